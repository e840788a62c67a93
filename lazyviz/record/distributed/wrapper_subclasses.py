"""DTensors and their like around tensors of a card that is not there.

They are made with the device of the tensor inside, which C++ must not see: a planned tensor is on another one
there (:mod:`lazyviz.torch_internals.cuda`).  Python is told the planned device, as of any planned tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ...torch_internals import cuda as torch_cuda
from ...torch_internals import private_api, process_groups
from ..interception.attribute_patches import Patches
from ..tape import Tape

_device_below = private_api.TensorBase.device.__get__


def install(patches: Patches, tape: Tape) -> None:
    _tell_parameters(patches)
    if not torch_cuda.STAND_INS:
        return
    _install_propagation(patches, tape)
    _install_draws(patches)

    def device(tensor: torch.Tensor) -> torch.device:
        return torch_cuda.stands_for(_device_below(tensor))

    def of(answer: Callable[[torch.device], Any]) -> property:
        return property(lambda tensor: answer(device(tensor)))

    for cls in process_groups.wrapper_classes():
        patches.set(cls, "device", property(device))
        patches.set(cls, "is_cuda", of(lambda found: found.type == "cuda"))
        patches.set(cls, "is_meta", of(lambda found: found.type == "meta"))
        patches.set(cls, "is_cpu", of(lambda found: found.type == "cpu"))
        patches.set(
            cls, "get_device", lambda tensor: -1 if (index := device(tensor).index) is None else index
        )
    original = private_api.make_wrapper_subclass

    @functools.wraps(original)
    def make_wrapper_subclass(*args: Any, **kwargs: Any) -> Any:
        place = kwargs.get("device")
        if place is not None:
            place = torch.device(place)
            if place.type == "cuda" and place.index is None:
                place = torch.device("cuda", torch.cuda.current_device())
            kwargs["device"] = torch_cuda.STAND_INS.get(place, place)
        return original(*args, **kwargs)

    patches.set(torch.Tensor, private_api.MAKE_WRAPPER_SUBCLASS, staticmethod(make_wrapper_subclass))


def _install_propagation(patches: Patches, tape: Tape) -> None:
    """DTensor asks PyTorch's shape rules, on fake tensors of the planned card, which need what ours need."""
    cls = process_groups.sharding_propagator()
    original = cls._propagate_tensor_meta_non_cached

    @functools.wraps(original)
    def propagate(propagator: Any, schema: Any) -> Any:
        before = tape.shapes.inferring
        tape.shapes.inferring = True
        try:
            with torch_cuda.cuda_guards():
                return original(propagator, schema)
        finally:
            tape.shapes.inferring = before

    patches.set(cls, "_propagate_tensor_meta_non_cached", propagate)


def _install_draws(patches: Patches) -> None:
    """A planned generator has no state that ranks could have in common, and draws nothing."""
    dispatcher, tracker = process_groups.random_state()
    patches.set(dispatcher, "is_rng_supported_mesh", lambda mesh: False)
    asked = tracker.distribute_region_enabled
    patches.set(tracker, "distribute_region_enabled", property(lambda self: False, asked.fset))


def _tell_parameters(patches: Patches) -> None:
    """A DTensor is made a parameter by a mark: what it has here is this rank's part of the parameter."""

    def get(tensor: torch.Tensor) -> bool:
        return bool(tensor.__dict__.get("_is_param", False))

    def mark(tensor: Any, is_param: bool) -> None:
        tensor.__dict__["_is_param"] = is_param
        value = tensor._local_tensor.__dict__.get("_lazyviz")
        if is_param and value is not None and value.storage.role is None:
            value.storage.role = "parameter"

    patches.set(process_groups.wrapper_classes()[0], "_is_param", property(get, mark))
