"""Loads the compiled modules, each beside its source; lazyviz works the same without them.

They are made when lazyviz is installed (``scripts/accelerator_build.py``): one in Cython where there is
a C compiler, those in C++ where PyTorch is installed already, for that PyTorch.  ``LAZYVIZ_PURE_PYTHON``
set in the environment leaves them out.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import warnings
from pathlib import Path
from typing import Any

import torch

_PACKAGE = Path(__file__).parent
loaded: list[str] = []  # their names


def load(name: str, source: str) -> Any:
    """The compiled module ``name``, of the file ``source``; ``None`` if there is none to use.

    Warns if there is one that was made of another source, or for another PyTorch; most of these cannot even
    be loaded.
    """
    if os.environ.get("LAZYVIZ_PURE_PYTHON"):
        return None
    try:
        module = importlib.import_module(f"lazyviz.{name}")
    except ModuleNotFoundError:
        return None
    except ImportError as error:
        warnings.warn(f"lazyviz's compiled {name} cannot be loaded ({error}); install again", stacklevel=2)
        return None
    file = _PACKAGE / source
    if file.exists() and hashlib.sha256(file.read_bytes()).hexdigest() != module.SOURCE:
        warnings.warn(f"lazyviz's compiled {name} is older than its source; install again", stacklevel=2)
        return None
    made_for = getattr(module, "TORCH", torch.__version__)
    if made_for != torch.__version__:
        warnings.warn(
            f"lazyviz's compiled {name} is for PyTorch {made_for}, not {torch.__version__}; install again",
            stacklevel=2,
        )
        return None
    loaded.append(name)
    return module
