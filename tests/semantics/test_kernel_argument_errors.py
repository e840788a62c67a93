"""Errors of kernels that do not depend on data come while recording, at their line, as in eager mode."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ..lazy_equals_eager import both

PROGRAMS = {
    "reduced dimension of too many": lambda x: x.reshape(x.shape + (1,) * 63).sum(0),
    "greatest along one dimension of too many": lambda x: x.reshape(x.shape + (1,) * 63).argmax(0),
    "none of too many dimensions": lambda x: x.reshape(x.shape + (1,) * 63).any(),
    "more elements than can be counted": lambda x: torch.empty(4, 2**61),
    "none, but of too many others": lambda x: x.new_zeros(0, 2**40, 2**40),
    "a complex weight after one that is a real number": lambda x: [
        torch.addcmul(x, x, x, value=value) for value in (2 + 0j, 2 + 1j)
    ],
    "window of integers": lambda x: torch.hann_window(5, dtype=torch.int64),
    "another window of integers": lambda x: torch.kaiser_window(5, dtype=torch.int64),
    "range of booleans": lambda x: torch.arange(0, 2, dtype=torch.bool),
    "range of unsigned integers": lambda x: torch.arange(3, dtype=torch.uint16),
    "range of eight bits": lambda x: torch.arange(0, 3, 2, dtype=torch.float8_e5m2),
    "range of complex numbers": lambda x: torch.arange(0, 2, dtype=torch.complex64),
    "slice_scatter of a large tensor": lambda x: torch.slice_scatter(torch.ones(200, 200), x[0]),
    "slice_scatter of a large tensor by no step": lambda x: torch.slice_scatter(
        torch.ones(200, 200), torch.ones(200, 200), step=0
    ),
    "steps of booleans": lambda x: torch.linspace(0, 1, 3, dtype=torch.bool),
    "powers of booleans": lambda x: torch.logspace(0, 1, 3, dtype=torch.bool),
    "gradient of a leaky relu in place": lambda x: F.leaky_relu_(x.requires_grad_() * 2, -2).sum().backward(),
    "gradient of an elu in place": lambda x: F.elu_(x.requires_grad_() * 2, -2).sum().backward(),
    "softshrink": lambda x: F.softshrink(x * 2, -1.5),
    "softshrink after one that is right": lambda x: (F.softshrink(x * 2, 0.5), F.softshrink(x * 2, -1.5)),
    "mvlgamma": lambda x: torch.mvlgamma(x * 2 + 5, 0),
    "lu without pivots": lambda x: torch.linalg.lu(x * 2, pivot=False),
    "lu factors without pivots": lambda x: torch.linalg.lu_factor(x * 2, pivot=False),
    "addmm of a large bias": lambda x: torch.addmm(x.unsqueeze(0) * 2, x, x),
    "addmm of a wrong bias": lambda x: torch.addmm(x[:2] * 2, x, x),
    "linear with a wrong bias": lambda x: F.linear(x * 2, x, x[0, :3]),
    "addmv": lambda x: torch.addmv(x * 2, x, x[0]),
    "addr": lambda x: torch.addr(x[:2] * 2, x[0], x[1]),
    "baddbmm": lambda x: torch.baddbmm(x[:3] * 2, x[None], x[None]),
    "bucketize": lambda x: torch.bucketize(x * 2, x),
    "searchsorted": lambda x: torch.searchsorted(x.sum(), x * 2),
    "index_select by numbers that are no integers": lambda x: x.index_select(0, x[0] * 2),
    "index_select of a number": lambda x: x.sum().index_select(0, x[0, :1] * 2),
    "as_strided_copy": lambda x: torch.as_strided_copy(x * 2, (7,), (3,)),
    "as_strided_scatter": lambda x: torch.as_strided_scatter(x * 2, x[0], (4,), (9,)),
    "diagonal_scatter": lambda x: torch.diagonal_scatter(x * 2, x[:2, 0]),
    "slice_scatter": lambda x: torch.slice_scatter(x * 2, x[0]),
    "select_scatter": lambda x: torch.select_scatter(x * 2, x, 0, 0),
    "slice_scatter by no step": lambda x: torch.slice_scatter(x * 2, x, step=0),
    "padding of a transposed convolution": lambda x: F.conv_transpose1d(
        x * 2, x[:, :, None], output_padding=1
    ),
    "a transposed convolution of nothing": lambda x: F.conv_transpose2d(
        x[None, None] * 2, x[None, None, :1, :1], padding=3
    ),
    "resizing to nothing": lambda x: F.interpolate(x[None, None] * 2, (0, 3), mode="bilinear"),
    "resizing to nothing by cubes": lambda x: F.interpolate(x[None, None] * 2, (0, 3), mode="bicubic"),
    "unfold": lambda x: F.unfold(x[None, None] * 2, 2, padding=-1),
    "soft margin": lambda x: F.soft_margin_loss(x * 2, x.unsqueeze(0), reduction="none"),
    "soft margin of a number": lambda x: F.soft_margin_loss(x.sum(), x[:1, 0]),
    "multilabel margin": lambda x: F.multilabel_margin_loss(x * 2, torch.ones(4, 4, dtype=torch.int32)),
    "multilabel margin of a number": lambda x: F.multilabel_margin_loss(x.sum(), torch.tensor(0).int()),
    "multilabel margin of integers": lambda x: F.multilabel_margin_loss(torch.tensor(1), torch.tensor(0)),
    "multi margin of another dtype": lambda x: F.multi_margin_loss(x * 2, torch.zeros(4)),
    "multi margin weights": lambda x: F.multi_margin_loss(x * 2, torch.zeros(4).long(), weight=x[0, :2]),
    "entropy with wide weights": lambda x: F.binary_cross_entropy_with_logits(
        x * 2, x.sigmoid(), pos_weight=x.unsqueeze(0).unsqueeze(0), weight=x[:3]
    ),
    "batch norm with a matrix": lambda x: F.batch_norm(
        x * 2, torch.zeros(1, 4), torch.ones(4), training=True
    ),
    "group norm": lambda x: torch.native_group_norm(x * 2, x[0, :2], None, 4, 4, 1, 2, 1e-5),
    "group norm of other sizes": lambda x: torch.native_group_norm(x * 2, None, None, 4, 3, 1, 2, 1e-5),
    "channels last pooled in 3-d": lambda x: F.max_pool3d(
        torch.ones(1, 4, 4, 4).to(memory_format=torch.channels_last) * x[0, 0], 2
    ),
    "gradient of a softmax": lambda x: torch._softmax_backward_data(x * 2, x[0], 0, torch.float32),
    "floating indices of a bag": lambda x: F.embedding_bag(
        torch.tensor([1.0, 2.0]), x * 2, torch.tensor([0])
    ),
    "floating offsets": lambda x: F.embedding_bag(torch.tensor([1, 2]), x * 2, torch.tensor([0.0])),
    "weights of another dtype": lambda x: F.embedding_bag(
        torch.tensor([1, 2]), x.double(), torch.tensor([0]), per_sample_weights=x[0, :2], mode="sum"
    ),
    "a first offset": lambda x: F.embedding_bag(torch.tensor([1, 2]), x * 2, torch.tensor([1])),
    "a last offset": lambda x: F.embedding_bag(torch.tensor([1, 2]), x * 2, torch.tensor([0, 5])),
    "an index out of a bag's table": lambda x: F.embedding_bag(
        torch.tensor([1, 7]), x * 2, torch.tensor([0])
    ),
    "an offset after one that is right": lambda x: [
        F.embedding_bag(torch.tensor([1, 2]), x * 2, torch.tensor([offset])) for offset in (0, 1)
    ],
    "offsets by a matrix": lambda x: F.embedding_bag(torch.tensor([1, 2]), x * 2, torch.tensor([[0]])),
    "numbers of a quantile": lambda x: torch.quantile(x * 2, torch.ones(2, dtype=torch.complex64)),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_errors_come_at_their_line(program):
    with pytest.raises(Exception):  # noqa: B017
        program(torch.rand(4, 4))
    both(program, lambda: torch.rand(4, 4), syncs=None, orders=("at once",))
