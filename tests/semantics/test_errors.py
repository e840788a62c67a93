"""Errors are those of eager PyTorch, at the user's line: while recording if possible, else later."""

from __future__ import annotations

import gc
import os
import traceback
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyviz

from ..bit_equality import difference

A = torch.arange(12.0).reshape(4, 3)
LEAF = torch.ones(3, requires_grad=True)
LONG = torch.arange(3)

# What metadata can tell, by family.
METADATA = {
    # matrices
    "mm": lambda: torch.mm(A, A),
    "matmul": lambda: A @ A,
    "matmul of vectors": lambda: torch.ones(3) @ torch.ones(4),
    "bmm": lambda: torch.bmm(A, A),
    "addmm": lambda: torch.addmm(torch.ones(7), A, A.t()),
    "linear": lambda: F.linear(A, torch.ones(5, 4)),
    "linear dtype": lambda: F.linear(A, torch.ones(5, 3, dtype=torch.float64)),
    "linear integers": lambda: nn.Linear(3, 2)(LONG),
    "linear half": lambda: nn.Linear(3, 2)(A.half()),
    "dot": lambda: torch.dot(torch.ones(3), torch.ones(4)),
    "einsum": lambda: torch.einsum("ij,jk->ik", A, A),
    "outer": lambda: torch.outer(A, A),
    "bilinear": lambda: F.bilinear(A, A, torch.ones(2, 4, 3)),
    "cholesky of a rectangle": lambda: torch.linalg.cholesky(A),
    "inverse of integers": lambda: torch.linalg.inv(torch.ones(2, 2, dtype=torch.int64)),
    "solve": lambda: torch.linalg.solve(torch.ones(2, 2), torch.ones(3, 1)),
    "det of a vector": lambda: torch.linalg.det(torch.ones(3)),
    # convolutions and pooling
    "conv2d channels": lambda: nn.Conv2d(3, 4, 3)(torch.ones(1, 2, 8, 8)),
    "conv2d too small": lambda: nn.Conv2d(1, 1, 5)(torch.ones(1, 1, 3, 3)),
    "conv2d dimensions": lambda: nn.Conv2d(3, 4, 3)(torch.ones(8, 8)),
    "conv2d dtype": lambda: nn.Conv2d(3, 4, 3)(torch.ones(1, 3, 8, 8, dtype=torch.float64)),
    "conv1d groups": lambda: F.conv1d(torch.ones(1, 3, 8), torch.ones(4, 3, 3), groups=2),
    "conv transpose": lambda: nn.ConvTranspose2d(3, 4, 3)(torch.ones(1, 2, 8, 8)),
    "max_pool2d": lambda: F.max_pool2d(torch.ones(1, 1, 2, 2), 5),
    "avg_pool2d padding": lambda: F.avg_pool2d(torch.ones(1, 1, 8, 8), 2, padding=3),
    "adaptive pool": lambda: F.adaptive_avg_pool2d(torch.ones(8), 2),
    "interpolate": lambda: F.interpolate(torch.ones(3, 3), scale_factor=2),
    "pad reflect": lambda: F.pad(torch.ones(1, 2, 2), (5, 5), mode="reflect"),
    "pixel_shuffle": lambda: F.pixel_shuffle(torch.ones(1, 3, 2, 2), 2),
    # shapes
    "cat": lambda: torch.cat([A, torch.ones(2, 2)]),
    "cat of nothing": lambda: torch.cat([]),
    "cat dimension": lambda: torch.cat([A, A], 5),
    "stack": lambda: torch.stack([A, torch.ones(3, 3)]),
    "view": lambda: A.view(5),
    "view of a transpose": lambda: A.t().view(-1),
    "view of an expansion": lambda: A.expand(2, 4, 3).view(-1),
    "view as a dtype": lambda: torch.ones(3, dtype=torch.float32).view(torch.float64),
    "reshape": lambda: A.reshape(7, -1),
    "expand": lambda: A.expand(4, 5),
    "permute": lambda: A.permute(0, 0),
    "transpose": lambda: A.transpose(0, 4),
    "squeeze": lambda: A.squeeze(6),
    "unsqueeze": lambda: A.unsqueeze(7),
    "as_strided": lambda: A.as_strided((100,), (1,)),
    "as_strided negative": lambda: A.as_strided((2,), (-1,)),
    "split": lambda: A.split([1, 1]),
    "chunk": lambda: A.chunk(0),
    "unfold": lambda: A.unfold(0, 9, 1),
    "diagonal": lambda: A.diagonal(0, 1, 1),
    "narrow": lambda: A.narrow(0, 3, 5),
    "select": lambda: A.select(0, 9),
    "flatten": lambda: A.flatten(2, 3),
    "repeat": lambda: A.repeat(2),
    "roll": lambda: A.roll((1, 2), 0),
    "movedim": lambda: A.movedim(0, 9),
    "t": lambda: torch.ones(2, 2, 2).t(),
    # indexing
    "index": lambda: A[9],
    "too many indices": lambda: A[0, 0, 0],
    "mask shape": lambda: A[torch.ones(2, 2, dtype=torch.bool)],
    "float index": lambda: A[torch.ones(2)],
    "index shapes": lambda: A[torch.tensor([0, 1]), torch.tensor([0, 1, 2])],
    "gather dimensions": lambda: A.gather(0, LONG),
    "gather dtype": lambda: A.gather(0, A),
    "index_select": lambda: A.index_select(0, torch.zeros(2, 2, dtype=torch.int64)),
    "scatter": lambda: A.scatter(0, torch.zeros(5, 5, dtype=torch.int64), A),
    "index_add": lambda: A.index_add(0, torch.tensor([0]), A),
    "take": lambda: A.take(A),
    "masked_fill": lambda: A.masked_fill(A, 0.0),
    "masked_select": lambda: A.masked_select(A),
    "setitem": lambda: A.clone().__setitem__(0, torch.ones(5)),
    "embedding dtype": lambda: F.embedding(A, A),
    "one_hot dtype": lambda: F.one_hot(A),
    # pointwise and reductions
    "broadcast": lambda: A + torch.ones(2),
    "where": lambda: torch.where(A, A, A),
    "clamp": lambda: A.clamp(),
    "lerp dtype": lambda: A.lerp(LONG, 0.5),
    "sum dimension": lambda: A.sum(5),
    "sum twice": lambda: A.sum((0, 0)),
    "mean of integers": lambda: LONG.mean(),
    "max of nothing": lambda: torch.ones(0).max(),
    "argmax of nothing": lambda: torch.ones(0).argmax(),
    "max of an empty dimension": lambda: torch.ones(2, 0).max(1),
    "median": lambda: A.median(4),
    "sort": lambda: A.sort(3),
    "topk": lambda: A.topk(9),
    "kthvalue": lambda: A.kthvalue(9),
    "cumsum": lambda: A.cumsum(9),
    "bitwise of floats": lambda: A & A,
    "not of floats": lambda: ~A,
    "shift of floats": lambda: A << 1,
    "minus a bool": lambda: torch.ones(2, dtype=torch.bool) - torch.ones(2, dtype=torch.bool),
    "minus of a bool": lambda: -torch.ones(2, dtype=torch.bool),
    "logical power": lambda: torch.ones(2, dtype=torch.int64) ** -1,
    "view_as_complex": lambda: torch.view_as_complex(A),
    "complex comparison": lambda: torch.ones(2, dtype=torch.complex64) > 0,
    "fft": lambda: torch.fft.fft(A, dim=4),
    # losses and normalization
    "cross_entropy classes": lambda: F.cross_entropy(A, torch.zeros(5, dtype=torch.int64)),
    "cross_entropy dtype": lambda: F.cross_entropy(A, torch.zeros(4, dtype=torch.int32)),
    "nll_loss": lambda: F.nll_loss(A, torch.zeros(4, 2, dtype=torch.int64)),
    "mse_loss": lambda: F.mse_loss(A, torch.ones(5, 7)),
    "bce": lambda: F.binary_cross_entropy(A, torch.ones(2)),
    "bce_with_logits": lambda: F.binary_cross_entropy_with_logits(A, torch.ones(2)),
    "kl_div": lambda: F.kl_div(A, torch.ones(7)),
    "cosine_similarity": lambda: F.cosine_similarity(A, torch.ones(2, 2)),
    "triplet": lambda: F.triplet_margin_loss(A, A, torch.ones(9)),
    "reduction": lambda: F.mse_loss(A, A, reduction="median"),
    "batch_norm": lambda: nn.BatchNorm1d(5)(A),
    "batch_norm of one": lambda: nn.BatchNorm1d(3)(A[:1]),
    "batch_norm dtype": lambda: nn.BatchNorm1d(3)(A.double()),
    "batch_norm dimensions": lambda: nn.BatchNorm2d(3)(A),
    "layer_norm": lambda: nn.LayerNorm(5)(A),
    "group_norm": lambda: nn.GroupNorm(2, 3)(A),
    "instance_norm": lambda: nn.InstanceNorm1d(3)(torch.ones(2, 3, 1)),
    "softmax": lambda: A.softmax(7),
    "softmax of integers": lambda: LONG.softmax(0),
    "dropout probability": lambda: F.dropout(A, 1.5),
    "attention": lambda: F.scaled_dot_product_attention(
        torch.ones(1, 2, 3), torch.ones(1, 2, 4), torch.ones(1, 2, 4)
    ),
    "multihead": lambda: nn.MultiheadAttention(4, 2)(A, A, A),
    "lstm": lambda: nn.LSTM(5, 2)(A),
    "gru": lambda: nn.GRU(3, 2)(torch.ones(2, 2, 2, 2)),
    # factories and draws
    "negative size": lambda: torch.empty(-1),
    "arange": lambda: torch.arange(0, 5, -1),
    "linspace": lambda: torch.linspace(0, 1, -2),
    "full": lambda: torch.full((2,), "a"),
    "randperm": lambda: torch.randperm(-1),
    "randint": lambda: torch.randint(5, 2, (3,)),
    "normal of integers": lambda: torch.ones(3, dtype=torch.int64).normal_(),
    "bernoulli": lambda: torch.ones(3).bernoulli_(2.0),
    "uniform": lambda: torch.ones(3).uniform_(2, 1),
    "multinomial": lambda: torch.multinomial(torch.ones(3), 5),
    "eye": lambda: torch.eye(-3),
    # in-place and out=
    "in place on a leaf": lambda: LEAF.add_(1),
    "in place on a view of a leaf": lambda: LEAF[:2].mul_(2),
    "in place dtype": lambda: torch.ones(3, dtype=torch.int64).add_(0.5),
    "in place broadcast": lambda: torch.ones(3).add_(A),
    "in place on an expansion": lambda: torch.ones(1).expand(3).add_(1),
    "overlapping write": lambda: _overlapping_write(),
    "foreach": lambda: torch._foreach_add_([torch.ones(2)], [torch.ones(3)]),
    "copy_": lambda: torch.ones(2).copy_(A),
    "out dtype": lambda: torch.add(A, A, out=torch.ones(4, 3, dtype=torch.int64)),
    "out with a gradient": lambda: torch.add(LEAF, 1, out=torch.ones(3)),
    "resize": lambda: LEAF.resize_(7),
    "unbound view in place": lambda: torch.ones(2, 2, requires_grad=True).unbind()[0].add_(1),
    # autograd
    "backward of many": lambda: (LEAF * 2).backward(),
    "backward without a gradient": lambda: A.sum().backward(),
    "backward twice": lambda: _backward_twice(),
    "backward after a write": lambda: _backward_after_a_write(),
    "gradient shape": lambda: (LEAF * 2).backward(torch.ones(5)),
    "unused": lambda: torch.autograd.grad((LEAF * 2).sum(), [torch.ones(1, requires_grad=True)]),
    "requires_grad of integers": lambda: LONG.requires_grad_(),
    "gradient assignment": lambda: setattr(torch.ones(3, requires_grad=True), "grad", torch.ones(2)),
    "Parameter of integers": lambda: nn.Parameter(LONG * 2),
    "numpy with a gradient": lambda: (LEAF * 2).numpy(),
    "deepcopy with a gradient": lambda: __import__("copy").deepcopy(LEAF * 2),
    "retain_grad": lambda: A.retain_grad(),
    "data of another type": lambda: setattr(LEAF, "data", LONG * 2),
    # devices
    "another device": lambda: A + torch.ones(3, device="meta"),
    "no such device": lambda: A.to("nonsense"),
    # arguments
    "no argument": lambda: torch.add(A),
    "a string": lambda: torch.add(A, "a"),
    "unknown keyword": lambda: torch.sum(A, dims=3),
    "no such method": lambda: torch.no_such_function(A),
    "item of many": lambda: (A * 2).item(),
    "bool of many": lambda: bool(A * 2),
    "bool of nothing": lambda: bool(torch.ones(0) * 2),
    "float of many": lambda: float(A * 2),
    "int of a matrix as an index": lambda: [1, 2][A * 2],
    "iterating a number": lambda: list(torch.tensor(1.0) * 2),
    "len of a number": lambda: len(torch.tensor(1.0) * 2),
    "length": lambda: nn.Linear(2, 2).load_state_dict({"weight": torch.ones(3, 3), "bias": torch.ones(2)}),
}


def _overlapping_write():
    x = torch.arange(5.0)
    x[1:].add_(x[:-1])


def _backward_twice():
    loss = (LEAF * LEAF).sum()
    loss.backward()
    loss.backward()


def _backward_after_a_write():
    y = LEAF * 2
    loss = (y * y).sum()
    y.add_(1)
    loss.backward()


def outcome(call):
    """Type and message of the error that ``call`` raises, and the innermost frame in this file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call()
        except Exception as error:
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)]
            files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
            mine = [line for line, file in zip(lines, files) if file == __file__]
            return type(error), str(error), mine
    return None


@pytest.fixture(autouse=True)
def no_gradients_left():
    yield
    LEAF.grad = None


@pytest.mark.parametrize("name", METADATA)
def test_what_metadata_tells_fails_while_recording(name):
    call = METADATA[name]
    expected = outcome(call)
    assert expected is not None
    with lazyviz.lazy() as graph:
        before = A * 2
        actual = outcome(call)
        after = before + 1
    message = expected[1].replace("torch.FloatTensor", "Tensor")
    assert actual is not None, f"no error; eager: {message}"
    assert (actual[0], actual[1]) == (expected[0], expected[1])
    assert actual[2] == expected[2]
    graph.evaluate()
    assert difference(A * 2 + 1, after) is None and graph.pending == 0


def test_the_block_ends_with_the_error_and_earlier_ops_stay_pending():
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="size of tensor"):
        with lazyviz.lazy() as graph:
            x.add_(1)
            y = x * 2
            x + torch.ones(7)
    assert graph.pending == 3 and not graph.sync_points
    assert x.tolist() == [2, 2, 2] and y.tolist() == [4, 4, 4]


PROBABILITIES = torch.tensor([0.5, -1.0])
FAR = torch.tensor([0, 9])
INDEFINITE = torch.tensor([[1.0, 2.0], [2.0, 1.0]])
SINGULAR = torch.zeros(2, 2)

# What only data can tell.
DATA = {
    "embedding": lambda: F.embedding(FAR, A),
    "embedding_bag": lambda: F.embedding_bag(FAR[None], A),
    "gather": lambda: A.gather(0, FAR[:, None]),
    "index": lambda: A[FAR],
    "index two": lambda: A[FAR, FAR],
    "index_select": lambda: A.index_select(0, FAR),
    "take": lambda: A.take(FAR + 90),
    "scatter": lambda: A.scatter(0, FAR[:, None], A),
    "scatter_add": lambda: A.clone().scatter_add_(0, FAR[:, None], A),
    "index_put": lambda: A.clone().index_put_((FAR,), torch.ones(3)),
    "index_add": lambda: A.clone().index_add_(0, FAR, torch.ones(2, 3)),
    "index_fill": lambda: A.clone().index_fill_(0, FAR, 1.0),
    "nll_loss": lambda: F.nll_loss(A[:2], FAR),
    "cross_entropy": lambda: F.cross_entropy(A[:2], FAR),
    "cholesky": lambda: torch.linalg.cholesky(INDEFINITE),
    "inverse": lambda: torch.linalg.inv(SINGULAR),
    "solve": lambda: torch.linalg.solve(SINGULAR, torch.ones(2)),
    "multinomial": lambda: torch.multinomial(PROBABILITIES, 1),
    "multinomial of nothing": lambda: torch.multinomial(torch.zeros(2), 1),
    "bernoulli": lambda: torch.bernoulli(torch.tensor([2.0, 0.5])),
    "binary_cross_entropy": lambda: F.binary_cross_entropy(torch.tensor([2.0, 0.5]), torch.ones(2)),
    "integer division": lambda: FAR // torch.tensor([0, 1]),
    "integer remainder": lambda: FAR % torch.tensor([0, 1]),
    "masked_scatter": lambda: A.masked_scatter(A > 0, torch.ones(2)),
    "bincount": lambda: torch.bincount(torch.tensor([-1, 2])),
    "one_hot": lambda: F.one_hot(FAR, 3),
    "repeat_interleave": lambda: A[0].repeat_interleave(torch.tensor([-1, 2, 3])),
    "unflatten by data": lambda: A.view(int(FAR[1] * 1)),
    "histogram": lambda: torch.histc(torch.tensor([float("inf"), 1.0])),
    "normal": lambda: torch.normal(torch.zeros(2), torch.tensor([-1.0, 1.0])),
    "segment_reduce": lambda: torch.segment_reduce(
        torch.ones(4), "sum", lengths=torch.tensor([1, 1]), axis=0
    ),
}


@pytest.mark.parametrize("name", DATA)
def test_what_only_data_tells_fails_at_the_latest_at_evaluation(name):
    call = DATA[name]
    expected = outcome(call)
    assert expected is not None
    line = call.__code__.co_firstlineno
    with lazyviz.lazy() as graph:
        before = A * 2
        now = outcome(call)  # a sync point, or known constants: the error comes at once, as in eager
        after = before + 1
    if now is not None:
        assert now == expected
        graph.evaluate()
    else:
        for _ in range(2):  # it may be evaluated again, and fails again
            later = outcome(graph.evaluate)
            assert later is not None
            assert later[0] is expected[0]
            assert later[1].startswith(expected[1])
            assert f"test_errors.py:{line}" in later[1] or f"test_errors.py:{line + 1}" in later[1]
            assert later[1].count("was recorded at") == 1
        assert graph.state == "failed" and graph.pending
        lazyviz.evaluate(after)
    assert difference(A * 2 + 1, after) is None  # nothing else is poisoned


def test_an_error_in_the_data_is_raised_where_it_is_read_inside_the_block():
    with lazyviz.lazy():
        bad = A[FAR]
        with pytest.raises(IndexError, match=r"out of bounds[\s\S]*bad = A\[FAR\]"):
            bad.sum().item()
        with pytest.raises(IndexError, match=r"bad = A\[FAR\]"):
            print(bad)
        good = A.sum().item()
    assert good == A.sum().item()


CHECKED = {
    "cholesky": (lambda: torch.linalg.cholesky(INDEFINITE), "not positive-definite"),
    "a view of factors": (lambda: torch.linalg.cholesky(INDEFINITE).mT[0], "not positive-definite"),
    "inverse": (lambda: torch.linalg.inv(SINGULAR), "singular"),
    "solve": (lambda: torch.linalg.solve(SINGULAR, torch.ones(2)), "singular"),
    "power": (lambda: torch.linalg.matrix_power(SINGULAR, -2), "singular"),
    "pending": (lambda: torch.linalg.cholesky(INDEFINITE * 1) * 2, "not positive-definite"),
    "written": (lambda: torch.linalg.cholesky(INDEFINITE).add_(1), "not positive-definite"),
}


@pytest.mark.parametrize("name", CHECKED)
def test_what_a_check_refuses_is_never_seen(name):
    """Factors of a matrix are computed by one operator, and whether there are any is checked by another."""
    call, says = CHECKED[name]
    for read in (lambda x: x.tolist(), print, lambda x: bool(x.sum() > 0), lambda x: x.numpy()):
        with lazyviz.lazy():
            factors = call()
            with pytest.raises(torch.linalg.LinAlgError, match=says):
                read(factors)
            assert (A * 2).sum().item() == A.sum().item() * 2
        lazyviz.reset()


def test_what_a_check_lets_pass_is_read_at_one_sync_point():
    matrix = torch.tensor([[4.0, 2.0], [2.0, 3.0]])
    expected = torch.linalg.cholesky(matrix)
    with lazyviz.lazy() as graph:
        found = torch.linalg.cholesky(matrix).tolist()
    assert found == expected.tolist()
    assert [point.cause for point in graph.sync_points] == ["tolist"]
    assert not graph.pending


def test_an_error_in_a_gradient_names_the_forward_and_the_backward_line():
    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return grad[FAR][:1] + grad[:1]

    x = torch.ones(1, requires_grad=True)
    with lazyviz.lazy() as graph:
        loss = Fail.apply(x).sum()
        loss.backward()
    with pytest.raises(IndexError, match=r"return grad\[FAR\]"):
        graph.evaluate()
    assert loss.item() == 1


def test_an_operation_after_a_failed_one_can_be_given_up():
    x = torch.ones(3)
    with lazyviz.lazy() as graph:
        bad = A[FAR]
        x.add_(1)
    with pytest.raises(IndexError):
        graph.evaluate()
    assert x.tolist() == [2, 2, 2]
    del bad, graph
    lazyviz.session.lazy_graph.cell_boundary()
    assert lazyviz.evaluate().ops_run == 0


def test_a_draw_that_fails_leaves_the_generator_as_eager_does():
    torch.manual_seed(3)
    with pytest.raises(RuntimeError):
        torch.multinomial(PROBABILITIES, 1)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with lazyviz.lazy():
        torch.multinomial(PROBABILITIES, 1)
        after = torch.rand(2)
    with pytest.raises(RuntimeError, match="probability tensor"):
        lazyviz.sync()
    assert difference(expected, lazyviz.to_eager(after)) is None  # eager goes on after the error
    torch.get_rng_state()


def test_a_draw_that_failed_and_is_gone_is_not_heard_of_again():
    torch.manual_seed(3)
    with lazyviz.lazy() as graph:
        drawn = torch.multinomial(PROBABILITIES, 1)
    with pytest.raises(RuntimeError, match="probability tensor"):
        graph.evaluate()
    del graph, drawn
    gc.collect()  # the exception's traceback knows the graph
    state = torch.get_rng_state()
    torch.manual_seed(3)
    assert torch.equal(state, torch.get_rng_state())
    lazyviz.sync()


BYTES, SHORT = torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.int16)
# What the kernels' shape rules do not check, of tensors that are too large for a trial of the kernel.
LARGE = {
    "masked_fill": lambda x: x.masked_fill(BYTES.expand_as(x), 1.0),
    "masked_scatter": lambda x: x.masked_scatter(SHORT.expand_as(x), x),
    "an integer that does not fit": lambda x: x.long().masked_fill(x > 0, 1e300),
    "assignment by a legacy mask": lambda x: x.__setitem__(BYTES.expand_as(x), 1.0),
    "index_fill": lambda x: x.index_fill(0, SHORT, 1.0),
    "index_copy": lambda x: x.index_copy(0, SHORT.int(), x[:1]),
    "index_add": lambda x: x.index_add(0, SHORT, x[:1]),
    "index_reduce": lambda x: x.index_reduce(0, SHORT, x[:1], "amax"),
    "bucketize": lambda x: torch.bucketize(x, x.reshape(2, -1)),
    "as_strided_scatter": lambda x: x.as_strided_scatter(x[:4].reshape(2, 2), (2, 2), (2**22, 1)),
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_arguments_of_large_tensors_are_checked_at_the_line(name):
    with pytest.raises(Exception) as expected:
        LARGE[name](torch.zeros(2**21))
    with lazyviz.lazy() as graph:
        x = torch.zeros(2**21)
        with pytest.raises(type(expected.value)) as found:
            LARGE[name](x)
    assert str(found.value) == str(expected.value)
    graph.evaluate()


MISTAKES = {
    "a tensor for a list": lambda x: torch.cat(x),
    "nothing added": lambda x: x + None,
    "text": lambda x: "a" + x,
    "a list": lambda x: [].__add__(x),
    "a product": lambda x: x @ 3,
    "arguments": lambda x: torch.clamp(x, min="a"),
    "one argument of three": lambda x: torch.where(x > 0, "a", x),
    "a stride": lambda x: torch.nn.functional.conv2d(x, x, stride=x),
    "a call": lambda x: x(),
    "an attribute": lambda x: x.nothing,
    "a path": lambda x: os.stat(x),
    "keywords": lambda x: dict(**x),
    "a parameter": lambda x: torch.nn.Parameter([x]),
    "a block": lambda x: x.__enter__(),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_errors_worded_by_the_type_s_name_say_tensor(name):
    def words(x):
        with pytest.raises((TypeError, AttributeError, RuntimeError)) as caught:
            MISTAKES[name](x)
        return type(caught.value), str(caught.value)

    expected = words(torch.ones(2, 2))
    with lazyviz.lazy():
        found = words(torch.rand(2, 2))
    assert found == expected and "Lazy" not in found[1]
