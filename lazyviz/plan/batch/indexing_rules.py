"""Batch rules for indexing: embedding, gather and scatter, ``x[index]``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ...graph.ir import Value
from .batch_placement import LOCAL, PARTIAL, Placement, Shard
from .batch_rule import Call, Coupled, rule


@rule("embedding")
def embedding(call: Call) -> Placement | None:
    if call.shard(call["weight"]) is not None:
        raise Coupled("the table that it looks up depends on the batch")
    return call.shard(call["indices"])


@rule("embedding_dense_backward")
def embedding_backward(call: Call) -> Placement | None:
    indices = call["indices"]
    found = call.shard(indices)
    shard = found or call.shard(call["grad_output"])
    if shard is None:
        return None
    call.take(indices, shard)
    call.take(call["grad_output"], shard)
    if call["scale_grad_by_freq"]:
        raise Coupled("scale_grad_by_freq counts indices over the whole batch")
    return PARTIAL


@rule("_embedding_bag _embedding_bag_forward_only")
def embedding_bag(call: Call) -> Sequence[Placement | None] | None:
    if call.shard(call["weight"]) is not None:
        raise Coupled("the table that it looks up depends on the batch")
    found = _of_bags(call, call["indices"], call["per_sample_weights"])
    if found is None:
        return None
    bags = _bags(call, found)
    # To which of a piece's bags an index belongs is nothing for the whole batch.
    return [bags, LOCAL, bags, bags]


@rule("_embedding_bag_backward")
def embedding_bag_backward(call: Call) -> Placement | None:
    found = _of_bags(call, call["indices"], call["per_sample_weights"])
    if found is None:
        return None
    bags = _bags(call, found)
    for name in ("grad", "bag_size", "maximum_indices"):
        call.take(call[name], bags)
    if call["sparse"]:
        raise Coupled("lazyviz has no rule for its sparse gradient")
    if call["scale_grad_by_freq"]:
        raise Coupled("scale_grad_by_freq counts indices over the whole batch")
    return PARTIAL


@rule("_embedding_bag_per_sample_weights_backward")
def embedding_bag_weights_backward(call: Call) -> Placement | None:
    found = _of_bags(call, call["indices"])
    if found is not None:
        call.take(call["grad"], _bags(call, found))
    return found


def _of_bags(call: Call, indices: Value, weights: Any = None) -> Shard | None:
    """The placement of the samples' own indices; each has a weight, if any are given."""
    given = [each for each in (indices, weights) if isinstance(each, Value)]
    found = next((shard for each in given if (shard := call.shard(each)) is not None), None)
    if found is None:
        if call.shard(call["offsets"]) is not None:
            raise Coupled("its offsets are positions in the indices of the whole batch")
        return None
    for each in given:
        call.take(each, found)
    return found


def _bags(call: Call, found: Shard) -> Shard:
    """The placement of the bags.  All have the same number of indices, as those of a two-dimensional input,
    so that the offsets of a piece are the first of the batch.
    """
    offsets = call["offsets"]
    if call.shard(offsets) is not None:
        raise Coupled("its offsets are positions in the indices of the whole batch")
    width = _width(offsets)
    if not width or found.dim or found.outer != 1 or found.unit % width:
        raise Coupled("its bags are not known to be of equal size, and of one sample each")
    bags = replace(found, unit=found.unit // width)
    call.heads[offsets] = bags
    return bags


def _width(offsets: Value) -> int:
    """The step of offsets that are ``arange(0, end, step)``; 0 if they are something else."""
    node = offsets.node
    if node is None or node.op is not torch.ops.aten.arange.start_step:
        return 0
    start, end, step = node.args[:3]
    counts = all(type(each) is int for each in (start, end, step)) and start == 0 < step
    return step if counts and offsets.shape[0] * step == end else 0


@rule("index_select")
def index_select(call: Call) -> Placement | None:
    value, index = call["self"], call["index"]
    dim = call["dim"] % max(len(value.shape), 1)
    shard, chosen = call.shard(value), call.shard(index)
    if chosen is not None:
        if shard is not None:
            raise Coupled("it selects samples by index")
        return chosen.at(dim)
    if shard is not None and shard.dim == dim:
        raise Coupled("it selects samples by index")
    return shard


@rule("gather")
def gather(call: Call) -> Placement | None:
    value, index = call["self"], call["index"]
    dim = call["dim"] % max(len(value.shape), 1)
    shard = call.shard(value)
    found = call.shard(index) or shard
    if found is None:
        return None
    if found.dim == dim:
        if shard is not None:
            raise Coupled("it selects samples by index")
        return found  # indices into a whole table
    call.take(index, found)
    call.take(value, found)
    return found


@rule("scatter scatter_add scatter_reduce")
def scatter(call: Call) -> Placement | None:
    target, index = call["self"], call["index"]
    source = call["src"] if call.has("src") else None
    dim = call["dim"] % max(len(target.shape), 1)
    shards = [shard for value in (target, index, source) if (shard := call.shard(value)) is not None]
    if not shards:
        return None
    found = shards[0]
    if found.dim == dim:
        if call.shard(target) is None and "add" in call.node.op._schema.name:
            call.take(index, found)
            call.take(source, found)
            call.onto = target
            return PARTIAL
        raise Coupled("it writes samples at indices")
    for value in (target, index, source):
        call.take(value, found)
    return found


@rule("gather_backward")
def gather_backward(call: Call) -> Placement | None:
    grad, index, value = call["grad"], call["index"], call["self"]
    dim = call["dim"] % max(len(value.shape), 1)
    found = call.shard(grad) or call.shard(index)
    if found is None:
        return None
    if found.dim == dim:
        raise Coupled("lazyviz has no rule for an index that depends on the batch")
    for each in (grad, index, value):
        call.take(each, found)
    return found


@rule("index _unsafe_index")
def index(call: Call) -> Placement | None:
    value, indices = call["self"], call["indices"]
    result = call.node.outputs[0]
    return _indexed(call, value, indices, len(result.shape))


def _indexed(call: Call, value: Value, indices: Sequence[Any], ndim: int) -> Placement | None:
    """The placement of ``value[indices]``, of ``ndim`` dimensions."""
    given = [(dim, entry) for dim, entry in enumerate(indices) if entry is not None]
    if any(entry.dtype in (torch.bool, torch.uint8) for _, entry in given):
        raise Coupled("it selects by a mask")
    shard = call.shard(value)
    chosen = [(dim, entry) for dim, entry in given if call.shard(entry) is not None]
    if shard is None and not chosen:
        return None
    width = max(len(entry.shape) for _, entry in given)
    dims = [dim for dim, _ in given]
    adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
    front = dims[0] if adjacent else 0
    if shard is not None and shard.dim not in dims:
        if chosen:
            raise Coupled("it selects by an index per sample along another dimension")
        before = sum(dim not in dims for dim in range(shard.dim))
        return shard.at(before + (width if front <= before else 0))
    if shard is not None:
        # logits[torch.arange(B), target]: each sample selects its own row.
        rows = dict(given)[shard.dim]
        if not counts_up(rows, shard.samples(call.total)) or shard != call.batch_at(shard.dim):
            raise Coupled("it selects samples by index")
        place = width - len(rows.shape)
        call.heads[rows] = call.batch_at(0)
        for _, entry in given:
            if entry is not rows:
                at = place - (width - len(entry.shape))
                if at >= 0 and entry.shape[at] != 1:
                    call.take(entry, call.batch_at(at))
        return call.batch_at(front + place)
    found: Shard | None = None
    for _, entry in chosen:
        own = call.shard(entry)
        assert own is not None
        here = own.at(own.dim + width - len(entry.shape))
        if found is not None and found != here:
            raise Coupled("the batch is in different dimensions of its indices")
        found = here
    assert found is not None
    for _, entry in given:
        at = found.dim - (width - len(entry.shape))
        if at >= 0 and entry.shape[at] != 1:
            call.take(entry, found.at(at))
    return found.at(found.dim + front)


def counts_up(value: Value, total: int) -> bool:
    """Whether ``value`` is ``torch.arange(total)``."""
    node = value.node
    while node is not None and node.op in (torch.ops.aten._to_copy.default, torch.ops.aten.alias.default):
        node = node.inputs[0].node
    if node is None or len(value.shape) != 1 or value.shape[0] != total:
        return False
    if node.op is torch.ops.aten.arange.default:
        return bool(node.args[0] == total)
    if node.op is torch.ops.aten.arange.start:
        return tuple(node.args[:2]) == (0, total)
    return node.op is torch.ops.aten.arange.start_step and tuple(node.args[:3]) in ((0, total), (0, total, 1))


@rule("index_put _index_put_impl _unsafe_index_put")
def index_put(call: Call) -> Placement | None:
    target, indices, source = call["self"], call["indices"], call["values"]
    before = call.shard(target)
    chosen = [entry for entry in indices if call.shard(entry) is not None]
    own = call.shard(source)
    if before is None and not chosen and own is None:
        return None
    given = [(dim, entry) for dim, entry in enumerate(indices) if entry is not None]
    samples = call.batch_at(0).size(call.total)
    rows = next(((dim, entry) for dim, entry in given if counts_up(entry, samples)), None)
    if before is None and rows is not None and target.shape[rows[0]] == samples:
        call.take(target, call.batch_at(rows[0]))
        before = call.batch_at(rows[0])
    width = max(len(entry.shape) for _, entry in given)
    if before is not None:
        if rows is None or before != call.batch_at(rows[0]):
            if any(dim == before.dim for dim, _ in given):
                raise Coupled("it writes samples at indices")
            found = _indexed(call, target, indices, len(source.shape))
        else:
            call.heads[rows[1]] = call.batch_at(0)
            place = width - len(rows[1].shape)
            for _, entry in given:
                at = place - (width - len(entry.shape))
                if entry is not rows[1] and at >= 0 and entry.shape[at] != 1:
                    call.take(entry, call.batch_at(at))
            front = (
                given[0][0]
                if [dim for dim, _ in given] == list(range(given[0][0], given[0][0] + len(given)))
                else 0
            )
            found = call.batch_at(front + place)
        ndim = len(target.shape) - len(given) + width
        if isinstance(found, Shard):
            at = found.dim - (ndim - len(source.shape))
            if at >= 0 and source.shape[at] != 1:
                call.take(source, found.at(at))
        return before
    if not call["accumulate"]:
        raise Coupled("it writes samples at indices")
    return _sum_of_rows(call, given, width, own)


def _sum_of_rows(call: Call, given: Sequence[tuple[int, Any]], width: int, own: Shard | None) -> Placement:
    """Rows of a table were selected for each sample: its gradient is a sum over the samples."""
    target, source = call["self"], call["values"]
    dims = [dim for dim, _ in given]
    front = dims[0] if dims == list(range(dims[0], dims[0] + len(dims))) else 0
    missing = (
        len(target.shape) - len(given) + width - len(source.shape)
    )  # dimensions to which the source is broadcast
    found: Shard | None = None
    for _, entry in given:
        if (shard := call.shard(entry)) is not None:
            found = shard.at(shard.dim + width - len(entry.shape))
    if found is None and own is not None and front <= own.dim + missing < front + width:
        found = own.at(own.dim + missing - front)
    if found is None:
        raise Coupled("lazyviz has no rule for these arguments")
    for _, entry in given:
        at = found.dim - (width - len(entry.shape))
        if at >= 0 and entry.shape[at] != 1:
            call.take(entry, found.at(at))
    at = found.dim + front - missing
    if at >= 0 and source.shape[at] != 1:
        call.take(source, found.at(at))
    call.onto = target
    return PARTIAL


@rule("index_add")
def index_add(call: Call) -> Placement | None:
    target, indices, source = call["self"], call["index"], call["source"]
    dim = call["dim"] % len(target.shape)
    shards = [shard for value in (target, source) if (shard := call.shard(value)) is not None]
    chosen = call.shard(indices)
    if chosen is None and not shards:
        return None
    if chosen is not None or (shards and shards[0].dim == dim):
        found = chosen.at(dim) if chosen is not None else shards[0]
        if call.shard(target) is not None:
            raise Coupled("it writes samples at indices")
        call.take(indices, found.at(0))
        call.take(source, found)
        call.onto = target
        return PARTIAL
    call.take(target, shards[0])
    call.take(source, shards[0])
    return shards[0]
