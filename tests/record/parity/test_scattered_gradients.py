"""Gradients that eager writes into zeros in place are recorded in place, bit-equal to eager."""

from __future__ import annotations

import pytest
import torch

import lazyviz

from ...bit_equality import difference

ROWS, PLACES = torch.tensor([1, 4, 1, 0]), torch.arange(30).reshape(5, 6) % 5

TAKEN = {
    "scatter_": lambda x: x.sort(0).values,
    "scatter_.src": lambda x: x.median(1).values,
    "scatter_add_": lambda x: x.cummax(0).values,
    "scatter_add_.default": lambda x: x.gather(0, PLACES),
    "index_add_": lambda x: x.index_select(0, ROWS),
    "put_": lambda x: x.take(PLACES),
    "index_put_": lambda x: x[ROWS],
    "index_put_.default": lambda x: x[:, ROWS, None],
    "masked_scatter_": lambda x: x.masked_select(PLACES > 1),
    "masked_scatter_.row": lambda x: x.masked_select(PLACES[0] > 1),
    "masked_scatter_.more": lambda x: x[:1].masked_select(PLACES > 1),
    "index_fill_": lambda x: x.trace(),
    "index_fill_.turned": lambda x: x.t().trace(),
    "index_fill_.tall": lambda x: x[:, :2].trace(),
}


def gradients(take, *, twice):
    torch.manual_seed(0)
    x = torch.randn(5, 6, requires_grad=True)
    taken = take(x * 1.5)
    first = torch.autograd.grad((taken**3).sum(), x, create_graph=twice)[0]
    return (first, torch.autograd.grad(first.square().sum(), x)[0]) if twice else (first,)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("name", TAKEN)
def test_it_is_recorded_in_place_with_eager_s_bits(name, twice):
    expected = gradients(TAKEN[name], twice=twice)
    with lazyviz.lazy() as graph:
        found = gradients(TAKEN[name], twice=twice)
    names = [node.op._schema.name.removeprefix("aten::") for node in graph.nodes]
    in_place = name.partition(".")[0]
    assert in_place in names and in_place.rstrip("_") not in names
    graph.evaluate()
    assert difference(expected, found) is None


def test_what_a_hook_puts_somewhere_leaves_its_tensor_as_it_is():
    def run():
        torch.manual_seed(0)
        x = torch.randn(5, 6, requires_grad=True)
        rows = (x * 2)[ROWS]

        def hook(grad):
            zeros = grad.new_zeros(4, 6)
            put = zeros.index_put((ROWS[:2] % 4,), grad[:2], accumulate=True)
            return put + zeros

        rows.register_hook(hook)
        rows.grad_fn.register_prehook(lambda grads: (hook(grads[0]),))
        rows.sum().backward()
        return x.grad

    expected = run()
    with lazyviz.lazy() as graph:
        found = run()
    graph.evaluate()
    assert torch.equal(expected, found)


def test_a_function_of_a_transform_keeps_to_its_own_way():
    x, function = torch.randn(5, 6), torch.func.vmap(torch.func.grad(lambda row: row[ROWS].pow(2).sum()))
    with lazyviz.lazy() as graph:
        found = function(x)
    graph.evaluate()
    assert torch.equal(found, function(x))


def test_with_a_named_batch_each_piece_has_a_gradient_of_the_table_to_add():
    def run(table, rows):
        loss = (table[rows] + table.index_select(0, rows) + table.gather(0, rows[:, None].expand(-1, 6))).pow(
            2
        )
        loss.mean().backward()

    torch.manual_seed(0)
    values, rows = torch.randn(5, 6), torch.arange(8) % 5
    eager, ours = values.clone().requires_grad_(), values.clone().requires_grad_()
    run(eager, rows)
    with lazyviz.lazy(batch=[rows]) as graph:
        run(ours, rows)
    assert graph.evaluate(split=4).pieces == 4
    torch.testing.assert_close(ours.grad, eager.grad)
