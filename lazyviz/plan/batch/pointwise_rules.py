"""Batch rules for general operators: pointwise, matrix products, reductions, views, indexing."""

from __future__ import annotations

from typing import Any

from ...graph.ir import Value
from .batch_placement import PARTIAL, Partial, Placement, Shard
from .batch_rule import Call, Coupled, Outputs, align, labeled, named, rule, wrapped

# --- element by element -----------------------------------------------------------------

# Operators without PyTorch's tag "pointwise", whose result elements each depend on one element of the
# arguments.
POINTWISE = named(
    """_to_copy copy clone alias detach lift_fresh rsub floor_divide fill hardtanh_backward
    leaky_relu_backward elu_backward softplus_backward hardsigmoid_backward hardswish_backward
    hardswish mish_backward log_sigmoid_backward _prelu_kernel _prelu_kernel_backward polar
    complex _fake_quantize_learnable_per_tensor_affine fake_quantize_per_tensor_affine
    native_dropout_backward softshrink hardshrink softshrink_backward hardshrink_backward
    rrelu_with_noise_backward masked_fill _conj _neg_view real imag view_as_real view_as_complex
    resolve_conj resolve_neg"""
)


def pointwise(call: Call) -> Outputs | Placement | None:
    outputs = call.node.outputs
    ndim = len(outputs[0].shape)
    found = align(call, call.tensors, ndim)
    if found is not None and any(len(value.shape) != ndim for value in outputs):
        raise Coupled("its results have different numbers of dimensions")
    return found


@rule("log_sigmoid_forward")
def log_sigmoid(call: Call) -> Outputs | None:
    """Its second result, which only the CPU's backward pass reads, is empty on a GPU."""
    found = call.shard(call["self"])
    return [found, found if call.node.outputs[1].meta.nbytes else None]


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
    """It depends on its argument's shape, but not on its values (except ``bernoulli``)."""
    value = call["self"]
    probabilities = call["p"] if call.has("p") else None
    if isinstance(probabilities, Value):
        return align(call, (value, probabilities), len(value.shape))
    return call.shard(value)


# --- products --------------------------------------------------------------------------


@rule("mm")
def mm(call: Call) -> Placement | None:
    return labeled(call, [(call["self"], "ik"), (call["mat2"], "kj")], "ij")


@rule("bmm")
def bmm(call: Call) -> Placement | None:
    return labeled(call, [(call["self"], "bik"), (call["mat2"], "bkj")], "bij")


@rule("mv")
def mv(call: Call) -> Placement | None:
    return labeled(call, [(call["self"], "ik"), (call["vec"], "k")], "i")


@rule("dot vdot")
def dot(call: Call) -> Placement | None:
    return labeled(call, [(call["self"], "i"), (call["other" if call.has("other") else "tensor"], "i")], "")


@rule("linear")
def linear(call: Call) -> Placement | None:
    rows = "abcdefgh"[: len(call["input"].shape) - 1]
    weight = call["weight"]
    columns = "j" if len(weight.shape) == 2 else ""
    found = labeled(call, [(call["input"], rows + "k"), (weight, columns + "k")], rows + columns)
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
    found = labeled(call, [(left, labels[0]), (right, labels[1])], labels[2])
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
        raise Coupled("it adds the batch to a matrix product without the batch")
    return None


@rule("_cdist_forward")
def cdist(call: Call) -> Placement | None:
    left, right = call["x1"], call["x2"]
    if len(left.shape) != len(right.shape):
        raise Coupled("it broadcasts the batch")
    rows = "abcdefgh"[: len(left.shape) - 2]
    return labeled(call, [(left, rows + "pm"), (right, rows + "rm")], rows + "pr", linear=False)


# --- reductions and what runs along dimensions -------------------------------------------

_SUMS = frozenset(["sum", "nansum", "count_nonzero"])


@rule(
    """sum nansum count_nonzero mean amax amin max min all any argmax argmin prod var std var_mean std_mean
    logsumexp linalg_vector_norm norm median nanmedian mode kthvalue aminmax"""
)
def reduction(call: Call) -> Outputs | Placement | None:
    value = call["self"]
    shard = call.shard(value)
    if any(call.shard(other) is not None for other in call.tensors if other is not value):
        raise Coupled("lazyviz has no rule for these arguments")
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
    if name in ("any", "all"):
        return Partial(how=name)
    raise Coupled(f"{name} reduces over the batch", [None])


@rule(
    """_softmax _log_softmax _safe_softmax softmax log_softmax cumsum cumprod logcumsumexp cummax cummin
    _cummax_helper _cummin_helper sort argsort topk glu flip roll unfold _fft_r2c _fft_c2c _fft_c2r"""
)
def along(call: Call) -> Outputs | Placement | None:
    """Operates along some dimensions, and leaves the others in place."""
    value = call["self"]
    shard = call.shard(value)
    if shard is None:
        return None
    name = "dim" if call.has("dim") else "dims" if call.has("dims") else "dimension"
    given = call[name]
    if shard.dim in wrapped(given if given != [] and given != () else None, len(value.shape)):
        short = call.node.op._schema.name.rpartition("::")[2].strip("_")
        raise Coupled(f"{short} computes along the batch", shard if short != "topk" else None)
    return shard


@rule("_softmax_backward_data _log_softmax_backward_data glu_backward")
def along_backward(call: Call) -> Outputs | Placement | None:
    grad = call["grad_output"]
    found = align(call, call.tensors, len(grad.shape))
    if found is not None and found.dim in wrapped(call["dim"], len(grad.shape)):
        raise Coupled("it computes along the batch", found)
    return found


@rule("bucketize searchsorted")
def buckets(call: Call) -> Placement | None:
    bounds = call["boundaries" if call.has("boundaries") else "sorted_sequence"]
    if call.shard(bounds) is not None or len(bounds.shape) != 1:
        raise Coupled("lazyviz has no rule for these arguments")
    return call.shard(call["self"])


@rule("tril triu")
def triangle(call: Call) -> Outputs | Placement | None:
    return _leading(call, 2)


@rule(
    """linalg_inv_ex inverse linalg_cholesky_ex cholesky linalg_lu_factor_ex linalg_qr linalg_eigh
    _linalg_eigh _linalg_svd _linalg_det _linalg_slogdet matrix_exp linalg_matrix_exp"""
)
def matrices(call: Call) -> Outputs | Placement | None:
    return _leading(call, 2)


def _leading(call: Call, last: int) -> Shard | None:
    """Operates on the ``last`` dimensions, for each index of the leading dimensions of its (first)
    argument.
    """
    value = call.tensors[0]
    found = align(call, call.tensors, len(value.shape))
    if found is not None and found.dim >= len(value.shape) - last:
        raise Coupled("it combines samples", found)
    return found
