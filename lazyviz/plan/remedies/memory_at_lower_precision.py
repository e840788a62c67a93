"""Precision remedies: what a program would allocate with smaller dtypes."""

from __future__ import annotations

from collections.abc import Container, Iterator

import torch

from ...graph.ir import Node, Value
from ...torch_internals.private_api import OpOverload
from ..liveness.allocation_trace import Key, Program, Step
from ..workspace.workspace_lookup import SCRATCH, Known, has_rule, in_lower_precision
from .what_if_edits import Changed

_CUDNN_RNN = torch.ops.aten._cudnn_rnn.default


def bf16(program: Program, device_type: str) -> Iterator[Changed]:
    """``model.bfloat16()``, including inputs: every float32 tensor takes half the bytes.

    What attention kernels store in float32 beside their result (the log-sum-exp, see the meta functions in
    torch/_meta_registrations.py) does not change. The result is the best case: tensors that the program
    itself requests in float32 also stay, which a float32 recording does not show, and GPU kernels may need
    workspace in bfloat16, which is not counted.
    """
    stay = {
        program.keys.get(value.storage)
        for step in program.steps
        if "_scaled_dot_product" in _name(step.node) and step.node.phase != "backward"
        for value in step.node.outputs[1:]
    }
    if any(step.node.op is _CUDNN_RNN for step in program.steps):
        return  # cuDNN's recurrent layers do not support bfloat16, so another program would run
    halves = [key for key, dtype in enumerate(program.dtypes) if dtype is torch.float32 and key not in stay]
    if not any(program.storages[key].role == "parameter" for key in halves):
        return  # there is no model to convert
    changed = program.copy()
    for key in halves:
        changed.sizes[key] = program.sizes[key] // 2
    for key in program.scratch:
        changed.sizes[key] = 0
    if device_type == "cpu":
        lower = set(halves)
        known: Known = {}
        for at, step in enumerate(changed.steps):
            if not has_rule(step.node):
                continue
            values = (*step.node.inputs, *step.node.outputs)
            ids = {value.id for value in values if program.keys.get(value.storage) in lower}
            changed.steps[at] = _with_scratch(changed, step, ids, known)
    text = "model.bfloat16() (weights, gradients, optimizer state, and activations; also cast the inputs)"
    # In half precision, another attention kernel may be used (transformers/cuda/sdp_utils.cpp), which saves
    # other tensors: the saving is then an estimate, not an upper bound.
    same_kernels = not any("_efficient_attention" in _name(step.node) for step in program.steps)
    yield Changed("bf16", text, changed, numerics=True, estimate=True, at_best=same_kernels)


def _with_scratch(program: Program, step: Step, lower: Container[int], known: Known) -> Step:
    """The step with the CPU workspace of its kernel if the values with these ids are bfloat16."""
    need = in_lower_precision(step.node, lower, known)
    if need is None:
        return step
    count = len(program.storages)
    found = next((key for key in step.makes if key < count and program.storages[key].name == SCRATCH), None)
    if found is None and need and step.uses:
        found = program.key(step.uses[0], 0)
        step = step._replace(uses=(*step.uses, found), makes=(*step.makes, found))
    if found is not None:
        program.sizes[found] = need
    return step


# The operators that autocast runs in the lower precision and in float32; all others run in the dtype of their
# inputs. They implement the functions of AT_FORALL_LOWER_PRECISION_FP, AT_FORALL_FP32, and related lists in
# ATen's autocast_mode.h; the CPU has a shorter float32 list, in autocast_mode.cpp.
_LOWER = {
    *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "addr", "linear", "matmul"),
    *("convolution", "_convolution", "cudnn_convolution", "convolution_overrideable", "_prelu_kernel"),
    "_cudnn_rnn",  # in float16 (autocast_RNN.cpp), which has the same size
}
# Normalizations whose kernels support an input in lower precision with float32 weights: the result has the
# dtype of the input, the statistics and the weights' gradients that of the weights (``is_mixed_type`` in
# ATen's native/cpu/mixed_data_type.h; the type checks of ``cudnn_batch_norm`` in native/cudnn/BatchNorm.cpp).
_MIXED = {
    *("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_native_batch_norm_legit"),
    *("_native_batch_norm_legit_no_training", "_batch_norm_with_update", "_batch_norm_no_update"),
    *("native_layer_norm", "native_group_norm"),
}
_FULL_ANYWHERE = {
    *(
        "binary_cross_entropy_with_logits",
        "mse_loss",
        "nll_loss_forward",
        "nll_loss2d_forward",
        "binary_cross_entropy",
        "smooth_l1_loss",
    ),
    *("huber_loss", "multi_margin_loss", "_ctc_loss"),
}
# Reductions that CUDA kernels compute in float32 from lower-precision input, without a copy
# (``make_reduction_from_ty`` in native/ReduceOpsUtils.h).
_FULL_RESULT_ON_CUDA = {"sum", "prod", "norm", "linalg_vector_norm"}
_FULL_ON_CUDA = {
    *("native_layer_norm", "_fused_rms_norm", "native_group_norm", "_softmax", "_log_softmax", "softplus"),
    *("cumsum", "cumprod", "pow", "exp", "expm1", "log", "log1p", "log2", "log10", "rsqrt"),
    *("reciprocal", "norm", "renorm", "acos", "asin", "cosh", "sinh", "tan", "erfinv", "_cdist_forward"),
    *("soft_margin_loss", "multilabel_margin_loss_forward"),
}


def autocast(program: Program, device_type: str) -> Iterator[Changed]:
    """``torch.autocast(device_type, torch.bfloat16)`` around the forward pass; weights stay float32.

    Dtypes are inferred again in program order: matrix products and convolutions run in bfloat16 on copies of
    float32 inputs (the copy of a weight is kept until the forward pass ends, see ``cached_cast`` in ATen's
    autocast_mode.cpp), and the other ops follow their inputs. Backward nodes follow their forward node and
    cast gradients back. The result is an estimate, within a tenth in the tests: a backward node does not say
    which of its results belongs to which argument, and workspace is scaled in proportion to its tensors.
    """
    cast = next(
        (each.node for each in program.steps if each.node.phase == "forward" and _lower(each.node)), None
    )
    if cast is None:
        return
    if any(dtype in (torch.bfloat16, torch.float16) for dtype in program.dtypes):
        return  # it already computes in a lower precision
    text = f'with torch.autocast("{device_type}", torch.bfloat16) around the forward pass'
    yield Changed(
        "autocast", text, _Autocast(program, device_type).program, cast.source, numerics=True, estimate=True
    )


class _Autocast:
    """Changes the dtypes of a program; ``program`` is the result."""

    def __init__(self, program: Program, device_type: str) -> None:
        self.program = program.copy()
        self._host = device_type == "cpu"
        self._results = _FULL_RESULT_ON_CUDA if device_type == "cuda" else set()
        self._entropies = _cross_entropies(program.steps)
        self._last = {
            step.node.forward.index: index
            for index, step in enumerate(program.steps)
            if step.node.phase == "backward" and step.node.forward is not None
        }
        self._full = _FULL_ANYWHERE | (_FULL_ON_CUDA if device_type == "cuda" else set())
        self._keys = program.keys
        self._known: Known = {}
        self._low: set[int] = set()  # ids of values in the lower precision
        self._weights: dict[Key, Key] = {}  # a parameter's copy
        self._casts: dict[int, dict[Key, Key]] = {}  # by forward node: the copies that it read
        self._alias: dict[Key, Key] = {}  # replacements of results that were cast
        # Copies of gradients, by the forward node whose result they are of.
        self._gradients: dict[tuple[int, Key], Key] = {}
        self._attention, self._attended = _attention_by_hand(program.steps)
        self._position = 0
        self._before: list[Step] = []
        self._after: list[Step] = []
        # Casts of this autograd node's results, which run after all its ops.
        self._casts_back: list[Step] = []
        function: Node | None = None
        steps: list[Step] = []
        last_forward = max(index for index, step in enumerate(program.steps) if step.node.phase == "forward")
        for index, step in enumerate(program.steps):
            self._position, self._before, self._after = index, [], []
            if step.node.forward is not function:
                steps += self._casts_back
                function, self._casts_back = step.node.forward, []
            if any(key in self._alias for key in step.uses):
                uses = dict.fromkeys(self._alias.get(key, key) for key in step.uses)
                step = step._replace(uses=tuple(uses))
            if step.node.phase == "backward":
                step = self._backward(step)
            elif step.node.phase != "optimizer":
                step = self._forward(step)
            steps += [*self._before, step, *self._after]
            if index == last_forward and self._weights:
                # The cache is cleared when the block is exited.
                steps.append(Step(step.node, tuple(self._weights.values()), ()))
        self.program.steps = [*steps, *self._casts_back]

    def _key(self, value: Value) -> Key:
        key = self._keys.get(value.storage, -1)
        return self._alias.get(key, key)

    def _forward(self, step: Step) -> Step:
        node = step.node
        inputs = [value for value in node.inputs if value.dtype is torch.float32]
        low = any(value.id in self._low for value in inputs)
        # A zero-dimensional tensor does not determine the dtype of a result ("Type Promotion" in PyTorch's
        # docs).
        full = any(value.id not in self._low for value in inputs if value.shape)
        swapped: dict[Key, Key] = {}
        if _lower(node) and node.index not in self._attention:
            result = True
            for value in inputs:
                if value.id not in self._low and (key := self._key(value)) >= 0:
                    swapped[key] = self._cast_down(node, value, key)
        elif _name(node) in self._results:
            result = False
        elif self._in_full(node) and not _is_view(step):
            result = False
            swapped = self._cast_up(node)
            if node.index in self._attended:
                self._cast_result(step)
        elif _name(node) == "add" and low and any(map(_is_bias, inputs)):
            result = True  # the second half of a linear function
        elif _name(node) in _MIXED:
            result = bool(inputs) and inputs[0].id in self._low
        else:
            result = low and not full and node.kwargs.get("dtype") is not torch.float32
            # The result of a view or an in-place operator has the dtype of its input.
            if not step.makes and node.inputs:
                result = node.inputs[0].id in self._low
        if swapped:
            self._casts[node.index] = swapped
        self._type(step, result)
        uses = tuple(dict.fromkeys(swapped.get(key, key) for key in step.uses))
        step = step._replace(uses=uses)
        return self._sized(step, every=result and _lower(node))

    def _in_full(self, node: Node) -> bool:
        if node.index in self._entropies:
            return self._host
        return _name(node) in self._full or node.index in self._attention

    def _sized(self, step: Step, *, every: bool) -> Step:
        """The step with its workspace; ``every``: all float32 operands are now in the lower precision."""
        node = step.node
        if not self._host or not has_rule(node):
            return step
        values = (*node.inputs, *node.outputs)
        if every:
            lower = {value.id for value in values}
        elif self._in_full(node) or {node.index, getattr(node.forward, "index", -1)} & self._attention:
            lower = set()
        else:
            lower = {value.id for value in values if value.id in self._low}
        return _with_scratch(self.program, step, lower, self._known)

    def _backward(self, step: Step) -> Step:
        node, forward = step.node, step.node.forward
        swapped = self._casts.get(forward.index, {}) if forward is not None else {}
        uses = tuple(dict.fromkeys(swapped.get(key, key) for key in step.uses))
        if forward is not None and forward.phase == "forward":
            low = _lower(forward) or any(value.id in self._low for value in forward.outputs)
        else:
            low = any(value.id in self._low for value in node.inputs)
        if not step.makes:
            low = bool(node.inputs) and node.inputs[0].id in self._low
        makes = list(step.makes)
        received = self._received(node)
        uses = tuple(dict.fromkeys(received.get(key, key) for key in uses))
        if forward is not None and forward.index in self._attention and not _is_view(step):
            low = False
            up = self._cast_up(node)
            uses = tuple(dict.fromkeys(up.get(key, key) for key in uses))
            if swapped:
                self._cast_result(step)
        elif low and forward is not None and swapped:
            shapes = {value.shape for value in forward.inputs if self._key(value) in swapped}
            for value in node.outputs:
                key = self._key(value)
                recorded = 0 <= key < len(self.program.storages)
                gradient = recorded and self.program.storages[key].role == "gradient"
                if key in makes and (gradient or (value.shape in shapes and value.id not in self._low)):
                    # Computed in bfloat16, then cast to float32, which is accumulated or passed on.
                    made = self.program.key(key, self.program.sizes[key] // 2)
                    makes[makes.index(key)] = made
                    uses = tuple(made if use == key else use for use in uses)
                    self._casts_back.append(Step(node, (made, key), (key,), cast=True))
        step = Step(node, uses, tuple(makes))
        self._type(step, low)
        in_full = forward is not None and (forward.index in self._attention or not _lower(forward))
        if forward and in_full and not low and swapped and self._last.get(forward.index) == self._position:
            self._cast_gradient(node, forward, swapped)
        every = low and forward is not None and (_lower(forward) or bool(received))
        return self._sized(step, every=every)

    def _received(self, node: Node) -> dict[Key, Key]:
        """Copies of float32 gradients that the backward node reads, of a result in the lower precision.

        The result was promoted by another operand where it was used, so autograd casts its gradient back.
        """
        forward = node.forward
        if forward is None or forward.phase != "forward" or forward.index in self._attention:
            return {}
        shapes = {value.shape for value in forward.outputs if value.id in self._low}
        found = {}
        for value in node.inputs:
            maker = value.node
            if maker is None or maker.phase != "backward" or maker.forward is forward:
                continue
            if value.id in self._low or value.dtype is not torch.float32 or value.shape not in shapes:
                continue
            if (key := self._key(value)) < 0:
                continue
            if value.storage.nbytes < value.nbytes:
                continue  # expanded: the copy that its reader makes is workspace already
            if (forward.index, key) not in self._gradients:
                self._gradients[forward.index, key] = self._copy(node, key, value.nbytes // 2)
            found[key] = self._gradients[forward.index, key]
        return found

    def _type(self, step: Step, low: bool) -> None:
        """Note the dtype of a node's results, and their size if the node allocated them."""
        if low:
            for key in step.makes:
                if key < len(self.program.storages) and self.program.storages[key].name == SCRATCH:
                    self.program.sizes[key] //= 2
            if step.node.op is _CUDNN_RNN and (key := self._key(step.node.outputs[3])) in step.makes:
                # The reserve tensor has dtype uint8, but cuDNN stores floating-point numbers in it.
                self.program.sizes[key] //= 2
        for position, value in enumerate(step.node.outputs):
            if value.dtype is not torch.float32 or not low:
                continue
            if position and "_scaled_dot_product" in _name(step.node) and step.node.phase != "backward":
                continue  # the log-sum-exp
            if position and _name(step.node).removesuffix("_backward") in _MIXED:
                continue  # statistics, and gradients of float32 inputs
            key = self._key(value)
            if key in step.makes:
                self.program.sizes[key] //= 2
            elif any(key in cast.makes for cast in self._casts_back):
                continue  # cast back
            self._low.add(value.id)

    def _cast_up(self, node: Node) -> dict[Key, Key]:
        return {
            key: self._copy(node, key, value.nbytes)
            for value in node.inputs
            if value.id in self._low and (key := self._key(value)) >= 0
        }

    def _cast_result(self, step: Step) -> None:
        """Let later steps read a copy of the step's results in the lower precision."""
        for key in step.makes:
            self._alias[key] = self._copy_after(step.node, key)
        self._low.update(value.id for value in step.node.outputs if value.dtype is torch.float32)

    def _cast_gradient(self, node: Node, forward: Node, swapped: dict[Key, Key]) -> None:
        """Cast the gradient of an input that was cast to float32 back, as autograd does at the end of the
        node.
        """
        shapes = {value.shape for value in forward.inputs if self._key(value) in swapped}
        for value in node.outputs:
            key = self._key(value)
            if key >= 0 and value.shape in shapes and value.id not in self._low:
                self._alias[key] = self._copy_after(node, key)
                self._low.add(value.id)

    def _copy_after(self, node: Node, key: Key) -> Key:
        copy = self.program.key(key, self.program.sizes[key] // 2)
        self._after.append(Step(node, (key, copy), (copy,), cast=True))
        return copy

    def _cast_down(self, node: Node, value: Value, key: Key) -> Key:
        if value.storage.role != "parameter":
            return self._copy(node, key, value.nbytes // 2)
        if key not in self._weights:
            self._weights[key] = self._copy(node, key, self.program.sizes[key] // 2)
        return self._weights[key]

    def _copy(self, node: Node, key: Key, nbytes: int) -> Key:
        made = self.program.key(key, nbytes)
        self._before.append(Step(node, (key, made), (made,)))
        return made


def _cross_entropies(steps: list[Step]) -> set[int]:
    """Indices of the ``_log_softmax`` nodes inside ``cross_entropy_loss``.

    It requests the dtype of the logits, so that CUDA's autocast does not change it (native/LossNLL.cpp),
    while the CPU's autocast casts the logits (autocast_mode.cpp). They are recognized by a loss that follows
    on the same line.
    """
    found = set()
    before: Node | None = None
    for step in steps:
        node = step.node
        if _name(node) == "detach":
            continue
        follows = before is not None and _name(node) in ("nll_loss_forward", "nll_loss2d_forward")
        if follows and before and _name(before) == "_log_softmax" and before.source == node.source:
            found.add(before.index)
        before = node
    return found


_names: dict[int, tuple[OpOverload, str]] = {}  # keyed by identity, because hashing operators takes longer


def _name(node: Node) -> str:
    found = _names.get(id(node.op))
    if found is None:
        found = _names[id(node.op)] = node.op, node.op._schema.name.rpartition("::")[2]
    return found[1]


def _lower(node: Node) -> bool:
    name = _name(node)
    return name in _LOWER or ("_scaled_dot_product" in name and not name.endswith("_backward"))


def _is_view(step: Step) -> bool:
    return not step.makes


def _is_bias(value: Value) -> bool:
    return value.storage.role == "parameter" and len(value.shape) == 1


_IN_ATTENTION = {
    *("mul", "bmm", "baddbmm", "add", "masked_fill", "where", "native_dropout", "empty_like", "div"),
    *("bernoulli_", "div_", "add_"),
}


def _attention_by_hand(steps: list[Step]) -> tuple[set[int], set[int]]:
    """Indices of the nodes of attention without a fused kernel, and of those that produce its result.

    In lower precision, these run in float32 on copies (``_scaled_dot_product_attention_math`` in ATen's
    transformers/attention.cpp): from the scaling of query and key, over ``_safe_softmax``, to the product
    with the values.
    """
    readers: dict[int, list[Node]] = {}
    for step in steps:
        if step.node.phase == "forward":
            for value in step.node.inputs:
                readers.setdefault(value.id, []).append(step.node)
    members: set[int] = set()
    results: set[int] = set()
    for step in steps:
        if _name(step.node) != "_safe_softmax" or step.node.phase != "forward":
            continue
        members.add(step.node.index)
        queue = [value.node for value in step.node.inputs]
        for node in queue:  # grows while it is read
            if node is None or node.index in members:
                continue
            view = torch.Tag.inplace_view in node.op.tags or node.op.is_view or _name(node) in _RESHAPES
            if view or _name(node) in _IN_ATTENTION:
                members.add(node.index)
                if _name(node) != "mul":  # query and key are scaled first
                    queue += [value.node for value in node.inputs]
        forward = [reader for value in step.node.outputs for reader in readers.get(value.id, ())]
        for node in forward:  # grows while it is read
            if node.index in members:
                continue
            if _name(node) == "bmm":
                members.add(node.index)
                results.add(node.index)
            elif node.op.is_view or _name(node) in _RESHAPES or _name(node) in _IN_ATTENTION:
                members.add(node.index)
                forward += [reader for value in node.outputs for reader in readers.get(value.id, ())]
    return members, results


_RESHAPES = {"_unsafe_view", "view", "expand", "transpose", "detach", "alias"}
