"""TorchScript's compiler while functions of PyTorch are replaced, and its interpreter in a lazy block."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import warnings

import pytest
import torch

import lazyviz
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
    script = path / "script_as_main.py"  # the compiler reads it
    script.write_text(PROGRAM.format(options=options, numbers=numbers, factories=FACTORIES))
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("options", ["", "mesh=(2,)", "device='A100-40GB'"])
@pytest.mark.slow
def test_scripts_are_compiled_in_a_block_and_after_it(options, tmp_path):
    numbers = WRITES_NUMBERS if native_recorder.watches_access() else "torch.ones(n)"
    done = run(tmp_path, options, numbers)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif("native_recorder.watches_access()", reason="the compiled modules intercept it")
def test_numbers_that_a_script_writes_are_an_error_without_the_compiled_modules(tmp_path):
    done = run(tmp_path, "", WRITES_NUMBERS)
    assert done.returncode == 1 and "Cannot access data pointer" in done.stderr


def script(program):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(program)


@script
def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left @ right


@script
def row(matrix: torch.Tensor, number: int) -> torch.Tensor:
    return matrix[number]


@script
def factor(matrix: torch.Tensor) -> torch.Tensor:
    if bool(torch.linalg.cholesky(matrix).sum() > 0):
        return matrix
    return matrix * 2


@script
def refuse(matrix: torch.Tensor) -> torch.Tensor:
    if matrix.dim() == 2:
        raise ValueError("a matrix")
    return matrix


LINEAR = script(torch.nn.Linear(3, 2).eval())
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    FROZEN = torch.jit.freeze(LINEAR)
CALLS = {
    "shapes": lambda: product(torch.ones(2, 3), torch.ones(2, 3)),
    "an index": lambda: row(torch.ones(2, 3), 5),
    "data": lambda: factor(torch.tensor([[1.0, 2.0], [2.0, 1.0]])),
    "its own": lambda: refuse(torch.ones(2, 2)),
    "a module": lambda: LINEAR(torch.ones(2, 2)),
    "a frozen module": lambda: FROZEN(torch.ones(2)),
    "a part": lambda: torch.jit.wait(torch.jit.fork(LINEAR, torch.ones(1))),
}


def error_of(call) -> Exception:
    with warnings.catch_warnings(), pytest.raises(Exception) as caught:
        warnings.simplefilter("ignore", DeprecationWarning)
        call()
    return caught.value


@pytest.mark.parametrize("name", CALLS)
def test_errors_of_the_interpreter_say_what_is_wrong(name):
    expected = error_of(CALLS[name])
    with lazyviz.lazy():
        found = error_of(CALLS[name])
        again = error_of(CALLS[name])
    lazyviz.reset()
    for error in (found, again):
        assert type(error) is type(expected)
        # The place may be another: data is noticed where the result is read, and Python frames may be in it.
        assert str(expected).rpartition("RuntimeError: ")[2].strip() in str(error)
        assert "<--- HERE" in str(error)


def test_a_forbidden_sync_point_in_compiled_code_keeps_its_class():
    matrix = torch.eye(2)
    with lazyviz.lazy():
        pending = torch.rand(2, 2) + matrix
        with lazyviz.forbid_sync(), pytest.raises(lazyviz.SyncError, match="forbid"):
            factor(pending)
        assert factor(torch.eye(2) * 2).tolist() == [[2, 0], [0, 2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_that_a_traced_program_has_for_tensors(dtype):
    """While TorchScript optimizes it, it compares them by ``equal``, which takes no numbers."""

    def draw(degrees):
        return torch.distributions.Chi2(degrees).rsample() * 0.5

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        degrees = torch.tensor([0.5, 2.5])
        results = []
        for block in (contextlib.nullcontext, lazyviz.lazy):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # also those of the tracer
                traced = torch.jit.trace(draw, (degrees,), check_trace=False)
            with block():
                torch.manual_seed(0)
                results.append([traced(degrees) for _ in range(3)])
    finally:
        torch.set_default_dtype(before)
    assert all(map(torch.equal, *results))
