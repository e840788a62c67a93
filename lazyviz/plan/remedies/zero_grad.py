"""The remedy ``zero_grad``: gradients that an optimizer has used are freed before memory is needed again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...graph.ir import Node, SourceLine
from ...graph.modules import full_name
from ..liveness.allocation_trace import Hold, Key, Program, Step
from ..node_formatting import line_text
from .what_if_edits import Changed

_ZEROING = frozenset({"zero_", "_foreach_zero_"})


def zero_grad(program: Program, at: int) -> Iterator[Changed]:
    """``zero_grad()`` earlier, or with ``set_to_none=True``, for gradients that nothing needs at the peak.

    Gradients that are only dropped later, as by ``zero_grad()`` between forward and backward pass, could be
    dropped after the optimizer's step: exact. Those that are set to zero, so that the backward pass adds to
    them, could be dropped instead of that; the gradient that was added is then kept itself: an estimate,
    because autograd copies it if other code refers to it.
    """
    uses: dict[Key, list[int]] = {}
    for position, step in enumerate(program.steps):
        for key in step.uses:
            if key < len(program.storages) and program.storages[key].role == "gradient":
                uses.setdefault(key, []).append(position)
    yield from _dropped_earlier(program, at, uses)
    yield from _dropped_instead_of_zeroed(program, at, uses)


def _dropped_earlier(program: Program, at: int, uses: dict[Key, list[int]]) -> Iterator[Changed]:
    spans = program.spans()
    ends = _ends_of_steps(program)
    stepped: dict[SourceLine | None, dict[Key, int]] = {}  # the step's line, the gradients, the step's end
    for key, positions in uses.items():
        end = ends[positions[-1]]
        if end >= spans[key][1] or not (
            key in program.kept or (key in program.held and program.held[key].last is None)
        ):
            continue
        if (update := _update(program, key, positions[-1], end)) is not None:
            stepped.setdefault(update.source, {})[key] = end
    for source, idle in stepped.items():
        if not any(end <= at < spans[key][1] for key, end in idle.items()):
            continue
        changed = program.copy()
        changed.kept.difference_update(idle)
        for key, end in idle.items():
            changed.held[key] = Hold(program.places[program.steps[end - 1].node] + 1, None)
        text = f"zero_grad() right after the optimizer's step{_at(source)}"
        yield Changed("zero_grad", text, changed, source)


def _ends_of_steps(program: Program) -> list[int]:
    """For each position, where the ops of optimizers end that it belongs to: it, if it belongs to none."""
    ends = list(range(len(program.steps)))
    end = len(ends)
    for position in range(len(ends) - 1, -1, -1):
        if program.steps[position].node.phase == "optimizer":
            ends[position] = end
        else:
            end = position
    return ends


def _update(program: Program, key: Key, start: int, end: int) -> Node | None:
    """The op between these positions that updates the parameter with this gradient.

    Clipping is an optimizer's op, too; a recording may have ended between it and the step.
    """
    gradient = program.storages[key]
    parameter = full_name(gradient.name).removesuffix(".grad")
    for step in reversed(program.steps[start:end]):
        for storage in step.node.writes:
            if (
                storage.role == "parameter"
                and storage.nbytes == gradient.nbytes
                and (full_name(storage.name) == parameter or not parameter)
            ):
                return step.node
    return None


def _dropped_instead_of_zeroed(program: Program, at: int, uses: dict[Key, list[int]]) -> Iterator[Changed]:
    changed = program.copy()
    last = {key: position for position, step in enumerate(program.steps) for key in step.uses}
    zeroing: list[tuple[int, int]] = []  # positions of the zeroing, and of what adds to the zeros
    for key, positions in uses.items():
        zeroing += _without_zeroing(program, changed, key, positions, last)
    if not zeroing:
        return
    # The line whose zeros exist at the peak, or come next.
    position = min(zeroing, key=lambda pair: (not pair[0] <= at <= pair[1], abs(pair[0] - at)))[0]
    source = program.steps[position].node.source
    text = (
        f"zero_grad(set_to_none=True), which frees the gradients instead of setting them to zero{_at(source)}"
    )
    yield Changed("zero_grad", text, changed, source, estimate=True)


def _without_zeroing(
    program: Program, changed: Program, key: Key, positions: list[int], last: Mapping[Key, int]
) -> list[tuple[int, int]]:
    """Split a gradient into one allocation for each backward pass; returns where it was set to zero and
    where that was added to.
    """
    nodes = [program.steps[position].node for position in positions]
    pairs = [
        index
        for index in range(1, len(nodes) - 1)
        if _name(nodes[index]) in _ZEROING and _adds_to(program, nodes[index + 1], key)
    ]
    current = key
    for index in pairs:
        zeroed, added = positions[index], positions[index + 1]
        changed.steps[zeroed] = _without(changed.steps[zeroed], current)
        summand = _own_summand(program, nodes[index + 1], last)
        new = changed.key(key) if summand is None else summand
        for position in positions[index + 1 :]:
            step = changed.steps[position]
            used = dict.fromkeys(new if each == current else each for each in step.uses)
            makes = (*step.makes, new) if position == added and summand is None else step.makes
            changed.steps[position] = step._replace(uses=tuple(used), makes=makes)
        current = new
    if current != key:
        if key in changed.kept:
            changed.kept.remove(key)
            changed.kept.add(current)
        if (hold := changed.held.pop(key, None)) is not None:
            changed.held[current] = hold
    return [(positions[index], positions[index + 1]) for index in pairs]


def _adds_to(program: Program, node: Node, key: Key) -> bool:
    """Whether autograd adds to the gradient with this key."""
    return (
        node.phase == "backward"
        and _name(node) == "add_"
        and len(node.inputs) > 1
        and program.keys.get(node.inputs[0].storage) == key
    )


def _own_summand(program: Program, node: Node, last: Mapping[Key, int]) -> Key | None:
    """What is added, if autograd could keep it as the gradient: new memory that nothing else uses later."""
    key = program.keys.get(node.inputs[1].storage)
    if key is None or program.makers[key] < 0 or key in program.kept or key in program.held:
        return None
    if program.sizes[key] != node.inputs[0].storage.nbytes:
        return None
    return key if last[key] == node.index and program.storages[key].role is None else None


def _without(step: Step, key: Key) -> Step:
    return step._replace(uses=tuple(each for each in step.uses if each != key))


def _name(node: Node) -> str:
    return node.op._schema.name.rpartition("::")[2]


def _at(source: SourceLine | None) -> str:
    return f" at {line_text(source)}" if source is not None else ""
