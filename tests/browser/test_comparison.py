"""A second graph dropped on a widget, or chosen in its settings, is compared with the first."""

from __future__ import annotations

import base64

import pytest

from .support.bare_page import Stage, shown
from .support.models import training
from .test_accessibility import violations

pytestmark = pytest.mark.browser

PANEL = '[data-panel="comparison"]'
DROP = """(token) => {
  const data = new DataTransfer();
  data.setData("application/x-lazyviz", token);
  const root = document.querySelector(".lazyviz");
  for (const name of ["dragenter", "dragover", "drop"]) {
    root.dispatchEvent(new DragEvent(name, { dataTransfer: data, bubbles: true, cancelable: true }));
  }
}"""
GRAB = """() => {
  const data = new DataTransfer();
  document.querySelector(".lz-verdict").dispatchEvent(new DragEvent("dragstart", { dataTransfer: data }));
  return data.getData("application/x-lazyviz");
}"""


@pytest.fixture
def two(browser, request):
    """Two widgets, the second of a wider model, and the token that is dragged from the second."""
    pages = [browser.new_page(viewport={"width": 1216, "height": 1000}) for _ in range(2)]
    (small, keep), (wide, also) = training(2), training(2, width=64)
    small.title, wide.title = "lazyviz, small", "lazyviz, wide <b>"
    dark = getattr(request, "param", False)
    graphs = zip(pages, (small, wide), strict=True)
    stages = [Stage(page, graph, width=1200, dark=dark) for page, graph in graphs]
    pages[1].locator(".lz-verdict").hover()
    stages[1].settle()
    yield stages[0], pages[1].evaluate(GRAB), (small, wide)
    for stage, page in zip(stages, pages, strict=True):
        stage.widget.close()
        page.close()
    del keep, also


def test_a_graph_that_is_dropped_is_compared_and_escape_goes_back(two):
    stage, token, (small, wide) = two
    page = stage.page
    page.locator(".lz-verdict").hover()
    stage.settle()
    page.evaluate(DROP, token)
    stage.settle()
    panel = page.locator(PANEL)
    assert panel.is_visible() and panel.locator("h3").inner_text() == "small → wide <b>"
    assert panel.locator("polyline").count() == 2
    peak = [cell.strip() for cell in panel.locator("tbody tr").first.locator("td").all_inner_texts()]
    assert peak[3] == "peak" and peak[2].startswith("+")
    assert panel.locator(".lz-grew").count() > 1
    pictures = "images => images.map((image) => image.complete && image.naturalWidth > 100)"
    assert panel.locator("img").evaluate_all(pictures) == [True, True]
    page.keyboard.press("Escape")
    assert panel.is_hidden()
    boxes = page.locator(".lz-box.lz-grew", has_text=" → ")
    assert boxes.count() > 0 and page.locator(".lz-part.lz-pale").count() > 0
    page.locator('[data-action="end-comparison"]').click()
    assert page.locator(".lz-box.lz-grew, .lz-part.lz-pale").count() == 0
    page.locator('[data-box][tabindex="0"]').focus()
    assert page.evaluate("document.activeElement.closest('.lz-graph') !== null")
    assert small.pending == len(small.nodes) and wide.pending == len(wide.nodes), "nothing has run"


@pytest.mark.parametrize("two", [False, True], ids=["light", "dark"], indirect=True)
def test_the_settings_offer_the_other_graphs_by_keyboard_and_axe_finds_nothing_wrong(two):
    stage, *_ = two
    page = stage.page
    page.locator('button[data-action="settings"]').focus()
    page.keyboard.press("Enter")
    stage.settle()
    menu = page.locator('select[data-action="compare"]')
    assert "wide <b>" in menu.locator("option").all_inner_texts()
    menu.select_option(label="wide <b>")
    stage.settle()
    assert page.locator(PANEL).is_visible()
    assert violations(page) == []
    dark = page.locator(".lazyviz.lz-dark").count() > 0
    for image in page.locator(f"{PANEL} img").all():
        text = base64.b64decode(image.get_attribute("src").partition(",")[2]).decode()
        assert ('fill="#ffffff"' in text) != dark, "pictures have the widget's theme"


def test_another_batch_size_is_compared_with_what_was_recorded(two):
    stage, *_ = two
    page = stage.page
    page.locator('input[data-action="batch-size"]').fill("100")
    stage.settle()
    page.locator('button[data-action="settings"]').click()
    stage.settle()
    shown(page.locator('select[data-action="compare"]')).select_option(label="itself, as recorded")
    stage.settle()
    assert page.locator(f"{PANEL} h3").inner_text() == "as recorded → as shown"
    assert page.locator(f"{PANEL} .lz-grew").count() > 0


def test_a_graph_of_another_kernel_is_refused_in_one_sentence(two):
    stage, *_ = two
    stage.page.locator(".lz-verdict").hover()
    stage.settle()
    stage.page.evaluate(DROP, "w999999")
    stage.settle()
    assert "is not displayed in this kernel" in stage.page.locator(".lz-run-note").inner_text()
    assert stage.page.locator(PANEL).is_hidden()
