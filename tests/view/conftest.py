"""Graphs built by hand, so that pictures are tested without the recorder."""

from __future__ import annotations

import types
from collections.abc import Sequence

import pytest
import torch

from lazyviz.graph.ir import Graph, Node, Phase, Role, SourceLine, Storage, SyncPoint, TensorMeta, Value
from lazyviz.plan.make_plan import make_plan
from lazyviz.plan.plan import Plan
from lazyviz.view.scene.scene import Scene

CPU = torch.device("cpu")
aten = torch.ops.aten


class Program:
    """Writes a graph down op by op: ``y = program(aten.relu.default, [x], module="act")``."""

    def __init__(self) -> None:
        self.graph = Graph()

    def outside(self, shape: Sequence[int] = (4, 8), role: Role | None = None, name: str = "") -> Value:
        """A tensor from outside."""
        meta = _meta(shape)
        storage = Storage(meta.storage_nbytes, CPU, external=True, created=-1)
        storage.role, storage.name = role, name
        value = Value(meta, storage, None)
        value.name = name
        self.graph.storages.append(storage)
        self.graph.inputs.append(value)
        return value

    def __call__(
        self,
        op: torch._ops.OpOverload,
        inputs: Sequence[Value],
        shape: Sequence[int] = (4, 8),
        *,
        module: str = "",
        root: str = "Net",
        phase: Phase = "forward",
        line: int = 1,
        text: str = "loss = net(x)",
        writes: Value | None = None,
        forward: Node | None = None,
        keep: bool = False,
    ) -> Value:
        """One op; it makes a new tensor, a view of its first input, or writes one in place."""
        index = len(self.graph.nodes)
        node = Node(index, op, tuple(inputs), {})
        node.inputs = list(inputs)
        node.module, node.root, node.phase = module, root if phase != "optimizer" else "", phase
        node.source = SourceLine("cell_compilation.py", line, text)
        node.forward = forward
        meta = _meta(shape)
        if writes is not None:
            node.writes = [writes.storage]
            value = writes
        else:
            if op.is_view:
                storage = inputs[0].storage
            else:
                storage = Storage(meta.storage_nbytes, CPU, external=False, created=index)
                self.graph.storages.append(storage)
            value = Value(meta, storage, node)
        for used in inputs:
            if not used.storage.external:
                used.storage.dropped = index + 1
        if writes is None and keep:
            value.storage.dropped = None
        node.outputs = [value]
        self.graph.nodes.append(node)
        return value

    def sync(self, cause: str = "item", line: int = 9) -> None:
        source = SourceLine("cell_compilation.py", line, "print(loss.item())")
        self.graph.sync_points.append(SyncPoint(cause, source, 3, 0.25, 4, len(self.graph.nodes)))


def _meta(shape: Sequence[int]) -> TensorMeta:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= size
    return TensorMeta(tuple(shape), tuple(reversed(stride)), 0, torch.float32, CPU)


def training_step(program: Program, layers: int = 3, x: Value | None = None) -> None:
    """Forward, backward and SGD of a stack of equal layers, ``h.0``, ``h.1``, ..."""
    graph = program.graph
    known = {value.name: value for value in graph.inputs}
    weights = [
        known.get(f"h.{i}.weight") or program.outside((8, 8), "parameter", f"h.{i}.weight")
        for i in range(layers)
    ]
    saved = []
    y = x if x is not None else program.outside((4, 8), name="x")
    for i, weight in enumerate(weights):
        turned = program(aten.t.default, [weight], (8, 8), module=f"h.{i}")
        product = program(aten.mm.default, [y, turned], module=f"h.{i}")
        saved.append((y, product))
        y = program(aten.relu.default, [product], module=f"h.{i}.act")
    loss = program(aten.mean.default, [y], (), root="")
    gradient = program(aten.ones_like.default, [loss], (), phase="backward", root="", line=2)
    gradients = []
    for i in reversed(range(layers)):
        before, product = saved[i]
        forward = product.node
        gradient = program(
            aten.threshold_backward.default,
            [gradient, product],
            module=f"h.{i}.act",
            phase="backward",
            line=2,
        )
        made = program(
            aten.mm.default,
            [gradient, before],
            (8, 8),
            module=f"h.{i}",
            phase="backward",
            line=2,
            forward=forward,
        )
        gradients.append(made)
        gradient = program(
            aten.mm.default,
            [gradient, weights[i]],
            module=f"h.{i}",
            phase="backward",
            line=2,
            forward=forward,
        )
    for weight, made in zip(weights, reversed(gradients), strict=True):
        program(
            aten.add_.Tensor,
            [weight, made],
            (8, 8),
            phase="optimizer",
            writes=weight,
            line=3,
            text="opt.step()",
        )


@pytest.fixture
def write():
    """The tools to write a graph by hand."""
    return types.SimpleNamespace(Program=Program, training_step=training_step, aten=aten)


@pytest.fixture(scope="session")
def large_scene() -> Scene:
    """The scene of a training step of more than 100,000 ops; building it takes seconds."""
    program = Program()
    training_step(program, layers=14_300)
    return Scene(program.graph, make_plan(program.graph))


@pytest.fixture
def step() -> Graph:
    """One training step of three layers."""
    program = Program()
    training_step(program)
    return program.graph


@pytest.fixture
def plan(step: Graph) -> Plan:
    return make_plan(step)
