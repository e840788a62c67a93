"""Run a Python script in this process as ``python train.py`` would.

The script is ``__main__``, ``sys.argv`` holds its arguments, and ``sys.path`` starts with its folder. Output,
exceptions, and exit code are the script's own.
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from ..process.startup_interrupt import end_interrupted
from ..process.stdio import flush, is_open
from ..process.tracebacks import leave_out_ours
from ..record.interception.print_numpy_tolist import show_values_in_repr
from ..record.tape import tape


class NoScript(ValueError):
    """The script or module does not exist or cannot be run; the message is a sentence for the user."""


class Stopped(SystemExit):
    """Raised in the script to stop it after enough steps; it unwinds the stack like ``sys.exit()``."""

    def __init__(self) -> None:
        super().__init__(0)


@dataclass
class Script:
    """A script (or, with ``-m``, a module) and its arguments."""

    name: str
    arguments: Sequence[str] = ()
    is_module: bool = False
    main: ModuleType = field(init=False)
    _code: CodeType = field(init=False)
    _file: str = field(init=False)
    _process: int = field(init=False, default_factory=os.getpid)
    _spec: ModuleSpec | None = field(init=False, default=None)

    def load(self) -> None:
        """Read and compile the script.

        Raises:
            NoScript: it does not exist or cannot be read.
            SyntaxError: it is not valid Python.
        """
        if self.is_module:
            self._load_module()
            return
        self._file = os.path.abspath(self.name)
        if os.path.isdir(self._file):
            raise NoScript(f"{self.name} is a directory: name a script in it, or a module with -m")
        if self.name.endswith(".ipynb"):
            raise NoScript(f"{self.name} is a notebook: begin its cells with %%lazy, or name a .py script")
        try:
            with io.open_code(self._file) as source:
                text = source.read()
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise NoScript(f"cannot read {self.name}: {reason}") from None
        self._code = compile(text, self._file, "exec", dont_inherit=True)

    def _load_module(self) -> None:
        sys.path.insert(0, os.getcwd())
        try:
            try:
                spec = importlib.util.find_spec(self.name)
                if spec is not None and spec.submodule_search_locations is not None:
                    spec = importlib.util.find_spec(f"{self.name}.__main__")
            except ModuleNotFoundError as error:
                raise NoScript(f"there is no module {self.name}: {error}") from None
            get_code: Any = getattr(spec.loader, "get_code", None) if spec is not None else None
            code = get_code(spec.name) if spec is not None and get_code is not None else None
            if spec is None or code is None or spec.origin is None:
                raise NoScript(f"the module {self.name} does not exist or cannot be run")
        finally:
            del sys.path[0]
        self._spec, self._code, self._file = spec, code, spec.origin

    def enter(self) -> None:
        """Set up this process as if Python had been started with the script."""
        show_values_in_repr(tape)  # such as that of a list: its output has to be the script's own
        main = self.main = ModuleType("__main__")
        main.__file__ = self._file
        vars(main)["__cached__"] = None if self._spec is None else self._spec.cached
        vars(main)["__builtins__"] = builtins
        if self._spec is None:
            main.__loader__ = SourceFileLoader("__main__", self._file)
            folder = os.path.dirname(os.path.realpath(self._file))
        else:
            main.__spec__, main.__loader__ = self._spec, self._spec.loader
            main.__package__ = self._spec.parent
            folder = os.getcwd()
        sys.modules["__main__"] = main
        sys.argv[:] = [self._file if self.is_module else self.name, *self.arguments]
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = folder

    def run(self) -> None:
        """Run the script; its exceptions propagate."""
        exec(self._code, vars(self.main))

    @property
    def file(self) -> str:
        """The absolute path of the script."""
        return self._file

    def leave_child(self, error: BaseException | None) -> None:
        """Exit as Python would if this process is a child that the script forked; otherwise, do nothing.

        ``error`` is the exception that the script did not catch. Plans and summaries are the parent's.
        """
        if os.getpid() == self._process:
            return
        code = 0
        if isinstance(error, SystemExit):
            code = exit_code(error)
        elif error is not None:
            show(error)
            if isinstance(error, KeyboardInterrupt):
                end_interrupted()
            code = 1
        raise SystemExit(code)


def show(error: BaseException) -> None:
    """Show an exception that the script did not catch, as Python does."""
    flush(sys.stdout)
    leave_out_ours(error)
    sys.excepthook(type(error), error, error.__traceback__)


def exit_code(error: SystemExit) -> int:
    """The exit code for ``sys.exit(...)``: its number, or 1 after printing its message to stderr."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    flush(sys.stdout)
    if is_open(sys.stderr):
        print(error.code, file=sys.stderr)
    return 1
