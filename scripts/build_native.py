"""Compiles the optional native modules that speed up recording and replay.

python scripts/build_native.py     # needs setuptools, Cython, a C and C++ compiler, and PyTorch
python scripts/build_native.py --check    # builds nothing; g++'s warnings about our C++ are errors
python scripts/build_native.py --sanitize    # for scripts/run_sanitizers.py: with AddressSanitizer and UBSan

The implementation is in ``lazyviz/torch_internals/find_compiler_and_build_extensions.py``, which is also
part of an installed lazyviz (``lazyviz compile``); it is loaded by path, because importing the package
imports PyTorch.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent


def _native_build() -> ModuleType:
    path = ROOT / "lazyviz" / "torch_internals" / "find_compiler_and_build_extensions.py"
    spec = importlib.util.spec_from_file_location("lazyviz_native_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


native_build = _native_build()
SOURCES = native_build.SOURCES
REQUIREMENTS = native_build.REQUIREMENTS
build_all = native_build.build_all


def main(args: list[str]) -> int | str | None:
    """Compile, or check for warnings; returns the exit status, or the reason for a failure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--check", action="store_true", help="make nothing; warnings of our C++ are errors")
    which.add_argument("--sanitize", action="store_true", help="with AddressSanitizer and UBSan")
    options = parser.parse_args(args)
    if options.check:
        return "\n".join(native_build.check_warnings()) or None
    files, missing = build_all(native_build.SANITIZED, anew=False) if options.sanitize else build_all()
    for file in files:
        print(file)
    if missing:
        return "Not compiled (lazyviz works without, but more slowly): " + "; ".join(missing)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
