"""Older PyTorch releases: tensors that they saved or allocated and the installed one does not.

A block can be recorded as such a release would run it on a GPU.  The known differences are in
:data:`DIFFERENCES`, each with its source; everything else is as in the installed release.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...torch_internals import fake_cuda_devices
from ..interception.attribute_patches import Patches

Release = tuple[int, int]
OLDEST: Release = (1, 4)
_LAST_OF_1 = 13


class Difference(NamedTuple):
    """The difference in releases from ``since`` to before ``until``, as text, and the change that
    ended it.
    """

    since: Release
    until: Release
    words: str
    source: str

    def holds(self, release: Release | None) -> bool:
        return release is not None and self.since <= release < self.until


SOFTMAX_KEEPS_INPUT = Difference(
    OLDEST,
    (1, 11),
    "softmax and log_softmax save their input for the backward pass",
    "https://github.com/pytorch/pytorch/pull/65242",
)
ZERO_GRAD_KEEPS = Difference(
    OLDEST,
    (2, 0),
    "zero_grad() fills gradients with zeros",
    "https://github.com/pytorch/pytorch/pull/92731",
)
ONE_BY_ONE = Difference(
    OLDEST,
    (2, 0),
    "optimizers update parameters one by one",
    "https://github.com/pytorch/pytorch/pull/92306",
)
ADAM_TWO_LISTS = Difference(
    (2, 0),
    (2, 1),
    "Adam and AdamW use a second buffer for the square roots of second moments",
    "https://github.com/pytorch/pytorch/pull/104780",
)
DIFFERENCES = (SOFTMAX_KEEPS_INPUT, ZERO_GRAD_KEEPS, ONE_BY_ONE, ADAM_TWO_LISTS)


def installed() -> Release:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def release(version: str) -> Release:
    """The major and minor version of ``"1.13.1"``; a development build counts as the previous release.

    Raises ``ValueError`` if it is not a release, or an unknown one.
    """
    parts = version.partition("+")[0].split(".") if isinstance(version, str) else []
    if len(parts) >= 2 and parts[0].isdecimal() and parts[1].isdecimal():
        found = int(parts[0]), int(parts[1])
        if "dev" in version and found[1]:
            found = found[0], found[1] - 1
        if OLDEST <= found <= installed() and not (found[0] == 1 and found[1] > _LAST_OF_1):
            return found
    oldest, newest = (".".join(map(str, each)) for each in (OLDEST, installed()))
    raise ValueError(
        f"torch_version must be a PyTorch release from {oldest} to {newest} (the installed one), such as "
        f'"1.13", not {version!r}'
    )


def install(patches: Patches, of: Release | None) -> None:
    """Record the program as release ``of`` would run it; ``None``: the installed release.

    :class:`.device_dependent_composites.CudaKernels` chooses kernels that differ.
    """
    if ZERO_GRAD_KEEPS.holds(of):
        for owner in (torch.nn.Module, torch.optim.Optimizer):
            patches.set(owner, "zero_grad", _keeping(owner.zero_grad))
    if ONE_BY_ONE.holds(of):
        for owner, name in fake_cuda_devices.foreach_choices():
            patches.set(owner, name, lambda *args, **kwargs: (False, False))
    if ADAM_TWO_LISTS.holds(of):
        _hold_two_lists(patches)


def _keeping(clear: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(clear)
    def zero_grad(self: Any, set_to_none: bool = False) -> None:
        clear(self, set_to_none=set_to_none)

    return zero_grad


def _hold_two_lists(patches: Patches) -> None:
    """The foreach form of Adam adds epsilon to a copy of its square roots, and keeps both until its end."""
    module, name = fake_cuda_devices.FOREACH_ADAM
    step = getattr(module, name)
    add: Callable[..., None] = getattr(torch, fake_cuda_devices.FOREACH_ADD_IN_PLACE)
    held: list[Sequence[torch.Tensor]] = []
    inside = False

    @functools.wraps(step)
    def adam(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        inside = True
        try:
            return step(*args, **kwargs)
        finally:
            inside = False
            held.clear()

    @functools.wraps(add)
    def foreach_add_(tensors: Sequence[torch.Tensor], other: Any, *args: Any, **kwargs: Any) -> Any:
        # Epsilon is a number; the step counters, to which it is also added, are on the host.
        if inside and isinstance(other, float) and tensors[0].is_cuda:
            # None of it will have values.
            held.append(fake_cuda_devices.foreach_add(tensors, other, *args, **kwargs))
            return None
        return add(tensors, other, *args, **kwargs)

    patches.set(module, name, adam)
    patches.set(torch, fake_cuda_devices.FOREACH_ADD_IN_PLACE, foreach_add_)


class _Softmax(torch.autograd.Function):
    """Keeps its input besides its result, although the gradient needs only the result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, widen: bool, log: bool) -> torch.Tensor:
        kernel = torch.ops.aten._log_softmax.default if log else torch.ops.aten._softmax.default
        result: torch.Tensor = kernel(x, dim, widen)
        ctx.dim, ctx.log = dim, log
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, result = ctx.saved_tensors
        aten = torch.ops.aten
        kernel = aten._log_softmax_backward_data if ctx.log else aten._softmax_backward_data
        return kernel.default(gradients[0], result, ctx.dim, x.dtype), None, None, None


def softmax(tensor: torch.Tensor, dim: int, dtype: torch.dtype | None, *, log: bool) -> torch.Tensor:
    """``softmax`` or ``log_softmax`` on a GPU, as in releases that keep the input."""
    widen = tensor.dtype == torch.float16 and dtype == torch.float32
    if dtype is not None and not widen:
        tensor = tensor.to(dtype)
    result: torch.Tensor = _Softmax.apply(tensor, dim, widen, log)
    return result
