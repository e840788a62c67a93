"""The live set at a moment: categories, modules, lines, and what keeps tensors alive."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.plan.liveness.lifetimes import lifetimes
from lazyviz.plan.liveness.live_set_and_categories import categorize
from lazyviz.plan.make_plan import make_plan
from lazyviz.plan.plan import CATEGORIES


@pytest.fixture
def training_step(program):
    """w -> forward (a temporary, a saved activation, the loss) -> gradient -> optimizer state."""
    w = program.outside(1000, role="parameter", name="fc.weight")
    x = program.outside(100)
    h = program.op([x, w], 400, module="fc", line=1)
    t = program.op([h], 300, module="act", line=1)
    loss = program.op([t], 4, line=2)
    program.drop(t)
    program.op([h, loss], 1000, phase="backward", role="gradient", module="fc", line=3)
    program.drop(h)
    return program.graph


def test_every_point_of_the_timeline_tells_what_is_alive_there(training_step):
    plan = make_plan(training_step)
    for position, nbytes in plan.timeline:
        moment = plan.at(position)
        assert moment.node is training_step.nodes[position]
        assert moment.nbytes == nbytes == sum(each.nbytes for each in moment.alive)
        assert tuple(moment.by_category) == CATEGORIES
        assert moment.by_category == {
            category: series[position] for category, series in plan.category_timeline.items()
        }
        assert sum(moment.by_module.values()) == nbytes
        assert [each.nbytes for each in moment.alive] == sorted(
            (each.nbytes for each in moment.alive), reverse=True
        )


def test_what_is_alive_is_a_sequence_largest_first(training_step):
    plan = make_plan(training_step)
    alive = plan.at(plan.peak_position).alive
    every = list(alive)
    assert len(alive) == len(every) > 3
    assert [each.nbytes for each in every] == sorted((each.nbytes for each in every), reverse=True)
    assert alive[0] is alive[0] is alive[:1][0] and alive[-1] is every[-1]
    assert alive[1:3] == every[1:3]
    assert alive == every and repr(alive) == repr(every)
    with pytest.raises(IndexError):
        alive[len(alive)]


def test_at_the_peak_it_is_what_the_plan_lists(training_step):
    plan = make_plan(training_step)
    moment = plan.at(plan.peak_node.index)
    assert list(moment.alive) == list(plan.alive_at_peak)
    assert moment.by_category == plan.by_category


def test_bytes_are_reported_by_module_and_by_the_allocating_line(training_step):
    moment = make_plan(training_step).at(1)
    assert moment.by_module == {"fc": 1500, "act": 300}
    assert moment.activations_by_module == {"fc": 400}
    assert {source.line: nbytes for source, nbytes in moment.by_line.items()} == {1: 700}


def test_a_saved_activation_names_the_backward_node_that_reads_it_last(training_step):
    saved = next(each for each in make_plan(training_step).at(1).alive if each.nbytes == 400)
    assert saved.category == "activations"
    assert saved.saved_for is training_step.nodes[3]
    assert saved.last_use is training_step.nodes[3]


@pytest.mark.parametrize("position", [-1, 4, 1000])
def test_a_position_outside_of_the_graph_is_an_index_error(training_step, position):
    with pytest.raises(IndexError, match="no node"):
        make_plan(training_step).at(position)


def test_modules_of_two_models_with_the_same_paths_are_told_apart():
    G = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    D = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    with lazyviz.lazy() as graph:
        loss = D(G(torch.randn(2, 4))).sum()
        loss.backward()
    plan = graph.plan(device="A100-40GB")
    by_module = plan.at(plan.peak_position).by_module
    assert {"G.0", "G.2", "D.0", "D.2"} <= by_module.keys()
    assert "0" not in by_module and sum(by_module.values()) == plan.peak_bytes
    assert plan.time is not None
    assert {"G.0", "G.2", "D.0", "D.2"} <= plan.time.by_module.keys()
    other = torch.nn.Sequential(nn.Linear(4, 8))
    with lazyviz.lazy() as smaller:
        other(torch.randn(2, 4)).sum().backward()
    compared = lazyviz.compare(smaller, graph)
    assert {"other.0", "G.0", "D.0"} <= compared.by_module.keys()
    lazyviz.reset()


def categories(graph, **tensors):
    """The category of the storage of each pending tensor."""
    found = {span.storage: categorize(span) for span in lifetimes(graph.ir)}
    return {name: found[tensor._lazyviz.storage] for name, tensor in tensors.items()}


def step_on(net, inputs, labels):
    loss = torch.nn.functional.cross_entropy(net(inputs), labels)
    loss.backward()


def test_data_that_the_program_computes_are_inputs_as_those_from_outside_are():
    outside = torch.arange(64.0).reshape(8, 8)
    with lazyviz.lazy() as graph:
        raw = torch.randn(8, 8)
        images = (raw - raw.mean(0)) / raw.std(0)
        scaled = outside * 2
        labels = torch.randint(4, (8,))
        batch = images[torch.randperm(8)]
        step_on(nn.Linear(8, 4), batch + scaled, labels)
    found = categories(graph, raw=raw, images=images, scaled=scaled, labels=labels, batch=batch)
    assert set(found.values()) == {"inputs"}, found


def test_data_stay_inputs_when_a_value_of_them_is_read_in_between():
    with lazyviz.lazy() as graph:
        images, labels = torch.randn(8, 8), torch.randint(4, (8,))
        assert images.sum().item() == images.sum().item()
        shifted = images - 1
        step_on(nn.Linear(8, 4), shifted, labels)
    assert categories(graph, shifted=shifted) == {"shifted": "inputs"}


def test_what_a_model_computes_is_not_data_wherever_it_is_written():
    net = nn.Linear(8, 4)
    with lazyviz.lazy() as graph:
        images, labels = torch.randn(8, 8), torch.randint(4, (8,))
        hidden = net(images)
        scores = hidden.softmax(-1)
        total = torch.zeros(8, 4)
        total += scores.detach()
        copy = net.weight.detach().clone()
        step_on(net, images, labels)
        scores.sum().backward()
    assert categories(graph, images=images) == {"images": "inputs"}
    found = categories(graph, hidden=hidden, scores=scores, total=total, copy=copy)
    assert set(found.values()) == {"activations"}, found


def test_a_model_of_plain_tensors_is_told_from_its_data_by_its_backward_pass():
    with lazyviz.lazy() as graph:
        weight = torch.randn(8, 4, requires_grad=True)
        images = torch.randn(16, 8)
        hidden = (images @ weight).relu()
        hidden.square().mean().backward()
        with torch.no_grad():
            weight -= weight.grad
    assert categories(graph, images=images) == {"images": "inputs"}
    assert set(categories(graph, hidden=hidden, weight=weight).values()) == {"activations"}


def test_without_a_model_and_a_backward_pass_nothing_is_called_data():
    with lazyviz.lazy() as graph:
        first = torch.randn(16, 8)
        second = first @ torch.randn(8, 4)
    assert set(categories(graph, first=first, second=second).values()) == {"activations"}
