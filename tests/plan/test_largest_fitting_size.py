"""The capacity search finds the largest size with few plans, whatever the memory function."""

from __future__ import annotations

import random

import pytest

from lazyviz.plan.largest_fitting_size import fewest_pieces, largest_fitting


def asked(need, room, start=8, most=2**40):
    """What is found, and with how many questions."""
    questions = []

    def ask(size):
        questions.append(size)
        return need(size) <= room, need(size)

    return largest_fitting(start, most, ask, room), len(questions)


@pytest.mark.parametrize("start", [1, 8, 1000])
@pytest.mark.parametrize("room", [50, 2**20, 2**34 + 7])
def test_of_straight_lines_the_largest_that_fits_is_found(start, room):
    draw = random.Random(start * room)
    for _ in range(200):
        constant, slope = draw.randrange(2 * room), draw.randrange(1, room)
        found, _ = asked(lambda size, c=constant, s=slope: c + s * size, room, start)
        assert found == max((room - constant) // slope, 0)


def test_of_lines_bent_upwards_it_is_found_with_few_questions():
    draw = random.Random(1)
    worst = 0
    for _ in range(300):
        lines = [(draw.randrange(2**33), draw.randrange(1, 2**24)) for _ in range(4)]

        def need(size, lines=lines):
            return max(constant + slope * size for constant, slope in lines)

        found, questions = asked(need, 2**35)
        assert need(found) <= 2**35 < need(found + 1)
        worst = max(worst, questions)
    assert worst <= 14


def test_steps_as_an_allocator_makes_them_do_not_hold_it_up():
    step = 20 * 2**20

    def need(size):
        return (2**30 + 3_000_000 * size + step - 1) // step * step

    found, questions = asked(need, 2**35)
    assert need(found) <= 2**35 < need(found + 1)
    assert questions <= 30


def test_what_needs_nothing_more_has_no_end_but_the_one_given():
    assert asked(lambda size: 10, 100, most=5000)[0] == 5000
    assert asked(lambda size: 1000, 100)[0] == 0


@pytest.mark.parametrize("seed", range(40))
def test_the_fewest_pieces_are_those_that_trying_each_number_finds(seed):
    draw = random.Random(seed)
    blocks = draw.choice([2, 3, 5, 12, 48, 97, 1000])
    constant, slope, sums = draw.randrange(1000), draw.randrange(1, 50), draw.randrange(200)
    rounded = draw.choice([1, 64, 512])

    def need(first, second):
        worst = max(constant + slope * first, constant + sums + slope * second)
        return (worst + rounded - 1) // rounded * rounded

    room = draw.randrange(constant, constant + sums + slope * blocks)
    asked = []

    def ask(first, second):
        asked.append((first, second))
        return need(first, second) <= room, need(first, second)

    def sizes(pieces):
        least, more = divmod(blocks, pieces)
        return least + (more > 0), least + (more > 1)

    expected = next((each for each in range(2, blocks + 1) if need(*sizes(each)) <= room), blocks)
    assert fewest_pieces(blocks, ask, room, need(blocks, 0)) == expected
    assert len(asked) <= 16
