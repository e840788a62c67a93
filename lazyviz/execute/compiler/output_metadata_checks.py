"""Checks of compiled outputs: a backend's results are compared with the recorded metadata."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...graph.ir import Value


class WrongResults(ValueError):
    """A backend's results differ from the recorded number, shape, dtype, device or strides."""


def refuse_other_metadata(outputs: Sequence[Value], results: Sequence[torch.Tensor]) -> None:
    """Raise an error if results differ from what was recorded.

    Raises:
        WrongResults: the message names the op, its line, and what was recorded.
    """
    if len(results) != len(outputs):
        raise WrongResults(
            f"the backend returned {len(results)} tensors for a segment with {len(outputs)} outputs"
        )
    for value, tensor in zip(outputs, results):
        meta = value.meta
        if not isinstance(tensor, torch.Tensor):
            raise WrongResults(f"the backend returned {type(tensor).__name__} for {_named(value)}")
        if tensor.shape != meta.shape or tensor.dtype != meta.dtype or tensor.device != meta.device:
            kind = f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} {tensor.device}"
            raise WrongResults(f"the backend returned {kind} for {_named(value)}, recorded as {meta}")
        if tensor.layout == torch.strided and tensor.stride() != meta.stride:
            raise WrongResults(
                f"the backend returned strides {list(tensor.stride())} for {_named(value)}, "
                f"recorded as {list(meta.stride)}"
            )


def _named(value: Value) -> str:
    node = value.node
    if node is None:
        return "an input"
    name = "the result" if len(node.outputs) == 1 else f"result {value.index}"
    return f"{name} of {node.name}" + (f" at {node.source}" if node.source is not None else "")
