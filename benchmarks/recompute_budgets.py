"""Cost and savings of recomputation: training steps under budgets from their full need to the minimum.

    python benchmarks/recompute_budgets.py [--rounds N] [--layers N]

Each model's step (forward, backward, AdamW) is recorded and evaluated without a budget and under
budgets between its peak and the lowest one within reach.  Per budget: the projected and the measured
peak, the ops that ran again and their estimated share of the work, the time of the evaluation relative to
one without a budget (medians of interleaved rounds, because a shared machine drifts), the seconds of the
selection, and whether gradients are bit-equal.  For comparison, the same model with
``torch.utils.checkpoint`` around each layer, if transformers supports it
(``gradient_checkpointing_enable``): its time relative to plain eager, and its projected eager peak.

Prints a table and writes ``benchmarks/results/recompute_budgets.json``.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

import lazyviz

RESULT = Path(__file__).resolve().parent / "results" / "recompute_budgets.json"
SHARES = (0.75, 0.5, 0.25, 0.0)  # fractions of the way from the minimum to the full need

Step = Callable[[], torch.Tensor]


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norms[0](self.first(x)), inplace=True)
        return F.relu(self.norms[1](self.second(y)) + x, inplace=True)


def gpt2(layers: int) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    config = transformers.GPT2Config(
        n_layer=layers, n_head=4, n_embd=256, vocab_size=1000, n_positions=128, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    tokens = torch.randint(0, 1000, (8, 128))
    return transformers.GPT2LMHeadModel(config).train(), lambda model: model(tokens, labels=tokens).loss


def resnet(layers: int) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), *(Block(32) for _ in range(layers)), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    x, y = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    return model, lambda model: F.cross_entropy(model(x), y)


def step_of(model: nn.Module, loss_of: Callable[[nn.Module], torch.Tensor]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def seconds_of(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(name: str, make: Callable[[int], Any], layers: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model, loss_of = make(layers)
    step = step_of(model, loss_of)
    for _ in range(2):  # optimizer state, caches
        with lazyviz.lazy() as graph:
            step()
        graph.evaluate()
    with lazyviz.lazy() as graph:
        step()
    whole = graph.plan().peak_bytes
    choosing = seconds_of(lambda: graph.plan(recompute=1))
    least = graph.plan(recompute=1).recompute.least_bytes
    assert least is not None
    graph.evaluate()
    state = {key: value.clone() for key, value in model.state_dict().items()}

    def run(budget: int | None) -> tuple[Any, Any, float, list[torch.Tensor]]:
        model.load_state_dict(state)
        torch.manual_seed(1)
        with lazyviz.lazy() as graph:
            step()
        plan = graph.plan(recompute="off" if budget is None else budget)
        report = graph.evaluate(recompute="off" if budget is None else budget)
        return plan, report, report.seconds, [p.grad.clone() for p in model.parameters()]

    budgets: list[int | None] = [None, *(int(least + share * (whole - least)) for share in SHARES)]
    rows: list[dict[str, Any]] = [{} for _ in budgets]
    seconds: list[list[float]] = [[] for _ in budgets]
    expected: list[torch.Tensor] = []
    without = 0.0
    for _ in range(rounds):
        for index, budget in enumerate(budgets):
            plan, report, taken, gradients = run(budget)
            if index == 0:  # without recomputation
                expected, without = gradients, taken
            seconds[index].append(taken / without)
            rows[index] = {
                "budget_bytes": budget,
                "projected_bytes": plan.tensor_peak_bytes,
                "measured_bytes": report.peak_bytes,
                "ops_again": report.recomputed,
                "estimated_more_work": round(plan.recompute.share, 3),
                "bit_equal": all(torch.equal(a, b) for a, b in zip(gradients, expected)),
            }
    for row, ratios in zip(rows, seconds):
        row["seconds_over_without"] = round(statistics.median(ratios), 3)
    result = {
        "model": name, "layers": layers, "ops": len(graph.nodes), "peak_bytes": whole, "least_bytes": least,
        "choosing_seconds": round(choosing, 3), "runs": rows,
    }  # fmt: skip
    if hasattr(model, "gradient_checkpointing_enable"):
        result["checkpoint"] = checkpointed(model, step, rounds)
    return result


def checkpointed(model: Any, step: Step, rounds: int) -> dict[str, Any]:
    """The model with its own checkpointing, which recomputes the call of every layer."""
    ratios = []
    for _ in range(rounds):
        model.gradient_checkpointing_disable()
        plain = seconds_of(step)
        model.gradient_checkpointing_enable()
        ratios.append(seconds_of(step) / plain)
    with lazyviz.lazy() as graph:
        step()
    peak = graph.plan().eager_peak_bytes
    graph.evaluate()
    return {"eager_peak_bytes": peak, "seconds_over_plain_eager": round(statistics.median(ratios), 3)}


def mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:7.1f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    results = [measure(make.__name__, make, options.layers, options.rounds) for make in (gpt2, resnet)]
    for result in results:
        print(
            f"{result['model']}, {result['layers']} layers, {result['ops']} ops: peak "
            f"{mib(result['peak_bytes'])}, at least {mib(result['least_bytes'])}, chosen in "
            f"{result['choosing_seconds']} s"
        )
        for row in result["runs"]:
            print(
                f"  {mib(row['measured_bytes'])} measured, {mib(row['projected_bytes'])} projected, "
                f"{row['ops_again']:4} ops again, {row['estimated_more_work']:5.1%} estimated, time x "
                f"{row['seconds_over_without']:.2f}, {'bit-equal' if row['bit_equal'] else 'DIFFERENT'}"
            )
        if "checkpoint" in result:
            each = result["checkpoint"]
            print(
                f"  {mib(each['eager_peak_bytes'])} with torch.utils.checkpoint in eager (projected), "
                f"time x {each['seconds_over_plain_eager']:.2f}"
            )
    about = {"torch": torch.__version__, "python": platform.python_version(), "threads": 1}
    RESULT.write_text(
        json.dumps({"about": about, "rounds": options.rounds, "results": results}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
