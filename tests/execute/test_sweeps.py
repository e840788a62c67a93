"""Sweeps over nodes in C++ find, and leave, what those in Python do."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.execute import sweeps
from lazyviz.execute.sweeps import InPython
from lazyviz.record.recorder import tape

pytestmark = pytest.mark.skipif(not sweeps.active, reason="lazyviz was installed without it")
IN_CPP = sweeps._module


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


def test_both_find_the_same():
    kept = training()
    nodes = list(tape.pending)
    found = IN_CPP.survey(nodes)
    assert found == InPython.survey(nodes)
    entries, made, read, users, _, graphs, results = found
    assert len(entries) == len(nodes) and results >= len(made) > len(users) > 0
    assert graphs == [graph.ir for graph in kept[-2:]]
    values = dict.fromkeys([*made, *read])
    storages, told = IN_CPP.storages_of(values)
    assert (storages, told) == InPython.storages_of(values)
    assert len(storages) > len(told) > 0


def test_both_leave_the_same():
    left = []
    for sweep in (IN_CPP, InPython):
        kept = training()
        nodes = list(tape.pending)
        *_, made, read, _, _, _, _ = sweep.survey(nodes)
        storages, _ = sweep.storages_of([*made, *read])
        assert any(node.after for node in nodes) or any(value.uses for value in made)
        sweep.note_done(nodes, [0.5 * at for at in range(len(nodes) + 1)])
        sweep.note_unused(made, storages)
        left.append(
            [
                (node.state, node.seconds, node.after, [value.uses for value in node.outputs], storage.uses)
                for node in nodes
                for storage in {value.storage for value in node.outputs}
            ]
        )
        for node in nodes:
            node.seconds = None
        sweep.note_done(nodes, None)
        assert {node.seconds for node in nodes} == {None}
        tape.forget_all()
        del kept
    assert left[0] == left[1]


@pytest.mark.parametrize("change", ["failed", "again", "another mode", "nothing"])
def test_nothing_is_found_of_what_is_no_stretch(change):
    with contextlib.ExitStack() as stack, lazyviz.lazy():
        x = torch.ones(3) + 1
        if change == "another mode":
            stack.enter_context(torch.inference_mode())
        y = torch.ones(3) * 2
    nodes = list(tape.pending)
    if change == "failed":
        nodes[1].error = "it did"
    if change == "again":
        nodes[1].again = True
    for sweep in (IN_CPP, InPython):
        assert (sweep.survey(nodes) is None) == (change != "nothing")
    assert x.shape == y.shape
    tape.forget_all()


def test_what_is_no_node_is_refused():
    with pytest.raises(TypeError, match="instead of"):
        IN_CPP.survey([object()])
    with pytest.raises(TypeError, match="instead of"):
        IN_CPP.note_unused([object()], [])
