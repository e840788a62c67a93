"""Runs a program in eager mode and in a lazy block, and requires bit-equal results.

``both`` also compares metadata, gradients, and version counters, in several orders of evaluation;
``assert_same_as_eager`` compares warnings, and allows errors and warnings to come when the graph runs.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_flatten_with_path

import lazyviz

from .bit_equality import content_difference, difference

# How the lazy runs get their values: all at once, the last result first, or when something reads them.
ORDERS = ("at once", "last first", "by reading")


def both(
    program: Callable[..., Any],
    make: Callable[[], Any] = tuple,
    *,
    syncs: Collection[str] | None = (),
    versions: bool = True,
    orders: Collection[str] = ORDERS,
) -> lazyviz.LazyGraph:
    """Run ``program(*make())`` eagerly, then in a lazy block once for each order; compare.

    ``make`` runs eagerly, outside of the block.  What the program returns and what ``make`` made is
    compared: classes, strides, values, gradients, autograd nodes, version counters; what metadata
    tells already before anything is evaluated.  Where eager raises, recording must raise the same,
    and what was written before must be the same.

    Args:
        syncs: the causes of the sync points to expect; None for any.
        versions: False where version counters differ: autograd adds up the gradients that reach a
            tensor on several ways in place, but those of pending tensors out of place.

    Returns:
        The graph of the last lazy run.
    """
    _seed()
    inputs = _as_tuple(make())
    expected, expected_error = _outcome(program, inputs)
    expected_tensors = dict(_leaves((expected, inputs)))
    expected_metadata = {name: _metadata(leaf, versions) for name, leaf in expected_tensors.items()}
    expected_draw = torch.rand(1)
    for order in orders:
        _seed()
        inputs = _as_tuple(make())
        with lazyviz.lazy() as graph:
            result, error = _outcome(program, inputs)
        _compare_errors(expected_error, error)
        if syncs is not None:
            assert {point.cause for point in graph.sync_points} == set(syncs)
        leaves = dict(_leaves((result, inputs)))
        _compare(
            {name: _metadata(leaf, versions) for name, leaf in leaves.items()}, expected_metadata, "pending"
        )
        if order == "at once":
            graph.evaluate()
            assert graph.pending == 0
        elif order == "last first":
            for leaf in reversed(leaves.values()):
                if isinstance(leaf, torch.Tensor):
                    lazyviz.evaluate(leaf)
        for name, leaf in leaves.items():
            if order == "by reading" and lazyviz.is_lazy(leaf):
                content_difference(expected_tensors[name], leaf)
            found = difference(expected_tensors[name], leaf)
            assert found is None, f"{order}: {name}: {found}"
        _compare({name: _metadata(leaf, versions) for name, leaf in leaves.items()}, expected_metadata, order)
        assert torch.equal(torch.rand(1), expected_draw), f"{order}: the generator is elsewhere"
        graph.evaluate()
    return graph


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)


def _as_tuple(made: Any) -> tuple[Any, ...]:
    return made if isinstance(made, tuple) else (made,)


def _outcome(program: Callable[..., Any], inputs: tuple[Any, ...]) -> tuple[Any, str | None]:
    """What the program returned, and the class and message of what it raised."""
    try:
        return program(*inputs), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _compare_errors(expected: str | None, actual: str | None) -> None:
    assert actual == expected, f"raised {actual}\ninstead of {expected}"


def _compare(actual: dict[str, Any], expected: dict[str, Any], when: str) -> None:
    assert list(actual) == list(expected), f"{when}: {list(actual)} instead of {list(expected)}"
    for name, facts in expected.items():
        assert actual[name] == facts, f"{when}: {name}: {actual[name]}\ninstead of {facts}"


def _leaves(item: Any) -> Iterator[tuple[str, Any]]:
    """Every tensor and plain value in nested containers, modules and optimizers, gradients included."""
    for path, leaf in tree_flatten_with_path(item)[0]:
        name = "".join(str(key) for key in path)
        if isinstance(leaf, nn.Module):
            for key, tensor in [*leaf.named_parameters(), *leaf.named_buffers()]:
                yield from _with_gradient(f"{name}.{key}", tensor)
        elif isinstance(leaf, torch.optim.Optimizer):
            yield from _leaves(leaf.state_dict())
        elif isinstance(leaf, torch.Tensor):
            yield from _with_gradient(name, leaf)
        elif not callable(leaf):
            yield name, leaf


def _with_gradient(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield name, tensor
    if (tensor.is_leaf or tensor.retains_grad) and tensor.grad is not None:
        yield from _with_gradient(f"{name}.grad", tensor.grad)


def _metadata(leaf: Any, versions: bool) -> Any:
    """What a tensor shows without its values; a plain value itself."""
    if not isinstance(leaf, torch.Tensor):
        return None
    facts: dict[str, Any] = {
        "layout": leaf.layout,
        "dtype": leaf.dtype,
        "requires_grad": leaf.requires_grad,
        "is_leaf": leaf.is_leaf,
        "grad_fn": type(leaf.grad_fn).__name__,
        "is_inference": leaf.is_inference(),
        "_is_view": leaf._is_view(),
        "Parameter": isinstance(leaf, nn.Parameter),
    }
    if versions and not leaf.is_inference():
        facts["_version"] = leaf._version
    if not leaf.is_nested:
        facts["shape"] = tuple(leaf.shape)
    if leaf.layout == torch.strided and not leaf.is_nested:
        facts["stride"] = leaf.stride()
        facts["storage_offset"] = leaf.storage_offset()
        facts["flags"] = (leaf.is_conj(), leaf.is_neg())
    return facts


def assert_same_as_eager(program: Callable[[], Any]) -> lazyviz.LazyGraph:
    """Run ``program`` eagerly and in a block that is then evaluated: the same values, error and warnings.

    An error that depends on data may come when the graph runs, and says there where it was recorded;
    warnings of a deferred op come then, too.  Returns the block's graph.
    """
    _run(program, nullcontext())  # what PyTorch warns of when it is first used
    expected, error, warned, _ = _run(program, nullcontext())
    actual, lazy_error, lazily_warned, graph = _run(program, lazyviz.lazy())
    assert lazy_error == error
    assert lazily_warned == warned
    if error is None:
        found = difference(expected, actual)
        assert found is None, found
    return graph


def _run(
    program: Callable[[], Any], block: AbstractContextManager[Any]
) -> tuple[Any, str | None, Counter[str], Any]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    result = error = None
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with block as graph:
                    result = program()
                if graph is not None:
                    graph.evaluate()
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}".partition("\naten.")[0]
    finally:
        torch.set_warn_always(always)
    return result, error, Counter(f"{item.category.__name__}: {item.message}" for item in caught), graph
