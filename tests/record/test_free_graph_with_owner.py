"""A graph is freed with its owner, without the garbage collector, unless parts are still referenced."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyviz
from lazyviz.record import native_recorder

pytestmark = pytest.mark.skipif(
    "graph_release" not in lazyviz.metrics()["compiled modules"],
    reason="the compiled module is not built, or switched off",
)


@pytest.fixture(params=["compiled", "in Python"])
def recorder(request):
    before = native_recorder.active
    if native_recorder.use(request.param == "compiled") is not (request.param == "compiled"):
        pytest.skip("the compiled recorder is not built")
    lazyviz.sync()
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    native_recorder.use(before)
    lazyviz.sync()


def training_step():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.5), nn.LayerNorm(4))
    optimizer = torch.optim.AdamW(model.parameters())
    x, target = torch.randn(3, 4), torch.randint(4, (3,))

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        return loss

    return step


def evaluated(step):
    with lazyviz.lazy() as graph:
        loss = step()
    graph.evaluate()
    return graph, loss


def test_a_round_is_freed_when_its_graph_goes(recorder):
    step = training_step()
    losses = []
    for _ in range(3):
        graph, loss = evaluated(step)
        losses.append(loss)
        gone = weakref.ref(graph.ir)
        del graph
        assert gone() is None
    assert all(loss.grad_fn is not None and loss.item() > 0 for loss in losses)


def test_rounds_leave_no_objects(recorder):
    """Neither for the collector, nor out of its sight."""
    step = training_step()

    def left_by(rounds):
        before = sys.getallocatedblocks()
        for _ in range(rounds):
            evaluated(step)
        return sys.getallocatedblocks() - before

    left_by(5)
    gc.collect()
    graph, _ = evaluated(step)
    ops = len(graph.nodes)
    del graph
    assert left_by(20) < 20 * ops / 2
    assert gc.collect() < 50


def test_a_loop_that_rebinds_its_graph_keeps_one(recorder):
    step = training_step()
    gone = []
    for _ in range(4):
        with lazyviz.lazy() as graph:
            loss = step()
        graph.evaluate()
        gone.append(weakref.ref(graph.ir))
    assert [reference() is None for reference in gone] == [True, True, True, False]
    assert loss.item() > 0


def test_a_graph_whose_plan_goes_later_is_freed_by_the_next_block(recorder):
    step = training_step()
    gone = []
    for _ in range(4):
        with lazyviz.lazy() as graph:
            step()
        plan = graph.plan()
        graph.evaluate()
        gone.append(weakref.ref(graph.ir))
    assert [reference() is None for reference in gone] == [True, True, False, False]
    assert plan.explain()


def test_a_graph_of_which_a_part_has_run_is_freed_once_the_rest_has(recorder):
    with lazyviz.lazy() as graph:
        loss = training_step()()
    loss.item()
    gone = weakref.ref(graph.ir)
    del graph
    assert gone() is not None
    lazyviz.sync()
    with lazyviz.lazy():
        pass
    assert gone() is None


def test_what_was_dropped_before_it_ran_still_runs(recorder):
    weight = torch.ones(3)
    with lazyviz.lazy() as graph:
        weight.add_(1)
        result = weight * 2
        drawn = torch.rand(3)
    del graph, drawn
    assert result.tolist() == [4.0] * 3 and weight.tolist() == [2.0] * 3


def test_a_weak_reference_to_the_record_is_called(recorder):
    graph, _ = evaluated(training_step())
    called = []
    reference = weakref.ref(graph.ir, lambda ref: called.append(ref()))
    del graph
    assert called == [None] and reference() is None


HELD = {
    "node": lambda graph: graph.nodes[5],
    "list of nodes": lambda graph: graph.nodes,
    "value": lambda graph: graph.nodes[5].outputs[0],
    "results": lambda graph: graph.nodes[5].outputs,
    "arguments": lambda graph: graph.nodes[5].args,
    "storage": lambda graph: graph.nodes[5].outputs[0].storage,
    "draws": lambda graph: next(node.draws for node in graph.nodes if node.draws is not None),
    "graph": lambda graph: graph.ir,
    "iterator": lambda graph: iter(graph.nodes),
    "plan": lambda graph: graph.plan(),
    "bound method": lambda graph: graph.ir.__len__,
    "weak reference to a value": lambda graph: (graph.ir.by_sequence, weakref.ref(graph.nodes[5].outputs[0])),
}


def facts(graph):
    """What refers to what in the record of ``graph``."""
    return [
        (
            node.graph is graph,
            node.forward in graph.nodes or node.forward is None,
            [(value.node is not None, value.storage.graph is graph) for value in node.inputs],
            [value.node is node for value in node.outputs],
            [storage.writer is not None for storage in node.writes],
        )
        for node in graph.nodes
    ]


@pytest.mark.parametrize("what", HELD)
def test_a_reference_to_a_part_of_a_record_keeps_all_of_it(recorder, what):
    graph, _ = evaluated(training_step())
    held = HELD[what](graph)
    expected = facts(graph.ir)
    ir = weakref.ref(graph.ir)
    del graph
    assert facts(ir()) == expected
    with lazyviz.lazy():
        pass
    assert facts(ir()) == expected
    assert all(gc.is_tracked(node) for node in ir().nodes)
    del held
    gc.collect()
    assert ir() is None


def test_a_pending_tensor_keeps_its_record(recorder):
    with lazyviz.lazy() as graph:
        kept = (torch.arange(3.0) * 2).sum()
    ir = weakref.ref(graph.ir)
    del graph
    assert ir() is not None and kept.item() == 6.0


def test_a_graph_that_uses_values_of_another_keeps_it(recorder):
    with lazyviz.lazy() as first:
        x = torch.arange(3.0) * 2
    with lazyviz.lazy() as second:
        y = x + 1
    del first
    second.evaluate()
    assert [node.inputs[0].shape for node in second.nodes] == [torch.Size([3])]
    del second
    assert y.tolist() == [1.0, 3.0, 5.0] and x.tolist() == [0.0, 2.0, 4.0]


def test_an_exception_that_knows_the_graph_keeps_it(recorder):
    def fails():
        graph, _ = evaluated(training_step())
        nodes = graph.nodes
        raise ValueError(len(nodes))

    with pytest.raises(ValueError) as caught:
        fails()
    frame = caught.tb
    while frame.tb_next is not None:
        frame = frame.tb_next
    assert len(frame.tb_frame.f_locals["graph"].nodes) == caught.value.args[0]


def test_code_that_runs_while_a_record_is_freed_sees_no_half_of_it(recorder):
    seen = []
    with lazyviz.lazy() as graph:
        for _ in range(5):
            result = torch.ones(3).requires_grad_().exp()
    graph.evaluate()
    ir = weakref.ref(graph.ir, lambda _: seen.append(ir()))
    tensor = weakref.ref(result, lambda _: seen.append(ir()))
    del graph, result
    assert seen == [None, None]
    assert tensor() is None and ir() is None


def test_a_tensor_that_dies_while_its_record_is_freed_is_no_trouble(recorder):
    with lazyviz.lazy() as other:  # which is pending, so that records know their tensors
        pending = torch.ones(3) + 1
    with lazyviz.lazy() as graph:
        results = [torch.arange(3.0) * 2]
    graph.evaluate()
    assert graph.nodes[-1].outputs[0].tensor is not None
    gone = weakref.ref(graph.ir, lambda _: results.clear())
    del graph
    assert gone() is None and results == []
    assert other.pending and pending.tolist() == [2.0] * 3


def test_long_chains_are_freed_without_recursion(recorder):
    with lazyviz.lazy() as graph:
        x = torch.ones(2)
        for _ in range(20_000):
            x.add_(1.0)
    graph.evaluate()
    gone = weakref.ref(graph.ir)
    del graph
    assert gone() is None and x.tolist() == [20_001.0] * 2


def test_graphs_are_freed_on_any_thread(recorder):
    step = training_step()
    graphs = [evaluated(step)[0] for _ in range(4)]
    gone = [weakref.ref(graph.ir) for graph in graphs]
    threads = [threading.Thread(target=graphs.pop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [reference() for reference in gone] == [None] * 4


def test_it_can_be_switched_off():
    code = (
        "import lazyviz, torch\n"
        "from lazyviz.record import free_graph_with_owner\n"
        "with lazyviz.lazy() as graph:\n"
        "    y = torch.ones(3) + 1\n"
        "graph.evaluate()\n"
        "print(free_graph_with_owner._module, y.tolist())\n"
    )
    env = {**os.environ, "LAZYVIZ_GRAPH_RELEASE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.split(maxsplit=1) == ["None", "[2.0, 2.0, 2.0]\n"], done.stderr


def drawn_step():
    """A model that is created and trained in a block: its draws stay pending when all of it is dropped."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    model(torch.ones(2, 8)).square().sum().backward()
    return model


def expected_draws():
    torch.manual_seed(3)
    drawn_step()
    return torch.rand(3)


def test_a_dropped_graph_keeps_only_what_its_pending_draws_need(recorder):
    expected = expected_draws()
    torch.manual_seed(3)
    with lazyviz.lazy() as graph:
        drawn_step()
    recorded, reference = len(graph.nodes), weakref.ref(graph.ir)
    del graph
    with lazyviz.lazy():
        pass
    kept = reference().nodes
    assert len(kept) < recorded / 2
    assert {node.op._schema.name for node in kept} == {"aten::empty", "aten::uniform_", "aten::detach"}
    assert [node.index for node in kept] == list(range(len(kept)))
    assert all(storage.created < len(kept) for storage in reference().storages)
    del kept
    assert torch.equal(torch.rand(3), expected)
    gc.collect()
    assert reference() is None


def test_what_is_dropped_after_its_graph_is_freed_by_the_next_block(recorder):
    expected = expected_draws()
    torch.manual_seed(3)
    with lazyviz.lazy() as graph:
        model = drawn_step()
    reference = weakref.ref(graph.ir)
    del graph
    before = len(reference().nodes)
    gradients = [weight.grad for weight in model.parameters()]
    del model
    with lazyviz.lazy():
        pass
    assert len(reference().nodes) <= before
    del gradients
    with lazyviz.lazy():
        pass
    assert {node.op._schema.name for node in reference().nodes} <= {
        "aten::empty",
        "aten::uniform_",
        "aten::detach",
    }
    assert torch.equal(torch.rand(3), expected)


def test_a_plan_of_a_dropped_graph_stays_whole(recorder):
    with lazyviz.lazy() as graph:
        drawn_step()
    plan, recorded = graph.plan(), len(graph.nodes)
    text = plan.explain()
    del graph
    with lazyviz.lazy():
        pass
    assert len(plan.ir.nodes) == recorded and plan.explain() == text
