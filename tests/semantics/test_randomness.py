"""Random numbers, generators and their states are eager PyTorch's."""

from __future__ import annotations

import pickle
import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lazyviz

from ..bit_equality import difference
from ..lazy_equals_eager import both

DRAWS = {
    "rand": lambda g: torch.rand(3, generator=g),
    "randn": lambda g: torch.randn(17, generator=g),
    "randint": lambda g: torch.randint(0, 9, (3,), generator=g),
    "randperm": lambda g: torch.randperm(7, generator=g),
    "normal": lambda g: torch.normal(0.0, 1.0, (3,), generator=g),
    "normal of tensors": lambda g: torch.normal(torch.zeros(3), torch.ones(3), generator=g),
    "bernoulli": lambda g: torch.bernoulli(torch.full((5,), 0.3), generator=g),
    "multinomial": lambda g: torch.multinomial(torch.ones(5), 3, generator=g),
    "poisson": lambda g: torch.poisson(torch.full((4,), 3.0), generator=g),
    "binomial": lambda g: torch.binomial(torch.full((4,), 5.0), torch.full((4,), 0.5), generator=g),
    "normal_": lambda g: torch.empty(3).normal_(generator=g),
    "uniform_": lambda g: torch.empty(3).uniform_(-1, 1, generator=g),
    "random_": lambda g: torch.empty(3).random_(0, 5, generator=g),
    "bernoulli_": lambda g: torch.empty(3).bernoulli_(0.5, generator=g),
    "exponential_": lambda g: torch.empty(3).exponential_(generator=g),
    "geometric_": lambda g: torch.empty(3).geometric_(0.5, generator=g),
    "cauchy_": lambda g: torch.empty(3).cauchy_(generator=g),
    "log_normal_": lambda g: torch.empty(3).log_normal_(generator=g),
}
PLAIN = {
    "rand_like": lambda: torch.rand_like(torch.ones(3)),
    "randn_like": lambda: torch.randn_like(torch.ones(3)),
    "randint_like": lambda: torch.randint_like(torch.ones(3), 5),
    "dropout": lambda: F.dropout(torch.ones(9)),
    "dropout in place": lambda: F.dropout(torch.ones(9), inplace=True),
    "dropout2d": lambda: F.dropout2d(torch.ones(2, 3, 2, 2)),
    "alpha_dropout": lambda: F.alpha_dropout(torch.ones(9), training=True),
    "feature_alpha_dropout": lambda: F.feature_alpha_dropout(torch.ones(2, 3, 2, 2), training=True),
    "rrelu": lambda: F.rrelu(-torch.ones(9), training=True),
    "gumbel_softmax": lambda: F.gumbel_softmax(torch.ones(2, 3), hard=True),
    "fractional_max_pool2d": lambda: F.fractional_max_pool2d(torch.randn(1, 2, 8, 8), 2, output_size=3),
    "attention": lambda: F.scaled_dot_product_attention(*torch.ones(3, 1, 2, 4, 8), dropout_p=0.5),
    "multihead attention": lambda: nn.MultiheadAttention(4, 2, dropout=0.5)(*torch.ones(3, 5, 1, 4))[0],
    "a transformer layer": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)(
        torch.ones(2, 3, 8)
    ),
    "lstm": lambda: nn.LSTM(3, 4, 2, dropout=0.5)(torch.ones(5, 2, 3))[0],
    "initialization": lambda: list(nn.Sequential(nn.Linear(3, 4), nn.Conv2d(1, 2, 3)).parameters()),
    "truncated": lambda: nn.init.trunc_normal_(torch.empty(9)),
    "orthogonal": lambda: nn.init.orthogonal_(torch.empty(4, 4)),
    "kaiming": lambda: nn.init.kaiming_normal_(torch.empty(4, 4)),
    "a distribution": lambda: torch.distributions.Normal(0.0, 1.0).sample((3,)),
    "categories": lambda: torch.distributions.Categorical(torch.ones(4)).sample((3,)),
    "gamma": lambda: torch.distributions.Gamma(torch.ones(3), 1.0).rsample(),
    "dirichlet": lambda: torch.distributions.Dirichlet(torch.ones(3)).sample(),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("own", [False, True])
def test_draws(name, own):
    def program():
        generator = torch.Generator().manual_seed(5) if own else None
        return DRAWS[name](generator), DRAWS[name](generator), torch.rand(2, generator=generator)

    both(program)


@pytest.mark.parametrize("name", PLAIN)
def test_functions_and_modules_that_draw(name):
    both(lambda: (PLAIN[name](), PLAIN[name]()), syncs=None, versions=False)


@pytest.mark.parametrize(
    "name", ["dropout", "attention", "lstm", "multihead attention", "a transformer layer"]
)
def test_draws_in_inference_mode(name):
    def program():
        with torch.inference_mode():
            return PLAIN[name](), torch.rand(2)

    both(program, syncs=None, versions=False)


def test_dropped_draws_still_advance_the_generator():
    def program():
        torch.rand(5)
        F.dropout(torch.ones(4))
        torch.randperm(4)
        return torch.rand(3)

    both(program)


def test_each_way_to_seed():
    def program():
        generator = torch.Generator()
        results = []
        for seed in (torch.manual_seed, torch.random.manual_seed, torch.default_generator.manual_seed):
            seed(3)
            results += [torch.rand(2), torch.initial_seed()]
        generator.manual_seed(8)
        results += [torch.rand(2, generator=generator)]
        torch.manual_seed(-1)
        return [*results, torch.rand(2)]

    both(program)


def test_a_seed_from_the_system_is_used_by_the_draws_after_it():
    with lazyviz.lazy():
        torch.rand(3)
        seed = torch.seed()
        assert torch.initial_seed() == seed
        drawn = torch.rand(3)
    torch.manual_seed(seed)
    assert difference(torch.rand(3), lazyviz.to_eager(drawn)) is None


def test_the_initial_seed_is_the_users():
    generator = torch.Generator().manual_seed(77)
    torch.manual_seed(66)
    with lazyviz.lazy():
        torch.rand(3)
        assert torch.initial_seed() == torch.random.initial_seed() == 66
    lazyviz.sync()
    assert torch.default_generator.initial_seed() == 66 and generator.initial_seed() == 77


STATES = {
    "get_rng_state": (torch.get_rng_state, torch.set_rng_state),
    "random.get_rng_state": (torch.random.get_rng_state, torch.random.set_rng_state),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_was_read_is_restored(name):
    get, put = STATES[name]

    def program():
        torch.rand(3)
        state = get()
        first = torch.rand(3)
        torch.manual_seed(9)
        torch.rand(1)
        put(state)
        return first, torch.rand(3), torch.equal(first, torch.rand(3))

    both(program, syncs=None)


def test_a_state_from_before_the_block_and_one_for_after_it():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    expected = torch.rand(3), torch.rand(2)
    torch.manual_seed(5)
    with lazyviz.lazy():
        torch.rand(1)
        torch.set_rng_state(before)
        first = torch.rand(3)
        after = torch.get_rng_state()
    torch.manual_seed(7)
    torch.set_rng_state(after)
    assert difference(expected, (lazyviz.to_eager(first), torch.rand(2))) is None


def test_methods_of_a_generator_with_nothing_pending():
    def program():
        generator = torch.Generator().manual_seed(4)
        state, twin = generator.get_state(), generator.clone_state()
        first = torch.rand(3, generator=generator)
        other = torch.Generator()
        other.set_state(state)
        return first, torch.rand(3, generator=other), torch.rand(3, generator=twin)

    both(program)


def test_methods_of_a_generator_after_evaluation():
    def program(generator, settle):
        torch.rand(3, generator=generator)
        settle()
        state = generator.get_state()
        first = torch.rand(3, generator=generator)
        settle()
        generator.set_state(state)
        return first, torch.rand(3, generator=generator)

    expected = program(torch.Generator().manual_seed(4), lambda: None)
    with lazyviz.lazy():
        actual = program(torch.Generator().manual_seed(4), lazyviz.sync)
    lazyviz.sync()
    assert difference(expected, actual) is None


@pytest.mark.parametrize("reseed", [False, True])
def test_fork_rng_in_the_block(reseed):
    def program():
        first = torch.rand(2)
        with torch.random.fork_rng():
            if reseed:
                torch.manual_seed(4)
            inside = torch.rand(2)
            with torch.random.fork_rng(enabled=False):
                inside = inside + torch.rand(2)
        return first, inside, torch.rand(2)

    both(program)


def test_fork_rng_around_the_block():
    torch.manual_seed(4)
    expected = [torch.rand(2)]
    with torch.random.fork_rng():
        expected.append(torch.rand(2))
    expected.append(torch.rand(2))
    torch.manual_seed(4)
    actual = [torch.rand(2)]
    with torch.random.fork_rng():
        with lazyviz.lazy():
            actual.append(torch.rand(2))
    actual.append(torch.rand(2))
    lazyviz.sync()
    assert difference(expected, actual) is None


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("preserve", [False, True])
def test_checkpoints_restore_the_generator(use_reentrant, preserve):
    def inside(x):
        return F.dropout(x.sin(), 0.5) * torch.rand(4)

    def program(x):
        options = {"use_reentrant": use_reentrant, "preserve_rng_state": preserve}
        y = checkpoint(inside, x * 1, **options)
        z = checkpoint(inside, y, **options)
        torch.rand(3)
        z.sum().backward()
        return z, torch.rand(2)

    both(program, lambda: torch.ones(4, requires_grad=True), versions=False, syncs=None)


def test_draws_beside_those_of_numpy_and_python():
    def program():
        results = []
        for _ in range(4):
            x = torch.rand(3) * random.random() + float(np.random.rand())
            np.random.shuffle(order := [0, 1, 2])
            results.append(x[order])
            torch.manual_seed(random.randrange(100))
        return results

    def seeded():
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        return ()

    both(program, seeded)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 4, 0, 3, 1], [3], []])
def test_any_order_of_evaluation(order):
    def program(generator):
        a = torch.rand(3)
        b = torch.rand(3, generator=generator)
        torch.manual_seed(6)
        c = torch.randn(3) + b
        d = torch.rand(3, generator=generator) * a
        return [a, b, c, d, torch.bernoulli(d.abs().clamp(max=1))]

    torch.manual_seed(2)
    generator = torch.Generator().manual_seed(3)
    expected = [*program(generator), torch.rand(2), torch.rand(2, generator=generator)]
    torch.manual_seed(2)
    generator = torch.Generator().manual_seed(3)
    with lazyviz.lazy():
        actual = program(generator)
    for at in order:
        lazyviz.evaluate(actual[at])
    actual += [torch.rand(2), torch.rand(2, generator=generator)]
    lazyviz.sync()
    assert difference(expected, actual) is None


def test_draws_of_two_graphs_from_one_generator():
    torch.manual_seed(2)
    expected = [torch.rand(2), torch.rand(2), torch.rand(2), torch.rand(2)]
    torch.manual_seed(2)
    with lazyviz.lazy() as first:
        a = torch.rand(2)
    with lazyviz.lazy() as second:
        b = torch.rand(2)
        with lazyviz.lazy():
            c = torch.rand(2)
        d = torch.rand(2)
    lazyviz.evaluate(d)
    assert first.pending == second.pending == 0
    assert difference(expected, [a, b, c, d]) is None


def test_a_run_that_is_interrupted_between_draws_goes_on_with_the_next():
    torch.manual_seed(2)
    expected = [torch.rand(2) for _ in range(4)]
    torch.manual_seed(2)
    with lazyviz.lazy() as graph:
        actual = [torch.rand(2) for _ in range(4)]

    def stop(progress):
        if progress.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        graph.evaluate(progress=stop)
    assert graph.pending == 2
    graph.evaluate()
    assert difference(expected, actual) is None


def test_a_generator_that_dies_before_its_draws():
    expected = torch.rand(3, generator=torch.Generator().manual_seed(5))
    with lazyviz.lazy():
        actual = torch.rand(3, generator=torch.Generator().manual_seed(5))
        for _ in range(20):
            torch.rand(1, generator=torch.Generator().manual_seed(6))
    lazyviz.sync()
    assert difference(expected, actual) is None


def test_a_state_read_while_draws_are_pending_is_the_state_after_them():
    def program(generator, other, settle):
        torch.rand(2, generator=generator)
        state = generator.get_state()
        first = torch.rand(3, generator=generator)
        settle()
        generator.set_state(state)
        other.set_state(state)
        torch.set_rng_state(state)
        again = torch.rand(3, generator=other), torch.rand(3)
        middle = other.get_state()
        torch.rand(1, generator=other)
        other.set_state(middle)
        return first, torch.rand(3, generator=generator), *again, torch.rand(3, generator=other)

    def generators():
        return torch.Generator().manual_seed(4), torch.Generator()

    pair = generators()
    expected = [*program(*pair, lambda: None), *[torch.rand(1, generator=generator) for generator in pair]]
    for settle in (lambda: None, lazyviz.sync):
        pair = generators()
        with lazyviz.lazy():
            actual = program(*pair, settle)
        actual = [*actual, *[torch.rand(1, generator=generator) for generator in pair]]
        lazyviz.sync()
        assert difference(expected, actual) is None


def test_a_state_set_in_the_block_is_the_generators_once_all_has_run():
    generator = torch.Generator().manual_seed(4)
    expected = generator.get_state()
    with lazyviz.lazy():
        torch.rand(2, generator=generator)
        state = generator.get_state()
        torch.rand(2, generator=generator)
        generator.set_state(state)
    lazyviz.sync()
    torch.rand(2, generator=(twin := torch.Generator().manual_seed(4)))
    assert torch.equal(generator.get_state(), twin.get_state())
    assert not torch.equal(generator.get_state(), expected)


READERS = {
    "get_state": lambda generator: generator.get_state(),
    "clone_state": lambda generator: generator.clone_state().get_state(),
    "__reduce__": lambda generator: pickle.loads(pickle.dumps(generator)).get_state(),
    "initial_seed": lambda generator: generator.initial_seed(),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("default", [False, True])
def test_methods_that_report_state_report_that_of_eager_mode(name, inside, default):
    def program(generator, lazily):
        generator.manual_seed(4)
        with lazily() as graph:
            torch.rand(3, generator=generator)
            told = READERS[name](generator) if inside else None
            after = torch.rand(3, generator=generator)
        return told if inside else READERS[name](generator), after, graph

    def generator():
        return torch.default_generator if default else torch.Generator()

    expected = program(generator(), nullcontext)
    actual = program(generator(), lazyviz.lazy)
    graph = actual[2]
    if inside:
        causes = [point.cause for point in graph.sync_points][:1]
        assert causes == ([] if name == "initial_seed" else [f"Generator.{name}"])
    lazyviz.sync()
    assert difference(expected[:2], actual[:2]) is None
