"""Peak memory of evaluating a graph, compared with the same step in eager mode.

Both are measured in the same way: on a CPU by the profiler's events of the allocator, in order of time, on a
GPU by the allocator's own counter; relative to the start of the step, in a process where the same step has
run before.  Inputs that a pending graph must hold, although eager mode would have freed them, are the
category ``held`` of lazyviz's plan; in addition, 16 KiB are allowed for bookkeeping.
"""

from __future__ import annotations

import functools
import gc
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import lazyviz

from .figures import WORST, Figure, Settings
from .measured_programs import Optimizer, Program

sys.path.insert(0, str(Path(__file__).parent.parent))
from models.catalog import Case, by_hand, hugging_face

TITLE = "peak while evaluating with {} / eager's + held"
# Memory that lazyviz needs besides tensors: generator states before and after pending draws (5 kB each), and
# Adam's step counters.
BOOKKEEPING = 16 * 1024
QUICK = ("resnet18", "lstm", "encoder", "gpt2")


def peak_of(run: Callable[[], Any], device: str) -> int:
    """The peak bytes of ``run`` in addition to existing memory; its result is kept alive during it."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        kept = run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del kept
        return peak
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        kept = run()
    found = profiler.profiler
    assert found is not None
    events = [event for event in found.kineto_results.events() if event.name() == "[memory]"]
    level = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    del kept
    return peak


def compare(name: str, make: Callable[[], Callable[[], Any]], device: str, backend: str) -> Figure:
    """The figure of a step; each call of ``make`` builds a new identical one."""
    step = make()
    step()
    eager = peak_of(step, device)
    del step
    step = make()
    held = 0
    reports = []

    def lazily() -> Any:
        nonlocal held
        with lazyviz.lazy(backend=backend) as graph:
            result = step()
        held = graph.plan().by_category.get("held", 0)
        reports.append(graph.evaluate())
        return result, graph

    lazily()
    peak = max(peak_of(lazily, device) for _ in range(2))
    allowed = eager + held + BOOKKEEPING
    lazyviz.session.lazy_graph.reset()
    return Figure(
        TITLE.format(backend),
        name,
        peak / allowed,
        "<= 1",
        detail={
            "peak, bytes": peak,
            "eager's peak, bytes": eager,
            "held, bytes": held,
            "ops": reports[-1].ops_run,
        },
    )


def figure(program: Program, settings: Settings, backend: str, optimizer: Optimizer) -> Figure:
    """The figure of a program's training step."""

    def make() -> Callable[[], Any]:
        return program.on(settings.device).training_step(optimizer)

    return compare(program.name, make, settings.device, backend)


def training(case: Case, device: str) -> Callable[[], Any]:
    """A training step with AdamW of a model of the catalog."""
    torch.manual_seed(0)
    model = case.make().train().to(device)
    batch = moved(case.batch(), device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> Any:
        output, loss = case.run(model, batch)
        assert loss is not None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return output, loss

    return step


def moved(value: Any, device: str) -> Any:
    """Tensors in containers, on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: moved(each, device) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(moved(each, device) for each in value)
    return value


def measure(settings: Settings) -> Iterator[Figure]:
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    cases = by_hand() | hugging_face()
    if settings.quick:
        cases = {name: cases[name] for name in QUICK}
    found: list[Figure] = []
    for name, case in cases.items():
        make = functools.partial(training, case, settings.device)
        try:
            figure = compare(name, make, settings.device, "eager")
        except Exception as error:  # the model cannot run here: its figure says so
            lazyviz.session.lazy_graph.reset()
            text = str(error).strip().splitlines()
            reason = f"{type(error).__name__}: {text[0][:100] if text else ''}"
            figure = Figure(TITLE.format("eager"), name, None, "<= 1", note=reason)
        yield figure
        found.append(figure)
    measured = {each.case: each.value for each in found if each.value is not None}
    if measured:
        worst = max(measured, key=lambda name: measured[name])
        yield Figure(
            TITLE.format("eager"),
            f"{WORST} {len(measured)} models: {worst}",
            measured[worst],
            "<= 1",
            detail={"above": [name for name, value in measured.items() if value > 1]},
        )
