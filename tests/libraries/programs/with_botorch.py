"""BoTorch: a surrogate is fitted, an acquisition function optimized."""

from __future__ import annotations

from typing import Any

import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from gpytorch.mlls import ExactMarginalLogLikelihood

from ..catalog import SHARED, program

BOUNDS = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.double)


def surrogate() -> tuple[SingleTaskGP, torch.Tensor]:
    inputs = torch.rand(8, 2, dtype=torch.double)
    targets = 1 - (inputs - 0.5).norm(dim=-1, keepdim=True) + 0.01 * torch.randn(8, 1, dtype=torch.double)
    return SingleTaskGP(inputs, targets), targets


@program(
    {
        "item": "whether data is scaled, a prior's parameters are in range, a matrix could be decomposed",
        "numpy": "SciPy optimizes",
        "equal": "whether inputs are those of the training",
        "write to memory shared with others": SHARED,
    }
)
def a_surrogate_is_fitted() -> Any:
    model, _ = surrogate()
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    posterior = model.posterior(torch.rand(3, 2, dtype=torch.double))
    return model, posterior.mean, posterior.variance
