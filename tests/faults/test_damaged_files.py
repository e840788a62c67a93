"""Files that lazyviz reads, cut off or with flipped bits or other values: one sentence, or as if absent."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator
from typing import Any

import torch

import lazyviz
from lazyviz.cli.compare_command import compare
from lazyviz.cli.plan_command import UsageError
from lazyviz.cli.plan_data import FORMAT
from lazyviz.plan.runtime import cpu_op_times

PLAN = {
    "format": FORMAT,
    "script": "train.py",
    "device": "cpu",
    "verdict": "fits",
    "needed_bytes": 1200,
    "eager_peak_bytes": 1000,
    "eager_reserved_bytes": None,
    "ops": 12,
    "by_category": {"parameters": 800, "activations": 200},
    "by_line": [{"file": "train.py", "line": 3, "text": "net = Linear(4, 4)", "bytes": 800}],
}
CURVE = ((8.0, 1e9), (512.0, 2e9))
RATES = cpu_op_times.CpuRates(2e-6, 9e-6, {"mm": 3e-6}, *[CURVE] * 7)
NUMBERS = (True, -1, 0, 1.5, math.nan, math.inf, 10**400)
VALUES = (*NUMBERS, None, "", "\ud800\0\x1b[31m[/bold]", [], {}, [[]], [None], {"a": 1})
ODD = (b"", b"null", b"1" * 5000, b"\0" * 100, b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000)


def places(data: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if above:
        yield above
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, item in items:
        yield from places(item, (*above, key))


def damaged(text: str) -> Iterator[bytes]:
    """``text`` cut off at each byte, with single bits flipped, with other values, and other texts."""
    good, data, chance = text.encode(), json.loads(text), random.Random(3)
    yield from ODD
    for end in range(len(good)):
        yield good[:end]
    for _ in range(300):
        bit = chance.randrange(8 * len(good))
        flipped = bytearray(good)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)
    for *above, last in places(data):
        for value in VALUES:
            changed = copy.deepcopy(data)
            inner = changed
            for key in above:
                inner = inner[key]
            inner[last] = value
            yield json.dumps(changed).encode()


def test_a_damaged_plan_is_one_sentence_or_compared(tmp_path, capsys):
    good, other = tmp_path / "good.json", tmp_path / "other.json"
    good.write_text(json.dumps(PLAN))
    refused = compared = 0
    tried = list(damaged(json.dumps(PLAN)))
    for each in tried:
        other.write_bytes(each)
        try:
            compare(str(good), str(other))
            compared += 1
        except UsageError as error:
            refused += "\n" not in str(error) and str(other) in str(error)
        said = capsys.readouterr().out
        said.encode()  # no lone surrogates
        assert "\x1b[31m" not in said and "\0" not in said
    assert refused + compared == len(tried) and min(refused, compared) > 100


def test_a_damaged_calibration_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with lazyviz.lazy() as graph:
        x = torch.ones(8, 8)
        (x @ x).exp().sum()
    file = cpu_op_times.cache_file()
    file.parent.mkdir()

    def seconds(content: bytes) -> float | None:
        file.write_bytes(content)
        cpu_op_times._read.clear()
        return graph.plan(device="cpu").seconds

    assert seconds(RATES.text().encode())
    used = ignored = 0
    for each in damaged(RATES.text()):
        found = seconds(each)
        assert found is None or 0 < found < math.inf
        used, ignored = used + (found is not None), ignored + (found is None)
    assert used > 50 and ignored > 500
    lazyviz.reset()
