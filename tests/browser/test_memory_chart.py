"""The memory chart and the device menu in Chromium: reading, choosing, zooming, planning again."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from torch import nn

import lazyviz

from .support.bare_page import Stage, shown
from .support.pictures import same_speed

pytestmark = pytest.mark.browser

CHART = ".lz-chart"
SCALE = ".lz-axis:not(.lz-time-label)"
BOTTOM = 154  # of the plot, in pixels of the chart


@pytest.fixture
def recorded():
    """A training step of a stack of layers, and what has to stay alive."""

    def record(layers: int = 5, **options):
        torch.manual_seed(0)
        net = nn.Sequential(
            *[layer for _ in range(layers) for layer in (nn.Linear(128, 128), nn.GELU())], nn.Linear(128, 4)
        )
        optimizer = torch.optim.AdamW(net.parameters())
        x, y = torch.randn(64, 128), torch.randint(4, (64,))
        with lazyviz.lazy(batch=[x, y], **options) as graph:
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
        return graph, (net, optimizer, x, y, loss)

    return record


@pytest.fixture
def staged(page, recorded):
    """The widget of a recorded step; ``graph`` is its graph."""
    stages = []

    def stage(*, width: int = 1100, views: int = 1, dark: bool = False, **options):
        graph, keep = recorded(**options)
        page.set_viewport_size({"width": width + 40, "height": 1300})
        made = Stage(page, graph, width=width, views=views, dark=dark)
        made.graph, made.keep = graph, keep
        stages.append(made)
        return made

    yield stage
    for each in stages:
        each.__exit__(None, None, None)


def place(page, share: float) -> tuple[float, float]:
    """A place in the plot, so much of its width from the left."""
    plot = page.locator(".lz-plot").first.bounding_box()
    return plot["x"] + plot["width"] * share, plot["y"] + plot["height"] / 2


def drag(page, start: float, stop: float) -> None:
    page.mouse.move(*place(page, start))
    page.mouse.down()
    page.mouse.move(*place(page, (start + stop) / 2))
    page.mouse.move(*place(page, stop))
    page.mouse.up()


def test_pointing_at_the_chart_reads_position_op_line_and_bytes_by_category(page, staged):
    stage = staged()
    readout = page.locator(".lz-chart-readout")
    assert "at the peak" in readout.inner_text()
    page.locator(".lz-verdict").hover()  # which brings the deferred part
    stage.settle()
    before = len(stage.messages)
    page.mouse.move(*place(page, 0.3))
    words = readout.get_attribute("title")
    plan = stage.graph.plan()
    found = re.match(r"op (\d+) of (\d+)", words)
    assert found and int(found[2]) == len(plan.timeline)
    position = int(found[1]) - 1
    node = stage.graph.nodes[position]
    assert f"{node.module or node.phase}: {node.op._schema.name.split('::')[1]}" in words
    assert f"test_memory_chart.py:{node.source.line}" in words
    assert f"{lazyviz.plan.units.format_bytes(plan.timeline[position][1])} in all" in words
    for name, series in plan.category_timeline.items():
        if series[position]:
            assert f"{name} {lazyviz.plan.units.format_bytes(series[position])}" in words
    assert page.locator(".lz-crosshair").count() == 2
    assert len(stage.messages) == before, "reading asks nothing"
    page.mouse.move(5, 5)
    assert page.locator(".lz-crosshair").count() == 0
    assert "at the peak" in readout.inner_text()


def test_a_click_selects_the_op_in_the_graph_and_highlights_what_is_alive(page, staged):
    stage = staged()
    page.mouse.click(*place(page, 0.25))
    stage.settle()
    moment = next(message["moment"] for message in reversed(stage.messages) if message["kind"] == "moment")
    details = page.locator('[data-panel="alive"]')
    assert details.locator("h3").first.inner_text() == f"Alive at op {moment['position'] + 1:,}"
    selected = page.locator(".lz-selected[data-node]")
    assert selected.count() == 1
    assert selected.get_attribute("data-node") in moment["chain"], "its box, or the nearest around it"
    assert page.locator(".lz-lit[data-node]").count() >= 1
    assert page.locator(".lz-cursor").count() == 1
    details.locator(".lz-link").first.click()  # the op itself
    stage.settle()
    assert page.locator(".lz-selected[data-node]").get_attribute("data-node") == moment["chain"][-1]
    assert page.locator(".lz-lifetime").count() == 1, "and its lifetime is marked"
    assert stage.graph.pending == len(stage.graph.nodes)


def test_dragging_over_a_part_looks_closer_and_esc_double_click_or_the_button_go_back(page, staged):
    stage = staged(layers=24)
    count = len(stage.graph.nodes)
    assert count > 480
    back = page.locator('[data-action="chart-back"]')
    for leave in ("Escape", "double click", "button"):
        drag(page, 0.5, 0.6)
        stage.settle()
        assert back.is_visible()
        found = re.match(r"Ops ([\d,]+) to ([\d,]+)", back.inner_text())
        start, stop = (int(each.replace(",", "")) for each in found.groups())
        assert abs(start - count * 0.5) < 6 and abs(stop - count * 0.6) < 6
        details = page.locator('[data-panel="alive"]')
        assert details.locator("h3").first.inner_text() == f"Ops {start:,} to {stop:,}"
        assert details.locator(".lz-number").first.inner_text().endswith("%")
        assert page.locator(".lz-lit[data-node]").count() >= 1
        page.mouse.move(*place(page, 0.5))
        words = page.locator(".lz-chart-readout").get_attribute("title")
        assert "the highest of" not in words, "each op has a point of its own now"
        assert start <= int(re.match(r"op ([\d,]+) of", words)[1].replace(",", "")) <= stop
        if leave == "Escape":
            page.keyboard.press("Escape")
        elif leave == "button":
            back.click()
        else:
            page.mouse.dblclick(*place(page, 0.5))
        stage.settle()
        assert not back.is_visible()


def test_the_keyboard_does_what_the_mouse_does(page, staged):
    stage = staged(layers=24)
    slider = page.locator('.lz-memory [role="slider"]')
    slider.focus()
    page.keyboard.press("Home")
    assert re.match(r"op [1-4] of 851, the highest of 1 to ", slider.get_attribute("aria-valuetext"))
    for key in ("ArrowRight", "PageUp", "ArrowLeft"):
        page.keyboard.press(key)
    first = slider.get_attribute("aria-valuenow")
    page.keyboard.press("Enter")
    stage.settle()
    assert page.locator('[data-panel="alive"] h3').first.inner_text() == f"Alive at op {first}"
    assert slider.evaluate("(element) => element === document.activeElement"), "the focus stays"
    for _ in range(5):
        page.keyboard.press("Shift+ArrowRight")
    assert page.locator(".lz-chart-part").count() == 1
    page.keyboard.press("Enter")
    stage.settle()
    assert page.locator('[data-action="chart-back"]').is_visible()
    page.keyboard.press("Escape")
    stage.settle()
    assert not page.locator('[data-action="chart-back"]').is_visible()


def test_a_category_can_be_seen_alone_with_totals_that_stay_true(page, staged):
    stage = staged()
    total = page.locator(SCALE).last.text_content()
    stage.click('[data-category="activations"]')
    assert page.locator(".lz-area").count() == 1
    most = max(stage.graph.plan().category_timeline["activations"])
    assert page.locator(SCALE).last.text_content() == lazyviz.plan.units.format_bytes(most) != total
    page.mouse.move(*place(page, 0.2))
    words = page.locator(".lz-chart-readout").get_attribute("title")
    assert " in all: activations " in words and "parameters" not in words
    stage.click('[data-action="all-categories"]')
    assert page.locator(SCALE).last.text_content() == total


def test_after_the_run_the_measured_curve_lies_over_the_projected_one(page, staged):
    stage = staged(views=2)
    assert page.locator(".lz-measured").count() == 0
    stage.click('button[data-action="evaluate"]')
    assert page.locator(".lz-measured").count() == 2, "in both views"
    head = page.locator(".lz-memory-head").first
    assert head.inner_text().startswith("measured peak ") and "as projected" in head.get_attribute("title")
    assert page.locator(".lz-legend", has_text="measured").count() == 2
    page.mouse.move(*place(page, 0.5))
    assert " · measured " in page.locator(".lz-chart-readout").first.get_attribute("title")
    stage.page.locator('input[data-action="batch-size"]').first.fill("128")
    stage.settle()
    assert page.locator(".lz-measured").count() == 0
    assert head.inner_text() == "measured with 64 samples"


def test_another_device_changes_verdict_capacity_pieces_and_largest_batch_and_runs_nothing(page, staged):
    stage = staged(device=lazyviz.DeviceProfile("tiny", "1 MiB"))
    verdict, words = page.locator("[data-verdict]"), page.locator("[data-batch]")
    menu = page.locator('select[data-action="device"]')
    assert verdict.get_attribute("data-verdict") == "too-big"
    assert page.locator(".lz-capacity").count() == 1
    assert page.locator(".lz-capacity-text").text_content() == "tiny: 1.00 MiB"
    shown(page.locator('select[data-action="split"]')).select_option("auto")
    stage.settle()
    assert "pieces of" in words.inner_text()
    menu.select_option("H100-80GB")
    assert "planning for H100-80GB" in page.locator(".lz-planning").inner_text()
    stage.settle()
    assert verdict.get_attribute("data-verdict") == "fits" and "H100-80GB" in verdict.inner_text()
    assert "in one piece" in words.inner_text()
    most = stage.graph.plan(device="H100-80GB", split="auto").max_batch_size
    assert f"at most {most:,} samples fit" in words.inner_text()
    assert page.locator(".lz-capacity").count() == 0
    head = page.locator(".lz-memory-head").get_attribute("title")
    assert re.search(
        r"needs \d+ MiB with what H100-80GB takes itself · H100-80GB has 79\.6 GiB, \d+ × that",
        head,
    )
    room = page.locator(".lz-room").text_content()
    assert re.fullmatch(r"H100-80GB has 79\.6 GiB, \d+ × \d+ MiB", room), "no word without what it is about"
    assert page.locator(".lz-planning").inner_text().startswith("Evaluate runs on cpu")
    menu.select_option("given")
    stage.settle()
    assert verdict.get_attribute("data-verdict") == "too-big" and "tiny" in verdict.inner_text()
    assert page.locator(".lz-planning").inner_text() == ""
    assert stage.graph.pending == len(stage.graph.nodes)


@pytest.mark.parametrize("width", [560, 700, 800, 1100])
def test_what_is_needed_and_what_the_device_has_are_never_written_over_each_other(page, width):
    def step():  # after which the curve is low
        net = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)])
        net(torch.ones(4096, 1024)).sum().backward()

    with lazyviz.lazy(device=lazyviz.DeviceProfile("RTX-4711", "24 GiB", context_bytes="1 MiB")) as graph:
        step()
        rest = torch.ones(3)
        for _ in range(400):
            rest = rest + 1
    page.set_viewport_size({"width": width + 40, "height": 1300})
    with Stage(page, graph, width=width):
        needed, has = page.locator(".lz-needed-text"), page.locator(".lz-room")
        assert needed.count() == 1
        if has.count():
            first, second = needed.bounding_box(), has.bounding_box()
            beside = first["x"] + first["width"] <= second["x"]
            assert beside or first["y"] + first["height"] <= second["y"] + 3, (first, second)
        else:
            assert width < 1100
    del rest


def test_bars_follow_what_is_read_in_the_chart_and_come_back_to_the_peak(page, staged):
    stage = staged()
    id = page.locator('[data-kind="module"]', has_text="at peak").first.get_attribute("data-node")
    card = page.locator(f'[data-node="{id}"]')
    at_peak = card.text_content()
    assert page.locator(".lz-part.lz-pale").count() == 0
    page.mouse.move(*place(page, 0.2))
    stage.settle()
    assert page.locator(".lz-part.lz-pale").count() > 0
    read = re.search(r"^op ([\d,]+)", page.locator(".lz-chart-readout").inner_text())[1]
    moment = stage.graph.plan().at(int(read.replace(",", "")) - 1)
    told = page.locator(".lz-chart-readout").inner_text()
    assert lazyviz.plan.units.format_bytes(moment.nbytes) in told
    assert " now" in card.text_content() and "at peak" not in card.text_content()
    page.mouse.move(5, 5)
    stage.settle()
    assert page.locator(".lz-part.lz-pale").count() == 0 and card.text_content() == at_peak


def test_the_time_track_tells_each_phase_and_how_it_is_known(page, staged):
    with same_speed():
        stage = staged()
        assert "projected, ±" in page.locator(".lz-strip-side").inner_text()
        assert page.locator(".lz-time-bars").count() > 0
        names = page.locator(".lz-phase-name").all_text_contents()
        assert [re.match("[A-Z][a-z]+", name)[0] for name in names] == ["Forward", "Backward", "Optimizer"]
        assert any(name.endswith("s") for name in names), "where there is room"
        title = page.locator(".lz-strip-side p", has_text="projected").get_attribute("title")
        assert "from the calibration of this CPU" in title and "in kernels with measurements" in title
        page.mouse.move(*place(page, 0.2))
        stage.settle()  # with the deferred part, which tells the rest
        assert "-bound" in page.locator(".lz-chart-readout").get_attribute("title")


def test_the_phases_of_many_steps_are_named_once_with_the_time_of_all(browser):
    net = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with lazyviz.lazy("cpu:1GiB") as graph:
        for _ in range(30):
            optimizer.zero_grad()
            loss = net(torch.ones(4, 16)).sum()
            loss.backward()
            optimizer.step()
            loss.item()
    page = browser.new_page(viewport={"width": 900, "height": 1000})
    with same_speed(), Stage(page, graph, width=884):
        assert page.locator(".lz-phase-strip").count() > 80
        names = page.locator(".lz-phase-name").all_text_contents()
        assert [re.match("[A-Z][a-z]+", name)[0] for name in names] == ["Forward", "Backward", "Optimizer"]
        assert all(re.search(r"\d.* [µm]?s$", name) for name in names), names
        places = [each.bounding_box() for each in page.locator(".lz-phase-name").all()]
        assert all(a["x"] + a["width"] < b["x"] for a, b in itertools.pairwise(places))
    page.close()


def test_two_views_of_a_graph_stay_in_step(page, staged):
    stage = staged(views=2)
    menus = page.locator('select[data-action="device"]')
    menus.nth(1).select_option("RTX-3060")
    stage.settle()
    assert menus.nth(0).input_value() == "RTX-3060"
    page.locator('input[data-action="batch-size"]').nth(0).fill("256")
    stage.settle()
    assert page.locator('input[data-action="batch-size"]').nth(1).input_value() == "256"
    verdicts = page.locator("[data-verdict]").all_inner_texts()
    assert len(verdicts) == 2 and verdicts[0] == verdicts[1]
    assert "RTX-3060 · for 256 samples" in verdicts[0]
    words = page.locator("[data-batch]").all_inner_texts()
    assert words[0] == words[1] and "at most" in words[0]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [600, 1000, 2400])
def test_nothing_of_the_chart_is_cut_off_or_covered(page, staged, width, dark, screenshots):
    stage = staged(width=width, dark=dark, device="T4-16GB")
    drag(page, 0.1, 0.9)
    stage.settle()  # the deferred part draws what was dragged over
    page.mouse.move(*place(page, 0.6))
    stage.settle()
    page.locator(".lz-memory").screenshot(
        path=screenshots / f"memory-{'dark' if dark else 'light'}-{width}.png"
    )
    outside = page.evaluate(
        """() => {
          const root = document.querySelector(".lazyviz").getBoundingClientRect();
          const parts = [...document.querySelectorAll(".lz-memory *, .lz-batch *:not([aria-hidden])")];
          return parts.filter((part) => {
            const box = part.getBoundingClientRect();
            return box.width > 2 && (box.left < root.left - 0.5 || box.right > root.right + 0.5);
          }).map((part) => part.outerHTML.slice(0, 120));
        }"""
    )
    assert outside == []
    covering = page.evaluate(
        """() => {
          const texts = [...document.querySelectorAll(".lz-chart text")];
          const found = [];
          texts.forEach((one, i) => texts.slice(i + 1).forEach((other) => {
            const [a, b] = [one.getBoundingClientRect(), other.getBoundingClientRect()];
            const across = a.left < b.right && b.left < a.right;
            const upright = a.top + 2 < b.bottom && b.top + 2 < a.bottom;
            if (across && upright) found.push([one.textContent, other.textContent]);
          }));
          return found;
        }"""
    )
    assert covering == []


def test_the_words_for_a_capacity_just_below_the_peak_are_not_behind_its_flag(page):
    net, x = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]), torch.randn(512, 512)
    with lazyviz.lazy("cpu:18MiB") as graph:
        loss = net(x).square().mean()
        loss.backward()
    with Stage(page, graph, width=720):
        words, flag = (
            page.locator(f".lazyviz {part}").first.evaluate(
                "(e) => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; }"
            )
            for part in (".lz-capacity-text", ".lz-peak .lz-flag")
        )
        peak, capacity = (graph.plan().peak_bytes, graph.plan().capacity_bytes)
    assert 0.85 * peak < capacity < peak, "the line is close to the top"
    assert words[1] >= flag[3] or words[0] >= flag[2] or words[2] <= flag[0]
    del loss
