"""Casts inside of elementwise CPU kernels: temporaries for operands and results of another dtype.

``TensorIteratorBase::compute_types`` (TensorIterator.cpp) creates them as temporaries, on the CPU alone: a
GPU's kernels convert each element when they load or store it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch

from ...graph.ir import Node, TensorMeta, Value
from .workspace_rule import Rule, exactly, on
from .workspace_size import NOTHING, Need

TABLE: dict[str, Rule] = {}

Number = bool | int | float | complex


def in_place_too(*names: str) -> tuple[str, ...]:
    return (*names, *(f"{name}_" for name in names))


_PROMOTING = in_place_too(
    "add", "sub", "mul", "remainder", "fmod", "pow", "floor_divide", "hypot", "nextafter", "gcd", "lcm",
    "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift",
    "igamma", "igammac", "clamp_max", "clamp_min",
)  # fmt: skip
_TO_FLOAT = in_place_too("div", "atan2", "copysign", "xlogy")
_COMPARING = in_place_too(
    "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor"
)  # fmt: skip
_UNARY_TO_FLOAT = in_place_too(
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "digamma", "erf", "erfc", "erfinv",
    "exp", "exp2", "expm1", "lgamma", "log", "log10", "log1p", "log2", "logit", "reciprocal", "rsqrt",
    "sigmoid", "sin", "sinc", "sinh", "sqrt", "tan", "tanh", "i0", "polygamma",
)  # fmt: skip
_SPECIAL = (
    "airy_ai", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "entr", "erfcx", "i0e", "i1", "i1e",
    "log_ndtr", "modified_bessel_i0", "modified_bessel_i1", "modified_bessel_k0", "modified_bessel_k1",
    "ndtri", "scaled_modified_bessel_k0", "scaled_modified_bessel_k1", "spherical_bessel_j0",
)  # fmt: skip


@on(TABLE, *_PROMOTING, "rsub", "maximum", "minimum", "fmin", "fmax", "logaddexp", "logaddexp2")
def _promoted(node: Node, threads: int) -> Need:
    """Casts of operands and result to the promoted dtype."""
    operands = node.args[:2]
    return NOTHING if _uniform(node, operands) else _casts(node, operands, common_dtype(operands))


@on(TABLE, *_TO_FLOAT, "special_zeta", "special_xlog1py")
def _promoted_to_float(node: Node, threads: int) -> Need:
    """The same, with integers cast to the default floating-point dtype."""
    operands = node.args[:2]
    if _uniform(node, operands):
        return NOTHING
    common = common_dtype(operands)
    if "rounding_mode" not in node.kwargs or node.kwargs["rounding_mode"] is None:
        common = _floating(common)
    return _casts(node, operands, common)


@on(TABLE, *_COMPARING)
def _compared(node: Node, threads: int) -> Need:
    """Casts of the operands to the promoted dtype; ``torch.bool`` results are stored without a cast."""
    operands = node.args[:2]
    metas = [item.meta for item in operands if isinstance(item, Value)]
    if len(metas) == 2 and metas[0].dtype == metas[1].dtype and node.outputs[0].meta.dtype == torch.bool:
        return NOTHING
    return _casts(node, operands, common_dtype(operands), mask=True)


@on(TABLE, "addcmul", "addcmul_", "addcdiv", "addcdiv_", "clamp", "clamp_")
def _of_three(node: Node, threads: int) -> Need:
    """Casts of three operands to their promoted dtype; bounds of ``clamp`` may be missing."""
    operands = [item for item in node.args[:3] if item is not None]
    operands += [node.kwargs[name] for name in ("min", "max") if node.kwargs.get(name) is not None]
    return NOTHING if _uniform(node, operands) else _casts(node, operands, common_dtype(operands))


@on(TABLE, *_UNARY_TO_FLOAT, *(f"special_{name}" for name in _SPECIAL))
def _integers_as_floats(node: Node, threads: int) -> Need:
    """Casts of integers, ``out`` included, to the default floating dtype (``build_unary_float_op``)."""
    operands = [item for item in node.args[:2] if isinstance(item, Value)][:1]
    dtype = operands[0].meta.dtype
    if dtype == node.outputs[0].meta.dtype:
        return NOTHING
    return _casts(node, operands, _floating(dtype))


@on(TABLE, "deg2rad", "deg2rad_", "rad2deg", "rad2deg_")
def _multiplied_by_a_constant(node: Node, threads: int) -> Need:
    """Casts of integers to the result's dtype (``at::mul`` in UnaryOps.cpp)."""
    return _casts(node, node.args[:1], _floating(node.args[0].meta.dtype))


@on(TABLE, "where")
def _chosen(node: Node, threads: int) -> Need:
    """Casts of both branches to one dtype (``where_self_out``, TensorCompare.cpp)."""
    return _casts(node, node.args[1:3], node.outputs[0].meta.dtype)


@on(TABLE, "cat", "stack")
def _joined(node: Node, threads: int) -> Need:
    """Casts of operands of another dtype, one at a time (``cat``, TensorShape.cpp)."""
    dtype = node.outputs[0].meta.dtype
    sizes = [_size(item.meta, item.meta.dtype) for item in node.args[0] if item.meta.dtype != dtype]
    return exactly(max(sizes, default=0))


def _uniform(node: Node, operands: Sequence[Any]) -> bool:
    """Whether operands and result share a floating-point or complex dtype, and no number is complex."""
    dtype = node.outputs[0].meta.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return False
    return all(
        item.meta.dtype == dtype if isinstance(item, Value) else not isinstance(item, complex)
        for item in operands
    )


def _floating(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.get_default_dtype()


def _casts(node: Node, operands: Sequence[Any], common: torch.dtype, *, mask: bool = False) -> Need:
    """Bytes of the copies in ``common`` of operands, and of the result, that have another dtype."""
    metas = [item.meta for item in operands if isinstance(item, Value)]
    result = node.outputs[0].meta
    if not (mask and result.dtype == torch.bool):
        metas.append(result)
    return exactly(cast_bytes(metas, common))


def cast_bytes(metas: Sequence[TensorMeta], common: torch.dtype) -> int:
    """Bytes of the copies in ``common`` of tensors that have another dtype."""
    return sum(_size(meta, common) for meta in metas if meta.dtype != common)


def _size(meta: TensorMeta, dtype: torch.dtype) -> int:
    return math.prod(meta.shape) * dtype.itemsize


def common_dtype(operands: Sequence[Any]) -> torch.dtype:
    """The dtype to which tensors and Python numbers are promoted.

    As ``torch.result_type`` (``at::native::result_type``, TypeProperties.cpp), which takes real tensors.
    """
    metas = [item.meta for item in operands if isinstance(item, Value)]
    numbers = [_dtype_of(type(item)) for item in operands if isinstance(item, Number)]
    return promoted_dtype([(meta.dtype, bool(meta.shape)) for meta in metas], numbers)


def promoted_dtype(
    tensors: Sequence[tuple[torch.dtype, bool]], numbers: Sequence[torch.dtype] = ()
) -> torch.dtype:
    """The dtype that PyTorch's type promotion gives for ``tensors``, each with its dtype and whether it has
    dimensions, and for Python ``numbers``, by their dtypes.

    Tensors without dimensions and numbers count only if their category (integer, floating, ...) is higher.
    """
    dimensioned = [dtype for dtype, has_dimensions in tensors if has_dimensions]
    others = [dtype for dtype, has_dimensions in tensors if not has_dimensions]
    common: torch.dtype | None = None
    for dtypes in (dimensioned, others, numbers):
        if dtypes:
            highest = reduce(torch.promote_types, dtypes)
            common = highest if common is None else _combined(common, highest)
    assert common is not None
    return common


def _dtype_of(number: type[Number]) -> torch.dtype:
    if number is bool:
        return torch.bool
    if number is int:
        return torch.int64
    default = torch.get_default_dtype()
    return default.to_complex() if number is complex else default


def _combined(common: torch.dtype, lower: torch.dtype) -> torch.dtype:
    """``combine_categories`` of TypeProperties.cpp."""
    if common.is_complex:
        return common
    if common.is_floating_point:
        return common.to_complex() if lower.is_complex else common
    if common == torch.bool or lower.is_floating_point or lower.is_complex:
        return torch.promote_types(common, lower)
    return common


@on(TABLE, "ldexp", "ldexp_")
def _scaled_by_powers(node: Node, threads: int) -> Need:
    """The powers of two, and the casts to compute and to multiply by them; integer exponents have a kernel
    without temporaries (BinaryOps.cpp).
    """
    operand, exponent, result = node.args[0].meta, node.args[1].meta, node.outputs[0].meta
    integers = not (exponent.dtype.is_floating_point or exponent.dtype.is_complex)
    if operand.dtype.is_floating_point and integers and exponent.dtype != torch.bool:
        return NOTHING
    dtype = common_dtype((2.0 + 0j if operand.dtype.is_complex else 2.0, node.args[1]))
    powers = _size(exponent, dtype)
    common = promoted_dtype(((operand.dtype, bool(operand.shape)), (dtype, bool(exponent.shape))))
    first = powers + (_size(exponent, dtype) if exponent.dtype != dtype else 0)
    then = (
        powers + (_size(exponent, common) if dtype != common else 0) + cast_bytes((operand, result), common)
    )
    return exactly(max(first - (0 if node.writes else result.nbytes), then))


def _of_lists(rule: Rule) -> Rule:
    """The rule of a ``_foreach_`` operator, which on the CPU calls the tensor operator for each item."""

    def of_lists(node: Node, threads: int) -> Need:
        results = node.args[0] if node.writes else node.outputs
        peak = made = 0
        for place in range(len(results)):
            args = tuple(item[place] if isinstance(item, (list, tuple)) else item for item in node.args)
            one = Node(node.index, node.op, args, node.kwargs)
            one.outputs = [results[place]]
            made += 0 if node.writes else results[place].nbytes
            peak = max(peak, made + rule(one, threads).nbytes)
        return exactly(max(peak - (0 if node.writes else made), 0))

    return of_lists


_LISTS: dict[Rule, tuple[str, ...]] = {
    _promoted: ("add", "sub", "mul", "maximum", "minimum", "pow", "clamp_max", "clamp_min"),
    _promoted_to_float: ("div",),
    _of_three: ("addcmul", "addcdiv"),
    _integers_as_floats: (
        "acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "exp", "expm1", "lgamma", "log", "log10",
        "log1p", "log2", "reciprocal", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh",
    ),
}  # fmt: skip
for _rule, _names in _LISTS.items():
    on(TABLE, *in_place_too(*(f"_foreach_{name}" for name in _names)))(_of_lists(_rule))
