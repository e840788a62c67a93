"""A block with a mesh initializes ``torch.distributed`` for one rank, and restores it afterwards."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp  # it registers a backend on import, here and not within a test
from torch.distributed import init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lazyviz
from lazyviz.graph.collective_info import collective_of
from lazyviz.record.sync_points import AbsentDeviceError

GPU = "H100-80GB"
gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # their names since torch 2.13
scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = {name: os.environ.get(name) for name in VARIABLES}
    plugins = dict(dist.Backend._plugins)
    yield
    assert {name: os.environ.get(name) for name in VARIABLES} == before
    now = dict(dist.Backend._plugins)
    now.pop("GLOO", None)  # since torch 2.14 registered with the first real group
    plugins.pop("GLOO", None)
    assert now == plugins
    assert not dist.is_initialized()
    lazyviz.reset()


def collectives(graph):
    return [found for node in graph.nodes if (found := collective_of(node)) is not None]


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_the_block_is_one_rank_of_many(device):
    with lazyviz.lazy(device=device, mesh=(4, 2), rank=5) as graph:
        assert dist.is_initialized()
        assert (dist.get_rank(), dist.get_world_size()) == (5, 8)
        assert dist.get_backend() == ("gloo" if device == "cpu" else "nccl")
        assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == ["5", "8", "5"]
    assert graph.plan().world_size == 8


def test_another_rank_has_another_gpu():
    with lazyviz.lazy(device=GPU, mesh=(16,), rank=11):
        assert torch.cuda.device_count() == 8
        assert torch.cuda.current_device() == int(os.environ["LOCAL_RANK"]) == 3
        assert torch.ones(2, device="cuda").device == torch.device("cuda", 3)


def test_a_program_may_call_init_process_group_in_a_block():
    with lazyviz.lazy(device=GPU, mesh=(8,), rank=2):
        init_process_group("nccl")
        dist.init_process_group("cpu:gloo,cuda:nccl", rank=2, world_size=8)
        assert dist.get_rank() == 2
        with pytest.raises(RuntimeError, match=r"world_size=4\) in a block for rank 2 of 8"):
            dist.init_process_group("nccl", world_size=4)
        dist.destroy_process_group()
        assert not dist.is_initialized()
        dist.init_process_group("nccl")
        assert dist.get_world_size() == 8
        dist.destroy_process_group()


def test_an_exception_in_the_block_leaves_nothing():
    with pytest.raises(ZeroDivisionError), lazyviz.lazy(device=GPU, mesh=(8,)):
        dist.new_group([0, 1])
        1 / 0


def test_groups_of_other_users_are_in_the_way_or_fit(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="already initialized, with backend gloo as rank 0 of 1"):
            lazyviz.lazy(device="cpu", mesh=(8,)).__enter__()
        assert dist.get_backend() == "gloo"
    finally:
        dist.destroy_process_group()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    own = dist.group.WORLD
    try:
        with lazyviz.lazy(device="cpu", mesh=(4,), rank=1) as graph:
            assert dist.group.WORLD is own
            dist.all_reduce(torch.ones(4))
        assert dist.group.WORLD is own
        assert [each.kind for each in collectives(graph)] == ["all_reduce"]
    finally:
        dist.destroy_process_group()


def test_meshes_and_groups_go_on_in_the_next_block():
    with lazyviz.lazy(device=GPU, mesh=(8,)):
        mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp", "tp"))
        group = mesh.get_group("tp")
        x = torch.ones(4, device="cuda")
    with lazyviz.lazy(device=GPU, mesh=(8,)) as graph:
        dist.all_reduce(x, group=group)
        assert mesh["dp"].size() == 4
    assert [(each.kind, each.group.ranks) for each in collectives(graph)] == [("all_reduce", (0, 1))]


def test_blocks_inside_are_of_the_same_rank():
    with lazyviz.lazy(device=GPU, mesh=(8,), rank=3):
        with lazyviz.lazy() as inner:
            assert dist.get_rank() == 3
            dist.all_reduce(torch.ones(4, device="cuda"))
        assert inner.plan().world_size == 8
        with pytest.raises(RuntimeError, match="rank 0 of 8 inside one for rank 3 of 8"):
            lazyviz.lazy(device=GPU, mesh=(8,)).__enter__()
        assert dist.get_rank() == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mesh": (8,), "rank": 8}, "from 0 to 7"),
        ({"mesh": (0,)}, "number of ranks"),
        ({"mesh": ()}, "number of ranks"),
        ({"rank": 1}, "needs a mesh"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        lazyviz.lazy(device=GPU, **options).__enter__()


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_collectives_are_nodes_with_their_bytes(device):
    kind = "cpu" if device == "cpu" else "cuda"
    with lazyviz.lazy(device=device, mesh=(4,), rank=1) as graph:
        x = torch.ones(1024, device=kind)
        whole = torch.empty(4096, device=kind)
        dist.all_reduce(x)
        gather(whole, x)
        scatter(x, whole)
        dist.broadcast(x, src=0)
        parts = [torch.empty(1024, device=kind) for _ in range(4)]
        dist.all_gather(parts, x)
        dist.all_to_all_single(torch.empty_like(x), x)
        dist.barrier()
    found = [(each.kind, each.nbytes, each.sent_bytes) for each in collectives(graph)]
    assert found == [
        ("all_reduce", 4096, 6144),
        ("all_gather", 16384, 12288),
        ("reduce_scatter", 16384, 12288),
        ("broadcast", 4096, 4096),
        ("all_gather", 16384, 12288),
        ("all_to_all", 4096, 3072),
        ("barrier", 0, 0),
    ]
    assert graph.plan().communication_bytes == sum(each[2] for each in found)
    assert "all_reduce of 4" in graph.text()
    assert "Rank 1 of 4; it sends 49.0 KiB to the others" in graph.plan().explain()


def test_an_async_collective_can_be_waited_for():
    with lazyviz.lazy(device=GPU, mesh=(4,)):
        work = dist.all_reduce(torch.ones(4, device="cuda"), async_op=True)
        work.wait()
        assert work.is_completed()


def test_what_other_ranks_would_send_is_not_invented():
    x = torch.ones(4)
    with lazyviz.lazy(device="cpu", mesh=(4,)) as graph:
        y = x * 2
        assert y.sum().item() == 8  # this rank's own
        z = x + 1
        dist.all_reduce(z)
        with pytest.raises(AbsentDeviceError, match="depends on data of the other planned ranks"):
            z.sum().item()
    with pytest.raises(AbsentDeviceError, match="one rank without the others"):
        graph.evaluate()
    assert torch.equal(y, x * 2)


def test_a_distributed_sampler_has_the_part_of_this_rank():
    with lazyviz.lazy(device="cpu", mesh=(4,), rank=3):
        data = TensorDataset(torch.arange(32))
        loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))
        assert len(loader) == 2


def test_objects_of_this_rank_can_be_sent():
    with lazyviz.lazy(device=GPU, mesh=(4,)):
        objects = ["run 7"]
        dist.broadcast_object_list(objects, src=0)
        assert objects == ["run 7"]
    with lazyviz.lazy(device=GPU, mesh=(4,), rank=1), pytest.raises(AbsentDeviceError):
        dist.broadcast_object_list([None], src=0)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_mesh_may_have_one_rank(device):
    with lazyviz.lazy(device=device, mesh=(1,)) as graph:
        assert (dist.get_world_size(), dist.get_rank()) == (1, 0)
        layer = torch.nn.Linear(8, 8, device=None if device == "cpu" else "cuda")
        torch.distributed.fsdp.fully_shard(layer)
        layer(torch.ones(4, 8, device=layer.weight.device)).sum().backward()
    assert graph.plan().eager_peak_bytes > 0
    with lazyviz.lazy(mesh=(1,)) as graph:
        doubled = torch.ones(3) * 2
    graph.evaluate()  # nothing of it needs the group
    assert doubled.tolist() == [2.0, 2.0, 2.0]
