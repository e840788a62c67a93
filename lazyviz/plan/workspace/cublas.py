"""Workspace of cuBLAS: one for each handle and stream, from the caching allocator, which is kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...graph.ir import Node
from ...torch_internals.private_api import OpOverload
from ..devices.device_lookup import Device, DeviceProfile
from ..liveness.lifetimes import nodes_with

# ATen's CublasHandlePool.cpp: 2 x 4096 KiB + 8 x 16 KiB, or 32 MiB for compute capability 9, 10 and 12;
# one per handle and stream, from the caching allocator, at the first call, kept.
CUBLAS_WORKSPACE_BYTES = (2 * 4096 + 8 * 16) * 1024
LARGE_CUBLAS_WORKSPACE_BYTES = 32 * 2**20
_LARGE_WORKSPACE = ("H100", "H200", "GH200", "B100", "B200", "GB200", "B300", "RTX-50", "RTX-PRO")
_CALL_CUBLAS = {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "addr", "linear"}


def cublas_workspaces(
    nodes: Sequence[Node], target: Device | DeviceProfile, *, eager: bool
) -> list[tuple[int, int]]:
    """(Position, bytes) of each cuBLAS workspace: eager's backward pass has its own thread, and its own
    handle.
    """
    large = target.name.startswith(_LARGE_WORKSPACE)
    if target.present and torch.cuda.is_initialized():
        large = torch.cuda.get_device_capability(target.name)[0] >= 9
    size = LARGE_CUBLAS_WORKSPACE_BYTES if large else CUBLAS_WORKSPACE_BYTES
    first: dict[bool, Node] = {}
    for node in nodes_with(nodes, _calls_cublas):
        first.setdefault(eager and node.phase == "backward", node)
        if len(first) == 2 or not eager:
            break
    return [(nodes.index(node), size) for node in first.values()]


def _calls_cublas(op: OpOverload) -> bool:
    return op._schema.name.rpartition("::")[2] in _CALL_CUBLAS
