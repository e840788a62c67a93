"""LazyGraph, ``lazy()``, and functions for all pending graphs: the composition root.

Only this package and ``notebook`` import all stages.  This module connects graphs to their plans, pictures,
and runs; :mod:`lazyviz.session.connect_packages_and_exit_handlers` gives recording the functions
that a sync point needs.
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
from ..execute.run_report import NonFinite
from ..execute.run_report import Report as Report
from ..graph.ir import Failure, Graph, Node, SyncPoint, failure_of
from ..graph.user_annotations import LONGEST_NAME, annotation
from ..plan.devices.device_lookup import DeviceLike
from ..plan.devices.device_lookup import devices as devices
from ..plan.result_tables import DisplayedText
from ..process.deferred_signals import deferred
from ..process.global_state_transaction import Transaction, complete
from ..process.tracebacks import shortened
from ..process.unpicklable_base_class import Unpicklable
from ..record import partially_written_memory
from ..record.dependency_closure import closure
from ..record.fake_cuda.gpu_copies_of_host_values import give_back
from ..record.free_graph_with_owner import Owned
from ..record.lazy_tensor import is_pending
from ..record.recording_state import HELD_BYTES_LIMIT
from ..record.sparse.components import parts_of
from ..record.sync_points import RunLock, if_free
from ..record.tape import tape
from ..record.tracked_storages import TrackedNode, Unreachable
from ..torch_internals import op_stream
from . import evaluation
from .argument_type_checks import check_evaluate, check_save, check_tensors, check_texts, check_type
from .asynchronous.run_handle import Run as AsyncRun
from .batch_specification import BatchLike, NamedBatch
from .block import LazyBlock, Options, close_all, open_blocks
from .default_options import options as defaults
from .display import Pictures
from .evaluate_all_pending import evaluate_everything, merged
from .evaluate_at_sync_point import run_with_options
from .graph_options import GraphOptions
from .recompute_options import RecomputeError as RecomputeError
from .recompute_options import split_and_recompute
from .run_history import Listener, RunHistory
from .run_options import Recompute, assumptions
from .split_options import SplitError as SplitError
from .why_it_ran_and_status import metrics as metrics
from .why_it_ran_and_status import why as why

if TYPE_CHECKING:
    import graphviz

    from ..plan.plan import Plan
    from ..view.comparison.comparison import Comparison
    from ..view.render.publication_figure import Drawing
    from ..view.scene.scene import Scene
    from ..view.widget.plan_settings import Plans


_logger = logging.getLogger("lazyviz")


class LazyGraph(Unpicklable):
    """A recorded block: its nodes, plans, and pictures, and methods to run it.

    Displaying it shows the widget; its ``repr`` is one line.  Neither evaluates anything.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        device: DeviceLike | None = None,
        backend: str = "eager",
        code: str = "",
        batch: NamedBatch | None = None,
        split: int | str = "off",
        recompute: Recompute = "off",
    ) -> None:
        self.ir = graph
        self.choices = GraphOptions(backend, batch, split, recompute)
        self.runs = RunHistory()
        self.device = device
        self.code = code
        self.title = "lazyviz"
        self.shown_plans: Plans | None = None
        self.drawing: Drawing | None = None  # as shown by the page that was used last
        self._pictures = Pictures()
        self._waits = 0  # index of the first node not known to have run
        self._owned = Owned(graph)  # last, because attributes are deleted in this order

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_ending() or "ir" not in vars(self):
            return  # at interpreter exit, or if the constructor was interrupted
        self.ir.lost = True
        if Unreachable.drop is not None and tape.pending and node_passes.unfinished(self.nodes):
            Unreachable.drop()

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
        """Number of ops not yet run; without those that were dropped, which never will."""
        return sum(node.state != "done" and not _is_dropped(node) for node in self.ir.nodes)

    @property
    def has_pending(self) -> bool:
        """Whether some op has not run."""
        nodes = self.nodes
        if self._waits < len(nodes) and nodes[self._waits].state != "done":
            return True  # the node found last is still pending
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
        if not self.has_pending:
            return "done"
        never = all(map(_is_dropped, node_passes.unfinished(self.nodes)))
        return "failed" if never else "pending"

    @property
    def report(self) -> Report | None:
        """The report of the last run of nodes of this graph."""
        return self.runs.report

    @property
    def error(self) -> BaseException | None:
        """The exception that the last run raised, if any."""
        return self.runs.error

    @property
    def live(self) -> Run | None:
        """The current run, if its progress is being followed."""
        return self.runs.live

    @property
    def measured(self) -> list[tuple[int, int]]:
        """Positions of nodes in the order in which they ran, each with the peak memory while it ran.

        For a split run, only the first two pieces, as in the plan's timeline.
        """
        return self.runs.measured

    @property
    def nonfinite(self) -> dict[str, NonFinite]:
        """The first NaN (``"nan"``) and the first infinity (``"inf"``) that runs have found."""
        return self.runs.nonfinite

    def subscribe(self, callback: Listener) -> None:
        """Call ``callback``, on any thread, when the state or a choice changes.

        Its exceptions are reported through ``sys.unraisablehook`` and do not stop a run.
        """
        if not callable(callback):
            raise TypeError(f"a callback must be a function, not {type(callback).__name__}")
        self.runs.subscribe(callback)

    def unsubscribe(self, callback: Listener) -> None:
        """Stop calling ``callback``."""
        self.runs.unsubscribe(callback)

    def own(self, nodes: Sequence[Node]) -> list[TrackedNode]:
        """``nodes``, checked.

        Raises ``ValueError`` for a node of another graph, ``TypeError`` for something else.
        """
        mine = self.ir.nodes
        for node in nodes:
            check_type("a node", node, Node, "a node of this graph")
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
        """Set how ``evaluate`` runs the graph by default; all widgets of the graph show it.

        Raises:
            ValueError: the backend is unknown or not available, or the options exclude each other.  Nothing
                has changed then.
        """
        self.choices.choose(backend=backend, split=split, summaries=summaries)
        self.runs.notify()

    def backends(self) -> list[tuple[str, str]]:
        """All backends, each with the reason why it cannot run this graph here, or ""."""
        return self.choices.backends()

    @property
    def is_recording(self) -> bool:
        """Whether its block is open."""
        return any(block.graph is self for block in open_blocks())

    # --- planning -----------------------------------------------------------------

    @evaluation.reads_recording
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
            device: a device, a profile, or its name; default: the device of the block's options, or the
                device that the block runs on.
            batch_size: plan for this number of samples instead of the recorded one.
            split: number of pieces of the batch, ``"auto"`` for the fewest that fit; default: the block's.
            recompute: keep the peak below this size (bytes, or text such as ``"2 GiB"``) by dropping and
                recomputing activations, ``"auto"`` for the device's free memory; default: the block's.

        Raises:
            ValueError: unknown device, or something this version cannot plan.
        """
        from ..plan.make_plan import make_plan

        device = self.device if device is None else device
        split, recompute = split_and_recompute(self, split, recompute, backend or "eager")
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
        if pending == self.ir.nodes:  # the usual case, checked first because checking each node takes longer
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

        A part of a step keeps what the rest needs, for the whole batch: to save memory by ``split`` or
        ``recompute``, run all ops.  Ops of earlier graphs run with the options of their own blocks, if these
        split the batch or recompute activations.

        Args:
            nodes: nodes of this graph; only these and the nodes that they depend on are run.
            summaries: store statistics of every result in ``node.summaries``: minimum, maximum, mean, the
                shares of NaN and infinity, and a small histogram.  ``report.first_nan`` and
                ``report.first_inf`` are then known.  Results do not change.  This takes about as long as
                reading every result twice, and up to 16 MiB of additional memory.  Default: off, or as set by
                the widget's "Values" button.
            timings: measure the time of each op, on a GPU with CUDA events.  Default: only on a CPU.
            split: run the batch in this many pieces, or with ``"auto"`` in the fewest that fit; default: the
                block's.  An interrupted split run continues with the number of pieces that it started with.
            backend: as in :func:`lazy`; default: the block's.  ``"ipyparallel"``, ``"ray"``, or a registered
                cluster runs the pieces on its workers; ``"auto"``, also if no split was given, then uses at
                least one piece per worker.
            recompute: keep the peak below this size (bytes, or text such as ``"2 GiB"``) by dropping and
                recomputing activations, with ``"auto"`` below the device's free memory; default: the block's.
            progress: called after each op with a :class:`lazyviz.execute.progress.Progress`.  If it raises,
                the run stops there; evaluating again continues.
            cancel: set this event to stop between two ops, or while a backend compiles.
            verify: compare the results of a compiling backend's new segments with those of the recorded ops,
                on copies of their inputs.  If they differ by more than rounding, the recorded ops' results
                are used, and ``report.fallbacks`` says so.
            wait: with ``False``, ops on the CPU that have run before run on another thread while the program
                continues, for example to record the next step.  Returns a :class:`lazyviz.Run`.  Anything
                that needs the results waits for them, and so does the next evaluation: only one run is in
                progress at a time.  Its inputs and results are kept until then, and its error is raised
                there. Ops that cannot run this way have run when this returns; ``run.waited`` says why.

        Raises:
            TypeError: an argument has a wrong type, for example a list of tensors.
            ValueError: unknown backend, a split without a named batch or with a backend that does not support
                it, or nodes of another graph.
            lazyviz.SplitError: the batch cannot be split; the message names the nodes.  Nothing has run.
            lazyviz.RecomputeError: the budget cannot be met; the message has the lowest peak.  Nothing ran.
            lazyviz.Interrupted: the run was canceled; evaluating again continues.
            lazyviz.NoWorkersError: the cluster has no workers, or all were lost; evaluating again continues.
            Exception: a kernel raised it; the message includes the line that recorded the op.
        """
        check_evaluate(tensors, progress, cancel, nodes)
        name = backend or self.backend
        split, recompute = split_and_recompute(self, split, recompute, name)
        if tape.recording.graph is not None and tape.recording.owner != threading.get_ident():
            raise RuntimeError("a cell is recording on another thread; evaluate when it has ended")
        with tape.runs.lock:
            targets = evaluation.needed(tensors)
            if nodes is not None:
                targets += self.own(list(nodes))
            elif not tensors:
                targets = self.unfinished()
            # All pending nodes: they depend on no others.
            everything = not tensors and nodes is None and targets == list(tape.pending)
            cause = evaluation.cause_at_line("evaluate()")
            done = (evaluation.run if wait else evaluation.start)(
                targets if everything else run_with_options(closure(targets), cause, apart=self),
                cause,
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

    @evaluation.reads_recording
    def scene(self) -> Scene:
        """The data that all pictures of the graph are drawn from; its boxes are reused, its plan is new."""
        return self._pictures.scene(self)

    @evaluation.reads_recording
    def text(self) -> str:
        """The graph and its plan as text."""
        return DisplayedText(self._pictures.text(self))

    @evaluation.reads_recording
    def to_dot(self) -> graphviz.Digraph:
        from ..view.render.dot import to_dot

        return to_dot(self.ir)

    @evaluation.reads_recording
    def to_fx(self) -> torch.fx.GraphModule:
        from ..graph.fx_export import to_fx

        return to_fx(self.ir)

    @evaluation.reads_recording
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
        """Write a picture or the timeline of the graph; the suffix of ``path`` selects the format.

        An existing file is replaced only when the new one is complete.

        Args:
            format: overrides the suffix, or selects the kind of ``.json``: ``"perfetto"``,
                ``"model-explorer"``.
            eager: show the plan of eager PyTorch, also in a ``.pickle`` (PyTorch memory snapshot), not that
                of an evaluation by lazyviz.
            paths: False omits the user's code and the directories of its files.  Otherwise, pages contain
                lines of code (the whole code of a cell), and timelines also the full paths of files.
            title: title of a figure, that is, a ``.svg``, ``.pdf``, or ``.png`` without state, verdict, and
                device.
            show: parts of a figure: ``"forward"``, ``"backward"``, ``"optimizer"``, ``"other"``,
                ``"memory"``.
            legend: False omits the scale of a figure's bars.
            direction: direction of a figure's forward pass: ``"TB"`` (down) or ``"LR"`` (to the right, with
                lanes below each other and without edge labels).
            theme: theme of a figure: ``"light"`` or ``"dark"``.

        If a widget of the graph is open, pictures show the same open boxes and the same numbers.

        Raises:
            OSError: the file cannot be written.
            TypeError: an argument has a wrong type.
            ValueError: unknown format, unknown part in ``show``, or figure options for another kind of file.
            RuntimeError: no program that writes ``.pdf`` or ``.png`` is installed, or it failed.
        """
        check_save(path, format, title, show, eager=eager, paths=paths, legend=legend)
        figure = {"title": title, "show": show, "legend": legend, "direction": direction, "theme": theme}
        self._pictures.save(self, path, format, eager=eager, paths=paths, figure=figure)

    def annotate(self, name: str, values: Mapping[Any, Any] | None) -> None:
        """Color and label boxes by your own numbers, such as gradient norms, sensitivities, or measured
        times.

        New pictures and files show them instead of bytes.  Open widgets show them immediately, and list
        ``name`` in their menu.  A group of boxes without its own number shows the minimum and maximum inside.
        Nothing is evaluated.

        Args:
            name: name in the menu and after each number, such as ``"grad norm"``.  An existing annotation of
                that name is replaced.
            values: numbers by node of this graph, by module, or by a module's name (``"net.h.0"`` or
                ``"h.0"``); ``None`` removes the annotation.

        Raises:
            TypeError: a key is not a node, module, or name; a value is not a number, or is a pending tensor.
            ValueError: a node of another graph, a module that ran no op in this graph, NaN or infinity, no
                values, an empty name, or a name of more than 60 characters.
            RuntimeError: the block is still recording, so modules have no names yet.
        """
        if not isinstance(name, str):
            raise TypeError(f"an annotation's name must be a string, not {name!r:.40}")
        if not name.strip() or len(name) > LONGEST_NAME:
            raise ValueError(f"an annotation's name must have 1 to {LONGEST_NAME} characters")
        if self.is_recording:
            raise RuntimeError("annotate the graph after its block has ended")
        made = annotation(self.ir, name, values, is_pending) if values is not None else None
        self.ir.annotations.pop(name, None)
        if made is not None:
            self.ir.annotations[name] = made
        if self.drawing is not None:
            self.drawing = replace(self.drawing, by="")
        self.runs.notify()

    @evaluation.reads_recording
    def show(self) -> Path:
        """Write the interactive page to a temporary file, open it in the browser, and return its path.

        For scripts.  The page shows the graph in its current state; nothing is run.
        """
        return self._pictures.show(self)

    @evaluation.reads_recording
    def widget(self, scene: Scene | None = None) -> Any:
        """The interactive widget; the same one each time, until it is closed."""
        return self._pictures.widget(self, scene)

    @evaluation.reads_recording
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
        batch: the tensors whose dim 0 is the batch, ``{tensor: dim}``, or variable names (``"x,y:1"``), which
            are looked up when the block first uses their tensors.
        split: evaluate the batch in this many pieces (also at sync points and later reads, which then run all
            pending ops of the block); ``"auto"``: in the fewest that fit the device's free memory.
        whole: operators (ATen names such as ``"cumsum"``) that may run on the whole batch, between two passes
            over the pieces, if they would otherwise prevent a split.
        independent_rng: operators that draw random numbers inside a fused kernel may draw separately for each
            piece; a split run then uses other random numbers than a run on the whole batch.
        backend: the default backend: ``"eager"``, ``"inductor"``, ``"xla"``, ``"cudagraphs"``,
            ``"ipyparallel"``, ``"ray"``, a registered one, or one of an installed package;
            ``None``: ``lazyviz.options.backend``.
        recompute: evaluate with a peak below this size (bytes, or text such as ``"2 GiB"``) by dropping and
            recomputing activations (also at sync points and later reads, which then run all pending ops of
            the block); ``"auto"``: below the device's free memory.
        device: the default device for plans (a device, a profile, or its name; ``None``: the device of
            ``lazyviz.options``, if set).  In a process without CUDA, ``torch.cuda`` inside the block behaves
            as if that GPU were present, and the block can only be planned.
        mesh: for a distributed program, the number of ranks in each dimension: ``(8,)``, ``(2, 4)``.  Inside
            the block, ``torch.distributed`` is initialized as one of these ranks.  Because the other ranks do
            not exist, the block can only be planned.
        rank: the rank to record.
        torch_version: the PyTorch release that will run on an absent GPU, such as ``"1.13"``; its known
            differences in memory use (:mod:`lazyviz.record.fake_cuda.older_releases`) are recorded.
        assume: values of reads that only an absent device could compute, by line.  A line is its number, in
            any file, ``"train.py:12"``, or ``"*"`` for all others; an iterator or a list gives one value per
            read (a read of several numbers returns the whole list). ``"until max_new_tokens"``: text
            generation by transformers continues to its maximum length, independent of the tokens, unless
            one value per read is given.
        allow_sync: False makes a sync point inside the block an error that names its line.
        held_bytes_limit: evaluate when pending ops keep more than this many bytes of outside tensors alive
            that the block itself has dropped.
        names: the variables that name tensors in pictures and plans; default: the caller's.

    Raises:
        ValueError: an unsupported option, or an unknown device or backend.
        TypeError: an option of a wrong type.
        RuntimeError: another thread or task is recording; an outer block is for another absent GPU or rank;
            ``torch.distributed`` is initialized as another rank; or the block was already entered.
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
    """Run all pending ops that ``tensors`` need, in any graphs; without arguments, all pending ops.

    Without arguments, each graph runs with the options of its block (backend, split, recompute), and ops that
    were recorded for an absent GPU stay pending.  With ``tensors``, a graph that splits the batch or
    recomputes activations runs as a whole, as at a sync point, and other graphs run op by op.

    A failing op stops only the ops that depend on it, and its error is raised when everything else has run.
    It stays pending and is tried again by the next call, but an error that was already raised is only listed
    in ``report.left``.

    Raises:
        lazyviz.AbsentDeviceError: one of ``tensors`` needs an absent GPU.
        lazyviz.SplitError, lazyviz.RecomputeError, lazyviz.NoWorkersError: a block's options cannot be met;
            everything else has run.
        Exception: a kernel raised it; the message includes the line that recorded the op.
        RuntimeError: a compiled segment failed and left memory partially written; everything else has run.
    """
    check_tensors("lazyviz.evaluate", tensors)
    with tape.runs.lock:
        cause = evaluation.cause_at_line("lazyviz.evaluate()")
        if tensors:
            reports: list[Report] = []
            needed = run_with_options(closure(evaluation.needed(tensors)), cause, reports=reports)
            if needed or not reports:
                reports.append(evaluation.run(needed, cause))
            return merged(reports)
        report = evaluate_everything(cause)
        if (error := partially_written_memory.left(list(tape.pending))) is not None:
            raise RuntimeError(error)
        return report


@shortened
def sync() -> Report:
    """Run all pending graphs, except those for absent devices: :func:`evaluate` without arguments."""
    return evaluate()


def is_lazy(tensor: Any) -> bool:
    """Whether ``tensor`` is a tensor whose value is still pending."""
    return isinstance(tensor, torch.Tensor) and any(map(is_pending, parts_of(tensor) or [tensor]))


def to_lazy(tensor: torch.Tensor) -> torch.Tensor:
    """A lazy view of ``tensor``.  Ops on ordinary tensors inside a lazy block are recorded without it."""
    check_tensors("lazyviz.to_lazy", [tensor])
    if is_lazy(tensor):
        return tensor
    if tape.recording.graph is not None:
        return torch.ops.aten.alias.default(tensor)
    with lazy():
        return torch.ops.aten.alias.default(tensor)


@shortened
def to_eager(tensor: torch.Tensor) -> torch.Tensor:
    """Evaluate ``tensor`` and return it as an ordinary tensor."""
    check_tensors("lazyviz.to_eager", [tensor])
    if needed := evaluation.needed([tensor]):
        with tape.runs.lock:
            cause = "lazyviz.to_eager()"
            evaluation.run(run_with_options(closure(needed), cause), cause)
    return tensor


def compare(a: LazyGraph | Plan, b: LazyGraph | Plan, *, names: tuple[str, str] | None = None) -> Comparison:
    """Compare two graphs or plans: how much more or less memory the second one needs, in bytes.

    For graphs, it compares the plans returned by ``graph.plan()``.  Two plans may be of the same graph, for
    example for two devices or batch sizes, or split and not split.  Runs nothing.

    Args:
        names: names of the two in the chart and the tables; by default, what tells their plans apart:
            devices, batch sizes, or numbers of pieces; otherwise ``("before", "after")``.

    Raises:
        TypeError: one of them is neither a graph nor a plan, or ``names`` are not two names.
    """
    if names is not None:
        check_texts("names", names, "('before', 'after')", 2)
    from ..plan.plan import Plan
    from ..view.comparison.comparison import Comparison, names_of

    plans, ops = [], []
    for each in (a, b):
        plan = each.plan() if isinstance(each, LazyGraph) else each
        if not isinstance(plan, Plan):
            raise TypeError(f"compare takes graphs or plans, not {type(each).__name__}")
        plans.append(plan)
        ops.append(len(each.nodes) if isinstance(each, LazyGraph) else len(plan.timeline))
    names = names_of(plans[0], plans[1]) if names is None else names
    return Comparison(plans[0], plans[1], names, (ops[0], ops[1]), defaults._theme_of_pages())


class forbid_sync(Transaction):
    """Make every sync point in the block a :class:`SyncError` that names its cause."""

    def _recreate_cm(self) -> forbid_sync:
        return forbid_sync()

    def begin(self) -> None:
        before = evaluation.forbidden.get()
        self.undo_by(lambda: evaluation.forbidden.set(before))
        evaluation.forbidden.set(True)
        evaluation.forbidden_blocks += 1


def cell_boundary() -> None:
    """Between two cells: drop unreachable ops, and restore PyTorch if nothing is pending."""
    tape.runs.refuse_nested()
    evaluation.end_abandoned()
    with deferred(), if_free(tape.runs.lock) as taken:
        if taken:  # else another thread has chosen what to run
            tape.pending_ops.forget_unreachable(tape.pending_ops.reachable())
    evaluation.watch.leave()


def unload() -> None:
    """Restore PyTorch to its state before lazyviz was imported, if nothing is pending."""
    cell_boundary()
    evaluation.watch.unload()


def _is_dropped(node: Node) -> bool:
    return failure_of(node.error) is Failure.FORGOTTEN


def reset() -> None:
    """Drop all pending ops without running them, and restore PyTorch from any state.

    Tensors that were pending remain without values.  Tensors and modules that were moved to an absent GPU are
    again as they were on the CPU.  Open blocks are closed.
    """
    if evaluation.is_running_here():
        tape.runs.refuse_nested()
    complete(_reset)


def _reset() -> None:
    close_all()
    op_stream.end()
    if tape.runs.lock.is_lost or (tape.runs.lock.is_mine and not evaluation.is_running_here()):
        tape.runs.lock, tape.runs.running = RunLock(), 0
    evaluation.end_abandoned()
    evaluation.watch.reset()
    give_back(tape)
    tape.pending_ops.forget_all()
    evaluation.graphs.clear()
    RunHistory.with_split_runs.clear()
    evaluation.watch.restore()
