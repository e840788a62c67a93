"""Composite functions of ATen under a dispatch mode are bit-equal to eager, and deferred."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lazyviz

from ...bit_equality import difference
from ...lazy_equals_eager import assert_same_as_eager


def check_parity(program):
    expected = program()
    with lazyviz.lazy() as graph:
        result = program()
    graph.evaluate()
    assert difference(expected, result) is None
    return graph


def numbers(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


SPECTRA = {
    "svdvals": torch.linalg.svdvals,
    "eigvals": torch.linalg.eigvals,
    "eigvalsh": torch.linalg.eigvalsh,
    "cond": torch.linalg.cond,
    "nuclear norm": lambda matrix: torch.linalg.matrix_norm(matrix, "nuc"),
    "matrix_rank": torch.linalg.matrix_rank,
}


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_spectra_without_gradient_are_computed_without_vectors(name, dtype):
    matrix = numbers(7, 7, dtype=dtype)
    graph = check_parity(lambda: SPECTRA[name](matrix))
    assert not graph.sync_points


@pytest.mark.parametrize("name", SPECTRA)
def test_spectra_with_gradient_keep_what_it_needs(name):
    def program():
        matrix = numbers(7, 7).requires_grad_()
        result = SPECTRA[name](matrix)
        if result.requires_grad:
            result.abs().sum().backward()
        return result, matrix.grad

    check_parity(program)


CLASSES = torch.tensor([[0, 2], [1, 2]])


@pytest.mark.parametrize("arguments", [(3,), (5,), ()])
def test_classes_are_written_as_ones(arguments):
    graph = check_parity(lambda: torch.nn.functional.one_hot(CLASSES + 0, *arguments))
    assert not graph.sync_points


@pytest.mark.parametrize(("offset", "number"), [(0, 2), (-1, 3), (-1, -1), (0, 0)])
def test_classes_that_there_are_not_are_an_error(offset, number):
    def program():
        return torch.nn.functional.one_hot(CLASSES + offset, number).tolist()

    with pytest.raises(RuntimeError):
        program()
    with lazyviz.lazy(), pytest.raises((RuntimeError, IndexError), match="Class values|out of bounds"):
        program()
    lazyviz.reset()


@pytest.mark.parametrize("number", [-1, 0, 3])
def test_no_classes_are_written_as_in_eager(number):
    assert not assert_same_as_eager(
        lambda: torch.nn.functional.one_hot(CLASSES[:, :0] + 0, number)
    ).sync_points


@pytest.mark.parametrize("gradients", [(False, False), (True, False), (False, True)])
def test_one_matrix_for_a_batch_is_multiplied_as_in_eager(gradients):
    def program():
        left, right = numbers(9, 33, 65), numbers(1, 65, 17)
        left.requires_grad_(gradients[0])
        right.requires_grad_(gradients[1])
        product = left @ right
        if any(gradients):
            product.sum().backward()
        return product, left.grad, right.grad, type(product.grad_fn).__name__

    graph = check_parity(program)
    assert not graph.sync_points


def test_one_matrix_for_a_batch_with_out_is_multiplied_as_in_eager():
    def program():
        out = torch.zeros(9, 33, 17)
        torch.matmul(numbers(9, 33, 65), numbers(1, 65, 17), out=out)
        return out, torch.matmul(numbers(4, 4), numbers(4, 4), out=torch.zeros(4, 4))

    check_parity(program)


FOLDED = [
    ((2, 3, 4, 5), (5,)),
    ((2, 3, 4, 5), (5, 6)),
    ((2, 3, 5), (5, 6)),
    ((5,), (2, 3, 5, 4)),
    ((6, 5), (2, 3, 5, 4)),
    ((0, 3, 5), (5, 6)),
    ((2, 3, 0), (0, 4)),
]


def products_into(out_of, left, right, product):
    torch.manual_seed(0)
    left, right = torch.randn(left), torch.randn(right) * 2
    found = []
    for each in (left, left.transpose(0, 1).contiguous().transpose(0, 1) if left.dim() > 2 else left * 1):
        out = out_of(torch.matmul(left, right).shape)
        try:
            assert product(each, right, out=out) is out
            found.append((out, out.stride()))
        except RuntimeError as error:  # a view of `out` is not possible
            found.append((str(error), None))
    return found


@pytest.mark.parametrize("product", [torch.matmul, torch.linalg.matmul])
@pytest.mark.parametrize(
    "out_of",
    [
        torch.zeros,
        lambda shape: torch.empty(0),
        lambda shape: torch.zeros(shape) * 2,
        lambda shape: torch.zeros(*shape, 2)[..., 0],
        lambda shape: torch.zeros(*shape[::-1]).permute(*range(len(shape))[::-1]),
    ],
)
@pytest.mark.parametrize(("left", "right"), FOLDED)
def test_products_of_a_folded_batch_are_written_to_out(left, right, out_of, product):
    expected = products_into(out_of, left, right, product)
    with lazyviz.lazy() as graph:
        found = products_into(out_of, left, right, product)
    assert all("resize" in point.cause for point in graph.sync_points)
    graph.evaluate()
    for (one, strides), (other, expected_strides) in zip(found, expected):
        assert strides == expected_strides
        assert torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other


@pytest.mark.parametrize("shape", [(2, 3, 4, 6), (0,)])
def test_products_written_to_out_ignore_autocast_as_in_eager(shape):
    def program():
        with torch.autocast("cpu", torch.bfloat16):
            return torch.matmul(numbers(2, 3, 4, 5), numbers(5, 6), out=torch.zeros(shape))

    check_parity(program)


def test_quantiles_out_of_range_are_an_error_as_in_eager():
    values, wrong = numbers(5), torch.tensor([0.5, 1.5])
    with pytest.raises(RuntimeError) as eager:
        torch.quantile(values, wrong)
    with pytest.raises(RuntimeError) as lazy, lazyviz.lazy():
        torch.quantile(values, wrong)
    assert str(lazy.value) == str(eager.value)


CHECKS_ITSELF = torch.__version__ < "2.13"


def test_quantiles_of_a_known_or_outside_q_are_deferred():
    values, q = numbers(5), torch.tensor([0.25, 0.5])
    for function in (torch.quantile, torch.nanquantile):
        graph = check_parity(lambda function=function: (function(values, q), function(values, 0.1)))
        # torch 2.11 checks a tensor of q itself, where it sees a mode, by operators.
        assert {point.cause for point in graph.sync_points} <= ({"equal"} if CHECKS_ITSELF else set())
    graph = check_parity(lambda: torch.quantile(values, q * 2))
    assert graph.sync_points[0].cause == "quantile checks its q"
    assert len(graph.sync_points) == 1 + CHECKS_ITSELF


def test_another_dispatch_mode_is_seen_as_in_eager():
    class Listen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def program():
        with Listen():
            return torch.linalg.svdvals(numbers(4, 4)), numbers(3, 4, 4) @ numbers(1, 4, 4)

    seen: list[str] = []
    check_parity(program)
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


def test_vmap_and_grad_are_seen_as_in_eager():
    def program():
        batch = numbers(3, 4, 4)
        gradient = torch.func.grad(lambda matrix: torch.linalg.svdvals(matrix).sum())
        return torch.vmap(torch.linalg.svdvals)(batch), torch.vmap(gradient)(batch)

    check_parity(program)


def test_a_rank_is_written_to_out():
    def program():
        out = torch.zeros((), dtype=torch.int64)
        torch.linalg.matrix_rank(numbers(4, 4), out=out)
        return out, torch.linalg.matrix_rank(numbers(2, 4, 4), tol=0.1, out=torch.zeros(2, dtype=torch.int64))

    check_parity(program)


def test_tensor_split_reads_pending_indices():
    graph = check_parity(lambda: torch.tensor_split(numbers(7), torch.arange(100).sum().reshape(1) - 4948))
    assert [point.cause for point in graph.sync_points] == ["tensor_split reads its indices"]
