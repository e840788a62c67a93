"""Entry points for ``%load_ext lazyviz``. IPython is imported here, so that scripts do not import it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Register ``%%lazy`` and ``%lazy``; doing it twice changes nothing."""
    from . import magic

    magic.load_ipython_extension(ipython)


def unload_ipython_extension(ipython: InteractiveShell) -> None:
    """Evaluate pending ops, and undo everything that loading the extension did."""
    from . import magic

    magic.unload_ipython_extension(ipython)
