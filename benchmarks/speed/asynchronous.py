"""Loops of ``lazyviz.steps`` compared with eager loops.

Iterations of a program that has been recorded often enough run in eager mode.  With ``always_record``, each
runs while the next is recorded, which requires two cores: one for recording, one for kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lazyviz

from .figures import Figure, Settings
from .timing import interleaved, medians, ratio, timed

STEPS = 60
Loss = Callable[[], Tensor]


def perceptron() -> tuple[nn.Module, Loss]:
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())]
    model, x, y = nn.Sequential(*layers, nn.Linear(64, 10)), torch.randn(32, 64), torch.randint(10, (32,))
    return model, lambda: F.cross_entropy(model(x), y)


def encoder() -> tuple[nn.Module, Loss]:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 4)
    x = torch.randn(8, 16, 64)
    return model, lambda: model(x).square().mean()


def gpt2() -> tuple[nn.Module, Loss]:
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.GPT2Config(
        n_layer=4, n_embd=64, n_head=4, vocab_size=500, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    model, tokens = transformers.GPT2LMHeadModel(config), torch.randint(500, (8, 32))
    return model, lambda: model(input_ids=tokens, labels=tokens).loss


def convolutions() -> tuple[nn.Module, Loss]:
    blocks = [(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in ((3, 16), (16, 32))]
    layers = [*blocks[0], nn.MaxPool2d(2), *blocks[1], nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(32, 10))
    x, y = torch.randn(8, 3, 16, 16), torch.randint(10, (8,))
    return model, lambda: F.cross_entropy(model(x), y)


def lstm() -> tuple[nn.Module, Loss]:
    model, x = nn.LSTM(16, 32, batch_first=True), torch.randn(8, 12, 16)
    return model, lambda: model(x)[0].square().mean()


MODELS = {
    "perceptron": perceptron,
    "transformer encoder 4 x 64": encoder,
    "GPT-2 4 x 64": gpt2,
    "convolutions": convolutions,
    "LSTM": lstm,
}


def training(make: Callable[[], tuple[nn.Module, Loss]]) -> Callable[[Any], list[float]]:
    """A function that trains one step per item of its argument, and returns the losses."""
    torch.manual_seed(0)
    model, loss_of = make()
    optimizer = torch.optim.AdamW(model.parameters())

    def train(rounds: Any) -> list[float]:
        losses = []
        torch.manual_seed(1)  # for dropout
        for _ in rounds:
            optimizer.zero_grad()
            loss = loss_of()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return [loss.item() for loss in losses]

    return train


def elementwise() -> Callable[[Any], list[float]]:
    """A function that runs small operators, without a model, once per item of its argument."""
    torch.manual_seed(0)
    x, y = torch.randn(100, 100), torch.randn(100, 100)

    def run(rounds: Any) -> list[float]:
        results = []
        for _ in rounds:
            z = x
            for _ in range(100):
                z = torch.relu((z + y) * 0.5)
            results.append(z.sum())
        return [result.item() for result in results]

    return run


TINY = "300 ops on 100 x 100"
PROGRAMS: dict[str, Callable[[], Callable[[Any], list[float]]]] = {
    **{name: partial(training, make) for name, make in MODELS.items()},
    TINY: elementwise,
}


def ways(make: Callable[[], Callable[[Any], list[float]]]) -> dict[str, Callable[[], list[float]]]:
    """A program's loop in each mode, with separate models."""
    eager, waiting, overlapped, recorded = (make() for _ in range(4))
    return {
        "eager": lambda: eager(range(STEPS)),
        "steps, waiting": lambda: waiting(lazyviz.steps(range(STEPS), wait=True)),
        "steps": lambda: overlapped(lazyviz.steps(range(STEPS))),
        "steps, each recorded": lambda: recorded(lazyviz.steps(range(STEPS), always_record=True)),
    }


MEMORY = """
import resource, torch, lazyviz
torch.set_num_threads(1)
torch.manual_seed(0)
layers = [layer for _ in range(6) for layer in (torch.nn.Linear(512, 512), torch.nn.GELU())]
model = torch.nn.Sequential(*layers, torch.nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
target = torch.zeros(16384, dtype=torch.long)

def rounds(loop):
    for x in loop:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), target).backward()
        optimizer.step()
        del x

def batches(count, rows):
    return (torch.ones(rows, 512) for _ in range(count))

target = target[:64]
rounds(lazyviz.steps(batches(4, 64), always_record=True))
target = torch.zeros(16384, dtype=torch.long)
before = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
loop = lazyviz.steps(batches(8, 16384), always_record=True)
rounds(loop)
after = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
plan = loop.graph.plan()
print(after - before, plan.peak_bytes, loop.waited)
"""


def memory() -> Figure:
    """Compare the peak of a loop that overlaps with recording, in a separate process, with its plan."""
    # The C library returns freed blocks of this size to the operating system at once.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "1000000"}
    run = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True, env=environment
    )
    measured, planned, waited = run.stdout.split(maxsplit=2)
    if waited.strip() != "None":
        raise RuntimeError(f"the loop did not run asynchronously: {waited}")
    batch = 4 * 512 * 16384
    return Figure(
        "peak of lazyviz.steps / its plan and the next batch",
        "6 layers of 512, batch of 16,384",
        int(measured) / (int(planned) + batch),
        "<= 1.05",
        detail={"peak, bytes": int(measured), "plan, bytes": int(planned), "batch, bytes": batch},
    )


LABELS = {
    "steps": ("lazyviz.steps / eager", "<= 1.25"),
    "steps, waiting": ("lazyviz.steps(wait=True) / eager", "<= 1.6"),
    "steps, each recorded": ("lazyviz.steps(always_record=True) / eager", ""),
}


def measure(settings: Settings) -> Iterator[Figure]:
    if settings.device == "cpu":
        yield memory()
    for name, make in PROGRAMS.items():
        try:
            runs = ways(make)
        except ImportError as error:
            yield Figure("lazyviz.steps / eager", name, None, "<= 1.25", note=str(error))
            continue
        first = [run() for run in runs.values()]
        if any(losses != first[0] for losses in first):
            raise RuntimeError(f"{name}: lazyviz and eager PyTorch have come to different results")
        times = interleaved([timed(way, partial(run)) for way, run in runs.items()], settings.rounds)
        detail = {**medians(times), "steps": STEPS}
        for way, (label, criterion) in LABELS.items():
            if name == TINY and criterion:
                criterion = "<= 2.0"
            yield Figure(label, name, ratio(times, way, "eager"), criterion, detail=detail)
