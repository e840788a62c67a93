"""Compares the plan of one rank of N with that rank's process in a real gloo group, on the CPU.

Measured: the profiler's allocator events of eager PyTorch in each of N processes, which build a model, shard
it and train it for two steps.  Planned: the same program recorded in one process, with
``lazyviz.lazy(device="cpu", mesh=(N,), rank=R)``.  Compared: the peak of each rank.

    python benchmarks/several_gpus.py [NAME ...] [--ranks 2,4] [--json FILE]
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.multiprocessing as mp

import lazyviz

sys.path.insert(0, str(Path(__file__).parent))
from models.multi_gpu_programs import PROGRAMS
from speed.peak_memory import peak_of

PATIENCE = 0.03  # seconds
COLLECTIVES = (
    "allreduce", "broadcast", "reduce", "allgather", "_allgather_base", "all_gather_single", "scatter",
    "gather", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "alltoall", "alltoall_base",
)  # fmt: skip
RESULTS = Path(__file__).parent / "results" / "several_gpus.json"


def _allocated(name: str, ranks: int) -> int:
    return peak_of(lambda: PROGRAMS[name].run(torch.device("cpu"), ranks), "cpu")


def _patiently() -> None:
    """Make the program wait until every collective has ended.

    The profiler only sees memory freed by the program's own threads.  A gloo thread that has just ended a
    collective may own the last reference to its tensors, and memory that it frees would count as held.
    """

    def slowed(function: Any, before: bool) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if before:
                time.sleep(PATIENCE)
            result = function(*args, **kwargs)
            if not before:
                result.wait()
                time.sleep(PATIENCE)
            return result

        return call

    group = dist.ProcessGroup
    for name in COLLECTIVES:
        if hasattr(group, name):
            setattr(group, name, slowed(getattr(group, name), before=False))
    collectives.wait_tensor = slowed(collectives.wait_tensor, before=True)


def _rank(rank: int, name: str, ranks: int, runs: int, folder: str) -> None:
    torch.set_num_threads(1)
    _patiently()
    torch.manual_seed(0)
    store = dist.FileStore(f"{folder}/store", ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    try:
        peaks = []
        for _ in range(runs):
            torch.manual_seed(0)
            peaks.append(_allocated(name, ranks))
            gc.collect()
    finally:
        dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps(min(peaks)))


def measured(name: str, ranks: int, runs: int = 3) -> list[int]:
    """The peak of allocated bytes of each rank.

    It is the minimum of several runs, because memory freed by gloo threads may still count as held.  Ranks
    are forked with the modules of this process, which must not have computed anything.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = (name, ranks, runs, folder)
        mp.start_processes(_rank, arguments, nprocs=ranks, start_method="fork")  # type: ignore[attr-defined]
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def planned(name: str, ranks: int, rank: int) -> Any:
    """The plan of one rank."""
    torch.manual_seed(0)
    with lazyviz.lazy(device="cpu", mesh=(ranks,), rank=rank) as graph:
        kept = PROGRAMS[name].run(torch.device("cpu"), ranks)
    plan = graph.plan()
    lazyviz.reset()
    del kept
    return plan


def compared(name: str, ranks: int, peaks: list[int]) -> list[dict[str, Any]]:
    """A row for each rank, with its measured peak and its plan."""
    rows = []
    for rank, peak in enumerate(peaks):
        plan = planned(name, ranks, rank)
        rows.append(
            {
                "program": name,
                "ranks": ranks,
                "rank": rank,
                "measured": peak,
                "planned": plan.eager_peak_bytes,
                "communication": plan.communication_bytes,
                "error": plan.eager_peak_bytes / peak - 1,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="programs; default: all")
    parser.add_argument("--ranks", default="2,4", help="sizes of the group")
    parser.add_argument("--runs", type=int, default=3, help="of which the least counts")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    sizes = [int(size) for size in options.ranks.split(",")]
    groups = [
        (name, ranks)
        for name, program in PROGRAMS.items()
        if not options.names or name in options.names
        for ranks in program.ranks
        if ranks in sizes
    ]
    peaks = [measured(name, ranks, options.runs) for name, ranks in groups]
    rows: list[dict[str, Any]] = []
    for (name, ranks), of_ranks in zip(groups, peaks):
        for row in compared(name, ranks, of_ranks):
            rows.append(row)
            print(
                f"{name:32} {row['rank']} of {ranks}: measured {row['measured']:>12,}, "
                f"planned {row['planned']:>12,}, {row['error']:+.2%}",
                flush=True,
            )
        if options.json is not None:
            _write(options.json, rows)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    machine = {"torch": torch.__version__, "python": platform.python_version()}
    path.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
