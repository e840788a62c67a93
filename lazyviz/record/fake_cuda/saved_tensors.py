"""Saved tensors that are written to, on an absent GPU.

``torch.autograd.graph.allow_mutation_on_saved_tensors`` recognizes tensors and their memory by addresses,
which tensors on an absent GPU do not have.  Their recorded memory identifies them as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...torch_internals import private_api
from .fake_gpus_protocol import Gpus


def install(gpus: Gpus) -> None:
    module, of_tensor, of_memory = private_api.SAVED_TENSOR_KEYS
    find = gpus.tape.tensors.value_of

    def place(tensor: torch.Tensor) -> tuple[Any, int] | None:
        value = find(tensor) if tensor.device.type == "cuda" else None
        return None if value is None else ((id(value.storage), value.meta.offset), tensor._version)

    def key_of_tensor(tensor: torch.Tensor) -> Any:
        found = place(tensor)
        return original_key(tensor) if found is None else (id(tensor), *found)

    def key_of_memory(tensor: torch.Tensor) -> Any:
        return place(tensor) or original_memory(tensor)

    original_key: Callable[..., Any] = getattr(module, of_tensor)
    original_memory: Callable[..., Any] = getattr(module, of_memory)
    gpus.replace(module, of_tensor, key_of_tensor)
    gpus.replace(module, of_memory, key_of_memory)
