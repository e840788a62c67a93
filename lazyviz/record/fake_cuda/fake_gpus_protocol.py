"""Protocol of the fake GPUs: the interface that the patches of ``torch.cuda`` use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..interception.attribute_patches import Patches
from ..tape import Tape
from .fake_gpu import Gpu

Memory = Callable[[torch.device, int], tuple[int, int]]
"""Bytes allocated now and at most since a position of the graph, on a device, in eager PyTorch."""
Reserved = Callable[[torch.device], int]
"""Bytes that the caching allocator of a device would hold, in eager PyTorch."""


class Gpus(Protocol):
    """The interface of :class:`~lazyviz.record.fake_cuda.torch_cuda_replacement.AbsentGpus` for its parts."""

    gpu: Gpu
    memory: Memory
    reserved: Reserved
    reset_at: int
    patches: Patches

    @property
    def tape(self) -> Tape: ...
    def index(self, device: Any = None) -> int: ...
    def device(self, device: torch.device) -> torch.device: ...
    def below(self, device: torch.device) -> torch.device: ...
    def replace(self, owner: Any, name: str, function: Any) -> None: ...
    def properties(self, device: Any = None) -> Any: ...
    def assumes_each_read(self) -> bool: ...
