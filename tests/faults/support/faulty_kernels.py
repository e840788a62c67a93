"""Kernels that fail or are interrupted, at any op of a program and for every way to run it.

``FaultyKernels`` puts a function in the place of each operator's kernel, which calls that kernel and,
when its turn has come, lets something happen before or after.  ``Calls`` does the same between ops: it
raises where Python itself looks for signals, at the entry of lazyviz's functions and after the functions of C
that they call.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch

import lazyviz
from lazyviz.record.provenance.source_lines import AT_USERS_LINE

PACKAGE = os.path.dirname(os.path.abspath(lazyviz.__file__)) + os.sep


Fault = Callable[[Callable[[], Any]], Any]
"""What comes in a kernel; it is given the function that runs this."""


class KernelError(RuntimeError):
    """What a kernel raises."""


class Alarm(Exception):
    """What a signal's handler raises that is not Ctrl-C's, or another thread has raised here."""


def error(run: Callable[[], Any]) -> Any:
    raise KernelError("the kernel has failed")


def out_of_memory(run: Callable[[], Any]) -> Any:
    raise torch.OutOfMemoryError("there is no memory for the kernel")


def interrupt(run: Callable[[], Any]) -> Any:
    result = run()
    signal.raise_signal(signal.SIGINT)
    return result


def another_signal(run: Callable[[], Any]) -> Any:
    result = run()
    signal.raise_signal(signal.SIGUSR1)
    return result


def error_after_it(run: Callable[[], Any]) -> Any:
    """The kernel has written its results, and fails then."""
    run()
    raise KernelError("the kernel has failed after it has written")


class ThreadSwitch:
    """Another thread evaluates all that is pending, while a kernel runs; ``errors`` are what it raised."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []

    def __call__(self, run: Callable[[], Any]) -> Any:
        def evaluate() -> None:
            try:
                lazyviz.evaluate()
            except BaseException as error:
                self.errors.append(error)

        thread = threading.Thread(target=evaluate, daemon=True)
        thread.start()
        self.threads.append(thread)
        thread.join(0.0005)  # it waits for the run
        return run()

    def join(self) -> None:
        while self.threads:
            thread = self.threads.pop()
            thread.join(30)
            assert not thread.is_alive(), "a thread is stuck"


_KEY = torch._C._dispatch_key_parse("TESTING_ONLY_GenericMode")  # PyTorch has it for such tests

_others = torch.library.Library("_", "IMPL")
_others.fallback(torch.library.fallthrough_kernel, "TESTING_ONLY_GenericMode")


def everything(op: Any) -> bool:
    return True


def may_fail_after_writing(op: Any) -> bool:
    """Elementwise kernels in place do not: they take all memory that they need before."""
    return not (op._schema.is_mutable and torch.Tag.pointwise in op.tags)


class FaultyKernels:
    """While ``active``, calls of ``ops`` go through here; armed, those numbered ``at`` through ``fault``.

    Only calls of operators that ``counts`` says have numbers.
    """

    def __init__(self, ops: Iterable[Any]) -> None:
        self.calls = self.fired = 0  # since it was armed, from 0; faults, ever
        self.at: frozenset[int] | None = None
        self.counts: Callable[[Any], bool] = everything
        self.fault: Fault = error
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            # Of another one that is there still, which PyTorch says once in a process.
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for op in ops:
                if op.namespace == "aten":
                    self._put_before(op)

    def _put_before(self, op: Any) -> None:
        name, overload = op._schema.name.partition("::")[2], op._schema.overload_name
        full = f"{name}.{overload}" if overload else name
        self._library.impl(full, self._kernel(op), "TESTING_ONLY_GenericMode")

    def _kernel(self, op: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            def run() -> Any:
                with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEY)):
                    return op(*args, **kwargs)

            if self.at is None or not self.counts(op):
                return run()
            number, self.calls = self.calls, self.calls + 1
            if number not in self.at:
                return run()
            self.fired += 1
            return self.fault(run)

        return call

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Context, of a run on this thread; a block's mode, inside which it may be, has excluded the key."""
        excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(_KEY)
        torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, False)
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, True)
        try:
            yield
        finally:
            torch._C._dispatch_tls_set_dispatch_key_included(_KEY, False)
            torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, excluded)

    def arm(self, at: int | frozenset[int], fault: Fault) -> None:
        """From now on the calls numbered ``at`` go through ``fault``; -1: none, they are counted."""
        numbers = frozenset({at}) if isinstance(at, int) else at
        self.calls, self.at, self.fault = 0, numbers, fault
        self.counts = may_fail_after_writing if fault is error_after_it else everything

    def disarm(self) -> None:
        self.at = None

    def restore(self) -> None:
        self._library._destroy()


class Calls:
    """A profiler that raises :class:`Alarm` at its point number ``at``; ``count`` is how many it has seen."""

    def __init__(self, at: int = -1, files: tuple[str, ...] = (PACKAGE,)) -> None:
        self.at, self.count, self.place = at, 0, ""
        self._files = files

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "c_return"):
            return
        code = frame.f_code
        is_replay = code.co_name == AT_USERS_LINE and code.co_argcount > 1  # the generated code
        if not (is_replay or code.co_filename.startswith(self._files)):
            return
        number, self.count = self.count, self.count + 1
        if number == self.at:
            what = getattr(argument, "__name__", "")
            self.place = f"{event} {what} in {frame.f_code.co_name}, line {frame.f_lineno}"
            raise Alarm(self.place)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
