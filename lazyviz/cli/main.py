"""Entry point of the ``lazyviz`` command: runs a subcommand, and prints errors as one sentence."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Sequence

import click

from ..process import startup_interrupt
from .plan_command import FAILED, FINE, USAGE, UsageError
from .subcommands_and_options import cli


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 success, 1 script failed, 2 usage error, 3 above the
    budget.

    Raises:
        KeyboardInterrupt: Ctrl-C has ended this process's command (``arguments`` is ``None``).
    """
    code = _exit_code(arguments)
    if isinstance(code, startup_interrupt.InterruptedCode) and arguments is None:
        startup_interrupt.end_interrupted()
    return code


def _exit_code(arguments: Sequence[str] | None) -> int:
    """Run the command; print errors as one sentence and return the exit code."""
    try:
        startup_interrupt.end()
        task = cli.main(
            args=None if arguments is None else list(arguments), prog_name="lazyviz", standalone_mode=False
        )
        return task() if callable(task) else int(task or FINE)
    except click.NoSuchOption as error:
        similar = f" (did you mean {' or '.join(error.possibilities)}?)" if error.possibilities else ""
        takes_script = error.ctx is not None and any(
            each.name == "arguments" for each in error.ctx.command.params
        )
        hint = "; put the script's arguments after --" if takes_script else ""
        click.UsageError(f"There is no option {error.option_name}{similar}{hint}.", error.ctx).show()
    except click.ClickException as error:
        error.show()
    except (click.exceptions.Abort, KeyboardInterrupt):
        return startup_interrupt.INTERRUPTED
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        if error.errno == errno.ENOSPC:
            print(f"lazyviz: cannot write the output: {error.strerror}", file=sys.stderr)
        # The reader of our output has exited, or its disk is full: Python would report it at exit, too.
        with contextlib.suppress(AttributeError, ValueError):  # there is none, or the script has closed it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())  # type: ignore[union-attr]
        return FAILED
    except UsageError as error:
        print(f"lazyviz: {error}", file=sys.stderr)
    return USAGE


if __name__ == "__main__":
    sys.exit(main())
