"""Subcommands of the ``lazyviz`` command, and their options.

A subcommand starts only after click has parsed the command line and returned, because a script may use click
itself, and because its tracebacks should show only its own frames.
"""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import click

from .. import __version__
from ..plan.units import parse_bytes
from ..record.fake_cuda.generate_until_max_length import UNTIL_MAX_NEW_TOKENS
from . import compare_command, compile_command, doctor_command, plan_command, run_command
from .plan_command import PlanOptions
from .run_script_as_main import Script

Task = Callable[[], int]
Command = Callable[..., Any]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="lazyviz %(version)s")
def cli() -> None:
    """Plan, view, and run PyTorch scripts: their graph, memory, and time.

    Scripts need no changes. Put a script's own arguments after "--".
    """


class Size(click.ParamType):  # type: ignore[type-arg]  # click 8.1 has no arguments
    """A size: bytes, or text such as 38GiB."""

    name = "size"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> int:
        try:
            return parse_bytes(value)
        except ValueError as error:
            self.fail(str(error), parameter, context)


class Assumed(click.ParamType):  # type: ignore[type-arg]
    """An assumed value: LINE=VALUE, FILE:LINE=VALUE, or *=VALUE."""

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
    """Add the arguments that name the script and its arguments."""
    command = click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS]...")(
        command
    )
    command = click.argument("script", metavar="SCRIPT")(command)
    return click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in python -m.")(command)


def of_recording(steps: int) -> Callable[[Command], Command]:
    """Add the options for the device to record for, and for how many steps."""

    def decorate(command: Command) -> Command:
        for option in (
            click.option(
                "--assume",
                multiple=True,
                type=Assumed(),
                help="The value that a read at that line of the script (or FILE:LINE, or * for "
                "anywhere) returns if "
                "only an absent GPU could compute it. Can be repeated.",
            ),
            click.option(
                "--steps",
                type=click.IntRange(min=1),
                default=steps,
                show_default=True,
                help="Stop after this many steps of the first optimizer that steps.",
            ),
            click.option(
                "--device",
                metavar="DEVICE",
                help="Plan for this device: cpu, cuda, or a GPU such as A100-80GB, present or not "
                "(see lazyviz devices). Default: the device that the script uses.",
            ),
            click.option(
                "--torch-version",
                metavar="VERSION",
                help="The PyTorch release that will run on the absent GPU, such as 1.13. Default: the "
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
    "--fail-above", type=Size(), metavar="SIZE", help="Exit with 3 if more memory is needed: 38GiB, 800MB."
)
@click.option("--json", "json_file", metavar="FILE", help="Write the plan as JSON (- for stdout).")
@click.option(
    "--annotations/--no-annotations",
    default=None,
    help="Print the peak as GitHub Actions annotations. Default: on if GITHUB_ACTIONS=true.",
)
def plan(
    script: str, arguments: Sequence[str], module: bool, annotations: bool | None, **options: Any
) -> Task:
    """Record SCRIPT, stop after some optimizer steps, and print its plan.

    The plan shows the memory peak, whether it fits, which tensors are alive at the peak, which lines
    allocated them, and what would lower it. Values that the script reads are evaluated, as in any lazy block.
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
    help="Output file: .html (interactive), .svg, .png, .pdf, .dot, .json, .pickle. Can be repeated.",
)
def view(script: str, arguments: Sequence[str], module: bool, output: Sequence[str], **options: Any) -> Task:
    """Record SCRIPT, and write a picture of its graph."""
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
@click.option("--backend", metavar="NAME", help="Backend to run with: eager (the default), inductor, ...")
@click.option("--recompute", metavar="SIZE", help="Stay below SIZE (or auto) by recomputing activations.")
@click.option("-q", "--quiet", is_flag=True, help="Print no summary at the end.")
def run(
    script: str,
    arguments: Sequence[str],
    module: bool,
    backend: str | None,
    recompute: str | None,
    quiet: bool,
) -> Task:
    """Run SCRIPT lazily: record it, and evaluate after each optimizer step and where it reads values.

    Results, output, and exit code are those of python SCRIPT. A summary goes to stderr.
    """
    made = Script(script, arguments, module)
    return functools.partial(run_command.run, made, backend=backend, recompute=recompute, quiet=quiet)


@cli.command()
@click.argument("first", metavar="BEFORE.json")
@click.argument("second", metavar="AFTER.json")
def compare(first: str, second: str) -> Task:
    """Compare two plans written by lazyviz plan --json."""
    return functools.partial(compare_command.compare, first, second)


@cli.command()
@click.option(
    "--time", "timed", metavar="SCRIPT", help="Record SCRIPT, and print its projected time on each known GPU."
)
@click.option(
    "--device",
    default="H100-80GB",
    show_default=True,
    metavar="DEVICE",
    help="With --time: the GPU that SCRIPT is recorded for; it determines the kernels.",
)
@click.option(
    "--price", metavar="FILE", help="With --time: a CSV file; each line has a GPU and its price per hour."
)
@click.option("--assume", multiple=True, type=Assumed(), help="With --time: as for lazyviz plan.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS]...")
def devices(
    timed: str | None, device: str, price: str | None, assume: Sequence[Any], arguments: Sequence[str]
) -> Task:
    """List the devices of this machine, and the profiles of GPUs that plans can use without having them.

    With --time SCRIPT: whether its second optimizer step fits on each GPU, how long it would take there, and
    with --price what a thousand such steps would cost.
    """
    if timed is None:
        if price or assume or arguments:
            raise click.UsageError("--price, --assume, and script arguments need --time SCRIPT.")
        return doctor_command.show_devices
    made = Script(timed, arguments, False)
    return functools.partial(plan_command.on_each_gpu, made, device=device, price=price, assume=dict(assume))


@cli.command()
@click.option("--gpu", is_flag=True, help="Also test lazyviz on a GPU; takes a few minutes.")
def doctor(gpu: bool) -> Task:
    """Show what is installed, compiled, and missing, and possible improvements.

    With --gpu, also compare operators and training steps with eager PyTorch on a GPU, bit by bit, and
    projected with measured memory, and print a report to paste into an issue.
    """
    return functools.partial(doctor_command.examine, gpu=gpu)


@cli.command("compile")
@click.option("--force", is_flag=True, help="Recompile modules that are up to date, too.")
def compile_modules(force: bool) -> Task:
    """Compile the native modules for the installed PyTorch."""
    return functools.partial(compile_command.compile_modules, force=force)
