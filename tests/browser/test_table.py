"""The table view: the same facts, sorted and filtered, and in step with the graph."""

from __future__ import annotations

import pytest

from .support.bare_page import Stage, shown
from .support.models import training

pytestmark = pytest.mark.browser

ROWS = "[data-panel='table'] tbody tr"


@pytest.fixture
def stage(page):
    graph, keep = training(4)
    with Stage(page, graph) as stage:
        stage.click('button[data-action="table"]')
        yield stage
    del keep


def column(page, key):
    at = page.locator("thead button[data-sort]").evaluate_all("all => all.map((each) => each.dataset.sort)")
    cell = at.index(key)
    return page.locator(ROWS).evaluate_all(f"rows => rows.map((row) => row.cells[{cell}].textContent)")


def test_the_switch_shows_the_table_instead_of_the_graph(page, stage):
    assert page.locator("[data-panel='table']").is_visible() and not page.locator(".lz-graph").is_visible()
    assert page.locator('button[data-action="table"]').get_attribute("aria-pressed") == "true"
    assert page.locator('[data-chart="memory"]').is_visible()
    total = int(page.locator(".lz-table-bar > .lz-muted").inner_text().rpartition(" ")[2])
    drawn = [box for box in stage.widget._answers.scene.hierarchy.box_of if box is not None]
    assert total == len(drawn) and page.locator(ROWS).count() == 100
    stage.click('button[data-action="table"]')
    assert page.locator(".lz-graph").is_visible() and not page.locator("[data-panel='table']").is_visible()


def test_a_columns_head_sorts_one_way_then_the_other_then_not_at_all(page, stage):
    first = column(page, "op")
    head = page.locator('thead th:has(button[data-sort="op"])')
    for expected in ("ascending", "descending", "none"):
        stage.click('thead button[data-sort="op"]')
        assert head.get_attribute("aria-sort") == expected
        assert page.evaluate("document.activeElement.dataset.sort") == "op", "the focus stays"
    assert column(page, "op") == first
    stage.click('thead button[data-sort="bytes"]')
    assert page.locator('[aria-sort="descending"]').inner_text().startswith("Allocates")
    assert column(page, "bytes")[0] == "4.00 KiB"
    assert "sorted by Allocates" in page.locator(".lz-said").last.inner_text()


def test_pages_follow_one_another(page, stage):
    first = column(page, "op")
    stage.click('[aria-label="Next page"]')
    assert page.locator(".lz-table-bar > .lz-muted").inner_text().startswith("101–")
    assert column(page, "op") != first
    assert page.locator('[aria-label="Next page"]').is_disabled()
    assert page.evaluate("document.activeElement !== document.body"), "the focus is not lost"
    stage.click('[aria-label="Previous page"]')
    assert column(page, "op") == first


def test_search_and_phase_filter_the_rows(page, stage):
    page.locator('input[data-action="search"]').fill("addmm")
    stage.settle()
    assert set(column(page, "op")) == {"addmm"} and page.locator(ROWS).count() == 5
    page.locator('input[data-action="search"]').fill("")
    stage.settle()
    page.select_option('[data-action="table-phase"]', "backward")
    stage.settle()
    assert set(column(page, "phase")) == {"backward"}


def test_a_row_selects_its_box_and_a_box_its_row(page, stage):
    page.locator(ROWS).nth(2).click()
    stage.settle()
    id = page.locator("tr.lz-marked[data-row]").get_attribute("data-row")
    assert page.locator('[data-panel="details"] h3').inner_text() == column(page, "op")[2]
    assert page.locator("[data-panel='table']").is_visible(), "the table stays"
    stage.click('button[data-action="table"]')
    selected = page.locator(".lz-selected[data-node]")
    assert selected.get_attribute("data-node") == id and selected.is_visible()
    stage.click('button[data-action="fit"]')
    stage.click('[data-node][data-op^="aten._log_softmax_backward"]')
    other = page.locator(".lz-selected[data-node]").get_attribute("data-node")
    stage.click('button[data-action="table"]')
    marked = page.locator("tr.lz-marked[data-row]")
    assert marked.get_attribute("data-row") == other and marked.is_visible()
    shown(page.locator('[data-panel="details"] .lz-link').last).click()
    stage.settle()
    assert page.locator("tr.lz-marked[data-row]").count() == 1, "on the page where it is"
    assert page.locator("tr.lz-marked[data-row]").get_attribute("data-row") != other


def test_modules_and_lines_are_rows_too(page, stage):
    page.select_option('[data-action="table-rows"]', "modules")
    stage.settle()
    assert "net.0" in column(page, "module")
    page.locator(ROWS).first.click()
    stage.settle()
    assert page.locator('[data-panel="details"] h3').inner_text()
    page.select_option('[data-action="table-rows"]', "lines")
    stage.settle()
    assert column(page, "text")[-1] == "optimizer.step()"
    page.locator(ROWS).last.click()
    stage.settle()
    assert "optimizer.step()" in page.locator('[data-panel="details"]').inner_text()
    assert page.locator(".lz-code tr.lz-marked").count() == 1


def test_rows_are_walked_by_arrow_keys(page, stage):
    page.locator(f"{ROWS} button").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    stage.settle()
    assert page.locator("tr.lz-marked[data-row] button").evaluate("each => each === document.activeElement")
    assert page.locator(ROWS).nth(2).get_attribute("aria-current") == "true"
    page.keyboard.press("End")
    assert page.locator(f"{ROWS} button").last.evaluate("each => each === document.activeElement")


def test_after_a_run_rows_have_times_and_states(page, stage):
    stage.click('button[data-action="evaluate"]')
    assert set(column(page, "state")) == {"done"}
    stage.click('thead button[data-sort="seconds"]')
    assert column(page, "seconds")[0].endswith("s")


@pytest.mark.parametrize("width", [600, 1000, 2400])
def test_nothing_is_cut_off_at_any_width(page, width):
    page.set_viewport_size({"width": width + 30, "height": 1000})
    graph, keep = training(4)
    with Stage(page, graph, width=width) as stage:
        stage.click('button[data-action="table"]')
        assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")
        root = page.locator(".lazyviz").bounding_box()
        for part in (".lz-table-bar", ".lz-table-scroll", ".lz-drawer", ".lz-search", ".lz-icons"):
            box = page.locator(part).bounding_box()
            assert box["x"] >= root["x"] and box["x"] + box["width"] <= root["x"] + root["width"] + 0.5, part
    del keep
