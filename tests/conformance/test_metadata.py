"""Recorded metadata of every node equals its kernel's: shape, strides, offset, dtype, memory.

The operators' own samples, contiguous and not, forward and backward, with gradients whose
strides are those of a transposed tensor: where torch's shape rules go wrong, they do so there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import OpInfo, op_db
from torch.utils._pytree import tree_leaves

import lazyviz
from lazyviz.execute import eager_backend

ENTRIES = [entry for entry in op_db if torch.float32 in entry.dtypes]


@pytest.fixture
def wrong(monkeypatch) -> list[str]:
    """Filled, while graphs run, with what was recorded otherwise than it came out."""
    found: list[str] = []
    deliver = eager_backend.deliver

    def comparing(results: Mapping[Any, torch.Tensor], memory: Any) -> None:
        found.extend(text for value, real in results.items() if (text := disagreement(value, real)))
        found.extend(sharing_disagreements(results))
        deliver(results, memory)

    monkeypatch.setattr(eager_backend, "deliver", comparing)
    return found


def disagreement(value: Any, real: torch.Tensor) -> str | None:
    meta, made = value.meta, value.storage.created == value.node.index and not value.storage.external
    recorded = [meta.shape, meta.dtype]
    actual = [tuple(real.shape), real.dtype]
    if real.numel():
        recorded.append(meta.stride)
        actual.append(real.stride())
    if made:
        recorded += [meta.offset, value.storage.nbytes]
        actual += [real.storage_offset(), real.untyped_storage().nbytes()]
    return None if recorded == actual else f"{value.node.op}: {recorded} recorded, {actual} returned"


def sharing_disagreements(results: Mapping[Any, torch.Tensor]) -> Iterator[str]:
    """Of a node's results: which two are on one memory as recorded, or as they came out, but not both."""
    pairs = itertools.combinations([pair for pair in results.items() if pair[1].numel()], 2)
    for (value, real), (other, real_other) in pairs:
        recorded = value.storage is other.storage
        if recorded != (real.untyped_storage()._cdata == real_other.untyped_storage()._cdata):
            how = "one memory" if recorded else "two memories"
            yield f"{value.node.op}: results {value.index} and {other.index} recorded on {how}"


def gradients_like(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [
        torch.ones(output.shape[::-1], dtype=output.dtype).permute(*range(output.dim() - 1, -1, -1))
        for output in outputs
    ]


def run(entry: OpInfo, sample: Any) -> None:
    output = entry(sample.input, *sample.args, **sample.kwargs)
    outputs = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
    outputs = [t for t in outputs if t.is_floating_point() or t.is_complex()]
    leaves = [
        t for t in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(t, torch.Tensor)
    ]
    leaves = [t for t in leaves if t.requires_grad]
    if outputs:
        torch.autograd.grad(outputs, leaves, gradients_like(outputs), allow_unused=True)


def samples(entry: OpInfo, everything: bool) -> Iterator[Any]:
    torch.manual_seed(0)
    given = entry.sample_inputs("cpu", torch.float32, requires_grad=entry.supports_autograd)
    for sample in itertools.islice(given, 12 if everything else 1):
        tensors = [t for t in tree_leaves((sample.input, sample.args)) if isinstance(t, torch.Tensor)]
        strided = all(tensor.layout == torch.strided for tensor in tensors)
        if everything or not strided:
            yield sample
        if strided:
            yield sample.noncontiguous()


@pytest.mark.filterwarnings("ignore")  # what the entries themselves are warned of
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.formatted_name)
def test_metadata_is_that_of_the_kernels(entry, wrong, everything):
    for sample in samples(entry, everything):
        with torch.random.fork_rng():
            try:
                run(entry, sample)
            except Exception:
                continue  # eager refuses it
            with lazyviz.lazy() as graph:
                run(entry, sample)
        graph.evaluate()
    assert not wrong


@pytest.mark.parametrize("cell", [torch.nn.RNN, torch.nn.LSTM, torch.nn.GRU])
def test_metadata_of_recurrent_layers_is_that_of_the_kernels(cell, wrong):
    layer = cell(4, 5, num_layers=2)
    with lazyviz.lazy() as graph:
        layer(torch.ones(6, 3, 4))[0].square().sum().backward()
    graph.evaluate()
    assert not wrong
