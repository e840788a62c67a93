"""``python -m lazyviz``: entry point of the command line, also for ``torchrun -m lazyviz``."""

from __future__ import annotations

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
