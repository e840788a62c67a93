"""First optimizer steps of a training loop: recorded, planned, and evaluated, for all callbacks."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from ..cli.plan_data import PICTURES, described, plan_of
from ..execute.run_report import Report
from ..plan.devices.device_lookup import DeviceLike, planned
from ..plan.explain_memory import essence, other_kernels
from ..plan.plan import Plan
from ..plan.units import format_bytes, parse_bytes
from ..session.block import LazyBlock
from ..session.lazy_graph import LazyGraph, lazy
from ..testing.peak_assertion import PeakExceeded

logger = logging.getLogger("lazyviz")


@dataclass(frozen=True)
class Findings:
    """Projected and measured memory of the first steps.

    ``text`` is a summary in a few sentences, ``plan`` the whole plan as text, and ``picture`` the file of the
    picture, if one was written.  ``numbers`` are for loggers: bytes, by name.
    """

    text: str
    numbers: dict[str, float] = field(default_factory=dict)
    plan: str = ""
    picture: Path | None = None


@dataclass(frozen=True)
class _Measured:
    """The measured peak of a step, its projection if there is one, and text about both."""

    nbytes: int
    projected: int | None
    details: str


def _measured(graph: LazyGraph, report: Report, plan: Plan) -> _Measured | None:
    """The peak over all runs of a step; the last run, with this ``report``, ran the remaining pending ops."""
    if report.peak_bytes is None:
        return None
    earlier = graph.runs.measured_peak
    if earlier <= report.peak_bytes:
        details = f" ({report.comparison})" if report.comparison else ""
        return _Measured(report.peak_bytes, report.projected_bytes, details)
    details = f" at a sync point before the last {report.ops_run:,} of {len(graph.nodes):,} ops"
    projected = None if plan.borrowed else plan.lazyviz_peak_bytes
    if projected is not None:
        details += f" (projected {format_bytes(projected)})"
    return _Measured(earlier, projected, details)


class FirstSteps:
    """Records each of the first steps, starting with :meth:`begin`; :meth:`stepped` plans and evaluates it.

    Args:
        enabled: ``False`` disables everything.
        fail_above: bytes, or text such as ``"38GiB"``; if a step needs more, raise
            :class:`lazyviz.testing.PeakExceeded` before evaluating it.
        device: plan for this GPU, present or not; default: the device that the training runs on.
        steps: number of optimizer steps.  From the second step, the optimizer state exists all the time.
        picture: file for a picture of the last of these steps; the suffix selects the format.  If it cannot
            be written, a warning is logged, and training continues.

    Raises:
        ValueError: an invalid size or number of steps, an unknown device, or an unknown suffix.
    """

    def __init__(
        self,
        enabled: bool = True,
        fail_above: int | str | None = None,
        device: DeviceLike | None = None,
        steps: int = 2,
        picture: str | Path | None = None,
    ) -> None:
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        if device is not None:
            planned(device)
        if picture is not None and (suffix := Path(picture).suffix.removeprefix(".")) not in PICTURES:
            known = f".{', .'.join(PICTURES)}"
            raise ValueError(f"picture={str(picture)!r}: the suffix must be one of {known}, not {suffix!r}")
        self._budget = parse_bytes(fail_above) if fail_above is not None else None
        self._device, self._steps, self._picture = device, steps, picture
        self._left = steps if enabled else 0
        self._block: LazyBlock[LazyGraph] | None = None
        self._graph: LazyGraph | None = None
        self._need: tuple[int, Plan] | None = None  # the highest peak of a step
        self._largest: _Measured | None = None
        self._last: LazyGraph | None = None  # of the last step, as long as others are to be recorded

    @property
    def waits(self) -> bool:
        """Whether there is another step to record that has not started."""
        return self._left > 0 and self._block is None

    def begin(self, title: str) -> None:
        if self.waits:
            self._block = lazy()
            self._graph = self._block.__enter__()
            self._graph.title = title

    def stepped(self, folder: str | Path | None = ".") -> Findings | None:
        """Handle the end of an optimizer step; return the findings after the last step.

        A relative ``picture`` is written to ``folder``; ``None``: nothing is, because another rank writes it.

        Raises:
            PeakExceeded: the step needs more than ``fail_above``.
        """
        if self._block is None:
            return None
        self._left -= 1
        self._last = None
        graph = self._leave()
        if graph is None or not graph.nodes:
            return None
        plan = plan_of(graph, self._device)
        need = described(graph, plan)["needed_bytes"]
        if not self._left:
            self._draw(graph, folder)
        if self._budget is not None and need > self._budget:
            self._left = 0
            over = f"{format_bytes(need - self._budget)} above the limit of {format_bytes(self._budget)}"
            first = f"{plan.device} would need {format_bytes(need)}, {over}."
            raise PeakExceeded("\n".join([first, *essence(plan), *other_kernels(plan)]), plan)
        if self._need is None or need > self._need[0]:
            self._need = need, plan
        measured = _measured(graph, graph.evaluate(), plan)
        if measured is not None and (self._largest is None or measured.nbytes > self._largest.nbytes):
            self._largest = measured
        if not self._left:
            return self._found(folder)
        self._last = graph
        return None

    def ended(self, folder: str | Path | None = ".") -> Findings | None:
        """Handle the end of training; return the findings if it had fewer steps than were to be recorded."""
        last, self._last = self._last, None
        self._leave()  # of a step that was not finished
        if last is None:
            self._left = 0
            return None
        self._draw(last, folder)
        found = self._found(folder)
        self._left = 0
        return found

    def _draw(self, graph: LazyGraph, folder: str | Path | None) -> None:
        """Write the picture, with the plan of eager PyTorch; a Trainer's folder may not exist yet."""
        if self._picture is None or folder is None:
            return
        path = Path(folder) / self._picture
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            graph.save(path, eager=True)
        except (OSError, RuntimeError) as error:  # no reason to end a training
            logger.warning("The picture was not written: %s: %s", type(error).__name__, error)
            self._picture = None

    def abandon(self) -> None:
        """Handle the failure of training: recorded ops stay pending."""
        self._left, self._last = 0, None
        self._leave()

    def _leave(self) -> LazyGraph | None:
        block, graph = self._block, self._graph
        self._block = self._graph = None
        if block is not None:
            block.__exit__(None, None, None)
        return graph

    def _found(self, folder: str | Path | None) -> Findings:
        assert self._need is not None
        need, plan = self._need
        recorded = self._steps - self._left
        steps = "the first step" if recorded == 1 else f"the first {recorded:,} steps"
        numbers: dict[str, float] = {"lazyviz/needed_bytes": need}
        text = " ".join(
            [f"{plan.device}: {format_bytes(need)} needed by {steps}.", plan.verdict(), *other_kernels(plan)]
        )
        if (measured := self._largest) is not None:
            numbers["lazyviz/measured_peak_bytes"] = measured.nbytes
            text += f" Measured: {format_bytes(measured.nbytes)}{measured.details}."
            if measured.projected is not None:
                numbers["lazyviz/projected_peak_bytes"] = measured.projected
        picture: Path | None = None
        if self._picture is not None and folder is not None:
            picture = Path(folder) / self._picture
            text += f" The picture is in {picture}."
        return Findings(text, numbers, plan.explain(), picture)
