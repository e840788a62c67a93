"""Backend conformance programs, run with lazyviz's backends and the documented example."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import lazyviz
from lazyviz.execute import backend_registry
from lazyviz.testing import PROGRAMS, check_backend

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "timing_backend.py"


@pytest.fixture
def example(monkeypatch):
    spec = importlib.util.spec_from_file_location("timing_backend", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "timing_backend", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def timing(example):
    backend = example.TimingBackend()
    lazyviz.register_backend("timing", backend)
    yield backend
    del backend_registry._backends["timing"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_eager_backend_is_exact(program):
    assert check_backend("eager", program, exact=True) == 1.0


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_documented_example_is_exact_and_times_every_operator(timing, program):
    share = check_backend("timing", program, exact=True)
    if program in ("attention with Adam", "dropout and noise"):  # their kernels may draw, which runs between
        assert 0.9 < share < 1
    else:
        assert share == 1.0
    assert timing.seconds and all(seconds > 0 for seconds in timing.seconds.values())


def test_the_example_takes_thirty_lines():
    code = [line for line in EXAMPLE.read_text().splitlines() if line.strip()]
    assert len(code) <= 32


def test_a_backend_of_an_installed_package_is_found_by_its_entry_point(example, monkeypatch):
    point = importlib.metadata.EntryPoint("theirs", "timing_backend:TimingBackend", "lazyviz.backends")
    monkeypatch.setattr(
        backend_registry, "entry_points", lambda group: [point] if group == point.group else []
    )
    backend_registry.offered.cache_clear()
    try:
        assert "theirs" in backend_registry.backend_names()
        x = torch.ones(2)
        with lazyviz.lazy(backend="theirs") as graph:
            y = x + 1
        assert graph.evaluate().backend == "theirs" and y.tolist() == [2, 2]
    finally:
        backend_registry._backends.pop("theirs", None)
        backend_registry.offered.cache_clear()


class Wrong:
    """Gives back what it should, less a little."""

    def __init__(self, spoil):
        self.spoil = spoil

    def compile(self, segment, inputs):
        run = self.example.compile(segment, inputs)
        return lambda *tensors: [self.spoil(each) for each in run(*tensors)]


def assert_found_out(backend, example, program):
    """``program`` fails with ``backend``, which spoils what the documented example computes."""
    backend.example = example.TimingBackend()
    lazyviz.register_backend("wrong", backend)
    try:
        with pytest.raises(AssertionError):
            check_backend("wrong", program)
    finally:
        del backend_registry._backends["wrong"]


@pytest.mark.parametrize(
    ("spoil", "program"),
    [
        (lambda each: each + 1 if each.is_floating_point() else each, "numbers of all kinds"),
        (lambda each: each.clone(), "views and writes in place"),
        (
            lambda each: each.t().contiguous().t() if each.dim() == 2 else each,
            "a multilayer perceptron with AdamW",
        ),
    ],
    ids=["values", "memory", "strides"],
)
def test_a_wrong_backend_is_found_out(example, spoil, program):
    assert_found_out(Wrong(spoil), example, program)


class OneBuffer(Wrong):
    """Hands out the same memory whenever the same operators come again."""

    def __init__(self):
        self.buffers = {}

    def compile(self, segment, inputs):
        run = self.example.compile(segment, inputs)
        inside = {value.storage for value in segment.inputs}
        key = tuple(str(node.op) for node in segment.nodes)

        def again(*tensors):
            results = run(*tensors)
            buffers = self.buffers.setdefault(key, results)
            for at, value in enumerate(segment.outputs):
                if value.storage not in inside and not results[at]._is_view():
                    results[at] = buffers[at].copy_(results[at])
            return results

        return again


class OneForEqual(Wrong):
    """Computes equal expressions once, and hands out one tensor for them."""

    def __init__(self):
        pass

    def compile(self, segment, inputs):
        run = self.example.compile(segment, inputs)
        inside = {value.storage for value in segment.inputs}

        def merged(*tensors):
            results, kept = [], []
            for value, tensor in zip(segment.outputs, run(*tensors)):
                new = value.storage not in inside and not tensor._is_view()
                alike = [each for each in kept if each.dtype == tensor.dtype and torch.equal(each, tensor)]
                results.append(alike[0] if new and alike else tensor)
                kept += [tensor] if new else []
            return results

        return merged


@pytest.mark.parametrize(
    ("backend", "program"),
    [
        (OneBuffer(), "results kept from run to run"),
        (OneForEqual(), "results of equal value"),
        (
            Wrong(lambda each: each.int().long() if each.dtype == torch.int64 else each),
            "whole numbers of 64 bits",
        ),
    ],
    ids=["one buffer", "one for equal", "32 bits"],
)
def test_mistakes_that_compilers_make_are_found_out(example, backend, program):
    assert_found_out(backend, example, program)
