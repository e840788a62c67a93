"""Inputs of kernel probes: contents of their tensors, for kernels that check values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...torch_internals import private_api

# They check the content of their arguments with messages that are the same for zeros and for ones.
NOT_MADE_UP = {"_validate_compressed_sparse_indices", "repeat_interleave"}
_SEGMENTS = {"segment_reduce", "_segment_reduce_backward"}
_INDEX_PUT = {"index_put", "index_put_", "_index_put_impl_"}
_MASKS = (torch.bool, torch.uint8)


def fill(name: str, arguments: dict[str, Any]) -> None:
    """Fill the probes of a kernel that rejects both zeros and ones with content that it accepts, by
    argument.
    """
    if name in _INDEX_PUT and private_api.current_autograd_node() is not None:
        _fill_masks(**arguments)
    if name not in _SEGMENTS:
        return
    data, lengths, offsets = (arguments.get(name) for name in ("data", "lengths", "offsets"))
    axis = arguments.get("axis", 0)
    if data is None or not -data.dim() <= axis < data.dim():
        return
    # All data is in the last segment.
    for segments in (lengths, offsets):
        if isinstance(segments, torch.Tensor) and segments.dim() and segments.shape[-1]:
            segments.zero_()
            segments[..., -1] = data.shape[axis]


def _fill_masks(indices: Sequence[torch.Tensor | None], values: torch.Tensor, **_: Any) -> None:
    """Let each mask select as many elements as there are values.

    Only for gradients of ``x[mask]``: autograd has made the values with the same masks.
    """
    given = [(at, index) for at, index in enumerate(indices) if index is not None]
    masks = [index for _, index in given if index.dtype in _MASKS]
    if not masks or any(index.dim() > 1 for _, index in given if index.dtype not in _MASKS):
        return
    first, last = given[0][0], given[-1][0]
    at = first if last - first == len(given) - 1 else 0  # where indexed dimensions are, as NumPy has them
    if at >= values.dim():
        return
    for mask in masks:
        overlaps = any(size > 1 and step == 0 for size, step in zip(mask.shape, mask.stride()))
        if values.shape[at] <= mask.numel() and not overlaps:
            mask.copy_((torch.arange(mask.numel(), device=mask.device) < values.shape[at]).view(mask.shape))
