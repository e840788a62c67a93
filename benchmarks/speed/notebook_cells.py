"""Ordinary code of notebooks: plain cells beside pending ops, and loaders, masks, and draws in a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn import functional as F

import lazyviz

from . import measured_programs
from .figures import Figure, Settings
from .sync_point_cost import OPTIMIZERS, lazily
from .timing import Turn, interleaved, medians, timed

STEPS = 50


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4)
    )


def data(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(64, 16, device=device), torch.randint(4, (64,), device=device)


def steps(device: str, optimizer: measured_programs.Optimizer, read: bool) -> Callable[[], list[float]]:
    """Training steps with dropout; ``read``: each reads its loss, otherwise all are read at the end."""

    def run() -> list[float]:
        model, (x, y) = network().to(device), data(device)
        updates = optimizer(model.parameters())
        losses: list[Any] = []
        for _ in range(STEPS):
            updates.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            updates.step()
            losses.append(loss.item() if read else loss.detach())
        return [float(loss) for loss in losses]

    return run


def epochs(device: str) -> Callable[[], list[float]]:
    """Losses of shuffled batches of a small data set, read once per epoch."""

    def run() -> list[float]:
        model, (x, y) = network().to(device), data(device)
        batches = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(x, y), batch_size=16, shuffle=True
        )
        losses = []
        for _ in range(STEPS // 5):
            total = torch.zeros((), device=device)
            for features, labels in batches:
                total = total + F.cross_entropy(model(features), labels)
            losses.append(total.item())
        return losses

    return run


def masks(device: str) -> Callable[[], list[float]]:
    """Sums of elements selected by a boolean mask."""

    def run() -> list[float]:
        torch.manual_seed(0)
        x, _ = data(device)
        return [(x * number)[x > 0.5].sum().item() for number in range(STEPS)]

    return run


def beside_pending(name: str, function: Callable[[], Any]) -> Turn:
    """A turn that times ``function`` while an op of an earlier block is pending."""
    inner = timed(name, function)

    def turn() -> Mapping[str, float]:
        outside = torch.ones(2)
        with lazyviz.lazy() as graph:
            _ = outside * 3
        found = inner()
        if graph.pending != 1:
            raise RuntimeError("the plain steps have evaluated an op that they do not need")
        return found

    return turn


def measure(settings: Settings) -> Iterator[Figure]:
    plain = steps(settings.device, OPTIMIZERS["AdamW"], read=False)
    turns = [timed("plain", plain), beside_pending("beside a pending op", plain)]
    found = medians(interleaved(turns, settings.rounds))
    ratio = found["beside a pending op, s"] / found["plain, s"]
    yield Figure("plain steps beside a pending op / without", f"AdamW, {STEPS} steps", ratio, detail=found)
    for case, function in (
        ("SGD with dropout, losses read", steps(settings.device, OPTIMIZERS["SGD"], read=True)),
        ("epochs of a DataLoader", epochs(settings.device)),
        ("boolean masks", masks(settings.device)),
    ):
        if function() != lazily(function)():
            raise RuntimeError("lazyviz and eager PyTorch have read different values")
        turns = [timed("eager", function), timed("lazy", lazily(function))]
        found = medians(interleaved(turns, settings.rounds))
        yield Figure("in a block / eager", case, found["lazy, s"] / found["eager, s"], detail=found)
