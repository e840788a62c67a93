"""FLOP count of every op: a multiplication and an addition are two.

They are counted by the formulas of ``torch.utils.flop_counter``.  Operators that it does not know, and whose
work is a matrix product, have rules here.  Elementwise work counts as zero, as it does there and in papers on
model FLOPs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ...graph.ir import Node, Value
from .op_classes import class_of, short_name


def flops_of(node: Node) -> int:
    """FLOPs of one op: by PyTorch's counter, otherwise by a rule of lazyviz, otherwise 0."""
    formula = flop_registry.get(node.op.overloadpacket)
    if formula is not None:
        returned: list[Any] = [None] * len(node.op._schema.returns)
        for value in node.outputs:
            if value.index < len(returned):
                returned[value.index] = value.shape
        out = returned[0] if len(returned) == 1 else tuple(returned)
        try:
            return int(formula(*_shapes(node.args), **_shapes(node.kwargs), out_val=out))
        except (AttributeError, TypeError, AssertionError, IndexError, ValueError):
            return 0  # a call that the formula does not support
    rule = _OWN.get(short_name(node.op))
    return int(rule(node)) if rule is not None else 0


def executed_flops_of(node: Node) -> int:
    """FLOPs that the kernels of one op execute; what its time depends on.

    They differ from :func:`flops_of` for the weight gradients of convolutions in groups, which PyTorch's
    counter takes for those of a convolution that is not in groups.
    """
    if short_name(node.op).startswith("convolution_backward") and groups_of(node) > 1:
        return _convolution_backward(node)
    return flops_of(node)


def least_flops(node: Node) -> int:
    """FLOPs of an op of unknown duration; of a factorization at least those of a Cholesky factorization."""
    if class_of(node.op) != "iterative":
        return flops_of(node)
    matrices = [value.shape for value in node.inputs if len(value.shape) > 1]
    return max((math.prod(shape) * min(shape[-2:]) // 3 for shape in matrices), default=0)


def arguments_of(node: Node) -> dict[str, Any]:
    """The arguments of a call by name; those that have their default values may be missing."""
    return dict(zip((each.name for each in node.op._schema.arguments), node.args)) | node.kwargs


def groups_of(node: Node) -> int:
    """The number of groups of a convolution, or of its backward pass."""
    return int(arguments_of(node).get("groups", 1))


def steps_of(node: Node) -> int:
    """The number of kernels of recurrent layers that run in sequence: one per step and layer.

    cuDNN's operator computes all layers, oneDNN's only one, whose input has the steps first.
    """
    named = arguments_of(node)
    cudnn = "cudnn" in short_name(node.op)
    packed, shape = named.get("batch_sizes"), named["input"].shape
    length = len(packed) if packed else shape[1 if cudnn and named.get("batch_first") else 0]
    passes = 2 if "backward" in short_name(node.op) else 1
    return passes * int(length) * (int(named["num_layers"]) if cudnn else 1)


def _shapes(argument: Any) -> Any:
    if isinstance(argument, Value):
        return argument.shape
    if isinstance(argument, (tuple, list)):
        return [_shapes(each) for each in argument]
    if isinstance(argument, dict):
        return {key: _shapes(each) for key, each in argument.items()}
    return argument


def _convolution_backward(node: Node) -> int:
    """Each gradient, of the input and of the weights, takes the FLOPs of the forward pass."""
    named = arguments_of(node)
    pixels = named["input" if named["transposed"] else "grad_output"].shape
    wanted = sum(value.index in (0, 1) for value in node.outputs)
    return 2 * wanted * pixels[0] * math.prod(pixels[2:]) * math.prod(named["weight"].shape)


def _product_with_vector(node: Node) -> int:
    matrix = node.inputs[1 if short_name(node.op) == "addmv" else 0]
    return 2 * math.prod(matrix.shape)


def _sparse_product(node: Node) -> int:
    """An element of the sparse matrix times a row of the other one."""
    named = arguments_of(node)
    name = next(name for name in named if name.endswith("_values"))
    columns = [each.shape[-1] for each in named.values() if isinstance(each, Value) and len(each.shape) > 1]
    if short_name(node.op) == "sparse_sampled_addmm":
        return 2 * math.prod(named[name].shape) * named["mat1"].shape[1]
    if name == "mat2_values":
        return 2 * math.prod(named[name].shape) * named["self"].shape[0]
    vector = short_name(node.op) == "sparse_mv"
    return 2 * math.prod(named[name].shape) * (1 if vector else columns[-1])


def _linear(node: Node) -> int:
    return 2 * math.prod(node.inputs[0].shape) * node.inputs[1].shape[0]


def _last_two_operands(node: Node) -> int:
    """Products of the last two operands with two or three dimensions, as in ``addbmm`` and ``_int_mm``."""
    first, second = [value.shape for value in node.inputs if len(value.shape) > 1][-2:]
    return 2 * math.prod(first) * second[-1]


def _products_in_groups(node: Node) -> int:
    """``_grouped_mm``: every row, or every column, belongs to one of the matrices, or they split the sum."""
    first, second = node.inputs[0].shape, node.inputs[1].shape
    if len(first) == len(second) == 2:
        return 2 * math.prod(first) * second[-1]
    return 2 * math.prod(node.outputs[0].shape) * first[-1]


def _product_with_packed_weights(node: Node) -> int:
    """``_weight_int8pack_mm`` and ``_weight_int4pack_mm``."""
    return 2 * math.prod(node.inputs[0].shape) * node.outputs[0].shape[-1]


def _trilinear(node: Node) -> int:
    """The sum over the products of three tensors, which `F.bilinear` computes: two matrix products."""
    named = arguments_of(node)
    shapes = []
    for name, expand in (("i1", "expand1"), ("i2", "expand2"), ("i3", "expand3")):
        shape = list(named[name].shape)
        for dim in sorted(named[expand]):
            shape.insert(dim, 1)
        shapes.append(shape)
    return 2 * math.prod(map(max, zip(*shapes)))


def _conv_tbc(node: Node) -> int:
    """``[steps, batch, channels]`` with weights ``[taps, channels, filters]``, and its two gradients."""
    named = arguments_of(node)
    backward = "backward" in short_name(node.op)
    out = named["self"].shape if backward else node.outputs[0].shape
    return (2 if backward else 1) * 2 * out[0] * out[1] * math.prod(named["weight"].shape)


def _distances(node: Node) -> int:
    """Squared distances by a matrix product of rows that are two elements longer."""
    first, second = (value.shape for value in node.inputs[:2])
    return 2 * math.prod(first[:-1]) * second[-2] * (first[-1] + 2)


def _attention(node: Node) -> int:
    query, key, value = (each.shape for each in node.inputs[:3])
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(node: Node) -> int:
    grad, query, key, value = (each.shape for each in node.inputs[:4])
    return int(sdpa_backward_flop_count(grad, query, key, value))


def _rnn(node: Node) -> int:
    """Every weight matrix is multiplied once per element of the sequences, twice in the backward pass."""
    named = arguments_of(node)
    steps = math.prod(named["input"].shape[:-1])
    passes = 2 if "backward" in short_name(node.op) else 1
    given = named.get("weight") or [each for name, each in named.items() if name.startswith("weight")]
    weights = [each.shape for each in given if isinstance(each, Value)]
    return 2 * passes * steps * sum(math.prod(shape) for shape in weights if len(shape) == 2)


def _encoder_layer(node: Node) -> int:
    """One layer of ``nn.TransformerEncoder``'s fused inference path: its matrix products and attention."""
    if len(node.inputs[0].shape) != 3:  # a nested tensor, whose sizes the record does not have
        return 0
    batch, length, width = node.inputs[0].shape
    weights = [value.shape for value in node.inputs[1:] if len(value.shape) == 2]
    kernels = [shape for shape in weights if width in shape]
    return 2 * batch * length * sum(map(math.prod, kernels)) + 4 * batch * length * length * width


def _multihead_attention(node: Node) -> int:
    """``nn.MultiheadAttention``'s fused inference path: four projections, scores, and weighted sums."""
    query, key = node.args[0], node.args[1]
    if len(query.shape) != 3:  # a nested tensor, whose sizes the record does not have
        return 0
    batch, length, width = query.shape
    others = key.shape[1]
    return batch * (4 * (length + others) * width * width + 4 * length * others * width)


_OWN: Mapping[str, Callable[[Node], int]] = {
    **{f"sparse_{name}": _sparse_product for name in ("mm", "addmm", "bmm", "mv", "sampled_addmm")},
    "mv": _product_with_vector,
    "addmv": _product_with_vector,
    "dot": _product_with_vector,
    "vdot": _product_with_vector,
    "linear": _linear,
    "addbmm": _last_two_operands,
    "_int_mm": _last_two_operands,
    "_grouped_mm": _products_in_groups,
    "_weight_int8pack_mm": _product_with_packed_weights,
    "_weight_int4pack_mm": _product_with_packed_weights,
    "_trilinear": _trilinear,
    "conv_tbc": _conv_tbc,
    "conv_tbc_backward": _conv_tbc,
    "_euclidean_dist": _distances,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_scaled_dot_product_fused_attention_overrideable": _attention,
    "_cudnn_rnn": _rnn,
    "_cudnn_rnn_backward": _rnn,
    "mkldnn_rnn_layer": _rnn,
    "mkldnn_rnn_layer_backward": _rnn,
    "_transformer_encoder_layer_fwd": _encoder_layer,
    "_native_multi_head_attention": _multihead_attention,
}
