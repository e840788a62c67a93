"""Where a graph could run: the devices of this machine, and known cards that are absent.

Real NVIDIA devices are read through NVML, which works without a CUDA build of PyTorch and
creates no CUDA context; a machine without a driver, without a GPU or with a driver that
fails is described in words (:attr:`Devices.cuda_state`), never an exception.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pynvml
import torch

from .units import format_bytes

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Device:
    """A device of this machine, as it was when asked; sizes in bytes.

    ``name`` is what ``%%lazy --device`` takes (``"cpu"``, ``"cuda:0"``); ``free_bytes`` is
    what a new allocation could get now.  Sizes are ``None`` if the driver did not say.
    """

    name: str
    model: str
    total_bytes: int | None
    free_bytes: int | None
    used_bytes: int | None
    state: str = "ready"

    @property
    def present(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """A kind of card to plan for, present or not.

    ``total_bytes`` is its memory in bytes, ``source`` says where that number is from.
    ``context_bytes`` is what a CUDA context takes of it: with it a plan compares what PyTorch's
    caching allocator would hold with the rest of the memory, without it (0) tensors with all of it.
    """

    name: str
    total_bytes: int
    source: str = "given by the user"
    context_bytes: int = 0

    def __post_init__(self) -> None:
        if self.total_bytes <= 0:
            raise ValueError(f"A device profile needs a positive total_bytes, got {self.total_bytes}.")

    @property
    def present(self) -> bool:
        return False


CONTEXT_BYTES = 600 * _MIB
"""Estimate of what a CUDA context takes, on the safe side: reports say 300 to 430 MiB with lazily
loaded kernels (pytorch issues 107667 and 109888), growing with the kernels a program uses."""


def _profile(name: str, mib: int, datasheet: str) -> DeviceProfile:
    return DeviceProfile(name, mib * _MIB, f"{datasheet}; nvidia-smi shows {mib} MiB", CONTEXT_BYTES)


# Memory as the driver reports it, which is what a program can get: up to 7 % more or less
# than the "GB" on the box, depending on ECC and on what the vendor means by a gigabyte.
PROFILES: dict[str, DeviceProfile] = {
    profile.name: profile
    for profile in (
        _profile("A100-40GB", 40960, "NVIDIA A100 datasheet: 40 GB HBM2"),
        _profile("A100-80GB", 81920, "NVIDIA A100 datasheet: 80 GB HBM2e"),
        _profile("A10-24GB", 23028, "NVIDIA A10 datasheet: 24 GB GDDR6, ECC on"),
        _profile("H100-80GB", 81559, "NVIDIA H100 datasheet: 80 GB HBM3"),
        _profile("H200-141GB", 143771, "NVIDIA H200 datasheet: 141 GB HBM3e"),
        _profile("L4-24GB", 23034, "NVIDIA L4 datasheet: 24 GB GDDR6, ECC on"),
        _profile("L40S-48GB", 46068, "NVIDIA L40S datasheet: 48 GB GDDR6, ECC on"),
        _profile("T4-16GB", 15360, "NVIDIA T4 datasheet: 16 GB GDDR6, ECC on"),
        _profile("V100-16GB", 16384, "NVIDIA V100 datasheet: 16 GB HBM2"),
        _profile("V100-32GB", 32768, "NVIDIA V100 datasheet: 32 GB HBM2"),
        _profile("RTX-3060", 12288, "GeForce RTX 3060 specifications: 12 GB GDDR6"),
        _profile("RTX-3090", 24576, "GeForce RTX 3090 specifications: 24 GB GDDR6X"),
        _profile("RTX-4090", 24564, "GeForce RTX 4090 specifications: 24 GB GDDR6X"),
        _profile("RTX-5090", 32607, "GeForce RTX 5090 specifications: 32 GB GDDR7"),
    )
}


class Devices(list["Device | DeviceProfile"]):
    """Real devices first, then known profiles; prints as a table.

    ``cuda_state`` says in words what NVML answered.
    """

    def __init__(self, items: Iterable[Device | DeviceProfile], cuda_state: str) -> None:
        super().__init__(items)
        self.cuda_state = cuda_state

    def __repr__(self) -> str:
        lines = [f"NVIDIA: {self.cuda_state}"]
        for item in self:
            if isinstance(item, Device):
                if item.total_bytes is None or item.free_bytes is None:
                    sizes = item.state
                else:
                    sizes = f"{format_bytes(item.free_bytes)} free of {format_bytes(item.total_bytes)}"
                lines.append(f"{item.name:<12} {sizes}  ({item.model})")
            else:
                lines.append(f"{item.name:<12} {format_bytes(item.total_bytes)}  (profile; {item.source})")
        return "\n".join(lines)


def devices() -> Devices:
    """The devices of this machine (CUDA through NVML, then the CPU) and the known profiles."""
    gpus, state = cuda_devices()
    return Devices([*gpus, cpu_device(), *PROFILES.values()], state)


def lookup(name: str) -> DeviceProfile:
    """The known profile called ``name`` (case does not matter).

    Raises ``ValueError`` naming the nearest known ones if there is none.
    """
    by_lower = {known.lower(): profile for known, profile in PROFILES.items()}
    profile = by_lower.get(name.lower())
    if profile is not None:
        return profile
    # A name without its memory size ("H100") is a prefix of what is meant.
    wanted = name.lower()
    near = [known for known in PROFILES if wanted and known.lower().startswith(wanted)]
    close = difflib.get_close_matches(wanted, by_lower, n=3, cutoff=0.5)
    near += [by_lower[match].name for match in close if by_lower[match].name not in near]
    hint = f"did you mean {' or '.join(near[:3])}?" if near else f"known: cpu, cuda, {', '.join(PROFILES)}."
    raise ValueError(f"Unknown device {name!r}; {hint}")


def resolve(device: str | torch.device | Device | DeviceProfile) -> Device | DeviceProfile:
    """What ``device`` names: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, a profile's name or object.

    Raises ``ValueError`` for an unknown name or a CUDA device that this machine lacks.
    """
    if isinstance(device, (Device, DeviceProfile)):
        return device
    name = str(device)
    kind, _, index = name.partition(":")
    if name == "cpu":
        return cpu_device()
    if kind == "cuda" and (not index or index.isdigit()):
        gpus, state = cuda_devices()
        if index:
            position = int(index)
        else:
            position = torch.cuda.current_device() if _cuda_in_use() else 0
        for gpu in gpus:
            if gpu.name == f"cuda:{position}":
                return gpu
        raise ValueError(
            f"There is no device {name!r} on this machine ({state}); "
            f"name a profile to plan for a card that is absent: {', '.join(PROFILES)}."
        )
    return lookup(name)


def cpu_device() -> Device:
    """The host's memory, or the container's where a control group limits it to less."""
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    model = "system memory"
    limited = _cgroup_memory()
    if limited is not None and limited[0] < total:
        total = limited[0]
        free = min(free, limited[1])
        model = "memory limit of this container"
    return Device("cpu", model, total, free, total - free)


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
            limit = int((root / limit_file).read_text())  # "max" where there is none
            used = int((root / usage_file).read_text())
            stat = (root / stat_file).read_text()
        except (OSError, ValueError):
            continue
        # Page cache is given back under pressure, so it is not in the way.
        for line in stat.splitlines():
            key, _, number = line.partition(" ")
            if key == cache:
                used -= int(number)
        return limit, max(limit - used, 0)
    return None


def cuda_devices() -> tuple[list[Device], str]:
    """This process's CUDA devices, numbered as PyTorch numbers them, and NVML's state in words."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [], _nvml_words(error)
    try:
        return _read_nvml()
    except pynvml.NVMLError as error:
        return [], _nvml_words(error)
    finally:
        pynvml.nvmlShutdown()


def _nvml_words(error: Any) -> str:
    code = getattr(error, "value", None)
    if code in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
        return "no NVIDIA driver on this machine"
    return f"the NVIDIA driver does not answer: {error}"


def _read_nvml() -> tuple[list[Device], str]:
    handles = _handles()
    if not handles:
        return [], "driver present, no GPU visible"
    found = []
    for index, handle in enumerate(handles):
        name = f"cuda:{index}"
        try:
            model = pynvml.nvmlDeviceGetName(handle)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        except pynvml.NVMLError as error:
            found.append(Device(name, "NVIDIA GPU", None, None, None, _nvml_words(error)))
            continue
        if isinstance(model, bytes):
            model = model.decode()
        found.append(Device(name, model, int(memory.total), int(memory.free), int(memory.used)))
    return found, f"{len(found)} GPU{'s' if len(found) > 1 else ''}"


def _handles() -> list[Any]:
    """NVML handles in PyTorch's order.

    NVML counts every card in PCI order; PyTorch counts those that CUDA_VISIBLE_DEVICES
    leaves, fastest first, so cards are matched by their UUID.  A PyTorch without CUDA has
    no order of its own: NVML's is used.
    """
    if not torch.cuda.is_available():
        return [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    handles = []
    for index in range(torch.cuda.device_count()):
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        if not uuid.startswith(("GPU-", "MIG-")):  # PyTorch leaves the prefix out
            uuid = f"GPU-{uuid}"
        handles.append(pynvml.nvmlDeviceGetHandleByUUID(uuid))
    return handles


def _cuda_in_use() -> bool:
    """Whether this process has a CUDA context; asking for more would create one."""
    return bool(torch.cuda.is_initialized())


def capacity(device: Device | DeviceProfile, counted_bytes: int) -> int | None:
    """Bytes that a plan for ``device`` may use; ``None`` if the driver did not say.

    A plan's peak counts tensors that exist already (parameters, inputs) beside those still
    to come.  On a real device the former are inside what is used now, so the peak is
    compared with *free memory now, plus the counted tensors already there*
    (``counted_bytes``), plus what PyTorch's CUDA allocator holds in reserve without using.
    A profile stands for an empty card: its whole memory.
    """
    if isinstance(device, DeviceProfile):
        return device.total_bytes
    if device.free_bytes is None:
        return None
    spare = 0
    if device.name.startswith("cuda") and _cuda_in_use():
        index = int(device.name.partition(":")[2])
        spare = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
    return device.free_bytes + counted_bytes + spare
