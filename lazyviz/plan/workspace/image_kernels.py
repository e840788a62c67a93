"""Workspace of ATen's CPU image kernels: resizing, sliding windows, grids.

Sizes are exact; each entry names the file below ``aten/src/ATen/native`` that determines them.
"""

from __future__ import annotations

import math

from ...graph.ir import Node, TensorMeta
from .workspace_rule import (
    Rule,
    argument,
    channels_last,
    contiguous,
    copied,
    exactly,
    on,
    suggests_channels_last,
)
from .workspace_size import Need

TABLE: dict[str, Rule] = {}

# Neighbors along a dimension, each with a list of positions and one of weights (``HelperInterp...``).
_NEIGHBORS = {"nearest": 1, "linear": 2, "bilinear": 2, "trilinear": 2, "bicubic": 4}


@on(
    TABLE,
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
)
def _resize(node: Node, threads: int) -> Need:
    """Copies of image and result in channels-last for the kernels that need it, otherwise lists of neighbors.

    ``_use_vectorized_kernel_cond_2d`` and ``_3d`` (cpu/UpSampleKernel.cpp) decide: channels-last images of
    more than 3 channels, and in 2D results whose height and width sum to at most 128; one thread also resizes
    color images that way.
    """
    name = node.op._schema.name
    image, result = node.args[0].meta, node.outputs[0].meta
    dims = len(image.shape) - 2
    if image.dtype.itemsize == 1 and dims == 2 and "nearest" not in name:
        return _bytes_resized(image, result)
    if dims > 1 and "cubic" not in name:
        last = channels_last(image)
        small = dims == 2 and sum(result.shape[2:]) <= 128
        three_colors = "bilinear" in name and threads == 1 and image.shape[1] == 3
        if (last and image.shape[1] > 3) or small or three_colors:
            return exactly((0 if last else image.nbytes) + (0 if channels_last(result) else result.nbytes))
    neighbors = next(count for kind, count in _NEIGHBORS.items() if kind in name)
    return exactly(neighbors * sum(result.shape[2:]) * (8 + image.dtype.itemsize))


@on(TABLE, "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
def _resize_antialiased(node: Node, threads: int) -> Need:
    """Rows first, into an intermediate image, then columns; each with its lists of weights.

    ``separable_upsample_generic_Nd_kernel_impl`` and ``_compute_index_ranges_weights``
    (cpu/UpSampleKernel.cpp).
    """
    image, result = node.args[0].meta, node.outputs[0].meta
    if image.dtype.itemsize == 1:
        return _bytes_resized(image, result)
    support = 4 if "cubic" in node.op._schema.name else 2
    item = image.dtype.itemsize

    def weight_tables(dim: int) -> int:
        inside, outside = image.shape[dim], result.shape[dim]
        if node.args[2] and outside > 1:  # align_corners
            scale = (inside - 1) / (outside - 1)
        else:
            given = argument(node, dim + 1 if dim == 2 else 4, "scales_h" if dim == 2 else "scales_w")
            scale = 1 / given if given else inside / outside
        reach = math.ceil(support / 2 * max(scale, 1.0)) * 2 + 1
        return outside * (4 * 8 + reach * item)

    changed = [dim for dim in (3, 2) if image.shape[dim] != result.shape[dim]]
    between = math.prod((*image.shape[:3], result.shape[3])) * item if len(changed) == 2 else 0
    return exactly(between + max((weight_tables(dim) for dim in changed), default=0))


def _bytes_resized(image: TensorMeta, result: TensorMeta) -> Need:
    """Rows first, as above; color images one at a time, unpacked to four channels
    (UpSampleKernelAVXAntialias.h).
    """
    between = math.prod((*image.shape[:3], result.shape[3]))
    weight_tables = 64 * sum(result.shape[2:])
    return Need(between + weight_tables, 0, 4 * (image.nbytes + between) + 4 * weight_tables)


@on(TABLE, "im2col", "col2im")
def _windows(node: Node, threads: int) -> Need:
    """The result is initially as large as the operand (``im2col_cpu``, Im2Col.cpp; ``col2im_cpu``,
    Col2Im.cpp).

    A smaller result keeps that memory, which then belongs to it; a larger one needs both while it grows.
    """
    operand = node.args[0].meta
    grows = node.outputs[0].nbytes > operand.nbytes
    return exactly(copied(operand) + (operand.nbytes if grows else 0))


@on(TABLE, "affine_grid_generator")
def _grid(node: Node, threads: int) -> Need:
    """A grid of homogeneous coordinates, and one line of it (AffineGridGenerator.cpp)."""
    theta, size = node.args[0].meta, node.args[1]
    points = size[0] * math.prod(size[2:])
    return exactly(points * (len(size) - 1) * theta.dtype.itemsize)


@on(
    TABLE,
    "avg_pool2d",
    "_adaptive_avg_pool2d",
    "max_pool2d_with_indices",
    "max_pool3d_with_indices",
    "adaptive_max_pool2d",
    "reflection_pad1d",
    "reflection_pad2d",
    "reflection_pad3d",
    "replication_pad1d",
    "replication_pad2d",
    "replication_pad3d",
    "pixel_shuffle",
    "pixel_unshuffle",
    "channel_shuffle",
    "native_channel_shuffle",
)
def _image_in_order(node: Node, threads: int) -> Need:
    """Kernels that use ``input.contiguous()``, in the memory format that the image's strides suggest."""
    return exactly(_copied_for(suggests_channels_last(node.args[0].meta), node.args[0].meta))


@on(TABLE, "max_pool1d", "avg_pool3d", "fractional_max_pool2d", "fractional_max_pool3d")
def _contiguous_image(node: Node, threads: int) -> Need:
    return exactly(copied(node.args[0].meta))


@on(TABLE, "max_unpool2d")
def _unpooled(node: Node, threads: int) -> Need:
    """Image and indices in the image's memory format (MaxUnpooling.cpp)."""
    image, indices = node.args[0].meta, node.args[1].meta
    return exactly(_copied_for(suggests_channels_last(image), image, indices))


@on(TABLE, "max_unpool3d")
def _unpooled_3d(node: Node, threads: int) -> Need:
    return exactly(copied(node.args[0].meta, node.args[1].meta))


def _copied_for(last: bool, *metas: TensorMeta) -> int:
    """Bytes of the copies in channels-last, or of contiguous ones, of tensors with another layout."""
    return sum(meta.nbytes for meta in metas if not (channels_last(meta) if last else contiguous(meta)))


@on(
    TABLE,
    "avg_pool2d_backward",
    "_adaptive_avg_pool2d_backward",
    "upsample_nearest2d_backward",
    "upsample_nearest3d_backward",
    "_upsample_nearest_exact2d_backward",
    "_upsample_nearest_exact3d_backward",
    "upsample_bilinear2d_backward",
    "upsample_trilinear3d_backward",
    "reflection_pad2d_backward",
    "reflection_pad3d_backward",
    "replication_pad2d_backward",
    "replication_pad3d_backward",
)
def _gradient_in_its_format(node: Node, threads: int) -> Need:
    """Kernels for the memory format that the gradient's strides suggest, also of the result.

    The functions ``..._backward_channels_last`` in cpu/AdaptiveAvgPoolKernel.cpp, AvgPoolKernel.cpp,
    PaddingKernel.cpp and UpSampleMoreKernel.cpp.
    """
    gradient, result = node.args[0].meta, node.outputs[0].meta
    return exactly(_copied_for(suggests_channels_last(gradient), gradient, result))


@on(TABLE, "max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward")
def _gradient_of_maxima(node: Node, threads: int) -> Need:
    """The same, and the indices (cpu/MaxPoolKernel.cpp)."""
    gradient, indices, result = node.args[0].meta, node.args[-1].meta, node.outputs[0].meta
    return exactly(_copied_for(suggests_channels_last(gradient), gradient, indices, result))


@on(TABLE, "adaptive_max_pool2d_backward")
def _gradient_of_adaptive_maxima(node: Node, threads: int) -> Need:
    """Gradient and indices in the image's memory format (AdaptiveMaxPooling2d.cpp)."""
    gradient, image, indices = (value.meta for value in node.args[:3])
    return exactly(_copied_for(suggests_channels_last(image), gradient, indices))


@on(TABLE, "adaptive_max_pool3d_backward", "embedding_dense_backward")
def _contiguous_gradient(node: Node, threads: int) -> Need:
    return exactly(copied(node.args[0].meta))


@on(
    TABLE,
    "avg_pool3d_backward",
    "_adaptive_avg_pool3d_backward",
    "grid_sampler_2d_backward",
    "upsample_nearest1d_backward",
    "_upsample_nearest_exact1d_backward",
    "upsample_linear1d_backward",
    "upsample_bicubic2d_backward",
    "_upsample_bilinear2d_aa_backward",
    "_upsample_bicubic2d_aa_backward",
    "reflection_pad1d_backward",
    "replication_pad1d_backward",
)
def _contiguous_gradients(node: Node, threads: int) -> Need:
    """Kernels that use ``contiguous()`` on the gradients of their results and of their images."""
    return exactly(copied(node.args[0].meta, node.outputs[0].meta))
