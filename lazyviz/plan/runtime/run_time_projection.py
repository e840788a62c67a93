"""Run time of a graph, projected for a device: a GPU by its rates, this CPU by its calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from ...graph.ir import Bound, Graph, Node
from ..devices.device_lookup import Device, DeviceProfile, planned
from ..devices.known_gpus import PROFILES
from .cpu_op_times import known_rates, project_on_cpu, without_time_on_cpu
from .gpu_kernel_times import Gpu, kernel_time, times_on
from .gpu_timeline import Projection, project


def project_on(nodes: Sequence[Node], target: Device | DeviceProfile) -> Projection | None:
    """The time of ``nodes`` on ``target``; ``None`` if too little is known about either."""
    if target.name == "cpu":
        rates = known_rates()
        return project_on_cpu(nodes, rates) if rates is not None else None
    gpu = gpu_of(target)
    return project(nodes, gpu) if gpu is not None else None


def without_time(nodes: Sequence[Node], target: Device | DeviceProfile) -> list[Node]:
    """Those of ``nodes`` of unknown duration on ``target``; none if nothing is known about that."""
    if target.name == "cpu":
        return without_time_on_cpu(nodes) if known_rates() is not None else []
    gpu = gpu_of(target)
    if gpu is None:
        return []
    times = times_on(gpu)
    return [node for node in nodes if kernel_time(node, gpu, times) is None]


class NodeTime(NamedTuple):
    """The projected seconds of one recorded op, and their bound."""

    seconds: float
    bound: Bound


# For each graph, the number of its nodes when it was projected, and the times by position. A stored
# projection would keep the graph alive.
_projected: WeakKeyDictionary[Graph, tuple[int, Mapping[int, NodeTime]]] = WeakKeyDictionary()


def time_of_node(node: Node, graph: Graph) -> NodeTime | None:
    """The projected time of one op of ``graph``, on the device that the graph is recorded for.

    The graph is projected once, and again when it has more nodes or the host has been calibrated in the
    meantime.
    """
    known = _projected.get(graph)
    if known is None or known[0] != len(graph.nodes) or not known[1]:
        try:
            target = planned(graph.gpu or _device_of(graph))
        except ValueError:  # a user-defined profile, whose name has no meaning
            return None
        found = project_on(graph.nodes, target)
        times = {each.node.index: NodeTime(each.seconds, each.bound) for each in found.ops} if found else {}
        known = _projected[graph] = len(graph.nodes), times
    return known[1].get(node.index)


def _device_of(graph: Graph) -> str:
    """The device of most outputs of the graph."""
    counts: dict[str, int] = {}
    for node in graph.nodes:
        for value in node.outputs:
            name = str(value.device)
            counts[name] = counts.get(name, 0) + 1
    return max(counts, key=lambda name: counts[name], default="cpu")


def gpu_of(target: Device | DeviceProfile) -> Gpu | None:
    """The known rates of a GPU, with the current TF32 settings; ``None`` for other devices."""
    profile = target if isinstance(target, DeviceProfile) else _profile_of(target)
    if profile is None or profile.rates is None:
        return None
    return Gpu(
        profile.name,
        profile.rates,
        profile.compute_capability,
        torch.get_float32_matmul_precision() != "highest",
        bool(torch.backends.cudnn.allow_tf32),
    )


def _profile_of(device: Device) -> DeviceProfile | None:
    """The profile whose name is part of the driver's name for a present GPU, and whose memory has the same
    size.
    """
    if device.total_bytes is None or not device.name.startswith("cuda"):
        return None
    model = _plain(device.model)
    near = [
        profile
        for name, profile in PROFILES.items()
        if _plain(_without_size(name)) in model and abs(profile.total_bytes / device.total_bytes - 1) < 0.1
    ]
    return max(near, key=lambda profile: len(_without_size(profile.name)), default=None)


def _without_size(name: str) -> str:
    head, _, tail = name.rpartition("-")
    return head if tail.endswith("GB") else name


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
