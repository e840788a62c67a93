"""Python code generation: one line for each kernel, local variables for tensors, freed at last use."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from time import perf_counter
from typing import Any

import torch

from ...graph.ir import TensorMeta
from ...record.random_draw_order import state_of
from ...record.tracked_storages import TrackedNode, TrackedValue
from ...torch_internals import fastest_op_calls
from .. import write_rollback
from .node_instructions import NOWHERE, Code, Give, Line, Stopped, lines, name_of
from .program_key import Step, Steps, Subgraph, values_in

NODES_IN_ONE = 1000  # nodes per function: compiling one takes many times the memory of the result
_PARAMETERS = "tensors, scalars, draws, users, later, arrived, times, done"
_LITERALS = (int, bool, type(None))


def write(subgraph: Subgraph, steps: Steps, store_result: Give) -> Code:
    """The generated function; see :func:`lazyviz.execute.replay.native_codegen.generate`."""
    choose_calls(subgraph, steps)
    return _Writer(subgraph, store_result).function(list(lines(subgraph, steps)))


def choose_calls(subgraph: Subgraph, steps: Steps) -> None:
    """Determine the fastest call of each operator of the subgraph, unless it is known already."""
    made: dict[TensorMeta, list[torch.Tensor]] = {}
    trials: dict[Step, tuple[TrackedNode, list[Any], dict[str, Any]]] = {}
    for node in subgraph.nodes:
        step = steps.of(node)
        if step.call is not None or step in trials:
            continue
        if any(value.meta.flags for value in node.inputs):  # conjugate bits are resolved above kernels
            step.call = fastest_op_calls.plain(node.op)
            continue
        stand_ins = _stand_ins(node, made)

        def stand_in(item: Any, stand_ins: Mapping[TrackedValue, torch.Tensor] = stand_ins) -> Any:
            if type(item) in (list, tuple):
                return type(item)([stand_in(entry, stand_ins) for entry in item])
            return stand_ins[item] if isinstance(item, TrackedValue) else item

        named = {name: stand_in(item) for name, item in node.kwargs.items()}
        trials[step] = node, [stand_in(item) for item in node.args], named
    if trials:
        with fastest_op_calls.proving() as quickest:
            for step, (node, args, kwargs) in trials.items():
                step.call = quickest(node.op, args, kwargs)


def _stand_ins(
    node: TrackedNode, made: dict[TensorMeta, list[torch.Tensor]]
) -> dict[TrackedValue, torch.Tensor]:
    """For each input, a tensor like it without memory; ``made`` are those of other nodes."""
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

    def __init__(self, subgraph: Subgraph, store_result: Give) -> None:
        self.numbers = subgraph.numbers
        self.names: dict[str, Any] = {
            "store_result": store_result,
            "perf_counter": perf_counter,
            "set_grad_enabled": fastest_op_calls.set_grad_enabled,
            "state_of": state_of,
            "stopped": self.stopped,
            "partial": partial,
            "chain": chain,
            "guarded": write_rollback.guarded,
            "noted": write_rollback.noted,
        }
        self.results: list[Sequence[tuple[int, str]]] = []  # the nodes' positions and names
        self.constants: dict[Any, str] = {}
        self.text: list[str] = []
        self.alive: dict[str, None] = dict.fromkeys(name_of(self.numbers[v]) for v in subgraph.outside)

    def function(self, nodes: list[Line]) -> Code:
        parts: list[Code] = []
        left: list[list[str]] = []
        self.total = len(nodes)
        for start in range(0, len(nodes), NODES_IN_ONE):
            given = list(self.alive)
            self.text = []
            for line in nodes[start : start + NODES_IN_ONE]:
                self._write(line)
            parts.append(self._compiled(given))
            left.append(list(self.alive))
        return parts[0] if len(parts) == 1 else _one_after_another(parts, left)

    def _compiled(self, given: list[str]) -> Code:
        """A function of the lines so far, which receives these variables and returns those that are alive."""
        text = [f"def replay({_PARAMETERS}):"]
        if given:
            text.append(f" {', '.join(given)}, = tensors")
        text += [
            " ran, begun = [], []",
            " try:",
            "  tensors.clear()",
            *[f"  {line}" for line in self.text],
        ]
        text += [
            " except BaseException as error:",
            "  return stopped(error, locals(), ran, begun, len(times) - 1)",
        ]
        if self.alive:
            text.append(f" tensors += {', '.join(self.alive)},")
        exec(compile(_on_one_line(ast.parse("\n".join(text))), "<lazyviz replay>", "exec"), self.names)
        code: Code = self.names.pop("replay")
        return code

    def stopped(
        self,
        error: BaseException,
        variables: dict[str, Any],
        ran: Sequence[Any],
        begun: Sequence[Any],
        done: int,
    ) -> Stopped:
        """The return value of a function that was stopped after ``done`` nodes."""
        if done >= len(self.results):
            return error, variables, False, False
        names = self.results[done]
        if has_run := len(ran) == 2 and ran[1] == done:
            result = ran[0] if isinstance(ran[0], (list, tuple)) else (ran[0],)
            variables = {**variables, **{name: result[position] for position, name in names}}
        else:
            has_run = bool(names) and all(name in variables for _, name in names)
        return error, variables, has_run, bool(begun) and not has_run

    def _write(self, line: Line) -> None:
        """Write the lines of one node."""
        text, results = self.text, line.results
        number = len(self.results)
        if line.grad_mode is not None:
            text.append(f"set_grad_enabled({line.grad_mode})")
        text.append(f"if arrived: arrived.handle('after {number} of {self.total} ops')")
        draw = f"draws[{line.draw}]"
        if line.draw != NOWHERE:
            text.append(f"{draw}.generator.set_state({draw}.state)")
        names = {result.position: name_of(result.number) for result in results}
        self.results.append(tuple(names.items()))
        returns = line.node.op._schema.returns
        one = len(returns) == 1 and str(returns[0].type) == "Tensor"
        whole = 0 < len(names) == len(results) == len(returns) and str(returns[0].type) == "Tensor"
        if line.node.writes or line.draw != NOWHERE:
            # An interrupted kernel that ran again would write or draw twice. No Python code runs between the
            # kernel and its bookkeeping, so no asynchronous exception can occur there.
            text.append(f"ran[:] = chain({self._mapped(line)}, ({number},))")
            call = "ran[0]"
        else:
            call = self._call(line)
        if not results:
            text += [call] if call != "ran[0]" else []
        elif whole:
            text.append(f"{', '.join(names[at] for at in sorted(names))} = {call}")
        else:
            text.append(f"results = {call}")
            if one:
                text.append("results = (results,)")
            text += [f"{name_of(result.number)} = results[{result.position}]" for result in results]
            text.append("del results")
        if line.draw != NOWHERE:
            text.append(f"{draw}.state = state_of({draw}.generator)")
        for result in results:
            name = name_of(result.number)
            if result.later != NOWHERE:
                text.append(f"later[{result.later}].real = {name}")
            if result.user != NOWHERE:
                text.append(f"store_result(users[{result.user}], {name})")
        text.append("times.append(perf_counter())")
        if call == "ran[0]":
            text.append("ran.clear()")
        if line.refused:
            text.append("begun.clear()")
        self.alive.update(dict.fromkeys(name_of(result.number) for result in results))
        gone = [name_of(number) for number in line.gone]
        if gone:
            text.append(f"del {', '.join(gone)}")
            for name in gone:
                del self.alive[name]
        text.append("if done: done()")

    def _call(self, line: Line) -> str:
        """The expression that calls the kernel."""
        args, kwargs = self._arguments(line)
        return f"{self._constant(line.step.call)}({', '.join([*args, *kwargs])})"

    def _mapped(self, line: Line) -> str:
        """An iterator that calls the kernel when its only item is requested."""
        args, kwargs = self._arguments(line)
        kernel = f"partial({', '.join([self._constant(line.step.call), *args, *kwargs])})"
        if line.refused:
            return f"noted(begun, {kernel})"
        if line.copied:
            kernel = f"partial(guarded, ({', '.join(map(name_of, line.copied))},), {kernel})"
        return f"map({self._constant(partial.__call__)}, ({kernel},))"

    def _arguments(self, line: Line) -> tuple[list[str], list[str]]:
        varying = {place: f"scalars[{number}]" for place, number in line.scalars.items()}
        args = [varying.get(at) or self._argument(item) for at, item in enumerate(line.node.args)]
        kwargs = line.node.kwargs.items()
        return args, [f"{name}={varying.get(name) or self._argument(item)}" for name, item in kwargs]

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
        """The name of an object that is the same in each run."""
        key = (type(item), repr(item)) if isinstance(item, (list, tuple, float)) else id(item)
        if key not in self.constants:
            name = self.constants[key] = f"c{len(self.constants)}"
            self.names[name] = item
        return self.constants[key]


def _on_one_line(tree: ast.Module) -> ast.Module:
    """Set all line numbers to 1, because warnings of kernels have the line of the calling frame.

    See :func:`~lazyviz.record.interception.warning_routing.moved_to_users_line`.
    """
    for node in ast.walk(tree):
        for name in ("lineno", "end_lineno"):
            if hasattr(node, name):
                setattr(node, name, 1)
        for name in ("col_offset", "end_col_offset"):
            if hasattr(node, name):
                setattr(node, name, 0)
    return tree


def _one_after_another(parts: list[Code], left: list[list[str]]) -> Code:
    """A function that calls ``parts`` in sequence; ``left`` has the names of the tensors that each leaves in
    the list for the next one.
    """

    def replay(tensors: list[torch.Tensor], *arguments: Any) -> Stopped | None:
        names: list[str] = []
        try:
            for part, names_then in zip(parts, left):
                stopped = part(tensors, *arguments)
                if stopped is not None:
                    return stopped
                names = names_then
        except BaseException as error:  # between two parts
            if not names:
                raise
            return error, dict(zip(names, tensors)), False, False
        return None

    return replay
