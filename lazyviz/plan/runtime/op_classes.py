"""Classes of operators by the work of their kernels: matrix products, elementwise ops, copies, ..."""

from __future__ import annotations

import functools
from typing import Literal

import torch

from ...graph.ir import works_by_element
from ...torch_internals.private_api import OpOverload

OpClass = Literal[
    "matmul", "batched matmul", "convolution", "attention", "rnn", "softmax", "norm", "elementwise",
    "reduction", "copy", "indexing", "random", "optimizer", "collective", "allocation", "view",
    "iterative", "other",
]  # fmt: skip
"""``"iterative"``: factorizations and dynamic programs, whose steps depend on each other, so that neither
FLOPs nor bytes determine their time."""

_BY_NAME: dict[str, OpClass] = {}
for _class, _names in (
    ("matmul", "mm addmm linear mv addmv dot vdot addr _addmm_activation _scaled_mm"),
    ("batched matmul", "bmm baddbmm _grouped_mm"),
    (
        "convolution",
        "convolution _convolution convolution_overrideable convolution_backward "
        "convolution_backward_overrideable cudnn_convolution mkldnn_convolution _slow_conv2d_forward "
        "cudnn_convolution_transpose",
    ),
    ("rnn", "_cudnn_rnn _cudnn_rnn_backward mkldnn_rnn_layer mkldnn_rnn_layer_backward"),
    ("softmax", "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data _safe_softmax"),
    (
        "norm",
        "native_layer_norm native_layer_norm_backward native_batch_norm native_batch_norm_backward "
        "_native_batch_norm_legit cudnn_batch_norm cudnn_batch_norm_backward native_group_norm "
        "native_group_norm_backward _fused_rms_norm _fused_rms_norm_backward "
        "_native_batch_norm_legit_no_training _batch_norm_with_update batch_norm_backward",
    ),
    (
        "reduction",
        "sum mean prod amax amin max min argmax argmin var std var_mean std_mean norm linalg_vector_norm "
        "logsumexp cumsum nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward all any",
    ),
    ("copy", "clone copy_ _to_copy cat stack contiguous constant_pad_nd repeat roll flip _reshape_copy"),
    (
        "indexing",
        "embedding embedding_dense_backward index index_select gather scatter scatter_ scatter_add "
        "scatter_add_ index_add index_add_ index_put index_put_ _index_put_impl_ index_copy_ "
        "_embedding_bag masked_select take sort topk",
    ),
    (
        "random",
        "native_dropout normal_ uniform_ bernoulli_ random_ exponential_ randn rand randint randperm "
        "multinomial bernoulli",
    ),
    (
        "iterative",
        "_linalg_det _linalg_eigh _linalg_eigvals _linalg_slogdet _linalg_solve_ex _linalg_svd "
        "linalg_cholesky_ex linalg_eig linalg_eigvals linalg_householder_product linalg_inv_ex "
        "linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor_ex linalg_lu_solve "
        "linalg_matrix_exp linalg_qr linalg_solve_triangular cholesky cholesky_inverse cholesky_solve geqrf "
        "ormqr orgqr triangular_solve _ctc_loss _ctc_loss_backward _cudnn_ctc_loss",
    ),
    (
        "allocation",
        "empty empty_strided empty_like new_empty new_empty_strided empty_permuted _efficientzerotensor",
    ),
):
    _BY_NAME.update(dict.fromkeys(_names.split(), _class))  # type: ignore[arg-type]

_REDUCING = getattr(torch.Tag, "reduction", None)


@functools.cache
def short_name(op: OpOverload) -> str:
    """The operator's name without its namespace and overload: ``"addmm"``."""
    return op._schema.name.rpartition("::")[2]


@functools.cache
def class_of(op: OpOverload) -> OpClass:
    """The class of an operator, from its name and tags; ``"other"`` if neither determines it."""
    namespace, _, name = op._schema.name.rpartition("::")
    if namespace in ("c10d", "_c10d_functional", "_dtensor"):
        return "collective"
    if namespace == "lazyviz" and name.startswith("sparse_"):
        return _class_of_sparse(name.removeprefix("sparse_"))
    if name in _BY_NAME:
        return _BY_NAME[name]
    if "attention" in name or name == "_transformer_encoder_layer_fwd":
        return "attention"
    if name.startswith(("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad", "_amp_foreach")):
        return "optimizer"
    if name.startswith(("new_", "zero", "ones", "full", "fill", "arange", "eye", "scalar_tensor")):
        return "elementwise"  # filling memory
    if works_by_element(op) or name in ("tril", "triu", "tril_", "triu_"):
        return "elementwise"
    if _REDUCING is not None and _REDUCING in op.tags:
        return "reduction"
    return "other"


def _class_of_sparse(name: str) -> OpClass:
    """The class of a sparse kernel: ``"indexing"`` if it gathers or scatters rows of a strided tensor."""
    if name in ("clone", "to_copy", "t", "transpose", "permute"):
        return "copy"
    if name in ("sum", "norm"):
        return "reduction"
    if name in (
        "mm",
        "addmm",
        "bmm",
        "mv",
        "sampled_addmm",
        "add",
        "add_",
        "sub",
        "sub_",
        "mask",
        "to_dense",
    ):
        return "indexing"
    return "softmax" if "softmax" in name else "elementwise"
