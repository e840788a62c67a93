"""Loading and unloading the extension, interrupted anywhere: all of it or nothing, and it can be repeated."""

from __future__ import annotations

import pytest

import lazyviz

from .inject import Fault, inject, is_plain, points, sampled


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
    monkeypatch.setattr("lazyviz.notebook.magic.run_all", stop)
    with pytest.raises(error):
        run("unload_ext", "lazyviz")
    monkeypatch.undo()
    if error is KeyboardInterrupt:  # it is still loaded
        run("lazy", "evaluate")
        assert x.tolist() == [2, 2]
    else:
        run("load_ext", "lazyviz")
    x = recorded()
    run("unload_ext", "lazyviz")
    assert x.tolist() == [2, 2] and is_plain()
    assert "lazy" not in shell.magics_manager.magics["cell"]


def test_a_reset_restores_handlers_that_were_left_deferred():
    from lazyviz.process.signals import Deferred

    left = Deferred()
    left.__enter__()
    del Deferred.current[next(iter(Deferred.current))]  # as if an exception had come in between
    assert not lazyviz.doctor().ok
    lazyviz.reset()
    assert lazyviz.doctor().ok
