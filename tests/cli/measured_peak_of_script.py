"""Peak of PyTorch's CPU allocator during the first optimizer steps of a script.

    python measured_peak_of_script.py STEPS SCRIPT [ARGUMENTS]

By PyTorch's profiler, and without lazyviz; the last line printed is the number of bytes.  Steps are those of
the optimizer that steps first.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile


def main() -> None:
    steps, script = int(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    seen: list[Any] = []

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not seen or optimizer is seen[0]:
            seen.append(optimizer)
        if len(seen) == steps:
            raise SystemExit(0)

    register_optimizer_step_post_hook(stepped)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as error:
            # Its traceback keeps what the script has: freeing DistributedDataParallel and its process group
            # does not always return.
            seen.append(error)
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    print(peak, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
