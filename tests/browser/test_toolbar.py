"""The toolbar's row: the verdict or the error is legible at any width."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazyviz

from .support import pictures
from .support.bare_page import Stage
from .support.models import training

pytestmark = pytest.mark.browser

WIDTHS = (700, 760, 900, 1010, 1260, 1500)
# The chip's text as far as it is in sight, its full text, and that of its tooltip.
CHIP = """() => {
  const chip = document.querySelector(".lz-verdict");
  const words = chip.querySelector(".lz-chip-words");
  const box = words.getBoundingClientRect();
  const seen = (rect) =>
    rect.top >= box.top - 1 && rect.bottom <= box.bottom + 1 && rect.right <= box.right + 1;
  const parts = [...words.children].filter((part) => seen(part.getBoundingClientRect()));
  return {
    seen: parts.map((part) => part.textContent).join(" "),
    text: words.textContent.trim(),
    title: chip.title,
    whole: words.scrollWidth <= words.clientWidth && words.scrollHeight <= words.clientHeight + 1,
    high: chip.offsetHeight,
  };
}"""


def too_big():
    """A step that does not fit, with a batch and a finding: all that the row can hold."""
    net = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
    x = torch.randn(640, 256)
    with lazyviz.lazy("cpu:512KiB", batch=[x]) as graph:
        loss = net(x).square().mean()
        if loss > 0:
            loss.backward()
    return graph, (net, x)


def refused(inside):
    """A layer that does not take what it is given; PyTorch's message has one line."""
    net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(inside, 64, 3))
    graphs = []
    with pytest.raises(RuntimeError) as error, lazyviz.lazy("cpu:1GiB") as graph:
        graphs.append(graph)
        net(torch.randn(4, 3, 32, 32))
    return graphs[0], (net, str(error.value))


@pytest.mark.parametrize("width", WIDTHS)
def test_verdict_and_numbers_of_the_chip_are_in_sight_at_any_width(browser, width):
    graph, keep = too_big()
    page = browser.new_page(viewport={"width": width + 16, "height": 1000})
    with Stage(page, graph, width=width) as stage:
        chip = page.evaluate(CHIP)
        bar = page.locator('[data-part="toolbar"]').evaluate(
            "(e) => [e.offsetHeight, e.scrollWidth - e.clientWidth]"
        )
        verdict = stage.widget.scene["memory"]["verdictShort"]
    page.close()
    assert bar == [45, 0] or bar == [44, 0], "one row, nothing of it outside"
    assert chip["text"] == verdict
    assert chip["seen"].startswith(" ".join(verdict.split(" ")[:5])), "the word and what it needs"
    assert chip["seen"] == verdict or width < 760, "and what there is"
    assert chip["title"].startswith("Too big") and chip["high"] == 28
    del keep


@pytest.mark.parametrize("width", WIDTHS)
def test_an_error_in_the_chip_is_whole_or_says_what_failed(browser, width):
    graph, (_, message) = refused(32)
    page = browser.new_page(viewport={"width": width + 16, "height": 1000})
    with Stage(page, graph, width=width) as stage:
        chip = page.evaluate(CHIP)
        told = page.locator('[data-panel="error"]').text_content()
        words = stage.widget.error["words"]
        page.evaluate("document.querySelector('.stage').style.width = '1500px'")
        page.set_viewport_size({"width": 1516, "height": 1000})
        stage.settle()
        wide = page.evaluate(CHIP)
    page.close()
    assert chip["whole"], "no letter is cut"
    assert chip["text"] in (f"RuntimeError: {message}", message, words)
    assert message in chip["title"] and message in told
    assert wide["whole"] and wide["text"] == f"RuntimeError: {message}", "also after the window has grown"


def test_the_chosen_device_is_named_without_its_memory_where_there_is_no_room_for_both(browser):
    graph, keep = too_big()
    page = browser.new_page(viewport={"width": 1516, "height": 1000})
    seen = {}
    with Stage(page, graph, width=1500) as stage:
        for width in (1500, 700, 1500):
            page.locator(".stage").evaluate("(e, width) => { e.style.width = `${width}px`; }", width)
            stage.settle()
            menu = page.locator('select[data-action="device"]')
            seen.setdefault(width, []).append(menu.evaluate("(e) => e.selectedOptions[0].text"))
    page.close()
    assert seen == {1500: ["cpu · 512 KiB"] * 2, 700: ["cpu"]}
    del keep


@pytest.mark.parametrize("width", [600, 700])
def test_lanes_are_as_wide_as_the_widget_at_most(browser, width):
    graph, keep = pictures.recorded("gpt2")
    page = browser.new_page(viewport={"width": width + 16, "height": 1000})
    with Stage(page, graph, width=width):
        end = page.locator(".lazyviz").evaluate("(e) => e.getBoundingClientRect().right")
        lanes = page.locator("[data-lane] > rect").evaluate_all(
            "(all) => all.map((e) => e.getBoundingClientRect().right)"
        )
        phases = page.locator("[data-lane]").evaluate_all("(all) => all.map((e) => e.dataset.lane)")
    page.close()
    assert phases == ["forward", "backward", "optimizer"] and max(lanes) <= end
    del keep


def test_the_chip_is_whole_once_the_largest_batch_stands_beside_it(browser):
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    x = torch.randn(128, 64)
    with lazyviz.lazy("cpu:64GiB", batch=[x]) as graph:
        net(x).square().mean().backward()
    for width in range(1230, 1400, 30):
        page = browser.new_page(viewport={"width": width + 16, "height": 900})
        with Stage(page, graph, width=width):
            page.locator(".lz-batch-value", has_text="of ").wait_for()
            page.wait_for_function(f"() => ({CHIP})().whole")
        page.close()


def test_the_words_about_capacity_are_struck_out_by_no_line_of_the_axis_or_of_what_was_measured(page):
    graph, keep = training(4, width=256)
    crossed = """() => {
      const words = document.querySelector(".lz-room")?.getBBox();
      if (!words) return "no words";
      for (const line of document.querySelectorAll(".lz-grid, .lz-measured")) {
        for (let at = 0; at < line.getTotalLength(); at++) {
          const { x, y } = line.getPointAtLength(at);
          const [right, low] = [x - words.x, y - words.y];
          if (right > 0 && right < words.width && low > 2 && low < words.height - 2) return line.outerHTML;
        }
      }
      return "";
    }"""
    with Stage(page, graph, width=1320) as stage:
        assert page.evaluate(crossed) == ""
        stage.click('button[data-action="evaluate"]')
        assert page.locator(".lz-measured").count() == 1
        assert page.evaluate(crossed) == ""
    del keep


def test_the_words_about_capacity_are_not_struck_out_by_the_line_of_what_is_needed(browser):
    with lazyviz.lazy("A100-80GB") as graph:
        net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(12)]).cuda()
        net(torch.randn(2**18, 256, device="cuda")).square().mean().backward()
    page = browser.new_page(viewport={"width": 1336, "height": 900})
    with Stage(page, graph, width=1320):
        words, line = (page.locator(css).bounding_box() for css in (".lz-room", "path.lz-needed"))
        assert words["y"] >= line["y"] or words["y"] + words["height"] <= line["y"]
        other = page.locator(".lz-needed-text").bounding_box()
        assert other["x"] + other["width"] <= words["x"]
    page.close()


def state_in_sight(page):
    """The words of the state that are in sight, and whether they are within their cell."""
    return page.evaluate("""() => {
      const cell = document.querySelector(".lz-state-cell").getBoundingClientRect();
      const state = document.querySelector(".lz-state");
      if (getComputedStyle(state).opacity === "0") return ["", true];
      const top = state.getBoundingClientRect().top;
      const spans = [...state.children].filter((span) => span.getBoundingClientRect().top < top + 10);
      const cut = spans.some((span) => span.scrollWidth > span.clientWidth);
      return [spans.map((span) => span.textContent).join("").replaceAll("\\xa0", " "), !cut];
    }""")


@pytest.mark.parametrize(
    ("name", "width", "words"),
    [
        ("gan", 1180, "not run · 193 ops"),
        ("moe", 1180, "not run · 368 ops"),
        ("gan", 880, "not run · 193 ops"),
        ("gan", 720, "not run"),
    ],
)
def test_the_state_is_told_in_words_where_a_narrow_toolbar_has_room(browser, name, width, words):
    graph, _ = pictures.recorded(name)
    page = browser.new_page(viewport={"width": width + 16, "height": 1000})
    with Stage(page, graph, width=width):
        text, whole = state_in_sight(page)
        assert text == words and whole
        assert page.locator(".lz-toolbar").bounding_box()["height"] == 44
        verdict = page.locator(".lz-chip-words").evaluate("e => e.scrollWidth <= e.clientWidth")
        assert verdict, "the verdict is whole, too"
    page.close()
