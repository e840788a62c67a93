"""captum: what a network's answer is due to."""

from __future__ import annotations

from typing import Any

import torch
from captum import attr
from torch import nn

from ..catalog import LOADING, program


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 3),
    ).eval()


def pictures() -> torch.Tensor:
    return torch.randn(2, 1, 8, 8)


@program()
def integrated_gradients() -> Any:
    return attr.IntegratedGradients(network()).attribute(
        pictures(), target=1, n_steps=8, return_convergence_delta=True
    )


@program()
def saliency_and_input_times_gradient() -> Any:
    model, inputs = network(), pictures()
    return attr.Saliency(model).attribute(inputs, target=0), attr.InputXGradient(model).attribute(
        inputs, target=2
    )


@program()
def deep_lift() -> Any:
    return attr.DeepLift(network()).attribute(pictures(), torch.zeros(2, 1, 8, 8), target=1)


@program()
def guided_backpropagation_and_deconvolution() -> Any:
    model, inputs = network(), pictures()
    return attr.GuidedBackprop(model).attribute(inputs, target=1), attr.Deconvolution(model).attribute(
        inputs, target=1
    )


@program()
def gradient_shap_and_smooth_gradients() -> Any:
    model, inputs = network(), pictures()
    shap = attr.GradientShap(model).attribute(inputs, torch.randn(3, 1, 8, 8), n_samples=4, target=1)
    smooth = attr.NoiseTunnel(attr.Saliency(model)).attribute(inputs, nt_samples=3, stdevs=0.1, target=1)
    return shap, smooth


@program()
def occlusion_and_ablation() -> Any:
    model, inputs = network(), pictures()
    occlusion = attr.Occlusion(model).attribute(inputs, (1, 4, 4), strides=(1, 4, 4), target=1)
    groups = torch.arange(4).repeat_interleave(16).reshape(1, 1, 8, 8)
    return occlusion, attr.FeatureAblation(model).attribute(inputs, target=1, feature_mask=groups)


@program(
    {
        "tolist": "a random order of features",
        "item": "how many features a sample has",
        "stack": LOADING,
    }
)
def shapley_values_and_lime() -> Any:
    model, inputs = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(1, 4)
    shapley = attr.ShapleyValueSampling(model).attribute(inputs, target=1, n_samples=3)
    return shapley, attr.KernelShap(model).attribute(inputs, target=1, n_samples=10)


@program()
def layers() -> Any:
    model, inputs = network(), pictures()
    return (
        attr.LayerGradCam(model, model[3]).attribute(inputs, target=1),
        attr.LayerConductance(model, model[3]).attribute(inputs, target=1, n_steps=5),
        attr.LayerActivation(model, model[1]).attribute(inputs),
        attr.NeuronGradient(model, model[0]).attribute(inputs, (0, 1, 1)),
    )
