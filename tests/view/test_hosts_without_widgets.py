"""Output where no widget can run: viewers that filter HTML, terminals, log files."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
import torch

import lazyviz
from lazyviz.view.widget.widget import LazyWidget

ROOT = Path(__file__).parent.parent.parent
# What viewers of saved notebooks let through, at least: elements, and their attributes.
LET_THROUGH = {"img": {"alt", "class", "id", "src", "style"}}


def recorded():
    x = torch.ones(3)
    with lazyviz.lazy() as graph:
        y = (x * 2).relu()
    return graph, (x, y)


def test_the_static_picture_is_made_of_nothing_that_viewers_filter_out():
    graph, _keep = recorded()
    found = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            found.append((tag, dict(attrs)))

        def handle_data(self, data):
            assert not data.strip()

    Reader().feed(graph.static_bundle()["text/html"])
    ((tag, attributes),) = found
    assert attributes.keys() <= LET_THROUGH[tag]
    head, _, data = attributes["src"].partition(",")
    assert head == "data:image/svg+xml;base64"
    svg = ElementTree.fromstring(base64.b64decode(data))
    # An SVG in an <img> may run and load nothing, and needs nothing of the page.
    assert not {element.tag.rpartition("}")[2] for element in svg.iter()} & {
        "script", "style", "foreignObject", "image", "use", "a"
    }  # fmt: skip
    assert svg.get("role") == "img" and svg.get("aria-label")
    assert attributes["alt"]


def test_the_widget_adds_no_text_where_it_cannot_run():
    graph, _keep = recorded()
    widget = LazyWidget(graph)
    bundle = widget._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    assert data["text/plain"] == ""
    widget.close()


def run(code: str, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, *command, code],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


RECORD = "import torch, lazyviz\nx = torch.ones(3)\nwith lazyviz.lazy() as graph:\n    y = x * 2\n"


@pytest.mark.slow
def test_a_log_file_gets_text_and_nothing_runs():
    out = run(RECORD + "print(graph)\nprint(graph.text())\nprint(graph.pending)", "-c")
    assert out.startswith("<LazyGraph: 1 ops, 1 pending, 0 sync points>")
    assert "Forward: 1 op" in out and "Memory over the run" in out
    assert out.rstrip().endswith("1")
    assert "<img" not in out and "\x1b" not in out


@pytest.mark.slow
def test_a_terminal_gets_text(tmp_path):
    script = tmp_path / "cell.ipy"
    script.write_text(
        "%load_ext lazyviz\nimport torch\nget_ipython().run_cell_magic('lazy', '', 'y = torch.ones(3) * 2')\n"
    )
    environment = {"IPYTHONDIR": str(tmp_path / "ipython")}
    os.environ.update(environment)
    try:
        out = run(str(script), "-m", "IPython", "--no-banner", "--colors=NoColor")
    finally:
        del os.environ["IPYTHONDIR"]
    assert "ops recorded" in out and "Memory over the run" in out
    assert not re.search(r"<img|LazyWidget", out)


CELLS = [
    "%load_ext lazyviz\nimport torch\nnet, x = torch.nn.Linear(3, 3), torch.ones(3)",
    "%%lazy\ny = net(x)",
]


@pytest.mark.slow
def test_nbconvert_runs_a_notebook_into_html_with_the_picture_and_latex_with_the_text(tmp_path):
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    path = tmp_path / "step.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    for form in ("html", "latex"):
        done = subprocess.run(
            [sys.executable, "-m", "nbconvert", "--execute", "--to", form, str(path)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path)},
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
    page = (tmp_path / "step.html").read_text(encoding="utf-8")
    (picture,) = re.findall(r'<img[^>]*class="lazyviz-static"[^>]*>', page)
    svg = base64.b64decode(re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', picture)[1]).decode()
    assert ">net<" in svg
    text = (tmp_path / "step.tex").read_text(encoding="utf-8")
    assert "op recorded" in text or "ops recorded" in text
    assert "includegraphics" not in text.partition("begin{document}")[2]
