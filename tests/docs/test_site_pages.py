"""Pages of the documentation site: what a reader sees of code, outputs, tables, figures, and docstrings."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SHOWN = [ROOT / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
BLOCK = re.compile(r"^(```+)(?P<language>[^\n]*)\n(?P<code>.*?)^\1$", re.MULTILINE | re.DOTALL)


def loaded(name):
    spec = importlib.util.spec_from_file_location(f"site_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def breaks():
    return loaded("lines_that_break")


@pytest.fixture
def conf(monkeypatch):
    """The site's configuration, which changes the environment and starts a server of kernels."""
    import os

    before, path = dict(os.environ), list(sys.path)
    sys.path.insert(0, str(DOCS))
    import forked_jupyter_kernels

    monkeypatch.setattr(forked_jupyter_kernels, "start", lambda: None)
    yield loaded("conf")
    os.environ.clear()
    os.environ.update(before)
    sys.path[:] = path


@pytest.mark.parametrize("page", [*sorted(DOCS.rglob("*.md")), *SHOWN], ids=lambda page: page.stem)
def test_no_line_of_code_is_wider_than_a_page(breaks, page):
    blocks = list(BLOCK.finditer(page.read_text(encoding="utf-8")))
    code = [found["code"] for found in blocks if found["language"] not in ("{toctree}", "{eval-rst}")]
    assert not [line for text in code for line in text.splitlines() if len(line) > breaks.WIDEST]


def test_long_lines_of_outputs_are_wrapped_and_those_of_tables_are_not(breaks):
    long = "  It does not fit: " + "the GPU is too small, and " * 5
    page = (
        f'<div class="output stream highlight-a"><div class="highlight"><pre>a  b\n{long}\n1  2</pre></div>'
    )
    found = breaks.with_broken_lines(page)
    assert f'<span class="lazyviz-long-line" style="--hang: 6ch">{long}</span>' in found
    assert found.count("<span") == 1
    assert re.sub(r"</?span[^>]*>", "", found) == page, "nothing else has changed"
    assert "lazyviz-long-line" in (DOCS / "_static" / "site.css").read_text(encoding="utf-8")


def test_code_and_lines_within_a_style_stay_as_they_are(breaks):
    long = "x" * 200
    for page in (
        f'<div class="highlight-python"><div class="highlight"><pre>{long}</pre></div></div>',
        f'<div class="output stream"><div class="highlight"><pre><span class="b">{long}\n</span></pre></div>',
    ):
        assert breaks.with_broken_lines(page) == page


def test_names_in_tables_break_between_their_parts_only(breaks):
    page = (
        '<table><td><a href="a_long_file_name.html">record/source_lines.py</a> sum &#39;internationalization'
        "</td></table><p>record/source_lines.py</p>"
    )
    found = breaks.with_broken_lines(page)
    assert "record/<wbr>source_<wbr>lines.<wbr>py</a>" in found
    assert found.count("<wbr>") == 3
    assert found.replace("<wbr>", "") == page


def test_figures_and_results_of_other_folders_come_with_the_site(conf):
    source = [
        "![a plot](../benchmarks/results/speed.svg) ([result](../benchmarks/results/speed.json)), by "
        "[a script](../benchmarks/run.py)"
    ]
    conf.read(None, "performance", source)
    assert source[0] == (
        "![a plot](../benchmarks/results/speed.svg) ([result](../benchmarks/results/speed.json)), by a script"
    )
    source = ["[result](../../benchmarks/results/speed.json)"]
    conf.read(None, "tutorials/first_cell", source)
    assert source == ["[result](../../benchmarks/results/speed.json)"]


def test_a_colon_in_the_docstring_of_a_property_is_not_the_end_of_a_type(conf):
    napoleon = pytest.importorskip("sphinx.ext.napoleon")
    lines = ["The first storage: itself, or another one."]
    conf.no_types_of_properties(None, "property", "a", None, {}, lines)
    found = str(napoleon.GoogleDocstring(lines, napoleon.Config(), None, "property", "a"))
    assert "The first storage: itself, or another one." in found
    assert ":type:" not in found
