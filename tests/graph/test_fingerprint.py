from __future__ import annotations

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.graph.fingerprint import fingerprint, first_difference
from lazyviz.session.lazy_graph import reset


@pytest.fixture(autouse=True)
def forget():
    yield
    reset()


def record(function, *args):
    """The graph of ``function(*args)``; what it returns stays alive, as in a notebook."""
    with lazyviz.lazy() as graph:
        graph.kept = function(*args)
    return graph.ir


def same(a, b):
    assert first_difference(a, b) is None
    return fingerprint(a) == fingerprint(b)


def different(a, b, *words):
    assert fingerprint(a) != fingerprint(b)
    text = first_difference(a, b)
    for word in words:
        assert word in text, text
    assert "\n" not in text


def test_the_same_code_recorded_twice_is_the_same_program():
    def step():
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        loss = model(torch.ones(3, 4)).square().mean()
        loss.backward()
        return loss

    assert same(record(step), record(step))


def test_python_floats_are_inputs():
    x = torch.ones(3)
    assert same(record(lambda: x * 0.1 + 2.0), record(lambda: x * 0.7 + 3.5))


def test_a_learning_rate_schedule_is_one_program():
    def step(lr):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()

    assert same(record(step, 0.1), record(step, 0.05))


def test_ints_that_only_feed_arithmetic_are_inputs():
    x = torch.ones(3)
    assert same(record(lambda: x * 2), record(lambda: x * 5))


def test_an_int_operand_and_a_float_operand_are_different_programs():
    x = torch.ones(3, dtype=torch.int64)
    different(record(lambda: x * 2), record(lambda: x * 2.5), "mul")


def test_ints_that_choose_what_is_done_are_structure():
    x = torch.ones(3, 3)
    different(record(lambda: x.sum(0)), record(lambda: x.sum(1)), "sum", "argument")
    different(record(lambda: x.round(decimals=1)), record(lambda: x.round(decimals=2)), "round")


def test_which_variables_are_alive_is_no_structure():
    x = torch.ones(3)

    def keep():
        a = x + 1
        return a, a * 2

    def drop():
        return (x + 1) * 2

    assert same(record(keep), record(drop))


def test_names_and_lines_are_no_structure():
    x = torch.ones(3)

    def one():
        return x.exp()

    def other():
        renamed = x
        return renamed.exp()

    assert same(record(one), record(other))


def test_another_operator_is_named():
    x = torch.ones(3)
    different(record(lambda: x.exp()), record(lambda: x.sin()), "aten.exp.default", "aten.sin.default", ":")


@pytest.mark.parametrize(
    ("other", "word"),
    [
        (torch.ones(4), "shape of an input is [3] in one, [4] in the other"),
        (torch.ones(3, dtype=torch.float64), "dtype of an input is float32 in one, float64 in the other"),
        (torch.ones(6)[::2], "strides of an input is [1] in one, [2] in the other"),
        (torch.ones(4)[1:], "offset of an input is 0 in one, 1 in the other"),
    ],
)
def test_metadata_of_inputs_is_structure_and_named(other, word):
    x = torch.ones(3)
    different(record(lambda: x.exp()), record(lambda: other.exp()), "exp_0", word)


def test_wiring_is_structure():
    x, y = torch.ones(3), torch.ones(3)
    different(record(lambda: (x + y) * x), record(lambda: (x + y) * y), "other tensors")


def test_sharing_memory_is_structure():
    base = torch.ones(6)
    x, view, apart = base[:3], base[3:], torch.ones(6)[3:]
    different(record(lambda: x + view), record(lambda: x + apart), "shares memory")


def test_a_longer_program_is_named_by_its_first_further_op():
    x = torch.ones(3)
    short, long = record(lambda: x.exp()), record(lambda: x.exp().sin())
    different(short, long, "the second graph goes on with sin_1", "after 1 ops")
    different(long, short, "the first graph goes on with sin_1")


def test_empty_graphs_are_equal():
    assert same(record(lambda: None), record(lambda: None))


def test_the_fingerprint_is_the_same_in_another_process(tmp_path):
    import subprocess
    import sys

    script = (
        "import torch, lazyviz\n"
        "from lazyviz.graph.fingerprint import fingerprint\n"
        "x = torch.ones(3, 4)\n"
        "with lazyviz.lazy() as g:\n"
        "    y = torch.nn.functional.softmax(x * 2.0, -1).sum(0)\n"
        "print(fingerprint(g.ir))\n"
    )
    runs = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert len(runs[0].strip()) == 32
