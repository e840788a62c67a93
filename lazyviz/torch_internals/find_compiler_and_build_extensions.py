"""Build of the optional native modules that speed up recording and replay.

It is used by ``lazyviz compile``, by the installation of lazyviz (``hatch_build.py``), and by
``scripts/build_native.py``. The latter two load this file by path, because PyTorch may be missing; therefore
it imports nothing of the package.

The Cython modules do not need PyTorch.  The C++ modules are compiled against the PyTorch of this Python
environment and work only with that version; without PyTorch, they are skipped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]  # in a checkout, or the folder that has the package
_NATIVE = Path("lazyviz") / "torch_internals" / "native"
CYTHON = (_NATIVE / "plan_passes.pyx", _NATIVE / "recorder.pyx", _NATIVE / "short_runs.pyx")
CPP = (
    _NATIVE / "allocations.cpp",
    _NATIVE / "dispatch.cpp",
    _NATIVE / "backward_nodes.cpp",
    _NATIVE / "graph_release.cpp",
    _NATIVE / "interpreter.cpp",
    _NATIVE / "node_passes.cpp",
    _NATIVE / "op_stream.cpp",
)
SOURCES = (*CYTHON, *CPP)
REQUIREMENTS = ["cython>=3.1", "setuptools>=68"]

_ASK_TORCH = """\
import json, torch
from torch.utils.cpp_extension import include_paths, library_paths
print(json.dumps([torch.__version__, include_paths(), library_paths()]))
"""

# PyTorch does not export the classes whose virtual tables UBSan would compare.
SANITIZED = (
    "-fsanitize=address,undefined",
    "-fno-sanitize=vptr",
    "-fno-omit-frame-pointer",
    "-O1",
    "-g1",
)


class CannotBuild(RuntimeError):
    """There is no compiled module; the message says why."""


@dataclass(frozen=True)
class Torch:
    """The installed PyTorch."""

    version: str
    include: list[str]
    libraries: list[str]


def digest(source: Path) -> str:
    """The digest by which a compiled module recognizes its source."""
    return hashlib.sha256((ROOT / source).read_bytes()).hexdigest()


def find_torch() -> Torch:
    """The PyTorch of the environment, also from inside pip's isolated build.

    Raises:
        CannotBuild: there is none.
    """
    # In isolated mode, Python does not search the paths of pip's build environment, but its own packages.
    asked = subprocess.run([sys.executable, "-I", "-c", _ASK_TORCH], capture_output=True, text=True)
    if asked.returncode:
        raise CannotBuild("PyTorch is not installed in this environment yet")
    return Torch(*json.loads(asked.stdout.splitlines()[-1]))


def name_of(source: Path) -> str:
    """The name of the module that is built from a source."""
    return ".".join(source.with_suffix("").parts)


def build(source: Path, torch: Torch | None = None, more: Sequence[str] = ()) -> Path:
    """Compile one of ``SOURCES`` for this Python; returns the file, which is next to its source.

    ``more`` are options for the compiler and the linker.

    Raises:
        CannotBuild: a compiler or a requirement is missing, or does not take the source.
    """
    try:
        from setuptools import Distribution
        from setuptools.command.build_ext import build_ext
    except ImportError as error:
        raise CannotBuild(str(error)) from error
    with tempfile.TemporaryDirectory() as folder:
        try:
            modules = (
                _in_cython(source, folder) if source in CYTHON else [_in_cpp(source, torch or find_torch())]
            )
            for module in modules:
                module.extra_compile_args += more
                module.extra_link_args += more
            command = build_ext(Distribution({"name": "lazyviz", "ext_modules": modules}))
            command.build_lib = command.build_temp = folder
            command.ensure_finalized()
            command.run()
        except CannotBuild:
            raise
        except Exception as error:  # setuptools and Cython raise many kinds of exceptions for this
            if type(error).__name__ in ("CompileError", "LinkError") and "Command" in str(error):
                raise CannotBuild("the compiler failed; its output is above") from error
            raise CannotBuild(f"{type(error).__name__}: {error}") from error
        made = Path(command.get_ext_fullpath(name_of(source)))
        target = ROOT / source.parent / made.name
        target.unlink(missing_ok=True)  # a process may have loaded the old one
        shutil.move(made, target)
    return target


# Cython compresses a module's strings, but `is_made` searches for this one.
_FOUND_IN_THE_FILE = '''
cdef extern from *:
    """
    extern const char lazyviz_source[];
    const char lazyviz_source[] = "{}";
    """
'''


def _in_cython(source: Path, folder: str) -> list[Any]:
    try:
        from Cython.Build import cythonize
    except ImportError as error:
        raise CannotBuild(str(error)) from error
    from setuptools import Extension

    copy = Path(folder) / source
    copy.parent.mkdir(parents=True)
    text = (ROOT / source).read_text(encoding="utf-8")
    text = text.replace('SOURCE = ""', f'SOURCE = "{digest(source)}"')
    copy.write_text(text + _FOUND_IN_THE_FILE.format(digest(source)), encoding="utf-8")
    made: list[Any] = cythonize([Extension(name_of(source), [str(copy)])], quiet=True, build_dir=folder)
    return made


def _in_cpp(source: Path, torch: Torch) -> Any:
    from setuptools import Extension

    options = ["/std:c++20", "/O2", "/w"] if os.name == "nt" else ["-std=c++20", "-O2", "-g0", "-w"]
    macros = {"LAZYVIZ_SOURCE": f'"{digest(source)}"', "LAZYVIZ_TORCH": f'"{torch.version}"'}
    return Extension(
        name_of(source),
        [str(ROOT / source)],
        language="c++",
        include_dirs=torch.include,
        library_dirs=torch.libraries,
        libraries=["torch_python", "torch_cpu", "torch", "c10"],
        # PyTorch is built with NDEBUG; without it, inline functions of its headers check what it never sets.
        define_macros=[*macros.items(), ("NDEBUG", None)],
        extra_compile_args=options,
    )


def is_made(source: Path, torch: Torch | None) -> bool:
    """Whether the compiled module is up to date with its source, and built for that PyTorch."""
    made = (ROOT / source.parent).glob(f"{source.stem}.*.so")
    of_one_torch = torch is not None and "LAZYVIZ_TORCH" in (ROOT / source).read_text(encoding="utf-8")
    words = [digest(source), torch.version] if torch is not None and of_one_torch else [digest(source)]
    return any(all(word.encode() in file.read_bytes() for word in words) for file in made)


def _joined(reasons: Iterable[str]) -> list[str]:
    """Sentences ``"SOURCE: REASON"``; sources that share a reason share a sentence."""
    sources: dict[str, list[str]] = {}
    for sentence in reasons:
        source, _, reason = sentence.partition(": ")
        sources.setdefault(reason, []).append(source)
    return [f"{', '.join(names)}: {reason}" for reason, names in sources.items()]


def missing_compiler() -> str | None:
    """Why nothing can be compiled here; ``None`` if Python's compilers are found."""
    if os.name == "nt":  # setuptools finds Visual Studio by itself
        return None
    for variable in ("CC", "CXX"):
        command = os.environ.get(variable) or sysconfig.get_config_var(variable) or ""
        program = next(iter(shlex.split(command)), "")
        if shutil.which(program) is None:
            return f"no C and C++ compiler found ({program or variable} is not found)"
    return None


def build_all(
    more: Sequence[str] = (), anew: bool = True, report: Callable[[str], None] = lambda sentence: None
) -> tuple[list[Path], list[str]]:
    """Compile what can be compiled; returns the files, and why others are missing.

    ``more`` are options as in :func:`build`; without ``anew``, modules that match their source are not
    rebuilt. ``report`` is called with progress messages, from several threads.
    """
    reasons: list[str] = []
    try:
        torch: Torch | None = find_torch()
    except CannotBuild as error:
        torch = None
        reasons.append(f"{error} ({', '.join(path.name for path in CPP)})")

    def attempt(source: Path) -> Path | str:
        begin = time.monotonic()
        report(f"{source.name}: compiling")
        try:
            made = build(source, torch, more)
        except CannotBuild as error:
            return f"{source.name}: {error}"
        except OSError as error:  # the folder belongs to another Python
            return f"{source.name}: cannot be written to {ROOT / source.parent}: {error.strerror}"
        report(f"{source.name}: compiled in {time.monotonic() - begin:.0f} s")
        return made

    known = SOURCES if torch is not None else CYTHON
    wanted = [each for each in known if anew or not is_made(each, torch)]
    if wanted and (lacking := missing_compiler()):
        return [], [*reasons, lacking]
    with ThreadPoolExecutor() as pool:
        made = list(pool.map(attempt, wanted))
    reasons += _joined(item for item in made if isinstance(item, str))
    return [item for item in made if isinstance(item, Path)], reasons


# Python's own structs are meant to be partially initialized.
STRICT = ("-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers")


def check_warnings() -> list[str]:
    """The compiler's warnings about our own C++, without those about PyTorch's and Python's headers."""
    torch = find_torch()
    outside = [*torch.include, sysconfig.get_paths()["include"]]
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    said = []
    for source in CPP:
        command = [*compiler, "-std=c++20", *STRICT, *(f"-isystem{path}" for path in outside)]
        command += ['-DLAZYVIZ_SOURCE=""', '-DLAZYVIZ_TORCH=""', str(ROOT / source)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            said.append(done.stderr)
    return said
