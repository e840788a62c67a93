"""The ``%%lazy`` and ``%lazy`` magics in an IPython shell."""

from __future__ import annotations

import re
import sys
import time

import nbclient
import nbformat
import pytest
import torch
from IPython.core.completer import provisionalcompleter
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

import lazyviz
from lazyviz.notebook import magic
from lazyviz.record.tape import tape
from lazyviz.session import lazy_graph, why_it_ran_and_status
from lazyviz.session.asynchronous import unrecorded_steps
from lazyviz.torch_internals import op_stream
from lazyviz.view.scene.scene import Scene


class Cells:
    """Runs cells as a notebook would, and tells what was printed."""

    def __init__(self, shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
        self.shell = shell
        self.capsys = capsys
        self.output = ""

    def __call__(self, cell: str):
        self.capsys.readouterr()
        result = self.shell.run_cell(cell, store_history=True)
        captured = self.capsys.readouterr()
        self.output = captured.out + captured.err
        return result

    def __getitem__(self, name: str):
        return self.shell.user_ns[name]

    def __contains__(self, name: str) -> bool:
        return name in self.shell.user_ns


@pytest.fixture
def shell(new_shell):
    return new_shell


@pytest.fixture
def run(shell, capsys, monkeypatch):
    # What the pictures look like is the view's to test; here it counts that they are shown.
    monkeypatch.setattr(lazy_graph.LazyGraph, "text", lambda graph: f"TEXT OF {graph!r}")
    monkeypatch.setattr(
        lazy_graph.LazyGraph, "static_bundle", lambda graph, scene=None: {"text/plain": "STATIC"}
    )
    cells = Cells(shell, capsys)
    magic.load_ipython_extension(shell)
    assert cells("import torch").success
    return cells


# --- a cell that works ---------------------------------------------------------------------


def test_a_lazy_cell_records_and_shows_its_graph_without_running(run):
    assert run("%%lazy --as g\nx = torch.ones(3)\ny = x + 1").success
    assert run["g"] is run["_lazy"]
    assert run["g"].pending == 2
    assert "TEXT OF <LazyGraph: 2 ops, 2 pending" in run.output
    assert lazyviz.is_lazy(run["y"])


def test_the_last_expression_is_the_cell_s_result(run):
    result = run("%%lazy\nx = torch.ones(3)\nx + 1")
    assert lazyviz.is_lazy(result.result)
    assert "Out[2]: lazy[3] float32 cpu, pending" in run.output
    assert run["_"] is result.result


def test_a_semicolon_silences_the_result(run):
    result = run("%%lazy\nx = torch.ones(3)\nx + 1;")
    assert result.result is None
    assert "Out[" not in run.output


def test_a_cell_of_plain_python_has_an_empty_graph(run):
    assert run("%%lazy\na = 1 + 1\na").result == 2
    assert run["_lazy"].pending == 0


def test_now_evaluates_at_the_end_and_still_shows_the_graph(run):
    result = run("%%lazy --now\ny = torch.ones(3) + 1\ny")
    assert "TEXT OF <LazyGraph: 2 ops, 0 pending" in run.output
    assert "Evaluated: 2 ops" in run.output
    assert torch.equal(result.result, torch.full((3,), 2.0))
    assert type(result.result) is torch.Tensor


def test_async_does_not_wait_and_ends_by_itself(run):
    run("import torch\nx = torch.rand(300, 300)")
    cell = "%%lazy --async --as step\ny = x\nfor _ in range(20):\n    y = (y @ x) / 300"
    for _ in range(3):
        assert run(cell).success
    step = run["step"]
    deadline = time.monotonic() + 60
    while step.state != "done" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert step.state == "done" and type(run["y"]) is torch.Tensor
    assert step.runs.report.ops_run == 40
    assert tape.runs.background is None


def test_an_error_of_an_async_cell_comes_where_it_is_read(run):
    run("import torch\ntable = torch.rand(5)\nat = torch.tensor([1])")
    for _ in range(4):
        assert run("%%lazy --async\ny = table[at] * 2").success
    run("at[0] = 9")
    run("%%lazy --async\ny = table[at] * 2")
    result = run("print(y)")
    assert isinstance(result.error_in_exec, IndexError)
    run("%lazy reset")


TRAINING = """
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters())
losses = []
for epoch in range(2):
    for x, y in data:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    epochs = epoch + 1
"""
TRAINING_DATA = """
import torch
torch.manual_seed(0)
data = [(torch.randn(5, 6), torch.randint(3, (5,))) for _ in range(4)]
"""


def test_a_cell_can_run_each_round_of_its_loop_while_it_records_the_next(run):
    run(TRAINING_DATA)
    run("torch.manual_seed(1)" + TRAINING)
    expected = [*run["losses"], *(item.detach().clone() for item in run["model"].parameters())]
    state = torch.get_rng_state()
    run("torch.manual_seed(1)")
    assert run("%%lazy --loop --as step" + TRAINING).success
    step = run["step"]
    assert step.state == "done" and not tape.pending and tape.runs.background is None
    assert {node.phase for node in step.nodes} == {"forward", "backward", "optimizer"}  # one round, no setup
    assert sum(node.op.name() == "aten::nll_loss_forward" for node in step.nodes) == 1
    found = [*run["losses"], *(item.detach() for item in run["model"].parameters())]
    assert all(type(item) is torch.Tensor for item in found)
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert run["epochs"] == 2 and "_lazyviz_rounds" not in run.shell.user_ns
    lines = {node.source.line for node in step.nodes if node.source is not None}
    assert lines <= set(range(8, 13))  # of the inner loop, as the user counts them


@pytest.mark.parametrize(
    ("cell", "nodes"),
    [
        ("for x in xs:\n    y = x * 2", 1),  # no step: the outermost
        ("for x in xs:\n    for _ in range(3):\n        y = x * 2", 3),
        ("y = 0\nfor x in xs:\n    y = y + x\nz = y * 2", 1),  # what follows is evaluated, too
        ("if True:\n    with torch.no_grad():\n        for x in xs:\n            y = x * 2", 1),
        ("for x in xs:\n    y = x * 2\n    if x is xs[1]:\n        break", 1),
        ("y = xs[0]\nfor x in []:\n    y = x * 2\ny = y + 1", 1),  # without a round: all the cell records
    ],
)
def test_rounds_of_a_cell_are_those_of_its_loop(run, cell, nodes):
    run("import torch\nxs = [torch.full((3,), float(at)) for at in range(3)]")
    run(cell)
    names = [name for name in "yz" if name in run.shell.user_ns]
    expected = {name: run[name].clone() for name in names}
    assert run("%%lazy --loop --as step\n" + cell).success
    assert len(run["step"].nodes) == nodes and run["step"].state == "done"
    assert not tape.pending
    for name in names:
        assert torch.equal(run[name], expected[name])


@pytest.mark.skipif(not op_stream.is_available, reason="without it, each round is recorded")
@pytest.mark.parametrize("end", ["", "    if number == 30:\n        break\n"])
def test_rounds_of_a_known_program_run_in_eager_mode_and_what_follows_is_recorded(run, end):
    run("import torch\nx = torch.ones(4)")
    run("from lazyviz import is_lazy\nlazy = []")
    cell = f"for number in range(40):\n    x = x * 2 / 2 + 1\n    lazy.append(is_lazy(x))\n{end}y = x + 1"
    unrecorded_steps.programs.clear()
    assert run("%%lazy --loop --as step\n" + cell + "\nlate = is_lazy(y)").success
    rounds = 31 if end else 40
    assert run["lazy"] == [True] * 8 + [False] * (rounds - 8) and run["late"]
    assert run["x"].tolist() == [rounds + 1] * 4 and run["y"].tolist() == [rounds + 2] * 4
    assert not tape.pending and lazyviz.doctor().ok


@pytest.mark.skipif(not op_stream.is_available, reason="without it, each round is recorded")
def test_an_error_in_a_round_that_was_not_recorded_shows_the_last_recorded_one(run):
    run("import torch\nx = torch.ones(4)")
    result = run("%%lazy --loop --as step\nfor number in range(20):\n    x = x.mul(2)\n    1 / (15 - number)")
    assert isinstance(result.error_in_exec, ZeroDivisionError)
    assert [node.op.name() for node in run["step"].nodes] == ["aten::mul.Tensor"]
    assert run["x"].tolist() == [2.0**16] * 4 and not tape.pending


def test_a_micro_batch_is_no_round_and_a_read_is_a_sync_point(run):
    run(TRAINING_DATA)
    cell = """
model = torch.nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen = []
for step in range(3):
    for x, y in data[:2]:
        torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    seen.append(model.weight.sum().item())
"""
    run("torch.manual_seed(1)" + cell)
    expected = run["seen"]
    run("torch.manual_seed(1)")
    assert run("%%lazy --loop --as step" + cell).success
    assert run["seen"] == expected
    assert sum(node.op.name() == "aten::nll_loss_forward" for node in run["step"].nodes) == 2
    assert [point.cause for point in run["step"].sync_points] == ["item"]


def test_a_step_of_an_environment_is_no_round(run):
    run("import torch")
    cell = """
class Environment:
    def step(self, action):
        return action.detach() * 0.5
environment, net = Environment(), torch.nn.Linear(3, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for episode in range(3):
    state, rewards = torch.ones(3), []
    for time in range(4):
        state = environment.step(net(state))
        rewards.append(net(state).sum())
    torch.stack(rewards).sum().backward()
    optimizer.step()
"""
    run("torch.manual_seed(1)" + cell)
    expected = run["net"].weight.detach().clone()
    run("torch.manual_seed(1)")
    assert run("%%lazy --loop --as step" + cell).success
    assert torch.equal(run["net"].weight, expected)
    assert sum(node.op.name() == "aten::addmm" for node in run["step"].nodes) == 8  # all of an episode


def test_an_error_in_a_round_shows_that_round(run):
    run("import torch\nxs = [torch.ones(2), torch.ones(3)]")
    result = run("%%lazy --loop --as step\nfor x in xs:\n    y = x * 2 + torch.ones(2)")
    assert isinstance(result.error_in_exec, RuntimeError)
    assert len(run["step"].nodes) == 2  # `x * 2` and `ones` of the second round
    assert "_lazyviz_rounds" not in run.shell.user_ns
    run("%lazy reset")


def test_a_loop_says_how_many_iterations_are_not_in_the_graph(run):
    run("import torch\nxs = [torch.full((3,), float(at)) for at in range(40)]")
    unrecorded_steps.programs.clear()
    run("%%lazy --loop --as g\nfor x in xs[:3]:\n    y = x * 2 + 1")
    assert "eager mode" not in run.output
    run("%%lazy --loop --as g\nfor x in xs:\n    y = x * 2 + 1")
    found = re.search(r"(\d+) iterations ran in eager mode", run.output)
    if op_stream.is_available:
        assert found is not None and 0 < int(found[1]) < 40, run.output
        assert len(run["g"].nodes) == 2
    else:
        assert found is None


def test_an_error_of_a_kernel_in_a_round_ends_the_loop(run):
    run("import torch\ntable = torch.rand(5)\nats = [torch.tensor([at]) for at in (1, 2, 9, 3)]")
    result = run("%%lazy --loop\nfor at in ats:\n    y = table[at] * 2")
    assert isinstance(result.error_in_exec, IndexError)
    run("%lazy reset")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--now", "without --now"),
        ("--async", "without --async"),
        ("--batch x", "without --batch"),
        ("--recompute auto", "without --recompute"),
        ("--device A100-40GB", "not on this machine"),
    ],
)
def test_a_loop_refuses_options_that_it_does_not_support(run, options, text):
    run("import torch\nx = torch.ones(2)")
    run(f"%%lazy --loop {options}\nfor _ in range(2):\n    y = x * 2")
    assert text in run.output


def test_a_loop_in_a_function_is_no_loop_of_the_cell(run):
    run("%%lazy --loop\ndef train():\n    for _ in range(2):\n        pass\ntrain()")
    assert "lazyviz.steps" in run.output


def test_a_loop_in_what_records_already_is_a_part_of_it(run):
    run("import torch, lazyviz")
    inner = "for at in range(3):\\n    y = torch.ones(2) * at"
    cell = f"get_ipython().run_cell_magic('lazy', '--loop --as inner', '{inner}')"
    run(f"with lazyviz.lazy() as outer:\n    {cell}")
    assert len(run["inner"].nodes) == 6
    run("%lazy reset")


def test_shell_escapes_and_line_magics_work_inside(run):
    assert run("%%lazy\n!echo from the shell\n%time y = torch.ones(2)\ny").success
    assert "from the shell" in run.output
    assert "Wall time" in run.output
    assert run["_lazy"].pending == 1


def test_future_imports_of_earlier_cells_hold(run):
    run("from __future__ import annotations")
    run("%%lazy\ndef f(x: not_defined_anywhere): pass\nf.__annotations__")
    assert run["_"] == {"x": "not_defined_anywhere"}


def test_ops_carry_the_line_of_the_cell_as_the_user_counts_it(run):
    run("\n\n%%lazy\n\nx = torch.ones(3)\ny = x + 1")
    assert [(node.source.line, node.source.text) for node in run["_lazy"].nodes] == [
        (5, "x = torch.ones(3)"),
        (6, "y = x + 1"),
    ]


def test_the_magic_can_be_called_from_code(run):
    run.shell.run_cell_magic("lazy", "--as g", "y = torch.ones(3)\n")
    assert run["g"].pending == 1
    assert run["g"].nodes[0].source.line == 2  # as if %%lazy stood above it


def lines_of(run):
    return [(str(node.source), node.source.text) for node in run["_lazy"].nodes]


@pytest.mark.parametrize(
    ("above", "below"),
    [
        ("%%lazy\n%%time\n", ""),
        ("%%lazy --as g\n\n%%time\n\n", ""),
        ("%%time\n%%lazy\n", ""),
        ("%%lazy\n%%capture out\n", ""),
        ("%%capture out\n%%lazy\n", ""),
        ("%%lazy\n%%timeit -n 1 -r 1\n", ""),
        ("%%timeit -n 1 -r 1\n%%lazy\n", ""),
        ("%%lazy\n%%capture\n%%time\n", ""),
        ("%%lazy\n%%prun -q\n", ""),
    ],
)
def test_other_cell_magics_around_the_code_keep_its_line_numbers(run, above, below):
    run(f"{above}y = torch.rand(3)\nv = y + 1")
    first = above.count("\n") + 1
    assert lines_of(run) == [
        (f"cell [2], line {first}", "y = torch.rand(3)"),
        (f"cell [2], line {first + 1}", "v = y + 1"),
    ]


def test_a_sync_point_below_another_magic_is_at_its_line(run):
    run("%%lazy\n%%time\ny = torch.rand(3)\nv = y.tolist()")
    (point,) = run["_lazy"].sync_points
    assert (str(point.source), point.source.text) == ("cell [2], line 4", "v = y.tolist()")


def test_what_a_line_magic_runs_is_at_its_own_line(run):
    run("%%lazy\n%%time\ny = torch.rand(3)\n\n%time v = y + 1")
    assert [line for line, _ in lines_of(run)] == ["cell [2], line 3", "cell [2], line 5"]


def test_what_timeit_runs_in_a_line_is_at_that_line(run):
    run("%%lazy\n%%capture\ny = torch.rand(3)\n\n%timeit -n 1 -r 1 y + 1")
    assert [line for line, _ in lines_of(run)] == ["cell [2], line 3", "cell [2], line 5"]


@pytest.mark.parametrize("above", ["%%capture out\n", "\n%%capture\n\n", "%%lazy\n%%capture\n"])
def test_a_function_keeps_the_lines_of_the_cell_whose_output_was_captured(run, above):
    run(f"{above}def f(t):\n    return t + 1")
    run("%%lazy\nv = f(torch.rand(3))")
    line = above.count("\n") + 2
    assert lines_of(run)[1] == (f"cell [2], line {line}", "return t + 1")
    run("def f(t):\n    return t + 1")
    run("%%lazy\nv = f(torch.rand(3))")
    assert lines_of(run)[1] == ("cell [4], line 2", "return t + 1")


def test_a_block_whose_output_is_captured_has_the_cell_s_lines(run):
    run("%%capture\nimport lazyviz\nwith lazyviz.lazy() as g:\n    v = torch.rand(3).tolist()")
    (point,) = run["g"].sync_points
    assert str(run["g"].nodes[0].source) == str(point.source) == "cell [2], line 4"


def test_a_function_defined_below_another_magic_has_its_lines(run):
    run("%%lazy\n%%time\ndef f(t):\n    return t + 1\nv = f(torch.rand(3))")
    assert lines_of(run)[1] == ("cell [2], line 4", "return t + 1")


def test_a_block_below_a_magic_has_the_cell_s_lines(run):
    run("import lazyviz")
    run("%%time\nwith lazyviz.lazy() as g:\n    y = torch.rand(3)")
    assert [str(node.source) for node in run["g"].nodes] == ["cell [3], line 3"]


def test_an_error_below_another_magic_shows_the_magic_as_it_was_typed(run):
    run("%%lazy\n%%time\n1 / 0")
    assert "----> 2 %%time" in run.output and "ZeroDivisionError" in run.output
    assert "# %%lazy" not in run.output


def test_magics_that_run_no_python_get_their_text_as_it_is(run):
    seen = []
    run.shell.register_magic_function(lambda line, cell: seen.append((line, cell)), "cell", "notes")
    run("%%lazy\n%%notes a b\nfirst\nsecond")
    assert seen == [("a b", "first\nsecond\n")]


# --- a cell that fails ------------------------------------------------------------------------


def test_an_exception_appears_once_at_the_user_s_line(run):
    result = run("%%lazy\nx = torch.ones(3)\n\nundefined_name\n")
    assert isinstance(result.error_in_exec, NameError)
    assert run.output.count("----> 4 undefined_name") == 1
    assert run.output.count("undefined_name\n") == 1
    assert "Cell In[2], line 4" in run.output
    assert "run_cell_magic" not in run.output
    assert "magic.py" not in run.output


def test_a_shape_mismatch_appears_at_the_user_s_line_without_the_recorder(run):
    result = run("%%lazy\na = torch.ones(2, 3)\na @ torch.ones(2, 3)\n")
    assert isinstance(result.error_in_exec, RuntimeError)
    assert "----> 3 a @ torch.ones(2, 3)" in run.output
    assert "recorder" not in run.output
    assert "fake_tensor" not in run.output
    assert "_dynamo" not in run.output


def test_frames_of_the_user_s_functions_stay_in_the_traceback(run):
    run("def outer():\n    return inner()\ndef inner():\n    return 1 / 0")
    run("%%lazy\nouter()")
    assert "----> 2 outer()" in run.output
    assert "----> 2     return inner()" in run.output
    assert "----> 4     return 1 / 0" in run.output


def test_what_was_recorded_before_an_exception_stays_pending_and_is_shown(run):
    run("%%lazy --as g\ny = torch.ones(3) + 1\n1 / 0")
    assert run["g"] is run["_lazy"]
    assert run["g"].pending == 2
    assert "TEXT OF <LazyGraph: 2 ops, 2 pending" in run.output
    run("z = torch.ones(2) + 1")
    assert type(run["z"]) is torch.Tensor  # recording has ended
    assert run["g"].pending == 2
    assert run("y.tolist()").result == [2.0, 2.0, 2.0]


def test_nothing_recorded_before_an_exception_shows_nothing_but_the_exception(run):
    run("%%lazy\n1 / 0\ntorch.ones(3)")
    assert "TEXT OF" not in run.output
    assert "ZeroDivisionError" in run.output


def test_a_picture_that_fails_does_not_hide_the_user_s_error(run, monkeypatch):
    def fail(graph):
        raise OSError("no picture")

    monkeypatch.setattr(lazy_graph.LazyGraph, "text", fail)
    with pytest.warns(UserWarning, match="could not show the graph: OSError"):
        result = run("%%lazy\ny = torch.ones(3)\n1 / 0")
    assert isinstance(result.error_in_exec, ZeroDivisionError)


def test_an_interrupt_ends_recording_and_keeps_the_graph(run):
    result = run("%%lazy\ny = torch.ones(3)\nraise KeyboardInterrupt")
    assert isinstance(result.error_in_exec, KeyboardInterrupt)
    assert run["_lazy"].pending == 1
    assert not lazyviz.is_lazy(torch.ones(2))


def test_a_syntax_error_is_shown_like_any_other_and_nothing_runs(run):
    result = run("%%lazy\nran = True\nx = = 1\n")
    assert isinstance(result.error_in_exec, SyntaxError)
    assert "Cell In[2], line 3" in run.output
    assert "run_cell_magic" not in run.output
    assert "magic.py" not in run.output
    assert "ran" not in run
    assert "showsyntaxerror" not in vars(run.shell)


def test_a_syntax_error_in_code_that_the_cell_runs_keeps_its_stack(run):
    run("%%lazy\n\nexec('x = = 1')")
    assert "Cell In[2], line 3" in run.output
    assert "x = = 1" in run.output


def test_an_exception_raised_again_later_shows_where(run):
    run("%%lazy\ntry:\n    1 / 0\nexcept Exception as error:\n    kept = error\nraise kept")
    assert "line 6" in run.output
    run("raise kept")
    assert "----> 1 raise kept" in run.output


def test_top_level_await_is_one_clear_usage_error(run):
    for cell, line in [
        ("import asyncio\nawait asyncio.sleep(0)", 3),
        ("ran = True\nasync def f():\n    await g()\nasync with f() as h:\n    pass", 5),
        ("\n[i async for i in rows()]", 3),
    ]:
        result = run(f"%%lazy\n{cell}")
        assert isinstance(result.error_in_exec, UsageError)
        assert "top-level `await`" in run.output
        assert f"line {line} " in run.output
        assert "\n" not in run.output.strip()
    assert "ran" not in run


def test_await_inside_a_function_is_fine(run):
    assert run("%%lazy\nasync def f():\n    await g()\ny = torch.ones(2)").success


def test_no_sync_makes_a_sync_point_an_error_at_its_line(run):
    run("w = torch.ones(3)")
    result = run("%%lazy --no-sync\ny = w + torch.rand(3)\nprint(float(y[0]))")
    assert isinstance(result.error_in_exec, lazyviz.SyncError)
    assert "----> 3 print(float(y[0]))" in run.output


# --- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ("--nope", "--nope"),
        ("--as 1x", "1x"),
        ("--as class", "class"),
        ("--device H100", "H100-80GB"),
        ("--device cuda:99", "cuda:99"),
        ("--backend nosuch", "nosuch"),
        ("--batch x-y", "NAME or NAME:DIM"),
        ("--split 4", "name its tensors"),
        ("--split auto", "name its tensors"),
        ("--split 0 --batch x", "off, auto, or a number"),
        ("--split maybe", "off, auto, or a number"),
        ("--recompute much", "recompute must be 'off', 'auto', or a size"),
        ("--recompute 2GiB --split 2 --batch x", "recompute and split can be combined only"),
        ("--assume 3", "LINE=VALUE"),
        ("--assume x=1", "LINE=VALUE"),
        ("--assume 3=loss", "LINE=VALUE"),
    ],
)
def test_a_bad_option_is_one_line_and_the_cell_does_not_run(run, options, word):
    run("x = torch.ones(2)")
    result = run(f"%%lazy {options}\nran = True")
    assert isinstance(result.error_in_exec, UsageError)
    assert word in run.output
    assert len(run.output.strip().splitlines()) == 1
    assert "ran" not in run
    assert "_lazy" not in run


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("imges,labels", "there is no variable 'imges'; did you mean images?"),
        ("images,label", "there is no variable 'label'; did you mean labels?"),
        ("nothing_like_it", "there is no variable 'nothing_like_it'"),
        ("number", "'number' is not a tensor but a int"),
        ("net", "'net' is not a tensor but a Linear"),
        ("images,labels:1", "labels has 1 dimensions, but no dimension 1"),
    ],
)
def test_an_unknown_name_of_the_batch_is_one_line_and_the_cell_does_not_run(run, names, words):
    run("images, labels, number = torch.rand(4, 2), torch.rand(4), 3\nnet = torch.nn.Linear(2, 1)")
    result = run(f"%%lazy --batch {names}\nran = True")
    assert isinstance(result.error_in_exec, UsageError)
    assert run.output.strip() == f"UsageError: %%lazy --batch: {words}"
    assert "ran" not in run


@pytest.mark.parametrize(
    "body",
    [
        "x = torch.rand(6, 2)",
        "for x in [torch.rand(6, 2)]: pass",
        "(x := torch.rand(6, 2))\nx = x",
        "def load():\n    global x\n    x = torch.rand(6, 2)\nload()",
        "exec('x = torch.rand(6, 2)')",
        "%time x = torch.rand(6, 2)",
    ],
)
def test_a_batch_can_be_made_by_the_cell_itself(run, body):
    assert run(f"%%lazy --batch x\n{body}\ny = (x * 2).sum()").success
    assert run["_lazy"].plan().batch_size == 6


def test_a_batch_that_the_cell_could_have_made_and_has_not_is_said(run):
    run("%%lazy --batch x\nif torch is None:\n    x = torch.rand(6, 2)\ny = torch.rand(2)")
    assert "--batch x: the cell assigned no tensor to x." in run.output


def test_a_budget_that_cannot_be_met_is_said_by_the_cell_in_a_sentence(run):
    run("net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))")
    run("x = torch.rand(64, 8)")
    assert run("%%lazy --recompute 1KiB\nnet(x).sum().backward()").success
    (said,) = [line for line in run.output.splitlines() if line.startswith("The budget cannot be met: ")]
    assert "1.00 KiB are not enough" in said
    assert run["_lazy"].pending
    run("%lazy reset")
    run("net.zero_grad()")
    run("%%lazy --recompute 1GiB\nnet(x).sum().backward()")
    assert "budget" not in run.output


@pytest.mark.parametrize("read", ["torch.rand(3)", "print(y)", "%lazy evaluate", "lazyviz.sync()"])
@pytest.mark.parametrize(
    ("options", "option"), [("--recompute 1KiB", "recompute"), ("--batch x --split 2", "split")]
)
def test_an_option_that_cannot_be_met_is_named_with_its_cell_and_the_cure_wherever_it_matters(
    run, read, options, option
):
    run("import lazyviz\nx = torch.randn(6, 64)")
    assert run(f"%%lazy {options}\ny = (x + torch.randn(6, 64)).softmax(0)").success
    cell = run["_lazy"].ir.where
    result = run(read)
    said = run.output if result.success else f"{result.error_in_exec} {run.output}"
    assert f"This is the option {option} of {cell}, whose ops stay pending." in said
    assert "%lazy reset" in said
    run(f"_lazy.evaluate({option}='off')")
    assert not run["_lazy"].pending


def test_a_split_that_cannot_be_is_said_by_the_cell_in_a_sentence(run):
    run("x = torch.randn(6, 3)")
    for split in ("2", "auto"):
        assert run(f"%%lazy --batch x --split {split}\ny = x.softmax(0)").success
        assert "The batch cannot be split: " in run.output
        assert "softmax computes along the batch" in run.output
    run("%%lazy --batch x --split auto\ny = x * 2")
    assert "cannot" not in run.output


def test_a_batch_that_fits_in_no_number_of_pieces_is_said_by_the_cell(run):
    run("import lazyviz\nfrom lazyviz import DeviceProfile\nx = torch.randn(256, 64)")
    run("net = torch.nn.Linear(64, 64)")
    run(
        "with lazyviz.lazy(device=DeviceProfile('tiny', 30_000), batch='x', split='auto') as g:\n"
        "    net(x).sum().backward()"
    )
    (said,) = why_it_ran_and_status.unmet_options(run["g"])
    assert said.startswith(
        "The budget cannot be met: even in 256 pieces of the batch, it does not fit: tiny has"
    )


def test_a_profile_can_be_planned_for(run):
    assert run("%%lazy --device RTX-3060 --split off --backend eager\ny = torch.ones(3)").success
    assert run["_lazy"].plan().device == "RTX-3060"


def test_the_help_names_every_option(run):
    doc = magic.LazyMagics.lazy_cell.__doc__
    for option in magic.OPTIONS:
        assert option in doc
    assert "%%lazy [--as NAME]" in doc


def completions(shell: InteractiveShell, typed: str) -> list[str]:
    with provisionalcompleter():
        return [match.text for match in shell.Completer.completions(typed, len(typed))]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("%%lazy --n", ["--no-sync", "--no-widget", "--now"]),
        ("%%lazy --now --no-s", ["--no-sync"]),
        ("%%lazy --device RTX-309", ["RTX-3090-Ti", "RTX-3090"]),
        ("%%lazy --backend e", ["eager"]),
        ("%%lazy --split ", ["off", "auto"]),
        ("%%lazy --recompute ", ["off", "auto"]),
        ("%lazy e", ["evaluate", "explain"]),
        ("%lazy plan _", ["_lazy"]),
    ],
)
def test_tab_completes_options_values_and_verbs(run, typed, offered):
    run("%%lazy\ny = torch.ones(3)")
    assert completions(run.shell, typed) == offered


def test_an_option_already_given_is_not_offered_again(run):
    typed = "%%lazy --now --"
    matches = completions(run.shell, typed)
    assert "--now" not in matches
    assert "--as" in matches


# --- %lazy -------------------------------------------------------------------------------------


def test_evaluate_runs_the_latest_graph_and_says_what_it_took(run):
    run("%%lazy\ny = torch.ones(3) + 1")
    assert run("%lazy evaluate").success
    assert "2 ops in" in run.output
    assert type(run["y"]) is torch.Tensor
    run("%lazy evaluate")
    assert "Nothing is pending" in run.output


def test_a_verb_takes_the_name_of_a_graph(run):
    run("%%lazy --as first\na = torch.ones(3)")
    run("%%lazy\nb = torch.ones(3)")
    run("%lazy evaluate first")
    assert (run["first"].pending, run["_lazy"].pending) == (0, 1)


def test_evaluate_takes_a_tensor_and_runs_what_it_needs(run):
    run("%%lazy\na = torch.ones(3) + 1\nb = torch.ones(3) * 2")
    run("%lazy evaluate a")
    assert run["_lazy"].pending == 2
    assert run["a"].tolist() == [2.0] * 3


def test_status_plan_explain_why_and_devices_answer_in_text_and_run_nothing(run):
    run("%%lazy\nx = torch.ones(1000)\ny = x + 1")
    run("%lazy status")
    assert "2 ops recorded, 2 pending" in run.output
    run("%lazy plan")
    assert "Projected peak on cpu: 7.81 KiB" in run.output
    assert "fit" in run.output
    assert "by category" not in run.output
    run("%lazy explain")
    assert "by category" in run.output
    run("%lazy why")
    assert "last evaluation" in run.output
    run("%lazy devices")
    assert "A100-40GB" in run.output
    assert "cpu" in run.output
    assert run["_lazy"].pending == 2


def test_devices_in_time_tells_the_record_on_each_gpu(run, tmp_path):
    run("%%lazy --device L4-24GB\na = torch.ones(512, 512, device='cuda')\nb = a @ a")
    run("%lazy devices --time")
    assert "Projected time of the last step on each GPU" in run.output
    assert "RTX-4090" in run.output
    prices = tmp_path / "my prices.csv"
    prices.write_text("H100-80GB,3.5\n")
    run(f'%lazy devices --time --price "{prices}" _lazy')
    assert "cost of 1,000 steps" in run.output
    assert run["_lazy"].pending == 2
    for line, says in {
        "--price x": "need --time",
        "--time nothing": "is not a lazy graph",
        "--time --price /nowhere.csv": "No such file",
        "--time --epoch 10": "needs a batch",
    }.items():
        result = run(f"%lazy devices {line}")
        assert isinstance(result.error_in_exec, UsageError)
        assert says in str(result.error_in_exec)


def test_status_names_the_sync_points(run):
    run("w = torch.ones(3)")
    run("%%lazy\ny = w + torch.rand(3)\nv = float(y[0])")
    run("%lazy status")
    assert "sync point" in run.output
    assert "item, cell [3], line 3 (ran 3 ops" in run.output


def test_equal_sync_points_are_one_line_of_status_explain_and_why(run):
    run("%%lazy\nfor _ in range(300):\n    v = torch.rand(3).sum().item()\nw = v + torch.ones(2)")
    assert len(run["_lazy"].sync_points) == 300
    for verb in ("status", "explain", "why"):
        run(f"%lazy {verb}")
        lines = [line for line in run.output.splitlines() if "sync point" in line.lower()]
        assert len(lines) == 1, verb
        assert "item, cell [2], line 3, x 300 (ran " in lines[0]
        assert lines[0].endswith(": v = torch.rand(3).sum().item()")


def test_a_source_names_the_cell_that_it_is_in(run):
    run("def helper(t):\n    return t.tolist()")
    run("%%lazy\nq = torch.rand(3) + 1\nhelper(q)")
    graph = run["_lazy"]
    assert [str(node.source) for node in graph.nodes] == ["cell [3], line 2"] * 2
    (point,) = graph.sync_points
    assert str(point.source) == point.source.short == "cell [2], line 2"
    assert (point.source.line, point.source.text) == (2, "return t.tolist()")
    assert "at cell [3], line 2" in graph.plan().explain()


def test_evaluate_runs_all_that_is_pending_and_status_counts_it(run):
    run("%%lazy\na = torch.rand(3) + 1")
    run("import lazyviz\nwith lazyviz.lazy() as block:\n    b = torch.rand(3) * 2")
    run("%%lazy --as last\nc = torch.rand(3).sum()")
    run("%lazy status")
    assert run.output.startswith("6 ops pending in 3 graphs")
    for line in (
        "cell [2]: 2 pending of 2 ops",
        "cell [3], line 2: 2 ops recorded",
        "cell [4]: 2 ops recorded",
    ):
        assert line in run.output
    run("%lazy status last")
    assert "2 ops recorded, 2 pending" in run.output and "cell [2]" not in run.output
    run("%lazy evaluate")
    ran = re.findall(r"^(cell \[3\], line 2|cell \[4\]|the rest): (\d) ops? in", run.output, re.MULTILINE)
    assert [where for where, _ in ran] == ["cell [3], line 2", "cell [4]", "the rest"]
    assert sum(int(count) for _, count in ran) == 6
    assert lazy_graph.metrics()["ops pending"] == 0
    assert [type(run[name]) for name in "abc"] == [torch.Tensor] * 3


def test_evaluate_with_a_name_runs_that_graph_alone(run):
    run("%%lazy --as first\na = torch.rand(3)")
    run("%%lazy\nb = torch.rand(3)")
    run("%lazy evaluate first")
    assert not lazyviz.is_lazy(run["a"]) and lazyviz.is_lazy(run["b"])


FAILS = "%%lazy\nbad = torch.ones(3)[torch.randint(1, (1,)) + 5]\nworse = bad + 1"


def test_a_failed_op_names_its_cell_and_fails_no_other_evaluation(run):
    run("%%lazy\ngood = torch.rand(3) + 1")
    run(FAILS)
    result = run("%lazy evaluate")
    assert isinstance(result.error_in_exec, IndexError)
    assert "was recorded at cell [3], line 2: bad = " in run.output and "%lazy reset" in run.output
    assert "run_line_magic" in run.output and "magic.py" not in run.output
    assert not lazyviz.is_lazy(run["good"])
    run("%%lazy\nloss = torch.rand(3).sum() * 0")
    assert run("print(loss)").success
    run("%%lazy\nother = torch.rand(3)")
    assert run("%lazy evaluate").success
    assert "failed again: index_" in run.output and "at cell [3], line 2" in run.output
    run("%lazy status")
    assert "failed: index_" in run.output
    assert isinstance(run("print(worse)").error_in_exec, IndexError)
    assert run("%lazy reset").success and run("%lazy evaluate").success
    assert "Nothing is pending" in run.output


MIDWAY = """%%lazy
bad = torch.zeros(1_000_000)
positions = torch.arange(900_000)
positions[-1] = 2_000_000
bad.index_put_((positions,), torch.ones(900_000))
worse = bad + 1
"""


@pytest.mark.parametrize("cell", [FAILS, MIDWAY])
def test_an_op_that_fails_stops_no_cell_but_those_that_need_it(run, cell):
    run(cell)
    run("%%lazy\nneeds_it = worse + 1\ngood = torch.ones(2) * 2")
    run("%%lazy\nlast = torch.ones(2) * 3")
    assert isinstance(run("%lazy evaluate").error_in_exec, IndexError)
    assert not lazyviz.is_lazy(run["good"]) and not lazyviz.is_lazy(run["last"])
    assert lazyviz.is_lazy(run["needs_it"])
    for again in ("%lazy evaluate", "%lazy status"):
        assert run(again).success
        assert "failed" in run.output and "out of bounds" in run.output and "cell [2], line" in run.output


@pytest.mark.parametrize("mode", ["Plain", "Context", "Verbose", "Minimal"])
@pytest.mark.parametrize("cell", ["print(worse)", "%lazy evaluate", "%%lazy --now\nw = worse * 2"])
def test_every_mode_of_tracebacks_shows_the_user_s_line_and_at_most_one_frame_of_ours(run, mode, cell):
    run(f"%xmode {mode}")
    run(FAILS)
    result = run(cell)
    assert isinstance(result.error_in_exec, IndexError)
    files = set(re.findall(r"lazyviz/[a-z_/]+\.pyx?", run.output))
    assert len(files) <= 1
    assert "out of bounds" in run.output
    if mode != "Minimal":
        assert "Cell In[4], line 1" in run.output or 'In[4]", line 1' in run.output
    run.shell.run_line_magic("xmode", "Context")


def test_frames_of_the_user_s_modules_stay_in_the_traceback(run):
    run(
        "from torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.inner = nn.Linear(3, 4)\n    def forward(self, x):\n        return self.inner(x)"
    )
    run("%%lazy\nNet()(torch.rand(2, 5))")
    assert "----> 2 Net()(torch.rand(2, 5))" in run.output
    assert "----> 7     return self.inner(x)" in run.output
    assert "torch/nn/modules/linear.py" in run.output
    assert not re.findall(r"lazyviz/[a-z_/]+\.pyx?", run.output)


def test_the_status_after_a_reset_is_short(run):
    run("%%lazy --as g\nx = torch.ones(3) * 2\ny = x[torch.tensor([7]) * 1]")
    assert not run("y.tolist()").success
    run("%lazy status")
    assert ", 1 pending, failed\n" in run.output
    run("%lazy reset")
    run("%lazy status")
    assert " 0 pending, 1 dropped" in run.output and "failed" not in run.output
    run("%%lazy\nx = torch.ones(3) * 2\ny = x + 1")
    run("%lazy reset")
    run("%lazy status")
    assert run.output.splitlines() == ["3 ops recorded, 0 pending, 3 dropped"]


def test_reset_forgets_what_is_pending(run):
    run("%%lazy\ny = torch.ones(3)")
    run("%lazy reset")
    assert lazy_graph.metrics()["ops pending"] == 0


def test_plan_and_explain_name_what_would_lower_the_peak_with_the_cell_s_own_names(run):
    run("%load_ext lazyviz")
    run("import torch; from torch import nn; import torch.nn.functional as F")
    run("net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4000)); x = torch.ones(64, 8)")
    assert run("%%lazy\nout = net(x)\nloss = out.square().mean()\nloss.backward()").success
    run("%lazy plan")
    assert (
        "Cheapest remedies:" in run.output and "1. del out after its last use at cell [5], line" in run.output
    )
    assert "Alive" not in run.output
    run("%lazy explain")
    assert "1. del out after its last use at cell [5], line" in run.output
    assert "kept by out" in run.output and "by line that allocated it:" in run.output
    assert run["_lazy"].pending == len(run["_lazy"].nodes)


@pytest.mark.parametrize("line", ["", "frobnicate", "plan nosuch", "plan a b", "why x", "explain number"])
def test_a_bad_verb_or_name_is_one_line(run, line):
    run("number = 3")
    run("%%lazy\ny = torch.ones(3)")
    result = run(f"%lazy {line}")
    assert isinstance(result.error_in_exec, UsageError)
    assert len(run.output.strip().splitlines()) == 1


def test_without_a_graph_verbs_say_how_to_get_one(run):
    run("%lazy plan")
    assert "run a %%lazy cell first" in run.output


# --- where it is shown -----------------------------------------------------------------------------


class Frontend:
    """Makes a shell look like a kernel's and keeps what is displayed."""

    def __init__(self, shell):
        shell.kernel = object()
        shell.display_pub = CapturingDisplayPublisher()
        self.outputs = shell.display_pub.outputs

    def texts(self):
        return [output["data"].get("text/plain") for output in self.outputs]


class FakeWidget:
    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"text/plain": "WIDGET", "application/vnd.jupyter.widget-view+json": {}}


def test_in_jupyter_the_static_picture_comes_first_then_the_widget(run, monkeypatch):
    monkeypatch.setattr(lazy_graph.LazyGraph, "widget", lambda graph, scene=None: FakeWidget())
    frontend = Frontend(run.shell)
    assert run("%%lazy\ny = torch.ones(3)").success
    assert frontend.texts() == ["STATIC", "WIDGET"]
    assert "TEXT OF" not in run.output


def test_no_widget_shows_the_static_picture_alone(run, monkeypatch):
    monkeypatch.setattr(
        lazy_graph.LazyGraph, "widget", lambda graph, scene=None: pytest.fail("a widget was made")
    )
    frontend = Frontend(run.shell)
    assert run("%%lazy --no-widget\ny = torch.ones(3)").success
    assert frontend.texts() == ["STATIC"]


# --- loading and unloading ----------------------------------------------------------------------------


def snapshot(shell):
    return (
        {kind: set(names) for kind, names in shell.magics_manager.magics.items()},
        set(shell.magics_manager.registry),
        {event: list(callbacks) for event, callbacks in shell.events.callbacks.items()},
        list(shell.Completer.custom_matchers),
        set(vars(shell)),
    )


def test_loading_twice_changes_nothing_and_unloading_leaves_nothing(shell, capsys):
    before = snapshot(shell)
    magic.load_ipython_extension(shell)
    once = snapshot(shell)
    assert once != before
    magic.load_ipython_extension(shell)
    assert snapshot(shell) == once
    magic.unload_ipython_extension(shell)
    assert snapshot(shell) == before
    magic.unload_ipython_extension(shell)
    assert snapshot(shell) == before


def test_unloading_evaluates_pending_ops_and_restores_pytorch(run):
    numpy_before = torch.Tensor.numpy
    run("%%lazy\ny = torch.ones(3) + 1")
    y = run["y"]
    magic.unload_ipython_extension(run.shell)
    assert type(y) is torch.Tensor
    assert y.tolist() == [2.0] * 3
    assert "_lazy" not in run
    assert torch.Tensor.numpy is numpy_before
    assert "torch.utils._python_dispatch" in sys.modules
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    assert _get_current_dispatch_mode() is None


def test_the_extension_loads_unloads_and_reloads_by_name(shell, capsys):
    run = Cells(shell, capsys)
    assert run("%load_ext lazyviz").success
    assert run("%load_ext lazyviz").success
    assert "already loaded" in run.output
    assert run("%reload_ext lazyviz").success
    assert run("%%lazy --no-widget\na = 1").success
    assert run("%unload_ext lazyviz").success
    assert not run("%lazy status").success


def test_the_session_is_reported_between_cells(run, monkeypatch):
    calls = []
    monkeypatch.setattr(lazy_graph, "cell_boundary", lambda: calls.append(1))
    run("a = 1")
    run("b = 1")
    assert len(calls) == 2


# --- in a real kernel -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def notebook():
    """A notebook run by a real kernel: cell -> its outputs."""
    cells = [
        "import torch\n%load_ext lazyviz",
        "%%lazy --no-widget --as g\nx = torch.ones(3)\ny = x + 1\ny",
        "%%lazy --no-widget\nz = y * 2\ntorch.ones(2, 3) @ torch.ones(2, 3)",
        "%%lazy\n\nx = = 1",
        "print(*[(node.source.line, node.source.text) for node in g.nodes])",
        "%lazy evaluate",
        "y",
        "%%lazy --nope\n1",
        "%unload_ext lazyviz\nprint('lazy' in get_ipython().magics_manager.magics['cell'])",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(book, allow_errors=True, timeout=120).execute()
    return [cell.outputs for cell in book.cells]


def traceback_of(outputs) -> str:
    (error,) = [output for output in outputs if output.output_type == "error"]
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback))


@pytest.mark.slow
def test_a_kernel_shows_the_static_picture_and_the_result(notebook):
    picture, result = notebook[1]
    assert set(picture.data) == {"text/html", "text/plain"}
    assert result.data["text/plain"] == "lazy[3] float32 cpu, pending"


def test_a_kernel_shows_an_error_once_at_the_user_s_line(notebook):
    text = traceback_of(notebook[2])
    assert "Cell In[3], line 3" in text
    assert text.count("torch.ones(2, 3) @ torch.ones(2, 3)") == 1
    assert "run_cell_magic" not in text
    assert "recorder" not in text


def test_a_kernel_shows_a_syntax_error_at_the_user_s_line(notebook):
    text = traceback_of(notebook[3])
    assert "Cell In[4], line 3" in text
    assert "run_cell_magic" not in text


def test_a_kernel_s_ops_know_their_lines(notebook):
    assert notebook[4][0].text.strip() == "(2, 'x = torch.ones(3)') (3, 'y = x + 1')"


def test_a_kernel_evaluates_and_unloads(notebook):
    assert "ops in" in notebook[5][0].text
    assert notebook[6][0].data["text/plain"] == "tensor([2., 2., 2.])"
    assert notebook[7][0].text.strip().splitlines() == ["UsageError: unrecognized arguments: --nope"]
    assert notebook[8][0].text.strip() == "False"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
def test_a_cell_can_be_planned_for_a_gpu_that_is_absent(run):
    result = run(
        "%%lazy --device H100-80GB --assume 3=0.5 --no-widget\n"
        "x = torch.randn(8, 4).cuda()\n"
        "read = x.mean().item()\n"
        "print(x, read)"
    )
    assert result.success
    assert "lazy[8, 4] float32 cuda:0, pending 0.5" in run.output
    assert run["_lazy"].plan().device == "H100-80GB"
    result = run("%lazy evaluate")
    assert isinstance(result.error_in_exec, UsageError)
    result = run("%%lazy --device H100-80GB\ny = x * 2\nfloat(y.sum())")
    assert isinstance(result.error_in_exec, lazyviz.AbsentDeviceError)
    assert "--assume 3=VALUE" in str(result.error_in_exec)
    assert "----> 3 float(y.sum())" in run.output
    assert run("%%lazy --device cuda\nz = torch.ones(2, device='cuda')").success
    assert run["_lazy"].plan().fits is None
    assert not torch.cuda.is_available()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
def test_evaluating_for_an_absent_gpu_is_refused_in_one_sentence_without_a_traceback(run):
    result = run("%%lazy --device H100-80GB --now --no-widget\nx = torch.ones(3, device='cuda')")
    assert isinstance(result.error_in_exec, UsageError) and "H100-80GB" in str(result.error_in_exec)
    for line in ("%lazy evaluate", "%lazy evaluate x"):
        result = run(line)
        assert isinstance(result.error_in_exec, UsageError)
        assert "not on this machine" in run.output and "Traceback" not in run.output
    result = run("(x + 1).cpu().tolist()")
    assert isinstance(result.error_in_exec, lazyviz.AbsentDeviceError)
    assert "not on this machine" in str(result.error_in_exec)
    assert "--assume" not in str(result.error_in_exec)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
def test_what_unloading_drops_says_so(run, shell):
    run("%%lazy --device H100-80GB\nx = torch.ones(3, device='cuda')")
    magic.unload_ipython_extension(shell)
    with pytest.raises(RuntimeError, match="unloading lazyviz"):
        run["x"] + 1


@pytest.mark.parametrize("how", ["--now", "%lazy evaluate"])
def test_a_batch_that_cannot_be_split_is_a_sentence_and_no_traceback(run, how):
    run("import torch\nx = torch.randn(6, 3)")
    result = run(f"%%lazy --batch x --split 2 {'--now' if how == '--now' else ''}\ny = x.softmax(0)")
    if how != "--now":
        result = run(how)
    assert isinstance(result.error_in_exec, UsageError)
    assert "softmax computes along the batch" in run.output
    assert "Traceback" not in run.output
    assert run["_lazy"].pending


def test_a_cell_is_recorded_as_one_rank_of_several(run):
    assert run("%%lazy --world 4 --rank 1\nimport torch.distributed as dist\nrank = dist.get_rank()").success
    assert run["rank"] == 1
    assert run["_lazy"].plan().world_size == 4
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--world 4 --rank 4", "--rank must be from 0 to 3 with --world 4, got 4"),
        ("--rank 2", "--rank 2 needs the number of ranks: add --world N"),
        ("--world 0", "--world takes the number of ranks, got 0"),
    ],
)
def test_a_rank_that_cannot_be_is_one_sentence(run, options, words):
    result = run(f"%%lazy {options}\nx = torch.ones(3)")
    assert isinstance(result.error_in_exec, UsageError)
    assert words in str(result.error_in_exec)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
def test_a_cell_is_planned_for_an_older_release(run):
    cell = "x = torch.randn(256, 256, device='cuda', requires_grad=True)\n(x * 2).softmax(1).sum().backward()"
    run("import torch")
    assert run(f"%%lazy --device V100-16GB\n{cell}").success
    newer = run["_lazy"].plan()
    assert run(f"%%lazy --device V100-16GB --torch-version 1.10\n{cell}").success
    older = run["_lazy"].plan()
    assert older.torch_version == "1.10" and newer.torch_version == torch.__version__.partition("+")[0]
    assert older.eager_peak_bytes - newer.eager_peak_bytes == 4 * 256 * 256  # softmax keeps its input


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--device V100-16GB --torch-version 0.3", "must be a PyTorch release from 1.4 to"),
        ("--device V100-16GB --torch-version newest", "not 'newest'"),
        ("--torch-version 1.13", "torch_version is only for a GPU that is not on this machine"),
        ("--device cpu --torch-version 1.13", "torch_version is only for a GPU that is not on this machine"),
    ],
)
def test_a_release_that_cannot_be_planned_is_one_sentence(run, options, words):
    result = run(f"%%lazy {options}\nran = True")
    assert isinstance(result.error_in_exec, UsageError)
    assert words in str(result.error_in_exec)
    assert "ran" not in run


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
def test_values_are_assumed_one_after_the_other(run):
    cell = (
        "x = torch.randn(3, device='cuda')\nrounds = 0\n"
        "while not bool(x.sum() > 5):\n    x = x + 1\n    rounds += 1"
    )
    assert run(f"%%lazy --device H100-80GB --assume 4=False*3,True\n{cell}").success
    assert run["rounds"] == 3
    result = run(f"%%lazy --device H100-80GB --assume 4=False*3\n{cell}")
    assert "read more often than the number of values assumed" in str(result.error_in_exec)
    result = run(f"%%lazy --device H100-80GB --assume 4=False*x\n{cell}")
    assert isinstance(result.error_in_exec, UsageError)


@pytest.mark.parametrize("name", ["WIDGET", "PROGRESS", "COLOR", "THEME", "DEVICE", "BACKEND"])
def test_an_invalid_environment_variable_is_one_sentence_and_the_cell_does_not_run(run, monkeypatch, name):
    monkeypatch.setenv(f"LAZYVIZ_{name}", "nonsense")
    result = run("%%lazy\nran = torch.ones(2)")
    assert isinstance(result.error_in_exec, UsageError)
    assert run.output.startswith(f"UsageError: %%lazy: LAZYVIZ_{name}=nonsense: ")
    assert "ran" not in run


def test_a_loop_of_a_cell_is_called_by_its_statement(run):
    run("x = torch.randn(4, 8)\nweights = torch.randn(8, 8)")
    run("%%lazy\nh = x\nfor step in range(6):\n    h = torch.tanh(h @ weights)\n    h.sum().item()")
    graph = run["_lazy"]
    scene = Scene(graph.ir, graph.plan())
    (loop,) = [box for box in scene.hierarchy.boxes.values() if box.repeats > 1]
    assert (loop.label, loop.repeats, loop.syncs) == ("for step in range(6)", 6, 6)
