"""Compares the plan's eager timeline with the CPU allocations of eager PyTorch, over many architectures.

Measured: the profiler's allocator events, replayed in time order, for two training steps with AdamW
or SGD, or one forward without gradients.  Compared: the peak of the whole, and of each phase, the
level at its start included.  What was there before (parameters, the batch) counts on both sides.

    python benchmarks/cpu_memory.py [NAME ...] [--threads N] [--memtracker] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import lazyviz
from lazyviz.plan.liveness.lifetimes import lifetimes

sys.path.insert(0, str(Path(__file__).parent))
from models.catalog import Case, by_hand, hugging_face

RESULTS = Path(__file__).parent / "results" / "cpu_memory.json"
Phase = Callable[[str], contextlib.AbstractContextManager[Any]]
MODES = ("AdamW", "SGD", "inference")


def program(case: Case, mode: str) -> tuple[Callable[[Phase], Any], Any]:
    """The code to measure, and the model and optimizer that it uses."""
    torch.manual_seed(0)
    model = case.make()
    batch = case.batch()
    model.train(mode != "inference")
    if mode == "inference":

        def infer(phase: Phase) -> Any:
            with torch.no_grad(), phase("forward"):
                return case.run(model, batch)

        return infer, (model, None)
    optimizer = (
        torch.optim.AdamW(model.parameters())
        if mode == "AdamW"
        else torch.optim.SGD(model.parameters(), 1e-3)
    )

    def train(phase: Phase) -> Any:
        output = loss = None
        for step in range(2):
            with phase(f"forward {step}"):
                output, loss = case.run(model, batch)
            with phase(f"backward {step}"):
                assert loss is not None
                loss.backward()
            with phase(f"optimizer {step}"):
                optimizer.step()
                optimizer.zero_grad()
        return output, loss

    return train, (model, optimizer)


def measure(run: Callable[[Phase], Any]) -> tuple[int, dict[str, int], float]:
    """The peak and the peak of each phase, in bytes in addition to the initial memory, and the seconds."""
    gc.collect()
    start = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = run(lambda name: record_function(f"phase:{name}"))
    seconds = time.perf_counter() - start
    changes, spans = [], {}
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            changes.append((event.start_ns(), event.nbytes()))
        elif event.name().startswith("phase:"):
            spans[event.name()[6:]] = (event.start_ns(), event.end_ns())
    changes.sort(key=lambda change: change[0])
    now = peak = 0
    phases = dict.fromkeys(spans, 0)
    for at, nbytes in changes:
        for name, (start_ns, end_ns) in spans.items():
            if start_ns <= at <= end_ns:  # the level before the first change counts, too
                phases[name] = max(phases[name], now, now + nbytes)
        now += nbytes
        peak = max(peak, now)
    del kept
    return peak, phases, seconds


def project(run: Callable[[Phase], Any]) -> tuple[dict[str, Any], lazyviz.LazyGraph]:
    bounds: dict[str, tuple[int, int]] = {}

    @contextlib.contextmanager
    def phase(name: str) -> Iterator[None]:
        start = len(graph.nodes)
        yield
        bounds[name] = (start, len(graph.nodes))

    start = time.perf_counter()
    with lazyviz.lazy() as graph:
        kept = run(phase)
    recorded = time.perf_counter()
    plan = graph.plan()
    planned = time.perf_counter()
    before = sum(s.storage.nbytes for s in lifetimes(graph.ir) if s.eager_start < 0 < s.eager_stop)
    timeline = [nbytes for _, nbytes in plan.eager_timeline]
    result = {
        "peak": plan.eager_peak_bytes,
        "range": plan.eager_peak_range,
        "phases": {name: max(timeline[a:b], default=0) for name, (a, b) in bounds.items()},
        "before": before,
        "nodes": len(graph.nodes),
        "syncs": len(graph.sync_points),
        "record_seconds": recorded - start,
        "plan_seconds": planned - recorded,
    }
    del kept
    return result, graph


def track(case: Case, mode: str, fake: bool = True) -> tuple[int | None, float, str]:
    """The peak according to PyTorch's own estimator, and seconds; the text of the error if it fails.

    It uses fake tensors, as intended, or real ones if the estimator does not support the model otherwise.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()

    def phase(name: str) -> contextlib.AbstractContextManager[Any]:
        if name.startswith("forward") and name != "forward 0":
            tracker.reset_mod_stats()  # the estimator requires this between iterations
        return contextlib.nullcontext()

    start = time.perf_counter()
    try:
        with FakeTensorMode() if fake else contextlib.nullcontext():
            run, (model, optimizer) = program(case, mode)
            start = time.perf_counter()
            tracker.track_external(*(part for part in (model, optimizer) if part is not None))
            with tracker:
                run(phase)
        peak = sum(snapshot["Total"] for snapshot in tracker.get_tracker_snapshot("peak").values())
        return peak, time.perf_counter() - start, ""
    except Exception as error:
        if fake:
            return track(case, mode, fake=False)
        return None, time.perf_counter() - start, f"{type(error).__name__}: {str(error)[:80]}"


def compare(case: Case, mode: str, with_tracker: bool) -> dict[str, Any]:
    run, parts = program(case, mode)
    torch.manual_seed(1)
    measured, phases, seconds = measure(run)
    del run, parts
    run, parts = program(case, mode)
    torch.manual_seed(1)
    projected, _ = project(run)
    del run, parts
    lazyviz.session.lazy_graph.reset()
    before = projected["before"]
    row = {
        "measured": measured + before,
        "projected": projected["peak"],
        "range": projected["range"],
        "error": projected["peak"] / (measured + before) - 1,
        "phases": {
            name: {"measured": size + before, "projected": projected["phases"][name]}
            for name, size in phases.items()
        },
        "eager_seconds": seconds,
        **{key: projected[key] for key in ("nodes", "syncs", "record_seconds", "plan_seconds")},
    }
    for phase in row["phases"].values():
        phase["error"] = phase["projected"] / phase["measured"] - 1
    if with_tracker:
        peak, took, failed = track(case, mode)
        row["memtracker"] = {
            "peak": peak,
            "error": None if peak is None else peak / row["measured"] - 1,
            "seconds": took,
            "failed": failed,
        }
    return row


def summary(rows: dict[str, Any]) -> dict[str, Any]:
    errors = [abs(row["error"]) for row in rows.values()]
    phases = [abs(p["error"]) for row in rows.values() for p in row["phases"].values()]
    result = {
        "runs": len(errors),
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "median_phase_error": statistics.median(phases),
        "worst_phase_error": max(phases),
        "outside_of_range": [
            name
            for name, row in rows.items()  # a tolerance of a thousandth for tiny tensors that the plan omits
            if not 0.999 * row["range"][0] <= row["measured"] <= 1.001 * row["range"][1]
        ],
        "plan_microseconds_a_node": 1e6
        * sum(row["plan_seconds"] for row in rows.values())
        / sum(row["nodes"] for row in rows.values()),
    }
    tracked = [row["memtracker"] for row in rows.values() if "memtracker" in row]
    if tracked:
        known = [abs(row["error"]) for row in tracked if row["error"] is not None]
        result["memtracker"] = {
            "median_error": statistics.median(known) if known else None,
            "worst_error": max(known, default=None),
            "failed": sum(row["error"] is None for row in tracked),
            "seconds": sum(row["seconds"] for row in tracked),
            "our_seconds": sum(row["record_seconds"] + row["plan_seconds"] for row in rows.values()),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--modes", nargs="*", default=MODES)
    parser.add_argument("--memtracker", action="store_true", help="PyTorch's own estimator beside ours")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    torch.set_num_threads(options.threads)
    cases = by_hand() | hugging_face()
    rows: dict[str, Any] = {}
    for name, case in cases.items():
        if options.names and name not in options.names:
            continue
        for mode in options.modes:
            try:
                row = compare(case, mode, options.memtracker)
            except Exception as error:
                print(f"{name:13} {mode:9} failed: {type(error).__name__}: {str(error)[:90]}", flush=True)
                lazyviz.session.lazy_graph.reset()
                if options.names:
                    raise
                continue
            row["family"] = case.family
            rows[f"{name} {mode}"] = row
            worst = max(row["phases"].items(), key=lambda item: abs(item[1]["error"]))
            line = f"{name:13} {mode:9} {row['measured']:>12,} {100 * row['error']:+8.3f} %"
            line += f"   worst phase {worst[0]:11} {100 * worst[1]['error']:+8.3f} %"
            if "memtracker" in row:
                tracker = row["memtracker"]
                share = tracker["failed"] or f"{100 * tracker['error']:+8.2f} %"
                ours = row["record_seconds"] + row["plan_seconds"]
                line += f"   MemTracker {share} {tracker['seconds']:.1f} s, ours {ours:.1f} s"
            print(line, flush=True)
    if not rows:
        return
    total = summary(rows)
    print(json.dumps(total, indent=1))
    if options.json or not options.names:
        path = options.json or RESULTS
        versions = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
        }
        import transformers

        versions |= {"transformers": transformers.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}
        report = {"versions": versions, "threads": options.threads, "summary": total, "runs": rows}
        path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
