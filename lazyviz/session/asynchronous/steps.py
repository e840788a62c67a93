"""``lazyviz.steps``: each iteration of a loop is recorded, and runs while the next one is recorded."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Generic, TypeVar

from ...record.tape import tape
from ..block import LazyBlock
from ..lazy_graph import LazyGraph, lazy
from ..planned_device import resolved
from .run_handle import Run

T = TypeVar("T")


class Rounds:
    """Iterations of loops in an open block, each in its own graph.

    Attributes:
        graph: the graph of the last finished iteration.
        waited: why its evaluation was synchronous although ``wait`` is False, if it was.
    """

    def __init__(self, block: LazyBlock[LazyGraph], wait: bool) -> None:
        self._block, self._wait = block, wait
        self.graph: LazyGraph | None = None
        self.waited: str | None = None
        self._run: Run | None = None

    def end(self) -> None:
        """End an iteration: it runs while the next one is recorded."""
        if self._block.graph is not None and self._block.graph.nodes:
            self._block.renew(self.evaluate)

    def evaluate(self, graph: LazyGraph) -> None:
        self.graph, self._run = graph, None
        if self._wait:
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
        self.end()
        for item in unrecorded(iter(iterable)):
            yield item
            self.end()


class steps(Generic[T]):
    """The items of ``iterable``, for a loop in which each iteration is recorded as one graph.

    ``for batch in lazyviz.steps(loader):`` records an iteration, evaluates it like
    ``graph.evaluate(wait=False)``, and meanwhile records the next one.  Reading a value is a sync point, as
    in any block, and waits only for the ops that it needs.  When the loop ends, everything has run.  If the
    loop is left early (by ``break`` or an exception), its last iteration stays pending, as in a block.

    Ops between two iterations, such as those of the loader, are not recorded.  Inside an open block, the
    iterations are recorded in that block.

    Args:
        backend: as in :func:`lazyviz.lazy`; only the default one runs while the next iteration is recorded.
        device: as in :func:`lazyviz.lazy`, for plans.
        wait: evaluate each iteration before the next one begins.

    Attributes:
        graph: the graph of the last finished iteration, to show or plan; earlier graphs are dropped.
        rounds: the number of finished iterations.
        waited: why the last evaluation was synchronous although ``wait`` is False, if it was.

    Raises:
        ValueError: the device is a GPU that is not on this machine; record one iteration with
            :func:`lazyviz.lazy` to plan it.
        RuntimeError: something else is recording.
        Exception: a kernel raised it; raised when the loop requests its next item, with the line that
            recorded the op.
    """

    def __init__(
        self, iterable: Iterable[T], *, backend: str | None = None, device: Any = None, wait: bool = False
    ) -> None:
        self._iterable, self._backend, self._device, self._wait = iterable, backend, device, wait
        self._ended: Rounds | None = None
        self.rounds = 0

    @property
    def graph(self) -> LazyGraph | None:
        return None if self._ended is None else self._ended.graph

    @property
    def waited(self) -> str | None:
        return None if self._ended is None else self._ended.waited

    def __len__(self) -> int:
        if not isinstance(self._iterable, Sized):
            raise TypeError(f"{type(self._iterable).__name__!r} object has no len()")
        return len(self._iterable)

    def __iter__(self) -> Iterator[T]:
        items = iter(self._iterable)
        if tape.recording.is_on_this_thread():
            return unrecorded(items)
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
        ended = self._ended = Rounds(block, self._wait)
        with block as graph:
            del graph  # others are to come
            for item in unrecorded(items):
                ended.end()
                yield item
                self.rounds += 1
            last, block.ends_in = block.graph, sys._getframe(1)
        if last is not None and last.nodes:
            ended.evaluate(last)
            ended.finish()

    def __repr__(self) -> str:
        return f"<lazyviz.steps: {self.rounds:,} iterations, {self.graph!r}>"


def unrecorded(items: Iterator[T]) -> Iterator[T]:
    """``items``, without recording the ops of the iterator itself."""
    while True:
        with tape.recording.paused():
            try:
                item = next(items)
            except StopIteration:
                return
        yield item
