"""Remedy "delete this variable earlier": tensors that only the user's variables keep alive at the peak.

The names of local variables come from :mod:`lazyviz.plan.remedies.local_variable_names`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ...graph.ir import Node, SourceLine
from ..liveness.allocation_trace import Key, Program
from ..node_formatting import line_text
from .local_variable_names import Binding, Scope, Statements, chain, line_in, needed_after, scope_of
from .what_if_edits import Changed

MAX_HELD = 50  # number of largest storages kept by functions' variables whose names are searched


def variables(program: Program, at: int) -> Iterator[Changed]:
    """``del out``: tensors that only the user's variables, in any function, keep alive after their last use.

    Expressions are listed under their first name, because deleting ``out`` also frees ``out.logits``. Exact
    for variables that exist at the end; an estimate for local variables while the step at ``at`` ran, whose
    names are found in the source code.
    """
    last: dict[Key, Node] = {}
    for step in program.steps:
        for key in step.uses:
            if step.node.phase != "backward" or key not in last:  # the deletion is before the backward pass
                last[key] = step.node
    if not program.steps:
        return
    functions = _Functions(program, at)
    groups: dict[_Variable, list[Key]] = {}
    for key in program.kept:
        storage = program.storages[key]
        if program.makers[key] >= 0 and storage.role is None and storage.variables and key in last:
            roots = [name.partition(".")[0].partition("[")[0] for name in storage.variables]
            variable = functions.of_kept(key, tuple(dict.fromkeys(roots)), last[key])
            groups.setdefault(variable, []).append(key)
    for key in _held_at(program, at):
        held = functions.of_held(key, last[key], program.held[key].until) if key in last else None
        if held is not None:
            groups.setdefault(held, []).append(key)
    for variable, keys in groups.items():
        free = [key for key in keys if not functions.read_at_peak(key, variable, last[key])]
        if not free and variable.scope is not None:
            continue
        changed = _deleted(program, functions, variable, free or keys, last, needed=not free)
        if changed is not None:
            yield changed


def _deleted(
    program: Program,
    functions: _Functions,
    variable: _Variable,
    keys: Sequence[Key],
    last: Mapping[Key, Node],
    *,
    needed: bool,
) -> Changed | None:
    """Delete a variable that refers to ``keys``; ``needed``: before a line that reads it.

    ``None``: the next iteration of a loop reads it.
    """
    changed = program.copy()
    changed.kept.difference_update(keys)
    for key in keys:
        changed.held.pop(key, None)
    final = max((last[key] for key in keys), key=lambda node: node.index)
    source = functions.last_use(keys[0], variable.names, final) or next(reversed(chain(final)), None)
    then = "if no later code needs it"
    text = f"del {', '.join(variable.names)}"
    if variable.scope is not None:
        source = line_in(final, variable.scope) or source
        then = f"in {variable.scope.name}, which can no longer return it"
        if not any(key in program.kept for key in keys):
            then = f"in {variable.scope.name}"
    later = None if source is None else needed_after(source, variable.names)
    if source is not None and later is not None:
        if not needed:
            source = later.last
        elif later.first < source.line:
            return None
        else:
            then = f"if line {later.last.line}, which reads it later, can do without it"
    if source is not None:
        text += f" after {'its' if len(variable.names) == 1 else 'their'} last use at {line_text(source)}"
    return Changed("variable", f"{text} ({then})", changed, source, estimate=variable.scope is not None)


class _Variable(NamedTuple):
    """Variable names and their function; ``None``: variables of the block or of the code that opened it."""

    names: tuple[str, ...]
    scope: Scope | None


class _Functions:
    """The local variables of functions at the step ``at`` of the recorded program."""

    def __init__(self, program: Program, at: int) -> None:
        self._program, self._at = program, at
        self._nodes = [step.node for step in program.steps]
        self._statements = Statements(self._nodes)
        self._running = {scope_of(line) for line in chain(self._nodes[at])}

    def of_kept(self, key: Key, names: tuple[str, ...], final: Node) -> _Variable:
        """The variable to delete for a storage that the variables ``names`` refer to at the end, if they are
        bound then.
        """
        own = _Variable(names, None)
        if self._statements.own_end(self._nodes[self._program.makers[key]]) <= self._at:
            return own
        return self.of_held(key, final, len(self._nodes)) or own

    def read_at_peak(self, key: Key, variable: _Variable, final: Node) -> bool:
        """Whether the step ``at`` runs between the last op that uses a storage, and a line that still reads
        its variable.

        The recording may have ended before that line, and it need not lead to an op (``x.shape[0]``).
        """
        used = self.last_use(key, variable.names, final) or next(reversed(chain(final)), None)
        if variable.scope is not None:
            used = line_in(final, variable.scope) or used
        needed = None if used is None else needed_after(used, variable.names)
        if used is None or needed is None:
            return False
        scope = scope_of(used)
        lines = (each for each in chain(self._nodes[self._at]) if each.file == used.file)
        running = next((each.line for each in lines if scope_of(each) == scope), None)
        return running is not None and needed.first <= running <= needed.last.line

    def last_use(self, key: Key, names: tuple[str, ...], final: Node) -> SourceLine | None:
        """The line of ``final`` in the code that gave a storage one of these names: it may be a function."""
        for binding in self._statements.bindings(self._nodes[self._program.makers[key]]):
            if not set(names).isdisjoint(binding.names):
                return line_in(final, binding.scope)
        return None

    def of_held(self, key: Key, final: Node, until: int) -> _Variable | None:
        """The local variable of a running function that refers to a storage ``until`` then, after its last
        use.
        """
        for binding in self._statements.bindings(self._nodes[self._program.makers[key]]):
            if binding.scope in self._running and binding.stop < until and line_in(final, binding.scope):
                if len(binding.names) != 1:
                    return None
                return _Variable(self._with_views(key, binding), binding.scope)
        return None

    def _with_views(self, key: Key, binding: Binding) -> tuple[str, ...]:
        """The variable, and those of the same function to which views of its storage were bound."""
        names = dict.fromkeys(binding.names)
        storage = self._program.storages[key]
        for node in self._nodes[self._program.makers[key] + 1 :]:
            if any(value.storage is storage for value in node.outputs) and not node.writes:
                for other in self._statements.bindings(node):
                    if other.scope == binding.scope and len(other.names) == 1:
                        names.update(dict.fromkeys(other.names))
        return tuple(names)


def _held_at(program: Program, at: int) -> list[Key]:
    """Storages that code still refers to at ``at``, although no later step uses them and autograd did not
    save them.
    """
    used_later = {key for step in program.steps[at:] for key in step.uses}
    found = [
        key
        for key, hold in program.held.items()
        if hold.last is None
        and program.makers[key] >= 0
        and program.makers[key] < at < hold.until
        and key not in used_later
        and key not in program.kept
        and key < len(program.storages)
        and program.storages[key].role is None
    ]
    return sorted(found, key=lambda key: -program.sizes[key])[:MAX_HELD]
