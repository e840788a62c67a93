"""Search as a user does it: type, see results, step through them, clear."""

from __future__ import annotations

import pytest

from .support.bare_page import Stage
from .support.models import training

pytestmark = pytest.mark.browser

BOX = 'input[data-action="search"]'


@pytest.fixture
def stage(page):
    graph, keep = training(6)
    with Stage(page, graph) as stage:
        yield stage
    del keep


def search(stage, query):
    stage.page.locator(BOX).fill(query)
    stage.settle()


def count(page):
    return page.locator(".lz-count").inner_text()


def test_hits_are_counted_lit_and_stepped_through_with_groups_opened_on_the_way(page, stage):
    search(stage, "addmm")
    assert count(page) == "7"
    assert page.locator(".lz-found").count() > 0, "closed groups stand for the hits in them"
    ids = []
    for number in range(1, 8):
        page.keyboard.press("Enter")
        stage.settle()
        assert count(page) == f"{number} of 7"
        selected = page.locator('.lz-selected[data-node][data-op^="aten.addmm"]')
        assert selected.count() == 1 and selected.is_visible()
        ids.append(selected.get_attribute("data-node"))
        box, view = selected.bounding_box(), page.locator(".lz-graph").bounding_box()
        assert view["y"] <= box["y"] <= view["y"] + view["height"], "it is in view"
    assert len(set(ids)) == 7
    assert page.locator('.lz-found[data-op^="aten.addmm"]').count() >= 1
    page.keyboard.press("Enter")
    stage.settle()
    assert count(page) == "1 of 7", "round and round"
    page.keyboard.press("Shift+Enter")
    stage.settle()
    assert count(page) == "7 of 7"
    assert page.evaluate("document.activeElement.dataset.action") == "search", "the focus stays in the box"


def test_buttons_and_f3_step_too_and_escape_clears(page, stage):
    search(stage, "relu")
    stage.click('button[data-action="search-next"]')
    assert count(page).startswith("1 of ")
    page.keyboard.press("F3")
    stage.settle()
    assert count(page).startswith("2 of ")
    page.keyboard.press("Shift+F3")
    stage.settle()
    stage.click('button[data-action="search-previous"]')
    total = count(page).rpartition(" ")[2]
    assert count(page) == f"{total} of {total}"
    page.locator(BOX).focus()
    page.keyboard.press("Escape")
    stage.settle()
    assert page.locator(BOX).input_value() == "" and count(page) == ""
    assert page.locator(".lz-found").count() == 0
    assert page.locator('button[data-action="search-next"]').is_disabled()


def test_what_is_found_and_where_one_is_are_said(page, stage):
    search(stage, "line 99999")
    assert count(page) == "none"
    assert page.locator(".lz-said").last.inner_text() == "Nothing found"
    search(stage, "8x32")
    page.keyboard.press("Enter")
    stage.settle()
    assert page.locator(".lz-said").last.inner_text().startswith("1 of ")


def test_the_list_of_hits_is_reached_by_arrow_keys(page, stage):
    search(stage, "nll_loss")
    rows = page.locator(".lz-hit")
    assert rows.count() == int(count(page))
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert rows.nth(1).evaluate("row => row === document.activeElement")
    page.keyboard.press("Enter")
    stage.settle()
    assert count(page) == f"2 of {rows.count()}" and not rows.first.is_visible()
    assert page.locator(".lz-selected[data-node]").get_attribute("data-op").startswith("aten.nll_loss")


def test_messages_of_a_search_are_pages_of_a_few_hits(page, stage):
    stage.messages.clear()
    search(stage, "float32")
    assert len(stage.messages[-1]["hits"]) == 50
    total = stage.messages[-1]["total"]
    page.keyboard.press("Shift+Enter")
    stage.settle()
    assert count(page) == f"{total} of {total}", "the last hit is on a page of its own"
    assert page.locator(".lz-selected[data-node]").count() == 1


@pytest.mark.parametrize("query", ["<b>", "(.*)", "%", "\\", "층", "мм"])
def test_a_query_is_literal_text(page, stage, query):
    search(stage, query)
    assert count(page) == "none"
