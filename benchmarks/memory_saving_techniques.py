"""Techniques that save memory in training: plans compared with CPU allocations of eager PyTorch.

Each program of ``models/memory_saving_programs.py`` is measured by the profiler's allocator events, planned
for the CPU (where what it compiles is not known) and planned for an absent GPU.  A GPU's figure
is beside the CPU's: its kernels take other scratch memory, and its ``foreach`` optimizers other temporaries.

    python benchmarks/memory_saving_techniques.py [NAME ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import platform
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

import lazyviz

sys.path.insert(0, str(Path(__file__).parent))
from models.memory_saving_programs import NOT_DEFERRED, PROGRAMS, names
from speed.peak_memory import peak_of

RESULTS = Path(__file__).parent / "results" / "memory_saving_techniques.json"
CARD = "H100-80GB"


def measured(name: str) -> int:
    """The peak of bytes that eager PyTorch allocates on the CPU."""
    torch.manual_seed(0)
    gc.collect()
    return peak_of(lambda: PROGRAMS[name]("cpu"), "cpu")


def planned(name: str, device: str) -> Any:
    """The plan of the program on ``device``: ``"cpu"`` or a GPU."""
    torch.manual_seed(0)
    lazyviz.reset()
    with lazyviz.lazy(device=None if device == "cpu" else device) as graph:
        kept = PROGRAMS[name]("cpu" if device == "cpu" else "cuda")
    plan = graph.plan()
    del kept
    lazyviz.reset()
    return plan


def compared(name: str) -> dict[str, Any]:
    peak = measured(name)
    row: dict[str, Any] = {"program": name, "measured": peak}
    if name not in NOT_DEFERRED:
        row["planned"] = planned(name, "cpu").eager_peak_bytes
        row["error"] = row["planned"] / peak - 1
    row["card"] = planned(name, CARD).peak_bytes
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="programs; default: all whose libraries are installed")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found = options.names or list(names(lambda library: importlib.util.find_spec(library) is not None))
    rows = []
    print(f"{'':32} {'measured':>12} {'planned':>12} {'':>8} {'on ' + CARD:>12}")
    for name in found:
        row = compared(name)
        rows.append(row)
        error = f"{row['error']:+.2%}" if "error" in row else ""
        print(
            f"{name:32} {row['measured']:12,} {row.get('planned', 0):12,} {error:>8} {row['card']:12,}",
            flush=True,
        )
    if options.json or not options.names:
        environment = {"torch": torch.__version__, "python": platform.python_version(), "card": CARD}
        text = json.dumps({"environment": environment, "rows": rows}, indent=1)
        (options.json or RESULTS).write_text(text + "\n")


if __name__ == "__main__":
    main()
