"""NCCL's reduction over GPUs of one process, as an operator that can be recorded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_library = torch.library.Library("lazyviz", "FRAGMENT")
_library.define("nccl_reduce(Tensor(a!) output, Tensor[] inputs) -> ()")


def _no_result(output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
    """It writes ``output``, and returns no tensor."""


torch.library.register_fake("lazyviz::nccl_reduce", _no_result, lib=_library)

REDUCE = torch.ops.lazyviz.nccl_reduce.default
