"""``lazyviz doctor --gpu``, on the CPU: its checks, and the report at the end."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from lazyviz.cli import doctor_gpu_check
from lazyviz.record.tape import tape

pytestmark = pytest.mark.slow


@pytest.mark.filterwarnings("ignore")
def test_all_is_well_on_the_cpu_and_the_report_is_a_table():
    out = io.StringIO()
    assert doctor_gpu_check.check("cpu", Console(file=out, width=200))
    report = out.getvalue().partition("Paste this into an issue:")[2]
    rows = [line for line in report.splitlines() if line.startswith("| ")]
    count = len(doctor_gpu_check.operators("cpu"))
    assert f"| operators, bit by bit | yes | {count} of {count} bit-equal to eager PyTorch |" in rows
    assert sum("peak memory of" in row for row in rows) == len(doctor_gpu_check.models())
    assert not any("**no**" in row for row in rows)


def test_other_bits_and_errors_are_found(monkeypatch):
    drawn = iter([0.0, 1.0])

    def fails_in_a_block():
        if tape.recording.graph is not None:
            raise ValueError("in an operator")
        return torch.ones(2)

    def fails_in_eager_mode():
        if tape.recording.graph is None:
            raise ValueError("in an operator")
        return torch.ones(2)

    def is_missing():
        raise NotImplementedError("no kernel on this device")

    calls = {
        "other": lambda: torch.ones(2) + next(drawn),
        "failing": fails_in_a_block,
        "not failing": fails_in_eager_mode,
        "missing": is_missing,
        "same": lambda: torch.ones(2) + 1,
    }
    monkeypatch.setattr(doctor_gpu_check, "operators", lambda device: calls)
    found = doctor_gpu_check.Findings()
    doctor_gpu_check._check_operators("cpu", found)
    assert not found.ok
    assert ("operator other", False, "not bit-equal to eager PyTorch") in found.rows
    assert ("operator failing", False, "ValueError: in an operator") in found.rows
    without = "no error, but in eager mode: ValueError: in an operator"
    assert ("operator not failing", False, without) in found.rows
    neither = "eager PyTorch cannot do it either (NotImplementedError: no kernel on this device)"
    assert ("operator missing", True, neither) in found.rows
    assert found.rows[-1] == ("operators, bit by bit", False, "2 of 5 bit-equal to eager PyTorch")


def test_bits_are_compared_not_values():
    assert not doctor_gpu_check.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert doctor_gpu_check.same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not doctor_gpu_check.same_bits([torch.ones(2)], [torch.ones(2), torch.ones(2)])
    assert not doctor_gpu_check.same_bits(torch.ones(2), torch.ones(2, dtype=torch.float64))
