"""ATen operators in JAX: torchax's lowerings where they agree with eager PyTorch, otherwise lazyviz's own.

``TAKEN`` lists the operators of torchax's table that agree with eager mode, as tested by
``tests/execute/xla/test_xla_ops.py``.  Operators that differ, that torchax does not have, or whose kernels
raise errors about values (an index out of range, a division by zero) are implemented here, in
:mod:`lazyviz.execute.xla.indexing`, and in :mod:`lazyviz.execute.xla.layers`.  Operators in neither table are
not compiled.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from ...graph.ir import Node
from ...torch_internals import torchax_lowerings

aten = torch.ops.aten
Lowering = Callable[..., Any]

DTYPES: dict[torch.dtype, Any] = {
    torch.bool: jnp.bool_,
    torch.uint8: jnp.uint8,
    torch.int8: jnp.int8,
    torch.int16: jnp.int16,
    torch.int32: jnp.int32,
    torch.int64: jnp.int64,
    torch.float16: jnp.float16,
    torch.bfloat16: jnp.bfloat16,
    torch.float32: jnp.float32,
    torch.float64: jnp.float64,
    torch.complex64: jnp.complex64,
    torch.complex128: jnp.complex128,
}
"""Element types that are the same in both."""

OWN: dict[Any, Lowering] = {}
CHECKED: set[Any] = set()
"""Those of ``OWN`` whose first argument is a function that registers conditions on values."""


class NoLowering(ValueError):
    """There is no lowering of this operator for these arguments."""


def lowers(*ops: Any, checked: bool = False) -> Callable[[Lowering], Lowering]:
    """Registers a lowering; it is called like the operator, with arrays and element types of JAX."""

    def register(function: Lowering) -> Lowering:
        for op in ops:
            OWN[op] = function
            if checked:
                CHECKED.add(op)
        return function

    return register


def _overloads(names: str) -> frozenset[Any]:
    found = []
    for name in names.split():
        packet, _, overloads = name.partition(".")
        found += [getattr(getattr(aten, packet), each) for each in (overloads or "default").split("|")]
    return frozenset(found)


TAKEN = _overloads("""
    abs acos acosh asin asinh atan atanh ceil cos cosh erf erfc erfinv exp exp2 expm1 floor
    isinf isnan lgamma log log10 log1p log2 neg reciprocal relu round rsqrt sigmoid signbit sin sinh sqrt
    tan tanh trunc
    logical_not logical_and logical_or logical_xor bitwise_not
    bitwise_and.Tensor|Scalar bitwise_or.Tensor|Scalar bitwise_xor.Tensor|Scalar
    add.Tensor|Scalar sub.Tensor|Scalar mul.Tensor|Scalar div.Tensor|Scalar
    eq.Tensor|Scalar ne.Tensor|Scalar lt.Tensor|Scalar le.Tensor|Scalar gt.Tensor|Scalar ge.Tensor|Scalar
    maximum minimum fmax fmin atan2 hypot copysign.Tensor where.self clamp.default|Tensor
    sum.dim_IntList mean.default|dim amax amin argmax argmin any.default|dim|dims prod.default|dim_int
    max.default|dim min.default|dim cumsum cumprod logcumsumexp mm bmm avg_pool2d
    view permute expand squeeze.dims unsqueeze slice.Tensor select.int split_with_sizes cat flip repeat
    diagonal constant_pad_nd as_strided as_strided_scatter slice_scatter select_scatter diagonal_scatter
    view_as_complex view_as_real real imag
""")
"""Operators whose lowering is torchax's."""


@functools.cache
def lowering_of(op: Any) -> Lowering | None:
    """The function for an operator, or None."""
    if op in OWN:
        return OWN[op]
    if op not in TAKEN:
        return None
    table = torchax_lowerings.lowerings()
    packet = op.overloadpacket
    return table.get(op) or table.get(packet) or table.get(getattr(packet, "default", None))


def draws(node: Node) -> bool:
    """Whether running ``node`` uses a generator: attention without dropout does not."""
    if node.op is aten._scaled_dot_product_flash_attention_for_cpu.default:
        return bool(node.kwargs.get("dropout_p") or any(node.args[3:4]))
    return torch.Tag.nondeterministic_seeded in node.op.tags


def convert(array: jax.Array, dtype: Any) -> jax.Array:
    """``array`` in another element type, as PyTorch's kernels convert."""
    if array.dtype == dtype:
        return array
    if jnp.issubdtype(array.dtype, jnp.complexfloating) and not jnp.issubdtype(dtype, jnp.complexfloating):
        array = array.real
    narrow = jnp.issubdtype(dtype, jnp.integer) and jnp.dtype(dtype).itemsize < 4
    if narrow and jnp.issubdtype(array.dtype, jnp.floating):
        array = array.astype(jnp.int64)  # wraps around, where XLA's conversion saturates
    return array.astype(dtype)


# Creating tensors.


@lowers(aten.full.default)
def _full(size: Sequence[int], value: Any, *, dtype: Any = None) -> jax.Array:
    return jnp.full(tuple(size), value, dtype)


@lowers(aten.full_like.default)
def _full_like(x: jax.Array, value: Any, *, dtype: Any = None) -> jax.Array:
    return jnp.full(x.shape, value, dtype or x.dtype)


@lowers(aten.scalar_tensor.default)
def _scalar_tensor(value: Any, *, dtype: Any = None) -> jax.Array:
    return jnp.asarray(value, dtype)


@lowers(aten.empty.memory_format)
def _empty(size: Sequence[int], *, dtype: Any = None) -> jax.Array:
    return jnp.zeros(tuple(size), dtype)


@lowers(aten.empty_strided.default, aten.empty_permuted.default)
def _empty_strided(size: Sequence[int], order: Sequence[int], *, dtype: Any = None) -> jax.Array:
    return jnp.zeros(tuple(size), dtype)


@lowers(aten.arange.start_step)
def _arange(start: Any, end: Any, step: Any = 1, *, dtype: Any = None) -> jax.Array:
    if isinstance(start, int) and isinstance(end, int) and isinstance(step, int):
        return jnp.arange(start, end, step, dtype)
    count = max(0, math.ceil((end - start) / step))
    return start + step * jnp.arange(count).astype(dtype)


# Tensors as they are.


@lowers(aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh.default)
def _same(x: jax.Array) -> jax.Array:
    return x


@lowers(aten._to_copy.default)
def _to_copy(x: jax.Array, *, dtype: Any = None) -> jax.Array:
    return x if dtype is None else convert(x, dtype)


@lowers(aten.copy.default)
def _copy(x: jax.Array, source: jax.Array) -> jax.Array:
    return jnp.broadcast_to(convert(source, x.dtype), x.shape)


@lowers(aten.sign.default)
def _sign(x: jax.Array) -> jax.Array:
    return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)  # zero for NaN


@lowers(
    aten.__lshift__.Scalar,
    aten.__lshift__.Tensor,
    aten.bitwise_left_shift.Tensor,
    aten.bitwise_left_shift.Tensor_Scalar,
)
def _left_shift(x: jax.Array, y: Any) -> jax.Array:
    return jnp.left_shift(x, y)


@lowers(
    aten.__rshift__.Scalar,
    aten.__rshift__.Tensor,
    aten.bitwise_right_shift.Tensor,
    aten.bitwise_right_shift.Tensor_Scalar,
)
def _right_shift(x: jax.Array, y: Any) -> jax.Array:
    return jnp.right_shift(x, y)


# Divisions: an integer division by zero is an error in PyTorch.


def _divisor(require: Lowering, x: Any, y: Any) -> Any:
    if jnp.issubdtype(jnp.result_type(x, y), jnp.integer):
        require(jnp.asarray(y) != 0)
    return y


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode, checked=True)
def _div(require: Lowering, x: jax.Array, y: Any, *, rounding_mode: str | None) -> jax.Array:
    if rounding_mode == "floor":
        return jnp.floor_divide(x, _divisor(require, x, y))
    if rounding_mode == "trunc":
        if jnp.issubdtype(jnp.result_type(x, y), jnp.integer):
            return jax.lax.div(*jnp.broadcast_arrays(x, _divisor(require, x, jnp.asarray(y, x.dtype))))
        # XLA multiplies by the reciprocal of values that it knows to be broadcast, which is less exact.
        every = jnp.broadcast_to(y, jnp.broadcast_shapes(x.shape, jnp.shape(y)))
        return jnp.trunc(x / jax.lax.optimization_barrier(every))
    return x / y


@lowers(aten.remainder.Tensor, aten.remainder.Scalar, checked=True)
def _remainder(require: Lowering, x: jax.Array, y: Any) -> jax.Array:
    return jnp.remainder(x, _divisor(require, x, y))


@lowers(aten.fmod.Tensor, aten.fmod.Scalar, checked=True)
def _fmod(require: Lowering, x: jax.Array, y: Any) -> jax.Array:
    return jnp.fmod(x, _divisor(require, x, y))


@lowers(aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar, checked=True)
def _pow(require: Lowering, x: Any, y: Any) -> jax.Array:
    if jnp.issubdtype(jnp.result_type(x, y), jnp.integer):
        require(jnp.asarray(y) >= 0)
        return jax.lax.integer_pow(x, y) if isinstance(y, int) and y >= 0 else jnp.power(x, jnp.maximum(y, 0))
    return jnp.power(x, y)


# Sums, norms, matrix products.


@lowers(aten.addmm.default, aten.baddbmm.default, aten.addmv.default)
def _addmm(bias: jax.Array, a: jax.Array, b: jax.Array, *, beta: Any = 1, alpha: Any = 1) -> jax.Array:
    if jnp.issubdtype(bias.dtype, jnp.integer) and not (isinstance(beta, int) and isinstance(alpha, int)):
        raise NoLowering("scales integers by a number that is not an integer")
    product = a @ b if isinstance(alpha, int) and alpha == 1 else alpha * (a @ b)
    if isinstance(beta, int | float) and beta == 0:  # the operand is ignored then, even if it has NaN
        return jnp.broadcast_to(product, jnp.broadcast_shapes(bias.shape, product.shape))
    return (bias if isinstance(beta, int) and beta == 1 else beta * bias) + product


@lowers(aten.var_mean.correction)
def _var_mean(
    x: jax.Array, dims: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    exact = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    axes = tuple(axis % max(x.ndim, 1) for axis in dims or range(x.ndim)) if x.ndim else ()
    mean = exact.mean(axes, keepdims=True)
    left = math.prod(x.shape[axis] for axis in axes) - (1 if correction is None else correction)
    variance = (jnp.abs(exact - mean) ** 2).sum(axes, keepdims=keepdim) / max(0, left)
    return variance, mean if keepdim else mean.squeeze(axes)


@lowers(aten.var.correction)
def _var(x: jax.Array, dims: Sequence[int] | None = None, **options: Any) -> jax.Array:
    return _var_mean(x, dims, **options)[0]


SCALARS: dict[Any, Lowering] = {
    operator.add: operator.add,
    operator.sub: operator.sub,
    operator.mul: operator.mul,
    operator.truediv: operator.truediv,
    operator.neg: operator.neg,
    operator.pow: operator.pow,
    operator.getitem: operator.getitem,
}
"""Python's operators between numbers that are inputs of a program."""


DECOMPOSED = [
    aten.native_layer_norm,
    aten.native_group_norm,
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten._native_batch_norm_legit_no_training,
    aten._softmax,
    aten._log_softmax,
    aten.gelu,
    aten.silu,
    aten.elu,
    aten.hardtanh,
    aten.leaky_relu,
    aten.linalg_vector_norm,
    aten.upsample_bilinear2d,
    aten.upsample_nearest2d,
    aten.grid_sampler_2d,
    aten.dist,
    aten.unfold,
    aten.tril_indices,
    aten.triu_indices,
]
"""Operators decomposed by PyTorch in addition to its core decompositions."""


def _foreach(name: str) -> Lowering:
    """One operator for every tensor of a list."""
    single = aten.linalg_vector_norm if name == "norm" else getattr(aten, name)

    def every(*args: Any, **kwargs: Any) -> list[Any]:
        count = len(args[0])
        rows = [item if isinstance(item, (list, tuple)) else [item] * count for item in args]
        return [single(*row, **kwargs) for row in zip(*rows)]

    return every


_FOREACH = (
    *("add", "sub", "mul", "div", "addcmul", "addcdiv", "lerp", "pow", "maximum", "minimum", "clamp_min"),
    *("clamp_max", "sqrt", "rsqrt", "neg", "abs", "reciprocal", "exp", "log", "sign", "zero", "norm"),
)
FOREACH = {
    getattr(packet, overload): _foreach(name)
    for name in _FOREACH
    for packet in [getattr(aten, f"_foreach_{name}")]
    for overload in packet.overloads()
    if not overload.endswith("out")
}
