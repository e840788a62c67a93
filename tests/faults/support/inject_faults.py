"""Raises an exception at any point of a call, and checks that PyTorch is unmodified afterwards.

``points(action)`` counts the places where a tracer sees ``action``; ``inject(action, at)`` runs it again and
raises at one of them, which is what a signal handler or ``PyThreadState_SetAsyncExc`` may do::

    state = State()                          # what PyTorch is before
    for at in sampled(points(action), 50):
        error = inject(action, at)           # the exception that came out, or None if all was swallowed
        assert not state.differences()       # what of PyTorch is not as it was
        assert is_plain()

``action`` must take the same way each time, so it is called once before.  A *point* is a call, a line or a
return of the frames that ``where`` selects (with ``opcodes=True`` each instruction, too): Python itself looks
for signals at calls, returns and backward jumps only, so this is more than can happen.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, TypeVar

import torch

import lazyviz
from lazyviz.torch_internals import private_api

Result = TypeVar("Result")
PACKAGE = os.path.dirname(os.path.abspath(lazyviz.__file__)) + os.sep
TESTS = str(Path(__file__).absolute().parents[2])


class Fault(Exception):
    """What a signal handler of the user's may raise: no KeyboardInterrupt, and nobody expects it."""


def in_lazyviz(frame: FrameType) -> bool:
    """Frames of lazyviz, and those of ``contextlib`` that its functions run in."""
    return frame.f_code.co_filename.startswith((PACKAGE, contextlib.__file__))


def everywhere(frame: FrameType) -> bool:
    """All frames but those of the tests and of Python's import machinery."""
    return not frame.f_code.co_filename.startswith((TESTS, "<frozen"))


def _in_finalizer(frame: FrameType | None) -> bool:
    """Python drops what is raised in a finalizer, with a message, so nothing is to be seen there."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


class _Tracer:
    """Counts points, and raises ``error`` at the one numbered ``at``."""

    def __init__(
        self,
        where: Callable[[FrameType], bool],
        opcodes: bool,
        at: int = -1,
        error: type[BaseException] = KeyboardInterrupt,
        by_signal: bool = False,
    ) -> None:
        self.where, self.opcodes, self.at, self.error = where, opcodes, at, error
        self.by_signal = by_signal
        self.count = 0
        self.place = ""  # where it was raised

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "call" and (not self.where(frame) or _in_finalizer(frame)):
            return None
        frame.f_trace_opcodes = self.opcodes
        if event != "exception":
            if self.count == self.at:
                self.place = f"{event} of {frame.f_code.co_qualname}, line {frame.f_lineno}"
                self.count += 1
                if not self.by_signal:
                    raise self.error(self.place)
                signal.raise_signal(signal.SIGUSR1)
            self.count += 1
        return self

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(before)


def points(
    action: Callable[[], object],
    *,
    where: Callable[[FrameType], bool] = in_lazyviz,
    opcodes: bool = False,
) -> int:
    """How many points ``action`` has; it is called twice."""
    action()
    tracer = _Tracer(where, opcodes)
    with tracer.tracing():
        action()
    return tracer.count


def inject(
    action: Callable[[], object],
    at: int,
    error: type[BaseException] = KeyboardInterrupt,
    *,
    where: Callable[[FrameType], bool] = in_lazyviz,
    opcodes: bool = False,
    by_signal: bool = False,
) -> BaseException | None:
    """Call ``action`` and raise ``error`` at its point number ``at``; returns what came out of it.

    ``by_signal``: it is raised by the handler of a signal that arrives there, and which may be deferred.
    The exception is returned with its traceback, as notebooks keep that of the last error: whoever lets go
    of something only when the frames in it die has not let go of it.
    """
    tracer = _Tracer(where, opcodes, at, error, by_signal)

    def handler(number: int, frame: FrameType | None) -> None:
        raise error(tracer.place)

    before = signal.signal(signal.SIGUSR1, handler) if by_signal else None
    function_state, collects = torch._C._get_torch_function_state(), gc.isenabled()
    try:
        with tracer.tracing():
            action()
    except BaseException as raised:
        if not tracer.place:  # not ours
            raise
        raised.add_note(f"injected at point {at}: {tracer.place}")
        return raised
    finally:
        if by_signal:
            signal.signal(signal.SIGUSR1, before)
            # A trace function, but no signal, can raise before the first call of a `finally` clause, and
            # before `__exit__` of a context written in C, such as PyTorch's; see docs/limits.md.
            torch._C._set_torch_function_state(function_state)
            if collects:
                gc.enable()
    return None


def call_at(
    action: Callable[[], Result],
    at: int,
    function: Callable[[], object],
    *,
    where: Callable[[FrameType], bool] = in_lazyviz,
) -> Result:
    """Call ``action``; the handler of a signal that arrives at its point number ``at`` calls ``function``."""
    tracer = _Tracer(where, False, at, by_signal=True)

    def handler(number: int, frame: FrameType | None) -> None:
        before = sys.gettrace()
        sys.settrace(None)
        try:
            function()
        finally:
            sys.settrace(before)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with tracer.tracing():
            return action()
    finally:
        signal.signal(signal.SIGUSR1, before)


def sampled(count: int, most: int, seed: int = 0) -> list[int]:
    """All of ``range(count)``, or ``most`` of them, the first and the last among these."""
    if count <= most:
        return list(range(count))
    inner = random.Random(seed).sample(range(1, count - 1), most - 2)
    return [0, *sorted(inner), count - 1]


def interrupted(
    action: Callable[[], object], seconds: float, error: type[BaseException] = KeyboardInterrupt
) -> BaseException | None:
    """Call ``action``; a signal whose handler raises ``error`` comes after ``seconds``, if it takes so long.

    Returns what came out of it, as :func:`inject` does.
    """
    armed = True

    def handler(number: int, frame: FrameType | None) -> None:
        if armed:
            raise error("a signal")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        action()
    except error as raised:
        return raised
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return None


def is_plain() -> bool:
    """Whether PyTorch computes at once, on this thread."""
    result = torch.ones(2) + 1
    return type(result) is torch.Tensor and result.tolist() == [2.0, 2.0]


class State:
    """What PyTorch and Python are, as far as an open block changes them; found out by opening one.

    Nothing of lazyviz is asked: all attributes of PyTorch's modules and classes are compared.
    """

    _changed: list[tuple[dict[str, Any] | Any, str]] | None = None

    def __init__(self) -> None:
        if State._changed is None:
            State._changed = _what_a_block_changes()
        self._before = self._now()

    def differences(self) -> list[str]:
        """What is not as it was when this object was made, each with its name."""
        now = self._now()
        return [
            f"{name}: {now[name]!r:.200}, was {before!r:.200}"
            for name, before in self._before.items()
            if now[name] is not before and now[name] != before
        ]

    def _now(self) -> dict[str, Any]:
        assert State._changed is not None
        found = {f"{_name(owner)}.{name}": vars(owner).get(name) for owner, name in State._changed}
        function = private_api.module_call
        found |= {
            "code of nn.Module.__call__": function.__code__,
            "defaults of nn.Module.__call__": function.__kwdefaults__,
            "code of the look-up of rules": private_api.dispatch_rule.__code__,
            "dispatch modes": private_api.dispatch_modes(),
            "dispatch keys included": str(torch._C._dispatch_tls_local_include_set()),
            "dispatch keys excluded": str(torch._C._dispatch_tls_local_exclude_set()),
            "garbage collector": (gc.get_threshold(), gc.isenabled(), list(gc.callbacks)),
            "signal handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
            "hooks of optimizers": [
                dict(hooks)
                for name, hooks in sorted(vars(sys.modules["torch.optim.optimizer"]).items())
                if name.startswith("_global_optimizer")
            ],
            "threading.Thread.start": threading.Thread.start,
            "warnings": (list(warnings.filters), torch.is_warn_always_enabled()),
            "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        }
        return found


def _name(owner: Any) -> str:
    return getattr(owner, "__module__", "") * isinstance(owner, type) + "." + owner.__name__


def _owners() -> Iterator[Any]:
    modules = [
        module
        for name, module in sorted(sys.modules.items())
        if isinstance(module, ModuleType) and name.partition(".")[0] == "torch"
    ]
    yield from modules
    seen: set[int] = set()
    for module in modules:
        for value in list(vars(module).values()):
            if (
                issubclass(type(value), type)
                and id(value) not in seen
                and value.__module__.startswith("torch")
            ):
                seen.add(id(value))
                yield value


def _what_a_block_changes() -> list[tuple[Any, str]]:
    def everything() -> list[tuple[Any, dict[str, Any]]]:
        return [(owner, dict(vars(owner))) for owner in _owners()]

    with lazyviz.lazy():
        torch.ones(2) + 1
        torch.fft.rfft(torch.ones(3))  # the first shape rule imports modules, which add warnings filters
    lazyviz.reset()
    before = everything()
    with lazyviz.lazy():
        during = {id(owner): attributes for owner, attributes in everything()}
    lazyviz.reset()
    return [
        (owner, name)
        for owner, attributes in before
        for name in attributes.keys() | during.get(id(owner), {}).keys()
        if attributes.get(name) is not during.get(id(owner), {}).get(name)
    ]
