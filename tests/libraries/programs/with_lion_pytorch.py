"""lion-pytorch: the optimizer Lion."""

from __future__ import annotations

from typing import Any

import lion_pytorch
import torch
from lion_pytorch import cautious_lion, foreach
from torch import nn

from ..catalog import program


def trained(lion: type[torch.optim.Optimizer] = lion_pytorch.Lion, **options: Any) -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = lion(model.parameters(), lr=1e-3, weight_decay=1e-2, **options)
    inputs, labels = torch.randn(16, 8), torch.randint(0, 3, (16,))
    for _ in range(4):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    return model, optimizer, loss


@program()
def plain() -> Any:
    return trained()


@program()
def decoupled_decay() -> Any:
    return trained(decoupled_weight_decay=True)


@program()
def of_many_tensors_at_once() -> Any:
    return trained(foreach.Lion)


@program()
def cautious() -> Any:
    return trained(cautious_lion.Lion, cautious_factor=0.5)
