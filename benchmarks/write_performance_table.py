"""Writes the table of speed and memory from ``benchmarks/results/speed.json`` to docs/performance.md.

    python benchmarks/write_performance_table.py

A test compares the page with the JSON, so after a run of ``make bench`` this is to be run, too.
"""

from __future__ import annotations

import sys

from run import RESULT, ROOT, read
from speed.results_table import put

PAGE = ROOT / "docs" / "performance.md"


def main() -> int:
    """Write the page; the exit status."""
    PAGE.write_text(put(PAGE.read_text(encoding="utf-8"), read(RESULT)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
