"""``python ARGUMENTS`` in a separate process, forked from one that has already imported PyTorch.

The program finds what it would find in a fresh process, except for the modules that are imported already.
Use :func:`subprocess.run` to test imports, their time, or the outermost frames of a traceback.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess

import lazyviz

from .fork_server import SHOW_STACKS

ROOT = Path(lazyviz.__file__).parent.parent
_FOLDER = Path(__file__).parent
_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); import fork_server; del sys.path[0]; "
    "fork_server.serve(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])"
)
# Variables that are read where the modules that are there already were imported.
_READ_BY_IMPORTS = ("LAZYVIZ_", "OMP_", "MKL_", "ATEN_", "TORCH", "CUDA_", "DNNL_", "ONEDNN_")


class WarmPython:
    """One process that has imported ``imports``, whose forks run programs."""

    def __init__(self, imports: tuple[str, ...], env: Mapping[str, str]) -> None:
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        command = [sys.executable, "-c", _START, str(_FOLDER), str(requests), str(answers), *imports]
        self._process = subprocess.Popen(command, env=dict(env), pass_fds=(requests, answers))
        self._read_by_imports = _settings(env)
        os.close(requests)
        os.close(answers)
        self._lines = os.fdopen(self._answers, "rb", buffering=0)  # `select` sees no line that was read ahead
        atexit.register(self.end)

    def end(self) -> None:
        """It ends where nothing more can be asked."""
        os.close(self._requests)
        self._process.wait(60)
        self._lines.close()

    def can_run(self, env: Mapping[str, str]) -> bool:
        """Whether the modules were imported under what ``env`` says."""
        return self._process.poll() is None and _settings(env) == self._read_by_imports

    def run(
        self, argv: list[str], env: Mapping[str, str], cwd: Path | None, stdin: str | None, timeout: float
    ) -> CompletedProcess[str]:
        """As :func:`subprocess.run` with ``capture_output=True, text=True``."""
        with tempfile.TemporaryDirectory() as folder:
            files = {name: Path(folder) / name for name in ("stdin", "stdout", "stderr")}
            for name, file in files.items():
                file.write_text((stdin or "") if name == "stdin" else "")
            request = {"argv": argv, "env": dict(env), "cwd": str(cwd or Path.cwd())}
            request |= {name: str(file) for name, file in files.items()}
            os.write(self._requests, (json.dumps(request) + "\n").encode())
            child = int(self._lines.readline())
            if not select.select([self._answers], [], [], timeout)[0]:
                os.kill(child, SHOW_STACKS)
                select.select([self._answers], [], [], 2)  # while it writes
                os.kill(child, signal.SIGKILL)
                self._lines.readline()
                out, err = _written(files)
                print(f"stdout of {argv}:\n{out}\nstderr:\n{err}")
                raise subprocess.TimeoutExpired(argv, timeout, out, err)
            code = int(self._lines.readline())
            out, err = _written(files)
        return CompletedProcess([sys.executable, *argv], code, out, err)


def _written(files: Mapping[str, Path]) -> tuple[str, str]:
    """What the program has written, to stdout and to stderr."""
    out, err = (files[name].read_text(encoding="utf-8") for name in ("stdout", "stderr"))
    return out, err


def _settings(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(_READ_BY_IMPORTS)}


@functools.cache
def _warm(imports: tuple[str, ...]) -> WarmPython:
    # An optimizer's first step imports Dynamo, and so do fake tensors: almost a second in each program.
    return WarmPython((*imports, "torch._dynamo"), environment({}))


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of a program: this process's, ``env``, and this tree's package to be imported."""
    env = dict(env)
    path = filter(None, [str(ROOT), env.pop("PYTHONPATH", None), os.environ.get("PYTHONPATH")])
    known = {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    known |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **known, **env}


def python(
    *argv: str,
    imports: tuple[str, ...] = ("torch",),
    env: Mapping[str, str],
    cwd: Path | None = None,
    stdin: str | None = None,
    timeout: float = 300,
    fresh: bool = False,
) -> CompletedProcess[str]:
    """``python ARGV`` where ``imports`` have been imported, in the environment ``env``.

    A ``fresh`` process also where these modules would be other ones in ``env``, or nothing can be forked.
    """
    if not fresh and hasattr(os, "fork") and (warm := _warm(imports)).can_run(env):
        return warm.run(list(argv), env, cwd, stdin, timeout)
    return subprocess.run(
        [sys.executable, *argv],
        env=env,
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
