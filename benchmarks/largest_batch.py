"""Checks ``plan.max_batch_size`` by recording programs at that size and with one sample more.

A training step is recorded for a GPU with a small batch, and the plan is asked for the largest that fits.
Then the same step is recorded as people would run it with that batch, and with one sample more, and the
allocations of each are played to the simulated caching allocator of that GPU: the first has to fit, the
second to run out of memory.

    python benchmarks/largest_batch.py [MODEL ...] [--cards RTX-3060,V100-16GB] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import lazyviz

RESULTS = Path(__file__).parent / "results" / "largest_batch.json"
CARDS = ("RTX-3060", "V100-16GB", "A100-40GB", "H100-80GB")
RECORDED = 4  # batch size of the first recording


def perceptron() -> Any:
    layers = [layer for _ in range(8) for layer in (nn.Linear(4096, 4096), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(4096, 10)), lambda n: (torch.randn(n, 4096), labels(n, 10))


def convolutions() -> Any:
    def block(inside: int, outside: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inside, outside, 3, 2, 1), nn.BatchNorm2d(outside), nn.ReLU())

    model = nn.Sequential(
        block(3, 64),
        block(64, 128),
        block(128, 256),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(256, 100),
    )
    return model, lambda n: (torch.randn(n, 3, 128, 128), labels(n, 100))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8000, 512)
        layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(512, 8000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(ids))).transpose(1, 2)


def transformer() -> Any:
    return Language(), lambda n: (torch.randint(8000, (n, 256)), torch.randint(8000, (n, 256)))


def recurrent() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(256, 512, 2, batch_first=True), nn.Linear(512, 50)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(x)[0][:, -1])

    return Model(), lambda n: (torch.randn(n, 200, 256), labels(n, 50))


def labels(count: int, classes: int) -> torch.Tensor:
    return torch.randint(classes, (count,))


MODELS: dict[str, Callable[[], Any]] = {
    "perceptron": perceptron,
    "convolutions": convolutions,
    "transformer": transformer,
    "LSTM": recurrent,
}


def recorded(name: str, card: str, samples: int, *, named: bool = False, gpus: int = 1) -> Any:
    """The plan of two training steps with Adam; ``named``: the block names the batch tensors.

    On several ``gpus`` the model is in ``nn.DataParallel``.
    """
    lazyviz.reset()
    torch.manual_seed(0)
    with torch.device("meta"):
        model, batch = MODELS[name]()
        like = batch(samples)
    with lazyviz.lazy(device=card):
        x, y = (torch.empty_like(each, device="cuda") for each in like)
    with lazyviz.lazy(device=card, batch=[x, y] if named else None) as graph:
        model.to_empty(device="cuda")
        optimizer = torch.optim.Adam(model.parameters())
        called = nn.DataParallel(model, list(range(gpus))) if gpus > 1 else model
        for _ in range(2):
            F.cross_entropy(called(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return graph.plan()


def tried(name: str, card: str, gpus: int = 1) -> dict[str, Any]:
    """The largest batch according to a plan, and whether new recordings with it and one more sample fit."""
    start = time.perf_counter()
    largest = int(recorded(name, card, RECORDED, named=True, gpus=gpus).max_batch_size or 0)
    found = time.perf_counter() - start
    row: dict[str, Any] = {"model": name, "card": card, "largest": largest, "seconds": round(found, 2)}
    for key, samples in (("fits", largest), ("fits with one more", largest + 1)):
        plan = recorded(name, card, samples, gpus=gpus)
        cards = [each for each in plan.devices.values() if each.device.startswith("cuda")]
        row[key] = all(each.fits for each in cards)
        row[f"needed, {key}"] = plan.needed_bytes
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="default: all")
    parser.add_argument("--cards", default=",".join(CARDS))
    parser.add_argument("--gpus", type=int, default=1, help="more than one: in nn.DataParallel")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    rows = []
    for name in options.models or MODELS:
        for card in options.cards.split(","):
            row = tried(name, card, options.gpus)
            rows.append(row)
            verdict = "as it should be" if row["fits"] and not row["fits with one more"] else "NOT SO"
            print(f"{name:14} {card:12} {row['largest']:8,} {row['seconds']:6.1f} s  {verdict}", flush=True)
    if options.json or (not options.models and options.gpus == 1):
        (options.json or RESULTS).write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    if not all(row["fits"] and not row["fits with one more"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
