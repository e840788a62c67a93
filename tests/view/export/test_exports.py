"""Exported timelines and graphs: read back with PyTorch's functions, and checked key by key."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz

import lazyviz
from lazyviz.plan.units import format_bytes
from lazyviz.view.export.memory_viz_snapshot import memory_snapshot
from lazyviz.view.scene.boxes import LANE_TITLES
from lazyviz.view.scene.scene import Scene


@pytest.fixture
def graph():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Sequential(nn.Linear(256, 64), nn.Tanh()))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(128, 64)
    with lazyviz.lazy(device="RTX-3060") as graph:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    yield graph
    graph.evaluate()
    assert loss.isfinite()


def snapshot_of(graph, tmp_path, **options):
    graph.save(tmp_path / "timeline.pickle", **options)
    return pickle.loads((tmp_path / "timeline.pickle").read_bytes())


def levels(snapshot, key_of_more, key_of_less):
    now, result = 0, [0]
    for entry in snapshot["device_traces"][0]:
        now += entry["size"] if entry["action"] in key_of_more else 0
        now -= entry["size"] if entry["action"] in key_of_less else 0
        result.append(now)
    return result


def test_the_snapshot_s_allocations_peak_where_the_plan_does(graph, tmp_path):
    plan = graph.plan()
    snapshot = snapshot_of(graph, tmp_path)
    allocated = levels(snapshot, {"alloc"}, {"free_completed"})
    workspace = plan._reservation.workspace_bytes
    assert workspace > 0
    assert max(allocated) == plan.peak_bytes + workspace
    reserved = levels(snapshot, {"segment_alloc", "segment_map"}, {"segment_free", "segment_unmap"})
    assert max(reserved) == plan.reserved_bytes
    assert snapshot["lazyviz"]["peak_bytes"] == plan.peak_bytes
    assert snapshot["lazyviz"]["timeline"] == "plain eager PyTorch"  # of a GPU that is absent


def test_the_eager_timeline_can_be_had_instead_and_says_so(graph, tmp_path):
    snapshot = snapshot_of(graph, tmp_path, eager=True)
    plan = graph.plan()
    workspaces = plan._reservation.workspace_bytes  # backward's thread has one of its own
    assert max(levels(snapshot, {"alloc"}, {"free_completed"})) == plan.eager_peak_bytes + workspaces
    assert snapshot["lazyviz"]["timeline"] == "plain eager PyTorch"


def test_the_eager_timeline_of_a_gpu_has_the_workspaces_that_the_plan_counts(tmp_path):
    with lazyviz.lazy() as graph:
        layer = nn.Linear(64, 64)
        layer(torch.randn(8, 64)).sum().backward()
    plan = graph.plan(device="H100-80GB")
    for eager, held in ((False, plan.reserved_bytes), (True, plan.eager_reserved_bytes)):
        snapshot = memory_snapshot(plan, eager=eager)
        assert sum(segment["total_size"] for segment in snapshot["segments"]) == held
        assert snapshot["lazyviz"]["reserved_bytes"] == held


def test_every_entry_has_the_documented_keys_and_frames_with_module_and_line(graph, tmp_path):
    snapshot = snapshot_of(graph, tmp_path)
    entries = snapshot["device_traces"][0]
    for entry in entries:
        assert {"action", "addr", "size", "stream", "frames", "pool_id"} <= entry.keys()
        assert entry["action"] in ("alloc", "free_requested", "free_completed", "segment_alloc")
        assert entry["frames"]
        assert all(frame.keys() == {"filename", "line", "name"} for frame in entry["frames"])
    names = {frame["name"] for entry in entries for frame in entry["frames"]}
    assert any(name.startswith("2.0: addmm_") for name in names)
    assert {"2.0", "2", "model", "forward", "model.0.weight", "(parameters)", "(activations)"} <= names
    lines = {(frame["filename"], frame["line"]) for entry in entries for frame in entry["frames"]}
    assert any(file == __file__ and line > 0 for file, line in lines)


def test_no_two_blocks_are_ever_in_one_place(graph, tmp_path):
    alive: dict[int, int] = {}
    for entry in snapshot_of(graph, tmp_path)["device_traces"][0]:
        if entry["action"] == "alloc":
            start, stop = entry["addr"], entry["addr"] + entry["size"]
            assert all(stop <= other or other + size <= start for other, size in alive.items())
            alive[start] = entry["size"]
        elif entry["action"] == "free_completed":
            assert alive.pop(entry["addr"]) == entry["size"]
    assert alive


def test_what_is_allocated_in_the_end_is_what_the_segments_show(graph, tmp_path):
    snapshot = snapshot_of(graph, tmp_path)
    shown = {
        block["address"]: block["requested_size"]
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    alive: dict[int, int] = {}
    for entry in snapshot["device_traces"][0]:
        if entry["action"] == "alloc":
            alive[entry["addr"]] = entry["size"]
        elif entry["action"] == "free_completed":
            del alive[entry["addr"]]
    assert shown == alive
    for segment in snapshot["segments"]:
        assert segment["total_size"] == sum(block["size"] for block in segment["blocks"])


def test_pytorch_s_own_tools_read_the_snapshot(graph, tmp_path):
    snapshot = snapshot_of(graph, tmp_path)
    assert "MemoryViz.js" in _memory_viz.trace_plot(snapshot)
    assert "MemoryViz.js" in _memory_viz.segment_plot(snapshot)
    assert "MemoryViz.js" in _memory_viz.trace_plot(snapshot, filter_freed=True)
    text = _memory_viz.trace(snapshot)
    assert "cudaMalloc" in text and "Device 0" in text
    total = sum(segment["total_size"] for segment in snapshot["segments"])
    assert f"total_reserved: {_memory_viz.Bytes(total)}" in _memory_viz.segsum(snapshot)


def test_a_plan_for_the_cpu_has_a_snapshot_too(tmp_path):
    model = nn.Linear(50, 70)
    with lazyviz.lazy() as graph:
        model(torch.ones(8, 50)).sum().backward()
    snapshot = snapshot_of(graph, tmp_path)
    assert len(snapshot["device_traces"]) == 1
    assert max(levels(snapshot, {"alloc"}, {"free_completed"})) == graph.plan().peak_bytes
    assert _memory_viz.segsum(snapshot) and _memory_viz.trace(snapshot)
    assert snapshot["lazyviz"]["device"] == "cpu"


def test_expandable_segments_are_mapped_in_the_trace(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    model = nn.Linear(50, 70)
    with lazyviz.lazy(device="RTX-3060") as graph:
        model(torch.ones(8, 50)).sum().backward()
    snapshot = snapshot_of(graph, tmp_path)
    reserved = levels(snapshot, {"segment_alloc", "segment_map"}, {"segment_free", "segment_unmap"})
    assert max(reserved) == graph.plan().reserved_bytes
    assert all(segment["is_expandable"] for segment in snapshot["segments"])
    assert _memory_viz.segsum(snapshot)


@pytest.mark.parametrize("format", [None, "perfetto", "chrome"])
def test_trace_events_have_every_node_once_and_the_memory_of_each(graph, tmp_path, format):
    graph.save(tmp_path / "timeline.json", format)
    content = json.loads((tmp_path / "timeline.json").read_text())
    plan, events = graph.plan(), content["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    drawn = [event for event in events if event["ph"] == "X" and event["cat"] != "module"]
    assert sorted(event["name"] for event in drawn) == sorted(node.name for node in graph.nodes)
    counters = [event for event in events if event["ph"] == "C" and event["name"] == "all allocated bytes"]
    assert [event["args"]["bytes"] for event in counters[:-1]] == [size for _, size in plan.timeline]
    by_category = [event for event in events if event["ph"] == "C" and event["name"] == "allocated bytes"]
    assert max(sum(event["args"].values()) for event in by_category) == plan.peak_bytes
    assert "nothing has run" in content["otherData"]["time"]
    assert sum(event["args"]["allocates_bytes"] for event in drawn) == sum(
        storage.nbytes for storage in graph.ir.storages if not storage.external
    )


def test_slices_of_a_lane_nest_or_follow_and_modules_stand_around_their_nodes(graph, tmp_path):
    graph.save(tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    lanes = {event["tid"] for event in events if event["ph"] == "X"}
    assert len(lanes) >= 3
    for lane in lanes:
        stack: list[float] = []
        slices = [event for event in events if event["ph"] == "X" and event["tid"] == lane]
        for event in slices:
            start, stop = event["ts"], event["ts"] + event["dur"]
            while stack and stack[-1] <= start:
                stack.pop()
            assert not stack or stop <= stack[-1]
            stack.append(stop)
    modules = {event["name"] for event in events if event.get("cat") == "module"}
    assert {"model", "0", "2"} <= modules


def test_after_the_run_times_are_the_measured_ones(tmp_path):
    model = nn.Linear(50, 70)
    with lazyviz.lazy() as graph:
        model(torch.ones(8, 50)).sum().backward()
    graph.evaluate()
    graph.save(tmp_path / "timeline.json")
    content = json.loads((tmp_path / "timeline.json").read_text())
    assert content["otherData"]["time"] == "measured"
    drawn = [event for event in content["traceEvents"] if event["ph"] == "X" and event["cat"] != "module"]
    total = 1e6 * sum(node.seconds for node in graph.nodes)
    assert sum(event["dur"] for event in drawn) == pytest.approx(total, rel=0.05)


def test_model_explorer_gets_a_graph_whose_edges_all_have_two_ends(graph, tmp_path):
    graph.save(tmp_path / "graph.json", "model-explorer")
    content = json.loads((tmp_path / "graph.json").read_text())
    (only,) = content["graphs"]
    nodes = {node["id"]: node for node in only["nodes"]}
    assert len(nodes) == len(only["nodes"]) == len(graph.nodes) + len(graph.ir.inputs)
    for node in nodes.values():
        assert isinstance(node["label"], str) and node["label"]
        assert all(isinstance(each["value"], str) for each in node["attrs"])
        for edge in node["incomingEdges"]:
            source = nodes[edge["sourceNodeId"]]
            assert int(edge["sourceNodeOutputId"]) < len(source["outputsMetadata"])
    product = next(node for node in nodes.values() if node["label"] == "addmm")
    assert product["namespace"] == "Forward/model/0"
    assert len(product["incomingEdges"]) == len(graph.nodes[int(product["id"])].inputs)
    assert product["outputsMetadata"][0]["attrs"][0] == {"key": "shape", "value": "128×256"}


@pytest.mark.parametrize("format", ["perfetto", "model-explorer", "pickle"])
def test_an_empty_graph_can_be_saved(tmp_path, format):
    with lazyviz.lazy() as graph:
        pass
    graph.save(tmp_path / "empty", format)
    assert (tmp_path / "empty").stat().st_size > 0


@pytest.fixture
def cut():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4))
    x, y = torch.randn(12, 16), torch.randint(4, (12,))
    with lazyviz.lazy(batch="x,y", split=4) as graph:
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
    graph.keep = net, x, y, loss
    return graph


def test_the_snapshot_of_a_run_in_pieces_peaks_where_its_plan_does(cut, tmp_path):
    plan = cut.plan()
    assert plan.split.pieces == 4
    snapshot = snapshot_of(cut, tmp_path)
    assert max(levels(snapshot, {"alloc"}, {"free_completed"})) == plan.peak_bytes
    names = [node.name for node in cut.nodes]
    for entry in snapshot["device_traces"][0]:
        if entry["action"] == "alloc" and entry["time_us"] > 0:
            index = plan.timeline[entry["time_us"]][0]
            innermost = entry["frames"][0]["name"]
            assert innermost.endswith(names[index]), "what was allocated then belongs to the node of then"
    eager = snapshot_of(cut, tmp_path, eager=True)
    assert max(levels(eager, {"alloc"}, {"free_completed"})) == plan.eager_peak_bytes


def test_trace_events_of_a_run_in_pieces_are_in_its_order_and_name_the_piece(cut, tmp_path):
    plan = cut.plan()
    cut.save(tmp_path / "trace.json")
    found = json.loads((tmp_path / "trace.json").read_text())
    assert found["otherData"]["split"].startswith("in 4 pieces of 3 samples")
    drawn = [event for event in found["traceEvents"] if event["ph"] == "X" and event["cat"] != "module"]
    drawn.sort(key=lambda event: event["ts"])
    assert [event["name"] for event in drawn] == [cut.nodes[index].name for index, _ in plan.timeline]
    relu = [event["args"].get("piece") for event in drawn if event["name"].startswith("native_layer_norm_")]
    assert relu[:1] == ["1 of 4"] and set(relu) == {"1 of 4", "2 of 4"}
    levels = [
        event["args"]["bytes"] for event in found["traceEvents"] if event["name"] == "all allocated bytes"
    ]
    assert levels[:-1] == [nbytes for _, nbytes in plan.timeline]
    for lane in {event["tid"] for event in found["traceEvents"] if event["ph"] == "X"}:
        open_until = []
        for event in found["traceEvents"]:
            if event["ph"] == "X" and event["tid"] == lane:
                while open_until and open_until[-1] <= event["ts"]:
                    open_until.pop()
                assert not open_until or event["ts"] + event["dur"] <= open_until[-1], "slices nest"
                open_until.append(event["ts"] + event["dur"])


def test_measured_times_of_all_pieces_are_not_shown_as_those_of_one(cut, tmp_path):
    cut.evaluate()
    cut.save(tmp_path / "trace.json")
    found = json.loads((tmp_path / "trace.json").read_text())
    assert found["otherData"]["time"].startswith("one microsecond per node")


def test_model_explorer_gets_the_pieces_and_the_maximum_of_each_node(cut, tmp_path):
    plan = cut.plan()
    cut.save(tmp_path / "graph.json", "model-explorer")
    (graph,) = json.loads((tmp_path / "graph.json").read_text())["graphs"]
    assert graph["groupNodeAttributes"][""]["split"].startswith("in 4 pieces")
    most: dict[int, int] = {}
    for index, nbytes in plan.timeline:
        most[index] = max(most.get(index, 0), nbytes)
    for node in graph["nodes"]:
        if node["id"].isdigit() and int(node["id"]) in most:
            attributes = {each["key"]: each["value"] for each in node["attrs"]}
            assert attributes["allocated during it"] == format_bytes(most[int(node["id"])])


def test_exports_have_the_lanes_of_the_picture(tmp_path):
    with lazyviz.lazy() as graph:
        net = nn.Linear(8, 4)
        x = torch.randn(16, 8)
        net(x).sum().backward()
        with torch.no_grad():
            for weight in net.parameters():
                weight -= 0.1 * weight.grad
    graph.save(tmp_path / "events.json", "perfetto")
    events = json.loads((tmp_path / "events.json").read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    in_lane = {event["name"]: lanes[event["tid"]] for event in events if event["ph"] == "X"}
    graph.save(tmp_path / "explorer.json", "model-explorer")
    (drawn,) = json.loads((tmp_path / "explorer.json").read_text())["graphs"]
    spaces = {node["id"]: node["namespace"].split("/")[0] for node in drawn["nodes"]}
    shown = Scene(graph.ir, graph.plan()).hierarchy
    for node in graph.nodes:
        if shown.box_of[node.index] is not None:
            expected = LANE_TITLES[shown.lane_of(node)]
            assert in_lane[node.name] == spaces[str(node.index)] == expected
    assert {"Initialization", "Forward", "Backward", "Optimizer"} == set(in_lane.values())
