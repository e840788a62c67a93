"""``lazyviz.steps``: each iteration of a loop is recorded, and runs while the next one is recorded."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Sized
from contextlib import nullcontext
from functools import partial
from types import FrameType
from typing import Generic, TypeVar

from ...plan.devices.device_lookup import DeviceLike
from ...process.tracebacks import shorten
from ...record.tape import tape
from ...torch_internals import op_stream
from ..block import LazyBlock
from ..device_options import resolved
from ..lazy_graph import LazyGraph, lazy
from .run_handle import Run
from .unrecorded_steps import Program, Repetition

T = TypeVar("T")


class Rounds:
    """Iterations of loops in an open block, each in its own graph.

    Args:
        block: the open block.
        wait: evaluate each iteration before the next one begins.
        always_record: record each iteration, also of a known program.

    Attributes:
        graph: the graph of the last finished iteration that was recorded.
        waited: why its evaluation was synchronous although ``wait`` is False, if it was.
        unrecorded: the number of iterations that ran in eager mode.
    """

    def __init__(self, block: LazyBlock[LazyGraph], wait: bool, always_record: bool = False) -> None:
        self._block, self._wait = block, wait
        self.graph: LazyGraph | None = None
        self.waited: str | None = None
        self.unrecorded = 0
        self._run: Run | None = None
        self._repetition = None if always_record else Repetition(block.options)
        self._known: Program | None = None  # of the current iteration, which is not recorded
        self._matches = False  # whether the last iteration that was not recorded was of this program

    def end(self, place: FrameType) -> None:
        """End an iteration: it runs while the next one is recorded.

        ``place`` is the frame of the loop.
        """
        if self._known is not None:
            if not self._matches:
                self.resume()
            return
        graph = self._block.graph
        if graph is None or not graph.nodes:
            return
        known = self._repetition.known(graph) if self._repetition is not None else None
        if known is None:
            self._block.renew(self.evaluate)
            return
        # The next iteration is not recorded, so there is nothing to do while this one runs.
        self._block.renew(partial(self.evaluate, wait=True), place)
        self._suspend(known)

    def _suspend(self, known: Program) -> None:
        """Let the next iteration run in eager mode, unless something is still pending."""
        self.finish()
        if tape.pending or self.graph is None:
            return
        if not self.unrecorded:
            self._block.undo_by(op_stream.end)
        self._block.suspend(self.graph)
        self._known = known

    def resume(self) -> None:
        """Record the next iteration, if the last one was not recorded."""
        if self._known is not None:
            self._known = None
            if self._repetition is not None:
                self._repetition.ended()
            op_stream.end()
            self._block.resume()

    def begin(self) -> None:
        """Called before the code of an iteration runs."""
        if self._known is not None:
            self._matches = False
            self._known.observe()

    def ran(self) -> None:
        """Called after the code of an iteration has run."""
        if self._known is not None and self.graph is not None:
            self.unrecorded += 1
            self._matches = self._known.matches(self.graph.nodes)

    def what_ran_unrecorded(self) -> str:
        """A sentence for users who see the graph of one iteration."""
        count = f"{self.unrecorded:,} iteration{'' if self.unrecorded == 1 else 's'}"
        return (
            f"{count} ran in eager mode, with the ops of those recorded; the graph is the last recorded one."
        )

    def evaluate(self, graph: LazyGraph, wait: bool = False) -> None:
        self.graph, self._run = graph, None
        if wait or self._wait:
            graph.evaluate()
        else:
            self._run = graph.evaluate(wait=False)
            self.waited = self._run.waited

    def finish(self) -> None:
        """Wait for the last evaluation; raises its error, if any."""
        if self._run is not None:
            self._run.result()

    def of(self, iterable: Iterable[T]) -> Iterator[T]:
        """The items of ``iterable``, for a loop in the block: each iteration ends where the next begins."""
        self.end(sys._getframe(1))
        try:
            for item in unrecorded(iter(iterable)):
                self.begin()
                yield item
                self.ran()
                self.end(sys._getframe(1))
        finally:
            self.resume()  # ops after the loop are recorded


class steps(Generic[T]):
    """The items of ``iterable``, for a loop in which each iteration is recorded as one graph.

    ``for batch in lazyviz.steps(loader):`` records an iteration, evaluates it like
    ``graph.evaluate(wait=False)``, and meanwhile records the next one.  Reading a value is a sync point, as
    in any block, and waits only for the ops that it needs.  When the loop ends, everything has run.  If the
    loop is left early (by ``break`` or an exception), its last iteration stays pending, as in a block.

    Once eight iterations with the same ops and shapes have been recorded in this process, the last of them in
    this loop, the next ones are not recorded: they run in eager mode, where nothing is pending, and their
    operator calls are compared with those of the recorded program.  The iteration after one that differs is
    recorded again.  This needs the default backend and the compiled modules, and eager PyTorch's memory must
    be projected to fit; iterations with ``forbid_sync``, in which the first NaN is looked for, or that begin
    while ops of another cell or block are pending, are recorded.

    Ops between two iterations, such as those of the loader, are not recorded.  Inside an open block, the
    iterations are recorded in that block.

    Args:
        backend: as in :func:`lazyviz.lazy`; only the default one runs while the next iteration is recorded.
        device: as in :func:`lazyviz.lazy`, for plans.
        wait: evaluate each iteration before the next one begins.
        always_record: record each iteration, also those that would run in eager mode.

    Attributes:
        graph: the graph of the last finished iteration that was recorded, to show or plan; earlier graphs are
            dropped.
        rounds: the number of finished iterations.
        unrecorded: how many of them ran in eager mode.
        waited: why the last evaluation was synchronous although ``wait`` is False, if it was. It is
            ``None`` if the next iteration runs in eager mode, so that there was nothing to record meanwhile.

    Raises:
        ValueError: the device is a GPU that is not on this machine; record one iteration with
            :func:`lazyviz.lazy` to plan it.
        RuntimeError: something else is recording.
        Exception: a kernel raised it; raised when the loop requests its next item, with the line that
            recorded the op.
    """

    def __init__(
        self,
        iterable: Iterable[T],
        *,
        backend: str | None = None,
        device: DeviceLike | None = None,
        wait: bool = False,
        always_record: bool = False,
    ) -> None:
        self._iterable, self._backend, self._device = iterable, backend, device
        self._wait, self._always_record = wait, always_record
        self._ended: Rounds | None = None
        self.rounds = 0

    @property
    def graph(self) -> LazyGraph | None:
        return None if self._ended is None else self._ended.graph

    @property
    def waited(self) -> str | None:
        return None if self._ended is None else self._ended.waited

    @property
    def unrecorded(self) -> int:
        return 0 if self._ended is None else self._ended.unrecorded

    def __len__(self) -> int:
        if not isinstance(self._iterable, Sized):
            raise TypeError(f"{type(self._iterable).__name__!r} object has no len()")
        return len(self._iterable)

    def __iter__(self) -> Iterator[T]:
        items = iter(self._iterable)
        if tape.recording.is_on_this_thread() or op_stream.observed_thread() == threading.get_ident():
            return unrecorded(items)  # part of an iteration of another loop, or of a block
        return self._recorded(items)

    def _recorded(self, items: Iterator[T]) -> Iterator[T]:
        block = lazy(device=self._device, backend=self._backend)
        if resolved(block.options.device)[1] is not None:
            raise ValueError(
                "lazyviz.steps: the loop cannot run on a GPU that is not on this machine; to plan it, "
                "record one "
                "iteration in a block of lazyviz.lazy(device=...)"
            )
        block.begins_in = sys._getframe(1)  # the loop; it is not kept, since it may keep this generator
        ended = self._ended = Rounds(block, self._wait, self._always_record)
        try:
            with block as graph:
                del graph  # other iterations will follow
                for item in unrecorded(items):
                    ended.begin()
                    yield item
                    ended.ran()
                    self.rounds += 1
                    # Before the loader makes the next batch, so that it works during the run.
                    ended.end(sys._getframe(1))
                block.ends_in = sys._getframe(1)
            ended.finish()
        except BaseException as error:  # raised by a kernel, the loader, or an interrupt
            shorten(error)
            raise

    def __repr__(self) -> str:
        eager = f" ({self.unrecorded:,} of them in eager mode)" if self.unrecorded else ""
        return f"<lazyviz.steps: {self.rounds:,} iterations{eager}, {self.graph!r}>"


def unrecorded(items: Iterator[T]) -> Iterator[T]:
    """``items``, without recording the ops of the iterator itself."""
    while True:
        with nullcontext() if tape.recording.graph is None else tape.recording.paused():
            try:
                item = next(items)
            except StopIteration:
                return
        yield item
