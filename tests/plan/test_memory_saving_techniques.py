"""Techniques that save memory in training: planned and measured on the CPU, and planned for a GPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import lazyviz

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import memory_saving_techniques
from models.memory_saving_programs import LIBRARIES, NOT_DEFERRED, PROGRAMS

GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")


def needs(name):
    missing = [each for each in LIBRARIES.get(name, ()) if importlib.util.find_spec(each) is None]
    return pytest.param(name, marks=pytest.mark.skipif(bool(missing), reason=f"{missing} is not installed"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [needs(name) for name in PROGRAMS if name not in NOT_DEFERRED])
def test_what_is_planned_for_the_cpu_is_what_it_takes(name):
    plan = memory_saving_techniques.planned(name, "cpu")
    assert plan.eager_peak_bytes == pytest.approx(memory_saving_techniques.measured(name), rel=0.002, abs=0)


@GPU
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [needs(name) for name in PROGRAMS])
def test_it_is_planned_for_a_gpu(name):
    plan = memory_saving_techniques.planned(name, "H100-80GB")
    assert plan.verdict_of == "eager" and plan.fits
    assert plan.peak_bytes > 0 and plan.device == "H100-80GB"


@GPU
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [needs(name) for name in NOT_DEFERRED])
def test_compiled_optimizers_take_on_a_gpu_what_they_take_eagerly(name):
    plan = memory_saving_techniques.planned(name, "H100-80GB")
    assert plan.peak_bytes == pytest.approx(memory_saving_techniques.measured(name), rel=0.002, abs=0)
    assert "planned as run by eager PyTorch" in plan.explain()


@GPU
def test_activations_that_are_offloaded_leave_the_gpu():
    kept, offloaded, halved = (
        memory_saving_techniques.planned(name, "H100-80GB")
        for name in ("plain", "save_on_cpu", "offload by saved_tensors_hooks")
    )
    saved = 2048 * 256 * 4 * 4  # what one of each pair of layers keeps, at least
    assert offloaded.peak_bytes < kept.peak_bytes - saved
    assert halved.peak_bytes < kept.peak_bytes - saved
    on_host = offloaded.devices["cpu"].eager_peak_bytes
    assert on_host >= saved
    assert halved.devices["cpu"].eager_peak_bytes < 0.6 * on_host


@pytest.mark.parametrize("device", ["cpu", pytest.param("H100-80GB", marks=GPU)])
def test_an_optimizer_in_the_backward_pass_keeps_one_gradient_at_a_time(device):
    kept, freed = (
        memory_saving_techniques.planned(name, device) for name in ("small batch", "optimizer in backward")
    )
    assert freed.eager_peak_bytes < 0.9 * kept.eager_peak_bytes


def test_what_operators_of_other_libraries_take_inside_is_said_to_be_unknown():
    torch.library.define("lazyviz_tests::scaled", "(Tensor x) -> Tensor")
    torch.library.impl("lazyviz_tests::scaled", "CPU", lambda x: x * 2)
    torch.library.register_fake("lazyviz_tests::scaled", lambda x: torch.empty_like(x))
    with lazyviz.lazy() as graph:
        kept = torch.ops.lazyviz_tests.scaled(torch.ones(64))
    text = graph.plan().explain()
    assert "lazyviz_tests.scaled" in text and "is unknown" in text
    assert torch.equal(kept, torch.full((64,), 2.0))
