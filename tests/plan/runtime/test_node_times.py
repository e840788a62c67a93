"""``node.seconds`` and ``node.bound``: projected before the run, measured after."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import lazyviz


@pytest.fixture
def step():
    with lazyviz.lazy(device="A100-40GB") as graph:
        net = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)).cuda()
        net(torch.randn(4096, 4096, device="cuda")).square().mean().backward()
    return graph


def test_on_a_planned_gpu_each_op_has_its_time_and_its_bound(step):
    times = {node: node.seconds for node in step.nodes}
    assert sum(times.values()) == pytest.approx(step.plan().seconds)
    large = next(node for node in step.nodes if node.name.startswith("addmm"))
    relu = next(node for node in step.nodes if node.name.startswith("relu"))
    assert (large.bound, relu.bound) == ("compute", "memory")
    assert times[large] > 3 * times[relu]
    assert {node.bound for node in step.nodes} == {"compute", "memory", "launch"}
    assert {node.measured_seconds for node in step.nodes} == {None}


def test_asking_for_a_time_keeps_no_record():
    records = []
    for _ in range(3):  # the latest block's GPU is asked for its memory until the next one
        with lazyviz.lazy(device="A100-40GB") as graph:
            x = torch.randn(64, 64, device="cuda") * 2
        assert graph.nodes[-1].seconds > 0
        records.append(weakref.ref(graph.ir))
        lazyviz.reset()
        del graph, x
    gc.collect()
    assert [record() is not None for record in records[:2]] == [False, False]


def test_a_record_that_grows_is_projected_again():
    with lazyviz.lazy(device="A100-40GB") as graph:
        x = torch.randn(1024, 1024, device="cuda")
        first = graph.nodes[-1]
        assert first.seconds > 0
        y = x @ x
        assert graph.nodes[-1].seconds > 0 and graph.nodes[-1].bound
    del y


def test_before_the_run_the_cpu_has_times_once_it_is_calibrated(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with lazyviz.lazy() as graph:
        x = torch.ones(512, 512)
        x @ x
    product = graph.nodes[-1]
    assert product.seconds is None and product.bound is None
    lazyviz.calibrate()
    projected = product.seconds
    assert projected > 0 and product.bound == "compute"
    graph.evaluate(timings=True)
    assert product.seconds == product.measured_seconds > 0


def test_a_user_defined_profile_has_no_times():
    mine = lazyviz.DeviceProfile("my GPU", total_bytes=10 * 2**30)
    with lazyviz.lazy(device=mine) as graph:
        torch.ones(8, device="cuda") + 1
    assert [(node.seconds, node.bound) for node in graph.nodes] == [(None, None)] * 2
