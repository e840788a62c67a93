"""Convolutions on a CPU: which library runs them, and what it does beside multiplying.

oneDNN converts images and weights to layouts of its own, and results back. ATen's own kernel multiplies the
weights with the columns of one image at a time, as many as it has pixels.
"""

from __future__ import annotations

import math

import torch

from ...graph.ir import Node, Value
from .flop_count import arguments_of, groups_of
from .op_classes import short_name

MOST_ELEMENTS = 20480
"""Elements of a single image up to which ATen's own kernel is faster, and from how many images on oneDNN is
(``MANY``): ``ConvParams::use_mkldnn`` of ATen's ``Convolution.cpp``."""
MANY = 16
FORWARD, OF_INPUT, OF_WEIGHT = "convolution by ATen", "input gradient by ATen", "weight gradient by ATen"
"""Names of the rates of ATen's own kernels, by the pixels of an image."""


def in_onednn(node: Node) -> bool:
    """Whether oneDNN runs a convolution, or its backward pass, on this machine."""
    named = arguments_of(node)
    image, weight = _given(node, "input", 0), _given(node, "weight", 1)
    if image.dtype == torch.float64 or image.dtype.is_complex or not torch.backends.mkldnn.enabled:
        return False
    kernel = (1, *weight.shape[2:])[-2:] if len(weight.shape) < 4 else weight.shape[2:]
    moved = any(step != 1 for each in ("stride", "dilation") for step in named.get(each, ()))
    threads, count, groups = torch.get_num_threads(), image.shape[0], int(named.get("groups", 1))
    pays = moved or count >= MANY or kernel[-1] != 1 or kernel[-2] != 1 or threads > 1
    is_large = count > 1 or groups > 1 or (kernel[-1] > 3 and kernel[-2] > 3)
    return pays and (is_large or math.prod(image.shape) > MOST_ELEMENTS)


def _given(node: Node, name: str, at: int) -> Value:
    """An operand; operators of single libraries have other names for some."""
    found = arguments_of(node).get(name)
    return found if isinstance(found, Value) else node.inputs[at]


def directions(node: Node) -> tuple[str, ...]:
    """The passes of which a convolution, or its backward pass, consists."""
    if "backward" not in short_name(node.op):
        return (FORWARD,)
    wanted = {value.index for value in node.outputs}
    return tuple(name for index, name in enumerate((OF_INPUT, OF_WEIGHT)) if index in wanted)


def pixels(node: Node) -> int:
    """Pixels of one result image, or of its gradient."""
    named = arguments_of(node)
    result = named["grad_output"] if "grad_output" in named else node.outputs[0]
    return math.prod(result.shape[2:])


def reordered_images(node: Node) -> int:
    """Bytes of images that oneDNN converts to or from its own layout; a backward pass is two convolutions."""
    images = [value for value in (*node.inputs, *node.outputs) if len(value.meta.shape) > 2]
    if len(images) < 2:
        return 0
    if "backward" not in short_name(node.op):
        source, result = images[0], images[-1]
        return source.nbytes + result.nbytes
    gradient, source = images[:2]
    passes = sum(1 for value in node.outputs if len(value.meta.shape) > 2)
    return passes * (gradient.nbytes + source.nbytes)


def reordered_weights(node: Node) -> int:
    """Bytes of weights that oneDNN converts. Their gradient is made in its layout, after it was zeroed."""
    weight = _given(node, "weight", 1)
    return sum(2 if each == OF_WEIGHT else 1 for each in directions(node)) * weight.nbytes


def is_depthwise(node: Node) -> bool:
    """Whether each channel is convolved on its own."""
    weight = _given(node, "weight", 1)
    return weight.shape[1] == 1 and groups_of(node) == weight.shape[0] > 1


def terms(node: Node) -> int:
    """Products of which each pixel of a result is the sum."""
    weight = _given(node, "weight", 1)
    channels = weight.shape[0] // groups_of(node) if arguments_of(node).get("transposed") else weight.shape[1]
    return int(channels * math.prod(weight.shape[2:]))


def width(node: Node) -> int:
    """Pixels in a row of the kernel."""
    return int(_given(node, "weight", 1).shape[-1])


def padding(node: Node) -> float:
    """How many times the FLOPs oneDNN computes: it makes whole vectors of channels, in each group."""
    named = arguments_of(node)
    shape, groups = _given(node, "weight", 1).shape, groups_of(node)
    made, given = shape[0] // groups, shape[1]
    if named.get("transposed"):
        made, given = given, shape[0] // groups
    lanes = 16 if "512" in torch.backends.cpu.get_cpu_capability() else 8
    factors = [
        math.ceil(count / lanes) * lanes / max(count, 1)
        for count in (given if each == OF_INPUT else made for each in directions(node))
    ]
    return sum(factors) / len(factors) if factors else 1.0


def is_pointwise(node: Node) -> bool:
    """Whether each pixel of the result depends on one pixel."""
    return math.prod(_given(node, "weight", 1).shape[2:]) == 1
