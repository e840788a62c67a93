"""Errors in PyTorch's operator database are raised at their line, with eager PyTorch's message."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils._pytree import tree_leaves, tree_map_only

import lazyviz
from lazyviz.session import lazy_graph

from .compared_runs import seed
from .entries import name_of

# Inputs that are refused for what they hold: that shows when the op runs.
OF_CONTENT = (
    "out of bounds",
    "probability tensor contains",
    "invalid multinomial distribution",
    "value cannot be converted to type int64_t",  # a tensor that is complex, and might be real
)


def variants(entry: Any) -> Iterator[tuple[str, Callable[..., Any], bool]]:
    """Name, function, and whether to go on to its gradient."""
    yield "function", entry, False
    yield "backward", entry, True
    for name, function in (("method", entry.method_variant), ("in place", entry.inplace_variant)):
        if function is not None:
            yield name, function, False
    if entry.inplace_variant is not None:
        yield (
            "in place, backward",
            lambda x, *args, **kwargs: entry.inplace_variant(x * 1, *args, **kwargs),
            True,
        )


def copied(sample: Any, *, differentiable: bool, pending: bool) -> tuple[Any, Any, Any]:
    """Fresh tensors; ``pending`` ones where they have strides."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
        overlaps = (
            any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride()))
            if plain
            else True
        )
        fresh = tensor.detach() if overlaps else tensor.detach().clone()
        if pending and not overlaps:
            fresh = fresh.clone()
        if fresh.is_floating_point() or fresh.is_complex():
            fresh.requires_grad_(differentiable or tensor.requires_grad)
        return fresh

    tree = (sample.input, tuple(sample.args), dict(sample.kwargs))
    return tree_map_only(torch.Tensor, copy, tree)  # type: ignore[no-any-return]


def error_of(function: Callable[..., Any], sample: Any, gradient: bool, pending: bool = False) -> str | None:
    seed(0)
    first, args, kwargs = copied(sample, differentiable=gradient, pending=pending)
    try:
        result = function(first, *args, **kwargs)
        if gradient:
            results = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
            if results:
                sum(t.abs().sum() for t in results).backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.filterwarnings("ignore")  # what the entries themselves are warned of
@pytest.mark.parametrize(
    "entry",
    [pytest.param(entry, id=name_of(entry)) for entry in op_db if entry.error_inputs_func is not None],
)
def test_errors(entry, everything):
    seed(0)
    wrong = []
    for case in itertools.islice(entry.error_inputs("cpu"), None if everything else 3):
        for name, function, gradient in variants(entry):
            expected = error_of(function, case.sample_input, gradient)
            if expected is not None and any(words in expected for words in OF_CONTENT):
                continue
            for pending in (False, True) if everything else (True,):
                with lazyviz.lazy():
                    found = error_of(function, case.sample_input, gradient, pending)
                lazy_graph.reset()
                if found != expected:
                    wrong.append(f"{name}: {found} instead of {expected}")
    assert not wrong


# What a GPU says only once it has run, or checks in another order; and samples of several devices.
OF_A_GPU = (
    *OF_CONTENT,
    "single memory location",  # the copy that a GPU gets of such an `out=` does not overlap itself
    "aweights cannot be negative",
    "on the same device",
)
READ_FIRST = "nn.functional.gaussian_nll_loss"  # reads before it checks its arguments


def sent(sample: Any) -> Any:
    """The sample with its tensors on the planned GPU."""

    def send(item: Any) -> Any:
        return item.cuda() if isinstance(item, torch.Tensor) and item.device.type == "cpu" else item

    sample = copied(sample, differentiable=False, pending=False)
    first, args, kwargs = tree_map_only(torch.Tensor, send, sample)
    if kwargs.get("device") in ("cpu", torch.device("cpu")):
        kwargs = {**kwargs, "device": "cuda"}
    return first, args, kwargs


def of_any_device(text: str | None) -> str | None:
    if text is None:
        return None
    text = text.replace("torch.cuda.", "torch.").replace("CUDA", "CPU")
    return re.sub(r"cuda(:0)?", "cpu", text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(entry, id=name_of(entry))
        for entry in op_db
        if entry.error_inputs_func is not None and name_of(entry) != READ_FIRST
    ],
)
def test_errors_on_a_planned_gpu(entry, everything):
    seed(0)
    wrong = []
    for case in itertools.islice(entry.error_inputs("cpu"), None if everything else 3):
        for name, function, gradient in variants(entry):
            expected = error_of(function, case.sample_input, gradient)
            if expected is None or any(words in expected for words in OF_A_GPU):
                continue
            with lazyviz.lazy(device="A100-40GB"):
                first, args, kwargs = sent(case.sample_input)
                found = error_of(function, SampleInput(first, args=args, kwargs=kwargs), gradient)
            lazy_graph.reset()
            if of_any_device(found) != of_any_device(expected):
                wrong.append(f"{name}: {found} instead of {expected}")
    assert not wrong
