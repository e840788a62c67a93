"""Python and the command ``lazyviz`` in processes of their own, with this tree's package."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess

import lazyviz

SCRIPTS = Path(__file__).parent / "scripts"
BITS = Path(__file__).parent / "bits"
ROOT = Path(lazyviz.__file__).parent.parent
_OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GITHUB_ACTIONS", "COLUMNS", "FORCE_COLOR")


def python(
    *arguments: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str | None = None,
    timeout: float = 300,
) -> CompletedProcess[str]:
    """``python ARGUMENTS``."""
    inherited = {name: value for name, value in os.environ.items() if name not in _OF_LAUNCHERS}
    env = dict(env or {})
    path = os.pathsep.join(
        filter(None, [str(ROOT), env.pop("PYTHONPATH", None), os.environ.get("PYTHONPATH")])
    )
    known = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**inherited, **known, **env},
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def lazyviz_command(
    *arguments: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str | None = None,
) -> CompletedProcess[str]:
    """``lazyviz ARGUMENTS``."""
    return python("-m", "lazyviz", *arguments, env=env, cwd=cwd, stdin=stdin)
