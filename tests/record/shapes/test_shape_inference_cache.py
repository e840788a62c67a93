"""The shape cache agrees with FakeTensor, and distinguishes all calls that differ."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import lazyviz
from lazyviz.record.shapes import kernel_probes
from lazyviz.record.shapes.shape_inference_cache import ShapeCache
from lazyviz.record.tape import tape

from ...bit_equality import difference


def both(program, *inputs):
    expected = program(*inputs)
    with lazyviz.lazy() as graph:
        result = program(*inputs)
        shape, stride, dtype = result.shape, result.stride(), result.dtype
    assert (shape, stride, dtype) == (expected.shape, expected.stride(), expected.dtype)
    graph.evaluate()
    assert torch.equal(result, expected)
    return graph


def test_a_second_recording_asks_nothing_again():
    def program(x):
        return (x @ x.t()).softmax(-1).sum()

    x = torch.randn(7, 3)
    both(program, x)
    misses = tape.shapes.misses
    both(program, torch.randn(7, 3))
    assert tape.shapes.misses == misses


def test_learning_rates_do_not_miss_the_cache():
    x = torch.randn(3, 3)
    both(lambda x: torch.add(x * 0.1, x, alpha=0.5), x)
    misses = tape.shapes.misses
    both(lambda x: torch.add(x * 0.2, x, alpha=0.75), x)
    assert tape.shapes.misses == misses


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_structural_integers_are_distinguished(groups):
    both(lambda x: F.group_norm(x, groups), torch.randn(4, 8, 3))


def test_the_type_of_a_scalar_decides_the_result_type():
    x = torch.arange(4)
    for scalar in (1, 1.0, True, 1j):
        both(lambda x, s=scalar: x * s, x)


def test_the_default_dtype_at_recording_time_holds():
    torch.set_default_dtype(torch.float64)
    try:
        expected = torch.ones(3) / 3
        with lazyviz.lazy() as graph:
            result = torch.ones(3) / 3
    finally:
        torch.set_default_dtype(torch.float32)
    graph.evaluate()
    assert result.dtype == torch.float64 and torch.equal(result, expected)


def test_views_know_the_size_of_their_storage():
    both(lambda x: x[2:4].as_strided((3, 2), (2, 1), 0), torch.randn(6, 2))
    with pytest.raises(RuntimeError, match="out of bounds"), lazyviz.lazy():
        torch.randn(6, 2)[2:4].as_strided((30, 2), (2, 1), 0)


@pytest.mark.parametrize(
    "program",
    [
        lambda: torch.ones(2, 3) @ torch.ones(2, 3),
        lambda: torch.ones(2, 3) + torch.ones(4),
        lambda: torch.cat([torch.ones(2, 3), torch.ones(2, 4)]),
        lambda: torch.ones(2, 3).view(5),
        lambda: F.conv2d(torch.ones(1, 3, 8, 8), torch.ones(4, 2, 3, 3)),
        lambda: torch.ones(3).sum(dim=2),
        lambda: F.linear(torch.ones(2, 3), torch.ones(4, 5)),
        lambda: torch.ones(2, dtype=torch.int64).mean(),
    ],
)
def test_a_wrong_shape_fails_at_recording_with_eagers_message(program):
    with pytest.raises(Exception) as eager:
        program()
    with pytest.raises(type(eager.value)) as lazy, lazyviz.lazy():
        program()
    assert str(lazy.value) == str(eager.value)


CTC_SCORES = torch.randn(10, 3, 5).log_softmax(2)
CTC_WORDS = torch.randint(1, 5, (3, 4))


@pytest.mark.parametrize("lengths", ["tensors", "pending tensors", "lists"])
@pytest.mark.parametrize("targets", ["rows", "one after the other"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ctc_loss_is_recorded_where_the_lengths_are_known(reduction, targets, lengths):
    many = [4, 2, 3]

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        log_probs = CTC_SCORES.clone().requires_grad_()
        given: tuple = torch.full((3,), 10), torch.tensor(many)
        if lengths == "lists":
            given = [10] * 3, many
        elif lengths == "pending tensors":
            given = given[0] + 0, given[1] * 1
        words = CTC_WORDS if targets == "rows" else torch.cat([row[:n] for row, n in zip(CTC_WORDS, many)])
        loss = F.ctc_loss(log_probs * 1, words, *given, reduction=reduction, zero_infinity=True)
        return loss, torch.autograd.grad(loss.sum(), log_probs)[0]

    expected = run()
    with lazyviz.lazy() as graph:
        actual = run()
    assert not graph.sync_points
    assert {"_ctc_loss", "_ctc_loss_backward"} <= {node.name.rpartition("_")[0] for node in graph.nodes}
    graph.evaluate()
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize(
    "lengths",
    [([10, 10], [4, 2, 3]), ([11, 10, 10], [4, 2, 3]), ([10] * 3, [5, 2, 3]), ([10] * 3, [4, -1, 3])],
)
def test_lengths_that_ctc_loss_refuses_are_refused_at_their_line(lengths):
    def run() -> None:
        F.ctc_loss(CTC_SCORES * 1, CTC_WORDS, *lengths, reduction="none")

    with pytest.raises(RuntimeError) as expected:
        run()
    with lazyviz.lazy(), pytest.raises(RuntimeError) as actual:
        run()
    assert str(actual.value) == str(expected.value)


def test_a_library_op_without_a_shape_rule_is_a_sync_point():
    library = torch.library.Library("lazyviz_test", "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: x * 2, "CPU")
    x = torch.ones(3)
    with lazyviz.lazy() as graph:
        y = torch.ops.lazyviz_test.double(x + 1) + 1
    assert "lazyviz_test.double" in graph.sync_points[0].cause
    assert y.tolist() == [5, 5, 5]


def test_sparse_tensors_run_at_a_named_sync_point():
    dense = torch.eye(3)
    with lazyviz.lazy() as graph:
        product = torch.sparse.mm((dense * 2).to_sparse(), dense + 1)
    assert graph.sync_points
    assert torch.equal(product, torch.sparse.mm((dense * 2).to_sparse(), dense + 1))


def test_out_tensors_made_in_the_block_grow_and_are_read_later():
    a, b = torch.randn(5, 5), torch.randn(5)
    expected = torch.linalg.solve(a, b)  # it grows three `out=` tensors of its own and reads one of them
    out = torch.zeros(5)
    with lazyviz.lazy() as graph:
        torch.linalg.solve(a, b, out=out)
        grown = torch.add(a, 1, out=torch.empty(0)) * 2
    graph.evaluate()
    assert not graph.sync_points
    assert difference((expected, (a + 1) * 2), (out, grown)) is None


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss])
def test_gradients_of_losses_are_laid_out_as_the_kernel_does(loss):
    def program(x, y):
        turned = x.permute(0, 3, 1, 2).requires_grad_()
        return torch.autograd.grad(loss(turned, y), turned)[0]

    both(program, torch.randn(2, 4, 3, 5), torch.randn(2, 5, 4, 3))


def test_batch_norm_of_a_transposed_sequence_is_contiguous():
    both(
        lambda x: torch.nn.BatchNorm1d(6)(x.transpose(1, 2)).transpose(1, 2).reshape(20, 6),
        torch.randn(4, 5, 6),
    )


def test_a_kernel_that_takes_more_than_its_shape_rule_is_deferred():
    x, weights = torch.randn(8, 12), torch.randn(2, 6, 12).transpose(-2, -1)
    graph = both(
        lambda x, w: torch._grouped_mm(x, w, torch.tensor([3, 8], dtype=torch.int32)), x[:, :12], weights
    )
    assert not graph.sync_points


def test_batch_norm_under_autocast_keeps_its_statistics_in_single_precision():
    x = torch.randn(5, 6, dtype=torch.bfloat16)
    norm = torch.nn.BatchNorm1d(6)

    def program(x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(norm(x).float().pow(2).sum(), x)[0]

    assert not both(program, x).sync_points


def test_out_of_the_right_shape_keeps_its_strides():
    x, out = torch.rand(3, 4).t(), torch.zeros(4, 3)
    expected = torch.cos(x, out=torch.zeros(4, 3))
    with lazyviz.lazy() as graph:
        torch.cos(x, out=out)
    assert not graph.sync_points
    graph.evaluate()
    assert difference(expected, out) is None


def test_asking_a_kernel_that_refuses_keeps_no_tensor():
    factors, pivots = torch.linalg.lu_factor(torch.randn(13, 13))
    lazy, eager = (torch.ones(13, 1, requires_grad=True) for _ in range(2))
    torch.linalg.lu_solve(factors, pivots, eager).sum().backward()
    with lazyviz.lazy() as graph:
        torch.linalg.lu_solve(factors, pivots, lazy).sum().backward()
    graph.evaluate()
    assert lazy.grad.stride() == eager.grad.stride()  # autograd copies a gradient that others hold
    assert torch.equal(lazy.grad, eager.grad)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_an_out_tensor_that_grows_gets_the_kernels_strides():
    x = torch.arange(12.0).view(4, 3).t()
    expected = torch.add(x, 1, out=torch.ones(4, 3))
    with lazyviz.lazy() as graph:
        out = torch.add(x, 1, out=torch.ones(4, 3))
        assert out.stride() == expected.stride() == (1, 3)
        filled = torch.arange(12, out=torch.ones(4, 3))
        assert filled.shape == (4, 3)
    assert not graph.sync_points
    assert torch.equal(out, expected) and filled[3].tolist() == [9, 10, 11]


def test_a_view_of_an_empty_tensor_keeps_its_offset():
    empty = torch.ones(2, 3)[2:]
    with lazyviz.lazy():
        for _ in range(2):
            assert empty.view(-1).storage_offset() == empty.view(0).storage_offset() == 6


def test_kernels_that_trust_pivots_are_asked_with_rows_that_there_are(monkeypatch):
    asked = []
    full = torch.full

    def note(size, fill, **options):
        if options["dtype"] == torch.int32:
            asked.append(fill)
        return full(size, fill, **options)

    matrix = torch.eye(3, dtype=torch.float16)  # LAPACK has no such kernel, so it is asked what it says
    pivots = torch.ones(3, dtype=torch.int32)
    monkeypatch.setattr(kernel_probes.torch, "full", note)
    with pytest.raises(RuntimeError, match="Half"), lazyviz.lazy():
        torch.linalg.lu_solve(matrix, pivots, matrix)
    assert asked and all(fill == 1 for fill in asked)


@pytest.mark.parametrize("transform", [torch.fft.fftn, torch.fft.rfftn, torch.fft.irfftn, torch.fft.hfftn])
def test_transforms_are_laid_out_as_their_kernel_leaves_them(transform):
    for shape in ((4, 3, 5), (2, 1, 3), (1, 6, 2)):
        for order in ((0, 1, 2), (2, 0, 1), (1, 0, 2), (0, 2, 1)):
            for dim in ((0,), (1, 2), (2, 0), (0, 1, 2)):
                x = torch.randn(shape).permute(order)
                if transform is not torch.fft.rfftn:
                    x = torch.complex(x, x)
                both(lambda x, dim=dim: transform(x, [8] * len(dim), dim), x)


@pytest.mark.parametrize("default", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_complex_fill_value_has_eagers_dtype_under_every_default(default):
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        both(lambda: torch.full((2, 2), 1j))
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32])
def test_elements_are_updated_in_place_without_pytorchs_rules_for_each_position(dtype, monkeypatch):
    def program(rows):
        x = torch.zeros(5, 6, dtype=dtype)
        for row in rows:
            x[row, 2] *= 1
            x[row] += x[row]
        return x

    both(lambda: program(range(2)))
    with monkeypatch.context() as patched, lazyviz.lazy() as graph:
        patched.setattr(type(tape.shapes), "_ask", lambda *call: pytest.fail(f"asked for {call[1]}"))
        result = program(range(2, 5))
    graph.evaluate()
    assert torch.equal(result, program(range(2, 5)))


def test_a_write_to_memory_that_overlaps_its_source_in_part_is_refused_as_in_eager_mode():
    x = torch.arange(6.0)
    with pytest.raises(RuntimeError, match="unsupported operation") as expected:
        x[1:].add_(x[:-1])
    with lazyviz.lazy(), pytest.raises(RuntimeError, match="unsupported operation") as raised:
        x[1:].add_(x[:-1])
    assert str(raised.value) == str(expected.value)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
def test_conversions_to_sparse_layouts_ask_no_shape_rule(layout, monkeypatch):
    x = torch.eye(4)
    block = (2, 2) if layout.startswith("b") else None
    convert = getattr(torch, f"sparse_{layout}")
    expected = (x * 2).to_sparse(layout=convert, blocksize=block).to_dense()
    with monkeypatch.context() as patched, lazyviz.lazy() as graph:
        doubled = x * 2
        patched.setattr(type(tape.shapes), "_ask", lambda *call: pytest.fail(f"asked for {call[1]}"))
        sparse = doubled.to_sparse(layout=convert, blocksize=block)
    assert torch.equal(sparse.to_dense(), expected)
    assert len(graph.sync_points) == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.nonzero(),
        lambda x: x[x > 2] * 2,
        lambda x: torch.masked_select(x, x > 1).sum(),
        lambda x: torch.unique(x, return_counts=True),
        lambda x: torch.repeat_interleave(x, x.long()),
        lambda x: torch.where(x > 1)[0] + 1,
        lambda x: torch.bincount(x.long()),
    ],
)
def test_the_shape_rule_of_a_data_dependent_op_is_asked_once(monkeypatch, use):
    asked = []
    rule = ShapeCache._ask

    def noted(self, op, *call):
        asked.append(op)
        return rule(self, op, *call)

    data = [torch.tensor(row) for row in ([0.0, 1, 2, 3], [3.0, 3, 3, 3], [0.0, 0, 0, 0], [1.0, 0, 4, 0])]
    expected = [use(x * 1) for x in data]
    with lazyviz.lazy():
        use(data[0] * 1)
        monkeypatch.setattr(ShapeCache, "_ask", noted)
        again = use(data[0] * 1)
        assert asked == []
        actual = [again, *[use(x * 1) for x in data[1:]]]
    lazyviz.sync()
    assert difference(expected, actual) is None
