"""Numbers in lists are read without an op: pending writes to them run first."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy import array
from torch import as_tensor, asarray, sparse_coo_tensor, tensor

import lazyviz


def put(x, t, index):
    y = x.clone()
    y[index] = 5.0
    return y


READS = {
    "index of lists": lambda t, v, x: x[[t, 1], [t, 0]],
    "index of a list and a slice": lambda t, v, x: x[:, [t, 0]],
    "nested index": lambda t, v, x: x[[[t, 1]], [[0, t]]],
    "index of a tuple": lambda t, v, x: x[t, :],
    "index of numbers": lambda t, v, x: x[t, t],
    "slice": lambda t, v, x: x[:t],
    "put at lists": lambda t, v, x: put(x, t, ([t, 1], [t, 0])),
    "put at a tuple": lambda t, v, x: put(x, t, (t, slice(None))),
    "index of a parameter": lambda t, v, x: torch.nn.Parameter(x)[[t, 1], [t, 0]].detach(),
    "tensor": lambda t, v, x: tensor([t, 1]),
    "nested": lambda t, v, x: tensor([[t, 1], [2, t]]),
    "as_tensor": lambda t, v, x: as_tensor([t, 1]),
    "asarray": lambda t, v, x: asarray([t, 1]),
    "new_tensor": lambda t, v, x: x.new_tensor([t, 1]),
    "legacy": lambda t, v, x: torch.FloatTensor([t, 1.0]),
    "indices of a sparse tensor": lambda t, v, x: sparse_coo_tensor([[0, t]], v, (4,)).to_dense(),
    "values of a sparse tensor": lambda t, v, x: torch.sparse_csr_tensor(
        [0, 1, 2], [0, 1], [t, 1], size=(2, 2), check_invariants=True
    ).to_dense(),
    "truth": lambda t, v, x: tensor([True, t - 2]),
    "complex": lambda t, v, x: tensor([1j, t]),
    "array of a number": lambda t, v, x: torch.from_numpy(array([t, 1])),
    "array of vectors": lambda t, v, x: torch.from_numpy(np.stack([v, v])),
    "sizes": lambda t, v, x: torch.ones(t, 2),
}  # fmt: skip


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("inside", [True, False], ids=["in the block", "after it"])
@pytest.mark.filterwarnings("ignore")
def test_what_is_read_is_what_eager_reads(read, inside):
    x = torch.arange(12.0).view(4, 3)
    expected = read(torch.tensor(2), torch.tensor([3.0, 6.0]), x)
    t, v = torch.tensor(1), torch.tensor([1.0, 2.0])
    with lazyviz.lazy():
        t.add_(1)
        v.mul_(3)
        if inside:
            actual = read(t, v, x)
    if not inside:
        actual = read(t, v, x)
    assert torch.equal(actual, expected)


def test_indices_without_tensors_are_no_sync_point():
    x = torch.arange(12.0).view(4, 3)
    with lazyviz.lazy() as graph:
        y = (x * 2)[[0, 1], [1, 2]] + x[1, 1]
    assert not graph.sync_points
    assert torch.equal(y, (x * 2)[[0, 1], [1, 2]] + x[1, 1])


def test_patching_numbers_leaves_indexing_as_it_was():
    """A class that had ``__getitem__`` set once counts as a sequence for good."""
    x, t = torch.arange(12.0).view(4, 3), torch.tensor(2)
    with lazyviz.lazy():
        x + 1
    lazyviz.reset()
    assert torch.equal(x[[t, 1], [t, 0]], torch.tensor([8.0, 3.0]))
    assert "__index__" not in vars(torch.Tensor)
