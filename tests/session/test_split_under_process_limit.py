"""A batch whose eager step exceeds a memory limit runs in pieces; the eager run fails."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import resource
import sys

import psutil
import torch
import torch.nn.functional as F
from torch import nn

import lazyviz

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.Tanh())])
x, y = torch.randn(16000, 256), torch.randint(0, 256, (16000,))


def step(x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss


expected = step(x, y).item(), [each.grad for each in model.parameters()]
model.zero_grad()
with lazyviz.lazy(batch=[x, y]) as graph:
    step(x, y)
need = graph.plan().eager_peak_bytes - x.nbytes
del graph
import gc; gc.collect()
model.zero_grad()
torch.testing.assert_close(y, y)  # it imports what it compares with: not under the limit
used = psutil.Process().memory_info().data
resource.setrlimit(resource.RLIMIT_DATA, (used + need // 4, resource.RLIM_INFINITY))
if sys.argv[1] == "eager":
    step(x, y)
    print("done")
else:
    with lazyviz.lazy(batch="x,y", split="auto") as graph:
        loss = step(x, y)
    report = graph.evaluate()
    torch.testing.assert_close(loss.item(), expected[0])
    for each, gradient in zip(model.parameters(), expected[1]):
        torch.testing.assert_close(each.grad, gradient, rtol=1e-4, atol=1e-8)
    print("pieces", report.pieces)
"""


def run(how):
    # glibc keeps what is freed in small pieces otherwise, for eager and for us.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=300, env=environment
    )


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts memory mappings on Linux alone")
def test_what_needs_four_times_the_limit_runs_in_pieces_and_eager_dies():
    eager = run("eager")
    assert eager.returncode != 0
    assert "can't allocate memory" in eager.stderr
    ours = run("split")
    assert ours.returncode == 0, ours.stderr[-2000:]
    assert int(ours.stdout.split()[1]) > 4
