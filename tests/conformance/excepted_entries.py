"""Entries of PyTorch's operator database that cannot be compared or deferred like the others, and why.

The suites fail where an entry behaves as said here and is not listed, and, when all samples
run, where a listed one does not.
"""

from __future__ import annotations

from lazyviz.torch_internals import private_api

# Memory that nobody wrote: eager differs from itself, so only metadata can be compared.
UNINITIALIZED = frozenset(
    {
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "linalg.lstsq",  # its pivots, on the way to a solution
        "linalg.lstsq.grad_oriented",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
    }
)

_SHAPE = "the shape of its result depends on data"
_SPARSE = "a sparse tensor has no strides, and its number of entries depends on data"
_RESIZE = "it may replace the memory of a tensor"
_CHECK = "it reads values to check its arguments"
_NUMBER = "it returns a Python number"

# Entries with a sync point when run forward, out of place, on tensors of which nothing is known.
FORWARD: dict[str, str] = {
    "__getitem__": _SHAPE + ", with a mask",
    "allclose": _NUMBER,
    "argwhere": _SHAPE,
    "bincount": _SHAPE,
    "cov": _CHECK,
    "equal": _NUMBER,
    "item": _NUMBER,
    "linalg.lstsq": "whether it returns residuals depends on the rank that it computes",
    "linalg.lstsq.grad_oriented": "whether it returns residuals depends on the rank that it computes",
    "masked_select": _SHAPE,
    "nanquantile": _CHECK,
    "narrow": "it reads a start index that is a tensor",
    "nn.functional.ctc_loss": "the shape of a tensor saved for its gradient depends on lengths in tensors",
    "nn.functional.gaussian_nll_loss": _CHECK,
    "nn.functional.one_hot": _SHAPE,
    "nonzero": _SHAPE,
    "quantile": _CHECK,
    "repeat_interleave": _SHAPE + ", with counts in a tensor",
    "resize_": _RESIZE,
    "sparse.mm.reduce": _SPARSE,
    "sparse.sampled_addmm": _SPARSE,
    "tensor_split": "it reads indices from a tensor",
    "to_sparse": _SPARSE,
    "unique": _SHAPE,
    "unique_consecutive": _SHAPE,
}

_FORMULA = "ATen reads values to choose the formula of its gradient"
_EVEN = "ATen reads whether the result is NaN to distribute the gradient"

# Those whose gradient has a sync point, beside the entries above.
BACKWARD: dict[str, str] = {
    "linalg.eig": "ATen checks that the loss does not depend on the phase of an eigenvector",
    "linalg.eigvals": "ATen checks that the loss does not depend on the phase of an eigenvector",
    "masked.prod": _FORMULA,
    "masked_fill": "the gradient of the value is a sum over the elements that the mask selects",
    "max.reduction_no_dim": _EVEN,
    "median": _EVEN,
    "min.reduction_no_dim": _EVEN,
    "nanmedian": _EVEN,
    "ormqr": "its gradient has other strides for tensors without memory",
    "prod": _FORMULA,
}

if private_api.CUMPROD_ASKS_ALWAYS:  # torch 2.11
    BACKWARD |= {"cumprod": _FORMULA, "masked.cumprod": _FORMULA}

# Those whose in-place variant has one, beside FORWARD.
IN_PLACE: dict[str, str] = {}

# Those whose `out=` variant has one, beside FORWARD.
OUT: dict[str, str] = {
    "matmul": "for a vector, ATen temporarily changes the shape of `out=`",
}

# Entries of the databases of custom operators, autograd functions and higher-order operators.
_NUMPY = "it reads its tensors with NumPy"
_PROGRAM = "one operator stands for a program, which runs immediately"
OTHER: dict[str, str] = {
    "NumpyCubeAutogradFunction": _NUMPY,
    "NumpyExpMarkDirtyAutogradFunction": _NUMPY,
    "NumpyMulAutogradFunction": _NUMPY,
    "NumpyNMSCustomOp": _SHAPE,
    "NumpyNonzeroCustomOp": _SHAPE,
    "NumpySortAutogradFunction": _NUMPY,
    "NumpySplitCopyWithIntCustomOp": "it returns a Python number",
    "NumpyTakeAutogradFunction": _NUMPY,
    "cond.simple": "which branch runs depends on data",
    "invoke_quant_packed.simple": _PROGRAM,
    "map.nested": _PROGRAM,
    "map.simple": _PROGRAM,
    "map.triple_nested": _PROGRAM,
}
