"""Partition for CUDA Graphs: which ops are captured together, and which memory the parts share.

Everything is described by positions and numbers, so that it applies to every recording of the same structure
and keeps none alive.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ...graph.ir import Node, Storage, TensorMeta, Value
from ..backend_protocol import Segment
from .torch_cuda_calls import CaptureDevice

LEAST_KERNELS = 4  # enough for a separate part: launching it costs as much as some kernels
TOO_FEW = f"is in a group of fewer than {LEAST_KERNELS} kernels between ops that cannot be captured"

# Operators that wait for the device, or read a value, without a tag that says so. Operators that are missing
# here are found when they are captured, and then run separately.
_WAITING = {
    "aten::_local_scalar_dense",
    "aten::_assert_scalar",
    "aten::_fused_moving_avg_obs_fq_helper",
    "aten::_fused_moving_avg_obs_fq_helper_functional",
    "aten::is_pinned",
    "aten::equal",
    "aten::multinomial",
    "aten::histc",
    "aten::embedding_renorm_",
    "aten::_ctc_loss",
    "aten::record_stream",
}
_WAITING_TAGS = (
    torch.Tag.cudagraph_unsafe,
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
)
_INDEXED_WRITES = {"aten::index_put", "aten::index_put_", "aten::_unsafe_index_put", "aten::_index_put_impl_"}
_SOLVERS = ("aten::linalg_", "aten::_linalg_", "aten::cholesky", "aten::lu_", "aten::geqrf", "aten::ormqr")


def named(node: Node) -> str:
    """A node in a message: its operator and line."""
    return f"{node.op} at {node.source}" if node.source is not None else str(node.op)


def unfit(node: Node, device: torch.device, captures: CaptureDevice) -> str:
    """Why ``node`` cannot be captured on ``device``; "" if there is no known reason."""
    op, name = node.op, node.op._schema.name
    if op.namespace not in ("aten", "prims"):
        return "is not an operator of PyTorch itself, and may do more than launch kernels"
    if name in _WAITING or any(tag in op.tags for tag in _WAITING_TAGS):
        return "waits for the device"
    if name.startswith(_SOLVERS):
        return "computes partly on the CPU"
    for value in (*node.inputs, *node.outputs):
        if value.meta.device != device or not captures.takes(value.meta):
            return f"uses the {value.meta.device.type} in addition to {device}"
    if not node.inputs and not node.outputs:
        return "has no tensor arguments or results"
    if name in _INDEXED_WRITES and any(
        value.dtype in (torch.bool, torch.uint8)
        for value in node.inputs[1:]
        if value in _listed(node.args[1])
    ):
        return "counts the elements of a mask, which needs its values"
    if "cudnn_rnn" in name and "backward" not in name and node.args[11:12] not in ((0,), ()):
        return "draws random numbers from cuDNN's own state"
    return ""


def _listed(item: object) -> Sequence[object]:
    return item if isinstance(item, (list, tuple)) else (item,)


def refused(node: Node) -> str | None:
    """Why a segment cannot contain ``node`` at all, or None: it changes a tensor itself, rather than its
    content.
    """
    name = node.op._schema.name
    if torch.Tag.inplace_view in node.op.tags or name in ("aten::set_", "aten::resize_", "aten::resize_as_"):
        return f"{named(node)} changes the shape or memory of a tensor in place"
    for value in (*node.inputs, *node.outputs):
        if value.meta.flags:
            return f"{named(node)} uses or creates a conjugate or negative view"
    return None


@dataclass(slots=True)
class Line:
    """One node: the numbers of the values that it reads and creates, and of the storages that it writes and
    creates.

    ``outputs`` has pairs of the position of a result and its number. ``by_place``: offsets count from the
    beginning of its input's storage. The values in ``dead`` are not needed after it.
    """

    inputs: tuple[int, ...]
    outputs: tuple[tuple[int, int], ...]
    writes: frozenset[int]
    makes: frozenset[int]
    by_place: bool
    dead: list[int] = field(default_factory=list)

    @property
    def launches(self) -> bool:
        """Whether it is more than a view."""
        return bool(self.writes or self.makes)


class Layout:
    """A segment by numbers: its values, inputs first, and their storages, in order of first appearance.

    The first ``outside`` storages existed before. ``metas`` are the values' metadata, ``storage_of`` their
    storages. For each storage created here, ``made`` has the node, and the number of the output that created
    it. ``first`` are slices of inputs, which are computed before everything else.
    """

    def __init__(self, segment: Segment, first: Iterable[int] = ()) -> None:
        self.first = frozenset(first)
        self.lines: list[Line] = []
        self.metas: list[TensorMeta] = []
        self.storage_of: list[int] = []
        self.made: dict[int, tuple[int, int]] = {}
        self.inputs = len(segment.inputs)
        self._values: dict[Value, int] = {}
        self._storages: dict[Storage, int] = {}
        for value in segment.inputs:
            self._number(value)
        self.outside = len(self._storages)
        ends: dict[int, int] = {}
        for at, node in enumerate(segment.nodes):
            inputs = tuple([self._values[value] for value in node.inputs])
            before = len(self._storages)
            outputs = []
            for place, value in enumerate(node.outputs):
                if value.node is node:
                    number = self._number(value)
                    outputs.append((value.index, number))
                    if self.storage_of[number] >= before:
                        self.made.setdefault(self.storage_of[number], (at, place))
                    ends[number] = at
            ends.update(dict.fromkeys(inputs, at))
            writes = frozenset(self._storages[each] for each in node.writes if each in self._storages)
            makes = frozenset(range(before, len(self._storages)))
            by_place = "as_strided" in node.op._schema.name
            self.lines.append(Line(inputs, tuple(outputs), writes, makes, by_place))
        for number, at in ends.items():
            self.lines[at].dead.append(number)
        self.written = frozenset(storage for line in self.lines for storage in line.writes)
        self._values, self._storages = {}, {}  # they would keep the recording alive

    def base_of(self, storage: int) -> int | None:
        """The value that created a storage; None if it existed before."""
        if storage not in self.made:
            return None
        line = self.lines[self.made[storage][0]]
        return next(number for _, number in line.outputs if self.storage_of[number] == storage)

    def _number(self, value: Value) -> int:
        number = self._values[value] = len(self.metas)
        self.metas.append(value.meta)
        self.storage_of.append(self._storages.setdefault(value.storage, len(self._storages)))
        return number


@dataclass(frozen=True, slots=True)
class Part:
    """Nodes from ``start`` to before ``stop``, captured or run one by one.

    For a captured part, ``direct`` has the outside values that it uses, by storage; ``writes`` are the
    storages that it writes.
    """

    start: int
    stop: int
    captured: bool
    direct: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    writes: frozenset[int] = frozenset()


def parts_of(
    layout: Layout,
    alone: dict[int, str],
    moving: Container[int] = (),
    tied: Sequence[frozenset[int]] = (),
) -> list[Part]:
    """The layout cut into parts.

    Args:
        alone: the nodes that run by themselves, and why; more are added.
        moving: storages from outside that are elsewhere in each run.
        tied: nodes of which all are captured or none.
    """
    while True:
        before = len(alone)
        for group in tied:
            if not alone.keys().isdisjoint(group):
                for at in group:
                    alone.setdefault(at, "returns the random state that it used")
        for at, line in enumerate(layout.lines):
            if line.by_place and at not in alone:
                storage = layout.storage_of[line.inputs[0]]
                if storage in moving or (storage in layout.made and layout.made[storage][0] in alone):
                    alone[at] = "uses another slice of memory in each run"
        parts = _cut(layout, alone)
        for part in parts:
            if not part.captured:
                continue
            positions = [at for at in range(part.start, part.stop) if at not in layout.first]
            if sum(layout.lines[at].launches for at in positions) < LEAST_KERNELS:
                for at in positions:
                    alone.setdefault(at, TOO_FEW)
        if len(alone) == before:
            return parts


def _cut(layout: Layout, alone: Container[int]) -> list[Part]:
    parts: list[Part] = []
    start, count = 0, len(layout.lines)
    while start < count:
        captured = start not in alone and start not in layout.first
        stop = start + 1
        while stop < count and (stop in layout.first or (stop not in alone) is captured):
            stop += 1
        parts.append(_captured(layout, start, stop) if captured else Part(start, stop, False))
        start = stop
    return parts


def _captured(layout: Layout, start: int, stop: int) -> Part:
    lines = [layout.lines[at] for at in range(start, stop) if at not in layout.first]
    inside = {number for line in lines for _, number in line.outputs}
    direct: dict[int, dict[int, None]] = {}
    for line in lines:
        for number in line.inputs:
            if number not in inside:
                direct.setdefault(layout.storage_of[number], {})[number] = None
    writes = frozenset(storage for line in lines for storage in line.writes)
    return Part(start, stop, True, {storage: tuple(numbers) for storage, numbers in direct.items()}, writes)
