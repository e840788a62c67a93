"""What recording costs: a training step of GPT-2 small, recorded, run eagerly, and traced by make_fx.

    make bench        # or: python benchmarks/record.py [--rounds N] [--layers N]

One step is forward, backward and SGD of a transformers GPT-2 (12 layers of width 768, random
weights, dropout on).  Per op figures are wall time over the number of recorded ops, so all rows
count the same program.  The rounds are interleaved, because a shared machine drifts, and in a
round each runs twice, of which the second is timed: read the medians, and the ratios before the
absolute times.

Prints a table and writes ``benchmarks/results/record.json``.
"""

from __future__ import annotations

import argparse
import gc
import json
import operator
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import lazyviz

RESULT = Path(__file__).resolve().parent / "results" / "record.json"
LEARNING_RATE = 1e-3
COLD_RUNS = 3
TARGET_US = 40.0  # the aim for the warm recording of one op


def make_step(config: GPT2Config, tokens: torch.Tensor) -> Callable[[], None]:
    """A model of its own and the step that trains it."""
    model = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def step() -> None:
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()

    return step


def make_tracer(config: GPT2Config, tokens: torch.Tensor) -> Callable[[], int]:
    """The same step under ``make_fx`` with fake tensors; returns how many ops were traced.

    ``make_fx`` wants a function of tensors, so parameters are arguments and SGD is spelled out.
    """
    model = GPT2LMHeadModel(config).train()
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = [name for name, _ in model.named_parameters()]

    def step(state: dict[str, torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
        loss = torch.func.functional_call(model, state, (batch,), {"labels": batch}).loss
        parameters = [state[name] for name in names]
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients):
                parameter.add_(gradient, alpha=-LEARNING_RATE)
        return loss

    def trace() -> int:
        graph = make_fx(step, tracing_mode="fake")(state, tokens).graph
        calls = [node for node in graph.nodes if node.op == "call_function"]
        return sum(node.target is not operator.getitem for node in calls)

    return trace


def seconds(function: Callable[[], object]) -> float:
    """Wall time of one call, with the garbage of earlier calls out of the way."""
    gc.collect()
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def measure(config: GPT2Config, tokens: torch.Tensor, rounds: int) -> dict[str, object]:
    """Interleaved rounds of the three; times in microseconds an op."""
    step = make_step(config, tokens)
    trace = make_tracer(config, tokens)
    counts: list[int] = []

    def record() -> None:
        with lazyviz.lazy() as graph:
            step()
        counts.append(len(graph.nodes))
        recorded.append(graph)

    recorded: list[lazyviz.LazyGraph] = []
    record()
    recorded.pop().evaluate()
    ops = counts[0]
    traced_ops = trace()  # once outside the count: what it imports is not what is measured
    times: dict[str, list[float]] = {"eager": [], "record_warm": [], "make_fx": []}
    step()
    for number in range(rounds):
        print(f"   round {number + 1} of {rounds}", flush=True)
        # Each runs once before it is timed, so that none pays for the caches another has emptied.
        step()
        times["eager"].append(seconds(step))
        record()
        recorded.pop().evaluate()
        times["record_warm"].append(seconds(record))
        recorded.pop().evaluate()
        trace()
        times["make_fx"].append(seconds(trace))
    if len(set(counts)) != 1:
        raise RuntimeError(f"the recorded number of ops varies between rounds: {sorted(set(counts))}")
    per_op = {name: [1e6 * value / ops for value in values] for name, values in times.items()}
    medians = {name: statistics.median(values) for name, values in per_op.items()}
    return {
        "ops": ops,
        "make_fx_ops": traced_ops,
        "microseconds_per_op": {
            **{name: summary(values) for name, values in per_op.items()},
        },
        "ratios_of_medians": {
            "record_warm / eager": medians["record_warm"] / medians["eager"],
            "make_fx / record_warm": medians["make_fx"] / medians["record_warm"],
        },
    }


def summary(values: list[float]) -> dict[str, float]:
    """Minimum, median and maximum."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def cold(layers: int, length: int) -> float:
    """Microseconds an op of a process's first recording; run in a process of its own."""
    config, tokens = make_inputs(layers, length)
    step = make_step(config, tokens)
    with lazyviz.lazy() as graph:
        begin = time.perf_counter()
        step()
        total = time.perf_counter() - begin
    return 1e6 * total / len(graph.nodes)


def cold_in_fresh_processes(layers: int, length: int) -> list[float]:
    """:func:`cold`, a few times."""
    command = [sys.executable, __file__, "--cold", "--layers", str(layers), "--tokens", str(length)]
    results = []
    for number in range(COLD_RUNS):
        print(f"   fresh process {number + 1} of {COLD_RUNS}", flush=True)
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        results.append(float(done.stdout.split()[-1]))
    return results


def make_inputs(layers: int, length: int) -> tuple[GPT2Config, torch.Tensor]:
    """The configuration, and one sequence of tokens."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, bos_token_id=0, eos_token_id=0)
    return config, torch.randint(0, config.vocab_size, (1, length))


def show(result: dict) -> None:
    """The table a person reads."""
    micro = result["microseconds_per_op"]
    titles = {
        "record_cold": "lazyviz, recording, first in a process",
        "record_warm": "lazyviz, recording, warm",
        "make_fx": "make_fx, fake tensors, warm",
        "eager": "plain eager PyTorch, kernels included",
    }
    print(f"\n{result['ops']} ops a step; microseconds an op: median (min to max)")
    for name, title in titles.items():
        row = micro[name]
        print(f"  {title:40s} {row['median']:8.1f}   ({row['min']:.1f} to {row['max']:.1f})")
    for name, value in result["ratios_of_medians"].items():
        print(f"  {name:40s} {value:8.2f}")


def main(args: list[str]) -> int:
    """Measure, print, write the JSON; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--cold", action="store_true", help="only one first recording, for the parent process"
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=16, help="length of the one sequence in the batch")
    options = parser.parse_args(args)
    logging.set_verbosity_error()
    if options.cold:
        print(cold(options.layers, options.tokens))
        return 0
    print(f"-- recording cost: GPT-2, {options.layers} layers, forward + backward + SGD", flush=True)
    first = cold_in_fresh_processes(options.layers, options.tokens)
    config, tokens = make_inputs(options.layers, options.tokens)
    result: dict[str, object] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "layers": options.layers,
        "tokens": options.tokens,
        "rounds": options.rounds,
        **measure(config, tokens, options.rounds),
    }
    result["microseconds_per_op"]["record_cold"] = summary(first)  # type: ignore[index]
    show(result)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    warm = result["microseconds_per_op"]["record_warm"]["median"]  # type: ignore[index]
    verdict = "under" if warm < TARGET_US else "OVER"
    where = f"{RESULT.parent.parent.name}/{RESULT.parent.name}/{RESULT.name}"
    print(f"make bench: {warm:.1f} us an op, {verdict} the {TARGET_US:.0f} us aimed at; see {where}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
