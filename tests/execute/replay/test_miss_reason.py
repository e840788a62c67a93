"""Miss reasons: the first difference from the most similar cached program."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lazyviz
from lazyviz.execute.replay.miss_reason import forms_differ
from lazyviz.execute.replay.program_cache import replays
from lazyviz.execute.replay.program_key import Form

X, W = torch.ones(3, 4), torch.ones(4, 4)


@pytest.fixture(autouse=True)
def forgotten():
    replays.clear()
    yield
    replays.clear()


def miss(program, *args):
    with lazyviz.lazy() as graph:
        kept = program(*args)
    report = graph.evaluate()
    del kept
    return report.cache_miss_reason


def test_an_op_put_in_is_named_however_many_tensors_are_from_outside():
    def program(more):
        hidden = torch.relu(X @ W)
        out = hidden @ W
        if more:
            out = out + 1
        return out.sum() * 2 + 1

    assert miss(program, False) == "the first program of its kind"
    reason = miss(program, True)
    assert reason.startswith("add_3 at ") and reason.endswith("aten.add.Tensor, was aten.sum.default")
    replays.clear()
    miss(program, True)
    reason = miss(program, False)
    assert reason.startswith("sum_3 at ") and reason.endswith("aten.sum.default, was aten.add.Tensor")


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.GELU(), "aten.gelu.default, was aten.relu.default"),
        (nn.Dropout(0.5), "aten.empty_like.default, was aten.relu.default"),
        (nn.Identity(), "aten.t.default, was aten.relu.default"),
    ],
)
def test_another_layer_in_a_training_step_is_what_is_named(layer, words):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def step():
        model.zero_grad()
        model(X).mean().backward()

    miss(step)
    model[1] = layer
    reason = miss(step)
    assert reason.endswith(words) and "test_miss_reason.py" in reason


def test_tensors_connected_in_another_way_are_still_reported():
    def program(crossed):
        left, right = X @ W, X * 2
        both = (right if crossed else left) + 1
        return left, right, both.exp()

    miss(program, False)
    reason = miss(program, True)
    assert reason.startswith("add_2 at ") and reason.endswith("it has other inputs")


def test_of_two_alternating_programs_each_is_compared_with_itself():
    model, image = nn.Linear(4, 8), nn.Conv2d(1, 2, 3)

    def one(rows):
        return model(torch.ones(rows, 4)).relu().sum() * 2 + 1

    def other(size):
        return image(torch.ones(1, 1, size, size)).relu().sum() * 2 + 1

    assert miss(one, 5) == "the first program of its kind"
    miss(other, 8)
    for _ in range(2):
        assert miss(one, 5) is None and miss(other, 8) is None
    assert miss(other, 9).endswith("[1, 1, 9, 9] float32 cpu, was [1, 1, 8, 8] float32 cpu")
    assert miss(one, 6).endswith("[6, 4] float32 cpu, was [5, 4] float32 cpu")


def test_of_equal_ops_on_two_lines_each_is_compared_with_its_own():
    def one(rows):
        return (torch.ones(rows) + 1).exp().sum() * 2

    def other(rows):
        return (torch.ones(rows) + 1).exp().sum() * 2

    miss(one, 2)
    for rows in range(30, 60):
        miss(other, rows)
    assert miss(one, 3).endswith("[3] float32 cpu, was [2] float32 cpu")


def test_a_program_of_other_ops_is_the_first_of_its_kind():
    miss(lambda: torch.ones(3).exp().log().sin() + 1)
    assert miss(lambda: torch.ones(3).cos() @ W[:3] @ W @ W) == "the first program of its kind"


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ((X,), (torch.ones(5, 4),), "an input is [5, 4] float32 cpu, was [3, 4] float32 cpu"),
        ((X,), (torch.ones(4, 3).t(),), "with strides [1, 3], was [4, 1]"),
        ((X, 0), (X, 0, (1, 0)), "dim0 is 1, was 0"),
        ((X,), (X, 0, (0, 1), "sum"), "reduction is 2, was not given"),
        ((X,), (X.double(),), "[4] float64 cpu, was [4] float32 cpu"),
    ],
)
def test_a_difference_in_the_same_op_is_reported(first, second, words):
    def program(x, dim=0, swapped=(0, 1), reduction="mean"):
        return x.sum(dim), x.transpose(*swapped).clone(), F.mse_loss(x, x * 2, reduction=reduction), x + 1

    miss(program, *first)
    assert words in miss(program, *second)


def test_metadata_with_equal_text_is_distinguished():
    plain = Form((2,), (1,), torch.float32, torch.device("cpu"), 0)
    assert (
        forms_differ(plain, plain._replace(flags=1))
        == "[2] float32 cpu, with another conjugate or negative bit"
    )
    assert forms_differ(plain, plain._replace(stride=(2,))) == "[2] float32 cpu with strides [2], was [1]"
