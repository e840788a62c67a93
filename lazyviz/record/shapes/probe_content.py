"""Contents of probe tensors, for kernels that check values."""

from __future__ import annotations

from typing import Any

import torch

# They check the content of their arguments with messages that are the same for zeros and for ones.
NOT_MADE_UP = {"_validate_compressed_sparse_indices", "repeat_interleave"}
_SEGMENTS = {"segment_reduce", "_segment_reduce_backward"}


def fill(name: str, arguments: dict[str, Any]) -> None:
    """Fill the probes of a kernel that rejects both zeros and ones with content that it accepts, by
    argument.
    """
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
