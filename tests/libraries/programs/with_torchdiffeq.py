"""torchdiffeq: differential equations whose right side is a network."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchdiffeq import odeint, odeint_adjoint, odeint_event

from ..catalog import program


class Field(nn.Module):
    """The slope at a place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, time: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        return self.layers(place**3)


def trained(solve: Any, **options: Any) -> Any:
    field, times = Field(), torch.linspace(0, 1, 6)
    start, wanted = torch.tensor([[2.0, 0.0]]), torch.randn(6, 1, 2)
    optimizer = torch.optim.RMSprop(field.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        found = solve(field, start, times, **options)
        loss = (found - wanted).abs().mean()
        loss.backward()
        optimizer.step()
    return field, optimizer, found, loss


@program()
def fixed_steps() -> Any:
    return trained(odeint, method="rk4", options={"step_size": 0.1})


@program()
def euler_and_midpoint() -> Any:
    return trained(odeint, method="euler"), trained(odeint, method="midpoint")


@program(
    {
        "item": "whether a step is accepted, and how long the next one is",
    }
)
def adaptive_steps() -> Any:
    return trained(odeint, method="dopri5", rtol=1e-3, atol=1e-4)


@program(
    {
        "item": "whether a step is accepted, and how long the next one is",
    }
)
def adaptive_steps_with_the_adjoint() -> Any:
    return trained(odeint_adjoint, method="dopri5", rtol=1e-3, atol=1e-4)


@program(
    {
        "item": "whether the iteration has converged; how many steps there are",
    }
)
def adams_with_the_adjoint() -> Any:
    return trained(odeint_adjoint, method="implicit_adams", options={"step_size": 0.2})


@program(
    {
        "item": "whether a step is accepted, and how long the next one is",
    }
)
def until_an_event() -> Any:
    start, gone = torch.tensor([1.0, 0.0]), torch.tensor(0.0)
    return odeint_event(
        lambda time, state: torch.stack([state[1], torch.full_like(state[1], -9.8)]),
        start,
        gone,
        event_fn=lambda time, state: state[0],
        method="dopri5",
    )
