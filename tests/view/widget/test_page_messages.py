"""Messages of a page, of any kind: they can request what is offered, and change nothing else."""

from __future__ import annotations

import copy
import json
import random

import anywidget
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lazyviz
from lazyviz.view.widget.widget import LONGEST_ID, LazyWidget


def recorded():
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(6, 4)
    with lazyviz.lazy(batch=[x]) as graph:
        model(x).sum().backward()
    graph.kept = model  # somebody has the gradients
    return graph


graph = pytest.fixture(scope="module")(recorded)


def traits_of(widget):
    return copy.deepcopy({name: getattr(widget, name) for name in widget.keys if name != "layout"})


@pytest.fixture
def sent(monkeypatch):
    messages = []
    monkeypatch.setattr(
        anywidget.AnyWidget, "_send", lambda widget, message, buffers=None: messages.append(message)
    )
    return messages


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.parametrize("name", list(LazyWidget.class_traits(sync=True)))
def test_a_page_sets_no_trait_and_gets_its_state(name, graph, sent):
    widget = graph.widget()
    before = traits_of(widget)
    for value in (None, "running", 7, -1, {}, {"groups": []}, ["x"], "<script>", "IPY_MODEL_0" * 2):
        del sent[:]
        widget._handle_msg({"content": {"data": {"method": "update", "state": {name: value}}}, "buffers": []})
        assert traits_of(widget) == before
        assert [message["method"] for message in sent if message["method"] != "echo_update"] == ["update"]
        back = sent[-1]["state"]
        assert list(back) == [name]
        assert back[name] == widget.get_state(name)[name]


@settings(max_examples=200, deadline=None)
@given(state=st.dictionaries(st.sampled_from(sorted(LazyWidget.class_traits(sync=True))) | st.text(), JSON))
@pytest.mark.slow
def test_no_state_that_is_sent_changes_anything(state, graph):
    widget = graph.widget()
    before = traits_of(widget)
    widget._handle_msg({"content": {"data": {"method": "update", "state": state}}, "buffers": []})
    assert traits_of(widget) == before


ACTIONS = (
    "open", "open-all", "select", "summarize", "life", "moment", "alive", "range", "track", "shown", "device",
    "largest", "batch-size", "split", "reveal", "views", "search", "search-on", "code", "line", "table",
    "cancel", "backend", "summaries", "evaluate-to", "export", "nothing",
)  # fmt: skip
IDS = (
    "", "0", "-1", "1e9", "9" * 400, "٣", "0x10", "NaN", "g0", "g99999", "n0", "1:1", "1:" + "9" * 50, "5-2",
    "0-99", "../../etc/passwd", "__class__", "\x00", "\ud800", "off", "auto", "a" * LONGEST_ID,
    "a" * (LONGEST_ID + 1), None, 3, 2.5, [], {}, True, ["g0"], {"id": "g0"},
)  # fmt: skip


def test_no_message_fails_or_runs_anything(sent, caplog):
    graph = recorded()  # what is pending is dropped between tests
    widget = graph.widget()
    order = random.Random(0)
    pairs = [(action, id) for action in ACTIONS for id in IDS]
    pairs.remove(("evaluate-to", "g0"))  # a box that is there: its button runs it
    messages = [{"action": action, "id": id} for action, id in pairs]
    messages += [None, 3, "evaluate", [], {}, {"action": None}, {"action": ["evaluate"]}, {"id": "g0"}]
    messages += [{"action": "x" * 10**6}, {"action": {"evaluate": 1}, "id": {}}]
    order.shuffle(messages)
    pending = graph.pending
    assert pending
    for message in messages:
        widget._handle_msg({"content": {"data": {"method": "custom", "content": message}}, "buffers": []})
    json.dumps(sent, default=str)
    assert graph.pending == pending
    assert not [record for record in caplog.records if record.exc_info]
    assert graph.state == "pending"


def test_a_message_that_is_none_at_all_is_an_error_of_ipywidgets_and_changes_nothing(graph):
    widget = graph.widget()
    before = traits_of(widget)
    for method in ("update", "custom", "request_state", "nonsense", None):
        widget._handle_msg({"content": {"data": {"method": method}}, "buffers": []})
    assert traits_of(widget) == before
