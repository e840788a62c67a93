"""Plans of other batch sizes and other cuts, made from a plan; positions in a run of pieces."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazyviz


@pytest.fixture(scope="module")
def graph():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(net.parameters())
    x, y = torch.randn(12, 32), torch.randint(4, (12,))
    with lazyviz.lazy(batch="x,y") as graph:
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    graph.keep = net, optimizer, x, y, loss
    return graph


@pytest.mark.parametrize("size", [None, 1, 5, 12, 96])
@pytest.mark.parametrize("split", [None, "off", 2, 5, "auto"])
def test_replanning_gives_the_same_plan_as_a_new_one(graph, size, split):
    again = graph.plan(split=3).replan(batch_size=size, split=split)
    anew = graph.plan(batch_size=size, split=split)
    for name in ("peak_bytes", "eager_peak_bytes", "timeline", "category_timeline", "peak_position"):
        assert getattr(again, name) == getattr(anew, name)
    assert (again.split.piece_sizes, again.batch_size) == (anew.split.piece_sizes, anew.batch_size)


@pytest.mark.parametrize("size", [None, 96])
@pytest.mark.parametrize("split", ["off", 3])
@pytest.mark.parametrize("device", ["cpu", "H100-80GB", "T4-16GB", lazyviz.DeviceProfile("small", "64 KiB")])
def test_replanning_for_another_device_gives_the_same_plan_as_a_new_one(graph, device, size, split):
    anew = graph.plan(device=device, batch_size=size, split=split)
    for start in (graph.plan(), graph.plan(device="RTX-3060", split=2, batch_size=24)):
        again = start.replan(size, split, device)
        for name in ("device", "peak_bytes", "reserved_bytes", "timeline", "fits", "needed_range"):
            assert getattr(again, name) == getattr(anew, name)
        if device != "cpu":  # whose free memory changes
            assert again.capacity_bytes == anew.capacity_bytes
            assert again.max_batch_size == anew.max_batch_size


def test_a_device_that_is_not_known_is_refused(graph):
    with pytest.raises(ValueError, match="did you mean"):
        graph.plan().replan(device="H10")


@pytest.mark.parametrize("split", ["off", "auto", 4])
def test_the_search_for_the_largest_batch_goes_on_where_its_time_was_up(graph, split):
    plan = graph.plan(device="T4-16GB")
    known, sizes = False, []
    while not known:
        size, known = plan.largest_within(0, split)
        sizes.append(size)
    assert len(sizes) > 2, "each turn asks for one size more"
    assert sizes == sorted(sizes)
    assert sizes[-1] == graph.plan(device="T4-16GB", split=split).max_batch_size


def test_what_a_part_of_the_run_allocates_is_listed_largest_first(graph):
    plan = graph.plan()
    made = plan.made(0, len(plan.timeline))
    assert [each.nbytes for each in made] == sorted((each.nbytes for each in made), reverse=True)
    half = len(plan.timeline) // 2
    parts = [*plan.made(0, half), *plan.made(half, len(plan.timeline))]
    assert sorted(each.nbytes for each in parts) == sorted(each.nbytes for each in made)
    assert all(each.node is not None and each.node.index < half for each in plan.made(0, half))


def test_a_plan_made_again_refuses_what_a_plan_refuses(graph):
    for wrong in [{"batch_size": 0}, {"split": "some"}, {"split": True}]:
        with pytest.raises(ValueError, match="split must be|batch_size must be"):
            graph.plan().replan(**wrong)


@pytest.mark.parametrize("split", ["off", 2, 5])
def test_the_moment_at_a_position_holds_what_the_timeline_says(graph, split):
    plan = graph.plan(split=split)
    for position, (index, nbytes) in enumerate(plan.timeline):
        moment = plan.at(position)
        assert moment.node is graph.nodes[index]
        assert moment.nbytes == nbytes
        held = {storage for storage in graph.ir.storages for each in plan.held(storage) if position in each}
        assert {allocation.storage.origin for allocation in moment.alive} >= held
    assert plan.timeline[plan.peak_position] == (plan.peak_node.index, plan.peak_bytes)


def test_in_pieces_a_tensor_of_the_batch_is_held_once_a_piece_and_a_weight_throughout(graph):
    plan = graph.plan(split=4)
    relu = next(node for node in graph.nodes if "relu" in node.name)
    first, second = plan.held(relu)
    assert first.stop <= second.start
    assert plan.timeline[first.start][0] == plan.timeline[second.start][0] == relu.index
    assert plan.lifetime(relu) == range(first.start, second.stop)
    weight = next(storage for storage in graph.ir.storages if storage.role == "parameter")
    assert plan.held(weight) == [range(len(plan.timeline))]


def test_the_text_of_a_plan_in_pieces_names_what_is_alive_at_its_own_peak(graph):
    plan = graph.plan(split=4)
    at_peak = plan.at(plan.peak_position)
    assert f"{lazyviz.plan.units.format_bytes(at_peak.nbytes)}" in plan.explain()
    assert sum(allocation.nbytes for allocation in at_peak.alive) == plan.peak_bytes


def test_the_room_for_another_size_is_what_there_was_however_large_the_batch_and_whatever_has_run():
    torch.manual_seed(0)
    net = nn.Linear(1024, 1024)
    x = torch.randn(64, 1024)
    with lazyviz.lazy(batch="x", device="cpu") as graph:
        y = net(x)
        y.sum().backward()
    plan = graph.plan()
    assert plan.capacity_bytes is not None
    for split in ("off", 4):
        assert plan.replan(64_000, split).capacity_bytes == plan.capacity_bytes
    graph.evaluate()
    for split in ("off", 4):
        assert plan.replan(64_000, split).capacity_bytes == plan.capacity_bytes
    assert y.isfinite().all()
