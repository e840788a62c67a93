"""Formulas that ATen changes for tensor subclasses are bit-equal to eager, at a named sync point."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import lazyviz
from lazyviz.torch_internals import private_api

from ...bit_equality import difference


def check_parity(program, *make_inputs):
    expected = program(*[make() for make in make_inputs])
    inputs = [make() for make in make_inputs]
    with lazyviz.lazy() as graph:
        result = program(*inputs)
    graph.evaluate()
    assert difference(expected, result) is None
    return graph


def gradients(function):
    def program(*inputs):
        output = function(*inputs)
        leaves = [tensor for tensor in inputs if tensor.requires_grad]
        weights = torch.linspace(0.5, 1.5, output.numel()).reshape(output.shape)
        return torch.autograd.grad((output * weights).sum(), leaves)

    return program


def seeded(*shape, seed=0):
    def make():
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator).requires_grad_()

    return make


MASK = torch.arange(400).reshape(20, 20) % 3 == 0

CASES = {
    "ProdBackward1": (gradients(lambda x: x.prod(1)), seeded(5, 5, 5)),
    "ProdBackward0": (gradients(lambda x: x.prod()), seeded(30)),
    "MaskedFillBackward1": (gradients(lambda x, v: x.masked_fill(MASK, v)), seeded(20, 20), seeded()),
    "OrmqrBackward0": (gradients(torch.ormqr), seeded(5, 5), seeded(5, seed=1), seeded(5, 5, seed=2)),
}


for reduction, node in {
    torch.max: "MaxBackward1",
    torch.min: "MinBackward1",
    torch.median: "MedianBackward0",
    torch.nanmedian: "NanmedianBackward0",
}.items():
    # A negative gradient: zeros elsewhere are positive ones in eager.
    CASES[node] = (gradients(lambda x, reduction=reduction: -reduction(x)), seeded(6))


def gradients_of_gradients(function):
    def program(x):
        (gradient,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        return gradient, *torch.autograd.grad(gradient.square().sum(), x)

    return program


@pytest.mark.parametrize("function", [lambda x: x.cumprod(0), torch.matrix_exp, torch.linalg.det])
def test_a_second_gradient_has_eager_bits(function):
    check_parity(gradients_of_gradients(function), seeded(5, 5))


@pytest.mark.parametrize("decompose", [torch.linalg.eig, torch.linalg.eigh])
def test_a_gradient_that_depends_on_the_phase_is_the_error_of_eager(decompose):
    def program():
        matrix = torch.randn(4, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
        decompose(matrix.requires_grad_())[1].real.sum().backward()

    with pytest.raises(RuntimeError) as eager:
        program()
    with pytest.raises(RuntimeError) as lazy, lazyviz.lazy():
        program()
    assert str(lazy.value) == str(eager.value)


@pytest.mark.parametrize("name", CASES)
def test_its_gradient_has_eager_bits(name):
    program, *inputs = CASES[name]
    graph = check_parity(program, *inputs)
    assert [point.cause for point in graph.sync_points] == [f"{name} reads values"]


@pytest.mark.skipif(private_api.CUMPROD_ASKS_ALWAYS, reason="this PyTorch's formula reads values")
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_a_plan_says_which_values_a_gradient_is_recorded_for(dtype):
    x = torch.ones(4, 5, dtype=dtype, requires_grad=True)
    with lazyviz.lazy() as graph:
        x.cumprod(0).abs().sum().backward()
    assert not graph.sync_points
    assert "Assumed: the inputs of cumprod have no zeros, with which" in graph.plan().explain()


def test_recording_goes_on_after_such_a_gradient():
    def program(x):
        x.relu().prod(0).sum().backward()
        return x.grad * 2

    graph = check_parity(program, seeded(6, 7))
    assert graph.nodes[-1].op is torch.ops.aten.mul.Tensor


def test_recording_goes_on_after_such_a_gradient_failed():
    x = torch.ones(3, 3, requires_grad=True)
    with lazyviz.lazy() as graph:
        total = (x * 2).prod(0)
        total.register_hook(lambda gradient: gradient[:, None])  # of a wrong shape
        with pytest.raises(RuntimeError):
            total.sum().backward()
        later = x + 1
    assert lazyviz.is_lazy(later)
    graph.evaluate()


def test_where_syncs_are_forbidden_it_is_an_error():
    x = torch.ones(3, 3, requires_grad=True)
    with lazyviz.lazy(allow_sync=False):
        total = (x * 2).prod(0).sum()
        with pytest.raises(lazyviz.SyncError, match="ProdBackward1 reads values"):
            total.backward()


def test_weighted_and_smoothed_cross_entropy():
    targets = torch.arange(50) % 7
    targets[::5] = -100

    def program(logits):
        weight = torch.linspace(0.1, 2, 7)
        loss = F.cross_entropy(logits, targets, weight, label_smoothing=0.1)
        return loss.detach(), torch.autograd.grad(loss, logits)

    graph = check_parity(program, seeded(50, 7))
    assert "cross_entropy" in graph.sync_points[0].cause


@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing": 0.1},
        {"label_smoothing": 0.1, "weight": torch.linspace(0.1, 2, 7), "reduction": "sum"},
        {"label_smoothing": 0.1, "weight": torch.linspace(0.1, 2, 7), "reduction": "none"},
        {
            "label_smoothing": 0.1,
            "weight": torch.linspace(0.1, 2, 7),
            "target": torch.arange(49.0).reshape(7, 7).softmax(1),
        },
    ],
)
def test_other_cross_entropy_is_deferred(options):
    target = options.get("target", torch.arange(7))

    def program(logits):
        loss = F.cross_entropy(logits, **{"target": target, **options})
        return torch.autograd.grad(loss.sum(), logits)

    assert not check_parity(program, seeded(7, 7)).sync_points


def sums_of(program):
    """The additions of gradients that the engine makes in a lazy block, by operator."""
    x = torch.randn(3, 4, requires_grad=True)
    expected = torch.autograd.grad(program(x), x)
    with lazyviz.lazy() as graph:
        results = torch.autograd.grad(program(x), x)
    names = [str(n.op) for n in graph.nodes if n.phase == "backward" and "add" in str(n.op)]
    graph.evaluate()
    assert difference(expected, results) is None
    return names


def test_the_engine_adds_gradients_in_place():
    def program(x):
        y = x * 2
        return (y.exp() + y.sin() + y.cos()).sum()

    assert sums_of(program) == ["aten.add_.Tensor"] * 2


def test_a_gradient_with_another_reference_is_not_added_to():
    kept = []

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            result = gradient * 3
            kept.append(result)
            return result

    def program(x):
        y = x * 2
        return (y.exp() + Keep.apply(y)).sum()

    assert sums_of(program) == ["aten.add.Tensor"]
    assert torch.equal(*kept)  # eager's, and the block's


def test_a_gradient_on_shared_memory_is_not_added_to():
    def program(x):
        y = x * 2
        return (y.exp() + y.sum(0)).sum()  # the gradient of sum is expanded

    assert sums_of(program) in (["aten.add.Tensor"], ["aten.add_.Tensor"])


def test_additions_in_formulas_and_in_hooks_are_not_the_engine_s():
    def program(x):
        y = x * 2
        y.register_hook(lambda gradient: gradient + gradient)
        return (torch.nn.functional.gelu(y) + y.sin()).sum()

    assert sums_of(program).count("aten.add_.Tensor") == 1


def test_with_create_graph_nothing_is_added_in_place():
    x = torch.randn(3, requires_grad=True)
    with lazyviz.lazy() as graph:
        y = x * 2
        torch.autograd.grad((y.exp() + y.sin()).sum(), x, create_graph=True)
    assert "aten.add_.Tensor" not in [str(node.op) for node in graph.nodes]


def test_under_checkpointing_its_saved_tensors_are_made_once():
    def product(x):
        return checkpoint(lambda x: F.dropout(x * 2, 0.3).prod(1).sin(), x, use_reentrant=False)

    def program(x):
        torch.manual_seed(0)
        return gradients(product)(x), torch.rand(2)

    check_parity(program, seeded(4, 6))


def test_formulas_outside_of_the_block_while_something_is_pending():
    def gradient():
        x = torch.arange(12.0).cos().requires_grad_()
        x.prod().backward()
        return x.grad

    expected = gradient()
    with lazyviz.lazy():
        pending = torch.ones(3) * 2
    assert difference(expected, gradient()) is None
    assert pending.tolist() == [2, 2, 2]
