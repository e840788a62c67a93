"""Kernel probes: a kernel is called on small known tensors if its shape rule is unreliable.

Shape rules raise errors with their own messages, accept dtypes that no kernel supports, and ignore
overlapping operands. A probe has the recorded metadata, on memory that is shared in the same way, and
contains zeros or ones.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ...graph.ir import TensorMeta
from ...torch_internals import fake_cuda_devices, private_api
from ...torch_internals.private_api import OpOverload
from ..random_draw_order import Generators, set_state, state_of
from . import kernel_probe_inputs, scalar_operands
from .kernel_argument_checks import CHECK_MORE
from .operator_schema_properties import OpInfo


class DataDependent(Exception):
    """The metadata of the op's result is unknown without running it; ``sparse`` if this is because it has no
    strides.
    """

    def __init__(self, reason: str, *, sparse: bool = False) -> None:
        super().__init__(reason)
        self.sparse = sparse


LARGEST_NBYTES = 256 * 2**20
"""Inputs above this are not probed."""
MOST_DIMENSIONS = 64
"""Most kernels that reduce dimensions count them in the bits of an integer; shape rules accept more."""
_LARGEST_DOUBTFUL_NBYTES = 4 * 2**20  # of inputs and outputs, if only the dtypes are unusual
_LARGEST_UNCOMMON_NBYTES = 2**16  # likewise, if only the operator is
# The operators that most programs consist of, in-place variants included. Their rules are known to agree with
# their kernels, except where `may_differ_from_rule` says otherwise, so they are not checked for each shape.
_COMMON_NAMES = """
_local_scalar_dense _log_softmax _log_softmax_backward_data
_safe_softmax _scaled_dot_product_flash_attention_for_cpu
_scaled_dot_product_flash_attention_for_cpu_backward _softmax _softmax_backward_data _to_copy
_unsafe_view abs add addcdiv addcmul addmm all amax amin any arange argmax avg_pool2d
avg_pool2d_backward baddbmm bernoulli bitwise_and bitwise_not bitwise_or bmm cat clamp clamp_max
clamp_min clone constant_pad_nd convolution convolution_backward copy cos cumsum div elu embedding
embedding_dense_backward empty empty_like eq exp expm1 fill full full_like gather ge gelu
gelu_backward gt index index_select le leaky_relu lerp linalg_vector_norm log log1p log2
logical_and logical_not logical_or lt masked_fill max max_pool2d_with_indices
max_pool2d_with_indices_backward maximum mean min minimum mkldnn_rnn_layer
mkldnn_rnn_layer_backward mm mul native_batch_norm native_batch_norm_backward native_dropout
native_dropout_backward native_group_norm native_group_norm_backward native_layer_norm
native_layer_norm_backward ne neg new_empty new_empty_strided new_full new_ones new_zeros
nll_loss_backward nll_loss_forward normal ones ones_like pow rand rand_like randint randint_like
randn randn_like random reciprocal relu repeat rsqrt rsub scalar_tensor scatter select_backward
sigmoid sigmoid_backward sign silu silu_backward sin slice_backward softplus sort split sqrt stack
std sub sum tanh tanh_backward threshold_backward topk tril triu unbind uniform
upsample_bilinear2d upsample_nearest2d var where zero zeros zeros_like
"""
_COMMON = frozenset(_COMMON_NAMES.split())
_EVERYWHERE_NAMES = "float32 float64 int32 int64 bool uint8 complex64 complex128"
_EVERYWHERE = frozenset(getattr(torch, name) for name in _EVERYWHERE_NAMES.split())
_COMMON_DTYPES = frozenset((torch.float32, torch.float64))
# They require one common dtype, which shape rules do not check.
_SAME_DTYPE = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution"}

# LAPACK counts rows from 1, and uses pivots as unchecked memory offsets.
_PIVOTED = {"linalg_ldl_solve", "linalg_lu_solve", "lu_solve"}
_OURS = ("aten", "torch_nn")  # PyTorch's own kernels
_MASKS = (torch.bool, torch.uint8)
_FOR_INTEGERS = ("bitwise_", "__and__", "__or__", "__xor__", "__iand__", "__ior__", "__ixor__")


def sharing(values: Sequence[Any]) -> tuple[int, ...]:
    """Which of a call's values share memory: for each value, the first one on its storage; () if none do."""
    storages = [value.storage for value in values]
    if len(set(storages)) == len(storages):
        return ()
    return tuple([storages.index(storage) for storage in storages])


def differ_in_shape(values: Sequence[Any]) -> bool:
    """Whether two tensors that are compared for equality differ in shape."""
    left, right = (value.meta for value in values)
    return left.shape != right.shape and (left.dtype, left.device) == (right.dtype, right.device)


def answer(
    op: OpOverload,
    args: Any,
    kwargs: Any,
    inputs: Sequence[Any],
    fill: tuple[int, int] = (0, 0),
    *,
    small: bool = False,
) -> Any:
    """The kernel's results for probes filled with ``fill``; random kernels do not change their generator.

    Args:
        fill: the content of integer and boolean tensors, and of all other dtypes.
        small: whether each probe has one element.
    """
    if on_absent_gpu(inputs, kwargs):
        kwargs = {name: _cpu_for(item) for name, item in kwargs.items()}
        args = tuple([_cpu_for(item) for item in args])
    name = op._schema.name.rpartition("::")[2]
    memory: dict[Any, torch.UntypedStorage] = {}
    probes: dict[int, torch.Tensor] = {}
    for value in inputs:
        meta: TensorMeta = value.meta
        shared = value if small else value.storage
        if shared not in memory:
            elements = 1 if small else value.storage.nbytes // meta.dtype.itemsize
            numbers = meta.dtype.is_floating_point or meta.dtype.is_complex
            held = fill[numbers] or int(name in _PIVOTED and not numbers)
            place = _cpu_for(meta.device)
            filled = torch.full((elements,), held, dtype=meta.dtype, device=place)
            memory[shared] = private_api.TensorBase.untyped_storage(filled)
        probe = torch.empty(0, dtype=meta.dtype, device=_cpu_for(meta.device))
        ones = (1,) * len(meta.shape)
        place = (0, ones, ones) if small else (meta.offset, meta.shape, meta.stride)
        private_api.TensorBase.set_(probe, memory[shared], *place)
        probes[id(value)] = with_flags(probe, meta.flags)
    states: list[tuple[torch.Generator, torch.Tensor]] = []
    if torch.Tag.nondeterministic_seeded in op.tags:
        own = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Generator)]
        device = _cpu_for(inputs[0].meta.device) if inputs else torch.device("cpu")
        states = [(generator, state_of(generator)) for generator in own or [Generators.default(device)]]
    args, kwargs = substitute(args, probes), substitute(kwargs, probes)
    kernel_probe_inputs.fill(
        name, dict(zip([argument.name for argument in op._schema.arguments], args)) | kwargs
    )
    try:
        return op(*args, **kwargs)
    finally:
        for generator, state in states:
            set_state(generator, state)


def ask(
    op: OpOverload,
    info: OpInfo,
    args: Any,
    kwargs: Any,
    inputs: Sequence[Any],
    arguments: dict[str, Any],
    result: Any,
) -> Any | None:
    """The kernel's results, if its shape rule may be wrong and calling it is cheap; otherwise None.

    Args:
        arguments: the call's arguments by name, with fake tensors.
        result: what the rule says.

    Raises:
        DataDependent: the kernel may not take these arguments.
        Exception: the kernel rejects them, regardless of their content.
    """
    if scalar_operands.are_unusual(op, arguments, inputs):
        refused = _refusal_of_numbers(op, args, kwargs, inputs)
        if refused is not None and info.counts_writes:
            raise DataDependent(f"{op} may fail partway through its list")
        if refused is not None:
            raise refused.with_traceback(None) from None
    if may_differ_from_rule(info.name, info.mutates, arguments, inputs):
        planned = info.mutates and on_absent_gpu(inputs, kwargs)
        refused = refusal(op, args, kwargs, inputs, of_dtypes=not planned)
        if refused is not None:
            raise refused.with_traceback(None) from None
    elif info.is_view or info.name in kernel_probe_inputs.NOT_MADE_UP:
        return None
    elif on_absent_gpu(inputs, kwargs):
        if _may_be_refused(op, inputs, result):
            refuse_planned(op, args, kwargs, inputs, of_dtypes=False)
    elif needs_kernel_check(info.name, inputs, result) or (info.draws and are_small(inputs, result)):
        answered, refused = trial(op, args, kwargs, inputs)
        if refused is not None:
            # The kernel raises the error, at this line.
            raise DataDependent(f"{op} may reject these arguments")
        return None if info.mutates else answered
    return None


def _may_be_refused(op: OpOverload, inputs: Sequence[Any], result: Any) -> bool:
    """Whether the GPU's kernel would reject what the CPU's rejects: both have kernels for these dtypes.

    Autograd's formulas get results of the forward kernel, which may differ on a GPU (the buffer of
    ``log_sigmoid`` is empty there).
    """
    name = op._schema.name
    return (
        not name.startswith("aten::_")
        and not name.endswith("_backward")
        and all(value.dtype in _EVERYWHERE for value in inputs)
        and are_small(inputs, result, _LARGEST_UNCOMMON_NBYTES)
    )


def refuse_planned(
    op: OpOverload, args: Any, kwargs: Any, inputs: Sequence[Any], *, of_dtypes: bool = True
) -> None:
    """Raise the error with which an absent GPU would reject these arguments, regardless of their content."""
    if on_absent_gpu(inputs, kwargs):
        refused = refusal(op, args, kwargs, inputs, of_dtypes=of_dtypes)
        if refused is not None and "CPU" not in str(refused):
            raise refused from None


def refusal(
    op: OpOverload,
    args: Any,
    kwargs: Any,
    inputs: Sequence[Any],
    *,
    of_dtypes: bool = True,
    small: bool = False,
) -> Exception | None:
    """The error that the kernel raises for zeros and for ones alike, so not because of the content; None if
    it accepts either.

    If the messages about a mask differ, they depend on its content: a mask of ones selects more than a mask
    of zeros. Without ``of_dtypes``, the result is also None if only the CPU's kernel lacks a dtype and the
    question is about a GPU's. ``small``: for tensors of one element each.
    """
    refused = _refusals(op, args, kwargs, inputs, small=small)
    if any(isinstance(error, torch.linalg.LinAlgError) for error in refused):  # type: ignore[attr-defined]
        return None
    if any(value.meta.dtype in _MASKS for value in inputs) and len(set(map(str, refused))) > 1:
        return None
    if not refused or (not of_dtypes and any(isinstance(error, NotImplementedError) for error in refused)):
        return None
    return refused[0]


def _refusal_of_numbers(op: OpOverload, args: Any, kwargs: Any, inputs: Sequence[Any]) -> Exception | None:
    """The error that the kernel raises for the numbers of a call, regardless of its tensors, but not for
    ordinary numbers.
    """
    args, kwargs = scalar_operands.on_one_element(op, args, kwargs)
    of_dtypes = not on_absent_gpu(inputs, kwargs)
    refused = refusal(op, args, kwargs, inputs, of_dtypes=of_dtypes, small=True)
    if (
        refused is None
        or refusal(op, *scalar_operands.ordinary(op, args, kwargs), inputs, small=True) is not None
    ):
        return None
    return refused


def trial(
    op: OpOverload, args: Any, kwargs: Any, inputs: Sequence[Any]
) -> tuple[Any | None, Exception | None]:
    """The kernel's results for zeros or for ones, and its error for any content; None if not known.

    Integers are often indices, for which ones may be too large. Then floating-point ones with integer zeros
    are tried.
    """
    first: Exception | None = None
    for found in _answers(op, args, kwargs, inputs, ((0, 0), (1, 1), (0, 1))):
        if not isinstance(found, Exception):
            return found, None
        if isinstance(found, NotImplementedError) or str(found) == str(first):
            return None, found
        first = first or found
    return None, None


def _refusals(
    op: OpOverload, args: Any, kwargs: Any, inputs: Sequence[Any], *, small: bool
) -> list[Exception]:
    """The errors that the kernel raises for zeros and for ones; nothing if it accepts either."""
    answers = list(_answers(op, args, kwargs, inputs, small=small))
    return answers if all(isinstance(found, Exception) for found in answers) else []


def must_come_again(error: Exception, ask: Callable[[], Any]) -> None:
    """Raise the ``error`` of a first ``ask()`` if a second one succeeds: then another thread sent it, not the
    kernel.
    """
    try:
        ask()
    except Exception:
        return
    raise error


def _answers(
    op: OpOverload,
    args: Any,
    kwargs: Any,
    inputs: Sequence[Any],
    fills: Sequence[tuple[int, int]] = ((0, 0), (1, 1)),
    *,
    small: bool = False,
) -> Iterator[Any]:
    """The kernel's results for the first of ``fills`` that it accepts; the exceptions for those before.

    A kernel that is not PyTorch's own may have side effects, so only the user's call runs it. For an absent
    GPU's kernel, the CPU's answers are used, with the tensors renamed in messages.
    """
    if op.namespace not in _OURS or (_nbytes(inputs) > LARGEST_NBYTES and not small):
        return
    absent = on_absent_gpu(inputs, kwargs)
    for fill in fills:
        with torch.no_grad(), private_api.kernels_only():
            ask = functools.partial(answer, op, args, kwargs, inputs, fill, small=small)
            try:
                found = ask()
            except Exception as error:
                must_come_again(error, ask)
                found = error.with_traceback(None)  # its frames would keep the user's tensors alive
        if absent and isinstance(found, Exception):
            if isinstance(found, NotImplementedError) and "not implemented for" not in str(found):
                return  # the CPU has no such kernel
            found = type(found)(*[with_cuda_names(item) for item in found.args])
        yield found
        if not isinstance(found, Exception):
            return


def may_differ_from_rule(name: str, mutates: bool, arguments: dict[str, Any], inputs: Sequence[Any]) -> bool:
    """Whether the kernel may reject, for every content, what its shape rule accepts (in some release)."""
    if name == "as_strided":
        return any(step < 0 for step in arguments["stride"])
    if name == "embedding":
        return arguments["indices"].dtype not in (torch.int64, torch.int32)
    if name in CHECK_MORE and CHECK_MORE[name](arguments):
        return True
    if any(len(value.meta.shape) > MOST_DIMENSIONS for value in inputs):
        return True
    if len(inputs) > 1 and name in _SAME_DTYPE and len({value.meta.dtype for value in inputs}) > 1:
        return True
    if name.startswith(_FOR_INTEGERS) and any(value.meta.dtype.is_floating_point for value in inputs):
        return True
    return mutates and (bool(sharing(inputs)) or any(_overlaps_itself(value.meta) for value in inputs))


def needs_kernel_check(name: str, inputs: Sequence[Any], result: Any) -> bool:
    """Whether calling the kernel is cheap, and the rule of a rare operator may be wrong.

    The kernel may also lack these dtypes, reject empty tensors, or use another layout.
    """
    dtypes = {value.meta.dtype for value in inputs}
    if len(dtypes) > 1 or not dtypes <= _COMMON_DTYPES or any(not value.meta.nbytes for value in inputs):
        return are_small(inputs, result)
    if any(not item.numel() for item in _results(result)):
        return are_small(inputs, result)
    if name.removesuffix("_") in _COMMON or name.startswith(("_foreach", "_fused")):
        return False
    return are_small(inputs, result, _LARGEST_UNCOMMON_NBYTES)


def are_small(inputs: Sequence[Any], result: Any, limit: int = _LARGEST_DOUBTFUL_NBYTES) -> bool:
    """Whether calling the kernel is cheap."""
    if any(value.meta.device.type == "meta" for value in inputs):
        return False
    made = sum(item.numel() * item.element_size() for item in _results(result))
    return _nbytes(inputs) + made <= limit


def _results(result: Any) -> list[torch.Tensor]:
    results = result if isinstance(result, (list, tuple)) else [result]
    return [item for item in results if isinstance(item, torch.Tensor)]


def on_absent_gpu(inputs: Sequence[Any], kwargs: Any) -> bool:
    """Whether the kernel is that of an absent GPU."""
    absent = fake_cuda_devices.STAND_INS
    return bool(absent) and (
        kwargs.get("device") in absent or any(value.meta.device in absent for value in inputs)
    )


def as_kernel_error(error: Exception) -> Exception:
    """The error of a shape rule, without classes and texts that only shape rules have."""
    refused = error.__context__
    if isinstance(refused, NotImplementedError) and not isinstance(error, NotImplementedError):
        error = refused  # raised by the rule; FakeTensor has then tried the kernel of an absent device
    if found := _TWO_DEVICES.search(str(error)):  # torch 2.11's
        return RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{found[1]} and {found[2]}!"
        )
    return error if type(error).__module__ == "builtins" else RuntimeError(str(error))


_TWO_DEVICES = re.compile(r"Unhandled FakeTensor Device Propagation .* two different devices (\S+), (\S+)$")


def _cpu_for(item: Any) -> Any:
    """The CPU in place of an absent device, and None in place of its generator."""
    if isinstance(item, torch.device):
        return torch.device("cpu") if item in fake_cuda_devices.STAND_INS else item
    if isinstance(item, torch.Generator):
        return None if item.device in fake_cuda_devices.STAND_INS else item
    return item


def with_cuda_names(text: Any) -> Any:
    """An error of the CPU's kernel, worded like a GPU's."""
    if not isinstance(text, str):
        return text
    text = re.sub(r"\btorch\.(\w+Tensor)\b", r"torch.cuda.\1", text)
    text = re.sub(r"\bCPU(\w+Type)\b", r"CUDA\1", text)
    text = re.sub(r'^"(\w+)_cpu" not', r'"\1_cuda" not', text)
    return text.replace("expected m1 and m2", "expected mat1 and mat2")


def check_dimension(name: str, dim: Any, inputs: Sequence[Any], result: Any) -> None:
    """Raise DataDependent if the op uses a dimension that does not exist."""
    if type(dim) is not int or not inputs:
        return
    made = [len(result.shape)] if isinstance(result, torch.Tensor) else []
    rank = max(1, *made, *[len(value.meta.shape) for value in inputs])
    if not -rank <= dim < rank:
        raise DataDependent(f"{name} over dimension {dim}")


def view_without_memory(op: OpOverload, args: Any, kwargs: Any, inputs: Sequence[Any]) -> None:
    """Create a view with the kernel, which needs no memory; FakeTensor accepts some impossible ones."""
    with torch.no_grad(), private_api.kernels_only():
        tensors = {}
        for value in inputs:
            meta = value.meta
            elements = torch.empty(
                value.storage.nbytes // meta.dtype.itemsize, dtype=meta.dtype, device="meta"
            )
            tensors[id(value)] = with_flags(
                elements.as_strided(meta.shape, meta.stride, meta.offset), meta.flags
            )
        args, kwargs = substitute(args, tensors), substitute(kwargs, tensors)
        # In inference mode, `Tensor.to` is not decomposed and names a device to which nothing can be copied
        # from here.
        on_absent_gpu = torch.device("meta")
        if op is torch.ops.aten.as_strided.default:
            strides = list(requested_strides(args, kwargs))
            if any(step < 0 for step in strides):  # torch 2.11 accepts them for a tensor without memory
                raise RuntimeError(
                    f"as_strided: Negative strides are not supported at the moment, got strides: {strides}"
                )
        args = [on_absent_gpu if isinstance(item, torch.device) else item for item in args]
        op(*args, **(kwargs | {"device": on_absent_gpu} if kwargs.get("device") is not None else kwargs))


def requested_strides(args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[int]:
    """The strides passed to ``as_strided``."""
    found: Sequence[int] = args[2] if len(args) > 2 else kwargs["stride"]
    return found


def substitute(item: Any, tensors: dict[int, torch.Tensor]) -> Any:
    """``item`` with each value replaced by its tensor."""
    if isinstance(item, dict):
        return {name: substitute(entry, tensors) for name, entry in item.items()}
    if isinstance(item, (list, tuple)):
        return type(item)([substitute(entry, tensors) for entry in item])
    return tensors.get(id(item), item)


def fake(meta: TensorMeta, storage_nbytes: int) -> torch.Tensor:
    """A fake tensor with ``meta``'s metadata on a storage of the true size."""
    elements = storage_nbytes // meta.dtype.itemsize
    if meta.offset == 0 and meta.storage_nbytes == storage_nbytes and meta.nbytes == storage_nbytes:
        fake = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
    else:
        fake = torch.empty(elements, dtype=meta.dtype, device=meta.device)
        fake = fake.as_strided(meta.shape, meta.stride, meta.offset)
    return with_flags(fake, meta.flags)


def with_flags(tensor: torch.Tensor, flags: int) -> torch.Tensor:
    """``tensor`` with the conjugate and negative bits of a :class:`TensorMeta`."""
    if flags & 1:
        tensor = tensor.conj()
    if flags & 2:
        tensor = private_api.neg_view(tensor)
    return tensor


def _nbytes(inputs: Sequence[Any]) -> int:
    return sum(value.storage.nbytes for value in inputs)


def _overlaps_itself(meta: TensorMeta) -> bool:
    return any(step == 0 and size > 1 for size, step in zip(meta.shape, meta.stride))
