"""Training loops of a cell, for ``%%lazy --loop``: finds them, and adds a hook to each iteration."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from IPython.core.error import UsageError

_NO_LOOP = (
    "%%lazy --loop: the cell has no `for` loop at its top level. In a function, write "
    "`for batch in lazyviz.steps(loader):` and leave out --loop."
)
_OWN_SCOPE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
# Methods called in a training loop, the most specific combination first; an RL environment has a `step`, too.
_OF_A_ROUND = (("step", "backward"), ("step",), ("backward",))


def pass_rounds_through(function: str, tree: ast.Module) -> None:
    """Wrap the iterables of the training loops of ``tree`` in calls of ``function``.

    Raises:
        UsageError: the cell has no ``for`` loop outside functions.
    """
    loops = training_loops(tree)
    if not loops:
        raise UsageError(_NO_LOOP)
    for loop in loops:
        name = ast.copy_location(ast.Name(function, ast.Load()), loop.iter)
        loop.iter = ast.copy_location(ast.Call(name, [loop.iter], []), loop.iter)


def training_loops(tree: ast.Module) -> list[ast.For]:
    """The innermost ``for`` loops that call both ``backward`` and ``step``; if there are none, those that
    call one of them, otherwise the outermost loops.

    Therefore, neither a loop over epochs nor a gradient accumulation loop over micro-batches is selected.
    """
    loops = [node for node in _in_scope(tree) if isinstance(node, ast.For)]
    for methods in _OF_A_ROUND:
        calling = [loop for loop in loops if all(_calls(loop, method) for method in methods)]
        if calling:
            return [loop for loop in calling if not any(other in calling for other in _inside(loop))]
    inside = {id(other) for loop in loops for other in _inside(loop)}
    return [loop for loop in loops if id(loop) not in inside]


def _inside(loop: ast.For) -> list[ast.For]:
    return [node for node in _in_scope(loop) if isinstance(node, ast.For)]


def _calls(loop: ast.For, method: str) -> bool:
    """Whether the loop or a loop inside it calls a method of that name on any object."""
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method
        for node in _in_scope(loop)
    )


def _in_scope(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes below ``tree`` in source order, without functions and classes."""
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, _OWN_SCOPE):
            yield child
            yield from _in_scope(child)
