"""Blocks in which values are read: cost per step and per read, by the length of the block.

A training loop that reads its loss in each step, a read after every operator, and a transformers
``Trainer``, each inside one lazy block, compared with the same in eager mode.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

import lazyviz

from . import measured_programs
from .figures import Figure, Settings, say
from .timing import Turn, interleaved, medians, now, settle, timed

STEPS = (50, 200, 800)
READS = (50, 200, 800)
TRAINER_STEPS = 60
OPTIMIZERS: dict[str, measured_programs.Optimizer] = {
    "SGD": measured_programs.sgd,
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=measured_programs.LEARNING_RATE),
}


def training_loop(
    optimizer: measured_programs.Optimizer, steps: int, device: str
) -> Callable[[], list[float]]:
    """``steps`` training steps of a tiny network, each of which reads its loss."""

    def run() -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)).to(
            device
        )
        updates = optimizer(model.parameters())
        x, y = torch.randn(32, 16, device=device), torch.randint(4, (32,), device=device)
        losses = []
        for _ in range(steps):
            updates.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            updates.step()
            losses.append(loss.item())
        return losses

    return run


def start(device: str) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.rand(8, device=device)


def reads(count: int, x: torch.Tensor) -> list[Any]:
    """Read after every one or two operators; values depend on data, because constants need no run."""
    seen: list[Any] = []
    for number in range(count // 4):
        x = x * 1.5 - 0.25 if number % 2 else x * 0.75
        seen += [x.tolist(), x.sum().item(), bool((x > 0.5).any()), x[0].item()]
    return seen


def lazily(function: Callable[[], Any]) -> Callable[[], Any]:
    """``function`` in a block that is evaluated, because pending ops would slow down the timed eager code."""

    def run() -> Any:
        with lazyviz.lazy() as graph:
            result = function()
        graph.evaluate()
        return result

    return run


def within_a_block(name: str, count: int, device: str) -> Turn:
    """A turn that times ``count`` reads in a block, without seeding."""

    def turn() -> dict[str, float]:
        settle()
        with lazyviz.lazy() as graph:
            x = start(device)
            begin = time.perf_counter()
            reads(count, x)
            seconds = now() - begin
        graph.evaluate()
        return {name: seconds}

    return turn


def trainer(steps: int) -> Callable[[], list[float]]:
    """``Trainer.train`` of a small GPT-2 on random tokens; returns the logged losses."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.GPT2Config(
        n_layer=2, n_head=4, n_embd=128, vocab_size=1000, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    tokens = torch.randint(1000, (8 * steps, 64), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in tokens]

    def run() -> list[float]:
        transformers.set_seed(0)
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            arguments = transformers.TrainingArguments(
                folder,
                max_steps=steps,
                per_device_train_batch_size=8,
                logging_steps=10,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
            )
            work = transformers.Trainer(transformers.GPT2LMHeadModel(config), arguments, train_dataset=data)
            work.remove_callback(transformers.PrinterCallback)
            work.train()
        return [entry["loss"] for entry in work.state.log_history if "loss" in entry]

    return run


def beside_eager(
    functions: dict[int, Callable[[], Any]], settings: Settings
) -> tuple[dict[str, list[float]], dict[int, float]]:
    """Interleaved times of each function in eager and lazy mode, and the ratios lazy / eager."""
    turns = []
    for count, function in functions.items():
        if function() != lazily(function)():
            raise RuntimeError("lazyviz and eager PyTorch have read different values")
        turns += [timed(f"eager {count}", function), timed(f"lazy {count}", lazily(function))]
    times = interleaved(turns, settings.rounds, warm_up=False)
    found = medians(times)
    return times, {count: found[f"lazy {count}, s"] / found[f"eager {count}, s"] for count in functions}


def loops(settings: Settings) -> Iterator[Figure]:
    steps = settings.pick(STEPS, STEPS[:2])
    for name, optimizer in OPTIMIZERS.items():
        loop = {count: training_loop(optimizer, count, settings.device) for count in steps}
        times, ratios = beside_eager(loop, settings)
        detail = medians(times)
        step = {count: detail[f"lazy {count}, s"] / count for count in steps}
        for count in steps:
            case = f"{name}, {count} steps"
            yield Figure("a loop that reads its loss / eager", case, ratios[count], "< 4", detail=detail)
        longest, shortest = steps[-1], steps[0]
        yield Figure(
            f"a step that reads its loss, of {longest} / of {shortest}",
            name,
            step[longest] / step[shortest],
            "<= 1.15",
            detail=detail,
        )


def single(settings: Settings) -> Iterator[Figure]:
    counts = settings.pick(READS, READS[:2])
    for count in counts:

        def function(count: int = count) -> list[Any]:
            return reads(count, start(settings.device))

        if function() != lazily(function)():
            raise RuntimeError("lazyviz and eager PyTorch have read different values")
    # Without the cost of entering and leaving a block, which is paid once per cell.
    turns = [within_a_block(f"lazy {count}", count, settings.device) for count in counts]
    detail = medians(interleaved(turns, settings.rounds))
    for count in counts:
        # Of four reads, one follows one or two operators, one follows two, and two follow one.
        value = 1e6 * detail[f"lazy {count}, s"] / count
        yield Figure("a read after every operator", f"{count} reads", value, "< 60", "us", detail=detail)


def measure(settings: Settings) -> Iterator[Figure]:
    say("     loops that read their loss")
    yield from loops(settings)
    say("     a read after every operator")
    yield from single(settings)
    if settings.device != "cpu":
        return
    say("     transformers.Trainer")
    steps = settings.pick(TRAINER_STEPS, TRAINER_STEPS // 3)
    try:
        times, ratios = beside_eager({steps: trainer(steps)}, settings)
    except ImportError as error:
        yield Figure("Trainer.train in one block / eager", f"{steps} steps", None, "< 1.4", note=str(error))
        return
    yield Figure(
        "Trainer.train in one block / eager", f"{steps} steps", ratios[steps], "< 1.4", detail=medians(times)
    )
