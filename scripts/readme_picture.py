"""Draws the README's picture: the first lazy step of the quickstart, by the product itself.

make picture        # or: .venv/bin/python scripts/readme_picture.py
"""

from __future__ import annotations

import os
import sys
from typing import Any

import nbformat
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from steps import ROOT, relative, say

NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"
PICTURE = ROOT / "docs" / "step.svg"
GRAPH = "step"  # the name that the notebook's first lazy cell gives its graph
LIMIT_BYTES = 300_000


def first_graph() -> Any:
    """Run the notebook's cells until its first graph is there, and return it, not evaluated."""
    shell = InteractiveShell.instance()
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        if cell.cell_type != "code":
            continue
        with capture_output():
            result = shell.run_cell(cell.source)
        result.raise_error()
        if GRAPH in shell.user_ns:
            return shell.user_ns[GRAPH]
    raise SystemExit(f"{relative(NOTEBOOK)} has no cell that names its graph {GRAPH}")


def main() -> int:
    """Write the picture; returns the exit status."""
    graph = first_graph()
    PICTURE.parent.mkdir(exist_ok=True)
    graph.save(PICTURE)
    size = PICTURE.stat().st_size
    if size > LIMIT_BYTES:
        say(f"make picture: {relative(PICTURE)} has {size:,} bytes, more than {LIMIT_BYTES:,}")
        return 1
    say(f"make picture: look at {relative(PICTURE)} ({size:,} bytes)")
    return 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
