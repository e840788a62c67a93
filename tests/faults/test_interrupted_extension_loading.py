"""Loading and unloading the extension, interrupted anywhere: all of it or nothing, and it can be repeated."""

from __future__ import annotations

import signal

import pytest
import torch

import lazyviz

from .support.inject_faults import Fault, inject, is_plain, points, sampled


def hooks(shell):
    events = shell.events.callbacks
    return {
        "events": {name: list(functions) for name, functions in events.items()},
        "matchers": list(shell.Completer.custom_matchers),
        "magics": {kind: sorted(names) for kind, names in shell.magics_manager.magics.items()},
        "tables": {
            kind: sorted(map(str, formatter.type_printers))
            for kind, formatter in shell.display_formatter.formatters.items()
        },
    }


@pytest.mark.parametrize("error", [KeyboardInterrupt, Fault])
def test_loading_and_unloading_can_be_interrupted_anywhere(error, new_shell, request):
    shell, before = new_shell, hooks(new_shell)

    def load_and_unload():
        lazyviz.load_ipython_extension(shell)
        lazyviz.unload_ipython_extension(shell)

    most = 2000 if request.config.getoption("--all") else 150
    for at in sampled(points(load_and_unload), most):
        raised = inject(load_and_unload, at, error)
        assert is_plain()
        lazyviz.load_ipython_extension(shell)
        known = [function for names in hooks(shell)["events"].values() for function in names]
        assert len({function.__qualname__ for function in known}) == len(known), raised.__notes__
        lazyviz.unload_ipython_extension(shell)
        assert hooks(shell) == before, raised and raised.__notes__


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_unloading_that_is_interrupted_loses_nothing_and_can_be_repeated(error, new_shell, monkeypatch):
    shell = new_shell
    run = shell.run_line_magic

    def stop(*_):
        raise error

    def recorded():
        shell.run_cell("import torch").raise_error()
        shell.run_cell("%%lazy --no-widget\nx = torch.ones(2) + 1").raise_error()
        assert lazyviz.is_lazy(shell.user_ns["x"])
        return shell.user_ns["x"]

    run("load_ext", "lazyviz")
    x = recorded()
    monkeypatch.setattr("lazyviz.notebook.magic.evaluate_graphs", stop)
    with pytest.raises(error):
        run("unload_ext", "lazyviz")
    monkeypatch.undo()
    run("lazy", "evaluate")  # it is still loaded
    assert x.tolist() == [2, 2]
    x = recorded()
    run("unload_ext", "lazyviz")
    assert x.tolist() == [2, 2] and is_plain()
    assert "lazy" not in shell.magics_manager.magics["cell"]


FAILING = """
bad = torch.zeros(3)[torch.tensor([7])]
worse = bad + 1
good = torch.ones(2) * 3
also = x * 2
"""
STOPPED_MIDWAY = """
bad = torch.zeros(1_000_000)
good = torch.ones(2) * 3
positions = torch.arange(900_000)
positions[-1] = 2_000_000
bad.index_put_((positions,), torch.ones(900_000))
worse = bad + 1
also = x * 2
"""


@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
@pytest.mark.parametrize("options", ["", "--batch x --split 2"])
@pytest.mark.parametrize("body", [FAILING, STOPPED_MIDWAY], ids=["failing", "stopped midway"])
def test_unloading_evaluates_what_can_run_and_names_all_that_has_failed(
    body, options, known, new_shell, capsys
):
    shell = new_shell
    run = shell.run_line_magic
    run("load_ext", "lazyviz")
    for cell in (
        "import torch\nx = torch.randn(8, 4)",
        f"%%lazy --no-widget {options}\n{body}",
        "%%lazy --no-widget\nother = torch.ones(2)[torch.tensor([9])]",
        "%%lazy --no-widget\nlast = torch.ones(2) + 1\nlost = worse + 1",
    ):
        shell.run_cell(cell, store_history=True).raise_error()
    variables = dict(shell.user_ns)
    if known:
        with pytest.raises(IndexError):
            lazyviz.sync()
    capsys.readouterr()
    if known:
        run("unload_ext", "lazyviz")
        said = capsys.readouterr().out
    else:
        with pytest.raises(IndexError, match="out of bounds") as raised:
            run("unload_ext", "lazyviz")
        said = str(raised.value)
        assert "stay pending" not in said
    assert "4 pending ops have no result" in said
    assert "index 9 is out of bounds" in said and ("index 7 " in said or "index 2000000 " in said)
    assert "at cell [2], line" in said and "at cell [3], line 2" in said
    assert variables["good"].tolist() == [3, 3] and variables["last"].tolist() == [2, 2]
    assert torch.equal(variables["also"], variables["x"] * 2)
    for name in ("worse", "lost"):
        with pytest.raises(RuntimeError, match="forgotten before it ran.*had failed: "):
            variables[name].tolist()
    with pytest.raises(RuntimeError, match="had failed: index 9 is out of bounds"):
        variables["other"].tolist()
    assert is_plain() and "lazy" not in shell.magics_manager.magics["cell"]
    run("load_ext", "lazyviz")
    assert "lazy" in shell.magics_manager.magics["cell"]


def test_what_a_signal_handler_raises_while_unloading_loses_nothing(new_shell):
    shell = new_shell
    run = shell.run_line_magic
    run("load_ext", "lazyviz")
    cell = "import torch\nwith lazyviz.lazy():\n  x = torch.eye(300)\n  for _ in range(300): x = x @ x"
    shell.push({"lazyviz": lazyviz})
    shell.run_cell(cell).raise_error()
    x = shell.user_ns["x"]

    def stop(*_):
        raise TimeoutError("from the handler")

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(TimeoutError, match="from the handler"):
            run("unload_ext", "lazyviz")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert lazyviz.is_lazy(x) and "lazy" in shell.magics_manager.magics["cell"]
    run("unload_ext", "lazyviz")
    assert torch.equal(x, torch.eye(300)) and is_plain()


def test_a_reset_restores_handlers_that_were_left_deferred():
    from lazyviz.process.deferred_signals import Deferred

    left = Deferred()
    left.__enter__()
    del Deferred.current[next(iter(Deferred.current))]  # as if an exception had come in between
    assert not lazyviz.doctor().ok
    lazyviz.reset()
    assert lazyviz.doctor().ok
