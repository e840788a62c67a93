"""Runs programs twice from one seed, in eager mode and in a lazy block."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

import lazyviz

from .bit_equality import difference

Program = Callable[[], Any]


def assert_same_as_eager(program: Program) -> lazyviz.LazyGraph:
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


def _run(program: Program, block: AbstractContextManager[Any]) -> tuple[Any, str | None, Counter[str], Any]:
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
