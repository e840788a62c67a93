"""PyTorch's list of modules: each is built, run forward and backward, and compared bit by bit.

Every input of every entry, in training and in evaluation mode, with the module built before
the block and inside of it.  A sync point that is not on the list below fails, and so does one
that is on it and does not happen.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db
from torch.utils._pytree import tree_leaves

import lazyviz

from ..bit_equality import difference
from .scoreboard import EQUAL, FAILING

# Entries with sync points: cause -> why it needs data.
SYNC_POINTS: dict[str, dict[str, str]] = {
    "nn.GaussianNLLLoss": {"item": "it raises ValueError if any variance is negative"},
    "nn.LinearCrossEntropyLoss": {
        "cross_entropy with weight and label_smoothing": "ATen takes another path for tensor subclasses",
    },
    "nn.Transformer": {
        "_nested_tensor_from_mask_left_aligned": "its fast path is taken where the mask is left-aligned",
    },
}
REPRESENTATIVE = 4  # inputs of each mode that run without --all, spread over the list


def inputs_of(info: ModuleInfo, dtype: torch.dtype, training: bool) -> list[ModuleInput]:
    torch.manual_seed(0)
    random.seed(0)
    return list(
        info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
    )


def build(info: ModuleInfo, given: ModuleInput, dtype: torch.dtype, training: bool) -> torch.nn.Module:
    torch.manual_seed(1)
    made = given.constructor_input
    return info.module_cls(*made.args, **made.kwargs).to(dtype).train(training)


def step(module: torch.nn.Module, given: ModuleInput) -> Any:
    """Forward and backward with a weight for each element of the output."""
    output = module(*given.forward_input.args, **given.forward_input.kwargs)
    differentiable = [tensor for tensor in tree_leaves(output) if getattr(tensor, "requires_grad", False)]
    weights = [
        torch.linspace(0.5, 1.5, max(1, t.numel()), dtype=t.dtype)[: t.numel()] for t in differentiable
    ]
    torch.autograd.backward(
        differentiable, [weight.reshape(tensor.shape) for weight, tensor in zip(weights, differentiable)]
    )
    return output


def left_behind(module: torch.nn.Module, given: ModuleInput, output: Any) -> Any:
    """All that a user can see afterwards."""
    arguments = tree_leaves((given.forward_input.args, given.forward_input.kwargs))
    return {
        "output": output,
        "state": dict(module.state_dict()),
        "parameters": dict(module.named_parameters()),
        "buffers": dict(module.named_buffers()),
        "gradients": {name: parameter.grad for name, parameter in module.named_parameters()},
        "arguments": [t for t in arguments if isinstance(t, torch.Tensor)],
        "gradients of arguments": [t.grad for t in arguments if isinstance(t, torch.Tensor) and t.is_leaf],
        "next random number": torch.rand(1),
    }


def eagerly(info: ModuleInfo, given: ModuleInput, dtype: torch.dtype, training: bool) -> Any:
    module = build(info, given, dtype, training)
    return left_behind(module, given, step(module, given))


def lazily(
    info: ModuleInfo, given: ModuleInput, dtype: torch.dtype, training: bool, built_inside: bool
) -> tuple[Any, set[str]]:
    module = None if built_inside else build(info, given, dtype, training)
    with lazyviz.lazy() as graph:
        if module is None:
            module = build(info, given, dtype, training)
        output = step(module, given)
    graph.evaluate()
    assert not graph.pending
    return left_behind(module, given, output), {point.cause for point in graph.sync_points}


@pytest.mark.filterwarnings("ignore")  # what the entries themselves are warned of
@pytest.mark.parametrize("info", module_db, ids=lambda info: info.name)
def test_a_module_does_what_it_does_in_eager_pytorch(info, everything, scoreboard):
    found: list[str] = []
    causes: set[str] = set()
    compared = 0
    dtypes = (torch.float32, torch.float64) if everything else (torch.float32,)
    for dtype, training in itertools.product(dtypes, (True, False)):
        samples = list(zip(*(inputs_of(info, dtype, training) for _ in range(4))))
        for number in range(len(samples)) if everything else spread(len(samples)):
            first, again, before, inside = samples[number]
            expected = eagerly(info, first, dtype, training)
            assert difference(expected, eagerly(info, again, dtype, training)) is None
            for given, built_inside in ((before, False), (inside, True)):
                try:
                    actual, seen = lazily(info, given, dtype, training, built_inside)
                    wrong = difference(expected, actual)
                except Exception as error:
                    wrong, seen = f"{type(error).__name__}: {error}", set()
                if wrong is not None:
                    found.append(
                        f"input {number}, {dtype}, training={training}, inside={built_inside}: {wrong}"
                    )
                causes |= seen
                compared += 1
    scoreboard.add("module_db", info.name, FAILING if found else EQUAL, compared, causes)
    assert compared
    assert not found
    expected_causes = set(SYNC_POINTS.get(info.name, ()))
    assert causes == expected_causes if everything else causes <= expected_causes


def spread(count: int) -> list[int]:
    """A few of ``count`` positions, the first and the last among them."""
    chosen = min(count, REPRESENTATIVE)
    return sorted({round(at * (count - 1) / max(1, chosen - 1)) for at in range(chosen)})
