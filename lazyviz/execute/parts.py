"""A piece's part of a whole tensor."""

from __future__ import annotations

import torch

from ..plan.placement import Piece, Shard


def place(tensor: torch.Tensor, shard: Shard, piece: Piece) -> torch.Tensor:
    """Where the piece's samples are in a whole tensor: a view of it.

    Where they lie in several places of the dimension, it is seen as three: ``(outer, samples, unit)``.
    """
    blocks, start, count = (
        piece.total // shard.group,
        piece.start // shard.group,
        piece.samples // shard.group,
    )
    if shard.outer == 1:
        return tensor.narrow(shard.dim, start * shard.unit, count * shard.unit)
    apart = tensor.unflatten(shard.dim, (shard.outer, blocks, shard.unit))
    return apart.narrow(shard.dim + 1, start, count)


def cut(tensor: torch.Tensor, shard: Shard, piece: Piece) -> torch.Tensor:
    """The piece's part of a whole tensor, laid out as kernels would have made it: in the same order of
    dimensions, as dense.  Where it is so already, it is a view.
    """
    part = place(tensor, shard, piece)
    if shard.outer > 1:
        part = part.flatten(shard.dim, shard.dim + 2)
    own, full = tensor.stride(shard.dim), tensor.shape[shard.dim]
    stride = [step * part.shape[shard.dim] // full if step > own else step for step in tensor.stride()]
    if own == 0 or list(part.stride()) == stride:
        return part
    result = torch.empty_strided(part.shape, stride, dtype=part.dtype, device=part.device)
    return result.copy_(part)
