"""``python -m lazyviz``: the command, as ``torchrun -m lazyviz`` and its kind start it."""

from __future__ import annotations

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
