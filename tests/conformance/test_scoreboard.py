"""The table of counts is correct."""

from __future__ import annotations

import json

from .scoreboard import EQUAL, FAILING, NONDETERMINISTIC, Scoreboard


def test_an_entry_counts_once_with_its_worst_outcome_and_all_its_samples():
    board = Scoreboard()
    board.add("ops", "add", EQUAL, samples=2)
    board.add("ops", "add", FAILING, samples=3, syncs=["item"])
    board.add("ops", "empty", NONDETERMINISTIC)
    assert board.rows()[1:] == [("ops", "2", "6", "0", "1", "1", "1", "1")]
    assert "ops" in board.text() and "Lazy Tensor Core" in board.text()


def test_a_written_scoreboard_can_be_read_back(tmp_path):
    board, again = Scoreboard(), Scoreboard()
    board.add("op out=", "add", EQUAL, samples=1_000, syncs=["item"])
    board.write(tmp_path / "scores.json")
    again.merge(json.loads((tmp_path / "scores.json").read_text()))
    assert again.to_json() == board.to_json()
    board.write(tmp_path / "scores.md")
    assert "| op out= | 1 | 1,000 |" in (tmp_path / "scores.md").read_text()
