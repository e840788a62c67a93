"""A script under recording: from its start to its N-th optimizer step, or as far as it goes."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, Generic, Literal, TypeVar

from ..record.provenance.source_lines import is_user_file
from ..record.sync_points import AbsentDeviceError
from ..session.lazy_graph import LazyGraph, lazy
from ..torch_internals.optimizer_steps import watched_steps
from .script import Script, Stopped, exit_code

R = TypeVar("R")

How = Literal["stopped", "ended", "failed", "out of reach", "interrupted"]


@dataclass
class Recorded(Generic[R]):
    """What became of a script.

    Attributes:
        how: it was ``"stopped"`` after its steps, has ``"ended"`` before, has ``"failed"``, needed a value of
            a card that is not there (``"out of reach"``), or was ``"interrupted"`` by the user.
        steps: optimizer steps taken, of the optimizer that stepped first.
        result: what was made of the graph.
        error: what it has raised and not caught.
        exit_code: its own, as far as it has ended by itself.
    """

    how: How
    steps: int
    result: R
    error: BaseException | None = None
    exit_code: int = 0


class UnknownDevice(ValueError):
    """A device of that name, or a release of PyTorch for it, is not known; the message says so."""


class StepCount:
    """Counts the steps of the optimizer that steps first.

    Of several optimizers, as in a GAN, it is that one's steps; what a step calls in turn (a closure, an
    optimizer that wraps another one) is a part of it.
    """

    def __init__(self, stepped: Callable[[int], None], refuse: Callable[[], None] = lambda: None) -> None:
        self.count = 0
        self._stepped = stepped
        self._refuse = refuse
        self._first: weakref.ref[Any] | None = None
        self._thread = threading.get_ident()

    def before(self, optimizer: Any) -> None:
        self._refuse()
        if self._first is None:
            self._first = weakref.ref(optimizer)

    def after(self, optimizer: Any) -> None:
        if self._first is not None and self._first() is optimizer and threading.get_ident() == self._thread:
            self.count += 1
            self._stepped(self.count)


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's own code."""
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


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

    ``finish`` is called with the graph where the script is then, before anything of it is unwound.

    Raises:
        UnknownDevice: there is none of that name, or no such release of PyTorch for it.
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
        except Exception as error:  # of ours, which is not to be the script's
            finished.append(functools.partial(_raise, error))

    def stepped(count: int) -> None:
        if count == steps:
            end(user_frame(sys._getframe()))
            raise Stopped

    def refuse() -> None:
        if finished:  # the script has caught what stopped it
            raise Stopped

    count = StepCount(stepped, refuse)
    how: How = "ended"
    trouble: BaseException | None = None
    code = 0
    try:
        with watched_steps(count.before, count.after):
            script.enter()
            script.run()
    except SystemExit as left:
        code = 0 if finished else exit_code(left)
    except BaseException as raised:
        if not finished:
            trouble, how = raised, _how(raised)
    if finished:
        how = "stopped"
    else:
        end(vars(script.main))
    return Recorded(how, count.count, finished[0](), trouble, code)


def _raise(error: Exception) -> Any:
    raise error


def _how(error: BaseException) -> How:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return "out of reach" if isinstance(error, AbsentDeviceError) else "failed"
