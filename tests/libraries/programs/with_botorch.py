"""BoTorch: a surrogate is fitted, an acquisition function optimized."""

from __future__ import annotations

from typing import Any

import torch
from botorch.acquisition import LogExpectedImprovement, UpperConfidenceBound, qExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from botorch.utils.sampling import draw_sobol_samples
from gpytorch.mlls import ExactMarginalLogLikelihood

from ..catalog import program

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
    }
)
def a_surrogate_is_fitted() -> Any:
    model, _ = surrogate()
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    posterior = model.posterior(torch.rand(3, 2, dtype=torch.double))
    return model, posterior.mean, posterior.variance


@program(
    {
        "equal": "whether inputs are those of the training",
        "allclose": "whether a candidate is within bounds",
        "numpy": "SciPy optimizes",
        "raw memory access": "the Sobol sequence is drawn by C++ code",
        "item": "whether bounds are finite and kept, a matrix could be decomposed; which candidate is best",
    }
)
def a_confidence_bound_is_optimized() -> Any:
    model, _ = surrogate()
    return optimize_acqf(UpperConfidenceBound(model, beta=0.2), BOUNDS, q=1, num_restarts=2, raw_samples=8)


@program(
    {
        "equal": "whether inputs are those of the training",
        "allclose": "whether a candidate is within bounds",
        "numpy": "SciPy optimizes",
        "raw memory access": "the Sobol sequence is drawn by C++ code",
        "item": "whether bounds are finite and kept, a matrix could be decomposed; which candidate is best",
    }
)
def log_expected_improvement_is_optimized() -> Any:
    model, targets = surrogate()
    function = LogExpectedImprovement(model, best_f=targets.max())
    return optimize_acqf(function, BOUNDS, q=1, num_restarts=2, raw_samples=8, options={"maxiter": 5})


@program(
    {
        "equal": "whether inputs are those of the training",
        "allclose": "whether a candidate is within bounds",
        "numpy": "SciPy optimizes",
        "raw memory access": "the Sobol sequence is drawn by C++ code",
        "item": "whether bounds are finite and kept, a matrix could be decomposed; which candidate is best",
        "the result of aten.index.Tensor depends on data": "the candidates that improve on what is known",
    }
)
def two_candidates_by_quasi_monte_carlo() -> Any:
    model, targets = surrogate()
    sampler = SobolQMCNormalSampler(torch.Size([16]), seed=3)
    function = qExpectedImprovement(model, targets.max(), sampler)
    return optimize_acqf(function, BOUNDS, q=2, num_restarts=2, raw_samples=8, options={"maxiter": 3})


@program(
    {
        "raw memory access": "the Sobol sequence is drawn by C++ code",
    }
)
def sobol_samples_within_bounds() -> Any:
    return draw_sobol_samples(BOUNDS, n=4, q=2, seed=5)
