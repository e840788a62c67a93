"""Quantized tensors: they run at sync points that name them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazyviz


@pytest.mark.filterwarnings("ignore")  # PyTorch announces the end of this module
def test_a_model_is_quantized_in_a_block_with_eagers_results():
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(8, 16)

    def program():
        quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
        return quantized(x)

    expected = program()
    with lazyviz.lazy() as graph:
        found = program()
    graph.evaluate()
    assert torch.equal(found, expected)
    assert "a quantized tensor cannot be deferred" in {point.cause for point in graph.sync_points}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
def test_on_a_planned_gpu_a_remedy_is_named_that_holds():
    weight = torch.ones(4, 4)
    with pytest.raises(RuntimeError, match="quantize the model on the CPU"):
        with lazyviz.lazy(device="H100-80GB"):
            torch.quantize_per_tensor(weight.cuda(), 0.1, 0, torch.qint8)
    lazyviz.reset()
    with lazyviz.lazy(device="H100-80GB") as graph:
        torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8)
        kept = weight.cuda() * 2
    assert graph.plan().eager_peak_bytes >= kept.nbytes
    lazyviz.reset()


@pytest.mark.filterwarnings("ignore")  # PyTorch announces the end of this module
@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
def test_on_a_planned_gpu_dynamic_quantization_names_the_remedy_and_no_value_to_assume():
    with pytest.raises(RuntimeError, match="quantize the model on the CPU") as caught:
        with lazyviz.lazy(device="H100-80GB"):
            model = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).to("cuda")
            torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert "assume" not in str(caught.value)
    lazyviz.reset()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
def test_on_a_planned_gpu_a_value_that_an_observer_reads_can_be_assumed():
    observer = torch.ao.quantization.MovingAverageMinMaxObserver

    def step():
        fake = torch.ao.quantization.FakeQuantize(observer=observer, quant_min=0, quant_max=255)
        model = nn.Sequential(nn.Linear(16, 16), fake).to("cuda")
        model(torch.randn(8, 16, device="cuda")).sum().backward()
        return model

    with pytest.raises(RuntimeError, match="give the value"):
        with lazyviz.lazy(device="H100-80GB"):
            step()
    lazyviz.reset()
    with lazyviz.lazy(device="H100-80GB", assume={"*": False}) as graph:
        kept = step()
    assert graph.plan().fits
    del kept
    lazyviz.reset()
