"""Scattered gradients: eager PyTorch writes into zeros, and ATen under a dispatch mode into a copy.

The results are bitwise equal, but the copy takes the same memory again, for example of a whole table of which
a few rows were used. ATen checks whether tensors are subclass-like (FunctionsManual.cpp, ReduceOpsUtils.h);
these kernels treat lazy tensors as plain ones, in the way of
:mod:`lazyviz.record.parity.mode_sensitive_composites`.

If a batch is named, the sum over its samples for a shared tensor stays a separate result, because each piece
of a split run needs its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch

from ...torch_internals import private_api
from ..tape import tape
from .other_modes_and_subclasses import Original, is_plain

_INDEX_GRADIENTS = ("IndexBackward0",)


def selected(
    original: Original,
    grad: torch.Tensor,
    dim: int,
    indices: torch.Tensor,
    sizes: Sequence[int],
    keepdim: bool,
) -> torch.Tensor:
    """For the values of a maximum, a median, or a sort: ``value_selecting_reduction_backward``."""
    if not is_plain(original, grad, indices):
        return original(grad, dim, indices, sizes, keepdim)
    if not keepdim and len(sizes):
        grad, indices = grad.unsqueeze(dim), indices.unsqueeze(dim)
    return grad.new_zeros(sizes).scatter_(dim, indices, grad)


def cumulative(
    original: Original, grad: torch.Tensor, image: torch.Tensor, indices: torch.Tensor, dim: int
) -> torch.Tensor:
    """``cummaxmin_backward``."""
    if not is_plain(original, grad, indices) or not image.numel():
        return original(grad, image, indices, dim)
    return grad.new_zeros(image.shape, dtype=image.dtype).scatter_add_(dim, indices, grad)


def gathered(
    original: Original,
    grad: torch.Tensor,
    image: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    sparse_grad: bool,
) -> torch.Tensor:
    """``gather_backward``."""
    if sparse_grad or tape.recording.batch is not None or not is_plain(original, grad, index):
        return original(grad, image, dim, index, sparse_grad)
    return grad.new_zeros(image.shape).scatter_add_(dim, index, grad)


def rows_selected(
    original: Original, grad: torch.Tensor, sizes: Sequence[int], dim: int, index: torch.Tensor
) -> torch.Tensor:
    """``index_select_backward``."""
    if tape.recording.batch is not None or not is_plain(original, grad, index):
        return original(grad, sizes, dim, index)
    return grad.new_zeros(sizes).index_add_(dim, index, grad)


def on_the_diagonal(original: Original, grad: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """``trace_backward``."""
    if tape.recording.batch is not None or len(sizes) != 2 or not is_plain(original, grad):
        return original(grad, sizes)
    result, step = grad.new_zeros(sizes[0] * sizes[1]), sizes[1] + 1
    diagonal = torch.arange(0, min(sizes) * step, step, dtype=torch.int64, device=grad.device)
    return result.index_fill_(0, diagonal, grad).view(sizes)


def where_selected(
    original: Original, grad: torch.Tensor, image: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """``masked_select_backward``."""
    if tape.recording.batch is not None or not is_plain(original, grad, mask):
        return original(grad, image, mask)
    shape = torch.broadcast_shapes(image.shape, mask.shape)
    return torch.zeros_like(image.expand(shape)).masked_scatter_(mask, grad)


def indexed(
    original: Original,
    target: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
) -> torch.Tensor:
    """``index_put``, if the formula of ``x[indices]`` calls it with its own zeros."""
    node = private_api.current_autograd_node()
    if (
        accumulate
        and tape.recording.batch is None
        and node is not None
        and node.name() in _INDEX_GRADIENTS
        and private_api.is_engine_call(sys._getframe(1).f_back)  # without the wrapper; not called by a hook
        and is_plain(original, target, values, *[index for index in indices if index is not None])
    ):
        return torch.ops.aten.index_put_.default(target, indices, values, True)
    return original(target, indices, values, accumulate)


def put(
    original: Original,
    target: torch.Tensor,
    index: torch.Tensor,
    source: torch.Tensor,
    accumulate: bool = False,
) -> torch.Tensor:
    """``put``, if the formula of ``take`` calls it with its own zeros."""
    node = private_api.current_autograd_node()
    if (
        accumulate
        and tape.recording.batch is None
        and node is not None
        and node.name() == "TakeBackward0"
        and private_api.is_engine_call(sys._getframe(1).f_back)
        and is_plain(original, target, index, source)
    ):
        return torch.ops.aten.put_.default(target, index, source, True)
    return original(target, index, source, accumulate)


KERNELS: dict[str, Callable[..., torch.Tensor]] = {
    "cummaxmin_backward": cumulative,
    "gather_backward": gathered,
    "index_put": indexed,
    "put": put,
    "index_select_backward": rows_selected,
    "masked_select_backward": where_selected,
    "trace_backward": on_the_diagonal,
    "value_selecting_reduction_backward": selected,
}
"""By the names of ATen's functions."""
