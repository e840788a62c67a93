"""Workspace of CUDA kernels, from PyTorch's sources: estimates, since libraries decide at run time.

Each entry names the file below ``aten/src/ATen/native`` whose allocations it follows.  No GPU is needed.  A
graph that was recorded on the CPU for a GPU has CPU operators, so these have entries, too.  Kernels without
scratch memory include softmax, pointwise kernels, ``_foreach_`` arithmetic, and fused optimizers
(MultiTensorApply.cuh passes its lists as kernel arguments).  The workspace that cuBLAS keeps is in
:mod:`lazyviz.plan.workspace.cublas`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from ...graph.ir import Node, TensorMeta, Value
from ...torch_internals.private_api import OpOverload
from . import cudnn_rnn_workspace
from .workspace_size import NOTHING, Need

Rule = Callable[[Node, int], Need]
TABLE: dict[str, Rule] = {
    "aten::_cudnn_rnn": cudnn_rnn_workspace.forward,
    "aten::_cudnn_rnn_backward": cudnn_rnn_workspace.backward,
}


_FFT_KERNEL = 7
"""From this size on, the FFT algorithms were chosen in pytorch#14614: 6 x 6 took less than the operands."""


def _on(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        TABLE.update((f"aten::{name}", rule) for name in names)
        return rule

    return add


def _count(meta: TensorMeta) -> int:
    return math.prod(meta.shape)


@_on("mm", "addmm", "bmm", "baddbmm")
def _product(node: Node, threads: int) -> Need:
    """Operands in a layout that cuBLAS does not support, mostly expanded gradients of a sum, are copied.

    ``prepare_matrix_for_cublas`` and ``prepare_batch_matrix_for_cublas`` (cuda/Blas.cpp).
    """
    operands = [value.meta for value in node.args if isinstance(value, Value)][-2:]
    size = sum([meta.nbytes for meta in operands if not _taken_by_cublas(meta)])
    return Need(size, size, size) if size else NOTHING


@lru_cache(4096)  # equal metadata is mostly the same object
def _taken_by_cublas(meta: TensorMeta) -> bool:
    """Whether one of a matrix's dimensions is contiguous, and rows along the other do not overlap."""
    if not meta.nbytes:
        return True
    (rows, columns), (row, column) = meta.shape[-2:], meta.stride[-2:]
    return (column == 1 and row >= max(1, columns)) or (row == 1 and column >= max(1, rows))


def _convolution_space(image: TensorMeta, weight: TensorMeta, result: TensorMeta, node: Node) -> Need:
    """cuDNN selects an algorithm at run time (cudnn/Conv_v8.cpp), with the workspace that it requests.

    At least: none. Best estimate: the image, weights and result in NHWC order, which its tensor-core kernels
    use (TF32 for float32, PyTorch's default); none for tensors that are NHWC already, and for depthwise
    convolutions, which have ATen's own kernels (cuda/DepthwiseConv2d.cu). At most: see :func:`_most`.
    """
    named = dict(zip(_names_of(node.op), node.args))
    groups = named["groups"]
    if groups == image.shape[1] and groups > 1 and weight.shape[1] == 1:
        return Need(0, 0, image.nbytes + result.nbytes)
    operands = image.nbytes + weight.nbytes + result.nbytes
    last = len(image.stride) > 2 and image.stride[1] == 1 and image.shape[1] > 1
    double = image.dtype.itemsize > 4
    dense = all(each == 1 for name in ("stride", "dilation") for each in named[name])
    return Need(0 if last or double else operands, 0, _most(image, weight, result, dense))


@lru_cache(64)
def _names_of(op: OpOverload) -> tuple[str, ...]:
    return tuple(each.name for each in op._schema.arguments)


def _most(image: TensorMeta, weight: TensorMeta, result: TensorMeta, dense: bool) -> int:
    """The largest workspace expected of a convolution, also with ``torch.backends.cudnn.benchmark``, which
    tries all algorithms.  ``dense``: without a stride or dilation.

    - Dense kernels of 3 x 3: the transforms of Winograd's algorithm, whose tiles of 4 x 4 results
      have 36 elements for each channel. 18 published runs with ``benchmark`` needed up to 2.7 times the
      operands, which is that (``benchmarks/published_memory.py``).
    - Large dense kernels: FFT algorithms, 33 times the operands in pytorch#14614.
    - Others: four times the operands.

    Half-precision kernels work on multiples of eight channels (pytorch#31500: 12 times two operands of one
    channel).
    """
    operands = image.nbytes + weight.nbytes + result.nbytes
    kernel = weight.shape[2:]
    if dense and kernel and max(kernel) >= _FFT_KERNEL:
        return 33 * operands
    if dense and tuple(kernel) == (3, 3):
        rows, columns = (-(-size // 4) * 4 / max(size, 1) for size in result.shape[2:])
        transformed = 36 / 16 * rows * columns * (image.nbytes + result.nbytes) + 36 / 9 * weight.nbytes
        most = max(int(transformed), operands)
    else:
        most = 4 * operands
    if image.dtype.itemsize == 2:
        most = max(most, 3 * sum(_padded(each) for each in (image, result)) // 2)
    return most


def _padded(meta: TensorMeta) -> int:
    """Bytes of an image whose channels are padded to a multiple of eight."""
    channels = meta.shape[1]
    return meta.nbytes // max(channels, 1) * (-(-channels // 8) * 8)


@_on("convolution", "cudnn_convolution", "cudnn_convolution_transpose")
def _convolution(node: Node, threads: int) -> Need:
    image, weight = node.args[0].meta, node.args[1].meta
    return _convolution_space(image, weight, node.outputs[0].meta, node)


@_on("convolution_backward")
def _convolution_backward(node: Node, threads: int) -> Need:
    """One gradient after the other: the workspace of one at a time."""
    gradient, image, weight = (value.meta for value in node.args[:3])
    return _convolution_space(image, weight, gradient, node)


@_on("embedding_dense_backward")
def _embedding_backward(node: Node, threads: int) -> Need:
    """cuda/Embedding.cu: few indices are summed at once; more are sorted, and summed in parts.

    Sorted: indices and their positions, twice each for cub's radix sort; then a row of sums, in float32, for
    each part of a segment of equal indices, at most one for each index.
    """
    gradient, indices, _, padding, *_ = node.args
    count = _count(indices.meta)
    if count <= 3072 and padding < 0:
        return NOTHING
    width = gradient.meta.shape[-1]
    sort = 4 * count * 8
    parts = count * width * 4
    return Need(sort + parts, 2 * count * 8, sort + parts + (count + 4096) * 16)


@_on("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
def _index_put(node: Node, threads: int) -> Need:
    """cuda/Indexing.cu: to accumulate, positions are linearized, and sorted by cub together with
    their order.
    """
    accumulate = node.args[3] if len(node.args) > 3 else node.kwargs.get("accumulate", False)
    values = node.args[2]
    if not accumulate or not isinstance(values, Value):
        return NOTHING
    indices = [value.meta for value in node.args[1] if isinstance(value, Value)]
    count = max((_count(meta) for meta in indices), default=0)
    return Need(5 * count * 8, 3 * count * 8, 7 * count * 8 + 65536)


@_on("sort", "argsort")
def _sort(node: Node, threads: int) -> Need:
    """cuda/Sort.cpp: keys and positions of all rows once more, and cub's counters."""
    image = node.args[0].meta
    size = image.nbytes + 8 * _count(image)
    return Need(size, 0, 2 * size + 65536)


@_on("topk")
def _topk(node: Node, threads: int) -> Need:
    """cuda/TensorTopK.cu: several blocks per row keep counts; sorting needs memory for the values found."""
    found = sum(value.nbytes for value in node.outputs)
    return Need(found, 0, 2 * found + 2**20)


@_on("cumsum", "cumprod")
def _cumulative(node: Node, threads: int) -> Need:
    """cuda/ScanKernels.cpp: the operand in the result's dtype; for one long row, cub's block sums."""
    image, result = node.args[0].meta, node.outputs[0]
    size = result.nbytes if image.dtype != result.dtype else 0
    return Need(size, size, size + result.nbytes // 256 + 4096)


@_on("_foreach_norm")
def _foreach_norm(node: Node, threads: int) -> Need:
    """cuda/ForeachReduceOp.cu: for each tensor, one float for every 65,536 elements of the largest."""
    tensors = [value.meta for value in node.args[0]]
    chunks = max((-(-_count(meta) // 65536) for meta in tensors), default=0)
    size = 4 * chunks * len(tensors)
    return Need(size, size, size)


_ATTENTION_BACKWARD = (
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_cudnn_attention_backward",
)


@_on(*_ATTENTION_BACKWARD)
def _attention_backward(node: Node, threads: int) -> Need:
    """transformers/cuda/attention_backward.cu: one float per query row; in half precision, sums in
    float32.
    """
    query = next(value.meta for value in node.args[1:] if isinstance(value, Value))
    rows = math.prod(query.shape[:-1]) * 4
    sums = 2 * query.nbytes if query.dtype.itemsize < 4 else 0
    return Need(rows + sums, 0, 2 * rows + 3 * sums + query.nbytes)


@_on("native_layer_norm_backward")
def _layer_norm_backward(node: Node, threads: int) -> Need:
    """cuda/layer_norm_kernel.cu: for many rows, sums for gamma and beta by blocks of rows."""
    _, image, shape, *_, mask = node.args
    if not (mask[1] or mask[2]):
        return NOTHING
    width = math.prod(shape)
    rows = _count(image.meta) // max(width, 1)
    most = 2 * (-(-rows // 64)) * width * 4
    return Need(most // 2, 0, most)
