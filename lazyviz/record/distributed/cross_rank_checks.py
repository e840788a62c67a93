"""Consistency checks among ranks, answered as if the other ranks were like this one."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ...torch_internals import fake_process_groups
from ..interception.attribute_patches import Patches

_IN_BFLOAT16 = ("bf16_compress_hook", "bf16_compress_wrapper_hook")


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
    _patch_device_numbers(patches)
    _patch_hooks(patches)
    _patch_gradients(patches, fsdp)


def _patch_device_numbers(patches: Patches) -> None:
    """Let FSDP1 take the number of a planned GPU as ``device_id``: it would pass it to ``torch.device``,
    which asks C++ for this machine's accelerator.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel  # slow to import, and known by now

    make = FullyShardedDataParallel.__init__

    @functools.wraps(make)
    def init(wrapper: Any, *args: Any, **kwargs: Any) -> None:
        number = kwargs.get("device_id")
        if isinstance(number, int) and torch.cuda.is_available():
            kwargs["device_id"] = torch.device("cuda", number)
        make(wrapper, *args, **kwargs)

    patches.set(FullyShardedDataParallel, "__init__", init)


def _patch_hooks(patches: Patches) -> None:
    """Accept hooks of DDP that compress to bfloat16 on a planned GPU, whose PyTorch has NCCL."""
    check = DistributedDataParallel._check_comm_hook

    @functools.wraps(check)
    def check_comm_hook(module: Any, hook: Any) -> None:
        name = getattr(hook, "__name__", "")
        if name not in _IN_BFLOAT16 or module.device_type != "cuda":
            check(module, hook)

    patches.set(DistributedDataParallel, "_check_comm_hook", check_comm_hook)


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
