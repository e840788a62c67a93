"""Garbage collector pauses."""

from __future__ import annotations

import gc

from lazyviz.process import gc_pause


def test_many_objects_made_in_a_pause_are_not_traversed_as_new_ones(monkeypatch):
    monkeypatch.setattr(gc_pause, "_MANY", 1000)
    gc.unfreeze()  # of the process that the tests were forked from
    with gc_pause.paused():
        kept = [[number] for number in range(100_000)]
        assert not gc.isenabled()
    assert gc.isenabled() and not gc.get_freeze_count()
    young = {id(item) for generation in (0, 1) for item in gc.get_objects(generation)}
    assert not young.intersection(map(id, kept[:-1000]))


def test_few_objects_made_in_a_pause_stay_young():
    gc.collect()
    with gc_pause.paused():
        kept = [[] for _ in range(10)]
    assert {id(item) for item in kept} <= {id(item) for item in gc.get_objects(0)}
