"""Total time of warm lazy steps (recording, plan look-up, and run), compared with eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import lazyviz

from . import lazy_tensor_core, measured_programs
from .figures import Figure, Settings
from .gpu_step_time import device_seconds
from .measured_programs import Program
from .timing import Turn, interleaved, lazily, medians, ratio, timed

DEVICE_BOUND = 5  # on a GPU, the criterion applies only if device time is this many times recording time

LOOP = 10  # number of consecutive steps


def loops(program: Program, settings: Settings, rounds: int) -> Iterator[Figure]:
    """Time steps without garbage collection in between, like a user's loop; each frees the previous graph."""
    step = program.on(settings.device).training_step()

    def lazily_once() -> None:
        with lazyviz.lazy() as graph:
            step()
        graph.evaluate()

    def repeated(once: Callable[[], Any]) -> Callable[[], None]:
        def loop() -> None:
            for _ in range(LOOP):
                once()

        return loop

    eager = timed("eager loop", repeated(program.on(settings.device).training_step()))
    times = interleaved([eager, timed("lazy loop", repeated(lazily_once))], rounds)
    detail = {**medians(times), "steps": LOOP}
    yield Figure(
        "lazy loop / eager loop", program.name, ratio(times, "lazy loop", "eager loop"), detail=detail
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
            lazy_tensor_core.start(settings.device)
            turns.append(lazy_tensor_core.lazily(program.on("lazy").training_step()))
        except lazy_tensor_core.Unavailable as error:
            missing = str(error)
    for _ in range(2):  # the second round uses what the first one has cached
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
    lazyviz.session.lazy_graph.reset()


def measure(settings: Settings, case: str) -> Iterator[Figure]:
    if case == "small":
        rounds = 2 * settings.rounds + 1
        program = measured_programs.transformer()
        yield from compare(program, settings, "<= 2.0", with_ltc=True, warm_up=True, rounds=rounds)
        yield from loops(program, settings, settings.rounds)
        return
    # A quick run has other sizes, and no criterion.
    size = settings.pick({}, {"layers": 2, "batch": 2, "length": 64})
    program = measured_programs.gpt2_of_transformers(**size)
    rounds = settings.pick(min(settings.rounds, 7), 3)
    criterion = settings.pick("<= 1.05", "")
    yield from compare(program, settings, criterion, with_ltc=False, warm_up=False, rounds=rounds)
