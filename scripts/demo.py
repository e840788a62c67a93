"""Runs the quickstart notebook, prints its plan and report, and saves it with its pictures.

    .venv/bin/python scripts/demo.py [--open=0|1]

Writes ``out/quickstart.ipynb`` (executed) and ``out/quickstart.html``.  At a terminal,
JupyterLab opens on the executed notebook.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from named_steps import OUT, ROOT, relative, say
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import HTMLExporter

NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"
TIMEOUT_S = 600
ANSI = re.compile(r"\x1b\[[0-9;]*m")

# Tags of the notebook cells whose outputs are printed here.
SHOWN = {
    "lazyviz-plan": "the plan, before anything ran",
    "lazyviz-report": "the report, after evaluating",
    "lazyviz-accuracy": "what it printed",
    "lazyviz-equal": "what it found",
}


def text_of(cell: Any) -> str:
    """The text that ``cell`` printed."""
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def heading(cell: Any) -> str:
    """The heading at the start of a Markdown cell, without its marks and number."""
    return cell.source.splitlines()[0].lstrip("# 0123456789.")


def execute(notebook: Any) -> None:
    """Run every cell, in place, with one line of progress per section."""

    def on_cell_start(cell: Any, cell_index: int) -> None:
        if cell.cell_type == "markdown" and cell.source.startswith("#"):
            say(f"   {heading(cell)}")

    client = NotebookClient(
        notebook,
        timeout=TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(NOTEBOOK.parent)}},
        # Widget state would make the file large and break other viewers; static pictures are kept.
        store_widget_state=False,
        coalesce_streams=True,  # a progress bar overwrites its line, as in a terminal
        extra_arguments=["--IPKernelApp.log_level=ERROR"],
        on_cell_start=on_cell_start,
    )
    client.execute()


def save(notebook: Any) -> tuple[Path, Path]:
    """Write the executed notebook and its HTML page; returns both paths."""
    OUT.mkdir(exist_ok=True)
    executed, page = OUT / "quickstart.ipynb", OUT / "quickstart.html"
    nbformat.write(notebook, executed)
    body, _ = HTMLExporter(template_name="lab").from_notebook_node(notebook)
    page.write_text(body, encoding="utf-8")
    return executed, page


def show(notebook: Any) -> None:
    """Print the outputs of the tagged cells, in the notebook's order."""
    section = ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and cell.source.startswith("#"):
            section = heading(cell)
        for tag in cell.metadata.get("tags", []):
            if tag in SHOWN:
                say(f"\n{section} — {SHOWN[tag]}")
                say("\n".join(f"  {line}" for line in text_of(cell).rstrip().splitlines()))
    say("")


def main(args: list[str]) -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--open", choices=["0", "1"], default="1", help="open JupyterLab at a terminal")
    wants_lab = parser.parse_args(args).open == "1"
    say(f"-- {relative(NOTEBOOK)}")
    begin = time.monotonic()
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    try:
        execute(notebook)
    except CellExecutionError as error:
        executed, _ = save(notebook)
        say(ANSI.sub("", str(error)))
        say(f"make demo: a cell of the notebook failed; see {relative(executed)}")
        return 1
    say(f"   done in {time.monotonic() - begin:.0f} s")
    executed, page = save(notebook)
    show(notebook)
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty() and not os.environ.get("CI")
    lab = wants_lab and at_terminal
    also = "; JupyterLab opens on it now (Ctrl-C ends it)" if lab else ""
    where = f"{relative(page)} (pictures) and {relative(executed)} (executed notebook)"
    say(f"make demo: look at {where}{also}")
    if lab:
        sys.stdout.flush()
        root = ["--allow-root"] if os.geteuid() == 0 else []
        quiet = ["--log-level=ERROR"]
        os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", *root, *quiet, str(executed)])
    return 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main(sys.argv[1:]))
