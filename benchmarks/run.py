"""All figures of lazyviz's speed and memory, and those of other tools, in one run: ``make bench``.

    python benchmarks/run.py [PART ...] [--quick] [--device cuda] [--rounds N] [--threads N] [--json FILE]

Each part is measured in a process of its own, under a time limit; what it had found when it failed or
ran out of time is kept, with the reason.  Within a part things that are compared take turns, and a figure is
the median over the rounds of one time by the other.  A machine that does something else at the same time
spoils the figures all the same.

Peers (``pip install 'lazyviz[bench]'``): those that are not installed are figures that say so.

A run writes ``benchmarks/results/speed.json`` and, beside it, the plot ``speed.svg``; the table in
docs/performance.md is made from the JSON by ``benchmarks/write_performance_table.py``.  Of a run of some
parts the JSON's other parts stay. ``--quick``, and a GPU, write to ``out/`` unless told otherwise.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speed.figures import Figure, Settings, say

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "speed.json"
VERSIONS = ("torch", "transformers", "torchview", "torchlens", "mlx", "numpy")


@dataclass(frozen=True)
class Part:
    """A module of ``speed``: its title, and its time limits in seconds for full and quick runs.

    A name with "-" consists of the module (see ``MODULES``) and the case to measure. ``threads`` is the
    default number of PyTorch's threads: 1 if operators are too small for more, 0 for PyTorch's own default.
    """

    title: str
    limit: int
    quick_limit: int
    threads: int = 0


PARTS: Mapping[str, Part] = {
    "chain": Part("recording a chain of small operators", 120, 30, threads=1),
    "first": Part("recording training steps for the first time in a process", 300, 90, threads=1),
    "startup": Part("importing lazyviz, and a first block", 120, 40, threads=1),
    "steps": Part("recording training steps that come again", 300, 60, threads=1),
    "peers": Part("recording beside other tools that make a graph", 120, 40, threads=1),
    "totals-small": Part("lazy totals of a small training step, eager backend", 60, 30, threads=1),
    "totals-gpt2": Part("lazy totals of a training step of GPT-2, eager backend", 240, 60),
    "reads": Part("blocks in which values are read", 420, 120, threads=1),
    "cells": Part("ordinary code of notebooks, beside pending ops and in a block", 180, 90, threads=1),
    "asynchronous": Part("loops of lazyviz.steps", 480, 150, threads=1),
    "fused": Part("a loop of tiny operators, compiled", 90, 60, threads=1),
    "compiled-resnet": Part("a compiled training step of ResNet beside torch.compile", 300, 60),
    "compiled-gpt2": Part("a compiled training step of GPT-2 beside torch.compile", 720, 60),
    "memory": Part("peak memory while evaluating", 300, 40),
    "linear": Part("cost from 1,000 to 1,000,000 operators", 240, 40, threads=1),
    "cuda_graphs": Part("CUDA Graph replay", 120, 60),
}
# Modules whose names differ from those of their parts, which are keys of the results.
MODULES = {
    "cells": "notebook_cells",
    "chain": "recording_overhead_per_op",
    "compiled": "compiled_steps",
    "first": "cold_step_recording",
    "fused": "fused_elementwise_loop",
    "linear": "op_count_scaling",
    "memory": "peak_memory",
    "peers": "other_graph_recorders",
    "reads": "sync_point_cost",
    "startup": "import_time",
    "steps": "warm_step_recording",
    "totals": "warm_step_time",
}


def measure_here(name: str, into: Path, settings: Settings) -> int:
    """Measure a part in this process, and write a line of JSON to ``into`` for each figure at once."""
    from speed.measured_programs import prepare

    prepare(settings.device, settings.threads or PARTS[name].threads)
    stem, _, case = name.partition("-")
    module = importlib.import_module(f"speed.{MODULES.get(stem, stem)}")
    with into.open("w", encoding="utf-8") as file:
        file.write(json.dumps(process()) + "\n")
        for figure in module.measure(settings, *([case] if case else [])):
            print(figure, flush=True)
            file.write(json.dumps(figure.to_json()) + "\n")
            file.flush()
    return 0


def process() -> dict[str, Any]:
    """Facts that are known only in a process that imports lazyviz and PyTorch."""
    import torch

    import lazyviz

    return {
        "threads": torch.get_num_threads(),
        "recorder": "compiled" if lazyviz.metrics()["compiled recorder"] else "in Python",
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def measure(name: str, settings: Settings, limit: float) -> dict[str, Any]:
    """Measure a part in a separate process; returns figures, seconds, and the reason for an early end."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        into, log = Path(folder) / "figures", Path(folder) / "errors"
        command = [sys.executable, __file__, name, "--measure-here", str(into)]
        command += ["--device", settings.device, "--rounds", str(settings.rounds)]
        command += ["--threads", str(settings.threads), *(["--quick"] if settings.quick else [])]
        failed = ""
        with log.open("w", encoding="utf-8") as errors:
            try:
                done = subprocess.run(command, stderr=errors, timeout=limit)
                if done.returncode:
                    failed = f"ended with status {done.returncode}"
            except subprocess.TimeoutExpired:
                failed = f"stopped after its limit of {limit:.0f} s"
        if failed:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            failed += f": {lines[-1].strip()}" if lines else ""
            say("\n".join(f"     {line}" for line in lines[-15:]))
        lines = into.read_text(encoding="utf-8").splitlines() if into.exists() else []
    return {
        "title": PARTS[name].title,
        "process": json.loads(lines[0]) if lines else {},
        "figures": [json.loads(line) for line in lines[1:]],
        "seconds": round(time.monotonic() - begin, 1),
        "failed": failed,
        "settings": vars(settings),
        "machine": machine(),
    }


def machine() -> dict[str, Any]:
    """The machine on which the figures were measured."""
    versions = {"python": platform.python_version()}
    for name in VERSIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        **versions,
    }


def cpu_name() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def read(path: Path) -> dict[str, Any]:
    """The parts measured earlier, in order; none if there is no file."""
    if not path.exists():
        return {}
    return json.loads(path.read_text(encoding="utf-8"))["parts"]


def write(path: Path, parts: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = {name: parts[name] for name in PARTS if name in parts}
    path.write_text(json.dumps({"parts": ordered}, indent=1) + "\n", encoding="utf-8")


def where(options: argparse.Namespace) -> Path:
    """The file for the results."""
    if options.json:
        return options.json
    if options.quick or options.device != "cpu":
        return (
            ROOT / "out" / f"speed-{'quick-' if options.quick else ''}{options.device.partition(':')[0]}.json"
        )
    return RESULT


def main(args: list[str]) -> int:
    """Measure, print, write; the exit status is 1 if a part failed to run, regardless of criteria."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller cases: three minutes")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda")
    parser.add_argument("--rounds", type=int, help="default 9, quick 3")
    parser.add_argument("--threads", type=int, default=0, help="PyTorch's; default: 1 for small operators")
    parser.add_argument("--limit", type=float, help="seconds for a part, instead of its own limit")
    parser.add_argument("--json", type=Path, help="the file to write")
    parser.add_argument("--measure-here", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(args)
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    rounds = options.rounds or (3 if options.quick else 9)
    settings = Settings(options.device, options.quick, rounds, options.threads)
    if options.measure_here:
        return measure_here(options.parts[0], options.measure_here, settings)
    path = where(options)
    parts = read(path)
    begin = time.monotonic()
    chosen = options.parts or [name for name in PARTS if name != "cuda_graphs" or options.device != "cpu"]
    for name in chosen:
        part = PARTS[name]
        say(f"-- {name}: {part.title}")
        limit = options.limit or (part.quick_limit if options.quick else part.limit)
        parts[name] = measure(name, settings, limit)
        if parts[name]["failed"]:
            print(f"  {name} {parts[name]['failed']}", flush=True)
        write(path, parts)
    figures = [Figure.from_json(data) for name in chosen for data in parts[name]["figures"]]
    judged = [figure.met for figure in figures if figure.criterion]
    failed = [name for name in chosen if parts[name]["failed"]]
    draw(path)
    print(
        f"{path.name}: {judged.count(True)} of {len(judged)} criteria met, {judged.count(False)} not met, "
        f"{judged.count(None)} not measured; {time.monotonic() - begin:.0f} s"
        + (f"; ended early: {', '.join(failed)}" if failed else "")
    )
    return 1 if failed else 0


def draw(path: Path) -> None:
    """Save the plot next to the JSON, if matplotlib is installed."""
    try:
        from speed.plot_figures import save
    except ImportError as error:
        say(f"   no plot: {error}")
        return
    save(read(path), path.with_suffix(".svg"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
