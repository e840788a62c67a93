"""NCCL's reduction over GPUs of one process, as an operator that can be recorded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .operator_registration import define


def _no_result(output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
    """It writes ``output``, and returns no tensor."""


REDUCE = define("nccl_reduce", "(Tensor(a!) output, Tensor[] inputs) -> ()", shape=_no_result)
