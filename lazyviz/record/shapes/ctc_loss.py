"""Shape rule of ``_ctc_loss`` and its backward, for which PyTorch has none.

It follows ``ctc_loss_allocate_outputs`` of ``ATen/native/LossCTC.cpp``; the results of the CUDA kernel have
the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

LENGTHS = ("input_lengths", "target_lengths")


def is_valid(arguments: Mapping[str, Any], *, moves_targets: bool = False) -> bool:
    """Whether the kernel accepts the call, whose lengths are lists. A call that it rejects must run to raise
    its error.

    ``arguments`` hold values or tensors, by the names in the operator's schema. ``moves_targets``: it is a
    call of ``torch.ctc_loss``, which moves targets from the CPU, where cuDNN takes them, to the scores.
    """
    scores, targets = arguments["log_probs"], arguments["targets"]
    if not all(isinstance(arguments[name], (list, tuple)) for name in LENGTHS):
        return False
    if len(scores.shape) != 3 or len(targets.shape) not in (1, 2):
        return False
    if scores.dtype not in (torch.float32, torch.float64) or targets.dtype not in (torch.int32, torch.int64):
        return False
    steps, batch, labels = scores.shape
    inputs, wanted = (arguments[name] for name in LENGTHS)
    longest = targets.shape[1] if len(targets.shape) == 2 else targets.shape[0]
    given = sum(wanted) if len(targets.shape) == 1 else max(wanted, default=0)
    return (
        (scores.device == targets.device or (moves_targets and targets.device.type == "cpu"))
        and 0 <= arguments.get("blank", 0) < labels
        and len(inputs) == len(wanted) == batch > 0
        and all(0 <= length <= steps for length in inputs)
        and all(0 <= length <= longest for length in wanted)
        and (given == longest if len(targets.shape) == 1 else given <= longest)
    )


def longest(
    name: str, scores: torch.Tensor, targets: Any, lengths: torch.Tensor
) -> tuple[list[int], str] | None:
    """Plausible lengths in place of unknown ones, and a text that says what was assumed; ``None`` if
    impossible.
    """
    count = lengths.numel()
    if not isinstance(targets, torch.Tensor) or not count or targets.dim() not in (1, 2):
        return None
    if name == LENGTHS[0]:
        return [scores.shape[0]] * count, "sequences of ctc_loss are as long as their padded length"
    if targets.dim() == 2:
        return [targets.shape[1]] * count, "targets of ctc_loss are as long as their padded length"
    least, rest = divmod(targets.shape[0], count)
    assumed = [least + (index < rest) for index in range(count)]
    return assumed, "concatenated targets of ctc_loss have equal lengths"


def results(arguments: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses, (batch,), and the forward variables, (batch, steps, 2 x the longest target + 1)."""
    scores: torch.Tensor = arguments["log_probs"]
    steps, batch, _ = scores.shape
    states = 2 * max(arguments["target_lengths"]) + 1
    return scores.new_empty([batch]), scores.new_empty([batch, steps, states])


def gradient(arguments: Mapping[str, Any]) -> torch.Tensor:
    """The gradient of the scores, contiguous regardless of their strides."""
    scores: torch.Tensor = arguments["log_probs"]
    return scores.new_empty(scores.shape)


def rule(name: str, arguments: Mapping[str, Any]) -> Callable[[dict[str, Any]], Any] | None:
    """The rule for the results of the operator ``name``; ``None`` if there is none here."""
    if name == "_ctc_loss" and is_valid(arguments):
        return results
    return gradient if name == "_ctc_loss_backward" else None
