"""A loop of tiny elementwise operators, where compilation helps most: fused, compared with eager."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import lazyviz

from .figures import Figure, Settings
from .timing import interleaved, lazily, medians, ratio, timed

TIMES = 100  # of add, mul and relu
SIZE = 100


def measure(settings: Settings) -> Iterator[Figure]:
    x, y = (torch.randn(SIZE, SIZE, device=settings.device) for _ in range(2))

    def loop(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(TIMES):
            x = x + y
            x = x * 0.5
            x = torch.relu(x)
        return x

    nothing = torch.empty(0, device=settings.device)
    compiled = torch.compile(loop)
    fused = lazily(lambda: loop(x, y), backend="inductor")
    replayed = lazily(lambda: loop(x, y), name="eager backend")
    turns = [
        timed("eager", lambda: loop(x, y)),
        fused.turn,
        replayed.turn,
        timed("torch.compile", lambda: compiled(x, y)),
        timed("without elements", lambda: loop(nothing, nothing)),
    ]
    for turn in turns:
        for _ in range(2):
            turn()
    times = interleaved(turns, settings.pick(3 * settings.rounds, settings.rounds))
    report = fused.reports[-1]
    detail = {**medians(times), "ops": fused.ops, "share": report.share, "threads": torch.get_num_threads()}
    case = f"{3 * TIMES} ops on {SIZE} x {SIZE}"
    total = ratio(times, "lazyviz total", "eager")
    note = "; ".join(report.fallbacks)
    yield Figure("inductor, lazy total / eager", case, total, "< 0.5", note=note, detail=detail)
    yield Figure("inductor, run / eager", case, ratio(times, "lazyviz run", "eager"), detail=detail)
    yield Figure(
        "eager backend, lazy total / eager", case, ratio(times, "eager backend total", "eager"), detail=detail
    )
    yield Figure("torch.compile / eager", case, ratio(times, "torch.compile", "eager"), detail=detail)
    # The cost of calling an operator that computes nothing, which every per-op mechanism pays.
    calls = ratio(times, "without elements", "eager")
    yield Figure("eager on tensors without elements / eager", case, calls, detail=detail)
    lazyviz.session.lazy_graph.reset()
