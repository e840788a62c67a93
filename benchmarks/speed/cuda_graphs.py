"""On a GPU: the small transformer's step replayed as a CUDA Graph, beside eager PyTorch and plain replay."""

from __future__ import annotations

from collections.abc import Iterator

import lazyviz

from . import programs
from .figures import Figure, Settings
from .timing import interleaved, lazily, medians, ratio, timed

BACKEND = "cudagraphs"


def measure(settings: Settings) -> Iterator[Figure]:
    program = programs.transformer()
    name = "CUDA Graph replay / eager"
    if not settings.device.startswith("cuda"):
        yield Figure(name, program.name, None, note="needs --device cuda")
        return
    captured = lazily(program.on(settings.device).training_step(), backend=BACKEND)
    replayed = lazily(program.on(settings.device).training_step(), name="eager backend")
    turns = [timed("eager", program.on(settings.device).training_step()), captured.turn, replayed.turn]
    try:
        for turn in turns:
            for _ in range(3):  # the first warms up, the second captures
                turn()
    except ValueError as error:  # no such backend
        yield Figure(name, program.name, None, note=str(error))
        return
    times = interleaved(turns, 2 * settings.rounds + 1)
    report = captured.reports[-1]
    detail = {**medians(times), "ops": captured.ops, "share": report.share}
    note = "; ".join(report.fallbacks)
    yield Figure(name, program.name, ratio(times, "lazyviz run", "eager"), note=note, detail=detail)
    total = ratio(times, "lazyviz total", "eager")
    yield Figure("recording and CUDA Graph replay / eager", program.name, total, detail=detail)
    plain = ratio(times, "eager backend run", "eager")
    yield Figure("replay without CUDA Graph / eager", program.name, plain, detail=detail)
    lazyviz.session.reset()
