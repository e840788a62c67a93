"""Constant folding: small CPU values that are computed while recording, without running the graph.

Examples are Adam's step counter, ``torch.tensor(1e-3)``, and the maximum of an attention mask: reading such a
value is not a sync point.  Nothing is computed in advance.  A read computes the pending nodes that it depends
on, on copies, if they are few, small, and start from constants or known outside tensors.  The graph stays
pending, and writes to real tensors are still deferred.

The copy of a storage, its *shadow*, is kept if a later read must continue from it: if a node wrote to it, if
it is tiny, or if a second read has computed it, so that a loop over the elements of a tensor does not compute
all of it for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..graph.ir import Failure, failure_of
from ..process.deferred_signals import deferred, deferring
from ..torch_internals import dispatch_level, fake_cuda_devices, private_api
from ..torch_internals.private_api import OpOverload
from .interception import warning_routing
from .shapes import ctc_loss
from .shapes.shape_inference_cache import Inferred, OpInfo, ShapeCache
from .tracked_storages import Shadow, TrackedNode, TrackedStorage, TrackedValue

LARGEST_NBYTES = 4 * 2**20  # everything that one read may visit and compute
MOST_NODES = 1000  # nodes that one read may compute
LARGEST_CHECKED_NBYTES = 2**16  # arguments of an op that is tried on known contents
KEPT_NBYTES = 4096  # of a storage that is kept for the next read although nothing wrote to it

# The argument that decides the shape of a data-dependent result, where not every argument does.
_DECIDING = {"index": "indices", "masked_select": "mask", "repeat_interleave": "repeats"}
_CTC_LOSS = torch.ops.aten._ctc_loss.default

_QUIET = frozenset({"add_", "div_", "fill_", "mul_", "sub_", "zero_"})  # operators that give no warnings

_QUIET_OPS = frozenset({"add", "div", "mul", "neg", "rsub", "sub"})  # the same for those with new results

# Some operators are much cheaper to call as methods; the methods call the same kernels.
_METHODS: dict[OpOverload, Callable[..., Any]] = {
    torch.ops.aten.add_.Tensor: private_api.TensorBase.add_,
    torch.ops.aten.sub_.Tensor: private_api.TensorBase.sub_,
    torch.ops.aten.mul_.Tensor: private_api.TensorBase.mul_,
    torch.ops.aten.div_.Tensor: private_api.TensorBase.div_,
}

# Operators whose results do not depend on the content of their tensor arguments.
SHAPE_ONLY = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like")
)
_STAND_INS = fake_cuda_devices.STAND_INS
CHECK_GRADIENTS = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
Tensors = dict[TrackedValue, torch.Tensor]


def is_given(tensor: torch.Tensor) -> bool:
    """Whether the content of an outside tensor counts as known: single numbers, integers and booleans, but
    not data.
    """
    return (
        tensor.device.type == "cpu"
        and not tensor.requires_grad
        and (tensor.numel() <= 1 or not (tensor.is_floating_point() or tensor.is_complex()))
    )


def _never_unknown(values: Sequence[TrackedValue]) -> bool:
    return False


def assume(value: TrackedValue, content: float) -> bool:
    """Assume that ``value`` is filled with ``content`` from now on; false if it shares its memory."""
    storage = value.storage
    if value.node is None or storage.created != value.node.index or storage.writer is not None:
        return False
    storage.shadow = Shadow()
    with dispatch_level.kernels_only():
        storage.shadow.tensors[value] = torch.full(value.meta.shape, content, dtype=value.dtype, device="cpu")
    return True


class Search:
    """A cheap check before the search, which only exists in compiled form
    (:mod:`lazyviz.record.native_recorder`).

    ``is_unknown``: whether the check shows that the contents of the values are known only after running.
    """

    is_unknown: Callable[[Sequence[TrackedValue]], bool] = staticmethod(_never_unknown)


def known(shapes: ShapeCache, values: Sequence[TrackedValue]) -> Tensors | None:
    """The contents of ``values`` at this point of the program, or None if only running the graph can tell."""
    if (contents := _known_contents(values)) is not None:
        return contents
    return None if Search.is_unknown(values) else _found(shapes, values)


@deferring
def _found(shapes: ShapeCache, values: Sequence[TrackedValue]) -> Tensors | None:
    walk = _Walk(shapes)
    if not walk.reach(values):
        return None
    if not walk.has_nodes:
        return _computed(walk, values)
    found, has_warned = _silently_computed(walk, values)
    if has_warned:  # the nodes have to run where the user can see it
        walk.give_up()
        return None
    if found is not None:
        walk.keep()
    return found


def _computed(walk: _Walk, values: Sequence[TrackedValue]) -> Tensors | None:
    with dispatch_level.NoGrad(), dispatch_level.kernels_only():
        try:
            return walk.compute(values)
        except Exception:  # the graph raises this error itself, with its source line
            walk.give_up()
            return None


_silently_computed = warning_routing.noting_warnings(_computed)


def _known_contents(values: Sequence[TrackedValue]) -> Tensors | None:
    """Their contents, if each has been computed before and nothing has been written since."""
    contents: Tensors = {}
    for value in values:
        shadow, writer = value.storage.shadow, value.storage.writer
        if shadow is None or shadow.lost or value not in shadow.tensors:
            return None
        if writer is not None and not writer.folded and writer.state != "done":
            return None
        contents[value] = shadow.tensors[value]
    return contents


@deferring
def number(shapes: ShapeCache, value: TrackedValue) -> Any:
    """The number in ``value``, if at most one in-place write has been recorded since it was last computed.

    ``None``: call :func:`known`. This is a fast path for the step counters of optimizers.
    """
    storage = value.storage
    node = storage.writer
    shadow = storage.shadow or _shadow_of_a_number(value)
    if shadow is None or shadow.lost or shadow.tensors.get(value) is None:
        return None
    with dispatch_level.kernels_only():  # these are below autograd
        if node is not None and not node.folded and node.state != "done":
            if not _is_one_step(shapes, node, shadow):
                return None
            storage.shadow = Shadow(lost=True)  # until it is complete: an interrupt may come before
            if not _take_step(node, shadow):
                return None
            node.folded = True
            storage.shadow = shadow
        return shadow.tensors[value].item()


@deferring
def number_of_one_op(shapes: ShapeCache, value: TrackedValue) -> Any:
    """The number in ``value``, if it is the result of arithmetic with numbers that are already known.

    ``None``: call :func:`known`. This is a fast path for chains of single numbers that are read at each step.
    """
    node = value.node
    if (
        node is None
        or node.state != "pending"
        or shapes.info(node.op).name not in _QUIET_OPS
        or node.missed
        or node.kwargs
        or value.storage.shadow is not None
        or value.storage.writer is not None
        or not all(other.folded or other.state == "done" for other in node.after)
    ):
        return None
    contents: Tensors = {}
    for item in node.inputs:
        content = _number_at_hand(item)
        if content is None:
            return None
        contents[item] = content
    with dispatch_level.kernels_only():  # these are below autograd
        try:
            result = node.op(*_substitute(node.args, contents.__getitem__))
        except Exception:  # the graph raises this error itself, with its source line
            return None
        shadow = Shadow()
        shadow.tensors[value] = result
        value.storage.shadow, node.folded = shadow, True
        return result.item()


def _number_at_hand(value: TrackedValue) -> torch.Tensor | None:
    """The content of a single number, if nothing has to be computed for it."""
    storage, real = value.storage, value.real
    writer = storage.writer
    if writer is not None and not writer.folded and writer.state != "done":
        return None
    if storage.shadow is not None:
        return None if storage.shadow.lost else storage.shadow.tensors.get(value)
    at_hand = value.given and not value.meta.flags and (value.node is None or value.node.state == "done")
    return real if at_hand and real is not None and real.numel() == 1 else None


def _take_step(node: TrackedNode, shadow: Shadow) -> bool:
    """Apply the write of ``node`` to the content of ``shadow``; False if its kernel raises an error."""
    method = _METHODS.get(node.op)
    if method is not None and type(node.args[1]) in (int, float):
        try:
            method(shadow.tensors[node.inputs[0]], node.args[1])
        except Exception as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                raise  # raised by a signal handler, not by the kernel, which is in C++
            return False
        return True
    with deferred():
        try:
            node.op(*_substitute(node.args, shadow.tensors.__getitem__))
        except Exception:
            return False
    return True


def _shadow_of_a_number(value: TrackedValue) -> Shadow | None:
    """A new shadow for a single outside number, such as a step counter, that no folded node has written.

    It is not assigned to the storage yet.
    """
    real = value.real
    if (
        value.node is not None
        or real is None
        or not value.given
        or value.meta.flags
        or value.storage.nbytes != real.itemsize
        or real.numel() != 1
    ):
        return None
    shadow = Shadow()
    with dispatch_level.kernels_only():
        shadow.tensors[value] = real.clone()
    return shadow


def _is_one_step(shapes: ShapeCache, node: TrackedNode, shadow: Shadow) -> bool:
    """Whether ``node`` only writes to the content of ``shadow``, and all nodes before it have been folded."""
    return (
        node.state == "pending"
        and shapes.info(node.op).name in _QUIET
        and not node.missed
        and node.draws is None
        and not node.kwargs
        and len(node.inputs) == len(node.outputs) == len(node.writes) == 1
        and node.outputs[0] is node.inputs[0]
        and node.inputs[0].node is not node
        and node.inputs[0] in shadow.tensors
        and all(other.folded or other.state == "done" for other in node.after)
    )


@deferring
def compute(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Tensors) -> Any:
    """Run the op on the known contents of its arguments."""
    with dispatch_level.NoGrad(), dispatch_level.kernels_only():
        return op(*_substitute(args, tensors.__getitem__), **_substitute(kwargs, tensors.__getitem__))


@deferring
def infer_from_values(
    shapes: ShapeCache,
    op: OpOverload,
    info: OpInfo,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    values: Sequence[TrackedValue],
) -> Inferred | None:
    """The results of an op whose result shape depends on content; None if that content is not known."""
    if info.mutates or info.is_view or info.draws or op.namespace != "aten":
        return None
    if info.name == "_ctc_loss":
        return _infer_ctc_loss(shapes, info, args, kwargs)
    deciding = values
    name = _DECIDING.get(info.name)
    if name in info.argument_names:
        position = info.argument_names.index(name)
        item = args[position] if position < len(args) else kwargs.get(name)
        items = item if isinstance(item, (list, tuple)) else [item]
        deciding = [entry for entry in items if isinstance(entry, TrackedValue)]
    if not deciding or sum(value.nbytes for value in values) > LARGEST_NBYTES:
        return None
    tensors = known(shapes, deciding)
    if tensors is None:
        return None
    try:
        for value in values:
            if value not in tensors:
                meta = value.meta
                tensors[value] = torch.empty(meta.shape, dtype=meta.dtype, device=_computed_on(meta.device))
        absent = next((value.device for value in values if value.device in _STAND_INS), None)
        return shapes.describe(info, warning_routing.silenced(compute)(op, args, kwargs, tensors), absent)
    except Exception:  # the op's own error, which the op raises at this line when it runs
        return None


def _infer_ctc_loss(
    shapes: ShapeCache, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Inferred | None:
    """The operator's results if its lengths are given as tensors with known content: the same as for lists.

    The kernel is not called with made-up targets, because it uses them as memory positions.
    """
    given = dict(zip(info.argument_names, args)) | kwargs
    lengths = {name: given[name] for name in ("input_lengths", "target_lengths")}
    deciding = [value for value in lengths.values() if isinstance(value, TrackedValue)]
    tensors = known(shapes, deciding) if deciding else None
    if tensors is None or any(value.dtype.is_floating_point for value in deciding):
        return None
    for name, value in lengths.items():
        given[name] = tensors[value].flatten().tolist() if isinstance(value, TrackedValue) else value
    if not ctc_loss.is_valid(given):
        return None
    inputs = [value for value in (given["log_probs"], given["targets"]) if isinstance(value, TrackedValue)]
    return shapes.infer(_CTC_LOSS, shapes.info(_CTC_LOSS), tuple(given.values()), {}, inputs)


@deferring
def refusal(
    shapes: ShapeCache, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], values: Sequence[Any]
) -> Exception | None:
    """The error that the kernel raises for the known contents of its integer arguments; other arguments are
    made up.
    """
    deciding = [value for value in values if not value.dtype.is_floating_point]
    if not deciding or sum(value.nbytes for value in values) > LARGEST_CHECKED_NBYTES:
        return None
    tensors = known(shapes, deciding)
    if tensors is None:
        return None
    for value in values:
        if value not in tensors:
            meta = value.meta
            tensors[value] = torch.zeros(meta.shape, dtype=meta.dtype, device=_computed_on(meta.device))
    try:
        compute(op, args, kwargs, tensors)
    except Exception as error:  # the op raises it at this line when it runs
        return error.with_traceback(None)
    return None


class _Walk:
    """One read: the nodes and outside tensors that it depends on, and their contents."""

    def __init__(self, shapes: ShapeCache) -> None:
        self._shapes = shapes
        self._nodes: set[TrackedNode] = set()
        self._lists: set[TrackedNode] = set()  # of views: only those that are needed are created
        self._leaves: set[TrackedValue] = set()
        self._written: set[TrackedStorage] = set()
        self._tensors: Tensors = {}
        self._budget = LARGEST_NBYTES
        self._computed: list[TrackedNode] = []

    @property
    def has_nodes(self) -> bool:
        return bool(self._nodes)

    # --- dependencies ---------------------------------------------------------------

    def reach(self, values: Sequence[TrackedValue]) -> bool:
        """Find everything that ``values`` depend on; False if some of it is unknown or there is too much."""
        stack: list[TrackedNode] = []
        for value in values:
            if value.storage.writer is not None:
                stack.append(value.storage.writer)
            if not self._reach_value(value, stack):
                return False
        while stack:
            if not self._reach_node(stack.pop(), stack):
                return False
        for writer in [node for node in self._nodes if node.writes]:
            for reader in writer.after:
                # The write destroys the input of this reader, so it is computed as well if nothing else is
                # needed for it.
                if reader.writes or not self._is_available(reader):
                    continue
                if not self._reach_node(reader, stack):
                    self._nodes.discard(reader)
        return True

    def _is_available(self, node: TrackedNode) -> bool:
        if node.folded or node.state == "done":
            return False
        for value in node.inputs:
            shadow, maker = value.storage.shadow, value.node
            if shadow is not None and value in shadow.tensors:
                continue
            if maker is not None and maker.state != "done":
                if maker not in self._nodes:
                    return False
            elif value not in self._leaves and not (value.given and value.real is not None):
                return False
        return all(
            not other.writes or other.folded or other.state == "done" or other in self._nodes
            for other in node.after
        )

    def _reach_value(self, value: TrackedValue, stack: list[TrackedNode]) -> bool:
        shadow = value.storage.shadow
        if shadow is not None:
            if shadow.lost:
                return False
            if value in shadow.tensors:
                return True
        if value.node is not None and value.node.state != "done":
            stack.append(value.node)
        elif value not in self._leaves:
            if not value.given or value.real is None or value.meta.flags:
                return False
            self._budget -= value.nbytes
            self._leaves.add(value)
        return True

    def _reach_node(self, node: TrackedNode, stack: list[TrackedNode]) -> bool:
        if node in self._nodes or node.folded or node.state == "done":
            return True
        if node.op is CHECK_GRADIENTS and node.inputs[0].device in _STAND_INS:
            # No gradient on an absent GPU is assumed to be infinite, so the result of this check is
            # unchanged.
            found = node.inputs[-2]
            stack += [other for other in node.after if found.storage in other.writes]
            return self._reach_value(found, stack)
        if (
            node.missed
            or node.draws is not None
            or failure_of(node.error) is Failure.FORGOTTEN
            or self._shapes.info(node.op).uncertain
        ):
            return False
        self._nodes.add(node)
        outputs = node.outputs
        if self._is_list_of_views(node):
            self._lists.add(node)
            outputs = outputs[:1]  # they are on one device, and need no memory
        for value in outputs:
            if value.device.type != "cpu" and value.device not in _STAND_INS:
                return False
            if value.node is node and node not in self._lists:
                self._budget -= value.nbytes
        if node.op in SHAPE_ONLY:
            self._budget -= node.inputs[0].nbytes
        for storage in node.writes:
            if storage not in self._written and not _holds(storage.shadow):
                self._budget -= storage.nbytes
            self._written.add(storage)
        if self._budget < 0 or len(self._nodes) > MOST_NODES:
            return False
        if node.op in SHAPE_ONLY:
            return True
        if not all(self._reach_value(value, stack) for value in node.inputs):
            return False
        touched = {value.storage for value in node.inputs}
        stack += [other for other in node.after if not touched.isdisjoint(other.writes)]
        return True

    def _is_list_of_views(self, node: TrackedNode) -> bool:
        """Whether the results are views of the parts of a tensor, like those of ``unbind`` and ``split``."""
        if len(node.outputs) < 2 or len(node.inputs) != 1 or not self._shapes.info(node.op).is_view:
            return False
        source, part = node.inputs[0], node.outputs[0]
        return source.storage is part.storage and source.dtype == part.dtype and not source.meta.flags

    # --- contents -------------------------------------------------------------------

    def compute(self, values: Sequence[TrackedValue]) -> Tensors:
        for leaf in self._leaves:
            self._tensors[leaf] = self._leaf(leaf)
        nodes = sorted(self._nodes, key=lambda node: node.sequence)
        for node in nodes:
            if node in self._lists:
                continue
            content_of = _shape_of if node.op in SHAPE_ONLY else self._tensor
            result = node.op(*_substitute(node.args, content_of), **_substitute(node.kwargs, content_of))
            results = list(result) if isinstance(result, (list, tuple)) else [result]
            results = [item for item in results if item is not None]
            for value in node.outputs:
                if value.node is node:
                    self._tensors[value] = results[value.index]
        self._computed = nodes
        return {value: self._tensor(value) for value in values}

    def keep(self) -> None:
        """Note that the nodes have been folded, and their contents."""
        with dispatch_level.kernels_only():
            for node in self._computed:
                self._keep(node)

    def give_up(self) -> None:
        """A node failed midway, so contents that the others wrote are no longer valid."""
        for storage in self._written:
            storage.shadow = Shadow(lost=True)

    def _tensor(self, value: TrackedValue) -> torch.Tensor:
        tensor = self._tensors.get(value)
        if tensor is None and value.node in self._lists:
            source, meta = self._tensor(value.node.inputs[0]), value.meta
            tensor = self._tensors[value] = source.as_strided(meta.shape, meta.stride, meta.offset)
        if tensor is None:
            tensor = value.storage.shadow.tensors[value]  # type: ignore[union-attr]
        return tensor

    def _leaf(self, value: TrackedValue) -> torch.Tensor:
        """The outside tensor itself, or its part of the copy of a storage that nodes write to."""
        real, storage = value.real, value.storage
        assert real is not None
        if storage.shadow is None or not _holds(storage.shadow):
            if storage not in self._written:
                return real
            storage.shadow = Shadow(_bytes_of(real).clone())
        if storage.shadow.memory is None:
            storage.shadow.memory = _bytes_of(next(iter(storage.shadow.tensors.values())))
        memory = storage.shadow.memory
        whole = memory[: len(memory) // real.itemsize * real.itemsize].view(real.dtype)
        tensor = whole.as_strided(real.shape, real.stride(), real.storage_offset())
        storage.shadow.tensors[value] = tensor
        return tensor

    def _is_kept_for_itself(self, fresh: set[TrackedStorage]) -> bool:
        """Whether the new memory of a node is tiny, or has been computed before."""
        keeps = bool(fresh)
        for storage in fresh:
            if storage.nbytes > KEPT_NBYTES and storage.shadow is None:
                storage.shadow = Shadow()  # nothing yet: it only notes this read
                keeps = False
        return keeps

    def _keep(self, node: TrackedNode) -> None:
        """Keep the results of ``node`` if a later read must not, or need not, compute them again."""
        inputs = {value.storage for value in node.inputs}
        outputs = node.outputs[:1] if node in self._lists else node.outputs
        storages = {value.storage for value in outputs if value.node is node}
        if not (
            node.writes
            or any(storage in self._written or _holds(storage.shadow) for storage in storages)
            or self._is_kept_for_itself(storages - inputs)
        ):
            return
        node.folded = True
        for value in node.outputs:
            if value.node is not node:
                continue
            if value.storage.shadow is None:
                value.storage.shadow = Shadow()
            value.storage.shadow.tensors[value] = self._tensor(value)
        if node.writes:  # earlier readers that have not been computed would now read what was written later
            for other in node.after:
                if not (other.folded or self._shapes.info(other.op).is_view):
                    other.missed = True


def _holds(shadow: Shadow | None) -> bool:
    """Whether a later read has to continue from this content."""
    return shadow is not None and (shadow.lost or bool(shadow.tensors) or shadow.memory is not None)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of ``tensor``, as bytes."""
    memory = torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.ops.aten.set_.source_Storage(memory, private_api.TensorBase.untyped_storage(tensor))


def _shape_of(value: TrackedValue) -> torch.Tensor:
    """A tensor with the value's metadata and arbitrary content."""
    meta = value.meta
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=_computed_on(meta.device))


def _substitute(item: Any, tensor_of: Callable[[TrackedValue], torch.Tensor]) -> Any:
    if isinstance(item, TrackedValue):
        return tensor_of(item)
    if isinstance(item, (list, tuple)):
        return type(item)([_substitute(entry, tensor_of) for entry in item])
    if isinstance(item, dict):
        return {name: _substitute(entry, tensor_of) for name, entry in item.items()}
    if isinstance(item, torch.device):
        return _computed_on(item)
    return item


def _computed_on(device: torch.device) -> torch.device:
    """The device on which a known value is computed: known values of GPU tensors are computed without the
    GPU.
    """
    return torch.device("cpu") if device in _STAND_INS else device
