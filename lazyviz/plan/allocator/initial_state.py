"""Initial state of the allocator: the GPU memory that this process already holds.

``torch.cuda.memory_snapshot()`` lists segments and blocks.  Some blocks are tensors that a plan also counts;
each of these is one block, and no bytes are counted twice.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..devices.device_lookup import Device, DeviceProfile
from ..liveness.lifetimes import Lifetime

Segment = Mapping[str, Any]


class Start(NamedTuple):
    """The allocator's ``segments`` on one GPU when the plan starts.

    ``blocks`` are the addresses of existing allocations, by name in the plan; ``again`` the addresses of
    existing allocations that the plan allocates at their nodes; ``foreign_bytes`` the bytes in blocks that do
    not belong to the plan.
    """

    segments: Sequence[Segment]
    blocks: Mapping[Hashable, int]
    again: Sequence[int]
    foreign_bytes: int


EMPTY = Start((), {}, (), 0)


def segments_on(target: Device | DeviceProfile) -> Sequence[Segment]:
    """The allocator's segments on a real GPU that this process uses; none for any other device."""
    if isinstance(target, DeviceProfile) or not target.name.startswith("cuda"):
        return ()
    if not torch.cuda.is_initialized():
        return ()
    index = int(target.name.partition(":")[2] or 0)
    return [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == index]


def nbytes_of(segments: Iterable[Segment]) -> int:
    return sum(segment["total_size"] for segment in segments)


def exists(span: Lifetime) -> bool:
    """Whether the storage occupies memory now, so that "free" excludes it."""
    if span.maker is not None:
        return span.storage.dropped is None and span.maker.state == "done"
    if not span.storage.external and span.first_use is not None:  # an earlier graph creates it
        origin = span.storage.origin
        makers = [value.node for value in span.first_use.inputs if value.storage.origin is origin]
        return all(maker is None or maker.state == "done" for maker in makers)
    if span.storage.dropped is None:
        return True
    return span.last_use is not None and span.last_use.state != "done"


def start(
    segments: Sequence[Segment], spans: Iterable[Lifetime], workspaces: Iterable[tuple[str, int]]
) -> Start:
    """Assign the plan's storages, and library workspaces (name, bytes), to blocks in ``segments``.

    A storage is found by its recorded address. If there is none, any unassigned block of the same size
    represents it, so that the bytes are correct even if the position is not.
    """
    if not segments:
        return EMPTY
    free: dict[int, int] = {}  # unassigned blocks: address -> requested bytes
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                free[address] = block["requested_size"]
            address += block["size"]
    blocks: dict[Hashable, int] = {}
    again: list[int] = []
    unplaced = []
    for span in spans:
        if not span.storage.nbytes or span.storage.device.type != "cuda" or not exists(span):
            continue
        if span.maker is None and span.storage.place in free:
            blocks[span.storage] = span.storage.place
            del free[span.storage.place]
        else:
            unplaced.append(span)
    by_size: dict[int, list[int]] = {}
    for address, nbytes in free.items():
        by_size.setdefault(nbytes, []).append(address)
    for span in unplaced:
        if alike := by_size.get(span.storage.nbytes):
            if span.maker is None:
                blocks[span.storage] = alike.pop()
            else:
                again.append(alike.pop())
    for name, nbytes in workspaces:
        if alike := by_size.get(nbytes):
            blocks[name] = alike.pop()
    return Start(segments, blocks, again, sum(size * len(alike) for size, alike in by_size.items()))
