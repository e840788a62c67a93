"""Compiles the optional native modules that speed up recording and replay.

python scripts/build_native.py     # needs setuptools, Cython, a C and C++ compiler, and PyTorch
python scripts/build_native.py --check    # makes nothing; g++'s warnings of our C++ are errors
python scripts/build_native.py --sanitize    # for scripts/sanitize.py: with AddressSanitizer and UBSan

All the work is in ``lazyviz/torch_internals/native_build.py``, which an installed lazyviz has, too
(``lazyviz compile``); it is loaded by its path, since importing the package imports PyTorch.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent


def _native_build() -> ModuleType:
    path = ROOT / "lazyviz" / "torch_internals" / "native_build.py"
    spec = importlib.util.spec_from_file_location("lazyviz_native_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


native_build = _native_build()
SOURCES = native_build.SOURCES
REQUIREMENTS = native_build.REQUIREMENTS
build_all = native_build.build_all


if __name__ == "__main__" and "--check" in sys.argv[1:]:
    sys.exit("\n".join(native_build.check_warnings()) or None)

if __name__ == "__main__":
    if "--sanitize" in sys.argv[1:]:
        files, missing = build_all(native_build.SANITIZED, anew=False)
    else:
        files, missing = build_all()
    for file in files:
        print(file)
    if missing:
        sys.exit("Not compiled (lazyviz works without, but more slowly): " + "; ".join(missing))
