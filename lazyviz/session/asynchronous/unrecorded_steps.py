"""Unrecorded steps: loop iterations run in eager mode once their program has been recorded often enough.

Such an iteration runs in eager mode, and its operator calls are compared with those of an earlier one.  The
first one after the program has become known is compared with the recorded ops themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ...execute.lru_cache import LRUCache
from ...graph.ir import RAN_AT_ONCE, Node, TensorMeta
from ...plan.remat.recompute_candidates import is_view
from ...torch_internals import op_stream
from ...torch_internals.private_api import OpOverload
from .. import evaluation
from ..block import Options
from ..lazy_graph import LazyGraph

RECORDED = 8  # iterations of a program that were recorded in this process before it is known
IN_A_ROW = 2  # of these, the most recent ones of a loop; one, if the program's calls in eager mode are known
SHAPES_EVERY = 8  # iterations are compared by operator names only, every eighth also by shapes
LEAST_SHARE = 0.9  # minimum fraction of the recorded ops among the calls of the first eager iteration
_MOST_KEPT = 64  # programs


@dataclass
class Program:
    """The ops of iterations that were recorded, and their calls in eager mode once they were observed."""

    key: object  # what the identities in the program's key are of, kept alive
    recorded: int = 0
    observed: int = 0
    calls: op_stream.Stream | None = None
    is_observed: bool = False  # now; another thread may be observing its own calls
    is_refused: bool = False  # its calls in eager mode do not match its ops, or it needs more memory there

    @property
    def is_known(self) -> bool:
        return self.recorded >= RECORDED and not self.is_refused

    def observe(self) -> None:
        """Observe an iteration in eager mode until :meth:`matches`."""
        self.is_observed = op_stream.observe(self.calls, tensors=self.observed % SHAPES_EVERY == 0)
        self.observed += 1

    def matches(self, nodes: Iterable[Node]) -> bool:
        """Whether the observed iteration made the calls of this program, with ``nodes`` as its ops."""
        seen = op_stream.end() if self.is_observed else None
        self.is_observed = False
        if seen is True:
            return True
        if seen is None or seen is False:  # the known calls may be those of a smaller batch
            self.calls, self.observed = None, 0
            return False
        if share_among(op_stream.names(seen), nodes) < LEAST_SHARE:
            self.is_refused = True
            return False
        self.calls = seen
        return True


programs: LRUCache[tuple[int, int], Program] = LRUCache(_MOST_KEPT)

observers: list[object] = []
"""Those whose observed iterations are in no block, not even a suspended one."""


class Repetition:
    """The iterations of one loop, as far as they were recorded."""

    def __init__(self, options: Options) -> None:
        self._is_possible = op_stream.is_available and _is_plain(options)
        self._last: Program | None = None
        self._in_a_row = 0  # iterations with this program
        self._forbidden = evaluation.forbidden_blocks

    def known(self, graph: LazyGraph) -> Program | None:
        """The program of the next iteration, if it need not be recorded, after that of ``graph`` was."""
        if not self._is_possible:
            return None
        program, before = program_of(graph.nodes), self._last
        forbidden, self._forbidden = self._forbidden, evaluation.forbidden_blocks
        self._last = program
        if program is None:
            return None
        program.recorded += 1
        same = program is before and forbidden == self._forbidden
        self._in_a_row = self._in_a_row + 1 if same else int(forbidden == self._forbidden)
        least = IN_A_ROW if program.calls is None else 1
        if not program.is_known or self._in_a_row < least or graph.choices.summaries:
            return None
        if program.calls is None and not _fits(graph):
            program.is_refused = True
            return None
        return program

    def ended(self) -> None:
        """An iteration that was not recorded was of another program."""
        self._in_a_row = 0


def _is_plain(options: Options) -> bool:
    """Whether eager PyTorch does the same as a block with these options, apart from recording."""
    split, recompute = options.checked()
    return (
        options.backend == "eager"
        and (split, recompute) == ("off", "off")
        and options.batch is None
        and options.allow_sync
        and not options.assume
    )


def _fits(graph: LazyGraph) -> bool:
    """Whether eager PyTorch's memory for the graph is not projected to exceed the device's."""
    try:
        return graph.plan().eager_fits is not False
    except Exception:  # if it cannot be planned, it is recorded; the user's loop continues
        return False


def stop_observing() -> None:
    """End the observation of an iteration that was left early; its calls are not compared."""
    op_stream.end()


def program_of(nodes: Iterable[Node]) -> Program | None:
    """The program with these ops, shapes, and dtypes; ``None`` if an op failed or represents other code."""
    ops: list[OpOverload] = []
    metas: list[TensorMeta] = []  # equal metadata is the same object
    for node in nodes:
        if node.error is not None:
            return None
        ops.append(node.op)
        metas += [value.meta for value in node.outputs]
    key = hash(tuple(map(id, ops))), hash(tuple(map(id, metas)))
    found = programs.get(key)
    if found is None:
        if any(op._schema.name == RAN_AT_ONCE for op in ops):
            return None
        programs[key] = found = Program((ops, metas))
    return found


def share_among(calls: Iterable[str], nodes: Iterable[Node]) -> float:
    """The fraction of the ops of ``nodes`` that are among ``calls``, each of which may make further calls.

    Views are left out, and an op may be its in-place variant.  Where no dispatch mode is active, some of
    PyTorch's composite functions and gradient formulas use fewer views, write in place, or call other kernels
    for the same result, so that even equal programs may have a fraction below 1.
    """
    wanted = Counter(node.op._schema.name.rstrip("_") for node in nodes if not is_view(node))
    found = Counter(call.rstrip("_") for call in calls) & wanted
    return found.total() / wanted.total() if wanted else 1.0
