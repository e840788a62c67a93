"""Comparison of two plans."""

import base64
import linecache
import re
import xml.etree.ElementTree as ET

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.view import colors
from lazyviz.view.comparison.side_by_side_pictures import differences
from lazyviz.view.render.box_bars import GREW, SHRANK
from lazyviz.view.scene.scene import Scene


def recorded(width):
    net = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4))
    x = torch.ones(8, 16)
    with lazyviz.lazy(batch=[x]) as graph:
        net(x).sum().backward()
    return graph


def test_two_graphs_differ_by_what_grew():
    small, large = recorded(32), recorded(64)
    comparison = lazyviz.compare(small, large)
    assert comparison.figures["peak"] == (small.plan().peak_bytes, large.plan().peak_bytes)
    assert comparison.figures["ops"] == (len(small.nodes), len(large.nodes))
    for side, graph in enumerate((small, large)):
        alive = graph.plan().alive_at_peak
        assert sum(pair[side] for pair in comparison.by_module.values()) == sum(a.nbytes for a in alive)
        of = {category: size for category, size in graph.plan().by_category.items() if size}
        assert {name: pair[side] for name, pair in comparison.by_category.items() if pair[side]} == of
    before, after = comparison.by_category["parameters"]
    assert after > before
    text = comparison.table().text()
    assert "parameters" in text
    assert small.pending == len(small.nodes), "nothing ran"


def test_two_batch_sizes_and_two_devices_of_one_graph():
    graph = recorded(32)
    larger = lazyviz.compare(graph.plan(), graph.plan(batch_size=16), names=("8", "16"))
    assert larger.figures["peak"][1] > larger.figures["peak"][0]
    gpus = lazyviz.compare(graph.plan(device="RTX-3060"), graph.plan(device="A100-40GB"))
    assert "reserved" in gpus.figures


def test_the_same_plan_twice_differs_in_nothing():
    plan = recorded(32).plan()
    comparison = lazyviz.compare(plan, plan)
    assert all(before == after for before, after in comparison.by_line.values())
    assert {row[2] for row in comparison.table().rows} == {"the same"}


def test_the_page_has_both_curves_and_escapes_names():
    graph = recorded(32)
    names = ("<large>", "half & small")
    page = lazyviz.compare(graph.plan(batch_size=16), graph, names=names)._repr_html_()
    assert "<large>" not in page
    drawing = page[page.index("<svg") : page.index("</svg>") + 6]
    root = ET.fromstring(drawing)
    lines = [each for each in root if each.tag == "polyline"]
    assert len(lines) == 2
    tops = [min(float(point.split(",")[1]) for point in line.get("points").split()) for line in lines]
    assert tops[0] == 10.0 < tops[1], "the higher peak touches the top, the other stays below"
    texts = [each for each in root if each.tag == "text"]
    words = " ".join("".join(each.itertext()) for each in texts)
    assert "<large>" in words
    assert "half & small" in words
    assert root.get("fill") == "currentColor" and not any(each.get("fill") for each in texts)
    for line in lines:  # on a white page and on JupyterLab's dark one
        assert all(contrast(line.get("stroke"), page) >= 3 for page in ("#ffffff", "#212121"))


def contrast(one: str, other: str) -> float:
    """The contrast of WCAG 2 of two colors like ``#1b5fcc``."""

    def light(color: str) -> float:
        parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


def test_modules_are_named_by_the_variable_of_the_one_model_of_both():
    rows = [row[3] for row in lazyviz.compare(recorded(32), recorded(64)).table().rows]
    assert "net.0" in rows and "0" not in rows
    other = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    with lazyviz.lazy() as graph:
        other(torch.ones(8, 16)).sum().backward()
    rows = [row[3] for row in lazyviz.compare(recorded(32), graph).table().rows]
    assert "0" in rows, "what the variable is called makes no difference of two models"


def pictures_of(page):
    return [
        base64.b64decode(each).decode()
        for each in re.findall(r'<img src="data:image/svg\+xml;base64,([^"]+)"', page)
    ]


def test_both_graphs_are_drawn_side_by_side_with_what_grew_in_color():
    small, large = recorded(32), recorded(4096)
    comparison = lazyviz.compare(small, large, names=("a <b>", "after"))
    page = comparison._repr_html_()
    first, second = pictures_of(page)
    for text in (first, second):
        ET.fromstring(text)
        assert GREW in text and " → " in text and "at peak" in text
    assert "a &lt;b&gt;, peak" in first and "after, peak" in second
    assert "<b>" not in page
    alike = pictures_of(lazyviz.compare(small, small)._repr_html_())
    assert len(alike) == 2 and not any(GREW in text or SHRANK in text for text in alike)


def test_the_pictures_have_the_theme_that_is_chosen_for_notebooks():
    small, large = recorded(32), recorded(64)
    with lazyviz.options(theme="dark"):
        dark = pictures_of(lazyviz.compare(small, large)._repr_html_())
        dark += pictures_of(lazyviz.compare(large, small)._repr_html_())
    light = pictures_of(lazyviz.compare(small, large)._repr_html_())
    assert all('fill="#ffffff"' in text for text in light)
    assert not any('fill="#ffffff"' in text for text in dark)


def test_the_pictures_have_the_theme_of_their_page_where_none_is_chosen():
    page = lazyviz.compare(recorded(32), recorded(64))._repr_html_()
    assert '[data-jp-theme-light="false"] .lazyviz-compared img' in page
    for text in pictures_of(page):
        style = next(element for element in ET.fromstring(text) if element.tag.endswith("style")).text
        assert style.startswith("@media (prefers-color-scheme:dark){")
        for kind, color in re.findall(r' (fill|stroke)="(#[0-9a-f]{6})"', text):
            assert f'[{kind}="{color}"]{{{kind}:{colors.DARK[color]}}}' in style
    with lazyviz.options(theme="light"):
        page = lazyviz.compare(recorded(32), recorded(64))._repr_html_()
    assert "<style>" not in page and "prefers-color-scheme" not in "".join(pictures_of(page))


def test_two_plans_of_one_graph_are_drawn_too_and_what_shrank_has_another_color():
    graph = recorded(4096)
    first, second = pictures_of(lazyviz.compare(graph.plan(batch_size=512), graph)._repr_html_())
    assert SHRANK in first and SHRANK in second
    assert graph.pending == len(graph.nodes), "nothing ran"


def test_large_growth_is_a_factor_and_the_peak_of_eager_pytorch_is_shown_where_it_is_another():
    graph = recorded(32)
    comparison = lazyviz.compare(graph.plan(), graph.plan(device="A100-40GB"))
    needed = comparison.figures["needed"]
    rows = {row[3]: row[2] for row in comparison.table().rows}
    assert f"(× {needed[1] / needed[0]:,.0f})" in rows["needed"]
    eager = graph.plan().eager_peak_bytes
    assert comparison.figures.get("peak in eager PyTorch", comparison.figures["peak"])[0] == eager
    assert "%" in {row[3]: row[2] for row in lazyviz.compare(recorded(32), recorded(64)).table().rows}["peak"]


def in_cell(number, code):
    """The graph of ``code``, run as a notebook cell."""
    name = f"<ipython-input-{number}-{abs(hash(code))}>"
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    scope = {"torch": torch, "nn": nn}
    with lazyviz.lazy() as graph:
        exec(compile(code, name, "exec"), scope)
    return graph, scope


CELL = """net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
x = torch.ones(256, 16)
y = net(x)
y.sum().backward()
"""


def test_lines_of_a_cell_that_was_edited_and_run_again_are_the_same_lines():
    before, keep = in_cell(2, CELL)
    after, also = in_cell(3, "import math\n" + CELL.replace("64", "256"))
    sizes = lazyviz.compare(before, after).by_line
    assert set(sizes) <= {
        "cell [2], line 1 → cell [3], line 2: net = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linea…",
        "cell [2], line 2 → cell [3], line 3: x = torch.ones(256, 16)",
        "cell [2], line 3 → cell [3], line 4: y = net(x)",
        "cell [2], line 4 → cell [3], line 5: y.sum().backward()",
    }
    forward = sizes["cell [2], line 3 → cell [3], line 4: y = net(x)"]
    assert 0 < forward[0] < forward[1]
    total = [sum(pair[side] for pair in sizes.values()) for side in (0, 1)]
    alive = [sum(each.nbytes for each in graph.plan().alive_at_peak) for graph in (before, after)]
    assert total == alive
    del keep, also


def test_lines_that_only_one_cell_has_stay_apart_from_the_others():
    before, keep = in_cell(2, CELL)
    after, also = in_cell(3, CELL.replace("y = net(x)", "z = x.repeat(8, 8)\ndel z\ny = net(x)"))
    names = set(lazyviz.compare(before, after).by_line)
    assert "cell [2], line 3 → cell [3], line 5: y = net(x)" in names
    assert not any("z = x" in name and "→" in name for name in names)
    del keep, also


def test_what_is_neither_is_refused():
    with pytest.raises(TypeError, match="not int"):
        lazyviz.compare(recorded(8), 3)


def test_names_tell_what_is_compared_and_devices_differ_in_memory_and_time():
    graph = recorded(1 << 18)
    gpus = lazyviz.compare(graph.plan(device="A100-40GB"), graph.plan(device="RTX-3060"))
    assert gpus.names == ("A100-40GB", "RTX-3060")
    rows = {row[3]: row for row in gpus.table().rows}
    assert rows["memory of the device"][:2] == ("40.0 GiB", "12.0 GiB")
    assert rows["projected time"][0] != rows["projected time"][1] and "%" in rows["projected time"][2]
    batches = lazyviz.compare(graph.plan(), graph.plan(batch_size=64))
    assert batches.names == ("batch 8", "batch 64")
    gpu = graph.plan(device="RTX-3060", batch_size=64)
    assert lazyviz.compare(graph.plan(), gpu).names == ("cpu, batch 8", "RTX-3060, batch 64")
    assert lazyviz.compare(graph, recorded(64)).names == ("before", "after")


def test_its_tables_print_as_text_and_display_as_html():
    comparison = lazyviz.compare(recorded(32), recorded(64))
    for table in (comparison.table(), comparison.lines()):
        assert str(table) == table.text() and table._repr_html_() == table.html()


class Layers(nn.Module):
    def __init__(self, changed=None):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(64, 64) if at == changed else nn.Sequential(nn.Linear(64, 64), nn.GELU())
            for at in range(5)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_layers_that_one_graph_folds_and_the_other_does_not_are_compared_with_one_another():
    plans = []
    for changed in (None, 2):
        net, x = Layers(changed), torch.ones(256, 64)
        with lazyviz.lazy() as graph:
            net(x).sum().backward()
        plans.append(graph.plan())
    before, after = (Scene(plan.ir, plan) for plan in plans)
    fold = next(box for box in before.hierarchy.boxes.values() if box.repeats == 5)
    own, other, alone = differences(before, after)[fold.id]
    assert not alone
    layers = [
        box for box in after.hierarchy.boxes.values() if box.kind == "module" and box.phase == "forward"
    ]
    held = sum(
        sum(after.held().get(box, {}).values()) for box in layers if re.search(r"layers\.\d$", box.name)
    )
    assert sum(size for _, size in other) == held < sum(size for _, size in own)


def test_what_grew_is_legible_in_the_rows_of_ops():
    def run(rows):
        x = torch.ones(rows, 1024, requires_grad=True)
        with lazyviz.lazy() as graph:
            y = (x * x).relu().exp()
            y.sum().backward()
        return graph

    comparison = lazyviz.compare(run(96), run(384))
    images = re.findall(r"base64,([\w+/=]+)", comparison._repr_html_())
    for image in images:
        texts = [each.text for each in ET.fromstring(base64.b64decode(image)).iter() if each.text]
        pairs = [text for text in texts if "→" in text]
        assert pairs and not [text for text in pairs if "…" in text]


def test_lines_of_two_programs_are_not_taken_for_edits_of_one_another(tmp_path):
    def run(name, code):
        file = tmp_path / name
        file.write_text(code)
        place = {"torch": torch, "x": torch.ones(64, 64, requires_grad=True)}
        with lazyviz.lazy() as graph:
            exec(compile(code, str(file), "exec"), place)
        return graph, place

    one, keep = run("one.py", "y = x.exp()\ny.sum().backward()\n")
    other, too = run(
        "other.py", "hidden = torch.nn.functional.softplus(x, beta=2)\nhidden.sum().backward()\n"
    )
    names = lazyviz.compare(one, other).by_line
    assert not [name for name in names if "→" in name and "softplus" in name]
    assert [name for name in names if name.startswith("one.py:2") and "other.py:2" in name], names
    del keep, too
