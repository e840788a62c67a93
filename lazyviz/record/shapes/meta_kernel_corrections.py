"""Meta kernel corrections: PyTorch's shape rules, corrected in strides, dtype, or memory.

Most rules are Python references of the operators, which have correct shapes, but not always the correct
memory layout. The corrections here were found by running PyTorch's operator samples, forward and backward,
and comparing recorded metadata with the results of the kernels (``tests/conformance/test_metadata.py``).
Each correction computes what the kernel does, on tensors without memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...graph.ir import is_dense, works_by_element
from ...torch_internals import fake_cuda_devices, private_api
from ...torch_internals.private_api import OpOverload
from .pointwise_result_strides import Operand, output_stride

Result = Any  # the result of an operator: a tensor, or a tuple or list of tensors and None


def corrected(
    op: OpOverload, name: str, arguments: dict[str, Any], tensors: Sequence[torch.Tensor], result: Result
) -> Result:
    """``result`` of the shape rule of ``op``, with the kernel's layout; called in the fake mode.

    Args:
        arguments: the call's arguments by name, with fake tensors.
        tensors: the fake tensors among them, in order.
    """
    if isinstance(result, torch.Tensor) and result.layout != torch.strided:
        return result
    correct = _CORRECTIONS.get(name)
    if correct is not None:
        return correct(arguments, result)
    if not isinstance(result, torch.Tensor) or not works_by_element(op) or name in _NOT_ITERATED:
        return result
    if any(result is tensor for tensor in tensors):
        return result
    numbers = op._overloadname.startswith("Scalar") or any(
        type(arguments.get(argument.name)) in _NUMBERS
        for argument in op._schema.arguments
        if str(argument.type) == "Tensor"
    )
    if name not in _NOT_PROMOTED:
        tensors = _promoted(tensors, result)
    return _iterated(tensors, result, numbers)


_WITH_MASK = (
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    "fake_quantize_per_tensor_affine_cachemask",
    "fake_quantize_per_channel_affine_cachemask",
)
_LEARNABLE = tuple(f"_fake_quantize_learnable_per_{scheme}_affine" for scheme in ("tensor", "channel"))


def without_rule(name: str, arguments: dict[str, Any]) -> Result:
    """The results of a kernel that has no shape rule, or whose rule rejects its inputs; ``None`` if they are
    not known here.
    """
    if name in _WITH_MASK or name.removesuffix("_backward") in _LEARNABLE:
        return _fake_quantized(name, arguments)
    if name in _LIKE_SELF:
        return arguments["self"].new_empty(arguments["self"].shape)
    if name == "geqrf" and arguments["self"].dim() >= 2:
        return _factored(arguments["self"])
    if name == "linalg_lstsq" and _fit(arguments["self"], arguments["b"]):
        return _least_squares(arguments["self"], arguments["b"])
    if name != "_grouped_mm":  # the rule accepts only bfloat16
        return None
    left: Any = arguments["self"]
    right: Any = arguments["mat2"]
    offs: Any = arguments.get("offs")
    shape = [left.size(-2), right.size(-1)]
    if left.dim() == right.dim():
        shape.insert(0, left.size(0) if left.dim() == 3 else offs.size(0))
    return left.new_empty(shape, dtype=arguments.get("out_dtype") or left.dtype)


_LIKE_SELF = (
    "fractional_max_pool3d_backward",
    "multi_margin_loss_backward",
    "multilabel_margin_loss_backward",
)


def _columns_first(like: torch.Tensor, batch: Sequence[int], rows: int, columns: int) -> torch.Tensor:
    """Column-major matrices, as LAPACK and cuSOLVER expect them."""
    return like.new_empty([*batch, columns, rows]).transpose(-2, -1)


def _factored(matrix: torch.Tensor) -> Result:
    """Reflectors and their factors (``geqrf``, BatchLinearAlgebra.cpp)."""
    *batch, rows, columns = matrix.shape
    return _columns_first(matrix, batch, rows, columns), matrix.new_empty([*batch, min(rows, columns)])


def _fit(matrix: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether ``linalg_lstsq`` accepts them: one system, or a batch of systems of equal shape."""
    if matrix.dim() < 2 or matrix.dtype != right.dtype:
        return False
    return right.shape == matrix.shape[:-1] or right.shape[:-1] == matrix.shape[:-1]


def _least_squares(matrix: torch.Tensor, right: torch.Tensor) -> Result:
    """With the driver ``gels``, the only one on a GPU: no rank, no singular values (``linalg_lstsq_out``,
    BatchLinearAlgebra.cpp).  The solution's memory has the rows of both matrices.
    """
    *batch, rows, columns = matrix.shape
    vector = right.shape == matrix.shape[:-1]
    count = 1 if vector else right.shape[-1]
    solution = _columns_first(matrix, batch, max(rows, columns), count).narrow(-2, 0, columns)
    residuals = [*batch, count] if rows > columns else [0]
    return (
        solution.squeeze(-1) if vector else solution,
        matrix.new_empty(residuals),
        matrix.new_empty([0], dtype=torch.int64),
        matrix.new_empty([0]),
    )


def _fake_quantized(name: str, arguments: dict[str, Any]) -> Result:
    """Rounded values, and a mask or the gradients of scale and zero point (FakeQuantPerTensorAffine.cpp,
    FakeQuantPerChannelAffine.cpp).
    """
    values = arguments["self"]
    if not values.numel() or arguments["quant_min"] > arguments["quant_max"]:
        return None
    rounded = torch.empty_like(values)
    if name in _WITH_MASK:
        return rounded, torch.empty_like(values, dtype=torch.bool)
    if name in _LEARNABLE:
        return rounded
    steps = [1] if "per_tensor" in name else [values.shape[arguments["axis"]]]
    return rounded, values.new_empty(steps), values.new_empty(steps)


def as_answered(result: Result, answer: Result, inputs: Sequence[int]) -> Result:
    """``result`` of a shape rule with the metadata of the kernel's ``answer``, except for results that are
    inputs.

    Args:
        inputs: the addresses of the fake inputs' storages.
    """
    if isinstance(result, torch.Tensor):
        if result.layout != torch.strided or private_api.storage_address(result) in inputs:
            return result
        return like_answered(result, answer)
    if not isinstance(result, (tuple, list)) or len(result) != len(answer):
        return result
    return type(result)([as_answered(fake, real, inputs) for fake, real in zip(result, answer)])


def like_answered(fake: Any, real: Any) -> Any:
    """``fake``, or a fake tensor with the metadata of ``real`` if these differ."""
    if fake is None or not isinstance(real, torch.Tensor) or real.layout != torch.strided:
        return fake
    if (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype):
        return fake
    return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=real.device)


def storage_nbytes(name: str, arguments: dict[str, Any], position: int, tensor: torch.Tensor) -> int:
    """Bytes of the storage of output number ``position`` after the kernel has run."""
    nbytes = tensor.untyped_storage().nbytes()
    if name in _REDUCED_IN_PLACE and arguments.get("reduction", 1) != 0:
        # The losses of all elements are computed into the result's memory, which is then resized.
        shape = torch.broadcast_shapes(arguments["self"].shape, arguments["target"].shape)
        return max(nbytes, shape.numel() * tensor.element_size())
    if name in _MADE_LIKE_OPERAND:
        # The result is created like the operand and then resized, which frees no memory (Col2Im.cpp).
        return max(nbytes, arguments["self"].numel() * tensor.element_size())
    if name in ("_embedding_bag", "_embedding_bag_forward_only") and tensor.numel():
        if position == 1:
            return nbytes + tensor.element_size()  # one more offset than there are indices
        if position == 2:  # as many as offsets; one less if the last offset is the end
            return max(nbytes, arguments["offsets"].numel() * tensor.element_size())
    return nbytes


_REDUCED_IN_PLACE = {"mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy"}
_MADE_LIKE_OPERAND = {"col2im", "im2col"}
# Pointwise by tag, but not computed by a TensorIterator over their arguments.
_NOT_ITERATED = {"clone", "_to_copy", "copy", "fill", "masked_fill", "alias_copy", "detach_copy"}
_NOT_PROMOTED = {"where"}  # its condition stays boolean; the others have one dtype at this point
_NUMBERS = (int, float, bool, complex)


def _laid_out(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    if tuple(stride) == tensor.stride():
        return tensor
    return torch.empty_strided(tensor.shape, tuple(stride), dtype=tensor.dtype, device=tensor.device)


def _in_format(tensor: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    with private_api.excluding_python():
        like = torch.empty(tensor.shape, device="meta", memory_format=memory_format)
    return _laid_out(tensor, like.stride())


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), device="meta")


def _promoted(tensors: Sequence[torch.Tensor], result: torch.Tensor) -> Sequence[torch.Tensor]:
    """On the CPU, a TensorIterator copies operands whose dtype is not the common one, which makes them
    contiguous.
    """
    if result.device.type != "cpu" or len({tensor.dtype for tensor in (*tensors, result)}) == 1:
        return tensors
    common = functools.reduce(
        torch.promote_types, [tensor.dtype for tensor in tensors if tensor.dim()], torch.bool
    )
    if result.dtype != torch.bool and not result.is_complex():
        common = torch.promote_types(common, result.dtype)
    return [
        tensor if tensor.dtype == common else _like({"self": tensor}, torch.empty_like(tensor))
        for tensor in tensors
    ]


def _iterated(tensors: Sequence[torch.Tensor], result: torch.Tensor, number: bool = False) -> torch.Tensor:
    """The result of a TensorIterator over ``tensors``; a ``number`` counts as a zero-dimensional tensor."""
    if not tensors:
        return result
    operands: list[Operand] = [(tensor.shape, tensor.stride()) for tensor in tensors]
    if number:
        operands.append(((), ()))
    if torch.broadcast_shapes(*[shape for shape, _ in operands]) != result.shape:
        return result
    return _laid_out(result, output_stride(result.shape, operands))


def _like(arguments: dict[str, Any], result: Result) -> Result:
    """A dense tensor's strides are kept, including those of dimensions of size 1."""
    source = arguments["self"]
    memory_format = arguments.get("memory_format")
    if memory_format in (None, torch.preserve_format) and is_dense(source.shape, source.stride()):
        return _laid_out(result, source.stride())
    return result


def _full(arguments: dict[str, Any], result: Result) -> Result:
    """A complex number has the default complex dtype only if that is one of 64 or 128 bits."""
    if isinstance(result, torch.Tensor) and result.dtype == torch.complex32 and not arguments.get("dtype"):
        return torch.empty_like(result, dtype=torch.complex64)
    return result


def _empty_like(argument: str) -> Callable[[dict[str, Any], Result], Result]:
    """``at::empty_like`` of the named argument."""

    def correct(arguments: dict[str, Any], result: Result) -> Result:
        source = arguments[argument]
        return _like({"self": source}, torch.empty_like(source, dtype=result.dtype))

    return correct


def _contiguous(arguments: dict[str, Any], result: Result) -> Result:
    if isinstance(result, torch.Tensor):
        return _in_format(result, torch.contiguous_format)
    return tuple([item if item is None else _in_format(item, torch.contiguous_format) for item in result])


def _format_of(argument: str) -> Callable[[dict[str, Any], Result], Result]:
    """The first result has the memory format that the named argument suggests."""

    def correct(arguments: dict[str, Any], result: Result) -> Result:
        memory_format = _suggested(arguments[argument])
        if not isinstance(result, (tuple, list)):
            return _in_format(result, memory_format)
        if result[0] is None:
            return result
        return (_in_format(result[0], memory_format), *result[1:])

    return correct


def _suggested(tensor: torch.Tensor) -> torch.memory_format:
    """``Tensor::suggest_memory_format``: the format that the strides suggest
    (``is_channels_last_strides_2d``).
    """
    memory_format = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if memory_format is None or not tensor.numel() or not tensor.stride(1):
        return torch.contiguous_format
    least = 0
    for dim in (1, *range(tensor.dim() - 1, 1, -1), 0):
        step, size = tensor.stride(dim), tensor.size(dim)
        if step < least or (dim == 0 and least == tensor.stride(1)):
            return torch.contiguous_format
        least = step * size
    return memory_format


def _dense_format(tensor: torch.Tensor) -> torch.memory_format | None:
    """The first format in which ``tensor`` is contiguous; strides of dimensions of size 1 do not count."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if tensor.is_contiguous():
        return torch.contiguous_format
    return last if last is not None and tensor.is_contiguous(memory_format=last) else None


def _format_of_dense(tensor: torch.Tensor) -> torch.memory_format:
    """``suggest_memory_format_contig`` in ``aten/src/ATen/native/Normalization.cpp``, or else what the
    strides suggest.
    """
    return _dense_format(tensor) or _suggested(tensor)


def _in_order(*names: str) -> Callable[[dict[str, Any], Result], Result]:
    """A TensorIterator over the named arguments, in this order."""

    def correct(arguments: dict[str, Any], result: Result) -> Result:
        given = [arguments.get(name) for name in names]
        tensors = [item for item in given if isinstance(item, torch.Tensor)]
        return _iterated(_promoted(tensors, result), result, any(type(item) in _NUMBERS for item in given))

    return correct


def _lerp(arguments: dict[str, Any], result: Result) -> Result:
    """A TensorIterator over its tensors; a number as the weight is not an operand."""
    operands = [arguments[name] for name in ("self", "end", "weight")]
    return _iterated([each for each in operands if isinstance(each, torch.Tensor)], result)


def _pow(arguments: dict[str, Any], result: Result) -> Result:
    """A number to the power of a tensor is contiguous."""
    if isinstance(arguments["self"], torch.Tensor):
        tensors = [item for item in arguments.values() if isinstance(item, torch.Tensor)]
        return _iterated(_promoted(tensors, result), result)
    return _contiguous(arguments, result)


def _ldexp(arguments: dict[str, Any], result: Result) -> Result:
    """``self`` times a new contiguous tensor of powers; integers become floating."""
    source, exponent = arguments["self"], arguments["other"]
    common = torch.result_type(source, exponent)
    if not common.is_floating_point and not common.is_complex:
        common = torch.get_default_dtype()
    result = result.to(common)
    powers = torch.empty(exponent.shape, dtype=result.dtype, device=exponent.device)
    return _iterated(_promoted([source, powers], result), result)


def _view(arguments: dict[str, Any], result: Result) -> Result:
    """Strides of dimensions of size 1 follow those of their neighbors."""
    with private_api.excluding_python():
        like = _meta(arguments["self"]).view(result.shape)
    if like.stride() == result.stride():
        return result
    return result.as_strided(result.shape, like.stride(), result.storage_offset())


def _layer_norm(arguments: dict[str, Any], result: Result) -> Result:
    """If weights are wider than the input, so are the saved statistics."""
    source = arguments["input"]
    given = [arguments.get(name) for name in ("weight", "bias")]
    parameter = next((item for item in given if item is not None), None)
    if parameter is None or parameter.dtype == source.dtype or source.device.type != "cpu":
        return result
    return (result[0], *[tensor.to(parameter.dtype) for tensor in result[1:]])


def _batch_norm(arguments: dict[str, Any], result: Result) -> Result:
    """Contiguous or channels last; the saved statistics have the dtype of parameters that are wider than the
    input.
    """
    source = arguments["input"]
    names = ("weight", "bias", "running_mean", "running_var")
    parameters = [arguments[name] for name in names if arguments.get(name) is not None]
    wider = any(parameter.dtype != source.dtype for parameter in parameters)
    if source.device.type == "cpu" and all(each.is_contiguous() for each in parameters):
        result = (_in_format(result[0], _format_of_dense(source)), *result[1:])
    else:
        result = _format_of("input")(arguments, result)
    if not wider or source.device.type != "cpu":
        return result
    return (result[0], *[tensor.to(torch.float32) for tensor in result[1:3]], *result[3:])


def _batch_norm_backward(arguments: dict[str, Any], result: Result) -> Result:
    """The gradient's format decides as well, if the strides of the input have several meanings."""
    source, gradient = arguments["input"], arguments["grad_out"]
    alike = _suggested(source) == _suggested(gradient)
    if result[0] is None or source.device.type != "cpu" or not (alike and _dense_format(gradient)):
        return _format_of("input")(arguments, result)
    return (_in_format(result[0], _format_of_dense(source)), *result[1:])


def _group_norm(arguments: dict[str, Any], result: Result) -> Result:
    """Channels last if the input is, on the CPU, regardless of the sizes that are passed with it."""
    result = _layer_norm(arguments, result)
    if arguments["input"].device.type != "cpu":
        return result
    return _format_of("input")(arguments, result)


def _group_norm_backward(arguments: dict[str, Any], result: Result) -> Result:
    return _on_cpu_format_of("input")(arguments, _contiguous(arguments, result))


def _on_cpu_format_of(argument: str) -> Callable[[dict[str, Any], Result], Result]:
    """The same for kernels that know channels-last on the CPU alone."""
    formatted = _format_of(argument)

    def correct(arguments: dict[str, Any], result: Result) -> Result:
        return formatted(arguments, result) if arguments[argument].device.type == "cpu" else result

    return correct


def _softmax_backward(arguments: dict[str, Any], result: Result) -> Result:
    """The gradient's dtype, except on a GPU where softmax computed single precision from half
    (SoftMax.cpp).
    """
    gradient, dtype = arguments["grad_output"].dtype, arguments["input_dtype"]
    result = _in_format(result, torch.contiguous_format)
    return result.to(dtype if (gradient, dtype) == (torch.float32, torch.float16) else gradient)


def _margin_loss(arguments: dict[str, Any], result: Result) -> Result:
    """The loss of one sample is zero-dimensional, though the target may have a dimension (LossMulti.h)."""
    source, losses = arguments["self"], result
    if isinstance(result, tuple):
        losses = result[0]
    if losses.dim() != 1 or source.dim() > 1:
        return result
    loss = losses.new_empty(())
    return loss if losses is result else (loss, *result[1:])


def _sort(arguments: dict[str, Any], result: Result) -> Result:
    return tuple([_like({"self": arguments["self"]}, item) for item in result])


def _mkldnn_rnn_backward(arguments: dict[str, Any], result: Result) -> Result:
    """The gradients of the two biases are equal, and each has its own memory.

    All are single precision, regardless of the layer's dtype; torch 2.11's rule omits this.
    """
    result = tuple([item.to(torch.float32) for item in result])
    return (*result[:4], torch.empty_like(result[4]), *result[5:])


def _cudnn_convolution(arguments: dict[str, Any], result: Result) -> Result:
    """cuDNN keeps channels last if the input or the weight is channels last (ConvUtils.h).

    A build without CUDA does not know that cuDNN would be selected.
    """
    source, weight = arguments["input"], arguments["weight"]
    if source.device not in fake_cuda_devices.STAND_INS or torch.float64 in (source.dtype, weight.dtype):
        return result
    memory_format = _suggested(source)
    if memory_format == torch.contiguous_format:
        memory_format = _suggested(weight)
    if isinstance(result, torch.Tensor):
        return _in_format(result, memory_format)
    return tuple(
        item if item is None or item.dim() < 4 else _in_format(item, memory_format) for item in result
    )


def _fourier(arguments: dict[str, Any], result: Result) -> Result:
    """MKL leaves the transformed dimensions innermost, and the others around them in the order of their
    strides.

    ``_exec_fft`` and its callers (mkl/SpectralOps.cpp); torch 2.11's rule does not sort the dimensions.
    """
    source, dims = arguments["self"], list(arguments["dim"])
    if source.device.type != "cpu" or not dims:
        return result
    if not torch.backends.mkl.is_available():
        return _in_format(result, torch.contiguous_format)
    strides = source.stride()
    if not result.is_complex():  # all but the last have been transformed before, by a separate operator
        if len(dims) > 1:
            strides = _transformed(source.shape, strides, _by_stride(dims[:-1], strides))
        dims = dims[-1:]
    elif source.is_complex():
        dims = _by_stride(dims, strides)
    else:  # only half of the last dimension is computed, so MKL must transform it first
        dims = [*_by_stride(dims[:-1], strides), dims[-1]]
    return _laid_out(result, _transformed(result.shape, strides, dims))


def _by_stride(dims: Sequence[int], strides: Sequence[int]) -> list[int]:
    return sorted(dims, key=lambda dim: strides[dim], reverse=True)


def _transformed(shape: Sequence[int], strides: Sequence[int], dims: Sequence[int]) -> list[int]:
    """Strides of a result of ``shape`` whose ``dims`` MKL transformed in this order, in one pass, given
    ``strides``.
    """
    others = list(range(len(shape)))  # in the order of std::partition, which decides between equal strides
    first, end = 0, len(others)
    while first < end:
        if others[first] in dims:
            end -= 1
            others[first], others[end] = others[end], others[first]
        else:
            first += 1
    others = _by_stride(others[:first], strides)
    made, step = [0] * len(shape), 1
    for dim in reversed([*others, *dims]):
        made[dim] = step
        step *= shape[dim]
    return made


def _max_pool3d(arguments: dict[str, Any], result: Result) -> Result:
    """A single sample, too, keeps the memory format that its strides suggest."""
    sample = arguments["self"]
    if sample.dim() != 4 or sample.device.type != "cpu":
        return result
    batch, last = sample.unsqueeze(0), torch.channels_last_3d
    is_last = not batch.is_contiguous() and batch.is_contiguous(memory_format=last)
    memory_format = last if is_last else _suggested(batch)
    return tuple([_in_format(item.unsqueeze(0), memory_format).squeeze(0) for item in result])


def _weights_if_wanted(arguments: dict[str, Any], result: Result) -> Result:
    """The attention weights are undefined if they are not requested; the rule creates an empty tensor."""
    return result if arguments.get("need_weights", True) else (result[0], None)


_UPSAMPLE = (
    *("upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d", "upsample_bicubic2d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa"),
)
_CORRECTIONS: dict[str, Callable[[dict[str, Any], Result], Result]] = {
    **{f"{name}_like": _like for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")},
    "full": _full,
    "view": _view,
    "convolution": _cudnn_convolution,
    "convolution_backward": _cudnn_convolution,
    "mkldnn_rnn_layer_backward": _mkldnn_rnn_backward,
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _contiguous,
    "native_group_norm_backward": _group_norm_backward,
    **{f"_fft_{kinds}": _fourier for kinds in ("c2c", "c2r", "r2c")},
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _softmax_backward),
    **dict.fromkeys(("col2im", "im2col", "log_sigmoid_forward", "rrelu_with_noise"), _contiguous),
    **dict.fromkeys(("tril", "triu", "linalg_vector_norm"), _contiguous),
    **{f"{name}_loss_backward": _contiguous for name in ("mse", "smooth_l1", "huber")},
    "native_group_norm": _group_norm,
    "max_pool1d": _contiguous,
    "max_pool3d_with_indices": _max_pool3d,
    **{
        f"{kind}_pad3d{backward}": _on_cpu_format_of("self")
        for kind in ("reflection", "replication")
        for backward in ("", "_backward")
    },
    "reflection_pad2d_backward": _on_cpu_format_of("self"),
    "replication_pad2d_backward": _on_cpu_format_of("self"),
    "_native_multi_head_attention": _weights_if_wanted,
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"), _batch_norm
    ),
    "native_batch_norm_backward": _batch_norm_backward,
    "batch_norm_backward": _format_of("input"),
    **dict.fromkeys(("channel_shuffle", "max_unpool2d"), _format_of("self")),
    "sort": _sort,
    "_conj_physical": _empty_like("self"),
    "floor_divide": _in_order("self", "other"),
    **dict.fromkeys(("multi_margin_loss", "multilabel_margin_loss_forward"), _margin_loss),
    "hardswish_backward": _in_order("grad_output", "self"),
    "hardtanh_backward": _in_order("grad_output", "self"),
    "logit_backward": _in_order("grad_output", "self"),
    "threshold_backward": _in_order("self", "grad_output"),
    "hardtanh": _empty_like("self"),
    "nan_to_num": _empty_like("self"),
    "lerp": _lerp,
    **dict.fromkeys(_UPSAMPLE, _format_of("self")),
    **{f"{name}_backward": _format_of("grad_output") for name in _UPSAMPLE},
    "rsub": _in_order("other", "self"),
    "complex": _in_order("real", "imag"),
    "polar": _in_order("abs", "angle"),
    "pow": _pow,
    "ldexp": _ldexp,
    "binary_cross_entropy_backward": _empty_like("self"),
}
