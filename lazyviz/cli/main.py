"""The command ``lazyviz`` and its options.

What a subcommand does begins once the command line has been read and click is done: a script may use click
itself, and its traceback is to show its own frames.
"""

from __future__ import annotations

import ast
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from .. import __version__
from ..plan.units import parse_bytes
from ..record.fake_cuda.generation import UNTIL_MAX_NEW_TOKENS
from . import compare_command, compile_command, doctor_command, plan_command, run_command
from .plan_command import FINE, USAGE, PlanOptions, UsageError
from .script import Script

Task = Callable[[], int]
Command = Callable[..., Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code: 0 fine, 1 the script failed, 2 usage, 3 above the budget."""
    try:
        task = cli.main(
            args=None if arguments is None else list(arguments), prog_name="lazyviz", standalone_mode=False
        )
        return task() if callable(task) else int(task or FINE)
    except click.NoSuchOption as error:
        sentence = f"There is no option {error.option_name}; arguments of the script come after --."
        click.UsageError(sentence, error.ctx).show()
    except click.ClickException as error:
        error.show()
    except (click.exceptions.Abort, KeyboardInterrupt):
        return plan_command.INTERRUPTED
    except BrokenPipeError:  # whoever read the output has gone; Python would complain of it at its end, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return plan_command.FAILED
    except UsageError as error:
        print(f"lazyviz: {error}", file=sys.stderr)
    return USAGE


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="lazyviz %(version)s")
def cli() -> None:
    """What a PyTorch script would do, and what memory it would take.

    Scripts are run as they are: their arguments come after "--".
    """


class Size(click.ParamType):
    """Bytes, or text such as 38GiB."""

    name = "size"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> int:
        try:
            return parse_bytes(value)
        except ValueError as error:
            self.fail(str(error), parameter, context)


class Assumed(click.ParamType):
    """LINE=VALUE, FILE:LINE=VALUE or *=VALUE."""

    name = "LINE=VALUE"

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> tuple[int | str, Any]:
        if isinstance(value, tuple):
            return value
        if value == UNTIL_MAX_NEW_TOKENS:
            return UNTIL_MAX_NEW_TOKENS, True
        place, sign, text = value.rpartition("=")
        known = place == "*" or place.isdecimal() or place.rpartition(":")[2].isdecimal()
        try:
            if sign and known:
                return int(place) if place.isdecimal() else place, ast.literal_eval(text)
        except (ValueError, SyntaxError):
            pass
        self.fail(
            f"{value!r}: write LINE=VALUE (a line of the script), FILE:LINE=VALUE, or *=VALUE for any line; "
            "VALUE is a number.",
            parameter,
            context,
        )


def of_script(command: Command) -> Command:
    """The script, and its arguments."""
    command = click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS]...")(
        command
    )
    command = click.argument("script", metavar="SCRIPT")(command)
    return click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as of python -m.")(command)


def of_recording(steps: int) -> Callable[[Command], Command]:
    """For what the script is recorded, and how far."""

    def decorate(command: Command) -> Command:
        for option in (
            click.option(
                "--assume",
                multiple=True,
                type=Assumed(),
                help="What a read of a value gives on a card that is absent: at that line of the script, at "
                "FILE:LINE, or with *=VALUE anywhere. May be repeated.",
            ),
            click.option(
                "--steps",
                type=click.IntRange(min=1),
                default=steps,
                show_default=True,
                help="Stop after so many steps of the optimizer that steps first.",
            ),
            click.option(
                "--device",
                metavar="DEVICE",
                help="Plan for this device: cpu, cuda, or a card such as A100-80GB, present or not "
                "(lazyviz devices). Default: where the script runs.",
            ),
            click.option(
                "--torch-version",
                metavar="VERSION",
                help="The PyTorch release that is to run on an absent card, such as 1.13. Default: the "
                "installed one.",
            ),
        ):
            command = option(command)
        return command

    return decorate


@cli.command()
@of_script
@of_recording(steps=2)
@click.option(
    "--fail-above", type=Size(), metavar="SIZE", help="Exit with 3 if more is needed: 38GiB, 800MB."
)
@click.option("--json", "json_file", metavar="FILE", help="Write the plan as JSON (- is stdout).")
@click.option(
    "--annotations/--no-annotations",
    default=None,
    help="Print the peak as annotations of GitHub Actions; default: where GITHUB_ACTIONS is set.",
)
def plan(
    script: str, arguments: Sequence[str], module: bool, annotations: bool | None, **options: Any
) -> Task:
    """Run SCRIPT under recording, stop after some optimizer steps, and print its plan.

    Shown are the peak of memory, whether it fits, what is alive then, the lines that made it, and what would
    lower it. What the script reads of its own values is evaluated, as in any lazy block.
    """
    if annotations is None:
        annotations = os.environ.get("GITHUB_ACTIONS") == "true"
    chosen = PlanOptions(
        options["device"],
        options["steps"],
        options["fail_above"],
        options["json_file"],
        annotations,
        dict(options["assume"]),
        options["torch_version"],
    )
    return functools.partial(plan_command.plan, Script(script, arguments, module), chosen)


@cli.command()
@of_script
@of_recording(steps=1)
@click.option(
    "-o",
    "--output",
    multiple=True,
    default=("graph.html",),
    show_default=True,
    metavar="FILE",
    help="Where to write it: .html (interactive), .svg, .png, .pdf, .dot, .json, .pickle. May be repeated.",
)
def view(script: str, arguments: Sequence[str], module: bool, output: Sequence[str], **options: Any) -> Task:
    """Run SCRIPT under recording, and write the picture of its graph."""
    return functools.partial(
        plan_command.view,
        Script(script, arguments, module),
        output,
        device=options["device"],
        steps=options["steps"],
        assume=dict(options["assume"]),
        torch_version=options["torch_version"],
    )


@cli.command()
@of_script
@click.option("--backend", metavar="NAME", help="What evaluates: eager (the default), inductor, ...")
@click.option("--recompute", metavar="SIZE", help="Stay below SIZE by computing activations again; or auto.")
@click.option("-q", "--quiet", is_flag=True, help="No summary at the end.")
def run(
    script: str,
    arguments: Sequence[str],
    module: bool,
    backend: str | None,
    recompute: str | None,
    quiet: bool,
) -> Task:
    """Run SCRIPT recorded, and evaluate it after each optimizer step and where it reads values.

    Its results, what it prints and its exit code are those of python SCRIPT; a summary goes to stderr.
    """
    made = Script(script, arguments, module)
    return functools.partial(run_command.run, made, backend=backend, recompute=recompute, quiet=quiet)


@cli.command()
@click.argument("first", metavar="BEFORE.json")
@click.argument("second", metavar="AFTER.json")
def compare(first: str, second: str) -> Task:
    """What differs between two plans that lazyviz plan --json has written."""
    return functools.partial(compare_command.compare, first, second)


@cli.command()
@click.option(
    "--time", "timed", metavar="SCRIPT", help="Record SCRIPT, and tell its time on each known card."
)
@click.option(
    "--device",
    default="H100-80GB",
    show_default=True,
    metavar="DEVICE",
    help="With --time: the card that SCRIPT is recorded for, which decides what its kernels are.",
)
@click.option("--price", metavar="FILE", help="With --time: CSV, a card and its price an hour a line.")
@click.option("--assume", multiple=True, type=Assumed(), help="With --time: as of lazyviz plan.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS]...")
def devices(
    timed: str | None, device: str, price: str | None, assume: Sequence[Any], arguments: Sequence[str]
) -> Task:
    """The devices of this machine, and the cards that can be planned for without being here.

    With --time SCRIPT: whether its second optimizer step fits each card, how long it would take there, and
    with --price what a thousand such steps cost.
    """
    if timed is None:
        if price or assume or arguments:
            raise click.UsageError("Prices, assumptions and arguments are of --time SCRIPT.")
        return doctor_command.show_devices
    made = Script(timed, arguments, False)
    return functools.partial(plan_command.on_each_card, made, device=device, price=price, assume=dict(assume))


@cli.command()
@click.option("--gpu", is_flag=True, help="Check lazyviz on a GPU, too, for some minutes.")
def doctor(gpu: bool) -> Task:
    """What is installed, compiled and missing, and what would be faster.

    With --gpu operators and training steps are compared with plain PyTorch on a card, bit by bit, projected
    memory with measured; it ends with a report to paste into an issue.
    """
    return functools.partial(doctor_command.examine, gpu=gpu)


@cli.command("compile")
@click.option("--force", is_flag=True, help="Anew, also what is there for this PyTorch.")
def compile_modules(force: bool) -> Task:
    """Compile the native modules for the PyTorch that is installed."""
    return functools.partial(compile_command.compile_modules, force=force)


if __name__ == "__main__":
    sys.exit(main())
