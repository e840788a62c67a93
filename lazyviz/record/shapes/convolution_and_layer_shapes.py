"""Shapes of convolutions, matrix products, and other layers on the CPU, from metadata alone.

:mod:`lazyviz.record.shapes.elementwise_and_factory_shapes` has the rules for other kernels.
"""

from __future__ import annotations

from typing import Any

import torch

from ...graph.ir import TensorMeta
from .kernel_probes import sharing
from .shape_rule_call import (
    COMMON,
    FLOATS,
    INTEGERS,
    Call,
    Made,
    New,
    Rule,
    Shape,
    are_sizes,
    broadcast,
    contiguous,
    is_plain,
    new,
    one_dtype,
)

# --- products -------------------------------------------------------------------------


def _product(call: Call) -> Made:
    """``mm`` and ``addmm``, ``bmm`` and ``baddbmm``."""
    arguments = call.arguments
    added = call.name in ("addmm", "baddbmm")
    if "out_dtype" in arguments or (dtype := one_dtype([value.meta for value in call.inputs])) is None:
        return None
    if added:
        left, right = (
            call.meta(name) for name in (("mat1", "mat2") if call.name == "addmm" else ("batch1", "batch2"))
        )
    else:
        left, right = call.meta("self"), call.meta("mat2")
    rank = 3 if "bmm" in call.name else 2
    if len(left.shape) != rank or len(right.shape) != rank:
        return None
    if left.shape[-1] != right.shape[-2] or left.shape[:-2] != right.shape[:-2]:
        return None
    shape = (*left.shape[:-1], right.shape[-1])
    if added and broadcast([shape, call.meta("self").shape]) != shape:
        return None
    if any(type(arguments.get(name, 1)) not in (int, float) for name in ("alpha", "beta")):
        return None
    return [new(shape, dtype)]


# --- reductions and operators along one dimension --------------------------------------


def _reduction(call: Call) -> Made:
    arguments, source = call.arguments, call.meta("self")
    if one_dtype([source]) is None or arguments.get("dtype") is not None or len(call.inputs) != 1:
        return None
    rank = len(source.shape)
    dims = arguments.get("dim")
    if dims is None or (type(dims) is list and not dims):
        dims = list(range(rank))
    if type(dims) is not list or any(type(dim) is not int or not -rank <= dim < rank for dim in dims):
        return None
    reduced = {dim % rank for dim in dims}
    if len(reduced) != len(dims):
        return None
    if arguments.get("keepdim"):
        shape = [1 if at in reduced else size for at, size in enumerate(source.shape)]
    else:
        shape = [size for at, size in enumerate(source.shape) if at not in reduced]
    return [new(shape, source.dtype)]


def _softmax(call: Call) -> Made:
    arguments = call.arguments
    metas = [value.meta for value in call.inputs]
    rank = len(metas[0].shape)
    if (dtype := one_dtype(metas)) is None or arguments.get("half_to_float"):
        return None
    if call.name == "_safe_softmax" and (arguments.get("dtype") is not None or not is_plain(*metas)):
        return None
    if any(meta.shape != metas[0].shape for meta in metas) or not -rank <= arguments["dim"] < rank:
        return None
    if arguments.get("input_dtype", dtype) != dtype:
        return None
    return [new(metas[0].shape, dtype)]


def _cat(call: Call) -> Made:
    metas = [value.meta for value in call.inputs]
    dim, shape = call.arguments.get("dim", 0), metas[0].shape
    rank = len(shape)
    if (dtype := one_dtype(metas, COMMON)) is None or type(dim) is not int:
        return None
    if not is_plain(*metas) and rank + (call.name == "stack") > 3:
        return None  # it may have the channels-last format
    if call.name == "stack":
        if not -rank - 1 <= dim <= rank or any(meta.shape != shape for meta in metas):
            return None
        dim %= rank + 1
        return [new((*shape[:dim], len(metas), *shape[dim:]), dtype)]
    if not -rank <= dim < rank or any(len(meta.shape) != rank for meta in metas):
        return None
    dim %= rank
    rest = (shape[:dim], shape[dim + 1 :])
    if any((meta.shape[:dim], meta.shape[dim + 1 :]) != rest for meta in metas):
        return None
    return [new((*rest[0], sum(meta.shape[dim] for meta in metas), *rest[1]), dtype)]


def _along(call: Call) -> Made:
    """``cumsum``, ``tril``, and ``triu``: the shape of the operand."""
    source = call.meta("self")
    rank = len(source.shape)
    if source.dtype not in (*FLOATS, *INTEGERS, torch.bool) or not is_plain(source):
        return None
    if call.name != "cumsum":
        return [new(source.shape, source.dtype)] if rank > 1 else None
    if call.arguments.get("dtype") is not None or not -rank <= call.arguments["dim"] < rank:
        return None
    return [new(source.shape, source.dtype if source.dtype in FLOATS else torch.int64)]


def _whether(call: Call) -> Made:
    """``all`` and ``any`` of a whole tensor."""
    known = call.meta("self").dtype in (*FLOATS, *INTEGERS, torch.bool)
    return [new((), torch.bool)] if known and len(call.arguments) == 1 else None


# --- normalization --------------------------------------------------------------------


def _image_strides(meta: TensorMeta) -> Shape | None:
    """The strides of a result of this shape from kernels that keep channels last; ``None`` if uncertain."""
    plain = contiguous(meta.shape)
    if meta.stride == plain:
        return plain
    if len(meta.shape) == 4:
        _, channels, height, width = meta.shape
        last = (channels * height * width, 1, channels * width, channels)
        if meta.stride == last and channels > 1 and height * width > 1:
            return last
    return None


def _batch_norm(call: Call) -> Made:
    source, arguments = call.meta("input"), call.arguments
    if (dtype := one_dtype([value.meta for value in call.inputs])) is None or len(source.shape) < 2:
        return None
    channels = (source.shape[1],)
    names = ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd")
    if any(meta.shape != channels or not is_plain(meta) for meta in call.optional(*names)):
        return None
    if len(call.optional("running_mean", "running_var")) == 1:
        return None
    stride = _image_strides(source)
    if stride is None or sharing(call.inputs):
        return None
    if call.name == "native_batch_norm":
        if not arguments["training"]:
            if arguments.get("running_mean") is None:
                return None
            channels = (0,)
        return [New(source.shape, stride, dtype), new(channels, dtype), new(channels, dtype)]
    gradient = call.meta("grad_out")
    if gradient.shape != source.shape or arguments.get("weight") is None or not arguments["train"]:
        return None
    if len(call.optional("save_mean", "save_invstd")) != 2:
        return None
    made = (New(source.shape, stride, dtype), new(channels, dtype), new(channels, dtype))
    return [item if wanted else None for item, wanted in zip(made, call.wanted())]


def _layer_norm(call: Call) -> Made:
    source, shape = call.meta("input"), call.arguments["normalized_shape"]
    if (
        (dtype := one_dtype([value.meta for value in call.inputs])) is None
        or not are_sizes(shape)
        or not shape
    ):
        return None
    shape = tuple(shape)
    split = len(source.shape) - len(shape)
    if split < 0 or source.shape[split:] != shape:
        return None
    if any(meta.shape != shape for meta in call.optional("weight", "bias")):
        return None
    statistics = (*source.shape[:split], *[1] * len(shape))
    result = new(source.shape, dtype)
    if call.name == "native_layer_norm":
        return [result, new(statistics, dtype), new(statistics, dtype)]
    if call.meta("grad_out").shape != source.shape:
        return None
    if any(meta.shape != statistics for meta in (call.meta("mean"), call.meta("rstd"))):
        return None
    wanted = call.wanted()
    given = [True, *[call.arguments.get(name) is not None for name in ("weight", "bias")]]
    if any(one and not other for one, other in zip(wanted, given)):
        return None
    made = (result, new(shape, dtype), new(shape, dtype))
    return [item if one else None for item, one in zip(made, wanted)]


# --- images ---------------------------------------------------------------------------


def _convolution(call: Call) -> Made:
    """Only for contiguous tensors, for which no memory format has to be chosen."""
    arguments = call.arguments
    source, weight = call.meta("input"), call.meta("weight")
    if (dtype := one_dtype([value.meta for value in call.inputs])) is None:
        return None
    if not is_plain(*[value.meta for value in call.inputs]) or arguments["transposed"]:
        return None
    rank, groups = len(source.shape) - 2, arguments["groups"]
    if rank not in (1, 2, 3) or len(weight.shape) != rank + 2 or (rank == 1 and source.shape[2] == 1):
        return None
    if groups < 1 or source.shape[1] != weight.shape[1] * groups or weight.shape[0] % groups:
        return None
    stride, padding, dilation = (_each(arguments[name], rank) for name in ("stride", "padding", "dilation"))
    if stride is None or padding is None or dilation is None:
        return None
    if min(stride) < 1 or min(padding) < 0 or min(dilation) < 1:
        return None
    sizes = [
        (size + 2 * pad - wide * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, wide in zip(
            source.shape[2:], weight.shape[2:], stride, padding, dilation
        )
    ]
    shape = (source.shape[0], weight.shape[0], *sizes)
    if min(sizes) < 1:
        return None
    if call.name == "convolution":
        if any(meta.shape != weight.shape[:1] for meta in call.optional("bias")):
            return None
        return [new(shape, dtype)]
    if call.meta("grad_output").shape != shape:
        return None
    wanted = call.wanted()
    if wanted[2] and arguments.get("bias_sizes") != [weight.shape[0]]:
        return None
    made = (new(source.shape, dtype), new(weight.shape, dtype), new(weight.shape[:1], dtype))
    return [item if one else None for item, one in zip(made, wanted)]


def _each(sizes: Any, rank: int) -> list[int] | None:
    """One number for each dimension of an image."""
    if type(sizes) is not list or len(sizes) not in (1, rank):
        return None
    return sizes if len(sizes) == rank else sizes * rank


def _max_pool(call: Call) -> Made:
    arguments, source = call.arguments, call.meta("self")
    if one_dtype([source]) is None or len(source.shape) != 4 or arguments.get("ceil_mode"):
        return None
    if (stride := _image_strides(source)) is None:
        return None
    kernel = _each(arguments["kernel_size"], 2)
    step = _each(arguments.get("stride") or arguments["kernel_size"], 2)
    padding, dilation = (
        _each(arguments.get(name, [at]), 2) for at, name in enumerate(("padding", "dilation"))
    )
    if kernel is None or step is None or padding is None or dilation is None:
        return None
    if min(kernel) < 1 or min(step) < 1 or min(dilation) < 1 or min(padding) < 0:
        return None
    if any(2 * pad > size for pad, size in zip(padding, kernel)):
        return None
    sizes = [
        (size + 2 * pad - wide * (window - 1) - 1) // jump + 1
        for size, window, jump, pad, wide in zip(source.shape[2:], kernel, step, padding, dilation)
    ]
    if min(sizes) < 1:
        return None
    shape = (*source.shape[:2], *sizes)
    if call.name == "max_pool2d_with_indices":
        if not is_plain(source):
            return None
        return [new(shape, source.dtype), new(shape, torch.int64)]
    gradient, indices = call.meta("grad_output"), call.meta("indices")
    if gradient.shape != shape or indices.shape != shape or indices.dtype != torch.int64:
        return None
    if gradient.dtype != source.dtype:
        return None
    return [New(source.shape, stride, source.dtype)]


# --- losses and embeddings ------------------------------------------------------------


def _mse_loss(call: Call) -> Made:
    """The kernel computes the squares in the memory of their mean or sum."""
    source, target = call.meta("self"), call.meta("target")
    metas = [value.meta for value in call.inputs]
    reduction = call.arguments.get("reduction", 1)
    if (dtype := one_dtype(metas)) is None or not is_plain(*metas) or source.shape != target.shape:
        return None
    if reduction not in (0, 1, 2):
        return None
    shape = source.shape if reduction == 0 else ()
    if call.name == "mse_loss":
        return [New(shape, contiguous(shape), dtype, source.nbytes)]
    return [new(source.shape, dtype)] if call.meta("grad_output").shape == shape else None


def _nll_loss(call: Call) -> Made:
    arguments, scores, target = call.arguments, call.meta("self"), call.meta("target")
    if len(scores.shape) != 2 or target.shape != scores.shape[:1] or target.dtype != torch.int64:
        return None
    weights = call.optional("weight")
    floats = [scores, *weights, *call.optional("grad_output", "total_weight")]
    if (dtype := one_dtype(floats)) is None or any(meta.shape != scores.shape[1:] for meta in weights):
        return None
    reduction = arguments["reduction"]
    if reduction not in (0, 1, 2):
        return None
    shape = target.shape if reduction == 0 else ()
    if call.name == "nll_loss_forward":
        return [new(shape, dtype), new((), dtype)]
    if call.meta("grad_output").shape != shape or call.meta("total_weight").shape != ():
        return None
    return [new(scores.shape, dtype)]


def _embedding(call: Call) -> Made:
    weight, indices = call.meta("weight"), call.meta("indices")
    if one_dtype([weight]) is None or len(weight.shape) != 2 or indices.dtype not in INTEGERS:
        return None
    return [new((*indices.shape, weight.shape[1]), weight.dtype)]


def _embedding_backward(call: Call) -> Made:
    arguments, gradient, indices = call.arguments, call.meta("grad_output"), call.meta("indices")
    if one_dtype([gradient]) is None or indices.dtype not in INTEGERS or not gradient.shape:
        return None
    if gradient.shape[:-1] != indices.shape or arguments["num_weights"] < 1:
        return None
    return [new((arguments["num_weights"], gradient.shape[-1]), gradient.dtype)]


def _select_backward(call: Call) -> Made:
    arguments, gradient, sizes = call.arguments, call.meta("grad_output"), call.arguments["input_sizes"]
    if one_dtype([gradient]) is None or not are_sizes(sizes):
        return None
    dim, rank = arguments["dim"], len(sizes)
    if not -rank <= dim < rank or not -sizes[dim] <= arguments["index"] < sizes[dim]:
        return None
    dim %= rank
    if gradient.shape != (*sizes[:dim], *sizes[dim + 1 :]):
        return None
    return [new(sizes, gradient.dtype)]


def _grid_sampler(call: Call) -> Made:
    """``F.grid_sample``: an image of the grid's size; its gradients are contiguous."""
    image, grid = call.meta("input"), call.meta("grid")
    rank = 4 if "2d" in call.name else 5
    modes = call.arguments["interpolation_mode"], call.arguments["padding_mode"]
    if one_dtype([value.meta for value in call.inputs]) is None or not all(
        type(mode) is int for mode in modes
    ):
        return None
    if len(image.shape) != rank or len(grid.shape) != rank or not 0 <= modes[1] <= 2:
        return None
    if not 0 <= modes[0] <= (2 if rank == 4 else 1):  # bicubic interpolation is of flat images only
        return None
    if grid.shape[0] != image.shape[0] or grid.shape[-1] != rank - 2:
        return None
    shape = (*image.shape[:2], *grid.shape[1:-1])
    if not call.name.endswith("backward"):
        return [new(shape, image.dtype)]
    if call.meta("grad_output").shape != shape:
        return None
    wanted = call.wanted()[0]
    return [new(image.shape, image.dtype) if wanted else None, new(grid.shape, grid.dtype)]


def _upsample(call: Call) -> Made:
    """``F.interpolate`` of a contiguous image; other images are resized in their own memory format."""
    image, size = call.meta("self"), call.arguments["output_size"]
    rank = int(call.name.removesuffix("_aa")[-2]) + 2
    if one_dtype([image]) is None or len(call.inputs) != 1 or len(image.shape) != rank:
        return None
    if not are_sizes(size) or len(size) != rank - 2 or image.stride != contiguous(image.shape):
        return None
    return [new((*image.shape[:2], *size), image.dtype)]


_RESIZES = ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")
RULES: dict[str, Rule] = {
    **{f"upsample_{kind}": _upsample for kind in _RESIZES},
    **dict.fromkeys(("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"), _upsample),
    **dict.fromkeys(("grid_sampler_2d", "grid_sampler_2d_backward"), _grid_sampler),
    **dict.fromkeys(("grid_sampler_3d", "grid_sampler_3d_backward"), _grid_sampler),
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), _product),
    **dict.fromkeys(("sum", "mean"), _reduction),
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax"), _softmax),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _softmax),
    **dict.fromkeys(("cat", "stack"), _cat),
    **dict.fromkeys(("all", "any"), _whether),
    **dict.fromkeys(("cumsum", "tril", "triu"), _along),
    **dict.fromkeys(("mse_loss", "mse_loss_backward"), _mse_loss),
    **dict.fromkeys(("native_batch_norm", "native_batch_norm_backward"), _batch_norm),
    **dict.fromkeys(("native_layer_norm", "native_layer_norm_backward"), _layer_norm),
    **dict.fromkeys(("convolution", "convolution_backward"), _convolution),
    **dict.fromkeys(("max_pool2d_with_indices", "max_pool2d_with_indices_backward"), _max_pool),
    **dict.fromkeys(("nll_loss_forward", "nll_loss_backward"), _nll_loss),
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "select_backward": _select_backward,
}
