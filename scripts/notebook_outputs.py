"""Prepares a notebook for commit: runs it, and keeps only outputs that are the same on all machines.

    .venv/bin/python scripts/notebook_outputs.py notebooks/*.ipynb

Cells tagged ``nbval-check-output`` keep their text, which nbval compares on every run, and those tagged
``lazyviz-measured`` keep what one real run on a named machine gave, which nobody compares;
all other outputs (pictures, timings, losses) are dropped, so that a diff shows what a
person changed.  Widget state, which breaks other viewers, is never kept.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
from named_steps import say
from nbclient import NotebookClient

CHECKED = "nbval-check-output"
KEPT = {CHECKED, "lazyviz-measured"}


def keep_only_checked(notebook: Any) -> None:
    """Remove outputs that differ between runs, in place."""
    notebook.metadata.pop("widgets", None)
    language = notebook.metadata.get("language_info", {})
    notebook.metadata["language_info"] = {"name": language.get("name", "python")}
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        checked = not KEPT.isdisjoint(cell.metadata.get("tags", []))
        cell.metadata.pop("execution", None)
        cell.execution_count = 1 if checked else None  # nbval compares only executed cells
        cell.outputs = cell.outputs if checked else []
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = 1


def main(paths: list[str]) -> int:
    """Run and rewrite the notebooks; returns the exit status."""
    if not paths:
        say(__doc__ or "")
        return 2
    for path in map(Path, paths):
        notebook = nbformat.read(path, as_version=4)
        folder = {"metadata": {"path": str(path.parent)}}
        NotebookClient(
            notebook,
            timeout=1800,
            resources=folder,
            store_widget_state=False,
            extra_arguments=["--IPKernelApp.log_level=ERROR"],
        ).execute()
        keep_only_checked(notebook)
        nbformat.write(notebook, path)
        say(f"{path}: run, and left with the outputs that are kept")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
