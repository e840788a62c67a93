"""Workspace look-up: scratch memory of a node's kernel, by operator and operands.

Storages are not the only allocations: kernels also copy operands to other layouts, convert them, and store
partial results.  This memory is used only *during* a node.  An entry of the table is exact if the kernel's
source determines it (``tests/plan/workspace/test_workspace.py`` compares it with the allocator's events), and
has a range if a library decides.  Operators without an entry have no known scratch memory; the few bytes of a
Python number converted to a tensor are omitted (:mod:`.scalar_tensors`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from ...graph.ir import Graph, Node, Storage, TensorMeta, Value
from ...torch_internals.cpu_kernel_selection import (
    Instructions,
    multiplies_in_onednn,
    onednn_instructions,
)
from ..liveness.lifetimes import Lifetime, nodes_with
from . import (
    composite_op_workspace,
    elementwise_casts,
    fft,
    fused_transformer_layers,
    gloo,
    image_kernels,
    kernel_measurement,
    matrix_decompositions,
    matrix_product_workspace,
    sorting_kernels,
    sparse_kernels,
)
from .cpu_convolution import backward_need, forward_need
from .cuda_kernels import TABLE as CUDA_TABLE
from .matrix_product_workspace import transposing
from .onednn_convolution import PAGE
from .workspace_rule import Rule, argument, channels_last, contiguous, copied, exactly, in_order, meta_of, on
from .workspace_size import NOTHING, Events, Need

_CPU_TABLE: dict[str, Rule] = {
    **elementwise_casts.TABLE,
    **composite_op_workspace.TABLE,
    **fft.TABLE,
    **gloo.TABLE,
    **matrix_decompositions.TABLE,
    **sorting_kernels.TABLE,
    **sparse_kernels.TABLE,
    **fused_transformer_layers.TABLE,
    **image_kernels.TABLE,
    **matrix_product_workspace.TABLE,
}
SCRATCH = "scratch"  # the name of a storage that represents it


def scratch(
    graph: Graph, device: torch.device, kind: str, nodes: Iterable[Node] | None = None
) -> dict[int, Need]:
    """The memory that each node on ``device`` needs besides its storages, by its position; other nodes need
    nothing.

    ``nodes`` are some of the graph's nodes, or ``None`` for all. ``kind`` is the type of device whose kernels
    would run: ``"cuda"`` for a graph recorded on the CPU and planned for a GPU.
    """
    table = _table(kind)
    threads = torch.get_num_threads()
    found: dict[int, Need] = {}
    if nodes is None:
        nodes = graph.nodes
        if kind != "cpu":  # where kernels are not measured
            nodes = nodes_with(nodes, lambda op: op._schema.name in table)
    for node in nodes:
        rule = _rule(table, node)
        measured = node.scratch_bytes if kind == "cpu" else None
        if rule is None and measured is None:
            continue
        if not _is_on(node, device):
            continue
        if measured is not None:
            need = exactly(measured)
        else:
            assert rule is not None
            need = rule(node, threads)
            if kind == "cpu":
                need = kernel_measurement.refined(node, threads, need)
        if need.high:
            found[node.index] = need
    return found


def _is_on(node: Node, device: torch.device) -> bool:
    for values in (node.outputs, node.inputs):
        for value in values:
            if value.meta.device == device:
                return True
    return False


def _table(kind: str) -> Mapping[str, Rule]:
    return CUDA_TABLE if kind == "cuda" else _CPU_TABLE if kind == "cpu" else {}


def _rule(table: Mapping[str, Rule], node: Node) -> Rule | None:
    """The rule for the kernel of ``node``; those of sparse tensors are other kernels, without rules."""
    rule = table.get(node.op._schema.name)
    return None if rule is None or (node.at_once and _has_sparse_operand(node.args)) else rule


def _has_sparse_operand(args: tuple[Any, ...]) -> bool:
    """Whether a tensor without strides is among the arguments: the record has its layout instead."""
    items = [item for entry in args for item in (entry if isinstance(entry, (list, tuple)) else [entry])]
    return any(isinstance(item, torch.layout) for item in items)


Known = dict[tuple[int, tuple[bool, ...]], int]
"""The needs of kernels in lower precision: by the shape entry of the node, and the values with lower
precision.
"""


def has_rule(node: Node, kind: str = "cpu") -> bool:
    """Whether the kernel of ``node`` for a type of device is known to need scratch memory."""
    return _rule(_table(kind), node) is not None


def in_lower_precision(node: Node, lower: Container[int], known: Known) -> int | None:
    """Bytes that ``node`` would need on the CPU if the values with these ids were bfloat16; ``None``: no
    rule.

    ``known`` is a cache for one record: similar layers are computed once.
    """
    rule = _rule(_CPU_TABLE, node)
    if rule is None:
        return None
    entry = getattr(node, "entry", None)
    if entry is None:
        return _in_lower_precision(rule, node, lower)
    key = id(entry), tuple([value.id in lower for value in (*node.inputs, *node.outputs)])
    found = known.get(key)
    if found is None:
        found = known[key] = _in_lower_precision(rule, node, lower)
    return found


def _in_lower_precision(rule: Rule, node: Node, lower: Container[int]) -> int:
    other, threads = _retyped(node, lower), torch.get_num_threads()
    return kernel_measurement.refined(other, threads, rule(other, threads)).nbytes


def _retyped(node: Node, lower: Container[int]) -> Node:
    def retyped(value: Value) -> TensorMeta:
        meta = value.meta
        if value.id not in lower or meta.dtype is not torch.float32:
            return meta
        return TensorMeta(meta.shape, meta.stride, meta.offset, torch.bfloat16, meta.device, meta.flags)

    return with_metadata(node, retyped)


def with_metadata(node: Node, changed: Callable[[Value], TensorMeta]) -> Node:
    """The node with other tensor metadata, for computing its scratch memory."""

    def replaced(item: Any) -> Any:
        if isinstance(item, Value):
            meta = changed(item)
            return item if meta is item.meta else Value(meta, item.storage, item.node, item.index)
        if type(item) in (list, tuple):
            return type(item)([replaced(entry) for entry in item])
        return item

    other = Node(
        node.index,
        node.op,
        replaced(node.args),
        {name: replaced(item) for name, item in node.kwargs.items()},
    )
    other.inputs, other.outputs = replaced(list(node.inputs)), replaced(list(node.outputs))
    other.at_once, other.writes = node.at_once, node.writes
    return other


def lifetime_of(at: int, node: Node, nbytes: int, device: torch.device) -> Lifetime:
    """The scratch memory of the node at ``at``: a storage that exists during it, on both timelines."""
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


# --- convolutions --------------------------------------------------------------------------


# The same layers occur in every step, and in every block of a model.
_forward_need = lru_cache(4096)(forward_need)
_backward_need = lru_cache(4096)(backward_need)


@on(_CPU_TABLE, "convolution", "convolution_overrideable")
def _convolution(node: Node, threads: int) -> Need:
    image, weight, bias, *rest = node.args
    return _forward_need(image.meta, weight.meta, bias is not None, _hashable(rest), threads)


@on(_CPU_TABLE, "convolution_backward")
def _convolution_backward(node: Node, threads: int) -> Need:
    gradient, image, weight, _, *rest, mask = node.args
    return _backward_need(gradient.meta, image.meta, weight.meta, _hashable(rest), tuple(mask), threads)


def _hashable(items: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(tuple(item) if isinstance(item, list) else item for item in items)


# --- ATen's own CPU kernels ----------------------------------------------------------------


@on(
    _CPU_TABLE,
    "_softmax",
    "_log_softmax",
    "log_sigmoid_forward",
    "multi_margin_loss",
)
def _of_contiguous(node: Node, threads: int) -> Need:
    """An operand that is not contiguous is copied, a transposed matrix through a tile."""
    return exactly(_contiguous_copy(node.args[0].meta))


@on(_CPU_TABLE, "nll_loss_forward")
def _likelihood(node: Node, threads: int) -> Need:
    """A contiguous operand and target (LossNLL.cpp)."""
    target = copied(node.args[1].meta)
    return exactly(max(target, _contiguous_copy(node.args[0].meta) + target))


@on(_CPU_TABLE, "rrelu_with_noise", "rrelu_with_noise_")
def _random_slopes(node: Node, threads: int) -> Need:
    """In training a contiguous input; in place, its result also (``_rrelu_with_noise_train``,
    Activation.cpp).
    """
    if not argument(node, 4, "training", False):
        return NOTHING
    image = node.args[0].meta
    in_place = node.op._schema.name.endswith("_")
    return exactly(_contiguous_copy(image) + (copied(image) if in_place else 0))


@on(_CPU_TABLE, "multilabel_margin_loss_forward")
def _margins_of_labels(node: Node, threads: int) -> Need:
    """Contiguous target and input (LossMultiLabelMargin.cpp)."""
    target, image = node.args[1].meta, node.args[0].meta
    return exactly(max(_contiguous_copy(target), copied(target) + _contiguous_copy(image)))


def _contiguous_copy(meta: TensorMeta) -> int:
    return copied(meta) and copied(meta) + transposing(meta.shape, meta.stride, meta.dtype.itemsize)


@on(_CPU_TABLE, "multi_margin_loss_backward")
def _contiguous_input(node: Node, threads: int) -> Need:
    """LossMultiMargin.cpp."""
    return exactly(copied(node.args[1].meta))


@on(_CPU_TABLE, "multilabel_margin_loss_backward")
def _contiguous_labels(node: Node, threads: int) -> Need:
    """Contiguous input, target and mask of the target (LossMultiLabelMargin.cpp)."""
    return exactly(copied(node.args[1].meta, node.args[2].meta, node.args[4].meta))


@on(_CPU_TABLE, "gelu_backward")
def _gelu_backward(node: Node, threads: int) -> Need:
    """oneDNN's kernel, for contiguous input, has contiguous gradients (Activation.cpp, mkldnn/Gelu.cpp)."""
    gradient, image, result = node.args[0].meta, node.args[1].meta, node.outputs[0].meta
    by_onednn = image.dtype == torch.float32 or (
        image.dtype == torch.bfloat16 and multiplies_in_onednn(torch.bfloat16)
    )
    if not by_onednn or argument(node, 2, "approximate", "none") != "none" or not contiguous(image):
        return NOTHING
    return exactly(copied(gradient, result))


@on(_CPU_TABLE, "native_layer_norm")
def _layer_norm(node: Node, threads: int) -> Need:
    """Operands that are not contiguous are copied, before the results are allocated (layer_norm.cpp)."""
    given, weight, bias = (meta_of(node.args[i]) for i in (0, 2, 3))
    assert given is not None
    copies = copied(given, weight, bias)
    return exactly(max(copies, _contiguous_copy(given) - sum(value.nbytes for value in node.outputs)))


@on(_CPU_TABLE, "tril", "triu")
def _triangle(node: Node, threads: int) -> Need:
    """A copy of matrices that do not follow each other in memory (``checkTrilTriuBatchContiguous``,
    LinearAlgebraUtils.h).
    """
    meta = node.args[0].meta
    if contiguous(meta):
        return NOTHING
    expected = math.prod(meta.shape[-2:])
    for size, stride in zip(reversed(meta.shape[:-2]), reversed(meta.stride[:-2])):
        if stride != expected:
            return exactly(copied(meta))
        expected *= size
    return NOTHING


@on(_CPU_TABLE, "_softmax_backward_data", "_log_softmax_backward_data")
def _softmax_backward(node: Node, threads: int) -> Need:
    """``softmax_backward_cpu_out`` (SoftMax.cpp) copies operands that are not contiguous."""
    return exactly(copied(node.args[0].meta, node.args[1].meta))


@on(_CPU_TABLE, "native_layer_norm_backward")
def _layer_norm_backward(node: Node, threads: int) -> Need:
    """Contiguous operands, and for each thread a row of sums for gamma and beta (layer_norm_kernel.cpp)."""
    gradient, image, shape, _, _, weight, _, mask = node.args
    size = copied(gradient.meta, image.meta, meta_of(weight))
    if mask[1] or mask[2]:
        size += 2 * threads * math.prod(shape) * image.meta.dtype.itemsize
    return exactly(size)


@on(_CPU_TABLE, "native_group_norm")
def _group_norm(node: Node, threads: int) -> Need:
    """A scale and a shift for each sample's channels, if the image is channels-last
    (``GroupNormKernelImplChannelsLastInternal``, group_norm_kernel.cpp).
    """
    image = node.args[0].meta
    return NOTHING if contiguous(image) else exactly(2 * _channel_sums(image))


@on(_CPU_TABLE, "native_group_norm_backward")
def _group_norm_backward(node: Node, threads: int) -> Need:
    """Sums of each sample's channels, twice (``GroupNormBackwardKernelImpl``, group_norm_kernel.cpp)."""
    return exactly(2 * _channel_sums(node.args[1].meta))


def _channel_sums(image: TensorMeta) -> int:
    return math.prod(image.shape[:2]) * max(image.dtype.itemsize, 4)


@on(_CPU_TABLE, "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update")
def _batch_norm(node: Node, threads: int) -> Need:
    """A scale and a shift for each channel; in training, each thread's sums of channels-last images
    (``batch_norm_cpu_collect_stats_channels_last_impl``, batch_norm_kernel.cpp).
    """
    image = node.args[0].meta
    rows, in_training = 2, argument(node, 5, "training")
    if in_training and not contiguous(image):
        if not channels_last(image):  # the general kernel computes in the image's dtype or in float32
            return exactly(2 * image.nbytes if image.dtype in _HALVES else 0)
        rows = threads + (1 if image.dtype in _HALVES else 2)
    return exactly(rows * image.shape[1] * max(image.dtype.itemsize, 4))


@on(_CPU_TABLE, "native_batch_norm_backward", "batch_norm_backward")
def _batch_norm_backward(node: Node, threads: int) -> Need:
    """The image's gradient, created twice on the fast path; otherwise one sum per channel
    (Normalization.cpp).
    """
    gradient, image = node.args[0].meta, node.args[1].meta
    if any(test(gradient) and test(image) for test in (contiguous, channels_last)):
        return exactly(image.nbytes if argument(node, 9, "output_mask")[0] else 0)
    return exactly(image.shape[1] * max(image.dtype.itemsize, 4))


@on(_CPU_TABLE, "_embedding_bag")
def _embedding_bag(node: Node, threads: int) -> Need:
    """Each index's bag, counted before the other results are there (``make_offset2bag``, EmbeddingBag.cpp).

    For the mean, sizes of bags that are at least 1, and as numbers; for the maximum, whether a bag is empty.
    """
    of_index, sizes, largest = (value.nbytes for value in node.outputs[1:4])
    if not of_index:
        return NOTHING  # the fast kernel for sums needs none of them
    mode = argument(node, 4, "mode", 0)
    after = (0, 2 * sizes + sizes // 8 * node.outputs[0].dtype.itemsize, sizes)[mode]
    return exactly(max(of_index + 8 - sizes - largest, after))


@on(_CPU_TABLE, "_embedding_bag_backward")
def _embedding_bag_backward(node: Node, threads: int) -> Need:
    """Each index's bag, indices and positions, sorted (EmbeddingBag.cpp).

    A sparse gradient has a row for each index; for the mean, also one factor per bag and index. To omit rows
    of a padding index, the others are copied. For the maximum, the gradients and the places of the maxima of
    all bags that are not empty are copied, whose positions are counted.
    """
    gradient, indices, mode, is_sparse = node.args[0].meta, node.args[1].meta, node.args[8], node.args[9]
    count = math.prod(indices.shape)
    number, place = gradient.dtype.itemsize, indices.dtype.itemsize
    bags = 0 if math.prod(node.args[3].meta.shape) else (count + 1) * place
    if is_sparse:
        factors = (2 * gradient.shape[0] + count) * number if mode == 1 else 0
        padding = argument(node, 11, "padding_idx", -1)
        rows = count * (gradient.shape[-1] * number + 9) if padding >= 0 else 0
        return exactly(bags + max(factors, rows))
    weights = count * number if argument(node, 10, "per_sample_weights", None) is not None else 0
    size = bags + copied(gradient)
    if mode == 2:
        rows = math.prod(gradient.shape) * (number + place) + gradient.shape[0] * 8
        return Need(size + rows, size, size + rows)
    return exactly(size + count * (16 + place) + weights)


@on(_CPU_TABLE, "segment_reduce", "_segment_reduce_backward")
def _segment_reduce(node: Node, threads: int) -> Need:
    """Contiguous operands, copied one after the other before the result is there (SegmentReduce.cpp)."""
    run, result = Events(), node.outputs[0].nbytes
    for operand in [value.meta for value in node.inputs if copied(value.meta)]:
        tile = transposing(operand.shape, operand.stride, operand.dtype.itemsize)
        run.take(copied(operand), tile)
        run.free(tile)
    run.take(result)
    return run.need(result)


@on(_CPU_TABLE, "native_dropout_backward")
def _dropout_backward(node: Node, threads: int) -> Need:
    """``grad * (mask.type_as(grad) * scale)`` (Dropout.cpp): the mask as numbers, scaled."""
    return exactly(node.args[0].meta.nbytes)


@on(_CPU_TABLE, "logsumexp")
def _logsumexp(node: Node, threads: int) -> Need:
    """The exponentials, and the maxima (``logsumexp_out_impl``, ReduceOps.cpp); integers as floats."""
    operand, result = node.args[0].meta, node.outputs[0]
    exponentials = math.prod(operand.shape) * result.dtype.itemsize
    maxima = result.nbytes // (2 if result.dtype.is_complex else 1)  # of the real parts
    return exactly(exponentials + maxima + elementwise_casts.cast_bytes((operand,), result.dtype))


@on(_CPU_TABLE, "mse_loss", "smooth_l1_loss", "huber_loss")
def _elementwise_loss(node: Node, threads: int) -> Need:
    """The losses of the elements, before they are reduced (Loss.cpp).

    Operands of two dtypes are cast: by structured kernels twice, to infer the shape and to compute.
    """
    reduction = argument(node, 2, "reduction", 1)
    operands = [node.args[0].meta, node.args[1].meta]
    losses, common = _broadcast(*operands), elementwise_casts.common_dtype(node.args[:2])
    cast = elementwise_casts.cast_bytes(operands, common)
    if node.op._schema.name.endswith("huber_loss"):
        return _huber_loss(node, losses, cast, common, reduction)
    if not reduction:
        return exactly(cast)
    return exactly(2 * cast + losses + _as_float(node, losses, reduction))


def _huber_loss(node: Node, losses: int, cast: int, common: torch.dtype, reduction: int) -> Need:
    """Its losses have the input's dtype, and their casts are gone before they are reduced."""
    dtype = node.args[0].meta.dtype
    if dtype != common:
        cast, losses = cast + losses, losses // common.itemsize * dtype.itemsize
    return exactly(max(cast, _as_float(node, losses, reduction)) + (losses if reduction else 0))


@on(_CPU_TABLE, "binary_cross_entropy_with_logits")
def _logits_loss(node: Node, threads: int) -> Need:
    """``(1 - target) * input - log_sigmoid(input)`` (Loss.cpp): two results at a time, and the input
    contiguous.
    """
    losses = _broadcast(node.args[0].meta, node.args[1].meta)
    copy = _contiguous_copy(node.args[0].meta)
    reduction = argument(node, 4, "reduction", 1)
    if not reduction:
        return exactly(losses + copy)
    return exactly(2 * losses + max(_as_float(node, losses, reduction), copy))


@on(_CPU_TABLE, "soft_margin_loss", "binary_cross_entropy")
def _loss_in_place(node: Node, threads: int) -> Need:
    """The losses of the elements are computed into the result's memory (Loss.cpp)."""
    position = 3 if node.op._schema.name.endswith("entropy") else 2
    losses = _broadcast(node.args[0].meta, node.args[1].meta)
    return exactly(_as_float(node, losses, argument(node, position, "reduction", 1)))


@on(_CPU_TABLE, "soft_margin_loss_backward")
def _soft_margin_backward(node: Node, threads: int) -> Need:
    """``exp(-target * input)`` (Loss.cpp): three results, of which the gradient takes one's place."""
    target, result = node.args[2].meta, node.outputs[0].meta
    losses = _broadcast(node.args[1].meta, target)
    return exactly(max(target.nbytes + 2 * losses - result.nbytes, losses))


def _as_float(node: Node, losses: int, reduction: int) -> int:
    """Bytes of the losses in float32, of which the mean in half precision is computed (see
    ``_reduction``).
    """
    return 2 * losses if reduction == 1 and node.outputs[0].dtype in _HALVES else 0


_HALVES = (torch.bfloat16, torch.float16)


def _broadcast(a: TensorMeta, b: TensorMeta) -> int:
    shape = torch.broadcast_shapes(a.shape, b.shape)
    return math.prod(shape) * torch.promote_types(a.dtype, b.dtype).itemsize


@on(_CPU_TABLE, "sort")
def _sort(node: Node, threads: int) -> Need:
    """One row's positions, for ``stable_sort`` with its keys (SortingKernel.cpp)."""
    image = node.args[0].meta
    if not image.shape:
        return NOTHING
    dim = next((arg for arg in node.args[1:] if isinstance(arg, int) and not isinstance(arg, bool)), None)
    if dim is None:
        dim = node.kwargs.get("dim", -1)
    return exactly(image.shape[dim] * 8)


@on(_CPU_TABLE, "linalg_vector_norm")
def _norm(node: Node, threads: int) -> Need:
    """For complex numbers nothing, except absolute values for the maximum or minimum (LinearAlgebra.cpp)."""
    operand = node.args[0].meta
    if not operand.dtype.is_complex:
        return _reduction(node, threads)
    order = argument(node, 1, "ord", 2)
    return exactly(operand.nbytes * 3 // 2 if math.isinf(order) else 0)


@on(_CPU_TABLE, "sum", "nansum", "prod", "any", "all", "mean")
def _reduction(node: Node, threads: int) -> Need:
    """The operand in the dtype of the reduction (``make_reduction_from_ty``, ReduceOpsUtils.h).

    That is the result's dtype; a mean in half precision is computed in float32 (``mean_out``, ReduceOps.cpp).
    """
    operand, result = node.args[0].meta, node.outputs[0].meta
    if not isinstance(operand, TensorMeta) or operand.dtype == result.dtype:
        if not node.op._schema.name.endswith("mean") or result.dtype not in _HALVES:
            return NOTHING
        return exactly(math.prod(operand.shape) * 4 + math.prod(result.shape) * 4)
    return exactly(math.prod(operand.shape) * result.dtype.itemsize)


@on(_CPU_TABLE, "median", "nanmedian")
def _median(node: Node, threads: int) -> Need:
    """A copy for sorting; for a dimension other than the last, one with that dimension innermost
    (Sorting.cpp).
    """
    operand = node.args[0].meta
    if len(node.outputs) == 1:
        return exactly(operand.nbytes)
    shape, stride = operand.shape, operand.stride
    dim = argument(node, 1, "dim")
    if not shape or stride[dim] == 1:
        return NOTHING
    order = list(range(len(shape)))
    order[dim], order[-1] = order[-1], order[dim]
    tile = transposing(
        tuple(shape[i] for i in order), tuple(stride[i] for i in order), operand.dtype.itemsize
    )
    return exactly(operand.nbytes + tile)


@on(_CPU_TABLE, "kthvalue")
def _kth(node: Node, threads: int) -> Need:
    """Values and their positions, which the selection moves (``kthvalue_out_impl_cpu``, Sorting.cpp)."""
    operand = node.args[0].meta
    return exactly(operand.nbytes + math.prod(operand.shape) * 8)


@on(_CPU_TABLE, "multinomial")
def _draws(node: Node, threads: int) -> Need:
    """Without replacement, one random number for each probability, and the chosen ones (Distributions.cpp).

    With replacement, sums along a row (cpu/MultinomialKernel.cpp).
    """
    chances, result = node.args[0].meta, node.outputs[0].meta
    item = chances.dtype.itemsize
    count = node.args[1]
    if argument(node, 2, "replacement", False) and count > 1:
        return exactly(chances.shape[-1] * item)
    return exactly(chances.nbytes + (math.prod(result.shape) * item if count > 1 else 0))


@on(_CPU_TABLE, "cumsum", "cumprod")
def _cumulative(node: Node, threads: int) -> Need:
    """The operand in the result's dtype (``impl_func_cum_ops``, ReduceOps.cpp)."""
    image, result = node.args[0].meta, node.outputs[0]
    return exactly(result.nbytes if image.dtype != result.dtype else 0)


# --- attention -----------------------------------------------------------------------------


def _attention_blocks(queries: int, keys: int) -> tuple[int, int]:
    """Numbers of queries and keys that a thread processes at once (cpu/FlashAttentionKernel.cpp)."""
    block = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return min(block, queries), min(512, keys)


@on(_CPU_TABLE, "_scaled_dot_product_flash_attention_for_cpu")
def _attention(node: Node, threads: int) -> Need:
    """For each thread: scores, their maxima and sums, and results (``cpu_flash_attention``).

    In half precision, the scores twice; oneDNN's block products then need a small unknown amount.
    """
    query, key = node.args[0].meta, node.args[1].meta
    queries, keys = _attention_blocks(query.shape[-2], key.shape[-2])
    wide = max(4, query.dtype.itemsize)
    size = threads * queries * (keys + 2 + query.shape[-1]) * wide
    return _and_products(size, threads * queries * keys * 2, query)


@on(_CPU_TABLE, "_scaled_dot_product_flash_attention_for_cpu_backward")
def _attention_backward(node: Node, threads: int) -> Need:
    """The gradient in the order of steps; for each thread, scores and their gradients; one sum for each
    query.
    """
    gradient, query, key = (value.meta for value in node.args[:3])
    queries, keys = _attention_blocks(query.shape[-2], key.shape[-2])
    wide = max(4, query.dtype.itemsize)
    order = in_order(gradient, (3, 1, 2, 0))  # (batch, steps, heads, size)
    size = 0 if order else gradient.nbytes
    size += (threads * 2 * keys + 1) * queries * wide
    return _and_products(size, 2 * threads * queries * keys * 2, query)


def _and_products(size: int, half: int, query: TensorMeta) -> Need:
    if query.dtype not in _HALVES:
        return exactly(size)
    return Need(size + half, size, size + 2 * half + 64 * 1024)


# --- recurrent layers by oneDNN ------------------------------------------------------------


@on(_CPU_TABLE, "mkldnn_rnn_layer")
def _recurrent(node: Node, threads: int) -> Need:
    """Both biases summed, weights in oneDNN's order, all steps' gates (mkldnn/RNN.cpp, rnn_utils.cpp).

    With AVX-512, the derived parts are exact; what oneDNN adds (pages, addresses of blocks) was observed in
    the allocator's events.
    """
    image, hidden = node.args[0].meta, node.args[5].meta
    train = node.outputs[-1].nbytes > 0  # a workspace for the backward pass
    steps, batch, inside = image.shape
    size = hidden.shape[-1]
    item = image.dtype.itemsize
    gates = 4 * size
    if train:
        weights = (inside + size) * _leading_dimension(gates) * item
        space = steps * batch * _leading_dimension(gates) * item + 2 * batch * size * item
        known = gates * item + weights + space
        state = batch * size * item
        return Need(known + 12856, known - PAGE - state, known + 4 * PAGE + state)
    weights = (inside + size) * 4 * _rounded(size, 32) * item
    # For each step, states and cells of the layer and before it, then one step's gates: ``set_offsets``.
    states = 2 * (steps + 1) * batch * _leading_dimension(max(inside, size)) * item
    cells = 2 * (steps + 1) * batch * size * item
    space = _rounded(_rounded(states, PAGE) + cells, PAGE) + batch * _leading_dimension(gates) * item
    known = gates * item + weights + space
    if onednn_instructions() < Instructions.AVX512:  # other blocks of weights, and other rows of states
        return Need(known + 12856, known // 2, 2 * known + 64 * 1024)
    return Need(known + 12856, known - PAGE, known + 64 * 1024 + space // 5)


@on(_CPU_TABLE, "mkldnn_rnn_layer_backward")
def _recurrent_backward(node: Node, threads: int) -> Need:
    image, hidden, gradient = node.args[0].meta, node.args[5].meta, meta_of(node.args[10])
    steps, batch, inside = image.shape
    size = hidden.shape[-1]
    item = image.dtype.itemsize
    gates = 4 * size
    known = (inside + size) * _leading_dimension(gates) * item  # weights in the layout of the forward pass
    for width in (inside, size):  # and in that of the backward pass
        if _leading_dimension(width) != width:
            known += gates * _leading_dimension(width) * item
    known += copied(gradient) + gates * item + 2 * batch * size * item
    known += steps * batch * _leading_dimension(gates) * item + 2 * batch * size * item
    return Need(known + 12856, known, known + 4 * PAGE + batch * size * item)


def _rounded(size: int, step: int) -> int:
    return -(-size // step) * step


def _leading_dimension(size: int) -> int:
    """A row's length that avoids cache conflicts: ``get_good_ld`` (rnn_utils.cpp)."""
    rounded = _rounded(size, 16)
    return rounded + 16 if rounded % 256 == 0 else rounded
