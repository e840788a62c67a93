"""Ctrl-C while the command is being imported ends it quietly; other programs are not affected."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

# Raises the signal when a module is looked for, at whose import time.
INTERRUPTING = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder())
"""
AS_SCRIPT = """
import sys
sys.argv[:] = ["/somewhere/bin/lazyviz", "devices"]
from lazyviz.cli.main import main
sys.exit(main())
"""
PROGRAM = """
try:
    import lazyviz
except KeyboardInterrupt:
    print("caught")
import lazyviz, signal
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


def started(tmp_path, at, *command):
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTING)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "INTERRUPT_AT": at}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env)


@pytest.mark.parametrize("command", [("-m", "lazyviz", "devices"), ("-c", AS_SCRIPT)], ids=["-m", "script"])
@pytest.mark.parametrize("at", ["torch.nn", "lazyviz.session", "lazyviz.cli.main"])
def test_an_interrupt_while_the_command_is_imported_is_no_traceback(command, at, tmp_path):
    ended = started(tmp_path, at, *command)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.slow
def test_a_program_that_imports_lazyviz_is_interrupted_as_ever(tmp_path):
    ended = started(tmp_path, "lazyviz.session", "-c", PROGRAM)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "caught\n", "")
