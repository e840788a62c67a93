"""Reads of values evaluate what they need, and are reported; displays evaluate nothing."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import pickle
import sys
import time

import numpy as np
import pytest
import torch

import lazyviz
from lazyviz.graph.ir import SourceLine, SyncPoint
from lazyviz.graph.sync_point_groups import listed, sites

READS = {
    "item": lambda t: t.sum().item(),
    "float": lambda t: float(t.sum()),
    "int": lambda t: int(t.sum()),
    "bool": lambda t: bool(t.sum() > 0),
    "if": lambda t: 1 if t.sum() > 0 else 2,
    "print": lambda t: str(t),
    "format": lambda t: f"{t.sum():.3f}",
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy().copy(),
    "array": lambda t: np.asarray(t).copy(),
    "data_ptr": lambda t: t.data_ptr() != 0,
    "storage": lambda t: t.untyped_storage().nbytes(),
    "dlpack": lambda t: torch.from_dlpack(t).sum().item(),
    "pickle": lambda t: pickle.loads(pickle.dumps(t)).tolist(),
    "save": lambda t: torch.save(t, io.BytesIO()),
    "deepcopy": lambda t: copy.deepcopy(t).tolist(),
    "equal": lambda t: torch.equal(t, t),
    "allclose": lambda t: torch.allclose(t, t),
    "nonzero": lambda t: t.nonzero().tolist(),
    "mask": lambda t: t[t > 0].tolist(),
    "unique": lambda t: t.unique().tolist(),
    "iterate": lambda t: [float(row.sum()) for row in t],
}


@pytest.mark.parametrize("name", READS)
def test_a_read_is_a_sync_point_with_eagers_answer(name):
    x = torch.randn(5, 3)
    read = READS[name]
    expected = read(x * 2 + 1)
    with lazyviz.lazy() as graph:
        y = x * 2 + 1
        assert lazyviz.is_lazy(y)
        got = read(y)
    if isinstance(expected, np.ndarray):
        assert np.array_equal(got, expected)
    elif name != "save":
        assert got == expected
    assert graph.sync_points
    assert graph.sync_points[0].source.text.startswith(("got = read(y)", f'"{name}"'))
    assert graph.sync_points[0].ops >= 2
    assert type(y) is torch.Tensor


def test_repr_and_display_never_run_the_graph():
    x = torch.randn(8, 512)
    weight = torch.nn.Parameter(torch.ones(3))
    with lazyviz.lazy() as graph:
        y = x * 2
        with torch.no_grad():
            weight.add_(1)
        assert repr(y) == "lazy[8, 512] float32 cpu, pending"
        assert repr([y]) == "[lazy[8, 512] float32 cpu, pending]"
        assert f"{y!r}" == repr(y)
        assert "pending write" in repr(weight)
        assert "pending" in repr(graph)
    assert "pending write" in repr(weight)
    assert graph.pending == len(graph.nodes) and not graph.sync_points
    graph.evaluate()
    assert repr(weight) == "Parameter containing:\ntensor([2., 2., 2.], requires_grad=True)"


def test_no_sync_makes_a_read_an_error_that_names_the_line():
    x = torch.randn(3)
    with pytest.raises(lazyviz.SyncError, match=r"item needs .* total = y.sum\(\).item\(\)"):
        with lazyviz.lazy(allow_sync=False):
            y = x * 2
            total = y.sum().item()
    assert not torch.overrides.is_tensor_method_or_property(total) if "total" in locals() else True
    assert torch.equal(y, x * 2)


def test_forbid_sync_covers_plain_code_too():
    x = torch.randn(3)
    with lazyviz.lazy():
        y = x * 2
    with lazyviz.forbid_sync(), pytest.raises(lazyviz.SyncError):
        y.tolist()
    assert y.tolist() == (x * 2).tolist()


def test_small_known_cpu_values_are_no_sync_points():
    with lazyviz.lazy() as graph:
        assert torch.arange(4).tolist() == [0, 1, 2, 3]
        assert torch.tensor(1e-3).item() == pytest.approx(1e-3)
        step = torch.tensor(0.0)
        for _ in range(3):
            step += 1
        assert step.item() == 3.0
        mask = torch.tensor([True, False])
        assert mask.any()
    assert [point.cause for point in graph.sync_points] == []


def test_shapes_that_known_values_decide_are_no_sync_points():
    def program(x, mask):
        selected = x * 2
        picked = selected[mask], selected.masked_select(mask), x.repeat_interleave(torch.tensor([2, 0, 1]), 0)
        return *picked, mask.nonzero(), torch.combinations(x[0]), torch.arange(4).unique()

    x, mask = torch.randn(3, 4), torch.tensor([True, False, True]).unsqueeze(1).expand(3, 4).clone()
    expected = program(x, mask)
    with lazyviz.lazy() as graph:
        result = program(x, mask)
        assert not graph.sync_points
        mask.logical_not_()
        other = x[mask]  # known to have changed
    graph.evaluate()
    assert not graph.sync_points
    assert all(torch.equal(left, right) for left, right in zip(expected, result))
    assert torch.equal(other, x[mask])


def test_an_index_that_is_known_to_be_wrong_fails_at_its_line():
    x, mask = torch.randn(3, 4), torch.ones(2, dtype=torch.bool)
    with pytest.raises(IndexError) as eager:
        x[mask]
    with pytest.raises(IndexError) as lazy, lazyviz.lazy():
        x[mask]
    assert str(lazy.value) == str(eager.value)


def test_a_known_value_is_forgotten_once_unknown_data_is_written():
    x = torch.randn(3, 3)
    with lazyviz.lazy() as graph:
        total = torch.zeros(())
        total += 1
        total += x.sum()
        got = total.item()
    assert got == (torch.zeros(()) + 1 + x.sum()).item()
    assert [point.cause for point in graph.sync_points] == ["item"]


def test_sync_inside_the_block_evaluates_only_what_is_needed():
    x = torch.randn(3)
    with lazyviz.lazy() as graph:
        y = x + 1
        z = x + 2
        y.tolist()
        assert not lazyviz.is_lazy(y)
        assert lazyviz.is_lazy(z)
    assert graph.pending == 1


def test_kernels_that_run_at_a_sync_point_see_the_conjugate_tensors_they_make():
    def program():
        matrix = torch.randn(5, 3, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
        inverse = torch.linalg.pinv(matrix)
        total = inverse.abs().sum().item()
        solution = torch.linalg.lstsq(matrix.mT, matrix.mT * 2 + 1, driver="gels")
        return inverse, total, solution.residuals

    expected = program()
    with lazyviz.lazy() as graph:
        result = program()
    graph.evaluate()
    assert torch.equal(result[0], expected[0]) and torch.equal(result[2], expected[2])
    assert result[1] == expected[1]


@pytest.mark.parametrize("inside", [True, False])
def test_functions_that_run_python_on_each_element_wait_and_are_waited_for(inside):
    def program():
        x, z, w = torch.ones(2), torch.full((2,), 5.0), torch.ones(2)
        before = x * 3
        z.add_(4)
        if not inside:
            block.__exit__(None, None, None)
        x.apply_(lambda v: v + 7)
        x.map_(z, lambda a, b: a + b)
        w.map2_(x, z, lambda a, b, c: a + b + c)
        before.apply_(lambda v: v + 1)
        return [x, z, w, before]

    block = contextlib.nullcontext()
    expected = program()
    block = lazyviz.lazy()
    block.__enter__()
    found = program()
    if inside:
        block.__exit__(None, None, None)
    lazyviz.sync()
    assert [t.tolist() for t in found] == [t.tolist() for t in expected]


# --- what is said of them -----------------------------------------------------------------------


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library that is installed, and reads a value for its caller."""
    folder = tmp_path / "site-packages" / "fitting"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "trainer.py").write_text("def train(loss):\n    copied = loss * 1\n    return copied.item()\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    yield importlib.import_module("fitting.trainer")
    for name in ("fitting", "fitting.trainer"):
        sys.modules.pop(name, None)


def test_a_sync_point_names_the_user_s_line_and_the_library_s_line_that_read_the_value(library):
    with lazyviz.lazy() as graph:
        for _ in range(3):
            library.train(torch.rand(2).sum() + 1)
    point = graph.sync_points[0]
    assert point.source.text == "library.train(torch.rand(2).sum() + 1)"
    assert (point.reader.short, point.reader.text) == ("fitting/trainer.py:3", "return copied.item()")
    (site,) = sites(graph.sync_points)
    line = point.source.line
    assert str(site) == f"item, test_sync_points.py:{line}, in fitting/trainer.py:3, x 3"
    assert str(site) in graph.text() and str(site) in graph.plan().explain()
    assert f"item at test_sync_points.py:{line}, in fitting/trainer.py:3" in lazyviz.why()


def test_pytorch_s_own_line_is_named_where_it_reads_for_the_user():
    w = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.LBFGS([w], max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = w.square().sum()
        loss.backward()
        return loss

    with lazyviz.lazy() as graph:
        optimizer.step(closure)
    readers = {point.reader.short.partition(":")[0] for point in graph.sync_points}
    assert readers == {"torch/optim/lbfgs.py"}


@pytest.mark.parametrize("read", [lambda t: t.item(), lambda t: 2.0 in t.view(1), pickle.dumps, float, print])
def test_what_the_user_reads_himself_has_no_other_reader(read):
    with lazyviz.lazy() as graph:
        read(torch.rand(3).sum())
    assert graph.sync_points and all(point.reader is None for point in graph.sync_points)


def test_a_refused_sync_names_both_lines(library):
    with pytest.raises(lazyviz.SyncError, match=r"test_sync_points.py:\d+, in fitting/trainer.py:3"):
        with lazyviz.lazy(allow_sync=False):
            library.train(torch.rand(2).sum())


def test_a_sync_point_can_be_made_of_its_first_fields_alone():
    point = SyncPoint("item", SourceLine("train.py", 4, "x.item()"), 3, 0.5, 4)
    assert str(sites([point] * 300)[0]) == "item, train.py:4, x 300"
    assert str(point.source) == "train.py:4"


def test_thousands_of_sync_points_are_listed_quickly():
    line = SourceLine("train.py", 4, "x.item()")
    points = [SyncPoint("item", line, 3, 0.5, 4, at) for at in range(100_000)]
    start = time.perf_counter()
    (site,) = sites(points)
    assert time.perf_counter() - start < 2
    assert (site.count, site.ops) == (100_000, 300_000)


def test_many_places_are_listed_up_to_a_number():
    points = [SyncPoint("item", SourceLine("train.py", at, ""), 1, 0.5, 4, at) for at in range(30)]
    lines = listed(points + points)
    assert len(lines) == 21
    assert lines[-1] == "and 20 more sync points, at 10 other lines"
