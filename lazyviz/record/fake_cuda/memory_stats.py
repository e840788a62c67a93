"""Memory statistics of an absent GPU: ``torch.cuda`` counters, and pinned host memory."""

from __future__ import annotations

from typing import Any

import torch

from ..sync_points import AbsentDeviceError
from .fake_gpus_protocol import Gpus


def install(gpus: Gpus) -> None:
    _install_counters(gpus)
    _install_pinning(gpus)


def _install_counters(gpus: Gpus) -> None:
    """The memory of eager PyTorch's tensors, and of the simulated allocator, at this line."""
    cuda, replace = torch.cuda, gpus.replace

    def counted(device: Any = None) -> tuple[int, int]:
        return gpus.memory(torch.device("cuda", gpus.index(device)), gpus.reset_at)

    def reserved(device: Any = None) -> int:
        return gpus.reserved(torch.device("cuda", gpus.index(device)))

    def free_and_total(device: Any = None) -> tuple[int, int]:
        total = gpus.properties(device).total_memory
        return total - counted(device)[0], total

    def summary(device: Any = None, abbreviated: bool = False) -> str:
        now, peak = counted(device)
        return (
            f"Projected for {gpus.gpu.planned}, which is not on this machine, in bytes: "
            f"allocated {now:,}, at most {peak:,}; held by the allocator {reserved(device):,}"
        )

    def reset(device: Any = None) -> None:
        graph = gpus.tape.recording.graph
        gpus.reset_at = len(graph.nodes) if graph is not None else 0

    fraction_of: dict[int, float] = {}

    def set_fraction(fraction: float, device: Any = None) -> None:
        fraction_of[gpus.index(device)] = fraction

    def fraction(device: Any = None) -> float:
        return fraction_of.get(gpus.index(device), 1.0)

    for owner in (cuda, cuda.memory, torch.accelerator, torch.accelerator.memory):
        replace(owner, "memory_allocated", lambda device=None: counted(device)[0])
        replace(owner, "max_memory_allocated", lambda device=None: counted(device)[1])
        # nothing is given back to the driver before an allocation fails
        replace(owner, "memory_reserved", reserved)
        replace(owner, "max_memory_reserved", reserved)
        replace(owner, "memory_summary", summary)
        replace(owner, "mem_get_info", free_and_total)
        replace(owner, "get_memory_info", free_and_total)
        replace(owner, "reset_peak_memory_stats", reset)
        replace(owner, "reset_max_memory_allocated", reset)
        for name in _WITHOUT_EFFECT:
            replace(owner, name, lambda device=None: None)
        replace(owner, "set_per_process_memory_fraction", set_fraction)
        replace(owner, "get_per_process_memory_fraction", fraction)
        for name in ("memory_stats", "memory_stats_as_nested_dict", "memory_snapshot"):
            replace(owner, name, _unknown(f"{owner.__name__}.{name}"))


_WITHOUT_EFFECT = [
    "empty_cache",
    "empty_host_cache",
    "reset_accumulated_memory_stats",
    "reset_accumulated_host_memory_stats",
    "reset_peak_host_memory_stats",
]


def _unknown(what: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AbsentDeviceError(
            f"{what}() is not available for a GPU that is not on this machine; "
            "memory_allocated() and memory_reserved() are."
        )

    return refuse


def _install_pinning(gpus: Gpus) -> None:
    """Replace the pinning of host memory, which needs a driver, by a copy, which pinning makes as well."""
    asked = torch.Tensor.is_pinned

    def pin(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        if is_pinned(tensor):
            return tensor
        pinned = tensor.clone()
        pinned._lazyviz_pinned = True  # type: ignore[attr-defined]
        return pinned

    def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
        attributes = vars(tensor)
        return "_lazyviz_pinned" in attributes or ("_lazyviz" not in attributes and asked(tensor))

    gpus.replace(torch.Tensor, "pin_memory", pin)
    gpus.replace(torch.Tensor, "is_pinned", is_pinned)
