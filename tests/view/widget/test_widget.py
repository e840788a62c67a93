"""The widget's Python side, driven by messages like those of the page."""

from __future__ import annotations

import functools
import json
import re
import threading
import time
import types

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.execute.microbatch.run_pieces_and_add_gradients import SplitRun
from lazyviz.plan.make_plan import make_plan
from lazyviz.view.scene.hierarchy import build_hierarchy
from lazyviz.view.widget import page_messages, page_state, run_thread_and_displays
from lazyviz.view.widget import widget as module
from lazyviz.view.widget.widget import LazyWidget


class FakeRun:
    """A run of these nodes, as far as widgets look at one."""

    def __init__(self, nodes) -> None:
        self.nodes, self.ended = nodes, []

    @property
    def running(self):
        return self.nodes[len(self.ended)] if len(self.ended) < len(self.nodes) else None

    def now(self, *, foresee=False):
        return types.SimpleNamespace(
            done=len(self.ended),
            total=len(self.nodes),
            seconds=0.1,
            seconds_left=0.2,
            label=self.ended[-1].name if self.ended else "",
            allocated_bytes=2048,
            piece=0,
            pieces=1,
        )


class FakeController:
    """A graph that "runs" by marking its nodes done, and can be made to fail or to wait."""

    def __init__(self, graph) -> None:
        self.graph = graph
        self.title = "a step"
        self.split: int | str = "off"
        self.backend, self.summaries, self.live, self.nonfinite = "eager", False, None, {}
        self.is_recording = False
        self.shown_plans = None
        self.measured: list[tuple[int, int]] = []
        self.report = None
        self.error = None
        self.fail_at: int | None = None
        self.pause = 0.0
        self.threads: list[threading.Thread] = []
        self.listeners = []

    going = False

    @property
    def state(self) -> str:
        if self.going:
            return "running"
        return "done" if all(node.state == "done" for node in self.graph.nodes) else "pending"

    def plan(self):
        return make_plan(self.graph)

    def subscribe(self, callback) -> None:
        self.listeners.append(callback)

    def backends(self):
        return [("eager", ""), ("absent", "needs the package absent")]

    def choose(self, *, backend=None, split=None, summaries=None) -> None:
        self.backend = backend or self.backend
        self.summaries = self.summaries if summaries is None else summaries
        self.tell()

    def readable(self, nodes):
        return False

    def summarize(self, nodes):
        pass

    def tell(self, going: bool = False) -> None:
        self.going = going
        for listener in self.listeners:
            listener()

    def evaluate(self, *, cancel=None, nodes=None):
        self.threads.append(threading.current_thread())
        self.live = FakeRun(self.graph.nodes)
        self.tell(going=True)
        try:
            return self._run(cancel)
        finally:
            self.live = None
            self.tell()

    def _run(self, cancel):
        total = len(self.graph.nodes)
        for done, node in enumerate(self.graph.nodes):
            if cancel is not None and cancel.is_set():
                raise RuntimeError("interrupted")
            if done == self.fail_at:
                node.state = "failed"
                raise RuntimeError("shapes do not match")
            node.state = "done"
            time.sleep(self.pause)
            self.live.ended.append(node)
        self.report = types.SimpleNamespace(
            ops_run=total, seconds=0.5, peak_bytes=4096, backend="eager", pieces=1
        )
        return self.report


@pytest.fixture
def made(step, monkeypatch):
    """A widget over a fake controller, and what it sent to the page."""
    monkeypatch.setattr(module, "bundle", lambda name: "export default {}" if name.endswith("js") else "")
    controller = FakeController(step)
    widget = LazyWidget(controller)
    sent: list = []
    monkeypatch.setattr(widget, "send", lambda content, buffers=None: sent.append(content))
    yield types.SimpleNamespace(widget=widget, controller=controller, sent=sent, graph=step)
    widget.close()


def say(made, action, id=""):
    made.widget._handle_custom_msg({"action": action, "id": id}, [])


def finished(widget):
    widget._worker.join(10)
    assert not widget._worker.is_alive()


def id_of(made, label):
    return next(box.id for box in made.widget._answers.scene.hierarchy.boxes.values() if box.label == label)


def test_the_first_picture_is_lanes_with_everything_in_them_closed_but_the_model(made):
    scene = made.widget.scene
    lanes = scene["groups"][0]["boxes"]
    assert [lane["label"] for lane in lanes] == ["Forward", "Backward", "Optimizer"]
    frame = id_of(made, "Net")
    assert scene["opened"] == [scene["root"], *[lane["id"] for lane in lanes], frame]
    json.dumps(scene)


def test_a_group_is_sent_when_it_is_opened(made):
    fold = id_of(made, "h.0–2")
    say(made, "open", fold)
    (message,) = made.sent
    assert message["kind"] == "groups"
    assert [box["label"] for box in message["groups"][0]["boxes"]] == ["h.0", "h.1", "h.2"]


def test_a_point_of_the_chart_shows_what_is_alive_there_and_why(made):
    plan = make_plan(made.graph)
    position = 4  # in the forward pass
    say(made, "moment", str(position))
    (message,) = made.sent
    json.dumps(message)
    moment = message["moment"]
    expected = plan.at(position)
    assert message["kind"] == "moment" and moment["position"] == position
    assert moment["aliveCount"] == len(expected.alive) == len(moment["alive"])
    assert {name for name, _ in moment["categories"]} == {
        name for name, size in expected.by_category.items() if size
    }
    assert any(row["keeper"].startswith("saved for") for row in moment["alive"])
    assert any(row["line"].endswith("1") and row["chain"] for row in moment["alive"])
    assert moment["source"]["text"]


def test_boxes_show_what_they_hold_at_a_point_of_the_chart(made):
    plan = make_plan(made.graph)
    hierarchy = made.widget._answers.scene.hierarchy

    def outermost(index):  # the box in the lane
        box = hierarchy.box_of[index]
        while box.parent.kind != "lane":
            box = box.parent
        return box.id

    for position in range(len(plan.timeline)):
        made.sent.clear()
        say(made, "alive", str(position))
        (message,) = made.sent
        json.dumps(message)
        assert message["kind"] == "alive" and message["position"] == position
        expected: dict[str, int] = {}
        for allocation in plan.at(position).alive:
            if allocation.node is not None and hierarchy.box_of[allocation.node.index] is not None:
                id = outermost(allocation.node.index)
                expected[id] = expected.get(id, 0) + allocation.nbytes
        for id, size in expected.items():
            assert sum(size for _, size in message["boxes"][id]) >= size  # and its weights
    say(made, "alive", str(plan.peak_position))
    at_peak = {
        box["id"]: box["by"] for group in made.widget.scene["groups"] for box in group["boxes"] if "by" in box
    }
    assert {id: sizes for id, sizes in made.sent[-1]["boxes"].items() if id in at_peak} == at_peak


@pytest.mark.parametrize("action", ["moment", "alive"])
@pytest.mark.parametrize("id", ["", "-1", "99999", "1.5", "x", "²"])
def test_a_point_that_is_not_there_is_ignored(made, action, id):
    say(made, action, id)
    assert made.sent == []


def test_a_click_shows_op_line_shapes_producers_and_readers(made):
    say(made, "select", "n1")
    details = made.sent[0]["details"]
    facts = dict(details["facts"])
    assert facts["op"] == "aten.mm.default"
    assert facts["module"] == "Net.h.0"
    assert facts["through"] == "t"
    assert details["source"] == {"file": "cell_compilation.py", "line": 1, "text": "loss = net(x)"}
    assert [row["shape"] for row in details["inputs"]] == ["4×8", "8×8"]
    assert details["inputs"][1]["name"] == "h.0.weight"
    assert [reader["label"] for reader in details["outputs"][0]["readers"]] == [
        "h.0.act: relu",
        "h.0.act: threshold_backward",
    ]
    assert details["flows"][0]["label"] == "h.0.act: threshold_backward"
    [[start, stop]] = details["lifetime"]
    assert start == 1
    assert stop > 10


def test_a_backward_op_links_to_the_op_it_differentiates(made):
    hierarchy = build_hierarchy(made.graph)
    node = next(node for node in made.graph.nodes if node.forward is not None)
    say(made, "select", hierarchy.box_of[node.index].id)
    assert made.sent[0]["details"]["forward"]["chain"][-1] == f"n{node.forward.index}"


@pytest.mark.parametrize("kind", ["op", "module", "input", "lane", "root"])
def test_every_kind_of_box_can_be_described(made, kind):
    for box in list(made.widget._answers.scene.hierarchy.boxes.values()):
        if box.kind == kind:
            say(made, "select", box.id)
    assert made.sent
    json.dumps(made.sent)


def test_search_finds_ops_modules_and_lines(made):
    for query, expected in [
        ("threshold", "h.2.act: threshold_backward"),
        ("h.1", "h.1"),
        ("opt.step", "optimizer: add_"),
    ]:
        made.sent.clear()
        say(made, "search", query)
        found = made.sent[0]
        assert any(expected in hit["label"] for hit in found["hits"]), (query, found["hits"])
        assert found["total"] >= len(found["hits"])
    made.sent.clear()
    say(made, "search", "<nothing>")
    assert made.sent[0]["hits"] == []


def test_revealing_a_deep_op_sends_all_groups_on_the_path_and_the_other_lanes(made):
    say(made, "reveal", "n1")
    message = made.sent[0]
    assert message["chain"][-1] == "n1"
    sent = [group["id"] for group in message["groups"]]
    assert sent[: len(message["chain"]) - 1] == message["chain"][:-1]
    lanes = [box.id for box in build_hierarchy(made.graph).lanes()]
    assert set(sent) == {*message["chain"][:-1], *lanes}


def test_expanding_all_says_when_it_leaves_something_closed(made, monkeypatch):
    say(made, "open-all")
    assert made.sent[-1]["note"] == ""
    assert len(made.sent[-1]["groups"]) == sum(
        box.is_group for box in made.widget._answers.scene.hierarchy.boxes.values()
    )
    monkeypatch.setattr(page_messages, "EXPANDED_BOXES", 8)
    say(made, "open-all")
    assert "too many boxes" in made.sent[-1]["note"]


def test_views_are_drawn_when_asked_for(made):
    before = len(made.widget._answers.scene.hierarchy.boxes)
    say(made, "views")
    assert made.widget.scene["views"] is True
    assert len(made.widget._answers.scene.hierarchy.boxes) > before


def test_messages_that_are_no_known_action_are_ignored(made):
    for message in [
        None,
        7,
        {},
        {"action": "exec", "id": "import os"},
        {"action": ["open"]},
        {"action": "open", "id": 3},
    ]:
        made.widget._handle_custom_msg(message, [])
    say(made, "open", "no-such-id")
    say(made, "select", "n999")
    assert made.sent == []


def test_evaluate_runs_on_one_worker_thread_and_reports_what_was_measured(made):
    made.controller.pause = 0.01
    say(made, "evaluate")
    say(made, "evaluate")
    assert made.widget.state == "running"
    finished(made.widget)
    assert made.widget.state == "done"
    assert made.widget.report == f"ran {len(made.graph.nodes)} ops in 0.5 s, measured peak 4.00 KiB"
    assert ", 0 pending" in made.widget.summary
    (thread,) = made.controller.threads
    assert thread is not threading.main_thread()


def test_progress_is_sent_at_most_ten_times_a_second(made):
    made.controller.pause = 0.02
    seen = []
    made.widget.observe(lambda change: seen.append(change["new"]), "progress")
    start = time.monotonic()
    say(made, "evaluate")
    finished(made.widget)
    assert 1 <= len(seen) <= (time.monotonic() - start) * 10 + 2
    assert seen[0]["total"] == len(made.graph.nodes)
    assert re.fullmatch(r"2(\.0\d?)? KiB held, [\d.]+ \wiB of [\d.]+ \wiB in use", seen[0]["memory"])


def test_cancel_stops_the_run_and_evaluate_goes_on_from_there(made):
    made.controller.pause = 0.05
    say(made, "evaluate")
    say(made, "cancel")
    finished(made.widget)
    assert made.widget.state == "interrupted"
    assert made.widget.error is None
    made.controller.pause = 0.0
    say(made, "evaluate")
    finished(made.widget)
    assert made.widget.state == "done"


def test_orders_about_running_that_make_no_sense_are_ignored(made):
    for action, id in [
        ("evaluate-to", "no-such"),
        ("backend", "no-such"),
        ("backend", ""),
        ("summaries", "maybe"),
    ]:
        say(made, action, id)
    assert made.widget._worker is None and made.widget.state == "pending"
    assert (made.controller.backend, made.controller.summaries) == ("eager", False)
    assert made.sent == []
    say(made, "summaries", "on")
    assert made.controller.summaries and made.widget.choices["summaries"] is True
    assert ["absent", "needs the package absent"] in made.widget.choices["backends"]


def test_only_boxes_of_groups_that_the_page_has_are_sent(step, monkeypatch):
    monkeypatch.setattr(module, "bundle", lambda name: "")
    monkeypatch.setattr(page_messages, "FIRST_BYTES", 0)
    widget = LazyWidget(FakeController(step))
    made = types.SimpleNamespace(widget=widget, sent=[])
    monkeypatch.setattr(widget, "send", lambda content, buffers=None: made.sent.append(content))
    fold = id_of(made, "h.0–2")
    given = {box["id"] for group in widget.scene["groups"] for box in group["boxes"]}
    inside = {box.id for box in widget._answers.scene.hierarchy.boxes[fold].children}
    assert inside.isdisjoint(given)
    say(made, "evaluate")
    finished(widget)
    told = {id for message in made.sent if message["kind"] == "states" for id in message["boxes"]}
    assert fold in told and told <= given
    made.sent.clear()
    say(made, "open", fold)
    (message,) = made.sent
    states = {box["id"]: box.get("state") for box in message["groups"][0]["boxes"]}
    assert set(states.values()) == {"done"}, "a group that is opened later brings its states"
    again = {box["id"]: box.get("state") for group in widget.scene["groups"] for box in group["boxes"]}
    assert again[fold] == "done", "what is displayed once more begins with what has run"
    widget.close()


def test_an_error_is_shown_with_its_message_and_the_users_line(made):
    made.controller.fail_at = 4
    say(made, "evaluate")
    finished(made.widget)
    assert made.widget.state == "failed"
    assert made.widget.error["message"] == "RuntimeError: shapes do not match"
    assert made.widget.error["source"]["text"] == "loss = net(x)"
    assert made.widget.error["chain"][-1] == "n4"
    assert isinstance(made.widget.exception, RuntimeError)


def test_a_change_elsewhere_is_followed(made):
    for node in made.graph.nodes:
        node.state = "done"
    made.controller.report = types.SimpleNamespace(ops_run=3, seconds=0.1, peak_bytes=None, backend="eager")
    made.controller.tell()
    assert made.widget.state == "done"
    assert made.widget.report == "ran 3 ops in 0.1 s"


def test_the_state_stays_small_however_large_the_graph(write, monkeypatch):
    monkeypatch.setattr(module, "bundle", lambda name: "")
    program = write.Program()
    for _ in range(40):
        write.training_step(program, 12)
    widget = LazyWidget(FakeController(program.graph))
    assert len(json.dumps(widget.scene)) < 150_000
    widget.close()


def test_a_missing_bundle_says_how_to_build_it(step, tmp_path, monkeypatch):
    monkeypatch.setattr(page_state, "STATIC", tmp_path)
    page_state.bundle.cache_clear()
    with pytest.raises(RuntimeError, match="npm --prefix js ci && npm --prefix js run build"):
        LazyWidget(FakeController(step))
    page_state.bundle.cache_clear()


# --- the batch ------------------------------------------------------------------------------


@pytest.fixture
def batched(monkeypatch):
    """A widget of a block that named its batch, and what it sent to the page."""
    monkeypatch.setattr(module, "bundle", lambda name: "export default {}" if name.endswith("js") else "")
    return functools.partial(_batched, monkeypatch)


def _batched(monkeypatch, *, norm=nn.LayerNorm, split="off", device=None, batch="x,y"):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), norm(32), nn.ReLU(), nn.Linear(32, 4))
    x, y = torch.randn(12, 16), torch.randint(4, (12,))
    with lazyviz.lazy(batch=batch, split=split, device=device) as graph:
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
    widget = graph.widget()
    sent: list = []
    monkeypatch.setattr(widget, "send", lambda content, buffers=None: sent.append(content))
    return types.SimpleNamespace(widget=widget, graph=graph, sent=sent, keep=(net, x, y, loss))


def test_without_a_named_batch_there_is_nothing_to_slide(batched):
    made = batched(batch=None)
    assert made.widget.scene["batch"] is None
    for action, id in [("batch-size", "4"), ("split", "2"), ("largest", "")]:
        say(made, action, id)
    assert made.sent == []
    assert made.graph.split == "off"


def test_another_batch_size_is_answered_with_the_plan_of_that_size(batched):
    made = batched()
    assert made.widget.scene["batch"]["size"] == made.widget.scene["batch"]["recorded"] == 12
    for size in (1, 7, 12, 4096):
        made.sent.clear()
        say(made, "batch-size", str(size))
        (message,) = made.sent
        json.dumps(message)
        plan = made.graph.plan(batch_size=size)
        assert message["kind"] == "plan" and message["note"] == ""
        assert message["memory"]["peak"] == plan.peak_bytes
        assert (message["batch"]["size"], message["batch"]["recorded"]) == (size, 12)
        assert message["batch"]["words"] == "in one piece"
    assert made.graph.pending == len(made.graph.nodes), "planning runs nothing"


def test_the_verdict_follows_the_size_and_the_largest_that_fits_is_sent(batched):
    made = batched(device=lazyviz.DeviceProfile("small", "64 KiB"))
    say(made, "largest")
    most = made.sent[-1]["most"]
    assert most == made.graph.plan().max_batch_size > 12
    for size, verdict in [(most, "fits"), (most + 1, "too-big")]:
        say(made, "batch-size", str(size))
        assert made.sent[-1]["memory"]["verdict"] == verdict


def test_the_menu_sets_what_evaluate_does_and_shows_its_plan(batched):
    made = batched()
    say(made, "split", "4")
    message = made.sent[-1]
    assert made.graph.split == 4
    plan = made.graph.plan(split=4)
    assert message["memory"]["peak"] == plan.peak_bytes
    assert message["memory"]["verdictText"].startswith("Fits in 4 pieces: needs ")
    assert message["batch"]["words"].startswith("in 4 pieces of 3 samples")
    assert message["batch"]["split"] == "4"
    names = [name for _, name in message["memory"]["pieces"]]
    assert "piece 1" in names and "piece 2, and 2 more like it" in names
    say(made, "evaluate")
    finished(made.widget)
    assert made.widget.state == "done"
    assert made.graph.report.pieces == 4
    assert "in 4 pieces" in made.widget.report


def test_choosing_auto_takes_the_fewest_pieces_that_fit(batched):
    made = batched(device=lazyviz.DeviceProfile("small", "64 KiB"))
    say(made, "split", "auto")
    assert made.graph.split == "auto"
    assert made.sent[-1]["batch"]["pieces"] == 1
    say(made, "largest")
    most = made.sent[-1]["most"]
    say(made, "batch-size", "300")
    answer = made.sent[-1]
    assert answer["batch"]["pieces"] == made.graph.plan(batch_size=300, split="auto").split.pieces > 1
    assert answer["memory"]["verdict"] == "fits"
    assert most > 300


def test_a_batch_that_cannot_be_cut_names_the_nodes_with_the_way_to_them(batched):
    made = batched(norm=nn.BatchNorm1d, split=3)
    batch = made.widget.scene["batch"]
    assert batch["blockedCount"] == len(batch["blocked"]) == 2
    first = batch["blocked"][0]
    assert first["label"].startswith("native_batch_norm")
    assert "batch norm in training" in first["why"] and "GroupNorm" in first["why"]
    assert made.widget._answers.scene.hierarchy.boxes[first["chain"][-1]].node.name in first["label"]
    say(made, "evaluate")
    finished(made.widget)
    assert made.widget.state == "pending"  # nothing has run, and nothing of it is wrong
    assert "cannot be split" in made.widget.error["message"]
    assert made.graph.pending == len(made.graph.nodes)
    say(made, "split", "off")
    assert made.widget.error is None
    say(made, "evaluate")
    finished(made.widget)
    assert made.widget.state == "done"


@pytest.mark.parametrize("id", ["", "0", "-3", "x", "1e3", "²", "9" * 14, " 4"])
def test_a_size_or_cut_that_is_none_is_ignored(batched, id):
    made = batched()
    say(made, "batch-size", id)
    say(made, "split", id)
    assert made.sent == []
    assert made.graph.split == "off"


def test_another_batch_size_shows_what_boxes_hold_at_its_peak(batched):
    made = batched()
    say(made, "batch-size", "300")
    message = next(each for each in reversed(made.sent) if each["kind"] == "plan")
    scene = made.widget._answers.scene
    expected = {box.id: list(map(list, held.items())) for box, held in scene.held().items()}
    assert message["held"] and message["held"].items() <= expected.items()
    assert scene.plan.batch_size == 300
    recorded = made.graph.plan()
    assert message["memory"]["peak"] == scene.plan.peak_bytes > recorded.peak_bytes


def test_moments_and_lifetimes_are_those_of_the_plan_that_is_shown(batched):
    made = batched()
    say(made, "split", "3")
    memory = made.sent[-1]["memory"]
    plan = made.graph.plan(split=3)
    assert memory["count"] == len(plan.timeline) > len(made.graph.nodes)
    assert memory["points"]["at"][memory["points"]["at"].index(memory["peakAt"])] == plan.peak_position
    made.sent.clear()
    say(made, "moment", str(plan.peak_position))
    assert made.sent[-1]["moment"]["bytes"] == memory["peakText"]
    say(made, "moment", str(len(plan.timeline)))
    assert len(made.sent) == 1
    relu = next(node for node in made.graph.nodes if node.name.startswith("relu"))
    say(made, "select", f"n{relu.index}")
    lifetime = made.sent[-1]["details"]["lifetime"]
    assert lifetime == [[each.start, each.stop] for each in plan.held(relu)]
    assert len(lifetime) == 2
    lane = made.widget._answers.scene.hierarchy.root.children[0].id
    say(made, "select", lane)
    ranges = made.sent[-1]["details"]["lifetime"]
    assert len(ranges) >= 2 and all(start < stop for start, stop in ranges)


def test_the_views_button_keeps_size_and_cut(batched):
    made = batched()
    say(made, "split", "3")
    say(made, "batch-size", "48")
    say(made, "views")
    assert made.widget.scene["batch"]["size"] == 48
    assert made.widget.scene["batch"]["split"] == "3"
    assert made.widget.scene["memory"]["peak"] == made.graph.plan(batch_size=48, split=3).peak_bytes


def test_progress_of_a_split_run_counts_its_pieces(batched, monkeypatch):
    made = batched(split=4)
    monkeypatch.setattr(run_thread_and_displays, "INTERVAL", 1e-3)
    report = SplitRun.report

    def slowly(*args, **kwargs):
        report(*args, **kwargs)
        time.sleep(0.01)

    monkeypatch.setattr(SplitRun, "report", slowly)
    seen = []
    made.widget.observe(lambda change: seen.append(change["new"]), "progress")
    say(made, "evaluate")
    finished(made.widget)
    pieces = [(each["piece"], each["pieces"]) for each in seen if each]
    assert {piece for piece, _ in pieces} >= {1, 2, 3, 4}
    assert {count for _, count in pieces} == {4}


def test_sizes_that_cannot_be_planned_say_why(batched, monkeypatch):
    made = batched()

    def refuse(batch_size=None, split=None):
        raise ValueError("lazyviz cannot determine how the results of odd_3 grow with the batch")

    say(made, "batch-size", "24")
    monkeypatch.setattr(
        type(made.widget._answers._plans.own), "replan", lambda self, *args, **kwargs: refuse()
    )
    say(made, "batch-size", "48")
    assert made.sent[-1]["note"].startswith("lazyviz cannot determine how")
    assert made.sent[-1]["batch"]["size"] == 24


def test_expanding_all_comes_in_small_messages_of_which_the_last_says_that_it_is(made, monkeypatch):
    say(made, "open-all")
    (whole,) = made.sent
    monkeypatch.setattr(page_messages, "MESSAGE_BYTES", 600)
    made.sent.clear()
    say(made, "open-all")
    assert len(made.sent) > 1
    assert [message.get("more", False) for message in made.sent] == [True] * (len(made.sent) - 1) + [False]
    assert [group for message in made.sent for group in message["groups"]] == whole["groups"]


def test_equal_sync_points_are_one_line_on_the_page():
    with lazyviz.lazy() as graph:
        for _ in range(30):
            torch.rand(3).sum().item()
    syncs = graph.widget().scene["syncs"]
    assert syncs["title"] == "30 sync points"
    (line,) = syncs["lines"]
    assert line.startswith("item, test_widget.py:") and ", x 30 (ran " in line


@pytest.mark.parametrize("change", ["run", "annotate"])
def test_a_picture_that_is_being_sent_does_not_change(change):
    """A run notifies its widgets on another thread than that of their messages."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU()), torch.randn(6, 4)
    with lazyviz.lazy() as graph:
        model(x)
    widget = graph.widget()

    def boxes():
        return [box for group in widget.scene["groups"] for box in group["boxes"]]

    being_sent = [(dict(box), iter(box.items())) for box in boxes()]
    if change == "run":
        graph.evaluate()
    else:
        graph.annotate("norm", {"model.0": 3})
    assert [dict(items) for _, items in being_sent] == [before for before, _ in being_sent]
    assert boxes() != [before for before, _ in being_sent]
    key = "state" if change == "run" else "numbers"
    assert any(key in box for box in boxes())
