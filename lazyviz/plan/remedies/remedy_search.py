"""Remedy search: each possible change is applied to the recorded program, whose peak is then computed.

A remedy is offered only if the replayed program shows that it saves memory.  Remedies are ordered by their
kind of cost (none, launches, recomputation, copies, precision), then by what they save.  Splitting the batch
and a smaller batch are offered if the block has a named batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from ..liveness.allocation_trace import Program, program_of
from ..plan import Plan
from . import delete_variables_earlier, memory_at_lower_precision, what_if_edits
from .remedy import KINDS as KINDS
from .remedy import Cost as Cost
from .remedy import Remedy as Remedy
from .zero_grad import zero_grad

WORTHWHILE = 0.005  # minimum share of the peak that a listed remedy saves
SMALLEST_BLOCK = 512  # and minimum bytes: the CUDA caching allocator reserves nothing smaller


def remedies(plan: Plan, kinds: int | None = None) -> tuple[Remedy, ...]:
    """Changes that would lower the peak of ``plan``, cheapest first; ``kinds``: only the cheapest kinds, that
    many.

    Replays the whole program for each candidate. Empty for a plan of a split run.
    """
    if not plan.peak_bytes or plan.split.pieces > 1:  # a split run is another program than the recorded one
        return ()
    program = program_of(plan._nodes, plan._lifetimes.values(), in_order=True)
    peak, at = program.peak()
    found: list[Remedy] = []
    count = 0
    for kind in KINDS:
        of_kind = _of_kind(plan, kind, program, peak, at)
        of_kind.sort(key=lambda each: (-each.saves_bytes, each.cost.ops))
        found += of_kind
        count += bool(of_kind)
        if count == kinds:
            break
    return tuple(found)


def is_worthwhile(saves: int, peak: int) -> bool:
    """Whether a remedy that saves so many bytes of the peak is listed."""
    return saves >= max(SMALLEST_BLOCK, WORTHWHILE * peak)


def _of_kind(plan: Plan, kind: str, program: Program, peak: int, at: int) -> list[Remedy]:
    """The remedies of one kind that save memory."""
    if kind in ("split", "batch"):
        planned = _in_pieces(plan) if kind == "split" else _halved(plan)
        return [remedy for remedy in planned if is_worthwhile(remedy.saves_bytes, peak)]
    host = plan.device == "cpu"
    device = "cpu" if host else "cuda"
    candidates: dict[str, Callable[[], Iterable[what_if_edits.Changed]]] = {
        "variable": lambda: delete_variables_earlier.variables(program, at),
        "no_grad": lambda: what_if_edits.no_grad(program),
        "zero_grad": lambda: zero_grad(program, at),
        "inplace": lambda: what_if_edits.in_place(program, at),
        "foreach": lambda: what_if_edits.foreach(program),
        "recompute": lambda: what_if_edits.recompute(program, at, plan._graph.calls),
        "offload": lambda: () if host else what_if_edits.offload(program),
        "autocast": lambda: memory_at_lower_precision.autocast(program, device),
        "bf16": lambda: memory_at_lower_precision.bf16(program, device),
    }
    found: list[tuple[Remedy, Program]] = []
    for changed in candidates[kind]():
        saves = peak - changed.program.peak()[0]
        if not is_worthwhile(saves, peak):
            continue
        cost = Cost(changed.ops, changed.copied_bytes, changed.numerics)
        remedy = Remedy(
            kind,
            changed.text,
            saves,
            peak - saves,
            cost,
            changed.source,
            changed.estimate,
            changed.at_best,
        )
        found.append((remedy, changed.program))
    return [
        replace(remedy, fits=_fits(plan, edited))
        for remedy, edited in found
        if not any(_beats(other, remedy) for other, _ in found)
    ]


def _in_pieces(plan: Plan) -> Iterator[Remedy]:
    """Splitting the batch, into the fewest pieces that fit, otherwise two: a separate plan, not a replay."""
    size = plan.batch_size
    if size is None or size < 2 or plan.split.blocked_by:
        return
    cut = plan._answers.rerun("auto")
    if cut.split.pieces == 1:
        cut = plan._answers.rerun(2)
    split = cut.split
    if split.pieces > 1:
        text = f"run the batch in {split.pieces} pieces: split={split.pieces} (--split {split.pieces})"
        yield _planned("split", text, plan, cut, Cost(split.again * split.pieces))


def _halved(plan: Plan) -> Iterator[Remedy]:
    """Half the batch size."""
    size = plan.batch_size
    if size is None or size < 2 or plan.max_batch_size is None:
        return
    half = size // 2
    try:
        other = plan.replan(batch_size=half)
    except ValueError:  # too few samples for DataParallel's GPUs
        return
    yield _planned("batch", f"a batch of {half} samples instead of {size}", plan, other, Cost())


def _planned(kind: str, text: str, plan: Plan, other: Plan, cost: Cost) -> Remedy:
    saves = plan.peak_bytes - other.peak_bytes
    return Remedy(kind, text, saves, other.peak_bytes, cost, None, fits=other.fits)


def _fits(plan: Plan, program: Program) -> bool | None:
    """Whether the program would fit the plan's device, by the plan's own rule."""
    room = plan.capacity_bytes
    if room is None:
        return None
    peak = program.peak()[0]
    if peak > room or plan._reservation is None:
        return peak <= room
    reservation = plan._reserve_calls([step.node for step in program.steps], program.calls())
    return reservation is not None and reservation.failure is None


def _beats(one: Remedy, other: Remedy) -> bool:
    """Whether ``one`` is a remedy of the same kind that saves more and costs no more."""
    return (
        one.kind == other.kind == "recompute"
        and one.saves_bytes >= other.saves_bytes
        and one.cost.ops <= other.cost.ops
        and (one.saves_bytes, -one.cost.ops) != (other.saves_bytes, -other.cost.ops)
    )
