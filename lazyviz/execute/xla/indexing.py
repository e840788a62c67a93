"""Indexing, scattering, and sorting in JAX; invalid indices are reported, not clamped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from .ops import Lowering, NoLowering, lowers

aten = torch.ops.aten


def _in_range(require: Lowering, index: jax.Array, size: int, negative: bool = False) -> jax.Array:
    """``index``, counted from the beginning, with the requirement that it is below ``size``."""
    require((index >= (-size if negative else 0)) & (index < size))
    return jnp.where(index < 0, index + size, index) if negative else index


@lowers(aten.embedding.default, checked=True)
def _embedding(
    require: Lowering,
    weight: jax.Array,
    index: jax.Array,
    padding: int = -1,
    by_frequency: bool = False,
    sparse: bool = False,
) -> jax.Array:
    return weight[_in_range(require, index, weight.shape[0])]


@lowers(aten.index_select.default, checked=True)
def _index_select(require: Lowering, x: jax.Array, dim: int, index: jax.Array) -> jax.Array:
    index = _in_range(require, jnp.atleast_1d(index), x.shape[dim] if x.ndim else 1)
    return jnp.take(x, index, dim) if x.ndim else x


def _places(
    require: Lowering, x: jax.Array, indices: Sequence[jax.Array | None]
) -> tuple[jax.Array | slice, ...]:
    places: list[jax.Array | slice] = []
    for dim, index in enumerate(indices):
        if index is None:
            places.append(slice(None))
        elif index.dtype in (jnp.bool_, jnp.uint8):
            raise NoLowering("with a mask has a result whose shape depends on values")
        else:
            places.append(_in_range(require, index, x.shape[dim], negative=True))
    return tuple(places)


@lowers(aten.index.Tensor, aten._unsafe_index.Tensor, checked=True)
def _index(require: Lowering, x: jax.Array, indices: Sequence[jax.Array | None]) -> jax.Array:
    return x[_places(require, x, indices)]


@lowers(aten.index_put.default, aten._unsafe_index_put.default, checked=True)
def _index_put(
    require: Lowering,
    x: jax.Array,
    indices: Sequence[jax.Array | None],
    values: jax.Array,
    accumulate: bool = False,
    unsafe: bool = False,
) -> jax.Array:
    mask = indices[0]
    if mask is not None and mask.dtype == jnp.bool_ and len(indices) == 1 and values.size == 1:
        mask = mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
        values = values.reshape(())
        return jnp.where(mask, x + values if accumulate else values, x)
    at = x.at[_places(require, x, indices)]
    return at.add(values) if accumulate else at.set(values)


def _along(x: jax.Array, dim: int, index: jax.Array) -> tuple[jax.Array, ...]:
    """The positions in ``x`` that ``index`` denotes in ``gather`` and ``scatter``."""
    places = list(jnp.indices(index.shape, sparse=True))
    places[dim] = index
    return tuple(places)


@lowers(aten.gather.default, checked=True)
def _gather(
    require: Lowering, x: jax.Array, dim: int, index: jax.Array, sparse_grad: bool = False
) -> jax.Array:
    if not x.ndim or not index.ndim:
        require((index == 0).all())
        return jnp.broadcast_to(x.reshape(()), index.shape)
    index = _in_range(require, index, x.shape[dim])
    return x[_along(x, dim, index)]


def _scattered(require: Lowering, x: jax.Array, dim: int, index: jax.Array) -> tuple[Any, tuple[slice, ...]]:
    x, index = (jnp.atleast_1d(x), jnp.atleast_1d(index))
    index = _in_range(require, index, x.shape[dim])
    return x.at[_along(x, dim, index)], tuple([slice(0, size) for size in index.shape])


@lowers(aten.scatter.src, checked=True)
def _scatter(require: Lowering, x: jax.Array, dim: int, index: jax.Array, source: jax.Array) -> jax.Array:
    at, part = _scattered(require, x, dim, index)
    return at.set(jnp.atleast_1d(source)[part]).reshape(x.shape) if index.size else x


@lowers(aten.scatter.value, checked=True)
def _scatter_value(require: Lowering, x: jax.Array, dim: int, index: jax.Array, value: Any) -> jax.Array:
    at, _ = _scattered(require, x, dim, index)
    return at.set(value).reshape(x.shape) if index.size else x


@lowers(aten.scatter_add.default, checked=True)
def _scatter_add(require: Lowering, x: jax.Array, dim: int, index: jax.Array, source: jax.Array) -> jax.Array:
    at, part = _scattered(require, x, dim, index)
    return at.add(jnp.atleast_1d(source)[part]).reshape(x.shape) if index.size else x


@lowers(aten.sort.stable)
def _sort(
    x: jax.Array, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[jax.Array, jax.Array]:
    """NaN is the largest; equal elements keep their order in both directions."""
    if not stable:
        raise NoLowering("does not define the order of equal elements")
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    if descending:
        last = x.shape[dim] - 1
        order = last - jnp.flip(jnp.argsort(jnp.flip(x, dim), dim, stable=True), dim)
    else:
        order = jnp.argsort(x, dim, stable=True)
    return jnp.take_along_axis(x, order, dim), order
