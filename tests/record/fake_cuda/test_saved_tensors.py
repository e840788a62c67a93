"""Writes to saved tensors, on a planned GPU: as many copies as in eager mode."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import allow_mutation_on_saved_tensors

import lazyviz

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")


def program(device: str | None, writes: bool) -> torch.Tensor:
    weight = torch.ones(64, 64, device=device, requires_grad=True)
    with allow_mutation_on_saved_tensors():
        hidden = weight.sin()
        squares, other = hidden.square(), hidden.exp()
        if writes:
            hidden.view(-1)[:64].mul_(2)
        (squares.sum() + other.sum()).backward()
    assert weight.grad is not None
    return weight.grad


@pytest.mark.parametrize("writes", [False, True])
def test_a_saved_tensor_is_copied_where_it_is_written(writes: bool) -> None:
    def copies(device: str | None) -> list[str]:
        with lazyviz.lazy(device="H100-80GB" if device else None) as graph:
            kept = program(device, writes)
        names = [node.name for node in graph.nodes if node.op._schema.name == "aten::clone"]
        if not device:
            graph.evaluate()
            assert torch.equal(kept, program(None, writes))
        return names

    assert len(copies("cuda")) == len(copies(None)) == writes
