"""Known shapes: results of views and common kernels by rules of ours, without PyTorch's in Python.

``find`` says ``None`` where there is any doubt; then FakeTensor is asked.
"""

from __future__ import annotations

from typing import Any

import torch

from ...torch_internals import private_api
from ...torch_internals.private_api import OpOverload
from . import foreach, kernel_probes, kernel_rules, scalar_operands
from .metadata_table import MetadataTable
from .op_call import Call
from .op_info import OpInfo
from .output_specs import Inferred, Output, OutputSpec

_CPU = torch.device("cpu")


def find(
    metadata: MetadataTable,
    op: OpOverload,
    info: OpInfo,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: list[Any],
) -> Inferred | None:
    """What the op returns, if it is known here."""
    if op.namespace != "aten":
        return None
    if info.is_view or info.name == "_unsafe_view":
        return _view(metadata, op, info, args, kwargs, inputs)
    call = Call(op, info.name, dict(zip(info.argument_names, args)) | kwargs, inputs)
    if scalar_operands.are_unusual(op, call.arguments, inputs):
        return None
    outputs: list[Output] = []
    if info.counts_writes:
        if info.mutable_positions != [0] or info.returned or not foreach.writes(call):
            return None
    elif info.mutable_positions:
        if info.mutable_positions != [0] or info.returned != [(0, 0)] or info.hidden_writes:
            return None
        if not inputs or not kernel_rules.writes_its_first(call):
            return None
        value = inputs[0]
        outputs.append(OutputSpec(value.meta, 0, True, -1, value.storage.nbytes))
    else:
        made = kernel_rules.made(call)
        if made is None:
            return None
        fresh = 0
        for result in made:
            if result is None:
                outputs.append(None)
                continue
            meta = metadata.meta(result.shape, result.stride, 0, result.dtype, _CPU)
            outputs.append(OutputSpec(meta, None, False, fresh, max(meta.nbytes, result.nbytes)))
            fresh += 1
    container: Any = tuple if len(info.op._schema.returns) > 1 else None
    if info.name in foreach.MAKE:
        container = list
    return Inferred(info, container, outputs, [], True)


def _view(
    metadata: MetadataTable, op: OpOverload, info: OpInfo, args: Any, kwargs: Any, inputs: list[Any]
) -> Inferred | None:
    """A view is taken by its kernel, which needs no memory."""
    if len(inputs) != 1:
        return None
    (value,) = inputs
    meta = value.meta
    if meta.device != _CPU or meta.flags or value.storage.nbytes % meta.dtype.itemsize:
        return None
    kernel = torch.ops.aten.view.default if info.name == "_unsafe_view" else op
    with private_api.no_function_modes(), private_api.below_autograd(), private_api.excluding_python():
        elements = value.storage.nbytes // meta.dtype.itemsize
        tensor = torch.empty(elements, dtype=meta.dtype, device="meta")
        tensor = tensor.as_strided(meta.shape, meta.stride, meta.offset)
        tensors = {id(value): tensor}
        try:
            result = kernel(
                *kernel_probes.substitute(args, tensors), **kernel_probes.substitute(kwargs, tensors)
            )
        except Exception:
            return None  # PyTorch words it
        address = private_api.storage_address(tensor)
        several = isinstance(result, (list, tuple))
        outputs: list[Output] = []
        for item in result if several else [result]:
            if item is tensor or item.layout != torch.strided or private_api.storage_address(item) != address:
                return None
            found = metadata.meta_of(item, meta.device)
            if found.storage_nbytes > value.storage.nbytes:
                return None
            outputs.append(OutputSpec(found, 0, False, -1, value.storage.nbytes))
    container = (list if type(result) is list else tuple) if several else None
    return Inferred(info, container, outputs, [], True)
