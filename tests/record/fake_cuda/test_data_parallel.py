"""``nn.DataParallel`` over several planned GPUs: what each of them holds, as PyTorch's own code makes it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import comm

import lazyviz
from lazyviz.plan.runtime.gpu_timeline import duration

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
FLOAT = 4


def on_devices(plan):
    return {name: each.peak_bytes for name, each in plan.devices.items() if name.startswith("cuda")}


def test_one_layer_takes_on_each_gpu_what_the_copies_and_sums_take():
    """The weight (W), the batch (X) and the gathered output (Y) are on the first GPU, parts on the other."""
    weight, batch, part = 1000 * 1000 * FLOAT, 400 * 1000 * FLOAT, 200 * 1000 * FLOAT
    with lazyviz.lazy(device="A100-40GB") as graph:
        model = nn.DataParallel(nn.Linear(1000, 1000, bias=False).cuda(), [0, 1])
        x = torch.empty(400, 1000, device="cuda")
        y = model(x)
        y.sum().backward()
    number = 2 * FLOAT  # the sum, and the gradient of it
    # First: W, X, Y, the gradient of its own part, and NCCL's sum of both.
    # Second: its part of X with the copied weight and the output, or, when the replica is gone, with the
    # gradients of both; nothing keeps the copied weight, as X needs no gradient.
    assert on_devices(graph.plan()) == {
        "cuda:0": weight + batch + batch + 2 * weight + number,
        "cuda:1": weight + part + part,
    }
    assert model.module.weight.grad.device == y.device == torch.device("cuda", 0)
    assert {p.device for p in model.parameters()} == {torch.device("cuda", 0)}


def test_parameters_travel_in_buffers_of_ten_mebibytes():
    layer = 1024 * 1024 * FLOAT
    with lazyviz.lazy(device="A100-40GB") as graph, torch.no_grad():
        tensors = [torch.empty(1024, 1024, device="cuda") for _ in range(5)]
        copies = comm.broadcast_coalesced(tensors, [0, 1, 2])
    assert copies[0][0] is tensors[0]
    assert [[t.device.index for t in found] for found in copies] == [[0] * 5, [1] * 5, [2] * 5]
    # Three tensors of 4 MiB fill a buffer; it is gone before the next one, of two, is filled.
    assert on_devices(graph.plan()) == {"cuda:0": 8 * layer, "cuda:1": 5 * layer, "cuda:2": 5 * layer}


def test_tensors_of_two_dtypes_come_back_in_order():
    with lazyviz.lazy(device="A100-40GB"):
        tensors = [
            torch.empty(n, device="cuda", dtype=d) for n, d in zip(range(1, 5), [torch.half, None] * 2)
        ]
        _, there = comm.broadcast_coalesced(tensors, [0, 1])
        assert [(t.shape, t.dtype) for t in there] == [(t.shape, t.dtype) for t in tensors]


class Both(nn.Module):
    """Returns its loss, and its output."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(100, 10)
        self.places = []

    def forward(self, x, target=None):
        self.places.append((x.device.index, torch.cuda.current_device(), self.layer.weight.device.index))
        found = self.layer(x)
        return {"loss": nn.functional.cross_entropy(found, target), "found": found}


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_replicas_run_on_their_own_gpus(place):
    with lazyviz.lazy(device="A100-40GB"):
        model = nn.DataParallel(Both().cuda(), [0, 1, 2])
        x, target = torch.randn(33, 100, device=place), torch.zeros(33, dtype=torch.long, device=place)
        with pytest.warns(UserWarning, match="all input tensors were scalars"):
            result = model(x, target=target)
        result["loss"].mean().backward()
        assert result["loss"].shape == (3,) and result["found"].shape == (33, 10)
        assert result["found"].device == torch.device("cuda", 0)
        assert model.module.layer.weight.grad.shape == (10, 100)
    assert model.module.places == [(number, number, number) for number in range(3)]


def test_without_device_ids_the_model_runs_on_every_gpu_of_the_machine():
    with lazyviz.lazy(device="A100-40GB", mesh=(4,)) as graph:
        model = nn.DataParallel(nn.Linear(8, 8).cuda())
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
            assert model(torch.randn(8, 8, device="cuda")).dtype == torch.float16
    assert list(on_devices(graph.plan())) == [f"cuda:{number}" for number in range(4)]


def test_the_output_can_be_gathered_elsewhere():
    with lazyviz.lazy(device="A100-40GB"):
        model = nn.DataParallel(nn.Linear(8, 8).cuda(1), [1, 0], output_device=0)
        y = model(torch.randn(4, 8, device="cuda"))
        y.sum().backward()
        assert y.device.index == 0 and model.module.weight.grad.device.index == 1


def test_images_stay_channels_last():
    with lazyviz.lazy(device="A100-40GB"):
        model = nn.DataParallel(nn.Conv2d(3, 16, 3).cuda().to(memory_format=torch.channels_last), [0, 1])
        y = model(torch.randn(4, 3, 8, 8, device="cuda").to(memory_format=torch.channels_last))
        assert y.is_contiguous(memory_format=torch.channels_last)


def test_batch_norm_updates_the_first_replica_and_amp_trains():
    with lazyviz.lazy(device="A100-40GB") as graph:
        model = nn.DataParallel(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).cuda(), [0, 1])
        optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler()
        for _ in range(2):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(torch.randn(32, 64, device="cuda")).float().square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    mean = model.module[1].running_mean._lazyviz.storage
    assert sum(mean in node.writes for node in graph.nodes if "batch_norm" in str(node.op)) == 2
    assert graph.plan().by_category["optimizer"] > 0


def test_an_error_in_a_replica_is_pytorchs():
    with lazyviz.lazy(device="A100-40GB"):
        model = nn.DataParallel(nn.Linear(8, 8).cuda(), [0, 1])
        with pytest.raises(RuntimeError, match="Caught RuntimeError in replica 0 on device 0"):
            model(torch.randn(4, 9, device="cuda"))
        with pytest.raises(RuntimeError, match="Gather got an input of invalid size"):
            comm.gather([torch.ones(2, 3, device="cuda:0"), torch.ones(2, 4, device="cuda:1")], 0, 0)
        with pytest.raises(RuntimeError, match=r"all tensors must be on devices\[0\]"):
            comm.broadcast_coalesced([torch.ones(2, device="cuda:1")], [0, 1])
        with pytest.raises(lazyviz.AbsentDeviceError, match="nccl.all_reduce"):
            torch.cuda.nccl.all_reduce([torch.ones(2, device="cuda")])
    assert torch.nn.parallel.parallel_apply.__module__ == "torch.nn.parallel.parallel_apply"


def test_gpus_work_concurrently():
    """Four GPUs with a quarter of the batch each take less than one with all of it."""

    def time_of(devices):
        with lazyviz.lazy(device="A100-40GB") as graph:
            model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(8)])
            with torch.no_grad():
                nn.DataParallel(model.cuda(), devices)(torch.randn(65536, 4096, device="cuda"))
        plan = graph.plan()
        assert plan.seconds == pytest.approx(sum(each.seconds for each in plan.time.ops))
        assert 0 < plan.time.mfu < 1, duration(plan.seconds)
        return plan.seconds

    one, four = time_of([0]), time_of([0, 1, 2, 3])
    assert one / 4 < four < one
