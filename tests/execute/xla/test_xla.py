"""Whole recorded steps, compiled by XLA: equal to eager within rounding, or run by eager kernels."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.execute import backend_registry
from lazyviz.testing import PROGRAMS, check_backend
from lazyviz.torch_internals import functionalization

jax = pytest.importorskip("jax", reason="the extra xla is not installed")
if find_spec("torchax") is None:  # not imported as it is: see lazyviz/torch_internals/torchax_lowerings.py
    pytest.skip("the extra xla is not installed", allow_module_level=True)

from lazyviz.execute.xla import backend as xla_backend  # noqa: E402
from lazyviz.execute.xla.backend import XlaBackend  # noqa: E402

from ..compiled_training import reports_of_training_as_eager_does  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture
def xla(monkeypatch):
    """A backend of its own, with nothing compiled yet."""
    backend = XlaBackend()
    monkeypatch.setitem(backend_registry._backends, "xla", backend)
    return backend


@pytest.fixture(scope="module")
def shared():
    """One backend for the programs of ``lazyviz.testing``: operators are looked at once."""
    return XlaBackend()


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_programs_of_the_conformance_tests_are_right(shared, program, monkeypatch):
    monkeypatch.setitem(backend_registry._backends, "xla", shared)
    share = check_backend("xla", program)
    # Random operators and MKL-DNN's recurrent layers run by themselves.
    partly = program in ("dropout and noise", "an LSTM with Adagrad")
    assert 0.95 < share < 1 if partly else share == 1.0


def test_training_is_eagers_and_is_compiled_for_the_first_and_for_all_later_steps(xla):
    def model():
        # A bias before a norm has a gradient of rounding alone, which Adam makes large.
        return nn.Sequential(nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))

    reports_of_training_as_eager_does("xla", model, (5, 4))
    assert not jax.config.jax_enable_x64  # the user's own setting


def test_memory_that_jax_releases_late_is_written_without_a_sync_point(xla, monkeypatch):
    kept, to_jax = [], xla_backend.to_jax

    def keep(*args):
        kept.append(to_jax(*args))
        return kept[-1]

    monkeypatch.setattr(xla_backend, "to_jax", keep)  # JAX does, when it is busy
    counter = torch.zeros(3)
    for count in range(1, 4):
        with lazyviz.lazy(backend="xla") as graph:
            counter.add_(1)
        report = graph.evaluate()
        assert (graph.sync_points, report.share, report.cache_hit) == ([], 1.0, count > 1)
        assert counter.tolist() == [count] * 3
    assert len(kept) == 3


def test_memory_that_a_user_gave_to_jax_is_written_at_a_sync_point(xla):
    counter = torch.zeros(3)
    array = jax.dlpack.from_dlpack(counter)
    with lazyviz.lazy(backend="xla") as graph:
        counter.add_(1)
    assert [point.cause.partition(";")[0] for point in graph.sync_points] == [
        "write to counter, whose memory a DLPack consumer shares"
    ]
    assert array.shape == (3,)


def test_results_are_ordinary_memory(xla):
    x = torch.arange(6.0).reshape(2, 3)
    with lazyviz.lazy(backend="xla") as graph:
        y = (x + 1).t()
        z = y[1]
    assert graph.evaluate().share == 1.0
    assert y.stride() == (1, 3) and y.untyped_storage().resizable()
    z.zero_()
    assert y.tolist() == [[1, 4], [0, 0], [3, 6]]


def test_views_that_came_in_see_what_is_written_through_others(xla):
    base, other = torch.arange(12.0), torch.arange(12.0)

    def write(whole, table, column):
        table.mul_(2)
        column.add_(whole[:3])
        return column.sum()

    def views(of):
        return of, of.view(3, 4)[:, 1:], of.view(3, 4)[:, 0]

    expected = write(*views(other))
    given = views(base)
    with lazyviz.lazy(backend="xla") as graph:
        total = write(*given)
    assert graph.evaluate().share == 1.0
    assert torch.equal(base, other) and torch.equal(total, expected)


def test_memory_that_changes_places_is_read_before_it_is_written(xla):
    x, y, z = torch.zeros(3), torch.ones(3), torch.full((3,), 2.0)
    with lazyviz.lazy(backend="xla") as graph:
        kept = x.clone()
        x.copy_(y)
        y.copy_(z)
        z.copy_(kept)
    assert graph.evaluate().share == 1.0
    assert [each.tolist() for each in (x, y, z, kept)] == [[1] * 3, [2] * 3, [0] * 3, [0] * 3]


def test_integers_keep_all_of_their_digits(xla):
    x = torch.tensor([2**53 + 1, -(2**62), 7, -7])
    with lazyviz.lazy(backend="xla") as graph:
        results = [x * 3 - 1, x // 2, x % 4, x.sum(), x.cumsum(0), x.to(torch.uint8), x >> 3, x << 1]
    report = graph.evaluate()
    expected = [x * 3 - 1, x // 2, x % 4, x.sum(), x.cumsum(0), x.to(torch.uint8), x >> 3, x << 1]
    assert all(torch.equal(*pair) for pair in zip(results, expected))
    assert report.share == 1.0


def test_values_that_a_kernel_refuses_are_refused_by_it(xla):
    table, numbers = torch.randn(4, 2), torch.tensor([6, 8])

    def run(index, divisor):
        with lazyviz.lazy(backend="xla") as graph:
            rows = table[index] + 1
            quotient = numbers // divisor
        return graph, rows, quotient

    good, divisor = torch.tensor([1, -1]), torch.tensor([2, 4])
    graph, rows, quotient = run(good, divisor)
    assert graph.evaluate().share == 1.0
    assert torch.equal(rows, table[good] + 1) and quotient.tolist() == [3, 2]
    graph, _, _ = run(torch.tensor([1, 4]), divisor)
    with pytest.raises(IndexError, match="out of bounds"):
        graph.evaluate()
    graph, _, _ = run(good, torch.tensor([2, 0]))
    with pytest.raises(RuntimeError, match="ZeroDivision"):
        graph.evaluate()
    graph, rows, _ = run(good, divisor)
    assert graph.evaluate().cache_hit and torch.equal(rows, table[good] + 1)


def test_random_numbers_are_drawn_by_pytorch_between_segments(xla):
    x = torch.ones(50)
    torch.manual_seed(1)
    expected = nn.functional.dropout(x * 2) + torch.randn(50)
    torch.manual_seed(1)
    with lazyviz.lazy(backend="xla") as graph:
        y = nn.functional.dropout(x * 2) + torch.randn(50)
    report = graph.evaluate()
    assert torch.equal(y, expected)
    assert report.share < 1
    assert any("bernoulli_" in reason and "draws random numbers" in reason for reason in report.fallbacks)


def test_what_xla_does_not_have_runs_op_by_op_and_the_report_says_why(xla):
    x = torch.eye(3) * 2
    with lazyviz.lazy(backend="xla") as graph:
        windows = (x + 1).as_strided((3, 2), (2, 1))
        inverse = torch.linalg.inv(x)
        y = (inverse + 1).sum() + windows.sum()
    report = graph.evaluate()
    assert torch.equal(y, (torch.linalg.inv(x) + 1).sum() + (x + 1).as_strided((3, 2), (2, 1)).sum())
    assert 0 < report.share < 1
    for word in ("as_strided", "linalg_inv"):
        assert any(word in reason and "test_xla.py" in reason for reason in report.fallbacks)


def test_code_that_is_not_right_is_found_out_and_never_runs_again(xla, monkeypatch):
    from lazyviz.execute.xla import ops as xla_ops

    monkeypatch.setitem(xla_ops.OWN, torch.ops.aten.tanh.default, lambda x: x)
    xla_ops.lowering_of.cache_clear()
    x, total = torch.randn(5), torch.zeros(5)
    try:
        for run in range(2):
            with lazyviz.lazy(backend="xla") as graph:
                y = (x * 2).tanh()
                total += y
            report = graph.evaluate()
            assert torch.equal(y, (x * 2).tanh()) and torch.allclose(total, y * (run + 1))
            assert report.share == 0
            assert any("tanh" in reason and "was wrong" in reason for reason in report.fallbacks)
    finally:
        xla_ops.lowering_of.cache_clear()


def test_without_jax_the_backend_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(backend_registry, "find_spec", lambda name: None)
    monkeypatch.delitem(backend_registry._backends, "xla", raising=False)
    message = r"needs the packages jax and torchax: pip install 'lazyviz\[xla\]'"
    with pytest.raises(ValueError, match=message), lazyviz.lazy(backend="xla"):
        pass
    with lazyviz.lazy() as graph:
        torch.ones(2) + 1
    assert dict(graph.backends())["xla"].endswith("pip install 'lazyviz[xla]'")


def test_importing_torchax_changes_nothing_for_others():
    code = """
import os, sys
import jax
import torch

def state():
    options = jax.config.values.get("jax_pjrt_client_create_options")
    device = torch._C._get_privateuse1_backend_name()
    return options, jax.config.jax_enable_x64, device, hasattr(torch, "jax"), dict(os.environ)

before = state()
overloads = set(dir(torch.ops.aten.prod))
from lazyviz.torch_internals import torchax_lowerings
assert torch.ops.aten.mm in torchax_lowerings.lowerings()
assert torch.backends.mha.get_fastpath_enabled()
assert state() == before
assert "dim_Dimname" not in set(dir(torch.ops.aten.prod)) - overloads
assert not any(name.startswith("torchax") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_functional_graph_writes_nothing_but_its_inputs_at_the_end():
    def program(x, number):
        y = x.t()
        y.add_(number.item())
        return x.sum()

    spec = ((2, 3), (3, 1), torch.float32, torch.device("cpu"))
    graph = functionalization.functional_graph(
        program, [spec], [1.0], functionalization.decompositions()
    ).graph
    calls = [node for node in graph.nodes if node.op == "call_function"]
    writes = [node for node in calls if torch.ops.aten.copy_.default is node.target]
    assert [node.args[0].op for node in writes] == ["placeholder"]
    assert not any(
        getattr(node.target, "_schema", None) and node.target._schema.is_mutable
        for node in calls
        if node not in writes
    )
    assert torch.ops.aten._local_scalar_dense.default in [node.target for node in calls]
