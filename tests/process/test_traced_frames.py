"""Debuggers and other trace functions: what they evaluate deletes no variables of the code that they stop."""

from __future__ import annotations

import sys

import pytest
import torch

import lazyviz
from lazyviz.record.interception import torch_save
from lazyviz.record.provenance.variable_names import variables_of


def numpy(frame, weight):
    weight.detach().numpy()


def variables(frame, weight):
    assert "weight" in variables_of(frame)


def arguments(frame, weight):
    assert torch_save._arguments(frame, False)


@pytest.mark.parametrize("tracing", [True, False])
@pytest.mark.parametrize("event", ["call", "line"])
@pytest.mark.parametrize("look", [numpy, variables, arguments])
def test_a_trace_function_leaves_the_variables_of_the_code_it_stops(look, event, tracing):
    stops = []

    def trace(frame, what, argument):
        if frame.f_code is not stopped.__code__:
            return None
        if what == event and not stops:
            stops.append(what)
            if not tracing:  # as debuggers do while they evaluate an expression
                sys.settrace(None)
            look(frame, frame.f_locals["weight"])
        return trace

    def stopped(weight, parts):
        doubled = weight * 2
        return doubled, weight, parts

    before = sys.gettrace()
    with lazyviz.lazy():
        weight, parts = torch.ones(3, requires_grad=True), [torch.ones(2)]
        sys.settrace(trace)
        try:
            doubled, *same = stopped(weight, parts)
        finally:
            sys.settrace(before)
    assert stops == [event] and same == [weight, parts]
    assert doubled.tolist() == [2, 2, 2]
