"""What a convolution on the CPU needs beyond its operands and results, from the recorded call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .._kernels import conv_backend
from .events import NOTHING, Events, Need
from .onednn import Conv, backward_data, backward_weights, columns_of, forward, transpose


class _Tensor(NamedTuple):
    """What matters of an operand: its sizes, and whether it must be copied to lie as asked for."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    nbytes: int

    @property
    def channels_last(self) -> bool:
        """Whether PyTorch takes it for channels last (``is_channels_last_strides_2d`` in c10)."""
        if len(self.shape) not in (4, 5) or self.stride[1] == 0:
            return False
        least = 0
        for dim in (1, *range(len(self.shape) - 1, 1, -1), 0):
            if self.shape[dim] == 0 or self.stride[dim] < least:
                return False
            if dim == 0 and least == self.stride[1]:
                return False
            least = self.stride[dim] * max(self.shape[dim], 1)
        return True

    def copied(self, channels_last: bool) -> int:
        """Bytes of the copy that ``contiguous(memory_format=...)`` makes; 0 if it lies so."""
        order = (
            (1, *range(len(self.shape) - 1, 1, -1), 0)
            if channels_last
            else range(len(self.shape) - 1, -1, -1)
        )
        expected = 1
        for dim in order:
            if self.shape[dim] != 1 and self.stride[dim] != expected:
                return self.nbytes
            expected *= self.shape[dim]
        return 0


def _operand(meta: Any) -> _Tensor:
    """A tensor's sizes, one-dimensional images as images of one row (``view1d_as_2d``)."""
    shape, stride = tuple(meta.shape), tuple(meta.stride)
    if len(shape) == 3:
        shape, stride = (*shape[:2], 1, shape[2]), (*stride[:2], shape[2] * stride[2], stride[2])
    return _Tensor(shape, stride, meta.nbytes)


def block_of_channels() -> int:
    """Channels of a block of oneDNN's layouts: the floats of a vector register."""
    return 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8


def forward_need(image: Any, weight: Any, bias: bool, rest: Sequence[Any], threads: int) -> Need:
    """What ``aten::convolution`` needs on the CPU beyond its result; operands are metadata."""
    case = _case(image, weight, rest, threads)
    if case is None:
        return NOTHING
    conv, backend, operand, kernel = case
    if not backend.startswith("Mkldnn"):
        return _slow(conv, backend, operand.copied(False) + kernel.copied(False), forward=True)
    last = operand.channels_last or kernel.channels_last
    run = Events()
    copies = (operand.copied(last), kernel.copied(last))
    run.take(*copies)
    transposed = rest[3]
    if transposed:
        transpose(run, conv, bias=bias, direct=last)
        results = conv.src()
    else:
        inner = forward(conv, bias=bias, direct=last)
        run.peak = [max(a, now + b) for a, now, b in zip(run.peak, run.now, inner.peak)]
        results = conv.dst()
    return _sure(run.need(results), conv, last)


def backward_need(
    gradient: Any, image: Any, weight: Any, rest: Sequence[Any], mask: Sequence[bool], threads: int
) -> Need:
    """What ``aten::convolution_backward`` needs on the CPU beyond the gradients that it returns."""
    case = _case(image, weight, rest, threads)
    if case is None:
        return NOTHING
    conv, backend, operand, kernel = case
    if not backend.startswith("Mkldnn"):
        copies = sum(tensor.copied(False) for tensor in (_operand(gradient), operand, kernel))
        return _slow(conv, backend, copies, needed=mask[0] or mask[1])
    last = operand.channels_last or kernel.channels_last
    run = Events()
    run.take(*(tensor.copied(last) for tensor in (_operand(gradient), operand, kernel)))
    transposed = rest[3]
    results = 0
    if mask[0]:
        if transposed:
            inner = forward(conv, bias=False, direct=last)
            run.peak = [max(a, now + b) for a, now, b in zip(run.peak, run.now, inner.peak)]
            results += conv.dst()
            run.take(conv.dst())
        else:
            backward_data(run, conv, direct=last)
            results += conv.src()
    if mask[1]:
        backward_weights(run, conv, bias=mask[2] and not transposed, direct=last)
        results += conv.weights() + (conv.out_channels * conv.itemsize if mask[2] and not transposed else 0)
    elif mask[2] and not transposed:
        results += conv.out_channels * conv.itemsize
    return _sure(run.need(results), conv, last)


def _sure(need: Need, conv: Conv, direct: bool) -> Need:
    """A wider range where oneDNN has more kernels to choose from than these rules know."""
    grouped = conv.groups > 1 and not conv.depthwise
    if conv.itemsize == 4 and conv.block == 16 and not grouped and not (direct and conv.channels == 1):
        return need
    return Need(need.nbytes, 0, 2 * need.high + conv.src() + conv.dst())


def _case(
    image: Any, weight: Any, rest: Sequence[Any], threads: int
) -> tuple[Conv, str, _Tensor, _Tensor] | None:
    """The convolution, its backend, and its operands, or ``None`` for one without elements.

    A transposed convolution is described by the one whose gradient it is: its ``src`` is the result.
    """
    stride, padding, dilation, transposed, output_padding, groups = rest
    operand, kernel = _operand(image), _operand(weight)
    if not image.nbytes or not weight.nbytes:
        return None
    dims = len(operand.shape) - 2
    if len(image.shape) == 3:
        stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
        output_padding = (0, *output_padding)
    stride, padding, dilation, output_padding = (
        tuple(value) * dims if len(value) == 1 else tuple(value)
        for value in (stride, padding, dilation, output_padding)
    )
    taps = kernel.shape[2:]
    backend = conv_backend(
        operand.shape,
        kernel.shape,
        stride,
        padding,
        dilation,
        transposed,
        output_padding,
        groups,
        image.dtype,
    )
    here = operand.shape[2:]
    if transposed:
        there = tuple(
            (size - 1) * s - 2 * p + d * (k - 1) + o + 1
            for size, s, p, d, k, o in zip(here, stride, padding, dilation, taps, output_padding)
        )
        channels, images = kernel.shape[1] * groups, (there, here)
        out = operand.shape[1]
    else:
        there = tuple(
            (size + 2 * p - d * (k - 1) - 1) // s + 1
            for size, s, p, d, k in zip(here, stride, padding, dilation, taps)
        )
        channels, images = operand.shape[1], (here, there)
        out = kernel.shape[0]
    conv = Conv(
        operand.shape[0], channels, images[0], out, images[1], taps, stride, padding, dilation, groups,
        image.dtype.itemsize, threads, block_of_channels(),
    )  # fmt: skip
    return conv, backend, operand, kernel


def _slow(conv: Conv, backend: str, copies: int, *, forward: bool = False, needed: bool = True) -> Need:
    """ATen's own convolutions: the image as columns, of one sample or the batch.

    ConvolutionMM2d.cpp, NaiveConvolutionTranspose2d.cpp (of the batch in the forward pass, always).
    """
    columns = columns_of(conv)
    if backend == "SlowTranspose2d" and forward:
        inside = conv.channels // conv.groups
        columns = inside * math.prod((*conv.kernel, *conv.out_image)) * conv.itemsize
    if backend in ("Slow2d", "Slow3d") or (backend == "SlowTranspose2d" and forward):
        columns *= conv.batch
    if not needed:
        columns = 0
    if conv.groups > 1:
        # Slices of image, weights and results, one group each, and what puts them together.
        parts = conv.src() + conv.dst() + conv.weights()
        return Need(copies + columns + parts, 0, copies + columns + 2 * parts)
    exact = backend in ("Slow2d", "SlowTranspose2d")
    return Need(columns + copies, columns + copies if exact else 0, (columns + copies) * (1 if exact else 2))
