"""Shapes of elementwise and factory kernels on the CPU, from metadata alone.

PyTorch's own shape rules are mostly Python references, each call of which takes up to ten milliseconds: most
of the cost of recording a program for the first time.  A rule here covers one kind of operator, for calls
whose result is certain: dense, non-empty tensors, dtypes that the kernel supports, shapes that match.  For
any other call it returns ``None``, and PyTorch's rule is called, which also raises all errors.  Results of
the rules are compared with PyTorch's (``tests/conformance/test_fast_shape_rules.py``) and with those of the
kernels (``tests/conformance/test_metadata.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...graph.ir import works_by_element
from ...torch_internals.private_api import OpOverload
from . import convolution_and_layer_shapes, foreach
from .kernel_probes import sharing
from .pointwise_result_strides import output_stride
from .shape_rule_call import (
    COMMON,
    FLOATS,
    INTEGERS,
    Call,
    Made,
    New,
    Rule,
    are_sizes,
    broadcast,
    new,
    one_dtype,
)

_CPU = torch.device("cpu")


def made(call: Call) -> Made:
    """The results of a call that writes nothing; ``None`` if PyTorch's own rule is needed."""
    rule = _RULES.get(call.name)
    if rule is None:
        if not (call.name in _FLOAT_TO_FLOAT or call.name in _TO_BOOL) or not works_by_element(call.op):
            return None
        rule = _by_element
    if not _are_common(call.inputs) or not (
        call.inputs or rule in (_filled, _drawn, _counted, _range, _scalar)
    ):
        return None
    arguments = call.arguments
    if arguments.get("device") not in (None, _CPU) or arguments.get("pin_memory"):
        return None
    if arguments.get("layout") not in (None, torch.strided):
        return None
    try:
        return rule(call)
    except (LookupError, TypeError, AttributeError):
        return None  # unexpected arguments: a default, or one that PyTorch will reject


def writes_its_first(call: Call) -> bool:
    """Whether the call writes and returns its first argument, and certainly changes no metadata."""
    base = call.name.removesuffix("_")
    check = _WRITES.get(call.name)
    if check is None and (base not in _FLOAT_TO_FLOAT or not works_by_element(call.op)):
        return False
    values = call.inputs
    if not _are_common(values):
        return False
    target = values[0].meta
    if not target.dense or any(
        first == 0 and value.meta is not target for value, first in zip(values[1:], sharing(values)[1:])
    ):
        return False  # the kernel may reject writes to memory that overlaps itself, or an input in part
    try:
        if check is not None:
            return check(call)
        found = _by_element(call)
    except (LookupError, TypeError, AttributeError):
        return False  # as in `made`: for example, a number in place of a tensor
    return found is not None and found[0] is not None and found[0].shape == target.shape


def _are_common(values: Sequence[Any]) -> bool:
    """Whether all tensors are on the CPU, have elements, and have no conjugate or negative bit."""
    for value in values:
        meta = value.meta
        if meta.device != _CPU or meta.flags or not meta.nbytes:
            return False
    return True


# --- pointwise operators --------------------------------------------------------------

# For tensors of one floating dtype, their result has that dtype.
_FLOAT_TO_FLOAT = {
    "add", "sub", "mul", "div", "neg", "abs", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt",
    "rsqrt", "reciprocal", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "sigmoid",
    "erf", "erfc", "floor", "ceil", "trunc", "sign", "relu", "gelu", "gelu_backward", "silu", "silu_backward",
    "mish", "tanh_backward", "sigmoid_backward", "threshold_backward", "pow", "maximum", "minimum", "lerp",
    "addcmul", "addcdiv", "where", "atan2", "clamp_min", "clamp_max", "sgn", "leaky_relu", "elu", "softplus",
    "hardsigmoid", "hardswish",
}  # fmt: skip
_TO_BOOL = {"eq", "ne", "lt", "le", "gt", "ge"}
_OF_INTEGERS = {"add", "sub", "mul", *_TO_BOOL}


@functools.cache
def _tensor_arguments(op: OpOverload) -> frozenset[str]:
    """Arguments that are tensors by the schema, but may be numbers."""
    return frozenset(argument.name for argument in op._schema.arguments if str(argument.type) == "Tensor")


def _by_element(call: Call) -> Made:
    arguments, base = call.arguments, call.name.removesuffix("_")
    metas = [value.meta for value in call.inputs]
    of_one_dtype = metas[1:] if base == "where" else metas
    if base == "where" and (len(metas) != 3 or metas[0].dtype != torch.bool):
        return None
    dtype = one_dtype(of_one_dtype, (*FLOATS, *INTEGERS) if base in _OF_INTEGERS else FLOATS)
    if dtype is None or (base == "pow" and "self" in arguments and type(arguments["self"]) in (int, float)):
        return None
    number = call.op._overloadname.startswith("Scalar") and base != "lerp"  # its weight is not an operand
    for name, item in arguments.items():
        if type(item) is int or (type(item) is float and dtype in FLOATS):
            number = number or name in _tensor_arguments(call.op)
        elif type(item) is str:
            if not (base.startswith("gelu") and item in ("none", "tanh")):
                return None
        elif item is not None and not hasattr(item, "meta"):
            return None
    if base == "threshold_backward":
        metas = [call.meta("self"), call.meta("grad_output")]
    shape = broadcast([meta.shape for meta in metas])
    if shape is None:
        return None
    operands: list[Any] = [(meta.shape, meta.stride) for meta in metas]
    if number:
        operands.append(((), ()))
    return [New(shape, output_stride(shape, operands), torch.bool if base in _TO_BOOL else dtype)]


# --- operators that only write --------------------------------------------------------


def _fills(call: Call) -> bool:
    """Whether the call fills a floating-point tensor with a number: every number fits its dtype."""
    value = call.arguments.get("value", 0.0)
    return call.inputs[0].meta.dtype in FLOATS and type(value) in (int, float) and len(call.inputs) == 1


def _draws(call: Call) -> bool:
    arguments = call.arguments
    if call.inputs[0].meta.dtype not in FLOATS or len(call.inputs) != 1:
        return False
    if call.name == "bernoulli_":
        return 0 <= arguments.get("p", 0.5) <= 1
    if call.name == "normal_":
        return bool(arguments.get("std", 1.0) >= 0)
    low, high = arguments.get("from", 0.0), arguments.get("to", 1.0)
    return -1e30 < low <= high < 1e30


def _copies(call: Call) -> bool:
    if type(call.arguments["src"]) in (int, float):  # Python functions treat these as tensors
        return call.inputs[0].meta.dtype in FLOATS
    target, source = call.meta("self"), call.meta("src")
    return (
        one_dtype([target, source], COMMON) is not None
        and broadcast([target.shape, source.shape]) == target.shape
    )


def _clamps(call: Call) -> bool:
    return _hardtanh(call) is not None


_WRITES: dict[str, Callable[[Call], bool]] = {
    "hardtanh_": _clamps,
    "fill_": _fills,
    "zero_": _fills,
    "bernoulli_": _draws,
    "normal_": _draws,
    "uniform_": _draws,
    "copy_": _copies,
}


# --- new tensors ----------------------------------------------------------------------


def like(call: Call) -> Made:
    """``empty_like`` and similar functions of a dense tensor."""
    arguments, source = call.arguments, call.meta("self")
    wanted = arguments.get("memory_format")
    if len(call.inputs) != 1 or (call.name == "clone" and arguments.get("dtype") is not None):
        return None
    value = arguments.get("fill_value", 0)
    dtype = arguments.get("dtype") or source.dtype
    if source.dtype not in COMMON:
        return None
    if type(value) not in (int, float) or dtype not in COMMON:
        return None
    if call.name == "full_like" and dtype not in FLOATS:
        return None
    if wanted is torch.contiguous_format:
        return [new(source.shape, dtype)]
    if wanted not in (None, torch.preserve_format) or not source.dense:
        return None
    return [New(source.shape, source.stride, dtype)]


def _hardtanh(call: Call) -> Made:
    """The result has the metadata of its operand."""
    low, high = call.arguments.get("min_val", -1), call.arguments.get("max_val", 1)
    return like(call) if call.meta("self").dtype in FLOATS and low <= high else None


def _range(call: Call) -> Made:
    """``arange`` of integers."""
    arguments = call.arguments
    start, end, step = arguments.get("start", 0), arguments["end"], arguments.get("step", 1)
    dtype = arguments.get("dtype") or torch.int64
    if not type(start) is type(end) is type(step) is int or step < 1 or end < start or call.inputs:
        return None
    return [new((-((start - end) // step),), dtype)] if dtype in (*FLOATS, *INTEGERS) else None


def _scalar(call: Call) -> Made:
    dtype = call.arguments.get("dtype") or torch.get_default_dtype()
    fits = type(call.arguments["s"]) in (int, float) and dtype in FLOATS
    return [new((), dtype)] if fits and not call.inputs else None


def _filled(call: Call) -> Made:
    """``zeros(2, 3)`` and similar functions."""
    arguments = call.arguments
    value = arguments.get("fill_value", 0.0)
    dtype = arguments.get("dtype")
    if dtype is None:
        dtype = call.inputs[0].meta.dtype if call.inputs else torch.get_default_dtype()
        if type(value) is not float and not call.inputs and call.name == "full":
            return None
    if dtype not in COMMON or not are_sizes(arguments["size"], 0):
        return None
    if type(value) not in (int, float) or ("fill_value" in arguments and dtype not in FLOATS):
        return None
    if arguments.get("memory_format") not in (None, torch.contiguous_format) or arguments.get("names"):
        return None
    return [new(arguments["size"], dtype)]


def _drawn(call: Call) -> Made:
    """``randn(2, 3)``, ``rand``, and ``randint`` with bounds that fit the dtype."""
    arguments = call.arguments
    dtype = arguments.get("dtype")
    if call.inputs or arguments.get("names") or not are_sizes(arguments["size"], 0):
        return None
    if call.name == "randint":
        low, high = arguments.get("low", 0), arguments["high"]
        dtype = dtype or torch.int64
        if not type(low) is type(high) is int or dtype not in INTEGERS or not -(2**31) <= low < high < 2**31:
            return None
        return [new(arguments["size"], dtype)]
    dtype = dtype or torch.get_default_dtype()
    return [new(arguments["size"], dtype)] if dtype in FLOATS else None


def _drawn_like(call: Call) -> Made:
    """``rand_like`` and ``randn_like``."""
    dtype = call.arguments.get("dtype") or call.meta("self").dtype
    return like(call) if dtype in FLOATS and call.meta("self").dtype in FLOATS else None


def _counted(call: Call) -> Made:
    """``randperm(4)``, ``eye(2, 3)``, and ``linspace(0, 1, 5)``."""
    arguments, name = call.arguments, call.name
    dtype = arguments.get("dtype") or (torch.int64 if name == "randperm" else torch.get_default_dtype())
    if call.inputs or dtype not in ((torch.int64,) if name == "randperm" else FLOATS):
        return None
    if name == "linspace":
        ends = arguments["start"], arguments["end"]
        shape: tuple[Any, ...] = (arguments["steps"],)
        if any(type(end) not in (int, float) for end in ends):
            return None
    elif name == "eye":
        shape = arguments["n"], arguments.get("m", arguments["n"])
    else:
        shape = (arguments["n"],)
    return [new(shape, dtype)] if are_sizes(shape, 1) else None


_RULES: dict[str, Rule] = {
    **dict.fromkeys(("empty_like", "zeros_like", "ones_like", "full_like", "clone"), like),
    "_to_copy": like,
    "hardtanh": _hardtanh,
    "hardtanh_backward": _by_element,
    "arange": _range,
    **dict.fromkeys(("rand", "randn", "randint"), _drawn),
    **dict.fromkeys(("rand_like", "randn_like"), _drawn_like),
    **dict.fromkeys(("randperm", "eye", "linspace"), _counted),
    "scalar_tensor": _scalar,
    **dict.fromkeys(foreach.MAKE, foreach.made),
    **dict.fromkeys(("empty", "zeros", "ones", "full"), _filled),
    **dict.fromkeys(("new_empty", "new_zeros", "new_ones", "new_full"), _filled),
    **convolution_and_layer_shapes.RULES,
}
