"""The table of speed and memory in docs/performance.md, generated from the results of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .figures import Figure, number, without_the_rest

START = "<!-- speed: this table is made by benchmarks/write_performance_table.py -->"
STOP = "<!-- end of speed -->"


class Row(NamedTuple):
    """A row of the table: its title, and the figures of a name in some parts, one for each case."""

    title: str
    figure: str
    parts: tuple[str, ...]


LONG = "an operator among {} / among 1,000"
TOTALS = ("totals-small", "totals-gpt2")
COMPILED = ("compiled-resnet", "compiled-gpt2")
ROWS = (
    Row("recording a chain of small operators / LTC's C++ recorder", "record / LTC record", ("chain",)),
    Row("the same with the recorder in Python", "record in Python / LTC record", ("chain",)),
    Row("`import lazyviz` after `import torch`; the first block of a process", "start-up", ("startup",)),
    Row("recording a training step for the first time in a process", "first record", ("first",)),
    Row("recording a training step again / LTC's recording", "warm record / LTC record", ("steps",)),
    Row("the same with the recorder in Python", "warm record in Python / LTC record", ("steps",)),
    Row("`make_fx` / recording a training step again", "make_fx / warm record", ("steps",)),
    Row("`torch.export` / recording, for a node", "torch.export / warm record, an operator", ("peers",)),
    Row("torchview / recording, for a node", "torchview / warm record, an operator", ("peers",)),
    Row("TorchLens / recording, for a node", "TorchLens / warm record, an operator", ("peers",)),
    Row("recording a chain / MLX's recording", "record / MLX record", ("chain",)),
    Row("recording, look-up and run of a training step / eager", "lazy total / eager", TOTALS),
    Row("the same in a loop, with nothing collected between steps", "lazy loop / eager loop", TOTALS),
    Row("the same under LTC / eager", "LTC total / eager", TOTALS),
    Row("a loop of `lazyviz.steps` / eager", "lazyviz.steps / eager", ("asynchronous",)),
    Row("the same with `wait=True`", "lazyviz.steps(wait=True) / eager", ("asynchronous",)),
    Row(
        "the same with each step recorded, while the one before it runs",
        "lazyviz.steps(always_record=True) / eager",
        ("asynchronous",),
    ),
    Row(
        "peak of a loop of `lazyviz.steps` / its plan and the next batch",
        "peak of lazyviz.steps / its plan and the next batch",
        ("asynchronous",),
    ),
    Row(
        "a training loop that reads its loss in each step / eager",
        "a loop that reads its loss / eager",
        ("reads",),
    ),
    Row(
        "a step of 800 that read their loss / of 50",
        "a step that reads its loss, of 800 / of 50",
        ("reads",),
    ),
    Row("a read after every operator, us", "a read after every operator", ("reads",)),
    Row("transformers' Trainer in one block / eager", "Trainer.train in one block / eager", ("reads",)),
    Row("the same compiled, a loop of tiny operators / eager", "inductor, lazy total / eager", ("fused",)),
    Row("the same loop under `torch.compile` / eager", "torch.compile / eager", ("fused",)),
    Row(
        "the same loop in eager, on tensors without elements / eager",
        "eager on tensors without elements / eager",
        ("fused",),
    ),
    Row("running compiled / `torch.compile` by hand", "inductor, run / torch.compile", COMPILED),
    Row("recording and running compiled / the same", "inductor, lazy total / torch.compile", COMPILED),
    Row("share of operators that run compiled", "share of ops that inductor runs", COMPILED),
    Row(
        "peak memory while evaluating / eager's and what is held",
        "peak while evaluating with eager / eager's + held",
        ("memory",),
    ),
    Row(
        "the same compiled",
        "peak while evaluating with inductor / eager's + held",
        COMPILED,
    ),
    Row(LONG.format("1,000,000"), LONG.format("1,000,000"), ("linear",)),
    Row(LONG.format("100,000"), LONG.format("100,000"), ("linear",)),
    Row("CUDA Graph replay / eager", "CUDA Graph replay / eager", ("cuda_graphs",)),
)


def table(parts: Mapping[str, Any]) -> str:
    """The table as Markdown, followed by a description of the machine."""
    if not parts:
        return "(`make bench` has not been run yet.)"
    lines = ["| | measured | wanted |", "|---|---|---|"]
    for row in ROWS:
        figures = found(parts, row)
        if not figures:
            continue
        for wanted in dict.fromkeys(figure.criterion for figure in figures):
            measured = "; ".join(shown(each) for each in figures if each.criterion == wanted)
            lines.append(f"| {row.title} | {measured} | {wanted.replace('<=', '≤').replace('>=', '≥')} |")
    return "\n".join([*lines, "", footer(parts)])


def found(parts: Mapping[str, Any], row: Row) -> list[Figure]:
    """The figures of a row; only the worst one if there is a figure for the worst case."""
    every = [Figure.from_json(data) for name in row.parts for data in parts.get(name, {}).get("figures", [])]
    return without_the_rest([each for each in every if each.name == row.figure])


def shown(figure: Figure) -> str:
    """A figure with its case; in bold if the criterion is not met."""
    value = "—" if figure.value is None else number(figure.value)
    if figure.met is False:
        value = f"**{value}**"
    return f"{figure.case}: {value}"


def footer(parts: Mapping[str, Any]) -> str:
    """Text about the machine and the method of measurement."""
    machines = [part["machine"] for part in parts.values()]
    last = machines[-1]
    versions = ", ".join(
        f"{name} {last[name]}" for name in ("torch", "transformers", "python") if name in last
    )
    recorder = next((part["process"]["recorder"] for part in parts.values() if part["process"]), "")
    rounds = max(part["settings"]["rounds"] for part in parts.values())
    return (
        "[All results](../benchmarks/results/speed.json), [plot](../benchmarks/results/speed.svg): "
        f"medians of up to {rounds} interleaved rounds, each part in one process; **bold** is not as wanted. "
        f"Recorder {recorder}. {last['cores']} cores ({last['cpu']}), {versions}."
    )


def put(text: str, parts: Mapping[str, Any]) -> str:
    """The page's text with the table between its markers.

    Raises:
        ValueError: the markers are missing.
    """
    if START not in text or STOP not in text:
        raise ValueError(f"the page has no {START!r} with {STOP!r} after it")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(STOP)
    return f"{before}{START}\n{table(parts)}\n{STOP}{after}"
