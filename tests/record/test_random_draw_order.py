"""Random numbers equal those of eager mode, whatever the order of evaluation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lazyviz
from lazyviz.session import lazy_graph

from ..bit_equality import difference


def test_a_seed_set_between_draws_is_noticed():
    def program():
        torch.manual_seed(1)
        a = torch.randn(5)
        torch.manual_seed(2)
        b = torch.randn(5)
        torch.manual_seed(1)
        c = torch.randn(5)
        return a, b, c

    expected = program()
    after = torch.rand(2)
    with lazyviz.lazy() as graph:
        result = program()
    lazyviz.evaluate(result[2])
    graph.evaluate()
    assert all(torch.equal(x, y) for x, y in zip(result, expected))
    assert torch.equal(torch.rand(2), after)


def test_evaluating_a_late_draw_evaluates_those_before():
    torch.manual_seed(4)
    expected = [torch.randn(3), torch.rand(4), torch.randperm(6), torch.bernoulli(torch.full((5,), 0.3))]
    after = torch.rand(2)
    torch.manual_seed(4)
    with lazyviz.lazy() as graph:
        draws = [torch.randn(3), torch.rand(4), torch.randperm(6), torch.bernoulli(torch.full((5,), 0.3))]
    assert draws[2].tolist() == expected[2].tolist()
    assert graph.pending  # the last one still is
    assert draws[3].tolist() == expected[3].tolist()
    assert torch.equal(draws[0], expected[0]) and torch.equal(draws[1], expected[1])
    assert torch.equal(torch.rand(2), after)


def test_a_dropped_draw_still_advances_the_generator():
    torch.manual_seed(4)
    torch.randn(100)
    expected = torch.randn(3)
    torch.manual_seed(4)
    with lazyviz.lazy():
        torch.randn(100)
        result = torch.randn(3)
    assert torch.equal(result, expected)


def test_generators_of_the_users_own():
    def program(generator):
        a = torch.rand(3, generator=generator)
        generator.manual_seed(9)
        b = torch.rand(3, generator=generator)
        state = torch.rand(3)
        return a, b, state

    torch.manual_seed(0)
    first = torch.Generator().manual_seed(3)
    expected = program(first)
    torch.manual_seed(0)
    second = torch.Generator().manual_seed(3)
    with lazyviz.lazy() as graph:
        result = program(second)
    graph.evaluate()
    assert all(torch.equal(x, y) for x, y in zip(result, expected))
    assert torch.equal(first.get_state(), second.get_state())


def test_reading_the_state_evaluates_the_draws_before_it():
    torch.manual_seed(5)
    torch.rand(3)
    expected = torch.get_rng_state()
    torch.manual_seed(5)
    with lazyviz.lazy() as graph:
        torch.rand(3)
        state = torch.get_rng_state()
        assert torch.initial_seed() == 5
    assert torch.equal(state, expected)
    assert [point.cause for point in graph.sync_points] == ["get_rng_state"]


def test_fork_rng_and_set_rng_state():
    def program():
        torch.manual_seed(5)
        before = torch.get_rng_state()
        a = torch.rand(3)
        with torch.random.fork_rng():
            torch.manual_seed(6)
            b = torch.rand(3)
        c = torch.rand(3)
        torch.set_rng_state(before)
        return a, b, c, torch.rand(3)

    expected = program()
    after = torch.rand(1)
    with lazyviz.lazy() as graph:
        result = program()
    graph.evaluate()
    assert all(torch.equal(x, y) for x, y in zip(result, expected))
    assert torch.equal(result[0], result[3])
    assert torch.equal(torch.rand(1), after)


def test_the_seed_shown_is_the_users_and_not_ours():
    torch.manual_seed(1234)
    with lazyviz.lazy():
        torch.rand(3)
        assert torch.initial_seed() == 1234


def test_eager_mode_dropout_draws_nothing_in_evaluation():
    model = torch.nn.Dropout(0.5).eval()
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with lazyviz.lazy() as graph:
        model(torch.ones(4))
    graph.evaluate()
    assert torch.equal(torch.rand(3), expected)


NOT_DRAWN = {
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x),
    "attention with a mask": lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x, x @ x.mT),
    "rrelu": torch.nn.functional.rrelu,
    "dropout": lambda x: torch.native_dropout(x, 0.5, False)[0],
}


@pytest.mark.parametrize("name", NOT_DRAWN)
def test_what_draws_nothing_this_time_is_not_evaluated_by_later_draws(name):
    x = torch.randn(1, 2, 8, 8)
    expected = NOT_DRAWN[name](x)
    torch.manual_seed(1)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    with lazyviz.lazy() as graph:
        result = NOT_DRAWN[name](x)
        node = graph.nodes[-1]
        assert torch.rand(3).tolist() == wanted.tolist()
        assert node.state != "done"
    graph.evaluate()
    assert torch.equal(result, expected)


@pytest.mark.parametrize("device", ["cpu"])
def test_in_place_draws(device):
    torch.manual_seed(2)
    expected = torch.empty(7, device=device).normal_().uniform_(1, 2)
    torch.manual_seed(2)
    with lazyviz.lazy() as graph:
        result = torch.empty(7, device=device).normal_().uniform_(1, 2)
    graph.evaluate()
    assert torch.equal(result, expected)


def checkpointed(use_reentrant):
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.3))
    x = torch.randn(4, 8, requires_grad=True)
    y = F.dropout(x, 0.2)
    for _ in range(2):
        y = checkpoint(first, y, use_reentrant=use_reentrant)
        y = F.dropout(y, 0.1)
    with torch.random.fork_rng():
        torch.rand(3)
        torch.manual_seed(3)
        inside = torch.rand(3)
    y.sum().backward()
    return x.grad, y.detach(), [p.grad for p in first.parameters()], inside, torch.rand(2)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_dropout_is_deferred(use_reentrant):
    expected, state = checkpointed(use_reentrant), torch.get_rng_state()
    with lazyviz.lazy(allow_sync=False) as graph:
        results = checkpointed(use_reentrant)
    lazyviz.evaluate(results[-1])  # draws made after the recomputation, first
    graph.evaluate()
    assert difference(expected, results) is None
    assert torch.equal(torch.get_rng_state(), state)


def test_a_state_that_the_user_reads_is_evaluated():
    with lazyviz.lazy() as graph:
        torch.rand(3)
        state = torch.get_rng_state()
    assert type(state) is torch.Tensor
    assert [point.cause for point in graph.sync_points] == ["get_rng_state"]


def test_forgetting_a_forked_state_goes_back_to_the_draws_before():
    torch.manual_seed(5)
    with lazyviz.lazy():
        torch.rand(3)
        with torch.random.fork_rng():
            torch.rand(3)
        assert torch.initial_seed() == 5
    lazy_graph.reset()
    assert torch.initial_seed() == 5
    after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))


def test_a_forked_state_outside_of_the_block_is_evaluated_first():
    def program():
        torch.manual_seed(2)
        a = torch.rand(2)
        with torch.random.fork_rng():
            b = torch.rand(2)
        return a, b

    expected = (*program(), torch.rand(2))
    with lazyviz.lazy() as graph:
        results = program()
    drawn = torch.rand(2)  # evaluates the state it begins with
    graph.evaluate()
    assert difference(expected, (*results, drawn)) is None


def test_the_default_generator_by_name_is_the_default_generator():
    torch.manual_seed(1)
    expected = [torch.rand(2), torch.rand(2, generator=torch.default_generator), torch.rand(2)]
    torch.manual_seed(1)
    with lazyviz.lazy() as graph:
        results = [torch.rand(2), torch.rand(2, generator=torch.default_generator), torch.rand(2)]
    graph.evaluate()
    assert difference(expected, results) is None
