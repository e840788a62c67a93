"""TorchScript's compiler while functions of PyTorch are replaced."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lazyviz.record import native_recorder

FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "as_tensor")
# TorchScript's own torch.tensor writes numbers through the address of a new tensor.
WRITES_NUMBERS = "torch.tensor([1.0] * n)"
PROGRAM = """
import warnings
warnings.simplefilter("ignore")
import torch, lazyviz

def make(n: int) -> torch.Tensor:
    return torch.zeros(n) + {numbers} + torch.meshgrid(torch.arange(n), torch.arange(n))[0][0]

with lazyviz.lazy({options}) as graph:
    pending = torch.ones(3) + 1
    import torch.distributed.optim  # which compiles its optimizers
    inside = torch.jit.script(make)
    assert inside(2).tolist() == [1.0, 1.0]
assert torch.jit.script(make)(2).tolist() == [1.0, 1.0]
lazyviz.reset()
def again(n: int) -> torch.Tensor:
    return torch.zeros(n) + {numbers}
assert torch.jit.script(again)(2).tolist() == [1.0, 1.0]
found = [torch.jit._builtins._find_builtin(getattr(torch, name)) for name in {factories}]
assert all(found), found
"""


def run(path, options: str, numbers: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the compiler's table of operators is made once."""
    script = path / "script.py"  # the compiler reads it
    script.write_text(PROGRAM.format(options=options, numbers=numbers, factories=FACTORIES))
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("options", ["", "mesh=(2,)", "device='A100-40GB'"])
def test_scripts_are_compiled_in_a_block_and_after_it(options, tmp_path):
    numbers = WRITES_NUMBERS if native_recorder.watches_access() else "torch.ones(n)"
    done = run(tmp_path, options, numbers)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif("native_recorder.watches_access()", reason="the compiled modules intercept it")
def test_numbers_that_a_script_writes_are_an_error_without_the_compiled_modules(tmp_path):
    done = run(tmp_path, "", WRITES_NUMBERS)
    assert done.returncode == 1 and "Cannot access data pointer" in done.stderr
