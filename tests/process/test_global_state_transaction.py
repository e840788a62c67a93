"""Steps of a transaction are undone once, whoever undoes them."""

from __future__ import annotations

import pytest

from lazyviz.process.global_state_transaction import take_back


class InterruptedAtLen(list):
    """A list whose length is asked for when a signal arrives, whose handler undoes the steps, too."""

    interrupted = False

    def __len__(self):
        length = super().__len__()
        if not self.interrupted:
            self.interrupted = True
            take_back(self, self.keep)
        return length


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_a_signal_handler_may_undo_the_same_steps_between_two_instructions(keep):
    undone = []
    steps = InterruptedAtLen([lambda: undone.append(0), lambda: undone.append(1)])
    steps.keep = keep
    take_back(steps, keep)
    assert undone == [1, 0][: 2 - keep]
    assert list.__len__(steps) == keep


@pytest.mark.parametrize("keep", [0, 1])
def test_a_signal_handler_may_undo_the_same_steps_during_one(keep):
    undone = []

    def interrupted():
        undone.append("interrupted")
        if len(undone) == 1:
            take_back(steps, keep)

    steps = [lambda: undone.append("first"), interrupted]
    take_back(steps, keep)
    assert undone == ["interrupted", "interrupted", "first"][: 3 - keep]
    assert len(steps) == keep


def test_a_step_that_fails_takes_no_other_one_with_it_if_a_signal_handler_undid_the_rest():
    failures = []

    def fails():
        failures.append("failed")
        if len(failures) == 3:  # the last attempt
            del steps[1:]
        raise ValueError

    steps = [lambda: None, fails]
    with pytest.raises(ValueError):
        take_back(steps, keep=1)
    assert len(steps) == 1
