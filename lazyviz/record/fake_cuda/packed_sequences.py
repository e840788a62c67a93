"""Packed sequences on an absent GPU, and other functions that read values or call the driver in C++.

Supported are packed sequences, whose lengths are on the host.  What a planned GPU does not support is
reported by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...torch_internals import dispatch_level, fake_cuda_devices, private_api
from . import rnn as fake_cuda_rnn
from .fake_gpus_protocol import Gpus
from .refused_driver_calls import refusal


def install(gpus: Gpus) -> None:
    _install_packing(gpus)
    fake_cuda_rnn.install(gpus)
    gpus.replace(torch, "cond", _cond(torch.cond))


def _cond(cond: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.cond``, which traces the gradients of both branches on its own tensors."""

    def checked(pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
        if torch.is_grad_enabled() and any(
            isinstance(each, torch.Tensor)
            and each.requires_grad
            and each.device in fake_cuda_devices.STAND_INS
            for each in operands
        ):
            raise refusal("torch.cond of operands that require a gradient")
        return cond(pred, true_fn, false_fn, operands)

    return checked


# --- packed sequences ------------------------------------------------------------------


class _Pack(torch.autograd.Function):
    """``_pack_padded_sequence`` and its backward pass, by steps (PackedSequence.cpp)."""

    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, batches: Sequence[int], batch_first: bool) -> torch.Tensor:
        ctx.batches, ctx.batch_first = batches, batch_first
        steps = padded.transpose(0, 1) if batch_first else padded
        ctx.shape = steps.shape
        parts = [
            steps[first:last, :batch].contiguous().view(-1, *steps.shape[2:])
            for first, last, batch in _ranges(batches)
        ]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        result = gradient.new_zeros(ctx.shape)
        offset = 0
        for step, batch in enumerate(ctx.batches):
            result[step, :batch].copy_(gradient[offset : offset + batch])
            offset += batch
        return result.transpose(0, 1) if ctx.batch_first else result, None, None


def _ranges(batches: Sequence[int]) -> list[tuple[int, int, int]]:
    """(First, last, batch) of the steps with the same number of sequences."""
    ends = [step for step in range(1, len(batches) + 1) if batches[step : step + 1] != [batches[step - 1]]]
    return [(first, last, batches[first]) for first, last in zip([0, *ends], ends)]


def _install_packing(gpus: Gpus) -> None:
    """The lengths determine the shapes: ATen's own kernels compute them, for host sequences with one
    feature.
    """
    pack_here = private_api.VF._pack_padded_sequence
    pad_here = private_api.VF._pad_packed_sequence

    def pack(padded: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
        if padded.device not in fake_cuda_devices.STAND_INS:
            return pack_here(padded, lengths, batch_first)
        if lengths.is_cuda:  # ATen's message
            raise RuntimeError(
                "'lengths' argument should be a 1D CPU int64 tensor, but got "
                f"{lengths.dim()}D {lengths.device} Long tensor"
            )
        with gpus.tape.recording.paused(), dispatch_level.no_grad():
            like = torch.zeros(1, device="cpu").expand(*padded.shape[:2], 1)
            sizes = pack_here(like, lengths, batch_first)[1]
            batches = sizes.tolist()
        return _Pack.apply(padded, batches, batch_first), sizes

    def pad(
        data: torch.Tensor, sizes: torch.Tensor, batch_first: bool, padding_value: float, total_length: int
    ) -> Any:
        if data.device not in fake_cuda_devices.STAND_INS:
            return pad_here(data, sizes, batch_first, padding_value, total_length)
        with gpus.tape.recording.paused(), dispatch_level.no_grad():
            like = torch.zeros(1, device="cpu").expand(data.shape[0], 1)
            padded, lengths = pad_here(like, sizes, False, padding_value, total_length)
            batches = sizes.tolist()
        result = data.new_full((*padded.shape[:2], *data.shape[1:]), padding_value)
        offset = 0
        for first, last, batch in _ranges(batches):
            count = batch * (last - first)
            part = data[offset : offset + count].view(last - first, batch, *data.shape[1:])
            result[first:last, :batch].copy_(part)
            offset += count
        return result.transpose(0, 1) if batch_first else result, lengths

    gpus.replace(private_api.VF, "_pack_padded_sequence", pack)
    gpus.replace(private_api.VF, "_pad_packed_sequence", pad)
