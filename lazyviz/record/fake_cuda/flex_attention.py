"""Flex attention on an absent GPU: gradients without tracing the user's function.

PyTorch traces ``score_mod`` on fake tensors of the device, whose gradients need a CUDA driver.  The trace
would compute the derivative of the function, which ``torch.func.vjp`` computes here at the call.  Dynamo
turns tensors that the function captures into arguments.  It is not used in a plan, so they become arguments
here, which gives them gradients.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch

from ...torch_internals.dynamo import FLEX_CALLED, FLEX_FUNCTION, FLEX_OPERATOR
from ..interception import unpatched_imports
from .fake_gpus_protocol import Gpus


def install(gpus: Gpus) -> None:
    def patch_operator(module: ModuleType) -> None:
        if hasattr(module, "create_fw_bw_graph"):
            gpus.patches.set(module, "create_fw_bw_graph", _function_and_gradients)

    def patch_function(module: ModuleType) -> None:
        operator = getattr(module, FLEX_CALLED, None)
        if operator is not None:
            gpus.patches.set(module, FLEX_CALLED, _with_captured(operator))

    unpatched_imports.when_imported(FLEX_OPERATOR, patch_operator)
    unpatched_imports.when_imported(FLEX_FUNCTION, patch_function)


def remove() -> None:
    unpatched_imports.forget(FLEX_OPERATOR)
    unpatched_imports.forget(FLEX_FUNCTION)


def _with_captured(operator: Callable[..., Any]) -> Callable[..., Any]:
    """``operator``, with the tensors that its ``score_mod`` captures as arguments of it."""

    @functools.wraps(operator)
    def call(query: Any, key: Any, value: Any, score_mod: Any, *rest: Any, **kwargs: Any) -> Any:
        captured = _captured(score_mod) if len(rest) <= _BUFFERS else {}
        if captured and not kwargs.get("score_mod_other_buffers"):
            score_mod = _taking(score_mod, list(captured))
            kwargs["score_mod_other_buffers"] = tuple(captured.values())
        return operator(query, key, value, score_mod, *rest, **kwargs)

    return call


_BUFFERS = 3  # arguments between the function and its buffers: mask, scale, options


def _captured(function: Any) -> dict[str, torch.Tensor]:
    """The tensors with gradients that a Python function captures: from enclosing scopes, and globals."""
    if not isinstance(function, FunctionType):
        return {}
    found = inspect.getclosurevars(function)
    named = {**found.globals, **found.nonlocals}
    return {
        name: item for name, item in named.items() if isinstance(item, torch.Tensor) and item.requires_grad
    }


def _taking(function: FunctionType, names: Sequence[str]) -> Callable[..., torch.Tensor]:
    """``function`` with the variables that it captures under these ``names`` as additional arguments."""

    def taking(*args: Any) -> torch.Tensor:
        given = dict(zip(names, args[-len(names) :]))
        free = function.__code__.co_freevars
        cells = tuple(
            CellType(given[name]) if name in given else cell
            for name, cell in zip(free, function.__closure__ or ())
        )
        scope = {**function.__globals__, **{name: given[name] for name in names if name not in free}}
        made = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
        return made(*args[: -len(names)])

    return taking


def _function_and_gradients(
    score_mod: Callable[..., torch.Tensor], indices: Sequence[torch.Tensor], captured: Sequence[Any]
) -> tuple[Callable[..., torch.Tensor], Callable[..., list[torch.Tensor | None]]]:
    """``score_mod``, and the gradients of its score and of the tensors that it captures."""
    wanted = [at for at, item in enumerate(captured) if isinstance(item, torch.Tensor) and item.requires_grad]

    def gradients(score: torch.Tensor, *rest: torch.Tensor) -> list[torch.Tensor | None]:
        places, gradient, others = rest[:4], rest[4], list(rest[5:])

        def function(score: torch.Tensor, *varied: torch.Tensor) -> torch.Tensor:
            given = list(others)
            for at, item in zip(wanted, varied):
                given[at] = item
            return score_mod(score, *places, *given)

        found: Any = torch.func.vjp(function, score, *[others[at] for at in wanted])
        of_score, *of_varied = found[1](gradient)
        of_others: list[torch.Tensor | None] = [None] * len(others)
        for at, item in zip(wanted, of_varied):
            of_others[at] = item
        return [of_score, None, None, None, None, *of_others]  # a list, as a traced graph returns

    return score_mod, gradients
