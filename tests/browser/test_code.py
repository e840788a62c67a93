"""The code panel: from a line to its ops and back, its figures, and changes after a run."""

from __future__ import annotations

import inspect

import pytest
import torch

import lazyviz

from .support import models
from .support.bare_page import Stage, shown
from .support.models import training

pytestmark = pytest.mark.browser

FIRST = next(
    n
    for n, text in enumerate(inspect.getsourcelines(models)[0], start=1)
    if text.strip().startswith("loss = nn.functional")
)
CELL = "# تجربة 実験\n\tx = x * 2\ny = x.relu()" + " + 0" * 200 + "\nz = y.sum()"


def row(page, line, section=0):
    return page.locator(f'tr[data-line="{section}:{line}"]')


@pytest.fixture
def stage(page):
    graph, keep = training(3)
    with Stage(page, graph) as stage:
        yield stage
    del keep


def test_each_line_shows_its_bytes_and_its_share_of_the_peak(page, stage):
    plan = stage.widget._controller.plan()
    shares = []
    for line in (FIRST, FIRST + 1, FIRST + 2):
        cells = row(page, line).locator("td")
        assert cells.nth(2).text_content().endswith("B")
        shares.append(float(cells.nth(3).inner_text().rstrip(" %").lstrip("<") or 0))
    rest = float(page.locator(".lz-code-foot").inner_text().split(" %")[0])
    assert sum(shares) + rest == pytest.approx(100, abs=2)
    held = sum(each.nbytes for each in plan.alive_at_peak if each.node is None)
    assert rest == pytest.approx(held / plan.peak_bytes * 100, abs=1)
    row(page, FIRST).hover()
    stage.settle()
    assert "its gradients" in row(page, FIRST).get_attribute("title")
    assert row(page, FIRST - 1).evaluate("row => row.className") == "lz-none"


def test_a_short_cell_is_in_sight_from_its_first_line_and_its_lines_are_whole(page, tmp_path):
    source = (
        "# the beginning\ny = x @ x\nz = y.tanh()\n"
        "loss = torch.nn.functional.mse_loss(z, torch.zeros_like(z))\nloss.backward()"
    )
    script = tmp_path / "step.py"
    script.write_text(source)
    with lazyviz.lazy() as graph:
        exec(
            compile(source, str(script), "exec"),
            {"x": torch.randn(64, 64, requires_grad=True), "torch": torch},
        )
    with Stage(page, graph, width=1480):
        body = page.locator(".lz-code-body")
        assert body.evaluate("e => e.scrollTop") == 0
        long = page.locator("tr[data-line] button", has_text="mse_loss")
        assert long.evaluate("e => e.scrollHeight <= e.clientHeight && e.scrollWidth <= e.clientWidth")


def test_a_click_on_a_line_lights_its_ops_and_lists_them(page, stage):
    stage.click(f'tr[data-line="0:{FIRST + 2}"] button')
    lit = page.locator(".lz-lit[data-node]")
    assert lit.count() > 0
    assert set(lit.evaluate_all("all => all.map((box) => box.dataset.phase)")) == {"optimizer"}
    details = page.locator('[data-panel="details"]')
    assert "optimizer.step()" in details.inner_text()
    graph = stage.widget._controller
    ops = sum(node.source.line == FIRST + 2 for node in graph.nodes)
    assert details.locator("dd").first.inner_text() == f"{ops:,}"
    assert details.locator(".lz-link").count() == 60 and "more" in details.inner_text()
    shown(details.locator(".lz-link").first).click()
    stage.settle()
    assert page.locator(".lz-selected[data-node]").count() == 1
    assert row(page, FIRST + 2).get_attribute("class") == "lz-marked"


def test_a_selected_box_marks_its_lines_the_forward_line_of_a_gradient_too(page, stage):
    page.locator('[data-lane="backward"]').wait_for()
    stage.click('[data-node][data-op^="aten._log_softmax_backward"]')
    marked = page.locator("tr.lz-marked")
    assert marked.evaluate_all("rows => rows.map((row) => row.dataset.line)") == [
        f"0:{FIRST}",
        f"0:{FIRST + 1}",
    ]
    page.keyboard.press("Escape")
    stage.settle()
    assert marked.count() == 0


def test_lines_are_reached_and_chosen_by_keyboard(page, stage):
    page.locator('.lz-tab[data-tab="code"]').focus()
    page.keyboard.press("Tab")
    if page.evaluate("document.activeElement.tagName") != "BUTTON":  # the scrolled area itself
        page.keyboard.press("Tab")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    stage.settle()
    chosen = page.locator('.lz-code button[aria-current="true"]')
    assert chosen.inner_text().strip() == "loss.backward()"
    assert chosen.evaluate("button => button === document.activeElement")
    assert page.locator(".lz-lit[data-node]").count() > 0


def test_a_run_adds_times_and_keeps_the_mark(page, stage):
    stage.click(f'tr[data-line="0:{FIRST}"] button')
    head = page.locator(".lz-code thead th").nth(4)
    assert head.inner_text() == "≈ Time", "what is projected"
    stage.click('button[data-action="evaluate"]')
    assert head.inner_text() == "Time"
    assert row(page, FIRST).locator("td").nth(4).inner_text().endswith("s")
    assert row(page, FIRST).evaluate("row => row.classList.contains('lz-marked')")


def test_another_batch_size_moves_the_shares(page, stage):
    share = row(page, FIRST).locator("td").nth(3)
    before = share.inner_text(), page.locator(".lz-code-foot").inner_text()
    page.locator('input[data-action="batch-size"]').fill("900")
    stage.settle()
    assert (share.inner_text(), page.locator(".lz-code-foot").inner_text()) != before


def test_a_failed_line_and_a_sync_point_are_marked(page):
    x = torch.randn(4, 4)
    with lazyviz.lazy() as graph:
        y = x * 2
        float(y.sum())  # the sync point
        z = y.relu() + 1
    node = graph.nodes[-1]
    node.state, node.error = "failed", "RuntimeError: <b>boom</b>"
    with Stage(page, graph) as stage:
        line = node.source.line
        assert row(page, line).evaluate("row => row.className") == "lz-failed-line"
        shown(row(page, line)).hover()
        stage.settle()
        assert "<b>boom</b>" in row(page, line).get_attribute("title")
        assert "sync point" in row(page, line - 1).get_attribute("title")
        assert row(page, line - 1).locator("td").first.get_attribute("data-mark") == "‖"
    node.state = "pending"
    assert z is not None


def test_tabs_other_scripts_and_very_long_lines_break_nothing(page):
    x = torch.randn(4, 4)
    with lazyviz.lazy() as graph:
        y = x * 2
    graph.code = "\n".join([CELL, *(f"# {n}" for n in range(1000))])
    with Stage(page, graph):
        rows = page.locator(".lz-code tr[data-line]")
        assert rows.count() > 1000
        assert "تجربة 実験" in rows.first.inner_text()
        assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")
        panel, root = page.locator(".lz-code").bounding_box(), page.locator(".lazyviz").bounding_box()
        assert panel["x"] + panel["width"] <= root["x"] + root["width"] + 0.5
    assert y is not None
