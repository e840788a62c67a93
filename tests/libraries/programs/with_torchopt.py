"""torchopt: optimizers as functions, and through which gradients flow."""

from __future__ import annotations

from typing import Any

import torch
import torchopt
from torch import nn

from ..catalog import program


def data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(16, 8), torch.randint(0, 3, (16,))


@program()
def functional_adam() -> Any:
    model, (inputs, labels) = nn.Linear(8, 3), data()
    parameters = dict(model.named_parameters())
    optimizer = torchopt.adam(lr=1e-2)
    state = optimizer.init(parameters)
    for _ in range(3):
        scores = torch.func.functional_call(model, parameters, (inputs,))
        loss = nn.functional.cross_entropy(scores, labels)
        gradients = dict(zip(parameters, torch.autograd.grad(loss, tuple(parameters.values()))))
        updates, state = optimizer.update(gradients, state, inplace=False)
        parameters = torchopt.apply_updates(parameters, updates, inplace=False)
    return parameters, loss


@program()
def adamw_in_the_style_of_pytorch() -> Any:
    model, (inputs, labels) = nn.Linear(8, 3), data()
    optimizer = torchopt.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    return model, loss


@program()
def a_gradient_through_inner_steps() -> Any:
    model, (inputs, labels) = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)), data()
    meta = nn.Parameter(torch.ones(3))
    outer = torch.optim.Adam([meta], lr=0.1)
    inner = torchopt.MetaAdam(model, lr=0.1)
    start, adam = torchopt.extract_state_dict(model), torchopt.extract_state_dict(inner)
    for _ in range(2):
        for _ in range(2):
            inner.step(nn.functional.cross_entropy(model(inputs) * meta, labels))
        loss = nn.functional.cross_entropy(model(inputs), labels)
        outer.zero_grad()
        loss.backward()
        outer.step()
        torchopt.recover_state_dict(model, start)
        torchopt.recover_state_dict(inner, adam)
    return meta, outer, loss


@program()
def a_zeroth_order_gradient() -> Any:
    def loss_of(parameter: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs @ parameter).pow(2).mean()

    distribution = torch.distributions.Normal(loc=0, scale=1)
    estimate = torchopt.diff.zero_order.zero_order(distribution=distribution, argnums=0, num_samples=4)(
        loss_of
    )
    parameter = nn.Parameter(torch.randn(8))
    loss = estimate(parameter, torch.randn(5, 8))
    loss.backward()
    return parameter, loss
