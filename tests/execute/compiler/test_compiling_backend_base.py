"""Common parts of compiling backends, tested with a backend whose code is the recorded program."""

from __future__ import annotations

import pytest
import torch

import lazyviz
from lazyviz.execute import backend_registry
from lazyviz.execute.backend_protocol import Refused
from lazyviz.execute.compiler.compiling_backend_base import SegmentCompiler
from lazyviz.execute.compiler.fx_lowering import lower
from lazyviz.torch_internals.dynamo import Compiled
from lazyviz.torch_internals.private_api import FakeTensorMode


class Lowered(SegmentCompiler):
    def _code(self, task):
        holds = None if task.sizes is None else lambda size: True
        code = lower(task.segment.nodes, task.segment.inputs, task.kept, task.groups, task.sizes)
        return Compiled(code, holds)


@pytest.fixture
def lowered():
    backend = Lowered()
    lazyviz.register_backend("lowered", backend)
    yield backend
    del backend_registry._backends["lowered"]


def test_numbers_that_are_part_of_a_program_are_heard_when_its_structure_comes_again(lowered):
    x = torch.tensor([1.23456, 2.34567])

    def run(decimals, factor):
        with lazyviz.lazy(backend="lowered") as graph:
            y = x
            for _ in range(24):  # so many that a repeat is found without a look at each
                y = y + 0.125
            y, z = y.round(decimals=decimals), y * factor
        hit = graph.evaluate().cache_hit
        torch.testing.assert_close(y, (x + 3).round(decimals=decimals))
        torch.testing.assert_close(z, (x + 3) * factor)
        return hit

    assert [run(*given) for given in ((1, 2j), (1, 2j), (2, 2j), (2, 3j))] == [False, True, False, False]


def test_another_size_of_data_made_in_the_block_and_of_its_halves_needs_no_new_code(lowered):
    def run(rows):
        def program():
            x = torch.arange(rows) * 2.0
            return x[: rows // 2] * 3, x[rows // 2 :].cumsum(0), x.roll(rows // 2)

        with lazyviz.lazy(backend="lowered") as graph:
            results = program()
        hit = graph.evaluate().cache_hit
        for mine, expected in zip(results, program()):
            assert torch.equal(mine, expected) and mine.stride() == expected.stride()
        return hit

    # The first two tell what the halves are.
    assert [run(rows) for rows in (6, 9, 12, 7, 30)] == [False, False, True, True, True]


def test_code_is_for_the_settings_that_it_was_made_under(lowered):
    x = torch.ones(3)

    def run():
        with lazyviz.lazy(backend="lowered") as graph:
            y = x
            for _ in range(6):
                y = y * 2 + 1
        report = graph.evaluate()
        return report.cache_hit, report.cache_miss_reason

    assert [run()[0], run()[0]] == [False, True]
    torch.use_deterministic_algorithms(True)
    try:
        hit, reason = run()
        assert not hit and "deterministic algorithms" in reason
        assert run()[0]
    finally:
        torch.use_deterministic_algorithms(False)
    assert run()[0]


def test_shape_rules_that_fail_in_a_compiler_are_in_the_report_and_log_nothing(lowered, monkeypatch, caplog):
    def fails(task):
        try:
            with FakeTensorMode():
                torch.ones(2) @ torch.ones(3)
        except RuntimeError as error:
            raise Refused(str(error)) from error

    monkeypatch.setattr(lowered, "_code", fails)
    with lazyviz.lazy(backend="lowered") as graph:
        y = torch.ones(2) + 1
    report = graph.evaluate()
    assert y.tolist() == [2, 2]
    assert report.share == 0 and "inconsistent tensor size" in report.fallbacks[0]
    assert not caplog.records
