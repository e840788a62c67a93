"""What older PyTorch releases kept or took that the recorded one does not, put into the recorded program.

Each difference is one that a published figure shows: with it the projection of that run comes close, without
it the run is missed by what the difference takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

# Until 1.10 softmax and log_softmax kept their input for the backward pass, beside their result
# (pytorch#65242).
SOFTMAX_KEEPS_INPUT = (1, 11)
# Until 2.1 flash attention copied its operands to (batch, length, heads, size), its result's layout: where
# the result is wanted in another one, as by nn.MultiheadAttention, that is one more tensor a layer.
ATTENTION_PACKS = (2, 2)
# Before 2.1 the foreach form of Adam held the square roots and the same with epsilon, both of all parameters
# (pytorch#104780).
ADAM_TWO_LISTS = (2, 1)
# Until 1.13 zero_grad() filled gradients with zeros and kept them, unless told otherwise.
ZERO_GRAD_KEEPS = (2, 0)


def release(version: str) -> tuple[int, int]:
    """Major and minor; what is built before a release counts as the one before."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return (major, minor - 1) if "dev" in version else (major, minor)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, dim: int) -> Tensor:
        result = torch.softmax(x, dim)
        context.dim = dim
        context.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        x, result = context.saved_tensors
        return torch._softmax_backward_data(gradients[0], result, context.dim, x.dtype), None


def _softmax(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    if torch.is_autocast_enabled("cuda"):
        x = x.float()
    return _Softmax.apply(x, dim)


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        result = torch.log_softmax(x, 1)
        context.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        x, result = context.saved_tensors
        return torch._log_softmax_backward_data(gradients[0], result, 1, x.dtype)


def _cross_entropy(x: Tensor, target: Tensor, label_smoothing: float = 0.0, **options: Any) -> Tensor:
    assert not label_smoothing, "none of the programs smooths its labels"
    if torch.is_autocast_enabled("cuda"):
        x = x.float()
    return F.nll_loss(_LogSoftmax.apply(x), target, **options)


def _packing(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attention(query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> Tensor:
        if query.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled("cuda"):
            query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value))
        return attend(query, key, value, *arguments, **options)

    return attention


def _keeping(clear: Callable[..., None]) -> Callable[..., None]:
    def zero_grad(self: Any, set_to_none: bool = False) -> None:
        clear(self, set_to_none=set_to_none)

    return zero_grad


class _Adam(torch.optim.Optimizer):
    """The operators of the older foreach form in their order; values are not what counts here."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for weight in weights:
            if not self.state[weight]:
                self.state[weight] = {"mean": torch.zeros_like(weight), "square": torch.zeros_like(weight)}
        gradients = [weight.grad for weight in weights]
        means = [self.state[weight]["mean"] for weight in weights]
        squares = [self.state[weight]["square"] for weight in weights]
        torch._foreach_lerp_(means, gradients, 0.1)
        torch._foreach_mul_(squares, 0.999)
        torch._foreach_addcmul_(squares, gradients, gradients, 0.001)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, 0.5)
        denominators = torch._foreach_add(roots, 1e-8)
        torch._foreach_addcdiv_(weights, means, denominators, -1e-3)


@contextmanager
def of(version: str) -> Iterator[None]:
    """PyTorch as it was at that version, in what is known here."""
    with ExitStack() as stack:
        if release(version) < SOFTMAX_KEEPS_INPUT:
            stack.enter_context(mock.patch.object(F, "softmax", _softmax))
            stack.enter_context(mock.patch.object(F, "cross_entropy", _cross_entropy))
        if release(version) < ATTENTION_PACKS:
            packing = _packing(F.scaled_dot_product_attention)
            stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", packing))
        if release(version) < ZERO_GRAD_KEEPS:
            for kind in (torch.nn.Module, torch.optim.Optimizer):
                stack.enter_context(mock.patch.object(kind, "zero_grad", _keeping(kind.zero_grad)))
        if (2, 0) <= release(version) < ADAM_TWO_LISTS:
            stack.enter_context(mock.patch.object(torch.optim, "Adam", _Adam))
        yield
