"""A click on "Evaluate" that an interrupt meets: the run exists and is shown, or neither."""

from __future__ import annotations

import pytest
import torch

import lazyviz
from lazyviz.record import native_recorder
from lazyviz.view.widget.run_thread_and_displays import Running

from .support.inject_faults import State, inject, is_plain


def in_start(frame):
    return frame.f_code is Running.start.__code__ or frame.f_code.co_filename.endswith("threading.py")


@pytest.mark.parametrize("at", range(60))
def test_an_interrupted_click_is_repeated(at):
    state = State()
    with lazyviz.lazy() as graph:
        y = torch.ones(3) * 2
    widget = graph.widget()

    def click():
        widget._handle_custom_msg({"action": "evaluate", "id": ""}, [])

    def settled():
        worker = widget._worker
        if worker is not None:
            worker.join(20)
            assert not worker.is_alive()
        return widget.state

    inject(click, at, where=in_start, by_signal=True)
    assert settled() in ("pending", "interrupted", "done"), widget.exception
    click()
    assert settled() == "done", widget.exception
    assert y.tolist() == [2, 2, 2]
    assert is_plain()  # the next op removes this thread's mode, which the worker could not do
    if native_recorder._dispatcher is None:
        lazyviz.sync()  # in Python, a mode cannot be removed by an op that it handles
    assert not state.differences()
    widget.close()
