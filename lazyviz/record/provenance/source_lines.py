"""Source lines: the line of the user's code that an op, or a read, comes from."""

from __future__ import annotations

import functools
import linecache
import os
import sys
import sysconfig
from dataclasses import replace
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

import torch

from ...graph.ir import Phase, SourceLine
from ...process.install_paths import PACKAGE, TORCH
from .notebook_cells import CellText, cell_number

_LIBRARIES = tuple(
    {os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, PACKAGE}
    | {sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
# Library code whose ops have their own phase, regardless of the caller.
_PHASES: dict[str, Phase] = {
    os.path.join(TORCH, "optim") + os.sep: "optimizer",
    os.path.join(TORCH, "nn", "utils", "clip_grad.py"): "optimizer",
    os.path.join(TORCH, "nn", "init.py"): "other",
    os.path.join(TORCH, "nn", "parameter.py"): "other",
    os.path.join(TORCH, "autograd", "__init__.py"): "backward",
}
# Functions of files that lead to ops of other phases as well: `Module.to` and `half` convert weights there.
_PHASES_OF_FUNCTIONS: dict[tuple[str, str], Phase] = {
    (os.path.join(TORCH, "nn", "modules", "module.py"), "_apply"): "other",
}
# Library code that does not show what reads a value: code that leads to a dispatch mode, Python's own
# modules.
_STDLIB = tuple({sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib")})
_SITE = tuple({sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib")})
_ON_THE_WAY = tuple(
    os.path.join(TORCH, *parts)
    for parts in (("_compile.py",), ("_dynamo", ""), ("_ops.py",), ("_tensor.py",), ("_tensor_str.py",))
) + tuple(os.path.join(TORCH, "utils", name) for name in ("_python_dispatch.py", "_contextlib.py"))
MOST_CODES = 1000  # maximum number of code objects that are kept for the next block
MOST_FRAMES = 100  # searched for the lines that led to an op
ENTRY = "entry"  # the kind of code that :meth:`SourceFinder.enter` was called for


def is_user_file(filename: str) -> bool:
    """Whether code of this file is the user's: not torch's, not a library's, not ours."""
    if filename.startswith("<"):
        return filename.startswith("<ipython-input")
    if filename.startswith(_LIBRARIES) or "site-packages" in filename:
        return False
    return not _is_generated(filename)


def _is_generated(filename: str) -> bool:
    """Whether a library generated this file for one of its modules, as torch_geometric does for layers."""
    if "." not in os.path.basename(filename).removesuffix(".py"):
        return False
    modules = list(sys.modules.items())
    name = next((name for name, module in modules if getattr(module, "__file__", None) == filename), "")
    package, _, rest = name.partition(".")
    file = getattr(sys.modules.get(package), "__file__", None) if rest else None
    return file is not None and not is_user_file(file)


@functools.lru_cache(maxsize=1000)
def is_reader(filename: str) -> bool:
    """Whether this is a library file that is worth naming for a read of a value."""
    if filename.startswith(("<", PACKAGE, *_ON_THE_WAY)):
        return False
    return filename.startswith(_SITE) or not filename.startswith(_STDLIB)


def _kind(code: CodeType) -> bool | Phase:
    filename = code.co_filename
    if is_user_file(filename):
        return True
    if (phase := _PHASES_OF_FUNCTIONS.get((filename, code.co_name))) is not None:
        return phase
    return next((phase for prefix, phase in _PHASES.items() if filename.startswith(prefix)), False)


class Place(NamedTuple):
    """The current place: the user's line, the phase of the library code below it, the lines that led
    to it.
    """

    line: SourceLine | None
    phase: Phase | None
    callers: tuple[SourceLine, ...]  # innermost first, up to the first line of the cell or block


AT_USERS_LINE = "<as at the user's line>"
"""The name of our functions that have the user's file and line, for warnings; they are not the user's."""


class SourceFinder:
    """Finds the innermost frame of user code; caches its results by code object."""

    __slots__ = ("__dict__", "__weakref__", "block")  # the compiled recorder reads this one

    def __init__(self) -> None:
        # Per code object: the user's (True), a library's (False), a library's with a known phase, or ours
        # that entered a place. Keyed by id, since hashing a code object hashes its whole content; `_codes`
        # keeps ids valid.
        self._kinds: dict[int, bool | str] = {}
        self._lines: dict[tuple[int, int], SourceLine] = {}
        self._codes: list[CodeType] = []
        # By id of a running frame: the place above it, so that no op below searches for it again. A plain
        # tuple if the compiled recorder has found it.
        self._above: dict[int, tuple[SourceLine | None, Phase | None, tuple[SourceLine, ...]]] = {}
        self.cell: CellText | None = None  # the running one, if it is known
        self.parts: dict[str, CellText] = {}  # by name of the code, cells that magics ran as separate cells
        self._of_magics: dict[int, CellText] = {}  # by id of code that a magic in a cell runs
        self.block: CodeType | None = None  # the code that opened the outermost block: callers end there

    def find(self, frame: FrameType | None) -> tuple[SourceLine | None, Phase | None]:
        """The user's line above ``frame``, and the phase of the library code in between."""
        kinds = self._kinds
        phase: Any = None
        while frame is not None:
            code = frame.f_code
            kind = kinds.get(id(code))
            if kind is None:
                kind = self._learn(code)
            if kind is True:
                return self._line(frame, code), phase
            if kind:
                if kind is not ENTRY:
                    phase = kind
                elif (place := self._above.get(id(frame))) is not None:
                    return place[0], place[1] or phase
            frame = frame.f_back
        return None, phase

    def users(self, frame: FrameType | None) -> tuple[FrameType, SourceLine] | None:
        """The user's innermost frame above ``frame``, with its line."""
        kinds = self._kinds
        while frame is not None:
            code = frame.f_code
            kind = kinds.get(id(code))
            if (self._learn(code) if kind is None else kind) is True:
                line = self._line(frame, code)
                return (frame, line) if line is not None else None
            frame = frame.f_back
        return None

    def opened_at(self, frame: FrameType | None, *, whole_cell: bool) -> SourceLine | None:
        """The user's line above ``frame``, which opens a block; of a ``whole_cell`` the code that its lines
        are in, not the call of the magic.
        """
        line, cell = self.find(frame)[0], self.cell
        if not whole_cell or line is None or cell is None or cell.number != line.cell:
            return line
        return replace(line, file=cell.file)

    def read_at(self, frame: FrameType | None) -> tuple[SourceLine | None, SourceLine | None]:
        """The user's line above ``frame``, and the innermost line of a library, if any, in between."""
        kinds = self._kinds
        reader: SourceLine | None = None
        while frame is not None:
            code = frame.f_code
            kind = kinds.get(id(code))
            if kind is None:
                kind = self._learn(code)
            if kind is True:
                return self._line(frame, code), reader
            if kind is ENTRY and (place := self._above.get(id(frame))) is not None:
                return place[0], reader
            if reader is None and is_reader(code.co_filename):
                reader = self._line(frame, code)
            frame = frame.f_back
        return None, reader

    def place(self, frame: FrameType | None) -> Place:
        """The user's line above ``frame``, with the lines that led to it."""
        kinds = self._kinds
        line: SourceLine | None = None
        phase: Any = None
        callers: list[SourceLine] = []
        for _ in range(MOST_FRAMES):
            if frame is None:
                break
            code = frame.f_code
            kind = kinds.get(id(code))
            kind = self._learn(code) if kind is None else kind
            if kind is True:
                found = self._line(frame, code)
                if line is None:
                    line = found
                elif found is not None and found is not line and found not in callers:
                    callers.append(found)  # a function that calls itself, once
            elif kind is ENTRY and (place := self._above.get(id(frame))) is not None:
                entered_at, phase_there, led = place
                if line is None:
                    return Place(entered_at, phase_there or phase, led)
                above = (entered_at, *led) if entered_at is not None else led
                callers += [found for found in above if found is not line and found not in callers]
                break
            elif kind and line is None and kind is not ENTRY:
                phase = kind
            if code is self.block or (kind is True and code.co_name == "<module>"):
                break
            frame = frame.f_back
        return Place(line, phase, tuple(callers))

    def enter(self, frame: FrameType) -> Place:
        """Remember the place above ``frame`` until :meth:`leave`, so that ops below it search no further."""
        code = frame.f_code
        if self._kinds.get(id(code)) is not ENTRY:
            self._kinds[id(code)] = ENTRY
            self._codes.append(code)
        place = self._above[id(frame)] = self.place(frame.f_back)
        return place

    def leave(self, frame: FrameType) -> None:
        self._above.pop(id(frame), None)

    def _learn(self, code: CodeType) -> bool | str:
        if code.co_name == AT_USERS_LINE:
            self._kinds[id(code)] = False
            self._codes.append(code)
            return False
        kind = _kind(code)
        cell = self.parts.get(code.co_filename)
        if cell is None and kind is False and self.cell is not None and self.cell.has(code):
            cell = self.cell
        if cell is not None:
            self._of_magics[id(code)], kind = cell, True
        elif kind is True:
            linecache.checkcache(code.co_filename)  # it may be an edited module that was reloaded
        self._kinds[id(code)] = kind
        self._codes.append(code)
        return kind

    def raised_at(self, traceback: TracebackType) -> SourceLine | None:
        """The line of the user's frame in which an error passed; the frame may be at another line by now."""
        frame = traceback.tb_frame
        code, at = frame.f_code, (traceback.tb_lasti, traceback.tb_lineno)
        kind = self._kinds.get(id(code))
        return self._line(frame, code, at) if (self._learn(code) if kind is None else kind) is True else None

    def _line(self, frame: FrameType, code: CodeType, at: tuple[int, int] | None = None) -> SourceLine | None:
        instruction, number = at or (frame.f_lasti, 0)
        key = (id(code), instruction)
        line = self._lines.get(key)
        if line is None and code.co_name != AT_USERS_LINE:
            file, number, cell = code.co_filename, number or frame.f_lineno, self._of_magics.get(id(code))
            if cell is not None:
                number += cell.shift
                if number <= cell.above:  # code of a line magic also has its own lines (`%timeit`)
                    return self.find(frame.f_back)[0]
                text = cell.lines[number - 1].strip() if number <= len(cell.lines) else ""
                line = SourceLine(cell.file, number, text, cell.number)
            else:
                line = SourceLine(file, number, linecache.getline(file, number).strip(), self._number(file))
            self._lines[key] = line
        return line

    def _number(self, file: str) -> int | None:
        """The number of the cell in ``file``, at most that of the running cell: a magic may have run it as a
        later one.
        """
        number = cell_number(file)
        running = self.cell.number if self.cell is not None else None
        return number if number is None or running is None else min(number, running)

    def forget_old(self) -> None:
        """Drop the cache once it is large: a cell that is run again has new code objects."""
        if len(self._codes) > MOST_CODES:
            self._kinds.clear()
            self._codes.clear()
            self._lines.clear()
            self._of_magics.clear()
