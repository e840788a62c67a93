"""schedulefree: optimizers that need no schedule."""

from __future__ import annotations

from typing import Any

import schedulefree
import torch
from torch import nn

from ..catalog import program


def trained(make: Any) -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = make(model.parameters())
    inputs, labels = torch.randn(16, 8), torch.randint(0, 3, (16,))
    model.train()
    optimizer.train()
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    model.eval()
    optimizer.eval()
    return model, optimizer, loss, model(inputs)


@program()
def adamw() -> Any:
    return trained(lambda parameters: schedulefree.AdamWScheduleFree(parameters, lr=1e-2, warmup_steps=2))


@program()
def sgd() -> Any:
    return trained(lambda parameters: schedulefree.SGDScheduleFree(parameters, lr=0.1))


@program()
def radam_without_foreach() -> Any:
    return trained(lambda parameters: schedulefree.RAdamScheduleFree(parameters, lr=1e-2, foreach=False))


@program()
def closures() -> Any:
    model = nn.Linear(8, 3)
    optimizer = schedulefree.AdamWScheduleFreeClosure(model.parameters(), lr=1e-2)
    inputs, labels = torch.randn(16, 8), torch.randint(0, 3, (16,))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        return loss

    return [optimizer.step(closure) for _ in range(3)], model, optimizer
