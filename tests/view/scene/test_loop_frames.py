"""The user's loops: one frame named after the statement, with its sync points."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyviz
from lazyviz.plan.make_plan import make_plan
from lazyviz.view.scene.scene import Scene
from lazyviz.view.widget.page_messages import Answers


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


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.cell, self.out = nn.Embedding(9, 8), nn.GRUCell(8, 8), nn.Linear(8, 9)

    def forward(self, y, state):
        found = []
        for t in range(y.shape[1]):
            if t >= 0:
                state = self.cell(self.embed(y[:, t]) * state.mean(), state)
            found.append(self.out(state))
        return torch.stack(found, 1)


def test_a_loop_in_a_module_is_called_by_its_statement_in_both_lanes():
    decoder, y = Decoder(), torch.zeros(2, 7, dtype=torch.long)
    with lazyviz.lazy() as graph:
        decoder(y, torch.zeros(2, 8)).sum().backward()
    found = [
        (box.phase, box.label)
        for box in Scene(graph.graph, make_plan(graph.graph)).hierarchy.boxes.values()
        if box.kind == "step" and box.repeats > 1
    ]
    assert {phase for phase, label in found if label == "for t in range(y.shape[1])"} == {
        "forward",
        "backward",
    }


def test_the_card_of_nested_loops_ends_with_the_inner_statement():
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8)
    with lazyviz.lazy() as graph:
        y, total = x, torch.zeros(())
        for i in range(3):
            for j in range(5):
                y = torch.tanh(y @ weight) * (i + j)
            total = total + y.sum()
        total.backward()
    scene = Scene(graph.graph, make_plan(graph.graph))
    lanes = {lane.phase: lane for lane in scene.hierarchy.lanes()}
    (rounds,) = [box for box in lanes["backward"].children if box.repeats > 1]
    assert rounds.label == "… › for j in range(5)"
    (outer,) = [box for box in lanes["forward"].children if box.repeats > 1]
    assert (outer.label, outer.repeats) == ("for i in range(3)", 3)


def test_a_loop_inside_of_a_library_is_not_called_by_the_users_loop_around_it():
    rnn, x = nn.GRU(4, 4), torch.zeros(9, 2, 4)
    with lazyviz.lazy() as graph:
        for _ in range(2):
            rnn(x)
    boxes = Scene(graph.graph, make_plan(graph.graph)).hierarchy.boxes.values()
    inside = [box.label for box in boxes if box.kind == "step" and box.repeats > 2]
    assert inside and set(inside) == {"step"}


def shown_steps(graph, depth=2):
    """Label and number of the outermost steps, and of those inside."""
    found = []
    stack = [(box, 1) for box in Scene(graph.graph, make_plan(graph.graph)).hierarchy.root.children[::-1]]
    while stack:
        box, at = stack.pop()
        if box.kind == "step":
            found.append((at, box.label, box.repeats))
            stack += [(child, at + 1) for child in box.children[::-1] if at < depth]
    return found


def test_steps_of_a_loop_that_differ_are_in_one_frame(trained):
    net, optimizer, x = trained
    with lazyviz.lazy() as graph:
        for micro in x.repeat(2, 1).chunk(4):  # the first makes gradients, the last step follows
            F.mse_loss(net(micro), micro).backward()
        optimizer.step()
    assert shown_steps(graph) == [
        (1, "for micro in x.repeat(2, 1).chunk(4)", 4),
        (2, "step 1", 1),
        (2, "step 2–3", 2),
        (2, "step 4", 1),
    ]


def test_steps_of_two_loops_are_not_all_named_after_the_first(trained):
    net, optimizer, x = trained
    adam = torch.optim.Adam(net.parameters())
    with lazyviz.lazy() as graph:
        for _ in "x":  # makes Adam's states
            step(net, adam, x)
        for _ in range(3):
            step(net, adam, x)
    assert shown_steps(graph, 1) == [(1, 'step 1 · for _ in "x"', 1), (1, "for _ in range(3)", 3)]
    with lazyviz.lazy() as graph:
        for _ in range(3):
            step(net, optimizer, x)
        for _ in range(4):
            step(net, optimizer, x)
    assert shown_steps(graph, 1) == [(1, "step 1–7", 7)]


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_nested_loops_are_one_frame_with_both_statements_that_counts_all_steps(optimizer):
    net = nn.Linear(8, 8)
    batches = [torch.ones(4, 8) for _ in range(5)]
    optimizer = getattr(torch.optim, optimizer)(net.parameters())  # Adam makes its states in the first step
    with lazyviz.lazy() as graph:
        for _epoch in range(3):
            for x in batches:
                step(net, optimizer, x)
    assert shown_steps(graph) == [
        (1, "for _epoch in range(3) › for x in batches", 15),
        (2, "step 1", 1),
        (2, "step 2–15", 14),
    ]


def test_rounds_of_an_outer_loop_that_its_own_op_tells_apart_are_around_those_of_the_inner_one(trained):
    net, optimizer, x = trained
    step(net, optimizer, x)
    with lazyviz.lazy() as graph:
        for _ in range(3):
            for x in torch.ones(5, 4, 8):  # one op for all five
                step(net, optimizer, x)
    outer, *rounds = shown_steps(graph, 4)
    assert outer == (1, "for _ in range(3)", 3)
    assert rounds[:4] == [
        (2, "step 1", 1),
        (3, "for x in torch.ones(5, 4, 8)", 5),
        (4, "step 1", 1),
        (4, "step 2–5", 4),
    ]
    assert rounds[4] == (2, "step 2–3", 2)


def test_the_largest_step_of_a_frame_is_shown_alone(trained):
    net, _, x = trained
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with lazyviz.lazy() as graph:
        for _ in range(9):  # the first step, which makes the momentum, has fewer ops
            step(net, optimizer, x)
    assert shown_steps(graph) == [
        (1, "for _ in range(9)", 9),
        (2, "step 1", 1),
        (2, "step 2", 1),
        (2, "step 3–9", 7),
    ]


def test_what_an_outer_loop_adds_after_the_inner_one_ends_its_round(trained):
    with lazyviz.lazy() as graph:
        for _ in range(3):
            for _ in range(5):
                step(*trained)
            with torch.no_grad():
                trained[0](trained[2]).abs().mean()
    outer, *rounds = shown_steps(graph, 3)
    assert outer == (1, "for _ in range(3)", 3)
    assert rounds[:2] == [(2, "step 1", 1), (3, "for _ in range(5)", 5)], rounds
    assert [each for each in rounds if each[0] == 2][1:] == [(2, "step 2–3", 2)], rounds


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_rounds_of_an_outer_loop_are_whole_although_their_first_step_differs(optimizer):
    net, x = nn.Linear(8, 8), torch.ones(20, 8)
    optimizer = getattr(torch.optim, optimizer)(net.parameters())  # Adam makes its states in the first step
    with lazyviz.lazy() as graph:
        for _epoch in range(4):
            for index in torch.randperm(20).split(5):
                step(net, optimizer, x[index])
    outer, *rounds = shown_steps(graph, 3)
    assert outer == (1, "for _epoch in range(4)", 4)
    assert rounds[:2] == [(2, "step 1", 1), (3, "for index in torch.randperm(20).split(5)", 4)]
    assert [each for each in rounds if each[0] == 2][1:] == [(2, "step 2–4", 3)]


def epoch(trained):
    for _batch in range(4):
        step(*trained)


def test_a_loop_in_a_function_that_a_loop_calls_is_named_too(trained):
    with lazyviz.lazy() as graph:
        for _ in range(3):
            epoch(trained)
    assert shown_steps(graph, 1) == [(1, "for _ in range(3) › for _batch in range(4)", 12)]


def test_a_loop_around_the_block_names_no_steps_in_it(trained):
    for _ in range(1):
        with lazyviz.lazy() as graph:
            step(*trained)
            step(*trained)
            step(*trained)
    assert shown_steps(graph, 1) == [(1, "step 1–3", 3)]


def test_a_step_does_not_show_the_shape_of_the_parameter_that_it_updates_last(trained):
    with lazyviz.lazy() as graph:
        for _ in range(3):
            step(*trained)
    scene = Scene(graph.graph, make_plan(graph.graph))
    steps = [box for box in scene.hierarchy.boxes.values() if box.kind == "step" and not box.name]
    assert steps
    assert not any("×" not in scene.box(box).get("through", "×") for box in steps)
    assert "through" not in scene.box(steps[0]) or "→" in scene.box(steps[0])["through"]


def test_a_loop_in_which_each_nth_step_differs_is_one_frame_that_counts_its_steps(trained):
    net, optimizer, x = trained
    step(net, optimizer, x)
    with lazyviz.lazy() as graph:
        for number in range(12):
            loss = step(net, optimizer, x)
            if number % 4 == 0:
                loss.item()
    assert shown_steps(graph) == [
        (1, "for number in range(12)", 12),
        (2, "step 1", 1),
        (2, "step 2–4", 3),
        (2, "step 5–12", 8),
    ]


def test_accumulated_gradients_are_steps_of_one_loop(trained):
    net, optimizer, x = trained
    with lazyviz.lazy() as graph:
        for number in range(12):
            F.mse_loss(net(x), x).backward()
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    frame, *steps = shown_steps(graph)
    assert frame == (1, "for number in range(12)", 12)
    assert sum(repeats for _, _, repeats in steps) == 12
    assert len({label for _, label, _ in steps}) == len(steps)


def test_a_batch_has_its_variables_name_also_in_a_step_that_updates_unlike_the_last_one(trained):
    net, _, _ = trained
    optimizer = torch.optim.Adam(net.parameters())
    batches = [torch.randn(4, 8) for _ in range(8)]
    with lazyviz.lazy() as graph:
        for number, batch in enumerate(batches):
            F.mse_loss(net(batch), torch.ones(4, 8)).backward()
            if number % 4 == 3:  # the first time it makes Adam's states
                optimizer.step()
                optimizer.zero_grad()
    boxes = Scene(graph.graph, make_plan(graph.graph)).hierarchy.boxes.values()
    given = [box.label for box in boxes if box.kind == "input" and box.key == "input"]
    assert given == ["batch"] * 8


def test_updates_are_called_by_their_statement_on_a_line_with_others():
    net, x = nn.Linear(8, 8), torch.ones(4, 8)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    with lazyviz.lazy() as graph:
        loss = F.mse_loss(net(x), x)
        sgd.zero_grad(); loss.backward(); sgd.step()  # noqa: E702  # fmt: skip
    boxes = Scene(graph.graph, make_plan(graph.graph)).hierarchy.boxes.values()
    assert [box.label for box in boxes if box.phase == "optimizer" and box.repeats == 2] == ["sgd.step()"]


def test_a_loop_of_a_single_line_is_called_by_its_statement_in_both_lanes():
    w, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8)
    with lazyviz.lazy() as graph:
        state = x
        for number in range(40):
            state = torch.tanh(state @ w) * 0.9 + x * number
        state.sum().backward()
    lanes = Scene(graph.ir, graph.plan()).hierarchy.lanes()
    folds = {lane.phase: [box for box in lane.children if box.repeats > 30] for lane in lanes}
    assert [box.label for box in folds["forward"]] == ["for number in range(40)"]
    assert [box.label for box in folds["backward"]] == ["for number in range(40)"]


def test_a_line_that_repeats_without_a_loop_keeps_its_text():
    w, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8)
    with lazyviz.lazy() as graph:
        y = functools.reduce(torch.matmul, [w] * 40, x)
        y.sum().backward()
    lane = next(Scene(graph.ir, graph.plan()).hierarchy.lanes())
    assert [box.label for box in lane.children if box.ops > 20] == [
        "y = functools.reduce(torch.matmul, [w] * 40, x)"
    ]
