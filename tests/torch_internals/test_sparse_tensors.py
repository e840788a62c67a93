"""The private APIs of :mod:`lazyviz.torch_internals.sparse_tensors` behave as documented."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lazyviz.torch_internals import sparse_tensors

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")  # which PyTorch warns of once
INDICES = {
    torch.sparse_coo: (torch.tensor([[0, 1], [1, 0]]),),
    torch.sparse_csr: (torch.tensor([0, 1, 2]), torch.tensor([1, 0])),
    torch.sparse_csc: (torch.tensor([0, 1, 2]), torch.tensor([1, 0])),
}
NAMES = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
}


class Seen(TorchDispatchMode):
    """Notes the operators that reach it."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", INDICES, ids=str)
def test_a_sparse_tensor_is_made_and_taken_apart_past_every_mode(layout):
    values = torch.tensor([1.0, 2.0])
    with Seen() as seen:
        made = sparse_tensors.make(layout, (2, 2), (*INDICES[layout], values))
        parts = [sparse_tensors.component(made, name) for name in NAMES[layout]]
        other = sparse_tensors.same_components(made)
    assert not seen.names
    by_rows = made.to_dense().t() if layout == torch.sparse_csc else made.to_dense()
    assert by_rows.tolist() == [[0, 1], [2, 0]] and other.to_dense().equal(made.to_dense())
    of_other = sparse_tensors.component(other, NAMES[layout][-1])
    assert parts[-1].data_ptr() == values.data_ptr() == of_other.data_ptr()


def test_whether_it_is_coalesced_is_kept():
    parts = (*INDICES[torch.sparse_coo], torch.tensor([1.0, 2.0]))
    for known in (True, False):
        assert (
            sparse_tensors.is_coalesced(sparse_tensors.make(torch.sparse_coo, (2, 2), parts, known)) is known
        )


def test_wrong_indices_are_not_read_and_the_check_of_invariants_stays_enabled():
    parts = torch.tensor([0, 9, 9]), torch.tensor([5, 5]), torch.tensor([1.0, 2.0])
    with torch.sparse.check_sparse_tensor_invariants():
        assert sparse_tensors.are_checked()
        made = sparse_tensors.make(torch.sparse_csr, (2, 2), parts)
        assert sparse_tensors.are_checked()
        with pytest.raises(RuntimeError):
            torch.sparse_csr_tensor(*parts, (2, 2))
    assert made.layout == torch.sparse_csr and not sparse_tensors.are_checked()


@pytest.mark.parametrize("layout", INDICES, ids=str)
def test_every_constructor_ends_in_an_operator_that_modes_see(layout):
    values = torch.tensor([1.0, 2.0], requires_grad=True)
    with Seen() as seen:
        if layout == torch.sparse_coo:
            made = torch.sparse_coo_tensor(*INDICES[layout], values, (2, 2))
        else:
            made = torch.sparse_compressed_tensor(*INDICES[layout], values, (2, 2), layout=layout)
        example = sparse_tensors.make(layout, (2, 2), (*INDICES[layout], values.detach()))
        again = sparse_tensors.make_differentiable(example, (*INDICES[layout], values))
    assert {maker.name() for maker in sparse_tensors.MAKERS} & set(seen.names)
    assert made.grad_fn is not None and type(again.grad_fn) is type(made.grad_fn)
