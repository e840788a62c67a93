"""Batch rules for views and rearrangements: reshaping, slicing, concatenation, padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch

from ...graph.ir import TensorMeta
from ..workspace.workspace_rule import contiguous
from .batch_placement import Placement, Shard
from .batch_rule import FACTORIES, Call, Coupled, Outputs, align, base_name, rule, wrapped


@rule("view _unsafe_view reshape _reshape_alias flatten")
def view(call: Call) -> Placement | None:
    value, result = call["self"], call.node.outputs[0]
    shard = call.shard(value)
    if shard is None:
        return None
    if call.node.op._overloadname == "dtype":
        if shard.dim == len(value.shape) - 1 and value.dtype.itemsize != result.dtype.itemsize:
            raise Coupled("it reinterprets the batch as another dtype")
        return shard
    found = reshaped(value.shape, shard, result.shape, call.total)
    if found is None:
        raise Coupled("it splits the batch dimension")
    call.local("size", found, result.shape)
    if call.has("stride"):
        call.sizes["stride"] = lambda samples: found.stride(result.meta, samples)
    return found


def reshaped(shape: Sequence[int], shard: Shard, target: Sequence[int], total: int) -> Shard | None:
    """The batch dimension after ``view(target)``; ``None`` if it is not in a single dimension.

    The batch's blocks (``group`` samples each) are ``inner`` entries apart; in the target, they are in the
    dimension that contains that distance.
    """
    if 0 in shape:
        return None
    blocks = shard.samples(total) // shard.group
    inner = shard.unit * prod(shape[shard.dim + 1 :])
    group = shard.group
    after = 1
    for dim in range(len(target) - 1, -1, -1):
        size = target[dim]
        if size != 1 and inner < after * size:
            break
        after *= size
    else:
        return None
    if inner % after:
        return None
    unit = inner // after
    if size % unit:
        return None
    length = size // unit
    if length % blocks:
        # Only the last samples of a block are in this dimension; the others are in the dimensions before it.
        if blocks % length:
            return None
        after, group, blocks, unit = after * size, group * length, blocks // length, 1
        dim -= 1
        while dim >= 0 and target[dim] == 1:
            dim -= 1
        if dim < 0 or target[dim] % blocks:
            return None
        length = target[dim]
    outer = length // blocks
    if group > 1 and unit % group == 0:
        unit, group = unit // group, 1
    if group > 1 and shard.part is not None:
        return None  # parts of another batch need not be multiples of it
    return Shard(dim, outer, unit, group, shard.part)


@rule("t")
def transpose_matrix(call: Call) -> Placement | None:
    shard = call.shard(call["self"])
    return shard.at(len(call["self"].shape) - 1 - shard.dim) if shard is not None else None


@rule("transpose swapaxes")
def transpose(call: Call) -> Placement | None:
    shard = call.shard(call["self"])
    if shard is None:
        return None
    first, second = wrapped((call["dim0"], call["dim1"]), len(call["self"].shape))
    return shard.at({first: second, second: first}.get(shard.dim, shard.dim))


@rule("permute")
def permute(call: Call) -> Placement | None:
    shard = call.shard(call["self"])
    dims = wrapped(call["dims"], len(call["self"].shape))
    return shard.at(dims.index(shard.dim)) if shard is not None else None


@rule("unsqueeze")
def unsqueeze(call: Call) -> Placement | None:
    shard = call.shard(call["self"])
    if shard is None:
        return None
    dim = call["dim"] % (len(call["self"].shape) + 1)
    return shard.at(shard.dim + (dim <= shard.dim))


@rule("squeeze")
def squeeze(call: Call) -> Placement | None:
    value = call["self"]
    shard = call.shard(value)
    if shard is None:
        return None
    gone = [
        dim
        for dim in wrapped(call["dim"] if call.has("dim") else None, len(value.shape))
        if value.shape[dim] == 1
    ]
    # A piece of one sample must keep the batch dimension.
    call.op = torch.ops.aten.squeeze_.dims if call.node.writes else torch.ops.aten.squeeze.dims
    call.sizes["dim"] = lambda samples: gone
    return shard.at(shard.dim - sum(dim < shard.dim for dim in gone))


@rule("expand broadcast_to")
def expand(call: Call) -> Placement | None:
    value, result = call["self"], call.node.outputs[0]
    shard = call.shard(value)
    if shard is None:
        return None
    found = shard.at(shard.dim + len(result.shape) - len(value.shape))
    call.local("size", found, result.shape)
    return found


@rule("slice")
def slice_(call: Call) -> Placement | None:
    value = call["self"]
    shard = call.shard(value)
    if shard is None:
        return None
    dim = call["dim"] % len(value.shape)
    if dim != shard.dim:
        return shard
    size, step = value.shape[dim], call["step"]
    start, end = _bounds(call["start"], call["end"], size)
    found = _whole_batches(shard, start, end, size) if step == 1 else None
    if found is None:
        raise Coupled("it selects some samples of the batch")
    part = size // shard.outer
    call.sizes["start"] = lambda samples: start // part * shard.size(samples) // shard.outer
    call.sizes["end"] = lambda samples: end // part * shard.size(samples) // shard.outer
    return found


def _bounds(start: int | None, end: int | None, size: int) -> tuple[int, int]:
    first, last, _ = slice(start, end).indices(size)
    return first, max(last, first)


def _whole_batches(shard: Shard, start: int, end: int, size: int) -> Shard | None:
    """The batches from ``start`` to ``end`` of ``outer`` consecutive ones; ``None`` if that cuts one."""
    part = size // shard.outer
    if start % part or end % part or end <= start:
        return None
    return replace(shard, outer=(end - start) // part)


@rule("slice_backward")
def slice_backward(call: Call) -> Placement | None:
    grad, sizes = call["grad_output"], call["input_sizes"]
    shard = call.shard(grad)
    if shard is None:
        return None
    dim = call["dim"] % len(sizes)
    found = shard
    if dim == shard.dim:
        size = sizes[dim]
        start, end = _bounds(call["start"], call["end"], size)
        part = size_of_batch = grad.shape[dim] // shard.outer
        if call["step"] != 1 or start % part or end % part or size % part:
            raise Coupled("it is the gradient of some samples of the batch")
        found = replace(shard, outer=size // size_of_batch)
        call.sizes["start"] = lambda samples: start // part * shard.size(samples) // shard.outer
        call.sizes["end"] = lambda samples: end // part * shard.size(samples) // shard.outer
    call.local("input_sizes", found, sizes)
    return found


@rule("select")
def select(call: Call) -> Placement | None:
    value = call["self"]
    shard = call.shard(value)
    if shard is None:
        return None
    dim = call["dim"] % len(value.shape)
    if dim == shard.dim:
        raise Coupled("it selects one sample of the batch", [None])
    return shard.at(shard.dim - (dim < shard.dim))


@rule("select_backward")
def select_backward(call: Call) -> Placement | None:
    sizes = call["input_sizes"]
    shard = call.shard(call["grad_output"])
    if shard is None:
        return None
    found = shard.at(shard.dim + (call["dim"] % len(sizes) <= shard.dim))
    call.local("input_sizes", found, sizes)
    return found


@rule("split split_with_sizes chunk unsafe_split unsafe_split_with_sizes unsafe_chunk tensor_split unbind")
def split(call: Call) -> Outputs | None:
    value = call["self"]
    shard = call.shard(value)
    if shard is None:
        return None
    dim = call["dim"] % len(value.shape)
    outputs = call.node.outputs
    gone = len(outputs[0].shape) < len(value.shape)
    if dim != shard.dim:
        return [shard.at(shard.dim - (gone and dim < shard.dim))] * len(outputs)
    part = value.shape[dim] // shard.outer
    if gone or any(output.shape[dim] % part for output in outputs):
        raise Coupled("it splits the batch dimension")
    batches = [output.shape[dim] // part for output in outputs]
    call.op = torch.ops.aten.split_with_sizes.default
    call.sizes["split_sizes"] = lambda samples: [
        count * shard.size(samples) // shard.outer for count in batches
    ]
    call.sizes["dim"] = lambda samples: dim
    return [replace(shard, outer=count) for count in batches]


@rule("as_strided")
def as_strided(call: Call) -> Placement | None:
    value = call["self"]
    shard = call.shard(value)
    if shard is None:
        return None
    size, stride, offset = tuple(call["size"]), tuple(call["stride"]), call["storage_offset"] or 0
    alike = size == tuple(value.shape) and all(
        length == 1 or now == then for length, now, then in zip(size, value.stride, stride)
    )
    if alike and not offset and not value.meta.offset:  # only strides of dimensions of size 1 differ
        call.local("size", shard, size)
        return shard
    if _covers(value.meta, size, stride, offset):  # a reshape, as of gradients of a view written in place
        found = reshaped(value.shape, shard, size, call.total)
        if found is not None:
            call.op = torch.ops.aten.view.default
            call.local("size", found, size)
            return found
    # A part of each sample of a tensor that the block created, as in the gradient of `x[:, 1:3] = y`.
    made = value.node is not None and base_name(value.node.op) in FACTORIES
    step = value.stride[shard.dim] * shard.unit
    rest = offset + sum((length - 1) * by for length, by in zip(size, stride) if by < step)
    where = [dim for dim, by in enumerate(stride) if by == step and size[dim] == shard.samples(call.total)]
    if not made or value.meta.offset or shard.outer > 1 or shard.group > 1 or len(where) != 1 or rest >= step:
        raise Coupled("it views the memory of the batch with its own strides")
    if step != max(value.stride) * shard.unit or max(stride) != step:
        raise Coupled("it views the memory of the batch with its own strides")
    found = Shard(where[0], part=shard.part)
    call.local("size", found, size)
    return found


def _covers(meta: TensorMeta, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> bool:
    """Whether these sizes and strides view all elements of a contiguous tensor in their order."""
    if offset or meta.offset or prod(size) != prod(meta.shape):
        return False
    return contiguous(meta) and contiguous(TensorMeta(size, stride, 0, meta.dtype, meta.device))


@rule("diagonal")
def diagonal(call: Call) -> Placement | None:
    value = call["self"]
    shard = call.shard(value)
    if shard is None:
        return None
    dims = wrapped((call["dim1"], call["dim2"]), len(value.shape))
    if shard.dim in dims:
        raise Coupled("it pairs samples with positions")
    return shard.at(shard.dim - sum(dim < shard.dim for dim in dims))


@rule("cat concat")
def cat(call: Call) -> Placement | None:
    values = [value for value in call["tensors"] if value.meta.nbytes or len(value.shape) != 1]
    result = call.node.outputs[0]
    dim = call["dim"] % len(result.shape)
    shards = [shard for value in values if (shard := call.shard(value)) is not None]
    if not shards:
        return None
    first = shards[0]
    if first.dim != dim:
        for value in values:
            call.take(value, first)
        return first
    if len(shards) != len(values):
        raise Coupled("it concatenates other rows to the batch")
    if any(replace(shard, outer=1) != replace(first, outer=1) for shard in shards):
        raise Coupled("the batch is in different dimensions of its arguments")
    return replace(first, outer=sum(shard.outer for shard in shards))


@rule("stack")
def stack(call: Call) -> Placement | None:
    found = align(call, call["tensors"], len(call["tensors"][0].shape))
    if found is None:
        return None
    return found.at(found.dim + (call["dim"] % len(call.node.outputs[0].shape) <= found.dim))


@rule("repeat tile")
def repeat(call: Call) -> Placement | None:
    value = call["self"]
    shard = call.shard(value)
    if shard is None:
        return None
    repeats = call["repeats" if call.has("repeats") else "dims"]
    dim = shard.dim + len(repeats) - len(value.shape)
    return replace(shard, dim=dim, outer=shard.outer * repeats[dim])


@rule(
    """constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d
    replication_pad2d replication_pad3d"""
)
def pad(call: Call) -> Placement | None:
    shard = call.shard(call["self"])
    padding = call["pad" if call.has("pad") else "padding"]
    if shard is not None:
        after = len(call["self"].shape) - 1 - shard.dim
        if any(padding[2 * after : 2 * after + 2]):
            raise Coupled("it pads the batch")
    return shard


@rule(
    """reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
    replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward"""
)
def pad_backward(call: Call) -> Placement | None:
    return align(call, (call["grad_output"], call["self"]), len(call["self"].shape))
