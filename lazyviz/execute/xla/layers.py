"""Convolutions, pooling, and attention in JAX; most gradients come from JAX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from .ops import lowering_of, lowers

aten = torch.ops.aten


def _convolution(
    image: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> jax.Array:
    dims = weight.ndim - 2
    stride, padding, dilation, output_padding = (
        tuple(each) * (dims if len(each) == 1 else 1) for each in (stride, padding, dilation, output_padding)
    )
    if transposed:
        # The gradient of a convolution with respect to its image: a dilated image under a rotated kernel.
        inside = weight.shape[0] // groups
        kernel = jnp.flip(weight, tuple(range(2, dims + 2)))
        kernel = kernel.reshape(groups, inside, *kernel.shape[1:]).swapaxes(1, 2)
        kernel = kernel.reshape(-1, inside, *kernel.shape[3:])
        reach = [step * (size - 1) for step, size in zip(dilation, weight.shape[2:])]
        pads = [
            (far - pad, far - pad + more)
            for far, pad, more in zip(reach, padding, output_padding, strict=True)
        ]
        steps, holes = (1,) * dims, stride
    else:
        kernel, steps, holes = weight, stride, (1,) * dims
        pads = [(pad, pad) for pad in padding]
    result = jax.lax.conv_general_dilated(
        image, kernel, steps, pads, lhs_dilation=holes, rhs_dilation=dilation, feature_group_count=groups
    )
    return result if bias is None else result + bias.reshape(-1, *(1,) * dims)


lowers(aten.convolution.default)(_convolution)


@lowers(aten.convolution_backward.default)
def _convolution_backward(
    gradient: jax.Array,
    image: jax.Array,
    weight: jax.Array,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    wanted: Sequence[bool],
) -> tuple[jax.Array | None, ...]:
    def forward(image: jax.Array, weight: jax.Array) -> jax.Array:
        return _convolution(
            image, weight, None, stride, padding, dilation, transposed, output_padding, groups
        )

    _, pull = jax.vjp(forward, image, weight)
    by_image, by_weight = pull(gradient)
    others = (0, *range(2, gradient.ndim))
    results = (by_image, by_weight, gradient.sum(others))
    return tuple([result if want else None for result, want in zip(results, wanted)])


@lowers(aten.max_pool2d_with_indices.default)
def _max_pool(
    image: jax.Array,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The first of the largest elements, like the kernel, or the last NaN."""
    kernel, padding, dilation = (tuple(each) * (3 - len(each)) for each in (kernel, padding, dilation))
    stride = tuple(stride) * (3 - len(stride)) if stride else kernel
    sizes = image.shape[-2:]
    counts = []
    for size, window, step, pad, spread in zip(sizes, kernel, stride, padding, dilation):
        room = size + 2 * pad - spread * (window - 1) - 1
        count = (room + (step - 1 if ceil_mode else 0)) // step + 1
        counts.append(count - (1 if ceil_mode and (count - 1) * step >= size + pad else 0))
    best = where = None
    for row in range(kernel[0]):
        for column in range(kernel[1]):
            lines, places = (
                np.arange(count) * step - pad + at * spread
                for count, step, pad, at, spread in zip(counts, stride, padding, (row, column), dilation)
            )
            inside = ((lines >= 0) & (lines < sizes[0]))[:, None] & ((places >= 0) & (places < sizes[1]))
            lines, places = lines.clip(0, sizes[0] - 1), places.clip(0, sizes[1] - 1)
            value = image[..., lines[:, None], places]
            index = jnp.broadcast_to(lines[:, None] * sizes[1] + places, value.shape)
            if best is None or where is None:
                # A window that begins outside has the first of its elements inside as its maximum.
                lowest = -jnp.inf if jnp.issubdtype(image.dtype, jnp.floating) else jnp.iinfo(image.dtype).min
                best, where = jnp.where(inside, value, lowest), jnp.where(inside, index, -1)
                continue
            better = inside & ((value > best) | jnp.isnan(value) | (where < 0))
            best, where = jnp.where(better, value, best), jnp.where(better, index, where)
    assert best is not None and where is not None
    return best, where


@lowers(aten.max_pool2d_with_indices_backward.default)
def _max_pool_backward(
    gradient: jax.Array,
    image: jax.Array,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: jax.Array,
) -> jax.Array:
    planes = math.prod(image.shape[:-2])
    flat = jnp.zeros((planes, math.prod(image.shape[-2:])), gradient.dtype)
    rows = jnp.arange(planes)[:, None]
    flat = flat.at[rows, indices.reshape(planes, -1)].add(gradient.reshape(planes, -1))
    return flat.reshape(image.shape)


@lowers(aten.avg_pool2d_backward.default)
def _avg_pool_backward(gradient: jax.Array, image: jax.Array, *options: Any) -> jax.Array:
    pool = lowering_of(aten.avg_pool2d.default)
    assert pool is not None
    _, pull = jax.vjp(lambda image: pool(image, *options), image)
    return pull(gradient)[0]


def _adaptive_avg_pool(image: jax.Array, size: Sequence[int]) -> jax.Array:
    for axis, parts in zip((-2, -1), size):
        whole = image.shape[axis]
        starts = [part * whole // parts for part in range(parts)]
        ends = [-(-(part + 1) * whole // parts) for part in range(parts)]
        lengths = np.subtract(ends, starts)
        places = np.array(starts)[:, None] + np.arange(max(lengths))
        image = jnp.moveaxis(image, axis, -1)
        windows = jnp.where(places < np.array(ends)[:, None], image[..., places.clip(0, whole - 1)], 0)
        image = jnp.moveaxis(windows.sum(-1) / lengths.astype(image.dtype), -1, axis)
    return image


lowers(aten._adaptive_avg_pool2d.default)(_adaptive_avg_pool)


@lowers(aten._adaptive_avg_pool2d_backward.default)
def _adaptive_avg_pool_backward(gradient: jax.Array, image: jax.Array) -> jax.Array:
    _, pull = jax.vjp(lambda image: _adaptive_avg_pool(image, gradient.shape[-2:]), image)
    return pull(gradient)[0]


# Attention on the CPU: the gradients are JAX's, of the plain formula.


def _attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    causal: bool,
    mask: jax.Array | None,
    scale: float | None,
) -> tuple[jax.Array, jax.Array]:
    exact = jnp.promote_types(query.dtype, jnp.float32)
    query, key, value = (each.astype(exact) for each in (query, key, value))
    scores = query @ key.swapaxes(-1, -2) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if causal:
        below = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(below, scores, -jnp.inf)
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf) if mask.dtype == jnp.bool_ else scores + mask.astype(exact)
    total = jax.nn.logsumexp(scores, -1)
    # A row that is completely masked is zero.
    weights = jnp.where(jnp.isneginf(total)[..., None], 0, jnp.exp(scores - total[..., None]))
    return weights @ value, total


@lowers(aten._scaled_dot_product_flash_attention_for_cpu.default)
def _flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    attn_mask: jax.Array | None = None,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    result, total = _attention(query, key, value, causal, attn_mask, scale)
    return result.astype(query.dtype), total


@lowers(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def _flash_attention_backward(
    gradient: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    result: jax.Array,
    total: jax.Array,
    dropout: float,
    causal: bool,
    *,
    attn_mask: jax.Array | None = None,
    scale: float | None = None,
) -> tuple[jax.Array, ...]:
    def forward(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return _attention(query, key, value, causal, attn_mask, scale)[0].astype(query.dtype)

    _, pull = jax.vjp(forward, query, key, value)
    return pull(gradient)
