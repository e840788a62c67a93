"""Local names: variable names of tensors in a function, from its source code.

When a function has returned, its variables no longer exist, and its result has another name.  The lines that
led to an op show which statement of which function bound its result.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ...graph.ir import Node, SourceLine


class Scope(NamedTuple):
    """A function, identified by file and first line, so that functions with the same name are distinct."""

    file: str
    line: int
    name: str


class _Function(NamedTuple):
    scope: Scope
    last_line: int


class Binding(NamedTuple):
    """``names`` in ``scope`` that a statement binds; ``stop``: the position after the last op of the
    statement.
    """

    names: tuple[str, ...]
    scope: Scope
    stop: int


def chain(node: Node) -> tuple[SourceLine, ...]:
    """The source lines that led to a node, innermost first."""
    return (node.source, *node.callers) if node.source is not None else node.callers


def scope_of(line: SourceLine) -> Scope | None:
    """The function that contains a line; ``None`` if there is none, or its source is not available."""
    inside = [each for each in _parsed(line.file)[0] if each.scope.line <= line.line <= each.last_line]
    return max(inside, key=lambda each: each.scope.line).scope if inside else None


class Statements:
    """The statements that bound the results of a program's ``nodes``."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._places = {node: position for position, node in enumerate(nodes)}
        self._ends: list[int] | None = None

    def own_end(self, node: Node) -> int:
        """The position after the last op of the block's statement that produced ``node``."""
        if self._ends is None:
            ends = list(range(1, len(self._nodes) + 1))
            outermost = [(chain(each) or (None,))[-1] for each in self._nodes]
            for index in range(len(ends) - 2, -1, -1):
                if outermost[index] == outermost[index + 1] is not None:
                    ends[index] = ends[index + 1]
            self._ends = ends
        return self._ends[self._places[node]]

    def bindings(self, node: Node) -> Iterator[Binding]:
        """The local variables that a node's result may have been bound to, innermost function first."""
        for line in chain(node):
            scope = scope_of(line)
            names = _parsed(line.file)[1].get(line.line, ())
            if scope is None or not names:
                continue
            stop = self._places[node] + 1
            while stop < len(self._nodes) and line in chain(self._nodes[stop]):
                stop += 1
            yield Binding(names, scope, stop)


def line_in(node: Node, scope: Scope) -> SourceLine | None:
    """The line of a function that led to a node, if there is one."""
    return next((line for line in chain(node) if scope_of(line) == scope), None)


class Needed(NamedTuple):
    """The lines of a function, or of code outside of functions, in which a variable is still needed."""

    first: int
    last: SourceLine


def needed_after(line: SourceLine, names: Sequence[str]) -> Needed | None:
    """Where one of the variables ``names`` is read after ``line``: further below in the same function, or in
    the next iteration of a loop that does not bind it again.

    Such a read need not lead to an op (``x.shape[0]``), and a recording may have ended before it.
    """
    scope = scope_of(line)
    reads, loops = _reads(line.file)
    lines = [each for name in names for each in reads.get((name, scope), ())]
    first, last = line.line, max(lines, default=0)
    for loop in loops:
        again = loop.first <= line.line <= loop.last and not loop.binds.issuperset(names)
        if again and any(loop.first <= each <= loop.last for each in lines):
            first, last = min(first, loop.first), max(last, loop.last)
    if last <= line.line and first == line.line:
        return None
    text = linecache.getline(line.file, last).strip()
    return Needed(first, replace(line, line=last, text=text))


class _Loop(NamedTuple):
    first: int
    last: int
    binds: frozenset[str]


_Reads = tuple[dict[tuple[str, Scope | None], list[int]], list[_Loop]]


@functools.lru_cache(maxsize=100)
def _reads_in_text(text: str, file: str) -> _Reads:
    """The lines in which each variable is read, by name and function, and the loops.

    A nested function may be called anywhere below its definition: what it reads counts as read in the last
    line of the function around it. A variable that is only returned does not count: who deletes it cannot
    return it.
    """
    functions = _parsed_text(text, file)[0]
    found: dict[tuple[str, Scope | None], list[int]] = {}
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return {}, []
    returned = {
        name for item in ast.walk(tree) if isinstance(item, ast.Return) for name in _parts(item.value)
    }
    changed = {item.target for item in ast.walk(tree) if isinstance(item, ast.AugAssign)}
    for item in ast.walk(tree):
        if not isinstance(item, ast.Name) or item in returned:
            continue
        if not isinstance(item.ctx, ast.Load) and item not in changed:
            continue
        around = [each for each in functions if each.scope.line <= item.lineno <= each.last_line]
        around.sort(key=lambda each: each.scope.line)
        if not around:
            found.setdefault((item.id, None), []).append(item.lineno)
        for inner, each in enumerate(around, 1):
            line = item.lineno if inner == len(around) else each.last_line
            found.setdefault((item.id, each.scope), []).append(line)
    return found, [
        _loop(item) for item in ast.walk(tree) if isinstance(item, (ast.For, ast.AsyncFor, ast.While))
    ]


def _loop(loop: ast.stmt) -> _Loop:
    names = {item.id for item in ast.walk(loop) if isinstance(item, ast.Name) and _is_store(item)}
    return _Loop(loop.lineno, loop.end_lineno or loop.lineno, frozenset(names))


def _parts(value: ast.expr | None) -> list[ast.expr]:
    """The elements of a tuple, list or dictionary; else the value alone."""
    if isinstance(value, (ast.Tuple, ast.List)):
        return value.elts
    if isinstance(value, ast.Dict):
        return value.values
    return [] if value is None else [value]


def _reads(file: str) -> _Reads:
    return _reads_in_text("".join(linecache.getlines(file)), file)


@functools.lru_cache(maxsize=100)
def _parsed_text(text: str, file: str) -> tuple[list[_Function], dict[int, tuple[str, ...]]]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # for example, of a cell with magics
        return [], {}
    functions: list[_Function] = []
    bound: dict[int, tuple[str, ...]] = {}
    for item in ast.walk(tree):
        if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
            scope = Scope(file, item.lineno, item.name)
            functions.append(_Function(scope, item.end_lineno or item.lineno))
        elif isinstance(item, (ast.Assign, ast.AnnAssign)):
            targets = item.targets if isinstance(item, ast.Assign) else [item.target]
            found = tuple(
                each.id
                for target in targets
                for each in ast.walk(target)
                if isinstance(each, ast.Name) and _is_store(each)
            )
            for line in range(item.lineno, (item.end_lineno or item.lineno) + 1):
                # Which of several statements on one line ran is unknown.
                bound[line] = tuple(dict.fromkeys((*bound.get(line, ()), *found)))
    return functions, bound


def _parsed(file: str) -> tuple[list[_Function], dict[int, tuple[str, ...]]]:
    return _parsed_text("".join(linecache.getlines(file)), file)


def _is_store(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)
