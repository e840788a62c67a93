"""Recording a chain of small operators: cost per operator, compared with eager and other recorders."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lazyviz
from lazyviz.record import native_recorder

from . import lazy_tensor_core
from .figures import Figure, Settings
from .timing import Turn, in_python, interleaved, lazily, medians, ratio, timed

OPS = 1000


def chain(x: Any) -> Any:
    """A chain of products and sums, for any type that supports them."""
    for _ in range(OPS // 2):
        x = x * 1.5
        x = x + 1.0
    return x


class Nothing(TorchDispatchMode):
    """A dispatch mode that does nothing: the minimum overhead of any recorder in Python."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def through_nothing(x: torch.Tensor) -> torch.Tensor:
    with Nothing():
        return chain(x)


def mlx_record() -> Turn:
    """MLX, which always records lazily; its evaluation is not timed."""
    import mlx.core as mx

    x = mx.ones((4,))
    mx.eval(x)
    inner = timed("MLX record", lambda: chain(x))

    def turn() -> dict[str, float]:
        times = inner()
        mx.eval(chain(x))  # the state after each turn: nothing pending, caches filled
        return dict(times)

    return turn


def measure(settings: Settings) -> Iterator[Figure]:
    rounds = settings.pick(2 * settings.rounds + 3, settings.rounds)
    x = torch.ones(4, device=settings.device)
    ours = lazily(lambda: chain(x))
    turns: list[Turn] = [
        timed("eager", lambda: chain(x)),
        timed("no-op mode", lambda: through_nothing(x)),
        ours.turn,
    ]
    if native_recorder.active:
        turns.append(in_python(lazily(lambda: chain(x), name="in Python").turn))
    missing: dict[str, str] = {}

    def peer(name: str, make: Callable[[], Turn]) -> None:
        try:
            turns.append(make())
        except (lazy_tensor_core.Unavailable, ImportError) as error:
            missing[name] = str(error)

    def of_ltc() -> Turn:
        lazy_tensor_core.start(settings.device)
        lazy = x.to("lazy")
        return lazy_tensor_core.lazily(lambda: chain(lazy))

    peer("LTC record", of_ltc)
    if importlib.util.find_spec("mlx") is None:
        missing["MLX record"] = "mlx is not installed"
    else:
        peer("MLX record", mlx_record)
    times = interleaved(turns, rounds)
    detail = {**medians(times), "ops": OPS, "threads": torch.get_num_threads()}
    criteria = {"LTC record": "<= 1.5"}
    for name in ("LTC record", "eager", "no-op mode", "MLX record"):
        criterion = criteria.get(name, "")
        title = f"record / {name}"
        if name in missing:
            yield Figure(title, f"chain of {OPS} ops", None, criterion, note=missing[name])
        else:
            value = ratio(times, "lazyviz record", name)
            yield Figure(title, f"chain of {OPS} ops", value, criterion, detail=detail)
    if native_recorder.active and "LTC record" not in missing:
        value = ratio(times, "in Python record", "LTC record")
        yield Figure("record in Python / LTC record", f"chain of {OPS} ops", value, detail=detail)
    lazyviz.session.lazy_graph.reset()
