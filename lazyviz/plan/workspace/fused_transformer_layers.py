"""Scratch memory of the fused inference path of attention and encoder layers on the CPU.

``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` take it in evaluation mode without gradients.
The allocations are those of ``aten/src/ATen/native/transformers`` (attention.cpp, transformer.cpp), in order.
"""

from __future__ import annotations

import math

import torch

from ...graph.ir import Node, TensorMeta
from .workspace_rule import Rule, argument, meta_of, on
from .workspace_size import NOTHING, Events, Need

TABLE: dict[str, Rule] = {}


def _attention(
    run: Events, query: TensorMeta, heads: int, mask: TensorMeta | None, *, weights: bool, mean: bool
) -> None:
    """``native_multi_head_attention_cpu``, which leaves its result and, with ``weights``, those of all heads
    or their ``mean``.
    """
    batch, steps, _ = query.shape
    each = batch * steps * steps * query.dtype.itemsize
    scores, projected = heads * each, 3 * query.nbytes
    run.take(projected, projected)  # once more with its bias, in the order of heads
    run.free(projected)
    run.take(scores)
    if mask is not None:
        flags = math.prod(mask.shape) if mask.dtype != torch.bool else 0
        run.take(flags, scores)
        run.free(flags, scores)
    if not weights:
        run.free(scores)
    run.take(query.nbytes, query.nbytes)  # the context in the order of steps, and the result
    run.free(query.nbytes)
    if weights and mean:
        run.take(each)
        run.free(scores)
    run.free(projected)


def _normalized(run: Events, image: TensorMeta) -> None:
    """``native_layer_norm`` leaves its result; the means and deviations are freed."""
    numbers = math.prod(image.shape[:-1]) * max(image.dtype.itemsize, 4)
    run.take(image.nbytes, numbers, numbers)
    run.free(numbers, numbers)


def _in_half(need: Need, image: TensorMeta) -> Need:
    """Products of 16-bit numbers take scratch memory that oneDNN chooses."""
    return need if image.dtype.itemsize > 2 else Need(need.nbytes, need.low, 3 * need.high)


@on(TABLE, "_native_multi_head_attention")
def _multi_head(node: Node, threads: int) -> Need:
    query, heads = node.args[0].meta, node.args[4]
    if len(query.shape) != 3 or node.args[0] is not node.args[1]:
        return NOTHING
    weights = argument(node, 10, "need_weights", True)
    mean = argument(node, 11, "average_attn_weights", True)
    run = Events()
    _attention(run, query, heads, meta_of(argument(node, 9, "mask")), weights=weights, mean=mean)
    return _in_half(run.need(sum(value.nbytes for value in node.outputs)), query)


@on(TABLE, "_transformer_encoder_layer_fwd")
def _encoder_layer(node: Node, threads: int) -> Need:
    """Normalization before or after attention and the two linear layers."""
    image, heads, first = node.args[0].meta, node.args[2], bool(node.args[8])
    if len(image.shape) != 3:  # nested tensors
        return NOTHING
    inner = math.prod(image.shape[:-1]) * node.args[14].meta.shape[0] * image.dtype.itemsize
    run = Events()
    if first:
        _normalized(run, image)
    mask = meta_of(argument(node, 18, "mask"))
    _attention(run, image, heads, mask, weights=False, mean=False)
    if first:
        run.free(image.nbytes)
    _normalized(run, image)
    if not first:
        run.free(image.nbytes)
    run.take(inner, image.nbytes)
    run.free(inner)
    if not first:
        _normalized(run, image)
    return _in_half(run.need(image.nbytes), image)
