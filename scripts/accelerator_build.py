"""Compiles ``lazyviz/record/_accelerator.pyx``, which lazyviz records faster with and works without.

python scripts/accelerator_build.py     # needs Cython, setuptools and a C compiler
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = Path("lazyviz") / "record" / "_accelerator.pyx"
REQUIREMENTS = ["cython>=3.1", "setuptools>=68"]


class CannotBuild(RuntimeError):
    """There is no compiled recorder; the message says why."""


def digest() -> str:
    """What a compiled module knows its source by."""
    return hashlib.sha256((ROOT / SOURCE).read_bytes()).hexdigest()


def build() -> Path:
    """Compile for the Python that runs this; returns the file, which stands beside its source.

    Raises:
        CannotBuild: a compiler or a requirement is missing, or does not take the source.
    """
    try:
        from Cython.Build import cythonize
        from setuptools import Distribution, Extension
        from setuptools.command.build_ext import build_ext
    except ImportError as error:
        raise CannotBuild(str(error)) from error
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / SOURCE
        copy.parent.mkdir(parents=True)
        text = (ROOT / SOURCE).read_text(encoding="utf-8")
        copy.write_text(text.replace('SOURCE = ""', f'SOURCE = "{digest()}"'), encoding="utf-8")
        extension = Extension("lazyviz.record._accelerator", [str(copy)])
        try:
            modules = cythonize([extension], quiet=True, build_dir=folder)
            command = build_ext(Distribution({"name": "lazyviz", "ext_modules": modules}))
            command.build_lib = command.build_temp = folder
            command.ensure_finalized()
            command.run()
        except Exception as error:  # setuptools and Cython have exceptions of many kinds for this
            raise CannotBuild(f"{type(error).__name__}: {error}") from error
        made = Path(command.get_ext_fullpath("lazyviz.record._accelerator"))
        target = ROOT / SOURCE.parent / made.name
        target.unlink(missing_ok=True)  # a process may have the old one loaded
        shutil.move(made, target)
    return target


if __name__ == "__main__":
    try:
        print(build())
    except CannotBuild as error:
        sys.exit(f"lazyviz records without its compiled module: {error}")
