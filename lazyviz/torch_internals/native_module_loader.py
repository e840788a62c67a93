"""Loading of the compiled modules; lazyviz gives the same results without them.

They are built by ``lazyviz compile`` (``find_compiler_and_build_extensions.py``): Cython modules if there is
a C compiler, and C++ modules for the installed PyTorch, if any.  ``LAZYVIZ_PURE_PYTHON`` in the environment
disables them.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import warnings
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch

from ..process.install_paths import PACKAGE

_FOLDER = Path(__file__).parent / "native"
_ROOT = Path(PACKAGE).parent
_COMMAND = "lazyviz compile"
_CHECKOUT = "python scripts/build_native.py"
loaded: list[str] = []  # their names
refused: dict[str, str] = {}  # why others that exist are not used, by name
_warned: set[str] = set()


def load(source: str) -> Any:
    """The compiled module of the file ``source`` in ``native``; ``None`` if there is no usable one.

    Warns if a module was built from another source, or, once for all modules, if they were built for another
    PyTorch. Such a module is not even loaded: its symbols may be missing, or mean something else.
    """
    if os.environ.get("LAZYVIZ_PURE_PYTHON"):
        return None
    name = source.partition(".")[0]
    file = _FOLDER / source
    text = file.read_bytes() if file.exists() else None
    if text is not None and b"LAZYVIZ_TORCH" in text and _is_for_another_torch(name):
        return _refuse(name, _OTHER_TORCH)
    try:
        module = importlib.import_module(f"{__package__}.native.{name}")
    except ModuleNotFoundError:
        return None
    except ImportError as error:
        return _refuse(name, f"compiled {name} cannot be loaded ({error}); slower Python code replaces it")
    if text is not None and hashlib.sha256(text).hexdigest() != module.SOURCE:
        return _refuse(name, f"compiled {name} is older than its source; slower Python code replaces it")
    if getattr(module, "TORCH", torch.__version__) != torch.__version__:
        return _refuse(name, _OTHER_TORCH)
    loaded.append(name)
    return module


_OTHER_TORCH = (
    f"compiled modules are for another PyTorch than {torch.__version__}; slower Python code replaces them"
)


def _is_for_another_torch(name: str) -> bool:
    """Whether there is a compiled module that does not contain the version of the installed PyTorch."""
    files = [_FOLDER / f"{name}{suffix}" for suffix in EXTENSION_SUFFIXES]
    made = next((file for file in files if file.exists()), None)
    return made is not None and torch.__version__.encode() not in made.read_bytes()


def _refuse(name: str, why: str) -> None:
    """Warn that the module is not used, with the command that rebuilds it."""
    refused[name] = why
    if why in _warned:
        return
    _warned.add(why)
    is_checkout = (_ROOT / "scripts" / "build_native.py").exists()
    warnings.warn(
        f"lazyviz's {why}. To recompile: {_CHECKOUT if is_checkout else _COMMAND}",
        stacklevel=_level_of_caller(),
    )


def _level_of_caller() -> int:
    """The level of the first frame outside of lazyviz, for ``warnings.warn``, which does not count those of
    the import system.
    """
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        is_import = "importlib" in file and "_bootstrap" in file
        if not is_import and not file.startswith(PACKAGE):
            break
        level, frame = level + (not is_import), frame.f_back
    return level
