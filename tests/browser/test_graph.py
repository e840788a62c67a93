"""The graph, as a user reads and navigates it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import lazyviz

from .support import pictures
from .support.bare_page import Stage, shown

pytestmark = pytest.mark.browser

CLOSED = '[data-node][aria-expanded="false"]'
FAULTS = (Path(__file__).parent / "support" / "faults.js").read_text(encoding="utf-8")


@pytest.fixture
def show(page):
    """Put a picture's graph on the page: ``show("mlp", width=1000)``."""
    stages = []

    def show_(name, graph=None, **options):
        if graph is None:
            torch.manual_seed(0)
            graph, keep = pictures.PICTURES[name]()
        else:
            keep = graph
        page.set_viewport_size({"width": options.get("width", 1000) + 16, "height": 1000})
        stages.append((Stage(page, graph, **options), graph, keep))
        return stages[-1][0]

    yield show_
    for stage, *_ in stages:
        stage.widget.close()


def scale(page) -> float:
    return page.evaluate(
        "+document.querySelector('.lz-content').getAttribute('transform').match(/scale.([0-9.]+)/)[1]"
    )


def focused(page) -> str:
    return page.evaluate("document.activeElement.getAttribute('data-node')")


def press(stage, *keys):
    for key in keys:
        stage.page.keyboard.press(key)
    stage.settle()


@pytest.mark.parametrize("name", ["mlp", "resnet", "gpt2", "lstm", "syncs", "failed"])
def test_nothing_overlaps_and_nothing_is_cut_whatever_is_open_at_any_width_and_zoom(page, show, name):
    stage = show(name, width=1000)
    for round in range(3):
        for width in (600, 1000, 3800):
            page.set_viewport_size({"width": width + 16, "height": 1000})
            page.evaluate("(width) => { document.querySelector('.stage').style.width = width + 'px' }", width)
            page.wait_for_timeout(80)
            if round:
                page.locator('[data-action="fit"]').click()
                page.get_by_label("Zoom out").click()
            for _ in range(5):
                assert page.evaluate(FAULTS) == [], (round, width, scale(page))
                page.get_by_label("Zoom in").click()
        page.evaluate(
            """(css) => {
              for (const group of [...document.querySelectorAll(css)].slice(0, 4)) {
                document.querySelector(`[data-node="${group.dataset.node}"]`)
                  .dispatchEvent(new MouseEvent('click', { bubbles: true }));
              }
            }""",
            CLOSED,
        )
        stage.settle()


@pytest.mark.parametrize("name", [name for name in pictures.TWELVE if name != "llama-70b"])
def test_nothing_overlaps_in_the_first_picture(page, show, name):
    show(name, width=700)
    for width in (700, 1500):
        page.set_viewport_size({"width": width + 16, "height": 1000})
        page.evaluate("(width) => { document.querySelector('.stage').style.width = width + 'px' }", width)
        page.wait_for_timeout(80)
        assert page.evaluate(FAULTS) == [], width


def joined():
    """Four tensors, from a lane and a module, that cannot be joined."""

    class Join(torch.nn.Module):
        def forward(self, *parts):
            return torch.cat(parts, 1)

    a, b, c, d = (torch.randn(4, count, high, 8) for count, high in ((3, 8), (5, 8), (7, 9), (7, 8)))
    graphs = []
    with pytest.raises(RuntimeError), lazyviz.lazy("cpu:1GiB") as graph:
        graphs.append(graph)
        Join()(d.relu(), a * 2, c, b.exp())
    return graphs[0]


def volumes():
    """A layer that does not take what the one before gives, with long shapes."""
    net = torch.nn.Sequential(torch.nn.Conv3d(3, 64, 3), torch.nn.Conv3d(32, 64, 3))
    graphs = []
    with pytest.raises(RuntimeError), lazyviz.lazy("cpu:1GiB") as graph:
        graphs.append(graph)
        net(torch.randn(4, 3, 32, 32, 32))
    return graphs[0]


@pytest.mark.parametrize("program", [joined, volumes])
def test_shapes_above_an_op_that_failed_stand_apart_at_lines_that_do_not_cross(page, show, program):
    show("refused", program(), width=1100)
    assert page.evaluate(FAULTS) == []
    shapes = page.locator(".lz-edge-shape")
    assert shapes.count() >= 3
    # Of each line its last stretch, from left to right as it begins and as it ends.
    lines = page.evaluate(
        """() => [...document.querySelectorAll('.lz-edge-failed .lz-edge-line')].map((line) => {
          const length = line.getTotalLength();
          const [from, to] = [Math.max(length - 60, 0), length].map((at) => line.getPointAtLength(at));
          return [Math.round(from.x), Math.round(to.x)];
        })"""
    )
    assert [end for _, end in sorted(lines)] == sorted(end for _, end in lines)
    assert len({end for _, end in lines}) == len(lines)


class Skip(torch.nn.Module):
    """Joins what it is given to what its layers make of it."""

    def __init__(self):
        super().__init__()
        self.down = torch.nn.Conv2d(3, 8, 3, 2, 1)
        self.up = torch.nn.ConvTranspose2d(8, 8, 2, 2)

    def forward(self, x):
        return torch.cat([self.up(self.down(x)), x], 1)


def test_only_lines_to_the_op_that_failed_are_red_also_of_a_tensor_that_others_read(page, show):
    graphs = []
    unet, picture = Skip(), torch.randn(2, 3, 33, 33)
    with pytest.raises(RuntimeError), lazyviz.lazy("cpu:1GiB") as graph:
        graphs.append(graph)
        unet(picture)
    show("refused", graphs[0], width=1100)
    red = page.locator(".lz-edge-failed")
    error = page.locator('[data-kind="error"]').get_attribute("data-node")
    assert red.evaluate_all("all => all.map((each) => each.dataset.to)") == [error] * 2
    assert sorted(page.locator(".lz-edge-shape").all_text_contents()) == ["2×3×33×33", "2×8×34×34"]
    top = page.locator('[data-kind="input"]').first.bounding_box()
    starts = red.evaluate_all("all => all.map((each) => each.getBoundingClientRect().top)")
    assert min(starts) <= top["y"] + top["height"] + 2, "red from where the tensor is"


@pytest.mark.parametrize("width", [700, 900])
def test_the_legend_of_lines_leaves_room_for_the_zoom_of_a_narrow_widget(page, show, width):
    stage = show("mlp", width=width)
    box = page.locator('[data-node][data-name="model.hidden"][data-phase="backward"]').first
    box.click()
    stage.settle()
    assert page.locator('.lz-entry[class*="lz-relation"]').count() >= 3
    cut = page.evaluate(
        """() => {
          const edge = document.querySelector(".lz-graph-foot").getBoundingClientRect().right;
          const parts = [...document.querySelectorAll(".lz-zoom button, .lz-entry")];
          const key = document.querySelector(".lz-color-key");
          const inside = parts.every((each) => each.getBoundingClientRect().right <= edge);
          return [inside, key.scrollWidth - key.clientWidth];
        }"""
    )
    assert cut == [True, 0]


def test_the_class_of_a_module_is_beside_its_name_if_it_fits(page, show):
    block = torch.nn.ModuleDict({"attention": torch.nn.MultiheadAttention(64, 4)})
    x = torch.randn(16, 4, 64)
    with lazyviz.lazy("cpu:1GiB") as graph:
        loss = block["attention"](x, x, x, need_weights=False)[0].square().mean()
        loss.backward()
    show("attention", graph, width=1500)
    for phase in ("forward", "backward"):
        box = page.locator(f'[data-node][data-class="MultiheadAttention"][data-phase="{phase}"]').first
        assert "MultiheadAttention" in box.text_content().replace(box.locator("title").text_content(), "")


def test_text_is_never_smaller_than_nine_pixels_and_truncated_text_is_in_the_tooltip(page, show):
    show("resnet", width=900)
    seen = set()
    for _ in range(9):
        sizes = page.evaluate(
            """() => [...document.querySelectorAll('.lz-content text')]
              .filter((text) => text.getClientRects().length && text.textContent)
              .map((text) => {
                const size = parseFloat(getComputedStyle(text).fontSize);
                return [size * text.getScreenCTM().a, text.textContent];
              })"""
        )
        assert all(size > 8.7 for size, *_ in sizes), min(sizes)
        seen.add(len(sizes))
        page.get_by_label("Zoom out").click()
    assert len(seen) > 2, "what has no room for words has none"
    assert scale(page) < 0.2
    page.locator('[data-action="fit"]').click()
    titles = page.locator("[data-node] title").all_text_contents()
    assert any("stages" in title for title in titles), "the whole name is told on hover"


def test_sync_points_are_barriers_across_their_lane_with_cause_and_line(page, show):
    stage = show("syncs", width=1100)
    rail = page.locator('[data-lane="optimizer"]')
    assert "❚❚ 1 sync" in rail.text_content()
    rail.click()
    stage.settle()
    barriers = page.locator('[data-node][data-kind="sync"]')
    barriers.first.wait_for()
    assert barriers.count() == 3
    lane = page.locator('[data-lane="forward"] .lz-frame').bounding_box()
    line = page.locator('[data-kind="sync"] .lz-barrier').first.bounding_box()
    assert line["width"] > lane["width"] * 0.9
    assert all("line " in words for words in barriers.locator(".lz-sub").all_text_contents())
    above = page.evaluate(
        """() => [...document.querySelectorAll('[data-kind="sync"]')].every((sync) => {
          const at = sync.querySelector('.lz-card').getBoundingClientRect();
          const lane = `[data-phase="${sync.dataset.phase}"]:not([data-kind="sync"])`;
          return [...document.querySelectorAll(`${lane} .lz-card:not(.lz-behind)`)].every((card) => {
            const box = card.getBoundingClientRect();
            return box.bottom <= at.top || box.top >= at.bottom;
          });
        })"""
    )
    assert above


def test_parameters_inputs_and_ops_have_shapes_of_their_own(page, show):
    stage = show("mlp")
    stage.open(f'{CLOSED}[data-kind="module"][data-phase="forward"]')
    shape = '(role) => document.querySelector(`[data-role="${role}"] .lz-card`).tagName'
    assert page.evaluate(shape, "parameter") == "path"
    assert page.evaluate(shape, "input") == "rect"
    radius = "(css) => +document.querySelector(css).getAttribute('rx')"
    assert page.evaluate(radius, '[data-role="input"] .lz-card') > page.evaluate(
        radius, '[data-kind="op"] .lz-card'
    )


def test_one_legend_says_what_the_chosen_colors_mean(page, show, screenshots):
    stage = show("mlp")
    menu = shown(page.locator('select[data-action="color"]'))
    legend = page.locator(".lz-color-key")
    assert menu.input_value() == "peak"
    assert "linear" in legend.inner_text() and "held at the peak" in legend.inner_text()
    fill = "() => getComputedStyle(document.querySelector('[data-kind=\"module\"] .lz-tint')).fill"
    number = '[data-node][data-name="model.hidden"][data-phase="forward"] .lz-sub >> nth=-1'
    by_layer = page.evaluate(fill)
    assert page.locator(number).text_content().endswith("at peak")
    menu.select_option("memory")
    assert page.locator(number).text_content().endswith("allocated"), "the number is what was chosen"
    menu.select_option("dtype")
    assert "float32" in legend.inner_text() and page.evaluate(fill) != by_layer
    menu.select_option("module")
    names = legend.locator(".lz-entry").all_inner_texts()
    assert {"hidden", "head"} <= {name.strip() for name in names}
    same = page.evaluate(
        """() => [...document.querySelectorAll('[data-name="model.hidden"]')]
          .map((box) => getComputedStyle(box.querySelector('.lz-tint')).fill)"""
    )
    assert len(same) >= 2 and len(set(same)) == 1, "a module has one color in every lane"
    menu.select_option("flops")
    stage.settle()
    assert legend.inner_text().split("\n")[-2:] == ["606 kFLOP", "linear"], "2 x 32 x (64 x 128 + 128 x 10)"
    menu.select_option("time")
    stage.settle()
    assert re.search(r"when the graph runs|\d [µm]s", legend.inner_text()), (
        "measured, or projected where rates are known"
    )
    stage.page.locator(".lazyviz").screenshot(path=screenshots / "graph-colors.png")


def test_an_annotation_colors_and_labels_boxes_at_once_and_can_be_chosen_and_taken_away(page, show):
    graph, (model, *keep) = pictures.mlp()
    stage = show("mlp", graph)
    card = page.locator('[data-name="model.hidden"][data-phase="forward"]')
    number, legend = card.locator(".lz-sub").last, page.locator(".lz-color-key")
    fill = "(css) => getComputedStyle(document.querySelector(css)).fill"
    tint = '[data-name="model.hidden"] .lz-tint'
    by_layer = page.evaluate(fill, tint)
    graph.annotate("<i>norm</i>", {model.hidden: 0.75, "model.head": -0.25})
    stage.settle()
    assert number.text_content().endswith("0.75 <i>norm</i>"), "shown at once, and as text"
    assert legend.inner_text().split() == ["<i>norm</i>", "-0.75", "0", "0.75", "linear"]
    assert page.evaluate(fill, tint) != by_layer
    menu = shown(page.locator('select[data-action="color"]'))
    assert menu.input_value() == "note:<i>norm</i>"
    assert menu.locator("optgroup option").all_inner_texts() == ["<i>norm</i>"]
    menu.focus()
    page.keyboard.press("ArrowUp")
    assert menu.input_value() == "module", "chosen by keys"
    menu.select_option("peak")
    assert number.text_content().endswith("at peak") and page.evaluate(fill, tint) == by_layer
    menu.select_option("note:<i>norm</i>")
    assert number.text_content().endswith("norm</i>")
    graph.annotate("<i>norm</i>", None)
    stage.settle()
    assert number.text_content().endswith("at peak") and page.evaluate(fill, tint) == by_layer
    assert menu.input_value() == "peak" and not menu.locator("optgroup").count()
    del keep


def test_after_a_run_boxes_are_colored_by_time(page):
    graph, keep = pictures.mlp()
    with Stage(page, graph) as stage:
        shown(page.locator('select[data-action="color"]')).select_option("time")
        stage.click('button[data-action="evaluate"]')
        assert "s" in page.locator(".lz-color-key").inner_text()
        assert page.locator(".lz-color-key .lz-ticks").count() == 1
        assert page.locator('[data-kind="op"][data-state="done"]').count() > 0
    del keep


PLACES = """() => Object.fromEntries([...document.querySelectorAll('[data-node], [data-lane]')].map((e) => {
  const { x, y } = e.querySelector('.lz-frame, .lz-card:not(.lz-behind)').getBoundingClientRect();
  return [e.dataset.node ?? `lane ${e.dataset.lane} ${x}`, [x, y, e.getAttribute('aria-expanded')]];
}))"""


@pytest.mark.parametrize("name", ["gpt2", "unet", "gan"])
def test_opening_boxes_moves_neither_their_corners_nor_lanes(page, show, name):
    stage = show(name, width=1400)
    opened: set[str] = set()
    rails = page.locator("[data-lane][data-node]").evaluate_all("all => all.map((e) => e.dataset.node)")
    for _ in range(12):
        before = page.evaluate(PLACES)
        closed = [id for id, place in before.items() if place[2] == "false" and id not in {*opened, *rails}]
        if not closed:
            break
        id = closed[len(opened) % len(closed)]
        opened.add(id)
        page.locator(f'[data-node="{id}"]').dispatch_event("click")
        stage.settle()
        after = page.evaluate(PLACES)
        assert after[id][2] == "true"
        assert after[id][:2] == pytest.approx(before[id][:2], abs=0.1), f"{id} has moved"
        lanes = {name for name in before if name.startswith("lane ")}
        assert lanes <= set(after), "lanes are named by where they begin"
    assert len(opened) > 5
    if name == "gpt2":
        assert focused(page) in opened, "the focus stays with the box"


@pytest.mark.parametrize("width", [700, 860, 900])
def test_where_lanes_have_no_room_the_optimizer_is_a_rail_that_opens(page, show, width):
    stage = show("gpt2", width=width)
    rail = page.locator('[data-lane="optimizer"]')
    view = page.locator(".lz-graph").bounding_box()

    def ends() -> list[float]:
        boxes = [page.locator(f'[data-lane="{lane}"]').bounding_box() for lane in ("forward", "backward")]
        return [round(boxes[0]["width"]), round(boxes[1]["width"]), round(boxes[1]["x"] - boxes[0]["x"])]

    for lane in ("forward", "backward", "optimizer"):
        box = page.locator(f'[data-lane="{lane}"]').bounding_box()
        assert box["x"] >= view["x"] and box["x"] + box["width"] <= view["x"] + view["width"], lane
    assert re.search(
        r"^Optimizer ?1,628 ops · 1\.21 GiB at peak$", rail.locator(".lz-lane-title").text_content()
    )
    assert page.locator(".lz-flag-text", has_text="Peak").count() == 2, "in the chart and at the rail"
    assert page.evaluate(FAULTS) == []
    before = ends()
    rail.click(position={"x": 20, "y": 60})
    stage.settle()
    assert rail.get_attribute("aria-expanded") == "true"
    card = page.locator('[data-node][data-phase="optimizer"][data-kind="module"]').first
    box = card.bounding_box()
    assert view["x"] <= box["x"] and box["x"] + box["width"] <= view["x"] + view["width"], (
        "it comes into view"
    )
    assert ends() == before, "no lane moves"
    card.click()
    stage.settle()
    press(stage, "Escape", "Escape")
    assert rail.get_attribute("aria-expanded") == "false"
    assert focused(page) == rail.get_attribute("data-node"), "the focus goes to the rail"
    press(stage, "Enter")
    assert rail.get_attribute("aria-expanded") == "true"
    stage.click('[data-action="collapse-all"]')
    assert rail.get_attribute("aria-expanded") == "false"


def test_a_lane_has_room_where_the_window_is_wide_and_a_hit_in_a_rail_opens_it(page, show):
    stage = show("gpt2", width=900)
    search = page.locator('input[data-action="search"]')
    search.focus()
    search.fill("optimizer.step()")
    stage.settle()
    press(stage, "Enter")
    rail = page.locator('[data-lane="optimizer"]')
    assert rail.get_attribute("aria-expanded") == "true"
    page.set_viewport_size({"width": 1516, "height": 1000})
    page.evaluate("document.querySelector('.stage').style.width = '1500px'")
    stage.settle()
    assert rail.get_attribute("role") is None, "a lane is nothing to click on"


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
@pytest.mark.parametrize("width", [900, 1500])
def test_a_module_and_its_backward_part_have_one_height(page, show, name, width):
    stage = show(name, width=width)

    def heights() -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for phase in ("forward", "backward"):
            for card in page.locator(f'[data-kind="module"][data-phase="{phase}"] > .lz-card').all():
                label = card.locator("..").get_attribute("data-op")
                box = card.bounding_box()
                if label and box:
                    found.setdefault(label, []).append(box["y"] + box["height"] / 2)
        return found

    pairs = {label: ys for label, ys in heights().items() if len(ys) == 2}
    level = [label for label, (one, other) in pairs.items() if abs(one - other) < 1]
    # Of GPT-2's embeddings one is beside its part: they are in the other order on the way back.
    assert len(level) >= len(pairs) - (name == "gpt2") > 2, pairs
    stage.open(f'{CLOSED}[data-phase="forward"][data-kind="module"] >> nth=1')
    assert {label: ys[-1] for label, ys in heights().items() if len(ys) == 2}.items() <= {
        label: ys[-1] for label, ys in pairs.items()
    }.items(), "what is opened moves no row of the other lane"


def test_lines_go_on_to_the_ops_in_open_groups(page, show):
    show("mlp", width=1400)
    frames = page.locator('[data-node][aria-expanded="true"]').evaluate_all(
        "all => all.map((e) => e.dataset.node)"
    )
    ends = page.locator(".lz-edge").evaluate_all("all => all.map((e) => [e.dataset.from, e.dataset.to])")
    assert frames and ends
    assert not {end for pair in ends for end in pair} & set(frames)


def test_nothing_moves_for_those_who_want_no_motion(browser):
    page = browser.new_page(reduced_motion="reduce")
    graph, keep = pictures.resnet()
    with Stage(page, graph) as stage:
        open_before = page.locator('[aria-expanded="true"]').count()
        page.evaluate(
            """() => {
              window.animations = 0;
              const animate = Element.prototype.animate;
              Element.prototype.animate = function (...all) {
                window.animations++;
                return animate.apply(this, all);
              };
            }"""
        )
        stage.open(f'{CLOSED}[data-phase="forward"]')
        assert page.locator('[aria-expanded="true"]').count() == open_before + 1
        assert page.evaluate("window.animations") == 0
    page.close()
    del keep


def test_keys_go_along_the_edges_open_close_and_search(page, show):
    stage = show("mlp")
    first = page.locator('.lz-graph [tabindex="0"]')
    assert first.count() == 1, "the graph is one stop of the Tab key"
    first.focus()
    start = focused(page)
    press(stage, "ArrowDown", "ArrowDown")  # the model's frame, and in there its first layer
    module = focused(page)
    assert module != start
    assert page.locator(f'[data-node="{module}"]').get_attribute("data-kind") == "module"
    press(stage, "Enter")
    page.wait_for_selector(f'[data-node="{module}"][aria-expanded="true"]')  # its content may be asked for
    press(stage, "ArrowDown")
    inside = focused(page)
    assert inside != module
    press(stage, "ArrowUp")
    assert focused(page) == module, "up leads out of the group"
    press(stage, "ArrowDown", "Escape")
    assert page.locator(f'[data-node="{module}"]').get_attribute("aria-expanded") == "false"
    assert focused(page) == module, "the group that has closed has the focus"
    press(stage, "ArrowRight")
    assert page.locator(f'[data-node="{focused(page)}"]').get_attribute("data-phase") in (
        "forward",
        "backward",
    )
    box = page.locator(f'[data-node="{focused(page)}"]').bounding_box()
    view = page.locator(".lz-graph").bounding_box()
    assert view["y"] - 1 <= box["y"] and box["y"] + box["height"] <= view["y"] + view["height"] + 8
    assert page.locator('.lz-graph [tabindex="0"]').count() == 1
    press(stage, "/")
    assert page.evaluate("document.activeElement.dataset.action") == "search"


def test_keys_pressed_before_the_deferred_part_has_arrived_all_count(page, show):
    def reached(at_once: bool) -> str:
        page.goto("about:blank")
        stage = show("mlp")
        page.locator('.lz-graph [tabindex="0"]').evaluate(
            """(box, atOnce) => {
              box.focus();
              const press = () => document.activeElement.dispatchEvent(
                new KeyboardEvent("keydown", { key: "ArrowDown", bubbles: true }));
              if (atOnce) { press(); press(); }
            }""",
            at_once,
        )
        stage.settle()
        if not at_once:
            press(stage, "ArrowDown", "ArrowDown")
        return focused(page)

    assert reached(at_once=True) == reached(at_once=False)


def test_breadcrumbs_lead_back_to_the_groups_around(page, show):
    stage = show("resnet", width=1200)
    stage.click(f'{CLOSED}[data-kind="module"][data-phase="forward"]')
    page.locator(".lz-open [data-node], [data-node][data-kind='op']").first.focus()
    press(stage, "Enter")
    crumbs = page.locator(".lz-crumbs button")
    names = crumbs.all_inner_texts()
    assert names[0] == "Graph" and len(names) >= 3
    crumbs.nth(len(names) - 2).click()
    stage.settle()
    assert page.locator(".lz-crumbs button").count() == len(names) - 1
    assert page.locator("[data-node].lz-selected, [data-lane]").count() > 0


def test_the_small_map_is_there_when_not_all_is_seen_and_moves_the_view(page, show):
    stage = show("resnet", width=1000)
    minimap = page.locator(".lz-minimap")
    assert minimap.count() == 0, "the first picture is without it"
    stage.click('[data-action="fit"]')
    assert not minimap.is_visible()
    for _ in range(5):
        page.get_by_label("Zoom in").click()
    assert minimap.is_visible()
    before = page.locator(".lz-content").get_attribute("transform")
    box = minimap.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 5)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] - 8, steps=4)
    page.mouse.up()
    assert page.locator(".lz-content").get_attribute("transform") != before
    assert minimap.get_attribute("aria-hidden") == "true" and minimap.get_attribute("tabindex") is None


def test_the_selected_box_lights_up_what_it_reads_what_reads_it_what_is_saved_and_its_gradient(
    page, show, screenshots
):
    stage = show("mlp", width=1400)
    page.locator('[data-node][data-phase="forward"][data-op="aten.relu.default"]').click()
    stage.settle()
    kinds = {"producer", "consumer", "saved", "gradient"}
    drawn = {kind for kind in kinds if page.locator(f".lz-relations .lz-relation-{kind} rect").count()}
    assert drawn == kinds
    looks = page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll('.lz-relation rect')].map((ring) => {
          const style = getComputedStyle(ring);
          return [ring.parentNode.getAttribute('class'), style.stroke + style.strokeDasharray];
        }))"""
    )
    assert len(set(looks.values())) == len(looks), "each kind has a look of its own"
    legend = page.locator(".lz-color-key").inner_text()
    assert all(word in legend for word in ("producers", "consumers", "saved activations", "gradient partner"))
    page.locator(".lazyviz").screenshot(path=screenshots / "graph-relations.png")
    page.locator(".lz-graph").click(position={"x": 4, "y": 4})
    stage.settle()
    assert page.locator(".lz-relations .lz-relation").count() == 0


def test_the_data_along_an_edge_is_shown_on_hover(page, show):
    stage = show("mlp")
    page.locator(".lz-graph").hover(position={"x": 2, "y": 2})
    stage.settle()
    told = page.locator(".lz-told")
    edge = page.locator(".lz-edge").first
    edge.dispatch_event("pointerover")
    assert "→" in told.inner_text() and "×" in told.inner_text()


def test_the_foot_describes_what_is_pointed_at_or_has_the_focus_only_as_long(page, show):
    stage = show("gpt2", width=1500)
    told, toolbar = page.locator(".lz-told"), page.locator('[data-part="toolbar"]')
    page.locator('[data-op="drop"][data-phase="forward"]').hover()
    stage.settle()
    assert "drop" in told.inner_text()
    toolbar.hover()
    assert told.inner_text() == ""
    page.keyboard.press("Tab")
    page.locator('[data-op="drop"][data-phase="forward"]').focus()
    assert "drop" in told.inner_text()
    page.locator('[data-op="wte"][data-phase="forward"]').hover()
    toolbar.hover()
    assert "drop" in told.inner_text(), "the box with the keyboard's focus again"
    page.locator('[data-action="fit"]').first.focus()
    assert told.inner_text() == ""


def test_a_box_that_is_pointed_at_shows_when_it_exists_only_as_long(page, show):
    stage = show("gpt2", width=1500)
    lives = page.locator(".lz-lifetime")
    card = page.locator('[data-op="drop"][data-phase="forward"]')
    card.hover()
    stage.settle()
    assert lives.count() == 1
    assert page.locator(".lz-edge.lz-relation-producer, .lz-edge.lz-relation-consumer").count() >= 2
    first = lives.bounding_box()
    page.locator('[data-op="wpe"][data-phase="forward"]').hover()
    stage.settle()
    assert lives.bounding_box() != first, "the next one's takes its place"
    page.mouse.move(5, 5)
    stage.settle()
    assert lives.count() == 0
    assert page.locator(".lz-edge.lz-relation-producer, .lz-edge.lz-relation-consumer").count() == 0
    card.click()
    stage.settle()
    selected = lives.bounding_box()
    page.locator('[data-op="wpe"][data-phase="forward"]').hover()
    stage.settle()
    assert lives.bounding_box() != selected
    page.mouse.move(5, 5)
    stage.settle()
    assert lives.bounding_box() == selected, "then again that of the selected one"


def test_who_passes_over_boxes_asks_for_nothing(page, show):
    stage = show("gpt2", width=1500)
    page.locator('[data-op="drop"][data-phase="forward"]').hover()
    stage.settle()
    told = len([each for each in stage.messages if each.get("kind") == "life"])
    boxes = [each.bounding_box() for each in page.locator('[data-kind="op"][data-phase="forward"]').all()[:5]]
    page.evaluate(
        """(places) => {
          const graph = document.querySelector('.lz-graph');
          for (const [x, y] of places) {
            const under = document.elementFromPoint(x, y);
            under?.dispatchEvent(new PointerEvent('pointerover', { bubbles: true }));
          }
          graph.dispatchEvent(new PointerEvent('pointerleave'));
        }""",
        [[box["x"] + 5, box["y"] + 5] for box in boxes if box],
    )
    stage.settle()
    assert len([each for each in stage.messages if each.get("kind") == "life"]) == told
    assert page.locator(".lz-lifetime").count() == 0


def test_dragging_pans_and_does_not_select(page, show):
    stage = show("resnet", width=1000)
    box = page.locator('[data-node][data-kind="module"]').first.bounding_box()
    page.mouse.move(box["x"] + 20, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 20, box["y"] - 40, steps=5)
    page.mouse.up()
    stage.settle()
    moved = page.locator('[data-node][data-kind="module"]').first.bounding_box()
    assert abs(box["y"] - 60 - moved["y"]) < 2
    assert page.locator(".lz-selected").count() == 0


def test_boxes_and_edges_tell_the_sizes_of_the_batch_that_is_planned(page, show):
    stage = show("mlp", width=1400)
    pill = page.locator('[data-kind="input"][data-op="x"] .lz-sub')
    hidden = page.locator('[data-op="hidden"][data-phase="forward"]')
    edges = page.locator(".lz-edge > title")
    hidden.click()
    stage.settle()
    before = pill.text_content(), sorted(edges.all_text_contents())
    assert before[0].endswith("8.00 KiB") and "B×128 · 16.0 KiB" in before[1]
    results = page.locator('[data-panel="details"]')
    assert "16.0 KiB" in results.inner_text()
    slider = page.locator('input[data-action="batch-size"]')
    slider.focus()
    press(stage, "PageUp")
    assert slider.input_value() == "64"
    assert pill.text_content().endswith("16.0 KiB")
    after = sorted(edges.all_text_contents())
    assert "B×128 · 32.0 KiB" in after and "B×128 · 16.0 KiB" not in after
    assert [text for text in after if text[0] != "B"] == [text for text in before[1] if text[0] != "B"]
    assert "B×128 · 32.0 KiB" in page.locator(".lz-edge-label").all_text_contents()
    assert "32.0 KiB" in results.inner_text(), "details follow, too"
    assert "as recorded" not in page.locator(".lazyviz").inner_text()
    shown(page.locator('[data-action="batch-recorded"]')).click()
    stage.settle()
    assert (pill.text_content(), sorted(edges.all_text_contents())) == before


def test_equal_sync_points_are_one_line_of_a_list_that_the_badge_opens(page, show):
    show("syncs", width=1100)
    items = page.locator('[data-panel="syncs"] li')
    assert not page.locator('[data-panel="syncs"]').is_visible()
    page.locator('[data-action="findings"]').click()
    items.nth(2).wait_for()
    assert items.count() == 3
    assert items.nth(1).is_visible()
    assert "item, pictures.py:" in items.nth(1).text_content()
    items.nth(1).locator("button").click()
    page.locator('.lz-selected[data-kind="sync"]').wait_for()


@pytest.mark.parametrize("width", [700, 900, 1100, 1200, 1320, 1500])
def test_what_the_lines_at_a_selected_box_mean_is_in_sight_at_any_width(browser, width):
    graph, keep = pictures.mlp()
    page = browser.new_page(viewport={"width": width + 16, "height": 900})
    with Stage(page, graph, width=width) as stage:
        stage.click('[data-name="model.hidden"][data-phase="forward"]')
        key = page.locator(".lz-color-key")
        room = key.bounding_box()
        entries = [entry for entry in key.locator(".lz-entry").all() if entry.is_visible()]
        assert len(entries) >= 3
        for entry in entries:
            box = entry.bounding_box()
            assert box["x"] + box["width"] <= room["x"] + room["width"] + 1, entry.inner_text()
    page.close()
    del keep


def test_labels_are_drawn_above_the_lines_of_relations(page, show):
    graph, _keep = pictures.mlp()
    show("mlp", graph)
    assert page.evaluate(
        """() => {
          const line = document.querySelector(".lz-relations");
          const words = [...document.querySelectorAll(".lz-kept-text, .lz-edge-label")];
          const painted = (each) => line.compareDocumentPosition(each) & Node.DOCUMENT_POSITION_FOLLOWING;
          return words.length > 2 && words.every(painted);
        }"""
    ), "words are painted after the lines"


def test_a_click_selects_and_two_clicks_or_one_on_the_arrow_open_and_close(page, show):
    stage = show("gpt2", width=900)  # the drawer rises at the first click, and what is drawn moves
    box = page.locator('[data-node][data-kind="module"][data-name*=".h."][data-phase="forward"]').first
    id = box.get_attribute("data-node")
    box = page.locator(f'[data-node="{id}"]')
    card = box.locator(".lz-card").last

    def state():
        stage.settle()
        return box.get_attribute("aria-expanded"), "lz-selected" in box.get_attribute("class")

    card.click(position={"x": 60, "y": 30})
    assert state() == ("false", True)
    assert page.locator('[data-panel="details"] h3').is_visible()
    card.click(position={"x": 60, "y": 30})
    assert state() == ("false", False), "a second one, later, takes the selection back"
    card.dblclick(position={"x": 60, "y": 30})
    assert state() == ("true", True)
    frame = box.locator(".lz-frame").evaluate("e => e.getBoundingClientRect().toJSON()")
    page.mouse.dblclick(frame["right"] - 12, frame["top"] + 10)
    assert state()[0] == "false"
    box.locator(".lz-arrow").click()
    assert state()[0] == "true"
    box.locator(".lz-arrow").dblclick()
    assert state()[0] == "false", "once for the arrow"
    box.dispatch_event("click")
    assert state()[0] == "true", "an assistive tool has only one way to press"


def test_marked_sizes_stand_clear_of_the_signs_beside_them(page, show):
    show("shapes", width=1300)
    gaps = page.locator(".lz-edge-shape").evaluate_all("""all => all.flatMap((text) => {
      const parts = [...text.querySelectorAll("tspan")].map((part) => [part, part.getBoundingClientRect()]);
      return parts.slice(1).flatMap(([part, box], n) => {
        const marked = [part, parts[n][0]].find((each) => each.classList.contains("lz-clash"));
        const scale = text.getScreenCTM().a;
        const outline = marked && parseFloat(getComputedStyle(marked).strokeWidth) / 2;
        return marked ? [(box.left - parts[n][1].right) / scale - outline] : [];
      });
    })""")
    assert gaps and min(gaps) >= 0


def test_the_flag_of_the_peak_stands_beside_words_that_are_as_wide_as_its_box(page, show):
    stages = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.GroupNorm(4, 16))
    x = torch.randn(8, 3, 64, 64)
    with lazyviz.lazy("cpu:1GiB") as graph:
        y = torch.nn.functional.gelu(stages(x))
    show("", graph, width=1300)
    words = page.locator(".lz-edge-label").evaluate_all(
        "all => all.map((e) => e.getBoundingClientRect().toJSON())"
    )
    flag = page.locator(".lz-peak-flag .lz-flag").evaluate("e => e.getBoundingClientRect().toJSON()")
    assert words
    for each in words:
        beside = each["left"] >= flag["right"] or each["right"] <= flag["left"]
        assert beside or each["top"] >= flag["bottom"] or each["bottom"] <= flag["top"]
    del y
