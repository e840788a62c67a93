"""LazyGraph, ``lazy()``, and functions for all pending graphs: the composition root.

Only this package and ``notebook`` see all stages.  Graphs get their plan, picture and run here;
:mod:`lazyviz.session.connect` gives recording what a sync point needs.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import torch

from ..execute.progress import Progress, Run
from ..execute.replay import node_passes
from ..execute.report import NonFinite
from ..execute.report import Report as Report
from ..graph.annotations import LONGEST_NAME, annotation
from ..graph.ir import Graph, Node, SyncPoint
from ..plan.devices.devices import DeviceLike
from ..plan.devices.devices import devices as devices
from ..process.tracebacks import shortened
from ..process.transaction import Transaction, complete
from ..record import partial_writes
from ..record.dependencies import closure
from ..record.fake_cuda.host_values import give_back
from ..record.graph_release import Owned
from ..record.lazy_tensor import is_pending
from ..record.recording_state import HELD_BYTES_LIMIT
from ..record.storage import Lost, TrackedNode
from ..record.sync_points import RunLock
from ..record.tape import tape
from . import evaluation
from .asynchronous.run_handle import Run as AsyncRun
from .block import LazyBlock, Options, close_all
from .diagnostics import metrics as metrics
from .diagnostics import why as why
from .display import Pictures
from .evaluate_all import run_all
from .named_batch import BatchLike, NamedBatch
from .option_checks import Recompute, assumptions
from .options import options as defaults
from .recompute_options import RecomputeError as RecomputeError
from .recompute_options import levers
from .run_choices import RunChoices
from .run_history import Listener, RunHistory
from .split_options import SplitError as SplitError

if TYPE_CHECKING:
    import graphviz

    from ..plan.plan import Plan
    from ..view.comparison.comparison import Comparison
    from ..view.render.figure import Drawing
    from ..view.scene.scene import Scene
    from ..view.widget.plan_choice import Plans


_logger = logging.getLogger("lazyviz")


class LazyGraph:
    """A recorded block: what was recorded, what it would cost, and the means to run it.

    Displaying it shows the widget; its ``repr`` is one line.  Neither evaluates anything.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        device: Any = None,
        backend: str = "eager",
        code: str = "",
        batch: NamedBatch | None = None,
        split: int | str = "off",
        recompute: Recompute = "off",
    ) -> None:
        self.ir = graph
        self.choices = RunChoices(backend, batch, split, recompute)
        self.runs = RunHistory()
        self.device = device
        self.code = code
        self.title = "lazyviz"
        self.shown_plans: Plans | None = None
        self.drawing: Drawing | None = None  # as the page that was used last shows it
        self._pictures = Pictures()
        self._waits = 0  # the node that was found not to have run
        self._owned = Owned(graph)  # the last: attributes go in this order

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_ending() or "ir" not in vars(self):
            return  # modules have lost their names by then, or making it was interrupted
        self.ir.lost = True
        if Lost.look is not None and tape.pending and node_passes.unfinished(self.nodes):
            Lost.look()

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
    def has_pending(self) -> bool:
        """Whether some op has not run."""
        nodes = self.nodes
        if self._waits < len(nodes) and nodes[self._waits].state != "done":
            return True  # still the one that was found before
        waiting = node_passes.unfinished(nodes)
        self._waits = waiting[0].index if waiting else len(nodes)
        return bool(waiting)

    @property
    def sync_points(self) -> Sequence[SyncPoint]:
        return self.ir.sync_points

    @property
    def state(self) -> str:
        """``pending``, ``running``, ``done``, ``failed`` or ``interrupted``."""
        if self.runs.state is not None:
            return self.runs.state
        return "pending" if self.has_pending else "done"

    @property
    def report(self) -> Report | None:
        """What the last run of nodes of this graph did."""
        return self.runs.report

    @property
    def error(self) -> BaseException | None:
        """What the last run raised."""
        return self.runs.error

    @property
    def live(self) -> Run | None:
        """The run that is under way, if somebody follows."""
        return self.runs.live

    @property
    def measured(self) -> list[tuple[int, int]]:
        """Positions of nodes in the order in which they ran, each with the most bytes held while it did.

        Of a run in pieces, as in the plan's timeline, the first two.
        """
        return self.runs.measured

    @property
    def nonfinite(self) -> dict[str, NonFinite]:
        """The first NaN (``"nan"``) and the first infinity (``"inf"``) that runs have met."""
        return self.runs.nonfinite

    def subscribe(self, callback: Listener) -> None:
        """Have ``callback`` called, on whatever thread, when the state or a choice changes.

        What it raises is reported by ``sys.unraisablehook`` and stops nothing.
        """
        self.runs.subscribe(callback)

    def unsubscribe(self, callback: Listener) -> None:
        """Call it no more."""
        self.runs.unsubscribe(callback)

    def own(self, nodes: Sequence[Node]) -> list[TrackedNode]:
        """``nodes`` as they are in this graph.

        Raises ``ValueError`` for one of another graph.
        """
        mine = self.ir.nodes
        for node in nodes:
            if not (0 <= node.index < len(mine) and mine[node.index] is node):
                raise ValueError(f"{node!r} is not a node of this graph")
        return cast("list[TrackedNode]", list(nodes))

    def readable(self, nodes: Sequence[Node]) -> bool:
        """Whether results of any of ``nodes`` have not been summarized and are still there."""
        return self.runs.readable(self.own(nodes))

    def summarize(self, nodes: Sequence[Node]) -> None:
        """Note in ``node.summaries`` what those results of ``nodes`` hold now that are still there."""
        self.runs.summarize(self.own(nodes))

    # --- how it runs by default -------------------------------------------------------

    @property
    def backend(self) -> str:
        return self.choices.backend

    @property
    def batch(self) -> NamedBatch | None:
        return self.choices.batch

    @property
    def split(self) -> int | str:
        return self.choices.split

    @property
    def recompute(self) -> Recompute:
        return self.choices.recompute

    @property
    def summaries(self) -> bool:
        return self.choices.summaries

    def choose(
        self, *, backend: str | None = None, split: int | str | None = None, summaries: bool | None = None
    ) -> None:
        """Choose how ``evaluate`` runs the graph where it is not told; everybody who shows it follows.

        Raises:
            ValueError: there is no such backend, it lacks something, or the choices rule each other out.
                Nothing has changed then.
        """
        self.choices.choose(backend=backend, split=split, summaries=summaries)
        self.runs.notify()

    def backends(self) -> list[tuple[str, str]]:
        """The backends there are, each with the reason why it cannot run this graph here, or ""."""
        return self.choices.backends()

    # --- planning -----------------------------------------------------------------

    def plan(
        self,
        device: DeviceLike | None = None,
        batch_size: int | None = None,
        split: int | str | None = None,
        backend: str | None = None,
        *,
        recompute: int | str | None = None,
    ) -> Plan:
        """Project the memory of running the whole graph.  Runs nothing.

        Args:
            device: a device, a profile or its name; default: the one the block was given, else where it runs.
            batch_size: plan for another number of samples than the batch recorded.
            split: pieces of the batch, ``"auto"`` for the fewest that fit; default: as the block was given.
            recompute: bytes (or a size as ``"2 GiB"``) that the peak is to stay below by dropping activations
                and computing them again, ``"auto"`` for what the device has free; default: as the block.

        Raises:
            ValueError: unknown device, or something this version cannot plan.
        """
        from ..plan.planner import make_plan

        device = self.device if device is None else device
        split, recompute = levers(self, split, recompute, backend or "eager")
        with evaluation.metrics.timer("plan"):
            return make_plan(
                self.ir,
                device=device,
                batch_size=batch_size,
                split=split,
                backend=backend,
                recompute=recompute,
            )

    # --- running ------------------------------------------------------------------

    def unfinished(self) -> list[TrackedNode]:
        """Its nodes that have not run, in program order."""
        pending = list(tape.pending)
        if pending == self.ir.nodes:  # as is usual, and sooner seen than what each of them is
            return pending
        return node_passes.unfinished(self.nodes)

    @overload
    def evaluate(
        self,
        *tensors: torch.Tensor,
        backend: str | None = None,
        split: int | str | None = None,
        progress: Callable[[Progress], None] | None = None,
        cancel: threading.Event | None = None,
        recompute: int | str | None = None,
        nodes: Sequence[Node] | None = None,
        summaries: bool | None = None,
        timings: bool | None = None,
        verify: bool = False,
        wait: Literal[True] = True,
    ) -> Report: ...

    @overload
    def evaluate(
        self,
        *tensors: torch.Tensor,
        backend: str | None = None,
        split: int | str | None = None,
        recompute: int | str | None = None,
        nodes: Sequence[Node] | None = None,
        summaries: bool | None = None,
        timings: bool | None = None,
        verify: bool = False,
        wait: Literal[False],
    ) -> AsyncRun: ...

    @shortened
    def evaluate(
        self,
        *tensors: torch.Tensor,
        backend: str | None = None,
        split: int | str | None = None,
        progress: Callable[[Progress], None] | None = None,
        cancel: threading.Event | None = None,
        recompute: int | str | None = None,
        nodes: Sequence[Node] | None = None,
        summaries: bool | None = None,
        timings: bool | None = None,
        verify: bool = False,
        wait: bool = True,
    ) -> Report | AsyncRun:
        """Run all pending ops, or those that ``tensors`` or ``nodes`` need.

        Args:
            nodes: of this graph; they run, with what they need, and nothing else.
            summaries: note of every result its least, largest and mean value, how much of it is NaN or
                infinite, and a small histogram, in ``node.summaries``; ``report.first_nan`` and
                ``report.first_inf`` are then known.  Results stay the same; it takes about as long as
                reading every result twice, and up to 16 MiB beside the run's memory.  Default: off, or as
                the widget's button "Values" says.
            timings: note each op's seconds; on a GPU by CUDA events.  Default: on a CPU only.
            split: run in that many pieces of the batch, with ``"auto"`` in the fewest that fit; default: as
                the block was given.  One that was interrupted goes on in the pieces that it was begun in.
            backend: as of :func:`lazy`; default: the block's.  ``"ipyparallel"``, ``"ray"`` or a registered
                cluster runs the pieces on its workers; ``"auto"``, also where no split was given, is then at
                least one each.
            recompute: stay below that many bytes (or a size as ``"2 GiB"``) by dropping activations and
                computing them again, with ``"auto"`` below what the device has free; default: as the block.
            progress: called after each op with a :class:`lazyviz.execute.progress.Progress`; what it raises
                stops the run there, and evaluating again goes on.
            cancel: set it to stop between two ops, or while a backend compiles.
            verify: compare what a compiled backend's new segments compute with the recorded ops' results on
                copies of their inputs; where they differ by more than rounding these stand, and
                ``report.fallbacks`` says so.
            wait: with ``False`` ops that have run before, on the CPU, run on another thread while the program
                goes on, and records the next step, say; it returns a :class:`lazyviz.Run`.  Whatever needs
                their results waits for them, as does the next evaluation: at most one run is under way,
                and its inputs and results are held until it has been waited for.  An error is raised there.
                What cannot run so has run when this returns: ``run.waited`` says why.

        Raises:
            ValueError: an unknown backend, a split where no batch was named or with another backend, nodes
                of another graph.
            lazyviz.SplitError: the batch cannot be cut; the message names the nodes.  Nothing has run.
            lazyviz.RecomputeError: the budget cannot be met; the message says what can.  Nothing has run.
            lazyviz.Interrupted: cancelled; evaluating again goes on from there.
            lazyviz.NoWorkersError: a cluster has no workers, or none are left; the same holds.
            Exception: what a kernel raised, with the line that recorded it.
        """
        name = backend or self.backend
        split, recompute = levers(self, split, recompute, name)
        if tape.recording.graph is not None and tape.recording.owner != threading.get_ident():
            raise RuntimeError("a cell is recording on another thread; evaluate when it has ended")
        with tape.runs.lock:
            targets = evaluation.needed(tensors)
            if nodes is not None:
                targets += self.own(nodes)
            elif not tensors:
                targets = self.unfinished()
            everything = not tensors and targets == list(tape.pending)  # which needs nothing else
            done = (evaluation.run if wait else evaluation.start)(
                targets if everything and nodes is None else closure(targets),
                evaluation.called("evaluate()"),
                backend=name,
                progress=progress,
                cancel=cancel,
                graph=self,
                split=split,
                recompute=recompute,
                summaries=summaries,
                timings=timings,
                verify=verify,
            )
        if isinstance(done, evaluation.AsyncEvaluation):
            return AsyncRun(done)
        _logger.debug("%s", done)
        return done

    # --- pictures -----------------------------------------------------------------

    def scene(self) -> Scene:
        """What every picture of the graph is drawn from; its boxes are kept, its plan is made anew."""
        return self._pictures.scene(self)

    def text(self) -> str:
        """The graph and its plan as text."""
        return self._pictures.text(self)

    def to_dot(self) -> graphviz.Digraph:
        from ..view.render.dot import to_dot

        return to_dot(self.ir)

    def to_fx(self) -> torch.fx.GraphModule:
        from ..graph.fx import to_fx

        return to_fx(self.ir)

    def save(
        self,
        path: str | Path,
        format: str | None = None,
        *,
        eager: bool = False,
        paths: bool = True,
        title: str | None = None,
        show: str | Sequence[str] | None = None,
        legend: bool | None = None,
        direction: str | None = None,
        theme: str | None = None,
    ) -> None:
        """Write a picture or the timeline of the graph; the suffix of ``path`` says which kind.

        A file that is there is replaced once the new one is whole; if that fails it stays as it was.

        Args:
            format: instead of the suffix, or which ``.json``: ``"perfetto"``, ``"model-explorer"``.
            eager: a ``.pickle`` (PyTorch's memory snapshot) of eager PyTorch's timeline, not our run's.
            paths: False leaves out the user's code, and of its files all but their names; otherwise pages
                hold lines of code, of a cell all of it, and timelines also the full paths of files.
            title: above a ``.svg``, ``.pdf`` or ``.png`` that is a figure: without state, verdict and device.
            show: a figure's parts: ``"forward"``, ``"backward"``, ``"optimizer"``, ``"other"``, ``"memory"``.
            legend: False leaves the scale of a figure's bars out.
            direction: of a figure's forward pass: ``"TB"`` (down) or ``"LR"`` (to the right, lanes one below
                the other, without words at edges).
            theme: of a figure: ``"light"`` or ``"dark"``.

        Pictures show what the widget shows, where one is open: the same boxes open, the same numbers.

        Raises:
            OSError: the file cannot be written.
            ValueError: an unknown format, or part in ``show``; a figure as another kind of file.
            RuntimeError: nothing is installed that makes a ``.pdf`` or ``.png``, or it failed.
        """
        figure = {"title": title, "show": show, "legend": legend, "direction": direction, "theme": theme}
        self._pictures.save(self, path, format, eager=eager, paths=paths, figure=figure)

    def annotate(self, name: str, values: Mapping[Any, Any] | None) -> None:
        """Color and label boxes by numbers of your own: gradient norms, sensitivities, measured times.

        Pictures and files made from now on show them instead of bytes, and widgets that are open do so at
        once, where their menu has ``name`` beside the other choices.  A group of boxes without a number of
        its own shows the least and the most inside.  Nothing is evaluated.

        Args:
            name: in the menu and after each number: ``"grad norm"``.  One that is there is replaced.
            values: numbers by node of this graph, by module, or by a module's name (``"net.h.0"`` or
                ``"h.0"``); ``None`` takes the annotation away.

        Raises:
            TypeError: something is neither a node nor a module nor a name, or no number, or a pending tensor.
            ValueError: a node of another graph, a module that ran no op in this one, NaN or infinity, no
                values, an empty name, or one of more than 60 characters.
            RuntimeError: the block is still being recorded, so that modules have no names yet.
        """
        if not isinstance(name, str):
            raise TypeError(f"an annotation's name must be a string, not {name!r:.40}")
        if not name.strip() or len(name) > LONGEST_NAME:
            raise ValueError(f"an annotation's name must have 1 to {LONGEST_NAME} characters")
        if tape.recording.graph is self.ir:
            raise RuntimeError("annotate the graph after its block has ended")
        made = annotation(self.ir, name, values, is_pending) if values is not None else None
        self.ir.annotations.pop(name, None)
        if made is not None:
            self.ir.annotations[name] = made
        if self.drawing is not None:
            self.drawing = replace(self.drawing, by="")
        self.runs.notify()

    def show(self) -> Path:
        """Open the interactive page in the browser, from a script: a file of its own, whose path is returned.

        It stays in the folder for temporary files, and shows the graph as it is now; nothing is run.
        """
        return self._pictures.show(self)

    def widget(self, scene: Scene | None = None) -> Any:
        """The interactive widget; the same one each time, until it is closed."""
        return self._pictures.widget(self, scene)

    def static_bundle(self, scene: Scene | None = None) -> dict[str, str]:
        """The picture for saved notebooks: MIME type -> data."""
        return self._pictures.static_bundle(self, scene)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        bundle = self.widget()._repr_mimebundle_(include=include, exclude=exclude)
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        if data is not None:
            data["text/plain"] = repr(self)
        return bundle


# --- the public functions -------------------------------------------------------------


def lazy(
    device: DeviceLike | None = None,
    batch: BatchLike | None = None,
    split: int | str | None = "off",
    backend: str | None = None,
    allow_sync: bool = True,
    *,
    assume: Mapping[int, Any] | Mapping[str, Any] | Mapping[int | str, Any] | str | None = None,
    held_bytes_limit: int = HELD_BYTES_LIMIT,
    code: str = "",
    names: Mapping[str, Any] | None = None,
    whole: Sequence[str] = (),
    independent_rng: bool = False,
    recompute: int | str | None = "off",
    mesh: Sequence[int] | int | None = None,
    rank: int = 0,
    torch_version: str | None = None,
) -> LazyBlock[LazyGraph]:
    """Record the PyTorch ops of a block instead of running them.

    Args:
        batch: the tensors whose dim 0 has the samples, ``{tensor: dim}``, or names (``"x,y:1"``): those that
            have them when the block first uses them.
        split: evaluate in that many pieces of the batch (also at sync points, which then run all that is
            pending); ``"auto"``: in the fewest that fit the device's free memory.
        whole: operators (ATen's names, as ``"cumsum"``) that may run on the whole batch, put together between
            two passes over the pieces, where they would forbid a split.
        independent_rng: operators that draw random numbers inside a fused kernel may draw for each piece;
            the split run's numbers are then not those of the whole.
        backend: what evaluates by default: ``"eager"``, ``"inductor"``, ``"xla"``, ``"cudagraphs"``,
            ``"ipyparallel"``, ``"ray"``, one that is registered or that an installed package offers;
            ``None``: ``lazyviz.options.backend``.
        recompute: evaluate with a peak below that many bytes (or a size as ``"2 GiB"``), activations being
            dropped and computed again for it (also at sync points, which then run all that is pending);
            ``"auto"``: below what the device has free.
        device: plan for this device by default (a device, a profile or its name; ``None``: the one of
            ``lazyviz.options``, if it has one).  In a process without
            CUDA, ``torch.cuda`` answers for a card inside the block, which can then only be planned.
        mesh: of a program that runs on several devices, the number of ranks in each dimension: ``(8,)``,
            ``(2, 4)``.  Inside the block ``torch.distributed`` is initialized as one of them, which can then
            only be planned: the others are not there.
        rank: which of them it is.
        torch_version: the PyTorch release that is to run on a card that is absent, such as ``"1.13"``; what
            is known to take other memory there (:mod:`lazyviz.record.fake_cuda.releases`) is recorded so.
        assume: what a read at each of these lines returns that an absent device would have to compute; a line
            is its number, in whatever file, ``"train.py:12"``, or ``"*"`` for all others; an iterator gives
            one value a read.  ``"until max_new_tokens"`` says what holds anyway: generation by transformers
            goes on to its longest length, whatever the tokens are, unless an iterator says what it reads.
        allow_sync: False makes a sync point inside the block an error that names its line.
        held_bytes_limit: evaluate once pending ops keep more than this many bytes of
            outside tensors alive that the block itself has dropped.
        names: the variables by which pictures and plans call tensors; default: the caller's.

    Raises:
        ValueError: an option this version does not support, an unknown device or backend.
        RuntimeError: another thread or task is recording, or an outer block is for another absent card or
            rank; ``torch.distributed`` is initialized as another rank; or the block has been entered before.
    """
    return LazyBlock(
        LazyGraph,
        Options(
            device=defaults.device if device is None else device,
            batch=batch,
            split=split,
            backend=backend or defaults.backend,
            allow_sync=allow_sync,
            assume=assumptions(assume),
            mesh=mesh,
            rank=rank,
            torch_version=torch_version,
            held_bytes_limit=held_bytes_limit,
            code=code,
            names=names,
            whole=whole,
            independent_rng=independent_rng,
            recompute=recompute,
        ),
    )


def lazy_function(function: Callable[..., Any]) -> Callable[..., tuple[Any, LazyGraph]]:
    """``lazy_function(f)(*args)`` calls ``f`` in a lazy block: ``(result, graph)``."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> tuple[Any, LazyGraph]:
        with lazy() as graph:
            result = function(*args, **kwargs)
        return result, graph

    return wrapper


@shortened
def evaluate(*tensors: torch.Tensor) -> Report:
    """Run what ``tensors`` need, in whatever graphs; without arguments, everything pending.

    What was recorded for a card that is not on this machine stays pending then.  An op that fails stops
    what needs it; its error is raised once all else has run.  It stays pending and is tried again, but an
    error that is known already is only named in ``report.left``.

    Raises:
        lazyviz.AbsentDeviceError: one of ``tensors`` needs such a card.
        Exception: what a kernel raised, with the line that recorded it.
        RuntimeError: a compiled segment that failed has left memory half written; the rest has run.
    """
    with tape.runs.lock:
        if not tensors:
            if tape.pending:
                tape.runs.refuse_nested()
            tape.pending_ops.forget_unreachable(tape.pending_ops.reachable())
        cause = evaluation.called("lazyviz.evaluate()")
        if tensors:
            return evaluation.run(closure(evaluation.needed(tensors)), cause)
        report = run_all(cause)
        if (error := partial_writes.left(list(tape.pending))) is not None:
            raise RuntimeError(error)
        return report


@shortened
def sync() -> Report:
    """Run every pending graph, as far as this machine can."""
    return evaluate()


def is_lazy(tensor: Any) -> bool:
    """Whether ``tensor`` is a tensor whose value is still pending."""
    return isinstance(tensor, torch.Tensor) and is_pending(tensor)


def to_lazy(tensor: torch.Tensor) -> torch.Tensor:
    """A lazy view of ``tensor``: inside a lazy block ops on either are recorded anyway."""
    if is_lazy(tensor):
        return tensor
    if tape.recording.graph is not None:
        return torch.ops.aten.alias.default(tensor)
    with lazy():
        return torch.ops.aten.alias.default(tensor)


@shortened
def to_eager(tensor: torch.Tensor) -> torch.Tensor:
    """Evaluate what ``tensor`` needs and return it, now an ordinary tensor."""
    if needed := evaluation.needed([tensor]):
        with tape.runs.lock:
            evaluation.run(closure(needed), "lazyviz.to_eager()")
    return tensor


def compare(
    a: LazyGraph | Plan, b: LazyGraph | Plan, *, names: tuple[str, str] = ("before", "after")
) -> Comparison:
    """Two graphs or plans: what the second needs more and less than the first, in bytes.

    Of graphs it compares the plans that ``graph.plan()`` makes.  Two plans may be of one graph: two devices,
    two batch sizes, in pieces and whole.  Runs nothing.

    Args:
        names: what the two are called in the chart and the tables.

    Raises:
        TypeError: one of them is neither.
    """
    from ..plan.plan import Plan
    from ..view.comparison.comparison import Comparison

    plans, ops = [], []
    for each in (a, b):
        plan = each.plan() if isinstance(each, LazyGraph) else each
        if not isinstance(plan, Plan):
            raise TypeError(f"compare takes graphs or plans, not {type(each).__name__}")
        plans.append(plan)
        ops.append(len(each.nodes) if isinstance(each, LazyGraph) else len(plan.timeline))
    return Comparison(plans[0], plans[1], names, (ops[0], ops[1]))


class forbid_sync(Transaction):
    """Make every sync point in the block a :class:`SyncError` that names its cause."""

    def _recreate_cm(self) -> forbid_sync:
        return forbid_sync()

    def begin(self) -> None:
        before = evaluation.forbidden.get()
        self.undo_by(lambda: evaluation.forbidden.set(before))
        evaluation.forbidden.set(True)


def cell_boundary() -> None:
    """Between two cells: forget what nobody can see; leave PyTorch as it was if nothing is pending."""
    tape.runs.refuse_nested()
    tape.pending_ops.forget_unreachable(tape.pending_ops.reachable())
    evaluation.watch.leave()


def unload() -> None:
    """Leave PyTorch as it was before lazyviz was imported, if nothing is pending."""
    cell_boundary()
    evaluation.watch.unload()


def reset() -> None:
    """Forget everything pending, unevaluated, and leave PyTorch as it was, whatever state it is in.

    Tensors that were pending stay without a value.  What was moved to a planned card that is not on this
    machine is what it was before, on the CPU.  Blocks that are open are so no longer.
    """
    if evaluation.is_running_here():
        tape.runs.refuse_nested()
    complete(_reset)


def _reset() -> None:
    close_all()
    if tape.runs.lock.is_lost or (tape.runs.lock.is_mine and not evaluation.is_running_here()):
        tape.runs.lock, tape.runs.running = RunLock(), 0
    evaluation.end_abandoned()
    evaluation.watch.reset()
    give_back(tape)
    tape.pending_ops.forget_all()
    evaluation.graphs.clear()
    evaluation.watch.restore()
