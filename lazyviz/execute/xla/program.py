"""Segments as functions of JAX arrays, and conversion of tensors to and from JAX.

PyTorch itself functionalizes the segment (:mod:`lazyviz.torch_internals.functionalization`): without in-place
writes and views, and with operators decomposed as needed for the lowerings in :mod:`lazyviz.execute.xla.ops`.
 The result is called on JAX tracers, operator by operator, so that XLA gets the whole program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import fx

from ...graph.ir import Node, Storage, Value
from ...torch_internals import functionalization
from ..compiler.fx_lowering import NotLowered, lower
from . import indexing as _indexing  # noqa: F401  (these two fill the table of `ops`)
from . import layers as _layers  # noqa: F401
from . import ops as xla_ops

aten = torch.ops.aten


@dataclass(frozen=True)
class Argument:
    """One array that a program receives: a single input, or the memory that several inputs share.

    ``places`` are the positions of these inputs; ``whole``: the array covers all of their memory.
    """

    places: tuple[int, ...]
    whole: bool


def arguments(inputs: Sequence[Value], written: set[Storage]) -> list[Argument]:
    """The arrays to pass: inputs on one memory that is written must be views of one array.

    Raises:
        NotLowered: they cannot be.
    """
    places: dict[Storage, list[int]] = {}
    for at, value in enumerate(inputs):
        places.setdefault(value.storage, []).append(at)
    result = []
    for storage, group in places.items():
        values = [inputs[at] for at in group]
        if storage not in written or (len(group) == 1 and _is_dense(values[0])):
            result += [Argument((at,), False) for at in group]
            continue
        if len({value.meta.dtype for value in values}) > 1 or storage.nbytes % values[0].meta.dtype.itemsize:
            raise NotLowered("tensors of different dtypes share memory that is written")
        result.append(Argument(tuple(group), True))
    return result


def _is_dense(value: Value) -> bool:
    return all(step or size <= 1 for size, step in zip(value.meta.shape, value.meta.stride))


@dataclass(frozen=True)
class Functional:
    """A segment without writes: ``graph`` returns its results, then the new contents of the ``writes``
    (arguments).
    """

    graph: fx.GraphModule
    inputs: int
    arguments: Sequence[Argument]
    results: int
    writes: Sequence[int]


def functional(
    nodes: Sequence[Node],
    inputs: Sequence[Value],
    kept: Sequence[Value],
    groups: Sequence[Sequence[int]],
    numbers: Sequence[float],
    table: Mapping[Any, Callable[..., Any]],
) -> Functional:
    """``nodes`` as a program from ``inputs`` and ``numbers``, one for each of ``groups``, to ``kept``.

    Raises:
        NotLowered: they cannot be made functional.
    """
    given = arguments(inputs, {storage for node in nodes for storage in node.writes})
    recorded = lower(nodes, inputs, kept, groups)

    def program(*parts: Any) -> Any:
        views: dict[int, Any] = {}
        for argument, part in zip(given, parts):
            for at in argument.places:
                meta = inputs[at].meta
                views[at] = part.as_strided(meta.shape, meta.stride, meta.offset) if argument.whole else part
        return recorded(*[views[at] for at in range(len(inputs))], *parts[len(given) :])

    specs = [_spec(argument, inputs) for argument in given]
    module = functionalization.functional_graph(program, specs, numbers, table)
    graph = module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    output = next(iter(reversed(graph.nodes)))
    results = list(output.args[0])
    writes: dict[int, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is aten.copy_.default:
            writes[placeholders.index(node.args[0])] = node.args[1]
            node.replace_all_uses_with(node.args[1])
            graph.erase_node(node)
    output.args = ((*results, *writes.values()),)
    graph.eliminate_dead_code()
    return Functional(module, len(inputs), given, len(results), tuple(writes))


def _spec(argument: Argument, inputs: Sequence[Value]) -> functionalization.Spec:
    value = inputs[argument.places[0]]
    shape, stride = value.meta.shape, value.meta.stride
    if argument.whole:
        shape, stride = (value.storage.nbytes // value.meta.dtype.itemsize,), (1,)
    return shape, stride, value.meta.dtype, value.meta.device


def argument_tensors(given: Sequence[Argument], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The arrays for ``given``, as tensors, from the inputs ``tensors``."""
    parts = []
    for argument in given:
        tensor = tensors[argument.places[0]]
        if argument.whole:
            storage = tensor.untyped_storage()
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            tensor = whole.set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))
        parts.append(tensor)
    return parts


def traced(program: Functional) -> Callable[..., Any]:
    """``program`` on JAX arrays: from numbers and arrays to results, writes, and whether all conditions hold.

    Raises:
        NoLowering: while it is traced, of an operator.
    """

    def run(numbers: Sequence[Any], arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        checks: list[jax.Array] = []
        known: dict[fx.Node, Any] = {}
        given = iter((*arrays, *numbers))

        def argument(item: Any, own: bool = True) -> Any:
            if isinstance(item, fx.Node):
                return known[item]
            if isinstance(item, (list, tuple)):
                return type(item)([argument(each, own) for each in item])
            return xla_ops.DTYPES[item] if own and isinstance(item, torch.dtype) else item

        for node in program.graph.graph.nodes:
            if node.op == "placeholder":
                known[node] = next(given)
            elif node.op == "get_attr":
                constant = getattr(program.graph, node.target)
                known[node] = jnp.asarray(constant.numpy())
            elif node.op == "call_function":
                known[node] = _call(node, argument, lambda ok: checks.append(jnp.all(ok)))
            elif node.op == "output":
                right = jnp.stack(checks).all() if checks else jnp.asarray(True)
                # JAX returns an unchanged argument as the same array, on memory that may be written next.
                given_back = [
                    jnp.copy(known[each]) if each.op == "placeholder" else known[each]
                    for each in node.args[0]
                ]
                return given_back, right
        raise AssertionError("a graph must end with its output node")

    return run


_LEFT_OUT = {"device", "layout", "pin_memory", "memory_format", "non_blocking"}


def _call(node: fx.Node, argument: Callable[..., Any], require: Callable[[jax.Array], None]) -> Any:
    target = node.target
    if target is aten._local_scalar_dense.default:
        return argument(node.args[0])
    if target in xla_ops.SCALARS:
        return xla_ops.SCALARS[target](*map(argument, node.args))
    lowering = xla_ops.lowering_of(target)
    if lowering is None:
        raise xla_ops.NoLowering(f"{target} has no lowering")
    own = target in xla_ops.OWN  # torchax takes PyTorch's element types, ours JAX's
    args = [argument(item, own) for item in node.args]
    kwargs = {name: argument(item, own) for name, item in node.kwargs.items() if name not in _LEFT_OUT}
    if target in xla_ops.CHECKED:
        args.insert(0, require)
    args = _promoted(node, args)
    return _as_recorded(str(target), lowering(*args, **kwargs), node.meta.get("val"))


def _promoted(node: fx.Node, args: list[Any]) -> list[Any]:
    """``args`` of a pointwise operator in the element type that PyTorch computes in."""
    first = 1 if node.target is aten.where.self else 0
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()) or len(args) < first + 2:
        return args
    pair = [_example(item) for item in node.args[first : first + 2]]
    if None in pair:
        return args
    common = xla_ops.DTYPES[torch.result_type(*pair)]
    for at in (first, first + 1):
        if isinstance(args[at], jax.Array) and isinstance(pair[at - first], torch.Tensor):
            args[at] = xla_ops.convert(args[at], common)
    return args


def _example(item: Any) -> Any:
    """A value with the same element type and kind, for type promotion; None if either is unknown."""
    value = item.meta["val"] if isinstance(item, fx.Node) else item
    if isinstance(value, torch.Tensor):
        return torch.empty((0,) if value.dim() else (), dtype=value.dtype, device="cpu")
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return 1 if isinstance(value, torch.SymInt) else 1.0
    return value if isinstance(value, (int, float, complex)) else None


def _as_recorded(name: str, result: Any, expected: Any) -> Any:
    """``result`` in the recorded element types.

    Raises:
        NoLowering: it has other shapes.
    """
    if isinstance(expected, torch.Tensor):
        array = jnp.asarray(result)
        if array.shape != tuple(expected.shape):
            raise xla_ops.NoLowering(f"{name} gives {array.shape}, not {tuple(expected.shape)}")
        return xla_ops.convert(array, xla_ops.DTYPES[expected.dtype])
    if isinstance(expected, (list, tuple)):
        return [_as_recorded(name, *pair) for pair in zip(result, expected, strict=True)]
    return result


def shapes(inputs: Sequence[Value], given: Sequence[Argument]) -> list[jax.ShapeDtypeStruct]:
    """The known properties of the arrays for ``given``, before these exist."""
    specs = [_spec(argument, inputs) for argument in given]
    return [jax.ShapeDtypeStruct(tuple(shape), xla_ops.DTYPES[dtype]) for shape, _, dtype, _ in specs]
