"""Import time of lazyviz in addition to PyTorch, and the first block.

Processor time is measured, because it depends little on the load of the machine.  Each round is a separate
process.  The first one is not counted, because it may compile modules to bytecode; those of an installed
package are already compiled.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator

from .figures import Figure, Settings

ONCE = """
import json, sys, time
begin = time.process_time()
import torch
torch_there = time.process_time()
import lazyviz
imported = time.process_time()
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
x, y = torch.randn(32, 64), torch.randint(10, (32,))
made = time.process_time()
with lazyviz.lazy() as graph:
    torch.nn.functional.cross_entropy(net(x), y).backward()
end = time.process_time()
slow = [name for name in ("torch._dynamo", "torch._inductor", "sympy", "IPython") if name in sys.modules]
print(json.dumps([torch_there - begin, imported - torch_there, end - made, slow]))
"""


def measure(settings: Settings) -> Iterator[Figure]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    found = []
    for number in range(settings.rounds + 1):
        command = [sys.executable, "-c", ONCE]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
        if number:
            found.append(json.loads(done.stdout))
    of_torch, own, block = (statistics.median(each[at] for each in found) for at in range(3))
    detail = {"import torch, s": of_torch, "slow imports": found[0][3]}
    yield Figure("start-up", "import", own, "<= 0.25", unit="s", detail=detail)
    yield Figure("start-up", "first block", block, "<= 0.2", unit="s", detail=detail)
