"""Projections that cannot be true: sums that differ, more work in less time, kernels of impossible speed."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyviz
from lazyviz.plan.devices.known_gpus import PROFILES, lookup
from lazyviz.plan.runtime.cpu_op_times import CpuRates, project_on_cpu
from lazyviz.plan.runtime.flop_count import executed_flops_of
from lazyviz.plan.runtime.run_time_projection import gpu_of

GPU = "A100-40GB"
FLAT = ((1e3, 1e9), (1e6, 1e9))
RATES = CpuRates(1e-6, 1e-6, {}, FLAT, FLAT, FLAT, FLAT, FLAT, FLAT, FLAT)


def _perceptron():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 8)), (64,)


def _convolutional():
    layers = (
        nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU6(), nn.Conv2d(32, 32, 3, 1, 1, groups=32),
        nn.Conv2d(32, 32, 3, 1, 1, groups=4), nn.GroupNorm(4, 32), nn.ConvTranspose2d(32, 8, 4, 2, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 8),
    )  # fmt: skip
    return nn.Sequential(*layers), (3, 32, 32)


class _Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.LSTM(16, 32, 2, batch_first=True)

    def forward(self, x):
        return self.layers(x)[0]


def _recurrent():
    return _Recurrent(), (12, 16)


def _attention():
    return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), (16, 32)


PROGRAMS = {
    "perceptron": _perceptron,
    "convolutional": _convolutional,
    "recurrent": _recurrent,
    "attention": _attention,
}


def _step(make, batch):
    """A recorded training step on a GPU, with AdamW."""
    with lazyviz.lazy(device=GPU) as graph:
        with torch.device("cuda"):
            model, shape = make()
            x = torch.randn(batch, *shape)
        optimizer = torch.optim.AdamW(model.parameters())
        model(x).square().mean().backward()
        optimizer.step()
    return graph


@pytest.mark.parametrize("name", PROGRAMS)
def test_times_are_plausible_on_every_gpu(name):
    graphs = {batch: _step(PROGRAMS[name], batch) for batch in (1, 32, 1024)}
    for gpu in PROFILES:
        times = [graph.plan(device=gpu).time for graph in graphs.values()]
        for time in times:
            low, high = time.seconds_range
            assert 0 < low < time.seconds < high < math.inf
            assert 0 < time.mfu < 1.2 and 0 <= time.coverage <= 1
            assert all(0 <= each.waiting <= each.seconds < math.inf for each in time.ops)
            for parts in (time.by_phase, time.by_module, time.by_line):
                assert sum(part[0] for part in parts.values()) == pytest.approx(time.seconds)
            assert sum(work.flops for _, work in time.by_module.values()) == time.flops
            assert sum(time.by_bound.values()) == pytest.approx(time.seconds)
            assert sum(each.seconds for each in time.ops) == pytest.approx(time.seconds)
        seconds = [time.seconds for time in times]
        assert seconds == sorted(seconds), gpu  # more samples take more time


def _kernel(f, *shapes, gpu=GPU):
    """The projected time of the last op of ``f``, without waiting for its launch."""
    with lazyviz.lazy(device=gpu) as graph, torch.device("cuda"):
        f(*(torch.randn(*shape) for shape in shapes))
    last = graph.plan(device=gpu).time.ops[-1]
    return last.seconds - last.waiting


def test_a_depthwise_convolution_takes_little_more_than_its_memory_traffic():
    shape = (32, 144, 56, 56)
    depthwise = _kernel(lambda x, w: F.conv2d(x, w, padding=1, groups=144), shape, (144, 1, 3, 3))
    copy = _kernel(lambda x: x + 1, shape)
    dense = _kernel(lambda x, w: F.conv2d(x, w, padding=1), shape, (144, 144, 3, 3))
    assert copy < depthwise < 3 * copy
    assert depthwise < dense


def test_fewer_products_in_groups_do_not_take_much_longer():
    times = [
        _kernel(lambda x, w, g=g: F.conv2d(x, w, padding=1, groups=g), (32, 64, 56, 56), (64, 64 // g, 3, 3))
        for g in (1, 2, 4, 8, 16, 32, 64)
    ]
    assert max(times) < 2 * times[0]


@pytest.mark.parametrize("groups", [1, 4, 32])
def test_the_gradients_of_a_convolution_take_twice_its_flops(groups):
    with lazyviz.lazy() as graph:
        x = torch.randn(2, 32, 9, 9, requires_grad=True)
        for convolution in (
            nn.Conv2d(32, 64, 3, 2, 1, groups=groups), nn.ConvTranspose2d(32, 64, 3, 2, groups=groups),
        ):  # fmt: skip
            convolution(x).sum().backward()
    forward = [node for node in graph.nodes if node.op is torch.ops.aten.convolution.default]
    backward = [node for node in graph.nodes if node.op is torch.ops.aten.convolution_backward.default]
    assert len(forward) == len(backward) == 2
    for there, back in zip(forward, backward):
        assert executed_flops_of(back) == 2 * executed_flops_of(there) == 2 * there.flops
        assert groups > 1 or back.flops == executed_flops_of(back)  # PyTorch's counter ignores the groups


def test_the_steps_of_a_recurrent_layer_run_one_after_another():
    def run(x):
        nn.LSTM(16, 16, 2)(x)

    short, long = (_kernel(run, (steps, 1, 16)) for steps in (10, 1000))
    assert long > 90 * short / 2 and long > 2 * 1000 * 2e-6


def test_batch_norm_reads_its_input_twice_only_in_training():
    shape = (256, 64, 56, 56)
    trained = _kernel(lambda x: nn.BatchNorm2d(64)(x), shape)
    applied = _kernel(lambda x: nn.BatchNorm2d(64).eval()(x), shape)
    gpu = gpu_of(lookup(GPU))
    slower = gpu.share("norm") / gpu.share("norm", 256 * 56 * 56)  # it reduces a channel of all images
    assert trained == pytest.approx(1.5 * slower * applied, rel=0.02) and 1 < slower < 1.5


@pytest.mark.parametrize("step", [
    lambda x: torch.linalg.svd(x), lambda x: torch.linalg.eigh(x @ x.T), lambda x: torch.linalg.inv(x),
    lambda x: torch.linalg.solve(x, x), lambda x: torch.linalg.cholesky(x),
])  # fmt: skip
def test_a_step_that_is_mostly_a_factorization_has_no_time(step):
    with lazyviz.lazy(device=GPU) as graph:
        step(torch.eye(512, device="cuda"))
    plan = graph.plan()
    assert plan.time is None and plan.seconds is None and "What limits" not in plan.explain()
    with lazyviz.lazy() as graph:
        step(torch.eye(512))
    assert project_on_cpu(graph.nodes, RATES) is None


@pytest.mark.parametrize("device", [GPU, "cpu"])
def test_a_graph_without_kernels_is_explained(device):
    with lazyviz.lazy(device=device) as graph:
        torch.empty(3, 4, device="cpu" if device == "cpu" else "cuda").t()
    assert "What limits" not in graph.plan(device=GPU).explain()


def test_bfloat16_is_no_remedy_for_a_program_that_uses_it():
    with lazyviz.lazy(device=GPU) as graph:
        layer = nn.Linear(4096, 4096).cuda().bfloat16()  # copied from the host in float32
        layer(torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)).sum().backward()
    assert "on H100" in graph.plan().explain() and "in bfloat16" not in graph.plan().explain()


def test_a_small_factorization_in_a_step_is_named_as_not_included():
    def step(device):
        x = torch.ones(1024, 1024, device=device)
        x @ x
        torch.linalg.cholesky(torch.eye(8, device=device))

    with lazyviz.lazy(device=GPU) as graph:
        step("cuda")
    plan = graph.plan()
    assert len(plan.time.unknown) == 1 and "1 op of unknown duration: linalg_cholesky_ex" in plan.explain()
    with lazyviz.lazy() as graph:
        step("cpu")
    assert len(project_on_cpu(graph.nodes, RATES).unknown) == 1
