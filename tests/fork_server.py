"""A process that has imported PyTorch once, and forks a child for each program to run.

It is the other end of :mod:`.warm_python`, and imports nothing of the tests.  A request is a line of JSON
with ``argv`` (as after ``python``), ``env``, ``cwd`` and the paths ``stdin``, ``stdout`` and ``stderr``.
Each is answered by two lines: the child's process id, and its exit code once it has ended.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from typing import Any

SHOW_STACKS = signal.SIGRTMAX  # a program that does not end shows where each thread is


def serve(requests: int, answers: int, imports: Sequence[str]) -> None:
    """Answer until ``requests`` is closed; returns in children only, once their program has run."""
    for name in imports:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or each child copies and traverses all of PyTorch's objects when it ends
    lines = os.fdopen(requests)
    while line := lines.readline():
        child = os.fork()
        if child == 0:
            lines.close()
            os.close(answers)
            become(json.loads(line))
            return
        os.write(answers, f"{child}\n".encode())
        _, status = os.waitpid(child, 0)
        os.write(answers, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def become(request: dict[str, Any]) -> None:
    """Run the program of ``request`` as ``__main__``; its errors and exits are those of this process."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        file = os.open(request[name], os.O_RDONLY if number == 0 else os.O_WRONLY)
        os.dup2(file, number)
        os.close(file)
    faulthandler.register(SHOW_STACKS)
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    path = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path[:] = [*path, *(part for part in sys.path if part and part not in (*before, *path))]
    if any(os.path.exists(os.path.join(part, "sitecustomize.py")) for part in path):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
    program, *arguments = request["argv"]
    if program == "-m":
        module, *sys.argv[1:] = arguments
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(module)  # type: ignore[attr-defined]
        return
    main = sys.modules["__main__"].__dict__
    if program == "-c":
        source, name = arguments[0], "<string>"
        sys.argv[:] = ["-c", *arguments[1:]]
        sys.path.insert(0, "")
    else:
        with open(program, encoding="utf-8") as file:
            source, name = file.read(), program
        sys.argv[:] = [program, *arguments]
        sys.path.insert(0, os.path.dirname(os.path.abspath(program)))
        main["__file__"] = program
    exec(compile(source, name, "exec"), main)
