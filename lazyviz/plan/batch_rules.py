"""Batch rules of the general operators: element by element, products, reductions, views, indexing."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from ..graph.ir import Value
from .batch_call import Call, Coupled, Outputs, align, labelled, rule, wrapped
from .placement import PARTIAL, Placement, Shard

# --- element by element -----------------------------------------------------------------

# Without PyTorch's tag "pointwise", though every element of the result is one of the arguments' own.
POINTWISE = frozenset(
    """_to_copy copy clone alias detach lift_fresh rsub floor_divide fill hardtanh_backward leaky_relu_backward
    elu_backward softplus_backward hardsigmoid_backward hardswish_backward mish_backward log_sigmoid_forward
    log_sigmoid_backward _prelu_kernel _prelu_kernel_backward polar complex bucketize
    _fake_quantize_learnable_per_tensor_affine fake_quantize_per_tensor_affine native_dropout_backward
    softshrink hardshrink softshrink_backward hardshrink_backward rrelu_with_noise_backward
    masked_fill _conj _neg_view real imag view_as_real view_as_complex resolve_conj resolve_neg""".split()
)


def pointwise(call: Call) -> Outputs | Placement | None:
    outputs = call.node.outputs
    ndim = len(outputs[0].shape)
    found = align(call, call.tensors, ndim)
    if found is not None and any(len(value.shape) != ndim for value in outputs):
        raise Coupled("its results differ in their dimensions")
    return found


@rule("view_as_real real imag view_as_complex")
def complex_views(call: Call) -> Outputs | Placement | None:
    return call.shard(call["self"])  # the added or removed dimension is the last


@rule("copy")
def copy(call: Call) -> Outputs | Placement | None:
    target = call["self"]
    found = align(call, (target, call["src"]), len(target.shape))
    if found is not None:
        call.take(target, found)
    return found


@rule("fill zero")
def fill(call: Call) -> Outputs | Placement | None:
    return call.shard(call["self"])


@rule(
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like "
    "uniform normal exponential random bernoulli cauchy log_normal geometric"
)
def like(call: Call) -> Outputs | Placement | None:
    """Its argument's shape; of its values nothing (``bernoulli`` apart)."""
    value = call["self"]
    probabilities = call["p"] if call.has("p") else None
    if isinstance(probabilities, Value):
        return align(call, (value, probabilities), len(value.shape))
    return call.shard(value)


# --- products --------------------------------------------------------------------------


@rule("mm")
def mm(call: Call) -> Placement | None:
    return labelled(call, [(call["self"], "ik"), (call["mat2"], "kj")], "ij")


@rule("bmm")
def bmm(call: Call) -> Placement | None:
    return labelled(call, [(call["self"], "bik"), (call["mat2"], "bkj")], "bij")


@rule("mv")
def mv(call: Call) -> Placement | None:
    return labelled(call, [(call["self"], "ik"), (call["vec"], "k")], "i")


@rule("dot vdot")
def dot(call: Call) -> Placement | None:
    return labelled(call, [(call["self"], "i"), (call["other" if call.has("other") else "tensor"], "i")], "")


@rule("linear")
def linear(call: Call) -> Placement | None:
    rows = "abcdefgh"[: len(call["input"].shape) - 1]
    weight = call["weight"]
    columns = "j" if len(weight.shape) == 2 else ""
    found = labelled(call, [(call["input"], rows + "k"), (weight, columns + "k")], rows + columns)
    return _with_summand(call, found, call["bias"])


@rule("addmm addbmm baddbmm addmv addr _addmm_activation")
def add_product(call: Call) -> Placement | None:
    names = [argument.name for argument in call.node.op._schema.arguments][:3]
    left, right = call[names[1]], call[names[2]]
    labels = {
        "mat1": ("ik", "kj", "ij"),
        "batch1": ("bik", "bkj", "bij" if len(call.node.outputs[0].shape) == 3 else "ij"),
        "mat": ("ik", "k", "i"),
        "vec1": ("i", "j", "ij"),
    }[names[1]]
    found = labelled(call, [(left, labels[0]), (right, labels[1])], labels[2])
    return _with_summand(call, found, call["self"])


def _with_summand(call: Call, product: Placement | None, summand: Any) -> Placement | None:
    """``product`` plus a tensor broadcast to its shape."""
    if not isinstance(summand, Value):
        return product
    ndim = len(call.node.outputs[0].shape)
    own = call.shard(summand)
    if isinstance(product, Shard):
        dim = product.dim - (ndim - len(summand.shape))
        if own is not None or (dim >= 0 and summand.shape[dim] != 1):
            call.take(summand, product.at(dim))
        return product
    if product is not None:
        raise Coupled("it adds a term to a sum over the batch")
    if own is not None:
        raise Coupled("it adds samples to a product of none")
    return None


@rule("_cdist_forward")
def cdist(call: Call) -> Placement | None:
    left, right = call["x1"], call["x2"]
    if len(left.shape) != len(right.shape):
        raise Coupled("it broadcasts the batch")
    rows = "abcdefgh"[: len(left.shape) - 2]
    return labelled(call, [(left, rows + "pm"), (right, rows + "rm")], rows + "pr", linear=False)


@rule("_trilinear")
def trilinear(call: Call) -> Placement | None:
    raise Coupled("it has no rule")


# --- reductions and what runs along dimensions -------------------------------------------

_SUMS = frozenset("sum nansum count_nonzero".split())


@rule(
    """sum nansum count_nonzero mean amax amin max min all any argmax argmin prod var std var_mean std_mean
    logsumexp linalg_vector_norm norm median nanmedian mode kthvalue aminmax"""
)
def reduction(call: Call) -> Outputs | Placement | None:
    value = call["self"]
    shard = call.shard(value)
    if any(call.shard(other) is not None for other in call.tensors if other is not value):
        raise Coupled("it has no rule for these arguments")
    if shard is None:
        return None
    ndim = len(value.shape)
    given = call["dim"] if call.has("dim") else None
    dims = wrapped(given if given != [] and given != () else None, ndim)
    keep = call.has("keepdim") and call["keepdim"]
    name = call.node.op._schema.name.rpartition("::")[2]
    if shard.dim not in dims:
        return shard if keep else shard.at(shard.dim - sum(dim < shard.dim for dim in dims))
    if name in _SUMS:
        return PARTIAL
    if name == "mean":
        call.scaled = (0,)
        return PARTIAL
    raise Coupled(f"{name} runs over the batch", [None])


@rule(
    """_softmax _log_softmax _safe_softmax softmax log_softmax cumsum cumprod logcumsumexp cummax cummin _cummax_helper _cummin_helper
    sort argsort topk glu flip roll unfold _fft_r2c _fft_c2c renorm cummaxmin_backward"""
)
def along(call: Call) -> Outputs | Placement | None:
    """Works along some dimensions and leaves the others in their places."""
    value = call["self"]
    shard = call.shard(value)
    if shard is None:
        return None
    name = "dim" if call.has("dim") else "dims" if call.has("dims") else "dimension"
    given = call[name]
    if shard.dim in wrapped(given if given != [] and given != () else None, len(value.shape)):
        short = call.node.op._schema.name.rpartition("::")[2].strip("_")
        raise Coupled(f"{short} runs along the batch", shard if short != "topk" else None)
    return shard


@rule("_fft_c2r")
def fft_to_real(call: Call) -> Outputs | Placement | None:
    return along(call)


@rule("_softmax_backward_data _log_softmax_backward_data glu_backward")
def along_backward(call: Call) -> Outputs | Placement | None:
    grad = call["grad_output"]
    found = align(call, call.tensors, len(grad.shape))
    if found is not None and found.dim in wrapped(call["dim"], len(grad.shape)):
        raise Coupled("it runs along the batch", found)
    return found


@rule("tril triu")
def triangle(call: Call) -> Outputs | Placement | None:
    return _leading(call, 2)


@rule(
    """linalg_inv_ex inverse linalg_cholesky_ex cholesky linalg_lu_factor_ex linalg_qr linalg_eigh _linalg_eigh
    _linalg_svd _linalg_det _linalg_slogdet matrix_exp linalg_matrix_exp"""
)
def matrices(call: Call) -> Outputs | Placement | None:
    return _leading(call, 2)


def _leading(call: Call, last: int) -> Shard | None:
    """Works on the ``last`` dimensions of each of its (first) argument's leading ones."""
    value = call.tensors[0]
    found = align(call, call.tensors, len(value.shape))
    if found is not None and found.dim >= len(value.shape) - last:
        raise Coupled("it combines samples", found)
    return found


# --- views ----------------------------------------------------------------------------


@rule("view _unsafe_view reshape _reshape_alias flatten")
def view(call: Call) -> Placement | None:
    value, result = call["self"], call.node.outputs[0]
    shard = call.shard(value)
    if shard is None:
        return None
    if call.node.op._overloadname == "dtype":
        if shard.dim == len(value.shape) - 1 and value.dtype.itemsize != result.dtype.itemsize:
            raise Coupled("it reads the batch as another type")
        return shard
    found = reshaped(value.shape, shard, result.shape, call.total)
    if found is None:
        raise Coupled("it takes the batch apart")
    call.local("size", found, result.shape)
    if call.has("stride"):
        call.sizes["stride"] = lambda samples: found.stride(result.meta, samples)
    return found


def reshaped(shape: Sequence[int], shard: Shard, target: Sequence[int], total: int) -> Shard | None:
    """Where the batch lies after ``view(target)``; ``None`` if in no one dimension.

    The batch's blocks (``group`` samples each) are ``inner`` entries apart; in the target they are in
    the dimension within which that distance falls.
    """
    blocks = total // shard.group
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
        # Only a block's last samples lie here: those before lie in the dimensions in front.
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
    return Shard(dim, outer, unit, group)


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
    # A piece of one sample must not lose the batch's dimension.
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
        raise Coupled("it takes some samples of the batch")
    part = size // shard.outer
    call.sizes["start"] = lambda samples: start // part * shard.size(samples) // shard.outer
    call.sizes["end"] = lambda samples: end // part * shard.size(samples) // shard.outer
    return found


def _bounds(start: int | None, end: int | None, size: int) -> tuple[int, int]:
    first, last, _ = slice(start, end).indices(size)
    return first, max(last, first)


def _whole_batches(shard: Shard, start: int, end: int, size: int) -> Shard | None:
    """Of ``outer`` batches one after another those from ``start`` to ``end``, if that is where some begin and end."""
    part = size // shard.outer
    if start % part or end % part or end <= start:
        return None
    return Shard(shard.dim, (end - start) // part, shard.unit, shard.group)


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
        found = Shard(dim, size // size_of_batch, shard.unit, shard.group)
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
        raise Coupled("it takes one sample of the batch", [None])
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
        raise Coupled("it takes the batch apart")
    batches = [output.shape[dim] // part for output in outputs]
    call.op = torch.ops.aten.split_with_sizes.default
    call.without = ("split_size", "chunks", "sections", "indices")
    call.sizes["split_sizes"] = lambda samples: [
        count * shard.size(samples) // shard.outer for count in batches
    ]
    call.sizes["dim"] = lambda samples: dim
    return [Shard(dim, count, shard.unit, shard.group) for count in batches]


@rule("as_strided")
def as_strided(call: Call) -> Placement | None:
    """Only other strides of dimensions of size 1, as of a pooled image in channels-last format."""
    value = call["self"]
    shard = call.shard(value)
    same = all(size == 1 or now == then for size, now, then in zip(value.shape, value.stride, call["stride"]))
    if shard is None:
        return None
    if tuple(call["size"]) != tuple(value.shape) or call["storage_offset"] or not same:
        raise Coupled("it views the batch's memory in its own way")
    call.local("size", shard, value.shape)
    return shard


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
        raise Coupled("it puts other rows beside the batch")
    if any((shard.dim, shard.unit, shard.group) != (dim, first.unit, first.group) for shard in shards):
        raise Coupled("the batch lies in different dimensions of its arguments")
    return Shard(dim, sum(shard.outer for shard in shards), first.unit, first.group)


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
    return Shard(dim, shard.outer * repeats[dim], shard.unit, shard.group)


@rule(
    "constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d"
)
def pad(call: Call) -> Placement | None:
    shard = call.shard(call["self"])
    padding = call["pad" if call.has("pad") else "padding"]
    if shard is not None:
        after = len(call["self"].shape) - 1 - shard.dim
        if any(padding[2 * after : 2 * after + 2]):
            raise Coupled("it pads the batch")
    return shard


@rule("reflection_pad1d_backward reflection_pad2d_backward replication_pad1d_backward replication_pad2d_backward")
def pad_backward(call: Call) -> Placement | None:
    return align(call, (call["grad_output"], call["self"]), len(call["self"].shape))


# --- indexing -------------------------------------------------------------------------


@rule("embedding")
def embedding(call: Call) -> Placement | None:
    if call.shard(call["weight"]) is not None:
        raise Coupled("the table that it looks up is made of the batch")
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
        raise Coupled("scale_grad_by_freq counts words of the whole batch")
    return PARTIAL


@rule("index_select")
def index_select(call: Call) -> Placement | None:
    value, index = call["self"], call["index"]
    dim = call["dim"] % max(len(value.shape), 1)
    shard, chosen = call.shard(value), call.shard(index)
    if chosen is not None:
        if shard is not None:
            raise Coupled("it chooses samples by index")
        return chosen.at(dim)
    if shard is not None and shard.dim == dim:
        raise Coupled("it chooses samples by index")
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
            raise Coupled("it chooses samples by index")
        return found  # of a whole table
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
        raise Coupled("it places samples by index")
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
        raise Coupled("it has no rule for an index of the batch")
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
        raise Coupled("it chooses by a mask")
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
            raise Coupled("it chooses by index for each sample of another dimension")
        before = sum(dim not in dims for dim in range(shard.dim))
        return shard.at(before + (width if front <= before else 0))
    if shard is not None:
        # logits[torch.arange(B), target]: each sample its own row.
        rows = dict(given)[shard.dim]
        if not counts_up(rows, call.total) or shard != Shard(shard.dim):
            raise Coupled("it chooses samples by index")
        place = width - len(rows.shape)
        call.heads[rows] = Shard(0)
        for dim, entry in given:
            if entry is not rows:
                at = place - (width - len(entry.shape))
                if at >= 0 and entry.shape[at] != 1:
                    call.take(entry, Shard(at))
        return Shard(front + place)
    found: Shard | None = None
    for _, entry in chosen:
        own = call.shard(entry)
        assert own is not None
        here = own.at(own.dim + width - len(entry.shape))
        if found is not None and found != here:
            raise Coupled("the batch lies in different dimensions of its indices")
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
    rows = next(((dim, entry) for dim, entry in given if counts_up(entry, call.total)), None)
    if before is None and rows is not None and target.shape[rows[0]] == call.total:
        call.take(target, Shard(rows[0]))
        before = Shard(rows[0])
    width = max(len(entry.shape) for _, entry in given)
    if before is not None:
        if rows is None or before != Shard(rows[0]):
            if any(dim == before.dim for dim, _ in given):
                raise Coupled("it places samples by index")
            found = _indexed(call, target, indices, len(source.shape))
        else:
            call.heads[rows[1]] = Shard(0)
            place = width - len(rows[1].shape)
            for _, entry in given:
                at = place - (width - len(entry.shape))
                if entry is not rows[1] and at >= 0 and entry.shape[at] != 1:
                    call.take(entry, Shard(at))
            front = given[0][0] if [dim for dim, _ in given] == list(range(given[0][0], given[0][0] + len(given))) else 0
            found = Shard(front + place)
        ndim = len(target.shape) - len(given) + width
        if isinstance(found, Shard):
            at = found.dim - (ndim - len(source.shape))
            if at >= 0 and source.shape[at] != 1:
                call.take(source, found.at(at))
        return before
    if not call["accumulate"]:
        raise Coupled("it places samples by index")
    # Rows of a table chosen for each sample: its gradient, a sum over the samples.
    dims = [dim for dim, _ in given]
    front = dims[0] if dims == list(range(dims[0], dims[0] + len(dims))) else 0
    missing = len(target.shape) - len(given) + width - len(source.shape)  # dimensions that source is broadcast in
    found = None
    for _, entry in given:
        if (shard := call.shard(entry)) is not None:
            found = shard.at(shard.dim + width - len(entry.shape))
    if found is None and own is not None and front <= own.dim + missing < front + width:
        found = own.at(own.dim + missing - front)
    if found is None:
        raise Coupled("it has no rule for these arguments")
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
            raise Coupled("it places samples by index")
        call.take(indices, found.at(0))
        call.take(source, found)
        call.onto = target
        return PARTIAL
    call.take(target, shards[0])
    call.take(source, shards[0])
    return shards[0]
