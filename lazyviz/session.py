"""The composition root: the public ``LazyGraph`` and the functions over every pending graph.

Only this module and ``magic`` see all stages.  It gives recording an evaluator (a sync
point must be able to run what it needs), and graphs their plan, picture and run.
"""

from __future__ import annotations

import contextvars
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import absence
from .execute import eager
from .execute.backend import find_backend
from .execute.report import Report as Report
from .execute.segments import run_with_backend
from .graph.ir import Graph, SyncPoint
from .metrics import Metrics
from .plan.devices import devices as devices
from .record.guard import nodes_before_access
from .record.names import name_tensors, variables_of
from .record.order import closure
from .record.pending import HELD_BYTES_LIMIT, SyncError
from .record.recorder import tape
from .record.storage import FORGOTTEN, TrackedNode
from .record.tensor import is_pending
from .record.watch import Watch

if TYPE_CHECKING:
    import graphviz

    from .plan.memory import Plan


class LazyGraph:
    """A recorded block: what was recorded, what it would cost, and the means to run it.

    Displaying it shows the widget; its ``repr`` is one line.  Neither evaluates anything.
    """

    def __init__(self, graph: Graph, *, device: Any = None, backend: str = "eager", code: str = "") -> None:
        self.ir = graph
        self.device = device
        self.backend = backend
        self.code = code
        self.title = "lazyviz"
        self.report: Report | None = None
        self.error: BaseException | None = None
        self._state: str | None = None  # running, failed or interrupted; else told by the nodes
        self._listeners: list[Callable[[], None]] = []
        self._widget: Any = None

    def __repr__(self) -> str:
        syncs = len(self.sync_points)
        return (
            f"<LazyGraph: {len(self.nodes)} ops, {self.pending} pending, "
            f"{syncs} sync point{'' if syncs == 1 else 's'}>"
        )

    # --- what was recorded --------------------------------------------------------

    @property
    def nodes(self) -> Sequence[TrackedNode]:
        return self.ir.nodes  # type: ignore[return-value]

    @property
    def graph(self) -> Graph:
        return self.ir

    @property
    def pending(self) -> int:
        """Number of ops not yet run."""
        return sum(node.state != "done" for node in self.ir.nodes)

    @property
    def sync_points(self) -> Sequence[SyncPoint]:
        return self.ir.sync_points

    @property
    def state(self) -> str:
        """``pending``, ``running``, ``done``, ``failed`` or ``interrupted``."""
        if self._state is not None:
            return self._state
        return "pending" if self.pending else "done"

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called, on whatever thread, when the state changes."""
        self._listeners.append(callback)

    def _changed(self, state: str | None = None) -> None:
        self._state = state
        for callback in list(self._listeners):
            callback()

    # --- planning -----------------------------------------------------------------

    def plan(
        self, device: Any = None, batch_size: int | None = None, split: Any = None, backend: str | None = None
    ) -> Plan:
        """Project the memory of running the whole graph.  Runs nothing.

        Args:
            device: a device, a profile or its name; default: the one the block was given, else where it runs.

        Raises:
            ValueError: unknown device, or something this version cannot plan.
        """
        from .plan.memory import make_plan

        device = self.device if device is None else device
        with _metrics.timer("plan"):
            return make_plan(self.ir, device=device, batch_size=batch_size, split=split, backend=backend)

    # --- running ------------------------------------------------------------------

    def evaluate(
        self,
        *tensors: torch.Tensor,
        backend: str | None = None,
        split: Any = None,
        progress: Callable[[Any], None] | None = None,
        cancel: threading.Event | None = None,
    ) -> Report:
        """Run all pending ops, or those that ``tensors`` need.

        Args:
            progress: called after each op with a :class:`lazyviz.execute.progress.Progress`.
            cancel: set it to stop between two ops.

        Raises:
            ValueError: an unknown backend, or a split (not available in this version).
            lazyviz.Interrupted: cancelled; evaluating again goes on from there.
            Exception: what a kernel raised, with the line that recorded it.
        """
        if split not in (None, "off"):
            raise ValueError("splitting is not available in this version of lazyviz")
        name = backend or self.backend
        find_backend(name)
        if tape.graph is not None and tape.owner != threading.get_ident():
            raise RuntimeError("a cell is recording on another thread; evaluate once it has ended")
        with tape.lock:
            targets = _needed(tensors) if tensors else [node for node in self.nodes if node.state != "done"]
            return _evaluate(
                closure(targets),
                _called("evaluate()"),
                backend=name,
                progress=progress,
                cancel=cancel,
                graph=self,
            )

    # --- showing ------------------------------------------------------------------

    def text(self) -> str:
        """The graph and its plan as text."""
        from .view.text import render_text

        return render_text(self.ir, self.plan())

    def to_dot(self) -> graphviz.Digraph:
        from .view.dot import to_dot

        return to_dot(self.ir)

    def to_fx(self) -> torch.fx.GraphModule:
        from .graph.fx import to_fx

        return to_fx(self.ir)

    def save(self, path: str | Path, format: str | None = None, *, eager: bool = False) -> None:
        """Write a picture or the timeline of the graph; the suffix of ``path`` says which kind.

        Args:
            format: instead of the suffix, or which ``.json``: ``"perfetto"``, ``"model-explorer"``.
            eager: a ``.pickle`` (PyTorch's memory snapshot) of eager PyTorch's timeline, not our run's.
        """
        from .view.export import save

        save(self.ir, self.plan(), path, format, eager=eager, title=self.title, state=self.state)

    def widget(self) -> Any:
        """The interactive widget; the same one each time, until it is closed."""
        if self._widget is None or self._widget.comm is None:
            from .view.widget import LazyWidget

            self._widget = LazyWidget(self)
        return self._widget

    def static_bundle(self) -> dict[str, str]:
        """The picture for saved notebooks: MIME type -> data."""
        from .view.static import static_bundle

        return static_bundle(self.ir, self.plan(), title=self.title, state=self.state, report=self.report)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        bundle = self.widget()._repr_mimebundle_(include=include, exclude=exclude)
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        if data is not None:
            data["text/plain"] = repr(self)
        return bundle


# --- the pieces below the public functions ------------------------------------------

_watch = Watch(tape)
# Graphs with pending nodes, by id of the ir.Graph; weak, since a graph nobody can reach need not run.
_graphs: weakref.WeakValueDictionary[int, LazyGraph] = weakref.WeakValueDictionary()
_forbidden = contextvars.ContextVar("lazyviz_forbid_sync", default=False)
_metrics = Metrics()
_last_cause = "nothing has been evaluated yet"


def _needed(tensors: Sequence[torch.Tensor]) -> list[TrackedNode]:
    return [node for tensor in tensors for node in nodes_before_access(tape, tensor, write=False)]


def _evaluate(
    nodes: Sequence[TrackedNode],
    cause: str,
    *,
    backend: str = "eager",
    progress: Callable[[Any], None] | None = None,
    cancel: threading.Event | None = None,
    graph: LazyGraph | None = None,
) -> Report:
    """Run ``nodes`` (closed under dependencies, in program order) and tell the graphs they belong to."""
    global _last_cause
    if any(node.error == FORGOTTEN for node in nodes):
        raise RuntimeError(FORGOTTEN)
    absence.refuse(nodes, graph.device if graph is not None else None)
    from .execute.progress import Progress

    touched = list(
        {id(node.graph): _graphs[id(node.graph)] for node in nodes if id(node.graph) in _graphs}.values()
    )
    start = time.perf_counter()
    cuda = [
        index
        for index in {value.device.index for node in nodes for value in node.outputs}
        if index is not None
    ]
    cuda = [index for index in cuda if torch.cuda.is_available()]
    for index in cuda:
        torch.cuda.reset_peak_memory_stats(index)

    def on_node(done: int, total: int, node: TrackedNode) -> None:
        if progress is not None:
            progress(Progress(done, total, time.perf_counter() - start, node.module or node.name))

    for lazy in touched:
        lazy.error = None
        lazy._changed("running")
    outcome: str | None = None
    peak: int | None = None
    share = 0
    try:
        runner = find_backend(backend)
        on_progress = on_node if progress is not None else None
        cancelled = cancel.is_set if cancel is not None else None
        if runner is None:
            peak = eager.run(tape, nodes, progress=on_progress, cancelled=cancelled, timed=not cuda)
            share = len(nodes)
        else:
            peak, share = run_with_backend(tape, nodes, runner, progress=on_progress, cancelled=cancelled)
        for index in cuda:
            torch.cuda.synchronize(index)
            peak = torch.cuda.max_memory_allocated(index)
    except (KeyboardInterrupt, eager.Interrupted):
        outcome = "interrupted"
        raise
    except BaseException as error:
        outcome = "failed"
        for lazy in touched:
            lazy.error = error
        raise
    finally:
        seconds = time.perf_counter() - start
        done = sum(node.state == "done" for node in nodes)
        report = Report(
            done,
            seconds,
            peak,
            backend,
            cause,
            share=share / len(nodes) if nodes and outcome is None else 1.0,
        )
        _last_cause = f"{cause}: {done} ops in {seconds:.3f} s"
        _metrics.add("evaluate", seconds)
        _metrics.count("ops run", done)
        for lazy in touched:
            lazy.report = report
            if not lazy.pending:
                _graphs.pop(id(lazy.ir), None)
            lazy._changed(outcome)
        _watch.release()
    if graph is not None:
        graph.report = report
    return report


def _forget_in_child() -> None:
    """A forked child (a loader's worker) neither records nor evaluates what its parent recorded."""
    tape.graph = None
    tape.lock = threading.RLock()
    tape.forget_all()
    _graphs.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def _called(what: str) -> str:
    """``what``, with the user's line that called for it."""
    line, _ = tape.scopes.sources.find(sys._getframe(2))
    return f"{what} at {line}" if line is not None else what


def _evaluate_for_sync(nodes: Sequence[TrackedNode], cause: str) -> None:
    if _forbidden.get():
        raise SyncError(f"{cause} needs {len(nodes)} pending ops to run, inside forbid_sync()")
    _metrics.count("syncs")
    _metrics.count(f"syncs by {cause.partition(' at ')[0]}")
    _evaluate(nodes, cause)


tape.evaluator = _evaluate_for_sync


# --- the public functions -------------------------------------------------------------


@contextmanager
def lazy(
    device: Any = None,
    batch: Any = None,
    split: Any = "off",
    backend: str = "eager",
    allow_sync: bool = True,
    *,
    assume: Mapping[int, Any] | None = None,
    held_bytes_limit: int = HELD_BYTES_LIMIT,
    code: str = "",
    names: Mapping[str, Any] | None = None,
) -> Iterator[LazyGraph]:
    """Record the PyTorch ops of a block instead of running them.

    Args:
        device: plan for this device by default (a device, a profile or its name).  In a process without
            CUDA, ``torch.cuda`` answers for a card inside the block, which can then only be planned.
        assume: what a read at each of these lines returns that an absent device would have to compute.
        allow_sync: False makes a sync point inside the block an error that names its line.
        held_bytes_limit: evaluate once pending ops keep more than this many bytes of
            outside tensors alive that the block itself has dropped.
        names: the variables by which pictures and plans call tensors; default: the caller's.

    Raises:
        ValueError: an option this version does not support, an unknown device or backend.
        RuntimeError: another thread is recording.
    """
    if batch is not None or split not in (None, "off"):
        raise ValueError("naming a batch and splitting are not available in this version of lazyviz")
    find_backend(backend)
    device, card = absence.resolved(device)
    if tape.graph is not None and tape.owner != threading.get_ident():
        raise RuntimeError("another thread is recording; one lazy block at a time")
    with tape.lock:  # a run on another thread ends first
        pass
    outer = (tape.graph, tape.owner, tape.allow_sync, tape.held_bytes_limit)
    graph = LazyGraph(Graph(), device=device, backend=backend, code=code)
    _graphs[id(graph.ir)] = graph
    tape.watching.add(graph.ir)
    if outer[0] is None:
        _watch.begin_recording()
    tape.graph, tape.owner = graph.ir, threading.get_ident()
    tape.allow_sync, tape.held_bytes_limit = allow_sync, held_bytes_limit
    start = time.perf_counter()
    try:
        with absence.recording_for(tape, card, graph.ir, assume):
            yield graph
    finally:
        tape.mark_parameters(graph.nodes)
        name_tensors(
            tape, names if names is not None else variables_of(sys._getframe(1)), copied=names is None
        )
        tape.graph, tape.owner, tape.allow_sync, tape.held_bytes_limit = outer
        own = [node for node in graph.nodes if node.state != "done"]
        if earlier := len(closure(own)) - len(own):
            # The plan is of this cell's ops alone: say what else its evaluation will run.
            graph.title += f", after {earlier:,} pending ops of earlier cells"
        if own:
            _graphs[id(graph.ir)] = graph  # a sync point inside, after which nothing was pending, took it out
        else:
            _graphs.pop(id(graph.ir), None)
        _metrics.add("record", time.perf_counter() - start)
        _metrics.count("graphs")
        _metrics.count("ops recorded", len(graph.ir))
        tape.settle()
        if tape.graph is None:
            _watch.end_recording()


def lazy_function(function: Callable[..., Any]) -> Callable[..., tuple[Any, LazyGraph]]:
    """``lazy_function(f)(*args)`` calls ``f`` in a lazy block: ``(result, graph)``."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> tuple[Any, LazyGraph]:
        with lazy() as graph:
            result = function(*args, **kwargs)
        return result, graph

    return wrapper


def evaluate(*tensors: torch.Tensor) -> Report:
    """Run what ``tensors`` need, in whatever graphs; without arguments, everything pending."""
    with tape.lock:
        nodes = closure(_needed(tensors) if tensors else list(tape.pending))
        return _evaluate(nodes, _called("lazyviz.evaluate()"))


def sync() -> Report:
    """Run every pending graph."""
    return evaluate()


def is_lazy(tensor: Any) -> bool:
    """Whether ``tensor`` is a tensor whose value is still pending."""
    return isinstance(tensor, torch.Tensor) and is_pending(tensor)


def to_lazy(tensor: torch.Tensor) -> torch.Tensor:
    """A lazy view of ``tensor``: inside a lazy block ops on either are recorded anyway."""
    if is_lazy(tensor):
        return tensor
    if tape.graph is not None:
        return torch.ops.aten.alias.default(tensor)
    with lazy():
        return torch.ops.aten.alias.default(tensor)


def to_eager(tensor: torch.Tensor) -> torch.Tensor:
    """Evaluate what ``tensor`` needs and return it, now an ordinary tensor."""
    if needed := _needed([tensor]):
        with tape.lock:
            _evaluate(closure(needed), "lazyviz.to_eager()")
    return tensor


@contextmanager
def forbid_sync() -> Iterator[None]:
    """Make every sync point in the block a :class:`SyncError` that names its cause."""
    token = _forbidden.set(True)
    try:
        yield
    finally:
        _forbidden.reset(token)


def why() -> str:
    """What caused the last evaluation, and what the shape cache last had to ask for."""
    miss = tape.shapes.last_miss or "none yet"
    return f"last evaluation: {_last_cause}\nlast shape cache miss: {miss}"


def metrics() -> dict[str, Any]:
    """Timings (count, total, percentiles in seconds) and counters of this process."""
    result = _metrics.summary()
    result["shape cache hits"] = tape.shapes.hits
    result["shape cache misses"] = tape.shapes.misses
    result["ops pending"] = len(tape.pending)
    for counter in ("ops recorded", "ops run", "graphs", "compiles", "syncs", "bytes read at syncs"):
        result.setdefault(counter, 0)
    return result


def cell_boundary() -> None:
    """Between two cells: forget what nobody can see; leave PyTorch as it was if nothing is pending."""
    tape.forget_unreachable([graph.ir for graph in _graphs.values()])
    _watch.release()


def reset() -> None:
    """Forget everything pending, unevaluated; tensors that were pending stay without a value."""
    tape.forget_all()
    _graphs.clear()
    _watch.release()
