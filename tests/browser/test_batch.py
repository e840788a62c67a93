"""The batch in a real JupyterLab: the slider changes peak, verdict, and pieces; Evaluate runs them."""

from __future__ import annotations

import re

import pytest

from .support.bare_page import shown
from .support.jupyterlab import (
    hide_side_bar,
    open_notebook,
    run_cell,
    set_theme,
    wait_for_kernel,
    write_notebook,
)
from .test_notebook import overlapping, scrolls_sideways

pytestmark = pytest.mark.browser

SETUP = """\
%load_ext lazyviz
import torch, lazyviz
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())], nn.Linear(64, 4))
optimizer = torch.optim.AdamW(net.parameters())
x, y = torch.randn(48, 64), torch.randint(4, (48,))
"""
STEP = """\
%%lazy --batch x,y --as graph
loss = nn.functional.cross_entropy(net(x), y)
optimizer.zero_grad()
loss.backward()
optimizer.step()
"""
NORM = """\
%%lazy --batch x,y --split 4 --as graph
normed = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 4))
loss = nn.functional.cross_entropy(normed(x), y)
loss.backward()
"""
PEAK = "print('peak is', lazyviz.plan.units.format_bytes(graph.plan(batch_size={}, split={!r}).peak_bytes))"


@pytest.fixture
def opened(page, lab, request):
    """Open a notebook of these cells, run the first two, and wait until the batch is known."""

    def open_(*cells, width=1500, dark=False, of=page):
        set_theme(lab.directory, dark=dark)
        name = f"{re.sub('[^a-z]', '-', request.node.name)}.ipynb"
        write_notebook(lab.directory / name, cells)
        of.set_viewport_size({"width": width, "height": 1250})
        open_notebook(of, lab.address, name, lab.kernel)
        hide_side_bar(of)
        wait_for_kernel(of)
        run_cell(of, 0)
        run_cell(of, 1)
        of.locator("[data-batch]", has_text="at most").wait_for(state="attached")
        of.locator(".lazyviz").scroll_into_view_if_needed()
        return of.locator(".lazyviz")

    return open_


def settled(page):
    """Every question about the batch has been answered."""
    page.locator(".lz-batch:not(.lz-asking)").wait_for()


def drag(page, slider, start, stop, steps=50):
    """Drag the slider's thumb from one share of its width to another."""
    box = slider.bounding_box()

    def at(share):
        return box["x"] + box["width"] * share, box["y"] + box["height"] / 2

    page.mouse.move(*at(start))
    page.mouse.down()
    for step in range(1, steps + 1):
        page.mouse.move(*at(start + (stop - start) * step / steps))
    page.mouse.up()


@pytest.mark.takes_times
def test_dragging_the_batch_size_moves_peak_and_verdict_and_runs_nothing(page, opened, screenshots):
    widget = opened(SETUP, STEP, PEAK.format("int(size)", "off"))
    slider = page.locator('input[data-action="batch-size"]')
    verdict = page.locator("[data-verdict]")
    assert slider.input_value() == "48" and verdict.get_attribute("data-verdict") == "fits"
    seen = page.evaluate(
        """() => {
          window.seen = {peaks: [], frames: []};
          const words = document.querySelector('[data-batch]');
          new MutationObserver(() => seen.peaks.push(words.textContent)).observe(words, {childList: true});
          let last = performance.now();
          const tick = (now) => { seen.frames.push(now - last); last = now; requestAnimationFrame(tick); };
          requestAnimationFrame(tick);
        }"""
    )
    assert seen is None
    place = slider.bounding_box()["x"]
    drag(page, slider, 0.1, 1.02)  # past its end, which is past what fits
    settled(page)
    assert slider.bounding_box()["x"] == place, "what its text says moves nothing in the row"
    size = int(slider.input_value())
    assert size > 48 * 4
    page.locator('[data-verdict="too-big"]').wait_for()
    assert f"for {size:,} samples" in verdict.inner_text()
    assert page.locator(".lz-capacity").count() == 1
    peaks = page.evaluate("seen.peaks.map((text) => text.match(/peak ([^·]*)/)[1])")
    assert len(set(peaks)) >= 3, "the peak follows while one drags"
    frames = sorted(page.evaluate("seen.frames"))
    assert frames[len(frames) // 2] < 100, "milliseconds: the page goes on drawing"
    page.locator(".lazyviz").screenshot(path=screenshots / "batch-dragged.png")

    # The last answer is of the last size, and the one that a plan of it gives.
    cell = page.locator(".jp-Notebook .jp-CodeCell").nth(2)
    cell.locator(".cm-content").click()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(PEAK.format(size, "off"))
    run_cell(page, 2)
    text = cell.locator(".jp-OutputArea").inner_text()
    assert peaks[-1].strip() in text
    assert f"peak {peaks[-1].strip()}" in page.locator("[data-batch]").inner_text()
    assert widget.get_attribute("data-state") == "pending"
    shown(page.locator('[data-action="batch-recorded"]')).click()
    settled(page)
    assert slider.input_value() == "48" and verdict.get_attribute("data-verdict") == "fits"


def test_the_keyboard_moves_the_slider_and_the_size_and_plan_are_said(page, opened):
    opened(SETUP, STEP)
    slider = page.locator('input[data-action="batch-size"]')
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert int(slider.input_value()) > 48
    page.keyboard.press("Home")
    settled(page)
    assert slider.input_value() == "1"
    assert slider.get_attribute("aria-valuetext").startswith("1 sample, peak ")
    page.keyboard.press("End")
    settled(page)
    assert "Too big" in slider.get_attribute("aria-valuetext")
    page.locator('.lz-said[role="status"]', has_text="Too big by").wait_for(state="attached")
    assert page.locator(".jp-Notebook .jp-Cell").count() == 2, "keys are the widget's"


def test_pieces_chosen_in_the_menu_are_planned_shown_and_run(page, opened, screenshots):
    widget = opened(SETUP, STEP, "print(graph.report.pieces, graph.split)")
    shown(page.locator('select[data-action="split"]')).select_option("4")
    page.locator("[data-batch]", has_text="in 4 pieces of 12 samples").wait_for(state="attached")
    assert page.locator("[data-verdict]").inner_text().startswith("Fits in 4 pieces · ")
    assert page.locator(".lz-piece-name title").all_text_contents() == [
        "piece 1",
        "piece 2, and 2 more like it",
    ]
    page.locator(".lazyviz").screenshot(path=screenshots / "batch-pieces.png")
    page.locator('button[data-action="evaluate"]').click()
    page.locator('.lazyviz[data-state="done"]').wait_for()
    assert ", in 4 pieces" in widget.locator(".lz-state").inner_text()
    assert page.locator('select[data-action="split"]').is_disabled()
    run_cell(page, 2)
    page.get_by_text("4 4", exact=True).wait_for()


def test_what_forbids_a_split_is_named_and_a_click_goes_to_it(page, opened, screenshots):
    opened(SETUP, NORM)
    page.locator(".lz-verdict").hover()  # which brings the deferred part
    link = page.locator(".lz-blocked button").first
    assert link.inner_text().startswith("native_batch_norm")
    assert "GroupNorm" in page.locator(".lz-blocked").inner_text()
    shown(link).click()
    page.locator('.lazyviz .lz-selected[data-node][data-op*="native_batch_norm"]').wait_for()
    page.locator(".lazyviz").screenshot(path=screenshots / "batch-blocked.png")
    page.locator('button[data-action="evaluate"]').click()
    page.locator(".lazyviz .lz-error").wait_for()
    assert "cannot be split" in page.locator('.lazyviz [role="alert"]').inner_text()


@pytest.mark.parametrize("width", [1600, 700])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_batch_row_is_neither_cut_off_nor_covered(page, opened, screenshots, width, dark):
    widget = opened(SETUP, STEP, width=width, dark=dark)
    shown(page.locator('select[data-action="split"]')).select_option("auto")
    page.locator('input[data-action="batch-size"]').fill("1000")
    settled(page)
    page.wait_for_timeout(300)
    widget.screenshot(path=screenshots / f"batch-{'dark' if dark else 'light'}-{width}.png")
    assert overlapping(page) == []
    assert not scrolls_sideways(page)
    inside = page.evaluate(
        """() => {
          const root = document.querySelector('.lazyviz').getBoundingClientRect();
          return [...document.querySelectorAll('.lz-batch *:not([aria-hidden])')].filter((part) => {
            const box = part.getBoundingClientRect();
            return box.width > 2 && !(box.left >= root.left && box.right <= root.right + 0.5);
          }).map((part) => part.className);
        }"""
    )
    assert inside == []
