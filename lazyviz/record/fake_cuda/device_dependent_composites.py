"""Device-dependent composite ATen functions: they take the CUDA branch for tensors on an absent GPU.

For C++, a planned tensor is not on a CUDA device, so ``is_cuda()`` is false.  These functions get a Python
kernel that takes the branch that PyTorch takes for CUDA tensors; for all other tensors, they are unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...process.global_state_transaction import take_back
from ...torch_internals import composite_ops, fake_cuda_devices
from ..lazy_tensor import is_pending
from . import older_releases, sparse_gradients
from . import rnn as fake_cuda_rnn
from .fake_gpus_protocol import Gpus
from .sdpa_backend_selection import MATH, Call, choose, fused

_aten = torch.ops.aten


class CudaKernels:
    """Registers and removes the kernels."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._undo: list[Callable[[], object]] = []
        self.of: dict[Any, Callable[..., Any]] = {}  # by operator

    def install(self) -> None:
        original = composite_ops.composite_kernel
        self._to_layout = original("to.dtype_layout")
        self._to_device = original("to.device")
        self._dropout_cpu = original("dropout")
        self._attention_cpu = original("scaled_dot_product_attention")
        self._softmax_cpu = original("softmax.int")
        self._log_softmax_cpu = original("log_softmax.int")
        kernels: dict[str, Callable[..., Any]] = {
            "to.dtype_layout": self._to_dtype_layout,
            "to.device": self._to_device_dtype,
            "dropout": self._dropout,
            "scaled_dot_product_attention": self._attention,
            "softmax.int": self._softmax,
            "log_softmax.int": self._log_softmax,
            "embedding_sparse_backward": sparse_gradients.embedding_backward(
                self._gpus.tape, original("embedding_sparse_backward")
            ),
            **fake_cuda_rnn.kernels(self._gpus),
        }
        self.of = {fake_cuda_devices.operator_named(name): kernel for name, kernel in kernels.items()}
        fake_cuda_devices.override(kernels, "CompositeImplicitAutograd", self._undo)
        fake_cuda_devices.run_as_one(["_fused_rms_norm"], self._undo)

    def remove(self) -> None:
        take_back(self._undo)

    # --- from device to device -------------------------------------------------------

    def _to_dtype_layout(self, tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None:
            kwargs["device"] = self._gpus.below(torch.device(device))
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return self._to_layout(tensor, **kwargs)

    def _to_device_dtype(self, tensor: torch.Tensor, device: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._to_device(tensor, self._gpus.below(torch.device(device)), *args, **kwargs)

    # --- dropout ---------------------------------------------------------------------

    def _dropout(self, tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        """``is_fused_kernel_acceptable`` in ATen's Dropout.cpp."""
        if tensor.is_cuda and train and 0 < p < 1 and tensor.numel():
            return _aten.native_dropout.default(tensor, p, train)[0]
        return self._dropout_cpu(tensor, p, train)

    # --- softmax ---------------------------------------------------------------------

    def _softmax(self, tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Half precision is converted to float in the kernel itself (ATen's SoftMax.cpp)."""
        if tensor.is_cuda and older_releases.SOFTMAX_KEEPS_INPUT.holds(self._gpus.gpu.release):
            return older_releases.softmax(tensor, dim, dtype, log=False)
        if tensor.is_cuda and tensor.dtype == torch.float16 and dtype == torch.float32:
            return _aten._softmax.default(tensor, dim, True)
        return self._softmax_cpu(tensor, dim, dtype)

    def _log_softmax(self, tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        if tensor.is_cuda and older_releases.SOFTMAX_KEEPS_INPUT.holds(self._gpus.gpu.release):
            return older_releases.softmax(tensor, dim, dtype, log=True)
        if tensor.is_cuda and tensor.dtype == torch.float16 and dtype == torch.float32:
            return _aten._log_softmax.default(tensor, dim, True)
        return self._log_softmax_cpu(tensor, dim, dtype)

    # --- attention -------------------------------------------------------------------

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if is_pending(query) and query.is_cuda:
            call = Call(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
            kernel = choose(call, self._gpus.gpu.capability)
            if kernel != MATH:
                return fused(call, kernel, scale)
        return self._attention_cpu(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
