"""What a committed notebook may carry; running the notebooks is nbval's part of `make test`."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("**/[!.]*.ipynb"))
KEPT = {"nbval-check-output", "lazyviz-measured"}
IDS = [path.name for path in NOTEBOOKS]


def code_cells(path: Path) -> list[dict]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def test_there_are_notebooks_to_check():
    assert "quickstart.ipynb" in IDS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_a_committed_notebook_is_valid(path: Path):
    nbformat.validate(nbformat.read(path, as_version=4))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_a_committed_notebook_carries_no_widget_state(path: Path):
    raw = json.loads(path.read_text(encoding="utf-8"))
    assert "widgets" not in raw["metadata"]
    assert "application/vnd.jupyter.widget" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_a_committed_notebook_runs_on_any_python_kernel(path: Path):
    metadata = json.loads(path.read_text(encoding="utf-8"))["metadata"]
    assert metadata["kernelspec"] == {"display_name": "Python 3", "language": "python", "name": "python3"}
    assert metadata["language_info"] == {"name": "python"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_a_committed_notebook_keeps_just_the_outputs_that_nbval_compares_or_that_were_measured(path: Path):
    for cell in code_cells(path):
        checked = not KEPT.isdisjoint(cell["metadata"].get("tags", []))
        assert bool(cell["outputs"]) == checked, cell["source"]
        assert cell["execution_count"] == (1 if checked else None)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_every_code_cell_follows_a_sentence_that_says_what_to_look_at(path: Path):
    cells = nbformat.read(path, as_version=4).cells
    assert cells[0].cell_type == "markdown"
    for before, cell in pairwise(cells):
        if cell.cell_type == "code":
            assert before.cell_type == "markdown", cell.source
