"""Speed of the widget in a real JupyterLab: for ``test_speed.py`` and ``benchmarks/widget_speed.py``.

Times are seconds.  What happens in the page is timed there, from the event to the frame after the change.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from . import jupyterlab

SETUP = """\
%load_ext lazyviz
import json, time, torch, lazyviz, lazyviz.notebook.magic
from torch import nn
torch.manual_seed(0)
show = lazyviz.notebook.magic.LazyMagics._show

def timed(self, graph, no_widget):
    global recorded_at
    recorded_at = time.time()
    show(self, graph, no_widget)

lazyviz.notebook.magic.LazyMagics._show = timed
"""
GPT2 = """\
from transformers import GPT2Config, GPT2LMHeadModel
net = GPT2LMHeadModel(GPT2Config()).train()
optimizer = torch.optim.AdamW(net.parameters())
tokens = torch.randint(0, 50257, (2, 128))
"""
GPT2_STEP = """\
%%lazy --as graph
loss = net(tokens, labels=tokens).loss
loss.backward()
optimizer.step()
"""
LOOP = """\
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
    def forward(self, x):
        return x + torch.relu(self.linear(self.norm(x)))

net = nn.Sequential(*[Layer() for _ in range(32)])
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x = torch.randn(4, 8)
"""
LOOP_STEPS = """\
%%lazy --as graph
for _ in range({steps}):
    optimizer.zero_grad()
    net(x).sum().backward()
    optimizer.step()
"""
REPORT = """\
state = graph.widget().get_state()
sizes = dict(ops=len(graph.nodes), recorded_at=recorded_at, scene=len(json.dumps(state["scene"])))
sizes["saved"] = len(json.dumps({k: v for k, v in state.items()}, default=str))
print("REPORT", json.dumps(sizes))
"""

# Notes when the first box was drawn: the frame after it was put there.
WATCH = """() => {
  window.firstBox = null;
  const look = () => {
    if (document.querySelector(".lazyviz [data-node]"))
      requestAnimationFrame(() => { window.firstBox ??= Date.now() / 1000; });
    else requestAnimationFrame(look);
  };
  look();
}"""
# Clicks a closed group and waits for the frame in which what is in it is drawn.
OPEN = """(id) => new Promise((done, fail) => {
  const root = document.querySelector(".lazyviz");
  const find = () => root.querySelector(`[data-node="${CSS.escape(id)}"]`);
  const boxes = () => root.querySelectorAll("[data-node]").length;
  const before = boxes();
  const begin = performance.now();
  find().dispatchEvent(new MouseEvent("click", { bubbles: true, cancelable: true, view: window }));
  const look = () => {
    if (find()?.getAttribute("aria-expanded") === "true" && boxes() > before)
      requestAnimationFrame(() => done([(performance.now() - begin) / 1000, boxes() - before]));
    else if (performance.now() - begin > 10000) fail(new Error("not open after 10 s: " + id));
    else requestAnimationFrame(look);
  };
  look();
})"""
CLOSED = """() => [...document.querySelectorAll('.lazyviz [data-node][aria-expanded="false"]')]
  .map((e) => e.getAttribute("data-node"))"""
# Boxes that are in sight; and intervals between frames while the wheel turns or the mouse drags.
IN_SIGHT = """() => {
  const svg = document.querySelector(".lazyviz svg.lz-graph");
  const view = svg.getBoundingClientRect();
  return [...svg.querySelectorAll("[data-node]")].filter((e) => {
    const r = e.getBoundingClientRect();
    return r.right > view.left && r.left < view.right && r.bottom > view.top && r.top < view.bottom;
  }).length;
}"""
FRAMES = """([drag, count]) => new Promise((done, fail) => {
  const svg = document.querySelector(".lazyviz svg.lz-graph");
  const view = svg.getBoundingClientRect();
  const x = view.left + view.width / 2, y = view.top + view.height / 2;
  const times = [];
  const first = svg.querySelector(".lz-content").getAttribute("transform");
  const fire = (target, kind, dx, more) => {
    const where = { bubbles: true, cancelable: true, view: window, clientX: x + dx, clientY: y + dx / 2 };
    target.dispatchEvent(new (kind === "wheel" ? WheelEvent : PointerEvent)(kind, { ...where, ...more }));
  };
  svg.focus();
  const held = { pointerId: 1, pointerType: "mouse", isPrimary: true, button: 0, buttons: 1 };
  if (drag) fire(svg, "pointerdown", 0, held);
  const frame = (now) => {
    times.push(now);
    const n = times.length;
    if (n > count) {
      if (drag) fire(svg, "pointerup", 0, { ...held, buttons: 0 });
      const after = svg.querySelector(".lz-content").getAttribute("transform");
      if (after === first && drag) fail(new Error("nothing moved"));
      done(times.slice(1).map((t, i) => t - times[i]));
      return;
    }
    if (drag) fire(svg, "pointermove", 80 * Math.sin(n / 5), held);
    else fire(svg, "wheel", 0, { deltaY: n % 40 < 20 ? -20 : 20 });
    requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
})"""


def opened(page: Any, directory: Path, address: str, name: str, *cells: str) -> None:
    """A notebook of these cells, with the kernel ready and nothing run."""
    jupyterlab.write_notebook(directory / name, cells)
    jupyterlab.open_notebook(page, address, name)
    jupyterlab.hide_side_bar(page)
    jupyterlab.wait_for_kernel(page)


def first_picture(page: Any, cell: int, report: int, *, seconds: float = 120) -> dict[str, Any]:
    """Run the lazy cell; from its recording's end, as the kernel tells it, to the first drawn box."""
    page.evaluate(WATCH)
    jupyterlab.run_cell(page, cell, timeout=seconds * 1000)
    page.wait_for_function("window.firstBox !== null", timeout=seconds * 1000)
    jupyterlab.run_cell(page, report, timeout=seconds * 1000)
    text = page.locator(".jp-CodeCell").nth(report).locator(".jp-OutputArea-output").first.inner_text()
    told = json.loads(text.partition("REPORT")[2])
    recorded = told.pop("recorded_at")
    return {**told, "first picture": page.evaluate("window.firstBox") - recorded}


def openings(page: Any, most: int) -> list[tuple[float, int]]:
    """Open groups one after the other, those inside of them too: seconds, and boxes that came."""
    page.locator(".lazyviz").scroll_into_view_if_needed()
    times: list[tuple[float, int]] = []
    tried: set[str] = set()
    while len(times) < most:
        waiting = [id for id in page.evaluate(CLOSED) if id not in tried]
        if not waiting:
            break
        tried.add(waiting[0])
        took, boxes = page.evaluate(OPEN, waiting[0])
        times.append((took, boxes))
        page.wait_for_timeout(1000)  # an animation, and the details under way, are not part of the next
    return times


def frames(page: Any, *, drag: bool, count: int = 90) -> float:
    """Frames a second while the wheel zooms or the mouse drags."""
    intervals = page.evaluate(FRAMES, [drag, count])
    return 1000 * len(intervals) / sum(intervals)


def crowd(page: Any, wanted: int) -> int:
    """Open groups until so many boxes are drawn, and fit them all in; how many are in sight."""
    page.locator('.lazyviz button[data-action="collapse-all"]').click()
    page.wait_for_timeout(300)
    while page.locator(".lazyviz [data-node]").count() < wanted:
        waiting = page.evaluate(CLOSED)
        if not waiting:
            break
        page.evaluate(OPEN, waiting[0])
        page.wait_for_timeout(100)
    page.locator('.lazyviz button[data-action="fit"]').click()
    page.wait_for_timeout(800)
    return int(page.evaluate(IN_SIGHT))
