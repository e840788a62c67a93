"""Puts the table of speed and memory, made from ``benchmarks/results/speed.json``, into the README.

    python benchmarks/readme_table.py

A test compares the README with the JSON, so after a run of ``make bench`` this is to be run, too.
"""

from __future__ import annotations

import sys

from run import RESULT, ROOT, read
from speed.table import put

README = ROOT / "README.md"


def main() -> int:
    """Write the README; the exit status."""
    README.write_text(put(README.read_text(encoding="utf-8"), read(RESULT)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
