"""Code generation: turns a subgraph into code that runs its kernels one after another.

The instructions of each node (:mod:`lazyviz.execute.replay.node_instructions`) become a program for the C++
interpreter (``interpreter.cpp``), if it was compiled and can represent them, or Python code
(:mod:`lazyviz.execute.replay.python_codegen`).  Both do the same, in the same order.

The code contains no names or text of the user's program.  Everything that differs from run to run is an
argument: outside tensors, numbers, generators, and the user's tensors for the results.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...record.random_draw_order import state_of
from ...record.tracked_storages import TrackedValue
from ...torch_internals import dispatch_level, fastest_op_calls, native_module_loader
from ...torch_internals.fake_cuda_devices import STAND_INS
from .node_instructions import NOWHERE, Code, Give, lines
from .program_key import Steps, Subgraph, values_in
from .python_codegen import write

_CONSTANT, _TENSOR, _TENSORS, _SCALAR = range(4)  # the kinds of arguments of the compiled program


def generate(subgraph: Subgraph, steps: Steps, store_result: Give) -> Code:
    """A function that runs the subgraph's kernels in order.

    Its arguments: ``tensors``, the outside tensors (the list is emptied); ``scalars``; ``draws``, the
    sequence of each random node; the values in ``users``, whose tensors ``give`` makes real, and in
    ``later``, which keep their tensor for later nodes; ``arrived``, the signals, whose handlers are called
    between two nodes; ``times``, an array of doubles that has the start time of the run, to which the end of
    each node is appended; ``done``, called after each node, or ``None``.

    It returns ``None``, or what stopped it and the local variables at that point.
    """
    if active:
        try:
            return _program(subgraph, steps, store_result)
        except _module.Refused:
            pass
    return write(subgraph, steps, store_result)


def _program(subgraph: Subgraph, steps: Steps, store_result: Give) -> Code:
    """Create a program of ``interpreter.cpp``, which describes the format of nodes; ``Refused`` if that is
    not possible.
    """
    numbers = subgraph.numbers
    nodes: list[tuple[Any, ...]] = []
    for line in lines(subgraph, steps):
        node, scalars = line.node, line.scalars
        given: list[tuple[int | str, Any]] = [*enumerate(node.args), *node.kwargs.items()]
        arguments = tuple(
            [
                (place, _SCALAR, scalars[place]) if place in scalars else (place, *_argument(item, numbers))
                for place, item in given
            ]
        )
        schema = node.op._schema
        mode = NOWHERE if line.grad_mode is None else int(line.grad_mode)
        nodes.append(
            (
                schema.name,
                schema.overload_name,
                mode,
                line.draw,
                arguments,
                tuple(line.results),
                tuple(line.gone),
                tuple(line.copied),
                int(line.refused),
            )
        )
    outside = tuple([numbers[value] for value in subgraph.outside])
    program: Code = _module.Program(len(numbers), outside, nodes, store_result, state_of)
    return program


def _argument(item: Any, numbers: Mapping[TrackedValue, int]) -> tuple[int, Any]:
    """The kind of an argument, and its description for the program."""
    cls = type(item)
    if cls is TrackedValue:
        return _TENSOR, numbers[item]
    if (cls is list or cls is tuple) and next(values_in(item), None) is not None:
        for entry in item:
            if entry is not None and type(entry) is not TrackedValue:
                raise _module.Refused("a list of tensors and other values")
        return _TENSORS, tuple([NOWHERE if entry is None else numbers[entry] for entry in item])
    return _CONSTANT, item


def store_result(value: TrackedValue, real: torch.Tensor) -> bool:
    """Do the same as :func:`lazyviz.execute.eager_backend.store_result` in compiled code.

    Returns False if it cannot; then nothing is done.
    """
    return bool(_store_result(value, real)) if active else False


def end_worker() -> None:
    """End the thread of asynchronous runs; the next run starts another one."""
    if _module is not None:
        _module.end_worker()


def use(compiled: bool) -> bool:
    """Generate code for C++ from now on, or for Python; returns which one is active."""
    global active
    active = compiled and _module is not None
    dispatch_level.compiled = _module.KernelsOnly if active else None
    return active


if (_module := native_module_loader.load("interpreter.cpp")) is not None:
    _module.connect(torch.Tensor, torch.nn.Parameter, STAND_INS, *fastest_op_calls.LEVEL_KEYS)
_store_result: Any = _module.store_result if _module is not None else None
active = use(True)
