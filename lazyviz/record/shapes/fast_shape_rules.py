"""Fast shape rules: those for views and common kernels that avoid PyTorch's Python shape rules.

``find`` returns ``None`` if there is any doubt; then FakeTensor is used.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ...torch_internals import fake_cuda_devices, private_api
from ...torch_internals.private_api import OpOverload
from . import elementwise_and_factory_shapes, foreach, kernel_probes, scalar_operands
from .inferred_outputs import Inferred, Output, OutputSpec
from .interned_metadata import MetadataTable
from .operator_schema_properties import OpInfo
from .shape_rule_call import COMMON, Call, one_dtype

_CPU = torch.device("cpu")
_STAND_INS = fake_cuda_devices.STAND_INS
_LARGEST_INTEGER = 2**63 - 1  # ATen's sizes and strides are 64-bit integers

# Operators whose results' metadata ATen computes in C++ before it selects a device's kernel. Those of the
# second set have no kernel for integers, or not for all of them.
_OF_NUMBERS = {"add", "sub", "mul", "cat", "eq", "ne", "lt", "le", "gt", "ge", "isin"}
_OF_FLOATS = {"div", "neg", "mm", "addmm", "bmm", "silu", "gelu", "rsqrt", "sin", "cos", "pow", "mean"}
# PyTorch's rules in Python for these need no fake tensors.
_OF_ATTENTION = {f"_scaled_dot_product_{kernel}_attention" for kernel in ("flash", "efficient", "cudnn")}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def find(
    metadata: MetadataTable,
    op: OpOverload,
    info: OpInfo,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: list[Any],
) -> Inferred | None:
    """The op's results, if they are known here."""
    if op.namespace != "aten":
        return None
    if info.is_view or info.name == "_unsafe_view":
        return _view(metadata, op, info, args, kwargs, inputs)
    for value in inputs:
        if len(value.meta.shape) > kernel_probes.MOST_DIMENSIONS:
            return None
    if _STAND_INS and inputs and inputs[0].meta.device in _STAND_INS:
        return _on_card(metadata, op, info, args, kwargs, inputs)
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
        if not inputs or not elementwise_and_factory_shapes.writes_its_first(call):
            return None
        value = inputs[0]
        outputs.append(OutputSpec(value.meta, 0, True, -1, value.storage.nbytes))
    else:
        results = _new(metadata, call)
        if results is None:
            return None
        outputs = results
    container: Any = tuple if len(info.op._schema.returns) > 1 else None
    if info.name in foreach.MAKE:
        container = list
    return Inferred(info, container, outputs, [], True)


def _new(metadata: MetadataTable, call: Call) -> list[Output] | None:
    """The results of a call that writes nothing."""
    made = elementwise_and_factory_shapes.made(call)
    if made is None:
        return None
    outputs: list[Output] = []
    fresh = 0
    for result in made:
        if result is None:
            outputs.append(None)
            continue
        meta = metadata.meta(result.shape, result.stride, 0, result.dtype, _CPU)
        if max((meta.storage_nbytes, *meta.stride)) > _LARGEST_INTEGER:
            return None  # PyTorch raises the error
        outputs.append(OutputSpec(meta, None, False, fresh, max(meta.nbytes, result.nbytes)))
        fresh += 1
    return outputs


def _view(
    metadata: MetadataTable, op: OpOverload, info: OpInfo, args: Any, kwargs: Any, inputs: list[Any]
) -> Inferred | None:
    """A view is created by its kernel, which needs no memory."""
    if len(inputs) != 1:
        return None
    (value,) = inputs
    meta = value.meta
    if meta.device != _CPU and meta.device not in _STAND_INS:
        return None
    if meta.flags or value.storage.nbytes % meta.dtype.itemsize:
        return None
    if info.name == "as_strided" and any(step < 0 for step in kernel_probes.requested_strides(args, kwargs)):
        return None
    kernel = torch.ops.aten.view.default if info.name == "_unsafe_view" else op
    with private_api.no_function_modes(), private_api.below_autograd(), private_api.excluding_python():
        elements = value.storage.nbytes // meta.dtype.itemsize
        tensor = torch.empty(elements, dtype=meta.dtype, device="meta")
        tensor = tensor.as_strided(meta.shape, meta.stride, meta.offset)
        tensors = {id(value): tensor}
        ask = partial(
            kernel, *kernel_probes.substitute(args, tensors), **kernel_probes.substitute(kwargs, tensors)
        )
        try:
            result = ask()
        except Exception as error:
            kernel_probes.must_come_again(error, ask)
            return None  # PyTorch raises the error
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
    return Inferred(info, container, outputs, [], meta.device == _CPU)


def _on_card(
    metadata: MetadataTable, op: OpOverload, info: OpInfo, args: Any, kwargs: Any, inputs: list[Any]
) -> Inferred | None:
    """The results of an op on a planned GPU if they do not depend on the device: those of the meta kernel.

    The meta kernels are called directly. Most are in C++; PyTorch's Python registrations for them, and fake
    tensors, would take most of the time.
    """
    device = inputs[0].meta.device
    if info.mutable_positions or any(value.meta.device != device or value.meta.flags for value in inputs):
        return None
    if info.name == "clone":
        made = elementwise_and_factory_shapes.like(
            Call(op, info.name, dict(zip(info.argument_names, args)) | kwargs, inputs)
        )
        if not made or made[0] is None:
            return None
        meta = metadata.meta(made[0].shape, made[0].stride, 0, made[0].dtype, device)
        return Inferred(info, None, [OutputSpec(meta, None, False, 0, meta.nbytes)], [], False)
    if info.name in _OF_FLOATS or info.name in _OF_ATTENTION:
        if one_dtype([value.meta for value in inputs], _FLOATS) is None:
            return None
    elif info.name not in _OF_NUMBERS or any(value.meta.dtype not in COMMON for value in inputs):
        return None
    with private_api.no_function_modes(), private_api.below_autograd(), private_api.excluding_python():
        tensors: dict[int, torch.Tensor] = {}
        for value in inputs:
            meta = value.meta
            tensors[id(value)] = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
        ask = partial(
            op, *kernel_probes.substitute(args, tensors), **kernel_probes.substitute(kwargs, tensors)
        )
        try:
            result = ask()
        except Exception as error:
            kernel_probes.must_come_again(error, ask)
            return None  # PyTorch raises the error
    results = result if info.name in _OF_ATTENTION else (result,)
    outputs: list[Output] = []
    fresh = 0
    for item in results:
        if item is None or type(item) is int:
            outputs.append(item)
            continue
        if type(item) is not torch.Tensor or item.layout != torch.strided:
            return None
        found = metadata.meta_of(item, device)
        outputs.append(OutputSpec(found, None, False, fresh, found.nbytes))
        fresh += 1
    return Inferred(info, tuple if results is result else None, outputs, [], False)
