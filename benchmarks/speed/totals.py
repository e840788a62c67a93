"""Warm lazy totals, recording, plan look-up and run, beside plain eager PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import lazyviz

from . import ltc, programs
from .device import device_seconds
from .figures import Figure, Settings
from .programs import Program
from .timing import Turn, interleaved, lazily, medians, now, ratio, settle, timed

DEVICE_BOUND = 5  # on a GPU the criterion holds where device time is that many times recording time


LOOP = 10  # steps one after another


def in_a_loop(name: str, once: Callable[[], Any]) -> Turn:
    """A turn of ``LOOP`` steps with nothing between them, as users train: seconds of each on average."""

    def turn() -> dict[str, float]:
        settle()
        begin = time.perf_counter()
        for _ in range(LOOP):
            once()
        return {name: (now() - begin) / LOOP}

    return turn


def loops(program: Program, settings: Settings, rounds: int) -> Iterator[Figure]:
    """The same without a collection before each step; what becomes of each one's graph is in it."""
    step = program.on(settings.device).training_step()

    def lazily_once() -> None:
        with lazyviz.lazy() as graph:
            step()
        graph.evaluate()

    eager = in_a_loop("eager", program.on(settings.device).training_step())
    times = interleaved([eager, in_a_loop("lazyviz", lazily_once)], rounds)
    yield Figure(
        "lazy loop / eager loop", program.name, ratio(times, "lazyviz", "eager"), detail=medians(times)
    )


def compare(
    program: Program, settings: Settings, criterion: str, *, with_ltc: bool, warm_up: bool, rounds: int
) -> Iterator[Figure]:
    eager = program.on(settings.device).training_step()
    ours = lazily(program.on(settings.device).training_step())
    turns: list[Turn] = [timed("eager", eager), ours.turn]
    missing = ""
    if with_ltc:
        try:
            ltc.start(settings.device)
            turns.append(ltc.lazily(program.on("lazy").training_step()))
        except ltc.Unavailable as error:
            missing = str(error)
    for _ in range(2):  # the second finds what the first has prepared for it
        for turn in turns:
            turn()
    times = interleaved(turns, rounds, warm_up=warm_up)
    detail: dict[str, Any] = {**medians(times), "ops": ours.ops, "threads": torch.get_num_threads()}
    note = ""
    if settings.device.startswith("cuda"):
        kernels, detail["device time by"] = device_seconds(program.on(settings.device).training_step())
        detail["device time, s"] = kernels
        share = kernels / detail["lazyviz record, s"]
        if share < DEVICE_BOUND:
            criterion, note = "", f"device time is {share:.1f} times recording time"
    yield Figure(
        "lazy total / eager",
        program.name,
        ratio(times, "lazyviz total", "eager"),
        criterion,
        note=note,
        detail=detail,
    )
    yield Figure("replay / eager", program.name, ratio(times, "lazyviz run", "eager"), detail=detail)
    if with_ltc:
        value = None if missing else ratio(times, "LTC total", "eager")
        yield Figure("LTC total / eager", program.name, value, note=missing, detail=detail)
    lazyviz.session.reset()


def measure(settings: Settings, case: str) -> Iterator[Figure]:
    if case == "small":
        rounds = 2 * settings.rounds + 1
        program = programs.transformer()
        yield from compare(program, settings, "<= 2.0", with_ltc=True, warm_up=True, rounds=rounds)
        yield from loops(program, settings, settings.rounds)
        return
    # A quick run is of other sizes, and has no criterion.
    size = settings.pick({}, {"layers": 2, "batch": 2, "length": 64})
    program = programs.gpt2_of_transformers(**size)
    rounds = settings.pick(min(settings.rounds, 7), 3)
    criterion = settings.pick("<= 1.05", "")
    yield from compare(program, settings, criterion, with_ltc=False, warm_up=False, rounds=rounds)
