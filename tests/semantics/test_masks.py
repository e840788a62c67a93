"""Boolean and legacy uint8 masks, in forward and backward: known, pending, and written."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import lazyviz

from ..lazy_equals_eager import assert_same_as_eager

PROGRAMS = []


def program(function):
    PROGRAMS.append(function)
    return function


def leaf(*shape, dtype=None):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


@program
def a_mask_of_a_leaf():
    y = torch.randn(6).requires_grad_()
    m = torch.rand(6) > 0.5
    y[m].sum().backward()
    return y.grad


@program
def a_mask_whose_values_are_squared():
    y, m = leaf(6), torch.rand(6) > 0.5
    (y[m] ** 2).sum().backward()
    return y.grad


@program
def a_mask_of_two_dimensions():
    y = leaf(3, 4)
    y[y > 0].sum().backward()
    return y.grad


@program
def a_mask_of_rows():
    y = leaf(3, 4)
    (y[y[:, 0] > 0] * 2).mean().backward()
    return y.grad


@program
def a_mask_of_columns():
    y = leaf(3, 4)
    (y[:, y[0] > 0] * 2).mean().backward()
    return y.grad


@program
def gradients_of_gradients():
    y = leaf(3, 4)
    (gradient,) = torch.autograd.grad((y[y > 0] ** 3).sum(), y, create_graph=True)
    (gradient**2).sum().backward()
    return y.grad


@program
def a_mask_of_a_gradient():
    y, m = leaf(4, 6), torch.rand(4) > 0.5
    (gradient,) = torch.autograd.grad((y[m] ** 2).sum(), y, create_graph=True)
    return torch.autograd.grad(gradient[m].sum(), y)


@program
def positions_by_nonzero():
    y = leaf(6)
    i = (y > 0).nonzero().squeeze(1)
    y[i].sum().backward()
    return y.grad, i


@program
def positions_by_where():
    y = leaf(3, 3)
    i, j = torch.where(y > 0)
    y[i, j].prod().backward()
    return y.grad


@program
def masked_select():
    y = leaf(6)
    torch.masked_select(y, y > 0).sum().backward()
    return y.grad


@program
def a_number_where_the_mask_is():
    y = leaf(6)
    z = y.clone()
    z[z > 0] = 0.5
    z.sum().backward()
    return y.grad


@program
def masked_scatter():
    y, v = leaf(6), torch.ones(6, requires_grad=True)
    z = y.clone()
    z.masked_scatter_(z > 0, v)
    z.pow(2).sum().backward()
    return y.grad, v.grad


@program
def values_put_back_by_the_same_mask():
    y = leaf(6)
    z = y.clone()
    m = z > 0
    z[m] = (y * 2)[m]
    z.pow(2).sum().backward()
    return y.grad


@program
def doubled_in_place_by_a_mask():
    y, m = leaf(6), torch.rand(6) > 0.5
    z = y.clone()
    z[m] = z[m] * 2
    z[m].sum().backward()
    return y.grad


@program
def put_with_accumulation():
    y = torch.randn(6)
    y.index_put_((y > 0,), torch.ones(1), accumulate=True)
    return y


@program
def too_many_expanded_values():
    y = torch.randn(6)
    y[y > 0] = torch.ones(1).expand(6)
    return y


@program
def too_many_values():
    y, m = leaf(4), torch.rand(4) > 0.5
    z = y * 1
    z[m] = torch.randn(7)
    return z


@program
def a_mask_of_another_size():
    y, m = leaf(5), torch.rand(4) > 0.5
    y[m].sum().backward()
    return y.grad


@program
def the_sum_of_the_rest():
    y = torch.randn(6)
    m = y > 0
    y[~m] = y[m].sum()
    return y


@program
def a_loss_of_what_counts():
    y = leaf(2, 3, 4)
    z = y[y.sum(-1) > 0]
    F.cross_entropy(z, torch.zeros(z.shape[0], dtype=torch.long)).backward()
    return y.grad


@program
def inverse_and_counts():
    y = leaf(6)
    u, inverse, counts = torch.unique((y > 0).long(), return_inverse=True, return_counts=True)
    (y * inverse).sum().backward()
    return y.grad, u, counts


class ByMask(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        m = x > 0
        ctx.save_for_backward(m)
        return x[m]

    @staticmethod
    def backward(ctx, gradient):
        (m,) = ctx.saved_tensors
        result = torch.zeros(m.shape)
        result[m] = gradient
        return result


@program
def a_custom_function():
    y = leaf(6)
    ByMask.apply(y * 2).sum().backward()
    return y.grad


@program
def a_mask_written_element_by_element():
    y, m = leaf(6), torch.zeros(6, dtype=torch.bool)
    m[2] = True
    m[4] = True
    y[m].sum().backward()
    return y.grad


@program
def a_mask_written_after_its_use():
    y, m = leaf(6), torch.rand(6) > 0.5
    z = y[m]
    m.logical_not_()
    z.sum().backward()
    return y.grad


@program
def a_mask_and_a_slice():
    y, m = leaf(4, 6), torch.rand(4) > 0.5
    y[m, 1:3].sum().backward()
    return y.grad


@program
def a_mask_and_an_index():
    y, m = leaf(4, 6), torch.rand(4) > 0.5
    (y[m, torch.tensor([1])] ** 2).sum().backward()
    return y.grad


@program
def gradcheck():
    return torch.autograd.gradcheck(lambda y: y[y > 0] ** 2, [leaf(6, dtype=torch.double)])


@program
def gradgradcheck():
    return torch.autograd.gradgradcheck(lambda y: y[y > 0] ** 3, [leaf(6, dtype=torch.double)])


@program
def checkpointing():
    y = leaf(6)
    checkpoint(lambda y: y[y > 0].exp(), y, use_reentrant=False).sum().backward()
    return y.grad


@program
def a_function_transform():
    y, m = leaf(4), torch.rand(4) > 0.5
    return torch.func.grad(lambda y: y[m].sum())(y)


@program
def the_same_mask_in_a_loop():
    y, m = leaf(6), torch.rand(6) > 0.5
    for _ in range(3):
        y.grad = None
        (y[m] * 3).sum().backward()
    return y.grad


@program
def a_mask_and_its_opposite():
    y, m = leaf(6), torch.rand(6) > 0.5
    y[m].sum().backward()
    y[~m].sum().backward()
    return y.grad


@program
def a_conjugate_view():
    y = leaf(6, dtype=torch.cfloat)
    y.conj()[y.real > 0].abs().sum().backward()
    return y.grad


@program
def an_old_mask():
    y, m = torch.randn(6), (torch.rand(6) > 0.5).to(torch.uint8)
    return y[m], y[m]


@program
def an_old_mask_in_the_backward_pass():
    y, m = leaf(6), (torch.rand(6) > 0.5).byte()
    (y[m] * 2).sum().backward()
    return y.grad


@program
def an_old_mask_of_a_power():
    y = leaf(3, 4)
    (y[(y > 0).to(torch.uint8)] ** 3).sum().backward()
    return y.grad


@program
def a_number_where_an_old_mask_is():
    y, m = torch.randn(6), (torch.rand(6) > 0.5).byte()
    y[m] = 2
    return y


@program
def an_old_mask_for_masked_select():
    return torch.masked_select(leaf(6), (torch.rand(6) > 0.5).byte())


@program
def an_old_mask_for_masked_fill():
    return torch.randn(6).masked_fill((torch.rand(6) > 0.5).byte(), 2.0)


@program
def an_old_mask_for_where():
    y = torch.randn(6)
    return torch.where((torch.rand(6) > 0.5).byte(), y, y * 2)


@program
def an_old_mask_for_masked_scatter():
    y = torch.randn(6)
    return y.masked_scatter((torch.rand(6) > 0.5).byte(), y * 2)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_masks(program):
    assert_same_as_eager(program)


@pytest.mark.parametrize("written", [False, True], ids=["outside", "written"])
def test_a_mask_from_outside(written):
    kept = torch.rand(6, generator=torch.Generator().manual_seed(3)) > 0.5

    def masked():
        m = kept.clone() if not written else kept
        y = leaf(6)
        if written:
            m.logical_not_()
        y[m].sum().backward()
        return y.grad, m.clone()

    if written:
        before = kept.clone()

        def again():
            kept.copy_(before)
            return masked()

        assert_same_as_eager(again)
    else:
        assert_same_as_eager(masked)


SELECTED = {
    "rows": lambda x, rows, columns, both: x[rows],
    "columns": lambda x, rows, columns, both: x[:, columns],
    "elements": lambda x, rows, columns, both: x[both],
    "turned elements": lambda x, rows, columns, both: x.t()[both.t()],
    "rows, then columns": lambda x, rows, columns, both: x[rows][:, columns],
    "one column of rows": lambda x, rows, columns, both: x[rows, 1],
    "an element of each row": lambda x, rows, columns, both: x[rows, torch.tensor([0, 3, 2])],
    "rows of a new dimension": lambda x, rows, columns, both: x[None, rows],
    "legacy mask": lambda x, rows, columns, both: x[rows.to(torch.uint8)],
}


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("name", SELECTED)
def test_a_mask_that_is_known_takes_no_sync_point_in_either_pass(name):
    def step():
        torch.manual_seed(0)
        x, both = torch.randn(6, 5, requires_grad=True), torch.rand(6, 5) > 0.4
        rows = torch.tensor([True, False, True, False, False, True])
        columns = torch.tensor([False, True, True, False, True])
        yield
        SELECTED[name](x * 2, rows, columns, both).square().sum().backward()
        yield x.grad

    eager, lazy = step(), step()
    next(eager)
    next(lazy)
    expected = next(eager)
    with lazyviz.lazy() as graph:
        found = next(lazy)
    assert not graph.sync_points
    assert torch.equal(found, expected)
