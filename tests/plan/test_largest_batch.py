"""The largest batch fits when recorded at that size, and one sample more does not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyviz

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import largest_batch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")


@pytest.fixture(autouse=True)
def reset():
    yield
    lazyviz.reset()


@pytest.mark.parametrize("gpu", ["RTX-3060", "A100-40GB"])
@pytest.mark.parametrize("name", largest_batch.MODELS)
@pytest.mark.slow
def test_the_largest_batch_fits_and_one_sample_more_does_not(name, gpu):
    row = largest_batch.tried(name, gpu)
    assert row["largest"] > largest_batch.RECORDED
    assert row["fits"] and not row["fits with one more"], row


@pytest.mark.parametrize("name", largest_batch.MODELS)
@pytest.mark.parametrize("samples", [2, 3, 700])
def test_another_batch_size_is_planned_as_if_it_had_been_recorded(name, samples):
    replanned = largest_batch.recorded(name, "A100-40GB", 4, named=True).replan(batch_size=samples)
    actual = largest_batch.recorded(name, "A100-40GB", samples)
    assert replanned.peak_bytes == actual.peak_bytes
    assert replanned.reserved_bytes == actual.reserved_bytes
    assert replanned.fits is actual.fits


def test_how_attention_with_dropout_grows_is_known_though_it_cannot_be_split():
    plan = largest_batch.recorded("transformer", "RTX-3060", 4, named=True)
    assert plan.max_batch_size and plan.split.blocked_by


def styled():
    layers = [nn.Conv2d(3, 16, 3), nn.InstanceNorm2d(16, affine=True), nn.LeakyReLU(0.2, inplace=True)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return model, lambda n: (torch.randn(n, 3, 64, 64), torch.randint(10, (n,)))


def test_how_the_gradient_of_an_in_place_activation_after_instance_norm_grows_is_known(monkeypatch):
    monkeypatch.setitem(largest_batch.MODELS, "styled", styled)
    row = largest_batch.tried("styled", "RTX-3060")
    assert row["largest"] > largest_batch.RECORDED
    assert row["fits"] and not row["fits with one more"], row
    replanned = largest_batch.recorded("styled", "RTX-3060", 4, named=True).replan(batch_size=7)
    assert replanned.peak_bytes == largest_batch.recorded("styled", "RTX-3060", 7).peak_bytes


def autoencoder(loss, samples, named=False):
    """The plan of a step whose ``loss`` compares two tensors of the batch on an absent GPU."""
    lazyviz.reset()
    with lazyviz.lazy(device="RTX-3060"):
        model = nn.Sequential(nn.Linear(512, 64), nn.Sigmoid(), nn.Linear(64, 512), nn.Sigmoid()).cuda()
        x, y = torch.rand(samples, 512, device="cuda"), torch.rand(samples, 512, device="cuda")
    with lazyviz.lazy(device="RTX-3060", batch=[x, y] if named else None) as graph:
        loss(model(x), y).backward()
    return graph.plan()


@pytest.mark.parametrize(
    "loss",
    [F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.l1_loss, F.soft_margin_loss],
)
def test_a_loss_that_is_summed_in_its_own_memory_grows_with_the_batch(loss):
    replanned = autoencoder(loss, 4, named=True).replan(batch_size=9000)
    actual = autoencoder(loss, 9000)
    assert replanned.peak_bytes == actual.peak_bytes
    assert [size for _, size in replanned.timeline] == [size for _, size in actual.timeline]


def recurrent(samples, named=False):
    lazyviz.reset()
    with lazyviz.lazy(device="RTX-3060"):
        model, x = nn.LSTM(64, 128, 2, batch_first=True).cuda(), torch.rand(samples, 50, 64, device="cuda")
    with lazyviz.lazy(device="RTX-3060", batch=[x] if named else None) as graph:
        model(x)[0].sum().backward()
    return graph.plan()


def test_the_range_of_what_cudnn_saves_grows_with_the_batch():
    replanned, actual = recurrent(4, named=True).replan(batch_size=2000), recurrent(2000)
    assert replanned.peak_range == pytest.approx(actual.peak_range, rel=0.02)
    assert replanned.estimated


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.GRU(8, 16, 2, batch_first=True, bidirectional=True),
        lambda: nn.RNN(8, 16, batch_first=True),
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Hardswish(), nn.LogSigmoid()),
        lambda: nn.Sequential(nn.Conv1d(5, 8, 1), nn.Hardswish(inplace=True)),
    ],
    ids=["GRU", "RNN", "activations", "activation in place"],
)
def test_how_layers_grow_is_known_on_a_gpu(make):
    def planned(samples, named=False):
        lazyviz.reset()
        with lazyviz.lazy(device="RTX-3060"):
            model, x = make().cuda(), torch.randn(samples, 5, 8, device="cuda")
        with lazyviz.lazy(device="RTX-3060", batch=[x] if named else None) as graph:
            result = model(x)
            (result[0] if isinstance(result, tuple) else result).sum().backward()
        return graph.plan()

    plan = planned(4, named=True)
    assert plan.max_batch_size
    assert plan.replan(batch_size=300).peak_bytes == planned(300).peak_bytes


def test_an_in_place_activation_after_instance_norm_runs_in_pieces():
    models, x = [], torch.randn(5, 3, 16, 16)
    for split in ("off", 2):
        torch.manual_seed(0)
        models.append(styled()[0])
        with lazyviz.lazy(batch=[x], split=split) as graph:
            models[-1](x).square().mean().backward()
        assert graph.evaluate().pieces == (1 if split == "off" else 2)
    for whole, pieces in zip(*(model.parameters() for model in models)):
        torch.testing.assert_close(whole.grad, pieces.grad)


# --- several GPUs ----------------------------------------------------------------------

ON_THREE = {"gpus": 3}


@pytest.mark.parametrize("name", largest_batch.MODELS)
def test_the_largest_batch_of_data_parallel_fits_and_one_sample_more_does_not(name):
    row = largest_batch.tried(name, "RTX-3060", 2)
    assert row["largest"] > largest_batch.RECORDED
    assert row["fits"] and not row["fits with one more"], row


@pytest.mark.parametrize("name", largest_batch.MODELS)
@pytest.mark.parametrize("samples", [8, 701])
@pytest.mark.slow
def test_every_gpu_of_data_parallel_is_planned_for_another_batch(name, samples):
    """The parts are as ``torch.chunk`` cuts them: of 701 samples 234, 234, and 233.

    With one sample for each GPU, PyTorch would run other operators.
    """
    replanned = largest_batch.recorded(name, "A100-40GB", 6, named=True, **ON_THREE).replan(
        batch_size=samples
    )
    actual = largest_batch.recorded(name, "A100-40GB", samples, **ON_THREE)
    assert list(replanned.devices) == list(actual.devices)
    for device, there in actual.devices.items():
        assert replanned.devices[device].peak_bytes == there.peak_bytes, device
        assert replanned.devices[device].reserved_bytes == there.reserved_bytes, device


def test_a_batch_that_data_parallel_gives_fewer_gpus_is_refused_by_name():
    plan = largest_batch.recorded("perceptron", "A100-40GB", 6, named=True, **ON_THREE)
    assert "DataParallel hands a part of the batch to each GPU" in plan.explain()
    with pytest.raises(ValueError, match="fewer than 3 GPUs for a batch of 2"):
        plan.replan(batch_size=2)
    few = largest_batch.recorded("perceptron", "A100-40GB", 2, named=True, **ON_THREE)
    assert few.max_batch_size is None
    assert "is unknown: lazyviz cannot determine" in few.explain()
    assert "no samples for some of DataParallel's 3 GPUs" in few.explain()


def test_shapes_of_a_part_name_the_batch():
    plan = largest_batch.recorded("perceptron", "A100-40GB", 7, named=True, **ON_THREE)
    assert plan.max_batch_size
    (parts,) = {
        tuple(value.symbolic_shape[0] for value in node.outputs)
        for node in plan._nodes
        if node.op is torch.ops.aten.split.Tensor
    }
    assert parts == ("ceil(B/3)", "ceil(B/3)", "(B-2*ceil(B/3))")


def test_a_split_that_is_not_data_parallels_still_has_an_unknown_growth():
    with lazyviz.lazy(device="A100-40GB"):
        x = torch.empty(6, 8, device="cuda")
    with lazyviz.lazy(device="A100-40GB", batch=[x]) as graph:
        kept = [part * 2 for part in x.split(2)]
    assert kept and graph.plan().max_batch_size is None
    assert "it splits the batch dimension" in graph.plan().explain()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_the_largest_batch_of_bags_of_embeddings_is_known(mode):
    def planned(samples):
        torch.manual_seed(0)
        bag, x = nn.EmbeddingBag(100, 32, mode=mode), torch.randint(0, 100, (samples, 8))
        with lazyviz.lazy(batch=x) as graph:
            bag(x).square().mean().backward()
        plan = graph.plan(device="RTX-3060")
        lazyviz.reset()
        return plan

    small = planned(12)
    assert small.max_batch_size > 100_000
    assert small.replan(batch_size=480).peak_bytes == pytest.approx(planned(480).peak_bytes, rel=0.003)
