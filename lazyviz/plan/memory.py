"""How much memory a graph needs, when, and for what: the :class:`Plan`.

Sizes are those of the tensors' storages, to the byte.  On a GPU more is needed: what the
caching allocator adds (rounding, fragments) and library workspaces make ``reserved_bytes``,
which decides whether a graph fits, beside the CUDA context.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from ..graph.ir import Graph, Node, SourceLine, Storage, Value
from .devices import Device, DeviceProfile, capacity, resolve
from .lifetimes import Lifetime, allocated, lifetimes, main_device
from .reservation import Reservation, reserve
from .units import format_bytes

Category = Literal[
    "parameters", "gradients", "optimizer", "activations", "inputs", "buffers", "temporaries", "held"
]

CATEGORIES: tuple[Category, ...] = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "inputs",
    "buffers",
    "temporaries",
    "held",
)

_OF_ROLE: dict[str | None, Category] = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer": "optimizer",
    "buffer": "buffers",
    "input": "inputs",
}


@dataclass(frozen=True, slots=True)
class Allocation:
    """One storage that is alive at the peak.

    ``nbytes`` is its size in bytes; ``node`` made it at the line ``source`` (both ``None``
    if it is from outside the graph); ``module`` is where it was made, for one from outside
    where it was first used.  ``name`` is the recorder's name for it (a parameter's), or "".
    """

    nbytes: int
    category: Category
    node: Node | None
    module: str
    source: SourceLine | None
    name: str
    storage: Storage = field(repr=False)


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """How the batch would be cut: ``pieces`` of ``piece_sizes`` samples; 1 is the whole batch.

    ``blocked_by`` are the nodes that do not allow a cut.
    """

    pieces: int
    piece_sizes: Sequence[int] = ()
    blocked_by: Sequence[Node] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What running the graph would need on one device.  Sizes are bytes.

    Made from the record alone; nothing has run.

    Attributes:
        device: what the plan is for: ``"cpu"``, ``"cuda:0"`` or a profile's name.
        recorded_device: the device whose tensors were counted.
        peak_bytes: projected peak of allocated tensor memory of our run.
        peak_node: the node that reaches it (``None`` for an empty graph).
        reserved_bytes: what the CUDA caching allocator would hold at most, cuBLAS's workspace
            included; ``None`` on the CPU, which has none.
        eager_peak_bytes: what plain eager PyTorch would have peaked at on the same code.
        timeline: ``(node_index, allocated_bytes)`` during every node of our run.
        eager_timeline: the same for eager PyTorch.
        category_timeline: per category, the bytes during every node; they add up to ``timeline``.
        alive_at_peak: the storages alive at the peak, largest first.
        by_category: bytes per category at the peak, every category named.
        capacity_bytes: what the peak is compared with: on a real device the memory free now
            plus the counted tensors that are there already, for a profile the whole card;
            ``None`` if the driver does not say.
        fits: whether the peak is within the capacity, on a GPU what is reserved and the CUDA
            context; ``None`` if that is not known.
        max_batch_size: largest batch that fits; ``None``: no batch was named.
        split: how the batch is cut; one piece here.
    """

    device: str
    recorded_device: torch.device
    peak_bytes: int
    peak_node: Node | None
    reserved_bytes: int | None
    eager_peak_bytes: int
    timeline: Sequence[tuple[int, int]]
    eager_timeline: Sequence[tuple[int, int]]
    category_timeline: dict[Category, list[int]]
    alive_at_peak: Sequence[Allocation]
    by_category: dict[Category, int]
    capacity_bytes: int | None
    fits: bool | None
    max_batch_size: int | None
    split: SplitPlan
    _lifetimes: dict[Storage, Lifetime] = field(repr=False, compare=False)
    _profile: bool = field(repr=False, default=False)
    _reservation: Reservation | None = field(repr=False, compare=False, default=None)

    def __repr__(self) -> str:
        return f"<Plan for {self.device}: peak {format_bytes(self.peak_bytes)}, {_VERDICT[self.fits]}>"

    def lifetime(self, what: Storage | Value | Node) -> range:
        """The node indices during which our run holds ``what``.

        For a node, from its first to its last moment what it allocated.  Empty for what
        allocates nothing on the planned device (an in-place operator, a view).
        """
        if isinstance(what, Value):
            what = what.storage
        if isinstance(what, Storage):
            span = self._lifetimes.get(what)
            return range(max(span.start, 0), span.lazy_stop) if span is not None else range(0)
        made = [
            span
            for storage in dict.fromkeys(value.storage for value in what.outputs)
            if (span := self._lifetimes.get(storage)) is not None and span.maker is what
        ]
        if not made:
            return range(0)
        return range(made[0].start, max(span.lazy_stop for span in made))

    def explain(self) -> str:
        """The plan as text: the peak, where it is, what is alive there, whether it fits."""
        lines = [f"Projected peak on {self.device}: {format_bytes(self.peak_bytes)}"]
        if self.peak_node is not None:
            lines.append(f"  during {_where(self.peak_node)}")
            if self.peak_node.source is not None and self.peak_node.source.text:
                lines.append(f"    {self.peak_node.source.text.strip()}")
        lines.append(f"Plain eager PyTorch: {format_bytes(self.eager_peak_bytes)}")
        if self.peak_bytes:
            lines.append("Alive at the peak, by category:")
            lines += _table(
                {str(key): size for key, size in self.by_category.items()}, self.peak_bytes, len(CATEGORIES)
            )
            lines.append("by module:")
            by_module: dict[str, int] = {}
            for allocation in self.alive_at_peak:
                module = allocation.module or "(outside of a module)"
                by_module[module] = by_module.get(module, 0) + allocation.nbytes
            lines += _table(_fold(by_module), self.peak_bytes, 8)
            lines.append("largest:")
            for allocation in self.alive_at_peak[:5]:
                lines.append(f"  {format_bytes(allocation.nbytes):>10}  {_what(allocation)}")
        lines.append(self.verdict())
        if self._reservation is not None:
            lines.append(self._reserved())
        if self._profile or not _same_device(self.device, self.recorded_device):
            lines.append(
                f"The tensors are those recorded on {self.recorded_device}; {self.device} may choose "
                "other kernels that save other tensors."
            )
        return "\n".join(lines)

    def _reserved(self) -> str:
        reservation = self._reservation
        assert reservation is not None
        text = f"PyTorch's CUDA allocator would hold {format_bytes(reservation.reserved_bytes)} at most"
        if reservation.workspace_bytes:
            text += f", {format_bytes(reservation.workspace_bytes)} of it cuBLAS's workspace"
        if reservation.context_bytes:
            text += (
                f"; the CUDA context takes up to {format_bytes(reservation.context_bytes)} more (an estimate)"
            )
        return text + ". cuDNN's workspaces are not counted."

    def verdict(self) -> str:
        """Whether it fits, in one sentence."""
        if self.capacity_bytes is None:
            return f"Whether it fits is unknown: {self.device} does not tell its memory."
        room = format_bytes(self.capacity_bytes)
        if not self._profile:
            room += " free (tensors already there included)"
        if self.fits:
            return f"It fits: {self.device} has {room}."
        need, reservation = self.peak_bytes, self._reservation
        if reservation is not None:
            need = reservation.reserved_bytes + reservation.context_bytes
        text = f"It does not fit: {self.device} has {room}"
        if need > self.capacity_bytes:
            text += f", {format_bytes(need - self.capacity_bytes)} too little"
        failure = reservation.failure if reservation is not None else None
        if failure is not None:
            text += f"; an allocation of {format_bytes(failure.nbytes)} would fail"
        return text + "."


_VERDICT = {True: "fits", False: "does not fit", None: "unknown whether it fits"}


def make_plan(
    graph: Graph,
    *,
    device: str | torch.device | Device | DeviceProfile | None = None,
    batch_size: int | None = None,
    split: int | str | None = None,
    backend: str | None = None,
) -> Plan:
    """Plan ``graph`` for ``device`` without running it.

    ``device`` may be a real device, the name or object of a profile, or ``None`` for the one
    that holds most of the graph's bytes.  If the graph has tensors on the named device those
    are counted, else those of its main device, as if they lived on the named one.

    Raises ``ValueError`` for an unknown device and for what this version does not plan:
    another batch size, a split batch, a backend other than ``"eager"``.
    """
    if batch_size is not None:
        raise ValueError("Planning for another batch size (batch_size) is not available in this version.")
    if split not in (None, "off", 1):
        raise ValueError(f"Splitting the batch (split={split!r}) is not available in this version.")
    if backend not in (None, "eager"):
        raise ValueError(f"The backend {backend!r} is not available in this version, only 'eager'.")

    everywhere = lifetimes(graph)
    recorded = main_device(everywhere)
    target = resolve(device) if device is not None else _target_of(recorded)
    if isinstance(target, Device):
        for storage_device in {span.storage.device for span in everywhere}:
            if _same_device(target.name, storage_device):
                recorded = storage_device
                break

    spans = [span for span in everywhere if span.storage.device == recorded]
    count = len(graph.nodes)
    totals = allocated(spans, count)
    eager_totals = allocated(spans, count, eager=True)
    by_purpose: dict[Category, list[Lifetime]] = {category: [] for category in CATEGORIES}
    for span in spans:
        by_purpose[categorize(span)].append(span)
    peak_index = totals.index(max(totals)) if totals else None
    peak_bytes = totals[peak_index] if peak_index is not None else 0

    alive = []
    by_category: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
    if peak_index is not None:
        for category, members in by_purpose.items():
            at_peak = [span for span in members if span.storage.nbytes and span.alive(peak_index)]
            by_category[category] = sum(span.storage.nbytes for span in at_peak)
            alive += [_allocation(span, category) for span in at_peak]
    alive.sort(key=lambda allocation: -allocation.nbytes)

    room = capacity(target, sum(span.storage.nbytes for span in spans if _exists(span)))
    reservation = None
    card = target.context_bytes > 0 if isinstance(target, DeviceProfile) else target.name.startswith("cuda")
    if card:
        reservation = reserve(graph, spans, target, room)
    fits = None if room is None else peak_bytes <= room
    if room is not None and reservation is not None:
        fits = reservation.failure is None
    return Plan(
        device=target.name,
        recorded_device=recorded,
        peak_bytes=peak_bytes,
        peak_node=graph.nodes[peak_index] if peak_index is not None else None,
        reserved_bytes=reservation.reserved_bytes if reservation is not None else None,
        eager_peak_bytes=max(eager_totals, default=0),
        timeline=list(enumerate(totals)),
        eager_timeline=list(enumerate(eager_totals)),
        category_timeline={category: allocated(members, count) for category, members in by_purpose.items()},
        alive_at_peak=alive,
        by_category=by_category,
        capacity_bytes=room,
        fits=fits,
        max_batch_size=None,
        split=SplitPlan(pieces=1),
        _lifetimes={span.storage: span for span in spans},
        _profile=isinstance(target, DeviceProfile),
        _reservation=reservation,
    )


def _target_of(recorded: torch.device) -> Device | DeviceProfile:
    """The device the graph was recorded on, also one whose memory nobody can tell (``meta``)."""
    try:
        return resolve(recorded)
    except ValueError as error:
        return Device(str(recorded), recorded.type, None, None, None, str(error))


def categorize(span: Lifetime) -> Category:
    """What a storage is for: the recorder's word if it said one, else from its lifetime."""
    storage = span.storage
    if span.held:
        return "held"
    category = _OF_ROLE.get(storage.role)
    if category is not None:
        return category
    if span.maker is None:
        # State of an optimizer that has stepped before: no module and no data loader made it.
        in_optimizer = span.first_use is not None and span.first_use.phase == "optimizer"
        return "optimizer" if in_optimizer else "inputs"
    kept = storage.dropped is None
    phase = span.maker.phase
    if phase == "optimizer":
        return "optimizer" if kept else "temporaries"
    # Code outside of modules is "other": a loss written by hand is forward like any.
    if phase != "backward" and (kept or span.in_backward):
        return "activations"
    return "temporaries"


def _allocation(span: Lifetime, category: Category) -> Allocation:
    storage, maker = span.storage, span.maker
    place = maker if maker is not None else span.first_use
    return Allocation(
        nbytes=storage.nbytes,
        category=category,
        node=maker,
        module=_module_of(storage) or (place.module if place is not None else ""),
        source=maker.source if maker is not None else None,
        name=storage.name,
        storage=storage,
    )


# How many last parts of its name a storage has beyond its module: "h.0.attn.weight.exp_avg".
_NAME_PARTS = {"parameter": 1, "buffer": 1, "gradient": 2, "optimizer": 2}


def _module_of(storage: Storage) -> str:
    """The module a named storage belongs to, wherever it was made (optimizer state, say)."""
    parts = storage.name.split(".")
    return ".".join(parts[: -_NAME_PARTS.get(storage.role or "", len(parts))])


def _fold(by_module: dict[str, int]) -> dict[str, int]:
    """Modules that differ only in numbers as one: ``"h.*.mlp × 12"``; fewer than three stay as they are."""
    families: dict[str, list[str]] = {}
    for module in by_module:
        pattern = ".".join("*" if part.isdigit() else part for part in module.split("."))
        families.setdefault(pattern, []).append(module)
    folded: dict[str, int] = {}
    for pattern, modules in families.items():
        if len(modules) < 3:
            folded |= {module: by_module[module] for module in modules}
        else:
            folded[f"{pattern} × {len(modules)}"] = sum(by_module[module] for module in modules)
    return folded


def _exists(span: Lifetime) -> bool:
    """Whether the storage takes up memory at this moment, so that "free" excludes it."""
    if span.maker is not None:
        return span.maker.state == "done" and span.storage.dropped is None
    if not span.storage.external and span.first_use is not None:  # an earlier graph makes it
        makers = [value.node for value in span.first_use.inputs if value.storage is span.storage]
        return all(maker is None or maker.state == "done" for maker in makers)
    if span.storage.dropped is None:
        return True
    return span.last_use is not None and span.last_use.state != "done"


def _same_device(name: str, device: torch.device) -> bool:
    if device.type == "cuda" and device.index is None:
        return name in ("cuda", "cuda:0")
    return name == str(device)


def _where(node: Node) -> str:
    parts = [node.name]
    if node.module:
        parts.append(f"in {node.module}")
    if node.phase != "other":
        parts.append(f"({node.phase})")
    if node.source is not None:
        parts.append(f"at {_line(node.source)}")
    return " ".join(parts)


def _line(source: SourceLine) -> str:
    """``"line 3"`` of a cell, ``"train.py:3"`` of a file: what the user can look up."""
    return str(source) if source.in_cell else f"{os.path.basename(source.file)}:{source.line}"


def _what(allocation: Allocation) -> str:
    parts: list[str] = [allocation.category]
    if allocation.name:
        parts.append(allocation.name)
    if allocation.node is not None:
        parts.append(f"from {_where(allocation.node)}")
    elif allocation.module:
        parts.append(f"used in {allocation.module}")
    return ", ".join(parts)


def _table(sizes: dict[str, int], total: int, limit: int) -> list[str]:
    rows = sorted(((size, key) for key, size in sizes.items() if size), key=lambda row: (-row[0], row[1]))
    lines = [f"  {format_bytes(size):>10} {100 * size / total:3.0f} %  {key}" for size, key in rows[:limit]]
    rest = rows[limit:]
    if rest:
        size = sum(row[0] for row in rest)
        lines.append(f"  {format_bytes(size):>10} {100 * size / total:3.0f} %  {len(rest)} more")
    return lines
