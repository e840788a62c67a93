"""Captured CUDA Graph of a segment: its kernels, memory, and launches.

Captured kernels read and write the addresses that they were captured with.  Therefore, outside memory is
either *pinned*, that is, used directly as long as its address does not change (parameters, optimizer states),
or *fed*: copied to a private buffer before the kernels that use it, and back if they write it.  Results of
kernels are in private memory, too, and those that are needed later are copied out of it, so that no later run
overwrites the user's tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...graph.ir import Node, Value
from ...torch_internals import cuda_graph_capture, fastest_op_calls, private_api
from ..backend_protocol import Segment, first_line
from ..compiler.fx_lowering import views_of
from .capturable_segments import Layout, Part
from .torch_cuda_calls import Captured, CaptureDevice

WORD = 16  # bytes: the largest access of a kernel; the order of sums of integers does not matter

_address: Callable[[torch.Tensor], int] = private_api.TensorBase.data_ptr
_storage: Callable[[torch.Tensor], torch.UntypedStorage] = private_api.TensorBase.untyped_storage


class Moved(RuntimeError):
    """Pinned memory has another address, or another slice of it is used; nothing has run.

    ``storages`` are the numbers of those that moved.
    """

    def __init__(self, why: str, storages: Collection[int]) -> None:
        super().__init__(why)
        self.storages = storages


class SegmentRun:
    """One run of a segment, with its input tensors.

    ``values`` has the known tensors by the number of their value, ``memory`` one tensor on each storage.
    ``keeps`` are the storages created here whose tensor must be kept until the end, ``holds`` such values.
    """

    def __init__(self, layout: Layout, segment: Segment, given: Sequence[torch.Tensor]) -> None:
        self.layout, self.segment, self.nodes = layout, segment, segment.nodes
        self.values: dict[int, torch.Tensor] = dict(enumerate(given))
        self.memory: dict[int, torch.Tensor] = {}
        for number, tensor in enumerate(given):
            self.memory.setdefault(layout.storage_of[number], tensor)
        self.keeps: Collection[int] = ()
        self.holds: Collection[int] = ()
        self.seen: Callable[[int, torch.Tensor], None] | None = None  # called with each result
        for at in sorted(layout.first):  # views of the inputs: nothing is computed
            self.call(at)

    def call(self, at: int) -> None:
        """Run one node by itself."""
        line = self.layout.lines[at]
        results = call(self.nodes[at], line.inputs, self.tensor)
        for index, number in line.outputs:
            if results[index] is not None:  # a kernel may omit a gradient that is not needed
                self.values[number] = results[index]
                if self.seen is not None:
                    self.seen(number, results[index])
                storage = self.layout.storage_of[number]
                if storage in line.makes and storage in self.keeps:
                    self.memory.setdefault(storage, results[index])

    def call_all(self, start: int = 0, stop: int | None = None) -> None:
        """Run nodes one by one, and free values after their last use."""
        layout = self.layout
        for at in range(start, len(layout.lines) if stop is None else stop):
            if at not in layout.first:
                self.call(at)
            for number in layout.lines[at].dead:
                if number >= layout.inputs and number not in self.holds:
                    self.values.pop(number, None)

    def tensor(self, value: Value, number: int) -> torch.Tensor:
        """The tensor of a value, on its real memory: captured nodes may use a view of a buffer instead."""
        found = self.values.get(number)
        if found is None:
            whole = self.memory[self.layout.storage_of[number]]
            (found,) = views_of([value], {value.storage: whole})
        return found


def call(node: Node, numbers: Sequence[int], tensor: Callable[[Value, int], torch.Tensor]) -> Sequence[Any]:
    """The results of ``node``'s kernel for the tensors of its inputs, which have these numbers."""
    given = {value: tensor(value, number) for value, number in zip(node.inputs, numbers)}

    def real(item: Any) -> Any:
        if isinstance(item, Value):
            return given[item]
        return type(item)([real(entry) for entry in item]) if type(item) in (list, tuple) else item

    fastest_op_calls.set_grad_enabled(getattr(node, "grad_mode", False))
    results = node.op(
        *[real(item) for item in node.args], **{name: real(each) for name, each in node.kwargs.items()}
    )
    return results if isinstance(results, (list, tuple)) else (results,)


@dataclass(slots=True)
class Buffer:
    """Private memory of the form that is filled before the kernels that use it.

    ``values`` are the values in it that the kernels use: the node and the argument that lead to it, its
    number, and its offset in ``content``. ``residue`` is the required remainder of the source address divided
    by ``alignment``, because it affects the selection of kernels, and with it the order of sums.
    """

    content: torch.Tensor  # bytes
    values: tuple[tuple[int, int, int, int], ...]
    residue: int
    alignment: int

    def source(self, segment_run: SegmentRun) -> torch.Tensor | None:
        """The source of its content; None if that is not the same slice of its memory as before."""
        tensors = [
            segment_run.tensor(segment_run.nodes[at].inputs[arg], number)
            for at, arg, number, _ in self.values
        ]
        begins = {_address(tensor) - value[3] for tensor, value in zip(tensors, self.values)}
        if len(begins) > 1 or begins.pop() % self.alignment != self.residue:
            return None
        first, before = tensors[0], self.values[0][3]
        start = int(first.storage_offset()) * first.element_size() - before
        return as_words(_storage(first), start, self.content.numel() * self.content.element_size())


def as_words(storage: torch.UntypedStorage, start: int, nbytes: int) -> torch.Tensor:
    """Bytes of a storage, as long integers if the address is aligned for them, which is faster to copy."""
    dtype = torch.int64 if start % 8 == 0 and nbytes % 8 == 0 else torch.uint8
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    return tensor.set_(storage, start // dtype.itemsize, (nbytes // dtype.itemsize,), (1,))


@dataclass(slots=True)
class Step:
    """A part, with its kernels if it is captured, and the outside memory that they use.

    ``fed`` is by storage; ``pinned`` are values with their addresses.
    """

    part: Part
    captured: Captured | None = None
    fed: dict[int, Buffer] = field(default_factory=dict)
    pinned: tuple[tuple[int, int], ...] = ()


class CapturedForm:
    """A segment captured for certain addresses, and for the numbers that its captured nodes are called with.

    Attributes:
        alone: the nodes that are not captured, and why.
        failed: the node that could not be captured, if it is known, and the error. The form cannot be used
            then.
        kept: the storages created by captured nodes that can be returned, each with a tensor on it.
    """

    def __init__(
        self,
        layout: Layout,
        parts: Sequence[Part],
        alone: Mapping[int, str],
        device: torch.device,
        captures: CaptureDevice,
    ) -> None:
        self.layout, self.alone, self.device = layout, alone, device
        self._captures = captures
        self.failed: tuple[int | None, str] | None = None
        self.kept: dict[int, torch.Tensor] = {}
        self._steps = [Step(part) for part in parts]
        self._pool: dict[int, torch.Tensor] = {}  # results of captured nodes that later parts read
        self._pinned: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # all inputs of a run
        self._given = {number for at in layout.first for _, number in layout.lines[at].outputs}
        self._given.update(range(layout.inputs))
        self._loose: frozenset[int] = frozenset()  # storages that are in other memory in each run, or fed
        self._keeps = frozenset(layout.made) if alone else frozenset()
        read = {number for part in parts for numbers in part.direct.values() for number in numbers}
        for at in alone:
            read.update(layout.lines[at].inputs)
        self._read = read  # possibly by another part than the one that creates it

    # --- the first run ---------------------------------------------------------------------

    def capture(self, segment_run: SegmentRun, feeds: Collection[int], needed: Collection[int]) -> None:
        """Capture each part and launch it; ``feeds`` are outside storages that are copied.

        If a part cannot be captured, ``failed`` says why, and it and all later nodes run one by one.
        """
        made_alone = {storage for storage, (at, _) in self.layout.made.items() if at in self.alone}
        self._loose = frozenset(made_alone | set(feeds))
        segment_run.keeps = {*needed, *made_alone}
        made: dict[int, torch.Tensor] = {}
        for step in self._steps:
            part = step.part
            if not part.captured:
                segment_run.call_all(part.start, part.stop)
                continue
            known, kept = dict(made), dict(self.kept)
            try:
                self._prepare(step, segment_run, made)
                sources = self._sources(step, segment_run)
                assert sources is not None, "the sources were checked before"
                feed(step, sources)
                record = functools.partial(self._record, part, segment_run, made, needed)
                step.captured = self._captures.capture(self.device, record)
            except Exception as error:
                if self.failed is None:
                    self.failed = None, first_line(error)
                made.clear()
                self.kept = kept
                segment_run.values.update(
                    {
                        each: tensor
                        for each, tensor in known.items()
                        if self._in_pool(each) or self._stays(each)
                    }
                )
                segment_run.keeps = self.layout.made
                segment_run.call_all(part.start)
                return
            launch(step, sources)
            segment_run.values.update(
                {each: made[each] for each in self._read if each in made and self._in_pool(each)}
            )
        self._pool = {each: made[each] for each in self._read if each in made and self._in_pool(each)}
        ready = [pair for step in self._steps for pair in step.pinned if pair[0] in self._given]
        self._pinned = tuple(number for number, _ in ready), tuple(address for _, address in ready)

    def _in_pool(self, number: int) -> bool:
        """Whether a value is in memory that captured nodes have created."""
        storage = self.layout.storage_of[number]
        return storage in self.layout.made and storage not in self._loose

    def _stays(self, number: int) -> bool:
        storage = self.layout.storage_of[number]
        return storage not in self.layout.made and storage not in self._loose

    def _prepare(self, step: Step, segment_run: SegmentRun, made: dict[int, torch.Tensor]) -> None:
        """Allocate memory for the inputs that are fed to a part, and store the addresses of the others."""
        layout, part = self.layout, step.part
        found: dict[int, tuple[int, int]] = {}
        for at in range(part.start, part.stop):
            for argument, number in enumerate(layout.lines[at].inputs):
                found.setdefault(number, (at, argument))
        pinned = []
        for storage, numbers in part.direct.items():
            if storage in self._loose:
                tensors = {
                    each: segment_run.tensor(segment_run.nodes[found[each][0]].inputs[found[each][1]], each)
                    for each in numbers
                }
                made.update({each: torch.empty_like(tensor) for each, tensor in tensors.items()})
                filled = {each: tensor for each, tensor in tensors.items() if tensor.numel()}
                if filled:
                    step.fed[storage] = self._buffer(filled, found, made)
            elif storage < layout.outside:
                pinned += [
                    (each, _address(segment_run.values[each]))
                    for each in numbers
                    if each in segment_run.values
                ]
        step.pinned = tuple(pinned)

    def _buffer(
        self,
        tensors: Mapping[int, torch.Tensor],
        found: Mapping[int, tuple[int, int]],
        made: dict[int, torch.Tensor],
    ) -> Buffer:
        low = min(map(_address, tensors.values()))
        high = max(_address(tensor) + _extent(tensor) for tensor in tensors.values())
        rounded = any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors.values())
        alignment = self._captures.alignment if rounded else WORD
        room = torch.empty(high - low + alignment, dtype=torch.uint8, device=self.device)
        begin = (low - _address(room)) % alignment
        places = []
        for each, tensor in tensors.items():
            place = _address(tensor) - low
            places.append((*found[each], each, place))
            view = torch.empty(0, dtype=tensor.dtype, device=self.device)
            start = (begin + place) // tensor.element_size()
            made[each] = view.set_(_storage(room), start, tensor.shape, tensor.stride())
        content = as_words(_storage(room), begin, high - low)
        return Buffer(content, tuple(places), low % alignment, alignment)

    def _record(
        self, part: Part, segment_run: SegmentRun, made: dict[int, torch.Tensor], needed: Collection[int]
    ) -> None:
        """Call the kernels of a part, which is being captured."""
        layout = self.layout

        def tensor(value: Value, number: int) -> torch.Tensor:
            found = made.get(number)
            return segment_run.tensor(value, number) if found is None else found

        for at in range(part.start, part.stop):
            line = layout.lines[at]
            if at not in layout.first:
                try:
                    results = call(segment_run.nodes[at], line.inputs, tensor)
                except Exception as error:
                    # If there is not enough memory for the whole part, no single op is the cause.
                    self.failed = None if _is_out_of_memory(error) else at, first_line(error)
                    raise
                for index, number in line.outputs:
                    if results[index] is None:
                        continue
                    made[number] = results[index]
                    storage = layout.storage_of[number]
                    if storage in needed and storage in line.makes:
                        self.kept.setdefault(storage, results[index])
            for number in line.dead:
                if number not in self._read:
                    made.pop(number, None)

    # --- every run -------------------------------------------------------------------------

    def check(self, segment_run: SegmentRun) -> None:
        """Raise :class:`Moved` unless this run can be launched; nothing runs here."""
        numbers, addresses = self._pinned
        values = segment_run.values
        storages: set[int] = set()
        if tuple([_address(values[number]) for number in numbers]) != addresses:
            for number, address in zip(numbers, addresses):
                if _address(values[number]) != address:
                    storages.add(self.layout.storage_of[number])
            are = "tensor is" if len(storages) == 1 else "tensors are"
            raise Moved(f"{len(storages)} {are} at another address than at capture", storages)
        for step in self._steps:
            for storage, buffer in step.fed.items():
                if storage < self.layout.outside and buffer.source(segment_run) is None:
                    storages.add(storage)
        if storages:
            are = "input is" if len(storages) == 1 else "inputs are"
            raise Moved(f"{len(storages)} {are} laid out otherwise in memory than at capture", ())

    def run(self, segment_run: SegmentRun) -> bool:
        """Run it with inputs that have been checked; False if a part had to run node by node."""
        segment_run.values.update(self._pool)
        segment_run.keeps = self._keeps
        for step in self._steps:
            part = step.part
            if not part.captured:
                segment_run.call_all(part.start, part.stop)
                continue
            sources = self._sources(step, segment_run)
            if sources is None:
                segment_run.call_all(part.start)
                return False
            feed(step, sources)
            launch(step, sources)
        return True

    def _sources(self, step: Step, segment_run: SegmentRun) -> list[torch.Tensor] | None:
        """The inputs to copy for a part, in order; None if its kernels would not find all their inputs."""
        values, given = segment_run.values, self._given
        if any(_address(values[number]) != address for number, address in step.pinned if number not in given):
            return None
        sources = [buffer.source(segment_run) for buffer in step.fed.values()]
        found = [source for source in sources if source is not None]
        return found if len(found) == len(sources) else None

    def copies(self, storages: Sequence[int]) -> list[torch.Tensor]:
        """Tensors on their own memory with the content of these, which are ``kept``."""
        sources, targets, results = [], [], []
        for storage in storages:
            kept = self.kept[storage]
            memory = _storage(kept)
            if kept.numel() * kept.element_size() == memory.nbytes():
                copy = torch.empty_strided(kept.shape, kept.stride(), dtype=kept.dtype, device=kept.device)
                source, target = kept, copy
            else:
                own = torch.empty(memory.nbytes(), dtype=torch.uint8, device=kept.device)
                source = as_words(memory, 0, memory.nbytes())
                target = as_words(_storage(own), 0, memory.nbytes())
                copy = torch.empty(0, dtype=kept.dtype, device=kept.device)
                copy.set_(_storage(own), kept.storage_offset(), kept.shape, kept.stride())
            results.append(copy)
            if memory.nbytes():
                sources.append(source)
                targets.append(target)
        copy_all(targets, sources)
        return results


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError)


def feed(step: Step, sources: Sequence[torch.Tensor]) -> None:
    """Fill the buffers of a part."""
    copy_all([buffer.content for buffer in step.fed.values()], sources)


def launch(step: Step, sources: Sequence[torch.Tensor]) -> None:
    """Launch the kernels of a part after feeding it; written inputs are copied back."""
    assert step.captured is not None
    step.captured.replay()
    written = [number for number, storage in enumerate(step.fed) if storage in step.part.writes]
    contents = list(step.fed.values())
    copy_all([sources[number] for number in written], [contents[number].content for number in written])


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each of ``sources`` to its target, with one kernel for all of one dtype."""
    by_type: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        into, out_of = by_type.setdefault(target.dtype, ([], []))
        into.append(target)
        out_of.append(source)
    for into, out_of in by_type.values():
        cuda_graph_capture.copy_each(into, out_of)


def _extent(tensor: torch.Tensor) -> int:
    """The bytes from a tensor's first element to the end of its last."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (steps + 1) * tensor.element_size()
