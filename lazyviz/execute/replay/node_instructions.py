"""Instructions: what each node of a subgraph does when it runs, for all code generators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ...record.tracked_storages import TrackedNode, TrackedValue
from .. import write_rollback
from .program_key import Step, Steps, Subgraph

Stopped = tuple[BaseException, Mapping[str, Any], bool, bool]
"""What stopped a run, the local variables at that point, whether the kernel of the current node has run, and
whether it had started a write that cannot be rolled back (:func:`lazyviz.execute.write_rollback.is_refused`).
"""
Code = Callable[..., Stopped | None]
"""Runs the subgraph; see :func:`lazyviz.execute.replay.native_codegen.generate`."""
Give = Callable[[TrackedValue, torch.Tensor], None]

NOWHERE = -1


def name_of(number: int) -> str:
    """The local variable of a value."""
    return f"v{number}"


class Result(NamedTuple):
    """A needed result: its position among the results of its node, its number, and its owner.

    ``user`` and ``later`` are positions in the lists that the code receives, or ``NOWHERE``.
    """

    position: int
    number: int
    user: int
    later: int


class Line(NamedTuple):
    """The instruction of a node.

    Attributes:
        grad_mode: the mode to set before it; ``None`` if it is set already.
        scalars: for each argument that is an input number (its position or name), the index of that number.
        draw: the index of its draw sequence among the code's arguments, or ``NOWHERE``.
        results: the results that are kept.
        gone: the numbers of values that are not needed after it.
        copied: the numbers of values that are copied before it runs, and restored if it fails.
        refused: whether its writes cannot be rolled back.
    """

    node: TrackedNode
    step: Step
    grad_mode: bool | None
    scalars: Mapping[int | str, int]
    draw: int
    results: list[Result]
    gone: list[int]
    copied: list[int]
    refused: bool


def lines(subgraph: Subgraph, steps: Steps) -> Iterator[Line]:
    """The instructions of the nodes, in order."""
    numbers = subgraph.numbers
    users = {value: at for at, value in enumerate(subgraph.users)}
    later = {value: at for at, value in enumerate(subgraph.later)}
    ends: dict[TrackedValue, int] = {}  # the position of the node that reads it last
    for at, node in enumerate(subgraph.nodes):
        for value in node.inputs:
            ends[value] = at
    dead: dict[int, list[int]] = {}
    for value, at in ends.items():
        dead.setdefault(at, []).append(numbers[value])
    grad_mode: bool | None = None
    scalars = draws = 0
    for at, node in enumerate(subgraph.nodes):
        step = steps.of(node)
        places: list[int | str] = [*step.args, *step.kwargs]
        results: list[Result] = []
        gone = dead.get(at, [])
        for value in node.outputs:
            if value.node is not node:  # an in-place op returns its argument
                continue
            user, kept = users.get(value, NOWHERE), later.get(value, NOWHERE)
            if value in ends or user != NOWHERE or kept != NOWHERE:
                results.append(Result(value.index, numbers[value], user, kept))
                if value not in ends:
                    gone.append(numbers[value])
        yield Line(
            node,
            step,
            None if node.grad_mode is grad_mode else node.grad_mode,
            {place: number for number, place in enumerate(places, scalars)} if places else {},
            draws if step.draws else NOWHERE,
            results,
            gone,
            [numbers[value] for value in write_rollback.copied(node)],
            write_rollback.is_refused(node),
        )
        grad_mode = node.grad_mode
        scalars += len(places)
        draws += step.draws
