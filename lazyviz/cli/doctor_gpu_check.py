"""``lazyviz doctor --gpu``: test lazyviz on this GPU, and print a report for a bug report.

It compares operators and small training steps with eager PyTorch bit by bit, compares projected with measured
memory, tests CUDA Graphs, and measures times.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F

from .. import __version__
from ..plan.units import format_bytes, format_deviation
from ..session.lazy_graph import lazy

STEPS, ROUNDS = 3, 7


@dataclass
class Findings:
    """Rows of the report: the check, whether it passed (``None``: only a figure), and details."""

    rows: list[tuple[str, bool | None, str]] = field(default_factory=list)

    def add(self, what: str, well: bool | None, found: str = "") -> None:
        self.rows.append((what, well, found))

    @property
    def ok(self) -> bool:
        return all(well is not False for _, well, _ in self.rows)


# --- what is run ------------------------------------------------------------------------


def operators(device: str) -> dict[str, Callable[[], Any]]:
    """Calls of common operators; each creates its inputs from a seed."""

    def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.float32).to(dtype)

    half = torch.bfloat16
    return {
        "add, mul": lambda: x(64, 33) * 2 + x(33),
        "matmul": lambda: x(65, 127) @ x(127, 33),
        "matmul, bfloat16": lambda: x(64, 128, dtype=half) @ x(128, 32, dtype=half),
        "bmm": lambda: torch.bmm(x(4, 31, 17), x(4, 17, 9)),
        "linear": lambda: F.linear(x(5, 7, 64), x(32, 64), x(32)),
        "conv2d": lambda: F.conv2d(x(2, 3, 33, 31), x(8, 3, 3, 3), padding=1, stride=2),
        "conv_transpose2d": lambda: F.conv_transpose2d(x(2, 4, 9, 9), x(4, 6, 3, 3), stride=2),
        "layer_norm": lambda: F.layer_norm(x(6, 9, 32), (32,)),
        "group_norm": lambda: F.group_norm(x(2, 8, 5, 5), 4),
        "softmax": lambda: x(7, 1000).softmax(-1),
        "log_softmax": lambda: F.log_softmax(x(7, 1000), -1),
        "attention": lambda: F.scaled_dot_product_attention(x(2, 4, 16, 8), x(2, 4, 16, 8), x(2, 4, 16, 8)),
        "attention, bfloat16, causal": lambda: _causal([x(2, 4, 64, 64, dtype=half) for _ in range(3)]),
        "gelu": lambda: F.gelu(x(100)),
        "dropout": lambda: F.dropout(x(1000), 0.3),
        "randn, rand, randint": lambda: (
            torch.randn(9, device=device)
            + torch.rand(9, device=device)
            + torch.randint(9, (9,), device=device)
        ),
        "randperm": lambda: torch.randperm(100, device=device),
        "embedding": lambda: F.embedding(torch.randint(50, (4, 7), device=device), x(50, 16)),
        "cross_entropy": lambda: F.cross_entropy(x(8, 10), torch.randint(10, (8,), device=device)),
        "sum, mean, std": lambda: (x(50, 50).sum(0), x(50, 50).mean(), x(50).std()),
        "max, sort, topk": lambda: (x(50, 9).max(0), x(50).sort(), x(50).topk(7)),
        "cumsum": lambda: x(5, 1001).cumsum(1),
        "cat, stack": lambda: torch.cat([x(3, 4), x(5, 4)]) + torch.stack([x(4)] * 8),
        "gather, scatter": lambda: (
            x(5, 5)
            .gather(1, torch.randint(5, (5, 5), device=device))
            .scatter_add(0, torch.zeros(1, 5, dtype=torch.int64, device=device), x(1, 5))
        ),
        "index, masked": lambda: x(9, 9)[x(9, 9) > 0],
        "nonzero": lambda: (x(9, 9) > 0).nonzero(),
        "in place on views": lambda: _in_place(x(8, 8)),
        "transposed, strided": lambda: (x(8, 9, 10).transpose(0, 2)[::2] * 3).contiguous(),
        "fft": lambda: torch.fft.rfft(x(64)).abs(),
        "linalg": lambda: torch.linalg.svdvals(x(8, 8)),
        "interpolate": lambda: F.interpolate(x(1, 3, 8, 8), scale_factor=2, mode="bilinear"),
        "max_pool, avg_pool": lambda: (
            F.max_pool2d(x(2, 3, 9, 9), 2).sum() + F.avg_pool2d(x(2, 3, 9, 9), 3).sum()
        ),
    }


def _causal(inputs: list[torch.Tensor]) -> torch.Tensor:
    query, key, value = inputs
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _in_place(x: torch.Tensor) -> torch.Tensor:
    x[2:4].mul_(3).add_(x[0])
    x.t()[1].zero_()
    return x


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(32, 48, 2, batch_first=True), nn.Linear(48, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x)[0][:, -1])


def _convolutional() -> nn.Module:
    layers = [
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3),
    ]
    return nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def _transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(64 * 16, 10))


def models() -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    """Small networks, each with the shape of its input batch."""
    mlp = lambda: nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 10))  # noqa: E731
    return {
        "MLP": (mlp, (64, 256)),
        "CNN": (_convolutional, (16, 3, 32, 32)),
        "transformer": (_transformer, (8, 16, 64)),
        "LSTM": (_Recurrent, (8, 12, 32)),
    }


class Training:
    """A network of :func:`models` with its optimizer and data, all created from one seed."""

    def __init__(
        self, make: Callable[[], nn.Module], shape: tuple[int, ...], device: str, autocast: bool
    ) -> None:
        torch.manual_seed(0)
        self.net = make().to(device)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        self.x, self.y = torch.randn(shape, device=device), torch.randint(10, shape[:1], device=device)
        self.autocast = torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast)

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        with self.autocast:
            loss = F.cross_entropy(self.net(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def state(self) -> list[torch.Tensor]:
        kept = [item for state in self.optimizer.state.values() for item in state.values()]
        return [*self.net.state_dict().values(), *kept]


# --- what is compared -------------------------------------------------------------------


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for item in result:
            yield from _tensors(item)


def same_bits(first: Any, second: Any) -> bool:
    """Whether two results hold bit-equal tensors."""
    a, b = list(_tensors(first)), list(_tensors(second))
    return len(a) == len(b) and all(
        x.shape == y.shape and x.dtype == y.dtype and torch.equal(_bits(x), _bits(y)) for x, y in zip(a, b)
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def check(device: str, to: Console) -> bool:
    """Check lazyviz on ``device`` and print a report; return whether everything passed."""
    found = Findings()
    begin = time.perf_counter()
    for title, part in (
        ("operators", _check_operators),
        ("training steps", _check_models),
        ("memory", _check_memory),
        ("CUDA Graphs", _check_graphs),
        ("times", _check_times),
    ):
        to.print(f"checking {title} ...")
        part(device, found)
    to.print()
    for line in _report(device, found, time.perf_counter() - begin):
        to.print(line, soft_wrap=True)
    return found.ok


def _same(found: Findings, what: str, eager: Callable[[], Any], lazily: Callable[[], Any]) -> bool:
    """Whether both calls return bit-equal results or raise the same error, such as a missing kernel."""
    plain, refused = _outcome(eager)
    recorded, failed = _outcome(lazily)
    if refused and refused == failed:
        found.add(what, True, f"eager PyTorch cannot do it either ({refused})")
        return True
    if failed or refused:
        found.add(what, False, failed or f"no error, but in eager mode: {refused}")
        return False
    if not same_bits(plain, recorded):
        found.add(what, False, "not bit-equal to eager PyTorch")
        return False
    return True


def _outcome(call: Callable[[], Any]) -> tuple[Any, str]:
    """The result of ``call``, and the class and first line of its error; "" without an error."""
    try:
        return call(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _check_operators(device: str, found: Findings) -> None:
    calls = operators(device)
    well = 0
    for name, call in calls.items():

        def eager(call: Callable[[], Any] = call) -> Any:
            torch.manual_seed(1)
            return call()

        def lazily(call: Callable[[], Any] = call) -> Any:
            torch.manual_seed(1)
            with lazy() as graph:
                recorded = call()
            graph.evaluate()
            return recorded

        well += _same(found, f"operator {name}", eager, lazily)
    found.add(
        "operators, bit by bit", well == len(calls), f"{well} of {len(calls)} bit-equal to eager PyTorch"
    )


def _check_models(device: str, found: Findings) -> None:
    cases = [(name, autocast) for name in models() for autocast in (False, True)]
    well = 0
    for name, autocast in cases:

        def eager(name: str = name, autocast: bool = autocast) -> Any:
            plain = Training(*models()[name], device, autocast)
            return [plain.step() for _ in range(STEPS)], plain.state()

        def lazily(name: str = name, autocast: bool = autocast) -> Any:
            recorded = Training(*models()[name], device, autocast)
            losses = []
            for _ in range(STEPS):
                with lazy() as graph:
                    losses.append(recorded.step())
                graph.evaluate()
            return losses, recorded.state()

        well += _same(found, f"{STEPS} steps of {name}{', autocast' if autocast else ''}", eager, lazily)
    found.add("training steps, bit by bit", well == len(cases), f"{well} of {len(cases)} bit-equal to eager")


def _check_memory(device: str, found: Findings) -> None:
    """Compare projected with measured memory in the second step; the first one allocates optimizer state."""
    on_gpu = torch.device(device).type == "cuda"
    for name, (make, shape) in models().items():
        training = Training(make, shape, device, False)
        training.step()
        with lazy() as graph:
            training.step()
        plan = graph.plan()
        report = graph.evaluate()
        measured, projected = report.peak_bytes, plan.tensor_peak_bytes
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            training.step()
            measured, projected = torch.cuda.max_memory_allocated(), plan.eager_peak_bytes
        if not measured:
            continue
        off = projected / measured - 1
        text = f"projected {format_bytes(projected)}, measured {format_bytes(measured)}"
        text += f" ({format_deviation(off)})"
        found.add(f"peak memory of {name}", abs(off) <= 0.1, text)


def _check_graphs(device: str, found: Findings) -> None:
    if torch.device(device).type != "cuda":
        found.add("CUDA Graphs", None, "not on this device")
        return

    def eager() -> Any:
        plain = Training(*models()["MLP"], device, False)
        torch.manual_seed(2)
        return [plain.step() for _ in range(6)], plain.state()

    def captured() -> Any:
        recorded = Training(*models()["MLP"], device, False)
        torch.manual_seed(2)
        losses = []
        for _ in range(6):
            with lazy(backend="cudagraphs") as graph:
                losses.append(recorded.step())
            graph.evaluate()
        return losses, recorded.state()

    if _same(found, "CUDA Graphs", eager, captured):
        found.add("CUDA Graphs", True, "6 steps, bit-equal")


def _check_times(device: str, found: Findings) -> None:
    def seconds(step: Callable[[], object]) -> float:
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    for name, (make, shape) in models().items():
        training = Training(make, shape, device, False)

        def recorded(training: Training = training) -> None:
            with lazy() as graph:
                training.step()
            graph.evaluate()

        for _ in range(3):
            training.step()
            recorded()
        plain = statistics.median(seconds(training.step) for _ in range(ROUNDS))
        lazily = statistics.median(seconds(recorded) for _ in range(ROUNDS))
        text = f"{1e3 * plain:.2f} ms eager, {1e3 * lazily:.2f} ms lazy ({lazily / plain:.2f} times)"
        found.add(f"a step of {name}", None, text)


def _report(device: str, found: Findings, seconds: float) -> Iterator[str]:
    """The report, in Markdown."""
    target = torch.device(device)
    name = torch.cuda.get_device_name(target) if target.type == "cuda" else platform.processor() or "a CPU"
    yield "Paste this into an issue:"
    yield ""
    yield f"### lazyviz {__version__} on {name}"
    yield ""
    python, system = platform.python_version(), platform.platform()
    cuda = torch.version.cuda or "none"
    yield f"torch {torch.__version__}, CUDA {cuda}, Python {python}, {system}; {seconds:.0f} s"
    yield ""
    yield "| check | passed | details |"
    yield "|---|---|---|"
    for what, well, text in found.rows:
        yield f"| {what} | {'' if well is None else 'yes' if well else '**no**'} | {text} |"
