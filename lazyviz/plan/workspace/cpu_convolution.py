"""Workspace of CPU convolutions beyond operands and results, from the recorded call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...torch_internals.cpu_kernel_selection import Instructions, conv_backend, onednn_instructions
from .onednn_convolution import PAGE, Conv, backward_data, backward_weights, columns_of, forward, transpose
from .workspace_size import NOTHING, Events, Need


class _Tensor(NamedTuple):
    """The relevant properties of an operand: its sizes, and whether it must be copied to the requested
    layout.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    nbytes: int

    @property
    def channels_last(self) -> bool:
        """Whether PyTorch treats it as channels last (``is_channels_last_strides_2d`` in c10)."""
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
        """Bytes of the copy that ``contiguous(memory_format=...)`` makes; 0 if it has that layout."""
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
    """A tensor's sizes; one-dimensional images count as images with one row (``view1d_as_2d``)."""
    shape, stride = tuple(meta.shape), tuple(meta.stride)
    if len(shape) == 3:
        shape, stride = (*shape[:2], 1, shape[2]), (*stride[:2], shape[2] * stride[2], stride[2])
    return _Tensor(shape, stride, meta.nbytes)


def forward_need(image: Any, weight: Any, bias: bool, rest: Sequence[Any], threads: int) -> Need:
    """The memory that ``aten::convolution`` needs on the CPU besides its result; operands are metadata."""
    case = _case(image, weight, rest, threads)
    if case is None:
        return NOTHING
    conv, backend, operand, kernel = case
    last = operand.channels_last or kernel.channels_last
    if not backend.startswith("Mkldnn"):
        copies = sum(tensor.copied(last and backend in _IN_TWO_DIMENSIONS) for tensor in (operand, kernel))
        return _slow_kernel(conv, backend, copies, forward=True)
    run = Events()
    copies = operand.copied(last) + kernel.copied(last)
    run.take(copies)
    transposed = rest[3]
    if transposed:
        transpose(run, conv, bias=bias, direct=last)
        results = conv.src()
    else:
        inner = forward(conv, bias=bias, direct=last)
        run.peak = [max(a, now + b) for a, now, b in zip(run.peak, run.now, inner.peak)]
        results = conv.dst()
    verified = _verified(conv, last) and (not transposed or conv.strided)
    return _with_uncertainty(run.need(results), conv, verified, copies)


def backward_need(
    gradient: Any, image: Any, weight: Any, rest: Sequence[Any], mask: Sequence[bool], threads: int
) -> Need:
    """The memory that ``aten::convolution_backward`` needs on the CPU besides the gradients that it
    returns.
    """
    case = _case(image, weight, rest, threads)
    if case is None:
        return NOTHING
    conv, backend, operand, kernel = case
    last = operand.channels_last or kernel.channels_last
    if not backend.startswith("Mkldnn"):
        kept = last and backend in _IN_TWO_DIMENSIONS
        copies = sum(tensor.copied(kept) for tensor in (_operand(gradient), operand, kernel))
        return _slow_kernel(conv, backend, copies, needed=mask[1] or (mask[0] and backend != "Slow2d"))
    run = Events()
    copies = sum(tensor.copied(last) for tensor in (_operand(gradient), operand, kernel))
    run.take(copies)
    transposed = rest[3]
    results = 0
    if mask[0]:
        if transposed:
            inner = forward(conv, bias=False, direct=last, nested=True)
            run.peak = [max(a, now + b) for a, now, b in zip(run.peak, run.now, inner.peak)]
            results += conv.dst()
            run.take(conv.dst())
        else:
            backward_data(run, conv, direct=last)
            results += conv.src()
    if mask[1]:
        backward_weights(run, conv, bias=mask[2] and not transposed, direct=last, nested=transposed)
        results += conv.weights() + (conv.out_channels * conv.itemsize if mask[2] and not transposed else 0)
    elif mask[2] and not transposed:
        results += conv.out_channels * conv.itemsize
    verified = _verified(conv, last) and _verified_backward(conv, mask[2], mask[1]) and not transposed
    return _with_uncertainty(run.need(results), conv, verified, copies)


def _with_uncertainty(need: Need, conv: Conv, verified: bool, copies: int) -> Need:
    """Where the rules were verified, the result is exact (or has their range); otherwise, it is an
    estimate.
    """
    return need if verified else Need(need.nbytes, 0, max(need.high * 5 // 4, _upper_bound(conv) + copies))


def _verified(conv: Conv, direct: bool) -> bool:
    """Whether the rules hold: for a thousand convolutions with AVX-512, they match the allocated memory.

    oneDNN has more kernels than the rules cover, for other processors' registers, half precision, channels
    last, groups, dilation, large strides, and a result of one pixel.
    """
    if onednn_instructions() < Instructions.AVX512 or conv.itemsize != 4 or direct:
        return False
    if max(conv.dilation) > 1 or max(conv.stride) > 2 or math.prod(conv.out_image) == 1:
        return False
    if conv.groups > 1:
        return conv.depthwise and math.prod(conv.kernel) > 1
    return len(conv.kernel) == 2 or not (conv.strided or conv.channels < conv.block or conv.pointwise)


def _verified_backward(conv: Conv, bias: bool, weight: bool) -> bool:
    """Additional conditions: rows that divide evenly, and sums of weight gradients in whole blocks for each
    thread.
    """
    if conv.strided and conv.image[-1] % conv.stride[-1]:
        return False
    if not weight or conv.threads == 1:
        return True
    blocks = -(-conv.out_channels // conv.block)
    return not (bias and blocks % conv.threads) and (conv.groups > 1 or not 3 < conv.channels < conv.block)


def _upper_bound(conv: Conv) -> int:
    """An upper bound of the memory that any oneDNN kernel allocates; the widest kernels are those for AMX.

    It consists of image and result in blocks of channels, twice; weights likewise, and each thread's sums of
    them in float32; for each thread, a block of columns and its own pages. No convolution that was tried came
    near.
    """
    block = 64 if onednn_instructions() >= Instructions.AMX and conv.itemsize < 4 else 16
    wide = -(-4 // conv.itemsize)
    weights = conv.weights(block, block)
    if conv.depthwise:
        weights = conv.groups * block * block * math.prod(conv.kernel) * conv.itemsize
    each = max(weights * wide, conv.weights() * 4) + columns_of(conv) + 16 * PAGE
    return 2 * (conv.src(16) + conv.dst(16) + weights) + (conv.threads + 1) * each


def _case(
    image: Any, weight: Any, rest: Sequence[Any], threads: int
) -> tuple[Conv, str, _Tensor, _Tensor] | None:
    """The convolution, its backend, and its operands, or ``None`` for one without elements.

    A transposed convolution is described by the convolution whose gradient it is: its ``src`` is the result.
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
        image.dtype.itemsize, threads, 16 if onednn_instructions() >= Instructions.AVX512 else 8,
    )  # fmt: skip
    return conv, backend, operand, kernel


# ATen's own kernels that support channels last.
_IN_TWO_DIMENSIONS = ("Slow2d", "SlowTranspose2d")


def _slow_kernel(
    conv: Conv, backend: str, copies: int, *, forward: bool = False, needed: bool = True
) -> Need:
    """ATen's own convolutions: the image as columns, of one sample or the batch.

    ConvolutionMM2d.cpp, NaiveConvolutionTranspose2d.cpp (the latter always uses the batch in the forward
    pass).
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
        # Slices of image, weights and results, one for each group, and their concatenation.
        parts = conv.src() + conv.dst() + conv.weights()
        return Need(copies + columns + parts, 0, 2 * (copies + columns) + 4 * parts)
    known = columns + copies
    fixed = backend == "Slow2d" or (backend == "SlowTranspose2d" and forward)
    if fixed and conv.itemsize > 2:  # half precision is summed in float32
        return Need(known, known, known)
    return Need(known, 0, 2 * known + 4 * (conv.src() + conv.dst() + conv.weights()))
