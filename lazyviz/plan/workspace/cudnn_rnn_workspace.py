"""Workspace of cuDNN's recurrent kernels, and how certain it is.

All sizes are estimates, except copies made by PyTorch (``ATen/native/cudnn/RNN.cpp``): see
:mod:`lazyviz.torch_internals.cudnn_rnn_buffer_sizes`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...graph.ir import Node, TensorMeta, Value
from ...torch_internals import cudnn_rnn_buffer_sizes
from ..liveness.lifetimes import Lifetime, nodes_with
from .workspace_size import NOTHING, Need

_FORWARD = torch.ops.aten._cudnn_rnn.default
_DROPOUT_STATE = torch.ops.aten._cudnn_init_dropout_state.default


def _call(node: Node) -> cudnn_rnn_buffer_sizes.Recurrence:
    names = [argument.name for argument in node.op._schema.arguments]
    arguments: dict[str, Any] = dict(zip(names, node.args)) | node.kwargs
    image: TensorMeta = arguments["input"].meta
    return cudnn_rnn_buffer_sizes.of_call(
        image.shape,
        image.dtype.itemsize,
        *(
            arguments[name]
            for name in (
                "mode", "hidden_size", "proj_size", "num_layers", "batch_first", "dropout",
                "bidirectional", "batch_sizes",
            )
        ),
    )  # fmt: skip


def unsure(nodes: Sequence[Node], spans: Iterable[Lifetime]) -> list[tuple[Lifetime, Need]]:
    """The tensors whose size is an estimate, each with that estimate, for the planned batch.

    ``nodes`` are those of the program.
    """
    if not nodes_with(nodes, lambda op: op is _FORWARD or op is _DROPOUT_STATE):
        return []
    found = []
    for span in spans:
        node = span.maker
        if node is None or not span.storage.nbytes:
            continue
        recorded = node.outputs[3].storage if node.op is _FORWARD else None
        if recorded is not None and span.storage.origin is recorded.origin:
            call, planned, nbytes = _call(node), span.storage.nbytes, recorded.nbytes
            sized = replace(call, rows=call.rows * planned // nbytes, batch=call.batch * planned // nbytes)
            found.append((span, Need(*sized.reserve)))
        elif node.op is _DROPOUT_STATE:
            found.append((span, Need(*cudnn_rnn_buffer_sizes.DROPOUT_STATE)))
    return found


def forward(node: Node, threads: int) -> Need:
    """The input in the order of steps, and cuDNN's workspace."""
    return _plus(
        _call(node).workspace(node.args[12]), _contiguous_copy(node.args[0].meta, _is_batch_first(node))
    )


def backward(node: Node, threads: int) -> Need:
    """Two passes: gradients of the data, then of the weights, from copies in the order of steps.

    Missing gradients are replaced by zeros; gradients that are not requested are computed nevertheless.
    """
    image, weights, flat, hx, cx, output = (node.args[at] for at in (0, 1, 3, 4, 5, 6))
    given, mask = node.args[7:10], node.args[21]
    if not any(isinstance(gradient, Value) for gradient in given):
        return NOTHING
    turned = _is_batch_first(node)
    all_along = 0
    for gradient, like in zip(given, (output, hx, cx)):
        if gradient is None and like is not None:
            all_along += like.nbytes
    for wanted, like in zip(mask, (image, hx, cx)):
        if not wanted and like is not None:
            all_along += like.nbytes
    steps = _contiguous_copy(image.meta, turned)
    data = steps + (_contiguous_copy(given[0].meta, turned) if given[0] is not None else 0)
    apart = mask[3] and (len(weights) > 0 and node.args[2] < 4)  # gradients are copied out of the buffer
    known = all_along + max(data, steps + (flat.nbytes if apart else 0))
    return _plus(_call(node).workspace(True), known)


def _is_batch_first(node: Node) -> bool:
    """Whether the kernel transposes an input whose first dimension is the batch."""
    names = [argument.name for argument in node.op._schema.arguments]
    return bool(node.args[names.index("batch_first")]) and not node.args[names.index("batch_sizes")]


def _contiguous_copy(meta: TensorMeta, turned: bool) -> int:
    """Bytes of the copy that ``contiguous()`` makes, after a transpose if ``turned``."""
    shape, stride = list(meta.shape), list(meta.stride)
    if turned:
        shape[:2], stride[:2] = shape[1::-1], stride[1::-1]
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride)):
        if size != 1 and step != expected:
            return math.prod(shape) * meta.dtype.itemsize
        expected *= size
    return 0


def _plus(space: cudnn_rnn_buffer_sizes.Estimate, known: int) -> Need:
    return Need(*(size + known for size in space))
