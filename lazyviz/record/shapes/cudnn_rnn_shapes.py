"""Results of cuDNN's recurrent operators without cuDNN: shapes, strides, shared memory.

PyTorch's own shape rules only cover ``_cudnn_rnn``, without the tensors saved for the backward pass, and with
other strides for ``batch_first``.  These rules follow ``ATen/native/cudnn/RNN.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...torch_internals import cudnn_rnn_buffer_sizes


def _call(arguments: dict[str, Any]) -> cudnn_rnn_buffer_sizes.Recurrence:
    return cudnn_rnn_buffer_sizes.of_call(
        arguments["input"].shape,
        arguments["input"].element_size(),
        *(
            arguments[name]
            for name in (
                "mode", "hidden_size", "proj_size", "num_layers", "batch_first", "dropout",
                "bidirectional", "batch_sizes",
            )
        ),
    )  # fmt: skip


def _parameters(arguments: dict[str, Any], outside: int, biases: bool) -> cudnn_rnn_buffer_sizes.Parameters:
    return cudnn_rnn_buffer_sizes.parameters(
        arguments["mode"],
        outside,
        arguments["hidden_size"],
        arguments["proj_size"],
        arguments["num_layers"],
        2 if arguments["bidirectional"] else 1,
        biases,
    )


def _has_biases(arguments: dict[str, Any]) -> bool:
    return arguments["weight_stride0"] >= 4


def _check(name: str, image: torch.Tensor, tensor: torch.Tensor) -> None:
    """``check_attributes`` (ATen/native/RNN.h), with its error messages."""
    for what, ours, theirs in (
        ("at the same device, found input tensor at", image.device, tensor.device),
        ("the same dtype, found input tensor with", _spelled(image.dtype), _spelled(tensor.dtype)),
    ):
        if ours != theirs:
            raise RuntimeError(
                f"Input and {name} tensors are not {what} {ours} and {name} tensor "
                f"{what.rpartition(' ')[2]} {theirs}"
            )


_SPELLED = {torch.float16: "Half", torch.float32: "Float", torch.float64: "Double"}


def _spelled(dtype: torch.dtype) -> str:
    return _SPELLED.get(dtype, str(dtype))


def _forward(arguments: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    call, image, hx, cx = _call(arguments), arguments["input"], arguments["hx"], arguments["cx"]
    for name, tensors in (("hidden", [hx] if cx is None else [hx, cx]), ("parameter", arguments["weight"])):
        for tensor in tensors:
            _check(name, image, tensor)
    for name in ("hx", "cx"):
        if arguments[name] is not None and not arguments[name].is_contiguous():
            raise RuntimeError(f"rnn: {name} is not contiguous")
    width = call.result * call.directions
    if arguments["batch_sizes"]:
        output = image.new_empty(call.rows, width)
    else:
        output = image.new_empty(call.steps, call.batch, width)
        if arguments["batch_first"]:
            output = output.transpose(0, 1)
    cells = (call.layers * call.directions, call.batch)
    hy = hx.new_empty(*cells, call.result)
    cy = hx.new_empty(0) if cx is None else cx.new_empty(*cells, call.hidden)
    reserve = image.new_empty(call.reserve.nbytes if arguments["train"] else 0, dtype=torch.uint8)
    weights = arguments["weight_buf"]
    if weights is None:
        weights = image.new_empty(_parameters(arguments, call.outside, True).elements)
    return output, hy, cy, reserve, weights


def _backward(arguments: dict[str, Any]) -> tuple[Any, ...]:
    image, weights = arguments["input"], arguments["weight"]
    mask = arguments["output_mask"]
    if all(arguments[f"grad_{name}"] is None for name in ("output", "hy", "cy")):
        # The kernel returns no tensors at all, which Python cannot pass as tensors of a list.
        return None, None, None, [weight.new_empty(weight.shape) for weight in weights] if mask[3] else []
    if not arguments["train"]:
        raise RuntimeError("cudnn RNN backward can only be called in training mode")
    turned = arguments["batch_first"] and not arguments["batch_sizes"]
    steps = image.transpose(0, 1) if turned else image
    dx = image.new_empty(steps.shape)
    if turned:
        dx = dx.transpose(0, 1)
    hx, cx = arguments["hx"], arguments["cx"]
    dhx = hx.new_empty(hx.shape)
    dcx = None if cx is None else cx.new_empty(cx.shape)
    dw: list[torch.Tensor] = []
    if mask[3]:
        biases = _has_biases(arguments)
        flat = arguments["weight_buf"].new_empty(arguments["weight_buf"].shape)
        if biases:  # in one buffer, each as a separate tensor
            places = _parameters(arguments, image.size(-1), True).places
            dw = [
                flat[offset : offset + weight.numel()].view(weight.shape)
                for (offset, _), weight in zip(places, weights)
            ]
        else:  # unless a cell has four or five, a copy is made
            dw = [weight.new_empty(weight.shape) for weight in weights]
    return dx, dhx, dcx, dw


def _flatten(arguments: dict[str, Any]) -> torch.Tensor:
    biases = arguments["weight_stride0"] >= 4
    count = _parameters(arguments, arguments["input_size"], biases).elements
    return arguments["weight_arr"][0].new_empty(count)


def _dropout_state(arguments: dict[str, Any]) -> torch.Tensor:
    return torch.empty(
        cudnn_rnn_buffer_sizes.DROPOUT_STATE.nbytes, dtype=torch.uint8, device=arguments["device"]
    )


RULES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "_cudnn_rnn": _forward,
    "_cudnn_rnn_backward": _backward,
    "_cudnn_rnn_flatten_weight": _flatten,
    "_cudnn_init_dropout_state": _dropout_state,
}
