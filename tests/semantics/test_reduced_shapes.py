"""Pending metadata is correct for single samples, empty tensors, unusual layouts, and dtypes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ..lazy_equals_eager import both

REDUCTIONS = ("none", "mean", "sum")
SHAPES = ((), (1,), (10,), (1, 1), (1, 10), (4, 10))


def multilabel(scores, target, weight, reduction):
    return F.multilabel_margin_loss(scores, target.expand(scores.shape), reduction=reduction)


def multi(scores, target, weight, reduction):
    return F.multi_margin_loss(scores, target, reduction=reduction)


def squared(scores, target, weight, reduction):
    return F.multi_margin_loss(scores, target, p=2, margin=0.5, weight=weight, reduction=reduction)


def multilabel_soft(scores, target, weight, reduction):
    labels = torch.ones_like(scores)
    return F.multilabel_soft_margin_loss(scores, labels, weight, reduction=reduction)


def nll(scores, target, weight, reduction):
    return F.nll_loss(scores, target, weight, reduction=reduction)


def cross_entropy(scores, target, weight, reduction):
    return F.cross_entropy(scores, target, weight, label_smoothing=0.1, reduction=reduction)


LOSSES = (multilabel, multi, squared, multilabel_soft, nll, cross_entropy)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_losses_of_one_sample_and_of_several(loss, shape, reduction):
    classes = shape[-1] if shape else 1

    def make():
        target = torch.randint(0, classes, shape[:-1])
        target = target.unsqueeze(-1) if loss is multilabel and shape else target
        return torch.randn(shape).requires_grad_(), target, torch.rand(classes)

    def program(scores, target, weight):
        result = loss(scores, target, weight, reduction)
        result.sum().backward()
        return result

    both(program, make, orders=("at once",), versions=False, syncs=None)


@pytest.mark.parametrize("target", [torch.tensor(3), torch.tensor([3])], ids=["a number", "a vector"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_margin_loss_of_one_sample_is_a_number_whatever_its_target_is(target, reduction):
    both(lambda scores: F.multi_margin_loss(scores, target, reduction=reduction), lambda: torch.randn(10))


TRANSPOSED = {
    "sort": lambda x: x.sort(0),
    "sort of one column": lambda x: x[:, :1].unsqueeze(0).sort(1),
    "argsort": lambda x: x.argsort(-1),
    "floor_divide": lambda x: x.floor_divide(x + 10),
    "logsigmoid": lambda x: F.logsigmoid(x),
    "multilabel soft margin": lambda x: F.multilabel_soft_margin_loss(x, (x > 0).float(), reduction="none"),
    "unfold": lambda x: F.unfold(x.t()[None, None, :, :], 2, padding=1),
    "unfold to one column": lambda x: F.unfold(x[None, None, :2, :2], 2),
    "fold": lambda x: F.fold(torch.ones(1, 4, 4), (3, 3), 2),
    "channel_shuffle": lambda x: F.channel_shuffle(
        torch.ones(2, 4, 3, 3).to(memory_format=torch.channels_last) * x[0, 0], 2
    ),
    "pixel_unshuffle of nothing": lambda x: F.pixel_unshuffle(x[None, None, :0, :2], 2),
    "flip of nothing": lambda x: x[:, :0].unsqueeze(0).flip(0),
    "hardtanh of nothing": lambda x: F.hardtanh(x[:, :0]),
    "prelu of nothing": lambda x: F.prelu(x[:, :0], torch.ones(1)),
    "ones like nothing": lambda x: torch.ones_like(x[:0].unsqueeze(0).transpose(0, 2)),
    "frexp of nothing": lambda x: torch.frexp(x[:, :0]),
    "amax over one": lambda x: x[:, :1].unsqueeze(0).aminmax(dim=0),
    "prod of nothing": lambda x: x[:, :0].unsqueeze(1).prod(1, keepdim=True),
    "max_unpool2d": lambda x: F.max_unpool2d(*_pooled(x), 2),
    "max_unpool1d": lambda x: F.max_unpool1d(x[:1, :4], torch.tensor([[0, 2, 4, 6]]), 2),
    "quantile": lambda x: x[:1].quantile(torch.tensor([0.2, 0.4]), 0, keepdim=True),
    "batch norm of halves": lambda x: F.batch_norm(x.bfloat16(), None, None, torch.ones(4), training=True),
    "group norm of halves": lambda x: torch.native_group_norm(
        x.bfloat16().contiguous(), torch.ones(4), torch.ones(4), 4, 4, 1, 2, 1e-5
    ),
    "layer norm with a bias": lambda x: torch.native_layer_norm(x.half(), (4,), None, torch.ones(4), 1e-5),
    "huber of halves": lambda x: F.huber_loss(x.bfloat16(), x, reduction="none"),
    "soft margin of halves": lambda x: F.soft_margin_loss(x.bfloat16(), x.sign()),
    "smooth_l1 of doubles": lambda x: F.smooth_l1_loss(x, x.double() + 1, reduction="none"),
    "normal of halves": lambda x: torch.normal(x.bfloat16(), torch.ones(4, 4)),
    "ihfft2": lambda x: torch.fft.ihfft2(x.unsqueeze(-1)),
}


def _pooled(x):
    pooled = F.max_pool2d(x[None, None], 2, return_indices=True)
    return pooled[0].expand(1, 2, 2, 2).transpose(1, 3).transpose(1, 3), pooled[1].expand(1, 2, 2, 2)


@pytest.mark.parametrize("program", TRANSPOSED.values(), ids=TRANSPOSED)
def test_results_are_laid_out_as_recorded(program):
    def transposed(x):
        return program(x.t() * 1.5)

    both(transposed, lambda: torch.randn(4, 4), orders=("at once", "by reading"), syncs=None)
