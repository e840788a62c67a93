"""Recording repeated training steps, compared with Lazy Tensor Core, ``make_fx``, and eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

import lazyviz
from lazyviz.record import native_recorder

from . import lazy_tensor_core, measured_programs
from .figures import Figure, Settings, say
from .measured_programs import Program
from .timing import in_python, interleaved, lazily, medians, ratio, timed, warm

TRACINGS = 3  # rounds of make_fx, which takes seconds


def tracer(program: Program, device: str) -> Callable[[], torch.fx.GraphModule]:
    """The training step under ``make_fx`` with fake tensors.

    It requires a function of tensors, so parameters are arguments, and SGD is written out.
    """
    model = program.on(device).model
    names = [name for name, _ in model.named_parameters()]
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def step(state: dict[str, Any], inputs: tuple[Any, ...], target: Any) -> Any:
        loss = program.loss(torch.func.functional_call(model, state, inputs), target)
        gradients = torch.autograd.grad(loss, [state[name] for name in names])
        with torch.no_grad():
            for name, gradient in zip(names, gradients):
                state[name].add_(gradient, alpha=-measured_programs.LEARNING_RATE)
        return loss

    inputs = tuple(tensor.to(device) for tensor in program.inputs)
    target = program.target.to(device)
    return lambda: make_fx(step, tracing_mode="fake")(state, inputs, target)


def compare(program: Program, settings: Settings, with_ltc: bool) -> Iterator[Figure]:
    """The figures of one training step."""
    step = program.on(settings.device).training_step()
    eager = program.on(settings.device).training_step()
    ours = lazily(step)
    with lazyviz.lazy() as graph:
        step()
    ops = len(graph.nodes)
    graph.evaluate()
    del graph
    turns = [timed("eager", eager), ours.turn]
    if native_recorder.active:
        plain = lazily(program.on(settings.device).training_step(), name="in Python")
        turns.append(in_python(plain.turn))
    missing = ""
    if with_ltc:
        try:
            turns.append(lazy_tensor_core.lazily(program.on("lazy").training_step()))
        except lazy_tensor_core.Unavailable as error:
            missing = str(error)
    times = interleaved(turns, settings.rounds)
    detail = {**medians(times), "ops": ops, "threads": torch.get_num_threads()}
    if with_ltc:
        value = None if missing else ratio(times, "lazyviz record", "LTC record")
        yield Figure("warm record / LTC record", program.name, value, "<= 0.8", note=missing, detail=detail)
        if native_recorder.active and not missing:
            value = ratio(times, "in Python record", "LTC record")
            yield Figure("warm record in Python / LTC record", program.name, value, detail=detail)
    yield Figure("warm record / eager", program.name, ratio(times, "lazyviz record", "eager"), detail=detail)
    trace = tracer(program, settings.device)
    trace()  # first imports and caches are not measured
    turns = [warm(ours.turn), timed("make_fx", trace)]
    tracing = interleaved(turns, settings.pick(TRACINGS, 1), warm_up=False)
    yield Figure(
        "make_fx / warm record",
        program.name,
        ratio(tracing, "make_fx", "lazyviz record"),
        ">= 25",
        detail={**medians(tracing), "ops": ops},
    )
    microseconds = 1e6 * detail["lazyviz record, s"] / ops
    yield Figure("warm record", program.name, microseconds, unit="us an op", detail=detail)
    lazyviz.session.lazy_graph.reset()


def measure(settings: Settings) -> Iterator[Figure]:
    missing = ""
    try:
        lazy_tensor_core.start(settings.device)
    except lazy_tensor_core.Unavailable as error:
        missing = str(error)
    for program in measured_programs.small():
        say(f"     {program.name}")
        yield from compare(program, settings, not missing)
        if missing:
            yield Figure("warm record / LTC record", program.name, None, "<= 0.8", note=missing)
    if not settings.quick:
        library = measured_programs.gpt2_of_transformers(width=64)
        say(f"     {library.name}")
        yield from compare(library, settings, with_ltc=False)
