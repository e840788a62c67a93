"""Program edits: changes that a user could make, and the allocations of the changed program.

Every function yields candidates, which are changed copies of the program; the caller computes from the peak
whether a candidate saves memory.  :mod:`lazyviz.plan.remedies.delete_variables_earlier`,
:mod:`lazyviz.plan.remedies.zero_grad` and :mod:`lazyviz.plan.remedies.memory_at_lower_precision` yield
others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import torch

from ...graph.ir import Node, SourceLine, Value, works_by_element
from ...graph.modules import OwnedName, full_name, known_path
from ..liveness.allocation_trace import Hold, Key, Program, Step
from ..liveness.lifetimes import formula_end
from ..node_formatting import family, line_text

MAX_FAMILIES = 10  # number of module families tried for recomputation


@dataclass(frozen=True, slots=True)
class Changed:
    """A changed program, the change that the user would make, and its cost.

    The cost is ``ops`` additional operators, and ``copied_bytes`` to the host and back.  ``at_best``: it may
    save less, never more.
    """

    kind: str
    text: str
    program: Program = field(repr=False)
    source: SourceLine | None = None
    ops: int = 0
    copied_bytes: int = 0
    numerics: bool = False
    estimate: bool = False
    at_best: bool = False


# --- autograd -------------------------------------------------------------------------


def no_grad(program: Program) -> Iterator[Changed]:
    """``with torch.no_grad()``: tensors that autograd saved in a block that never runs a backward pass.

    Exact if only autograd keeps unnamed tensors alive.
    """
    if any(step.node.phase == "backward" for step in program.steps):
        return
    keys = [
        key
        for key in program.kept
        if program.makers[key] >= 0
        and program.storages[key].role is None
        and not program.storages[key].variables
        and program.steps[program.makers[key]].node.phase in ("forward", "other")
    ]
    if keys:
        changed = program.copy()
        changed.kept.difference_update(keys)
        first = program.steps[min(program.makers[key] for key in keys)].node
        text = "with torch.no_grad(): this block runs no backward pass"
        yield Changed("no_grad", text, changed, first.source, estimate=True)


# --- in place -------------------------------------------------------------------------


def in_place(program: Program, at: int) -> Iterator[Changed]:
    """``inplace=True``, ``x += y``: pointwise operators whose input is not needed afterwards.

    Applied to all such operators together, because equal ones reach equal peaks. Tensors that autograd saved
    for a later backward pass have not been dropped, so they are not overwritten. Exact.
    """
    last: dict[Key, int] = {}
    for position, step in enumerate(program.steps):
        for key in (*step.uses, *step.makes):
            last[key] = position
    mapping: dict[Key, Key] = {}
    nodes: list[Node] = []
    for position, step in enumerate(program.steps):
        node = step.node
        if node.phase != "forward" or len(step.makes) != 1 or not _has_in_place_form(node):
            continue
        made, source = step.makes[0], node.inputs[0]
        key = program.keys.get(source.storage, -1)
        if (
            key < 0
            or key in program.kept
            or last[key] != position
            or program.makers[key] < 0
            or source.nbytes != program.sizes[key]
            or program.sizes[key] != program.sizes[made]
            or program.dtypes[key] != program.dtypes[made]
            or source.meta.shape != node.outputs[0].meta.shape
            or any(value.storage is source.storage for value in node.inputs[1:])
        ):
            continue
        mapping[made] = mapping.get(key, key)
        nodes.append(node)
    if not nodes:
        return
    changed = program.copy()
    changed.replaced(mapping)
    changed.steps = [
        step._replace(makes=tuple(key for key in step.makes if key not in mapping)) for step in changed.steps
    ]
    changed.kept = {mapping.get(key, key) for key in changed.kept}
    changed.held = {}
    for key, hold in sorted(program.held.items(), key=lambda each: each[1].until):
        changed.held[mapping.get(key, key)] = hold  # the last drop of the merged storages
    nodes = _above(changed.peak()[0], program, nodes)
    names = sorted({_op_name(node) for node in nodes})
    peak_node = next((node for node in nodes if program.places[node] >= at), nodes[-1])
    text = f"{', '.join(names)} in place ({_calls(nodes)})"
    yield Changed("inplace", text, changed, peak_node.source)


def _above(peak: int, program: Program, nodes: list[Node]) -> list[Node]:
    """Those of ``nodes`` during which there are more than ``peak`` bytes; all of them, if none.

    Only these have to be changed to stay below it: one in place takes less during itself alone.
    """
    during = {id(step.node): nbytes for step, nbytes in zip(program.steps, program.timeline())}
    return [node for node in nodes if during[id(node)] > peak] or nodes


def _has_in_place_form(node: Node) -> bool:
    """Whether the operator is elementwise and has an in-place variant in ATen with the same arguments."""
    name, overload = node.op._schema.name.rpartition("::")[2], node.op._overloadname
    if not works_by_element(node.op) or name.endswith("_") or not node.inputs:
        return False
    packet = getattr(torch.ops.aten, f"{name}_", None)
    return packet is not None and overload in packet.overloads() and node.args[:1] == (node.inputs[0],)


def _op_name(node: Node) -> str:
    return node.op._schema.name.rpartition("::")[2]


def _calls(nodes: list[Node]) -> str:
    lines = list(dict.fromkeys(line_text(node.source) for node in nodes if node.source is not None))
    modules = list(dict.fromkeys(family(known_path(node)) for node in nodes if node.module))
    where = [*modules[:2], *lines[:1]]
    times = f"{len(nodes)} calls" if len(nodes) > 1 else "1 call"
    return ", ".join([times, *where])


# --- the optimizer --------------------------------------------------------------------


def foreach(program: Program) -> Iterator[Changed]:
    """``foreach=False``: parameters are updated one after another, so that only the temporaries of one exist
    at a time.

    An estimate, within the size of the largest parameter: if the foreach implementation works in place on a
    temporary, another one of the same size is counted, because some loops of ``torch.optim`` allocate one
    (``denom`` in torch/optim/adam.py).
    """
    names = [_op_name(step.node) for step in program.steps]
    runs = [
        (run[0], run[-1] + 1)
        for is_optimizer, group in groupby(
            range(len(names)), key=lambda index: program.steps[index].node.phase == "optimizer"
        )
        if is_optimizer and (run := [index for index in group if names[index].startswith("_foreach_")])
    ]
    if not runs:
        return
    changed = program.copy()
    more = 0
    for start, stop in reversed(runs):
        steps = _one_by_one(changed, program.steps[start:stop])
        more += len(steps) - (stop - start)
        changed.steps[start:stop] = steps
    source = program.steps[runs[-1][0]].node.source
    text = "foreach=False in the optimizer"
    yield Changed("foreach", text, changed, source, ops=max(more, 0), estimate=True)


def _one_by_one(program: Program, steps: list[Step]) -> list[Step]:
    """Split steps on lists of tensors into steps on each tensor, grouped by parameter."""
    keys = program.keys
    temporary = {key for step in steps for key in step.makes} - program.kept
    for key in temporary:
        program.held.pop(key, None)  # the loop variables are rebound for the next parameter
    slices: list[tuple[Step, tuple[Key, ...]]] = []
    parent: dict[Key, Key] = {}

    def root(key: Key) -> Key:
        while parent.setdefault(key, key) != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    for step in steps:
        node = step.node
        if not _op_name(node).startswith("_foreach_"):
            slices.append((step, step.uses))
            continue
        lists = [argument for argument in (*node.args, *node.kwargs.values()) if _is_list(argument)]
        for index in range(max(map(len, lists), default=0)):
            values = [each[index] for each in lists if index < len(each)]
            values += [node.outputs[index]] if index < len(node.outputs) else []
            found = dict.fromkeys(keys[value.storage] for value in values if value.storage in keys)
            makes = tuple(key for key in found if key in step.makes)
            if _op_name(node).endswith("_") and not makes:
                first = keys.get(lists[0][index].storage)
                if first in temporary:
                    makes = (program.key(first),)
            used = tuple(found)
            for key in used[1:]:
                parent[root(key)] = root(used[0])
            slices.append((Step(node, (*used, *makes), makes), used))
    order: dict[Key, int] = {}
    ranked: list[tuple[int, Step]] = []
    for step, used in slices:
        # A step on one tensor is grouped with its parameter, and so are its results.
        home = next((root(key) for key in used if key in parent), None)
        if home is None:
            ranked.append((-1, step))
            continue
        for key in step.makes:
            parent.setdefault(key, home)
        ranked.append((order.setdefault(home, len(order)), step))
    ranked.sort(key=lambda each: each[0])
    return [step for _, step in ranked]


def _is_list(argument: object) -> bool:
    return isinstance(argument, (list, tuple)) and bool(argument) and isinstance(argument[0], Value)


# --- recomputation --------------------------------------------------------------------


def recompute(
    program: Program, at: int, started: Mapping[int, Sequence[tuple[str, str]]]
) -> Iterator[Changed]:
    """``torch.utils.checkpoint``: a module's saved tensors are recomputed when its backward pass begins.

    Follows the non-reentrant implementation (``use_reentrant=False``) of torch/utils/checkpoint.py: unpacking
    the first tensor of a call runs the module again, up to the last operator that saves a tensor (that
    operator itself only if it saves its result). Modules whose names differ only in numbers form a family.
    ``started`` has the calls by their first node, as root and path: for a ``ModuleList``, only the members
    are called; the path of a module that the user calls directly is empty.
    """
    saved = _saved_reads(program)
    calls = _module_calls(program, started)
    alive = _alive(program, at)
    gains: list[tuple[int, str, list[range]]] = []
    for pattern, runs in calls.items():
        gain = 0
        for run in runs:
            mine = {key for index in run for _, keys in saved.get(index, ()) for key in keys}
            gain += sum(
                program.sizes[key]
                for key in mine
                if key in alive and program.makers[key] in run and key not in program.kept
            )
        if gain:
            gains.append((gain, pattern, runs))
    gains.sort(key=lambda each: -each[0])
    for _, pattern, runs in gains[:MAX_FAMILIES]:
        changed, again = _recomputed(program, saved, runs)
        if not again:
            continue
        source = program.steps[runs[0].start].node.source
        count = _calls_in_a_pass(program, runs)
        name = _with_model(program, pattern, runs)
        name = f"each of {name} (× {count})" if count > 1 else name
        text = f"checkpoint {name}: torch.utils.checkpoint.checkpoint(module, ..., use_reentrant=False)"
        yield Changed("recompute", text, changed, source, ops=again)


def _with_model(program: Program, pattern: str, runs: Sequence[range]) -> str:
    """``"net.*"`` for ``"*"``, which names nothing, if it is one model whose members these are."""
    roots = {program.steps[run.start].node.root for run in runs}
    if pattern.strip("*.") or len(roots) != 1:
        return pattern
    return full_name(OwnedName(pattern, roots.pop()))


def _calls_in_a_pass(program: Program, runs: Sequence[range]) -> int:
    """How many of the calls a forward pass has at most, up to the backward pass that follows."""
    forward = [position for position, step in enumerate(program.steps) if step.node.phase != "backward"]
    # Between two forward nodes that are not neighbors there is a backward pass.
    starts = [b for a, b in pairwise(forward) if b > a + 1]
    return max(Counter(bisect_right(starts, run.start) for run in runs).values())


def _saved_reads(program: Program) -> dict[int, list[tuple[int, tuple[Key, ...]]]]:
    """For each forward node, the tensors from before the backward pass that its backward reads: (position,
    keys).
    """
    result: dict[int, list[tuple[int, tuple[Key, ...]]]] = {}
    steps = program.steps
    backward = {key for step in steps if step.node.phase == "backward" for key in step.makes}
    gradients = {key for key, storage in enumerate(program.storages) if storage.role == "gradient"}
    for position, step in enumerate(steps):
        forward = step.node.forward
        if step.node.phase != "backward" or forward is None:
            continue
        keys = tuple(key for key in step.uses if key not in backward and key not in gradients)
        if keys:
            result.setdefault(forward.index, []).append((position, keys))
    return result


def _module_calls(
    program: Program, started: Mapping[int, Sequence[tuple[str, str]]]
) -> dict[str, list[range]]:
    """The calls of each family of modules, as sequences of forward nodes.

    Modules that the user calls directly are grouped by class.
    """
    modules = {name for names in started.values() for name in names}
    result: dict[str, list[range]] = {}
    opened: dict[tuple[str, str], int] = {}

    def close(names: set[tuple[str, str]], stop: int) -> None:
        for name in names:
            result.setdefault(family(name[1]) or name[0], []).append(range(opened.pop(name), stop))

    for position, step in enumerate(program.steps):
        node = step.node
        inside: set[tuple[str, str]] = set()
        if node.phase == "forward" and node.root:
            parts = node.module.split(".") if node.module else []
            inside = {(node.root, ".".join(parts[:depth])) for depth in range(len(parts) + 1)} & modules
        again = started.get(node.index, ())  # called twice in a row
        close({name for name in opened if name not in inside or name in again}, position)
        for name in inside - opened.keys():
            opened[name] = position
    close(set(opened), len(program.steps))
    return {pattern: sorted(runs, key=lambda run: run.start) for pattern, runs in result.items()}


def _alive(program: Program, at: int) -> set[Key]:
    before = {key for step in program.steps[: at + 1] for key in (*step.uses, *step.makes)}
    after = {key for step in program.steps[at:] for key in step.uses}
    return before & (after | program.kept)


def _recomputed(
    program: Program, saved: dict[int, list[tuple[int, tuple[Key, ...]]]], runs: list[range]
) -> tuple[Program, int]:
    """The program with each run recomputed where its backward pass begins, and the number of additional
    steps.
    """
    changed = program.copy()
    inserted: list[tuple[int, list[Step]]] = []
    again = 0
    for run in runs:
        reads = [(index, position, keys) for index in run for position, keys in saved.get(index, ())]
        if not reads:
            continue
        last = max(index for index, _, _ in reads)
        own = any(
            index == last and any(program.makers[key] == last for key in keys) for index, _, keys in reads
        )
        stop = last + 1 if own else last
        mapping: dict[Key, Key] = {}
        copies = []
        for step in program.steps[run.start : stop]:
            for key in step.makes:
                mapping[key] = changed.key(key)
            uses = tuple(mapping.get(key, key) for key in step.uses)
            copies.append(Step(step.node, uses, tuple(mapping[key] for key in step.makes)))
        for _, position, _ in reads:
            step = changed.steps[position]
            uses = tuple(dict.fromkeys(mapping.get(key, key) for key in step.uses))
            changed.steps[position] = step._replace(uses=uses)
        inserted.append((_group_start(program, min(position for _, position, _ in reads)), copies))
        if program.of == "eager":
            _hold_arguments(changed, copies, max(position for _, position, _ in reads))
        again += len(copies)
    for position, copies in sorted(inserted, key=lambda each: -each[0]):
        changed.steps[position:position] = copies
    return changed, again


def _hold_arguments(changed: Program, copies: list[Step], last: int) -> None:
    """Keep the arguments of a checkpointed call alive until its backward pass has finished.

    A frame of torch/utils/checkpoint.py refers to them until the last saved tensor of the call has been
    unpacked.
    """
    nodes = [step.node for step in changed.steps]
    until = formula_end(nodes, last)
    own = {key for step in copies for key in step.makes}
    for key in {key for step in copies for key in step.uses} - own - changed.kept:
        before = changed.held.get(key)
        if before is None or before.last is not None or before.until < until:
            changed.held[key] = Hold(until, None)


def _group_start(program: Program, position: int) -> int:
    """The position where the backward of the same forward operator begins, which unpacks all its tensors."""
    forward = program.steps[position].node.forward
    while position and program.steps[position - 1].node.forward is forward:
        position -= 1
    return position


# --- the host -------------------------------------------------------------------------


def offload(program: Program) -> Iterator[Changed]:
    """``torch.autograd.graph.save_on_cpu()``: saved tensors are kept on the host.

    As in torch/autograd/graph.py, each tensor that an operator saved, including weights, is copied to the
    host and, where its backward begins, to new memory on the device. An estimate, because a custom function
    may keep tensors in other ways.
    """
    saved = _saved_reads(program)
    if not saved:
        return
    changed = program.copy()
    keys = program.keys
    copied = 0
    inserted: dict[int, list[Key]] = {}
    first = None
    for index, reads in sorted(saved.items()):
        mapping: dict[tuple[int, int], Key] = {}  # views of the same storage are copied separately
        for position, _ in reads:
            start = _group_start(program, position)
            node = program.steps[position].node
            swapped: dict[Key, list[Key]] = {}
            for value in node.inputs:
                key = keys.get(value.storage)
                if key is None or not any(key in old for at, old in reads if at == position):
                    continue
                if (start, value.id) not in mapping:
                    new = mapping[start, value.id] = changed.key(key, value.nbytes)
                    inserted.setdefault(start, []).append(new)
                    copied += value.nbytes
                swapped.setdefault(key, []).append(mapping[start, value.id])
            if _op_name(node) == "detach" and (own := mapping.get((start, node.inputs[0].id))) is not None:
                mapping[start, node.outputs[0].id] = own  # the operator's own result, as unpacked by autograd
            step = changed.steps[position]
            uses = [new for key in step.uses for new in swapped.get(key, (key,))]
            changed.steps[position] = step._replace(uses=tuple(dict.fromkeys(uses)))
        first = first if first is not None else program.steps[index].node
    for position, arrived in sorted(inserted.items(), reverse=True):
        node = program.steps[position].node
        changed.steps.insert(position, Step(node, tuple(arrived), tuple(arrived)))
    text = "with torch.autograd.graph.save_on_cpu(pin_memory=True) around the forward pass"
    source = first.source if first is not None else None
    yield Changed("offload", text, changed, source, copied_bytes=2 * copied, estimate=True)
