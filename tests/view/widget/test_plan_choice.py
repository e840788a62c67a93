"""Choosing another device, batch size, or split: all widgets of a graph show the plan, nothing runs."""

from __future__ import annotations

import json
import types

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.plan.devices.device_lookup import PROFILES
from lazyviz.plan.devices.known_gpus import KINDS
from lazyviz.view.widget import plan_settings
from lazyviz.view.widget import widget as module
from lazyviz.view.widget.widget import LazyWidget


@pytest.fixture
def recorded():
    """A small training step with a batch of 12 samples."""

    def record(**options):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
        x, y = torch.randn(12, 64), torch.randint(4, (12,))
        with lazyviz.lazy(**{"batch": [x, y], **options}) as graph:
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
        return types.SimpleNamespace(graph=graph, keep=(net, x, y, loss))

    return record


@pytest.fixture
def shown(monkeypatch):
    """Shows a graph in a widget; what it sends to its page is in ``sent``."""
    monkeypatch.setattr(module, "bundle", lambda name: "export default {}" if name.endswith("js") else "")
    widgets = []

    def show(graph):
        widget = LazyWidget(graph)
        sent: list = []
        monkeypatch.setattr(widget, "send", lambda content, buffers=None: sent.append(content))
        widgets.append(widget)
        return types.SimpleNamespace(widget=widget, sent=sent, graph=graph)

    yield show
    for widget in widgets:
        widget.close()


def say(made, action, id=""):
    made.widget._handle_custom_msg({"action": action, "id": id}, [])


def test_the_menu_has_the_graphs_own_device_this_machines_and_every_known_card(recorded, shown):
    menu = shown(recorded().graph).widget.scene["devices"]
    json.dumps(menu)
    assert menu["chosen"] == "given" and menu["note"].startswith("NVIDIA: ")
    assert menu["groups"][0][1][0][1].startswith("cpu · ")
    offered = [id for _, entries in menu["groups"] for id, _ in entries]
    assert len(offered) == len(set(offered))
    assert set(PROFILES) <= set(offered)
    assert {name for names in KINDS.values() for name in names} == set(PROFILES)
    assert "cpu" not in offered, "it is the block's own"
    other = shown(recorded(device="RTX-3060").graph).widget.scene["devices"]
    assert other["groups"][0][1] == [["given", "RTX-3060 · 12.0 GiB"]]
    assert "cpu" in [id for _, entries in other["groups"] for id, _ in entries]


def test_another_device_is_answered_with_the_plan_for_it_and_runs_nothing(recorded, shown):
    made = shown(recorded().graph)
    for device in ("H100-80GB", "RTX-3060"):
        made.sent.clear()
        say(made, "device", device)
        (message,) = made.sent
        json.dumps(message)
        plan = made.graph.plan(device=device)
        assert message["kind"] == "plan" and message["device"] == device and message["note"] == ""
        assert message["memory"]["device"] == device
        assert message["memory"]["peak"] == plan.peak_bytes
        assert message["memory"]["capacity"] == plan.capacity_bytes
        assert message["memory"]["needed"] == plan.needed_bytes > plan.peak_bytes
        assert message["memory"]["verdict"] == "fits"
    say(made, "device", "given")
    assert made.sent[-1]["memory"]["device"] == "cpu"
    assert made.graph.pending == len(made.graph.nodes)
    assert made.graph.device is None, "what Evaluate does stays as it is"


@pytest.mark.parametrize("id", ["", "cpu:1GiB", "H100", "../x", "cuda:99", "H100-80GB "])
def test_a_device_that_was_not_offered_is_ignored(recorded, shown, id):
    made = shown(recorded().graph)
    say(made, "device", id)
    assert made.sent == []


def test_size_and_pieces_stay_when_the_device_changes_and_the_largest_batch_is_the_devices(recorded, shown):
    small = lazyviz.DeviceProfile("small", "400 KiB")
    made = shown(recorded(device=small).graph)
    say(made, "split", "auto")
    say(made, "batch-size", "300")
    before = made.sent[-1]
    assert before["batch"]["pieces"] > 1
    say(made, "device", "RTX-3060")
    after = made.sent[-1]
    assert (after["batch"]["size"], after["batch"]["split"], after["batch"]["pieces"]) == (300, "auto", 1)
    say(made, "device", "given")
    assert {**made.sent[-1], "version": before["version"]} == before
    say(made, "split", "off")
    say(made, "largest")
    assert made.sent[-1] == {
        "kind": "largest",
        "most": made.graph.plan().max_batch_size,
        "searching": False,
        "fixed": False,
        "note": "",
    }
    say(made, "device", "RTX-3060")
    found = {"searching": True}
    while found["searching"]:
        say(made, "largest")
        found = made.sent[-1]
    assert found["most"] == made.graph.plan(device="RTX-3060").max_batch_size > 300


def test_a_long_search_for_the_largest_batch_reports_its_progress(recorded, shown, monkeypatch):
    made = shown(recorded(device="RTX-3060").graph)
    monkeypatch.setattr(plan_settings, "SEARCH_SECONDS", 0.0)
    told = []
    while not told or told[-1]["searching"]:
        say(made, "largest")
        told.append(made.sent[-1])
    assert len(told) > 2
    sizes = [each["most"] for each in told]
    assert sizes == sorted(sizes)
    assert sizes[-1] == made.graph.plan().max_batch_size


def test_all_widgets_of_a_graph_show_the_same_plan(recorded, shown):
    step = recorded()
    first, second = shown(step.graph), shown(step.graph)
    say(first, "device", "RTX-3060")
    say(second, "batch-size", "24")
    assert first.sent == second.sent and len(first.sent) == 2
    assert first.sent[-1]["device"] == "RTX-3060" and first.sent[-1]["batch"]["size"] == 24
    third = shown(step.graph)
    scene = third.widget.scene
    assert scene["devices"]["chosen"] == "RTX-3060" and scene["batch"]["size"] == 24
    first.sent.clear()
    say(first, "shown", first.widget.scene["devices"]["version"])
    assert first.sent[-1]["memory"] == scene["memory"], "a page opened later has the first picture, and asks"
    say(third, "shown", scene["devices"]["version"])
    assert third.sent == []


def test_a_device_that_cannot_be_planned_for_is_a_sentence_and_the_plan_before_stays(
    recorded, shown, monkeypatch
):
    made = shown(recorded().graph)
    say(made, "device", "H100-80GB")

    def refuse(self, *args, **kwargs):
        raise ValueError("There is no device 'cuda:0' on this machine")

    monkeypatch.setattr(type(made.graph.plan()), "replan", refuse)
    say(made, "device", "RTX-3060")
    assert made.sent[-1]["note"].startswith("There is no device")
    assert made.sent[-1]["device"] == made.sent[-1]["memory"]["device"] == "H100-80GB"


def test_without_a_named_batch_the_device_can_still_be_chosen(recorded, shown):
    made = shown(recorded(batch=None).graph)
    say(made, "device", "T4-16GB")
    assert made.sent[-1]["memory"]["device"] == "T4-16GB" and made.sent[-1]["batch"] is None
    say(made, "largest")
    assert len(made.sent) == 1


def test_lanes_hold_in_another_plan_what_their_boxes_do(recorded, shown):
    made = shown(recorded().graph)
    say(made, "batch-size", "300")
    held = made.sent[-1]["held"]
    scene = made.widget._answers.scene
    lanes = [box for box in scene.hierarchy.boxes.values() if box.kind == "lane"]
    assert lanes
    for lane in lanes:
        assert sum(size for _, size in held[lane.id]) == sum(scene.held()[lane].values()) > 0
