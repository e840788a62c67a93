"""Workspace of oneDNN's convolutions on the CPU.

oneDNN uses its own image layouts: it copies its inputs into them, and the result back.  The layouts were
observed in the allocator's events and in oneDNN's log of 300 convolutions (``ONEDNN_VERBOSE=profile_create``,
oneDNN 3.12, x86-64): blocks of 16 channels with AVX-512, with channels rounded up.
``at::native::mkldnn_convolution`` (mkldnn/Conv.cpp) and ideep determine the order of copies.

Workspace beyond the copies depends on how oneDNN distributes work over threads; parts that are not derived
exactly have a range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ...torch_internals.cpu_kernel_selection import Instructions, onednn_instructions
from .workspace_size import Events, Workspace

PAGE = 4096


class Conv(NamedTuple):
    """One convolution in oneDNN's terms; ``weight`` is (out, in / groups, kernel)."""

    batch: int
    channels: int
    image: tuple[int, ...]
    out_channels: int
    out_image: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    itemsize: int
    threads: int
    block: int  # channels per block: 16 with AVX-512, 8 with AVX2

    @property
    def depthwise(self) -> bool:
        return self.groups == self.channels == self.out_channels and self.groups > 1

    @property
    def pointwise(self) -> bool:
        """Whether oneDNN's 1x1 kernels support it; strided ones only if the steps divide evenly."""
        if math.prod(self.kernel) > 1 or any(self.padding) or self.groups > 1:
            return False
        return all(size * step == whole for size, step, whole in zip(self.out_image, self.stride, self.image))

    @property
    def strided(self) -> bool:
        return any(step > 1 for step in self.stride)

    @property
    def dilated(self) -> bool:
        return any(step > 1 and size > 1 for step, size in zip(self.dilation, self.kernel))

    def src(self, block: int = 1) -> int:
        return self._image(self.channels, self.image, block)

    def dst(self, block: int = 1) -> int:
        return self._image(self.out_channels, self.out_image, block)

    def _image(self, channels: int, image: Sequence[int], block: int) -> int:
        return self.batch * _round_up(channels, block) * math.prod(image) * self.itemsize

    def weights(self, of_out: int = 1, of_in: int = 1) -> int:
        """Bytes of the weights with channels rounded up; a depthwise convolution has blocks of groups."""
        size = math.prod(self.kernel) * self.itemsize
        if self.depthwise:
            return _round_up(self.groups, of_out) * size
        inside, outside = self.channels // self.groups, self.out_channels // self.groups
        return self.groups * _round_up(inside, of_in) * _round_up(outside, of_out) * size

    @property
    def group_block(self) -> int:
        """Channels per block, which must divide a group's channels; 0 if oneDNN multiplies matrices
        instead.
        """
        if self.groups == 1 or self.depthwise:
            return self.block
        inside, outside = self.channels // self.groups, self.out_channels // self.groups
        for block in (16, 8, 4) if self.block == 16 else (8,):
            if inside % block == 0 and outside % block == 0:
                return block
        return 0


def _round_up(size: int, block: int) -> int:
    return -(-size // block) * block


def _ceil(size: int, parts: int) -> int:
    return -(-size // parts)


def _booked(size: int, align: int = 128) -> int:
    """One entry of a oneDNN scratchpad: its bytes, plus padding for alignment
    (common/memory_tracking.hpp).
    """
    return size + align if size else 0


def _exactly(size: int) -> Workspace:
    return Workspace(size, size, size)


# The barrier for threads that sum partial results: simple_barrier::ctx_t, one page, booked with padding for
# another.
_BARRIER = _booked(PAGE, PAGE)


def forward(conv: Conv, *, bias: bool, direct: bool = False, nested: bool = False) -> Events:
    """``mkldnn_convolution``: operands are copied, then the result in blocks, then in the requested layout.

    ``direct``: tensors that are channels last already are used as they are. ``nested``: the kernel is called
    by that of a transposed convolution.
    """
    run = Events()
    block = conv.group_block
    space = _forward_space(conv, bias, direct)
    space = _nested(space) if nested else space
    if direct:
        # Channels in blocks of 16 to 64, by oneDNN's estimate of its speed.
        least, most = conv.weights(16), conv.weights(16 if conv.depthwise else 64)
        run.take(conv.dst(), space, Workspace(least, least, most))
        return run
    if not block:  # matrix products in the given layout
        run.take(space, conv.dst())
        run.free(space)
        run.take(conv.dst())
        return run
    first = conv.groups == 1 and conv.channels < block and not conv.pointwise
    image = 0 if first else conv.src(block)
    weights = conv.weights(block, 1 if first else block)
    run.take(space, image, weights, conv.dst(block))
    run.free(weights, image, space)
    run.take(conv.dst())
    return run


def _forward_space(conv: Conv, bias: bool, direct: bool) -> Workspace:
    if direct and conv.depthwise:
        return _exactly(0)
    if direct:  # brgemm kernels: a page, and a few pointers, for each thread
        return _exactly(conv.threads * (PAGE + 24) + PAGE)
    block = conv.group_block
    if not block:
        columns = columns_of(conv)
        return Workspace(_booked(columns), 0, _booked(columns * conv.threads))
    size = 0
    if bias and conv.out_channels % block:
        size += _booked(_round_up(conv.out_channels, block) * conv.itemsize)
    if conv.pointwise and conv.strided:
        size += _booked(conv.threads * _reduced_image(conv) * _ceil(conv.channels, block))
    return _exactly(size)


def _reduced_image(conv: Conv) -> int:
    """Bytes of one block of channels of the image for a strided 1x1 kernel (rtus in oneDNN)."""
    return math.prod(conv.out_image) * conv.block * conv.itemsize


def columns_of(conv: Conv) -> int:
    """Bytes of one sample's image as columns of one group; 0 if the image already has that form."""
    if math.prod(conv.kernel) == 1 and not conv.strided and not any(conv.padding):
        return 0
    inside = conv.channels // conv.groups
    return inside * math.prod(conv.kernel) * math.prod(conv.out_image) * conv.itemsize


def backward_data(run: Events, conv: Conv, *, direct: bool = False) -> None:
    """``mkldnn_convolution_backward_input``; the image's gradient stays allocated."""
    block = conv.group_block
    strided = conv.strided and _takes_strided(conv)
    if not direct and not strided and (not block or _has_no_avx2_kernel(conv)):
        space = Workspace(_booked(columns_of(conv)), 0, _booked(columns_of(conv) * conv.threads))
        run.take(conv.src(), space)
        run.free(space)
        run.take(conv.src())
        run.free(conv.src())
        return
    if direct or strided:
        # Channels last, for oneDNN's strided kernel as for tensors in that format.
        space = _strided_space(conv) if conv.strided else _exactly(conv.threads * (PAGE + 88) + PAGE)
        weights = _strided_weights(conv)
        if conv.depthwise:
            space, weights = _exactly(0), conv.weights(16)
        if direct:
            run.take(conv.src(), weights, space)
            run.free(space, weights)
            return
        copy = conv.dst()
        run.take(copy, weights, conv.src(), space)
        run.free(space, weights, copy)
        copies = 1 if conv.channels == 1 else 2  # from its layout into the requested one
        run.take(*[conv.src()] * copies)
        run.free(*[conv.src()] * copies)
        return
    image, weights, gradient = conv.src(block), conv.weights(block, block), conv.dst(block)
    run.take(gradient, weights, image)
    run.free(weights, gradient)
    run.take(conv.src())
    run.free(image)


def _has_no_avx2_kernel(conv: Conv) -> bool:
    """Whether AVX2's kernel for gradients of images does not support it: both strided and dilated."""
    return conv.block == 8 and conv.strided and conv.dilated


def _takes_strided(conv: Conv) -> bool:
    """Whether oneDNN's brgemm kernel for strided gradients supports it; it processes one group after the
    other.
    """
    if conv.depthwise or onednn_instructions() < Instructions.AVX2:
        return False
    if conv.block == 8:  # AVX2
        return not conv.dilated and (conv.groups == 1 or conv.out_channels // conv.groups > conv.block)
    if conv.groups == 1:
        return True
    return (conv.channels // conv.groups) % conv.block == 0 and conv.out_channels // conv.groups > conv.block


def _strided_weights(conv: Conv) -> int:
    """Weights with the image's channels rounded up to the kernel's block: with AVX2, of up to 32."""
    inside, outside = conv.channels // conv.groups, conv.out_channels // conv.groups
    blocks = (24, 32) if conv.block == 8 and inside > 32 else (conv.block,)
    return (
        conv.groups
        * outside
        * min(_round_up(inside, block) for block in blocks)
        * math.prod(conv.kernel)
        * conv.itemsize
    )


def _strided_space(conv: Conv) -> Workspace:
    """For each thread: pointers, the padded gradient, and its mask (jit_brgemm_conv_bwd_utils.cpp)."""
    padded = conv.out_channels
    for whole, size, kernel, dilation, pad, step in zip(
        conv.image, conv.out_image, conv.kernel, conv.dilation, conv.padding, conv.stride
    ):
        reach = (kernel - 1) * dilation
        after = (size - 1) * step + reach + 1 - whole - pad  # the padding on the right that the kernel uses
        padded *= size + max(0, reach - pad) // step + max(0, reach - after) // step
    pointers = _ceil(
        _round_up(40 * max(1, math.prod(_ceil(k, s) for k, s in zip(conv.kernel, conv.stride))), PAGE), 40
    )
    size = _booked(conv.threads * pointers * 40, PAGE)
    size += _booked(conv.threads * _round_up(padded, PAGE) * conv.itemsize, PAGE)
    size += _booked(conv.threads * PAGE, PAGE)
    if not conv.image[-1] % conv.stride[-1]:
        return _exactly(size)
    # Uneven rows are first written elsewhere; oneDNN may choose a block smaller than a row.
    row = _round_up(conv.image[-1], conv.stride[-1])
    more = _booked(conv.threads * _round_up(row * conv.channels, PAGE) * conv.itemsize, PAGE)
    return Workspace(size + more, size, size + more)


def backward_weights(
    run: Events, conv: Conv, *, bias: bool, direct: bool = False, nested: bool = False
) -> None:
    """``mkldnn_convolution_backward_weights``; the gradients of weights and bias stay allocated."""
    block = conv.group_block
    plain = conv.weights()
    with_bias = conv.out_channels * conv.itemsize if bias else 0
    wide = conv.depthwise and not _suits_depthwise(conv)
    by_matrix = not block or (not direct and conv.groups > 1 and (block < 8 or wide))
    by_matrix = by_matrix or (not direct and conv.dilated and conv.block == 8)
    if by_matrix:
        space = _nested(_matrix_space(conv)) if nested else _matrix_space(conv)
        run.take(plain, space, with_bias)
        run.free(space)
        run.take(with_bias, plain)
        run.free(plain, with_bias)
        return
    if conv.groups == 1 and not conv.pointwise and 3 < conv.channels < 16 and block == 16:
        block = 8  # the AVX2 kernel supports it
    first = conv.groups == 1 and conv.channels < 4 and not conv.pointwise
    if conv.block == 8:  # AVX2's kernel takes three channels as they are, and rounds one or two up
        first = first and conv.channels == 3
    weights = conv.weights(block, 1 if first else block)
    space = _reduction_space(conv, block, bias, first)
    if direct and conv.depthwise:
        # What the kernel for depthwise weights does not take uses blocks of 16 by 16 channels for each group.
        width = _round_up(conv.groups, block) * conv.itemsize
        if wide:
            weights *= block * conv.groups * block // _round_up(conv.groups, block)
            space = _exactly(_booked(conv.groups * block * conv.itemsize if bias else 0))
        elif conv.threads > 1:
            others = conv.threads - 1
            space = _exactly(_booked(weights * others) + _booked(width * others if bias else 0))
    gradient, image = (0, 0) if direct else (conv.dst(block), 0 if first else conv.src(block))
    run.take(gradient, image, weights, space, with_bias)
    run.free(space, image, gradient)
    run.take(with_bias, plain)
    if direct:  # from its layout into channels last
        run.take(plain)
        run.free(plain)
    run.free(weights, with_bias)


def _suits_depthwise(conv: Conv) -> bool:
    """Whether the kernel for weights of depthwise convolutions takes it: few taps in a row, and an image that
    is as high as the filter where that starts (``boundaries_ok``, jit_uni_dw_conv_kernel_utils.cpp).
    """
    if conv.kernel[-1] > 3 or len(conv.kernel) < 2:
        return conv.kernel[-1] <= 3
    return conv.image[-2] >= conv.kernel[-2] + conv.padding[-2] % conv.stride[-2]


def _matrix_space(conv: Conv) -> Workspace:
    """Columns, and partial weights: one float for each of their bytes (gemm_convolution_utils.cpp)."""
    outer = math.prod(conv.out_image) // conv.threads < 256 and (conv.batch != 1 or conv.groups > 2)
    threads = conv.threads if outer else 1
    size = _booked(threads * conv.weights() * 4) + _booked(threads * columns_of(conv))
    return _exactly(size)


def _reduction_space(conv: Conv, block: int, bias: bool, first: bool) -> Workspace:
    """Partial weights of the threads that share the batch, one set fewer than threads, and a barrier."""
    padded = (
        _booked(_round_up(conv.out_channels, block) * conv.itemsize)
        if bias and conv.out_channels % block
        else 0
    )
    weights = conv.weights(block, 1 if first else block)
    bias_size = _round_up(conv.out_channels, block) * conv.itemsize
    threads = conv.threads
    if conv.depthwise:
        # Channels first, the batch among the remaining threads (jit_uni_dw_conv_kernel_utils.cpp).
        shares = min(max(1, threads // min(threads, _ceil(conv.groups, block))), conv.batch) - 1
        return _exactly(_booked(weights * shares) + _booked(bias_size * shares if bias else 0))
    rtus = 0
    if conv.pointwise:
        blocks = _ceil(conv.channels, block)
        if conv.strided:
            factor = next((part for part in range(min(5, blocks), blocks + 1) if blocks % part == 0), blocks)
            rtus = _booked(threads * _reduced_image(conv) * factor)
        bias_size = 0

    def reduction(shares: int) -> int:
        if block < conv.block:  # the AVX2 kernel's
            return _booked(weights * (shares - 1), PAGE) + _BARRIER if shares > 1 else 0
        return _booked((weights + bias_size) * (shares - 1)) + _BARRIER if shares > 1 else 0

    shares = batch_shares(conv, block, first)
    base = padded + rtus + (_bias_space(conv, block) if bias else 0)
    most = base + reduction(threads)
    known = threads <= 2 or shares == threads
    mid = base + reduction(shares)
    return Workspace(mid, mid if known else base, mid if known else max(most, mid))


def _bias_space(conv: Conv, block: int) -> int:
    """The buffer in which threads that share the batch sum the bias's gradient, if there are too few blocks
    of channels.
    """
    jobs = conv.groups * _ceil(conv.out_channels // conv.groups, block)
    groups = min(jobs, conv.threads)
    each = min(conv.threads // groups, conv.batch)
    if each < 2:
        return 0
    size = _round_up(conv.out_channels, block) * conv.itemsize
    return _booked(size * (each - 1), PAGE) + _booked(groups * PAGE, PAGE)


@lru_cache(4096)
def batch_shares(conv: Conv, block: int, first: bool) -> int:
    """The number of threads among which oneDNN divides the batch when it sums the weights' gradient.

    It selects the division of batch, input and output channels that moves the fewest bytes per thread
    (``balance`` in jit_avx512_common_conv_kernel.cpp and jit_avx512_common_1x1_conv_kernel.cpp).
    """
    threads = conv.threads // conv.groups
    if threads < 2:
        return 1
    inner = conv.channels // conv.groups if first else block
    ins = _ceil(conv.channels // conv.groups, inner if first else block)
    outs = _ceil(conv.out_channels // conv.groups, block)
    taps = math.prod(conv.kernel)
    image, out_image = math.prod(conv.image), math.prod(conv.out_image)
    if conv.pointwise:
        rows, image, out_image, factor = 1, out_image, out_image, 12
        steps = conv.batch * _reduce_steps(out_image, conv.out_image[-1])
        per_step = out_image * conv.batch / steps
    else:
        factor = 8
        by_row = len(conv.kernel) == 2 and conv.out_image[0] > 9 and conv.dilation[0] == 1
        rows = conv.out_image[0] if by_row else 1
    strides = math.prod(conv.stride)

    def cost(batch: int, out: int, inn: int) -> float:
        if conv.pointwise:
            moved = _ceil(steps, batch) * per_step
            read = moved * _ceil(ins, inn) * inner / strides
            written = moved * _ceil(outs, out) * block
        else:
            row_in = conv.image[0] if by_row else 1
            read = _ceil(conv.batch * row_in, batch) * _ceil(ins, inn) * inner * (image // row_in) / strides
            written = _ceil(conv.batch * rows, batch) * _ceil(outs, out) * block * (out_image // rows)
        return read + written + factor * _ceil(outs, out) * _ceil(ins, inn) * taps * inner * block

    most = conv.batch * (
        max(1, rows // 9) if not conv.pointwise else _reduce_steps(out_image, conv.out_image[-1])
    )
    best, chosen = cost(1, 1, 1), 1
    splits = [
        (batch, out, min(threads // batch // out, ins))
        for batch in range(1, min(threads, most) + 1)
        for out in range(1, min(threads // batch, outs) + 1)
    ]
    for split in splits:
        price = cost(*split)
        if price <= best:
            best, chosen = price, split[0]
    if conv.pointwise:
        if conv.threads / 2 < chosen < conv.threads:
            chosen = min(conv.batch, conv.threads)
        return chosen

    # A second pass prefers fewer steps per thread if that hardly moves more bytes.
    def work(batch: int, out: int, inn: int) -> int:
        return _ceil(conv.batch * rows, batch) * _ceil(outs, out) * _ceil(ins, inn)

    at = next(split for split in [(1, 1, 1), *splits] if split[0] == chosen and cost(*split) == best)
    least = work(*at)
    for split in splits:
        steps_now = work(*split)
        if (steps_now <= least and cost(*split) < 1.1 * best) or 4 * steps_now <= 3 * least:
            least, chosen = steps_now, split[0]
    return chosen


def _reduce_steps(positions: int, width: int) -> int:
    """The number of steps into which a 1x1 kernel divides the image's positions: a divisor between 7 and 16,
    if there is one.
    """
    for step in range(16, 6, -1):
        if positions % step == 0:
            return positions // step
    for step in range(4, width + 1):
        if width % step == 0:
            return positions // step if step <= 256 else positions
    return 1


def transpose(run: Events, conv: Conv, *, bias: bool, direct: bool) -> None:
    """``mkldnn_convolution_transpose``: another convolution's gradient of its image."""
    if not direct and conv.strided and _takes_strided(conv):
        space = _strided_space(conv)
        if bias and conv.image[-1] % conv.stride[-1]:
            space = _plus(space, _booked(conv.src()))  # the bias is added to a copy
        copy, weights, space = conv.dst(), _strided_weights(conv), _nested(space)
        run.take(space, copy, weights, conv.src())
        run.free(weights, copy, space)
        run.take(conv.src(), conv.src())
        return
    extra = _booked(conv.src(conv.group_block or 1)) if bias and not direct else 0
    run.take(extra)
    backward_data(run, conv, direct=direct)
    run.free(extra)


def _plus(space: Workspace, size: int) -> Workspace:
    return Workspace(*(part + size for part in space))


def _nested(space: Workspace) -> Workspace:
    """The scratchpad of a kernel inside of another's, where it is one entry."""
    return Workspace(*(_booked(size) for size in space))
