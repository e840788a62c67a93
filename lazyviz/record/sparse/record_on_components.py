"""Recording of ops with sparse tensors: as operators on their components, where a rule knows the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...torch_internals import private_api, sparse_tensors
from ...torch_internals.fake_cuda_devices import STAND_INS
from ...torch_internals.private_api import OpOverload
from ..intercept_ops_outside_blocks import nodes_before_access
from ..lazy_tensor import detached, is_lazy
from ..tape import Tape
from .components import COMPONENTS, Form, is_sparse, parts_of
from .custom_operators import Signature, apply_rule, flat, new_parts, operator_for
from .result_metadata_rules import RULES, Made, New, Row

Record = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]

_aten = torch.ops.aten
# Support for other dtypes depends on the kernel.
_DTYPES = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
}  # fmt: skip
_SAME = {
    each.default for each in (_aten.detach, _aten.alias, _aten.positive)
}  # the same components, in another tensor
_METADATA = {
    each.default
    for each in (
        _aten._nnz, _aten.is_coalesced, _aten.sparse_dim, _aten.dense_dim, _aten._dimI, _aten._dimV,
        _aten._coalesced_,
    )
}  # fmt: skip


def record(do_record: Record, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The pending result of a call with sparse tensors; ``NotImplemented`` if the call must run now."""
    if not args or not is_sparse(args[0]):
        return _kernel(do_record, op, args, kwargs) if op.name() in RULES else NotImplemented
    tensor = args[0]
    if op in _METADATA:
        return sparse_tensors.call(op, tensor.layout, tensor.device, *args)
    if op in _SAME or (op is _aten.coalesce.default and sparse_tensors.is_coalesced(tensor)):
        return sparse_tensors.same_components(tensor)
    name = op._schema.name.removeprefix("aten::")
    if (
        name in ("indices", "values")
        and tensor.layout == torch.sparse_coo
        and sparse_tensors.is_coalesced(tensor)
    ):
        name = f"_{name}"
    if name in COMPONENTS[tensor.layout]:
        return _part(op, tensor, name)
    return _kernel(do_record, op, args, kwargs) if op.name() in RULES else NotImplemented


def is_composite(op: OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether the ops that ``op`` consists of are recorded in its place: it makes or takes sparse tensors,
    and has no kernel of its own.  In inference mode, such functions reach dispatch modes undecomposed.
    """
    makes = op._schema.name.removeprefix("aten::").startswith(("sparse_", "_sparse_"))
    return (makes or any(map(is_sparse, args))) and op.name() not in RULES and op._can_decompose()


def autocast(op: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operands as autocast passes them to ``addmm``, which the kernel of ``_sparse_addmm`` calls.

    Within a dispatch mode, the kernel's calls are below autocast.
    """
    if op is not _aten._sparse_addmm.default or len(args) != 3:
        return args
    dtype = private_api.autocast_dtype(args[0].device)
    if dtype is None:
        return args

    def needs_cast(item: torch.Tensor) -> bool:
        return item.is_floating_point() and item.dtype not in (dtype, torch.float64)

    if not any(map(needs_cast, args)):
        return args
    return tuple(_aten._to_copy.default(item, dtype=dtype) if needs_cast(item) else item for item in args)


def make(tape: Tape, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operator in which constructors end; ``NotImplemented`` if it has to run now, because
    it converts components.
    """
    is_coo = op is sparse_tensors.MAKE_COO
    *indices, values = args[3:5] if is_coo else args[:3]
    if kwargs.get("dtype") not in (None, values.dtype) or kwargs.get("pin_memory"):
        return NotImplemented
    if values.device in STAND_INS:  # see record/fake_cuda/sparse_gradients.py
        return NotImplemented
    if any(part.layout != torch.strided or part.device != values.device for part in (*indices, values)):
        return NotImplemented
    if is_coo:  # it does not read them
        return sparse_tensors.call(op, torch.sparse_coo, values.device, *args, **kwargs)
    if kwargs.get("layout") not in COMPONENTS:
        return NotImplemented
    shape = args[3] if len(args) > 3 else None
    if shape is None or sparse_tensors.are_checked():
        evaluate(tape, f"{op._schema.name.removeprefix('aten::')} reads indices", indices)
        with tape.recording.paused():
            shape = op(*indices, stand_in(values), *args[3:], **kwargs).shape
    return sparse_tensors.make(kwargs["layout"], shape, args[:3])


def stand_in(values: torch.Tensor) -> torch.Tensor:
    """Memory with the same layout, which is not read."""
    return torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device=values.device)


def evaluate(tape: Tape, cause: str, tensors: Sequence[torch.Tensor]) -> None:
    needed = [node for tensor in tensors for node in nodes_before_access(tape, tensor, write=False)]
    if needed:
        with tape.runs.lock:
            nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            tape.runs.sync(cause, needed, nbytes)


def _part(op: OpOverload, tensor: torch.Tensor, name: str) -> Any:
    """A component as a separate tensor."""
    part = parts_of(tensor)[COMPONENTS[tensor.layout].index(name)]
    if is_lazy(part):
        found = detached(part)
        return NotImplemented if found is None else found
    return sparse_tensors.call(op, tensor.layout, tensor.device, tensor)


def _kernel(do_record: Record, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    arguments = _in_order(op, args, kwargs)
    if any(isinstance(item, torch.Tensor) and item.device.type != "cpu" for item in arguments):
        return NotImplemented  # the rules are those of the CPU's kernels
    if any(isinstance(item, torch.Tensor) and item.dtype not in _DTYPES for item in arguments):
        return NotImplemented
    forms = {at: Form.of(item) for at, item in enumerate(arguments) if is_sparse(item)}
    outcome = apply_rule(op, [forms.get(at, item) for at, item in enumerate(arguments)])
    if outcome is None:
        return NotImplemented
    sparse = tuple((at, form.layout) for at, form in forms.items())
    numbers = tuple(
        at
        for at, (item, argument) in enumerate(zip(arguments, op._schema.arguments))
        if isinstance(item, (int, float, complex)) and str(argument.type) == "Tensor"
    )
    operands = tuple(flat(forms, arguments))
    if not isinstance(outcome, Made):
        return do_record(operator_for(op, Signature(sparse, numbers, None)), operands, {})
    fresh = new_parts(outcome)
    results: Sequence[Any] = ()
    if fresh:
        results = do_record(operator_for(op, Signature(sparse, numbers, fresh)), operands, {})
        results = results if isinstance(results, (tuple, list)) else (results,)
    made = dict(zip(fresh, results))

    def part(at: int, found: torch.Tensor | Row | New) -> torch.Tensor:
        if isinstance(found, Row):
            row: torch.Tensor = do_record(_aten.select.int, (found.part, 0, found.number), {})
            return row
        return made[at] if isinstance(found, New) else found

    parts = tuple(part(at, found) for at, found in enumerate(outcome.parts))
    return Form(outcome.layout, outcome.shape, parts, outcome.is_coalesced).made()


def _in_order(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The call's arguments in the order of the schema, defaults included."""
    rest = op._schema.arguments[len(args) :]
    return [*args, *(kwargs.get(argument.name, argument.default_value) for argument in rest)]
