"""Split plan: how the batch is split, and the memory of a run in pieces.

A split run is laid out as a separate program, in which spread nodes appear once per piece.  Its storages have
lifetimes in that program, so that timeline, categories, and allocator are computed as for any other program.
Two pieces of a pass represent all: from the second piece on, the accumulated sums exist, and nothing else
grows.  Sizes are in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import torch

from ...graph.ir import Graph, Node, Storage, TensorMeta, Value
from ...graph.modules import known_path
from ..liveness.lifetimes import Lifetime
from ..node_formatting import line_text
from ..result_tables import DisplayedText
from ..workspace.workspace_lookup import has_rule, scratch, with_metadata
from ..workspace.workspace_size import NOTHING, Need
from .batch_analysis_result import BatchAnalysis
from .batch_dim_propagation import Blocker, analyze, is_view, separable
from .batch_placement import Local, Part, Partial, Shard
from .batch_rule import Call, base_name
from .passes_over_pieces import Schedule, Unschedulable, schedule

SHOWN = 2
"""Pieces of each pass in a plan's timeline: from the second piece on, the accumulated sums exist as well."""


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """How the batch is split: ``pieces`` of ``piece_sizes`` samples; 1 piece is the whole batch.

    ``blocked_by`` are the nodes that prevent a split, with one reason each in ``reasons``.  ``passes`` is the
    number of passes over the pieces, ``again`` the number of nodes that a piece runs more than once because
    of them.  ``ranges`` are the parts of the plan's timeline: (first position, number of the piece from 1, or
    0 for whole nodes); the first two pieces of a pass represent all.  Piece sizes are multiples of ``group``
    samples.  ``why_whole``: why the plan is for the whole batch although pieces were requested, or "".
    """

    pieces: int
    piece_sizes: Sequence[int] = ()
    blocked_by: Sequence[Node] = ()
    reasons: Sequence[str] = ()
    passes: int = 1
    again: int = 0
    ranges: Sequence[tuple[int, int]] = ()
    group: int = 1
    why_whole: str = ""

    def explain(self) -> str:
        """The split as text, or the reasons that prevent it."""
        if self.blocked_by:
            blockers = zip(self.blocked_by, self.reasons)
            return DisplayedText("\n".join(describe(Blocker(*each)) for each in blockers))
        if self.pieces == 1:
            return f"in one piece: {self.why_whole}" if self.why_whole else "in one piece"
        sizes = sorted(set(self.piece_sizes), reverse=True)
        text = f"in {self.pieces} pieces of {' or '.join(map(str, sizes))} samples"
        if self.again:
            text += f", with {self.again:,} ops per piece recomputed for results that need the whole batch"
        return text


REMEDIES = {
    "batch norm": "model.eval(), GroupNorm, or LayerNorm instead",
    "DataParallel": "a single GPU, or accumulate gradients",
}


def describe(blocker: Blocker) -> str:
    """``blocker`` as a line of text: place, reason, and advice."""
    node = blocker.node
    line = line_text(node.source) if node.source is not None else ""
    where = [part for part in (known_path(node), line) if part]
    text = (
        f"{node.name} ({', '.join(where)}): {blocker.reason}" if where else f"{node.name}: {blocker.reason}"
    )
    advice = next((advice for word, advice in REMEDIES.items() if word in blocker.reason), None)
    name = node.op._schema.name.partition("::")[2].rstrip("_")
    return f"{text}. Use {advice}." if advice else f"{text}. To run it on the whole batch: whole=[{name!r}]."


def sizes_of(total: int, pieces: int, group: int, first: int | None = None) -> list[int]:
    """Sizes of that many pieces, in samples, larger ones first; fewer if there are not enough samples.

    With ``first``, only the sizes of the first pieces.
    """
    blocks = total // group
    pieces = max(1, min(pieces, blocks))
    least, more = divmod(blocks, pieces)
    shown = pieces if first is None else min(first, pieces)
    return [(least + (index < more)) * group for index in range(shown)]


BATCH_NEEDED = "needs the batch: name its tensors (--batch, batch=)"


def check_split(split: int | str | None) -> None:
    """Raise ``ValueError`` unless ``split`` is ``None``, ``"off"``, ``"auto"`` or a number of pieces."""
    if split in (None, "off", "auto"):
        return
    if isinstance(split, bool) or not isinstance(split, int) or split < 1:
        raise ValueError(f"split must be 'off', 'auto', or a number of pieces, not {split!r}")


class Batch:
    """A graph's batch: its dimension in each value, and the order of a run in pieces."""

    def __init__(
        self,
        nodes: Sequence[Node],
        roots: Mapping[Value, Shard],
        kept: Callable[[Value], bool],
        *,
        whole: Iterable[str] = (),
        independent_rng: bool = False,
        handed_out: Mapping[Node, int] | None = None,
    ) -> None:
        self.nodes = nodes
        self.analysis = analyze(
            nodes, roots, whole=frozenset(whole), independent_rng=independent_rng, handed_out=handed_out
        )
        self._kept = kept
        for value, placement in self.analysis.placements.items():
            if isinstance(placement, Shard):
                value.symbolic_shape = placement.symbolic(value.meta.shape)

    @property
    def size(self) -> int:
        return self.analysis.size

    @cached_property
    def _scheduled(self) -> tuple[Schedule | None, list[Blocker]]:
        if self.size < 2:  # nothing to split
            return None, []
        if self.analysis.blocked:
            return None, self.analysis.blocked
        try:
            return schedule(self.nodes, self.analysis, self._kept), []
        except Unschedulable as error:
            return None, error.blockers

    @property
    def schedule(self) -> Schedule | None:
        """The order of a split run; ``None`` if it is impossible."""
        return self._scheduled[0]

    @property
    def blocked(self) -> list[Blocker]:
        return self._scheduled[1]

    def unknown_growth(self, samples: int) -> str | None:
        """Why it is not known what the program would hold with a batch of ``samples``; ``None`` if it is."""
        analysis = self.analysis
        if analysis.unknown:
            node = analysis.unknown[0]
            reason = next((f": {each.reason}" for each in analysis.blocked if each.node is node), "")
            return (
                f"lazyviz cannot determine how the results of {node.name} ({node.op}) grow with the batch"
                f"{reason}"
            )
        counts = {
            shard.part.count
            for shard in analysis.placements.values()
            if isinstance(shard, Shard) and shard.part is not None
        }
        if any(not Part(count - 1, count).samples(samples) for count in counts):
            return f"DataParallel would use fewer than {max(counts)} GPUs for a batch of {samples:,}"
        return None

    def kept_at_reads(self, run_of: Callable[[Node], int]) -> set[Node]:
        """The nodes that use, directly or through others of them, values of the batch that an earlier run has
        computed: a read inside of the block leaves them in memory for the whole batch.

        Args:
            run_of: the number of the run that runs a node.
        """
        found: set[Node] = set()
        kept: set[Storage] = set()
        computed: dict[Storage, int] = {}  # by memory that has the batch: the run that computes it
        for node in self.nodes:
            run = run_of(node)
            read = [value.storage.origin for value in node.inputs]
            if any(memory in kept or computed.get(memory, run) < run for memory in read):
                found.add(node)
            for value in node.outputs:
                if node in found:
                    kept.add(value.storage.origin)
                elif isinstance(self.analysis.placements.get(value), Shard):
                    computed.setdefault(value.storage.origin, run)
        return found

    def split(self, pieces: int, size: int | None = None) -> SplitPlan:
        """A batch of ``size`` samples (default: as recorded) in that many pieces, if it can be split."""
        size = size or self.size
        found = self.schedule
        if found is None or pieces <= 1 or not found.passes:
            blocked = self.blocked
            nodes, reasons = [each.node for each in blocked], [each.reason for each in blocked]
            return SplitPlan(1, (size,), nodes, reasons, group=self.analysis.group)
        sizes = sizes_of(size, pieces, self.analysis.group)
        return SplitPlan(
            len(sizes),
            sizes,
            passes=len(found.passes),
            again=found.again,
            ranges=_ranges(found, len(sizes)),
            group=self.analysis.group,
        )


def _ranges(order: Schedule, pieces: int) -> list[tuple[int, int]]:
    """The ranges of whole nodes and pieces in the program that :func:`lay_out` creates."""
    result: list[tuple[int, int]] = []
    position = 0
    for level, nodes in enumerate(order.whole):
        if nodes:
            result.append((position, 0))
            position += len(nodes)
        work = order.passes[level].nodes if level < len(order.passes) else ()
        for piece in range(1, min(pieces, SHOWN) + 1 if work else 0):
            result.append((position, piece))
            position += len(work)
    return result


# --- another batch size --------------------------------------------------------------------


def scaled(
    spans: Iterable[Lifetime], needs: Mapping[int, Need], batch: Batch, samples: int
) -> tuple[list[Lifetime], dict[int, Need]]:
    """Lifetimes and scratch memory of the same program with a batch of ``samples``.

    Every storage is affine in the batch size: storages with the batch grow in proportion, the others do not.
    A tensor that was created with a plain int that happens to equal the batch size counts as one that does
    not grow, unless it is used sample by sample.

    Raises ``ValueError`` if it is not known how an operator's results grow.
    """
    analysis = batch.analysis
    if (why := batch.unknown_growth(samples)) is not None:
        raise ValueError(why)
    grows: dict[Storage, Part | None] = {}

    def held(value: Value, part: Part | None, dim: int | None = None) -> None:
        if dim is not None and not value.meta.stride[dim]:
            return  # expanded to the batch
        storage = value.storage.origin
        # Parts are also views of a tensor that has all samples.
        grows[storage] = part if grows.get(storage, part) == part else None

    for value, placement in analysis.placements.items():
        if isinstance(placement, Local) and value.node is not None:
            held(value, _part_of(value.node, analysis))
        elif isinstance(placement, Shard):
            held(value, placement.part, placement.dim)
        elif not isinstance(placement, Partial):
            held(value, None)
        elif value.node is not None and _sums_in_place(value, value.node, analysis):
            held(value, _part_of(value.node, analysis))
    for call in analysis.calls.values():
        for value, shard in (*call.slices.items(), *call.heads.items()):
            held(value, shard.part, shard.dim)

    def grown(nbytes: int, part: Part | None) -> int:
        if part is None:
            return nbytes * samples // batch.size
        return nbytes * part.samples(samples) // part.samples(batch.size)

    result = [
        span._replace(storage=_copy(span.storage, grown(span.storage.nbytes, grows[span.storage.origin])))
        if span.storage.origin in grows
        else span
        for span in spans
    ]
    spread = {node.index: node for node in _spread(analysis)}
    return result, {
        at: Need(*(grown(size, _part_of(spread[at], analysis)) for size in need)) if at in spread else need
        for at, need in needs.items()
    }


def _sums_in_place(value: Value, node: Node, analysis: BatchAnalysis) -> bool:
    """Whether the memory of a sum is that of all elements: a kernel such as ``mse_loss`` writes them, sums
    them in place, and shrinks the tensor.
    """
    nbytes = value.storage.nbytes
    if nbytes <= value.nbytes or value.storage not in node.made:
        return False
    of_batch = (each for each in node.inputs if isinstance(analysis.placements.get(each), Shard))
    return any(each.nbytes == nbytes for each in of_batch)


def _part_of(node: Node, analysis: BatchAnalysis) -> Part | None:
    """The part of the batch that ``node`` works on, if not on all of it."""
    for value in (*node.outputs, *node.inputs):
        placement = analysis.placements.get(value)
        if isinstance(placement, Shard):
            return placement.part
    return None


def rescaled(graph: Graph, device: torch.device, kind: str, batch: Batch, samples: int) -> dict[int, Need]:
    """The scratch memory of nodes that use the batch, for ``samples`` samples, on a type of device.

    Computed again per kernel, because scratch memory does not grow in proportion.
    """
    nodes = [node for node in _spread(batch.analysis) if has_rule(node, kind)]
    return scratch(graph, device, kind, resized(nodes, batch, samples))


def resized(nodes: Iterable[Node], batch: Batch, samples: int) -> list[Node]:
    """``nodes`` with the tensor metadata of a batch of ``samples``, for computing scratch memory or time."""
    analysis = batch.analysis

    def meta_of(call: Call | None, value: Value) -> TensorMeta:
        placement, meta = analysis.placements.get(value), value.meta
        if placement is None and call is not None:
            placement = call.slices.get(value)
        if isinstance(placement, Local) and len(meta.shape) == 1:  # bytes for a kernel's own use
            shape, stride = tuple(size * samples // batch.size for size in meta.shape), meta.stride
        elif isinstance(placement, Shard):
            shape = tuple(placement.shape(meta.shape, samples))
            stride = tuple(placement.stride(meta, samples))
        else:
            return meta
        return TensorMeta(shape, stride, meta.offset, meta.dtype, meta.device, meta.flags)

    return [with_metadata(node, partial(meta_of, analysis.calls.get(node))) for node in nodes]


def _spread(analysis: BatchAnalysis) -> list[Node]:
    """The nodes that use the batch."""
    blocked = [each.node for each in analysis.blocked if each.node not in analysis.calls]
    return [*analysis.calls, *dict.fromkeys(blocked)]


def _copy(storage: Storage, nbytes: int) -> Storage:
    """A copy of the storage with another size."""
    copy = Storage(nbytes, storage.device, external=storage.external, created=storage.created)
    copy.dropped, copy.role, copy.name = storage.dropped, storage.role, storage.name
    copy.variables, copy.continues, copy.is_data = storage.variables, storage, storage.is_data
    return copy


# --- a run in pieces as a program -------------------------------------------------------------


class SplitProgram(NamedTuple):
    """A split run, laid out: its nodes in order, lifetimes and scratch memory by their positions."""

    graph: Graph
    spans: list[Lifetime]
    needs: dict[int, Need]


def lay_out(
    graph: Graph,
    spans: Iterable[Lifetime],
    needs: Mapping[int, Need],
    batch: Batch,
    sizes: Sequence[int],
    total: int,
) -> SplitProgram:
    """The program of a run in pieces of ``sizes`` samples, ``total`` in all, with only the storages of
    ``spans``.

    ``needs`` is the scratch memory of the whole batch as recorded.
    """
    return _Layout(graph, spans, needs, batch, sizes, total).program()


@dataclass(slots=True)
class _Life:
    """A storage of the split program: it exists from ``start``, and is last used at ``last``."""

    nbytes: int
    start: int
    last: int
    maker: Node | None


@dataclass(slots=True)
class _Layout:
    graph: Graph
    spans: Iterable[Lifetime]
    needs: Mapping[int, Need]
    batch: Batch
    sizes: Sequence[int]
    total: int
    order: list[Node] = field(default_factory=list)
    scratch: dict[int, Need] = field(default_factory=dict)
    known: dict[Storage, Lifetime] = field(default_factory=dict)
    whole: dict[Storage, _Life] = field(default_factory=dict)
    parts: list[tuple[Storage, _Life]] = field(default_factory=list)
    masks: dict[Node, _Life] = field(default_factory=dict)

    def program(self) -> SplitProgram:
        found = self.batch.schedule
        assert found is not None, "the graph cannot be split"
        self.known = {span.storage.origin: span for span in self.spans}
        for storage, span in self.known.items():
            if span.maker is None:
                self.whole[storage] = _Life(span.storage.nbytes, -1, -1, None)
        for level, nodes in enumerate(found.whole):
            for node in nodes:
                self.step(node, 1.0)
                for value in (*node.inputs, *node.outputs):
                    self.use(value, node)
                for storage in node.writes:
                    self.touch(storage)
            if level < len(found.passes):
                before = len(self.order)
                for samples in self.shown():
                    self.piece(level, samples)
                for life in (*self.masks.values(), *self.whole.values()):  # other pieces need it
                    if life.last >= before:
                        life.last = len(self.order) - 1
        return self.finished()

    def shown(self) -> list[int]:
        """The pieces that represent all others."""
        return list(self.sizes[:SHOWN])

    def step(self, node: Node, share: float) -> None:
        position = len(self.order)
        self.order.append(node)
        need = self.needs.get(node.index)
        if need is not None:
            self.scratch[position] = need if share == 1 else Need(*(int(size * share) for size in need))

    def touch(self, storage: Storage) -> None:
        life = self.whole.get(storage.origin)
        if life is not None:
            life.last = len(self.order) - 1

    def use(self, value: Value, node: Node) -> None:
        """``node`` produces ``value`` whole."""
        storage = value.storage.origin
        span = self.known.get(storage)
        if span is None:
            return
        if storage not in self.whole and span.maker is node:
            self.whole[storage] = _Life(span.storage.nbytes, len(self.order) - 1, 0, node)
        self.touch(storage)

    def piece(self, level: int, samples: int) -> None:
        analysis = self.batch.analysis
        found = self.batch.schedule
        assert found is not None
        work = found.passes[level]
        collected: dict[Node, list[Value]] = {}
        for each in work.collected:
            collected.setdefault(each.after, []).append(each.value)
        local: dict[Storage, _Life] = {}
        products: list[_Life] = []
        share = samples / analysis.size
        for node in work.nodes:
            call = analysis.calls[node]
            self.step(node, share)
            now = len(self.order) - 1
            if separable(node) and node.outputs:
                self.draw(now, node)
            apart = {*call.slices, *call.whole, *analysis.gathers.get(node, ())}
            for value in node.inputs:
                storage = value.storage.origin
                if storage in local and value not in apart:
                    local[storage].last = now
                else:
                    self.touch(storage)
            self._made(node, local, now, samples)
            for value in collected.get(node, ()):
                storage = value.storage.origin
                if storage in self.known and storage not in self.whole:
                    mine = local.get(storage)
                    self.whole[storage] = _Life(self.known[storage].storage.nbytes, now, now, node)
                    if mine is not None and isinstance(analysis.placements[value], Partial):
                        mine.nbytes = 0  # the first piece's summand becomes the sum
                elif storage in self.known:
                    self.touch(storage)
                    product = node.op is torch.ops.aten.mm.default and storage in local
                    if product and isinstance(analysis.placements[value], Partial):
                        products.append(local[storage])
        for life in products:
            if life.last == life.start:
                life.nbytes = 0  # added to the sum as soon as it is computed

    def _made(self, node: Node, local: dict[Storage, _Life], now: int, samples: int) -> None:
        """``node`` has created or written its part of the batch."""
        for value in node.outputs:
            storage = value.storage.origin
            if storage not in self.known:
                continue
            if storage in local:
                local[storage].last = now
            elif value.node is node and not is_view(node):
                local[storage] = _Life(self.part(value, samples), now, now, node)
                self.parts.append((storage, local[storage]))

    def draw(self, position: int, node: Node) -> None:
        """Random numbers are drawn for the whole batch, and the piece's part is taken.

        A mask is drawn once, and stored with one bit per element.
        """
        drawn = node.outputs[-1]
        storage = drawn.storage.origin
        if storage not in self.known:
            return
        more = drawn.nbytes * self.total // self.batch.size
        if base_name(node.op) in ("native_dropout", "bernoulli") and len(self.sizes) > 1:
            kept = self.masks.get(node)
            if kept is None:
                bits = -(-more // (8 * drawn.dtype.itemsize))
                kept = self.masks[node] = _Life(bits, position, position, node)
                self.parts.append((storage, kept))
            else:
                more = 0
            kept.last = position
        need = self.scratch.get(position, NOTHING)
        self.scratch[position] = Need(*(size + more for size in need))

    def part(self, value: Value, samples: int) -> int:
        """Bytes of a piece's own storage."""
        placement = self.batch.analysis.placements.get(value)
        nbytes = value.storage.nbytes
        if isinstance(placement, Partial):
            return nbytes
        if isinstance(placement, Shard):
            return (
                placement.nbytes(value.meta, samples)
                if value.meta.dense
                else nbytes * samples // self.batch.size
            )
        return nbytes * samples // self.batch.size

    def finished(self) -> SplitProgram:
        count = len(self.order)
        spans = []
        for storage, life in self.whole.items():
            span = self.known[storage]
            stop = count if span.kept else max(life.last + 1, life.start + 1, 0)
            spans.append(
                span._replace(start=life.start, eager_start=life.start, eager_stop=stop, lazy_stop=stop)
            )
        for storage, life in self.parts:
            if life.nbytes:
                span = self.known[storage]
                copy = _copy(storage, life.nbytes)
                stop = life.last + 1
                spans.append(
                    span._replace(
                        storage=copy,
                        start=life.start,
                        eager_start=life.start,
                        eager_stop=stop,
                        lazy_stop=stop,
                        kept=False,
                    )
                )
        program = Graph()
        program.nodes = self.order
        program.gpu = self.graph.gpu
        return SplitProgram(program, spans, self.scratch)
