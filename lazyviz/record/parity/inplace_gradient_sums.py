"""In-place gradient sums: whether the autograd engine would accumulate two gradients in place.

The engine does not do so if either is subclass-like, as every tensor is while a dispatch mode is active.  The
recorder then records the in-place sum nevertheless.  Nor does the engine store a sparse gradient without a
copy in that case, which it would do without a mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ...torch_internals import private_api, sparse_tensors
from .. import backward_nodes
from ..lazy_tensor import is_lazy
from ..recording_state import RecordingState
from ..sparse.components import parts_of
from ..tracked_storages import TrackedValue


def accumulates_in_place(recording: RecordingState, args: tuple[Any, ...]) -> bool:
    """Whether this call of ``add`` is such a sum, under the engine's own conditions.

    They are those of ``can_accumulate_inplace`` of its input buffer.
    """
    if not backward_nodes.is_calling(recording.summing):
        recording.summing = None
        return False
    if not is_lazy(args[0]) or torch.is_grad_enabled() or len(args) != 2:
        return False
    value: TrackedValue = args[0]._lazyviz
    return (
        value.storage.live == 1
        and value.meta.dense
        and args[1].dtype == value.meta.dtype
        and args[1].shape == value.meta.shape
        and not private_api.is_zero_tensor(args[1])
        and not private_api.forward_mode_active()
        and private_api.engine_is_sole_owner(args)
    )


def is_taken_over(args: tuple[Any, ...], parts: Callable[[Any], Iterable[torch.Tensor]] = parts_of) -> bool:
    """Whether this ``clone`` copies a sparse gradient that the engine would store without a copy.

    The conditions are those of ``accumulateGrad`` (accumulate_grad.h); nothing else may use its components.
    """
    if args[0].layout != torch.sparse_coo or len(args) != 1 or torch.is_grad_enabled():
        return False
    node = private_api.current_autograd_node()
    return (
        node is not None
        and node.name() == private_api.ACCUMULATE_GRAD
        and private_api.engine_is_sole_owner(args)
        and all(part.is_contiguous() for part in parts(args[0]))
    )


def sharing_memory(gradient: torch.Tensor) -> torch.Tensor:
    """Another sparse tensor with the same components; it is not known whether it is coalesced."""
    return sparse_tensors.make(gradient.layout, gradient.shape, parts_of(gradient))
