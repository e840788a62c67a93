"""Whole training steps compiled, by lazyviz's ``inductor`` backend and by hand with ``torch.compile``.

"By hand" is what a user would write: ``torch.compile`` of the model, with loss and optimizer in eager mode.
A second comparison also compiles the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import lazyviz

from . import measured_programs, peak_memory
from .figures import Figure, Settings, say
from .measured_programs import Program
from .timing import Turn, interleaved, lazily, medians, ratio, timed


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=measured_programs.LEARNING_RATE)


def by_hand(program: Program, device: str) -> Program:
    """The program with its model compiled."""
    copy = program.on(device)
    model: Any = torch.compile(copy.model)
    return Program(copy.name, model, copy.inputs, copy.target, copy.loss)


def step_all_compiled(program: Program) -> Callable[[], Any]:
    """A step with a compiled model whose optimizer update is also compiled."""
    updates = adamw(program.model.parameters())
    update = torch.compile(updates.step)

    def step() -> Any:
        updates.zero_grad()
        loss = program.value()
        loss.backward()
        update()
        return loss

    return step


def warm(turns: dict[str, Turn]) -> None:
    """Compile twice: first without, then with existing gradients and optimizer state."""
    for name, turn in turns.items():
        for number in range(3):
            seconds = sum(value for key, value in turn().items() if not key.endswith("total"))
            if number == 0:
                say(f"     {name}: first run {seconds:.0f} s")


def both_ways(program: Program, settings: Settings, rounds: int) -> Iterator[Figure]:
    ours = lazily(program.on(settings.device).pass_both_ways(), backend="inductor")
    turns = {
        "lazyviz": ours.turn,
        "torch.compile": timed("torch.compile", by_hand(program, settings.device).pass_both_ways()),
        "eager": timed("eager", program.on(settings.device).pass_both_ways()),
    }
    warm(turns)
    times = interleaved(list(turns.values()), rounds, warm_up=False)
    report = ours.reports[-1]
    detail = {**medians(times), "ops": ours.ops, "threads": torch.get_num_threads()}
    run = ratio(times, "lazyviz run", "torch.compile")
    yield Figure(
        "inductor, run / torch.compile", f"forward + backward, {program.name}", run, "<= 1.05", detail=detail
    )
    total = ratio(times, "lazyviz total", "torch.compile")
    yield Figure(
        "inductor, lazy total / torch.compile", f"forward + backward, {program.name}", total, detail=detail
    )
    yield Figure(
        "share of ops that inductor runs",
        f"forward + backward, {program.name}",
        report.share,
        ">= 0.95",
        note="; ".join(report.fallbacks),
        detail={"ops": ours.ops},
    )
    lazyviz.session.lazy_graph.reset()


def whole_step(program: Program, settings: Settings, rounds: int) -> Iterator[Figure]:
    ours = lazily(program.on(settings.device).training_step(adamw), backend="inductor")
    turns = {
        "lazyviz": ours.turn,
        "torch.compile": timed("torch.compile", by_hand(program, settings.device).training_step(adamw)),
    }
    peers = [("inductor, run / torch.compile", "torch.compile", "< 1")]
    if program.name == "ResNet" and not settings.quick:  # compiling AdamW for GPT-2 takes minutes
        turns["both compiled"] = timed("both compiled", step_all_compiled(by_hand(program, settings.device)))
        peers.append(("inductor, run / torch.compile of model and optimizer", "both compiled", ""))
    warm(turns)
    times = interleaved(list(turns.values()), rounds, warm_up=False)
    report = ours.reports[-1]
    detail = {**medians(times), "ops": ours.ops, "threads": torch.get_num_threads()}
    case = f"step with AdamW, {program.name}"
    for name, peer, criterion in peers:
        yield Figure(name, case, ratio(times, "lazyviz run", peer), criterion, detail=detail)
    yield Figure(
        "inductor, lazy total / torch.compile",
        case,
        ratio(times, "lazyviz total", "torch.compile"),
        detail=detail,
    )
    yield Figure(
        "share of ops that inductor runs",
        case,
        report.share,
        ">= 0.95",
        note="; ".join(report.fallbacks),
        detail={"ops": ours.ops},
    )
    lazyviz.session.lazy_graph.reset()
    if not settings.device.startswith("cuda"):
        yield peak_memory.figure(program, settings, "inductor", adamw)


def measure(settings: Settings, case: str) -> Iterator[Figure]:
    if case == "gpt2":
        size = settings.pick({"batch": 4}, {"layers": 1, "width": 128, "batch": 2, "length": 32})
        program = measured_programs.gpt2_of_transformers(**size)
    else:
        program = (
            measured_programs.resnet(8, 64)
            if not settings.quick
            else measured_programs.resnet(2, 16, depths=(1,), widths=(64,))
        )
    rounds = settings.pick(min(settings.rounds, 7), 3)
    parts: tuple[Callable[..., Iterator[Figure]], ...] = (both_ways, whole_step)
    if settings.quick:  # most of the time goes into compiling
        parts = (whole_step,) if case == "gpt2" else (both_ways,)
    for part in parts:
        say(f"     {program.name}: {part.__name__}")
        yield from part(program, settings, rounds)
        torch.compiler.reset()
