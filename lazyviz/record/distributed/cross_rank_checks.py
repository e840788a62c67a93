"""Consistency checks among ranks, answered as if the other ranks were like this one."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from ...torch_internals import fake_process_groups
from ..interception.attribute_patches import Patches


def install(patches: Patches) -> None:
    # DistributedDataParallel: do all ranks have parameters of the same shapes?
    patches.set(dist, "_verify_params_across_processes", lambda *args, **kwargs: None)
    for owner in (dist, fake_process_groups.c10d()):
        original = owner.broadcast_object_list

        @functools.wraps(original)
        def broadcast_object_list(
            object_list: Any,
            src: Any = None,
            group: Any = None,
            *rest: Any,
            _original: Any = original,
            **named: Any,
        ) -> Any:
            root = named.get("group_src")
            own = dist.get_rank(group) if root is not None else dist.get_rank()
            if (src if root is None else root) == own or (src is None and root is None and own == 0):
                return None  # the other ranks would receive this rank's values
            return _original(object_list, src, group, *rest, **named)

        patches.set(owner, "broadcast_object_list", broadcast_object_list)
    fsdp = fake_process_groups.fsdp_parameter()
    reset = fsdp.reset_sharded_param

    @functools.wraps(reset)
    def reset_sharded_param(parameter: Any) -> None:
        """Replaced because it compares types and addresses, which pending tensors lack, and would copy padded
        tensors.
        """
        current = getattr(parameter._module_info.module, parameter._module_info.param_name)
        before: torch.Tensor = parameter._sharded_param_data
        local = current._local_tensor
        if current is parameter.sharded_param and _share(before, local):
            parameter._sharding_spec = current._spec
            return
        reset(parameter)

    patches.set(fsdp, "reset_sharded_param", reset_sharded_param)
    _patch_gradients(patches, fsdp)


def _patch_gradients(patches: Patches, fsdp: Any) -> None:
    """The tensor that FSDP2 stores in the ``grad`` of a sharded parameter: a part of a reduce-scatter's
    output.
    """
    make = fsdp.to_sharded_dtensor

    @functools.wraps(make)
    def to_sharded_dtensor(parameter: Any, tensor: torch.Tensor) -> Any:
        value = tensor.__dict__.get("_lazyviz")
        if value is not None and value.node is not None and value.node.phase == "backward":
            storage = value.storage
            if storage.role is None:
                storage.role = "gradient"
                storage.name = f"{parameter._param_fqn}.grad" if parameter._param_fqn else "grad"
            own = parameter.sharded_param._local_tensor.__dict__.get("_lazyviz")
            if own is not None and not own.storage.name:
                own.storage.name = parameter._param_fqn or ""
        return make(parameter, tensor)

    patches.set(fsdp, "to_sharded_dtensor", to_sharded_dtensor)


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two pending tensors share a storage."""
    values = [tensor.__dict__.get("_lazyviz") for tensor in (one, other)]
    return None not in values and values[0].storage is values[1].storage  # type: ignore[union-attr]
