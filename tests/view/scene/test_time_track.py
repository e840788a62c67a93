"""The time track below the memory chart: the plan's projected seconds by position."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.view.scene.memory_chart import stretches
from lazyviz.view.scene.scene import Scene
from lazyviz.view.scene.time_track import track_json


def step(device="H100-80GB"):
    """A training step with its batch named; what it needs is kept alive by the second value."""
    with lazyviz.lazy(device=device) as graph:
        place = "cpu" if device.startswith("cpu") else "cuda"
        net = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).to(place)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        x = torch.randn(4096, 512, device=place)
        net(x).square().mean().backward()
        optimizer.step()
    return graph, (net, optimizer, x)


def test_points_and_phases_add_up_to_the_projected_time():
    graph, _keep = step()
    plan = graph.plan()
    track = track_json(Scene(graph.ir, plan))
    assert sum(track["seconds"]) == pytest.approx(plan.seconds, rel=1e-2)
    assert len(track["seconds"]) == len(track["bounds"]) == min(len(plan.timeline), 240)
    assert set(track["bounds"]) <= set("cml") and set(track["keys"]) <= {"compute", "memory", "launch"}
    phases = stretches(Scene(graph.ir, plan))
    assert [phase for phase, _ in phases] == ["other", "forward", "backward", "optimizer"]
    assert len(track["phases"]) == len(phases)
    assert "projected, ±" in track["words"]
    low, high = plan.seconds_range
    assert track["title"].startswith("Projected for H100-80GB: ")
    assert "in kernels with measurements" in track["title"]
    assert low < plan.seconds < high


def test_a_part_of_the_run_has_its_own_points():
    graph, _keep = step()
    scene = Scene(graph.ir, graph.plan())
    whole, part = track_json(scene), track_json(scene, 3, 9)
    assert part["seconds"] == whole["seconds"][3:9] and part["bounds"] == whole["bounds"][3:9]
    assert part["phases"] == whole["phases"]


def test_the_bound_of_a_large_product_is_compute_and_of_an_update_memory():
    graph, _keep = step()
    track = track_json(Scene(graph.ir, graph.plan()))
    by_op = {str(node.op): bound for node, bound in zip(graph.nodes, track["bounds"], strict=True)}
    assert by_op["aten.addmm.default"] == "c"
    assert by_op["aten.relu.default"] == "m"


def test_pieces_have_no_time_and_say_so_and_another_batch_has_its_own():
    net, x = nn.Linear(8, 8), torch.randn(4, 8)
    with lazyviz.lazy(device="T4-16GB", batch=[x]) as graph:
        y = net(x)
    track = track_json(Scene(graph.ir, graph.plan(split=2)))
    assert "of one piece only" in track["words"] and track["seconds"] == [] and track["keys"] == []
    large = graph.plan(batch_size=1 << 20)
    track = track_json(Scene(graph.ir, large))
    assert sum(track["seconds"]) == pytest.approx(large.seconds, rel=0.01)
    assert large.seconds > 10 * graph.plan().seconds
    del y


def test_a_cpu_that_was_not_calibrated_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    graph, _keep = step("cpu")
    assert track_json(Scene(graph.ir, graph.plan()))["words"] == "time: lazyviz.calibrate() first"


def test_the_device_waits_while_the_host_initializes_and_not_at_one_position():
    graph, _keep = step()
    track = track_json(Scene(graph.ir, graph.plan()))
    names = [node.name for node in graph.nodes]
    initial = [at for at, name in enumerate(names) if name.startswith("uniform")]
    assert len(initial) == 4 and all(track["seconds"][at] for at in initial)
    copied = next(at for at, name in enumerate(names) if name.startswith("_to_copy"))
    waiting = graph.plan().time.ops[copied].waiting
    assert track["seconds"][initial[0]] == pytest.approx(waiting / 5, rel=0.01)
    assert track["bounds"][initial[0]] == "l"
