"""Value statistics, computed while ops run: minimum, maximum, mean, NaN, infinities, a histogram.

Tensors are only read: results, random numbers, and the run's own memory do not change.  For each tensor, a
few numbers are stored.  Large tensors are read in chunks, with at most :data:`SCRATCH_BYTES` of additional
memory.

Infinities that the program writes itself (``masked_fill(mask, -inf)``), or that an outside mask contains, are
intended; values computed from them raise no alarm.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence, Set
from typing import Any, Literal

import torch

from ..graph.ir import Node, Storage, is_dense
from ..graph.modules import full_name
from ..graph.value_stats_data import BINS, Summary
from ..plan.batch.batch_placement import Placement, Shard
from ..record.tracked_storages import TrackedNode, TrackedValue
from ..torch_internals import private_api
from .run_report import NonFinite

CHUNK = 1 << 19  # elements
SAMPLE = 1 << 13  # maximum number of elements in a histogram, evenly spaced

_log = logging.getLogger(__name__)
# The results of these operators have not been written yet.
BLANK = {
    "empty",
    "empty_like",
    "empty_strided",
    "empty_permuted",
    "new_empty",
    "new_empty_strided",
    "resize_",
}


def summarize(tensor: torch.Tensor) -> Summary | None:
    """The statistics of ``tensor``; ``None`` if it has no readable numbers.

    Works below autograd and every mode; on a GPU, waits for the tensor.
    """
    if (
        tensor.layout != torch.strided
        or tensor.is_quantized
        or tensor.is_neg()
        or tensor.device.type == "meta"
    ):
        return None
    count = tensor.numel()
    for dim, step in enumerate(tensor.stride()):  # the copies of one number in an expanded tensor count once
        if step == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    if not tensor.numel():
        return Summary(0, 0, 0, 0, None, None, None)
    if is_dense(tensor.shape, tensor.stride()):
        tensor = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    copies = count // tensor.numel()
    nan = plus = minus = 0
    least, largest, total = math.inf, -math.inf, 0.0
    for chunk in _chunks(tensor):
        chunk = _numbers(chunk)
        low, high = chunk.amin().item(), chunk.amax().item()
        if not (math.isfinite(low) and math.isfinite(high)):
            nan += int(chunk.isnan().sum())
            plus += int((chunk == math.inf).sum())
            minus += int((chunk == -math.inf).sum())
            chunk = chunk[chunk.isfinite()]
            if not chunk.numel():
                continue
            low, high = chunk.amin().item(), chunk.amax().item()
        least, largest = min(least, low), max(largest, high)
        total += chunk.sum(dtype=torch.float64).item()
    finite = tensor.numel() - nan - plus - minus
    special = (count, nan * copies, plus * copies, minus * copies)
    if not finite:
        return Summary(*special, None, None, None)
    mean = min(max(total / finite, least), largest)
    return Summary(
        *special,
        float(least),
        float(largest),
        mean,
        _histogram(tensor, least, largest, clean=finite == tensor.numel()),
    )


def _numbers(chunk: torch.Tensor) -> torch.Tensor:
    """``chunk`` in a dtype that reductions support."""
    dtype = chunk.dtype
    if dtype.is_complex:
        return chunk.abs()
    if dtype.is_floating_point:
        return chunk if dtype.itemsize > 1 else chunk.to(torch.float32)
    return chunk.to(torch.float64) if dtype != torch.bool else chunk.to(torch.uint8)


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """``tensor`` in parts of at most :data:`CHUNK` elements, which are views of it."""
    stack = [tensor]
    while stack:
        part = stack.pop()
        numel = part.numel()
        if numel <= CHUNK:
            yield part
            continue
        dim = max(range(part.dim()), key=lambda each: part.shape[each])
        pieces = min(-(-numel // CHUNK), part.shape[dim])
        stack += reversed(part.split(-(-part.shape[dim] // pieces), dim))


def _histogram(tensor: torch.Tensor, least: float, largest: float, *, clean: bool) -> tuple[int, ...]:
    width = largest - least
    if not (0 < width < math.inf):
        return ()
    while tensor.numel() > SAMPLE:  # an odd step, so that samples are not always from the same column
        dim = max(range(tensor.dim()), key=lambda each: tensor.shape[each])
        step = min(-(-tensor.numel() // SAMPLE), tensor.shape[dim]) | 1
        tensor = tensor[(slice(None),) * dim + (slice(None, None, step),)]
    values = _numbers(tensor).to(torch.float64, copy=True).flatten()
    if not clean:
        values = values[values.isfinite()]
    bins = values.sub_(least).mul_(BINS / width).to(torch.int32).clamp_(0, BINS - 1)
    return tuple(torch.bincount(bins, minlength=BINS).tolist())


def merged(one: Summary, other: Summary) -> Summary:
    """The summary of both tensors together; its histogram moves whole bins."""
    if not one.finite or not other.finite:
        known = other if other.finite else one
    else:
        known = one
    counts = (
        one.count + other.count,
        one.nan + other.nan,
        one.plus_inf + other.plus_inf,
        one.minus_inf + other.minus_inf,
    )
    if known.least is None or known.largest is None or known.mean is None:
        return Summary(*counts, None, None, None)
    least, largest, mean, histogram = known.least, known.largest, known.mean, known.histogram
    if one.finite and other.finite:
        assert one.mean is not None and other.mean is not None
        assert other.least is not None and other.largest is not None
        least, largest = min(least, other.least), max(largest, other.largest)
        mean = (one.mean * one.finite + other.mean * other.finite) / (one.finite + other.finite)
        histogram = _rebinned([one, other], least, largest)
    return Summary(*counts, least, largest, mean, histogram)


def _rebinned(parts: Sequence[Summary], least: float, largest: float) -> tuple[int, ...]:
    width = largest - least
    if not (0 < width < math.inf):
        return ()
    bins = [0] * BINS
    for part in parts:
        assert part.least is not None and part.largest is not None
        step = (part.largest - part.least) / BINS
        counts = part.histogram or (min(part.finite, SAMPLE),)
        for number, count in enumerate(counts):
            middle = part.least + (number + 0.5) * step if part.histogram else part.least
            bins[min(max(int((middle - least) * BINS / width), 0), BINS - 1)] += count
    return tuple(bins)


def readable(node: TrackedNode) -> bool:
    """Whether an output of ``node`` still exists."""
    return node.state == "done" and any(_alive(value) is not None for value in node.outputs)


def summarize_now(node: TrackedNode) -> None:
    """Store the statistics of those outputs of ``node`` that still exist."""
    found: list[Summary | None] = list(node.summaries) or [None] * len(node.outputs)
    with private_api.kernels_only():
        for index, value in enumerate(node.outputs):
            tensor = _alive(value)
            if tensor is not None:
                found[index] = _summary_of(node, tensor)
    node.summaries = found
    if any(summary is not None and summary.nan for summary in found):
        node.alarm = "nan"


def _alive(value: TrackedValue) -> torch.Tensor | None:
    """The current tensor of ``value``, if the user still has it."""
    memory = value.memory.storage() if value.memory is not None else None
    meta = value.meta
    if memory is None or memory.nbytes() < meta.storage_nbytes or meta.flags:
        return None
    with private_api.kernels_only():
        blank = torch.empty(0, dtype=meta.dtype, device=memory.device)
        return blank.set_(memory, meta.offset, meta.shape, meta.stride)


class Summaries:
    """The statistics of one run; ``seconds`` is the time that they took."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.first: dict[str, NonFinite] = {}  # by kind, in program order
        self._order: dict[str, int] = {}
        self._known: dict[Storage, dict[TrackedValue, Summary]] = {}  # since each storage was last written
        self._meant: set[Storage] = set()  # storages with intended infinities
        self._infinite: set[Storage] = set()

    def node(self, node: TrackedNode, results: Sequence[torch.Tensor | None]) -> None:
        """Called after ``node`` has run, while its inputs still exist."""
        start = time.perf_counter()
        try:
            self._node(node, results)
        except Exception:  # the run itself did not cause the error
            _log.exception("lazyviz: the results of %s could not be summarized", node.name)
        self.seconds += time.perf_counter() - start

    def part(self, value: TrackedValue, part: torch.Tensor, placement: Placement | None) -> None:
        """Called when a piece of the batch has computed its part of ``value``."""
        node = value.node
        if node is None or not isinstance(placement, Shard):
            return
        known = node.summaries[value.index] if value.index < len(node.summaries) else None
        if known is not None and known.count >= math.prod(value.meta.shape):
            return  # the pieces run again
        start = time.perf_counter()
        summary = _summary_of(node, part)
        if summary is not None:
            self._note(node, value.index, summary if known is None else merged(known, summary))
            self._judge(node)
        self.seconds += time.perf_counter() - start

    def whole(self, value: TrackedValue, tensor: torch.Tensor) -> None:
        """Called when all pieces have computed their summands of ``value``."""
        if value.node is not None:
            summary = _summary_of(value.node, tensor)
            if summary is not None:
                self._note(value.node, value.index, summary)
                self._judge(value.node)

    def _node(self, node: TrackedNode, results: Sequence[torch.Tensor | None]) -> None:
        for storage in node.writes:
            self._known.pop(storage, None)
        node.summaries = ()
        for index, value in enumerate(node.outputs):
            real = results[value.index if value.node is node else index] if results else None
            if real is None:
                continue
            same = self._of_view(node, value)
            summary = same if same is not None else _summary_of(node, real)
            if summary is not None:
                self._note(node, index, summary)
                self._known.setdefault(value.storage, {})[value] = summary
        self._judge(node)

    def _of_view(self, node: TrackedNode, value: TrackedValue) -> Summary | None:
        """The statistics of a view that covers its whole base."""
        if not node.op.is_view or not node.inputs:
            return None
        source = node.inputs[0]
        if math.prod(source.meta.shape) != math.prod(value.meta.shape) or source.dtype != value.dtype:
            return None
        return self._known.get(source.storage, {}).get(source)

    def _note(self, node: Node, index: int, summary: Summary) -> None:
        known = list(node.summaries) or [None] * len(node.outputs)
        known[index] = summary
        node.summaries = known

    # --- alarms -----------------------------------------------------------------------

    def _judge(self, node: TrackedNode) -> None:
        """Whether the outputs raise an alarm, and whether it is the first of its kind."""
        node.alarm = None
        written: set[Storage] = set(node.writes)
        given = {value.storage for value in node.inputs if value.storage not in written}
        for index, summary in enumerate(node.summaries):
            if summary is None:
                continue
            storage = node.outputs[index].storage
            self._infinite.discard(storage)
            if summary.inf and not self._is_intended_infinity(node, summary, given):
                self._infinite.add(storage)
                node.alarm = node.alarm or "inf"
                self._first(node, index, "inf", summary)
            elif summary.inf:
                self._meant.add(storage)
            if summary.nan:
                node.alarm = "nan"
                self._first(node, index, "nan", summary)

    def _is_intended_infinity(self, node: TrackedNode, summary: Summary, given: Set[Storage]) -> bool:
        """Whether infinities are intended: the program writes them, or they come from its masks."""
        if any(_is_infinite(item) for item in (*node.args, *node.kwargs.values())):
            return True
        if not self._infinite.isdisjoint(given):
            return False
        if not self._meant.isdisjoint([*given, *node.writes]):
            return True
        return summary.plus_inf == 0 and any(
            real is not None and real.numel() > 1 and _has(real, "inf")
            for value, real in ((value, value.real) for value in node.inputs)
            if value.storage.external and value.storage not in node.writes
        )

    def _first(self, node: TrackedNode, index: int, kind: Literal["nan", "inf"], summary: Summary) -> None:
        known = self._order.get(kind)
        if known is not None and known <= node.sequence:
            return
        self._order[kind] = node.sequence
        came = ""
        for value in node.inputs:
            real = value.real
            written = value.storage in node.writes
            if real is not None and not written and value.storage not in self._known and _has(real, kind):
                came = full_name(value.name or value.storage.name) or "an input"
                break
        self.first[kind] = NonFinite(node, index, kind, summary, came)


def _summary_of(node: Node, tensor: torch.Tensor) -> Summary | None:
    if node.op._schema.name.removeprefix("aten::") in BLANK:
        return None
    try:
        return summarize(tensor)
    except (RuntimeError, NotImplementedError):  # a dtype that reductions do not support
        return None


def _is_infinite(item: Any) -> bool:
    return isinstance(item, float) and math.isinf(item)


def _has(tensor: torch.Tensor, kind: str) -> bool:
    summary = summarize(tensor)
    return summary is not None and bool(summary.nan if kind == "nan" else summary.inf)
