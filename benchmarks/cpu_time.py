"""Compares projected with measured time on this CPU, over small and medium models.

It calibrates before each model, because the clock rate changes, and stores no calibration. With one thread
(``OMP_NUM_THREADS=1``), the time of other processes does not count::

    python benchmarks/cpu_time.py [--rounds N] [--only TEXT] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from models.catalog import by_hand, hugging_face
from torch import nn

import lazyviz
from lazyviz.plan.runtime.cpu_op_times import known_rates, project_on_cpu
from lazyviz.plan.runtime.match_profiler_times_to_ops import compared

Step = Callable[[], tuple[Any, Any]]
"""A forward pass; returns the output, and the loss."""


def _mlp(width: int, depth: int, batch: int) -> tuple[nn.Module, torch.Tensor]:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers), torch.randn(batch, width)


def _convolutions(channels: int, depth: int, pixels: int, batch: int) -> tuple[nn.Module, torch.Tensor]:
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1)]
    for _ in range(depth):
        layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(*layers), torch.randn(batch, 3, pixels, pixels)


class _Block(nn.Module):
    """Explicit attention and a feed-forward network, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.rest = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).flatten(2))
        return x + self.rest(x)


def _transformer(width: int, depth: int, length: int, batch: int) -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(_Block(width, 4) for _ in range(depth))), torch.randn(batch, length, width)


def models() -> Iterator[tuple[str, Callable[[], tuple[nn.Module, Step]]]]:
    """All models by name, each created when called, with its forward pass."""
    for name, make in _built_here():

        def of_inputs(make: Callable[[], tuple[nn.Module, torch.Tensor]] = make) -> tuple[nn.Module, Step]:
            model, x = make()

            def forward() -> tuple[Any, Any]:
                output = model(x)
                return output, output.sum() if output.requires_grad else None

            return model, forward

        yield name, of_inputs
    for name, case in (by_hand() | hugging_face()).items():

        def of_case(case: Any = case) -> tuple[nn.Module, Step]:
            model, batch = case.make(), case.batch()
            return model, lambda: case.run(model, batch)

        yield name, of_case


def _built_here() -> Iterator[tuple[str, Callable[[], tuple[nn.Module, torch.Tensor]]]]:
    """Fifteen models by name, each created when called, with its input."""
    for width, depth, batch in ((64, 4, 32), (256, 4, 64), (512, 3, 256), (1024, 3, 128), (2048, 2, 64)):
        yield f"mlp {depth} x {width}, batch {batch}", lambda w=width, d=depth, b=batch: _mlp(w, d, b)  # type: ignore[misc]
    for channels, depth, pixels, batch in (
        (16, 2, 32, 8),
        (32, 3, 32, 16),
        (64, 3, 28, 8),
        (32, 2, 96, 2),
        (64, 2, 56, 4),
    ):
        yield (
            f"cnn {depth} x {channels}, {batch} x {pixels} x {pixels}",
            lambda c=channels, d=depth, p=pixels, b=batch: _convolutions(c, d, p, b),  # type: ignore[misc]
        )
    for width, depth, length, batch in (
        (64, 2, 64, 8),
        (128, 4, 64, 8),
        (256, 2, 128, 8),
        (384, 3, 128, 4),
        (512, 2, 256, 2),
    ):
        yield (
            f"transformer {depth} x {width}, {batch} x {length}",
            lambda w=width, d=depth, n=length, b=batch: _transformer(w, d, n, b),  # type: ignore[misc]
        )


def measured(model: nn.Module, forward: Step, training: bool, rounds: int) -> tuple[float, float, int, int]:
    """Projected seconds, the median of eager PyTorch's, pairs of modules that are in order, and all pairs.

    Pairs are of the ten slowest modules, by kernel time (medians of runs by lazyviz), without pairs of
    similar times.
    """

    def step() -> Any:
        if training:
            return forward()[1].backward()
        with torch.no_grad():
            return forward()

    model.train(training)

    def recorded() -> Any:
        with lazyviz.lazy() as graph:
            step()
        graph.evaluate()
        return graph

    step()
    for _ in range(2):  # so that there is nothing between the kernels
        recorded()
    graph = recorded()
    found = [[node.measured_seconds or 0.0] for node in graph.nodes]
    for _ in range(rounds - 1):
        for seconds, node in zip(found, recorded().nodes):
            seconds.append(node.measured_seconds or 0.0)
    rates = known_rates()
    assert rates is not None
    projection = project_on_cpu(graph.nodes, rates)
    assert projection is not None
    times = compared(projection, dict(zip(graph.nodes, map(statistics.median, found))))
    taken, now = [], time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for _ in range(rounds):
        start = now()
        step()
        taken.append(now() - start)
    return projection.seconds, statistics.median(taken), *times.order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as kept:
        os.environ["XDG_CACHE_HOME"] = kept
        lazyviz.calibrate()  # otherwise a run's report has no times
        for name, make in models():
            for training in (False, True):
                if options.only not in name:
                    continue
                torch.manual_seed(0)
                lazyviz.calibrate()
                projected, taken, right, pairs = measured(*make(), training, options.rounds)
                runs.append(
                    {
                        "model": name,
                        "training": training,
                        "measured_seconds": taken,
                        "projected_seconds": projected,
                        "pairs_in_order": right,
                        "pairs": pairs,
                    }
                )
                print(
                    f"{name:<34} {'training' if training else 'inference':<9} {taken * 1e3:8.2f} ms, "
                    f"projected {projected * 1e3:8.2f} ({projected / taken - 1:+.0%}), "
                    f"{right} of {pairs} pairs of modules in order",
                    flush=True,
                )
    errors = [abs(each["projected_seconds"] / each["measured_seconds"] - 1) for each in runs]
    found = {
        "runs": len(runs),
        "median_error": statistics.median(errors),
        "pairs_in_order": sum(each["pairs_in_order"] for each in runs),
        "pairs": sum(each["pairs"] for each in runs),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "each": runs,
    }
    print(
        f"{len(runs)} runs: median error {found['median_error']:.1%}, {found['pairs_in_order']} of "
        f"{found['pairs']} pairs of modules in order"
    )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
