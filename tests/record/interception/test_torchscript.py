"""TorchScript's compiler while functions of PyTorch are replaced."""

from __future__ import annotations

import subprocess
import sys

import pytest

FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "as_tensor")
PROGRAM = """
import warnings
warnings.simplefilter("ignore")
import torch, lazyviz

def make(n: int) -> torch.Tensor:
    return torch.zeros(n) + torch.tensor([1.0] * n) + torch.meshgrid(torch.arange(n), torch.arange(n))[0][0]

with lazyviz.lazy({options}) as graph:
    pending = torch.ones(3) + 1
    import torch.distributed.optim  # which compiles its optimizers
    inside = torch.jit.script(make)
    assert inside(2).tolist() == [1.0, 1.0]
assert torch.jit.script(make)(2).tolist() == [1.0, 1.0]
lazyviz.reset()
def again(n: int) -> torch.Tensor:
    return torch.zeros(n) + torch.tensor([1.0] * n)
assert torch.jit.script(again)(2).tolist() == [1.0, 1.0]
found = [torch.jit._builtins._find_builtin(getattr(torch, name)) for name in {factories}]
assert all(found), found
"""


@pytest.mark.parametrize("options", ["", "mesh=(2,)", "device='A100-40GB'"])
def test_scripts_are_compiled_in_a_block_and_after_it(options, tmp_path):
    """In a process of its own: the compiler's table of operators is made once."""
    script = tmp_path / "script.py"  # the compiler reads it
    script.write_text(PROGRAM.format(options=options, factories=FACTORIES))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
