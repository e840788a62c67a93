"""Recurrent layers on an absent GPU: one cuDNN kernel, called as PyTorch does on a GPU.

``nn.LSTM``, ``nn.GRU``, and ``nn.RNN`` call ``lstm``, ``gru``, ``rnn_tanh``, ``rnn_relu``, which use the
cuDNN kernel for a CUDA tensor (``ATen/native/RNN.cpp``, ``_cudnn_impl`` in ``ATen/native/cudnn/RNN.cpp``).
What cuDNN does not support (bfloat16, or cuDNN disabled) is recorded cell by cell with CPU ops, and noted in
the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...torch_internals import composite_ops, cudnn_rnn_buffer_sizes, dispatch_level, fake_cuda_devices
from ..lazy_tensor import is_pending
from .fake_gpus_protocol import Gpus

_aten = torch.ops.aten
_DTYPES = (torch.float16, torch.float32, torch.float64)  # torch.backends.cudnn.CUDNN_TENSOR_DTYPES
_MODES = {
    "lstm": (cudnn_rnn_buffer_sizes.LSTM, "LSTM"),
    "gru": (cudnn_rnn_buffer_sizes.GRU, "GRU"),
    "rnn_tanh": (cudnn_rnn_buffer_sizes.TANH, "RNN"),
    "rnn_relu": (cudnn_rnn_buffer_sizes.RELU, "RNN"),
}
_MODE_OF = {
    "LSTM": cudnn_rnn_buffer_sizes.LSTM,
    "GRU": cudnn_rnn_buffer_sizes.GRU,
    "RNN_TANH": cudnn_rnn_buffer_sizes.TANH,
    "RNN_RELU": cudnn_rnn_buffer_sizes.RELU,
}


def install(gpus: Gpus) -> None:
    gpus.replace(torch.backends.cudnn, "is_acceptable", acceptable)
    before = torch.nn.RNNBase.flatten_parameters

    def flatten_parameters(layer: torch.nn.RNNBase) -> None:
        weights = layer._flat_weights
        if weights and all(isinstance(weight, torch.Tensor) and _is_planned(weight) for weight in weights):
            _flatten(layer, weights)
        else:
            before(layer)

    gpus.replace(torch.nn.RNNBase, "flatten_parameters", flatten_parameters)


def kernels(gpus: Gpus) -> dict[str, Callable[..., Any]]:
    """Replaces ATen's kernels with these names."""
    states: dict[torch.device, torch.Tensor] = {}  # dropout states: one for each GPU, created on first use
    return {
        f"{name}.{overload}": _kernel(gpus, name, packed=overload == "data", states=states)
        for name in _MODES
        for overload in ("input", "data")
    }


def _is_planned(tensor: torch.Tensor) -> bool:
    return is_pending(tensor) and tensor.is_cuda


def acceptable(tensor: torch.Tensor) -> bool:
    """``cudnn_is_acceptable`` (ATen/native/cudnn)."""
    enabled = bool(torch.backends.cudnn.enabled)
    return enabled and _is_planned(tensor) and tensor.dtype in _DTYPES and tensor.numel() > 0


# --- parameters in one buffer ----------------------------------------------------------


def _flatten(layer: torch.nn.RNNBase, weights: Sequence[Any]) -> None:
    """``RNNBase.flatten_parameters``, and ``copy_weights_to_flat_buf_views`` in cudnn/RNN.cpp."""
    if len(weights) != len(layer._flat_weights_names):
        return
    if any(weight.dtype != weights[0].dtype or not acceptable(weight) for weight in weights):
        return
    if len({_memory(weight) for weight in weights}) != len(weights):
        return  # tied: left as they are
    mode, sizes = _MODE_OF[layer.mode], (layer.hidden_size, layer.proj_size, layer.num_layers)
    count = (4 if layer.bias else 2) + (layer.proj_size > 0)
    with dispatch_level.no_grad():
        buffer = _aten._cudnn_rnn_flatten_weight.default(
            weights, count, layer.input_size, mode, *sizes, layer.batch_first, layer.bidirectional
        )
        places = cudnn_rnn_buffer_sizes.parameters(
            mode, layer.input_size, *sizes, 2 if layer.bidirectional else 1, layer.bias
        ).places
        for weight, (offset, shape) in zip(weights, places):
            weight.data = _part(buffer, offset, shape)


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor._lazyviz.storage.id, int(tensor.storage_offset())  # type: ignore[attr-defined]


def _part(buffer: torch.Tensor, offset: int, shape: Sequence[int]) -> torch.Tensor:
    return buffer[offset : offset + torch.Size(shape).numel()].view(shape)


def _flat_buffer(
    weights: Sequence[torch.Tensor], parameters: cudnn_rnn_buffer_sizes.Parameters
) -> torch.Tensor | None:
    """The buffer that contains all of ``weights`` at the expected offsets: ``try_get_weight_buf``."""
    storage, offset = _memory(weights[0])
    size = weights[0]._lazyviz.storage.nbytes // weights[0].element_size()  # type: ignore[attr-defined]
    if offset or size < parameters.elements:
        return None
    if [_memory(weight) for weight in weights] != [(storage, at) for at, _ in parameters.places]:
        return None
    with dispatch_level.no_grad():
        return weights[0].detach().as_strided((parameters.elements,), (1,), 0)


# --- the layers ------------------------------------------------------------------------


def _kernel(
    gpus: Gpus, name: str, *, packed: bool, states: dict[torch.device, torch.Tensor]
) -> Callable[..., Any]:
    original = composite_ops.composite_kernel(f"{name}.{'data' if packed else 'input'}")
    mode, layer = _MODES[name]

    def kernel(source: torch.Tensor, *args: Any) -> Any:
        if not _is_planned(source):
            return original(source, *args)
        if not acceptable(source):
            graph = gpus.tape.recording.graph
            if graph is not None and layer != "RNN":  # its cells are also ops on a GPU
                graph.in_parts.add(layer)
            return original(source, *args)
        batch_sizes: list[int] = []
        if packed:
            batch_sizes, args = args[0].tolist(), (*args[1:], False)
        hidden, weights, biases, layers, dropout, train, bidirectional, batch_first = args
        hx, cx = hidden if mode == cudnn_rnn_buffer_sizes.LSTM else (hidden, None)
        size, projection = hx.size(2), 0
        if cx is not None and cx.size(2) != size:
            size, projection = cx.size(2), size
        parameters = cudnn_rnn_buffer_sizes.parameters(
            mode, source.size(-1), size, projection, layers, 2 if bidirectional else 1, biases
        )
        buffer = _flat_buffer(weights, parameters) if all(map(_is_planned, weights)) else None
        state = _dropout_state(states, dropout, train, source.device)
        if torch.is_autocast_enabled("cuda"):
            source, hx, cx = _half(source), _half(hx), None if cx is None else _half(cx)
            weights, buffer = _half_weights(weights, buffer, parameters)
        with fake_cuda_devices.without_autocast():
            output, hy, cy, _, _ = _aten._cudnn_rnn.default(
                source, weights, (4 if biases else 2) + (projection > 0), buffer, hx, cx, mode, size,
                projection, layers, batch_first, dropout, train, bidirectional, batch_sizes, state,
            )  # fmt: skip
        return (output, hy, cy) if mode == cudnn_rnn_buffer_sizes.LSTM else (output, hy)

    return kernel


def _dropout_state(
    states: dict[torch.device, torch.Tensor], dropout: float, train: bool, device: torch.device
) -> torch.Tensor | None:
    """``get_dropout_state``: created once for each GPU, and kept."""
    if train and dropout > 0 and device not in states:
        states[device] = _aten._cudnn_init_dropout_state.default(
            dropout, train, 0, dtype=torch.uint8, device=device
        )
    return states.get(device)


def _half(tensor: torch.Tensor) -> torch.Tensor:
    """``cached_cast`` to float16, in which autocast runs cuDNN's layers regardless of the autocast dtype."""
    eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(torch.float16) if eligible else tensor


def _half_weights(
    weights: Sequence[torch.Tensor],
    buffer: torch.Tensor | None,
    parameters: cudnn_rnn_buffer_sizes.Parameters,
) -> tuple[Sequence[torch.Tensor], torch.Tensor | None]:
    """``_cudnn_rnn_cast_reflatten`` (autocast_RNN.cpp): half-precision copies in one buffer, seen by
    autograd.
    """
    with fake_cuda_devices.without_autocast():
        if weights[0].dtype != torch.float32:
            return weights, buffer
        with dispatch_level.no_grad():
            halves = torch.zeros(parameters.elements, dtype=torch.float16, device=weights[0].device)
            parts = [_part(halves, offset, shape).detach() for offset, shape in parameters.places]
        return [part.copy_(weight) for part, weight in zip(parts, weights)], halves
