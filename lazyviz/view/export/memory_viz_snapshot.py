"""Memory snapshot export: the projected timeline for pytorch.org/memory_viz and torch's own tools.

The keys are those that ``torch.cuda.memory._snapshot`` documents.  Frames describe the node instead of a
stack: the operator at the user's line, its modules from the inside out, and the category of the memory.  The
additional key ``"lazyviz"`` says that nothing was measured.
"""

from __future__ import annotations

import os
from typing import Any

from ...graph.ir import Node, Storage
from ...graph.modules import full_name, root_name
from ...plan.allocator.alloc_conf_and_rounding import SMALL_LIMIT
from ...plan.allocator.memory_history import Entry, trace
from ...plan.liveness.live_set_and_categories import categorize
from ...plan.plan import Plan

Frames = list[dict[str, Any]]


def memory_snapshot(plan: Plan, *, eager: bool = False) -> dict[str, Any]:
    """The dictionary to pickle: one trace, of the plan's device (0 if it has no number).

    ``eager``: the timeline of eager PyTorch instead of lazyviz's run.
    """
    if eager and plan.split.pieces > 1:
        plan = plan.replan(plan.batch_size)  # eager PyTorch runs the whole batch
    recorded = trace(plan, eager=eager)
    device = _index(plan)
    frames = _Frames(plan)
    entries = [_entry(entry, frames) for entry in recorded.entries]
    segments = []
    for blocks in recorded.segments:
        mapped = [block for block in blocks if block.mapped]
        if not mapped:
            continue
        found = []
        for block in mapped:
            owner = recorded.owners.get(block.address) if block.used else None
            found.append(
                {
                    "address": block.address,
                    "size": block.size,
                    "requested_size": block.requested,
                    "state": "active_allocated" if block.used else "inactive",
                    "frames": frames.of(*owner) if owner is not None else [],
                }
            )
        used = sum(block.size for block in mapped if block.used)
        total = sum(block.size for block in mapped)
        segments.append(
            {
                "device": device,
                "address": mapped[0].address,
                "total_size": total,
                "allocated_size": used,
                "active_size": used,
                "requested_size": sum(block.requested for block in mapped),
                "stream": 0,
                "segment_type": "small" if mapped[0].pool.small else "large",
                "segment_pool_id": (0, 0),
                "is_expandable": mapped[0].range is not None,
                "frames": [],
                "blocks": found,
            }
        )
    return {
        "segments": segments,
        "device_traces": [*([] for _ in range(device)), entries],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
            "small_limit": SMALL_LIMIT,
        },
        "lazyviz": {
            "what": "projected without running: times are node numbers, addresses are simulated",
            "timeline": "plain eager PyTorch" if eager or plan.verdict_of == "eager" else "a lazyviz run",
            "device": plan.device,
            "recorded_device": str(plan.recorded_device),
            "peak_bytes": plan.eager_peak_bytes if eager else plan.peak_bytes,
            "reserved_bytes": plan.eager_reserved_bytes if eager else plan.reserved_bytes,
        },
    }


def _index(plan: Plan) -> int:
    name, _, number = plan.device.partition(":")
    return int(number) if name == "cuda" and number.isdigit() else 0


def _entry(entry: Entry, frames: _Frames) -> dict[str, Any]:
    found = frames.of(entry.key, entry.position) if entry.key else frames.at(entry.position)
    return {
        "action": entry.action,
        "addr": entry.address,
        "size": entry.nbytes,
        "stream": 0,
        "pool_id": (0, 0),
        "time_us": max(entry.position, 0),
        "frames": found,
    }


class _Frames:
    """Frames, innermost first, created once for each node and storage."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._nodes: dict[int, Frames] = {}
        self._storages: dict[Storage, Frames] = {}

    def at(self, position: int) -> Frames:
        """The frames of the node at a position of the timeline."""
        nodes = self._plan._nodes
        if not 0 <= position < len(nodes):
            return [_frame("before the run" if position < 0 else "after the run")]
        if position not in self._nodes:
            self._nodes[position] = _of_node(nodes[position])
        return self._nodes[position]

    def of(self, key: object, position: int) -> Frames:
        """The origin of a storage: the node that allocated it, or the name of an external tensor."""
        if not isinstance(key, Storage):
            return [_frame(str(key)), *self.at(position)]
        if key not in self._storages:
            span = self._plan._lifetimes[key]
            purpose = [_frame(f"({categorize(span)})")]
            if span.maker is not None:
                self._storages[key] = self.at(span.start) + purpose
            else:
                self._storages[key] = [_frame(full_name(key.name) or "from outside"), *purpose]
        return self._storages[key]


def _of_node(node: Node) -> Frames:
    source = node.source
    file, line = (source.file, source.line) if source is not None else ("", 0)
    # The innermost frame is complete by itself, because lists of frames are often truncated after it.
    frames = [_frame(f"{node.module}: {node.name}" if node.module else node.name, file, line)]
    parts = node.module.split(".") if node.module else []
    frames += [_frame(".".join(parts[:depth])) for depth in range(len(parts), 0, -1)]
    if node.root:
        frames.append(_frame(root_name(node.root)))
    return [*frames, _frame(node.phase, file, line)]


def _frame(name: str, filename: str = "", line: int = 0) -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}
