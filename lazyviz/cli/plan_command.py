"""``lazyviz plan`` and ``lazyviz view``: record a script, and print its plan or draw its graph."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from ..plan.runtime.gpu_price_comparison import GpuTable, compare_gpus, read_prices
from ..plan.units import format_bytes
from ..process.startup_interrupt import INTERRUPTED
from ..process.stdio import StandardStreams
from ..session.default_options import options as defaults
from ..session.lazy_graph import LazyGraph
from ..view.export.atomic_write import write_whole
from ..view.printable_text import visible
from .github_annotations import github_lines
from .plan_data import HERE, PICTURES, Data, described, relative, with_inner_blocks
from .plan_tables import console, show_plan, steps_taken, table
from .record_script_up_to_step import Recorded, UnknownDevice, record
from .run_script_as_main import NoScript, Script, show

FINE, FAILED, USAGE, ABOVE = 0, 1, 2, 3


@dataclass(frozen=True)
class PlanOptions:
    """Options of ``lazyviz plan``."""

    device: str | None = None
    steps: int = 2
    budget: int | None = None
    json_file: str | None = None
    annotate: bool = False
    assume: Mapping[int | str, Any] = field(default_factory=dict)
    torch_version: str | None = None


class UsageError(ValueError):
    """The command cannot start; the message is a sentence for the user."""


def is_silent() -> bool:
    """Whether this process should print nothing, because it is not rank 0 of `torchrun` or a similar
    launcher.
    """
    return os.environ.get("RANK", "0") not in ("", "0")


def loaded(script: Script) -> bool:
    """Load the script. On a syntax error, show it as Python does and return False.

    Raises:
        UsageError: there is no such script, or an environment variable of lazyviz has an invalid value.
    """
    try:
        defaults.check()
        script.load()
    except (NoScript, ValueError) as error:
        raise UsageError(str(error)) from None
    except SyntaxError as error:
        show(error)
        return False
    return True


def of_lines(script: Script, assume: Mapping[int | str, Any]) -> dict[int | str, Any]:
    """``assume``, with line numbers as lines of the script."""
    return {f"{script.file}:{key}" if isinstance(key, int) else key: item for key, item in assume.items()}


def on_each_gpu(script: Script, *, device: str, price: str | None, assume: Mapping[int | str, Any]) -> int:
    """Record two steps of a script, print the time of the second on each known GPU, return the exit code."""
    try:
        prices = read_prices(price) if price else None
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from None
    if not loaded(script):
        return FAILED

    streams = StandardStreams()

    def timed(graph: LazyGraph, *_: Any) -> GpuTable | None:
        whole = with_inner_blocks(graph)
        return compare_gpus(whole.plan(device=device), prices=prices) if whole.nodes else None

    try:
        recorded = record(script, 2, timed, device=device, assume=of_lines(script, assume))
    except UnknownDevice as error:
        raise UsageError(str(error)) from None
    code = report_exit(recorded)
    if recorded.result is not None:
        found = recorded.result.table()
        console(streams.stdout).print(table(found.title, found.columns, found.rows, found.numbers))
    return code


def plan(script: Script, options: PlanOptions) -> int:
    """Record a script and print its plan; return the exit code."""
    if options.json_file not in (None, "-"):
        check_output(options.json_file)
    if not loaded(script):
        return FAILED
    assume = of_lines(script, options.assume)
    streams = StandardStreams()
    try:
        recorded = record(
            script,
            options.steps,
            described,
            device=options.device,
            assume=assume,
            torch_version=options.torch_version,
        )
    except UnknownDevice as error:
        raise UsageError(str(error)) from None
    code = report_exit(recorded)
    if is_silent():
        return code
    to = console(streams.stdout)
    data = {
        "script": relative(script.name),
        "arguments": list(script.arguments),
        "steps": recorded.steps,
        "steps_wanted": options.steps,
        "end": recorded.how,
        **recorded.result,
    }
    if options.json_file is not None and not _write(options.json_file, data, streams):
        code = code or FAILED
    if options.json_file != "-":
        if data["ops"]:
            show_plan(data, to)
        for sentence in _recording_extent(script, recorded, options):
            to.print(sentence)
    if options.annotate and data["ops"]:
        print("\n".join(github_lines(data, options.budget)), file=to.file, flush=True)
    return code if code != FINE else _compare_with_budget(data, recorded, options, streams.stderr)


def report_exit(recorded: Recorded[Any]) -> int:
    """Show the script's exception, if any, as Python does; return the exit code."""
    if recorded.error is not None and recorded.how in ("failed", "interrupted"):
        show(recorded.error)
        return INTERRUPTED if recorded.how == "interrupted" else FAILED
    return FAILED if recorded.exit_code else FINE


def _recording_extent(script: Script, recorded: Recorded[Data], options: PlanOptions) -> list[str]:
    """Sentences that say where recording stopped, if that was before the requested number of steps."""
    steps = f"{recorded.steps:,} of {options.steps:,} optimizer steps"
    if not recorded.result["ops"]:
        return [
            f"No PyTorch operator of {script.name} was recorded, so there is nothing to plan. Child "
            "processes, such as those of torch.multiprocessing.spawn, are not recorded: start one rank with "
            "torchrun."
        ]
    if recorded.how == "out of reach":
        return [
            f"The plan covers only what was recorded before this ({steps}): "
            f"{_of_command_line(str(recorded.error))}"
        ]
    if recorded.how == "failed":
        return [f"The plan covers what the script did before its {type(recorded.error).__name__} ({steps})."]
    if recorded.how == "interrupted":
        return [f"The plan covers what the script did before it was interrupted ({steps})."]
    if recorded.exit_code:
        return [f"The script exited with code {recorded.exit_code} after {steps}."]
    if recorded.how == "ended":
        return [f"The script ended after {steps}."]
    return []


def _of_command_line(sentence: str) -> str:
    """An error message for notebooks, without the parts that the command prints itself, and with its hint."""
    sentence = sentence.replace("; the plan covers what was recorded before it", "")
    before, sign, _ = sentence.partition(" To continue, give the value")
    if not sign:
        return sentence
    place = re.search(r" at ([^\s:]+:\d+)", before)
    line = place[1] if place is not None else "LINE"
    return f"{before} To continue, give the value: --assume {line}=VALUE, or --assume '*=VALUE' for any line."


def _compare_with_budget(data: Data, recorded: Recorded[Data], options: PlanOptions, stderr: TextIO) -> int:
    """Compare the plan with the budget, if there is one; return the exit code, and say if it is exceeded."""
    if options.budget is None:
        return FINE
    if not data["ops"]:
        print(
            "lazyviz: --fail-above cannot be checked: no PyTorch operator was recorded. The operators of "
            "child processes are not.",
            file=stderr,
        )
        return FAILED
    need, budget = data["needed_bytes"], options.budget
    if need > budget:
        more = format_bytes(need - budget)
        print(
            f"lazyviz: {format_bytes(need)} needed on {data['device']}, {more} above the "
            f"{format_bytes(budget)} of --fail-above.",
            file=stderr,
        )
        return ABOVE
    if recorded.how == "out of reach":
        print(
            "lazyviz: --fail-above cannot be checked: the plan ends before a value that only the absent GPU "
            "could compute.",
            file=stderr,
        )
        return FAILED
    return FINE


def check_output(path: str) -> None:
    """Refuse a file that cannot be written before the script runs.

    Raises:
        UsageError: its folder does not exist, it is a folder itself, or no file can have this name.
    """
    try:
        os.stat(Path(HERE, path))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # such as a name that is too long, or links that form a circle
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    if Path(HERE, path).is_dir():
        raise UsageError(f"cannot write {path}: it is a directory")
    if not Path(HERE, path).parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no directory {Path(path).parent}")


def _write(path: str, data: Data, streams: StandardStreams) -> bool:
    """Write a plan as JSON; say so and return False if the file cannot be written."""
    text = json.dumps(data, indent=2) + "\n"
    if path == "-":
        streams.stdout.write(text)
        streams.stdout.flush()
        return True
    try:
        write_whole(Path(HERE, path), text.encode("utf-8"))
    except OSError as error:
        print(f"lazyviz: cannot write {path}: {error.strerror or error}", file=streams.stderr)
        return False
    return True


def view(
    script: Script,
    outputs: Sequence[str],
    *,
    device: str | None,
    steps: int,
    assume: Mapping[int | str, Any],
    torch_version: str | None = None,
) -> int:
    """Record a script and write pictures of its graph; return the exit code."""
    for path in outputs:
        if (suffix := Path(path).suffix.removeprefix(".")) not in PICTURES:
            found = f", not .{suffix}" if suffix else ", and there is none"
            raise UsageError(f"{path}: the suffix must be one of .{', .'.join(PICTURES)}{found}")
        check_output(path)
    if not loaded(script):
        return FAILED

    streams = StandardStreams()

    def draw(graph: LazyGraph) -> int:
        whole = with_inner_blocks(graph)
        if whole.nodes and not is_silent():
            for path in outputs:
                whole.save(Path(HERE, path), eager=True)  # the plan that `lazyviz plan` prints
        return len(whole.nodes)

    try:
        lines = of_lines(script, assume)
        recorded = record(script, steps, draw, device=device, assume=lines, torch_version=torch_version)
    except UnknownDevice as error:
        raise UsageError(str(error)) from None
    except (OSError, RuntimeError) as error:
        print(f"lazyviz: cannot write the picture: {error}", file=streams.stderr)
        return FAILED
    code = report_exit(recorded)
    if is_silent():
        return code
    to = console(streams.stderr)
    if not recorded.result:
        to.print(f"No PyTorch operator of {script.name} was recorded, so there is nothing to draw.")
        return code or FAILED
    if recorded.how == "out of reach":
        to.print(
            f"The picture shows only what was recorded before this: {_of_command_line(str(recorded.error))}"
        )
    for path in outputs:
        to.print(f"{visible(path)}: {recorded.result:,} operators, {steps_taken(recorded.steps)}")
    return code
