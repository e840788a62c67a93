"""A graph that is displayed while its block is open is drawn as a whole later."""

from __future__ import annotations

import sys
from typing import Any

import anywidget
import pytest
import torch
from torch import nn

import lazyviz

REQUESTS = (
    *(("open-all", ""), ("code", ""), ("search", "l"), ("table", ""), ("moment", "0"), ("batch-size", "4")),
    *(("track", ""), ("views", ""), ("views", ""), ("evaluate-to", "n0"), ("export", "svg")),
)


@pytest.fixture(autouse=True)
def reported(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """What was given to ``sys.unraisablehook``, as errors of widgets during a run are."""
    errors: list[BaseException] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda given: errors.append(given.exc_value))
    monkeypatch.setattr(anywidget.AnyWidget, "send", lambda *_, **__: None)
    return errors


def drawn(widget: Any) -> int:
    boxes = widget.drawn.hierarchy.boxes.values()
    return sum(box.node is not None for box in boxes)


def test_a_graph_that_is_displayed_in_its_block(reported: list[BaseException]) -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.ones(2, 3)
    with lazyviz.lazy(batch=[x]) as graph:
        y = x + 1
        widget = graph.widget()
        graph._repr_mimebundle_()
        assert drawn(widget) == 1
        loss = model(y).sum()
        loss.item()  # a run, of which the widget hears
        loss.backward()
    graph.evaluate()
    assert drawn(widget) == sum(box is not None for box in widget.drawn.hierarchy.box_of) > 5
    assert len(widget.drawn.hierarchy.box_of) == len(graph.nodes)
    assert widget.state == "done" and widget.drawn.plan.peak_bytes == graph.plan().peak_bytes
    assert not reported
    widget.close()


@pytest.mark.parametrize(("action", "id"), REQUESTS)
def test_requests_to_a_picture_of_an_open_block(action: str, id: str, reported: list[BaseException]) -> None:
    x = torch.ones(2, 3)
    with lazyviz.lazy(batch=[x]) as graph:
        y = x + 1
        widget = graph.widget()
        y = (y * 2).exp()
        widget._hear(None, {"action": action, "id": id}, None)
        assert drawn(widget) == 3
        y = y.sum()
    widget._hear(None, {"action": action, "id": id}, None)
    if widget._worker is not None:
        widget._worker.join()
    assert drawn(widget) == 4
    assert y.item() > 0 and not reported
    widget.close()
