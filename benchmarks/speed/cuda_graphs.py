"""On a GPU: a small transformer's step as a CUDA Graph, compared with eager PyTorch and plain replay.

It is also compared with the same step captured by hand with PyTorch's recipe, which records nothing and
leaves results in the graph's memory, where the next replay overwrites them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import lazyviz

from . import measured_programs
from .figures import Figure, Settings, say
from .gpu_step_time import captured, device_seconds
from .measured_programs import Optimizer, Program
from .timing import interleaved, lazily, medians, ratio, timed

BACKEND = "cudagraphs"
WARM_UPS = 5  # an optimizer's first step is another program; the second one warms up, the third is captured


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=measured_programs.LEARNING_RATE)


def fused_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=measured_programs.LEARNING_RATE, fused=True)


OPTIMIZERS = {"SGD": measured_programs.sgd, "AdamW": adamw, "fused AdamW": fused_adamw}


def compare(program: Program, name: str, optimizer: Optimizer, settings: Settings) -> Iterator[Figure]:
    """The figures of one training step."""
    case = f"{program.name}, {name}"
    device = settings.device
    ours = lazily(program.on(device).training_step(optimizer), backend=BACKEND)
    plain = lazily(program.on(device).training_step(optimizer), name="eager backend")
    turns = [timed("eager", program.on(device).training_step(optimizer)), ours.turn, plain.turn]
    missing = ""
    try:
        turns.append(timed("by hand", captured(program.on(device).training_step(optimizer))))
    except RuntimeError as error:  # AdamW without ``capturable``
        missing = str(error).partition("\n")[0]
    for turn in turns:
        for _ in range(WARM_UPS):
            turn()
    times = interleaved(turns, 2 * settings.rounds + 1)
    report = ours.reports[-1]
    seconds, how = device_seconds(program.on(device).training_step(optimizer))
    detail: dict[str, Any] = {**medians(times), "ops": ours.ops, "share": report.share}
    detail |= {"device time, s": seconds, "device time by": how}
    note = "; ".join(report.fallbacks)
    run = ratio(times, "lazyviz run", "eager")
    yield Figure("CUDA Graph replay / eager", case, run, note=note, detail=detail)
    total = ratio(times, "lazyviz total", "eager")
    yield Figure("recording and CUDA Graph replay / eager", case, total, detail=detail)
    value = ratio(times, "eager backend run", "eager")
    yield Figure("replay without CUDA Graph / eager", case, value, detail=detail)
    by_hand = None if missing else ratio(times, "by hand", "eager")
    yield Figure("CUDA Graph by hand / eager", case, by_hand, note=missing, detail=detail)
    lazyviz.session.lazy_graph.reset()


def measure(settings: Settings) -> Iterator[Figure]:
    program = measured_programs.transformer()
    if not settings.device.startswith("cuda"):
        yield Figure("CUDA Graph replay / eager", program.name, None, note="needs --device cuda")
        return
    for name, optimizer in OPTIMIZERS.items():
        say(f"     {program.name}, {name}")
        yield from compare(program, name, optimizer, settings)
