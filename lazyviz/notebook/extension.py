"""What ``%load_ext lazyviz`` calls.  IPython is there by then; a script need not wait for its import."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Register ``%%lazy`` and ``%lazy``; doing it twice changes nothing."""
    from . import magic

    magic.load_ipython_extension(ipython)


def unload_ipython_extension(ipython: InteractiveShell) -> None:
    """Evaluate what is pending, and undo everything that loading the extension did."""
    from . import magic

    magic.unload_ipython_extension(ipython)
