"""Build hook: compiles ``js/`` into ``lazyviz/static/``.

The bundle is not committed.  An sdist carries the sources, so that a wheel can be
built from it.  All the work is in ``scripts/build_js_with_node.py``, which needs only the
standard library and also serves ``make``.

A wheel is of Python alone, so that one serves every system and PyTorch, and installing takes no compiler
and no minutes.  The native modules belong to one PyTorch: ``lazyviz compile`` makes them for the one that
is there.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def _script(root: str, name: str) -> ModuleType:
    """``scripts/NAME.py`` as a module; the build runs without the project on ``sys.path``."""
    path = Path(root) / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"lazyviz_{name}", path)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"lazyviz's build needs {path}, which is missing")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


class WidgetBuildHook(BuildHookInterface):  # type: ignore[type-arg]  # generic over a private type
    """Runs ``npm ci`` and ``npm run build`` when the bundle is older than its sources."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Build requirements: Node from PyPI, only where it is needed and not installed."""
        if self.target_name != "wheel":  # the target of an editable install is "wheel" too
            return []
        needed: list[str] = _script(self.root, "build_js_with_node").build_requirements()
        return needed

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the bundle before files are collected.

        ``version`` is ``"standard"`` or ``"editable"``; both put the bundle in the source
        tree, from where a wheel packs it and an editable install serves it.
        """
        if self.target_name != "wheel":
            return
        js_build = _script(self.root, "build_js_with_node")
        try:
            js_build.build(report=self.app.display_info)
        except js_build.BuildError as error:  # its message is complete: no traceback around it
            self.app.abort(str(error))
