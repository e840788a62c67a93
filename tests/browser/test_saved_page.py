"""The page that `graph.save("x.html")` writes, opened from a file with no network."""

from __future__ import annotations

import html

import pytest
import torch
from torch import nn

import lazyviz

from .support.bare_page import shown

pytestmark = pytest.mark.browser


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.relu(self.linear(self.norm(x)))


def step():
    torch.manual_seed(0)
    net = nn.Sequential(*(Block() for _ in range(4)))
    optimizer = torch.optim.AdamW(net.parameters())
    x = torch.randn(8, 16)
    with lazyviz.lazy(batch=[x]) as graph:
        loss = net(x).pow(2).mean()
        loss.backward()
        optimizer.step()
    return graph, (net, optimizer, x, loss)


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a saved graph; fails on any error, console message or request."""
    pages = []
    trouble: list[str] = []

    def open_page(graph, **options):
        path = tmp_path / "graph.html"
        graph.save(path)
        page = browser.new_page(viewport={"width": 1300, "height": 1000}, **options)
        pages.append(page)
        page.context.set_offline(True)
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("console", lambda message: trouble.append(message.text))
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        page.locator(".lazyviz [data-node]").first.wait_for()
        page.asked = asked
        return page

    yield open_page
    for page in pages:
        own = [url for url in page.asked if not url.startswith(("file:", "data:", "blob:"))]
        assert own == []
        page.context.close()
    assert trouble == []


def test_groups_open_details_and_lines_are_answered_and_search_finds(opened, screenshots):
    graph, _keep = step()
    page = opened(graph)
    fold = page.locator('[data-node][data-kind="module"][data-phase="forward"]').filter(has_text="× 4").first
    before = page.locator("[data-node]").count()
    fold.locator(".lz-label").dblclick()
    page.locator('[data-node][aria-expanded="true"][data-kind="module"]').first.wait_for()
    assert page.locator("[data-node]").count() == before + 4
    page.locator('[data-node][data-op="aten.mean.default"]').first.focus()
    page.keyboard.press("Enter")
    details = page.locator('[data-panel="details"]')
    details.get_by_text("aten.mean.default").wait_for()
    assert "loss = net(x).pow(2).mean()" in details.inner_text()
    page.locator('input[data-action="search"]').fill("layer_norm")
    page.locator(".lz-hit").first.wait_for()
    found = lazyviz.view.widget.search.Index(graph.scene()).find("layer_norm")
    assert str(len(found)) in page.locator(".lz-search").inner_text()
    page.keyboard.press("Enter")
    page.locator(".lazyviz .lz-selected[data-node]").wait_for()
    shown(page.locator('button[data-action="expand-all"]')).click()
    page.locator('[data-node][data-op="aten.relu.default"]').nth(3).wait_for()
    page.screenshot(path=screenshots / "saved-page.png")


def test_search_finds_there_what_python_finds(opened):
    graph, _keep = step()
    page = opened(graph)
    index = lazyviz.view.widget.search.Index(graph.scene())
    box = page.locator('input[data-action="search"]')
    for query in (
        "relu",
        "8x16",
        "(16, 16)",
        "[16]",
        "line 33",
        "float32",
        "1.linear",
        "linear",
        "layernorm",
        "addmm_1",
        "c++",
        "loss",
    ):
        found = index.page(query)
        box.fill(query)
        page.wait_for_timeout(400)
        text = page.locator(".lz-search").inner_text()
        if found["total"]:
            assert str(found["total"]) in text, query
            assert page.locator(".lz-hit").first.inner_text().startswith(found["hits"][0]["label"]), query
        else:
            assert page.locator(".lz-hit").count() == 0, query


def test_a_click_on_the_chart_shows_what_is_alive_there(opened):
    graph, _keep = step()
    page = opened(graph)
    areas = page.locator('[data-chart="memory"] .lz-area, .lz-chart .lz-area')
    areas.first.scroll_into_view_if_needed()
    box = areas.first.bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] - 2)
    page.locator('[data-panel="alive"]').get_by_text("alive", exact=False).first.wait_for()


def test_what_needs_python_is_not_offered_and_the_page_says_so(opened):
    graph, _keep = step()
    page = opened(graph)
    for action in ("evaluate", "cancel", "batch-size", "split", "views"):
        for control in page.locator(f'[data-action="{action}"]').all():
            assert not control.is_visible(), action
    assert "need the notebook" in page.locator("footer").inner_text()
    assert page.title() == "lazyviz"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_light_or_dark_as_the_reader_prefers(opened, scheme):
    graph, _keep = step()
    page = opened(graph, color_scheme=scheme)
    assert page.locator(".lazyviz.lz-dark").count() == (scheme == "dark")


def test_names_with_markup_are_shown_as_they_are(opened):
    name = "</script><img src=x onerror=alert(1)>"
    x = torch.ones(3)
    with lazyviz.lazy(names={name: x}) as graph:
        y = x * 2
    graph.title = "<b>title</b>"
    page = opened(graph)
    assert page.title() == "<b>title</b>"
    assert page.locator(".lazyviz h2").text_content() == "<b>title</b>"
    assert page.locator("img[src=x]").count() == 0
    assert y.shape == (3,)


def test_without_scripts_the_page_shows_the_static_picture(browser, tmp_path):
    graph, _keep = step()
    graph.save(tmp_path / "graph.html")
    context = browser.new_context(java_script_enabled=False, offline=True)
    page = context.new_page()
    page.goto((tmp_path / "graph.html").as_uri())
    assert page.locator("img.lazyviz-static").is_visible()
    context.close()


def test_the_page_lives_in_a_frame_of_another_page_and_in_what_nbconvert_writes(browser, tmp_path):
    """As Panel, Gradio and other hosts of HTML put it into theirs."""
    import nbformat
    from nbconvert import HTMLExporter

    graph, keep = step()
    graph.save(tmp_path / "graph.html")
    page_text = (tmp_path / "graph.html").read_text(encoding="utf-8")
    frame = f'<div><iframe srcdoc="{html.escape(page_text)}" width="100%" height="700"></iframe></div>'
    output = nbformat.v4.new_output("display_data", {"text/html": frame})
    cell = nbformat.v4.new_code_cell("HTML(frame)", outputs=[output])
    exported, _ = HTMLExporter().from_notebook_node(nbformat.v4.new_notebook(cells=[cell]))
    for name, text in (("host", f"<!doctype html><title>host</title>{frame}"), ("exported", exported)):
        path = tmp_path / f"{name}.html"
        path.write_text(text, encoding="utf-8")
        page = browser.new_page(viewport={"width": 1300, "height": 900})
        page.context.set_offline(True)
        page.goto(path.as_uri(), wait_until="domcontentloaded")
        inside = page.frame_locator("iframe")
        inside.locator(".lazyviz [data-node]").first.wait_for()
        # Its title: the middle of an open box is a box inside of it.
        inside.locator('[data-node][data-kind="module"]').first.click(position={"x": 60, "y": 12})
        inside.locator('[data-panel="details"] h3').wait_for()
        assert inside.locator("img.lazyviz-static:visible").count() == 0
        page.context.close()
    del keep


def test_a_saved_page_fills_its_window_or_frame(opened):
    graph, _keep = step()
    page = opened(graph)
    for width, height in ((700, 640), (1400, 900)):
        page.set_viewport_size({"width": width, "height": height})
        footer = page.locator("footer").bounding_box()
        assert height - 50 <= footer["y"] + footer["height"] <= height
