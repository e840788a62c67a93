"""Nested blocks: a block and the blocks inside it, as one program."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .ir import Fetch, Graph, Node, Storage, Value


def flattened(graph: Graph) -> Graph:
    """A copy of ``graph`` that includes the nodes of nested blocks, in program order; ``graph`` itself if
    there are none.

    The copy is for plans and pictures: its nodes and storages are new objects that are never evaluated.
    """
    return _Flat(graph).flat if graph.nested else graph


class _Flat:
    def __init__(self, graph: Graph) -> None:
        self.flat = Graph()
        self.flat.gpu = graph.gpu
        self.flat.torch_release = graph.torch_release
        self.flat.release_differences = graph.release_differences
        self.flat.world_size, self.flat.rank = graph.world_size, graph.rank
        self._storages: dict[Storage, Storage] = {}
        self._values: dict[Value, Value] = {}
        self._nodes: dict[Node, Node] = {}
        self._graphs = _order(graph)
        self._by_id = {id(each): each for each, _ in self._graphs}
        # The positions of each graph's nodes in the merged program, and of its end.
        self._positions: dict[Graph, list[int]] = {each: [] for each, _ in self._graphs}
        nodes = list(_in_order(graph))
        for position, (owner, _) in enumerate(nodes):
            self._positions[owner].append(position)
        self._end = len(nodes)
        for owner, _ in self._graphs:
            for storage in (*owner.storages, *owner.arrivals):
                self._storage(storage)
            for storage in (*owner.storages, *owner.arrivals):
                self._place(storage, owner)
            self.flat.fetches += [self._fetch(fetch, owner) for fetch in owner.fetches]
        for position, (_, node) in enumerate(nodes):
            self.flat.nodes.append(self._node(node, position))
        for owner, _ in self._graphs:
            self.flat.in_parts |= owner.in_parts
            self.flat.handed_out |= {self._nodes[node]: count for node, count in owner.handed_out.items()}
            self.flat.elsewhere |= owner.elsewhere
            self.flat.as_eager |= owner.as_eager
            self.flat.assumed |= owner.assumed
            self.flat.sync_points += [
                replace(each, index=self._position(owner, each.index)) for each in owner.sync_points
            ]
            self.flat.cudnn_benchmark |= owner.cudnn_benchmark
        self.flat.sync_points.sort(key=lambda sync: sync.index)

    def _position(self, graph: Graph, index: int) -> int:
        """The merged position at which ``graph`` had recorded ``index`` nodes."""
        positions = self._positions[graph]
        return positions[index] if index < len(positions) else self._after(graph)

    def _after(self, graph: Graph) -> int:
        """The merged position after the last node of ``graph``, nested blocks skipped."""
        for inner, (parent, at) in self._graphs:
            if inner is graph and parent is not None:
                return self._position(parent, at)
        return self._end

    def _storage(self, storage: Storage) -> Storage:
        copy = self._storages.get(storage)
        if copy is None:
            copy = Storage(storage.nbytes, storage.device, external=storage.external, created=-1)
            copy.role, copy.name, copy.variables = storage.role, storage.name, storage.variables
            copy.place, copy.borrowed = storage.place, storage.borrowed
            copy.resized = storage.resized[:1]
            copy.dropped = None if storage.dropped is None else self._end
            self._storages[storage] = copy
            self.flat.storages.append(copy)
        return copy

    def _fetch(self, fetch: Fetch, owner: Graph) -> Fetch:
        return Fetch(
            self._position(owner, fetch.position), tuple([self._storage(each) for each in fetch.beside])
        )

    def _place(self, storage: Storage, owner: Graph) -> None:
        copy = self._storages[storage]
        if storage.continues is not None:
            copy.continues = self._storage(storage.continues)
        if not storage.external:
            copy.created = self._position(owner, storage.created)
        if storage.arrived >= 0:
            copy.arrived = self._position(owner, storage.arrived)
        copy.resized = tuple(
            [
                resize._replace(graph=id(self.flat), position=self._position(graph, resize.position))
                for resize in storage.resized
                if (graph := self._by_id.get(resize.graph)) is not None
            ]
        )
        if copy.resized:
            copy.resized = (storage.resized[0], *copy.resized)
        if storage.dropped is not None:
            graph, count = storage.dropped_in or (owner, storage.dropped)
            if graph not in self._positions:
                graph, count = owner, storage.dropped
            copy.dropped = self._position(graph, count)

    def _value(self, value: Value) -> Value:
        copy = self._values.get(value)
        if copy is None:
            node = self._nodes.get(value.node) if value.node is not None else None
            copy = self._values[value] = Value(value.meta, self._storage(value.storage), node, value.index)
            copy.name = value.name
        return copy

    def _replaced(self, item: Any) -> Any:
        if isinstance(item, Value):
            return self._value(item)
        if isinstance(item, (list, tuple)):
            return type(item)([self._replaced(entry) for entry in item])
        return item

    def _node(self, node: Node, position: int) -> Node:
        copy = Node(position, node.op, (), {})
        self._nodes[node] = copy
        copy.inputs = [self._value(value) for value in node.inputs]
        copy.outputs = [self._value(value) for value in node.outputs]
        copy.args = self._replaced(node.args)
        copy.kwargs = {name: self._replaced(item) for name, item in node.kwargs.items()}
        copy.writes = [self._storage(storage) for storage in node.writes]
        for name in ("module", "root", "source", "callers", "phase", "state", "at_once", "scratch_bytes"):
            setattr(copy, name, getattr(node, name))
        copy.forward = self._nodes.get(node.forward) if node.forward is not None else None
        return copy


def _order(graph: Graph) -> list[tuple[Graph, tuple[Graph | None, int]]]:
    """The block and those inside it, each with its enclosing block and its position there."""
    found: list[tuple[Graph, tuple[Graph | None, int]]] = [(graph, (None, 0))]
    for outer, _ in found:  # the loop appends to it
        found += [(inner, (outer, at)) for at, inner in outer.nested]
    return found


def _in_order(graph: Graph) -> list[tuple[Graph, Node]]:
    """Every node in program order, with its block."""
    result: list[tuple[Graph, Node]] = []
    stack: list[tuple[Graph, int, int]] = [(graph, 0, 0)]  # a block, its next node, its next inner block
    while stack:
        current, node, block = stack.pop()
        nested = current.nested
        stop = nested[block][0] if block < len(nested) else len(current.nodes)
        result += [(current, each) for each in current.nodes[node:stop]]
        if block < len(nested):
            stack.append((current, stop, block + 1))
            stack.append((nested[block][1], 0, 0))
    return result
