"""Compiled passes of planning: the same plans as without them, field by field."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.graph.ir import Graph, Resize, RunInside, Storage, Value
from lazyviz.plan.devices.device_lookup import DeviceProfile
from lazyviz.plan.liveness import lifetimes
from lazyviz.plan.make_plan import make_plan
from lazyviz.plan.plan import Plan

from ..conftest import Program

pytestmark = pytest.mark.skipif(lifetimes.native is None, reason="the passes have not been compiled")

MIB = 2**20
PHASES = ("forward", "backward", "optimizer", "other")
ROLES = ("parameter", "gradient", "optimizer", "buffer", "input", "kv_cache", None, None, None)


def record(seed: int) -> Graph:
    """A random program: views, writes in place, drops, arrivals, resizes, and runs inside the block."""
    draw = random.Random(seed)
    program = Program(torch.device(draw.choice(["cuda:0", "cpu"])))
    graph = program.graph
    sizes = draw.choice([(0, 1, 512, 513, 4000), (0, 700, MIB, MIB + 1, 3 * MIB, 11 * MIB), (100, 30 * MIB)])
    values: list[Value] = [program.outside(draw.choice(sizes), draw.choice(ROLES)) for _ in range(4)]
    for _ in range(draw.randrange(1, 150)):
        change(program, values, sizes, draw)
    for storage in graph.storages:
        if draw.random() < 0.3 and storage.dropped is None:
            storage.dropped = len(graph.nodes)
    return graph


def change(program: Program, values: list[Value], sizes: tuple[int, ...], draw: random.Random) -> None:
    graph, some = program.graph, draw.choices(values, k=draw.randrange(1, 4))
    what = draw.random()
    if what < 0.5:
        values.append(program.op(some, draw.choice(sizes), draw.choice(PHASES), role=draw.choice(ROLES)))
    elif what < 0.6:
        values.append(program.view(some[0], draw.choice(PHASES)))
    elif what < 0.7:
        program.op(some, None, draw.choice(PHASES), writes=some[:1])
    elif what < 0.9:
        if len(values) > 4:
            program.drop(values.pop(draw.randrange(4, len(values))))
    elif what < 0.93:
        arrived = Storage(draw.choice(sizes), program.device, external=True, created=-1)
        arrived.arrived = len(graph.nodes)
        graph.arrivals[arrived] = None
    elif what < 0.95:
        foreign = Storage(draw.choice(sizes), program.device, external=False, created=draw.randrange(3))
        foreign.dropped = draw.choice([None, 2])
        values.append(Value(some[0].meta, foreign, None))
    elif what < 0.96 and graph.nodes:
        graph.runs_inside.append(RunInside(len(graph.nodes), tuple(range(len(graph.nodes))), ()))
    elif what < 0.97:
        storage = some[0].storage
        storage.resized = (*storage.resized, Resize(id(graph), len(graph.nodes), draw.choice(sizes)))
    elif what < 0.98:
        again = program.outside(some[0].storage.nbytes)
        again.storage.continues = some[0].storage
        values.append(again)


def contents(plan: Plan) -> dict[str, Any]:
    """Everything that a plan says; scratch and resized memory have storages of their own in each plan."""
    found: dict[str, Any] = {f.name: getattr(plan, f.name) for f in fields(plan) if f.name[0] != "_"}
    found["alive_at_peak"] = [repr(each) for each in plan.alive_at_peak]
    found["devices"] = {name: each.timeline for name, each in plan.devices.items()}
    found["reservation"] = plan._reservation
    found["ranges"] = (plan.reserved_range, plan.eager_reserved_range, plan.needed_range)
    found["lifetimes"] = [(named(storage), span[1:]) for storage, span in plan._lifetimes.items()]
    if plan._reservation is not None:
        found["calls"] = [(at, named(name), size) for at, name, size in plan._reservation.calls]
    return found


def named(what: object) -> object:
    if not isinstance(what, Storage):
        return what
    return what.created, what.nbytes, what.dropped, what.role, what.name, what.device, what.external


def assert_alike(graph: Graph, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    compiled = contents(make_plan(graph, **options))
    with monkeypatch.context() as patch:
        patch.setattr(lifetimes, "native", None)
        alone = contents(make_plan(graph, **options))
    for name, expected in alone.items():
        assert compiled[name] == expected, name


@pytest.mark.parametrize("seed", range(150))
def test_plans_of_random_programs_are_the_same(seed, monkeypatch):
    graph = record(seed)
    total = random.Random(seed).choice([2**20, 40 * MIB, 100 * MIB, 2**34])
    for of in ("eager", "lazyviz"):
        for device in ("cpu:1GiB", DeviceProfile("small", total, 2**10)):
            assert_alike(graph, monkeypatch, device=device, of=of, as_recorded=seed % 2 == 0)


@pytest.mark.parametrize(
    "options",
    [
        "max_split_size_mb:20", "expandable_segments:True", "roundup_power2_divisions:4",
        "large_segment_size_mb:32", "garbage_collection_threshold:0.5,per_process_memory_fraction:0.5",
        "per_process_memory_fraction:0.3",
    ],
)  # fmt: skip
def test_options_of_the_allocator_are_followed(options, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", options)
    for seed in range(20):
        assert_alike(record(seed), monkeypatch, device=DeviceProfile("small", 200 * MIB, 2**10), of="eager")


@pytest.mark.parametrize("device", ["RTX-4090", "H100-80GB", "cpu:1GiB"])
def test_plans_of_recorded_training_are_the_same(device, monkeypatch):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.LazyLinear(16))
    model(torch.randn(2, 3, 8, 8))
    optimizer = torch.optim.Adam(model.parameters())
    with lazyviz.lazy() as graph:
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 3, 8, 8)).square().mean()
            loss.backward()
            optimizer.step()
    for of in ("eager", "lazyviz"):
        assert_alike(graph.ir, monkeypatch, device=device, of=of)


def test_sizes_beyond_64_bits_are_left_to_python(program):
    program.op([program.outside(2**62)], 2**63)
    program.op([program.outside(1)], 2**62)
    plan = make_plan(program.graph, as_recorded=True)
    assert plan.peak_bytes == 2**62 + 2**63 + 2**62 + 1
