"""Runs Python and the ``lazyviz`` command in separate processes, with this tree's package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess

from .. import warm_python

SCRIPTS = Path(__file__).parent / "scripts"
BITS = Path(__file__).parent / "parameter_digest"
ROOT = warm_python.ROOT
_OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GITHUB_ACTIONS", "COLUMNS", "FORCE_COLOR")


def python(
    *arguments: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str | None = None,
    timeout: float = 300,
    imports: tuple[str, ...] = ("torch",),
    fresh: bool = False,
) -> CompletedProcess[str]:
    """``python ARGUMENTS``, where PyTorch is imported already, or ``fresh``."""
    own = env or {}
    env = {
        name: value
        for name, value in warm_python.environment(own).items()
        if name in own or name not in _OF_LAUNCHERS
    }
    return warm_python.python(
        *arguments, imports=imports, env=env, cwd=cwd, stdin=stdin, timeout=timeout, fresh=fresh
    )


def lazyviz_command(
    *arguments: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str | None = None,
    fresh: bool = False,
) -> CompletedProcess[str]:
    """``lazyviz ARGUMENTS``, where PyTorch and lazyviz are imported already, or ``fresh``."""
    imports = ("torch", "lazyviz")
    return python("-m", "lazyviz", *arguments, env=env, cwd=cwd, stdin=stdin, imports=imports, fresh=fresh)
