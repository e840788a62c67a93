"""NVML: what the NVIDIA driver reports about the GPUs of this machine.

NVML works without a CUDA build of PyTorch and creates no CUDA context.  All failures (no driver, a failing
driver, a GPU that does not respond, unsupported queries) are reported as text and never raise an exception,
because a plan must not fail because of them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pynvml
import torch

from ...process.deferred_signals import deferring


@dataclass(frozen=True, slots=True)
class Device:
    """A device of this machine, at the time of the query; sizes are in bytes.

    ``name`` is the name for ``%%lazy --device`` (``"cpu"``, ``"cuda:0"``), ``free_bytes`` the memory
    available to a new allocation, and ``other_bytes`` the memory used by other processes.  Sizes are ``None``
    if the driver does not report them.  A slice of a GPU in MIG mode is a device with the memory of the
    slice.
    """

    name: str
    model: str
    total_bytes: int | None
    free_bytes: int | None
    used_bytes: int | None
    state: str = "ready"
    other_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None

    @property
    def present(self) -> bool:
        return True


@deferring  # NVML's binding takes a lock, which an exception may leave locked and a handler cannot take again
def cuda_devices() -> tuple[list[Device], str]:
    """This process's CUDA devices, in PyTorch's order, and the state of NVML as text."""
    try:
        pynvml.nvmlInit()
    except Exception as error:  # a broken installation raises more than NVMLError
        return [], _message(error)
    try:
        return _read()
    except Exception as error:
        return [], _message(error)
    finally:
        _shutdown()


class LiveMemory:
    """Repeated readings of the memory of one GPU during a run; call ``close()`` afterwards.

    ``index`` is PyTorch's number of the GPU.
    """

    @deferring
    def __init__(self, index: int) -> None:
        self._handle: Any = None
        self._open = False
        try:
            pynvml.nvmlInit()
            self._open = True
            handle = _handles()[0][index]
            self._handle = None if isinstance(handle, _Lost) else handle
        except Exception:
            self.close()

    def read(self) -> tuple[int, int] | None:
        """``(used, total)`` bytes of the whole GPU, for all processes; ``None`` if NVML does not report
        them.
        """
        if self._handle is None:
            return None
        try:
            memory = pynvml.nvmlDeviceGetMemoryInfo(self._handle)
            return int(memory.used), int(memory.total)  # the result may be None
        except Exception:
            return None

    @deferring
    def close(self) -> None:
        self._handle = None
        if self._open:
            self._open = False
            _shutdown()


_WORDS = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "no NVIDIA driver on this machine",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "no NVIDIA driver on this machine",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "the NVIDIA driver does not respond: its library and its kernel module have different versions, "
        "as after an update without a reboot"
    ),
    pynvml.NVML_ERROR_NO_PERMISSION: "the NVIDIA driver does not respond: this user has no permission",
    pynvml.NVML_ERROR_GPU_IS_LOST: "the GPU does not respond: it has fallen off the bus",
    pynvml.NVML_ERROR_NOT_SUPPORTED: "the driver does not report the memory of this GPU",
}


def _message(error: Exception) -> str:
    code = getattr(error, "value", None)
    return _WORDS.get(code) or f"the NVIDIA driver does not respond: {error or type(error).__name__}"


@dataclass(frozen=True, slots=True)
class _Lost:
    """Placeholder for the handle of a GPU that NVML counts but cannot open."""

    error: Exception


def _shutdown() -> None:
    try:
        pynvml.nvmlShutdown()
    except Exception:  # as for other failures here: the caller already has its result
        pass


def _handle(question: Any, argument: Any) -> Any:
    """The handle of a GPU, or the reason why there is none: one lost GPU must not hide the others."""
    try:
        return question(argument)
    except Exception as error:
        return _Lost(error)


def _read() -> tuple[list[Device], str]:
    handles, hidden = _handles()
    if not handles:
        return [], f"driver present, no GPU visible{hidden}"
    found = [_describe(f"cuda:{index}", handle) for index, handle in enumerate(handles)]
    slices = sum(_ask(pynvml.nvmlDeviceIsMigDeviceHandle, handle) is True for handle in handles)
    kind = "MIG slice" if slices == len(found) else "GPU"
    return found, f"{len(found)} {kind}{'s' if len(found) > 1 else ''}{hidden}"


def _describe(name: str, handle: Any) -> Device:
    if isinstance(handle, _Lost):
        return Device(name, "NVIDIA GPU", None, None, None, _message(handle.error))
    model = _ask(pynvml.nvmlDeviceGetName, handle) or "NVIDIA GPU"
    if isinstance(model, bytes):
        model = model.decode(errors="replace")
    capability = _ask(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    capability = tuple(capability) if capability else None
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except Exception as error:
        state = _message(error)
        return Device(name, model, None, None, None, state, compute_capability=capability)
    return Device(
        name,
        model,
        int(memory.total),
        int(memory.free),
        int(memory.used),
        other_bytes=_used_by_others(handle),
        compute_capability=capability,
    )


def _used_by_others(handle: Any) -> int | None:
    """Bytes that other processes use on a GPU; ``None`` if the driver does not report one of them."""
    processes: dict[int, int | None] = {}
    for question in (
        pynvml.nvmlDeviceGetComputeRunningProcesses,
        pynvml.nvmlDeviceGetGraphicsRunningProcesses,
    ):
        answer = _ask(question, handle)
        if answer is None:
            return None
        processes.update({process.pid: process.usedGpuMemory for process in answer})
    processes.pop(os.getpid(), None)
    sizes = list(processes.values())
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _ask(question: Any, handle: Any) -> Any:
    """The result of an optional query that a GPU may not support."""
    try:
        return question(handle)
    except Exception:
        return None


def _handles() -> tuple[list[Any], str]:
    """NVML handles in PyTorch's order, and text that explains why some are not visible to this process.

    NVML numbers all GPUs in PCI order; PyTorch numbers those in CUDA_VISIBLE_DEVICES, fastest first.
    Therefore, GPUs are matched by UUID. Without CUDA, PyTorch has no order: NVML's is used, and
    CUDA_VISIBLE_DEVICES is interpreted as CUDA does.
    """
    if torch.cuda.is_available():
        uuids = [str(torch.cuda.get_device_properties(at).uuid) for at in range(torch.cuda.device_count())]
        return [_handle(_by_uuid, uuid) for uuid in uuids], ""
    count = pynvml.nvmlDeviceGetCount()
    gpus = [_handle(pynvml.nvmlDeviceGetHandleByIndex, index) for index in range(count)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return _enumerated(gpus)
    chosen: list[Any] = []
    for name in [entry.strip() for entry in visible.split(",")]:
        handle = _named(name, gpus)
        if handle is None:
            break  # CUDA stops at the first unknown entry
        chosen.append(handle)
    return chosen, f" (CUDA_VISIBLE_DEVICES={visible})"


def _enumerated(gpus: list[Any]) -> tuple[list[Any], str]:
    """The GPUs as a CUDA process numbers them; it sees at most one MIG slice (MIG User Guide, CUDA Device
    Enumeration).
    """
    found: list[Any] = []
    sliced, hidden = False, 0
    for gpu in gpus:
        for part in _parts(gpu):
            if part is not gpu and sliced:
                hidden += 1
                continue
            sliced = sliced or part is not gpu
            found.append(part)
    slices = "slices" if hidden > 1 else "slice"
    return found, f" ({hidden} more MIG {slices}; a CUDA process can use only one)" if hidden else ""


def _parts(gpu: Any) -> list[Any]:
    """The devices of a GPU: itself or, in MIG mode, its slices."""
    mode = _ask(pynvml.nvmlDeviceGetMigMode, gpu)
    if mode is None or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
        return [gpu]
    slices = []
    for index in range(_ask(pynvml.nvmlDeviceGetMaxMigDeviceCount, gpu) or 0):
        try:
            slices.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index))
        except pynvml.NVMLError:
            continue  # an index without a slice
    return slices


def _named(name: str, gpus: list[Any]) -> Any:
    if name.isdecimal() and name.isascii():
        parts = _parts(gpus[int(name)]) if int(name) < len(gpus) else []
        return parts[0] if parts else None  # CUDA sees only the first slice of a GPU
    if not name.startswith(("GPU-", "MIG-")):
        return None
    for part in [*gpus, *(part for gpu in gpus for part in _parts(gpu))]:
        uuid = _ask(pynvml.nvmlDeviceGetUUID, part) or ""
        if isinstance(uuid, bytes):
            uuid = uuid.decode(errors="replace")
        if uuid.startswith(name):  # CUDA accepts a prefix
            return part
    return None


def _by_uuid(uuid: str) -> Any:
    """The handle of the GPU or slice whose UUID, without a prefix, PyTorch reports."""
    if uuid.startswith(("GPU-", "MIG-")):
        return pynvml.nvmlDeviceGetHandleByUUID(uuid)
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError:
        return pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
