"""Data flow between ops: the values that each op reads, and its lane, training step, and update."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...graph.ir import Graph, Node, Phase, SourceLine, Value
from ...graph.modules import full_name
from ...plan.runtime.last_training_step import end_of_initialization

# For each node, the values that it reads, each with the position of the node that created it.
Reads = list[list[tuple["int | None", Value]]]

KEPT = ("parameter", "buffer", "optimizer")  # roles of tensors that exist longer than a step
LOOSE_OPS = 24  # ops outside of modules in one lane; more are grouped by source line
# A line that creates an object: variable and class.  Only the first line of a statement is recorded.
_MADE = re.compile(r"([\w.]+)\s*(?::[^=]+)?=\s*(?:\w+\.)*([A-Z]\w*)\(")
_STEPS = re.compile(r"[\w.\[\]'\"]+\.step\([\w., ]*\)")  # of an optimizer, or of a gradient scaler
# Ops that act like views, although their schemas do not declare them as views.
LIKE_VIEWS = {
    "aten::_conj",
    "aten::_reshape_alias",
    "aten::_unsafe_view",
    "aten::detach",
    "aten::lift_fresh",
}


def hidden_views(graph: Graph) -> list[bool]:
    """For each node, whether it only creates a view, and is therefore hidden in its consumer's box."""
    by_op: dict[object, bool] = {}
    hidden = []
    for node in graph.nodes:
        known = by_op.get(node.op)
        if known is None:
            known = by_op[node.op] = bool(node.op.is_view) or node.op._schema.name in LIKE_VIEWS
        hidden.append(known and bool(node.inputs) and node.state != "failed")
    return hidden


def data_flow(graph: Graph, hidden: list[bool]) -> tuple[Reads, dict[int, list[Node]]]:
    """The values that each node reads, with hidden views resolved to their base; and the hidden views that
    each node reads through.
    """
    nodes = graph.nodes
    reads: Reads = []
    behind: dict[int, list[Node]] = {}
    waiting: dict[int, list[Node]] = {}  # hidden views, by the id of their result
    writer: dict[int, int] = {}  # last node that wrote a storage in place
    origin: dict[int, tuple[int | None, Value]] = {}  # of hidden nodes
    for index, node in enumerate(nodes):
        found: list[tuple[int | None, Value]] = []
        seen: set[int] = set()
        for value in node.inputs:
            if value.id in seen:
                continue
            seen.add(value.id)
            maker = value.node
            known = maker is not None and maker.index < index and nodes[maker.index] is maker
            producer = maker.index if maker is not None and known else None
            if producer is not None and hidden[producer]:
                producer, source = origin[producer]
            else:
                source = value
            written = writer.get(value.storage.id)
            if written is not None and (producer is None or written > producer):
                producer, source = written, value
            found.append((producer, source))
            if value.id in waiting:
                (waiting if hidden[index] else behind).setdefault(
                    node.outputs[0].id if hidden[index] and node.outputs else index, []
                ).extend(waiting[value.id])
        if hidden[index]:
            origin[index] = found[0]
            for output in node.outputs:
                waiting.setdefault(output.id, []).append(node)
        for storage in node.writes:
            writer[storage.id] = index
        reads.append(found)
    return reads, behind


def drawn_lanes(graph: Graph) -> list[Phase]:
    """The lane of each node as the picture shows it."""
    return lanes_of(graph, data_flow(graph, hidden_views(graph))[0])


def steps_of(graph: Graph, lanes: Sequence[Phase], reads: Reads) -> list[int]:
    """The training step of each node: a new step starts with the first forward op after a backward pass.

    Only forward ops that are followed by a backward pass start a step; ops that only read results of the
    previous step belong to that one.
    """
    steps: list[int] = []
    step, after, begin = 0, False, 0
    last = max((index for index, lane in enumerate(lanes) if lane == "backward"), default=-1)
    of_gradients = _of_gradients(graph, reads, _first_backward(lanes))
    for index, (node, lane) in enumerate(zip(graph.nodes, lanes, strict=True)):
        if lane in ("backward", "optimizer"):
            after, begin = True, index + 1
        elif node.phase == lane == "forward" and not of_gradients[index] and after and index < last:
            step, after = step + 1, False
            steps[begin:] = [step] * (index - begin)  # loading the next batch belongs to its step
        steps.append(step)
    return _repeating(graph, steps, lanes)


def _repeating(graph: Graph, steps: list[int], lanes: Sequence[Phase]) -> list[int]:
    """``steps``, with a repeating sequence of different steps merged into one step.

    For example, the steps of two models that are trained alternately are merged. Iterations of a loop with
    a single ``backward()`` line are not.

    Ops of an optimizer are ignored, because it creates its state in the first step.
    """
    content: dict[int, list[object]] = {}
    lines: dict[int, object] = {}  # of the backward pass
    for node, step, lane in zip(graph.nodes, steps, lanes, strict=True):
        if lane in ("forward", "backward"):
            content.setdefault(step, []).append(node.op)
        if lane == "backward" and node.source is not None:
            lines.setdefault(step, (node.source, node.callers))
    kinds = [hash(tuple(content.get(step, ()))) for step in range(steps[-1] + 1 if steps else 0)]
    count = len(kinds)
    if len(set(kinds)) == 1 or (len(lines) == count and len(set(lines.values())) == 1):
        return steps
    period = next(
        (
            period
            for period in range(1, count)
            if count % period == 0 and all(kinds[at] == kinds[at - period] for at in range(period, count))
        ),
        count if len(set(kinds)) == count else 1,
    )
    return [step // period for step in steps]


def lanes_of(graph: Graph, reads: Reads) -> list[Phase]:
    """The lane of each node: its phase, unless it is an op outside of modules.

    An op outside of modules is drawn where it belongs. Creating a model, loading its weights, and moving it
    to a device are initialization (``"other"``), because they are not part of a step. Ops that write
    parameters or gradients after a backward pass, as in ``p -= 0.1 * p.grad``, are in the optimizer lane.
    Ops whose results only these ops read are in the same lane. If many ops precede the complete model, they
    create a data set and are initialization, too. All others are in the forward lane.
    """
    nodes = graph.nodes
    lanes: list[Phase] = [node.phase for node in nodes]
    counters = _counters(graph)
    called, complete = _first_call(graph), _end_of_data(nodes)
    backward = _first_backward(lanes)
    of_gradients = _of_gradients(graph, reads, backward, returned=True)
    readers = [0] * len(nodes)  # the lanes of each node's readers, as bits
    for index in reversed(range(len(nodes))):
        node = nodes[index]
        if lanes[index] in ("other", "forward") and not node.module:
            leads = bool(readers[index] & _BITS["forward"])
            if index > backward and _updates(node, backward, of_gradients[index]):
                lanes[index] = "optimizer"
            elif index < complete or _initializes(node, counters, before=index < called, leads=leads):
                lanes[index] = "other"
            elif index > backward and readers[index] == _BITS["optimizer"]:
                lanes[index] = "optimizer"
            elif node.phase == "forward" or readers[index] != _BITS["other"]:
                lanes[index] = "forward"
        for producer, _ in reads[index]:
            if producer is not None:
                readers[producer] |= _BITS[lanes[index]]
    return lanes


_BITS: dict[Phase, int] = {"forward": 1, "backward": 2, "optimizer": 4, "other": 8}


def _end_of_data(nodes: Sequence[Node]) -> int:
    """The position at which the model is complete if many other ops, which create a data set, come before;
    otherwise 0.
    """
    complete = end_of_initialization(nodes)
    others = [
        node for node in nodes[:complete] if all(value.storage.role not in KEPT for value in node.outputs)
    ]
    return complete if len(others) > LOOSE_OPS else 0


def _first_backward(lanes: Sequence[Phase]) -> int:
    """The position of the first op of a backward pass; without one, the number of ops."""
    return next((index for index, phase in enumerate(lanes) if phase == "backward"), len(lanes))


def _updates(node: Node, backward: int, of_gradients: bool) -> bool:
    """Whether ``node`` writes gradients, or parameters created before the position ``backward``.

    Other tensors count as parameters if ``node`` runs outside of autograd and reads gradients
    (``of_gradients``).
    """
    return any(
        storage.role == "gradient"
        or (
            storage.created < backward
            and (storage.role == "parameter" or (of_gradients and node.phase == "other"))
        )
        for storage in node.writes
    )


def _of_gradients(graph: Graph, reads: Reads, backward: int, *, returned: bool = False) -> list[bool]:
    """For each node after ``backward``, whether it reads gradients or values computed from them.

    ``returned``: also gradients that ``torch.autograd.grad`` returns; without it, a gradient penalty, which
    is computed from these, stays a part of the loss.  Tensors that the first forward pass reads, such as
    weights, do not count, even if they were updated from gradients.
    """
    nodes = graph.nodes
    weights = {value.storage.id for node in nodes[:backward] for value in node.inputs}
    result = [False] * len(nodes)
    for index in range(backward, len(nodes)):
        result[index] = nodes[index].phase != "backward" and any(
            value.storage.role == "gradient"
            or (
                producer is not None
                and (result[producer] or (returned and nodes[producer].phase == "backward"))
                and value.storage.id not in weights
            )
            for producer, value in reads[index]
        )
    return result


def _initializes(node: Node, counters: set[int], *, before: bool, leads: bool) -> bool:
    """Whether ``node`` creates or fills a parameter, buffer, or optimizer state, or copies a model.

    ``before``: it runs before the first call of a module. ``leads``: the forward pass reads its results.
    """
    index = node.index
    kept = any(
        (
            value.storage.role in KEPT
            and (node.phase == "other" or value.storage.created == index or (node.writes and before))
        )
        or (value.storage.id in counters and before)
        for value in node.outputs
    )
    return kept or (before and not leads and _is_copy(node, counters))


def _first_call(graph: Graph) -> int:
    """The position of the first op inside a module or, without one, of the first backward op; else 0."""
    for found in (
        (node.index for node in graph.nodes if node.module or node.root),
        (node.index for node in graph.nodes if node.phase == "backward"),
    ):
        if (first := next(found, None)) is not None:
            return first
    return 0


def _counters(graph: Graph) -> set[int]:
    """Ids of scalar storages that modules update in place, such as ``num_batches_tracked``."""
    return {
        value.storage.id
        for node in graph.nodes
        if node.writes and (node.module or node.root)
        for value in node.outputs
        if not value.meta.shape and value.storage in node.writes
    }


def initializations(graph: Graph, lanes: Sequence[Phase]) -> set[int]:
    """Positions of the ops that initialize parameters, buffers, and optimizer states."""
    called = _first_call(graph)
    if called == 0 or "forward" not in lanes:
        return set()
    counters = _counters(graph)
    return {
        node.index
        for node in graph.nodes[:called]
        if lanes[node.index] == "other"
        and (
            _is_copy(node, counters)
            or all(value.storage.role in KEPT or value.storage.id in counters for value in node.outputs)
        )
    }


def _is_copy(node: Node, counters: set[int]) -> bool:
    """Whether ``node`` reads only parameters, buffers, optimizer states, and counters of modules."""
    return bool(node.inputs) and all(
        value.storage.role in KEPT or value.storage.id in counters for value in node.inputs
    )


def crowded_lanes(
    graph: Graph, hidden: list[bool], steps: list[int], lanes: Sequence[Phase]
) -> set[tuple[int, str]]:
    """The (step, phase) lanes with more than :data:`LOOSE_OPS` ops outside of modules."""
    loose: dict[tuple[int, str], int] = {}
    for index, node in enumerate(graph.nodes):
        if not node.root and not node.module and not hidden[index]:
            lane = steps[index], lanes[index]
            loose[lane] = loose.get(lane, 0) + 1
    return {lane for lane, count in loose.items() if count > LOOSE_OPS}


def _made_there(source: SourceLine) -> str:
    """``"opt Adagrad"`` for ``opt = torch.optim.Adagrad(...)``, else the code of the line."""
    text = source.text.strip()
    made = _MADE.match(text)
    return f"{made[1]} {made[2]}" if made is not None else text


def step_on(source: SourceLine | None) -> str:
    """``"opt.step()"``, if that is the whole line, or the only such statement on it."""
    text = source.text.partition("#")[0] if source is not None else ""
    found = [part.strip() for part in text.split(";") if _STEPS.fullmatch(part.strip())]
    return found[0] if len(found) == 1 else ""


def updates(nodes: list[Node], lanes: Sequence[Phase]) -> dict[int, tuple[object, str]]:
    """For each optimizer op, the key and label of the parameter update that it is part of.

    An op that writes parameters belongs to their update. An op that serves only one update, at the same line
    (creating or changing its state), belongs to that update. The others are grouped by source line.
    """
    result: dict[int, tuple[object, str]] = {}
    serves: dict[int, tuple[object, str, object] | None] = {}  # by storage id; None: several updates
    for node in reversed(nodes):
        if lanes[node.index] != "optimizer":
            continue
        written = [storage for storage in node.writes if storage.role == "parameter"]
        update: tuple[object, str, object] | None = None
        if written:
            only_name = full_name(written[0].name) or "1 parameter"
            label = f"update {only_name if len(written) == 1 else f'{len(written)} parameters'}"
            update = tuple(storage.id for storage in written), label, node.source
        else:
            touched = {value.storage.id for value in node.outputs}.union(
                storage.id for storage in node.writes
            )
            served = {serves[storage] for storage in touched if storage in serves}
            only = served.pop() if len(served) == 1 else None
            if only is not None and only[2] == node.source:
                update = only
        if update is not None:
            result[node.index] = update[0], update[1]
        else:
            source = node.source
            result[node.index] = ("line", source), _made_there(source) if source is not None else "optimizer"
        for storage in {value.storage for value in node.inputs}:
            if storage.role == "parameter" or (storage.id in serves and serves[storage.id] != update):
                serves[storage.id] = None if storage.role != "parameter" else serves.get(storage.id)
            else:
                serves[storage.id] = update
    return {index: result[index] for index in sorted(result)}
