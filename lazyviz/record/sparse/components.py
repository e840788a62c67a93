"""Components of sparse tensors: the ordinary tensors whose memory can be read and written.

A sparse tensor that is pending is one of PyTorch's own, with pending components. Their evaluation makes it
an ordinary sparse tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...torch_internals import private_api, sparse_tensors

COMPONENTS: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""The operators that return them, the values last."""


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Indices and values of a sparse tensor, without history, the values last; empty for other tensors.

    Only its class knows those of a wrapper subclass (:mod:`lazyviz.record.fake_cuda.sparse_gradients`).
    """
    names = COMPONENTS.get(tensor.layout)
    if names is None or private_api.dispatches_itself(type(tensor)):
        return []
    return [sparse_tensors.component(tensor, name) for name in names]


@dataclass(frozen=True)
class Form:
    """A sparse tensor, represented by its components.

    Attributes:
        parts: its components, the values last; pending, real, or fake tensors.
        is_coalesced: for the layout ``torch.sparse_coo``.
    """

    layout: torch.layout
    shape: tuple[int, ...]
    parts: tuple[torch.Tensor, ...]
    is_coalesced: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        coalesced = tensor.layout == torch.sparse_coo and sparse_tensors.is_coalesced(tensor)
        return cls(tensor.layout, tuple(tensor.shape), tuple(parts_of(tensor)), coalesced)

    @property
    def values(self) -> torch.Tensor:
        return self.parts[-1]

    @property
    def indices(self) -> tuple[torch.Tensor, ...]:
        return self.parts[:-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def sparse_dims(self) -> int:
        """The number of sparse dimensions, for the layout ``torch.sparse_coo``."""
        return self.parts[0].shape[0]

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix of numbers, by coordinates or with compressed rows."""
        if self.layout == torch.sparse_coo:
            return self.sparse_dims == len(self.shape) == 2
        return self.layout == torch.sparse_csr and len(self.shape) == 2

    @property
    def is_degenerate(self) -> bool:
        """Whether it has no elements or no sparse dimensions: many kernels have a separate branch for it."""
        return not self.values.numel() or (self.layout == torch.sparse_coo and not self.sparse_dims)

    def made(self) -> torch.Tensor:
        """The sparse tensor with these components; nothing is copied or checked."""
        return sparse_tensors.make(self.layout, self.shape, self.parts, self.is_coalesced)


def is_sparse(item: Any) -> bool:
    """Whether an argument is a sparse tensor."""
    return isinstance(item, torch.Tensor) and item.layout in COMPONENTS
