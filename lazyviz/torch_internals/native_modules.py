"""Loading of the compiled modules; lazyviz gives the same results without them.

They are built by ``lazyviz compile`` (``native_build.py``): Cython modules if there is a C compiler, and C++
modules for the installed PyTorch, if any.  ``LAZYVIZ_PURE_PYTHON`` in the environment disables them.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import warnings
from pathlib import Path
from typing import Any

import torch

from ..process.paths import PACKAGE

_FOLDER = Path(__file__).parent / "native"
_ROOT = Path(PACKAGE).parent
_COMMAND = "lazyviz compile"
_CHECKOUT = "python scripts/build_native.py"
loaded: list[str] = []  # their names


def load(source: str) -> Any:
    """The compiled module of the file ``source`` in ``native``; ``None`` if there is no usable one.

    Warns if a module was built from another source, or for another PyTorch; most of these cannot even be
    loaded.
    """
    if os.environ.get("LAZYVIZ_PURE_PYTHON"):
        return None
    name = source.partition(".")[0]
    try:
        module = importlib.import_module(f"{__package__}.native.{name}")
    except ModuleNotFoundError:
        return None
    except ImportError as error:
        _warn(name, f"cannot be loaded ({error})")
        return None
    file = _FOLDER / source
    if file.exists() and hashlib.sha256(file.read_bytes()).hexdigest() != module.SOURCE:
        _warn(name, "is older than its source")
        return None
    made_for = getattr(module, "TORCH", torch.__version__)
    if made_for != torch.__version__:
        _warn(name, f"is for PyTorch {made_for}, not {torch.__version__}")
        return None
    loaded.append(name)
    return module


def _warn(name: str, why: str) -> None:
    """Warn that the module is not used, with the command that rebuilds it."""
    is_checkout = (_ROOT / "scripts" / "build_native.py").exists()
    warnings.warn(
        f"lazyviz's compiled {name} {why}; slower Python code replaces it. "
        f"To rebuild it: {_CHECKOUT if is_checkout else _COMMAND}",
        stacklevel=3,
    )
