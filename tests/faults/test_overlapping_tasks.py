"""Tasks with overlapping blocks: one clear error in the second, and nothing stays lazy in any order."""

from __future__ import annotations

import asyncio
import contextvars

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import lazyviz

from .support.inject_faults import State, is_plain


@pytest.mark.parametrize("waits", [(1, 3), (3, 1), (2, 2)])
def test_overlapping_blocks_of_two_tasks(waits, state):
    errors, values = [], []

    async def record(wait):
        try:
            with lazyviz.lazy():
                value = torch.ones(2) + wait
                for _ in range(wait):
                    await asyncio.sleep(0)
                value = value * 2
            values.append((value, wait))
        except RuntimeError as error:
            errors.append(str(error))

    async def main():
        await asyncio.gather(*[record(wait) for wait in waits])

    asyncio.run(main())
    assert is_plain()
    assert len(errors) == 1 and errors[0].startswith("another task is recording")
    assert [(value.tolist(), wait) for value, wait in values] == [([2.0 + 2 * waits[0]] * 2, waits[0])]


def test_blocks_of_tasks_that_do_not_overlap(state):
    async def record(number):
        await asyncio.sleep(0)
        with lazyviz.lazy():
            value = torch.ones(2) * number
        await asyncio.sleep(0)
        return value

    async def main():
        return await asyncio.gather(*[record(number) for number in range(5)])

    assert [value[0].item() for value in asyncio.run(main())] == [0, 1, 2, 3, 4]


def test_tasks_inside_a_block_belong_to_it(state):
    async def part(number):
        await asyncio.sleep(0)
        return torch.ones(2) * number

    async def nested(number):
        with lazyviz.lazy():
            return torch.ones(2) * number

    async def main():
        with lazyviz.lazy() as graph:
            values = await asyncio.gather(*[part(number) for number in range(3)], nested(3))
        return graph, values

    graph, values = asyncio.run(main())
    assert is_plain() and len(graph.nodes) == 6
    assert [value[0].item() for value in values] == [0, 1, 2, 3]


async def begun():
    """A task that waits in its block."""

    async def record():
        with lazyviz.lazy():
            torch.ones(2) + 1
            await asyncio.sleep(60)

    task = asyncio.create_task(record())
    await asyncio.sleep(0)
    return task


def test_a_task_that_is_cancelled_in_its_block(state):
    async def main():
        task = await begun()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert is_plain()

    asyncio.run(main())


def test_a_loop_that_ends_before_its_task(state):
    async def main():
        return await begun()

    task = asyncio.run(main())
    assert task.cancelled() and is_plain()


class Schedules(RuleBasedStateMachine):
    """Blocks entered and left by tasks (contexts of their own) in any order, and ops in between."""

    def __init__(self):
        super().__init__()
        lazyviz.reset()
        self.before = State()
        self.tasks = [contextvars.copy_context() for _ in range(3)]
        self.open: list[tuple[int, object]] = []  # task and block, in the order in which they were entered
        self.pending: list[tuple[torch.Tensor, list[float]]] = []
        self.count = 0

    def compute(self):
        self.count += 1
        value = torch.full((2,), float(self.count)) + 1
        self.pending.append((value, [self.count + 1.0] * 2))
        assert lazyviz.is_lazy(value) == bool(self.open)

    @rule(task=st.integers(0, 2))
    def enter(self, task):
        block = lazyviz.lazy()
        if not self.open or self.open[-1][0] == task:
            self.tasks[task].run(block.__enter__)
            self.open.append((task, block))
        else:
            with pytest.raises(RuntimeError, match="another task is recording"):
                self.tasks[task].run(block.__enter__)

    @precondition(lambda self: self.open)
    @rule(at=st.integers(0, 9), task=st.integers(0, 2))
    def leave(self, at, task):
        _, block = self.open.pop(at % len(self.open))
        self.tasks[task].run(block.__exit__, None, None, None)

    @rule(task=st.integers(0, 2))
    def record(self, task):
        self.tasks[task].run(self.compute)

    @precondition(lambda self: self.pending)
    @rule(at=st.integers(0, 9))
    def read(self, at):
        value, expected = self.pending.pop(at % len(self.pending))
        assert value.tolist() == expected

    @rule()
    def forget(self):
        lazyviz.reset()
        self.open.clear()
        self.pending.clear()

    @invariant()
    def what_no_block_is_around_is_plain(self):
        if not self.open:
            assert is_plain()

    def teardown(self):
        for _, block in self.open:
            block.__exit__(None, None, None)
        for value, expected in self.pending:
            assert value.tolist() == expected
        lazyviz.sync()
        assert is_plain()
        assert not self.before.differences()


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
