"""``lazyviz.advise``: records and plans a training step with several strategies and GPUs.

No figure comes from a formula: each is the plan of a recording with that strategy, for that GPU.  The largest
batch is found by recording other sizes, including one sample more, which does not fit.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...plan.devices.device_lookup import DeviceLike
from ...plan.plan import Plan
from ...plan.result_tables import Table, Tabular
from ...plan.runtime.last_training_step import last_step
from ...plan.units import format_bytes
from ..lazy_graph import lazy
from .training_strategies import (
    AS_WRITTEN,
    Strategy,
    blocks_of,
    eight_bit_optimizer,
    step_one_by_one_if_mixed,
    strategies_for,
    tensor_parallel_plan,
)

MOST_RECORDINGS = 24  # recordings in the search for one row's largest batch
_MOST_SAMPLES = 2**20

Step = Callable[..., Any]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy on one GPU; sizes are in bytes per GPU, for eager PyTorch.

    ``max_batch_size`` is the number of samples per rank (``None``: not requested, or not found; 0: not even
    one fits).  ``seconds`` is the projected time of one step.  ``failure`` says why there are no figures.
    """

    strategy: str
    device: str
    world_size: int
    peak_bytes: int | None = None
    needed_bytes: int | None = None
    fits: bool | None = None
    max_batch_size: int | None = None
    seconds: float | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Advice(Tabular):
    """The rows of :func:`advise`, shown as a table; ``notes`` say what was omitted, and why."""

    rows: Sequence[Row]
    batch_size: int
    notes: Sequence[str] = field(default=())

    def __repr__(self) -> str:
        fitting = sum(bool(row.fits) for row in self.rows)
        return f"<Advice: {len(self.rows)} rows, {fitting} fit>"

    def __str__(self) -> str:
        """The table, for ``print`` in a script."""
        return self.table().text()

    _repr_pretty_ = Tabular._repr_pretty_  # IPython uses it in addition to `__repr__`

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def table(self) -> Table:
        title = f"Batch of {self.batch_size:,} per rank, eager PyTorch; each row was recorded."
        title = " ".join([title, *(f"{note}." for note in self.notes)])
        columns: tuple[str, ...] = ("peak", "needed", "fits", "largest batch", "strategy", "GPU")
        timed = any(row.seconds is not None for row in self.rows)
        rows = []
        for row in self.rows:
            name = f"{row.strategy} ({shortened(row.failure)})" if row.failure else row.strategy
            cells = [
                _bytes(row.peak_bytes),
                _bytes(row.needed_bytes),
                _YES[row.fits],
                _count(row.max_batch_size),
            ]
            if timed:
                cells.append("" if row.seconds is None else f"{1000 * row.seconds:,.1f} ms")
            rows.append([*cells, name, row.device])
        if timed:
            columns = (*columns[:4], "a step", *columns[4:])
        return Table(title, columns, rows, 5 if timed else 4)


_YES = {True: "yes", False: "no", None: ""}


def _bytes(size: int | None) -> str:
    return "" if size is None else format_bytes(size)


def shortened(reason: str, most: int = 90) -> str:
    """The beginning of a reason, for a table."""
    return reason if len(reason) <= most else f"{reason[: most - 3].rstrip()}..."


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def advise(
    step: Step,
    devices: Sequence[DeviceLike] = (),
    *,
    model: Callable[[], nn.Module] | None = None,
    optimizer: MakeOptimizer = torch.optim.AdamW,
    batch_size: int = 1,
    world_size: int = 8,
    tensor_parallel: Mapping[str, Any] | None = None,
    tensor_parallel_sizes: Sequence[int] = (2, 4, 8),
    recompute: bool = True,
    eight_bit: MakeOptimizer | None = None,
    largest_batch: bool = True,
) -> Advice:
    """Compare training strategies on several GPUs by recording a training step with each; nothing runs.

    Args:
        step: with ``model``, ``step(model, batch_size)`` creates a batch of that size on ``"cuda"`` and
            returns the loss, and this function calls backward.  Without ``model``, ``step()`` or
            ``step(batch_size)`` is a complete training step, which is recorded as written.
        devices: profiles or devices (``"H100-80GB"``) that are not on this machine.
        model: creates the model; called under ``torch.device("cuda")``.  The comparison then covers one GPU,
            DDP and FSDP2 (whole, and by layer) on ``world_size`` GPUs, and tensor parallelism on
            ``tensor_parallel_sizes`` GPUs, with and without recomputing each layer, and with an 8-bit
            optimizer.
        optimizer: creates the optimizer for given parameters.
        batch_size: samples per rank.
        world_size: number of GPUs for DDP and FSDP2.
        tensor_parallel: parallel styles by module name, as for ``parallelize_module``; default: the plan of
            transformers models.  Without a plan, there are no such rows.
        tensor_parallel_sizes: numbers of GPUs for tensor parallelism.
        recompute: whether to add rows with activation checkpointing.
        eight_bit: creates the 8-bit optimizer; default: torchao's ``AdamW8bit``, if torchao is installed.
        largest_batch: whether to search for the largest batch that fits.

    Raises:
        TypeError: ``step`` is not a function, for example a recorded graph.
        ValueError: no device, or sizes below 1.
    """
    if not callable(step) or isinstance(step, nn.Module):
        raise TypeError(
            "advise() records a training step itself, once for each strategy: give it the function of a "
            f"step, as in advise(step, ['A100-80GB']), not a {type(step).__name__}"
        )
    if not devices or isinstance(devices, str):
        raise ValueError("devices must be a list of GPUs, such as ['A100-80GB', 'H100-80GB']")
    if min(batch_size, world_size, *tensor_parallel_sizes, 2**30) < 1:
        raise ValueError("sizes must be at least 1")
    notes: list[str] = []
    if model is None:
        strategies = [AS_WRITTEN]
    else:
        small = eight_bit or eight_bit_optimizer()
        notes.append(
            "No row uses an 8-bit optimizer: torchao is not installed"
            if small is None
            else "8-bit optimizers are planned as run by eager PyTorch, which takes more memory than "
            "compiled code, and without projected time"
        )
        with torch.device("meta"):
            example = model()
        shared = tensor_parallel if tensor_parallel is not None else tensor_parallel_plan(example)
        if shared is None:
            notes.append("No row uses tensor parallelism: the model has no plan for it, and none was given")
        layered = bool(blocks_of(example))
        if not layered:
            notes.append("No row is sharded layer by layer: the model has no list of equal layers")
        strategies = strategies_for(
            world_size=world_size,
            sizes=tensor_parallel_sizes if shared is not None else (),
            shared=shared,
            recompute=recompute and layered,
            layered=layered,
            small=small,
        )
    recorder = _Recorder(step, model, optimizer)
    rows = [
        recorder.row(strategy, device, batch_size, largest_batch)
        for device in devices
        for strategy in strategies
    ]
    return Advice(rows, batch_size, notes)


class _Recorder:
    """Records the step with each strategy."""

    def __init__(self, step: Step, model: Callable[[], nn.Module] | None, optimizer: MakeOptimizer) -> None:
        self._step, self._model, self._optimizer = step, model, optimizer
        self._sized = model is not None or bool(inspect.signature(step).parameters)

    def row(self, strategy: Strategy, device: DeviceLike, batch_size: int, largest: bool) -> Row:
        name = str(getattr(device, "name", device))
        try:
            plan = self._plan(strategy, device, batch_size)
            best = self._largest(strategy, device, batch_size, plan) if largest and self._sized else None
        except Exception as error:  # raised by user code, or by a strategy that does not fit the model
            reason = str(error).strip().splitlines()
            return Row(
                strategy.name,
                name,
                strategy.size,
                failure=reason[0][:200] if reason else type(error).__name__,
            )
        return Row(
            strategy.name,
            name,
            strategy.size,
            plan.peak_bytes,
            plan.needed_bytes,
            plan.fits,
            best,
            _seconds_of_a_step(plan) if strategy.optimizer is None else None,
        )

    def _plan(self, strategy: Strategy, device: DeviceLike, batch_size: int) -> Plan:
        mesh = (strategy.size,) if strategy.size > 1 else None
        with _collected():
            with lazy(device=device, mesh=mesh) as graph:
                self._record(strategy, batch_size)
            plan: Plan = graph.plan()
            del graph
        return plan

    def _record(self, strategy: Strategy, batch_size: int) -> None:
        if self._model is None:
            if self._sized:
                self._step(batch_size)
            else:
                self._step()
            return
        with torch.device("cuda"):
            made = self._model()
        made = strategy.applied(made.train())
        stepper = (strategy.optimizer or self._optimizer)(made.parameters())
        step_one_by_one_if_mixed(stepper)
        for _ in range(2):  # in the second step, the optimizer's state exists from the start
            self._step(made, batch_size).backward()
            stepper.step()
            stepper.zero_grad()

    def _largest(self, strategy: Strategy, device: DeviceLike, batch_size: int, plan: Plan) -> int | None:
        """The largest batch that fits; ``None`` if it is not found in ``MOST_RECORDINGS`` recordings."""
        room = plan.capacity_bytes
        if room is None:
            return None
        needed = {batch_size: plan.needed_bytes}
        fitting = {batch_size: bool(plan.fits)}
        while len(needed) < MOST_RECORDINGS:
            low = max((size for size, fits in fitting.items() if fits), default=0)
            high = min((size for size, fits in fitting.items() if not fits), default=_MOST_SAMPLES)
            if high - low <= 1:
                return low
            size = _guess(needed, room, low, high)
            other = self._plan(strategy, device, size)
            needed[size], fitting[size] = other.needed_bytes, bool(other.fits)
        return None


def _seconds_of_a_step(plan: Plan) -> float | None:
    time = plan.time_of(last_step(plan.ir.nodes))
    return time.seconds if time is not None else None


@contextlib.contextmanager
def _collected() -> Iterator[None]:
    """Garbage-collect what was created inside: pending ops that cannot run are dropped with their last
    reference.

    Older objects are excluded, because traversing all objects of a process takes longer than a recording.
    """
    frozen = gc.get_freeze_count() > 0  # by the user
    if not frozen:
        gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        if not frozen:
            gc.unfreeze()


def _guess(needed: Mapping[int, int], room: int, low: int, high: int) -> int:
    """The next size to record, where ``low`` fits and ``high`` does not: linear interpolation and bisection
    in turn.
    """
    if high >= _MOST_SAMPLES:
        return max(2 * low, 1)  # no recorded size is too large yet
    if low in needed and len(needed) % 2:
        slope = (needed[high] - needed[low]) / (high - low)
        if slope > 0:
            size = int(low + (room - needed[low]) / slope)
            return min(max(size, low + 1), high - 1)
    return (low + high) // 2
