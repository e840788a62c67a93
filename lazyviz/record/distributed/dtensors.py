"""DTensors on an absent GPU: their use of shape rules and generators.

:mod:`lazyviz.record.fake_cuda.wrapper_subclasses` handles the device that they report.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from ...torch_internals import fake_cuda_devices, fake_process_groups
from ..fake_cuda.wrapper_subclasses import report_planned_device
from ..interception.attribute_patches import Patches
from ..tape import Tape


def install(patches: Patches, tape: Tape) -> None:
    _patch_parameters(patches)
    if not fake_cuda_devices.STAND_INS:
        return
    _install_propagation(patches, tape)
    _install_draws(patches)

    for cls in fake_process_groups.wrapper_classes():
        report_planned_device(patches, cls)


def _install_propagation(patches: Patches, tape: Tape) -> None:
    """Patch DTensor's calls of PyTorch's shape rules on fake tensors of the planned GPU like lazyviz's own
    calls.
    """
    cls = fake_process_groups.sharding_propagator()
    original = cls._propagate_tensor_meta_non_cached

    @functools.wraps(original)
    def propagate(propagator: Any, schema: Any) -> Any:
        before = tape.shapes.inferring
        tape.shapes.inferring = True
        try:
            with fake_cuda_devices.cuda_guards():
                return original(propagator, schema)
        finally:
            tape.shapes.inferring = before

    patches.set(cls, "_propagate_tensor_meta_non_cached", propagate)


def _install_draws(patches: Patches) -> None:
    """A planned generator has no state that ranks could share, and draws nothing."""
    dispatcher, tracker = fake_process_groups.random_state()
    patches.set(dispatcher, "is_rng_supported_mesh", lambda mesh: False)
    original, asked = tracker.__init__, tracker.distribute_region_enabled

    # `torch.distributed.tensor.randn` and `manual_seed` create one even if the mesh does not support it.
    @functools.wraps(original)
    def create(self: Any, mesh: Any, run_state_sync: bool = True) -> None:
        original(self, mesh, run_state_sync=False)

    def region(self: Any, spec: Any, generator: Any = None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    patches.set(tracker, "__init__", create)
    patches.set(tracker, "_distribute_region", region)
    patches.set(tracker, "distribute_region_enabled", property(lambda self: False, asked.fset))


def _patch_parameters(patches: Patches) -> None:
    """Give the local tensor of a DTensor that is marked as a parameter the role of a parameter, too."""

    def get(tensor: torch.Tensor) -> bool:
        return bool(tensor.__dict__.get("_is_param", False))

    def mark(tensor: Any, is_param: bool) -> None:
        tensor.__dict__["_is_param"] = is_param
        value = tensor._local_tensor.__dict__.get("_lazyviz")
        if is_param and value is not None and value.storage.role is None:
            value.storage.role = "parameter"

    patches.set(fake_process_groups.wrapper_classes()[0], "_is_param", property(get, mark))
