"""The static picture, the text form, DOT, and saved files."""

from __future__ import annotations

import base64
import dataclasses
import re
import shutil
import sys
import types
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import graphviz
import pytest
import torch
from torch import nn
from wcwidth import wcswidth

import lazyviz
from lazyviz.graph.ir import Graph
from lazyviz.plan.make_plan import make_plan
from lazyviz.plan.node_formatting import line_text
from lazyviz.view.export import save as export_save
from lazyviz.view.export.save import save
from lazyviz.view.render import pdf_and_png
from lazyviz.view.render.dot import to_dot
from lazyviz.view.render.svg import WIDTH, render_svg, static_bundle
from lazyviz.view.render.text import render_text
from lazyviz.view.scene.hierarchy import build_hierarchy
from lazyviz.view.scene.memory_chart import memory_json, verdict
from lazyviz.view.scene.scene import Scene
from lazyviz.view.widget.source_view import Code

NASTY = '<script>alert("x")</script> & "quotes" \\n {a|b} \x00 ]]>'
SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_the_picture_is_one_self_contained_svg_with_lanes_chart_and_verdict(step, plan):
    svg = render_svg(step, plan, title="one step", state="pending")
    words = texts(svg)
    for expected in ("one step", "Forward ↓", "Backward ↑", "Optimizer", "h.0–2", "×3", "Projected memory"):
        assert expected in words
    assert any(word.startswith("Fits: needs") for word in words)
    assert any("parameters" in word for word in words)
    assert not re.search(r"<script|href|url\(|@import|<image|<foreignObject", svg)
    assert ElementTree.fromstring(svg).get("width") == f"{WIDTH:g}"


def test_nothing_in_the_picture_reaches_outside_of_it(step, plan):
    root = ElementTree.fromstring(render_svg(step, plan))
    height = float(root.get("height"))
    for rect in root.iter(f"{SVG}rect"):
        assert float(rect.get("x")) >= 0
        assert float(rect.get("y")) + float(rect.get("height")) <= height + 0.5


def test_names_from_the_program_are_escaped_everywhere(write):
    program = write.Program()
    x = program.outside(name=NASTY)
    program(write.aten.sin.default, [x], module=f"a{NASTY.replace('.', '')}", root=NASTY, text=NASTY)
    program.sync(cause=NASTY)
    graph = program.graph
    plan = make_plan(graph)
    svg = render_svg(graph, plan, title=NASTY)
    ElementTree.fromstring(svg)
    assert "<script" not in svg
    bundle = static_bundle(graph, plan, title=NASTY)
    assert "<script" not in bundle["text/html"]
    source = to_dot(graph).source
    assert '"quotes"' not in source.replace('\\"', "")


def test_the_bundle_is_an_image_with_an_id_and_a_text(step, plan):
    bundle = static_bundle(step, plan)
    assert set(bundle) == {"text/html", "text/plain"}
    found = re.fullmatch(
        r'<img class="lazyviz-static" id="(lazyviz-static-\w+)" alt="[^"]+" style="[^"]+" '
        r'src="data:image/svg\+xml;base64,([\w+/=]+)">',
        bundle["text/html"],
    )
    assert found
    ElementTree.fromstring(base64.b64decode(found[2]))
    assert static_bundle(step, plan)["text/html"] != bundle["text/html"]  # ids are unique


def test_a_graph_without_ops_says_so(step):
    graph = Graph()
    plan = make_plan(graph)
    assert any("Nothing was recorded" in word for word in texts(render_svg(graph, plan)))
    assert "Nothing was recorded" in render_text(graph, plan)


def test_a_plan_that_does_not_fit_shows_the_capacity_and_by_how_much(step, plan):
    small = dataclasses.replace(plan, capacity_bytes=plan.peak_bytes - 100, fits=False)
    assert verdict(small)[0] == "too-big"
    words = texts(render_svg(step, small))
    assert any(word.startswith("Too big by 100 B") for word in words)
    assert any(word.startswith("cpu: ") for word in words)
    unknown = dataclasses.replace(plan, capacity_bytes=None, fits=None)
    assert verdict(unknown)[0] == "unknown"


def test_what_was_measured_is_shown_once_there_is_a_report(step, plan):
    report = types.SimpleNamespace(ops_run=12, seconds=0.25, peak_bytes=2048)
    words = texts(render_svg(step, plan, state="done", report=report))
    assert any("evaluated · ran 12 ops in 0.25 s, measured peak 2.00 KiB" in word for word in words)


def test_sync_points_are_named_with_cause_and_line(write):
    program = write.Program()
    program(write.aten.sin.default, [program.outside()])
    program.sync("item", 9)
    plan = make_plan(program.graph)
    assert any(
        "item, cell_compilation.py:9: print" in word for word in texts(render_svg(program.graph, plan))
    )
    assert "sync point: item, cell_compilation.py:9 (ran 3 ops in 0.25 s): print(loss.item())" in render_text(
        program.graph, plan
    )


def test_equal_sync_points_are_one_line(write):
    program = write.Program()
    program(write.aten.sin.default, [program.outside()])
    for _ in range(300):
        program.sync("item", 4)
    program.sync("tolist", 5)
    plan = make_plan(program.graph)
    lines = [line for line in render_text(program.graph, plan).splitlines() if "sync point:" in line]
    assert lines == [
        "  sync point: item, cell_compilation.py:4, x 300 (ran 900 ops in 75 s): print(loss.item())",
        "  sync point: tolist, cell_compilation.py:5 (ran 3 ops in 0.25 s): print(loss.item())",
    ]
    drawn = [word for word in texts(render_svg(program.graph, plan)) if "sync point:" in word]
    assert len(drawn) == 2 and "x 300" in drawn[0]
    assert plan.explain().count("Sync point:") == 2
    (fact,) = [
        fact
        for fact in Code(program.graph).facts_json(plan)["lines"].values()
        if "x 300" in fact.get("sync", "")
    ]
    assert fact["sync"] == "item, x 300: ran 900 ops"


def test_a_loop_with_a_sync_point_in_each_pass_is_folded_like_one_without(write):
    program = write.Program()
    x = program.outside()
    for _ in range(20):
        y = program(write.aten.sin.default, [x])
        program(write.aten.cos.default, [y])
        program.sync("item", 4)
    hierarchy = build_hierarchy(program.graph)
    folds = [box for box in hierarchy.boxes.values() if box.repeats == 20]
    assert [box.syncs for box in folds] == [20]
    assert "20 sync points" in render_text(program.graph, make_plan(program.graph))


def test_the_text_names_ops_modules_peak_and_verdict(step, plan):
    text = render_text(step, plan, width=100)
    number = len(step.nodes)
    counted = rf"{number} ops recorded( \(\d+ of them (a view|views)\))?, {number} pending, no sync point"
    assert re.fullmatch(counted, text.splitlines()[0])
    assert "h.0–2 × 3" in text
    assert "Memory over the run, peak" in text
    assert "Alive at the peak:" in text
    assert text.splitlines()[-1].startswith("Fits: needs")


@pytest.mark.parametrize("width", [48, 80, 120])
def test_no_line_of_the_text_is_wider_than_asked_for(step, plan, width):
    assert max(map(len, render_text(step, plan, width=width).splitlines())) <= width


def test_the_chart_keeps_the_peak_when_it_leaves_positions_out(write):
    program = write.Program()
    for _ in range(60):
        write.training_step(program, 4)
    plan = make_plan(program.graph)
    memory = memory_json(Scene(program.graph, plan))
    assert len(memory["points"]["at"]) < len(plan.timeline)
    totals = [sum(sizes) for sizes in zip(*memory["points"]["bytes"], strict=True)]
    assert max(totals) == plan.peak_bytes


def test_dot_has_a_cluster_for_each_lane_and_module_and_a_node_for_each_op(step):
    dot = to_dot(step)
    assert isinstance(dot, graphviz.Digraph)
    assert "Forward" in dot.source
    assert dot.source.count("subgraph cluster_") >= 9
    for node in step.nodes:
        assert f"\tn{node.index} [" in dot.source


@pytest.mark.parametrize(
    ("name", "start"), [("a.svg", "<svg"), ("a.html", "<!doctype html>"), ("a.dot", "digraph")]
)
def test_pictures_are_saved_by_suffix(step, plan, tmp_path, name, start):
    save(step, plan, tmp_path / name)
    assert (tmp_path / name).read_text(encoding="utf-8").startswith(start)


def test_the_format_may_be_named_instead(step, plan, tmp_path):
    save(step, plan, tmp_path / "picture", format="svg")
    assert (tmp_path / "picture").read_text(encoding="utf-8").startswith("<svg")


def test_an_unknown_format_is_refused_by_name_and_the_known_ones_are_listed(step, plan, tmp_path):
    with pytest.raises(ValueError, match="unknown format 'xyz'.*svg, html.*json.*pickle"):
        save(step, plan, tmp_path / "a.xyz")


@pytest.fixture
def no_cairo(monkeypatch):
    monkeypatch.setitem(sys.modules, "cairosvg", None)


def test_pdf_where_nothing_can_make_one_says_what_to_install(step, plan, tmp_path, monkeypatch, no_cairo):
    monkeypatch.setattr(export_save.shutil, "which", lambda _: None)
    monkeypatch.setattr(pdf_and_png.sys, "platform", "linux")
    with pytest.raises(RuntimeError, match="pip install cairosvg"):
        save(step, plan, tmp_path / "a.pdf")


def test_cairo_gets_the_picture_with_halos_and_fonts_that_it_knows(step, plan, tmp_path, monkeypatch):
    given = {}

    def svg2pdf(bytestring, scale):
        given["svg"] = bytestring.decode()
        return b"%PDF-made"

    monkeypatch.setitem(sys.modules, "cairosvg", types.SimpleNamespace(svg2pdf=svg2pdf))
    save(step, plan, tmp_path / "a.pdf", title="the title")
    assert (tmp_path / "a.pdf").read_bytes() == b"%PDF-made"
    assert "the title" in given["svg"] and "paint-order" not in given["svg"]
    assert set(re.findall(r'font-family="([^"]*)"', given["svg"])) == {"sans-serif", "monospace"}
    with_halo = re.findall(r'<text[^>]* paint-order="stroke"[^>]*>(.*?)</text>', render_svg(step, plan))
    below = re.findall(
        r'<text[^>]* stroke="#[^>]*>(.*?)</text><text((?! stroke)[^>])*>\1</text>', given["svg"]
    )
    assert with_halo and [words for words, _ in below] == with_halo, "each is below its text"


def test_a_browser_is_asked_for_a_page_of_the_pictures_size(step, plan, tmp_path, monkeypatch, no_cairo):
    program = tmp_path / "chromium"
    program.write_text(
        "#!/bin/sh\nfor each; do case $each in --print-to-pdf=*) out=${each#*=};; "
        'file:*) in=${each#file://};; esac; done\ngrep -o "@page{[^}]*}" "$in" > "$out"\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(
        pdf_and_png.shutil, "which", lambda name: str(program) if name == "chromium" else shutil.which("grep")
    )
    save(step, plan, tmp_path / "a.pdf")
    width, height = re.search(r'width="(\d+)" height="(\d+)"', render_svg(step, plan)).groups()
    assert (tmp_path / "a.pdf").read_text().strip() == f"@page{{size:{width}px {height}px;margin:0}}"


def test_dot_is_stopped_after_its_time(step, plan, tmp_path, monkeypatch, no_cairo):
    monkeypatch.setattr(export_save, "convert", lambda svg, kind: None)
    program = tmp_path / "dot"
    program.write_text("#!/bin/sh\nexec sleep 30\n")
    program.chmod(0o755)
    monkeypatch.setattr(export_save.shutil, "which", lambda _: str(program))
    with pytest.raises(RuntimeError, match="did not finish"):
        save(step, plan, tmp_path / "a.png", dot_seconds=0.2)
    program.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    with pytest.raises(RuntimeError, match="broken"):
        save(step, plan, tmp_path / "a.png")


def test_the_picture_shows_a_verdict_with_a_range_in_full(step, plan):
    peak = plan.peak_bytes
    near = dataclasses.replace(plan, peak_range=(peak, 3 * peak), capacity_bytes=2 * peak, fits=True)
    words = verdict(near)[1]
    assert words.startswith("Probably fits: needs ") and " to " in words
    assert words in texts(render_svg(step, near))


@pytest.fixture
def cut():
    """Two graphs in which a batch was named: one that can be cut, and one that cannot."""
    torch.manual_seed(0)
    graphs = {}
    for norm in (nn.LayerNorm, nn.BatchNorm1d):
        net = nn.Sequential(nn.Linear(16, 32), norm(32), nn.Linear(32, 4))
        x, y = torch.randn(12, 16), torch.randint(4, (12,))
        with lazyviz.lazy(batch="x,y") as graph:
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
        graph.keep = net, x, y, loss
        graphs[norm] = graph
    return graphs


def test_picture_and_text_say_in_a_line_how_the_batch_is_cut(cut):
    graph = cut[nn.LayerNorm]
    for split, line, fits in [
        ("off", "Batch of 12 samples: in one piece", "Fits: needs"),
        (4, "Batch of 12 samples: in 4 pieces of 3 samples", "Fits in 4 pieces: needs"),
    ]:
        plan = graph.plan(split=split)
        text = render_text(graph.ir, plan).splitlines()
        words = texts(render_svg(graph.ir, plan))
        assert next(each for each in text if each.startswith("Batch")).startswith(line)
        assert any(each.startswith(line) for each in words)
        assert any(each.startswith(fits) for each in text) and any(each.startswith(fits) for each in words)


def test_a_batch_that_cannot_be_cut_is_said_with_reason_node_and_line(cut):
    graph = cut[nn.BatchNorm1d]
    plan = graph.plan(split=4)
    node = plan.split.blocked_by[0]
    why = (
        "Batch of 12 samples, cannot be split: batch norm in training mode computes statistics over the batch"
    )
    where = f"  {node.name} (net.{node.module}, {line_text(node.source)}) and 1 more"
    assert f"{why}\n{where}" in render_text(graph.ir, plan)
    words = texts(render_svg(graph.ir, plan))
    assert words[words.index(why) + 1] == where


def test_the_chart_of_a_run_in_pieces_names_them_in_the_order_of_the_run(cut):
    graph = cut[nn.LayerNorm]
    plan = graph.plan(split=4)
    memory = memory_json(Scene(graph.ir, plan))
    assert memory["count"] == len(plan.timeline)
    assert memory["points"]["at"] == list(range(len(plan.timeline)))
    for position, name in memory["pieces"]:
        piece = next(number for start, number in plan.split.ranges if start == position)
        assert name == ("", "piece 1", "piece 2, and 2 more like it")[piece]
    phases = [phase for phase, _ in memory["phases"]]
    assert phases.count("backward") >= 2, "each piece has a backward pass of its own"
    for (phase, start), (_, stop) in pairwise([*memory["phases"], ["", memory["count"]]]):
        assert {graph.nodes[index].phase for index, _ in plan.timeline[start:stop]} == {phase}
    words = texts(render_svg(graph.ir, plan))
    assert "piece 1" in words and "piece 2, and 2 more like it" in words
    assert not any(word.startswith("piece") for word in texts(render_svg(graph.ir, graph.plan())))


@pytest.mark.parametrize("pieces", [2, 3, 12])
def test_the_ranges_of_a_split_plan_are_those_of_its_timeline(cut, pieces):
    plan = cut[nn.LayerNorm].plan(split=pieces)
    starts = [*plan.split.ranges, (len(plan.timeline), 0)]
    found = []
    for (start, piece), (stop, _) in pairwise(starts):
        found.append((piece, [index for index, _ in plan.timeline[start:stop]]))
        assert start < stop
    ones = [nodes for piece, nodes in found if piece == 1]
    twos = [nodes for piece, nodes in found if piece == 2]
    assert ones == twos and 1 <= len(ones) <= plan.split.passes


def test_wide_letters_take_two_cells_of_the_text():
    wide, long = type("層", (nn.Tanh,), {}), type("注意機構の重み" * 8, (nn.Softmax,), {})
    with lazyviz.lazy() as graph:
        long(1)(wide()(nn.Linear(2, 3)(torch.ones(2, 2))))
    lines = render_text(graph.ir, graph.plan(), width=60).splitlines()
    assert max(map(wcswidth, lines)) <= 60
    boxes = [line for line in lines if (line.startswith("    ") and "softmax" in line) or "tanh ·" in line]
    starts = {wcswidth(line[: re.search("_softmax|tanh", line).start()]) for line in boxes}
    assert len(boxes) == 2 and len(starts) == 1 and "…" in boxes[1], boxes
