"""Warnings of PyTorch's kernels have the user's file and line: of the evaluation, or of the read."""

from __future__ import annotations

import inspect
import traceback
import warnings

import numpy as np
import pytest
import torch

import lazyviz


@pytest.fixture
def seen():
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
    torch.set_warn_always(always)


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    return first + next(at for at, line in enumerate(lines) if text in line)


def places(caught):
    return [(warning.filename, warning.lineno) for warning in caught]


def read():
    with lazyviz.lazy():
        y = torch.rand(1).std()
    y.item()  # here


def read_inside():
    with lazyviz.lazy():
        torch.rand(1).std().item()  # here


def graph_evaluated():
    with lazyviz.lazy() as graph:
        torch.rand(1).std()
    graph.evaluate()  # here


def synchronized():
    with lazyviz.lazy():
        y = torch.rand(1).std()
    lazyviz.sync()  # here
    del y


def at_a_sync_point():
    with lazyviz.lazy():
        rows = (torch.rand(3) > 2).to(torch.uint8)
        torch.ones(3)[rows]  # here


def several_ops():
    with lazyviz.lazy():
        y = torch.rand(1).std() + torch.ones(1, 1).std(1)
    lazyviz.evaluate(y)  # here


def number():
    with lazyviz.lazy():
        y = torch.ones(2, requires_grad=True).sum()
        float(y)  # here


def number_outside():
    x = torch.ones(2, requires_grad=True).sum()
    with lazyviz.lazy():
        y = torch.ones(2) * 2
    float(x)  # here
    del y


def read_only(size=2):
    array = np.ones(size)
    array.flags.writeable = False
    return array


def constructor():
    with lazyviz.lazy():
        torch.Tensor([np.ones(2), np.ones(2)])  # here


def list_of_arrays():
    with lazyviz.lazy():
        torch.tensor([[np.ones(2)], [np.ones(2)]])  # here


def copy_of_a_tensor():
    with lazyviz.lazy():
        torch.ones(2).new_tensor(torch.ones(2))  # here


def array_that_is_read_only():
    array = read_only()
    with lazyviz.lazy():
        torch.as_tensor(array)  # here


def argument_by_name():
    array = read_only()
    with lazyviz.lazy():
        torch.asarray(obj=array)  # here


def typed_storage():
    torch.storage._reset_warn_typed_storage_removal()
    with lazyviz.lazy():
        torch.ones(2).storage()  # here


def typed_storage_outside():
    torch.storage._reset_warn_typed_storage_removal()
    with lazyviz.lazy():
        y = torch.ones(2) * 2
    y.storage()  # here


def traced_branch():
    def branches(x):
        return x + 1 if bool(x.sum() > 0) else x  # here

    warnings.filterwarnings("ignore", category=DeprecationWarning)  # of torch.jit.trace itself
    with lazyviz.lazy():
        torch.jit.trace(branches, torch.ones(2), check_trace=False)


@pytest.mark.parametrize(
    "program",
    [
        constructor,
        list_of_arrays,
        copy_of_a_tensor,
        array_that_is_read_only,
        argument_by_name,
        typed_storage,
        typed_storage_outside,
        traced_branch,
        read,
        read_inside,
        graph_evaluated,
        synchronized,
        at_a_sync_point,
        several_ops,
        number,
        number_outside,
    ],
)
def test_the_line_is_the_users(program, seen):
    for _ in range(4):  # op by op, and then by code that is made for repeated programs
        program()
    assert len(seen) >= 4
    assert set(places(seen)) == {(__file__, line_of(program, "# here"))}


@pytest.mark.parametrize("program", [read, read_inside, graph_evaluated, several_ops])
def test_the_line_is_the_users_where_there_is_a_default_device(program, seen):
    with torch.device("cpu"):
        for _ in range(4):
            program()
        assert torch.zeros(1).device.type == "cpu"
    assert len(seen) >= 4
    assert set(places(seen)) == {(__file__, line_of(program, "# here"))}


def test_a_warning_is_shown_once_for_each_line(seen):
    warnings.simplefilter("default")
    for _ in range(3):
        with lazyviz.lazy() as graph:
            torch.rand(1).std()
        graph.evaluate()  # first
    with lazyviz.lazy() as graph:
        torch.rand(1).std()
    graph.evaluate()  # second
    here = test_a_warning_is_shown_once_for_each_line
    assert places(seen) == [(__file__, line_of(here, "# first")), (__file__, line_of(here, "# second"))]


def test_a_warning_that_is_an_error_and_an_error_leave_the_usual_traceback(seen):
    warnings.simplefilter("error")
    with lazyviz.lazy() as graph:
        torch.rand(1).std()
    with pytest.raises(UserWarning, match="degrees of freedom"):
        graph.evaluate()
    lazyviz.reset()
    rows = torch.tensor([7])
    with lazyviz.lazy() as graph:
        torch.ones(3)[rows]
    with pytest.raises(IndexError) as caught:
        graph.evaluate()
    mine = [frame.name for frame in traceback.extract_tb(caught.tb) if frame.filename == __file__]
    assert len(mine) == 1
    lazyviz.reset()
