"""The product in a real JupyterLab: record a cell, look at it, evaluate it with a click, reopen it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from .support.bare_page import shown
from .support.jupyterlab import (
    hide_side_bar,
    notebook,
    open_notebook,
    outputs_of,
    run_cell,
    save_notebook,
    set_theme,
    wait_for_kernel,
    write_notebook,
)

pytestmark = pytest.mark.browser

SETUP = """\
%load_ext lazyviz
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(32), nn.Linear(32, 32)
    def forward(self, x):
        return x + torch.relu(self.linear(self.norm(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(16, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(32, 4)
    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.AdamW(net.parameters())
x, y = torch.randn(64, 16), torch.randint(4, (64,))
before = net.head.weight.detach().clone()
"""
STEP = """\
%%lazy
loss = nn.functional.cross_entropy(net(x), y)
optimizer.zero_grad()
loss.backward()
optimizer.step()
"""
CHECK = "print('changed:', not torch.equal(before, net.head.weight), type(loss).__name__)"


def overlapping(page) -> list[str]:
    """Pairs of closed boxes, or of toolbar controls, that cover one another on screen."""
    return page.evaluate(
        """() => {
          const found = [];
          const check = (list) => {
            const rects = list.map((e) => [e, e.getBoundingClientRect()])
              .filter(([, r]) => r.width && r.height);
            const apart = (r, s) => r.right - 1 <= s.left || r.bottom - 1 <= s.top;
            rects.forEach(([a, r], i) => rects.slice(0, i).forEach(([b, s]) => {
              if (!apart(r, s) && !apart(s, r))
                found.push((a.getAttribute('aria-label') || a.textContent) + ' / ' +
                           (b.getAttribute('aria-label') || b.textContent));
            }));
          };
          const root = document.querySelector('.lazyviz');
          const all = (selector) => check([...root.querySelectorAll(selector)]);
          all('[data-node]:not(.lz-open) > .lz-card:not(.lz-behind)');
          all('.lz-toolbar button:not([hidden]), .lz-toolbar input, .lz-verdict, h2');
          all('.lz-edge-label');
          return found;
        }"""
    )


def texts_out_of_their_box(page) -> list[str]:
    """Texts that are wider than the box they are in."""
    return page.evaluate(
        """() => [
          ...document.querySelectorAll('.lazyviz [data-node]:not([aria-expanded="true"])'),
        ].flatMap((box) => {
          const card = box.querySelector('.lz-card:not(.lz-behind)').getBoundingClientRect();
          return [...box.querySelectorAll('text')]
            .filter((text) => {
              const r = text.getBoundingClientRect();
              return r.right > card.right + 0.5 || r.bottom > card.bottom + 0.5 || r.left < card.left - 0.5;
            })
            .map((text) => text.textContent);
        })"""
    )


def scrolls_sideways(page) -> bool:
    return page.evaluate(
        "[document.querySelector('.lazyviz')].some((root) => root.scrollWidth > root.clientWidth)"
    )


def start(page, lab, name, *cells):
    write_notebook(lab.directory / name, cells)
    open_notebook(page, lab.address, name, lab.kernel)
    hide_side_bar(page)
    wait_for_kernel(page)


def test_a_lazy_cell_is_seen_opened_evaluated_and_still_there_without_a_kernel(
    page, browser, lab, screenshots, tmp_path
):
    set_theme(lab.directory, dark=False)
    start(page, lab, "step.ipynb", SETUP, STEP, CHECK)
    run_cell(page, 0)
    run_cell(page, 1)
    widget = page.locator(".lazyviz")
    widget.wait_for()
    assert widget.get_attribute("data-state") == "pending"
    assert page.locator(".lazyviz [data-verdict]").get_attribute("data-verdict") == "fits"
    # The static picture is for readers without a kernel: the live widget hides it.
    picture = page.locator("img.lazyviz-static")
    picture.wait_for(state="hidden")

    fold = page.locator('[data-node][data-kind="module"][data-phase="forward"]').filter(has_text="× 6")
    assert fold.get_attribute("aria-expanded") == "false"
    nodes = page.locator(".lazyviz [data-node]").count()
    fold.dblclick()
    page.locator('[data-node][aria-expanded="true"]').nth(1).wait_for()
    assert page.locator(".lazyviz [data-node]").count() == nodes + 6
    page.locator('[data-node][data-op="aten._log_softmax.default"]').focus()
    page.keyboard.press("Enter")
    details = page.locator('[data-panel="details"]')
    details.get_by_text("aten._log_softmax.default").wait_for()
    assert "loss = nn.functional.cross_entropy(net(x), y)" in details.inner_text()
    assert page.locator(".lz-lifetime").count() == 1
    assert page.locator(".lz-relation-saved path").count() >= 1  # saved for backward: drawn on selection only
    page.screenshot(path=screenshots / "notebook-details.png")
    page.locator(".lz-peak .lz-flag").click()
    assert page.locator(".lazyviz .lz-lit").count() >= 1

    page.locator('input[data-action="search"]').fill("layer_norm")
    page.locator(".lz-hit").first.click()
    page.locator(".lazyviz .lz-selected[data-node]").wait_for()
    page.locator('button[data-action="collapse-all"]').click()

    page.locator('button[data-action="evaluate"]').click()
    page.locator('.lazyviz[data-state="done"]').wait_for()
    assert page.locator(".lz-state").inner_text().startswith("ran ")
    assert page.locator('button[data-action="evaluate"]').is_disabled()
    run_cell(page, 2)
    page.get_by_text("changed: True Tensor").wait_for()
    assert page.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.stderr']").count() == 0

    path = lab.directory / "step.ipynb"
    save_notebook(page, path)
    saved = json.loads(path.read_text(encoding="utf-8"))
    assert len(path.read_bytes()) < 250_000
    html = next(
        "".join(output["data"]["text/html"])
        for output in outputs_of(path, 1)
        if "lazyviz-static" in "".join(output.get("data", {}).get("text/html", ""))
    )
    assert html.startswith("<img")

    # Reopened as a copy whose kernel is not there: no widget can be alive in it.
    saved["metadata"]["kernelspec"] = {"display_name": "gone", "language": "python", "name": "gone"}
    saved["metadata"].pop("widgets", None)
    (lab.directory / "reopened.ipynb").write_text(json.dumps(saved))
    other = browser.new_page(viewport={"width": 1500, "height": 1100})
    open_notebook(other, lab.address, "reopened.ipynb")
    dismiss = other.locator(".jp-Dialog button", has_text="No Kernel")
    try:
        dismiss.click(timeout=8000)
    except Exception:
        pass
    shown = other.locator("img.lazyviz-static")
    shown.wait_for(state="visible", timeout=20_000)
    shown.scroll_into_view_if_needed()
    assert other.evaluate("document.querySelector('img.lazyviz-static').naturalWidth") == 900
    other.screenshot(path=screenshots / "reopened.png")
    other.close()

    done = subprocess.run(
        [sys.executable, "-m", "nbconvert", "--to", "html", str(path), "--output-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    exported = browser.new_page(viewport={"width": 1000, "height": 1100})
    exported.context.set_offline(True)
    exported.goto((tmp_path / "step.html").as_uri(), wait_until="domcontentloaded")
    exported.locator("img.lazyviz-static").wait_for(state="visible")
    assert exported.evaluate("document.querySelector('img.lazyviz-static').naturalWidth") == 900
    exported.screenshot(path=screenshots / "nbconvert.png")
    # Printed, or made a PDF by a browser, the whole picture is on the page.
    exported.emulate_media(media="print")
    exported.set_viewport_size({"width": 794, "height": 1123})  # A4
    picture = exported.locator("img.lazyviz-static").bounding_box()
    assert picture["width"] > 600 and picture["x"] >= 0 and picture["x"] + picture["width"] <= 794
    assert exported.pdf(format="A4").startswith(b"%PDF")
    exported.context.close()


@pytest.mark.parametrize("width", [1500, 900])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_nothing_overlaps_or_is_cut_off(browser, lab, screenshots, width, dark):
    set_theme(lab.directory, dark=dark)
    name = f"{'dark' if dark else 'light'}-{width}"
    page = browser.new_page(viewport={"width": width, "height": 1250})
    start(page, lab, f"{name}.ipynb", SETUP, STEP)
    run_cell(page, 0)
    run_cell(page, 1)
    page.locator(".lazyviz").wait_for()
    page.locator(".lazyviz .lz-chart .lz-area").first.wait_for()
    page.locator(".lazyviz").scroll_into_view_if_needed()
    page.wait_for_timeout(300)
    page.screenshot(path=screenshots / f"{name}.png")
    page.locator(".lazyviz").screenshot(path=screenshots / f"{name}-widget.png")
    assert overlapping(page) == []
    assert texts_out_of_their_box(page) == []
    assert not scrolls_sideways(page)
    shown(page.locator('button[data-action="expand-all"]')).click()
    page.locator('[data-node][aria-expanded="true"]').first.wait_for()
    page.wait_for_timeout(300)
    page.locator(".lazyviz").screenshot(path=screenshots / f"{name}-expanded.png")
    assert overlapping(page) == []
    assert texts_out_of_their_box(page) == []
    page.close()


def test_the_keyboard_reaches_and_opens_a_group_without_running_notebook_commands(page, lab):
    set_theme(lab.directory, dark=False)
    start(page, lab, "keyboard.ipynb", SETUP, STEP)
    run_cell(page, 0)
    run_cell(page, 1)
    fold = page.locator('[data-node][data-kind="module"]').filter(has_text="× 6").first
    fold.wait_for()
    cells = page.locator(".jp-Notebook .jp-Cell").count()
    fold.focus()
    page.keyboard.press("Enter")
    page.locator('[data-node][aria-expanded="true"]').nth(1).wait_for()
    page.keyboard.press("b")  # inserts a cell in the notebook's command mode
    page.wait_for_timeout(200)
    assert page.locator(".jp-Notebook .jp-Cell").count() == cells


def test_the_notebooks_these_tests_write_carry_no_widget_state():
    assert "widgets" not in notebook([STEP])["metadata"]
