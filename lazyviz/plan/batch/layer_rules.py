"""Batch rules for layers: normalization, convolution, pooling, attention, recurrence, losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...graph.ir import Value
from .batch_placement import LOCAL, PARTIAL, Partial, Placement, Shard
from .batch_rule import Call, Coupled, Outputs, align, rule

MEAN, SUM = 1, 2  # ATen's Reduction.h


# --- normalization ----------------------------------------------------------------------

_STATISTICS = "batch norm in training mode computes statistics over the batch"


@rule(
    """native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm
    miopen_batch_norm _batch_norm_with_update _batch_norm_no_update _native_batch_norm_legit_functional"""
)
def batch_norm(call: Call) -> Outputs | None:
    value = call["input"]
    shard = call.shard(value)
    if shard is None:
        return None
    training = "no_training" not in call.node.op._schema.name and "no_update" not in call.node.op._schema.name
    if call.has("training"):
        training = call["training"]
    if shard.dim == 1:  # each sample's channels are separate channels, as in instance norm
        for name in ("weight", "bias", "running_mean", "running_var"):
            if call.has(name):
                call.take(call[name], shard.at(0))
        saved = [each for each in call.node.outputs if each.index]
        return [shard, *[shard.at(0) if each.nbytes else None for each in saved]]
    if training:
        raise Coupled(_STATISTICS, [shard])
    return [shard]


@rule("native_batch_norm_backward cudnn_batch_norm_backward batch_norm_backward")
def batch_norm_backward(call: Call) -> Outputs | None:
    grad = call["grad_out" if call.has("grad_out") else "grad_output"]
    found = align(call, (call["input"], grad), len(call["input"].shape))
    if found is None:
        return None
    statistics = [call[name] for name in ("weight", "running_mean", "running_var") if call.has(name)]
    saved = [call[name] for name in ("save_mean", "save_invstd", "save_var") if call.has(name)]
    if found.dim == 1:
        for value in (*statistics, *saved):
            if isinstance(value, Value) and value.shape[0]:
                call.take(value, found.at(0))
        return [found, found.at(0), found.at(0)]
    training = call["train"] if call.has("train") else call["update"] if call.has("update") else True
    if training:
        raise Coupled(_STATISTICS, [found, None, None])
    return [found, PARTIAL, PARTIAL]


@rule("native_layer_norm _fused_rms_norm rms_norm")
def layer_norm(call: Call) -> Outputs | Placement | None:
    value = call["input"]
    shard = call.shard(value)
    if shard is not None and shard.dim >= len(value.shape) - len(call["normalized_shape"]):
        raise Coupled("it normalizes over the batch", shard)
    return shard


@rule("native_layer_norm_backward _fused_rms_norm_backward")
def layer_norm_backward(call: Call) -> Outputs | None:
    value = call["input"]
    found = align(call, (value, call["grad_out"]), len(value.shape))
    if found is None:
        return None
    if found.dim >= len(value.shape) - len(call["normalized_shape"]):
        raise Coupled("it normalizes over the batch", [found, None, None])
    for name in ("mean", "rstd"):
        if call.has(name):
            call.take(call[name], found)
    return [found, PARTIAL, PARTIAL]


@rule("native_group_norm")
def group_norm(call: Call) -> Outputs | Placement | None:
    shard = call.shard(call["input"])
    if shard is None:
        return None
    if shard.dim:
        raise Coupled("it normalizes over the batch", shard)
    call.sizes["N"] = shard.size
    return shard


@rule("native_group_norm_backward")
def group_norm_backward(call: Call) -> Outputs | None:
    found = align(call, (call["input"], call["grad_out"]), len(call["input"].shape))
    if found is None:
        return None
    if found.dim:
        raise Coupled("it normalizes over the batch", [found, None, None])
    for name in ("mean", "rstd"):
        call.take(call[name], found)
    call.sizes["N"] = found.size
    return [found, PARTIAL, PARTIAL]


# --- convolution, pooling, resampling ------------------------------------------------------


@rule(
    """convolution _convolution convolution_overrideable mkldnn_convolution cudnn_convolution conv2d conv1d
    conv3d"""
)
def convolution(call: Call) -> Placement | None:
    shard = call.shard(call["input" if call.has("input") else "self"])
    if any(call.shard(value) is not None for value in call.tensors[1:]):
        raise Coupled("its weights depend on the batch")
    if shard is not None and shard.dim:
        raise Coupled("it combines samples")
    return shard


@rule("convolution_backward convolution_backward_overrideable")
def convolution_backward(call: Call) -> Outputs | None:
    value, grad = call["input"], call["grad_output"]
    found = align(call, (value, grad), len(value.shape))
    if found is None:
        return None
    if found.dim or call.shard(call["weight"]) is not None:
        raise Coupled("it combines samples")
    return [found, PARTIAL, PARTIAL]


_WINDOWS = {"1d": 1, "2d": 2, "3d": 3}


def _spatial(call: Call) -> int:
    name = call.node.op._schema.name
    return next((count for ending, count in _WINDOWS.items() if ending in name), 2)


@rule(
    """max_pool1d max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d adaptive_avg_pool2d
    _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d mkldnn_max_pool2d
    fractional_max_pool2d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    _upsample_nearest_exact1d _upsample_nearest_exact2d upsample_linear1d upsample_bilinear2d
    upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa pixel_shuffle
    pixel_unshuffle channel_shuffle native_channel_shuffle max_pool2d_with_indices_backward
    max_pool3d_with_indices_backward avg_pool2d_backward avg_pool3d_backward
    _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward adaptive_max_pool2d_backward
    upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
    upsample_linear1d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward
    upsample_trilinear3d_backward _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward
    _upsample_bilinear2d_aa_backward max_unpool2d max_unpool3d im2col col2im"""
)
def window(call: Call) -> Outputs | Placement | None:
    value = call.tensors[0]
    found = align(call, call.tensors, len(value.shape))
    if found is None:
        return None
    name = call.node.op._schema.name
    last = (
        _spatial(call) + ("shuffle" in name)
        if "2col" not in name and "2im" not in name
        else len(value.shape) - 1
    )
    if found.dim >= len(value.shape) - last:
        raise Coupled("it combines samples")
    if call.has("input_size") and "backward" in name:
        call.local("input_size", found, call["input_size"])
    return found


@rule("grid_sampler_2d grid_sampler_3d")
def grid_sampler(call: Call) -> Placement | None:
    found = call.shard(call["input"]) or call.shard(call["grid"])
    if found is None:
        return None
    if found.dim:
        raise Coupled("it combines samples")
    call.take(call["input"], found)
    call.take(call["grid"], found)
    return found


@rule("grid_sampler_2d_backward grid_sampler_3d_backward")
def grid_sampler_backward(call: Call) -> Placement | None:
    grid_sampler(call)
    found = call.shard(call["input"]) or call.shard(call["grid"]) or call.shard(call["grad_output"])
    if found is not None:
        call.take(call["grad_output"], found)
    return found


# --- attention ----------------------------------------------------------------------------

_ATTENTION = """_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_fused_attention_overrideable"""


def _masked(call: Call, found: Shard, name: str) -> None:
    mask = call[name] if call.has(name) else None
    if isinstance(mask, Value):
        dim = found.dim - (4 - len(mask.shape))
        if dim >= 0 and mask.shape[dim] != 1:
            call.take(mask, found.at(dim))


@rule(_ATTENTION)
def attention(call: Call) -> Outputs | None:
    values = [call[name] for name in ("query", "key", "value")]
    found = align(call, values, 4)
    if found is None:
        return None
    if found.dim > 1:
        raise Coupled("it attends over the batch")
    _masked(call, found, "attn_mask")
    _masked(call, found, "attn_bias")
    return [found, found]


@rule(" ".join(f"{name}_backward" for name in _ATTENTION.split()))
def attention_backward(call: Call) -> Outputs | None:
    names = [name for name in ("grad_out", "grad_out_", "query", "key", "value", "out") if call.has(name)]
    found = align(call, [call[name] for name in names], 4)
    if found is None:
        return None
    if found.dim > 1:
        raise Coupled("it attends over the batch")
    call.take(call["logsumexp"], found)
    _masked(call, found, "attn_mask")
    _masked(call, found, "attn_bias")
    bias = call["attn_bias"] if call.has("attn_bias") else None
    if isinstance(bias, Value) and call.shard(bias) is None and bias not in call.slices:
        return [found, found, found, PARTIAL]
    return [found] * 4


# --- recurrence ---------------------------------------------------------------------------


@rule("mkldnn_rnn_layer")
def rnn_layer(call: Call) -> Outputs | None:
    shard = call.shard(call["input"])
    if shard is None:
        return None
    if shard.dim != 1 or call["batch_sizes"]:  # steps x samples x features; packed sequences mix them
        raise Coupled("it combines samples")
    states = [call["hx_"], call["cx_"]]
    for value in states:
        call.take(value, shard.at(len(value.shape) - 2))
    outputs: list[Placement | None] = [shard]
    outputs += [shard.at(len(value.shape) - 2) for value in call.node.outputs[1:3]]
    return [*outputs, LOCAL]


@rule("mkldnn_rnn_layer_backward")
def rnn_layer_backward(call: Call) -> Outputs | None:
    shard = call.shard(call["input"])
    if shard is None:
        return None
    if shard.dim != 1 or call["batch_sizes"]:
        raise Coupled("it combines samples")
    for value in call.tensors:
        name = next(
            (n for n in ("weight1", "weight2", "weight3", "weight4", "workspace") if call[n] is value), ""
        )
        if name:
            continue
        call.take(value, shard.at(len(value.shape) - 2))
    states = [shard.at(len(call[name].shape) - 2) for name in ("hx_", "cx_tmp")]
    return [shard, PARTIAL, PARTIAL, PARTIAL, PARTIAL, *states]


@rule("_cudnn_rnn _cudnn_rnn_backward")
def cudnn_rnn(call: Call) -> Outputs | None:
    """Weights are whole; cuDNN's buffer for the backward pass belongs to the piece."""
    found = call.batch_at(0 if call["batch_first"] else 1)
    spread = [each for each in ("input", "output", "grad_output") if call.has(each)]
    states = [each for each in ("hx", "cx", "grad_hy", "grad_cy") if call.has(each)]
    own = next((shard for name in spread if (shard := call.shard(call[name])) is not None), None)
    if own != found or call["batch_sizes"]:
        raise Coupled("it combines samples")
    for name in spread:
        call.take(call[name], found)
    for name in states:
        call.take(call[name], call.batch_at(1))
    cells = None if call["cx"] is None else call.batch_at(1)  # only LSTMs have them
    results: list[Placement | None] = [found, call.batch_at(1), cells]
    if call.has("reserve"):
        return results + [PARTIAL] * len(call["weight"])
    return [*results, LOCAL]


@rule("_thnn_fused_lstm_cell _thnn_fused_gru_cell")
def fused_cell(call: Call) -> Outputs | Placement | None:
    values = [call[name] for name in ("input_gates", "hidden_gates", "cx", "hx") if call.has(name)]
    return align(call, values, 2)


# --- losses -------------------------------------------------------------------------------


@rule(
    """mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits
    soft_margin_loss multilabel_margin_loss_forward multilabel_margin_loss"""
)
def loss(call: Call) -> Outputs | Placement | None:
    value = call["self"]
    found = align(call, call.tensors, len(value.shape))
    if found is None:
        return None
    outputs: list[Placement | None] = [found] * len(call.node.op._schema.returns)
    if call["reduction"] == MEAN:
        call.scaled = (0,)
    if call["reduction"] in (MEAN, SUM):
        outputs[0] = PARTIAL
    return outputs


@rule(
    """mse_loss_backward smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward
    soft_margin_loss_backward"""
)
def loss_backward(call: Call) -> Outputs | Placement | None:
    value = call["self"]
    found = align(call, [each for each in call.tensors if each.shape], len(value.shape))
    if found is not None and call["reduction"] == MEAN:
        call.scaled = (0,)  # it divides by the piece's number of elements
    return found


@rule("multi_margin_loss multi_margin_loss_backward")
def multi_margin_loss(call: Call) -> Placement | None:
    shard = call.shard(call["self"]) or call.shard(call["target"])
    if shard is None:
        return None
    if shard.dim or len(call["self"].shape) != 2:
        raise Coupled("the batch is in the class dimension")
    call.take(call["self"], shard)
    call.take(call["target"], shard)
    reduction, backward = call["reduction"], call.has("grad_output")
    if reduction == MEAN:
        call.scaled = (0,)
    if backward and call["grad_output"].shape:
        call.take(call["grad_output"], shard)
    return PARTIAL if reduction in (MEAN, SUM) and not backward else shard


@rule("nll_loss_forward nll_loss2d_forward")
def nll_loss(call: Call) -> Outputs | None:
    value, target = call["self"], call["target"]
    shard = call.shard(value) or _in_scores(call.shard(target))
    if shard is None:
        return None
    if shard.dim == 1 or len(value.shape) == 1:
        raise Coupled("the batch is in the class dimension")
    call.take(value, shard)
    call.take(target, _in_target(shard))
    if call["reduction"] not in (MEAN, SUM):
        return [_in_target(shard), None]
    mean = call["reduction"] == MEAN
    if mean:
        call.sizes["reduction"] = lambda samples: SUM
    return [Partial(mean_of=1) if mean else PARTIAL, PARTIAL]


def _in_scores(shard: Shard | None) -> Shard | None:
    return shard.at(shard.dim + (shard.dim > 0)) if shard is not None else None


def _in_target(shard: Shard) -> Shard:
    return shard.at(shard.dim - (shard.dim > 1))


def total_weight(given: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    """The second result of ``nll_loss_forward``, besides the loss, without the scores (of type ``dtype``).

    It is the sum of the targets' class weights, without those of ``ignore_index`` (ATen's LossNLL.cpp).
    """
    target, weight = given["target"], given["weight"]
    counted = target != given["ignore_index"]
    if weight is None:
        return counted.sum().to(dtype)
    return weight[target[counted]].sum()


@rule("nll_loss_backward nll_loss2d_backward")
def nll_loss_backward(call: Call) -> Placement | None:
    value, target = call["self"], call["target"]
    shard = call.shard(value) or _in_scores(call.shard(target))
    if shard is None:
        return None
    if shard.dim == 1 or len(value.shape) == 1:
        raise Coupled("the batch is in the class dimension", shard)
    call.take(value, shard)
    call.take(target, _in_target(shard))
    if call["grad_output"].shape:
        call.take(call["grad_output"], _in_target(shard))
    return shard


@rule("_ctc_loss")
def ctc_loss(call: Call) -> Outputs | None:
    scores = call["log_probs"]
    shard, padded = call.shard(scores), call.shard(call["targets"])
    if shard is None:
        if padded is None:
            return None
        shard = padded.at(1)
    _ctc(call, shard)
    return [shard.at(0), shard.at(0)]


@rule("_ctc_loss_backward")
def ctc_loss_backward(call: Call) -> Placement | None:
    shard = call.shard(call["log_probs"])
    if shard is None:
        shard = call.batch_at(1)  # other spread arguments have the batch in their first dimension
    _ctc(call, shard)
    for name in ("grad", "neg_log_likelihood", "log_alpha"):
        call.take(call[name], shard.at(0))
    return shard


def _ctc(call: Call, shard: Shard) -> None:
    if shard != call.batch_at(1):  # steps x samples x classes
        raise Coupled("it combines samples")
    targets = call["targets"]
    if len(targets.shape) != 2:
        raise Coupled("its targets are concatenated for all samples: pass them padded, (samples, length)")
    call.take(call["log_probs"], shard)
    call.take(targets, shard.at(0))
    for name in ("input_lengths", "target_lengths"):
        lengths = call[name]
        if isinstance(lengths, Value):
            call.take(lengths, shard.at(0))
        else:
            call.ranges[name] = _part(lengths)


def _part(lengths: Sequence[int]) -> Callable[[int, int], Sequence[int]]:
    return lambda start, stop: lengths[start:stop]


# --- random numbers -------------------------------------------------------------------------


@rule("native_dropout")
def dropout(call: Call) -> Placement | None:
    return call.shard(call["input"])
