"""Compares lazyviz with torchview, TorchLens, torchviz, and Model Explorer on the same training steps.

    pip install 'lazyviz[compare]'      # and Graphviz's `dot`, for the first three
    python benchmarks/compare_graph_tools.py [--models mlp,resnet18,gpt2,lstm] [--out
    benchmarks/results/compare.json]

For each: seconds until there is a picture (median of three, all in this process), how many
operations it has, and what a click on one shows.  A tool that is not installed, or fails, is a
row that says so.  ``notebooks/compare.ipynb`` shows the rows.

Each tool is asked for its most: every operation, backward where it knows backward.  What counts as an
operation differs, and is said in the rows: lazyviz and the yardstick (a ``TorchDispatchMode`` over
the same step in eager mode) count ATen operators as they run, the others calls of
``torch`` functions, autograd functions, or the nodes of an exported program.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import html
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lazyviz

ROUNDS = 3
LIMIT = 60  # time limit for one picture, in seconds
PHASES = ("forward", "backward", "optimizer")


class NoPicture(RuntimeError):
    """The tool created a graph, but no picture of it; the message says why."""


class TooLong(BaseException):
    """A tool's time is over; no ``except Exception`` of its own is to hear of it."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Context that keeps progress bars and hints of the tools out of the notebook."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


@contextlib.contextmanager
def limit(seconds: int) -> Iterator[None]:
    """Raise :class:`TooLong` after that time, which also terminates a running ``dot``."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# --- the models ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model, its inputs, and the training step around it."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    target: Tensor

    def loss(self) -> Tensor:
        scores = self.model(*self.inputs)
        return F.cross_entropy(scores.flatten(0, -2), self.target.flatten())

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters())

    def forget(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None


class Logits(nn.Module):
    """A transformers model as a function of tensors, as tracing tools require."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, use_cache=False).logits


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        self.lstm = nn.LSTM(64, 128, batch_first=True)
        self.head = nn.Linear(128, 20)

    def forward(self, words: Tensor) -> Tensor:
        found, _ = self.lstm(self.embed(words))
        return self.head(found)


def mlp() -> Case:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return Case(model, (torch.randn(32, 64),), torch.randint(0, 10, (32,)))


def resnet18() -> Case:
    from models.small import resnet18

    return Case(resnet18(), (torch.randn(4, 3, 128, 128),), torch.randint(0, 100, (4,)))


def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = torch.randint(0, 50257, (1, 64))
    return Case(Logits(GPT2LMHeadModel(GPT2Config())), (tokens,), tokens)


def lstm() -> Case:
    return Case(Tagger(), (torch.randint(0, 1000, (16, 50)),), torch.randint(0, 20, (16, 50)))


MODELS: dict[str, tuple[str, Callable[[], Case]]] = {
    "mlp": ("a small MLP", mlp),
    "resnet18": ("ResNet-18", resnet18),
    "gpt2": ("GPT-2 small", gpt2),
    "lstm": ("an LSTM tagger, 50 steps", lstm),
}


# --- the tools ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """One picture: its operations by phase, and the SVG if the tool creates one."""

    operations: dict[str, int]
    svg: str = ""


@dataclass(frozen=True)
class Tool:
    """A tool: ``draw`` creates the picture of a model; the other fields are texts for the table."""

    name: str
    module: str
    package: str
    draw: Callable[[Case], Drawn]
    counts: str  # what it counts as an operation
    picture: str  # the event that ends the measured time
    click: str


def lay_out(source: str) -> str:
    """The SVG that Graphviz's ``dot`` creates from ``source``."""
    program = shutil.which("dot")
    if program is None:
        raise NoPicture("Graphviz's dot is not installed")
    done = subprocess.run([program, "-Tsvg"], input=source, text=True, capture_output=True)
    if done.returncode:
        raise NoPicture(f"dot: {done.stderr.strip()[:200]}")
    return done.stdout


def draw_lazyviz(case: Case) -> Drawn:
    optimizer = case.optimizer()
    with lazyviz.lazy() as graph:
        loss = case.loss()
        loss.backward()
        optimizer.step()
    svg = graph.static_bundle()["text/html"]
    widget = graph.widget()  # with its first picture, as the page receives it
    counts = dict.fromkeys(PHASES, 0)
    for node in graph.nodes:
        counts[node.phase] = counts.get(node.phase, 0) + 1
    widget.close()
    lazyviz.session.lazy_graph.reset()
    return Drawn({phase: counts[phase] for phase in PHASES}, svg)


def draw_torchview(case: Case) -> Drawn:
    from torchview import FunctionNode, draw_graph

    graph = draw_graph(
        case.model,
        input_data=list(case.inputs),
        device="cpu",
        mode="train",
        depth=100,
        expand_nested=True,
        hide_module_functions=False,
    )
    found: set[Any] = {node for edge in graph.edge_list for node in edge if isinstance(node, FunctionNode)}
    return Drawn({"forward": len(found)}, lay_out(graph.visual_graph.source))


def draw_torchlens(case: Case) -> Drawn:
    import torchlens

    with tempfile.TemporaryDirectory() as folder:
        trace = torchlens.trace(case.model, list(case.inputs))
        scores = trace[trace.output_layers[0]].out
        trace.log_backward(F.cross_entropy(scores.flatten(0, -2), case.target.flatten()))
        counts = {"forward": len(trace.ops), "backward": len(trace.grad_fns)}
        # It runs dot itself.
        target = Path(folder) / "graph"
        trace.draw_combined(vis_outpath=str(target), vis_save_only=True, vis_fileformat="svg")
        return Drawn(counts, target.with_suffix(".svg").read_text())


def draw_torchviz(case: Case) -> Drawn:
    from torchviz import make_dot

    loss = case.loss()
    source = make_dot(loss, params=dict(case.model.named_parameters())).source
    return Drawn({"backward": _autograd_functions(loss)}, lay_out(source))


def _autograd_functions(loss: Tensor) -> int:
    seen = {loss.grad_fn}
    queue = [loss.grad_fn]
    for function in queue:
        for following, _ in function.next_functions if function is not None else ():
            if following is not None and following not in seen:
                seen.add(following)
                queue.append(following)
    return len(seen)


def draw_model_explorer(case: Case) -> Drawn:
    from model_explorer.consts import DEFAULT_SETTINGS
    from model_explorer.pytorch_exported_program_adapter_impl import PytorchExportedProgramAdapterImpl

    program = torch.export.export(case.model, case.inputs)
    graphs = PytorchExportedProgramAdapterImpl(program, DEFAULT_SETTINGS).convert()
    nodes = graphs["graphs"][0].nodes
    json.dumps(asdict(graphs["graphs"][0]))
    return Drawn({"forward": sum(node.label not in ("output", node.id) for node in nodes)})


TOOLS = (
    Tool(
        "lazyviz",
        "lazyviz",
        "lazyviz",
        draw_lazyviz,
        counts="ATen operators, all of the step",
        picture="picture in the notebook; nothing has run",
        click="opens a group in place; operator, module, source line, shapes, dtypes, bytes, producers and "
        "readers, saved activations, its lifetime in the memory chart",
    ),
    Tool(
        "torchview",
        "torchview",
        "torchview",
        draw_torchview,
        counts="calls of torch functions in the forward pass",
        picture="SVG by dot",
        click="nothing: a picture",
    ),
    Tool(
        "torchviz",
        "torchviz",
        "torchviz",
        draw_torchviz,
        counts="autograd functions that the loss can reach",
        picture="SVG by dot; the forward pass has run",
        click="nothing: a picture",
    ),
    Tool(
        "Model Explorer",
        "model_explorer",
        "ai-edge-model-explorer",
        draw_model_explorer,
        counts="calls in the program of torch.export, forward only",
        picture="graph as JSON; its page then lays it out",
        click="opens a layer; of an operator its arguments, module, inputs, and outputs with shape and dtype",
    ),
    Tool(  # last, because its wrappers of torch's functions stay in place and would affect later tools
        "TorchLens",
        "torchlens",
        "torchlens",
        draw_torchlens,
        counts="calls of torch functions in the forward pass, autograd functions in the backward pass",
        picture="SVG by dot; both passes have run",
        click="nothing: a picture; its HTML export shows metadata while the pointer is over a node",
    ),
)


# --- measuring ----------------------------------------------------------------------------


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.namespace == "aten" and function is not torch.ops.aten.detach.default
        return function(*args, **(kwargs or {}))


def yardstick(key: str) -> dict[str, int]:
    """ATen operators that one step of eager PyTorch runs, by phase.

    Without ``detach``, which computes nothing: autograd calls it for gradients that it stores and, while a
    dispatch mode is active, for tensors that it saves.
    """
    made = case(key)
    optimizer = made.optimizer()
    counts = {}
    with _Counter() as counter:
        loss = made.loss()
        counts["forward"] = counter.count
        loss.backward()
        counts["backward"] = counter.count - counts["forward"]
        optimizer.step()
        counts["optimizer"] = counter.count - counts["forward"] - counts["backward"]
    return counts


@dataclass
class Row:
    """One tool on one model; ``seconds`` is None if there is no picture, and ``why`` is the reason."""

    tool: str
    version: str
    model: str
    seconds: float | None = None
    rounds: list[float] = field(default_factory=list)
    operations: dict[str, int] = field(default_factory=dict)
    why: str = ""
    svg: str = ""


def measure(tool: Tool, key: str) -> Row:
    """Measure three rounds, or fewer if there is no picture."""
    name = MODELS[key][0]
    row = Row(tool.name, "", name)
    if importlib.util.find_spec(tool.module) is None:
        row.why = "not installed"
        return row
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a checkout on the path
        row.version = importlib.metadata.version(tool.package)
    made = case(key)
    drawn: Drawn | None = None
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        try:
            with limit(LIMIT), warnings.catch_warnings(), quiet():
                warnings.simplefilter("ignore")
                drawn = tool.draw(made)
        except TooLong:
            row.why = f"no end in {LIMIT} s"
        except NoPicture as error:
            row.why = str(error)
        except Exception as error:
            first = (str(error).strip() or "no message").splitlines()[0]
            row.why = f"{type(error).__name__}: {first}"[:200]
        made.forget()
        if row.why or drawn is None:
            break
        row.rounds.append(round(time.perf_counter() - begin, 3))
        row.operations, row.svg = drawn.operations, drawn.svg
    else:
        row.seconds = statistics.median(row.rounds)
    return row


def case(key: str) -> Case:
    """A new seeded model for each tool: some leave side effects, such as an array on a weight's memory."""
    torch.manual_seed(0)
    return MODELS[key][1]()


def table(rows: list[Row], counted: dict[str, dict[str, int]]) -> str:
    """The rows as a Markdown table with a column per model; ``counted`` has the reference counts by model."""
    names = list(counted)
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    lines.append("| eager PyTorch runs | " + " | ".join(_counts(counted[name]) for name in names) + " |")
    for tool in TOOLS:
        mine = {row.model: row for row in rows if row.tool == tool.name}
        version = next((row.version for row in mine.values() if row.version), "")
        cells = [_cell(mine[name]) if name in mine else "" for name in names]
        lines.append(f"| **{tool.name}** {version} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(row: Row) -> str:
    time_taken = f"**{row.seconds:.2g} s**" if row.seconds is not None else row.why.replace("|", "/")
    return f"{time_taken}<br>{_counts(row.operations)}" if row.operations else time_taken


def _counts(operations: dict[str, int]) -> str:
    return ", ".join(f"{phase} {count:,}" for phase, count in operations.items())


def words() -> str:
    """What each tool counts, when its time ends, and what a click shows, as a Markdown table."""
    lines = ["| | counted as an operation | the seconds end with | a click shows |", "|---|---|---|---|"]
    lines += [f"| **{tool.name}** | {tool.counts} | {tool.picture} | {tool.click} |" for tool in TOOLS]
    return "\n".join(lines)


def side_by_side(rows: list[Row], most: int = 400_000) -> str:
    """The pictures of one model as HTML, beside one another; each is an image, so that no script in it runs.

    Of pictures with more than ``most`` characters, only the size is shown.
    """
    parts = []
    for row in rows:
        if not row.svg:
            picture = f"<p>no picture: {html.escape(row.why or 'its own page draws it')}</p>"
        elif len(row.svg) > most:
            size = re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', row.svg)
            points = f", {float(size[1]):,.0f} × {float(size[2]):,.0f} points" if size else ""
            picture = f"<p>an SVG of {len(row.svg) / 1000:,.0f} kB{points}: not kept in this notebook</p>"
        elif row.svg.startswith("<img"):
            picture = row.svg.replace("max-width:100%", "width:100%")
        else:
            data = base64.b64encode(row.svg.encode()).decode()
            picture = (
                f'<img alt="{row.tool}" style="max-width:100%;max-height:640px" '
                f'src="data:image/svg+xml;base64,{data}">'
            )
        parts.append(
            '<figure style="flex:1 1 45%;margin:0">'
            f"<figcaption><b>{html.escape(row.tool)}</b></figcaption>{picture}</figure>"
        )
    return f'<div style="display:flex;flex-wrap:wrap;gap:16px;background:#fff">{"".join(parts)}</div>'


def machine() -> str:
    return f"{os.cpu_count()} cores, {'CUDA' if torch.cuda.is_available() else 'CPU'}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tools", default="")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {
        "machine": machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rows": [],
    }
    keys = options.models.split(",")
    for key in keys:
        print(f"{MODELS[key][0]}: eager PyTorch runs {yardstick(key)}", flush=True)
    for tool in TOOLS:
        for key in keys if not options.tools or tool.name in options.tools.split(",") else ():
            row = measure(tool, key)
            print(
                f"{row.tool}, {row.model}: {row.seconds} s {row.rounds} {row.operations} {row.why}",
                flush=True,
            )
            result["rows"].append({k: v for k, v in asdict(row).items() if k != "svg"})
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
