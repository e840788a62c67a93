"""Plan settings: the plan that the widgets of a graph show, by device, batch size, and pieces.

All widgets of one graph show the same plan, and are notified when one of them chooses another. Nothing here
runs the graph; of these choices, only the number of pieces affects the Evaluate button.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from ...plan.devices.device_lookup import Device, DeviceProfile, devices
from ...plan.devices.known_gpus import KINDS
from ...plan.units import format_bytes
from ..scene.plan_protocol import PlanLike
from .run_settings import Selectable

GIVEN = "given"  # the id of the device that the graph was first planned for
SEARCH_SECONDS = 0.2  # seconds of a search for the largest batch before the page can send other requests


class Planned(Selectable, Protocol):
    """A graph that can be planned."""

    shown_plans: Plans | None  # made by the first widget

    def plan(self) -> PlanLike: ...


def plans_of(graph: Planned, own: PlanLike | None = None) -> Plans:
    """The plans that all widgets of ``graph`` share; ``own`` is its existing plan, if there is one."""
    if graph.shown_plans is None:
        graph.shown_plans = Plans(graph, own or graph.plan())
    return graph.shown_plans


class Plans:
    """The plans of one graph; ``shown`` is the plan that its widgets currently show.

    ``own`` is the plan for the recorded batch and the device of the block; ``device`` is the id of the chosen
    device in :class:`Targets`.
    """

    def __init__(self, graph: Planned, own: PlanLike) -> None:
        self._graph = graph
        self.own = self.shown = own
        self.device = GIVEN
        self.version = 0  # incremented for each shown plan
        self._split = graph.split  # split of the shown plan
        self._bases: dict[str, PlanLike] = {GIVEN: self.own}  # plans for the recorded batch, by device
        self._listeners: list[weakref.WeakMethod[Callable[[str], None]]] = []

    def subscribe(self, callback: Callable[[str], None]) -> None:
        """Register a method that is called with a note or "" when another plan is chosen."""
        self._listeners.append(weakref.WeakMethod(callback))

    def choose(self, device: str, target: Device | DeviceProfile | None) -> None:
        """Plan for another device: ``target``, ``None`` for the device of the block."""

        def plan() -> PlanLike:
            base = self.own if target is None else self.own.replan(device=target)
            made = self._of_size(base, self.shown.batch_size)
            self._bases[device], self.device = base, device
            return made

        self._show(plan)

    def resize(self, samples: int) -> None:
        """Plan for another number of samples."""
        self._show(lambda: self._of_size(self._base, samples))

    def cut(self, split: int | str) -> None:
        """Set the number of pieces for Evaluate, and plan for it."""
        begun = getattr(self._graph, "split_run", None) is not None
        note = "the interrupted run continues with the number of pieces that it started with" if begun else ""
        before, self._split = self._split, split
        try:
            self._graph.choose(split=split)
        except ValueError as error:
            self._split, note = before, str(error)
        self._show(lambda: self._of_size(self._base, self.shown.batch_size), note)

    def follow(self) -> None:
        """Update the plan if the split was chosen elsewhere."""
        if self._split != self._graph.split:
            self._split = self._graph.split
            self._show(lambda: self._of_size(self._base, self.shown.batch_size))

    @property
    def _base(self) -> PlanLike:
        return self._bases[self.device]

    def _of_size(self, base: PlanLike, samples: int | None) -> PlanLike:
        own = samples == self.own.batch_size
        return base.replan(None if own else samples, self._graph.split)

    def _show(self, plan: Callable[[], PlanLike], note: str = "") -> None:
        """Compute and show a plan; pages wait for the answer, so every error is answered, too."""
        try:
            self.shown = plan()
            self.version += 1
        except ValueError as error:
            note = str(error)
        except Exception as error:
            self._notify(f"{type(error).__name__}: {error}")
            raise
        self._notify(note)

    def _notify(self, note: str) -> None:
        for listener in list(self._listeners):
            callback = listener()
            if callback is None:
                self._listeners.remove(listener)
            else:
                callback(note)

    def largest(self) -> dict[str, Any]:
        """The largest batch size that fits: ``most``, or during a search the largest known one so far."""
        plan = self._base
        most, found = plan.largest_within(SEARCH_SECONDS, self._graph.split)
        note = ""
        if most is None and plan.batch_size is not None:
            try:
                self.own.replan(2 * plan.batch_size)
            except ValueError as error:
                note = str(error)
        return {"most": most, "searching": not found, "fixed": bool(note), "note": note}


class Targets:
    """The devices that a page can choose, by id; others cannot be requested."""

    def __init__(self, own: PlanLike) -> None:
        self._own = own
        self._known = devices()
        self._by_id: dict[str, Device | DeviceProfile | None] = {each.name: each for each in self._known}
        self._by_id[GIVEN] = None

    def __contains__(self, device: str) -> bool:
        return device in self._by_id

    def __getitem__(self, device: str) -> Device | DeviceProfile | None:
        return self._by_id[device]

    def menu(self) -> dict[str, Any]:
        """The menu: the graph's own device, those of this machine, and known GPUs, as ``[id, label]``."""
        own = self._own
        given = [[GIVEN, f"{own.device} · {_room(own)}"]]
        here = [
            [each.name, _label(each)]
            for each in self._known
            if isinstance(each, Device) and not (each.name == own.device and own.device_state)
        ]
        gpus = {each.name: each for each in self._known if isinstance(each, DeviceProfile)}
        groups: list[list[Any]] = [["As in the block", given]]
        if here:
            groups.append(["This machine", here])
        for kind, names in KINDS.items():
            groups.append([kind, [[name, _label(gpus[name])] for name in names if name in gpus]])
        return {"groups": groups, "note": f"NVIDIA: {self._known.cuda_state}"}


def _room(own: PlanLike) -> str:
    return "memory unknown" if own.capacity_bytes is None else format_bytes(own.capacity_bytes)


def _label(device: Device | DeviceProfile) -> str:
    if isinstance(device, DeviceProfile):
        return f"{device.name} · {format_bytes(device.total_bytes)}"
    if device.free_bytes is None or device.total_bytes is None:
        return f"{device.name} · {device.state}"
    return f"{device.name} · {format_bytes(device.free_bytes)} free of {format_bytes(device.total_bytes)}"
