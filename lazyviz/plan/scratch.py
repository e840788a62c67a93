"""Scratch memory: what a kernel allocates and frees within one node, by operator and operands.

Storages are not all that is allocated: kernels copy operands into other layouts, convert them, and
keep partial results.  The level is higher *during* such a node only.  An entry of the table is exact
where the kernel's source fixes it (``tests/plan/test_scratch.py`` compares it with the allocator's
events), and has a range where a library decides.  Operators without an entry take none that is known;
the few bytes of a Python number made a tensor are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from ..graph.ir import Graph, Node, Storage, TensorMeta, Value
from .convolution import backward_need, forward_need
from .events import NOTHING, Need
from .lifetimes import Lifetime
from .onednn import PAGE
from .scratch_cuda import TABLE as CUDA_TABLE

_CPU_TABLE: dict[str, Callable[[Node, int], Need]] = {}
SCRATCH = "scratch"  # the name of a storage that stands for it
_Rule = Callable[[Node, int], Need]


def scratch(graph: Graph, device: torch.device, kind: str) -> dict[int, Need]:
    """What each node on ``device`` needs beyond its storages, by its position; the rest need nothing.

    ``kind`` is the type of device whose kernels would run: ``"cuda"`` for a graph recorded on the
    CPU and planned for a card.
    """
    table = CUDA_TABLE if kind == "cuda" else _CPU_TABLE if kind == "cpu" else {}
    threads = torch.get_num_threads()
    found: dict[int, Need] = {}
    for node in graph.nodes:
        rule = table.get(node.op._schema.name)
        if rule is None:
            continue
        if not any(value.meta.device == device for value in (*node.outputs, *node.inputs)):
            continue
        need = rule(node, threads)
        if need.high:
            found[node.index] = need
    return found


def lifetime_of(at: int, node: Node, nbytes: int, device: torch.device) -> Lifetime:
    """The scratch memory of the node at ``at``: a storage that lives during it, on both timelines."""
    stop = at + 1
    storage = Storage(nbytes, device, external=False, created=at)
    storage.name, storage.dropped = SCRATCH, stop
    return Lifetime(
        storage=storage,
        start=at,
        eager_start=at,
        eager_stop=stop,
        lazy_stop=stop,
        maker=node,
        first_use=node,
        last_use=node,
        in_backward=False,
        kept=False,
    )


def _exactly(nbytes: int) -> Need:
    return Need(nbytes, nbytes, nbytes)


def _on(table: dict[str, _Rule], *names: str) -> Callable[[_Rule], _Rule]:
    def add(rule: _Rule) -> _Rule:
        table.update((f"aten::{name}", rule) for name in names)
        return rule

    return add


def _argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument by position or name, as the call gave it."""
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(name, default)


def _meta(value: Any) -> TensorMeta | None:
    return value.meta if isinstance(value, Value) else None


def _contiguous(meta: TensorMeta) -> bool:
    expected = 1
    for size, step in zip(reversed(meta.shape), reversed(meta.stride)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def _copied(*metas: TensorMeta | None) -> int:
    """Bytes of the copies that ``contiguous()`` makes of operands that do not lie in order."""
    return sum(meta.nbytes for meta in metas if meta is not None and meta.nbytes and not _contiguous(meta))


# --- convolutions --------------------------------------------------------------------------


# The same layers come again in every step, and in every block of a model.
_forward_need = lru_cache(4096)(forward_need)
_backward_need = lru_cache(4096)(backward_need)


@_on(_CPU_TABLE, "convolution", "convolution_overrideable")
def _convolution(node: Node, threads: int) -> Need:
    image, weight, bias, *rest = node.args
    return _forward_need(image.meta, weight.meta, bias is not None, _hashable(rest), threads)


@_on(_CPU_TABLE, "convolution_backward")
def _convolution_backward(node: Node, threads: int) -> Need:
    gradient, image, weight, _, *rest, mask = node.args
    return _backward_need(gradient.meta, image.meta, weight.meta, _hashable(rest), tuple(mask), threads)


def _hashable(items: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(tuple(item) if isinstance(item, list) else item for item in items)


# --- ATen's own CPU kernels ----------------------------------------------------------------


@_on(
    _CPU_TABLE,
    "max_pool2d_with_indices_backward",
    "max_pool3d_with_indices_backward",
    "avg_pool2d_backward",
    "avg_pool3d_backward",
    "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d_backward",
    "adaptive_max_pool2d_backward",
    "adaptive_max_pool3d_backward",
    "embedding_dense_backward",
    "grid_sampler_2d_backward",
    "upsample_nearest1d_backward",
    "upsample_nearest2d_backward",
    "upsample_linear1d_backward",
    "upsample_bilinear2d_backward",
    "upsample_bicubic2d_backward",
    "upsample_trilinear3d_backward",
    "reflection_pad1d_backward",
    "reflection_pad2d_backward",
    "replication_pad1d_backward",
    "replication_pad2d_backward",
    "replication_pad3d_backward",
)
def _gradient_in_order(node: Node, threads: int) -> Need:
    """Kernels that work on ``grad_output.contiguous()``, in the image's memory format."""
    gradient = node.args[0].meta
    if _contiguous(gradient):
        return NOTHING
    if len(gradient.shape) == 4 and isinstance(node.args[1], Value):
        image = node.args[1].meta
        if _channels_last(gradient) and _channels_last(image):
            return NOTHING
    return _exactly(gradient.nbytes)


def _channels_last(meta: TensorMeta) -> bool:
    expected = 1
    for dim in (1, *range(len(meta.shape) - 1, 1, -1), 0):
        if meta.shape[dim] != 1 and meta.stride[dim] != expected:
            return False
        expected *= meta.shape[dim]
    return True


@_on(_CPU_TABLE, "_softmax_backward_data", "_log_softmax_backward_data")
def _softmax_backward(node: Node, threads: int) -> Need:
    """``softmax_backward_cpu_out`` (SoftMax.cpp) copies what is not contiguous."""
    return _exactly(_copied(node.args[0].meta, node.args[1].meta))


@_on(_CPU_TABLE, "native_layer_norm_backward")
def _layer_norm_backward(node: Node, threads: int) -> Need:
    """Operands in order, and a row of sums for gamma and beta for each thread (layer_norm_kernel.cpp)."""
    gradient, image, shape, _, _, weight, _, mask = node.args
    size = _copied(gradient.meta, image.meta, _meta(weight))
    if mask[1] or mask[2]:
        size += 2 * threads * math.prod(shape) * image.meta.dtype.itemsize
    return _exactly(size)


@_on(_CPU_TABLE, "native_group_norm_backward")
def _group_norm_backward(node: Node, threads: int) -> Need:
    """Sums of each sample's channels, twice (``GroupNormBackwardKernelImpl``, group_norm_kernel.cpp)."""
    gradient, image, _, _, _, batch, channels, *_ = node.args
    size = 0 if _channels_last(image.meta) else _copied(gradient.meta)
    return _exactly(size + 2 * batch * channels * max(image.meta.dtype.itemsize, 4))


@_on(_CPU_TABLE, "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update")
def _batch_norm(node: Node, threads: int) -> Need:
    """A scale and a shift for each channel (batch_norm_kernel.cpp)."""
    image = node.args[0].meta
    return _exactly(2 * image.shape[1] * max(image.dtype.itemsize, 4))


@_on(_CPU_TABLE, "native_batch_norm_backward", "batch_norm_backward")
def _batch_norm_backward(node: Node, threads: int) -> Need:
    """The image's gradient, made twice on the fast path; else a sum a channel (Normalization.cpp)."""
    gradient, image = node.args[0].meta, node.args[1].meta
    if any(test(gradient) and test(image) for test in (_contiguous, _channels_last)):
        return _exactly(image.nbytes if node.args[-1][0] else 0)
    return _exactly(image.shape[1] * max(image.dtype.itemsize, 4))


@_on(_CPU_TABLE, "_embedding_bag_backward")
def _embedding_bag_backward(node: Node, threads: int) -> Need:
    """Each index's bag, indices and places, sorted (EmbeddingBag.cpp); other modes copy rows, too."""
    gradient, indices, mode = node.args[0].meta, node.args[1].meta, node.args[8]
    count = math.prod(indices.shape)
    size = (count + 1) * 8 + _copied(gradient) + 3 * count * 8
    if mode == 0:
        return _exactly(size)
    return Need(size, size, size + 2 * gradient.nbytes + 2 * count * gradient.shape[-1] * 4)


@_on(_CPU_TABLE, "native_dropout_backward")
def _dropout_backward(node: Node, threads: int) -> Need:
    """``grad * (mask.type_as(grad) * scale)`` (Dropout.cpp): the mask as numbers, scaled."""
    return _exactly(node.args[0].meta.nbytes)


@_on(_CPU_TABLE, "logsumexp")
def _logsumexp(node: Node, threads: int) -> Need:
    """The exponentials, and the maxima (``logsumexp_out_impl``, ReduceOps.cpp)."""
    return _exactly(node.args[0].meta.nbytes + node.outputs[0].nbytes)


@_on(_CPU_TABLE, "mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss")
def _elementwise_loss(node: Node, threads: int) -> Need:
    """The losses of the elements, before they are reduced (Loss.cpp)."""
    if not _argument(node, 2, "reduction", 1):
        return NOTHING
    return _exactly(_broadcast(node.args[0].meta, node.args[1].meta))


@_on(_CPU_TABLE, "binary_cross_entropy_with_logits")
def _logits_loss(node: Node, threads: int) -> Need:
    """``(1 - target) * input - log_sigmoid(input)`` (Loss.cpp): two results at a time."""
    size = 2 * _broadcast(node.args[0].meta, node.args[1].meta)
    return _exactly(size if _argument(node, 4, "reduction", 1) else size // 2)


def _broadcast(a: TensorMeta, b: TensorMeta) -> int:
    shape = torch.broadcast_shapes(a.shape, b.shape)
    return math.prod(shape) * torch.promote_types(a.dtype, b.dtype).itemsize


@_on(_CPU_TABLE, "sort")
def _sort(node: Node, threads: int) -> Need:
    """One row's positions, for ``stable_sort`` beside its keys (SortingKernel.cpp)."""
    image = node.args[0].meta
    if not image.shape:
        return NOTHING
    dim = next((arg for arg in node.args[1:] if isinstance(arg, int) and not isinstance(arg, bool)), None)
    if dim is None:
        dim = node.kwargs.get("dim", -1)
    return _exactly(image.shape[dim] * 8)


@_on(_CPU_TABLE, "cumsum", "cumprod")
def _cumulative(node: Node, threads: int) -> Need:
    """The operand in the result's type (``impl_func_cum_ops``, ReduceOps.cpp)."""
    image, result = node.args[0].meta, node.outputs[0]
    return _exactly(result.nbytes if image.dtype != result.dtype else 0)


@_on(_CPU_TABLE, "mm", "addmm")
def _matrix_product(node: Node, threads: int) -> Need:
    """Operands without a BLAS leading dimension are copied (``addmm_impl_cpu_``, LinearAlgebra.cpp)."""
    operands = [value.meta for value in node.args if isinstance(value, Value)][-2:]
    size = sum(meta.nbytes for meta in operands if not _leading(meta))
    return _exactly(size)


def _leading(meta: TensorMeta) -> bool:
    if len(meta.shape) < 2 or not meta.nbytes:
        return True
    (rows, cols), (row, col) = meta.shape[-2:], meta.stride[-2:]
    return (col == 1 and row >= max(1, cols)) or (row == 1 and col >= max(1, rows)) or rows == cols == 1


# --- recurrent layers by oneDNN ------------------------------------------------------------


@_on(_CPU_TABLE, "mkldnn_rnn_layer")
def _recurrent(node: Node, threads: int) -> Need:
    """Both biases summed, weights in oneDNN's order, all steps' gates (mkldnn/RNN.cpp, rnn_utils.cpp).

    The gates are derived, what oneDNN adds to them (states, pages) was seen in the events, to a few
    percent of them.
    """
    image, hidden = node.args[0].meta, node.args[5].meta
    train = node.outputs[-1].nbytes > 0  # a workspace for the backward
    steps, batch, inside = image.shape
    size = hidden.shape[-1]
    item = image.dtype.itemsize
    gates = 4 * size
    if train:
        weights = (inside + size) * _leading_dimension(gates) * item
        space = steps * batch * _leading_dimension(gates) * item + 2 * batch * size * item
        known = gates * item + weights + space
        return Need(known + 12856, known, known + 4 * PAGE + batch * size * item)
    weights = (inside + size) * 4 * _rounded(size, 32) * item
    space = steps * batch * gates * item
    known = gates * item + weights + space
    if inside > size:  # the steps' inputs are copied among the states
        known += steps * batch * inside * item
    return Need(known + space // 12, known, known + space // 5 + 64 * 1024)


@_on(_CPU_TABLE, "mkldnn_rnn_layer_backward")
def _recurrent_backward(node: Node, threads: int) -> Need:
    image, hidden, gradient = node.args[0].meta, node.args[5].meta, _meta(node.args[10])
    steps, batch, inside = image.shape
    size = hidden.shape[-1]
    item = image.dtype.itemsize
    gates = 4 * size
    known = (inside + size) * _leading_dimension(gates) * item  # weights, as the forward takes them
    for width in (inside, size):  # and as the backward does
        if _leading_dimension(width) != width:
            known += gates * _leading_dimension(width) * item
    known += _copied(gradient) + gates * item + 2 * batch * size * item
    known += steps * batch * _leading_dimension(gates) * item + 2 * batch * size * item
    return Need(known + 12856, known, known + 4 * PAGE + batch * size * item)


def _rounded(size: int, step: int) -> int:
    return -(-size // step) * step


def _leading_dimension(size: int) -> int:
    """A row's length that avoids cache conflicts: ``get_good_ld`` (rnn_utils.cpp)."""
    rounded = _rounded(size, 16)
    return rounded + 16 if rounded % 256 == 0 else rounded
