"""Training strategies for one or several GPUs, compared by :mod:`lazyviz.session.advice.advise`."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Apply = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True, slots=True)
class Strategy:
    """A name, the number of GPUs, the changes to a model, and the optimizer if it is not the user's."""

    name: str
    size: int = 1
    apply: Apply | None = None
    recompute: bool = False
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None

    def applied(self, model: nn.Module) -> nn.Module:
        if self.recompute:
            for block in blocks_of(model):
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        return model if self.apply is None else self.apply(model)


AS_WRITTEN = Strategy("as written")


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated layers of a model: the longest list of modules of one class."""
    best: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            children = list(module)
            if len(children) > max(len(best), 1) and len({type(child) for child in children}) == 1:
                best = children
    return best


def strategies_for(
    *,
    world_size: int,
    sizes: Sequence[int],
    shared: Mapping[str, Any] | None,
    recompute: bool,
    layered: bool,
    small: Callable[[Any], torch.optim.Optimizer] | None,
) -> list[Strategy]:
    """One GPU, DDP, FSDP2, and tensor parallelism; each unchanged, with recomputation, and with ``small``."""
    found = [Strategy("one GPU")]
    if world_size > 1:
        found.append(Strategy(f"DDP x {world_size}", world_size, _data_parallel))
        found.append(Strategy(f"FSDP2 x {world_size}", world_size, _fully_sharded))
        if layered:
            found.append(Strategy(f"FSDP2 by layer x {world_size}", world_size, _sharded_by_layer))
    for size in sizes:
        if size > 1 and shared is not None:
            apply = functools.partial(_tensor_parallel, size=size, plan=shared)
            found.append(Strategy(f"tensor parallel x {size}", size, apply))
    variants: list[Strategy] = []
    for each in found:
        variants.append(each)
        name, size, apply_ = each.name, each.size, each.apply
        if recompute:
            variants.append(Strategy(f"{name}, recomputing", size, apply_, True))
        if small is not None:
            variants.append(Strategy(f"{name}, 8-bit optimizer", size, apply_, False, small))
        if recompute and small is not None:
            variants.append(Strategy(f"{name}, recomputing, 8-bit optimizer", size, apply_, True, small))
    return variants


def _data_parallel(model: nn.Module) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model)


def _fully_sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model)
    return model


def _sharded_by_layer(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in blocks_of(model):
        fully_shard(block)
    fully_shard(model)
    return model


def _tensor_parallel(model: nn.Module, size: int, plan: Mapping[str, Any]) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    named = {name: styles[style]() if isinstance(style, str) else style for name, style in plan.items()}
    return parallelize_module(model, init_device_mesh("cuda", (size,)), named)


def tensor_parallel_plan(model: nn.Module) -> dict[str, str] | None:
    """The plan of a transformers model, as far as its styles are PyTorch's; otherwise ``None``."""
    given = getattr(model, "_tp_plan", None) or getattr(model, "tp_plan", None)
    if not isinstance(given, Mapping):
        return None
    found = {str(name): style for name, style in given.items() if style in ("colwise", "rowwise")}
    return found or None


def eight_bit_optimizer() -> Callable[[Any], torch.optim.Optimizer] | None:
    """torchao's ``AdamW8bit``, if torchao is installed."""
    try:
        made: Any = importlib.import_module("torchao.optim").AdamW8bit
    except (ImportError, AttributeError):
        return None
    optimizer: Callable[[Any], torch.optim.Optimizer] = made
    return optimizer


def step_one_by_one_if_mixed(optimizer: torch.optim.Optimizer) -> None:
    """Disable the optimizer's foreach implementation if only some parameters are DTensors.

    A plan for tensor parallelism does not change the rest of a model, and PyTorch's foreach operators do not
    support both kinds together.
    """
    from torch.distributed.tensor import DTensor

    for group in optimizer.param_groups:
        kinds = {isinstance(parameter, DTensor) for parameter in group["params"]}
        if len(kinds) > 1 and "foreach" in group:
            group["foreach"] = False
