"""Which tests run on a day: the cases of a test, and tests that take long, take turns in `make test`."""

from __future__ import annotations

import datetime
import zlib
from collections import defaultdict
from collections.abc import Sequence

import pytest

TURNS = 8  # days in which ``--in-turn`` runs everything once
EVERY_TEST_TURNS = 24  # the same for ``--every-test-in-turn``: tests without the compiled modules
CONFORMANCE_DAYS = 8  # the same for conformance tests and ``--daily``
TAKE_LONG = ("browser", "slow", "takes_times")


def day_of(config: pytest.Config) -> datetime.date:
    """The day whose turn it is."""
    named = config.getoption("--day")
    return datetime.date.fromisoformat(named) if named else datetime.date.today()


def due(items: Sequence[pytest.Item], day: int, every_test: bool = False) -> list[pytest.Item]:
    """An eighth of what takes long, and of the cases of each other test, at least one of each.

    With ``every_test`` one in 24 of all tests, whether fast or slow.
    """
    if every_test:
        return _of_the_day(items, day, EVERY_TEST_TURNS)
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    take_long: list[pytest.Item] = []
    chosen: list[pytest.Item] = []
    for item in items:
        if any(map(item.get_closest_marker, TAKE_LONG)):
            take_long.append(item)
        elif hasattr(item, "callspec"):
            cases[item.nodeid.partition("[")[0]].append(item)
        else:
            chosen.append(item)
    chosen += _of_the_day(take_long, day, TURNS)
    for each in cases.values():
        chosen += each[day % min(TURNS, len(each)) :: TURNS]
    return chosen


def for_daily_use(items: Sequence[pytest.Item], day: int) -> list[pytest.Item]:
    """Tests that take no seconds; of the conformance tests those of the day."""
    fast = [item for item in items if not item.get_closest_marker("slow")]
    conformance = [item for item in fast if "conformance" in item.path.parts]
    left_out = set(conformance) - set(_of_the_day(conformance, day, CONFORMANCE_DAYS))
    return [item for item in fast if item not in left_out]


def _of_the_day(items: Sequence[pytest.Item], day: int, days: int) -> list[pytest.Item]:
    """The items whose day it is; one of them where it is no item's, since pytest fails without tests."""
    due = [item for item in items if zlib.crc32(item.nodeid.encode()) % days == day % days]
    return due or [items[day % len(items)]] if items else []
