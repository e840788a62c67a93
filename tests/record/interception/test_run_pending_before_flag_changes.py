"""Global settings that differ between recording and running an op."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import lazyviz
from lazyviz.torch_internals import private_api

pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration")  # torch's own, at `mkldnn.flags()`


@pytest.fixture
def default_dtype():
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("where", ["in the block", "after it"])
def test_floating_results_of_integers_have_the_default_dtype_they_were_recorded_with(default_dtype, where):
    counts = torch.arange(3)
    real = torch.ones(3)
    torch.set_default_dtype(torch.float64)
    expected = [counts / 3, counts.sqrt(), torch.arange(3).sigmoid()]
    with lazyviz.lazy() as graph:
        results = [counts / 3, counts.sqrt(), torch.arange(3).sigmoid()]
        other = real * 2 + counts
        made = torch.ones(2)
        if where == "in the block":
            torch.set_default_dtype(torch.float32)
    if where == "after it":
        torch.set_default_dtype(torch.float32)
    assert lazyviz.is_lazy(other) and lazyviz.is_lazy(made)  # nothing else had to run
    assert [str(point.cause) for point in graph.sync_points] == ["set_default_dtype"][
        : where == "in the block"
    ]
    graph.evaluate()
    for result, wanted in zip(results, expected):
        assert result.dtype == wanted.dtype == torch.float64 and torch.equal(result, wanted)
    assert made.dtype == torch.float64 and torch.equal(other, real * 2 + counts)


def test_the_same_default_dtype_again_runs_nothing(default_dtype):
    with lazyviz.lazy() as graph:
        torch.arange(3) / 3
        torch.set_default_dtype(torch.float32)
    assert not graph.sync_points


def test_denormal_numbers_are_flushed_where_the_program_said_so():
    tiny = torch.full((4,), 1e-30)
    with lazyviz.lazy() as graph:
        kept = tiny * 1e-10
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor cannot flush denormal numbers")
        try:
            flushed = tiny * 1e-10
        finally:
            torch.set_flush_denormal(False)
        last = tiny * 1e-10
    graph.evaluate()
    assert [bool(item[0] == 0) for item in (kept, flushed, last)] == [False, True, False]
    assert len(graph.sync_points) == 2


def test_flags_of_onednn_hold_for_what_they_surround():
    image, kernel = torch.randn(2, 3, 9, 9), torch.randn(4, 3, 3, 3)
    with torch.backends.mkldnn.flags(enabled=False):
        expected = F.conv2d(image, kernel)
    seen = []
    with lazyviz.lazy() as graph:
        before = F.conv2d(image, kernel)
        with torch.backends.mkldnn.flags(enabled=False):
            result = F.conv2d(image, kernel)
            seen.append(lazyviz.is_lazy(before))
        seen.append(lazyviz.is_lazy(result))
    graph.evaluate()
    assert seen == [False, False] and torch.equal(result, expected)


@pytest.mark.parametrize(
    ("forbid", "allow"),
    [
        (lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False)),
        (lambda: torch.set_deterministic_debug_mode("error"), lambda: torch.set_deterministic_debug_mode(0)),
    ],
    ids=["use_deterministic_algorithms", "set_deterministic_debug_mode"],
)
def test_what_was_recorded_before_algorithms_had_to_be_deterministic_is_not_refused(forbid, allow):
    table, places = torch.zeros(4), torch.tensor([1, 3])
    try:
        with lazyviz.lazy() as graph:
            table.put_(places, torch.ones(2))  # which then raises
            forbid()
            forbid()  # nothing new
        graph.evaluate()
    finally:
        allow()
    assert table.tolist() == [0, 1, 0, 1]
    assert len(graph.sync_points) == 1


def test_a_setting_changed_between_blocks_runs_nothing():
    with lazyviz.lazy():
        pending = torch.ones(3) + 1
    threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    with torch.backends.mkldnn.flags(enabled=False):
        pass
    assert lazyviz.is_lazy(pending)
    assert pending.tolist() == [2, 2, 2]


def test_cudnn_without_its_ctc_loss_runs_nothing():
    """As models do around it, whatever the device; ``ctc_loss`` chooses when it is recorded."""
    with lazyviz.lazy() as graph, torch.backends.cudnn.flags(enabled=False):
        torch.ones(3) + 1
    assert not graph.sync_points


def test_the_inner_module_has_what_its_wrapper_shows():
    assert private_api.mkldnn.set_flags is torch.backends.mkldnn.set_flags


def test_an_op_that_has_failed_does_not_keep_a_setting_from_being_changed_again(deterministic):
    with lazyviz.lazy():
        wrong = torch.zeros(3, 5).index_copy(1, torch.tensor([7]), torch.ones(3, 1))
        follows, other = wrong + 1, torch.ones(3) * 2
        with pytest.raises(IndexError, match="index 7 is out of bounds"):
            torch.use_deterministic_algorithms(True)
        assert not lazyviz.is_lazy(other), "everything else has run"
        torch.use_deterministic_algorithms(True)
        assert torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(False)
        with pytest.raises(IndexError, match="index 7 is out of bounds"):
            follows.tolist()


def test_an_op_that_has_failed_does_not_keep_the_default_dtype_from_being_changed(default_dtype):
    with lazyviz.lazy():
        wrong = torch.arange(3).index_copy(0, torch.tensor([7]), torch.ones(1, dtype=torch.int64))
        with pytest.raises(IndexError, match="index 7 is out of bounds"):
            wrong.tolist()
        follows, other = wrong / 2, torch.arange(3) / 2
        torch.set_default_dtype(torch.float64)
        assert other.dtype == follows.dtype == torch.float32
        assert other.tolist() == [0, 0.5, 1]
