"""Tensor subclasses around tensors of an absent GPU: DTensors, quantized weights.

They are created with the device of the inner tensor, which C++ must not see, because a planned tensor is on
another device there (:mod:`lazyviz.torch_internals.fake_cuda_devices`).  Python sees the planned device, as
for any planned tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch

from ...torch_internals import fake_cuda_devices, private_api
from ..interception.attribute_patches import Patches

_device_below = private_api.TensorBase.device.__get__
# (cls, size, strides, storage_offset, memory_format, dtype, layout, device, ...)
_DEVICE_POSITION = 7
_seen: WeakSet[type] = WeakSet()  # a later block may use existing tensors of these classes


def install(patches: Patches) -> None:
    original = private_api.make_wrapper_subclass
    reported: set[type] = set()

    @functools.wraps(original)
    def make_wrapper_subclass(*args: Any, **kwargs: Any) -> Any:
        by_position = len(args) > _DEVICE_POSITION
        place = args[_DEVICE_POSITION] if by_position else kwargs.get("device")
        if place is not None:
            place = torch.device(place)
            if place.type == "cuda" and place.index is None:
                place = torch.device("cuda", torch.cuda.current_device())
            below = fake_cuda_devices.STAND_INS.get(place)
            if below is not None:
                if by_position:
                    args = (*args[:_DEVICE_POSITION], below, *args[_DEVICE_POSITION + 1 :])
                else:
                    kwargs["device"] = below
                if args[0] not in reported:
                    reported.add(args[0])
                    report_planned_device(patches, args[0])
        return original(*args, **kwargs)

    patches.set(torch.Tensor, private_api.MAKE_WRAPPER_SUBCLASS, staticmethod(make_wrapper_subclass))
    for cls in list(_seen):
        reported.add(cls)
        report_planned_device(patches, cls)


def report_planned_device(patches: Patches, cls: type) -> None:
    """Let tensors of a class report that they are on the planned GPU; the class's own answer has
    precedence.
    """
    _seen.add(cls)

    def device(tensor: torch.Tensor) -> torch.device:
        return fake_cuda_devices.stands_for(_device_below(tensor))

    def of(answer: Callable[[torch.device], Any]) -> property:
        return property(lambda tensor: answer(device(tensor)))

    answers: dict[str, Any] = {
        "device": property(device),
        "is_cuda": of(lambda found: found.type == "cuda"),
        "is_meta": of(lambda found: found.type == "meta"),
        "is_cpu": of(lambda found: found.type == "cpu"),
        "get_device": lambda tensor: -1 if (index := device(tensor).index) is None else index,
    }
    for name, answer in answers.items():
        if getattr(cls, name) is getattr(torch.Tensor, name):
            patches.set(cls, name, answer)
