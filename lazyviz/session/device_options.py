"""Device options: the GPU and the rank that a block is recorded for, and errors if the GPU is absent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..graph.ir import Graph
from ..plan.device_timeline_and_verdict import is_gpu
from ..plan.devices.device_lookup import DeviceProfile, cuda_devices, gpu_number, resolve, unknown_gpu
from ..plan.liveness.lifetimes import allocated, lifetimes
from ..process.global_state_transaction import Transaction
from ..record import partially_written_memory
from ..record.dependency_closure import closure
from ..record.distributed.planned_rank import OneOfMany, local_world_size
from ..record.fake_cuda import older_releases
from ..record.fake_cuda.gpu_copies_of_host_values import give_back
from ..record.fake_cuda.torch_cuda_replacement import AbsentGpus, Gpu
from ..record.sync_points import AbsentDeviceError, needs_absent, without_absent
from ..record.tape import Tape, tape
from ..record.tracked_storages import TrackedNode
from ..torch_internals import fake_cuda_devices

ASSUMED_CAPABILITY = (8, 0)
"""For a GPU of unknown compute capability: kernels are chosen as for an A100."""


def resolved(
    device: Any, size: int = 1, rank: int = 0, torch_version: str | None = None
) -> tuple[Any, Gpu | None]:
    """The device that a block for ``device`` is planned for, and the GPU that it sees if this process has no
    CUDA.

    With ``size`` ranks, each of which has a GPU, it is the GPU of ``rank``. ``torch_version`` is the PyTorch
    release that will run there.

    Raises:
        ValueError: an unknown device or release, or a release for a device that is present.
    """
    target, gpu = _resolved(device, size, rank)
    if torch_version is not None:
        release = older_releases.release(torch_version)
        if gpu is None:
            raise ValueError(
                "torch_version is only for a GPU that is not on this machine: other devices use the "
                "installed PyTorch"
            )
        gpu = replace(gpu, release=release)
    return target, gpu


def _resolved(device: Any, size: int, rank: int) -> tuple[Any, Gpu | None]:
    if device is None:
        return None, None
    try:
        target = resolve(device)
    except ValueError:
        number = gpu_number(device)
        if number is None or number >= fake_cuda_devices.MOST_DEVICES or fake_cuda_devices.cuda_is_present():
            raise
        target = unknown_gpu(number, cuda_devices()[1])
        return target, Gpu("CUDA GPU", None, ASSUMED_CAPABILITY, target.name, number + 1, number)
    names_gpu = isinstance(target, DeviceProfile) or target.name.startswith("cuda")
    if not names_gpu or fake_cuda_devices.cuda_is_present():
        return device, None
    name = target.name if isinstance(target, DeviceProfile) else target.model
    here = local_world_size(size)
    return device, Gpu(
        name,
        target.total_bytes,
        target.compute_capability or ASSUMED_CAPABILITY,
        target.name,
        here,
        rank % here,
    )


def one_of_many(
    tape: Tape, size: int, rank: int, gpu: Gpu | None, graph: Graph, device: Any
) -> OneOfMany | None:
    """The context in which this process is ``rank`` of ``size``; ``None`` if no mesh is given (0 ranks), or
    the process already is this rank.

    Raises:
        RuntimeError: an outer block or ``torch.distributed`` uses another rank.
    """
    outer = tape.recording.world
    if not size:
        if outer is not None:
            graph.world_size, graph.rank = outer.size, outer.rank
        return None
    graph.world_size, graph.rank = size, rank
    if outer is not None:
        if (outer.size, outer.rank) != (size, rank):
            raise RuntimeError(
                f"a block for rank {rank} of {size} inside one for rank {outer.rank} of {outer.size}"
            )
        return None
    on_gpu = gpu is not None or (device is not None and is_gpu(resolve(device)))
    world = OneOfMany(tape, size, rank, "cuda" if on_gpu else "cpu")
    world.refuse_others()
    return world


def gpus(
    tape: Tape, gpu: Gpu | None, graph: Graph, assume: Mapping[int | str, Any] | None, device: Any
) -> Transaction | None:
    """The context in which ``torch.cuda`` describes ``gpu``, which ``device`` names.

    ``None`` if there is no GPU, or an outer block has entered this context.

    Raises:
        RuntimeError: an outer block is for another GPU.
    """
    absent = tape.recording.absent
    if gpu is not None and absent is not None and gpu != absent.gpu:
        raise RuntimeError(
            f"a block for {gpu.planned} inside one for {absent.gpu.planned}: only one absent GPU at a time"
        )
    return None if gpu is None or absent is not None else _Gpus(tape, gpu, graph, assume, device)


class _Gpus(Transaction):
    """The :func:`gpus` of the outermost block that has any."""

    def __init__(
        self, tape: Tape, gpu: Gpu, graph: Graph, assume: Mapping[int | str, Any] | None, target: Any
    ) -> None:
        def memory(device: torch.device, since: int) -> tuple[int, int]:
            """Current and maximum bytes of eager PyTorch's tensors on ``device``, the latter since node
            ``since``.
            """
            spans = [span for span in lifetimes(graph) if span.storage.device == device]
            levels = allocated(spans, len(graph.nodes), eager=True)
            now = sum(span.storage.nbytes for span in spans if span.storage.dropped is None)
            return now, max([now, *levels[since:]])

        def reserved(device: torch.device) -> int:
            """Bytes that the caching allocator would hold for them."""
            from ..plan.make_plan import make_plan  # the first plan imports it

            plan = make_plan(graph, device=target).devices.get(str(device))
            held = plan.reserve(True) if plan is not None else None
            return held[0] if held is not None else 0

        graph.gpu = gpu.planned
        if gpu.release is not None:
            graph.torch_release = gpu.release
            graph.release_differences = tuple(
                each.words for each in older_releases.DIFFERENCES if each.holds(gpu.release)
            )
        self._tape = tape
        self._gpus = AbsentGpus(tape, gpu, memory, reserved, assume or {})

    def begin(self) -> None:
        self.undo_by(self._gpus.remove)
        self.undo_by(self._forget)
        self._tape.recording.absent = self._gpus
        self._gpus.install()

    def _forget(self) -> None:
        self._tape.recording.absent = None


def refuse(nodes: Sequence[TrackedNode], device: Any) -> None:
    """Raise :class:`AbsentDeviceError` if some of ``nodes`` can only be planned."""
    if not needs_absent(nodes):
        return
    absent = fake_cuda_devices.STAND_INS
    if not any(value.meta.device in absent for node in nodes for value in (*node.outputs, *node.inputs)):
        raise AbsentDeviceError(
            "This was recorded for one rank without the others: it can be planned, but not evaluated."
        )
    name = getattr(device, "model", None) or getattr(device, "name", device) or "a CUDA device"
    raise AbsentDeviceError(
        f"This was recorded for {name}, which is not on this machine: it can be planned, but not evaluated."
    )


def runnable() -> list[TrackedNode]:
    """The pending nodes that can run, in program order.

    They need no absent device, and no segment that failed midway.
    """
    return closure(partially_written_memory.runnable(without_absent(tape.pending)))


def forget() -> None:
    """Forget pending nodes that can only be planned, and those that failed."""
    if tape.pending:
        give_back(tape)
        tape.pending_ops.forget_all()
