"""Runs a program twice in eager mode and once lazily, and compares all its effects."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch.utils._pytree import tree_leaves, tree_map

import lazyviz
from lazyviz.session import lazy_graph

from ..bit_equality import difference, metadata_difference
from .scoreboard import EQUAL, FAILING, NONDETERMINISTIC

Program = Callable[[Any], Any]
"""Takes a sample's inputs, which it may write to, and returns what it computed."""


@dataclass
class Trials:
    """What became of the samples of one entry."""

    samples: int = 0
    refused: int = 0  # by eager, and in the same way by us
    differences: list[str] = field(default_factory=list)
    uninitialized: bool = False  # eager is known to differ from itself
    unstable: bool = False  # it does
    syncs: set[str] = field(default_factory=set)

    @property
    def outcome(self) -> str:
        if self.differences:
            return FAILING
        return NONDETERMINISTIC if self.unstable else EQUAL


def seed(number: int) -> None:
    """Seed everything that sample generators and programs draw from."""
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)


def replayed(make: Callable[[], Iterable[Any]], limit: int | None) -> list[Any]:
    """The first ``limit`` samples, the same at every call; the tensors in them are fresh."""
    seed(0)
    return list(itertools.islice(make(), limit))


def compare(
    program: Program,
    make: Callable[[], Iterable[Any]],
    limit: int | None = None,
    *,
    uninitialized: bool = False,
) -> Trials:
    """Run ``program`` on each sample, in eager mode and lazily.

    Compared are what it returns, what it leaves in its inputs, which of these tensors share
    memory, the exception that it raises, and the state of the generator.  Of ``uninitialized``
    memory, and where eager differs from itself, only metadata is compared.
    """
    trials = Trials(uninitialized=uninitialized, unstable=uninitialized)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        triples = zip(*(replayed(make, limit) for _ in range(3)))
        for number, (first, second, third) in enumerate(triples):
            found = _compare_one(program, first, second, third, trials)
            if found is not None:
                trials.differences.append(f"sample {number}: {found}")
    return trials


def _compare_one(program: Program, first: Any, second: Any, third: Any, trials: Trials) -> str | None:
    trials.samples += 1
    expected, again = _eagerly(program, first), _eagerly(program, second)
    actual = _lazily(program, third, trials)
    if isinstance(expected, Exception):
        trials.refused += 1
        return _exception_difference(expected, actual)
    if isinstance(actual, Exception):
        return f"{type(actual).__name__}: {actual}"
    if trials.unstable or difference(expected, again) is not None:
        trials.unstable = True
        return _shallow_difference(expected, actual)
    return difference(expected, actual)


def _eagerly(program: Program, sample: Any) -> Any:
    seed(5)
    try:
        result = program(sample)
    except Exception as error:
        return error
    return _observed(result, sample)


def _lazily(program: Program, sample: Any, trials: Trials) -> Any:
    seed(5)
    try:
        with lazyviz.lazy() as graph:
            result = program(sample)
        graph.evaluate()
        lazy_graph.cell_boundary()
        trials.syncs.update(point.cause for point in graph.sync_points)
        return _observed(result, sample)
    except Exception as error:
        return error
    finally:
        lazy_graph.reset()


def _observed(result: Any, sample: Any) -> Any:
    everything = (result, list(tensors_of(sample)))
    return everything, _sharing(everything), torch.rand(2)


def tensors_of(sample: Any) -> Iterator[torch.Tensor]:
    """The tensors among a sample's inputs."""
    for leaf in tree_leaves((sample.input, sample.args, sample.kwargs)):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def _sharing(tree: Any) -> list[int]:
    """For each tensor, the place of the first one on the same memory."""
    first: dict[int, int] = {}
    places = []
    for place, leaf in enumerate(tree_leaves(tree)):
        if type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.layout == torch.strided:
            storage = leaf.untyped_storage()
            places.append(first.setdefault(storage._cdata, place) if storage.nbytes() else place)
    return places


def _shallow_difference(expected: Any, actual: Any) -> str | None:
    def shallow(leaf: Any) -> Any:
        return torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else leaf

    for left, right in zip(tree_leaves(expected), tree_leaves(actual)):
        if isinstance(left, torch.Tensor) and (found := metadata_difference(left, right)):
            return found
    return difference(tree_map(shallow, expected), tree_map(shallow, actual))


def _exception_difference(expected: Exception, actual: Any) -> str | None:
    if type(actual) is type(expected):
        return None
    got = f"{type(actual).__name__}: {actual}" if isinstance(actual, Exception) else "no exception"
    return f"{got}, instead of {type(expected).__name__}: {expected}"
