"""The live set at a moment: categories, modules, lines, and what keeps tensors alive."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazyviz
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
