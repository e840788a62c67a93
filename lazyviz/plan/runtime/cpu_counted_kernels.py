"""Kernels on a CPU whose time follows a number of elements instead of bytes: what is counted of an op.

They compute an element at a time, or evaluate long polynomials, so memory is not what they wait for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ...graph.ir import Node, Value
from .flop_count import arguments_of
from .op_classes import short_name

Counts = tuple[tuple[str, float], ...]
"""Names of timed kernels, and the elements of each."""

USUAL, RARE = 0.5, 0.1
"""The probabilities for which Bernoulli draws are timed. Their time follows how often a branch on the outcome
is predicted wrongly, which is proportional to the variance."""
SMALL, LARGE = 4, 9
"""The pixels of the windows for which max pooling is timed; its time per window is linear in them."""
MOST_PIXELS = 128
"""Height plus width of upsampled images up to which ATen uses another kernel."""

_BY_RESULT: Mapping[str, tuple[str, ...]] = {
    "exp": ("exp", "exp_", "expm1", "exp2"),
    "sigmoid": ("sigmoid", "sigmoid_"),
    "silu": ("silu", "silu_"),
    "silu_backward": ("silu_backward",),
    "erf": ("erf", "erf_", "erfc", "erfinv"),
    "elu": ("elu", "elu_", "selu", "selu_", "celu", "celu_"),
    "elu_backward": ("elu_backward",),
    "softplus": ("softplus", "log_sigmoid_forward", "logaddexp"),
    "mish": ("mish", "mish_", "mish_backward"),
    "sin": ("sin", "sin_", "cos", "cos_", "tan", "atan", "atan2"),
    "log": ("log", "log_", "log2", "log10", "log1p"),
    "pow": ("pow", "pow_"),
    "gt": ("gt", "lt", "ge", "le", "eq", "ne", "logical_and", "logical_or", "logical_not", "isnan"),
    "normal_": ("normal_", "randn", "randn_like", "normal"),
    "uniform_": ("uniform_", "rand", "rand_like", "random_", "randint", "randint_like"),
    "exponential_": ("exponential_", "geometric_", "log_normal_", "cauchy_"),
    "avg_pool2d": ("avg_pool1d", "avg_pool2d", "avg_pool3d", "avg_pool2d_backward", "avg_pool3d_backward"),
    "max_pool2d_with_indices_backward": tuple(
        f"{name}_backward" for name in ("max_pool2d_with_indices", "max_pool3d_with_indices")
    ),
    "upsample_bilinear2d": (
        "upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa", "grid_sampler_2d",
    ),
    "upsample_trilinear3d": ("upsample_trilinear3d",),
    "upsample_nearest2d": ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
    "upsample_bicubic2d": ("upsample_bicubic2d", "_upsample_bicubic2d_aa"),
    "index": ("index", "gather", "take"),
}  # fmt: skip
_BY_INPUT: Mapping[str, tuple[str, ...]] = {
    "_adaptive_avg_pool2d": ("_adaptive_avg_pool2d", "_adaptive_avg_pool3d"),
    "upsample_bilinear2d_backward": ("upsample_linear1d_backward", "upsample_bilinear2d_backward"),
    "upsample_nearest2d_backward": tuple(f"upsample_nearest{rank}d_backward" for rank in (1, 2, 3)),
    "max": ("max", "min", "argmax", "argmin", "cummax", "cummin"),
    "mse_loss": ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    "softplus": ("binary_cross_entropy_with_logits", "soft_margin_loss"),
    "var": ("var", "std", "var_mean", "std_mean"),
    "cumsum": ("cumsum", "cumprod", "logcumsumexp"),
}
_BY_INDEX: Mapping[str, tuple[str, ...]] = {
    "scatter_add": ("scatter", "scatter_", "scatter_add", "scatter_add_"),
    "scatter_reduce": ("scatter_reduce", "scatter_reduce_"),
}
_BY_SOURCE: Mapping[str, tuple[str, ...]] = {
    "index_put_": ("index_put", "index_put_", "_index_put_impl_"),
    "index_add": ("index_add", "index_add_", "index_copy", "index_copy_"),
}
_OF_POWERS = (2.0, 3.0, -1.0, -2.0)
"""Exponents for which ``pow`` multiplies instead: ``pow_tensor_scalar_optimized_kernel`` of ATen."""


def _elements(value: Value) -> int:
    return math.prod(value.shape)


def _of_result(node: Node) -> int:
    return _elements(node.outputs[0]) if node.outputs else 0


def _of_input(node: Node) -> int:
    return _elements(node.inputs[0]) if node.inputs else 0


def _of_index(node: Node) -> int:
    index = arguments_of(node).get("index")
    return _elements(index) if isinstance(index, Value) else 0


def _of_source(node: Node) -> int:
    named = arguments_of(node)
    source = named.get("source", named.get("values"))
    return _elements(source) if isinstance(source, Value) else 0


_Count = Callable[[Node], int]
_RULES: Mapping[str, tuple[str, _Count]] = {
    name: (kernel, count)
    for names, count in (
        (_BY_RESULT, _of_result),
        (_BY_INPUT, _of_input),
        (_BY_INDEX, _of_index),
        (_BY_SOURCE, _of_source),
    )
    for kernel, known in names.items()
    for name in known
}


def counted(node: Node) -> Counts:
    """The timed kernels whose time an op takes, with the elements of each; empty for other ops."""
    name = short_name(node.op)
    if not node.outputs:
        return ()
    if name in ("max_pool2d_with_indices", "max_pool3d_with_indices"):
        window = _product(arguments_of(node).get("kernel_size", 2), len(node.inputs[0].shape) - 2)
        return _between(
            f"max_pool {SMALL}", f"max_pool {LARGE}", (window - SMALL) / (LARGE - SMALL), _of_result(node)
        )
    if name in ("bernoulli_", "bernoulli", "native_dropout"):
        return _draws(node)
    if name == "gelu" and arguments_of(node).get("approximate") == "tanh":
        return (("gelu tanh", _of_result(node)),)
    if name == "gelu_backward" and arguments_of(node).get("approximate") == "tanh":
        return (("gelu_backward tanh", _of_result(node)),)
    if name == "pow" and arguments_of(node).get("exponent") in _OF_POWERS:
        return ()
    if name in ("sum", "mean", "amax", "amin", "linalg_vector_norm", "prod"):
        return (("rows", _rows(node)),)
    if name.startswith("upsample_nearest") and "backward" not in name and _is_large(node):
        return (("upsample_nearest2d large", _of_result(node)),)
    if name not in _RULES:
        return ()
    kernel, count = _RULES[name]
    return ((kernel, count(node)),)


def _between(low: str, high: str, part: float, count: int) -> Counts:
    """Linear interpolation, or extrapolation, between the times of two kernels."""
    return (low, (1 - part) * count), (high, part * count)


def _draws(node: Node) -> Counts:
    chance = arguments_of(node).get("p", USUAL)
    if not isinstance(chance, (int, float)) or not 0 <= chance <= 1:
        chance = USUAL  # a tensor
    usual, rare = USUAL * (1 - USUAL), RARE * (1 - RARE)
    part = (chance * (1 - chance) - rare) / (usual - rare)
    return _between(f"bernoulli_ {RARE}", f"bernoulli_ {USUAL}", part, _of_result(node))


def _rows(node: Node) -> int:
    """The results of a reduction over the innermost dimension, each of which is computed on its own."""
    if not node.inputs:
        return 0
    source, result = node.inputs[0], _of_result(node)
    given = arguments_of(node).get("dim")
    dims = {dim % max(len(source.shape), 1) for dim in _integers(given)}
    return result if dims and len(source.shape) - 1 in dims else 0


def _is_large(node: Node) -> bool:
    """Whether another kernel upsamples, as ``_use_vectorized_kernel_cond_2d`` of ATen has it."""
    return sum(node.outputs[0].shape[2:][-2:]) > MOST_PIXELS


def _integers(given: Any) -> Iterator[int]:
    if isinstance(given, int):
        yield given
    elif isinstance(given, (tuple, list)):
        yield from (each for each in given if isinstance(each, int))


def _product(sizes: Any, rank: int) -> int:
    given = tuple(_integers(sizes))
    return given[0] ** rank if len(given) == 1 else math.prod(given)
