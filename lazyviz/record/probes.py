"""Asking a kernel itself, on small tensors of known content, what its shape rule does not tell.

Shape rules word errors in their own way, take dtypes that no kernel has, and do not mind
operands that overlap.  A probe has the metadata of what was recorded, on memory shared in
the same way, and holds zeros or ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from .. import _torch, _torch_cuda
from .._torch import OpOverload
from ..graph.ir import TensorMeta
from .rng import Generators, state_of


class DataDependent(Exception):
    """The op's result cannot be described without running it."""


LARGEST_NBYTES = 256 * 2**20
"""Inputs above this are not probed."""
_LARGEST_DOUBTFUL_NBYTES = 4 * 2**20  # of inputs and outputs, where only the dtypes are unusual
_COMMON_DTYPES = frozenset((torch.float32, torch.float64))
# They want one dtype of all, which shape rules do not check.
_SAME_DTYPE = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution"}

# LAPACK counts rows from 1, and reads and writes where unchecked pivots say.
_PIVOTED = {"linalg_ldl_solve", "linalg_lu_solve", "lu_solve"}
# They check what their arguments hold in words that are the same for zeros and for ones.
CHECK_CONTENT = {"segment_reduce", "_segment_reduce_backward"}
_FOR_INTEGERS = ("bitwise_", "__and__", "__or__", "__xor__", "__iand__", "__ior__", "__ixor__")


def sharing(values: Sequence[Any]) -> tuple[int, ...]:
    """Which of a call's values share memory: for each the first one on its storage; () if none do."""
    storages = [value.storage for value in values]
    if len(set(storages)) == len(storages):
        return ()
    return tuple([storages.index(storage) for storage in storages])


def answer(op: OpOverload, args: Any, kwargs: Any, inputs: Sequence[Any], fill: int = 0) -> Any:
    """What the kernel returns for probes that hold ``fill``; random ones leave their generator alone."""
    name = op._schema.name.rpartition("::")[2]
    memory: dict[Any, torch.UntypedStorage] = {}
    probes: dict[int, torch.Tensor] = {}
    for value in inputs:
        meta: TensorMeta = value.meta
        if value.storage not in memory:
            elements = value.storage.nbytes // meta.dtype.itemsize
            pivots = name in _PIVOTED and not (meta.dtype.is_floating_point or meta.dtype.is_complex)
            content = torch.full((elements,), fill or int(pivots), dtype=meta.dtype, device=meta.device)
            memory[value.storage] = _torch.TensorBase.untyped_storage(content)
        probe = torch.empty(0, dtype=meta.dtype, device=meta.device)
        _torch.TensorBase.set_(probe, memory[value.storage], meta.offset, meta.shape, meta.stride)
        probes[id(value)] = with_flags(probe, meta.flags)
    states: list[tuple[torch.Generator, torch.Tensor]] = []
    if torch.Tag.nondeterministic_seeded in op.tags:
        own = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Generator)]
        device = inputs[0].meta.device if inputs else torch.device("cpu")
        states = [(generator, state_of(generator)) for generator in own or [Generators.default(device)]]
    try:
        return op(*substitute(args, probes), **substitute(kwargs, probes))
    finally:
        for generator, state in states:
            generator.set_state(state)


def refusal(op: OpOverload, args: Any, kwargs: Any, inputs: Sequence[Any]) -> Exception | None:
    """What the kernel raises for zeros and for ones alike, so not for their sake; None if it takes either."""
    refused = _refusals(op, args, kwargs, inputs)
    return refused[0] if refused else None


def refuses_any(op: OpOverload, args: Any, kwargs: Any, inputs: Sequence[Any]) -> bool:
    """Whether the kernel refuses zeros and ones in the same words, so probably whatever there is."""
    return len({(type(error), str(error)) for error in _refusals(op, args, kwargs, inputs)}) == 1


def _refusals(op: OpOverload, args: Any, kwargs: Any, inputs: Sequence[Any]) -> list[Exception]:
    """What the kernel raises for zeros and for ones; nothing if it takes either.

    A kernel that is not PyTorch's own may do anything: it is called only for the user.
    """
    if op.namespace != "aten" or _nbytes(inputs) > LARGEST_NBYTES or nowhere(inputs, kwargs):
        return []
    refused: list[Exception] = []
    with torch.no_grad(), _torch.kernels_only(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for fill in (0, 1):
            try:
                answer(op, args, kwargs, inputs, fill)
                return []
            except Exception as error:
                refused.append(error.with_traceback(None))  # its frames would keep the user's tensors
    return refused


def unlike_its_rule(name: str, mutates: bool, arguments: dict[str, Any], inputs: Sequence[Any]) -> bool:
    """Whether the kernel may refuse, for every content, what its shape rule takes (in some release)."""
    if name == "as_strided":
        return any(step < 0 for step in arguments["stride"])
    if name == "embedding":
        return arguments["indices"].dtype not in (torch.int64, torch.int32)
    if len(inputs) > 1 and name in _SAME_DTYPE and len({value.meta.dtype for value in inputs}) > 1:
        return True
    if name.startswith(_FOR_INTEGERS) and any(value.meta.dtype.is_floating_point for value in inputs):
        return True
    return mutates and (bool(sharing(inputs)) or any(_overlaps_itself(value.meta) for value in inputs))


def doubtful(inputs: Sequence[Any], result: Any) -> bool:
    """Whether the kernel may lack these dtypes, or refuse empty tensors, and is cheap to ask."""
    dtypes = {value.meta.dtype for value in inputs}
    if len(dtypes) <= 1 and dtypes <= _COMMON_DTYPES and all(value.meta.nbytes for value in inputs):
        return False
    return are_small(inputs, result)


def are_small(inputs: Sequence[Any], result: Any) -> bool:
    """Whether it is cheap to ask the kernel."""
    if any(value.meta.device.type == "meta" for value in inputs) or nowhere(inputs, {}):
        return False
    results = result if isinstance(result, (list, tuple)) else [result]
    made = sum(item.numel() * item.element_size() for item in results if isinstance(item, torch.Tensor))
    return _nbytes(inputs) + made <= _LARGEST_DOUBTFUL_NBYTES


def nowhere(inputs: Sequence[Any], kwargs: Any) -> bool:
    """Whether the kernel is that of a GPU which is not here."""
    absent = _torch_cuda.STAND_INS
    return bool(absent) and (
        kwargs.get("device") in absent or any(value.meta.device in absent for value in inputs)
    )


def check_dimension(name: str, dim: Any, inputs: Sequence[Any], result: Any) -> None:
    """Raise DataDependent where the op is to look at a dimension that is not there."""
    if type(dim) is not int or not inputs:
        return
    made = [len(result.shape)] if isinstance(result, torch.Tensor) else []
    rank = max(1, *made, *[len(value.meta.shape) for value in inputs])
    if not -rank <= dim < rank:
        raise DataDependent(f"{name} over dimension {dim}")


def view_without_memory(op: OpOverload, args: Any, kwargs: Any, inputs: Sequence[Any]) -> None:
    """Take a view with the kernel, which needs no memory; FakeTensor lets some impossible ones pass."""
    with torch.no_grad(), _torch.kernels_only():
        tensors = {}
        for value in inputs:
            meta = value.meta
            elements = torch.empty(
                value.storage.nbytes // meta.dtype.itemsize, dtype=meta.dtype, device="meta"
            )
            tensors[id(value)] = with_flags(
                elements.as_strided(meta.shape, meta.stride, meta.offset), meta.flags
            )
        op(*substitute(args, tensors), **substitute(kwargs, tensors))


def substitute(item: Any, tensors: dict[int, torch.Tensor]) -> Any:
    """``item`` with each value replaced by its tensor."""
    if isinstance(item, dict):
        return {name: substitute(entry, tensors) for name, entry in item.items()}
    if isinstance(item, (list, tuple)):
        return type(item)([substitute(entry, tensors) for entry in item])
    return tensors.get(id(item), item)


def with_flags(tensor: torch.Tensor, flags: int) -> torch.Tensor:
    """``tensor`` with the conjugate and negative bits of a :class:`TensorMeta`."""
    if flags & 1:
        tensor = tensor.conj()
    if flags & 2:
        tensor = _torch.neg_view(tensor)
    return tensor


def _nbytes(inputs: Sequence[Any]) -> int:
    return sum(value.storage.nbytes for value in inputs)


def _overlaps_itself(meta: TensorMeta) -> bool:
    return any(step == 0 and size > 1 for size, step in zip(meta.shape, meta.stride))
