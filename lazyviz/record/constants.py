"""Small CPU values that follow from constants, carried beside the graph.

Adam's step counter, ``torch.tensor(1e-3)`` or ``arange(4)`` are known without running
anything of the user's; carrying them means that reading one (``step.item()``) is no
sync point.  The writes to real tensors still wait for evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import _torch
from .._torch import OpOverload
from .shapes import OpInfo
from .storage import TrackedNode, TrackedValue

LARGEST_NBYTES = 512  # of a value that is carried: a few scalars, not data


def known(values: Sequence[TrackedValue]) -> bool:
    """Whether the content of every value follows from constants."""
    for value in values:  # noqa: SIM110 - on the path of every op; a generator costs as much as the rest
        if value.constant is None or not value.storage.known:
            return False
    return True


# What decides the shape of a result that depends on data, where it is not every argument.
_DECIDING = {"index": "indices", "masked_select": "mask", "repeat_interleave": "repeats"}


def decide_shape(
    op: OpOverload,
    info: OpInfo,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    values: Sequence[TrackedValue],
) -> bool:
    """Whether what the shape of the op's result depends on follows from constants."""
    if op.namespace != "aten" or info.mutates or info.draws or info.is_view:
        return False
    deciding = values
    name = _DECIDING.get(info.name)
    if name in info.argument_names:
        position = info.argument_names.index(name)
        item = args[position] if position < len(args) else kwargs.get(name)
        items = item if isinstance(item, (list, tuple)) else [item]
        deciding = [entry for entry in items if isinstance(entry, TrackedValue)]
    return bool(deciding) and known(deciding)


def learn(value: TrackedValue, tensor: torch.Tensor) -> None:
    """Note what is known of an outside tensor: single numbers, and small ones of integers or truth values."""
    small = tensor.numel() == 1 or (not tensor.is_floating_point() and value.nbytes <= LARGEST_NBYTES)
    if small and tensor.device.type == "cpu" and not tensor.requires_grad and value.real is not None:
        value.storage.known = True
        value.constant = value.real.clone()


def compute(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op on what is known of its arguments."""
    with torch.no_grad(), _torch.kernels_only():
        return op(*_substitute(args), **_substitute(kwargs))


def carry(node: TrackedNode, result: Any) -> None:
    """Note ``result``, computed from constants, as what the node's outputs will hold."""
    results = [] if result is None else list(result) if isinstance(result, (list, tuple)) else [result]
    for value, constant in zip(node.outputs, [item for item in results if item is not None]):
        if value.constant is None:
            value.constant = constant
            value.storage.known = True


def _substitute(item: Any) -> Any:
    if isinstance(item, TrackedValue):
        return item.constant
    if isinstance(item, (list, tuple)):
        return type(item)([_substitute(entry) for entry in item])
    if isinstance(item, dict):
        return {name: _substitute(entry) for name, entry in item.items()}
    return item
