"""Calls of TorchScript functions while anything is pending: errors that say what is wrong, and constants.

TorchScript's interpreter drops the message of an exception that a dispatch mode raises: it says where the
program failed, but shows messages of C++ exceptions only.  So a call keeps the last exception that left the
mode, and adds its message.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from ...process.global_state_transaction import Transaction, take_back
from ...process.tracebacks import shorten
from ...torch_internals import composite_ops
from ..sync_points import AbsentDeviceError, SyncError

_BEFORE_MESSAGE = "\nRuntimeError: "  # in errors of TorchScript; nothing follows if it was a Python exception
# These are not errors of the TorchScript program, so they propagate unchanged.
_OURS = (SyncError, AbsentDeviceError)


class _Calls(threading.local):
    """The exception that left the mode in this thread's innermost call, in a list, if there is a call."""

    innermost: list[BaseException] | None = None


_calls = _Calls()


def note(error: BaseException) -> None:
    """Note an ``error`` that leaves the dispatch mode."""
    if _calls.innermost is not None:
        _calls.innermost[:] = [error]


# The dtype of the tensor that PyTorch creates from a Python number.
_DTYPE_OF_NUMBER = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}


class ConstantsComparable(Transaction):
    """Context in which ``equal`` accepts numbers as tensors.

    While TorchScript optimizes a program, before one of its first calls, it compares its constants. It treats
    numbers among them as tensors, but a dispatch mode would receive numbers, which the operator does not
    accept.  Elsewhere, errors of ``equal`` should have no frame of lazyviz.
    """

    _entered: ClassVar[set[int]] = set()
    _undo_all: ClassVar[list[Callable[[], object]]] = []
    _lock = threading.RLock()

    def __init__(self, paused: Callable[[], AbstractContextManager[Any]]) -> None:
        """``paused`` returns a context in which nothing is recorded."""
        self._paused = paused

    def _recreate_cm(self) -> ConstantsComparable:
        return ConstantsComparable(self._paused)

    def begin(self) -> None:
        self.undo_by(self._leave_all)
        with self._lock:
            self._entered.add(id(self))
            if not self._undo_all:
                composite_ops.override_composites({"equal": self._equal}, self._undo_all)

    def _leave_all(self) -> None:
        with self._lock:
            self._entered.discard(id(self))
            if not self._entered:
                take_back(self._undo_all)

    def _equal(self, original: composite_ops.CompositeCall, *operands: torch.Tensor | complex) -> bool:
        return bool(original(*map(self._tensor, operands)))

    def _tensor(self, operand: torch.Tensor | complex) -> torch.Tensor:
        if isinstance(operand, torch.Tensor):
            return operand
        with self._paused():
            return torch.tensor(operand, dtype=_DTYPE_OF_NUMBER[type(operand)], device="cpu")


def with_messages(
    original: Callable[..., Any], paused: Callable[[], AbstractContextManager[Any]]
) -> Callable[..., Any]:
    """``original``, which runs TorchScript, with errors that say what is wrong, as in eager mode.

    ``paused`` returns a context in which nothing is recorded.
    """

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        outer, raised = _calls.innermost, list[BaseException]()
        _calls.innermost = raised
        try:
            with ConstantsComparable(paused):
                return original(*args, **kwargs)
        except RuntimeError as error:
            shorten(error)
            where, has_message, message = str(error).rpartition(_BEFORE_MESSAGE)
            if raised and has_message and message.strip() in ("", str(raised[0])):
                (cause,) = raised
                if isinstance(cause, _OURS) or not isinstance(cause, Exception):
                    raise cause from None
                notes = "".join(f"\n{note}" for note in getattr(cause, "__notes__", ()))
                error.args = (f"{where}{_BEFORE_MESSAGE}{cause}{notes}\n",)
            raise
        finally:
            _calls.innermost = outer
            raised.clear()

    return call
