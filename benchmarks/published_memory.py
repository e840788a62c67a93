"""Compares published memory figures in ``data/published_memory.csv`` with projections for their GPUs.

Each row's program (``published_programs.py``) is recorded on this machine for the GPU, which is absent, and
planned; nothing of it runs.  Written are ``results/published_memory.json`` and the page
``docs/published_memory.md``::

    python benchmarks/published_memory.py [--only TEXT] [--packages DIR]
    python benchmarks/published_memory.py --page-only

What a model of transformers keeps for its backward pass differs between releases.  A row that names one is
recorded with the package in ``DIR/VERSION``, put there by::

    pip install --no-deps --target DIR/4.46.3 transformers==4.46.3 'huggingface-hub<1' 'tokenizers<0.21'
    pip install --no-deps --target DIR/4.43.4 transformers==4.43.4 'huggingface-hub<1' 'tokenizers<0.20'
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DATA = HERE / "data" / "published_memory.csv"
RESULTS = HERE / "results" / "published_memory.json"
PAGE = HERE.parent / "docs" / "published_memory.md"
UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}
KINDS = {
    "allocated": "`max_memory_allocated`",
    "reserved": "`max_memory_reserved`",
    "driver less context": "NVML less the context",
    "driver": "NVML",
}
# GPUs that lazyviz does not list: memory according to the source or nvidia-smi, and compute capability.
CARDS = {
    "RTX-2060": ("8 GiB", (7, 5)),
    "RTX-3080-Ti-16GB": ("16 GiB", (8, 6)),
    "RTX-4070-Ti-SUPER": ("16 GiB", (8, 9)),
    "TITAN-RTX": ("24217 MiB", (7, 5)),
}
NARROW = 0.15  # of the projection: a range that is no wider
# Before this release, cuBLAS allocated its workspace with CUDA, not the caching allocator (pytorch#83461).
CUBLAS_WORKSPACE = (1, 13)

Row = dict[str, str]
Result = dict[str, Any]


def rows() -> list[Row]:
    with DATA.open(encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    for number, row in enumerate(found, 1):
        row["id"] = str(number)
    return found


def published(row: Row) -> tuple[float, float]:
    """The published bytes, and half of the last digit's value."""
    unit = UNITS[row["unit"]]
    return float(row["published"]) * unit, float(row["step"]) * unit / 2


def device_of(name: str) -> Any:
    import lazyviz
    from lazyviz.plan.devices.cuda_context import CONTEXT_BYTES

    if name not in CARDS:
        return name
    total, capability = CARDS[name]
    return lazyviz.DeviceProfile(
        name, total, context_bytes=CONTEXT_BYTES, compute_capability=capability, source="the published run"
    )


def simulated(plan: Any, release: tuple[int, int]) -> Any:
    """The caching allocator's figures for the plan's run, with the accounting of that PyTorch release."""
    from lazyviz.plan.allocator.simulate_events import simulate

    calls = plan._reservation.calls
    if release < CUBLAS_WORKSPACE:
        calls = [call for call in calls if not isinstance(call[1], str)]
    return simulate([(key, nbytes) for _, key, nbytes in calls])


def record(row: Row) -> Result:
    """The figures of one row's plan."""
    import older_release_effects
    import published_programs
    import torch

    import lazyviz
    from lazyviz.record.fake_cuda import older_releases

    torch.manual_seed(0)
    release = older_releases.release(row["torch"])
    device = device_of(row["card"])
    arguments = ast.literal_eval(row["arguments"])
    program = published_programs.PROGRAMS[row["program"]]
    if "optimizer" in program.__annotations__:
        arguments["optimizer"] = row["optimizer"]
    start = time.perf_counter()
    with (
        older_release_effects.of(release),
        lazyviz.lazy(device=device, assume=published_programs.ASSUMED, torch_version=row["torch"]) as graph,
    ):
        program(int(row["batch"]), **arguments)
    plan = graph.plan(device=device)
    outcome = simulated(plan, release)
    assert plan.verdict_of == "eager" and plan.reserved_bytes is not None
    by_kind = {
        "allocated": (outcome.allocated_peak, plan.max_memory_allocated_range),
        "reserved": (outcome.reserved_peak, plan.reserved_range),
        "driver less context": (outcome.reserved_peak, plan.reserved_range),
        "driver": (outcome.reserved_peak + plan.needed_bytes - plan.reserved_bytes, plan.eager_driver_range),
    }
    projected, stated = by_kind[row["kind"]]
    whole = {"allocated": plan.max_memory_allocated, "driver": plan.needed_bytes}
    return {
        "projected": projected,
        "range": stated,
        "planned": whole.get(row["kind"], plan.reserved_bytes),
        "tensors": plan.peak_bytes,
        "allocated": outcome.allocated_peak,
        "reserved": outcome.reserved_peak,
        "context": plan.needed_bytes - plan.reserved_bytes,
        "nodes": len(graph.nodes),
        "seconds": round(time.perf_counter() - start, 2),
    }


def record_all(ids: Iterable[str]) -> None:
    """Record rows in this process, each from a clean state, and print a line of JSON for each."""
    import transformers

    import lazyviz

    transformers.utils.logging.set_verbosity_error()
    known = {row["id"]: row for row in rows()}
    for number in ids:
        try:
            result = record(known[number])
        except Exception as error:  # the row then says why it cannot be recorded
            result = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        lazyviz.reset()
        print(json.dumps({"id": number, **result}), flush=True)


def measured(chosen: Sequence[Row], packages: Path | None) -> dict[str, Result]:
    """The result of each row by its number, with one process per release of transformers."""
    results: dict[str, Result] = {}
    for version in sorted({row["transformers"] for row in chosen}):
        ids = [row["id"] for row in chosen if row["transformers"] == version]
        folder = packages / version if packages is not None else None
        if version and (folder is None or not folder.is_dir()):
            missing = f"transformers {version} is not in the folder of --packages"
            results.update({number: {"failed": missing} for number in ids})
            continue
        path = [str(folder)] if version else []
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join([*path, environment.get("PYTHONPATH", str(HERE.parent))])
        command = [sys.executable, str(Path(__file__)), "--record", ",".join(ids)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                result = json.loads(line)
                results[result.pop("id")] = result
        ended = {"failed": f"the process that recorded it ended with status {done.returncode}"}
        results.update({number: ended for number in ids if number not in results})
    return results


def judged(row: Row, result: Result) -> Result:
    """Add the error, and whether the published value, within its precision, is in the range."""
    if "failed" in result:
        return result
    value, half = published(row)
    low, high = result["range"]
    return result | {
        "published": value,
        "error": result["projected"] / value - 1,
        "hit": low <= value + half and value - half <= high,
    }


def summary(results: Sequence[Result]) -> dict[str, Any]:
    good = [result for result in results if "failed" not in result]
    errors = [abs(result["error"]) for result in good]
    widths = [(result["range"][1] - result["range"][0]) / result["projected"] for result in good]
    narrow = [result["hit"] and width <= NARROW for result, width in zip(good, widths)]
    return {
        "rows": len(results),
        "failed": len(results) - len(good),
        "median error": statistics.median(errors),
        "within 1 %": sum(error <= 0.01 for error in errors),
        "worst error": max(errors),
        "in the range": sum(result["hit"] for result in good),
        "in a narrow range": sum(narrow),
        "median width of the range": statistics.median(widths),
    }


SHARES = [number / 200 for number in range(13)]  # margins that are tried: 0 to 6 % in steps of 0.5 %


def widened_again(row: Row, result: Result, shares: tuple[float, float]) -> Result:
    """``result`` with other margins than :mod:`lazyviz.plan.uncertainty` has.

    The squares of its own are subtracted from the range's ends, and those of ``shares`` added.  They are
    shares of the tensors' peak, or of what the allocator reserves; a context, if any, is in the range's ends.
    """
    from lazyviz.plan.uncertainty import ALLOCATED, RESERVED

    of_tensors = row["kind"] == "allocated"
    planned, base = result["planned"], result["tensors" if of_tensors else "reserved"]
    ends = []
    for end, own, share in zip(result["range"], ALLOCATED if of_tensors else RESERVED, shares):
        outside = max(0.0, (end - planned) ** 2 - (own * base) ** 2)
        far = (outside + (share * base) ** 2) ** 0.5
        ends.append(planned - far if end < planned else planned + far)
    return judged(row, result | {"range": ends})


def narrowest(found: Sequence[tuple[Row, Result]], level: float, each: bool) -> tuple[float, float]:
    """The margins below and above with the least sum that ``level`` of the rows are within; ``each``: of the
    rows of each source.
    """
    pairs = sorted(
        ((below, above) for below in SHARES for above in SHARES), key=lambda pair: (sum(pair), pair)
    )
    for shares in pairs:
        hits: dict[str, list[bool]] = {}
        for row, result in found:
            key = row["source"] if each else ""
            hits.setdefault(key, []).append(widened_again(row, result, shares)["hit"])
        if all(sum(of_it) >= level * len(of_it) for of_it in hits.values()):
            return shares
    return pairs[-1]


def left_out(found: Sequence[tuple[Row, Result]]) -> dict[str, str]:
    """Per source: its rows within ranges whose margins were chosen on the other sources, as a table; and how
    many rows that were with margins that hold 90 % of all rows of the others together.
    """
    from lazyviz.plan.uncertainty import LEVEL

    lines = [
        "| source left out | rows | below | above | in range | in the plan's range |",
        "|---|---|---|---|---|---|",
    ]
    inside = own_inside = pooled = 0
    for source in dict.fromkeys(row["source"] for row, _ in found):
        mine = [each for each in found if each[0]["source"] == source]
        of_tensors = mine[0][0]["kind"] == "allocated"  # no source has both
        alike = [each for each in found if (each[0]["kind"] == "allocated") == of_tensors]
        others = [each for each in alike if each[0]["source"] != source]
        below, above = narrowest(others, LEVEL, each=True)
        hits = sum(widened_again(row, result, (below, above))["hit"] for row, result in mine)
        own_hits = sum(result["hit"] for _, result in mine)
        shares = narrowest(others, LEVEL, each=False)
        pooled += sum(widened_again(row, result, shares)["hit"] for row, result in mine)
        inside, own_inside = inside + hits, own_inside + own_hits
        lines.append(
            f"| {source} | {len(mine)} | {100 * below:.1f} % | {100 * above:.1f} % | {hits} | {own_hits} |"
        )
    lines.append(f"| all | {len(found)} | | | {inside} | {own_inside} |")
    return {"table": "\n".join(lines), "pooled": f"{pooled} of {len(found)}"}


def wide(found: Sequence[tuple[Row, Result]]) -> list[str]:
    """The rows in a range wider than :data:`NARROW`, each with what makes it wide."""
    lines = ["| program | GPU | width | because of |", "|---|---|---|---|"]
    for row, result in found:
        width = (result["range"][1] - result["range"][0]) / result["projected"]
        if width > NARROW:
            of = "the CUDA context" if row["kind"] == "driver" else "the workspace of cuDNN's algorithms"
            lines.append(f"| {row['title']} | {row['card']} | {100 * width:.1f} % | {of} |")
    return lines


CHECK = """
## Do the ranges hold for other sources?

The margins of a range (1 % below and 2 % above for allocated memory, 2 % and 4 % for reserved memory) were
chosen after looking at rows of this page. So each source is left out in turn: the narrowest margins that
hold 90 % of the rows of each *other* source are chosen (in steps of 0.5 %, for allocated and reserved
memory separately), and the rows of the source are judged with them. The last column is with the margins of
the plan, the same for all.

{table}

What a source does not state shifts all of its rows alike. Margins that only hold 90 % of the rows of all
other sources together are too narrow for another one: {pooled} are in range.

## Ranges wider than 15 %

What a CUDA context takes depends on the GPU, the driver, and the release of PyTorch, which determines
whether all kernels are loaded at once (`lazyviz/plan/devices/cuda_context.py` lists published sizes). For
the oldest releases, sizes from 719 to 1,005 MiB were published, a difference of more than 15 % of what a
small program needs. The workspace that cuDNN chooses with `cudnn.benchmark` matters if the peak is during a
convolution.

{wide}
"""

HEAD = """# Published memory figures, and what a plan says

Generated by `benchmarks/published_memory.py` from `benchmarks/data/published_memory.csv`; do not edit.

Each figure was measured on a GPU and published by others. For each, the program was rewritten
(`benchmarks/published_programs.py`), recorded for that GPU without having it, and planned; nothing ran.
The projection is for eager PyTorch with the kernels of {torch}. If an older release is known to save or
allocate other tensors, the program was recorded for that release (`torch_version=`,
`benchmarks/older_release_effects.py`). Allocated memory is counted in blocks of the caching allocator, as
PyTorch counts it. The range is that of the plan. A hit is a published value, at its published precision,
that lies within the range; it counts as one in a range of 15 % if the range is at most that share of the
projection wide. NVML less the context is compared with the memory that the caching allocator reserves,
because the source measured the context and subtracted it. Details that a source does not state and that were
inferred are in the note below its table.

"""


def table(found: Sequence[tuple[Row, Result]]) -> list[str]:
    lines = [
        "| program | batch | precision | optimizer | published | projected | error | range | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row, result in found:
        unit = UNITS[row["unit"]]
        digits = 0 if row["step"] == "1" else 2
        shown = f"| {row['title']} | {row['batch']} | {row['precision']} | {row['optimizer']} "
        shown += f"| {row['published']} {row['unit']} "
        if "failed" in result:
            lines.append(shown + f"| — | — | — | not recorded: {result['failed']} |")
            continue
        low, high = (f"{size / unit:,.{digits}f}" for size in result["range"])
        lines.append(
            shown + f"| {result['projected'] / unit:,.{digits}f} | {100 * result['error']:+.2f} % "
            f"| {low} to {high} | {'hit' if result['hit'] else 'miss'} |"
        )
    return lines


def page(data: dict[str, Any]) -> str:
    """The documentation page for the saved results."""
    known = rows()
    found = [(row, judged(row, data["runs"][row["id"]])) for row in known]
    lines = [HEAD.format(torch=f"PyTorch {data['torch'].partition('+')[0]}"), "## Summary", ""]
    lines += [
        "| measured | rows | not recorded | median error | within 1 % | worst | in range "
        "| in a range of 15 % | median width |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    groups = [(text, [each for each in found if each[0]["kind"] == kind]) for kind, text in KINDS.items()]
    for text, group in [*groups, ("all", found)]:
        if not any("failed" not in result for _, result in group):
            continue
        total = summary([result for _, result in group])
        recorded = total["rows"] - total["failed"]
        lines.append(
            f"| {text} | {total['rows']} | {total['failed']} | {100 * total['median error']:.2f} % "
            f"| {total['within 1 %']} of {recorded} | {100 * total['worst error']:.1f} % "
            f"| {total['in the range']} of {recorded} | {total['in a narrow range']} of {recorded} "
            f"| {100 * total['median width of the range']:.1f} % |"
        )
    sources = list(dict.fromkeys(row["source"] for row in known))
    gpus = len({row["card"] for row in known})
    lines += ["", f"{len(known)} figures of {len(sources)} sources on {gpus} GPUs."]
    recorded_rows = [each for each in found if "failed" not in each[1]]
    lines += [CHECK.format(**left_out(recorded_rows), wide="\n".join(wide(recorded_rows)))]
    for source in sources:
        own = [each for each in found if each[0]["source"] == source]
        for key in dict.fromkeys((row["url"], row["card"], row["torch"], row["kind"]) for row, _ in own):
            part = [
                each
                for each in own
                if key == (each[0]["url"], each[0]["card"], each[0]["torch"], each[0]["kind"])
            ]
            first = part[0][0]
            of = f", transformers {first['transformers']}" if first["transformers"] else ""
            lines += [f"## [{source}]({first['url']})", ""]
            lines += [f"{first['card']}, PyTorch {first['torch']}{of}; {KINDS[first['kind']]}.", ""]
            lines += table(part)
            notes = list(dict.fromkeys(row["note"] for row, _ in part if row["note"]))
            lines += ["", *(f"- {note}" for note in notes), ""] if notes else [""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="TEXT", help="rows whose source or program has this text")
    parser.add_argument("--packages", type=Path, metavar="DIR", help="a folder per release of transformers")
    parser.add_argument("--page-only", action="store_true", help="write the page from the saved results")
    parser.add_argument("--record", metavar="IDS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.record:
        record_all(options.record.split(","))
        return
    known = rows()
    data = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"runs": {}}
    if not options.page_only:
        import torch

        wanted = [
            row
            for row in known
            if not options.only or any(options.only in row[key] for key in ("source", "program", "title"))
        ]
        data["torch"] = torch.__version__
        data["runs"].update(measured(wanted, options.packages))
        for row in wanted:
            result = judged(row, data["runs"][row["id"]])
            text = result.get("failed") or (
                f"{result['projected'] / 1e6:10,.1f} MB {100 * result['error']:+7.2f} %  "
                f"{'hit' if result['hit'] else 'miss'}"
            )
            print(f"{row['source'][:30]:30} {row['title'][:48]:48} {row['batch']:>3}  {text}", flush=True)
        RESULTS.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if all(row["id"] in data["runs"] for row in known):
        PAGE.write_text(page(data), encoding="utf-8")


if __name__ == "__main__":
    main()
