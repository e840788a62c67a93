"""Tensors of devices where they have no storage, such as those of PyTorch's own lazy backend."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch
import torch._lazy.ts_backend
import lazyviz

torch._lazy.ts_backend.init()  # for the whole process
with lazyviz.lazy() as graph:
    pending = torch.ones(3) * 2
    made = torch.ones(3, device="lazy")
    sent = pending.to("lazy")
    total = made + sent
    made.add_(2)
    close = torch.isclose(made, total)
    back = total.cpu() + 1
assert made.device.type == "lazy", made.device
assert back.tolist() == [4.0, 4.0, 4.0]
assert made.cpu().tolist() == [3.0, 3.0, 3.0]
assert close.cpu().tolist() == [True, True, True]
print(*sorted({point.cause for point in graph.sync_points}), sep="\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["compiled", "python"])
def test_such_tensors_are_computed_at_named_sync_points(mode):
    env = {**os.environ, "LAZYVIZ_PURE_PYTHON": "1"} if mode == "python" else os.environ
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert "a tensor on 'lazy', where tensors have no storage, cannot be deferred" in done.stdout
