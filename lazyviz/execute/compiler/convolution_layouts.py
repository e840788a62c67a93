"""Layouts of convolutions that Inductor runs on the CPU: channels last, whatever layout was recorded.

Inductor lets oneDNN's convolutions read and write channels last (``decide_layout_opt`` in
torch/_inductor/graph.py), but keeps the traced layout for values that their gradients read and for outputs.
For a forward and backward pass in one graph, each activation would be held in both layouts, some of them
twice, and the gradients of all weights would be copied at the same time, when all of them exist. Therefore,
such a segment is traced in that layout, and the conversions of weights and of their gradients are operators
that Inductor treats as opaque. A segment with more weights than images keeps the recorded layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ...graph.ir import Node, TensorMeta, Value
from ...torch_internals.operator_registration import define

aten = torch.ops.aten

# Arguments that are images, or weights, which have the same layouts.
_IMAGES = {aten.convolution.default: (0,), aten.convolution_backward.default: (0, 1, 2)}
_WEIGHT = 2  # of `convolution_backward`
RESHAPES = (aten.view.default, aten._unsafe_view.default)  # other strides are not possible


def wants_channels_last(nodes: Sequence[Node]) -> bool:
    """Whether Inductor would convert the layout of the convolutions in ``nodes`` back and forth."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    images = [node for node in nodes if node.op in _IMAGES]
    return (
        any(node.op is aten.convolution_backward.default for node in images)
        and all(value.meta.device.type == "cpu" for node in images for value in node.inputs)
        and all(len(node.args[at].meta.shape) == 4 for node in images for at in _IMAGES[node.op])
    )


def weights_outweigh_images(nodes: Sequence[Node]) -> bool:
    """Whether the convolutions in ``nodes`` read more bytes of weights than of images.

    Converting the layout of weights and their gradients then costs more than channels last saves, in time
    and in memory.
    """
    calls = [node for node in nodes if node.op is aten.convolution.default]
    images, weights = (sum(node.args[at].meta.nbytes for node in calls) for at in (0, 1))
    return weights > images


def to_channels_last(graph: fx.Graph, node: Node, op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of ``node`` in ``graph``, with images and the weight of a gradient channels last."""
    for at in _IMAGES.get(op, ()):
        if at == _WEIGHT and _is_row_major(node.args[at].meta):
            image = graph.call_function(channels_last, (args[at],))
        else:  # the same tensor, if it is traced in that layout
            image = graph.call_function(
                aten.contiguous.default, (args[at],), {"memory_format": torch.channels_last}
            )
        args = (*args[:at], image, *args[at + 1 :])
    return args


def is_to_be_row_major(node: Node, value: Value) -> bool:
    """Whether it is the gradient of a convolution's weight, recorded row-major and not also channels last."""
    return node.op is aten.convolution_backward.default and value.index == 1 and _is_row_major(value.meta)


def _is_row_major(weight: TensorMeta) -> bool:
    """Whether it is row-major and not also channels last."""
    _, channels, *window = weight.shape
    size = math.prod(window)
    return channels > 1 and size > 1 and weight.stride[1] == size


def _like_row_major(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _row_major(tensor: torch.Tensor) -> torch.Tensor:
    return _like_row_major(tensor).copy_(tensor)


def _like_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.channels_last)


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return _like_channels_last(tensor).copy_(tensor)


# If Inductor fused it into an optimizer's update, each element would be read several times, a few at once.
row_major = define("row_major", "(Tensor tensor) -> Tensor", kernel=_row_major, shape=_like_row_major)
# If Inductor fused it into the forward pass, which converts the weight, too, the copies of all weights would
# be held until the backward pass.
channels_last = define(
    "channels_last", "(Tensor tensor) -> Tensor", kernel=_channels_last, shape=_like_channels_last
)
