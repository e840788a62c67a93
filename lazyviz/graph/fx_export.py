"""Export to ``torch.fx``: the recorded program as a ``GraphModule``."""

from __future__ import annotations

import keyword
import operator
import re
from typing import Any

import torch
from torch import fx

from .ir import RAN_AT_ONCE, Graph, Node, Storage, Value


def to_fx(graph: Graph) -> fx.GraphModule:
    """A module that runs the recorded operators on given inputs.

    Its arguments are the external tensors, in order of first use (:func:`fx_inputs`); it returns a tuple of
    :func:`fx_outputs`. As in the recorded program, in-place operators mutate their arguments, and random
    operators use the default generator.
    """
    module = torch.nn.Module()
    target = fx.Graph()
    env: dict[Value, fx.Node] = {}
    names: set[str] = set()
    for number, value in enumerate(fx_inputs(graph)):
        name = re.sub(r"\W", "_", value.name or value.storage.name)
        if not name.isidentifier() or name in names or keyword.iskeyword(name):
            name = f"input_{number}_{name}".rstrip("_")
        names.add(name)
        env[value] = target.placeholder(name)
    for node in _operators(graph):
        args = tuple([_translate(item, env) for item in node.args])
        kwargs = {name: _translate(item, env) for name, item in node.kwargs.items()}
        result = target.call_function(node.op, args, kwargs)
        if node.source is not None:
            source = node.source
            result.stack_trace = f'  File "{source.file}", line {source.line}\n    {source.text}'
        _outputs(target, node, result, env)
    target.output(tuple([env[value] for value in fx_outputs(graph)]))
    return fx.GraphModule(module, target, class_name="LazyGraph")


def fx_inputs(graph: Graph) -> list[Value]:
    """The values that no node of ``graph`` produces, in order of first use."""
    made: set[Value] = set()
    found: dict[Value, None] = {}
    for node in _operators(graph):
        for value in node.inputs:
            if value not in made:
                found[value] = None
        made.update([value for value in node.outputs if value not in found])
    return list(found)


def fx_outputs(graph: Graph) -> list[Value]:
    """The results that are still referenced.

    For every live storage that the graph created: its first value, and the views of it that no node reads. If
    no storage is alive, the outputs of the last node.
    """
    read: set[Value] = set()
    for node in _operators(graph):
        read.update(node.inputs)
    own = set(graph.storages)
    seen: set[Storage] = set()
    result: dict[Value, None] = {}
    for node in _operators(graph):
        for value in node.outputs:
            storage = value.storage
            if storage.external or storage.dropped is not None or storage not in own:
                continue
            if storage not in seen or value not in read:
                result[value] = None
            seen.add(storage)
    if not result and (nodes := _operators(graph)):
        return list(nodes[-1].outputs)
    return list(result)


def _operators(graph: Graph) -> list[Node]:
    """The nodes that call operators, except those that represent code that ran during recording."""
    return [node for node in graph.nodes if node.op._schema.name != RAN_AT_ONCE]


def _translate(item: Any, env: dict[Value, fx.Node]) -> Any:
    if isinstance(item, Value):
        return env[item]
    if isinstance(item, (list, tuple)):  # never nested deeper than a list of lists
        return type(item)([_translate(part, env) for part in item])
    return item


def _outputs(target: fx.Graph, node: Node, result: fx.Node, env: dict[Value, fx.Node]) -> None:
    returns = node.op._schema.returns
    if len(returns) == 1 and str(returns[0].type) == "Tensor":
        for value in node.outputs:
            env[value] = result
        return
    if node.outputs and len(node.outputs) < len(returns):
        # The schema does not say which of them are missing (convolution_backward's output_mask).
        result = target.call_function(present, (result,))
    for position, value in enumerate(node.outputs):
        env[value] = target.call_function(operator.getitem, (result, position))


def present(results: Any) -> list[torch.Tensor]:
    """The results of an operator that are not ``None``."""
    return [item for item in results if item is not None]
