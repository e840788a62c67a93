"""Bitwise equality, with the first difference as text."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten


def difference(expected: Any, actual: Any) -> str | None:
    """What differs between two nested structures of tensors and Python values, or None.

    Tensors are compared by class, dtype, shape, layout, strides, conjugate and negative
    bits, ``requires_grad`` and content: equal bits, any NaN equal to any other.
    """
    ours, shape_of_ours = tree_flatten(expected)
    theirs, shape_of_theirs = tree_flatten(actual)
    if shape_of_ours != shape_of_theirs:
        return f"structure {shape_of_theirs} instead of {shape_of_ours}"
    for position, (left, right) in enumerate(zip(ours, theirs)):
        found = _leaf_difference(left, right)
        if found is not None:
            return f"leaf {position}: {found}" if len(ours) > 1 else found
    return None


def metadata_difference(expected: torch.Tensor, actual: torch.Tensor) -> str | None:
    """What differs between two tensors apart from their content, or None."""
    facts = ["dtype", "shape", "layout", "device", "requires_grad", "is_quantized", "is_nested"]
    if type(actual) is not type(expected):
        return f"{type(actual).__name__} instead of {type(expected).__name__}"
    if expected.is_nested or actual.is_nested:
        facts.remove("shape")
    for fact in facts:
        left, right = getattr(expected, fact), getattr(actual, fact)
        if left != right:
            return f"{fact} {right} instead of {left}"
    if expected.layout == torch.strided and not expected.is_nested:
        if expected.stride() != actual.stride():
            return f"strides {actual.stride()} instead of {expected.stride()}"
        if (expected.is_conj(), expected.is_neg()) != (actual.is_conj(), actual.is_neg()):
            return "conjugate or negative bit"
    return None


def _leaf_difference(left: Any, right: Any) -> str | None:
    if not isinstance(left, torch.Tensor):
        if type(left) is not type(right):
            return f"{type(right).__name__} instead of {type(left).__name__}"
        same = left == right or (left != left and right != right)
        return None if same else f"{right!r} instead of {left!r}"
    if not isinstance(right, torch.Tensor):
        return f"{type(right).__name__} instead of a tensor"
    return metadata_difference(left, right) or content_difference(left, right)


def content_difference(left: torch.Tensor, right: torch.Tensor) -> str | None:
    """Where two tensors of equal metadata hold different bits, or None."""
    with torch.no_grad():
        if left.is_nested:
            pairs = list(zip(left.unbind(), right.unbind()))
            return next((found for pair in pairs if (found := content_difference(*pair))), None)
        if left.is_quantized:
            left, right = left.int_repr(), right.int_repr()
        elif left.layout != torch.strided:
            if left.dtype == torch.complex32:  # no kernel makes it dense
                left, right = left.to(torch.complex64), right.to(torch.complex64)
            left, right = left.to_dense(), right.to_dense()
        left, right = _as_reals(left), _as_reals(right)
        wrong = left != right
        if left.dtype.is_floating_point:
            wrong &= ~(left.isnan() & right.isnan())
            wrong |= (left == 0) & (right == 0) & (left.signbit() != right.signbit())
        count = int(wrong.sum())
        if not count:
            return None
        if not left.dtype.is_floating_point:
            return f"{count} of {left.numel()} elements"
        largest = (left.double() - right.double()).abs()[wrong].max().item()
        return f"{count} of {left.numel()} elements, by up to {largest:.3g}"


def _as_reals(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor)
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize < 4:
        tensor = tensor.float()
    return tensor
