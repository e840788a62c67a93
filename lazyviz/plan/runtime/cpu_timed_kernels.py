"""The kernels that the calibration of this machine's CPU times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .cpu_counted_kernels import LARGE, RARE, SMALL, USUAL

Function = Callable[[], Any]
New = Callable[..., torch.Tensor]
OfTensors = Callable[[torch.Tensor, torch.Tensor], Any]
Counted = dict[str, tuple[Function, float]]


def operators(tensor: New) -> dict[str, Function]:
    """Calls of common operators on small tensors, where overhead takes most of the time."""
    a, b, column = tensor(8, 8), tensor(8), tensor(8, 1)
    image, weight = tensor(1, 8, 8, 8), tensor(8, 8, 3, 3)
    number = torch.zeros(8, dtype=torch.long, device="cpu")
    mean, variance = tensor(8), tensor(8).fill_(1)
    aten, generator = torch.ops.aten, torch.Generator().manual_seed(0)
    pooled, places = F.max_pool2d(image, 2, return_indices=True)
    _, bag, sizes, empty = aten._embedding_bag.default(a, number, number[:1], False, 1)
    drawn, pairs, masks = tensor(8), [1, 1], [True, True, True]
    return {
        "add": lambda: a + a,
        "mm": lambda: torch.mm(a, a),
        "addmm": lambda: torch.addmm(b, a, a),
        "bmm": lambda: torch.bmm(a[None], a[None]),
        "convolution": lambda: F.conv2d(image, weight, padding=1),
        "convolution_backward": lambda: aten.convolution_backward.default(
            image, image, weight, None, pairs, pairs, pairs, False, [0, 0], 1, [True, True, False]
        ),
        "gelu": lambda: F.gelu(a),
        "gelu_backward": lambda: aten.gelu_backward.default(a, a),
        "_softmax": lambda: a.softmax(-1),
        "_softmax_backward_data": lambda: aten._softmax_backward_data.default(a, a, -1, torch.float32),
        "_log_softmax": lambda: a.log_softmax(-1),
        "native_layer_norm": lambda: F.layer_norm(a, (8,)),
        "native_layer_norm_backward": lambda: aten.native_layer_norm_backward.default(
            a, a, [8], column, column, b, b, masks
        ),
        "native_batch_norm": lambda: F.batch_norm(image, mean, variance, b, b, training=True),
        "native_batch_norm_backward": lambda: aten.native_batch_norm_backward.default(
            image, image, b, mean, variance, b, variance, True, 1e-5, masks
        ),
        "max_pool2d_with_indices": lambda: F.max_pool2d(image, 2, return_indices=True),
        "embedding": lambda: F.embedding(number, a),
        "embedding_dense_backward": lambda: aten.embedding_dense_backward.default(a, number, 8, -1, False),
        "_embedding_bag": lambda: aten._embedding_bag.default(a, number, number[:1], False, 1),
        "_embedding_bag_backward": lambda: aten._embedding_bag_backward.default(
            a[:1], number, number[:1], bag, sizes, empty, 8, False, 1, False, None
        ),
        "index": lambda: a[number],
        "index_add": lambda: a.index_add(0, number, a),
        "scatter_add": lambda: a.scatter_add(0, number[None], a),
        "bernoulli_": lambda: drawn.bernoulli_(USUAL, generator=generator),
        "max_pool2d_with_indices_backward": lambda: aten.max_pool2d_with_indices_backward.default(
            pooled, image, [2, 2], [2, 2], [0, 0], [1, 1], False, places
        ),
        "upsample_bilinear2d": lambda: F.interpolate(image, scale_factor=2.0, mode="bilinear"),
        "native_group_norm": lambda: F.group_norm(image, 2),
        "mean": lambda: a.mean(1),
        "mse_loss": lambda: F.mse_loss(a, a),
        "nll_loss_forward": lambda: F.nll_loss(a, number),
        "binary_cross_entropy_with_logits": lambda: F.binary_cross_entropy_with_logits(a, a),
        "sum": lambda: a.sum(0, keepdim=True),
        "cat": lambda: torch.cat([a, a]),
    }


def moving_kernels(tensor: New, rows: int) -> dict[str, OfTensors]:
    """Kernels that move memory, by operator, on pairs of tensors of at most ``rows`` rows and 256 columns."""
    means = tensor(max(rows // 16, 1), 4).zero_()
    b, channel, positive, aten = tensor(256), tensor(8), tensor(8).fill_(1), torch.ops.aten
    column, masks = tensor(rows, 1).fill_(1), [True, True, True]

    def image(x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 8, 2, 256)

    return {
        "elementwise": lambda x, y: x + y,
        "function": lambda x, _: torch.tanh(x),
        "copy": lambda x, _: x.t().contiguous(),
        "gelu": lambda x, _: F.gelu(x),
        "gelu_backward": lambda x, y: aten.gelu_backward.default(x, y),
        "_softmax": lambda x, _: x.softmax(-1),
        "_softmax_backward_data": lambda x, y: aten._softmax_backward_data.default(x, y, -1, x.dtype),
        "native_layer_norm": lambda x, _: F.layer_norm(x, (256,)),
        "native_layer_norm_backward": lambda x, y: aten.native_layer_norm_backward.default(
            x, y, [256], column[: len(x)], column[: len(x)], b, b, masks
        ),
        "native_batch_norm": lambda x, _: F.batch_norm(
            image(x), channel, positive, channel, channel, training=True
        ),
        "native_batch_norm_backward": lambda x, y: aten.native_batch_norm_backward.default(
            image(x), image(y), channel, channel, positive, channel, positive, True, 1e-5, masks
        ),
        "native_group_norm": lambda x, _: F.group_norm(image(x), 4),
        "native_group_norm_backward": lambda x, y: aten.native_group_norm_backward.default(
            image(x),
            image(y),
            means[: len(x) // 16],
            means[: len(x) // 16],
            channel,
            len(x) // 16,
            8,
            512,
            4,
            masks,
        ),
        "_log_softmax": lambda x, _: x.log_softmax(-1),
        "_log_softmax_backward_data": lambda x, y: aten._log_softmax_backward_data.default(x, y, -1, x.dtype),
        "_safe_softmax": lambda x, _: aten._safe_softmax.default(x, -1),
        "sum": lambda x, _: x.sum(0),
    }


PASSES = {
    "elementwise": 3,
    "gelu_backward": 3,
    "_softmax_backward_data": 3,
    "native_layer_norm_backward": 3,
    "native_batch_norm_backward": 3,
    "native_group_norm_backward": 3,
    "_log_softmax_backward_data": 3,
    "sum": 1,
}
"""Tensors that a call reads and writes; of the others, two."""


def counted_kernels(tensor: New) -> Counted:
    """Functions and their numbers of elements, by the names of :mod:`.cpu_counted_kernels`."""
    return _functions(tensor) | _draws(tensor) | _windows(tensor) | _rows(tensor)


ELEMENTS = 16 * 1024


def _functions(tensor: New) -> Counted:
    x, aten = tensor(ELEMENTS), torch.ops.aten
    positive = x.abs() + 0.5
    known: dict[str, Function] = {
        "exp": lambda: x.exp(),
        "sigmoid": lambda: x.sigmoid(),
        "silu": lambda: F.silu(x),
        "silu_backward": lambda: aten.silu_backward.default(x, x),
        "erf": lambda: x.erf(),
        "elu": lambda: F.elu(x),
        "elu_backward": lambda: aten.elu_backward.default(x, 1.0, 1, 1, False, x),
        "softplus": lambda: F.softplus(x),
        "mish": lambda: F.mish(x),
        "sin": lambda: x.sin(),
        "log": lambda: positive.log(),
        "pow": lambda: positive.pow(1.5),
        "gt": lambda: x > 0,
        "gelu tanh": lambda: F.gelu(x, approximate="tanh"),
        "gelu_backward tanh": lambda: aten.gelu_backward.default(x, x, approximate="tanh"),
        "mse_loss": lambda: F.mse_loss(x, x),
        "cumsum": lambda: x.view(-1, 64).cumsum(-1),
    }
    return {name: (function, ELEMENTS) for name, function in known.items()}


def _draws(tensor: New) -> Counted:
    x, generator = tensor(ELEMENTS), torch.Generator().manual_seed(0)
    known: dict[str, Function] = {
        f"bernoulli_ {USUAL}": lambda: x.bernoulli_(USUAL, generator=generator),
        f"bernoulli_ {RARE}": lambda: x.bernoulli_(RARE, generator=generator),
        "normal_": lambda: x.normal_(generator=generator),
        "uniform_": lambda: x.uniform_(generator=generator),
        "exponential_": lambda: x.exponential_(generator=generator),
    }
    return {name: (function, ELEMENTS) for name, function in known.items()}


def _windows(tensor: New) -> Counted:
    """Pooling and resampling, per result of the forward pass, or per input of the backward pass.

    The images are so large that the processor cannot learn the outcome of each comparison of max pooling.
    """
    images, small, aten = tensor(2, 16, 64, 64), tensor(2, 16, 32, 32), torch.ops.aten
    _, places = F.max_pool2d(images, 2, return_indices=True)
    quarter, count = small.numel(), images.numel()
    shape, large = [*small.shape], [*images.shape[2:]]
    return {
        f"max_pool {SMALL}": (lambda: F.max_pool2d(images, 2, return_indices=True), quarter),
        f"max_pool {LARGE}": (lambda: F.max_pool2d(images, 3, 2, 1, return_indices=True), quarter),
        "max_pool2d_with_indices_backward": (
            lambda: aten.max_pool2d_with_indices_backward.default(
                small, images, [2, 2], [2, 2], [0, 0], [1, 1], False, places
            ),
            count,
        ),
        "avg_pool2d": (lambda: F.avg_pool2d(images, 2), quarter),
        "_adaptive_avg_pool2d": (lambda: F.adaptive_avg_pool2d(images, 4), count),
        "upsample_bilinear2d": (lambda: F.interpolate(small, scale_factor=2.0, mode="bilinear"), count),
        "upsample_bilinear2d_backward": (
            lambda: aten.upsample_bilinear2d_backward.default(images, large, shape, False),
            count,
        ),
        "upsample_nearest2d": (lambda: F.interpolate(small, scale_factor=2.0), count),
        "upsample_nearest2d large": (lambda: F.interpolate(images, scale_factor=2.0), 4 * count),
        "upsample_nearest2d_backward": (
            lambda: aten.upsample_nearest2d_backward.default(images, large, shape),
            count,
        ),
        "upsample_bicubic2d": (lambda: F.interpolate(small, scale_factor=2.0, mode="bicubic"), count),
        "upsample_trilinear3d": (
            lambda: F.interpolate(small[:, :, None], scale_factor=(1.0, 2.0, 2.0), mode="trilinear"),
            count,
        ),
    }


def _rows(tensor: New) -> Counted:
    """Gathering and adding rows, and reducing them: per element, and ``rows`` per result."""
    rows, columns = 256, 64
    x, made, short = tensor(rows, columns), tensor(rows, columns), tensor(ELEMENTS // 8, 8)
    index = torch.randint(rows, (rows,), generator=torch.Generator().manual_seed(0), device="cpu")
    wide = index[:, None].expand(rows, columns).contiguous()
    return {
        "index": (lambda: x[index], x.numel()),
        "index_put_": (lambda: torch.ops.aten.index_put_.default(made, [index], x, True), x.numel()),
        "index_add": (lambda: x.index_add(0, index, x), x.numel()),
        "scatter_add": (lambda: x.scatter_add(0, wide, x), x.numel()),
        "scatter_reduce": (lambda: x.scatter_reduce(0, wide, x, "amax"), x.numel()),
        "max": (lambda: x.max(-1), x.numel()),
        "var": (lambda: x.var(-1), x.numel()),
        "rows": (lambda: short.sum(-1), len(short)),
    }
