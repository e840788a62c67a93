"""Ops that run at a sync point are part of the graph, with their memory until it is dropped."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.torch_internals import native_module_loader


def compiled(function):
    return torch.compile(function, backend="eager")


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    torch.compiler.reset()


def nonzero(x):
    return torch.nonzero(x)


def masked(x):
    return x[x > 0]


def unique(x):
    return torch.unique(x)


def least_squares(x):
    return torch.linalg.lstsq(x, x).solution


def doubled_by_a_compiled_function(x):
    return compiled(lambda x: x * 2)(x)


def to_sparse(x):
    return x.to_sparse()


@pytest.mark.parametrize(
    "make", [nonzero, masked, unique, least_squares, doubled_by_a_compiled_function], ids=lambda f: f.__name__
)
def test_the_results_of_what_ran_at_a_sync_point_count_until_they_are_dropped(make):
    x = torch.randn(100, 100)
    size = make(x).untyped_storage().nbytes()
    with lazyviz.lazy() as graph:
        result = make(x)
        torch.ones(2)
        del result
        torch.ones(3)
    plan = graph.plan()
    (node,) = [node for node in graph.nodes if node.at_once]
    assert (
        sum(value.storage.nbytes for value in node.outputs if value.storage.dropped != node.index + 1) == size
    )
    lazily, eager = ([level for _, level in each] for each in (plan.timeline, plan.eager_timeline))
    for levels in (lazily, eager):
        assert levels[node.index] >= x.nbytes + size
        assert levels[-1] == x.nbytes + 12
    # In eager mode the result is there while the last but one runs; an evaluation runs it after `del`.
    assert eager[-2] == x.nbytes + size + 8
    assert lazily[-2] == x.nbytes + 8
    assert plan.peak_bytes >= x.nbytes + size


def test_a_budget_sees_what_a_data_dependent_op_returned():
    with pytest.raises(AssertionError, match=r"would need 9\.54 MiB"):
        with lazyviz.assert_peak_below("6 MiB"):
            k = torch.nonzero(torch.ones(1000, 500))
    assert k.untyped_storage().nbytes() == 8_000_000


def test_a_budget_sees_a_block_of_nothing_but_a_compiled_call():
    x = torch.ones(1000, 1000)
    function = compiled(lambda x: x * 2)
    with pytest.raises(AssertionError, match=r"would need 7\.63 MiB"):
        with lazyviz.assert_peak_below("6 MiB"):
            y = function(x)
    assert y.shape == x.shape


@pytest.mark.parametrize("how", ["compiled model", "function of a model", "model.compile"])
def test_a_compiled_model_counts_its_parameters_and_gradients(how):
    model = nn.Linear(100, 100, bias=False)
    step = model
    if how == "compiled model":
        step = compiled(model)
    elif how == "model.compile":
        model.compile(backend="eager")
    else:
        step = compiled(lambda x: model(x))
    with lazyviz.lazy() as graph:
        loss = step(torch.ones(4, 100)).sum()
        loss.backward()
    plan = graph.plan()
    assert plan.timeline[-1][1] == 2 * model.weight.nbytes + 4
    assert plan.by_category["parameters"] == plan.by_category["gradients"] == model.weight.nbytes


def test_what_was_made_at_once_is_one_memory_with_what_is_recorded_of_it():
    x = torch.randn(1000)
    with lazyviz.lazy() as graph:
        chosen = x[x > -10]
        doubled = chosen * 2
    plan = graph.plan()
    assert plan.timeline[-1][1] == 3 * 4000
    assert doubled.shape == chosen.shape
    assert graph.evaluate().projected_bytes == graph.report.peak_bytes


def test_a_sparse_result_counts_its_indices_and_values():
    x = torch.eye(100)
    with lazyviz.lazy() as graph:
        sparse = x.to_sparse()
        one = torch.ones(1)
    assert graph.plan().timeline[-1][1] == x.nbytes + 100 * (2 * 8 + 4) + one.nbytes
    assert sparse.layout == torch.sparse_coo


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_result_counts_its_bytes():
    parts = [torch.ones(2, 3), torch.ones(4, 3)]
    with lazyviz.lazy() as graph:
        nested = torch.nested.nested_tensor(parts)
        doubled = nested * 2
    assert graph.plan().timeline[-1][1] >= 2 * (2 * 3 + 4 * 3) * 4
    assert doubled.is_nested


def test_a_view_that_an_op_at_once_returns_makes_no_memory():
    x = torch.randn(100)
    with lazyviz.lazy() as graph:
        same = compiled(lambda x: x.view(10, 10))(x)
    assert not graph.nodes
    assert same.shape == (10, 10)


def test_explain_names_what_is_not_known_of_what_ran_at_once():
    function = compiled(lambda x: (x @ x).relu())
    with lazyviz.lazy() as graph:
        x = torch.ones(50, 50)
        y = function(x)
        k = y.nonzero()
    text = graph.plan().explain()
    assert "Ran immediately, at a sync point: torch.compile at test_fallback.py:" in text
    assert "is unknown" in text
    # What nonzero uses is measured, if that is compiled.
    assert ("nonzero at test_fallback.py:" in text) == ("allocations" not in native_module_loader.loaded)
    assert len(k) == 2500
    with lazyviz.lazy() as graph:
        y = x + 1
    assert "Ran at once" not in graph.plan().explain()


def test_what_ran_at_once_is_done_and_is_not_run_again():
    with lazyviz.lazy() as graph:
        k = torch.nonzero(torch.randn(3).abs())
        z = k + 1
    assert graph.pending == 1
    assert graph.evaluate().ops_run == 1
    assert graph.nodes[-2].op is torch.ops.aten.nonzero.default
    assert z.tolist() == [[1], [2], [3]]


def test_a_graph_with_a_compiled_call_is_exported_with_its_result_as_an_input():
    function = compiled(lambda x: x * 2)
    with lazyviz.lazy() as graph:
        z = function(torch.ones(3)) + 1
    (result,) = graph.to_fx()(torch.full((3,), 5.0))[-1:]
    assert result.tolist() == [6.0, 6.0, 6.0]
    assert z.tolist() == [3.0, 3.0, 3.0]


def test_a_copied_model_counts_though_no_op_uses_it():
    model = nn.Linear(100, 100)
    size = sum(p.nbytes for p in model.parameters())
    with lazyviz.lazy() as graph:
        target = copy.deepcopy(model)
        torch.ones(2)
    assert graph.plan().eager_peak_bytes == size + 8
    assert target.weight.shape == (100, 100)


def test_a_tensor_that_is_resized_counts_in_its_new_size():
    with lazyviz.lazy() as graph:
        h = torch.zeros(100, 100)
        h.resize_(200, 200)
        t = h + 1
    plan = graph.plan()
    assert [level for _, level in plan.timeline] == [40_000, 200_000, 320_000]
    assert plan.timeline == plan.eager_timeline
    report = graph.evaluate()
    assert report.projected_bytes == report.peak_bytes == 320_000
    assert t.shape == (200, 200)


def test_an_outside_tensor_that_is_resized_counts_in_both_sizes_while_it_is_copied():
    h = torch.zeros(100, 100)
    with lazyviz.lazy() as graph:
        h.resize_(200, 200)
        t = h + 1
    assert [level for _, level in graph.plan().timeline] == [200_000, 320_000]
    report = graph.evaluate()
    assert report.projected_bytes == report.peak_bytes == 320_000
    assert t.shape == h.shape


def test_memory_that_is_released_by_resizing_its_storage_no_longer_counts():
    t = torch.zeros(1000, 100)
    with lazyviz.lazy() as graph:
        a = t * 2
        a.untyped_storage().resize_(0)
        b = torch.ones(1000, 100)
    assert [level for _, level in graph.plan().timeline] == [800_000, 800_000]
    a.untyped_storage().resize_(400_000)
    assert a.nbytes == b.nbytes


def test_storages_that_are_alternately_released_and_refilled_count_one_at_a_time():
    full = [torch.zeros(1000, 100) for _ in range(4)]
    with lazyviz.lazy() as graph:
        for t in full:
            t.add_(0)
            t.untyped_storage().resize_(0)
        for t in full:
            t.untyped_storage().resize_(400_000)
            t.add_(1)
            t.untyped_storage().resize_(0)
    plan = graph.plan()
    assert plan.eager_timeline[-1][1] <= 400_000
    assert max(level for _, level in plan.eager_timeline[4:]) <= 800_000


def test_what_a_run_counts_grows_with_a_result_that_is_written_into_an_empty_tensor():
    a, b = torch.ones(100, 100), torch.ones(100, 100)
    with lazyviz.lazy() as graph:
        out = torch.empty(0)
        torch.mm(a, b, out=out)
    report = graph.evaluate()
    assert report.projected_bytes == report.peak_bytes == graph.plan().peak_bytes == 120_000
    assert out[0, 0] == 100


def test_an_outside_tensor_that_an_op_grows_counts_from_there():
    out = torch.empty(0)
    with lazyviz.lazy() as graph:
        torch.add(torch.ones(100, 100), 1, out=out)
    plan = graph.plan()
    assert plan.peak_bytes == plan.eager_peak_bytes == 80_000
    assert out.shape == (100, 100)
