"""Recorded graphs for the widget tests, with the objects that they depend on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import lazyviz


def training(layers: int = 2, *, width: int = 32) -> tuple[Any, Any]:
    """A step of a small network with AdamW, its batch named."""
    torch.manual_seed(0)
    net = nn.Sequential(
        *[layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU())], nn.Linear(width, 4)
    )
    optimizer = torch.optim.AdamW(net.parameters())
    x, y = torch.randn(8, width), torch.randint(4, (8,))
    with lazyviz.lazy(batch=[x, y]) as graph:
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
    return graph, (net, optimizer, x, y, loss)
