"""Errors that an absent GPU would raise are raised at their line, with PyTorch's message."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyviz

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")

VIEWS = {
    "view": lambda x: x.view(5),
    "reshape": lambda x: x.reshape(5),
    "view of two unknown sizes": lambda x: x.view(-1, -1),
    "view of an unknown size": lambda x: x.view(-1, 5),
    "view of a transposed tensor": lambda x: x.t().view(12),
    "view of another dtype": lambda x: x.view(torch.float64),
    "transpose": lambda x: x.transpose(0, 5),
    "swapaxes": lambda x: x.swapaxes(0, 7),
    "movedim": lambda x: x.movedim(0, 7),
    "permute": lambda x: x.permute(0, 2),
    "permute twice": lambda x: x.permute(0, 0),
    "permute fewer": lambda x: x.permute(0),
    "select": lambda x: x.select(0, 9),
    "select a dimension": lambda x: x.select(3, 0),
    "index": lambda x: x[7],
    "indices": lambda x: x[0, 0, 0],
    "expand": lambda x: x.expand(4, 4),
    "expand to fewer": lambda x: x.expand(3),
    "expand to more": lambda x: x.expand(-1, 4, 3),
    "split": lambda x: x.split([1, 1]),
    "split by less than nothing": lambda x: x.split(-1),
    "split a dimension": lambda x: x.split(2, 3),
    "chunk": lambda x: x.chunk(0),
    "vsplit": lambda x: x.vsplit(3),
    "unsqueeze": lambda x: x.unsqueeze(5),
    "squeeze": lambda x: x.squeeze(5),
    "t": lambda x: x[None].t(),
    "narrow": lambda x: x.narrow(0, 2, 5),
    "slice": lambda x: x[::0],
    "as_strided": lambda x: x.as_strided((2,), (-1,)),
    "diagonal": lambda x: x.diagonal(0, 0, 0),
    "unfold": lambda x: x.unfold(0, 9, 1),
    "unflatten": lambda x: x.unflatten(0, (3, 3)),
    "flatten": lambda x: x.flatten(3),
    "unbind": lambda x: x.unbind(4),
    "set item": lambda x: x.__setitem__(0, x),
    "view under vmap": lambda x: torch.vmap(lambda row: row.view(9))(x),
}
DIMENSIONS = {
    "softmax": lambda x: x.softmax(3),
    "log_softmax": lambda x: x.log_softmax(3),
    "sort": lambda x: x.sort(4),
    "argsort": lambda x: x.argsort(5),
    "topk": lambda x: x.topk(9),
    "sum": lambda x: x.sum(4),
    "mean twice": lambda x: x.mean((0, 0)),
    "cumsum": lambda x: x.cumsum(3),
    "max": lambda x: x.max(3),
    "unique": lambda x: x.unique(dim=5),
    "flip": lambda x: x.flip(5),
    "roll": lambda x: x.roll(1, 5),
    "max of nothing": lambda x: x[:0].max(),
    "argmax of nothing": lambda x: x[:0].argmax(),
    "cat": lambda x: torch.cat([x, x], 5),
    "stack": lambda x: torch.stack([x, x.t()]),
    "glu": lambda x: F.glu(x),
    "fft": lambda x: torch.fft.fft(x, dim=5),
}
ARGUMENTS = {
    "product": lambda x: x @ x,
    "matrix and vector": lambda x: torch.mm(x, x[0]),
    "bias": lambda x: torch.addmm(x[None], x, x.t()),
    "linear": lambda x: F.linear(x, x.t()),
    "linear with a bias": lambda x: F.linear(x, x, x[0]),
    "sum of other shapes": lambda x: x + x.t(),
    "integers and floats in place": lambda x: x.long().add_(x),
    "bits of floats": lambda x: x & x,
    "shift of floats": lambda x: x << 1,
    "leaky relu of booleans": lambda x: F.leaky_relu(x > 0),
    "difference of booleans": lambda x: (x > 0) - (x > 0),
    "integers to a negative power": lambda x: x.long() ** -1,
    "complex of two dtypes": lambda x: torch.complex(x, x.double()),
    "write to what overlaps": lambda x: x[:1].expand(4, 3).add_(1),
    "gather": lambda x: x.gather(0, x),
    "index_select": lambda x: x.index_select(0, x.long()),
    "index_put": lambda x: x.index_put((x.long()[0],), x),
    "masked_select": lambda x: x.masked_select(x),
    "bincount": lambda x: torch.bincount(x),
    "convolution": lambda x: F.conv2d(x[None, None], x[None]),
    "stride of a convolution": lambda x: F.conv2d(x[None, None], x[None, None], stride=0),
    "dilation of a convolution": lambda x: F.conv2d(x[None, None], x[None, None], dilation=0),
    "large kernel": lambda x: F.conv2d(x[None, None], x.new_zeros(1, 1, 9, 9)),
    "output padding": lambda x: F.conv_transpose2d(x[None, None], x[None, None], output_padding=1),
    "pool": lambda x: F.max_pool2d(x[None], 9),
    "padding of a pool": lambda x: F.max_pool2d(x[None, None], 2, padding=2),
    "resizing to nothing": lambda x: F.interpolate(x[None, None], (0, 3), mode="bilinear"),
    "pad": lambda x: F.pad(x[None], (9, 9), mode="reflect"),
    "batch norm": lambda x: F.batch_norm(x, x[0, :2], x[0, :2]),
    "layer norm": lambda x: F.layer_norm(x, (5,)),
    "classes of floats": lambda x: F.cross_entropy(x, x[:, 0]),
    "fewer classes": lambda x: F.cross_entropy(x, x[0].long()),
    "weights of classes": lambda x: F.nll_loss(x, x[:, 0].long(), x[0, :2]),
    "margin": lambda x: F.multi_margin_loss(x, x[:, 0]),
    "several margins": lambda x: F.multilabel_margin_loss(x, x[0].long()),
    "beta": lambda x: F.smooth_l1_loss(x, x, beta=-1),
    "embedding": lambda x: F.embedding(x, x),
    "bag": lambda x: F.embedding_bag(x.long()[0], x),
    "dropout": lambda x: torch.dropout(x, 2.0, True),
    "softshrink": lambda x: F.softshrink(x, -1.0),
    "gradient of a leaky relu in place": lambda x: F.leaky_relu_(x.requires_grad_() * 1, -2).sum().backward(),
    "window of integers": lambda x: torch.hann_window(5, dtype=torch.int64, device=x.device),
    "range": lambda x: torch.arange(0, -3, device=x.device),
    "negative size": lambda x: torch.zeros(-1, device=x.device),
    "integers from nowhere": lambda x: torch.randint(3, 1, (2,), device=x.device),
    "normal": lambda x: x.normal_(0, -1),
    "uniform": lambda x: x.uniform_(3, 1),
    "bernoulli": lambda x: x.bernoulli_(3.0),
    "random": lambda x: x.random_(3, 1),
    "multinomial": lambda x: torch.multinomial(x, 9),
    "inverse": lambda x: torch.linalg.inv(x),
    "cholesky": lambda x: torch.linalg.cholesky(x),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x.t()),
    "recurrence": lambda x: nn.LSTM(5, 2).to(x.device)(x),
    "layer": lambda x: nn.Conv2d(5, 2, 1).to(x.device)(x[None]),
    "backward of a matrix": lambda x: x.requires_grad_().exp().backward(),
    "write to a leaf": lambda x: x.requires_grad_().add_(1),
}
# What would read memory past the dispatcher, were it not refused for its arguments.
READS = {
    "resize_": lambda x: x.resize_(-1),
    "resize_ to a word": lambda x: x.resize_("a"),
    "set_": lambda x: x.set_(3),
    "set_ to another dtype": lambda x: x.set_(x.long()),
    "tensor of vectors": lambda x: torch.tensor([x[0], x[0]]),
    "tensor of nothing": lambda x: torch.tensor([x[:0], x[:0]]),
    "new_tensor of vectors": lambda x: x.new_tensor([x[0], 1.0]),
    "data": lambda x: setattr(x, "data", 3),
    "format": lambda x: format(x, ".2f"),
    "assigning a list": lambda x: x.__setitem__(0, [1, 2]),
    "assigning a word": lambda x: x.__setitem__(0, "a"),
    "lengths of ctc_loss": lambda x: F.ctc_loss(x[:, None], torch.tensor([[1]]), (5,), (1,)),
    "segments": lambda x: torch.segment_reduce(x, "sum", lengths=torch.tensor([1, 1], device=x.device)),
    "allclose": lambda x: torch.allclose(x, x.double()),
    "equal": lambda x: torch.equal(x[0], x[0].double()) if x.dtype.is_complex else x.equal(3),
    "deepcopy": lambda x: copy.deepcopy(x.requires_grad_() * 2),
    "masked_scatter": lambda x: x.masked_scatter_(x.byte(), x),
    "complex into another dtype": lambda x: torch.complex(x, x, out=torch.zeros(4, 3, device=x.device)),
}
PROGRAMS = {**VIEWS, **DIMENSIONS, **ARGUMENTS, **READS}


def on_a_gpu(message):
    """The CPU's words, with the names that tensors and kernels have on a GPU."""
    message = re.sub(r"\btorch\.(\w+Tensor)\b", r"torch.cuda.\1", message)
    return re.sub(r"_cpu\b", "_cuda", message)


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_refusals_have_pytorchs_messages(program):
    with pytest.raises(Exception) as expected:
        program(torch.ones(4, 3))
    with lazyviz.lazy(device="A100-80GB"), pytest.raises(Exception) as actual:
        program(torch.ones(4, 3).cuda())
    assert type(actual.value) is type(expected.value)
    assert str(actual.value) == on_a_gpu(str(expected.value))


@pytest.mark.parametrize("name", READS)
def test_refusals_have_pytorchs_messages_where_the_gpu_is_the_default_device(name):
    """The module's own tensors are then not on the GPU, although no device is given for them."""
    with pytest.raises(Exception) as expected:
        READS[name](torch.ones(4, 3))
    with lazyviz.lazy(device="A100-80GB"), torch.device("cuda"), pytest.raises(Exception) as actual:
        READS[name](torch.ones(4, 3))
    assert type(actual.value) is type(expected.value)
    assert str(actual.value) == on_a_gpu(str(expected.value))


def test_the_type_of_a_tensor_on_the_default_device():
    with lazyviz.lazy(device="A100-80GB"), torch.device("cuda"):
        x = torch.ones(2)
        assert x.type() == "torch.cuda.FloatTensor"
        with pytest.raises(TypeError, match=r"cannot assign 'torch\.cuda\.FloatTensor' as parameter"):
            nn.Linear(2, 2).weight = x


@pytest.mark.parametrize(
    ("program", "error"),
    [
        (lambda x: x.numpy(), TypeError("can't convert cuda:0 device type tensor to numpy.")),
        (
            lambda x: torch.meshgrid(x, x),
            RuntimeError("0D or 1D tensor in the tensor list but got: [ torch.cuda.Float"),
        ),
        (lambda x: x.tensor_split(x), RuntimeError("to be on cpu, but it's on cuda:0")),
    ],
)
def test_what_only_a_gpus_tensor_is_refused_for(program, error):
    with lazyviz.lazy(device="A100-80GB"), pytest.raises(type(error), match=re.escape(str(error))):
        program(torch.ones(4, 3).cuda())


JOINED = {
    "tensor": lambda x: torch.tensor([x.sum(), x[0, 0]]),
    "nested": lambda x: torch.tensor([[x[0, 0], 1.0], [2, x.sum()]], dtype=torch.float64, requires_grad=True),
    "as_tensor": lambda x: torch.as_tensor([x.sum(), True], device=x.device),
    "asarray": lambda x: torch.asarray([x.sum(), 1]),
    "new_tensor": lambda x: x.new_tensor([x.sum(), 1.0]),
    "new": lambda x: x.new([x.sum(), 1.0]),
}


@pytest.mark.parametrize("program", JOINED.values(), ids=JOINED)
def test_elements_on_a_planned_gpu_are_joined(program):
    expected = program(torch.ones(4, 3))
    with lazyviz.lazy(device="A100-80GB") as graph:
        there = torch.ones(4, 3).cuda()
        joined = program(there)
        onto = (
            there.device if program in (JOINED["new"], JOINED["new_tensor"], JOINED["as_tensor"]) else "cpu"
        )
    assert not graph.sync_points
    assert lazyviz.is_lazy(joined)
    assert (joined.shape, joined.dtype, joined.requires_grad) == (
        expected.shape,
        expected.dtype,
        expected.requires_grad,
    )
    assert joined.device == torch.device(onto)


def test_tensors_of_two_shapes_are_not_equal_whatever_they_hold():
    with lazyviz.lazy(device="A100-80GB") as graph:
        x = torch.ones(4, 3).cuda()
        assert not torch.equal(x, x[0])
    assert not graph.sync_points
    with lazyviz.lazy() as graph:
        assert not torch.equal(torch.randn(3), torch.randn(2))
    assert not graph.sync_points


@pytest.mark.parametrize("program", [lambda x: x + torch.ones(4, 3), lambda x: F.linear(x, torch.ones(2, 3))])
def test_tensors_of_two_devices_are_a_runtime_error(program):
    with lazyviz.lazy(device="A100-80GB"), pytest.raises(RuntimeError, match="on the same device") as error:
        program(torch.ones(4, 3).cuda())
    assert type(error.value) is RuntimeError


@pytest.mark.parametrize(
    "program",
    [
        lambda x: torch.linalg.lu(x, pivot=False),  # which only the CPU cannot
        lambda x: x.half() @ x.half().t(),
        lambda x: F.scaled_dot_product_attention(*[x[None, None].half()] * 3),
        lambda x: F.conv2d(x[None, None].bfloat16(), x[None, None].bfloat16()),
        lambda x: torch.multinomial(x, 2),
        lambda x: x.quantile(torch.tensor([0.5, 2.0], device=x.device)),
        lambda x: F.embedding_bag(torch.tensor([1, 2]).cuda(), x, torch.tensor([0]).cuda()),
    ],
)
def test_what_a_gpu_takes_is_planned(program):
    with lazyviz.lazy(device="A100-80GB") as graph:
        program(torch.ones(4, 3).cuda())
    assert graph.plan().peak_bytes


def test_a_tensor_without_memory_that_was_sent_to_a_planned_gpu_is_left_alone():
    with lazyviz.lazy(device="A100-80GB"):
        moved = torch.ones(3, device="meta").cuda()
    lazyviz.reset()
    assert moved.shape == (3,)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LazyLinear(10).cuda(),
        lambda: nn.Sequential(nn.Flatten(), nn.LazyBatchNorm1d()).to("cuda", torch.half),
        lambda: nn.LazyConv2d(8, 3, device="cuda"),
    ],
)
def test_lazy_modules_have_no_shapes_before_their_first_call(make):
    with (
        lazyviz.lazy(device="RTX-3090"),
        pytest.raises(lazyviz.AbsentDeviceError, match="Call the module"),
    ):
        make()


def test_lazy_modules_are_planned_after_a_call_on_the_cpu():
    with lazyviz.lazy(device="RTX-3090") as graph:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.LazyLinear(10))
        model = model.double().to(torch.float32)  # on the CPU, shapes are not needed
        model(torch.zeros(1, 3, 16, 16))
        model.cuda()(torch.randn(4, 3, 16, 16, device="cuda")).sum().backward()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert graph.plan().peak_bytes > 2 * weights
    lazyviz.reset()
