"""Components of sparse tensors: the ordinary tensors whose memory can be read and written."""

from __future__ import annotations

import torch

from ...torch_internals import private_api

_NAMES: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Indices and values of a sparse tensor, without history, the values last; empty for other tensors."""
    names = _NAMES.get(tensor.layout)
    if names is None:
        return []
    with private_api.kernels_only():
        return [getattr(private_api.TensorBase, name)(tensor) for name in names]
