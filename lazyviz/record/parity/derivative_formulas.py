"""Derivative formulas that compute differently unless they get plain tensors.

A few formulas check whether a tensor is subclass-like, which every tensor is while a dispatch mode is active,
and then avoid operations that subclasses might not support.  That path has different bits or strides.  Such
formulas are rare, and on their plain path they read values themselves (the gradient of ``prod`` looks for
zeros).  Therefore, they run immediately, on plain tensors and without lazyviz's mode, at a named sync point.

The lists come from running PyTorch's own operator samples with and without a mode that does nothing
(``tests/record/parity/test_derivative_formulas.py``).

Formulas of forward-mode derivatives are evaluated within their operator. There, the check concerns
normalizations and products; such an operator runs immediately if an argument has a tangent.

The autograd engine also accumulates gradients in place only if it sees plain tensors.  This reads no values:
the recorder is notified which additions are made by the engine.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ...torch_internals import composite_ops, dispatcher_bypasses, private_api
from .. import backward_nodes
from ..eager_fallback import note_region
from ..intercept_ops_outside_blocks import is_out_of_reach, nodes_before_access, tensors_in
from ..interception.attribute_patches import Patches
from ..tape import Tape
from ..tracked_storages import TrackedNode
from .backward_lock import BackwardLock
from .other_modes_and_subclasses import Original, is_plain

# By the names of their autograd nodes.
GRADIENTS = frozenset(
    {
        "LinalgEigBackward0",
        "MaskedFillBackward1",
        "MaxBackward1",
        "MedianBackward0",
        "MinBackward1",
        "NanmedianBackward0",
        "OrmqrBackward0",
        "ProdBackward0",
        "ProdBackward1",
    }
)
# Only if gradients will be differentiated again.
GRADIENTS_WITH_GRAPH = frozenset({"CumprodBackward0", "LinalgDetBackward0", "LinalgMatrixExpBackward0"})
if private_api.CUMPROD_ASKS_ALWAYS:
    GRADIENTS |= {"CumprodBackward0"}
# Only for complex tensors: eager PyTorch checks whether the loss depends on the phase of a vector.
COMPLEX_GRADIENTS = frozenset({"LinalgEighBackward0", "LinalgSvdBackward0"})
# Operators whose forward-mode formula makes the check (`batch_norm_jvp`, `group_norm_jvp`, `layer_norm_jvp`
# and `prod_jvp`, FunctionsManual.cpp).
FORWARD = (
    "_batch_norm_with_update",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit.no_stats",
    "cudnn_batch_norm",
    "miopen_batch_norm",
    "native_batch_norm",
    "native_group_norm",
    "native_layer_norm",
    "prod",
    "prod.dim_int",
)
# By whether gradients will be differentiated again: the formulas for any tensor, and all that are searched
# for.
_ALWAYS = GRADIENTS, GRADIENTS | GRADIENTS_WITH_GRAPH
_CHOOSES_BY_ZEROS = {"CumprodBackward0": "cumprod", "ProdBackward0": "prod", "ProdBackward1": "prod"}
_ASSUMED = {
    # A plan leaves out what is only computed for zeros: see plan/liveness/cumprod_gradient.py.
    "cumprod": "the inputs of cumprod have no zeros, with which its gradient would take more memory",
    "prod": "the inputs of prod have zeros, so that its gradient takes more memory",
}
_LOOKED_FOR = tuple(names | COMPLEX_GRADIENTS | {"CumprodBackward0"} for names in _ALWAYS)

_MEAN = 1  # at::Reduction::Mean


class FormulaPatches:
    """While installed, formulas that treat lazy tensors differently from plain ones run immediately."""

    def __init__(self, tape: Tape, mode: private_api.TorchDispatchMode) -> None:
        self._tape = tape
        self._mode = mode
        self._backward_lock = BackwardLock(tape)
        self._patches = Patches()

    def install(self) -> None:
        if self._patches or self._patches.reapply():
            return
        for owner in private_api.BACKWARD_ENTRIES:
            run_backward = self._run_backward(owner._engine_run_backward)
            self._patches.set(owner, "_engine_run_backward", run_backward)
        loss = self._cross_entropy(private_api.nn_functions.cross_entropy_loss)
        self._patches.set(private_api.nn_functions, "cross_entropy_loss", loss)
        self._patches.complete()

    def remove(self) -> None:
        self._patches.restore()

    def forward_kernels(self) -> dict[str, Callable[..., Any]]:
        """The kernels of the operators of ``FORWARD``, for
        :mod:`lazyviz.record.parity.mode_sensitive_composites`.
        """
        return {name: functools.partial(self._with_tangents, name) for name in FORWARD}

    def _with_tangents(self, name: str, original: Original, *args: Any, **kwargs: Any) -> Any:
        tape, tensors = self._tape, list(tensors_in((*args, *kwargs.values())))
        tangents = [found for found in map(private_api.tangent_of, tensors) if found is not None]
        if (
            not tangents
            or not private_api.has_mode(self._mode)
            or not is_plain(original, *tensors)
            or any(is_out_of_reach(tape, tensor) for tensor in tensors)
        ):
            return original(*args, **kwargs)
        base, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, base), overload or "default")
        read = (*tensors, *tangents)  # normalizations write to some of them
        needed = [node for tensor in read for node in nodes_before_access(tape, tensor, write=True)]
        cause = f"forward-mode derivative of {base}"
        return PlainTensors(tape, self._mode).call(cause, needed, tensors, op, *args, **kwargs)

    def _run_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The autograd engine; it runs the nodes of ``GRADIENTS`` immediately."""
        tape, mode = self._tape, self._mode

        @functools.wraps(original)
        def run_backward(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            # It is also installed between blocks and while recording is paused. Within one of functorch's
            # transforms, tensors are subclass-like in eager mode, too.
            if not private_api.has_mode(mode) or any(map(_is_of_functorch, outputs)):
                return original(outputs, *args, **kwargs)
            tape.scopes.sources.enter(sys._getframe())
            try:
                with self._backward_lock.wait():
                    return self._recorded(original, outputs, args, kwargs)
            finally:
                tape.scopes.sources.leave(sys._getframe())
                if not tape.pending:
                    tape.retire()  # tensors that nodes evaluated could not be released while the engine ran

        return run_backward

    def _recorded(
        self,
        original: Callable[..., Any],
        outputs: Sequence[Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call the engine, while the recorder's hooks are at the nodes that it will run."""
        tape, mode = self._tape, self._mode
        plain: PlainTensors | None = None
        create_graph = bool(args[2])
        handles: list[Any] = []
        found, sums = backward_nodes.below(outputs, _LOOKED_FOR[create_graph])
        asking = list(found)
        if asking and any(is_out_of_reach(tape, output) for output in tensors_in(outputs)):
            _assume(tape, asking)  # no value exists that could have other bits
            asking.clear()
        try:
            for node in asking:
                if _needs_plain_tensors(node, _ALWAYS[create_graph]):
                    plain = plain or PlainTensors(tape, mode)
                    handles.append(node.register_prehook(functools.partial(_before, plain, tape, node)))
                    handles.append(node.register_hook(plain.end_of_node))
                else:
                    _assume(tape, [node])  # recorded with the formula that is right for any values
            sums.watch(functools.partial(_after, tape))
            return original(outputs, *args, **kwargs)
        finally:
            if plain is not None:
                plain.end()  # if a node failed
            tape.recording.summing = None
            sums.release()
            for handle in handles:
                handle.remove()

    def _cross_entropy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """With class weights and label smoothing, a mean sums the weights in another order."""
        tape, mode = self._tape, self._mode

        @functools.wraps(original)
        def cross_entropy_loss(*args: Any, **kwargs: Any) -> Any:
            if not _sums_weights(*args, **kwargs) or not private_api.has_mode(mode):
                return original(*args, **kwargs)
            tensors = list(tensors_in((*args, *kwargs.values())))
            if any(is_out_of_reach(tape, tensor) for tensor in tensors):
                return original(*args, **kwargs)
            needed = [node for t in tensors for node in nodes_before_access(tape, t, write=False)]
            cause = "cross_entropy with weight and label_smoothing"
            return PlainTensors(tape, mode).call(cause, needed, tensors, original, *args, **kwargs)

        return cross_entropy_loss


def _sums_weights(*args: Any, **kwargs: Any) -> bool:
    """Whether ``cross_entropy_loss`` divides by the sum of the targets' weights, which it computes in two
    ways (``cross_entropy_loss_label_smoothing``, LossNLL.cpp): for targets that are classes, not
    probabilities.
    """
    if (args[2] if len(args) > 2 else kwargs.get("weight")) is None:
        return False  # nearly always, and every loss comes here
    given = dict(zip(("self", "target", "weight", "reduction", "ignore_index", "label_smoothing"), args))
    given |= kwargs
    return (
        bool(given.get("label_smoothing"))
        and given.get("reduction", _MEAN) == _MEAN
        and given["self"].shape != given["target"].shape
    )


class PlainTensors:
    """A subgraph of the program that runs on plain tensors, with lazyviz's mode off."""

    def __init__(self, tape: Tape, mode: private_api.TorchDispatchMode) -> None:
        self._tape = tape
        self._mode = mode
        self._off = False
        self._cause = ""

    def begin(self, cause: str, needed: Iterable[TrackedNode], read: Iterable[torch.Tensor]) -> None:
        self._cause = cause
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in read)
        self._tape.runs.sync(cause, needed, nbytes)
        self._off = private_api.remove_mode(self._mode)
        if self._off:
            dispatcher_bypasses.begin_measuring()

    def end(self, read: Any = (), result: Any = None) -> None:
        if self._off:
            held = dispatcher_bypasses.end_measuring()
            private_api.insert_mode_at_bottom(self._mode)
            self._off = False
            note_region(self._tape, self._cause, read, result, held=held)

    def call(
        self,
        cause: str,
        needed: Iterable[TrackedNode],
        read: Sequence[torch.Tensor],
        function: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The result of ``function``, which reads the tensors ``read``, after ``needed`` has run."""
        self.begin(cause, needed, read)
        result = None
        try:
            result = function(*args, **kwargs)
        finally:
            self.end(read, result)
        return result

    def end_of_node(self, results: Any, gradients: Any) -> None:
        self.end(gradients, results)


def _is_of_functorch(output: Any) -> bool:
    return isinstance(output, torch.Tensor) and composite_ops.is_of_transform(output)


def _needs_plain_tensors(node: Any, always: frozenset[str]) -> bool:
    """Whether the formula of one of these nodes differs for tensors that are not plain."""
    name = node.name()
    return name in always or (
        name in COMPLEX_GRADIENTS and any(m.dtype.is_complex for m in private_api.gradient_metadata(node))
    )


def _assume(tape: Tape, nodes: Iterable[Any]) -> None:
    """Note in the graph where eager PyTorch would choose a formula by values that do not exist here."""
    graph = tape.recording.graph
    for name in filter(None, {_CHOOSES_BY_ZEROS.get(node.name()) for node in nodes}):
        if graph is not None:
            graph.assumed.add(_ASSUMED[name])


def _before(plain: PlainTensors, tape: Tape, node: Any, gradients: Sequence[torch.Tensor | None]) -> None:
    given = list(tensors_in(gradients))
    if _may_use_pending(tape, node):
        # Everything that is pending: which saved tensors the node uses cannot be read, because reading a
        # saved tensor runs its hooks, and those of checkpointing may run only once.
        needed = list(tape.pending)
    else:
        needed = [before for tensor in given for before in nodes_before_access(tape, tensor, write=False)]
    plain.begin(f"{node.name()} reads values", needed, given)


def _may_use_pending(tape: Tape, node: Any) -> bool:
    """Whether a tensor that ``node`` has saved may be pending, or its memory may have a pending write.

    An op after all blocks has evaluated what it reads, so what its node has saved is real.
    """
    if tape.recording.graph is not None:
        return True
    sequence = node._sequence_nr()
    for graph in {id(pending.graph): pending.graph for pending in list(tape.pending)}.values():
        made = graph.autograd_nodes
        if made is None or sequence < made.stop or sequence in graph.by_sequence:
            return True
    return False


def _after(tape: Tape, node: Any) -> None:
    """Called when ``node`` has computed its gradients: further ops are the engine's additions to other
    gradients.
    """
    tape.recording.summing = node
