"""CUDA Graphs backend: repeated segments are captured and launched as a whole.

The first time, a segment runs node by node, which performs one-time initialization (cuBLAS handles, tuned
kernels).  The second time, its kernels are captured, in several parts if some cannot be captured
(:mod:`lazyviz.execute.cuda_graphs.capturable_segments`).  From then on, the captured graphs are launched
(:mod:`lazyviz.execute.cuda_graphs.captured_graph`).  The kernels, their order, and their arguments are those
of eager mode.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ...graph.ir import Node, Storage, Value
from ...torch_internals import private_api
from ..backend_protocol import Compiled, Refused, Segment
from ..compiler.compiled_program_cache import Programs, Variant, program_of
from ..compiler.fx_lowering import cut_first, views_of
from ..compiler.scalar_arguments import Place, places_of_scalars, scalars_at
from ..replay.program_key import moving
from .capturable_segments import TOO_FEW, Layout, named, parts_of, refused, unfit
from .captured_graph import CapturedForm, Moved, SegmentRun
from .torch_cuda_calls import CaptureDevice, CudaCaptures

MOST_PROGRAMS = 16  # each keeps the memory of a whole run
MOST_FORMS = 4  # per program: several models of one structure
MOST_CAPTURES = 16  # per program; if it differs more often, capturing is not worthwhile
PATIENCE = 2  # times that a parameter may move before it is copied to where it was captured
WARM_UP = "a new program runs op by op the first time and is captured the second time"

STAYING = ("parameter", "buffer", "optimizer")
"""Roles of memory that is the same from step to step."""


class CudaGraphsBackend:
    """Captures segments as CUDA Graphs and launches them; results are bit-equal to eager's.

    Args:
        captures: the capture device; default: CUDA.
        most: number of programs that are kept; the least recently used is dropped first.
    """

    draws = True  # segments may contain random operators

    def __init__(self, captures: CaptureDevice | None = None, *, most: int = MOST_PROGRAMS) -> None:
        self.programs: Programs[Known] = Programs(most)
        self.counters: Counter[str] = Counter(
            dict.fromkeys(("warm-ups", "captures", "failed captures", "replays"), 0)
        )
        self.captures = captures if captures is not None else CudaCaptures()
        self.lock = threading.RLock()  # graphs share the memory that they use

    def refuses(self, node: Node) -> str | None:
        """Why ``node`` cannot be in a segment, or None."""
        return refused(node)

    def compile(self, segment: Segment, inputs: Sequence[torch.Tensor]) -> Compiled:
        """The callable that runs the segment: op by op, with a capture, or by launching what was captured.

        Raises:
            lazyviz.execute.backend_protocol.Refused: nothing of it can be captured; the message says why.
        """
        if why := self.captures.obstacle():
            raise Refused(f"CUDA Graphs: {why}")
        inner = cut_first(segment)
        inside = set(inner.nodes)
        first = tuple([at for at, node in enumerate(segment.nodes) if node not in inside])
        if not inner.nodes:
            raise Refused("it contains no kernel to run")
        program = program_of(inner.nodes, ())
        modes = tuple([(_grad_mode(node), _inference_mode(node)) for node in segment.nodes])
        if len({inference for _, inference in modes}) > 1:
            raise Refused("only a part of it was recorded in inference mode")
        with self.lock:
            variant = self.programs.find(program)
            reason = ""
            if variant is None:
                reason = self.programs.difference(program, inner.nodes)
                every = tuple([(at,) for at in range(len(program.scalars))])  # with any numbers
                variant = Variant(program, every, Known(self, segment, first, modes))
                self.programs.add(variant)
            elif (variant.compiled.first, variant.compiled.modes) != (first, modes):
                reason = "it was recorded in another mode, or its inputs are other slices"
                variant.compiled = Known(self, segment, first, modes)
            return variant.compiled.compile(segment, inputs, reason)

    def forget(self, segment: Segment, why: str) -> None:
        """Discard the wrong capture of ``segment``: it must not be launched or captured again."""
        with self.lock:
            variant = self.programs.find(program_of(cut_first(segment).nodes, ()))
            if variant is not None:
                variant.compiled.refuse(f"a CUDA Graph was wrong: {why}")


Ran = tuple[list[torch.Tensor], int, Sequence[str]]
"""Result of a run: the segment's outputs, the number of ops that ran outside CUDA Graphs, and why."""


class SegmentOutputs:
    """The outputs of a segment: for each, its number and the number of its storage."""

    def __init__(self, layout: Layout, segment: Segment) -> None:
        numbers: dict[Storage, int] = {
            segment.nodes[at].outputs[place].storage: storage for storage, (at, place) in layout.made.items()
        }
        for number, value in enumerate(segment.inputs):
            numbers[value.storage] = layout.storage_of[number]
        values = {
            value: number
            for node, line in zip(segment.nodes, layout.lines)
            for value, (_, number) in zip([each for each in node.outputs if each.node is node], line.outputs)
        }
        self.values = [values[value] for value in segment.outputs]
        self.storages = [numbers[value.storage] for value in segment.outputs]
        self.made = [storage for storage in dict.fromkeys(self.storages) if storage in layout.made]
        self._base = {storage: layout.base_of(storage) for storage in self.storages}
        self._makers = {storage: layout.made[storage][0] for storage in self.made}

    def captured(self, form: CapturedForm) -> list[int]:
        """The storages created here by captured nodes."""
        return [storage for storage, at in self._makers.items() if at not in form.alone]

    def results(self, segment: Segment, memory: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """The segment's outputs, as tensors on their storages."""
        return [
            memory[storage] if number == self._base[storage] else _view_of(value, memory[storage])
            for value, number, storage in zip(segment.outputs, self.values, self.storages)
        ]


class Known:
    """A program that has run before: the known facts about its nodes, and its captured forms, the last used
    one first.

    ``first`` are its slices of inputs, ``modes`` the modes in which its nodes were recorded.
    """

    def __init__(
        self, backend: CudaGraphsBackend, segment: Segment, first: tuple[int, ...], modes: tuple[Any, ...]
    ) -> None:
        self.first, self.modes = first, modes
        self.inference = bool(modes[0][1])
        self.forms: list[Form] = []
        self.layout = Layout(segment, first)
        self.lock, self.counters, self.captures = backend.lock, backend.counters, backend.captures
        self.why_not = ""  # empty if it is captured
        self.places: list[Place] = places_of_scalars(segment.nodes)
        self._moving = [
            at for at, node in enumerate(segment.nodes) if moving(node.op) and at not in self.layout.first
        ]
        self._scalars: list[Any] = []  # in the last examined run
        self._varying: dict[int, tuple[Any, Any]] = {}  # numbers that changed, by position: (before, after)
        self.alone: dict[int, str] = {}  # nodes that turned out not to be capturable
        self._on_other_device: set[int] = set()  # values that are on another device than recorded
        self._handed: Collection[int] = ()  # storages of the outputs in the run node by node
        self._unsupported: dict[int, str] = {}  # storages that differ from the record, and how
        self._memory_of: dict[int, int] = {}  # by storage, its address when it ran node by node
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # threads in which it has run
        self._moved: Counter[int] = Counter()  # how often each storage had another address
        self._tries = 0
        self.device = self._single_device()

    def _single_device(self) -> torch.device | None:
        """The device of most of its nodes, if it can capture."""
        metas = [self.layout.metas[number] for line in self.layout.lines for _, number in line.outputs]
        devices = Counter(meta.device for meta in metas if self.captures.takes(meta))
        return devices.most_common(1)[0][0] if devices else None

    def refuse(self, why: str) -> None:
        """Do not capture it from now on."""
        self.why_not = why
        self.forms.clear()

    # --- finding or creating a captured form ---------------------------------------------------

    def compile(self, segment: Segment, inputs: Sequence[torch.Tensor], reason: str) -> Compiled:
        """The callable that runs a recording of the program; like :meth:`CudaGraphsBackend.compile`."""
        if self.device is None:
            self.refuse("CUDA Graphs: no op is on a CUDA device")
        if self.why_not:
            raise Refused(self.why_not)
        segment_outputs = SegmentOutputs(self.layout, segment)
        scalars = scalars_at(segment.nodes, self.places)
        self._note(scalars)
        if threading.current_thread() not in self._threads:
            # One-time initialization happens once for each thread.
            reason = reason or "its first run in this thread"
            return self._compiled(segment, segment_outputs, self._warm_up, reason)
        self._check_unsupported(segment_outputs, ())
        with private_api.kernels_only():
            segment_run = SegmentRun(self.layout, segment, inputs)
            for form in self.forms:
                why = form.difference(segment.nodes, scalars, segment_outputs) or self._moved_of(
                    form, segment_run
                )
                if not why:
                    return self._compiled(segment, segment_outputs, functools.partial(self.launch, [form]))
                reason = reason or why
        form = self._plan(segment, segment_outputs, scalars, reason)
        reason = f"captured as a CUDA Graph: {reason}" if reason else "captured as a CUDA Graph"
        return self._compiled(segment, segment_outputs, form.capture, reason)

    def _compiled(
        self,
        segment: Segment,
        segment_outputs: SegmentOutputs,
        how: Callable[[SegmentRun, SegmentOutputs], Ran],
        reason: str | None = None,
    ) -> Compiled:
        run = Run(self, segment, segment_outputs, how)
        return Compiled(run, reason is None, reason, Reuse(self, segment_outputs), run.left)

    def _note(self, scalars: list[Any]) -> None:
        """Note which numbers have changed since the last run."""
        for at, (before, now) in enumerate(zip(self._scalars, scalars)):
            if str(before) != str(now):
                self._varying[at] = before, now
        self._scalars = scalars

    def _moved_of(self, form: Form, segment_run: SegmentRun) -> str:
        """Why the form cannot be launched with these tensors now, or ""."""
        if form.settings != self.captures.settings():
            return "PyTorch settings that affect kernels changed"
        try:
            form.captured.check(segment_run)
        except Moved as moved:
            self._moved.update(moved.storages)
            return str(moved)
        return ""

    def _plan(
        self, segment: Segment, segment_outputs: SegmentOutputs, scalars: list[Any], reason: str
    ) -> Form:
        """A form to be captured.

        Raises:
            lazyviz.execute.backend_protocol.Refused: there is nothing to capture, or it was captured too
            often.
        """
        device, nodes = self.device, segment.nodes
        assert device is not None
        if self._tries >= MOST_CAPTURES:
            self.refuse(
                f"it was captured {MOST_CAPTURES} times as a CUDA Graph already, and differs again: {reason}"
            )
            raise Refused(self.why_not)
        alone = dict(self.alone)
        for at, node in enumerate(nodes):
            if at not in self.layout.first and (why := unfit(node, device, self.captures)):
                alone.setdefault(at, why)
        for position, (before, now) in self._varying.items():
            why = (
                f"has an argument that changes between runs, which a CUDA Graph cannot: {before}, then {now}"
            )
            alone.setdefault(self.places[position][0], why)
        feeds = self._feeds(segment)
        parts = parts_of(self.layout, alone, feeds, self._joint_nodes(alone))
        self._check_unsupported(
            segment_outputs, feeds.union(at for at in self.layout.made if self.layout.made[at][0] in alone)
        )
        if not any(part.captured for part in parts):
            at, why = min(alone.items(), key=lambda item: (item[1] == TOO_FEW, item[0]))
            raise Refused(f"CUDA Graphs: {named(nodes[at])} {why}")
        self._tries += 1
        captured = CapturedForm(self.layout, parts, alone, device, self.captures)
        return Form(self, captured, nodes, scalars, feeds)

    def _feeds(self, segment: Segment) -> set[int]:
        """The outside storages that are copied: those that are only read, such as a batch, and those that
        move.

        Parameters, optimizer states and written memory are used directly as long as they do not move.
        """
        layout, feeds = self.layout, set()
        cut = {layout.storage_of[number] for at in layout.first for number in layout.lines[at].inputs}
        for number, value in enumerate(segment.inputs):
            storage = layout.storage_of[number]
            patience = PATIENCE if value.storage.role in STAYING else 0 if storage in layout.written else -1
            if storage in cut or self._moved[storage] > patience:
                feeds.add(storage)
        return feeds

    def _joint_nodes(self, alone: dict[int, str]) -> list[frozenset[int]]:
        """Groups of nodes that are captured together or not at all, because they pass on values that a
        capture places elsewhere.

        The random state of attention's dropout is on the CPU in eager mode, and on the GPU in a capture.
        """
        groups = []
        lines = self.layout.lines
        for number in self._on_other_device:
            makers = [at for at, line in enumerate(lines) if number in [made for _, made in line.outputs]]
            group = [*makers, *(at for at, line in enumerate(lines) if number in line.inputs)]
            if not makers or self.layout.storage_of[number] in self._handed:
                for at in group:
                    alone.setdefault(at, "reads or returns random state that is not on the GPU")
            groups.append(frozenset(group))
        return groups

    def moves(self, nodes: Sequence[Node]) -> list[Any]:
        """The arguments of its nodes that are positions in a tensor."""
        return [nodes[at].args[place : place + 1] for at in self._moving for place in moving(nodes[at].op)]

    # --- running -----------------------------------------------------------------------------

    def _warm_up(self, segment_run: SegmentRun, segment_outputs: SegmentOutputs) -> Ran:
        """Run node by node, in the context in which it will be captured."""
        assert self.device is not None
        self.counters["warm-ups"] += 1
        self._handed, segment_run.holds = segment_outputs.made, frozenset(segment_outputs.values)
        segment_run.seen = self._check_against_record
        self._memory_of.clear()
        for number in range(self.layout.inputs):
            self._check_against_record(number, segment_run.values[number])

        def run() -> Sequence[torch.Tensor]:
            segment_run.call_all()
            return [segment_run.values[number] for number in segment_outputs.values]

        results = self.captures.warm_up(self.device, run)
        self._threads.add(threading.current_thread())
        return list(results), len(segment_run.nodes), [WARM_UP]

    def _check_against_record(self, number: int, tensor: torch.Tensor) -> None:
        """Compare a value with the record, which describes the results of captured nodes."""
        layout = self.layout
        meta, storage = layout.metas[number], layout.storage_of[number]
        if tensor.device != meta.device:
            self._on_other_device.add(number)
            return
        place = private_api.storage_address(tensor)
        steps = zip(meta.shape, meta.stride, tensor.stride()) if meta.nbytes else ()
        if (
            tensor.dtype is not meta.dtype
            or tuple(tensor.shape) != meta.shape
            or any(size > 1 and step != other for size, step, other in steps)
            or (storage in layout.made and meta.nbytes and tensor.storage_offset() != meta.offset)
            or self._memory_of.setdefault(storage, place) != place
        ):
            shown = f"{list(tensor.shape)} {tensor.dtype} with strides {tensor.stride()}"
            self._unsupported.setdefault(
                storage, f"a kernel returned {shown}, but {meta}, {meta.stride} was recorded"
            )

    def _check_unsupported(self, segment_outputs: SegmentOutputs, loose: Container[int]) -> None:
        """Raise :class:`Refused` if a kernel returned a tensor that differs from the recorded metadata."""
        for storage, why in self._unsupported.items():
            views = [
                each for each, on in zip(segment_outputs.values, segment_outputs.storages) if on == storage
            ]
            if storage in loose or any(each != self.layout.base_of(storage) for each in views):
                raise Refused(f"CUDA Graphs: {why}")

    def launch(self, forms: Sequence[Form], segment_run: SegmentRun, segment_outputs: SegmentOutputs) -> Ran:
        """Run the first of ``forms`` that can be launched with these tensors.

        Raises:
            Moved: there is none; nothing has run.
        """
        why = "the captured graph no longer exists"
        for form in forms:
            if form in self.forms and not (why := self._moved_of(form, segment_run)):
                self.forms.remove(form)
                self.forms.insert(0, form)
                return form.run(segment_run, segment_outputs)
        raise Moved(why, ())


class Form:
    """A captured form of a program, and the recordings that it is valid for."""

    def __init__(
        self,
        known: Known,
        captured: CapturedForm,
        nodes: Sequence[Node],
        scalars: Sequence[Any],
        feeds: Collection[int],
    ) -> None:
        self.captured = captured
        self._known = weakref.ref(known)
        self._captures, self._counters = known.captures, known.counters
        self._feeds, self._moves = feeds, known.moves(nodes)
        self.settings = known.captures.settings()
        alone = captured.alone
        reasons = [f"{named(nodes[at])} {alone[at]}" for at in sorted(alone) if alone[at] != TOO_FEW]
        self._fallbacks = list(dict.fromkeys(reasons))
        # Nodes that are not captured get the numbers of each run.
        self._places = known.places
        self._fixed = [at for at, place in enumerate(known.places) if place[0] not in alone]
        self._scalars = [scalars[at] for at in self._fixed]
        self._exact = list(map(str, self._scalars))

    def difference(
        self, nodes: Sequence[Node], scalars: Sequence[Any], segment_outputs: SegmentOutputs
    ) -> str:
        """Why a recording differs from what was captured, as far as the record shows; or ""."""
        values = [scalars[at] for at in self._fixed]
        if (values != self._scalars or 0 in values) and (exact := list(map(str, values))) != self._exact:
            at = next(at for at, (was, now) in enumerate(zip(self._exact, exact)) if was != now)
            node = nodes[self._places[self._fixed[at]][0]]
            return f"{named(node)} has the argument {exact[at]}, was {self._exact[at]}"
        known = self._known()
        if known is None or known.moves(nodes) != self._moves:
            return "it uses another slice of a tensor"
        if not self.captured.kept.keys() >= set(segment_outputs.captured(self.captured)):
            return "other results are still referred to"
        return ""

    def capture(self, segment_run: SegmentRun, segment_outputs: SegmentOutputs) -> Ran:
        """Capture it, and run it."""
        known, captured = self._known(), self.captured
        assert known is not None
        self._counters["captures"] += 1
        needed = set(segment_outputs.made).union(*[form.captured.kept for form in known.forms])
        captured.capture(segment_run, self._feeds, needed)
        if captured.failed is None:
            known.forms.insert(0, self)
            del known.forms[MOST_FORMS:]
            return self._ran(segment_run, segment_outputs)
        self._counters["failed captures"] += 1
        at, why = captured.failed
        if at is None:
            known.refuse(f"CUDA Graphs: capture failed: {why}")
        else:
            known.alone[at] = f"cannot be captured: {why}"
        why = known.why_not if at is None else f"{named(segment_run.nodes[at])} {known.alone[at]}"
        return self._results(segment_run, segment_outputs), len(segment_run.nodes), [why]

    def run(self, segment_run: SegmentRun, segment_outputs: SegmentOutputs) -> Ran:
        """Launch it with tensors that have been checked."""
        self._counters["replays"] += 1
        if self.captured.run(segment_run):
            return self._ran(segment_run, segment_outputs)
        why = "results of ops outside the CUDA Graph have another layout than at capture"
        return self._results(segment_run, segment_outputs), len(segment_run.nodes), [why]

    def _ran(self, segment_run: SegmentRun, segment_outputs: SegmentOutputs) -> Ran:
        return self._results(segment_run, segment_outputs), len(self.captured.alone), self._fallbacks

    def _results(self, segment_run: SegmentRun, segment_outputs: SegmentOutputs) -> list[torch.Tensor]:
        """The outputs, none of which is in memory that a later run writes."""
        kept = self.captured.kept
        storages = [
            storage
            for storage in segment_outputs.made
            if storage in kept and storage not in segment_run.memory
        ]
        segment_run.memory.update(zip(storages, self.captured.copies(storages)))
        return segment_outputs.results(segment_run.segment, segment_run.memory)


class Run:
    """Runs one recording of a program."""

    def __init__(
        self,
        known: Known,
        segment: Segment,
        segment_outputs: SegmentOutputs,
        how: Callable[[SegmentRun, SegmentOutputs], Ran],
    ) -> None:
        self._known, self._segment, self._handed, self._how = known, segment, segment_outputs, how
        self._left: tuple[int, Sequence[str]] = 0, ()

    def __call__(self, *given: torch.Tensor) -> list[torch.Tensor]:
        known = self._known
        with known.lock, private_api.inference_mode(True) if known.inference else nullcontext():
            segment_run = SegmentRun(known.layout, self._segment, given)
            try:
                results, ops, why = self._how(segment_run, self._handed)
            except Moved as moved:
                raise Refused(str(moved)) from moved
            self._left = ops, why
            return results

    def left(self) -> tuple[int, Sequence[str]]:
        """How many ops the run had to run separately, and why."""
        return self._left


class Reuse:
    """Finds the callable for further recordings of one structure; it keeps no recording and no graph
    alive.
    """

    def __init__(self, known: Known, segment_outputs: SegmentOutputs) -> None:
        self._known, self._handed = weakref.ref(known), segment_outputs
        self._last: tuple[Any, list[weakref.ref[Form]]] | None = None

    def __call__(self, segment: Segment) -> Compiled | None:
        known, segment_outputs = self._known(), self._handed
        if known is None or not known.forms:
            return None
        forms: list[Form] = []
        with known.lock:
            if self._last is not None and self._last[0] == segment.open:
                found = [reference() for reference in self._last[1]]
                forms = [form for form in found if form in known.forms]
            if not forms:
                scalars = scalars_at(segment.nodes, known.places)
                forms = [
                    form
                    for form in known.forms
                    if not form.difference(segment.nodes, scalars, segment_outputs)
                ]
                self._last = (segment.open, [*map(weakref.ref, forms)]) if segment.open is not None else None
        if not forms:
            return None
        run = Run(known, segment, segment_outputs, functools.partial(known.launch, forms))
        return Compiled(run, True, None, None, run.left)


def _view_of(value: Value, whole: torch.Tensor) -> torch.Tensor:
    (view,) = views_of([value], {value.storage: whole})
    return view


def _grad_mode(node: Node) -> bool:
    return bool(getattr(node, "grad_mode", False))


def _inference_mode(node: Node) -> bool:
    return bool(getattr(node, "inference_mode", False))
