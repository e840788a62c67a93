"""gpytorch: Gaussian processes, exact and variational."""

from __future__ import annotations

from typing import Any

import gpytorch
import torch
from gpytorch.kernels import MaternKernel, PeriodicKernel, RBFKernel, ScaleKernel
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy

from ..catalog import program


class Exact(gpytorch.models.ExactGP):
    """A process with all of its data."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor, likelihood: Any, kernel: Any) -> None:
        super().__init__(inputs, targets, likelihood)
        self.mean_module, self.covar_module = gpytorch.means.ConstantMean(), ScaleKernel(kernel)

    def forward(self, inputs: torch.Tensor) -> Any:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(inputs), self.covar_module(inputs))


class Variational(gpytorch.models.ApproximateGP):
    """A process with a few inducing points."""

    def __init__(self, points: torch.Tensor) -> None:
        distribution = CholeskyVariationalDistribution(points.shape[0])
        super().__init__(VariationalStrategy(self, points, distribution, learn_inducing_locations=True))
        self.mean_module, self.covar_module = gpytorch.means.ConstantMean(), ScaleKernel(RBFKernel())

    def forward(self, inputs: torch.Tensor) -> Any:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(inputs), self.covar_module(inputs))


def data(count: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.linspace(0, 1, count)
    return inputs, torch.sin(inputs * 6) + 0.1 * torch.randn(count)


def exact(kernel: Any) -> Any:
    inputs, targets = data()
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Exact(inputs, targets, likelihood, kernel)
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model.train()
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = -objective(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    model.eval()
    likelihood.eval()
    with torch.no_grad(), gpytorch.settings.fast_pred_var():
        found = likelihood(model(torch.linspace(0, 1.5, 7)))
    return model, losses, found.mean, found.variance, found.confidence_region()


@program(
    {
        "item": "whether a matrix could be decomposed; whether variances are tiny",
        "equal": "whether inputs are those of the training",
    }
)
def an_exact_process() -> Any:
    return exact(RBFKernel())


@program(
    {
        "item": "whether a matrix could be decomposed; whether variances are tiny",
        "equal": "whether inputs are those of the training",
    }
)
def a_sum_of_kernels() -> Any:
    return exact(MaternKernel(nu=1.5) + PeriodicKernel())


@program(
    {
        "item": "whether a matrix could be decomposed; whether variances are tiny",
        "equal": "whether inputs are those of the training",
    }
)
def a_variational_process_in_batches() -> Any:
    inputs, targets = data(40)
    model, likelihood = Variational(inputs[::8]), gpytorch.likelihoods.GaussianLikelihood()
    objective = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=40)
    parameters = [*model.parameters(), *likelihood.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.05)
    for start in (0, 10, 20, 30):
        optimizer.zero_grad()
        loss = -objective(model(inputs[start : start + 10]), targets[start : start + 10])
        loss.backward()
        optimizer.step()
    model.eval()
    return model, likelihood, loss, model(inputs[:5]).mean


@program(
    {
        "item": "whether a matrix could be decomposed",
        "equal": "whether inputs are those of the training",
    }
)
def samples_of_a_posterior() -> Any:
    inputs, targets = data(12)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Exact(inputs, targets, likelihood, RBFKernel())
    model.eval()
    with torch.no_grad():
        found = model(torch.linspace(0, 1, 5))
        return found.rsample(torch.Size([3])), found.covariance_matrix
