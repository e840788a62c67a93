"""Accessibility of the widget: axe, keyboard, and screen reader announcements."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lazyviz

from .support.bare_page import Stage, shown
from .support.jupyterlab import open_notebook, run_cell, wait_for_kernel, write_notebook
from .support.models import training

pytestmark = pytest.mark.browser

LAB_CELLS = [
    "%load_ext lazyviz\nimport torch\nnet = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())\n"
    "x = torch.randn(4, 8)\nget_ipython().run_cell_magic('lazy', '', 'y = net(x)\\ny.sum().backward()')"
]
AXE = Path(__file__).parents[2] / "js/node_modules/axe-core/axe.min.js"


def violations(page, root=".lazyviz"):
    """What axe finds wrong inside ``root``: its rule, and where."""
    if not AXE.is_file():
        pytest.fail("axe-core is missing: run `npm --prefix js ci`")
    if not page.evaluate("Boolean(window.axe)"):
        page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate(
        """async (root) => {
          const result = await axe.run(root, {resultTypes: ["violations"]});
          return result.violations.flatMap((rule) => rule.nodes.slice(0, 6).map((node) =>
            `${rule.id}: ${node.target.join(" ")}: ${node.failureSummary.split("\\n").slice(1).join(";")}`));
        }""",
        root,
    )
    return found


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_nothing_wrong_at_any_moment_of_use(page, dark):
    graph, keep = training(4)
    with Stage(page, graph, dark=dark) as stage:
        seen = {"before the run": violations(page)}
        stage.click('[data-node][data-op^="aten._log_softmax"]')
        seen["details"] = violations(page)
        stage.click(".lz-code tr[data-line] button")
        page.locator('input[data-action="search"]').fill("mm")
        stage.settle()
        seen["a line and hits"] = violations(page)
        stage.click('button[data-action="table"]')
        stage.click('thead button[data-sort="bytes"]')
        stage.click("tbody tr[data-row] >> nth=1")
        seen["table"] = violations(page)
        stage.click('button[data-action="table"]')
        stage.click('button[data-action="expand-all"]')
        seen["everything open"] = violations(page)
        stage.click('button[data-action="evaluate"]')
        seen["after the run"] = violations(page)
    assert {when: found for when, found in seen.items() if found} == {}
    del keep


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_nothing_wrong_with_two_widgets_on_a_page(page, dark):
    graph, keep = training(4)
    with Stage(page, graph, dark=dark, views=2) as stage:
        assert violations(page) == []  # among others: no two landmarks of the same name
        for root in page.locator(".lazyviz").all():
            root.locator('[data-node][data-op^="aten._log_softmax"]').first.click()
            stage.settle()
            root.locator('button[data-action="table"]').click()
            stage.settle()
        assert violations(page) == []
    del keep


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_key_lists_all_keys_and_another_plays(page, dark):
    graph, keep = training(4)
    with Stage(page, graph, dark=dark, width=900) as stage:
        slider = page.locator('.lz-memory [role="slider"]')
        slider.focus()
        stage.settle()
        page.keyboard.press("?")
        dialog = page.get_by_role("dialog", name="Keys")
        words = dialog.inner_text()
        assert all(each in words for each in ("K, or Space", "Esc", "Home, End", "search", "every group"))
        assert violations(page) == []
        box, view = dialog.bounding_box(), page.locator(".lazyviz").bounding_box()
        assert view["y"] <= box["y"] and box["y"] + box["height"] <= view["y"] + view["height"]
        page.keyboard.press("Escape")
        assert dialog.count() == 0
        assert slider.evaluate("(element) => element === document.activeElement"), "the focus comes back"
        play = page.locator('[data-action="play"]')
        for key in ("k", " "):
            page.keyboard.press(key)
            assert play.get_attribute("aria-label") == "Pause", key
            page.keyboard.press(key)
            assert play.get_attribute("aria-label") == "Play the run", key
        page.locator('input[data-action="search"]').focus()
        page.keyboard.type("k?")
        assert play.get_attribute("aria-label") == "Play the run" and dialog.count() == 0
        stage.click('[data-action="keys"]')
        assert dialog.is_visible()
        page.keyboard.press("?")
        assert dialog.count() == 0
        page.locator(".lz-graph").click(position={"x": 4, "y": 4})
        page.keyboard.press("Space")
        assert play.get_attribute("aria-label") == "Pause"
    del keep


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("by", ["memory", "time", "flops", "dtype", "module", "note:norm"])
def test_axe_finds_nothing_wrong_in_any_colors(page, dark, by):
    graph, keep = training(4)
    graph.evaluate()
    graph.annotate("norm", {"net.0": 1.5, "net.2": -3})
    with Stage(page, graph, dark=dark) as stage:
        page.locator(".lazyviz select").first.wait_for()
        menu = page.locator(f'.lazyviz select:has(option[value="{by}"])').first
        shown(menu).select_option(by)
        stage.settle()
        assert violations(page) == []
    del keep


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_nothing_wrong_after_a_failure_and_at_a_sync_point(page, dark):
    x = torch.randn(4, 4)
    with lazyviz.lazy(device="cpu:1MiB") as graph:
        y = x * 2
        float(y.sum())
        z = y.relu() + 1
    node = graph.nodes[-1]
    node.state, node.error = "failed", "RuntimeError: no"
    graph.runs.changed("failed")
    with Stage(page, graph, dark=dark) as stage:
        stage.widget.error = {"message": "RuntimeError: no", "source": None, "chain": []}
        stage.settle()
        stage.click('[data-node][data-kind="sync"]')
        assert violations(page) == []
    node.state = "pending"
    assert z is not None


def said(page):
    return page.locator(".lazyviz > .lz-said").inner_text()


def test_events_are_announced_once_as_text(page):
    graph, keep = training(4)
    with Stage(page, graph) as stage:
        page.evaluate(
            """() => {
              window.heard = [];
              const region = document.querySelector(".lazyviz > .lz-said");
              new MutationObserver(() => heard.push(region.textContent)).observe(region, {childList: true});
            }"""
        )
        box = page.locator('[data-node][data-kind="module"][aria-expanded="false"]').first
        box.focus()
        page.keyboard.press("Enter")
        stage.settle()
        assert said(page).endswith("opened")
        for done in (10, 30, 31, 60, 61, 99):
            stage.widget.progress = {"done": done, "total": 100, "seconds": 1.0, "label": "mm"}
            stage.settle()
        heard = page.evaluate("heard")
        assert [words for words in heard if "%" in words] == [
            f"{at} % of the ops have run" for at in (25, 50, 75)
        ]
        stage.click('button[data-action="evaluate"]')
        assert said(page).startswith("evaluated")
        assert page.locator('.lz-details[aria-live], .lz-state[role="status"]').count() == 0
    del keep


def test_the_focus_is_not_lost_when_its_button_disappears_or_everything_is_redrawn(page):
    graph, keep = training(4)
    with Stage(page, graph) as stage:
        shown(page.locator('button[data-action="views"]')).focus()
        page.keyboard.press("Enter")
        stage.settle()
        assert page.evaluate("document.activeElement.dataset.action") == "views"
        page.locator('button[data-action="evaluate"]').focus()
        page.keyboard.press("Enter")
        stage.settle()
        assert page.evaluate("document.querySelector('.lazyviz').contains(document.activeElement)")
    del keep


def test_everything_is_reached_by_tab_with_a_focus_that_is_seen(page):
    graph, keep = training(2)
    with Stage(page, graph) as stage:
        page.locator("body").click(position={"x": 2, "y": 2})
        seen: list[str] = []
        for _ in range(60):
            page.keyboard.press("Tab")
            found = page.evaluate(
                """() => {
                  const at = document.activeElement;
                  if (!document.querySelector(".lazyviz").contains(at)) return null;
                  const style = getComputedStyle(at);
                  const shown = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1;
                  const {action, panel, chart, kind} = at.dataset;
                  const name = action ?? panel ?? chart ?? kind ?? at.tagName;
                  return [name, shown || at.matches("[data-node], svg, [type=range]")];
                }"""
            )
            if found is None:
                break
            seen.append(found[0])
            assert found[1], f"{found[0]} has the focus, and nobody sees it"
        assert {"evaluate", "fit", "search", "table", "play", "settings"} <= set(seen), str(seen)
        assert len(seen) < 60, "no list makes Tab endless"
        stage.settle()
    del keep


@pytest.mark.parametrize("table", [False, True])
def test_no_target_is_smaller_than_24_pixels(page, table):
    graph, keep = training(4)
    with Stage(page, graph) as stage:
        if table:
            stage.click('button[data-action="table"]')
        small = page.evaluate(
            """() => [...document.querySelectorAll(".lazyviz :is(button, select, input, summary)")]
              .filter((each) => each.offsetParent && !each.closest("p, dd, li, .lz-said"))
              .map((each) => [each.dataset.action ?? each.className, each.getBoundingClientRect()])
              .filter(([, box]) => box.width && (box.height < 23.5 || box.width < 23.5))
              .map(([name, box]) => `${name} ${box.width.toFixed()}x${box.height.toFixed()}`)"""
        )
        assert small == []
    del keep


def test_high_contrast_keeps_every_word_and_outline(page):
    graph, keep = training(4)
    page.emulate_media(forced_colors="active")
    with Stage(page, graph) as stage:
        stage.click('[data-node][data-op^="aten._log_softmax"]')
        for selector in (".lz-content .lz-label", ".lz-content .lz-sub", ".lz-muted"):
            colors = page.locator(selector).evaluate_all(
                "all => [...new Set(all.map((each) => {"
                " const style = getComputedStyle(each);"
                " return each instanceof SVGElement ? style.fill : style.color; }))]"
            )
            assert colors == ["rgb(0, 0, 0)"], selector
        stroke = page.locator(".lz-selected > .lz-card").evaluate(
            "card => getComputedStyle(card).strokeWidth"
        )
        assert stroke == "4px"
        assert violations(page) == []
    del keep


class شبكة(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.طبقة_الانتباه_الأولى = torch.nn.Linear(8, 8)
        self.注意機構の重みをまとめる層 = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.注意機構の重みをまとめる層(self.طبقة_الانتباه_الأولى(x).relu())


@pytest.mark.parametrize("width", [700, 1100])
def test_names_of_any_script_stay_in_their_boxes_also_in_a_page_from_right_to_left(page, width):
    page.set_viewport_size({"width": width + 30, "height": 1000})
    net, x = شبكة(), torch.randn(4, 8)
    with lazyviz.lazy() as graph:
        y = net(x)
    with Stage(page, graph, width=width) as stage:
        page.evaluate("document.documentElement.dir = 'rtl'")
        stage.settle()
        outside = page.evaluate(
            """() => [...document.querySelectorAll(".lz-box > text")].filter((text) => {
              const around = text.parentElement.querySelector(".lz-card, .lz-frame");
              const [mine, box] = [text, around].map((each) => each.getBoundingClientRect());
              return mine.width && (mine.left < box.left || mine.right > box.right);
            }).map((text) => text.textContent)"""
        )
        assert outside == []
        assert (
            page.locator(".lz-label", has_text="…").count()
            or page.locator(".lz-label", has_text="層").count()
        )
        assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")
        assert violations(page) == []
    assert y is not None


def test_nothing_moves_where_motion_is_to_be_reduced(page):
    graph, keep = training(4)
    page.emulate_media(reduced_motion="reduce")
    with Stage(page, graph) as stage:
        stage.open('[data-node][data-kind="module"][data-phase="forward"][aria-expanded="false"]')
        stage.click('button[data-action="evaluate"]')
        moving = page.evaluate(
            "document.getAnimations().filter((each) => each.effect.target.closest('.lazyviz')).length"
        )
        assert moving == 0
    del keep


def test_axe_finds_nothing_wrong_in_jupyterlab(page, lab):
    write_notebook(lab.directory / "axe.ipynb", LAB_CELLS)
    open_notebook(page, lab.address, "axe.ipynb", lab.kernel)
    wait_for_kernel(page)
    run_cell(page, 0)
    page.locator(".lazyviz [data-node]").first.wait_for()
    assert violations(page) == []
    page.locator('.lazyviz button[data-action="table"]').click()
    page.locator("tr[data-row]").first.wait_for()
    page.locator('.lazyviz button[data-action="evaluate"]').click()
    page.locator('.lazyviz[data-state="done"]').wait_for()
    assert violations(page) == []
