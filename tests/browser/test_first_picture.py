"""The first picture shows the layer with the most memory: its class, shapes, and line."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

import lazyviz
from lazyviz.graph.modules import module_path

from .support import pictures
from .support.bare_page import Stage
from .support.models import training

pytestmark = pytest.mark.browser

# The rows of the list that are in sight as a whole, with what of them is cut off.
ROWS = """() => {
  const edge = document.querySelector(".lz-layers").getBoundingClientRect();
  return [...document.querySelectorAll(".lz-layers li")]
    .filter((row) => row.getBoundingClientRect().bottom <= Math.min(edge.bottom, innerHeight) + 1)
    .map((row) => [
      row.querySelector("button").textContent,
      row.querySelector(".lz-layer-class").textContent,
      row.querySelector(".lz-layer-sub").textContent,
      [...row.querySelectorAll("button, .lz-layer-class")].some((e) => e.scrollWidth > e.clientWidth + 1),
    ]);
}"""


def starred(path):
    """The path with numbers of a list's items left out."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def held_by_layer(graph):
    """Bytes at the peak by module, of those with none inside; those of one list are added up."""
    plan = graph.plan()
    sizes: Counter[str] = Counter()
    for allocation in plan.alive_at_peak:
        if allocation.node is not None:
            if allocation.node.phase == "optimizer":
                continue
            path = module_path(allocation.node)
        else:
            storage = allocation.storage  # of a weight that two layers share: the first that reads it
            readers = (node for node in graph.nodes if any(each.storage is storage for each in node.inputs))
            path = module_path(next(readers)) if storage.role == "parameter" else ""
        if path:
            sizes[path] += allocation.nbytes
    inner = {path for path in sizes if not any(other.startswith(f"{path}.") for other in sizes)}
    layers: Counter[str] = Counter()
    for path in inner:
        layers[starred(path)] += sizes[path]
    return layers


@pytest.mark.parametrize("name", [name for name in pictures.TWELVE if name not in ("shapes", "llama-70b")])
def test_the_layer_that_holds_most_is_named_with_class_shapes_and_line(browser, name):
    graph, _ = pictures.recorded(name)
    page = browser.new_page(viewport={"width": 1500, "height": 1000})
    with Stage(page, graph, width=1484):
        rows = page.evaluate(ROWS)
        widget = page.locator(".lazyviz").bounding_box()
        chart = page.locator('[data-chart="memory"]').bounding_box()
        canvas = page.locator('[data-part="canvas"]').bounding_box()
        bar = page.locator('[data-part="toolbar"]').bounding_box()
    page.close()
    assert bar["height"] <= 44 and widget["height"] <= 800, "80 % of the window"
    assert chart["y"] >= 0 and canvas["y"] + canvas["height"] <= 1000, "graph and chart in one window"
    most = held_by_layer(graph).most_common(1)[0][0]
    assert rows, "the list is in sight"
    label, cls, sub, cut = rows[0]
    shown = label.partition(" × ")[0].removeprefix("…").split(", ")  # of a short list each by its name
    assert all(starred(f".{most}").endswith(starred(f".{each}")) for each in shown)
    assert cls and cls[0].isupper(), "its class"
    assert re.search(r"\d+.*→.*\d+", sub), "its shapes, in and out"
    assert re.search(r"line \d+", sub), "its line"
    assert not cut, "nothing of it is cut off"


def test_the_device_is_named_in_full_where_the_toolbar_has_room(browser):
    graph, _ = pictures.recorded("gan")
    page = browser.new_page(viewport={"width": 900, "height": 1000})
    with Stage(page, graph, width=720):
        wide = page.evaluate("""() => {
          const menu = document.querySelector('[data-action="device"]');
          const copy = menu.cloneNode(true);
          copy.style.maxWidth = "none";
          menu.after(copy);
          const widths = [menu.offsetWidth, copy.offsetWidth];
          copy.remove();
          return widths;
        }""")
        chip = page.locator(".lz-verdict").evaluate("e => e.scrollWidth - e.clientWidth")
    page.close()
    assert wide[0] == wide[1], "the whole of its text is in sight"
    assert chip <= 0, "and of the verdict"


# JupyterLab leaves 720 px for the output where its window has 900.
@pytest.mark.parametrize("width", [900, 720])
@pytest.mark.parametrize("name", ["gpt2", "unet", "gan"])
def test_the_largest_layer_and_its_line_are_legible_beside_the_closed_drawer(browser, name, width):
    graph, _ = pictures.recorded(name)
    page = browser.new_page(viewport={"width": width + 16, "height": 1000})
    with Stage(page, graph, width=width):
        first = page.locator(".lz-first")
        label = page.locator(".lz-layers .lz-link").first
        words = first.inner_text()
        assert first.is_visible() and words.startswith(label.text_content()), words
        assert re.search(r"→.* · line \d+ · [\d.,]+ [KMG]iB$", words), words
        assert first.evaluate("e => e.scrollWidth <= e.clientWidth && e.scrollHeight <= e.clientHeight"), (
            "nothing of it is cut off"
        )
        tabs = page.locator(".lz-tab:visible").last.bounding_box()
        assert tabs["x"] + tabs["width"] < first.bounding_box()["x"]
        page.locator('.lz-tab[data-tab="code"]').click()
        assert not first.is_visible()
    page.close()


@pytest.mark.parametrize(("name", "width"), [("gan", 1480), ("gan", 1320), ("moe", 1480), ("moe", 1180)])
def test_the_search_field_has_the_width_of_the_design(browser, name, width):
    graph, _ = pictures.recorded(name)  # "moe" has a batch; at 1320 px its size needs the room
    page = browser.new_page(viewport={"width": width + 16, "height": 1000})
    with Stage(page, graph, width=width):
        assert page.locator(".lz-search").bounding_box()["width"] == 168
        icons = page.locator(".lz-icons").bounding_box()
        bar = page.locator(".lz-toolbar").bounding_box()
        assert icons["x"] + icons["width"] <= bar["x"] + bar["width"]
    page.close()


def test_the_names_of_ops_are_whole_where_a_lane_has_room(browser):
    x = torch.randn(4, 3, 64, 64, requires_grad=True)
    with lazyviz.lazy() as graph:
        F.max_pool2d(x * 2, 2).sum().backward()
    page = browser.new_page(viewport={"width": 1336, "height": 1000})
    with Stage(page, graph, width=1320):
        names = page.locator(".lz-op .lz-label").all_text_contents()
        assert {"max_pool2d_with_indices", "max_pool2d_with_indices_backward"} <= set(names)
        assert not any("…" in name for name in names)
    page.close()


def test_a_card_without_shapes_prints_only_the_bytes_that_its_number_is_about(page):
    graph, keep = training()
    with Stage(page, graph, width=1320):
        card = page.locator('[data-node][data-phase="optimizer"]:has-text("step()")').first
        lines = card.locator(".lz-sub").all_text_contents()
        assert re.fullmatch(r"\d+ ops", lines[0]), "not also what was ever allocated"
        assert "at peak" in lines[1]
    del keep
