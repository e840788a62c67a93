"""Errors of value reads on an absent GPU: PyTorch's own errors, or a recorded result where possible.

A call that reads memory without the dispatcher may fail because of its arguments, regardless of the values,
so it is tried on zeros and on ones.  A call that only combines elements (``torch.tensor([t, t])``) is
recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...process.tracebacks import shorten
from ...torch_internals import dispatch_level, private_api
from ..intercept_ops_outside_blocks import replaced
from ..shapes.kernel_probes import with_cuda_names
from ..sync_points import AbsentDeviceError
from ..tape import Tape

_JOIN_ELEMENTS = ("tensor", "as_tensor", "asarray", "new", "new_tensor")
_C_NAMES = ("torch.meta.", "torch.cuda.")  # of tensor types: of planned tensors in C++, and in Python
_OF_A_GPU = ("stream", "dl_device")  # arguments of DLPack's methods that the CPU does not have
Call = Callable[..., Any]


def with_own_errors(tape: Tape, original: Call, function: Call) -> Call:
    """``function``, which calls ``original`` after a read, with the errors that ``original`` raises for its
    arguments.
    """
    name = getattr(original, "__name__", "")

    @functools.wraps(function)
    def evaluates_what_is_pending(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except AbsentDeviceError as error:
            if tape.recording.absent is not None:
                refuse(tape, original, args, kwargs)
                if name in _JOIN_ELEMENTS:
                    return joined(tape, original, args, kwargs)
            shorten(error)
            raise
        except BaseException as error:
            shorten(error)  # one frame of lazyviz is enough
            raise

    return evaluates_what_is_pending


def refuse(tape: Tape, original: Call, args: Any, kwargs: Any) -> None:
    """Raise the error of ``original`` for these arguments, if it does not depend on the content of
    tensors.
    """
    first = args[0] if args else None
    if original.__name__ in ("numpy", "__array__") and isinstance(first, torch.Tensor) and first.is_cuda:
        raise TypeError(
            f"can't convert {first.device} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )
    errors: list[Exception] = []
    for fill in (0, 1):
        try:
            _call_with_fill(tape, original, args, kwargs, fill)
        except Exception as error:
            errors.append(error.with_traceback(None))
    if len(errors) == 2 and str(errors[0]) == str(errors[1]):
        refused = errors[0]
        refused.args = tuple([with_cuda_names(item) for item in refused.args])
        raise refused from None


def joined(tape: Tape, original: Call, args: Any, kwargs: Any) -> torch.Tensor:
    """The result of a constructor for lists of elements, recorded."""
    like = _call_with_fill(tape, original, args, kwargs, 0)
    device = kwargs.get("device")
    if device is None:
        device = args[0].device if args and isinstance(args[0], torch.Tensor) else "cpu"
    items = next(item for item in (*args, *kwargs.values()) if isinstance(item, (list, tuple)))
    with dispatch_level.no_grad():
        elements = [
            torch.ops.aten._to_copy.default(
                item.detach().reshape(()), dtype=like.dtype, device=torch.device(device)
            )
            if isinstance(item, torch.Tensor)
            else torch.tensor(item, dtype=like.dtype, device=device)
            for item in _elements(items)
        ]
        made = torch.stack(elements).reshape(like.shape)
    return made.requires_grad_(like.requires_grad)


def _call_with_fill(tape: Tape, original: Call, args: Any, kwargs: Any, fill: int) -> Any:
    """Call ``original`` with CPU tensors filled with ``fill`` in place of planned ones."""

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided:
            return tensor
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        return made.fill_(fill).requires_grad_(tensor.requires_grad)

    with tape.recording.paused(), private_api.no_dispatch_modes(), torch.random.fork_rng(devices=()):
        kwargs = {
            name: "cpu" if name == "device" else replaced(item, stand_in)
            for name, item in kwargs.items()
            if name not in _OF_A_GPU
        }
        return original(*replaced(args, stand_in), **kwargs)


def _elements(items: Any) -> Iterator[Any]:
    for item in items:
        if isinstance(item, (list, tuple)):
            yield from _elements(item)
        else:
            yield item


def meshgrid(original: Call) -> Call:
    """Its error shows the tensor's content."""

    def checked(tensors: Any, **kwargs: Any) -> Any:
        for tensor in tensors if isinstance(tensors, (list, tuple)) else ():
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda and tensor.dim() > 1:
                sizes = ",".join(map(str, tensor.shape))
                raise RuntimeError(
                    "torch.meshgrid: Expected 0D or 1D tensor in the tensor list but got: "
                    f"[ {tensor.type()}{{{sizes}}} ]"
                )
        return original(tensors, **kwargs)

    return checked


def with_cuda_messages(original: Call) -> Call:
    """``original`` with errors that name the types of planned tensors as Python does."""

    def renamed_call(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except TypeError as error:
            error.args = tuple([str(item).replace(*_C_NAMES) for item in error.args])
            raise

    return renamed_call
