"""Draws the README's picture with lazyviz: the first lazy step of the quickstart.

make picture        # or: .venv/bin/python scripts/readme_picture.py
.venv/bin/python scripts/readme_picture.py --check      # checks that it is up to date

It is a figure without verdict and device.  Byte counts depend on this processor's kernels, so the check
compares everything but the numbers: shapes, their order, and text.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from named_steps import ROOT, relative, say

NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"
PICTURE = ROOT / "docs" / "step.svg"
TITLE = "A training step, before it runs"
GRAPH = "step"  # the name that the notebook's first lazy cell gives its graph
LIMIT_BYTES = 300_000


def first_graph() -> Any:
    """Run the notebook's cells until its first graph exists, and return it without evaluating it."""
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


def without_numbers(picture: Path) -> str:
    """The content of an SVG file without numbers and their units."""
    return re.sub(r"[\d.]+( [KM]iB| B)?", "#", picture.read_text(encoding="utf-8"))


def main(arguments: list[str]) -> int:
    """Write the picture, or compare it; returns the exit status."""
    torch.set_num_threads(1)  # kernels' scratch memory depends on the number of threads
    graph = first_graph()
    if arguments == ["--check"]:
        with tempfile.TemporaryDirectory() as folder:
            fresh = Path(folder) / PICTURE.name
            graph.save(fresh, title=TITLE)
            same = without_numbers(fresh) == without_numbers(PICTURE)
        say(f"{relative(PICTURE)} is {'up to date' if same else 'stale: run `make picture` and look at it'}")
        return 0 if same else 1
    PICTURE.parent.mkdir(exist_ok=True)
    graph.save(PICTURE, title=TITLE)
    size = PICTURE.stat().st_size
    if size > LIMIT_BYTES:
        say(f"make picture: {relative(PICTURE)} has {size:,} bytes, more than {LIMIT_BYTES:,}")
        return 1
    say(f"make picture: look at {relative(PICTURE)} ({size:,} bytes)")
    return 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main(sys.argv[1:]))
