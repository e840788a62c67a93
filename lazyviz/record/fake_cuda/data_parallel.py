"""``nn.DataParallel`` over several absent GPUs, and the functions of ``torch.nn.parallel.comm`` that it uses.

PyTorch's own code replicates the model to every GPU, scatters the batch, gathers the outputs, and reduces the
gradients to the first GPU.  Its parts in C++ are replaced by functions that make the same allocations: the
buffers of the coalesced broadcast, the outputs, and the sums of gradients that NCCL writes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.cuda import nccl
from torch.nn.parallel import comm

from ...torch_internals import fake_cuda_devices
from ..lazy_tensor import is_lazy
from ..sync_points import AbsentDeviceError
from .fake_gpus_protocol import Gpus

_HOST = torch.device("cpu")


def install(gpus: Gpus) -> None:
    channels = _Channels(gpus)
    gpus.patches.set(fake_cuda_devices.SCATTER, "forward", staticmethod(channels.scatter_batch))
    for name in ("broadcast", "broadcast_coalesced", "scatter", "gather"):
        gpus.replace(comm, name, getattr(channels, name))
    gpus.replace(nccl, "is_available", _on_gpus_of_their_own)
    gpus.replace(nccl, "reduce", _reduce)
    for name in ("all_reduce", "broadcast", "all_gather", "reduce_scatter"):
        gpus.replace(nccl, name, _refusal(f"torch.cuda.nccl.{name}"))
    gpus.patches.set(*fake_cuda_devices.THREADS_OF_REPLICAS, _InTurn)


class _Channels:
    """Communication between GPUs of one process: scatter, gather, and broadcast."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus

    def _places(self, devices: Sequence[Any]) -> list[torch.device]:
        return [torch.device("cuda", self._gpus.index(device)) for device in devices]

    def _handed_out(self, parts: Sequence[torch.Tensor], count: int) -> None:
        """Note that a batch of any size is cut into one part for each of ``count`` GPUs."""
        graph, first = self._gpus.tape.recording.graph, parts[0]
        if count > 1 and graph is not None and is_lazy(first) and first._lazyviz.node is not None:
            graph.handed_out[first._lazyviz.node] = count

    def scatter_batch(
        self, ctx: Any, devices: Sequence[Any], sizes: Any, dim: int, tensor: torch.Tensor
    ) -> Any:
        """``Scatter.forward``, without the streams on which it copies."""
        ctx.dim, ctx.input_device = dim, tensor.get_device() if tensor.is_cuda else -1
        return self.scatter(tensor, devices, sizes, dim)

    def scatter(
        self,
        tensor: torch.Tensor,
        devices: Any = None,
        chunk_sizes: Any = None,
        dim: int = 0,
        streams: Any = None,
        *,
        out: Any = None,
    ) -> tuple[torch.Tensor, ...]:
        if out is not None:
            for part, target in zip(tensor.split([target.size(dim) for target in out], dim), out):
                target.copy_(part)
            return tuple(out)
        places = self._places(devices)
        parts = tensor.chunk(len(places), dim) if chunk_sizes is None else tensor.split(chunk_sizes, dim)
        self._handed_out(parts, len(places))
        return tuple([part.to(place) for part, place in zip(parts, places)])

    def gather(
        self, tensors: Sequence[torch.Tensor], dim: int = 0, destination: Any = None, *, out: Any = None
    ) -> torch.Tensor:
        first = tensors[0]
        sizes = [tensor.size(dim) for tensor in tensors]
        for tensor, size in zip(tensors, sizes):
            expected = [*first.shape]
            expected[dim] = size
            if [*tensor.shape] != expected:  # PyTorch's message
                raise RuntimeError(
                    f"Gather got an input of invalid size: got {[*tensor.shape]}, but expected {expected}"
                )
        if out is None:
            on_host = destination in ("cpu", -1, _HOST)
            shape = [*first.shape]
            shape[dim] = sum(sizes)
            last = len(shape) == 4 and all(_is_channels_last(tensor) for tensor in tensors)
            out = torch.empty(
                shape,
                dtype=first.dtype,
                device=_HOST if on_host else self._places([destination])[0],
                memory_format=torch.channels_last if last else torch.contiguous_format,
            )
        parts = out.split(sizes, dim)
        self._handed_out(parts, len(parts))
        for part, tensor in zip(parts, tensors):
            part.copy_(tensor, non_blocking=True)
        return out

    def broadcast(
        self, tensor: torch.Tensor, devices: Any = None, *, out: Any = None
    ) -> tuple[torch.Tensor, ...]:
        if out is not None:
            for target in out:
                target.copy_(tensor)
            return tuple(out)
        return tuple([tensor.to(place) for place in self._places(devices)])

    def broadcast_coalesced(
        self, tensors: Sequence[torch.Tensor], devices: Sequence[Any], buffer_size: int = 10485760
    ) -> list[list[torch.Tensor]]:
        """Buffer by buffer; the first GPU keeps its tensors, the others get views of the received buffers."""
        places = self._places(devices)
        if any(tensor.device != places[0] for tensor in tensors):
            raise RuntimeError("all tensors must be on devices[0]")
        copies: list[dict[int, torch.Tensor]] = [{} for _ in places]
        for members in _buffers(tensors, buffer_size):
            chunk = [tensors[index] for index in members]
            flat = fake_cuda_devices.flattened(chunk)
            for place, found in zip(places[1:], copies[1:]):
                parts = fake_cuda_devices.unflattened(flat.to(place), chunk)
                found.update({index: part.data for index, part in zip(members, parts)})
            del flat  # before the next buffer is filled
        everywhere = [[found[index] for index in range(len(tensors))] for found in copies[1:]]
        return [[*tensors], *everywhere]


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def _buffers(tensors: Sequence[torch.Tensor], most: int) -> list[list[int]]:
    """The indices of the tensors in each buffer: tensors of one dtype, of about ``most`` bytes in total."""
    full: list[list[int]] = []
    open_ones: dict[torch.dtype, tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        members, size = open_ones.pop(tensor.dtype, ([], 0))
        members.append(index)
        size += tensor.numel() * tensor.element_size()
        if size >= most:
            full.append(members)
        else:
            open_ones[tensor.dtype] = members, size
    return full + [members for members, _ in open_ones.values()]


# --- NCCL ------------------------------------------------------------------------------


def _on_gpus_of_their_own(tensors: Sequence[torch.Tensor]) -> bool:
    """``torch.cuda.nccl.is_available`` as in a build with NCCL."""
    if not all(
        tensor.layout == torch.strided and tensor.is_contiguous() and tensor.is_cuda for tensor in tensors
    ):
        return False
    return len({tensor.device for tensor in tensors}) == len(tensors)


def _reduce(
    inputs: Sequence[torch.Tensor],
    output: Any = None,
    root: int = 0,
    op: int = 0,
    streams: Any = None,
    comms: Any = None,
    *,
    outputs: Any = None,
) -> None:
    from ...torch_internals import nccl as operators

    if outputs is not None:
        output = outputs
    if isinstance(output, Sequence):
        output = output[root]
    operators.REDUCE(inputs[root] if output is None else output, [*inputs])


def _refusal(what: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AbsentDeviceError(f"{what} is not supported for a GPU that is not on this machine.")

    return refuse


# --- replicas --------------------------------------------------------------------------


class _InTurn:
    """Replaces ``threading`` for replicas: they run one after another, on the thread that records.

    Each replica uses its own GPU, so that their order does not affect the memory of any GPU.
    """

    Lock = staticmethod(threading.Lock)

    class Thread:
        def __init__(self, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
            self._target, self._args = target, args

        def start(self) -> None:
            self._target(*self._args)

        def join(self) -> None: ...
