"""Unmodified distributed programs, recorded as one rank on absent GPUs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed import tensor as distributed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import _random as random
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import lazyviz
from lazyviz.graph.collective_info import collective_of
from lazyviz.graph.nested_blocks import flattened
from lazyviz.plan.make_plan import make_plan
from lazyviz.record.sync_points import AbsentDeviceError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
GPU = "H100-80GB"
WIDTH = 64


@pytest.fixture(autouse=True)
def reset():
    yield
    lazyviz.reset()


def model(layers: int = 3) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])


def kinds(graph, phase=None):
    return [
        found.kind
        for node in graph.nodes
        if (found := collective_of(node)) is not None and phase in (None, node.phase)
    ]


def step(net, optimizer, rows: int = 4):
    net(torch.ones(rows, WIDTH, device="cuda")).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_data_parallel_reduces_each_bucket_in_the_backward_pass():
    with lazyviz.lazy(device=GPU, mesh=(8,)) as graph:
        net = DistributedDataParallel(model().cuda(), device_ids=[0], bucket_cap_mb=0.016)
        optimizer = torch.optim.AdamW(net.parameters())
        step(net, optimizer)
        step(net, optimizer)
    assert graph.sync_points == []
    assert kinds(graph)[0] == "broadcast"
    assert kinds(graph, "backward").count("all_reduce") >= 3  # one, and one a bucket when these are made
    parameters = 3 * WIDTH * WIDTH * 4
    sent = graph.plan().communication
    assert sent["all_reduce"] == 2 * 2 * 7 * parameters // 8


def test_flat_parameters_are_refused_with_what_to_use():
    with pytest.raises(AbsentDeviceError, match="fully_shard instead"), lazyviz.lazy(device=GPU, mesh=(4,)):
        FullyShardedDataParallel(nn.Linear(8, 8).cuda())


@pytest.mark.parametrize("device_id", [3, None])
def test_flat_parameters_on_a_numbered_gpu_are_refused_with_what_to_use(device_id):
    with (
        pytest.raises(AbsentDeviceError, match="fully_shard instead"),
        lazyviz.lazy(device=GPU, mesh=(4,), rank=3),
    ):
        FullyShardedDataParallel(nn.Linear(8, 8).cuda(), device_id=device_id)


@pytest.mark.parametrize("name", ["fp16_compress_hook", "bf16_compress_hook"])
def test_gradients_compressed_to_half_precision_send_half_of_the_bytes(name):
    sent = []
    for hook in (None, getattr(default_hooks, name)):
        with lazyviz.lazy(device=GPU, mesh=(8,)) as graph:
            net = DistributedDataParallel(model().cuda())
            if hook is not None:
                net.register_comm_hook(None, hook)
            net(torch.ones(4, WIDTH, device="cuda")).sum().backward()
        assert graph.sync_points == []
        sent.append(graph.plan().communication["all_reduce"])
        lazyviz.reset()
    assert sent[1] == pytest.approx(sent[0] / 2, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_synchronized_batch_normalization_sends_its_statistics(dtype):
    channels, ranks, peaks = 32, 8, []
    for convert in (nn.Identity(), nn.SyncBatchNorm.convert_sync_batchnorm):
        with lazyviz.lazy(device=GPU, mesh=(ranks,)) as graph:
            net = nn.Sequential(nn.Conv2d(3, channels, 3), nn.BatchNorm2d(channels), nn.ReLU())
            net = DistributedDataParallel(convert(net).cuda())
            with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
                loss = net(torch.randn(4, 3, 32, 32, device="cuda")).float().square().mean()
            loss.backward()
            assert net.module[1].running_mean.shape == net.module[1].weight.grad.shape == (channels,)
        plan = graph.plan()
        peaks.append(plan.peak_bytes)
        lazyviz.reset()
    assert graph.sync_points == []
    combined = 2 * channels + 1  # means, deviations, and the count of each rank
    assert plan.communication["all_gather"] == 4 * combined * (ranks - 1)
    assert (
        kinds(graph, "forward").count("all_gather") == kinds(graph, "backward").count("all_reduce") - 1 == 1
    )
    assert peaks[1] == pytest.approx(peaks[0], rel=0.01)


def test_without_synchronization_nothing_is_sent():
    with lazyviz.lazy(device=GPU, mesh=(8,)) as graph:
        net = DistributedDataParallel(model().cuda(), gradient_as_bucket_view=True)
        with net.no_sync():
            net(torch.ones(4, WIDTH, device="cuda")).sum().backward()
    assert kinds(graph, "backward") == []


@pytest.mark.parametrize("reshard", [True, False, 2])
def test_gathered_parameters_live_as_long_as_they_are_needed(reshard):
    with lazyviz.lazy(device=GPU, mesh=(8,)) as graph:
        net = model().cuda()
        for layer in net:
            fully_shard(layer, reshard_after_forward=reshard)
        fully_shard(net)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        step(net, optimizer)
    gathered = kinds(graph).count("all_gather")
    assert gathered == (3 if reshard is False else 6)
    assert kinds(graph).count("reduce_scatter") == 3
    shard = WIDTH * WIDTH * 4 // 8
    plan = graph.plan()
    levels = dict(plan.eager_timeline)
    assert plan.by_category["parameters"] >= 3 * shard
    assert any(
        each.category == "gradients" and each.nbytes == shard for each in plan.at(len(graph.nodes) - 1).alive
    )
    end = levels[len(graph.nodes) - 1]
    assert 3 * shard <= end < 6 * shard + WIDTH * 16  # what is left are shards, of gradients too


def test_mixed_precision_gathers_halves():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with lazyviz.lazy(device=GPU, mesh=(8,)) as graph:
        net = model().cuda()
        for layer in net:
            fully_shard(layer, mp_policy=policy)
        fully_shard(net, mp_policy=policy)
        step(net, torch.optim.AdamW(net.parameters()))
    found = [each for node in graph.nodes if (each := collective_of(node)) is not None]
    assert {each.nbytes for each in found if each.kind == "all_gather"} == {WIDTH * WIDTH * 2}
    assert {each.nbytes for each in found if each.kind == "reduce_scatter"} == {WIDTH * WIDTH * 4}


def test_offloaded_parameters_are_on_the_host():
    with lazyviz.lazy(device=GPU, mesh=(8,)) as graph:
        net = model().cuda()
        for layer in net:
            fully_shard(layer, offload_policy=CPUOffloadPolicy())
        fully_shard(net, offload_policy=CPUOffloadPolicy())
        step(net, torch.optim.SGD(net.parameters(), 0.1))
        assert all(parameter.device.type == "cpu" for parameter in net.parameters())
    plan = graph.plan()
    assert plan.devices["cpu"].eager_peak_bytes >= 3 * WIDTH * WIDTH * 4 // 8


def test_replicated_shards_are_reduced_twice():
    with lazyviz.lazy(device=GPU, mesh=(2, 4)) as graph:
        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
        net = fully_shard(model().cuda(), mesh=mesh)
        step(net, torch.optim.SGD(net.parameters(), 0.1))
    assert kinds(graph, "backward") == ["reduce_scatter", "all_reduce"]


def test_uneven_shards_are_padded_once():
    with lazyviz.lazy(device=GPU, mesh=(8,), rank=7) as graph:
        net = nn.Linear(WIDTH, 13, bias=False).cuda()
        fully_shard(net)
        step(net, torch.optim.SGD(net.parameters(), 0.1))
    made = [node for node in graph.nodes if node.op is torch.ops.aten.new_zeros.default]
    assert len(made) == 1


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_distributed_tensors_compute_their_part(device):
    kind = "cpu" if device == "cpu" else "cuda"
    with lazyviz.lazy(device=device, mesh=(8,), rank=3) as graph:
        mesh = init_device_mesh(kind, (8,))
        a = distribute_tensor(torch.ones(64, 32, device=kind), mesh, [Shard(0)])
        b = distribute_tensor(torch.ones(32, 16, device=kind), mesh, [Replicate()])
        c = a @ b
        assert isinstance(c, DTensor)
        assert c.shape == (64, 16)
        assert c.to_local().shape == (8, 16)
        assert a.device == c.device == torch.device("cpu" if kind == "cpu" else "cuda:3")
        assert c.is_cuda is (kind == "cuda")
        whole = c.full_tensor()
        assert whole.shape == (64, 16)
        total = (c * 2).sum().full_tensor()
        assert total.shape == ()
    assert kinds(graph) == ["scatter", "broadcast", "all_gather", "all_reduce"]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def test_layers_are_split_over_ranks():
    with lazyviz.lazy(device=GPU, mesh=(4,)) as graph:
        mesh = init_device_mesh("cuda", (4,))
        net = parallelize_module(Layer().cuda(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        net(torch.ones(2, 8, WIDTH, device="cuda")).sum().backward()
        assert net.up.weight.grad.to_local().shape == (WIDTH, WIDTH)
    assert kinds(graph, "forward").count("all_reduce") == 1
    assert kinds(graph, "backward").count("all_reduce") == 1


def test_sequences_and_the_loss_are_split_over_ranks():
    with lazyviz.lazy(device=GPU, mesh=(4,)) as graph:
        mesh = init_device_mesh("cuda", (4,))
        net = nn.Sequential(Layer(), nn.Linear(WIDTH, 128)).cuda()
        parallelize_module(
            net,
            mesh,
            {
                "0.norm": SequenceParallel(),
                "0.up": ColwiseParallel(input_layouts=Shard(1)),
                "0.down": RowwiseParallel(output_layouts=Shard(1)),
                "1": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            },
        )
        targets = torch.zeros(16, dtype=torch.long, device="cuda")
        with loss_parallel():
            logits = net(torch.ones(2, 2, WIDTH, device="cuda"))
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets)
            loss.backward()
    assert {"all_gather", "reduce_scatter", "all_reduce"} <= set(kinds(graph))


def test_two_dimensions_have_groups_of_their_own():
    with lazyviz.lazy(device=GPU, mesh=(2, 2), rank=2) as graph:
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
        net = Layer().cuda()
        parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(net, mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
        net(torch.ones(2, 8, WIDTH, device="cuda")).sum().backward()
        optimizer.step()
    groups = {
        (each.kind, each.group.ranks) for node in graph.nodes if (each := collective_of(node)) is not None
    }
    assert ("all_gather", (0, 2)) in groups
    assert ("all_reduce", (2, 3)) in groups


def test_a_model_that_was_sharded_in_one_block_is_trained_in_the_next():
    with lazyviz.lazy(device=GPU, mesh=(8,)):
        net = model().cuda()
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
        optimizer = torch.optim.AdamW(net.parameters())
    graphs = []
    for _ in range(3):
        with lazyviz.lazy(device=GPU, mesh=(8,)) as graph:
            step(net, optimizer)
        graphs.append(graph)
    first, second, third = (each.plan() for each in graphs)
    assert second.eager_peak_bytes == third.eager_peak_bytes
    assert second.communication == third.communication == first.communication


def test_gradients_are_clipped_by_their_norm_over_all_ranks():
    with lazyviz.lazy(device=GPU, mesh=(8,)) as graph:
        net = fully_shard(model().cuda())
        net(torch.ones(2, WIDTH, device="cuda")).sum().backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        assert norm.shape == ()
    assert "all_reduce" in kinds(graph)


def test_initialized_on_no_device_first():
    with lazyviz.lazy(device=GPU, mesh=(8,)) as graph:
        with torch.device("meta"):
            net = model()
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
        net.to_empty(device="cuda")
        for layer in net:
            layer.reset_parameters()
        step(net, torch.optim.AdamW(net.parameters()))
    assert kinds(graph).count("reduce_scatter") == 3
    assert all(value.device.type != "meta" for node in graph.nodes for value in node.outputs)


def test_the_picture_is_drawn(tmp_path):
    with lazyviz.lazy(device=GPU, mesh=(8,)) as graph:
        net = fully_shard(model().cuda())
        net(torch.ones(2, WIDTH, device="cuda")).sum().backward()
    graph.save(tmp_path / "graph.svg")
    assert "all_gather of 8" in (tmp_path / "graph.svg").read_text()


def test_a_step_in_a_block_of_its_own_is_planned_with_the_rest():
    with lazyviz.lazy(device=GPU, mesh=(8,)) as outer:
        net = model().cuda()
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        with lazyviz.lazy():
            step(net, optimizer)
        torch.zeros(1)
        with lazyviz.lazy():
            step(net, optimizer)
    with lazyviz.lazy(device=GPU, mesh=(8,)) as flat:
        net = model().cuda()
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        step(net, optimizer)
        torch.zeros(1)
        step(net, optimizer)
    whole = make_plan(flattened(outer.ir), device=GPU)
    assert whole.eager_peak_bytes == flat.plan().eager_peak_bytes
    assert whole.communication == flat.plan().communication


@pytest.mark.parametrize("device", ["cpu", "A100-40GB"])
def test_parameters_that_no_rank_uses_get_no_gradient(device):
    """DDP asks for their number on all ranks, which are taken to use the same ones."""

    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(64, 64), nn.Linear(500, 500)

        def forward(self, x):
            return self.used(x)

    place = "cpu" if device == "cpu" else "cuda"
    with lazyviz.lazy(device=device, mesh=(4,)) as graph:
        model = DistributedDataParallel(Partly().to(place), find_unused_parameters=True)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(8, 64, device=place)).sum().backward()
            optimizer.step()
        assert model.module.unused.weight.grad is None and model.module.used.weight.grad is not None
    assert graph.plan().communication["all_reduce"]


def test_counts_of_the_program_itself_are_not_assumed_equal():
    with lazyviz.lazy(mesh=(4,)):
        count = torch.ones(3, dtype=torch.int32)
        torch.distributed.all_reduce(count)
        with pytest.raises(lazyviz.AbsentDeviceError, match="depends on data of the other planned ranks"):
            count.sum().item()


@pytest.mark.parametrize("seeded", [False, True])
def test_dtensors_are_filled_with_random_numbers(seeded):
    with lazyviz.lazy(device=GPU, mesh=(4,)) as graph:
        mesh = init_device_mesh("cuda", (4,))
        if seeded:
            random.manual_seed(3, mesh)
        drawn = distributed.randn(8, 16, device_mesh=mesh, placements=[Shard(0)])
        dropped = nn.functional.dropout(drawn.normal_(), 0.5)
        assert dropped.shape == (8, 16) and dropped.to_local().shape == (2, 16)
    assert graph.plan().devices["cuda:0"].peak_bytes >= 2 * 2 * 16 * 4


def test_buckets_that_are_built_again_exist_only_from_then_on():
    with lazyviz.lazy(mesh=(2,)) as graph:
        model = DistributedDataParallel(nn.Linear(256, 256))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(torch.randn(4, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    buckets = [each for each in graph.ir.storages if each.nbytes >= nbytes]
    assert len(buckets) >= 2 and not any(bucket.external for bucket in buckets)
