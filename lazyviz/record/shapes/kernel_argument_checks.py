"""Kernel argument checks: conditions that common kernels check and their shape rules omit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

MOST_CATEGORIES = 2**24  # the maximum that ``multinomial`` accepts
_OF_RANGES: tuple[torch.dtype | None, ...] = (
    None,
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
"""The dtypes for which ``arange`` and similar functions have kernels; ``None`` is the default."""


def _does_not_expand(arguments: dict[str, Any]) -> bool:
    """Whether the first operand of ``addmm`` does not expand to the shape of the product."""
    left = arguments["self"].shape
    right = (*arguments["mat1"].shape[:1], *arguments["mat2"].shape[1:])
    return len(left) > 2 or any(
        size not in (1, wanted) for size, wanted in zip(reversed(left), reversed(right))
    )


def _no_vectors(arguments: dict[str, Any]) -> bool:
    """Whether the per-channel arguments of a normalization are not vectors."""
    names = ("weight", "bias", "running_mean", "running_var")
    return any(arguments.get(name) is not None and arguments[name].dim() != 1 for name in names)


def _no_groups(arguments: dict[str, Any]) -> bool:
    """Whether the sizes passed to ``native_group_norm`` differ from those of its input."""
    source, channels = arguments["input"], arguments["C"]
    weights = [arguments[name] for name in ("weight", "bias") if arguments.get(name) is not None]
    return (
        source.numel() != arguments["N"] * channels * arguments["HxW"]
        or not (source.is_contiguous() or source.dim() in (4, 5))
        or any(weight.numel() != channels for weight in weights)
        or _no_vectors(arguments)
    )


def _no_groups_backward(arguments: dict[str, Any]) -> bool:
    """Whether the sizes differ from those of the input, or a gradient is requested for missing weights."""
    source, wanted = arguments["input"], arguments["output_mask"]
    size = arguments["N"] * arguments["C"] * arguments["HxW"]
    return source.numel() != size or (arguments.get("weight") is None and wanted != [wanted[0], False, False])


def _not_of_one_softmax(arguments: dict[str, Any]) -> bool:
    gradient = arguments["grad_output"]
    other_dtype = gradient.dtype != arguments["input_dtype"]  # GPUs have kernels for this
    return gradient.shape != arguments["output"].shape or (other_dtype and gradient.device.type == "cpu")


def _pads_too_much(arguments: dict[str, Any]) -> bool:
    """Whether a transposed convolution pads its output by at least its stride and dilation."""
    return arguments["transposed"] and any(
        padding >= step and padding >= apart
        for padding, step, apart in zip(
            arguments["output_padding"], arguments["stride"], arguments["dilation"]
        )
    )


def _no_mask(arguments: dict[str, Any]) -> bool:
    """Whether the mask is not boolean, or an integer dtype cannot hold the value."""
    value, dtype = arguments.get("value"), arguments["self"].dtype
    is_integral = not (dtype.is_floating_point or dtype.is_complex)
    too_large = is_integral and isinstance(value, (int, float)) and not -(2**63) <= value < 2**63
    return too_large or arguments["mask"].dtype != torch.bool


def _has_byte_mask(arguments: dict[str, Any]) -> bool:
    return any(index is not None and index.dtype == torch.uint8 for index in arguments["indices"])


def _no_index(arguments: dict[str, Any]) -> bool:
    return arguments["index"].dtype not in (torch.int32, torch.int64)


def _no_long_index(arguments: dict[str, Any]) -> bool:
    return arguments["index"].dtype != torch.int64


def _reaches_too_far(arguments: dict[str, Any]) -> bool:
    """Whether a view with these strides exceeds the tensor's memory; it may lie in its storage."""
    steps = zip(arguments["size"], arguments["stride"])
    last = (arguments.get("storage_offset") or 0) + sum((size - 1) * step for size, step in steps)
    return last >= arguments["self"].numel()


def _no_numbers(arguments: dict[str, Any]) -> bool:
    return arguments.get("dtype") not in _OF_RANGES


CHECK_MORE: dict[str, Callable[[dict[str, Any]], bool]] = {
    **dict.fromkeys(("addmm", "addmm_"), _does_not_expand),
    **dict.fromkeys(("arange", "linspace", "logspace", "range"), _no_numbers),
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"), _no_vectors
    ),
    "native_group_norm": _no_groups,
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _not_of_one_softmax),
    "native_group_norm_backward": _no_groups_backward,
    "multinomial": lambda arguments: arguments["self"].shape[-1:] > (MOST_CATEGORIES,),
    "convolution": _pads_too_much,
    **dict.fromkeys(("masked_fill", "masked_fill_"), _no_mask),
    **dict.fromkeys(
        ("masked_scatter", "masked_scatter_"),
        lambda arguments: arguments["mask"].dtype not in (torch.bool, torch.uint8),
    ),
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_"), _has_byte_mask),
    **dict.fromkeys(("index_fill", "index_fill_", "index_copy", "index_copy_"), _no_long_index),
    **dict.fromkeys(("index_add", "index_add_", "index_reduce", "index_reduce_"), _no_index),
    "index_select": _no_index,
    "bucketize": lambda arguments: arguments["boundaries"].dim() != 1,
    "as_strided_scatter": _reaches_too_far,
    "slice_scatter": lambda arguments: (
        arguments.get("step", 1) <= 0 or arguments["src"].dim() != arguments["self"].dim()
    ),
    # The gradient of a result that was computed in place with a negative number is unknown.
    "leaky_relu_backward": lambda arguments: arguments["self_is_result"] and arguments["negative_slope"] < 0,
    "elu_backward": lambda arguments: arguments["is_result"] and arguments["alpha"] < 0,
    "softshrink": lambda arguments: arguments.get("lambd", 0.5) < 0,
    "softshrink_": lambda arguments: arguments.get("lambd", 0.5) < 0,
}
"""For each operator, whether to call its kernel for a check; arguments by name, with tensors without
content.
"""
CHECKED_NUMBERS = {"leaky_relu_backward", "elu_backward", "softshrink", "softshrink_backward"}
"""Pointwise operators that do not accept every number."""
