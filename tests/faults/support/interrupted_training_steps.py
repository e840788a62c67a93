"""Training steps that are interrupted everywhere, the ways to run them, and what is compared."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

import lazyviz
from lazyviz.execute.replay import native_codegen
from lazyviz.execute.replay.program_cache import replays
from lazyviz.process import deferred_signals
from lazyviz.record.tape import tape
from lazyviz.record.tracked_storages import PARTIAL_WRITE
from lazyviz.session.recompute_options import RecomputeError

from ...bit_equality import difference
from ...execute.microbatch.in_process_cluster import Here
from .faulty_kernels import Alarm, Calls, Fault, FaultyKernels, KernelError, ThreadSwitch, error

FAULTS = (KernelError, torch.OutOfMemoryError, KeyboardInterrupt, Alarm)


class Perceptron(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm1d, layers: int = 4) -> None:
        super().__init__()
        sizes = [6, *[8] * layers]
        self.layers = nn.Sequential(
            *[
                layer
                for inside, outside in itertools.pairwise(sizes)
                for layer in (nn.Linear(inside, outside), norm(outside), nn.ReLU(), nn.Dropout(0.3))
            ],
            nn.Linear(8, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.block(self.embed(x[:, None, :] * torch.ones(4, 1)))
        return self.head(self.norm(tokens.mean(1)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 8, num_layers=2, dropout=0.2, batch_first=True)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(x.view(len(x), 2, 3))
        return self.head(self.norm(states[:, -1]))


class GraphNetwork(nn.Module):
    """Features of nodes along edges, of which each has a weight that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.edges = torch.arange(24).view(2, 12) * 5 % 12
        self.weights = nn.Parameter(torch.rand(12))
        self.embed, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        along = torch.sparse_coo_tensor(self.edges, self.weights, (12, 12), check_invariants=False)
        return self.head(self.norm(torch.sparse.mm(along, self.embed(x)).relu()))


STEPS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "perceptron": (Perceptron, {}),
    "perceptron, layer norm": (lambda: Perceptron(nn.LayerNorm), {}),
    "perceptron, one layer": (lambda: Perceptron(layers=1), {}),
    "attention": (Attention, {}),
    "LSTM": (Recurrent, {}),
    "graph network": (GraphNetwork, {}),
    "perceptron, AdamW over lists": (Perceptron, {"foreach": True}),
    "perceptron, fused AdamW": (Perceptron, {"fused": True}),
}
"""What makes a step's model, and the options of its AdamW."""


def read(value: Callable[[], Any]) -> Any:
    """What a program reads: where that is interrupted, it asks again."""
    while True:
        try:
            return value()
        except FAULTS:
            continue


@dataclass
class Step:
    """One training step from a state that is the same each time."""

    name: str = "perceptron"
    reads: bool = False  # values in its midst

    def __post_init__(self) -> None:
        torch.manual_seed(4)
        make, options = STEPS[self.name]
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01, **options)
        self.x, self.y = torch.randn(12, 6), torch.randint(0, 3, (12,))
        self.take(model, optimizer)
        self._start = model, optimizer
        self._saved = [tensor.detach().clone() for tensor in self._tensors()]

    def _tensors(self) -> list[torch.Tensor]:
        model, optimizer = self._start
        states = [optimizer.state[parameter] for parameter in model.parameters()]
        return [*model.state_dict().values(), *[state[name] for state in states for name in sorted(state)]]

    def begin(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model and its optimizer as a first step left them; the generator is seeded."""
        torch.manual_seed(11)
        with torch.no_grad():
            for tensor, saved in zip(self._tensors(), self._saved):
                tensor.copy_(saved)
        self._start[1].zero_grad()
        return self._start

    def take(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(self.x + 0.1 * torch.randn(self.x.shape)), self.y)
        if self.reads:
            read(loss.item)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if self.reads:
            read(lambda: float(norm))
        optimizer.step()
        return loss

    def left(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> dict[str, Any]:
        """All that a step leaves, and the numbers of the next draw."""
        states = [optimizer.state[parameter] for parameter in model.parameters()]
        grads = [parameter.grad for parameter in model.parameters()]
        found: dict[str, Any] = {
            "loss": loss.detach() * 1,
            "parameters and buffers": [tensor.detach() * 1 for tensor in model.state_dict().values()],
            "gradients": [grad * 1 for grad in grads if grad is not None],
            "optimizer": [[state[name] * 1 for name in sorted(state)] for state in states],
            "generator": torch.get_rng_state(),
            "next draw": torch.rand(5),
        }
        return found


@dataclass
class Way:
    """A way to run a step: how its block is opened and how it is evaluated.

    ``together`` faults are tried in one step.  What is recognized is so until the first one, so each there
    has a step of its own; and what is computed again within a budget may not be within it once more.
    """

    name: str
    block: dict[str, Any] = field(default_factory=dict)
    evaluate: dict[str, Any] = field(default_factory=dict)
    repeats: bool = False  # it has run before, and is recognized
    compiled: bool = True  # what it is recognized by
    exact: bool = True  # eager's bits
    reads: bool = False
    batch: bool = False
    together: int = 10


WAYS = {
    way.name: way
    for way in (
        Way("op by op"),
        Way("replay, C++", repeats=True, together=1),
        Way("replay, Python", repeats=True, compiled=False, together=1),
        # Of its kernels, which another thread runs, none is one of ours: faults come between, here.
        Way("asynchronous", evaluate={"wait": False}, repeats=True, together=1),
        Way("op by op, Python", compiled=False),
        Way("split", block={"split": 3}, exact=False, batch=True, together=5),
        Way("recompute", evaluate={"recompute": 1}, together=2),
        Way("workers", block={"backend": "lazyviz-here", "split": 3}, exact=False, batch=True, together=5),
        Way("sync points", reads=True),
        Way("inductor", block={"backend": "inductor"}, repeats=True, exact=False, together=1),
    )
}


class Result(Exception):
    """What is wrong after a fault: of which kind, and in words."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


def _is_fault(error: BaseException) -> bool:
    """Whether one of ours has come out; a worker names exceptions of PyTorch's and Python's alone."""
    return isinstance(error, FAULTS) or str(error).startswith(tuple(f"{kind.__name__}:" for kind in FAULTS))


class Trial:
    """A step in one way, with faults."""

    def __init__(self, way: Way, step: str = "perceptron") -> None:
        self.way, self.step = dataclasses.replace(way, evaluate=dict(way.evaluate)), Step(step, way.reads)
        native_codegen.use(way.compiled)
        replays.clear()
        if way.name == "workers":
            lazyviz.register_backend("lazyviz-here", Here())
        eager = self._eager()
        with self._block() as graph:
            self.step.take(*self._begun)
        self.kernels = FaultyKernels({node.op for node in graph.nodes} | set(MORE_OPS))
        if "recompute" in way.evaluate:
            self.way.evaluate["recompute"] = self._budget(graph)
        lazyviz.reset()
        if way.reads:
            self._evaluator = tape.runs.evaluator
            tape.runs.evaluator = self._at_sync_points
        if way.block.get("backend") == "inductor":
            self._compile()
        self.expected = self._unfaulted()
        if way.exact and (found := difference(eager, self.expected)) is not None:
            raise AssertionError(f"{way.name}, nothing interrupted: {found}")
        self._unfaulted()  # it has been met now
        self.total = self.count(error)

    def _compile(self) -> None:
        """Run once without the faulty kernels, which a compiler cannot trace: what it makes is known then."""
        with self._block() as graph:
            self.step.take(*self._begun)
        report = graph.evaluate()
        if report.fallbacks or report.share < 1:
            raise AssertionError(f"not all was compiled: {report.fallbacks}")

    def close(self) -> None:
        self.kernels.restore()
        lazyviz.reset()
        if self.way.reads:
            tape.runs.evaluator = self._evaluator
        native_codegen.use(True)
        replays.clear()

    def _at_sync_points(self, nodes: Any, cause: str) -> None:
        with self._armed(), self.kernels.active():
            self._evaluator(nodes, cause)

    # --- running ----------------------------------------------------------------------------

    def _eager(self) -> dict[str, Any]:
        begun = self.step.begin()
        return self.step.left(*begun, self.step.take(*begun))

    def _block(self) -> contextlib.AbstractContextManager[Any]:
        if not self.way.repeats:
            replays.clear()
        self._begun = self.step.begin()
        options = dict(self.way.block)
        if self.way.batch:
            options["batch"] = [self.step.x, self.step.y]
        return lazyviz.lazy(**options)

    def _budget(self, graph: Any) -> int:
        peak = graph.plan().tensor_peak_bytes
        for share in (0.6, 0.7, 0.8, 0.85, 0.9, 0.95):
            if not graph.plan(recompute=int(peak * share)).recompute.reason:
                return int(peak * share)
        raise AssertionError("nothing to compute again")

    def _unfaulted(self) -> dict[str, Any]:
        with self._block() as graph:
            loss = self.step.take(*self._begun)
        self._evaluate(graph)
        return self.step.left(*self._begun, loss)

    def _evaluate(self, graph: Any, options: dict[str, Any] | None = None) -> None:
        if self.way.name == "asynchronous":
            with self._armed():
                graph.evaluate(**self.way.evaluate).result()
            return
        with self._armed(), self.kernels.active():
            graph.evaluate(**(self.way.evaluate if options is None else options))

    def count(self, fault: Fault) -> int:
        """The calls of kernels in a run that may go through ``fault``."""
        self.kernels.arm(-1, fault)
        try:
            self._unfaulted()
        finally:
            self.kernels.disarm()
        return self.kernels.calls

    def points(self) -> int:
        """The places between ops where an exception from elsewhere may come."""
        self._waiting, self._calls = [], Calls()
        try:
            self._unfaulted()
            return self._calls.count
        finally:
            self._calls = None

    def run(self, faults: list[tuple[Any, Callable[..., Any] | None]]) -> int:
        """Take the step with ``faults``, each so many calls (None: points between ops) after the one before.

        One that does not stop the step may be given a set of calls.

        Returns how many came.  Raises :class:`Result` where something is wrong afterwards.
        """
        before = _state()
        came, fired = 0, self.kernels.fired
        self._waiting, self._between = list(faults), 0
        try:
            with self._block() as graph:
                loss = self.step.take(*self._begun)
            pending, options = _state(), None
            while True:
                try:
                    self._evaluate(graph, options)
                    break
                except RecomputeError:  # what is left cannot be run within the budget
                    options = {}
                    continue
                except (*FAULTS, RuntimeError) as error:
                    if not _is_fault(error):
                        raise
                    came += 1
                    if came > len(faults) + 3:
                        raise Result("lost", "the fault comes again and again") from None
                    runs = graph.state == "running" and tape.runs.background is not None
                    if not runs and graph.state not in ("failed", "interrupted", "pending", "done"):
                        raise Result("left behind", f"the state is {graph.state!r}") from None
                    if found := _differences(before if not graph.pending else pending):
                        raise Result("left behind", found) from None
        except FAULTS as error:
            raise Result("lost", f"in the block: {error!r}") from error
        except (RuntimeError, AssertionError, TypeError, KeyError, AttributeError) as error:
            if self.way.block.get("backend") == "inductor" and str(error).startswith(PARTIAL_WRITE):
                lazyviz.reset()
                if found := _differences(before):
                    raise Result("left behind", found) from error
                raise Result("refused", str(error)) from error
            raise Result("lost", f"{type(error).__name__}: {error}") from error
        finally:
            self._disarm()
        for _, fault in faults:
            if isinstance(fault, ThreadSwitch):
                fault.join()
                if fault.errors:
                    raise Result("lost", f"in the other thread: {fault.errors}")
        if graph.pending:
            raise Result("lost", f"{graph.pending} ops are pending")
        self._compare(self.step.left(*self._begun, loss), faults)
        if found := _differences(before):
            raise Result("left behind", found)
        return self._between + self.kernels.fired - fired

    def _compare(self, actual: dict[str, Any], faults: Any) -> None:
        for name, expected in self.expected.items():
            if (found := difference(expected, actual[name])) is None:
                continue
            if self.way.batch and name not in ("generator", "next draw"):  # memory ran out: other pieces
                try:
                    torch.testing.assert_close(actual[name], expected)
                    continue
                except AssertionError as error:
                    found = str(error)
            raise Result("wrong", f"{name}: {found}")

    # --- faults that are still to come ---------------------------------------------------------

    _waiting: ClassVar[list[tuple[Any, Any]]] = []
    _calls: Calls | None = None  # of the fault that is to come between ops
    _fired: int | None = None  # how many had, when the fault that is to come in a kernel was armed
    _between = 0  # those that came between ops

    @contextlib.contextmanager
    def _armed(self) -> Iterator[None]:
        """Context of a run, in which the next fault comes, or the one that did not in the last run."""
        if self._calls is not None and self._calls.place:
            self._calls = None
        if self._fired is not None and self.kernels.fired > self._fired:
            self.kernels.disarm()
            self._fired = None
        if self._waiting and self._calls is None and self._fired is None:
            at, fault = self._waiting.pop(0)
            if fault is None:
                self._calls = Calls(at)
            else:
                self._fired = self.kernels.fired
                self.kernels.arm(at, fault)
        calls = self._calls
        try:
            with calls.watching() if calls is not None else contextlib.nullcontext():
                yield
        finally:
            self._between += calls is not None and bool(calls.place)

    def _disarm(self) -> None:
        self.kernels.disarm()
        self._waiting, self._calls, self._fired = [], None, None


MORE_OPS = (torch.ops.aten.add_.Tensor, torch.ops.aten.mm.out, torch.ops.aten.addmm.out)


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """A handler of SIGUSR1 that raises."""

    def handler(number: int, frame: Any) -> None:
        raise Alarm("a signal")

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def _state() -> dict[str, Any]:
    """What a run changes and puts back."""
    return {
        "signal handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)],
        "deferred signals": dict(deferred_signals.Deferred.current),
        "the thread that runs": (tape.runs.running, tape.runs.active_thread),
        "the lock": tape.runs.lock.owner,
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "garbage collector": (gc.get_threshold(), gc.isenabled()),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "dispatch keys": str(torch._C._dispatch_tls_local_exclude_set()),
    }


def _differences(before: dict[str, Any]) -> str:
    now = _state()
    return ", ".join(f"{name}: {now[name]}" for name, was in before.items() if now[name] != was)
