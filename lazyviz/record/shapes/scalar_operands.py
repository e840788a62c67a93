"""Scalar operands: number arguments that a kernel may reject, independent of its tensors.

A kernel converts a number to the dtype that it computes in, and rejects numbers that do not fit, booleans in
subtractions, and complex numbers that would be written to real memory.  Shape rules accept any number, and
the key of the shape cache has only the types of numbers.  Therefore, the key also has their :func:`extent`,
and the kernel itself is called for the first call with a number that is :func:`unusual <are_unusual>`.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...torch_internals.private_api import OpOverload

_INTEGERS = [torch.iinfo(dtype).max for dtype in (torch.int8, torch.int16, torch.int32, torch.int64)]
_FLOATS = [torch.finfo(dtype).max for dtype in (torch.float16, torch.bfloat16, torch.float32)]
_LIMITS = sorted([*_INTEGERS, *[limit + 1 for limit in _INTEGERS], *[2 * n + 1 for n in _INTEGERS], *_FLOATS])
LARGEST_COMMON = 127  # fits every number dtype
_TAKE_NUMBERS = ("number", "Optional[number]", "List[number]", "Tensor", "List[Tensor]")


def extent(number: int | float | complex) -> int:
    """How many dtypes are too small for ``number``, as a negative count if it is negative; 0 if none is.

    Numbers of the same type and extent fit the same dtypes.  That of a complex number is positive: it
    combines those of its parts with whether real dtypes accept it, which they do if it has no imaginary part.
    """
    if isinstance(number, complex):
        parts = -extent(number.real) * 64 - extent(number.imag)
        return parts * 2 + (number.imag != 0)
    if number != number:
        return -len(_LIMITS) - 2
    if -LARGEST_COMMON <= number <= LARGEST_COMMON:
        return 0
    return -bisect_left(_LIMITS, abs(number)) - 1


def fits(number: Any, dtype: torch.dtype) -> bool:
    """Whether an ``int`` or ``float`` is certainly converted to ``dtype``."""
    if -LARGEST_COMMON <= number <= LARGEST_COMMON:
        return dtype != torch.bool
    if dtype.is_floating_point:
        return bool(abs(number) <= torch.finfo(dtype).max or not math.isfinite(number))
    if dtype == torch.bool or dtype.is_complex:
        return False
    limits = torch.iinfo(dtype)
    return bool(limits.min <= number <= limits.max)


@functools.cache
def _operands(op: OpOverload) -> tuple[str, ...]:
    """The arguments that may be scalar operands."""
    return tuple(argument.name for argument in op._schema.arguments if str(argument.type) in _TAKE_NUMBERS)


def _numbers(op: OpOverload, arguments: dict[str, Any]) -> Iterator[Any]:
    for name in _operands(op):
        item = arguments.get(name)
        for entry in item if isinstance(item, (list, tuple)) else (item,):
            if type(entry) in (int, float, bool, complex):
                yield entry


def are_unusual(op: OpOverload, arguments: dict[str, Any], values: Sequence[Any]) -> bool:
    """Whether a number among the operands is boolean, complex, or too large for a dtype of the call."""
    dtypes: list[torch.dtype] = []
    for number in _numbers(op, arguments):
        if type(number) in (bool, complex):
            return True
        if not dtypes:
            named = arguments.get("dtype")
            dtypes = [named] if named is not None else [value.meta.dtype for value in values]
            # For other types it is a mask.
            dtypes = [dtype for dtype in dtypes if dtype != torch.bool] or dtypes
            dtypes = dtypes or [torch.get_default_dtype() if type(number) is float else torch.int64]
        if not all(fits(number, dtype) for dtype in dtypes):
            return True
    return False


def ordinary(op: OpOverload, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """A call's arguments with 1 in place of each number among the operands."""
    names = _operands(op)
    positions = [argument.name for argument in op._schema.arguments]
    return (
        tuple([_ones(item) if name in names else item for name, item in zip(positions, args)]),
        {name: _ones(item) if name in names else item for name, item in kwargs.items()},
    )


def on_one_element(op: OpOverload, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """A call's arguments with 1 in place of each size of its result."""
    names = [argument.name for argument in op._schema.arguments]
    if "size" not in names:
        return args, kwargs
    at = names.index("size")
    if at < len(args):
        return (*args[:at], [1] * len(args[at]), *args[at + 1 :]), kwargs
    return args, {**kwargs, "size": [1] * len(kwargs["size"])}


def _ones(item: Any) -> Any:
    if isinstance(item, (list, tuple)):
        return type(item)([_ones(entry) for entry in item])
    return 1 if type(item) in (int, float, bool, complex) else item
