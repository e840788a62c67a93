"""The Save menu: every file that it offers, by mouse and by keyboard."""

from __future__ import annotations

import struct
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.view.render import pdf_and_png

from .support.bare_page import Stage

pytestmark = pytest.mark.browser


def small_step():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(4, 8)
    with lazyviz.lazy() as graph:
        loss = net(x).sum()
        loss.backward()
    return graph, (net, x, loss)


def saved(stage, start):
    """The file that `start` makes the browser save: its name and bytes."""
    downloads = []
    stage.page.once("download", lambda download: downloads.append(download))
    start()
    for _ in range(1500):
        if downloads:
            break
        stage.pump()
        stage.page.wait_for_timeout(20)
    (download,) = downloads
    stage.settle()
    return download.suggested_filename, download.path().read_bytes()


def choose(page, label):
    page.locator('button[data-action="save"]').click()
    page.get_by_role("menuitem", name=label).click()


def test_svg_and_png_are_the_picture_as_it_is_drawn(page, tmp_path):
    graph, _keep = small_step()
    graph.title = "my net: step 1/2"
    with Stage(page, graph, width=1000) as stage:
        name, svg = saved(stage, lambda: choose(page, "SVG"))
        assert name == "my-net-step-1-2.svg"
        root = ElementTree.fromstring(svg)
        drawn = page.locator(".lazyviz [data-node]").count()
        assert sum(1 for element in root.iter() if "data-node" in element.attrib) == drawn
        name, png = saved(stage, lambda: choose(page, "PNG"))
        assert name == "my-net-step-1-2.png"
        assert png.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", png[16:24])
        assert (width, height) == tuple(round(2 * float(root.get(side))) for side in ("width", "height"))
        # Not an empty sheet: many colors of text and boxes.
        (tmp_path / "a.png").write_bytes(png)
        assert len(png) > 10_000


def test_dot_html_and_pdf_are_written_by_python(page, browser, tmp_path):
    graph, _keep = small_step()
    with Stage(page, graph, width=1000) as stage:
        name, dot = saved(stage, lambda: choose(page, "DOT"))
        assert (name, dot.decode()) == ("lazyviz.dot", graph.to_dot().source)
        name, html = saved(stage, lambda: choose(page, "HTML"))
        assert name == "lazyviz.html"
        (tmp_path / name).write_bytes(html)
        other = browser.new_page()
        other.goto((tmp_path / name).as_uri())
        other.locator(".lazyviz [data-node]").first.wait_for()
        other.close()
        name, pdf = saved(stage, lambda: choose(page, "PDF"))
        assert name == "lazyviz.pdf"
        assert pdf.startswith(b"%PDF-")


def test_a_failed_save_shows_a_message_and_the_menu_can_be_used_again(page, monkeypatch):
    graph, _keep = small_step()
    monkeypatch.setattr(pdf_and_png, "_by_cairo", lambda svg, kind: None)
    monkeypatch.setattr(pdf_and_png, "browser", lambda: None)
    monkeypatch.setattr("lazyviz.view.export.save.shutil.which", lambda name: None)
    with Stage(page, graph, width=1000) as stage:
        choose(page, "PDF")
        for _ in range(50):
            stage.settle()
            if page.get_by_text("pip install cairosvg").count():
                break
        assert page.get_by_text("pip install cairosvg").first.is_visible()
        name, _ = saved(stage, lambda: choose(page, "DOT"))
        assert name == "lazyviz.dot"


def test_the_menu_is_used_by_keyboard_and_gives_the_focus_back(page):
    graph, _keep = small_step()
    with Stage(page, graph, width=1000) as stage:
        button = page.locator('button[data-action="save"]')
        button.focus()
        stage.settle()
        page.keyboard.press("ArrowDown")
        assert button.get_attribute("aria-expanded") == "true"
        focused = "document.activeElement.dataset.format"
        assert page.evaluate(focused) == "svg"
        page.keyboard.press("ArrowUp")
        assert page.evaluate(focused) == "html"
        page.keyboard.press("Home")
        page.keyboard.press("ArrowDown")
        assert page.evaluate(focused) == "png"
        page.keyboard.press("Escape")
        assert button.get_attribute("aria-expanded") == "false"
        assert page.evaluate("document.activeElement.dataset.action") == "save"
        page.keyboard.press("Enter")
        name, _ = saved(stage, lambda: page.keyboard.press("Enter"))
        assert name == "lazyviz.svg"
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        assert button.get_attribute("aria-expanded") == "false"


def test_a_large_file_comes_in_pieces(page, monkeypatch):
    graph, _keep = small_step()
    monkeypatch.setattr("lazyviz.view.export.downloads.PIECE", 4000)
    with Stage(page, graph, width=1000) as stage:
        _, dot = saved(stage, lambda: choose(page, "DOT"))
        assert dot.decode() == graph.to_dot().source
        pieces = [message for message in stage.messages if message["kind"] == "file"]
        assert len(pieces) > 1
        assert all(len(piece["data"]) <= 4000 for piece in pieces)
