"""Composite ATen functions that compute differently while a dispatch mode is active.

Such a function checks whether its tensors are subclass-like, which all are while lazyviz's mode is active,
and then calls other operators than for plain tensors, with different bits, or without a check of values that
eager mode makes. Here, these functions get a Python kernel that treats lazy tensors as plain ones; it makes
the same choice as eager mode, and stays deferred.  (If the formula of a gradient makes the check, see
:mod:`lazyviz.record.parity.derivative_formulas`.)

The kernels are registered where PyTorch looks first if there is a dispatch mode or a wrapper subclass, and
nowhere else. Eager code on plain tensors does not reach them, so that they can stay registered from one block
to the next, which saves time in short blocks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...process.global_state_transaction import take_back
from ...torch_internals import composite_ops, private_api
from .. import eager_fallback, native_recorder
from ..intercept_ops_outside_blocks import tensors_in
from ..interception.storage_access import RAW_ACCESS
from ..lazy_tensor import is_pending
from ..sparse import constructors as sparse_constructors
from ..tape import Tape
from . import scattered_gradients
from .other_modes_and_subclasses import Original, is_plain

_bmm, _mm, _mv = torch.ops.aten.bmm, torch.ops.aten.mm, torch.ops.aten.mv
_clone = torch.ops.aten.clone
_unsafe_view = torch.ops.aten._unsafe_view.default

_SPLIT = "tensor_split.tensor_indices_or_sections"

# Not purely composite: they also read and write memory themselves, for plain tensors too.
_ON_RAW_MEMORY = (
    "_pack_padded_sequence_backward",
    "_rowwise_prune",
    "_saturate_weight_to_fp16",
    "_sobol_engine_draw",
    "_sobol_engine_ff_",
    "_sobol_engine_initialize_state_",
    "_sobol_engine_scramble_",
    "choose_qparams_optimized",
    "fbgemm_linear_fp16_weight",
    "fbgemm_linear_fp16_weight_fp32_activation",
    "fbgemm_linear_int8_weight",
    "fbgemm_linear_int8_weight_fp32_activation",
    "fbgemm_linear_quantize_weight",
    "fbgemm_pack_gemm_matrix_fp16",
    "fbgemm_pack_quantized_matrix",
    "fbgemm_pack_quantized_matrix.KN",
    "quantized_gru_cell",
    "quantized_lstm_cell",
    "quantized_rnn_relu_cell",
    "quantized_rnn_tanh_cell",
)


class CompositeKernels:
    """Registers and removes the kernels."""

    def __init__(
        self,
        tape: Tape,
        before_read: Callable[[torch.Tensor, str], None],
        more: Mapping[str, Callable[..., Any]],
    ) -> None:
        """``more`` kernels are those of :mod:`lazyviz.record.parity.derivative_formulas`."""
        self._tape = tape
        self._before_read = before_read
        self._more = more
        self._undo: list[Callable[[], object]] = []

    def install(self) -> None:
        if not self._undo:
            composite_ops.override_composites(
                {
                    "linalg_eigvals": _eigvals,
                    "linalg_eigvalsh": _eigvalsh,
                    "linalg_svdvals": _svdvals,
                    "linalg_matrix_rank.atol_rtol_float_out": _rank_out,
                    "linalg_matrix_rank.atol_rtol_tensor_out": _rank_out,
                    "linalg_matrix_rank.out": _rank_out,
                    "linalg_matrix_rank.out_tol_tensor": _rank_out,
                    "linear": _linear,
                    "matmul": _matmul,
                    "matmul.out": _matmul_out,
                    "max_pool1d": _max_pool1d,
                    "one_hot": _one_hot,
                    "nanquantile": functools.partial(self._quantile, "nanquantile"),
                    "quantile": functools.partial(self._quantile, "quantile"),
                    _SPLIT: self._tensor_split,
                    **{name: functools.partial(self._run_immediately, name) for name in _ON_RAW_MEMORY},
                    **scattered_gradients.KERNELS,
                    **sparse_constructors.kernels(self._tape),
                    **self._more,
                },
                self._undo,
                native_recorder.override_composite(),
            )

    def remove(self) -> None:
        take_back(self._undo)

    # --- memory access without the dispatcher ------------------------------------------

    def _run_immediately(self, name: str, original: Original, *args: Any, **kwargs: Any) -> Any:
        tensors = list(tensors_in((*args, *kwargs.values())))
        if not original.is_next:
            return original(*args, **kwargs)
        tape = self._tape
        for tensor in tensors:
            self._before_read(tensor, RAW_ACCESS)
            tape.tensors.forget_shadow(tensor)
        with tape.recording.paused():
            result = original(*args, **kwargs)
        eager_fallback.note_region(tape, name, tensors, result)
        return result

    # --- a check of values ----------------------------------------------------------

    def _quantile(
        self, name: str, original: Original, tensor: torch.Tensor, q: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        on_cpu = tensor.device.type == "cpu"  # PyTorch does not check it otherwise
        if on_cpu and is_plain(original, q) and q.dtype == tensor.dtype and not q.is_complex():
            self._before_read(q, f"{name} checks its q")
            with self._tape.recording.paused():
                inside = bool(((q >= 0) & (q <= 1)).all())
            if not inside:
                raise RuntimeError(f"{name}() q values must be in the range [0, 1]")
        return original(tensor, q, *args, **kwargs)

    def _tensor_split(
        self, original: Original, tensor: torch.Tensor, indices: torch.Tensor, *args: Any
    ) -> list[torch.Tensor]:
        # C++ reports another device for a tensor on an absent one.
        if original.is_next and indices.device.type == "cuda":
            raise RuntimeError(
                f"tensor_split expected tensor_indices_or_sections to be on cpu, but it's on {indices.device}"
            )
        if original.is_next and indices.dtype == torch.int64:
            # Read from memory, without the dispatcher.
            self._before_read(indices, "tensor_split reads its indices")
        return original(tensor, indices, *args)


# --- no vectors if no gradient needs them ------------------------------------------------


def _eigvals(original: Original, tensor: torch.Tensor) -> torch.Tensor:
    if not original.is_next:
        return original(tensor)
    if _may_be_differentiated(original, tensor):
        return torch.linalg.eig(tensor)[0]
    return composite_ops.linalg_eigvals(tensor)


def _eigvalsh(original: Original, tensor: torch.Tensor, UPLO: str = "L") -> torch.Tensor:
    if not original.is_next:
        return original(tensor, UPLO)
    return composite_ops.linalg_eigh(tensor, UPLO, _may_be_differentiated(original, tensor))[0]


def _svdvals(original: Original, tensor: torch.Tensor, *, driver: str | None = None) -> torch.Tensor:
    if not original.is_next:
        return original(tensor, driver=driver)
    return composite_ops.linalg_svd(tensor, False, _may_be_differentiated(original, tensor), driver=driver)[1]


# --- a bias added in place ---------------------------------------------------------------


def _linear(
    original: Original, image: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    if (
        bias is not None
        and image.dim() != 2
        and not image.is_contiguous()
        and image.layout == torch.strided
        and is_plain(original, image, weight, bias)
        and not private_api.has_tangent(bias)
    ):
        # Under a mode, ATen adds to a copy: the same bits, but the memory of one more result.
        return torch.matmul(image, weight.t()).add_(bias)
    return original(image, weight, bias)


# --- ones written, so that classes are checked ---------------------------------------------


def _one_hot(original: Original, classes: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Under a mode, ATen compares with all classes, and does not notice classes out of range.

    Eager mode writes the ones, on the CPU after it has read the smallest and the largest class. Here, the
    kernel that writes them raises the error if there is one.
    """
    pending = is_pending(classes) and is_plain(original, classes)  # else ATen does as in eager mode
    if not pending or classes.dtype != torch.int64:
        return original(classes, num_classes)
    if not classes.numel():
        if num_classes <= 0:
            raise RuntimeError("Can not infer total number of classes from empty tensor.")
        return classes.new_empty((*classes.shape, num_classes))
    if num_classes == -1:
        num_classes = int(classes.max().item()) + 1
    if num_classes < 1:
        reason = "Class values must be smaller than num_classes."
        raise RuntimeError("num_classes should be positive" if classes.device.type == "cuda" else reason)
    result = torch.zeros((*classes.shape, num_classes), dtype=torch.int64, device=classes.device)
    return result.scatter_(-1, classes.unsqueeze(-1), 1)


# --- maxima without their positions ------------------------------------------------------


def _max_pool1d(original: Original, image: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Without gradients, a separate CPU kernel, whose result has other strides than the one with indices."""
    if image.device.type != "cpu" or _may_be_differentiated(original, image):
        return original(image, *args, **kwargs)
    return original.whole(image, *args, **kwargs)


# --- one matrix for a batch of others ----------------------------------------------------


def _matmul(original: Original, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if _one_matrix_for_a_batch(original, left, right):
        size = left.shape[0]
        product = _bmm.default(left, right.expand(size, -1, -1))
        return _unsafe_view(product, product.shape)
    return original(left, right)


def _matmul_out(
    original: Original, left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor
) -> torch.Tensor:
    if _one_matrix_for_a_batch(original, left, right):
        return _bmm.out(left, right.expand(left.shape[0], -1, -1), out=out)
    differentiates = torch.is_grad_enabled() and any(each.requires_grad for each in (left, right, out))
    if not differentiates and _folds_into_out(left, right) and is_plain(original, left, right, out):
        return _folded_product(original, left, right, out)
    return original(left, right, out=out)


def _folds_into_out(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether ATen multiplies the larger tensor as one matrix, with a view of ``out`` for the result.

    As ``should_fold`` (LinearAlgebra.cpp) says. Then it compares the memory of ``out`` and the view, which
    are two for pending tensors, and would copy one to the other.
    """
    larger, other = (left, right) if left.dim() >= right.dim() else (right.mT, left)
    if larger.dim() < 3 or not 1 <= other.dim() <= 2 or left.dim() == 2:
        return False
    sizes, strides = larger.shape, larger.stride()
    rows = range(larger.dim() - 2)
    return not larger.numel() or all(strides[at] == strides[at + 1] * sizes[at + 1] for at in rows)


def _folded_product(
    original: Original, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    larger, other = (left, right) if left.dim() >= right.dim() else (right.mT, left)
    columns = other.shape[1:]
    shape, rows = [*larger.shape[:-1], *columns], math.prod(larger.shape[:-1])
    if list(out.shape) != shape:
        made = _folded_product(original, left, right, out.new_empty(shape))
        return _clone.out(made, out=out)  # resizes it, with PyTorch's own warning
    try:
        folded = out.view(rows, *columns)
    except RuntimeError:
        return original(left, right, out=out)  # an error in eager mode, too
    (_mm if columns else _mv).out(larger.reshape(rows, larger.shape[-1]), other, out=folded)
    return out


def _rank_out(original: Original, *args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """The rank, in ``out``: under a mode, ATen computes it but does not write it there."""
    if not original.is_next:
        return original(*args, out=out, **kwargs)
    return torch.add(torch.ops.aten.linalg_matrix_rank(*args, **kwargs), 0, out=out)


def _may_be_differentiated(original: Original, tensor: torch.Tensor) -> bool:
    return (
        (torch.is_grad_enabled() and tensor.requires_grad)
        or private_api.has_tangent(tensor)
        or not is_plain(original, tensor)
    )


def _one_matrix_for_a_batch(original: Original, left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether eager mode multiplies matrix by matrix, where under a mode ATen builds one large matrix."""
    return (
        right.dim() == 3
        and left.dim() == 3
        and right.shape[0] == 1
        and not right.requires_grad
        and is_plain(original, left, right)
    )
