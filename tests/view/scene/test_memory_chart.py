"""The memory chart's data: points, parts of the run, and what was measured."""

from __future__ import annotations

import json

import pytest

from lazyviz.plan.make_plan import make_plan
from lazyviz.view.scene.memory_chart import CHART_POINTS, memory_json, points, range_json
from lazyviz.view.scene.scene import Scene


@pytest.fixture
def long(write):
    """A scene of some thousand positions."""
    program = write.Program()
    for _ in range(80):
        write.training_step(program, 4)
    return Scene(program.graph, make_plan(program.graph))


def test_points_tell_what_runs_there_and_add_up_to_the_timeline(long):
    timeline = long.plan.timeline
    whole = memory_json(long)["points"]
    assert len(whole["at"]) == len(whole["ops"]) == CHART_POINTS < len(timeline)
    for part in (whole, points(long, 100, 160), points(long, 7, 8)):
        totals = [sum(sizes) for sizes in zip(*part["bytes"], strict=True)]
        assert totals == [timeline[position][1] for position in part["at"]]
        node = long.graph.nodes[timeline[part["at"][0]][0]]
        assert part["ops"][0].startswith(f"{node.module or node.phase}: ")
        assert part["ops"][0].endswith(f"cell_compilation.py:{node.source.line}")
    assert points(long, 100, 160)["at"] == list(range(100, 160)), "a part has a point for each op"


def test_a_part_of_the_run_lists_its_allocations_with_their_shares(long):
    part = range_json(long, 100, 160)
    json.dumps(part)
    made = [
        storage for storage in long.graph.storages if not storage.external and 100 <= storage.created < 160
    ]
    assert part["madeCount"] == len(made)
    assert sum(row["share"] for row in part["made"]) == pytest.approx(
        sum(sorted((storage.nbytes for storage in made), reverse=True)[: len(part["made"])])
        / sum(storage.nbytes for storage in made)
    )
    assert all(row["chain"] and 0 < row["share"] <= 1 for row in part["made"])
    shares = [row["share"] for row in part["made"]]
    assert shares == sorted(shares, reverse=True)


def test_messages_stay_small_however_long_the_run_is(long):
    assert len(json.dumps(memory_json(long))) < 60_000
    assert len(json.dumps(range_json(long, 0, len(long.plan.timeline)))) < 60_000


def test_measurements_are_shown_with_the_projection(long):
    timeline = long.plan.timeline
    same = memory_json(long, list(timeline))
    assert same["points"]["held"] == [timeline[position][1] for position in same["points"]["at"]]
    assert same["measured"] == f"measured peak {same['peakText']}, as projected"
    more = memory_json(long, [(index, size + 1024) for index, size in timeline])
    assert "1.00 KiB (" in more["measured"] and more["measured"].endswith("above the projection")
    assert max(more["points"]["held"]) == long.plan.peak_bytes + 1024


def test_of_a_run_that_is_not_over_the_measured_part_is_shown(long):
    timeline = long.plan.timeline
    memory = memory_json(long, list(timeline[:100]))
    assert memory["measured"].startswith("measured up to ")
    assert memory["measured"].endswith(f"in 100 of {len(timeline):,} ops")
    held = memory["points"]["held"]
    assert held[0] is not None and held[-1] is None
    assert "held" not in memory_json(long)["points"] and memory_json(long)["measured"] == ""


def test_a_run_in_parts_says_why_it_may_have_held_less(write):
    program = write.Program()
    write.training_step(program, 4)
    program.sync()
    scene = Scene(program.graph, make_plan(program.graph))
    less = [(index, size - 32) for index, size in scene.plan.timeline]
    words = memory_json(scene, less)["measured"]
    assert "below the projection" in words and words.endswith("each of which counts what it works on)")


def test_a_run_in_pieces_is_not_held_against_the_plan_of_the_whole(long):
    timeline = long.plan.timeline
    memory = memory_json(long, [*timeline, *timeline])
    assert "held" not in memory["points"]
    assert memory["measured"].startswith("measured in other pieces")


def test_nothing_measured_is_shown_in_the_plan_of_another_batch(long, monkeypatch):
    monkeypatch.setattr(type(long.plan), "recorded_batch_size", 12)
    memory = memory_json(long, list(long.plan.timeline))
    assert "held" not in memory["points"]
    assert memory["measured"] == "measured with 12 samples: choose that batch to see it here"
