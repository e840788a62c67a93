"""A cell that PyTorch rejects: the op, its shapes, and the sizes that do not match."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.graph.refused import clashes
from lazyviz.plan.planner import make_plan
from lazyviz.view.render.svg import render_svg
from lazyviz.view.scene.details import describe
from lazyviz.view.scene.scene import Scene
from lazyviz.view.widget.run_choice import failure_json
from lazyviz.view.widget.runner import running_of


def refused(program):
    """The graph of a block that ``program`` has ended with an error."""
    found = []
    with pytest.raises(Exception) as error, lazyviz.lazy() as graph:
        found.append(graph)
        program()
    return found[0], error.value


def marked(graph):
    """Each input's shape as text, with the sizes that do not fit in brackets."""
    op = graph.graph.raised.refused
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
    ],
)
def test_the_sizes_that_do_not_fit_are_known(program, shapes):
    graph, error = refused(program)
    assert marked(graph) == shapes
    raised = graph.graph.raised
    assert raised.message == f"{type(error).__name__}: {error}"
    assert raised.source is not None and raised.source.file.endswith("test_errors.py")


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


def test_an_error_that_the_program_catches_is_none():
    with lazyviz.lazy() as graph:
        try:
            torch.ones(2) + torch.ones(3)
        except RuntimeError:
            pass
        kept = torch.ones(2) + 1
    assert graph.graph.raised is None and graph.graph.refused is None
    assert kept.sum() == 4


def test_any_other_error_has_its_message_and_its_line():
    graph, _ = refused(lambda: [torch.ones(2) + 1, {}["missing"]])
    raised = graph.graph.raised
    assert raised.message == "KeyError: 'missing'" and raised.refused is None
    assert "missing" in raised.source.text
