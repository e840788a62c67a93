"""Recording of a script, from its start to its Nth optimizer step or its end."""

from __future__ import annotations

import functools
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, Generic, Literal, TypeVar

from ..record.provenance.source_lines import is_user_file
from ..record.provenance.variable_names import variables_of
from ..record.sync_points import AbsentDeviceError
from ..session.lazy_graph import LazyGraph, lazy
from ..torch_internals.after_optimizer_step_callbacks import watched_steps
from .run_script_as_main import Script, Stopped, exit_code

R = TypeVar("R")

How = Literal["stopped", "ended", "failed", "out of reach", "interrupted"]


@dataclass
class Recorded(Generic[R]):
    """How the recording of a script ended.

    Attributes:
        how: the script was ``"stopped"`` after its steps, ``"ended"`` earlier, ``"failed"``, needed a value
            that only an absent GPU could compute (``"out of reach"``), or was ``"interrupted"`` by the user.
        steps: steps of the first optimizer that stepped.
        result: what ``finish`` returned for the graph.
        error: the exception that the script raised and did not catch.
        exit_code: the script's exit code, if it ended by itself.
    """

    how: How
    steps: int
    result: R
    error: BaseException | None = None
    exit_code: int = 0


class UnknownDevice(ValueError):
    """The name of a device, or of a PyTorch release for it, is unknown; the message says so."""


class StepCount:
    """Counts the steps of the first optimizer that steps; after it has been freed, those of the next one.

    With several optimizers, as in a GAN, only one counts. Steps inside a step (of a closure, or of an
    optimizer that another one wraps) belong to the outer step. Those of other threads and of child processes
    do not count.
    """

    def __init__(self, stepped: Callable[[int], None], refuse: Callable[[], None] = lambda: None) -> None:
        self.count = 0
        self._stepped = stepped
        self._refuse = refuse
        self._first: weakref.ref[Any] | None = None
        self._thread = threading.get_ident()
        self._process = os.getpid()

    def before(self, optimizer: Any) -> None:
        if os.getpid() != self._process:
            return
        self._refuse()
        if threading.get_ident() == self._thread and (self._first is None or self._first() is None):
            self._first = weakref.ref(optimizer)

    def after(self, optimizer: Any) -> None:
        if self._first is None or self._first() is not optimizer:
            return
        if threading.get_ident() == self._thread and os.getpid() == self._process:
            self.count += 1
            self._stepped(self.count)


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's own code."""
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def variables_at(error: BaseException) -> dict[str, Any]:
    """The local variables of the user's functions in the traceback of ``error``.

    Variables of callers take precedence over those of callees, where a model is called ``self``.
    """
    found: dict[str, Any] = {}
    for frame, _ in traceback.walk_tb(error.__traceback__):  # from the script's first function inwards
        if is_user_file(frame.f_code.co_filename):
            found = {**found, **{k: v for k, v in variables_of(frame).items() if k not in found}}
    return found


def record(
    script: Script,
    steps: int,
    finish: Callable[[LazyGraph], R],
    *,
    device: str | None = None,
    assume: Mapping[int | str, Any] | None = None,
    torch_version: str | None = None,
) -> Recorded[R]:
    """Run ``script`` under recording until it has taken ``steps`` optimizer steps.

    ``finish`` is called with the graph at that point, before the script's stack is unwound.

    Raises:
        UnknownDevice: the device, or its PyTorch release, is unknown.
    """
    try:
        block = lazy(device=device, assume=assume, torch_version=torch_version)
        graph = block.__enter__()
    except ValueError as error:
        raise UnknownDevice(str(error)) from None
    graph.title = script.name
    finished: list[Callable[[], R]] = []

    def end(place: FrameType | Mapping[str, Any] | None) -> None:
        block.ends_in = place
        place = None
        block.__exit__(None, None, None)
        try:
            result = finish(graph)
            finished.append(lambda: result)
        except Exception as error:  # raised later, where the script cannot catch it
            finished.append(functools.partial(_raise, error))

    def stepped(count: int) -> None:
        if count == steps:
            end(user_frame(sys._getframe()))
            raise Stopped

    def refuse() -> None:
        if finished:  # the script has caught the exception that stops it
            raise Stopped

    count = StepCount(stepped, refuse)
    how: How = "ended"
    trouble: BaseException | None = None
    code = 0
    try:
        with watched_steps(count.before, count.after):
            script.enter()
            script.run()
    except BaseException as raised:
        script.leave_child(raised)
        if not finished:
            if isinstance(raised, SystemExit):
                code = exit_code(raised)
            else:
                trouble, how = raised, _end_kind(raised)
    script.leave_child(None)
    if finished:
        how = "stopped"
    else:
        end(vars(script.main) if trouble is None else {**vars(script.main), **variables_at(trouble)})
    return Recorded(how, count.count, finished[0](), trouble, code)


def _raise(error: Exception) -> Any:
    raise error


def _end_kind(error: BaseException) -> How:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return "out of reach" if isinstance(error, AbsentDeviceError) else "failed"
