"""Recording compared with other tools that create a graph of a model; per operator of their graphs.

They record other things: ``torch.export``, torchview and TorchLens the forward pass (torchview and
TorchLens run it, too), as calls of functions or as ATen operators, lazyviz the whole training step.  So what
is compared is the time for one node of the graph.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import statistics
from collections.abc import Callable, Iterator

import torch

import lazyviz

from . import measured_programs
from .figures import Figure, Settings, say
from .measured_programs import Program
from .timing import interleaved, lazily, medians, timed

# A peer creates the graph of a model, and returns its number of operators.
Recorder = Callable[[Program], int]


def by_export(program: Program) -> int:
    graph = torch.export.export(program.model, program.inputs).graph
    return sum(node.op == "call_function" for node in graph.nodes)


def by_torchview(program: Program) -> int:
    from torchview import FunctionNode, draw_graph

    drawn = draw_graph(
        program.model,
        input_data=list(program.inputs),
        device=str(program.target.device),
        mode="train",
        depth=100,
        hide_module_functions=False,
    )
    return len({node for edge in drawn.edge_list for node in edge if isinstance(node, FunctionNode)})


def by_torchlens(program: Program) -> int:
    import torchlens

    with contextlib.redirect_stdout(io.StringIO()):
        return len(torchlens.trace(program.model, list(program.inputs)).ops)


# TorchLens is last, because its wrappers of torch's functions stay in place and affect everything after it.
PEERS: dict[str, tuple[str, Recorder]] = {
    "torch.export": ("torch", by_export),
    "torchview": ("torchview", by_torchview),
    "TorchLens": ("torchlens", by_torchlens),
}


def measure(settings: Settings) -> Iterator[Figure]:
    ours: dict[str, float] = {}  # seconds per operator, by model, before TorchLens installs its wrappers
    models = measured_programs.small()[: settings.pick(None, 2)]
    for peer, (module, recorder) in PEERS.items():
        say(f"     {peer}")
        for program in models:
            title = f"{peer} / warm record, an operator"
            if importlib.util.find_spec(module) is None:
                yield Figure(title, program.name, None, note=f"{module} is not installed")
                continue
            program = program.on(settings.device)
            recording = lazily(program.on(settings.device).training_step())
            turns = [timed(peer, lambda: recorder(program))]  # noqa: B023 (called within this round)
            if program.name not in ours:
                turns.append(recording.turn)
            try:
                nodes = recorder(program)
                times = interleaved(turns, settings.pick(3, 1), warm_up=program.name not in ours)
            except Exception as error:  # the tool does not support the model
                text = str(error).strip().splitlines()
                reason = f"{type(error).__name__}: {text[0][:100] if text else ''}"
                yield Figure(title, program.name, None, note=reason)
                continue
            if program.name not in ours:
                ours[program.name] = statistics.median(times["lazyviz record"]) / recording.ops
            microseconds = 1e6 * statistics.median(times[peer]) / nodes
            detail = {**medians(times), "its operators": nodes, "its us an operator": microseconds}
            yield Figure(title, program.name, 1e-6 * microseconds / ours[program.name], detail=detail)
            lazyviz.session.lazy_graph.reset()
