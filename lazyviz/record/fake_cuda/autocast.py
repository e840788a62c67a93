"""``torch.autocast("cuda")`` on an absent GPU.

C++ casts if a tensor's ``is_cuda()`` is true, which it is not for a planned tensor.  While such a GPU is
planned, these kernels replace those for autocast and do the same: they cast above autograd, so that gradients
flow through the casts, and cache one cast of each parameter until autocast ends.  The lists are those of
ATen's ``autocast_mode.h``; a test compares them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...process.global_state_transaction import take_back
from ...torch_internals import fake_cuda_devices
from ..intercept_ops_outside_blocks import replaced, tensors_in
from ..interception.attribute_patches import Patches
from ..lazy_tensor import is_pending

LOWER_PRECISION = (
    "_convolution", "_convolution.deprecated", "conv1d", "conv2d", "conv3d", "conv_tbc",
    "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu",
    "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm",
    "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot", "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
    "cudnn_convolution", "cudnn_convolution_transpose",
)  # fmt: skip
FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal",
    "rsqrt", "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus",
    "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm",
    "nuclear_norm.dim", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss",
    "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss",
    "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss",
    "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist",
    "cdist", "renorm", "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d",
    "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_nearest3d",
    "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa",
    "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
    "linalg_matrix_sqrth",
)  # fmt: skip
FLOAT32_RESULT = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum",
    "linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
)  # fmt: skip
WIDEST = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put",
    "tensordot", "scatter_add",
)  # fmt: skip

_BANNED = (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
    "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
    "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
    "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
    "safe to autocast."
)


class AutocastKernels:
    """Registers and removes the kernels."""

    def __init__(self) -> None:
        # By id of a parameter: the parameter and its cast.
        self._casts: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        self._undo: list[Callable[[], object]] = []

    def install(self, patches: Patches) -> None:
        kernels: dict[str, Callable[..., Any]] = {"binary_cross_entropy": _refuse}
        for names, kernel in (
            (LOWER_PRECISION, self._lower_precision),
            (FLOAT32, self._float32),
            (FLOAT32_RESULT, self._float32_result),
            (WIDEST, self._widest),
        ):
            kernels |= {
                name: kernel(fake_cuda_devices.operator_named(name))
                for name in names
                if fake_cuda_devices.has_autocast(name)  # the lists grow from release to release
            }
        kernels["norm.Scalar"] = self._norm
        kernels["norm.ScalarOpt_dim"] = self._norm
        fake_cuda_devices.override(kernels, "AutocastCUDA", self._undo)
        clear = torch.clear_autocast_cache

        def clear_autocast_cache() -> None:
            self._casts.clear()
            clear()

        patches.set(torch, "clear_autocast_cache", clear_autocast_cache)

    def remove(self) -> None:
        take_back(self._undo)
        self._casts.clear()

    # --- casts ------------------------------------------------------------------------

    def _cast(self, item: Any, dtype: torch.dtype) -> Any:
        """``item`` with each eligible tensor cast to ``dtype``."""
        return replaced(item, lambda tensor: self._cast_tensor(tensor, dtype))

    def _cast_tensor(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not _is_eligible(tensor) or tensor.dtype == dtype:
            return tensor
        kept = (
            dtype == torch.get_autocast_dtype("cuda")
            and tensor.dtype == torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()
            and torch.is_autocast_cache_enabled()
        )
        if not kept:
            return tensor.to(dtype)
        found = self._casts.get(id(tensor))
        if found is None or found[0]() is not tensor:
            found = self._casts[id(tensor)] = (weakref.ref(tensor), tensor.to(dtype))
        return found[1]

    # --- policies -----------------------------------------------------------------------

    def _lower_precision(self, op: Any) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with fake_cuda_devices.without_autocast():
                dtype = torch.get_autocast_dtype("cuda")
                return op(*self._cast(args, dtype), **self._cast(kwargs, dtype))

        return kernel

    def _float32(self, op: Any) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with fake_cuda_devices.without_autocast():
                return op(*self._cast(args, torch.float32), **self._cast(kwargs, torch.float32))

        return kernel

    def _float32_result(self, op: Any) -> Callable[..., Any]:
        """The argument ``dtype`` is float32 unless the user passed one."""
        names = [argument.name for argument in op._schema.arguments]
        position = names.index("dtype")
        by_name = op._schema.arguments[position].kwarg_only

        def kernel(*args: Any, **kwargs: Any) -> Any:
            if _is_eligible(args[0]) and kwargs.get("dtype") is None:
                if by_name or len(args) <= position:
                    kwargs["dtype"] = torch.float32
                elif args[position] is None:
                    args = (*args[:position], torch.float32, *args[position + 1 :])
            with fake_cuda_devices.without_autocast():
                return op(*args, **kwargs)

        return kernel

    def _norm(self, tensor: torch.Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False) -> torch.Tensor:
        with fake_cuda_devices.without_autocast():
            dtype = torch.float32 if _is_eligible(tensor) else tensor.dtype
            if dim is None:
                return torch.ops.aten.norm.ScalarOpt_dtype(tensor, p, dtype=dtype)
            return torch.ops.aten.norm.ScalarOpt_dim_dtype(tensor, p, dim, keepdim, dtype=dtype)

    def _widest(self, op: Any) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with fake_cuda_devices.without_autocast():
                dtype = torch.get_autocast_dtype("cuda")
                for tensor in tensors_in((*args, *kwargs.values())):
                    if _is_eligible(tensor) and tensor.dtype == torch.float32:
                        dtype = torch.float32
                return op(*self._cast(args, dtype), **self._cast(kwargs, dtype))

        return kernel


def _is_eligible(tensor: Any) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and is_pending(tensor)
        and tensor.is_cuda
        and tensor.is_floating_point()
        and tensor.dtype != torch.float64
    )


def _refuse(*args: Any, **kwargs: Any) -> Iterator[Any]:
    raise RuntimeError(_BANNED)
