"""Passes over nodes in C++ have the same results and effects as those in Python."""

from __future__ import annotations

import contextlib
from array import array

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.execute.replay import node_passes
from lazyviz.execute.replay.node_passes import InPython, Storages, Survey
from lazyviz.execute.replay.program_cache import replays
from lazyviz.record.tape import tape

pytestmark = pytest.mark.skipif(not node_passes.active, reason="lazyviz was installed without it")
IN_CPP = node_passes._module


def training():
    """Pending nodes of two graphs, with views, in-place writes, results in lists and a draw."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    with lazyviz.lazy() as first:
        loss = model(x).relu_().sum()
        loss.backward()
    with lazyviz.lazy() as second:
        rows = loss * x.unbind(0)[0]
        rows.add_(1)
    return model, x, loss, rows, first, second


def surveyed(sweep, nodes):
    """What ``sweep`` finds of ``nodes``, whose steps are known."""
    assert replays.steps.structure_of(tape, nodes).key is not None
    return Survey(*sweep.survey(nodes, replays.steps._known))


def test_both_find_the_same():
    kept = training()
    nodes = list(tape.pending)
    found = surveyed(IN_CPP, nodes)
    assert found == surveyed(InPython, nodes)
    assert len(found.steps) == len(nodes) and len(found.values) > found.made > len(found.users) > 0
    assert found.draws
    assert found.graphs == [graph.ir for graph in kept[-2:]]
    storages = Storages(*IN_CPP.storages_of(found.values, found.made, found.wiring))
    assert storages == InPython.storages_of(found.values, found.made, found.wiring)
    assert len(storages.places) == len(found.values) - found.made
    assert len(storages.storages) > len(storages.roles) >= len(storages.live) > 0
    nodes[2].error = nodes[4].error = "it failed"
    assert IN_CPP.begin(nodes) == InPython.begin(nodes) == (["it failed"], found.graphs)
    nodes[1].state = "done"
    assert IN_CPP.unfinished(nodes) == InPython.unfinished(nodes) == [nodes[0], *nodes[2:]]
    tape.pending_ops.forget_all()


def test_both_find_results_that_two_tensors_share_and_memory_met_again():
    with lazyviz.lazy() as graph:
        y = torch.rand(3) * 2
        y.sum().item()  # what is here now is outside memory to the rest
        z = torch.zeros(3)
        z.data = y + 1
        w = z * y
    nodes = list(tape.pending)
    found = surveyed(IN_CPP, nodes)
    assert found == surveyed(InPython, nodes)
    storages = Storages(*IN_CPP.storages_of(found.values, found.made, found.wiring))
    assert storages == InPython.storages_of(found.values, found.made, found.wiring)
    assert storages.continued
    graph.evaluate()
    assert torch.equal(w, (y + 1) * y)


def test_both_know_what_nodes_beyond_a_subgraph_need():
    with lazyviz.lazy():
        x = torch.ones(3)
        y = x * 2
        z = y + y[0]
        beyond = y - 1
        other = y[1:] - 1
    nodes = [node for node in tape.pending if node not in (beyond._lazyviz.node, *closure_of(other))]
    nodes += [x._lazyviz.node, y._lazyviz.node]
    nodes = sorted(set(nodes), key=lambda node: node.sequence)
    for sweep in (IN_CPP, InPython):
        found = surveyed(sweep, nodes)
        storages = Storages(*sweep.storages_of(found.values, found.made, found.wiring))
        assert [found.values[number] for number in storages.later] == [y._lazyviz]
        assert [storages.storages[place] for place in storages.beyond] == [y._lazyviz.storage]
    uses = []
    for sweep in (IN_CPP, InPython):
        sweep.note_used(nodes)
        uses.append([(value.uses, value.storage.uses) for value in found.values])
        for node in nodes:
            for value in node.inputs:
                value.uses += 1
                value.storage.uses += 1
    assert uses[0] == uses[1]
    assert y._lazyviz.uses == 4 and uses[0][found.values.index(y._lazyviz)] == (2, 3)
    assert torch.equal(z, torch.full((3,), 4.0)) and torch.equal(other, torch.ones(2))
    tape.pending_ops.forget_all()


def closure_of(tensor):
    return [tensor._lazyviz.node, *[value.node for value in tensor._lazyviz.node.inputs]]


def test_a_step_that_is_not_known_is_named_by_its_answer():
    with lazyviz.lazy():
        x = torch.ones(3) + 1
    nodes = list(tape.pending)
    for sweep in (IN_CPP, InPython):
        with pytest.raises(KeyError) as error:
            sweep.survey(nodes, {})
        assert error.value.args == (nodes[0].entry,)
    assert x.shape == (3,)
    tape.pending_ops.forget_all()


def test_both_leave_the_same():
    left = []
    for sweep in (IN_CPP, InPython):
        kept = training()
        nodes = list(tape.pending)
        found = surveyed(sweep, nodes)
        storages = Storages(*sweep.storages_of(found.values, found.made, found.wiring)).storages
        assert any(node.after for node in nodes) or any(value.uses for value in found.values)
        nodes[0].outputs[0].storage.shadow = shadow = object()
        nodes[0].writes, nodes[0].folded = [nodes[0].outputs[0].storage], False
        sweep.note_done(nodes, array("d", [0.5 * at for at in range(len(nodes) + 1)]))
        assert nodes[0].outputs[0].storage.shadow is not shadow
        sweep.note_unused(found.values, storages)
        for graph in found.graphs:
            sweep.unlink_tensors(graph.nodes, graph.inputs)
        left.append(
            [
                (
                    node.state,
                    node.measured_seconds,
                    node.after,
                    [(value.uses, value.tensor) for value in (*node.outputs, *node.inputs)],
                    storage.uses,
                )
                for node in nodes
                for storage in {value.storage for value in node.outputs}
            ]
        )
        for node in nodes:
            node.measured_seconds = None
        sweep.note_done(nodes, None)
        assert {node.measured_seconds for node in nodes} == {None}
        tape.pending_ops.forget_all()
        del kept
    assert left[0] == left[1]
    assert not any(tensor for *_, values, _ in left[0] for _, tensor in values)


@pytest.mark.parametrize("change", ["failed", "again", "another mode", "nothing"])
def test_nothing_is_found_of_what_is_no_subgraph(change):
    with contextlib.ExitStack() as stack, lazyviz.lazy():
        x = torch.ones(3) + 1
        if change == "another mode":
            stack.enter_context(torch.inference_mode())
        y = torch.ones(3) * 2
    nodes = list(tape.pending)
    assert replays.steps._learn(tape, nodes)
    steps = replays.steps._known
    if change == "failed":
        nodes[1].error = "it did"
    if change == "again":
        nodes[1].is_rematerialized = True
    for sweep in (IN_CPP, InPython):
        assert (sweep.survey(nodes, steps) is None) == (change != "nothing")
    assert x.shape == y.shape
    tape.pending_ops.forget_all()


def test_what_is_no_node_is_refused():
    with pytest.raises(TypeError, match="instead of"):
        IN_CPP.survey([object()], {})
    with pytest.raises(TypeError, match="instead of"):
        IN_CPP.note_unused([object()], [])
