"""CUDA streams: kernels run in sequence, and the collectives of each group beside them.

As in NCCL and ``torch.distributed``, a collective runs on the stream of its group's communicator.  It starts
when Python has issued it, the group's previous collective has finished, and its input is ready.  Meanwhile,
kernels continue up to the first that uses its output.  Contention for bandwidth and multiprocessors is not
modeled.  FSDP2's copies of a layer's shards into the buffer for the all-gather also run on a separate stream.

If a program uses several GPUs, the kernels are those of the GPU that runs most of them.  The work of each
other GPU runs in parallel, in sequence on that GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from ...graph.collective_info import NAMESPACES, collective_of, kind_of
from ...graph.ir import Node, Storage, Value
from .bytes_and_launches import is_view


@dataclass(slots=True)
class CollectiveInFlight:
    """A collective that occupies the links for ``seconds``, until ``ends``.

    ``exposed``: seconds that kernels wait for it; ``hidden``: seconds that overlap with kernels.
    """

    group: str
    seconds: float
    ends: float
    exposed: float = 0.0
    hidden: float = 0.0

    def __post_init__(self) -> None:
        self.hidden = self.seconds


@dataclass(slots=True)
class Streams:
    """The current time of each stream, in seconds since the start of the graph."""

    has_collectives: bool
    kernels: float = 0.0
    _groups: dict[str, float] = field(default_factory=dict)
    _there: dict[Storage, float] = field(default_factory=dict)  # when the last write is complete
    # Storages whose last write is by a collective.
    _brought: dict[Storage, CollectiveInFlight] = field(default_factory=dict)
    _sent: list[CollectiveInFlight] = field(default_factory=list)

    def run(self, node: Node, seconds: float, issued: float) -> float:
        """Add a kernel of ``seconds`` that Python has issued by ``issued``; returns how long the GPU waits
        for Python.
        """
        ready = self.kernels
        begin = max(ready, issued) if seconds else ready
        late = self._latest(node.inputs)
        self.kernels = begin
        if late is not None and seconds:
            self._wait(late)
        self.kernels += seconds
        if seconds:
            self._write(node, self.kernels, None)
        elif late is not None:  # a view of a tensor in transfer, or a wait, neither of which runs a kernel
            for storage in _storages(node.outputs):
                if storage not in self._there:
                    self._there[storage], self._brought[storage] = late.ends, late
        return begin - ready

    def send(self, node: Node, seconds: float, issued: float, group: str) -> CollectiveInFlight:
        """Add a collective that takes ``seconds`` on the links of the group, or a copy into its input."""
        inputs = max((self._there.get(each, 0.0) for each in _storages(node.inputs)), default=0.0)
        begin = max(issued, self._groups.get(group, 0.0), inputs)
        sent = CollectiveInFlight(group, seconds, begin + seconds)
        self._groups[group] = sent.ends
        self._sent.append(sent)
        self._write(node, sent.ends, sent)
        return sent

    def finish(self) -> float:
        """Wait for the last collective; returns the time at which the graph ends."""
        last = max(self._sent, key=lambda each: each.ends, default=None)
        if last is not None:
            self._wait(last)
        return self.kernels

    def _wait(self, late: CollectiveInFlight) -> None:
        """Delay kernels until ``late`` ends; charge the wait to its group's collectives, latest first."""
        left = late.ends
        for each in reversed(self._sent):
            if left <= self.kernels:
                break
            if each.group == late.group and each.ends <= left:
                ended = max(each.ends, self.kernels)
                late.exposed += left - ended  # until the collective was issued, or its input was ready
                waited = ended - max(each.ends - each.seconds, self.kernels)
                each.exposed += waited
                each.hidden = max(each.hidden - waited, 0.0)
                left = ended - waited
        late.exposed += max(left - self.kernels, 0.0)
        self.kernels = max(self.kernels, late.ends)

    def _latest(self, values: Iterable[Value]) -> CollectiveInFlight | None:
        """The collective producing any of ``values`` that ends last."""
        if not self._sent:
            return None
        found = [self._brought[each] for each in _storages(values) if each in self._brought]
        return max(found, key=lambda each: each.ends, default=None)

    def _write(self, node: Node, time: float, sent: CollectiveInFlight | None) -> None:
        if not self.has_collectives:
            return
        for storage in {*_storages(node.outputs), *node.writes}:
            self._there[storage] = time
            if sent is not None:
                self._brought[storage] = sent
            elif self._brought:
                self._brought.pop(storage, None)


def nodes_on_other_streams(nodes: Sequence[Node], gpus: Counter[torch.device]) -> dict[Node, str]:
    """The collectives among ``nodes``, and FSDP2's copies into all-gather buffers, each with its group.

    Also the nodes that do not run on the GPU that runs most of them, each with its GPU; ``gpus`` is the
    result of :func:`gpus_among`.
    """
    found = _on_other_gpus(nodes, gpus)
    if not any(op.namespace in NAMESPACES for op in {id(node.op): node.op for node in nodes}.values()):
        return found
    following: dict[Storage, Node] = {}  # by storage: the next node that accesses it
    for node in reversed(nodes):
        collective = collective_of(node)
        if collective is not None:
            found[node] = collective.group.name
        elif kind_of(node) is not None:
            found[node] = ""
        elif node.op._schema.name == "aten::_foreach_copy_":
            gathering = {following.get(storage) for storage in node.writes}
            if (
                len(gathering) == 1
                and (last := gathering.pop()) is not None
                and kind_of(last) == "all_gather"
            ):
                found[node] = found[last]
        if not is_view(node):
            following.update(dict.fromkeys({*_storages(node.inputs), *_storages(node.outputs)}, node))
    return found


def gpus_among(nodes: Iterable[Node]) -> Counter[torch.device]:
    """The number of ops of ``nodes`` per GPU, determined by what they write or produce."""
    places = Counter(map(_place_of, nodes))
    return Counter({gpu: count for gpu, count in places.items() if gpu is not None and gpu.type == "cuda"})


def _place_of(node: Node) -> torch.device | None:
    values = node.outputs or node.inputs
    return values[0].meta.device if values else None


def _on_other_gpus(nodes: Sequence[Node], gpus: Counter[torch.device]) -> dict[Node, str]:
    if len(gpus) < 2:
        return {}
    ((main, _),) = gpus.most_common(1)
    return {node: str(place) for node in nodes if (place := _place_of(node)) in gpus and place != main}


def _storages(values: Iterable[Value]) -> set[Storage]:
    return {value.storage for value in values}
