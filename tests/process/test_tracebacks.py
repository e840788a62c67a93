"""Errors show the user's frames and one of lazyviz; a failed op fails no unrelated op."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.process import tracebacks
from lazyviz.record import native_recorder
from lazyviz.session import lazy_graph

THREE = torch.ones(3)
FAR = torch.tensor([5])


@pytest.fixture(autouse=True)
def nothing_pending():
    yield
    lazyviz.reset()


@pytest.fixture(params=[True, False], ids=["compiled", "python"])
def recorder(request):
    if request.param and not native_recorder.use(True):
        pytest.skip("not compiled")
    native_recorder.use(request.param)
    yield
    native_recorder.use(True)


def failing() -> tuple[torch.Tensor, lazyviz.LazyGraph]:
    with lazyviz.lazy() as graph:
        bad = THREE[FAR + torch.randint(2, (1,))] + 1
    return bad, graph


def shown(call, *args) -> list[str]:
    """The frames of the error that ``call`` raises, below this function's."""
    with pytest.raises(Exception) as caught:
        call(*args)
    entries = tracebacks.frames(caught.value.__traceback__)
    return [entry.tb_frame.f_code.co_filename for entry in entries[1:]]


def ours(files: list[str]) -> list[str]:
    return [file for file in files if "lazyviz" in file and "tests" not in file]


def read_in_a_function(tensor):
    return tensor.tolist()


READS = {
    "tolist": read_in_a_function,
    "print": lambda bad: str(bad),
    "item": lambda bad: bad.item(),
    "op": lambda bad: torch.ones(1).add_(bad),
    "equal": lambda bad: torch.equal(bad, bad),
    "evaluate": lambda bad: lazyviz.evaluate(bad),
    "to_eager": lambda bad: lazyviz.to_eager(bad),
    "sync": lambda bad: lazyviz.sync(),
    "as_tensor": lambda bad: torch.tensor([bad, bad]),
}


@pytest.mark.parametrize("name", READS)
def test_an_error_at_a_sync_point_shows_the_user_s_frames_and_one_of_ours(recorder, name):
    bad, _ = failing()
    files = shown(READS[name], bad)
    assert files[0] == __file__
    assert len(ours(files)) <= 1
    assert not [file for file in files if file.endswith((".pyx", "_ops.py"))]


def test_graph_evaluate_shows_one_frame_of_ours():
    _, graph = failing()
    files = shown(lambda: graph.evaluate())
    assert len(ours(files)) == 1


def test_a_loop_of_steps_shows_one_frame_of_ours():
    rows = [torch.tensor([0, 1])] * 3 + [torch.tensor([0, 9])]

    def loop():
        for row in lazyviz.steps(rows, always_record=True):
            nn.functional.embedding(row, torch.ones(2, 3)).sum()

    files = shown(loop)
    assert len(ours(files)) == 1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4))

    def forward(self, x):
        return self.inner(x)


def in_a_block():
    with lazyviz.lazy():
        Net()(torch.rand(2, 5))


def test_an_error_that_leaves_a_block_shows_the_user_s_modules_and_pytorch_s_and_one_frame_of_ours(recorder):
    files = shown(in_a_block)
    assert len(ours(files)) == 1
    assert files.count(__file__) == 2  # the block, and Net.forward
    assert any(file.endswith("linear.py") for file in files)


def test_no_frame_is_of_a_compiled_module(recorder):
    with lazyviz.lazy():
        try:
            Net()(torch.rand(2, 5))
        except RuntimeError as error:
            names = [entry.tb_frame.f_code.co_filename for entry in tracebacks.frames(error.__traceback__)]
    assert not [name for name in names if name.endswith((".pyx", ".cpp"))]


def test_a_user_s_frames_below_ours_are_kept():
    _, graph = failing()

    def progress(state):
        raise KeyError("stop")

    with pytest.raises(KeyError) as caught:
        graph.evaluate(progress=progress)
    names = [entry.tb_frame.f_code.co_name for entry in tracebacks.frames(caught.value.__traceback__)]
    assert names[-1] == "progress"


def test_causes_and_contexts_are_kept():
    bad, _ = failing()
    with pytest.raises(RuntimeError) as caught:
        try:
            bad.tolist()
        except IndexError as error:
            raise RuntimeError("mine") from error
    assert isinstance(caught.value.__cause__, IndexError)
    with pytest.raises(IndexError) as caught_while:
        try:
            {}["first"]
        except KeyError:
            bad.tolist()
    assert isinstance(caught_while.value.__context__, KeyError)


@pytest.mark.slow
def test_an_error_in_a_script_ends_with_the_user_s_line_and_one_of_ours(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, lazyviz\n"
        "def train():\n"
        "    with lazyviz.lazy():\n"
        "        bad = torch.ones(3)[torch.tensor([5]) + torch.randint(2, (1,))]\n"
        "    print(bad)\n"
        "train()\n"
    )
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    files = re.findall(r'File "(.*?)", line (\d+)', result.stderr)
    assert [(file, line) for file, line in files if file == str(script)] == [
        (str(script), "6"),
        (str(script), "5"),
    ]
    assert len(files) == 3
    assert f"was recorded at {script}:4" in result.stderr


def test_all_frames_are_shown_where_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(tracebacks, "_FULL", True)
    bad, _ = failing()
    assert len(ours(shown(bad.tolist))) > 3


# --- a failed op that stays alive ---------------------------------------------------------------


def test_what_failed_names_its_line_and_what_gets_rid_of_it():
    bad, _ = failing()
    with pytest.raises(
        IndexError, match=r"out of bounds[\s\S]*recorded at .*test_tracebacks.py:\d+"
    ) as caught:
        bad.tolist()
    assert "%lazy reset" in str(caught.value) and "lazyviz.reset()" in str(caught.value)
    lazyviz.reset()
    assert not lazy_graph.metrics()["ops pending"]
    assert torch.ones(2).add(1).tolist() == [2.0, 2.0]


def other_cell() -> torch.Tensor:
    with lazyviz.lazy():
        other = torch.rand(3).sum() * 0 + 2
    return other


def test_evaluating_everything_runs_the_rest_and_then_reports_a_failed_op_once():
    before = other_cell()
    bad, graph = failing()
    after = other_cell()
    with pytest.raises(IndexError, match="out of bounds"):
        lazyviz.sync()
    assert [type(tensor) for tensor in (before, after)] == [torch.Tensor] * 2
    assert graph.state == "failed" and graph.pending == 2
    later = other_cell()
    report = lazyviz.sync()
    assert type(later) is torch.Tensor and later.item() == 2
    assert len(report.left) == 1 and "test_tracebacks.py:" in report.left[0]
    assert "failed again: index_" in str(report)
    with pytest.raises(IndexError, match="out of bounds"):
        bad.tolist()  # who needs it is told each time


def test_what_does_not_need_a_failed_op_is_read_as_if_there_was_none():
    with lazyviz.lazy() as graph:
        good = torch.rand(3) * 0 + 1
        bad = good[FAR]
        best = good + 1
    with pytest.raises(IndexError):
        bad.tolist()
    assert best.tolist() == [2.0] * 3
    with lazyviz.lazy() as another:
        more = best * 2
    assert another.evaluate().ops_run == 1 and more.tolist() == [4.0] * 3
    assert [node.state for node in graph.nodes].count("failed") == 1


def test_several_failed_ops_stop_only_what_needs_them():
    pairs = [(failing()[0], other_cell()) for _ in range(3)]
    with pytest.raises(IndexError):
        lazyviz.sync()
    assert all(type(good) is torch.Tensor for _, good in pairs)
    assert len(lazyviz.sync().left) == 3


def test_an_op_that_failed_because_something_was_missing_runs_with_the_rest_once_it_exists():
    missing = [True]

    @torch.library.custom_op("lazyviz_tests::needs_something", mutates_args=())
    def needs_something(x: torch.Tensor) -> torch.Tensor:
        if missing:
            raise RuntimeError("something is missing")
        return x + 1

    needs_something.register_fake(torch.empty_like)
    with lazyviz.lazy():
        more = needs_something(torch.rand(2) * 0) + 1
    with pytest.raises(RuntimeError, match="something is missing"):
        lazyviz.sync()
    assert lazyviz.sync().left and lazyviz.is_lazy(more)
    missing.clear()
    assert not lazyviz.sync().left
    assert more.tolist() == [2.0, 2.0]


def test_writes_wait_for_a_failed_op_that_reads_what_they_write():
    x = torch.zeros(3)
    with lazyviz.lazy():
        bad = x[FAR]
        x.add_(1)
        y = torch.rand(2)
    with pytest.raises(IndexError):
        lazyviz.sync()
    assert type(y) is torch.Tensor and lazyviz.is_lazy(bad)
    with pytest.raises(IndexError):
        x.tolist()
