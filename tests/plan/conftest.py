"""A small builder of graphs by hand, so that plans are tested apart from recording."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from lazyviz.graph.ir import Graph, Node, Phase, Role, SourceLine, Storage, TensorMeta, Value

CPU = torch.device("cpu")


class Program:
    """Writes a graph line by line; sizes are bytes, tensors are one-dimensional uint8."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.graph = Graph()
        self.device = device

    def outside(
        self, nbytes: int, role: Role | None = None, name: str = "", device: torch.device | None = None
    ) -> Value:
        storage = self._storage(nbytes, device, external=True, created=-1)
        storage.role = role
        storage.name = name
        value = Value(self._meta(nbytes, device), storage, None)
        self.graph.inputs.append(value)
        return value

    def op(
        self,
        inputs: Sequence[Value] = (),
        nbytes: int | None = None,
        phase: Phase = "forward",
        module: str = "",
        writes: Sequence[Value] = (),
        role: Role | None = None,
        device: torch.device | None = None,
        line: int | None = None,
    ) -> Value:
        """One node; without ``nbytes`` it works in place on its first input."""
        node = Node(len(self.graph.nodes), torch.ops.aten.clone.default, tuple(inputs), {})
        node.inputs = tuple(inputs)
        node.phase = phase
        node.module = module
        node.writes = tuple(value.storage for value in writes)
        if line is not None:
            node.source = SourceLine("<ipython-input-1-0>", line, f"line {line} of the cell")
        if nbytes is None:
            output = inputs[0]
            node.writes = (output.storage,)
        else:
            storage = self._storage(nbytes, device, external=False, created=node.index)
            storage.role = role
            output = Value(self._meta(nbytes, device), storage, node)
        node.outputs = (output,)
        self.graph.nodes.append(node)
        return output

    def view(self, value: Value, phase: Phase = "forward") -> Value:
        node = Node(len(self.graph.nodes), torch.ops.aten.view.default, (value,), {})
        node.inputs = (value,)
        node.phase = phase
        output = Value(value.meta, value.storage, node)
        node.outputs = (output,)
        self.graph.nodes.append(node)
        return output

    def drop(self, *values: Value) -> None:
        """The user's code drops its last references now."""
        for value in values:
            value.storage.dropped = len(self.graph.nodes)

    def _meta(self, nbytes: int, device: torch.device | None) -> TensorMeta:
        return TensorMeta((nbytes,), (1,), 0, torch.uint8, device or self.device)

    def _storage(self, nbytes: int, device: torch.device | None, *, external: bool, created: int) -> Storage:
        storage = Storage(nbytes, device or self.device, external=external, created=created)
        self.graph.storages.append(storage)
        return storage


@pytest.fixture
def program() -> Program:
    return Program()
