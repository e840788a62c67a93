"""Evaluations with ``wait=False`` that have begun, for the tests of what waits for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import lazyviz

SIZE = 400


def products(x: torch.Tensor, length: int) -> torch.Tensor:
    """Takes a few milliseconds for each of its ``length`` products."""
    for _ in range(length):
        x = (x @ x) / SIZE
    return x


def started(function: Callable[[], Any]) -> tuple[Any, lazyviz.Run, lazyviz.LazyGraph]:
    """What ``function`` returns, recorded, and its evaluation, which is not waited for."""
    for _ in range(2):
        with lazyviz.lazy() as graph:
            kept = function()
        graph.evaluate()
    del kept
    with lazyviz.lazy() as graph:
        result = function()
    run = graph.evaluate(wait=False)
    assert run.waited is None
    return result, run, graph
