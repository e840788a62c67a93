"""Pictures on pages of the documentation site, which are light or dark."""

from __future__ import annotations

import base64
import importlib.util
import re
from pathlib import Path

import torch
from torch import nn

import lazyviz
from lazyviz.view.colors import darkened

DOCS = Path(__file__).parent.parent.parent / "docs"


def helper(name):
    spec = importlib.util.spec_from_file_location(f"site_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_dark_ones(page):
    return helper("light_and_dark_pictures").with_dark_ones(page)


def drawn(tag):
    return base64.b64decode(re.search(r"base64,([^\"]+)", tag)[1]).decode()


def test_each_picture_of_a_graph_and_of_a_comparison_is_there_in_light_and_in_dark():
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    with lazyviz.lazy() as graph:
        net(torch.ones(2, 4)).sum().backward()
    page = graph.static_bundle()["text/html"] + lazyviz.compare(graph, graph)._repr_html_()
    light = re.findall(r"<img [^>]*>", page)
    found = re.findall(r"<img [^>]*>", with_dark_ones(page))
    assert len(light) == 3 and len(found) == 6
    for before, one, other in zip(light, found[::2], found[1::2], strict=True):
        assert "lazyviz-on-light" in one and "lazyviz-on-dark" in other
        assert drawn(one) == drawn(before) and drawn(other) == darkened(drawn(before)) != drawn(before)
        assert 'id="' not in other, "an id is there once"
    css = (DOCS / "_static" / "site.css").read_text(encoding="utf-8")
    assert all(name in css for name in ("lazyviz-on-light", "lazyviz-on-dark"))


def test_other_pictures_stay_as_they_are():
    svg = '<svg xmlns="http://www.w3.org/2000/svg"><rect fill="#123456"/></svg>'
    page = f'<p><img src="data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}" alt="a"></p>'
    assert with_dark_ones(page) == page
    assert with_dark_ones('<img src="_images/a.png">') == '<img src="_images/a.png">'


def test_a_list_of_pages_shows_the_picture_of_each_page_s_graph(tmp_path, monkeypatch):
    monkeypatch.setenv("LAZYVIZ_DOCS_GRAPHS", str(tmp_path))
    pages = helper("embedded_graph_page")
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    with lazyviz.lazy() as graph:
        net(torch.ones(2, 4)).sum().backward()
    pages.interactive(graph, "cnn")
    light, dark = (tmp_path / f"cnn{suffix}.svg" for suffix in ("", "-dark"))
    assert darkened(light.read_text()) == dark.read_text() != light.read_text()
    one = '<li><p><a class="reference internal" href="{}.html"><span>CNN</span></a></p></li>'
    body = f'<ul class="simple">{one.format("cnn")}{one.format("not_executed")}</ul>'
    shown = pages.with_pictures(body, tmp_path)
    assert re.findall(r'class="lazyviz-(\S+)" src="\.\./graphs/(\S+)"', shown) == [
        ("on-light", "cnn.svg"), ("on-dark", "cnn-dark.svg"),
    ]  # fmt: skip
    assert '<ul id="lazyviz-gallery" class="simple">' in shown
    assert "#lazyviz-gallery" in (DOCS / "_static" / "site.css").read_text(encoding="utf-8")
    assert pages.with_pictures(body, tmp_path / "nowhere") == body
