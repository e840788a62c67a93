"""The first recording of a training step in a new process, like the first cell of a notebook.

Each is measured several times, in separate processes: model, batch, and optimizer exist, but no shape is
cached, and no module imported or patch installed that a block needs.  The whole ``with`` block is timed.  The
op count is that of PyTorch's dispatches in the step; the graph has fewer nodes, because unread ``detach``
results are dropped.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .figures import Figure, Settings, say

CASES = ("mlp", "gpt2", "resnet")

# Code for the new process; its arguments are the program, the device, and the number of threads.
ONCE = """
import gc, json, sys, time
sys.path.insert(0, sys.argv[4])
from speed import measured_programs
import lazyviz

measured_programs.prepare(sys.argv[2], int(sys.argv[3]))
program = getattr(measured_programs, sys.argv[1])()
step = program.on(sys.argv[2]).training_step()
gc.collect()
modules = set(sys.modules)
begin, cpu = time.perf_counter(), time.thread_time()
with lazyviz.lazy() as graph:
    opened = time.perf_counter()
    step()
    done = time.perf_counter()
end, cpu_end = time.perf_counter(), time.thread_time()

from torch.utils._python_dispatch import TorchDispatchMode

class Dispatched(TorchDispatchMode):
    ops = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.ops += op.namespace == "aten"
        return op(*args, **(kwargs or {}))

again = getattr(measured_programs, sys.argv[1])().on(sys.argv[2]).training_step()
with Dispatched() as dispatched:
    again()
print(json.dumps({
    "name": program.name,
    "ops": dispatched.ops,
    "nodes": len(graph.nodes),
    "record": end - begin,
    "processor": cpu_end - cpu,
    "open": opened - begin,
    "close": end - done,
    "misses": lazyviz.metrics()["shape cache misses"],
    "imported": sorted(set(sys.modules) - modules),
}))
"""


def measure(settings: Settings) -> Iterator[Figure]:
    folder = str(Path(__file__).parent.parent)
    for case in CASES:
        command = [sys.executable, "-c", ONCE, case, settings.device, str(settings.threads or 1), folder]
        found = []
        for _ in range(settings.rounds):
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
        first = found[0]
        say(f"     {first['name']}")
        detail = {
            "ops": first["ops"],
            "nodes": first["nodes"],
            "shape cache misses": first["misses"],
            "imported": len(first["imported"]),
            **{
                f"{name}, s": statistics.median(each[name] for each in found)
                for name in ("record", "processor", "open", "close")
            },
        }
        microseconds = 1e6 * detail["record, s"] / first["ops"]
        yield Figure("first record", first["name"], microseconds, "<= 60", unit="us an op", detail=detail)
