"""Compilation of ``%%lazy`` cells under IPython's file name, so that tracebacks show the user's lines."""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import re
from collections.abc import Sequence
from types import CodeType, TracebackType
from typing import Any

from IPython.core.error import UsageError

from ..process.tracebacks import frames, without_ours
from ..record.provenance.notebook_cells import CellText, cell_number
from ..record.tape import tape
from .rewrite_training_loops import pass_rounds_through

_NO_AWAIT = (
    "%%lazy does not record top-level `await` (line {line} of the cell): "
    "await in a cell of its own, before this one, and use the result here."
)


_OURS = (__file__, os.path.join(os.path.dirname(__file__), "magic.py"))


def compile_cell(
    shell: Any, raw_cell: str, line: str, cell: str, rounds: str | None = None
) -> tuple[CodeType, CodeType | None]:
    """The code of a ``%%lazy`` cell, and that of its last expression if it ends in one.

    Args:
        raw_cell: the whole cell as typed, empty when the magic was called from code.
        line: the text after ``%%lazy``.
        cell: the lines below it.
        rounds: the name of a function that wraps the iterables of its training loops.

    Raises:
        SyntaxError: at the cell's own line.
        UsageError: the cell needs an event loop at its top level; with ``rounds``, it has no loop.
    """
    raw = raw_cell.rstrip()
    text = cell.rstrip()
    if raw.endswith(text) and raw != text:
        before = raw[: len(raw) - len(text)].count("\n")
    else:  # called through run_cell_magic, not from a cell
        raw, before = f"%%lazy {line}\n{text}", 1
    # transform_cell removes leading blank lines.
    before += cell[: len(cell) - len(cell.lstrip())].count("\n")
    lines = raw.split("\n")
    code = "".join(f"# {above}\n" for above in lines[:before]) + _with_line_numbers(
        shell, cell, lines, before
    )
    number = shell.displayhook.prompt_count
    filename = shell.compile.cache(code, number, raw_code=raw)
    tape.scopes.sources.cell = CellText(filename, number, lines, before)
    if _MAGIC.match(cell.lstrip("\n")):  # tracebacks show the magic as it was typed
        linecache.cache[filename] = len(raw), None, [f"{each}\n" for each in lines], filename
    # The shell's own compiler applies `from __future__` imports of earlier cells.
    tree = shell.transform_ast(shell.compile.ast_parse(code, filename))
    _refuse_await(tree, filename)
    if rounds is not None:
        pass_rounds_through(rounds, tree)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)
    body = shell.compile(tree, filename, "exec")
    return body, None if last is None else shell.compile(last, filename, "eval")


_PYTHON_MAGICS = frozenset({"capture", "memit", "prun", "time", "timeit"})
"""Cell magics that run the lines below them as Python."""
_MAGIC = re.compile(r"%%(\w+)[ \t]*(.*)\n?")


def _with_line_numbers(shell: Any, text: str, lines: Sequence[str], before: int) -> str:
    """``text`` transformed to Python code; ``before`` is the number of the cell's ``lines`` above it.

    Code below a nested cell magic is preceded by the lines above it as comments, so that its line numbers
    are those of the cell.
    """
    text = text.lstrip("\n")
    found = _MAGIC.match(text)
    if found is None or found[1] not in _PYTHON_MAGICS:
        return str(shell.transform_cell(text))
    body = text[found.end() :]
    below = before + 1 + (len(body) - len(body.lstrip("\n")))
    if (inner := _MAGIC.match(body.lstrip("\n"))) and inner[1] in _PYTHON_MAGICS:
        body = _with_line_numbers(shell, body, lines, below)
    header = "".join(f"# {above}\n" for above in lines[:below])
    given = header + body.lstrip("\n")
    return f"get_ipython().run_cell_magic({found[1]!r}, {found[2]!r}, {given!r})\n"


def text_below_magics(raw: str) -> int:
    """The number of lines at the top of a cell that are cell magics that run the rest as Python."""
    above = 0
    for line in raw.split("\n"):
        found = _MAGIC.match(line)
        if line.strip() and (found is None or found[1] not in _PYTHON_MAGICS):
            break
        above += 1
    return above if raw.lstrip("\n").startswith("%%") else 0


def _refuse_await(tree: ast.Module, filename: str) -> None:
    """Raise ``UsageError`` if the code needs an event loop at its top level."""
    code = compile(tree, filename, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    if not code.co_flags & inspect.CO_COROUTINE:
        return
    raise UsageError(_NO_AWAIT.format(line=_first_await(tree)))


_ASYNC = (ast.Await, ast.AsyncFor, ast.AsyncWith)
_OWN_SCOPE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def _first_await(tree: ast.Module) -> int | str:
    """The line of the first ``await``, ``async for``, or ``async with`` outside of functions."""
    lines = []
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        comprehensions = getattr(node, "generators", ())
        if isinstance(node, _ASYNC) or any(part.is_async for part in comprehensions):
            lines.append(node.lineno)  # type: ignore[attr-defined]
        stack += [child for child in ast.iter_child_nodes(node) if not isinstance(child, _OWN_SCOPE)]
    return min(lines, default="?")


def without_own_frames(traceback: TracebackType | None) -> TracebackType | None:
    """``traceback`` from the cell's first frame on, without lazyviz's own frames.

    If no line of the cell raised the error, it is the frame of the line that called the magic.
    """
    entries = frames(traceback)
    magics = [at for at, entry in enumerate(entries) if entry.tb_frame.f_code.co_filename in _OURS]
    below = without_ours(entries[magics[-1] + 1 :] if magics else entries)
    if not below:
        below = [entry for entry in entries if cell_number(entry.tb_frame.f_code.co_filename) is not None][
            -1:
        ]
    rebuilt = None
    for entry in reversed(below):
        rebuilt = TracebackType(rebuilt, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return rebuilt
