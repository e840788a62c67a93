"""Memory that a graph needs on a GPU beyond its tensors, and the resulting verdict."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.plan.devices.cuda_context import CONTEXT_BYTES, CONTEXT_RANGE
from lazyviz.plan.uncertainty import ALLOCATED, RESERVED, widened
from lazyviz.plan.units import format_bytes, format_range
from lazyviz.plan.workspace.cublas import CUBLAS_WORKSPACE_BYTES, LARGE_CUBLAS_WORKSPACE_BYTES
from lazyviz.view.render.text import render_text
from lazyviz.view.scene.memory_chart import verdict

MIB = 2**20


@pytest.fixture
def step():
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
    x = torch.randn(256, 512)
    with lazyviz.lazy() as graph:
        model(x).pow(2).mean().backward()
    return graph


def test_the_cpu_reserves_nothing(step):
    assert step.plan(device="cpu").reserved_bytes is None


def test_a_gpu_holds_the_tensors_in_segments_and_a_workspace(step):
    plan = step.plan(device="RTX-3060")
    assert plan.fits
    assert plan.reserved_bytes % (2 * MIB) == 0
    workspaces = 2 * CUBLAS_WORKSPACE_BYTES  # eager's backward pass has a thread of its own
    assert plan.peak_bytes + workspaces < plan.reserved_bytes < 3 * plan.peak_bytes + workspaces
    assert "cuBLAS" in plan.explain() and "CUDA context" in plan.explain()


def test_recent_gpus_have_a_larger_workspace(step):
    small, large = step.plan(device="A100-40GB"), step.plan(device="H100-80GB")
    assert small.peak_bytes == large.peak_bytes
    assert large.reserved_bytes - small.reserved_bytes >= (
        LARGE_CUBLAS_WORKSPACE_BYTES - CUBLAS_WORKSPACE_BYTES
    )


def test_what_is_reserved_decides_the_verdict_not_the_tensors_alone(step):
    reserved = step.plan(device="RTX-3060").reserved_bytes

    def fits(nbytes):
        return step.plan(device=lazyviz.DeviceProfile("mine", nbytes, context_bytes=CONTEXT_BYTES))

    assert fits(reserved + CONTEXT_BYTES).fits
    tight = fits(step.plan().peak_bytes + CONTEXT_BYTES - MIB)
    assert not tight.fits
    assert "an allocation of" in tight.verdict()


def test_a_profile_without_a_context_counts_tensors(step):
    plan = step.plan(device=lazyviz.DeviceProfile("mine", step.plan().eager_peak_bytes))
    assert plan.fits and plan.reserved_bytes is None
    assert "Only tensors were counted" in plan.verdict() and plan.verdict() in plan.explain()
    for device in (
        "RTX-3060",
        "cpu",
        "cpu:2GiB",
        lazyviz.DeviceProfile("mine", "12 GiB", context_bytes="400 MiB"),
    ):
        assert "Only tensors" not in step.plan(device=device).explain()


@pytest.fixture(scope="module")
def convolutions():
    """Convolutions on a GPU, whose work space is cuDNN's choice: the plan is a range."""
    with lazyviz.lazy(device="RTX-3060") as graph:
        net = nn.Sequential(*[nn.Conv2d(64, 64, 3, padding=1) for _ in range(3)]).cuda()
        net(torch.randn(32, 64, 64, 64, device="cuda")).mean().backward()
    return graph


def test_a_verdict_within_the_range_says_probably_and_names_the_range(convolutions):
    plan = convolutions.plan()
    low, high = plan.needed_range
    assert low < plan.needed_bytes < high

    def on(nbytes):
        return convolutions.plan(device=lazyviz.DeviceProfile("mine", nbytes, context_bytes=CONTEXT_BYTES))

    ends = f"({format_range(low, high)})"
    for nbytes, fits in ((plan.needed_bytes, True), (high - 1, True), (low, False)):
        near = on(nbytes)
        assert near.fits is fits and near.straddles(nbytes)
        assert near.verdict().startswith(f"It probably {'fits' if fits else 'does not fit'}: mine has")
        assert ends in near.verdict() and near.verdict() in near.explain()
        hook, words = verdict(near)
        assert hook == ("fits" if fits else "too-big")
        assert words.startswith("Probably ") and ends in words
    for nbytes, words in ((high, "It fits: "), (low - MIB, "It does not fit: ")):
        assert on(nbytes).verdict().startswith(words)
        assert "Probably" not in verdict(on(nbytes))[1]


def test_a_gpu_s_range_is_never_zero_wide_and_has_a_level(step):
    plan = step.plan(device="RTX-3060")
    low, high = plan.needed_range
    assert low < plan.needed_bytes < high and plan.straddles(plan.needed_bytes)
    assert plan.reserved_range == widened(*3 * [plan.reserved_bytes], RESERVED)
    assert (low, high) == tuple(map(sum, zip(plan.reserved_range, CONTEXT_RANGE)))
    assert plan.peak_range == widened(*3 * [plan.peak_bytes], ALLOCATED)
    assert "in 90 % of runs, according to published measurements" in plan.explain()
    of_our_own = step.plan(device=lazyviz.DeviceProfile("mine", "12 GiB", context_bytes="400 MiB"))
    assert of_our_own.needed_range == tuple(each + 400 * MIB for each in of_our_own.reserved_range)
    # What is compared with torch.cuda.max_memory_allocated(): blocks of 512 bytes, and workspaces.
    assert plan.max_memory_allocated > plan.peak_bytes + plan._reservation.workspace_bytes
    on_the_host = step.plan(device="cpu")
    low, high = on_the_host.peak_range
    assert low == on_the_host.peak_bytes < high < low + 1024 and on_the_host.max_memory_allocated is None


def test_the_context_is_that_of_the_planned_release_unless_the_profile_says_its_size():
    def plan_for(version, device="RTX-3090"):
        with lazyviz.lazy(device=device, torch_version=version) as graph:
            torch.zeros(1024, 1024, device="cuda") + 1
        plan = graph.plan()
        lazyviz.reset()
        return plan

    for version, least, most in (("1.6", 700, 1050), ("1.7", 1050, 1750), ("1.12", 1050, 1750)):
        plan = plan_for(version)
        low, high = (size - held for size, held in zip(plan.needed_range, plan.reserved_range))
        assert (low, high) == (least * MIB, most * MIB)
        assert low < plan.needed_bytes - plan.reserved_bytes < high
    assert plan_for("1.13").needed_bytes == plan_for("2.13").needed_bytes
    own = plan_for("1.12", lazyviz.DeviceProfile("mine", "12 GiB", context_bytes="400 MiB"))
    assert own.needed_bytes - own.reserved_bytes == 400 * MIB


def test_independent_uncertainties_are_combined_by_their_squares():
    assert widened(1000, 1000, 1000, (0.02, 0.04)) == (980, 1040)
    assert widened(1000, 970, 1030, (0.04, 0.04)) == (950, 1050)
    assert widened(10, -40, 10, (0.0, 0.0)) == (0, 10)


def test_the_text_of_a_picture_distinguishes_needed_bytes_from_the_peak_of_tensors(step):
    plan = step.plan(device="RTX-3060")
    needs, peak = format_bytes(plan.needed_bytes), format_bytes(plan.peak_bytes)
    assert needs != peak
    assert verdict(plan) == ("fits", f"Fits: needs {needs} of 12.0 GiB on RTX-3060")
    text = render_text(step.graph, plan)
    assert f"Memory over the run, peak {peak}:" in text
    assert (
        f"Needed: {format_bytes(plan.reserved_bytes)} held by PyTorch's allocator, 600 MiB for the CUDA"
        in text
    )
    assert "Needed:" not in render_text(step.graph, step.plan())


def test_the_allocator_s_configuration_counts(step, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:nonsense")
    with pytest.raises(ValueError, match="max_split_size_mb"):
        step.plan(device="RTX-3060")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    assert step.plan(device="RTX-3060").reserved_bytes is None
