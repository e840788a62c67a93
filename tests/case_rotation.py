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
    """An eighth of what takes long, and of the cases of each other test, there at least one.

    With ``every_test`` one in 24 of all tests, whether fast or slow.
    """
    if every_test:
        return [item for item in items if _has_its_day(item, day, EVERY_TEST_TURNS)]
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    chosen: list[pytest.Item] = []
    for item in items:
        if any(map(item.get_closest_marker, TAKE_LONG)):
            if _has_its_day(item, day, TURNS):
                chosen.append(item)
        elif hasattr(item, "callspec"):
            cases[item.nodeid.partition("[")[0]].append(item)
        else:
            chosen.append(item)
    for each in cases.values():
        chosen += each[day % min(TURNS, len(each)) :: TURNS]
    return chosen


def for_daily_use(items: Sequence[pytest.Item], day: int) -> list[pytest.Item]:
    """Tests that take no seconds; of the conformance tests those of the day."""
    return [
        item
        for item in items
        if not item.get_closest_marker("slow")
        and ("conformance" not in item.path.parts or _has_its_day(item, day, CONFORMANCE_DAYS))
    ]


def _has_its_day(item: pytest.Item, day: int, days: int) -> bool:
    return zlib.crc32(item.nodeid.encode()) % days == day % days
