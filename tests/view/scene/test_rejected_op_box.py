"""A cell that PyTorch rejects: the op, its shapes, and the sizes that do not match."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.graph.rejected_op_and_mismatched_sizes import clashes
from lazyviz.plan.make_plan import make_plan
from lazyviz.view.render.svg import render_svg
from lazyviz.view.scene.details import describe
from lazyviz.view.scene.hierarchy import build_hierarchy
from lazyviz.view.scene.scene import Scene
from lazyviz.view.widget.page_state import run_traits
from lazyviz.view.widget.run_settings import failure_json
from lazyviz.view.widget.run_thread_and_displays import running_of
from lazyviz.view.widget.source_view import Code


def refused(program):
    """The graph of a block that ``program`` has ended with an error."""
    found = []
    with pytest.raises(Exception) as error, lazyviz.lazy() as graph:
        found.append(graph)
        program()
    return found[0], error.value


def marked(graph):
    """Each input's shape as text, with the sizes that do not fit in brackets."""
    op = graph.graph.raised.rejected
    return [
        "x".join(f"[{size}]" if dim in dims else str(size) for dim, size in enumerate(value.meta.shape))
        for value, dims in zip(op.inputs, clashes(op), strict=True)
    ]


@pytest.mark.parametrize(
    ("program", "shapes"),
    [
        (lambda: torch.ones(4, 16) @ torch.ones(8, 2), ["4x[16]", "[8]x2"]),
        (lambda: torch.ones(2, 4, 16).bmm(torch.ones(2, 8, 2)), ["2x4x[16]", "2x[8]x2"]),
        (lambda: torch.ones(4, 3) + torch.ones(4, 5), ["4x[3]", "4x[5]"]),
        (lambda: torch.ones(7, 4, 1).mul(torch.ones(6, 4, 5)), ["[7]x4x1", "[6]x4x5"]),
        (lambda: torch.cat([torch.ones(2, 3), torch.ones(2, 4)]), ["2x[3]", "2x[4]"]),
        (lambda: nn.Linear(8, 2)(torch.ones(4, 16)), ["2", "4x[16]", "[8]x2"]),
        (lambda: nn.Conv2d(3, 8, 3)(torch.ones(1, 4, 9, 9)), ["1x[4]x9x9", "8x[3]x3x3", "8"]),
        (lambda: nn.Conv2d(4, 8, 3, groups=2)(torch.ones(1, 6, 9, 9)), ["1x[6]x9x9", "8x[2]x3x3", "8"]),
        (lambda: nn.ConvTranspose2d(3, 8, 3)(torch.ones(1, 4, 9, 9)), ["1x[4]x9x9", "[3]x8x3x3", "8"]),
        (lambda: nn.Conv2d(3, 8, 5)(torch.ones(1, 3, 3, 9)), ["1x3x[3]x9", "8x3x[5]x5", "8"]),
        (
            lambda: torch.conv1d(torch.ones(2, 3, 9), torch.ones(4, 3, 3), torch.ones(5)),
            ["2x3x9", "[4]x3x3", "[5]"],
        ),
        (
            lambda: torch.cat([torch.ones(4, 7, 8), torch.ones(4, 3, 8), torch.ones(4, 7, 9)], -2),
            ["4x7x[8]", "4x3x8", "4x7x[9]"],
        ),
        (lambda: torch.stack([torch.ones(4, 7), torch.ones(4, 3)]), ["4x[7]", "4x[3]"]),
        (lambda: torch.bmm(torch.ones(2, 3, 4), torch.ones(3, 4, 5)), ["[2]x3x4", "[3]x4x5"]),
        (lambda: torch.addmm(torch.ones(3), torch.ones(2, 4), torch.ones(4, 5)), ["[3]", "2x4", "4x5"]),
        (lambda: nn.LayerNorm(5)(torch.ones(2, 4, 7)), ["2x4x[7]", "[5]", "[5]"]),
        (lambda: torch.ones(4, 6)[torch.zeros(3).long(), torch.zeros(4).long()], ["4x6", "[3]", "[4]"]),
        # Of ops with other rules nothing is marked, rather than what is as it should be.
        (lambda: torch.ones(4, 6).gather(1, torch.zeros(5, 2).long()), ["4x6", "5x2"]),
        (lambda: torch.ones(4, 5).index_add(0, torch.tensor([0, 1]), torch.ones(3, 5)), ["4x5", "2", "3x5"]),
    ],
)
def test_the_sizes_that_do_not_fit_are_known(program, shapes):
    graph, error = refused(program)
    assert marked(graph) == shapes
    raised = graph.graph.raised
    assert raised.message == f"{type(error).__name__}: {error}"
    assert raised.source is not None and raised.source.file.endswith("test_rejected_op_box.py")


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.pool, self.fc = nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Linear(500, 10)

    def forward(self, x):
        return self.fc(self.pool(self.conv(x)).flatten(1))


def told(graph):
    scene = Scene(graph.graph, make_plan(graph.graph))
    return failure_json(running_of(graph), scene)["sizes"]


def test_the_error_tells_where_both_sizes_are_from_and_which_layer_would_fit():
    net = Classifier()
    x = torch.randn(2, 3, 12, 12)
    with pytest.raises(RuntimeError), lazyviz.lazy() as graph:
        net(x)
    line = next(node.source.line for node in graph.nodes if node.module == "pool" and node.source is not None)
    assert told(graph) == [
        f"2×100 is from net.pool (line {line}), where it is 2×4×5×5",
        "500×10 is from net.fc.weight, where it is 10×500",
        "net.fc would take it with in_features=100 instead of 500",
    ]


def test_the_error_names_variables_and_convolutions_that_would_fit():
    conv = nn.Conv2d(3, 8, 3, padding=1)
    images = torch.ones(1, 4, 9, 9)
    with pytest.raises(RuntimeError), lazyviz.lazy() as graph:
        conv(images)
    first, second, fit = told(graph)
    assert first == "1×4×9×9 is from images" and second == "8×3×3×3 is from conv.weight"
    assert fit == "conv would take it with in_channels=4 instead of 3"
    left, right = torch.ones(4, 3), torch.ones(4, 5)
    with pytest.raises(RuntimeError), lazyviz.lazy() as graph:
        left + right
    assert told(graph) == ["4×3 is from left", "4×5 is from right"]


def test_a_grouped_convolution_is_not_given_another_number_of_channels():
    conv = nn.Conv2d(4, 8, 3, groups=2)
    images = torch.ones(1, 6, 9, 9)
    with pytest.raises(RuntimeError), lazyviz.lazy() as graph:
        conv(images)
    assert [text.partition(" is from ")[2] for text in told(graph)] == ["images", "conv.weight"]


def test_the_op_that_failed_is_drawn_in_its_module_with_lines_from_what_it_was_given():
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(4, 8)
    graph, _ = refused(lambda: net(x))
    scene = Scene(graph.graph, make_plan(graph.graph))
    boxes = scene.hierarchy.boxes
    box = next(each for each in boxes.values() if each.kind == "error")
    assert box.label == "addmm" and box.parent.label.endswith(".2")
    around, opened = box.parent, {each.id for each in scene.opened()}
    while around.kind != "root":
        assert around.id in opened, "what is around it is open at first"
        around = around.parent
    assert {maker.label for maker, reader in box.parent.edges if reader is box} == {"weight", "bias"}
    assert box in box.parent.enters, "what the layer before gives arrives at the op itself"
    drawn = scene.box(box)
    assert drawn["through"] == "2 · 4×16 · 8×2"
    assert [text for _, parts in drawn["given"] for text, clash in parts if clash] == ["16", "8"]
    assert describe(scene, box)["source"]["text"]
    assert "addmm failed" in render_svg(graph.graph, make_plan(graph.graph))
    told = failure_json(running_of(graph), scene)
    assert "cannot be multiplied" in told["message"] and told["chain"][-1] == box.id and told["recording"]
    assert told["stopped"] == f"stopped at line {graph.graph.raised.source.line}"
    graph.graph.raised.source = dataclasses.replace(graph.graph.raised.source, cell=7)
    assert failure_json(running_of(graph), scene)["stopped"].startswith("stopped at cell [7], line ")


class Wrong(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(8, 2)

    def forward(self, x):
        return self.outer(self.inner(x))


def test_the_line_that_called_the_failing_one_is_marked_and_the_error_stays_after_a_run():
    net, x = Wrong(), torch.randn(4, 8)
    with pytest.raises(RuntimeError), lazyviz.lazy() as graph:
        y = x * 2
        net(y)
    raised = graph.graph.raised
    assert "self.outer" in raised.source.text and [line.text for line in raised.callers] == ["net(y)"]
    facts = Code(graph.graph).facts_json(graph.plan())["lines"]
    assert len([fact for fact in facts.values() if fact.get("failed")]) == 2
    graph.evaluate()
    scene = Scene(graph.graph, make_plan(graph.graph))
    told = run_traits(graph, scene)
    assert told["state"] == "done" and "cannot be multiplied" in told["error"]["message"]
    assert not told["error"]["stopped"], "what ran is told in its place"


def test_an_error_that_the_program_catches_is_none():
    with lazyviz.lazy() as graph:
        try:
            torch.ones(2) + torch.ones(3)
        except RuntimeError:
            pass
        kept = torch.ones(2) + 1
    assert graph.graph.raised is None and graph.graph.rejected is None
    assert kept.sum() == 4


def test_any_other_error_has_its_message_and_its_line():
    graph, _ = refused(lambda: [torch.ones(2) + 1, {}["missing"]])
    raised = graph.graph.raised
    assert raised.message == "KeyError: 'missing'" and raised.rejected is None
    assert "missing" in raised.source.text


def test_an_error_in_the_block_itself_is_at_its_own_line():
    with pytest.raises(KeyError), lazyviz.lazy() as graph:
        x = torch.ones(2) + 1
        {}["missing"] = x[{}["key"]]
    assert graph.graph.raised.source.text.startswith('{}["missing"]')
    del x


def test_a_layer_before_hidden_views_has_its_own_shape_where_the_next_op_was_refused():
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 12 * 12, 10))
    with pytest.raises(RuntimeError), lazyviz.lazy() as graph:
        net(torch.randn(4, 1, 28, 28))
    shapes = {}
    stack = [build_hierarchy(graph.ir).root]
    while stack:
        box = stack.pop()
        stack += box.children
        if box.kind == "module":
            shapes[box.label] = [value and value.meta.shape for value in (box.takes, box.gives)]
    assert shapes["net.1"] == [(4, 8, 26, 26), (4, 8, 13, 13)]
    assert shapes["net.3"] == [(4, 8 * 13 * 13), None]


def test_a_size_is_as_the_layer_gave_it_out_and_not_as_its_kernel_computed_it():
    q, k = nn.Linear(64, 64), nn.Linear(64, 48)
    x = torch.ones(4, 16, 64)
    with pytest.raises(RuntimeError), lazyviz.lazy() as graph:
        q(x) @ k(x).transpose(1, 2)
    first, second = (text.partition(" is from ")[2] for text in told(graph))
    assert first.startswith("q (line") and ", where" not in first
    assert second.startswith("k (line") and second.endswith(", where it is 4×16×48")


def lanes_of(graph):
    scene = Scene(graph.graph, make_plan(graph.graph))
    return {lane.phase: scene.subtitle(lane) for lane in scene.hierarchy.lanes()}


def test_lanes_that_the_error_kept_the_program_from_reaching_are_there_and_empty():
    net, x = nn.Sequential(nn.Linear(8, 16), nn.Linear(8, 2)), torch.ones(4, 8)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def train():
        loss = net(x).sum()
        loss.backward()

    def other():
        x.backward()

    with pytest.raises(RuntimeError), lazyviz.lazy() as graph:
        train()
        optimizer.step()  # not reached
    assert list(lanes_of(graph).items()) == [
        ("forward", "1 op"),
        ("backward", "not reached: loss.backward()"),
        ("optimizer", "not reached: optimizer.step()"),
    ]
    picture = render_svg(graph.graph, graph.plan())
    assert picture.count('stroke-dasharray="4 4"') == 2 and "not reached: loss.backward()" in picture
    assert "not reached" in graph.text()
    with pytest.raises(RuntimeError), lazyviz.lazy() as graph:
        net(x)
    optimizer.step()
    assert list(lanes_of(graph)) == ["forward"], "what follows the block is not a part of it"
    del other


def test_a_phase_that_was_reached_has_no_second_lane():
    net, x = nn.Linear(8, 8), torch.ones(4, 8)
    with pytest.raises(RuntimeError), lazyviz.lazy() as graph:
        net(x).sum().backward()
        x @ x
        x.sum().backward()
        torch.optim.SGD(net.parameters(), 0.1).step()
    assert list(lanes_of(graph)) == ["forward", "backward", "optimizer"]
    assert lanes_of(graph)["optimizer"].startswith("not reached: ")
    assert not lanes_of(graph)["backward"].startswith("not reached")
