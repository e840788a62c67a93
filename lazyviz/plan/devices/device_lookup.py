"""Device look-up: those of this machine, and profiles of absent GPUs, by name.

A missing driver, a missing GPU, or a failing driver is described as text (:attr:`Devices.cuda_state`) and
never raises an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import torch

from ..units import format_bytes, parse_bytes
from . import cuda_context
from .known_gpus import PROFILES as PROFILES
from .known_gpus import WELL_KNOWN
from .known_gpus import DeviceProfile as DeviceProfile
from .known_gpus import lookup as lookup
from .nvml import Device as Device
from .nvml import LiveMemory
from .nvml import cuda_devices as cuda_devices

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None  # type: ignore[assignment]


DeviceLike: TypeAlias = str | torch.device | Device | DeviceProfile
"""A device to plan for: a device, a profile, or the name of either."""


class Devices(list["Device | DeviceProfile"]):
    """Real devices first, then known profiles; prints as a table.

    ``cuda_state`` describes the state of NVML as text.
    """

    def __init__(self, items: Iterable[Device | DeviceProfile], cuda_state: str) -> None:
        super().__init__(items)
        self.cuda_state = cuda_state

    def __repr__(self) -> str:
        lines = [f"NVIDIA: {self.cuda_state}"]
        width = max((len(item.name) for item in self), default=0)
        for item in self:
            if isinstance(item, Device):
                if item.total_bytes is None or item.free_bytes is None:
                    sizes = item.state
                else:
                    sizes = f"{format_bytes(item.free_bytes)} free of {format_bytes(item.total_bytes)}"
                    if item.other_bytes:
                        sizes += f", {format_bytes(item.other_bytes)} used by other processes"
                lines.append(f"{item.name:<{width}} {sizes}  ({item.model})")
            else:
                lines.append(
                    f"{item.name:<{width}} {format_bytes(item.total_bytes)}  (profile; {item.source})"
                )
        return "\n".join(lines)


def devices() -> Devices:
    """The devices of this machine (CUDA through NVML, then the CPU) and the known profiles."""
    gpus, state = cuda_devices()
    return Devices([*gpus, cpu_device(), *PROFILES.values()], state)


def resolve(device: str | torch.device | Device | DeviceProfile) -> Device | DeviceProfile:
    """The device or profile that ``device`` names: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, or a profile.

    ``"cpu:2GiB"`` is the host with a memory limit of 2 GiB for tensors.

    Raises ``ValueError`` for an unknown name, or a CUDA device that this machine lacks.
    """
    if isinstance(device, (Device, DeviceProfile)):
        return device
    name = str(device)
    if name == "cpu":
        return cpu_device()
    if name.startswith("cpu:") and not name[4:].isdecimal():
        return DeviceProfile("cpu", parse_bytes(name[4:]))
    if (position := gpu_number(name)) is not None:
        gpus, state = cuda_devices()
        if name == "cuda" and cuda_context.exists():
            position = torch.cuda.current_device()
        for gpu in gpus:
            if gpu.name == f"cuda:{position}":
                return gpu
        raise ValueError(
            f"There is no device {name!r} on this machine ({state}). "
            f"To plan for an absent GPU, name a profile such as {' or '.join(WELL_KNOWN[:2])}."
        )
    return lookup(name)


def planned(device: DeviceLike) -> Device | DeviceProfile:
    """Like :func:`resolve`, except that on a machine without a GPU, ``"cuda"`` is an unknown GPU.

    A plan for it can say what is needed and compare it with a budget, but not whether it fits.

    Raises ``ValueError`` for an unknown name, and for a device number that this machine does not have.
    """
    try:
        return resolve(device)
    except ValueError:
        number = gpu_number(device)
        gpus, state = cuda_devices()
        if number is None or gpus:
            raise
        return unknown_gpu(number, state)


def with_context_of(
    target: Device | DeviceProfile, release: tuple[int, int] | None
) -> Device | DeviceProfile:
    """``target`` with the CUDA context of a PyTorch release, unless the profile has a size of its own."""
    if release is None or not isinstance(target, DeviceProfile):
        return target
    if target.context_bytes != cuda_context.CONTEXT_BYTES:
        return target
    return replace(target, context_bytes=cuda_context.of_release(release))


def is_absent(target: Device | DeviceProfile) -> bool:
    """Whether it is a GPU that is not on this machine, so that lazyviz cannot evaluate there.

    A profile always counts as absent, whatever is in the machine; ``"cpu:2GiB"`` is the host.
    """
    if isinstance(target, DeviceProfile):
        return target.name != "cpu"
    named = gpu_number(target.name) is not None and target.total_bytes is None
    return named and not torch.cuda.is_available()


def gpu_number(device: object) -> int | None:
    """The number in ``"cuda"`` or ``"cuda:1"``; ``None`` for anything else."""
    kind, _, index = str(device).partition(":")
    if kind != "cuda" or not (not index or (index.isdecimal() and index.isascii())):
        return None
    return int(index or 0)


def unknown_gpu(number: int, state: str) -> Device:
    """The device ``cuda`` on a machine without a GPU."""
    return Device(f"cuda:{number}", "an unknown CUDA GPU", None, None, None, state)


def cpu_device() -> Device:
    """The host, with its memory or the limit of this container or process; unknown if the system does not
    tell it, as Linux does not without /proc.
    """
    known = _system_memory()
    model = "system memory"
    limited = _cgroup_memory()
    if limited is not None and (known is None or limited[0] < known[0]):
        known = limited[0], limited[1] if known is None else min(known[1], limited[1])
        model = "memory limit of this container"
    for limit, used in _own_limits():
        if known is None or limit - used < known[1]:
            known = limit, max(limit - used, 0)
            model = "memory limit of this process"
    if known is None:
        return Device("cpu", "unknown memory", None, None, None)
    total, free = known
    return Device("cpu", model, total, free, total - free)


_UNREADABLE = (OSError, ValueError, KeyError, RuntimeError)  # of psutil, where /proc is missing or incomplete


def _system_memory() -> tuple[int, int] | None:
    """``(total, available)`` in bytes."""
    import psutil  # imported on use, so that lazyviz is imported faster

    try:
        memory = psutil.virtual_memory()
    except (psutil.Error, *_UNREADABLE):
        return None
    return memory.total, memory.available


@contextmanager
def memory_in_use(device: torch.device) -> Iterator[Callable[[], tuple[int, int] | None]]:
    """A function that returns ``(used, total)`` bytes of a device, for all processes; ``None`` if unknown."""
    if device.type == "cuda":
        live = LiveMemory(device.index or 0)
        try:
            yield live.read
        finally:
            live.close()
        return

    def read() -> tuple[int, int] | None:
        cpu = cpu_device()
        return (
            None if cpu.used_bytes is None or cpu.total_bytes is None else (cpu.used_bytes, cpu.total_bytes)
        )

    yield read if device.type == "cpu" else lambda: None


def _own_limits() -> Iterator[tuple[int, int]]:
    """``(limit, used)`` in bytes of each limit of this process on memory (``setrlimit``)."""
    if resource is None:
        return
    import psutil

    try:
        memory = psutil.Process().memory_info()
    except (psutil.Error, *_UNREADABLE):
        return
    for name, used in (("RLIMIT_AS", memory.vms), ("RLIMIT_DATA", getattr(memory, "data", memory.vms))):
        limit = resource.getrlimit(getattr(resource, name))[0]
        if limit != resource.RLIM_INFINITY:
            yield limit, used


def _cgroup_memory(root: Path = Path("/sys/fs/cgroup")) -> tuple[int, int] | None:
    """``(limit, still available)`` in bytes of this process's control group, if it has a limit."""
    for limit_file, usage_file, stat_file, cache in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        try:
            limit = int((root / limit_file).read_text())  # "max" if there is no limit
            used = int((root / usage_file).read_text())
            stat = (root / stat_file).read_text()
        except (OSError, ValueError):
            continue
        # Page cache is reclaimed under memory pressure, so it counts as available.
        for line in stat.splitlines():
            key, _, number = line.partition(" ")
            if key == cache:
                used -= int(number)
        return limit, max(limit - used, 0)
    return None


def capacity(device: Device | DeviceProfile, counted_bytes: int) -> int | None:
    """Bytes that a plan for ``device`` may use; ``None`` if the driver does not report them.

    The peak of a plan counts tensors that already exist (parameters, inputs) and tensors that will be
    allocated.  On a real device, the former are part of the used memory.  Therefore the peak is compared with
    *the current free memory plus the counted tensors that already exist* (``counted_bytes``), plus unused
    memory held by PyTorch's CUDA allocator, limited by ``torch.cuda.set_per_process_memory_fraction``.
    A profile represents an empty GPU, so all of its memory counts.
    """
    if isinstance(device, DeviceProfile):
        return device.total_bytes
    if device.free_bytes is None:
        return None
    spare = 0
    if device.name.startswith("cuda") and cuda_context.exists():
        index = int(device.name.partition(":")[2])
        allocated = torch.cuda.memory_allocated(index)
        spare = torch.cuda.memory_reserved(index) - allocated
        fraction = torch.cuda.get_per_process_memory_fraction(index)
        if device.total_bytes is not None and fraction < 1:  # torch.cuda.set_per_process_memory_fraction
            spare = min(spare, int(fraction * device.total_bytes) - allocated - device.free_bytes)
    return max(device.free_bytes + counted_bytes + spare, 0)
