"""Streams and events of an absent GPU: they can be created and waited for, but nothing runs on them."""

from __future__ import annotations

from typing import Any

import torch

from ..sync_points import AbsentDeviceError
from .refused_driver_calls import refusal


class Stream:
    """A stream on which nothing will run."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = device
        self.cuda_stream = 0
        self.priority = priority

    def synchronize(self) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...

    @staticmethod
    def priority_range() -> tuple[int, int]:
        raise refusal("Stream.priority_range()")

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else Event()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: Any) -> None: ...


class Event:
    """An event that will never occur."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = kwargs.get("device")

    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Any) -> float:
        raise AbsentDeviceError(
            "Event.elapsed_time() is not available: a planned GPU does not run. The projected time is "
            "plan.seconds."
        )

    def ipc_handle(self) -> Any:
        raise refusal("Event.ipc_handle()")


def planned_or(original: Any, planned: type) -> Any:
    """Replaces ``torch.Stream`` or ``torch.Event``: also creates those of planned devices."""

    class Either(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, (original, planned))

        def __call__(cls, device: Any = None, *args: Any, **kwargs: Any) -> Any:
            type_of = "cuda" if device is None or isinstance(device, int) else torch.device(device).type
            return (planned if type_of == "cuda" else original)(device, *args, **kwargs)

    return Either(original.__name__, (), {})
