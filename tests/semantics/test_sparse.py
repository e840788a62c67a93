"""Sparse tensors are created immediately, as in eager mode, with and without invariant checks."""

from __future__ import annotations

import copy

import pytest
import torch

import lazyviz

from ..lazy_equals_eager import both

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")  # which PyTorch warns of once

CHECKS = {
    "unchecked": lambda program, *args: program(*args),
    "unchecked by argument": lambda program, *args: program(*args, check_invariants=False),
    "checked by argument": lambda program, *args: program(*args, check_invariants=True),
    "checked in a context": lambda program, *args: _in_context(program, *args),
}


def _in_context(program, *args):
    with torch.sparse.check_sparse_tensor_invariants():
        return program(*args)


def tensors():
    """Indices and values of a matrix by coordinates, then compressed, then in blocks."""
    return (
        torch.tensor([[0, 1, 1], [2, 0, 2]]),
        torch.tensor([3.0, 4.0, 5.0]),
        torch.tensor([0, 1, 2]),
        torch.tensor([1, 0]),
        torch.tensor([1.0, 2.0]),
        torch.arange(8.0).reshape(2, 2, 2),
    )


def batched(compressed, plain, **options):
    plain = torch.stack([plain, plain.flip(0)])
    compressed = torch.stack([compressed, compressed])
    return torch.sparse_csr_tensor(compressed, plain, torch.ones(2, 2) * 2, (2, 2, 2), **options)


def weights(indices, values, **options):
    values = (values * 2).requires_grad_()
    (torch.sparse_coo_tensor(indices * 1, values, (2, 3), **options).to_dense() * 3).sum().backward()
    return values.grad


CONSTRUCTORS = {
    "lists": lambda i, v, c, p, w, b, **o: torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 2), **o),
    "lists without a size": lambda i, v, c, p, w, b, **o: torch.sparse_coo_tensor(
        [[0, 1], [1, 0]], [1, 2], **o
    ),
    "compressed lists": lambda i, v, c, p, w, b, **o: torch.sparse_csr_tensor(
        (0, 1, 2), (1, 0), (1, 2), size=(2, 2), **o
    ),
    "coo": lambda i, v, c, p, w, b, **o: torch.sparse_coo_tensor(i * 1, v * 2, (2, 3), **o),
    "coo without a size": lambda i, v, c, p, w, b, **o: torch.sparse_coo_tensor(i * 1, v * 2, **o),
    "coo of real tensors": lambda i, v, c, p, w, b, **o: torch.sparse_coo_tensor(i, v, **o),
    "coo of indices made by ops": lambda i, v, c, p, w, b, **o: torch.sparse_coo_tensor(
        torch.stack([i[0].flip(0), i[1] + 0]), v.cumsum(0), **o
    ),
    "coalesced": lambda i, v, c, p, w, b, **o: torch.sparse_coo_tensor(
        i * 1, v * 2, (2, 3), is_coalesced=True, **o
    ),
    "with dense dimensions": lambda i, v, c, p, w, b, **o: torch.sparse_coo_tensor(
        i * 1, torch.ones(3, 4) * 2, (2, 3, 4), **o
    ),
    "another dtype": lambda i, v, c, p, w, b, **o: torch.sparse_coo_tensor(
        i * 1, v * 2, (2, 3), dtype=torch.float64, **o
    ),
    "nothing": lambda i, v, c, p, w, b, **o: torch.sparse_coo_tensor(size=(2, 3), **o),
    "no elements": lambda i, v, c, p, w, b, **o: torch.sparse_coo_tensor(
        i[:, :0] * 1, v[:0] * 2, (2, 3), **o
    ),
    "no elements, no size": lambda i, v, c, p, w, b, **o: torch.sparse_coo_tensor(
        i[:, :0] * 1, v[:0] * 2, **o
    ),
    "csr": lambda i, v, c, p, w, b, **o: torch.sparse_csr_tensor(c * 1, p * 1, w * 2, (2, 2), **o),
    "csr without a size": lambda i, v, c, p, w, b, **o: torch.sparse_csr_tensor(c * 1, p * 1, w * 2, **o),
    "csc": lambda i, v, c, p, w, b, **o: torch.sparse_csc_tensor(c * 1, p * 1, w * 2, (2, 2), **o),
    "csc without a size": lambda i, v, c, p, w, b, **o: torch.sparse_csc_tensor(c * 1, p * 1, w * 2, **o),
    "bsr": lambda i, v, c, p, w, b, **o: torch.sparse_bsr_tensor(c * 1, p * 1, b * 2, (4, 4), **o),
    "bsr without a size": lambda i, v, c, p, w, b, **o: torch.sparse_bsr_tensor(c * 1, p * 1, b * 2, **o),
    "bsc": lambda i, v, c, p, w, b, **o: torch.sparse_bsc_tensor(c * 1, p * 1, b * 2, (4, 4), **o),
    "bsc without a size": lambda i, v, c, p, w, b, **o: torch.sparse_bsc_tensor(c * 1, p * 1, b * 2, **o),
    "compressed": lambda i, v, c, p, w, b, **o: torch.sparse_compressed_tensor(
        c * 1, p * 1, w * 2, (2, 2), layout=torch.sparse_csr, **o
    ),
    "compressed without a size": lambda i, v, c, p, w, b, **o: torch.sparse_compressed_tensor(
        c * 1, p * 1, w * 2, layout=torch.sparse_csc, **o
    ),
    "batched": lambda i, v, c, p, w, b, **o: batched(c, p, **o),
    "gradient of the values": lambda i, v, c, p, w, b, **o: weights(i, v, **o),
}
WRONG = {
    "an index beyond the size": lambda i, v, c, p, w, b, **o: torch.sparse_coo_tensor(
        i * 5, v * 1, (2, 3), **o
    ),
    "an index below zero": lambda i, v, c, p, w, b, **o: torch.sparse_coo_tensor(i - 1, v * 1, (2, 3), **o),
    "an index below zero, no size": lambda i, v, c, p, w, b, **o: torch.sparse_coo_tensor(i - 1, v * 1, **o),
    "floating indices": lambda i, v, c, p, w, b, **o: torch.sparse_coo_tensor(i / 2, v * 1, (2, 3), **o),
    "fewer values": lambda i, v, c, p, w, b, **o: torch.sparse_coo_tensor(i * 1, v[:2] * 1, (2, 3), **o),
    "not coalesced": lambda i, v, c, p, w, b, **o: torch.sparse_coo_tensor(
        i.flip(1), v * 1, (2, 3), is_coalesced=True, **o
    ),
    "too few rows": lambda i, v, c, p, w, b, **o: torch.sparse_csr_tensor(
        c[:2] * 1, p * 1, w * 1, (2, 2), **o
    ),
    "a wrong count": lambda i, v, c, p, w, b, **o: torch.sparse_csr_tensor(c + 1, p * 1, w * 1, (2, 2), **o),
    "a column beyond the size": lambda i, v, c, p, w, b, **o: torch.sparse_csr_tensor(
        c * 1, p * 7, w * 1, (2, 2), **o
    ),
    "a row beyond the size": lambda i, v, c, p, w, b, **o: torch.sparse_csc_tensor(
        c * 1, p * 7, w * 1, (2, 2), **o
    ),
    "blocks that do not fit": lambda i, v, c, p, w, b, **o: torch.sparse_bsr_tensor(
        c * 1, p * 1, b * 1, (5, 4), **o
    ),
}
USES = {
    "arithmetic": lambda a: (a * 2 + a).coalesce().to_dense(),
    "product": lambda a: torch.sparse.mm(a, torch.ones(3, 2) * 2),
    "transposed": lambda a: a.t(),
    "joined": lambda a: torch.cat([a, a]),
    "summed": lambda a: torch.sparse.sum(a),
    "indices": lambda a: a._indices() + 1,
    "mask": lambda a: (torch.ones(2, 3) * 2).sparse_mask(a.coalesce()),
    "compressed": lambda a: a.to_sparse_csr(),
    "compressed values": lambda a: a.to_sparse_csr().values() * 2,
    "copied": lambda a: copy.deepcopy(a),
    "zeros like": lambda a: torch.zeros_like(a),
    "softmax": lambda a: torch.sparse.softmax(a, 1),
}


LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr)
FACTORIES = {
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "full_like": lambda x, **o: torch.full_like(x, 2, **o),
    "empty_like": lambda x, **o: torch.empty_like(x, **o).zero_(),
    "rand_like": torch.rand_like,
    "new_zeros": lambda x, **o: x.new_zeros((2, 4), **o),
    "new_full": lambda x, **o: x.new_full((2, 4), 2, **o),
    "zeros": lambda x, **o: torch.zeros(2, 4, **o) + 0 * x.sum().item(),
    "full": lambda x, **o: torch.full((2, 4), 2.0, **o),
    "eye": lambda x, **o: torch.eye(4, **o),
    "arange": lambda x, **o: torch.arange(4, **o),
    "_to_copy": torch.ops.aten._to_copy,
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
def test_a_layout_that_is_asked_for(factory, layout):
    for like in (lambda d: d * 1, lambda d: (d * 1).to_sparse(), lambda d: (d * 1).to_sparse_csr()):
        both(
            lambda dense: factory(like(dense), layout=layout),  # noqa: B023
            lambda: torch.tensor([[0, 1.0, 2, 0], [3, 0, 0, 4]]),
            syncs=None,
            orders=("at once",),
        )


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
@pytest.mark.parametrize("program", CONSTRUCTORS.values(), ids=CONSTRUCTORS)
def test_constructors(program, check):
    both(lambda *args: check(program, *args), tensors, syncs=None, orders=("at once",))


@pytest.mark.parametrize("check", ["checked by argument", "checked in a context"])
@pytest.mark.parametrize("program", WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_found_at_its_line(program, check):
    both(lambda *args: CHECKS[check](program, *args), tensors, syncs=None, orders=("at once",))


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_uses(use):
    def program(indices, values):
        return use(torch.sparse_coo_tensor(indices * 1, values * 2, (2, 3)))

    both(program, lambda: tensors()[:2], syncs=None, orders=("at once",))


def test_a_sparse_tensor_is_one_sync_point_where_its_values_are_read():
    def program(indices, values):
        sparse = torch.sparse_coo_tensor(indices, values * 2, (2, 3))
        return (sparse + sparse).coalesce() * 3

    cause = "add of a sparse tensor cannot be deferred"  # how many elements it has depends on data
    graph = both(program, lambda: tensors()[:2], syncs={cause}, orders=("at once",))
    assert len(graph.sync_points) == 1


def test_a_sparse_tensor_of_what_is_there_is_no_sync_point():
    both(lambda: torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0]).to_sparse_csr(), orders=("at once",))


def written_values(sparse, values):
    values[0] = 7
    values.mul_(2)
    return sparse.to_dense()


def written_between(sparse, values):
    values += 1
    first = sparse.clone().to_dense()
    values += 1
    return first, sparse.to_dense(), torch.sparse.mm(sparse, torch.ones(3, 2))


def read_before_a_write(sparse, values):
    doubled = values * 2
    sparse.mul_(3)
    return doubled, values + 1, sparse.to_dense()


def known_values(sparse, values):
    values.copy_(torch.arange(3.0))
    sparse.zero_()
    return values * 1


VIEWS = {
    "coo": (lambda a: a.to_sparse(), lambda a: a._values()),
    "detached": (lambda a: a.to_sparse(), lambda a: a._values().detach()),
    "csr": (lambda a: a.to_sparse_csr(), lambda a: a.values()),
    "csc": (lambda a: a.to_sparse_csc(), lambda a: a.values()),
    "bsr": (lambda a: a.to_sparse_bsr((1, 1)), lambda a: a.values().flatten()),
}
MATRIX = [[1.0, 0, 2], [0, 3, 0]]


@pytest.mark.parametrize("layout", VIEWS)
@pytest.mark.parametrize("program", [written_values, written_between, read_before_a_write, known_values])
def test_a_sparse_tensor_and_its_parts_are_one_memory(program, layout):
    make, values_of = VIEWS[layout]

    def inside(dense):
        sparse = make(dense * 1)
        return program(sparse, values_of(sparse))

    def outside(sparse):
        return program(sparse, values_of(sparse))

    both(inside, lambda: torch.tensor(MATRIX), syncs=None, versions=False, orders=("at once",))
    both(outside, lambda: make(torch.tensor(MATRIX)), syncs=None, versions=False, orders=("at once",))


def test_written_indices_of_a_sparse_tensor():
    def program(sparse):
        sparse._indices()[1, 0] = 1
        return sparse.to_dense()

    both(program, lambda: torch.tensor(MATRIX).to_sparse(), syncs=None, orders=("at once",))


def test_a_write_to_the_values_of_a_sparse_tensor_stays_pending_after_the_block():
    sparse = torch.tensor(MATRIX).to_sparse()
    with lazyviz.lazy():
        sparse._values().add_(1)
    assert repr(sparse) == "tensor[2, 3] float32 cpu, pending write"
    assert sparse.to_dense().tolist() == [[2.0, 0.0, 3.0], [0.0, 4.0, 0.0]]
    assert "pending" not in repr(sparse)
