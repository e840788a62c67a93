"""The user's loops: one frame named after the statement, with its sync points."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyviz
from lazyviz.plan.planner import make_plan
from lazyviz.view.scene.scene import Scene
from lazyviz.view.widget.requests import Answers


def step(net, optimizer, x):
    optimizer.zero_grad()
    loss = F.mse_loss(net(x), x)
    loss.backward()
    optimizer.step()
    return loss


@pytest.fixture
def trained():
    net = nn.Linear(8, 8)
    return net, torch.optim.SGD(net.parameters(), lr=0.1), torch.randn(4, 8)


def labels(graph):
    boxes = Scene(graph.graph, make_plan(graph.graph)).hierarchy.boxes.values()
    return {(box.label, box.repeats, box.syncs) for box in boxes if box.kind == "step" and box.repeats > 1}


def test_a_loop_is_called_by_its_statement_and_counts_its_syncs(trained):
    with lazyviz.lazy() as graph:
        for _ in range(5):  # a comment
            print(step(*trained).item())
    assert ("for _ in range(5)", 5, 5) in labels(graph)


def test_the_innermost_loop_around_the_steps_gives_the_name(trained):
    with lazyviz.lazy() as graph:
        left = 6
        while left > 0:
            left -= 1
            if left % 2 < 2:
                step(*trained)
    assert any(label == "while left > 0" for label, _, _ in labels(graph))


def test_steps_without_a_loop_keep_their_numbers(trained):
    def thrice():
        step(*trained)
        step(*trained)
        step(*trained)

    with lazyviz.lazy() as graph:
        thrice()
    assert not any(label.startswith(("for", "while")) for label, _, _ in labels(graph))


def test_each_line_of_sync_points_leads_to_them(trained):
    with lazyviz.lazy() as graph:
        for _ in range(5):
            step(*trained).item()
        trained[0](trained[2]).sum().item()
    answers = Answers(graph, lambda message: None, lambda: None)
    syncs = answers.first_picture()["syncs"]
    assert len(syncs["lines"]) == len(syncs["chains"]) == 2
    assert [len(chains) for chains in syncs["chains"]] == [5, 1]
    boxes = answers.scene.hierarchy.boxes
    assert {boxes[chain[-1]].kind for chains in syncs["chains"] for chain in chains} == {"sync"}
