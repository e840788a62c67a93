"""Collectives beside kernels: exposed and hidden communication."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lazyviz
from lazyviz.graph.collective_info import kind_of
from lazyviz.plan.runtime.gpu_timeline import duration


def _time(step, device="H100-80GB", ranks=8):
    with lazyviz.lazy(device=device, mesh=(ranks,), rank=0) as graph:
        step()
    time = graph.plan().time
    assert sum(each.seconds for each in time.ops) == pytest.approx(time.seconds)
    assert sum(time.by_bound.values()) == pytest.approx(time.seconds)
    return time


def _collectives(time):
    return [each for each in time.ops if kind_of(each.node) is not None]


def _links(time):
    """Seconds on the links, and what the kernels alone take, with the waits for Python."""
    found = _collectives(time)
    return sum(each.seconds + each.hidden for each in found), time.seconds - sum(
        each.seconds for each in found
    )


def _fsdp(samples):
    def step():
        mesh = init_device_mesh("cuda", (8,))
        blocks = [nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048)) for _ in range(4)]
        model = nn.Sequential(*blocks).cuda().bfloat16()
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(
            torch.randn(samples, 2048, device="cuda", dtype=torch.bfloat16)
        ).float().square().mean().backward()

    return step


def test_gathers_of_fsdp_are_hidden_behind_the_layer_before():
    time = _time(_fsdp(65_536))
    gathers = [each for each in _collectives(time) if kind_of(each.node) == "all_gather"]
    assert [each.node.phase for each in gathers].count("backward") == 4
    # Nothing runs before the first but the initialization, which the host issues ahead of the GPU.
    assert all(each.seconds == 0 and each.hidden > 0 for each in gathers[1:])
    scatters = [each for each in _collectives(time) if kind_of(each.node) == "reduce_scatter"]
    assert len(scatters) == 4 and all(each.seconds == 0 for each in scatters[:-1])
    assert scatters[-1].seconds > 0  # nothing is left to run beside it
    assert time.exposed == pytest.approx(sum(each.seconds for each in _collectives(time)))


def test_explain_says_what_kernels_wait_for():
    with lazyviz.lazy(device="H100-80GB", mesh=(8,), rank=0) as graph:
        _fsdp(1024)()
    plan = graph.plan()
    assert f"of which kernels wait for {duration(plan.time.exposed)}" in str(plan.explain())


def test_with_few_samples_kernels_wait_for_the_gathers():
    few, many = _time(_fsdp(128)), _time(_fsdp(65_536))
    assert few.exposed / few.seconds > many.exposed / many.seconds
    links, kernels = _links(few)
    assert max(links, kernels) <= few.seconds * 1.001
    assert few.seconds <= links + kernels + 1e-9


def test_what_is_taken_at_once_is_waited_for():
    def step():
        x = torch.randn(1 << 26, device="cuda")
        for _ in range(4):
            dist.all_reduce(x)
            x = x * 0.5

    time = _time(step)
    links, _ = _links(time)
    assert links > 0 and time.exposed == pytest.approx(links, rel=0.02)


def test_what_nothing_takes_ends_with_the_record_at_the_latest():
    def step():
        x = torch.randn(1 << 26, device="cuda")
        y = torch.randn(8192, 8192, device="cuda")
        dist.all_reduce(x)
        for _ in range(20):
            y = y @ y

    time = _time(step)
    assert time.exposed == 0 and time.hidden > 0
    alone = _time(lambda: dist.all_reduce(torch.randn(1 << 26, device="cuda")))
    assert alone.exposed == pytest.approx(time.hidden, rel=0.02)  # with nothing beside it, it sticks out


def test_buckets_of_ddp_are_reduced_while_the_backward_pass_goes_on():
    def step():
        model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(6))).cuda()
        model = DistributedDataParallel(model)
        for _ in range(2):  # the first has one bucket of all
            model(torch.randn(32_768, 4096, device="cuda")).sum().backward()

    time = _time(step)
    first, *reduced = [each for each in _collectives(time) if kind_of(each.node) == "all_reduce"]
    assert first.hidden == pytest.approx(0, abs=1e-9) and len(reduced) > 2
    assert sum(each.seconds for each in reduced[:-1]) == pytest.approx(0, abs=1e-9)
    assert reduced[-1].seconds > 0


def test_collectives_of_one_group_take_turns():
    def step():
        tensors = [torch.randn(1 << 24, device="cuda") for _ in range(4)]
        works = [dist.all_reduce(each, async_op=True) for each in tensors]
        for work in works:
            work.wait()

    time = _time(step)
    one = _time(lambda: dist.all_reduce(torch.randn(1 << 24, device="cuda")))
    assert _links(time)[0] == pytest.approx(4 * _links(one)[0], rel=0.02)
    assert time.seconds >= _links(time)[0]
