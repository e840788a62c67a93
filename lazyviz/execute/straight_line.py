"""Python code for a stretch of nodes: a line for each kernel, locals for tensors, freed at last use.

The code has no name and no text of the user's in it.  What differs from run to run it is given: tensors
from outside, numbers, generators, and whose tensors its results are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .. import _torch_calls
from ..graph.ir import TensorMeta
from ..record.rng import state_of
from ..record.storage import TrackedNode, TrackedValue
from .stretch import Step, Steps, Stretch, values_in

Stopped = tuple[BaseException | None, Mapping[str, Any]]
"""What stopped a run (``None``: an interrupt that arrived), and the local variables then."""
Code = Callable[..., Stopped | None]
"""Runs the stretch; see :func:`generate`."""

NODES_IN_ONE = 1000  # function: to compile one takes 12 KiB a node, of which 1 is kept
_PARAMETERS = "tensors, scalars, draws, users, later, arrived, done, clock"
_LITERALS = (int, bool, type(None))


def name_of(number: int) -> str:
    """The local variable of a value."""
    return f"v{number}"


def generate(stretch: Stretch, steps: Steps, give: Callable[[TrackedValue, torch.Tensor], None]) -> Code:
    """A function that runs the stretch's kernels in order.

    Its arguments: ``tensors``, those from outside (the list is emptied); ``scalars``; ``draws``, for
    each random node its sequence; the values in ``users``, whose tensors ``give`` makes real, and in
    ``later``, which keep their tensor for nodes to come; ``arrived``, a list that stops the run between two
    nodes once it has something in it; ``done``, called after each node with ``clock()``.

    It returns ``None``, or what stopped it (``None``: ``arrived``) and the local variables then.
    """
    choose_calls(stretch, steps)
    return _Writer(stretch, steps, give).function()


def choose_calls(stretch: Stretch, steps: Steps) -> None:
    """Find out how each operator of the stretch is called quickest, where it is not known yet."""
    made: dict[TensorMeta, list[torch.Tensor]] = {}
    trials: dict[Step, tuple[TrackedNode, list[Any], dict[str, Any]]] = {}
    for node in stretch.nodes:
        step = steps.of(node)
        if step.call is not None or step in trials:
            continue
        if any(value.meta.flags for value in node.inputs):  # conjugate bits are resolved above kernels
            step.call = _torch_calls.plain(node.op)
            continue
        stand_ins = _stand_ins(node, made)

        def stand_in(item: Any, stand_ins: Mapping[TrackedValue, torch.Tensor] = stand_ins) -> Any:
            if type(item) in (list, tuple):
                return type(item)([stand_in(entry, stand_ins) for entry in item])
            return stand_ins[item] if isinstance(item, TrackedValue) else item

        named = {name: stand_in(item) for name, item in node.kwargs.items()}
        trials[step] = node, [stand_in(item) for item in node.args], named
    if trials:
        with _torch_calls.proving() as quickest:
            for step, (node, args, kwargs) in trials.items():
                step.call = quickest(node.op, args, kwargs)


def _stand_ins(
    node: TrackedNode, made: dict[TensorMeta, list[torch.Tensor]]
) -> dict[TrackedValue, torch.Tensor]:
    """For each input a tensor like it without memory; ``made`` are those of other nodes."""
    taken: dict[TensorMeta, int] = {}
    result: dict[TrackedValue, torch.Tensor] = {}
    for value in dict.fromkeys(node.inputs):
        meta = value.meta
        number = taken[meta] = taken.get(meta, -1) + 1
        alike = made.setdefault(meta, [])
        if number == len(alike):
            alike.append(torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta"))
        result[value] = alike[number]
    return result


class _Writer:
    """Writes one function."""

    def __init__(
        self, stretch: Stretch, steps: Steps, give: Callable[[TrackedValue, torch.Tensor], None]
    ) -> None:
        self.stretch, self.steps = stretch, steps
        self.numbers = stretch.numbers
        self.users = {value: f"users[{number}]" for number, value in enumerate(stretch.users)}
        self.later = {value: f"later[{number}]" for number, value in enumerate(stretch.later)}
        self.names: dict[str, Any] = {
            "give": give,
            "set_grad_enabled": _torch_calls.set_grad_enabled,
            "state_of": state_of,
        }
        self.constants: dict[Any, str] = {}
        self.scalars = 0
        self.draws = 0
        self.lines: list[str] = []
        self.alive: dict[str, None] = dict.fromkeys(name_of(self.numbers[v]) for v in stretch.outside)
        self.ends: dict[TrackedValue, int] = {}  # the position of the node that reads it last
        for at, node in enumerate(stretch.nodes):
            for value in node.inputs:
                self.ends[value] = at

    def function(self) -> Code:
        nodes = self.stretch.nodes
        grad_mode: bool | None = None
        dead: dict[int, list[TrackedValue]] = {}
        for value, at in self.ends.items():
            dead.setdefault(at, []).append(value)
        parts: list[Code] = []
        for start in range(0, len(nodes), NODES_IN_ONE):
            given = list(self.alive)
            self.lines = []
            for at, node in enumerate(nodes[start : start + NODES_IN_ONE], start):
                if node.grad_mode is not grad_mode:
                    grad_mode = node.grad_mode
                    self.lines.append(f"set_grad_enabled({grad_mode})")
                self.lines.append("if arrived: return None, locals()")
                self._write(node, dead.get(at, []))
            parts.append(self._compiled(given))
        return parts[0] if len(parts) == 1 else _one_after_another(parts)

    def _compiled(self, given: list[str]) -> Code:
        """A function of the lines so far, which is given these variables and leaves those that are alive."""
        text = [f"def replay({_PARAMETERS}):"]
        if given:
            text.append(f" {', '.join(given)}, = tensors")
        text += [" tensors.clear()", " try:", *[f"  {line}" for line in self.lines]]
        text += [" except BaseException as error:", "  return error, locals()"]
        if self.alive:
            text.append(f" tensors += {', '.join(self.alive)},")
        exec(compile("\n".join(text), "<lazyviz replay>", "exec"), self.names)
        code: Code = self.names.pop("replay")
        return code

    def _write(self, node: TrackedNode, dead: list[TrackedValue]) -> None:
        """The lines of one node, after which nobody needs the values in ``dead``."""
        step = self.steps.of(node)
        call, lines = self._call(node, step), self.lines
        own = [value for value in node.outputs if value.node is node]
        needed = [value for value in own if value in self.ends or value in self.users or value in self.later]
        if step.draws:
            draw = f"draws[{self.draws}]"
            self.draws += 1
            lines.append(f"{draw}.generator.set_state({draw}.state)")
        names = {value.index: name_of(self.numbers[value]) for value in needed}
        returns = node.op._schema.returns
        if not needed:
            lines.append(call)
        elif len(names) == len(needed) == len(returns) and str(returns[0].type) == "Tensor":
            lines.append(f"{', '.join(names[at] for at in sorted(names))} = {call}")
        else:
            lines.append(f"results = {call}")
            if len(returns) == 1 and str(returns[0].type) == "Tensor":
                lines.append("results = (results,)")
            lines += [f"{name_of(self.numbers[value])} = results[{value.index}]" for value in needed]
            lines.append("del results")
        if step.draws:
            lines.append(f"{draw}.state = state_of({draw}.generator)")
        for value in needed:
            name = name_of(self.numbers[value])
            if value in self.later:
                lines.append(f"{self.later[value]}.real = {name}")
            if value in self.users:
                lines.append(f"give({self.users[value]}, {name})")
        gone = [name_of(self.numbers[value]) for value in dead]
        gone += [name_of(self.numbers[value]) for value in needed if value not in self.ends]
        self.alive.update(dict.fromkeys(name_of(self.numbers[value]) for value in needed))
        if gone:
            lines.append(f"del {', '.join(gone)}")
            for name in gone:
                del self.alive[name]
        lines.append("done(clock())")

    def _call(self, node: TrackedNode, step: Step) -> str:
        """The expression that calls the kernel."""
        varying: dict[int | str, str] = {}
        places: list[int | str] = [*step.args, *step.kwargs]
        for place in places:
            varying[place] = f"scalars[{self.scalars}]"
            self.scalars += 1
        parts = [varying.get(at) or self._argument(item) for at, item in enumerate(node.args)]
        for name, item in node.kwargs.items():
            parts.append(f"{name}={varying.get(name) or self._argument(item)}")
        return f"{self._constant(step.call)}({', '.join(parts)})"

    def _argument(self, item: Any) -> str:
        cls = type(item)
        if cls is TrackedValue:
            return name_of(self.numbers[item])
        if cls in _LITERALS:
            return repr(item)
        if (cls is list or cls is tuple) and next(values_in(item), None) is not None:
            inside = ", ".join(map(self._argument, item))
            return f"[{inside}]" if cls is list else f"({inside},)"
        return self._constant(item)

    def _constant(self, item: Any) -> str:
        """The name of something that is the same each time."""
        key = (type(item), repr(item)) if isinstance(item, (list, tuple, float)) else id(item)
        if key not in self.constants:
            name = self.constants[key] = f"c{len(self.constants)}"
            self.names[name] = item
        return self.constants[key]


def _one_after_another(parts: list[Code]) -> Code:
    """A function of several; each leaves the list of tensors as the next one takes it."""

    def replay(*arguments: Any) -> Stopped | None:
        for part in parts:
            stopped = part(*arguments)
            if stopped is not None:
                return stopped
        return None

    return replay
