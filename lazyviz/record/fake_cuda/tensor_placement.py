"""Placement of tensors on an absent GPU through APIs whose C++ code would call the driver.

These are devices given only by index, legacy tensor types (``torch.cuda.HalfTensor``), and ``torch.load``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ...torch_internals import dispatch_level, fake_cuda_devices
from .fake_gpus_protocol import Gpus
from .refused_driver_calls import refusal

_TYPES: dict[str, torch.dtype] = {
    "BFloat16Tensor": torch.bfloat16, "BoolTensor": torch.bool, "ByteTensor": torch.uint8,
    "CharTensor": torch.int8, "DoubleTensor": torch.float64, "FloatTensor": torch.float32,
    "HalfTensor": torch.float16, "IntTensor": torch.int32, "LongTensor": torch.int64,
    "ShortTensor": torch.int16,
}  # fmt: skip

_PARTS = {
    "indices", "values", "crow_indices", "col_indices", "ccol_indices", "row_indices", "compressed_indices",
    "plain_indices",
}  # fmt: skip


def install(gpus: Gpus) -> None:
    _install_numbers(gpus)
    _install_types(gpus)
    _install_sparse(gpus)
    _Storages(gpus).install()


# --- numbers ---------------------------------------------------------------------------


def _install_numbers(gpus: Gpus) -> None:
    """``torch.device("cuda", 1)`` for a device given as ``1``."""

    def device(item: Any) -> Any:
        return torch.device("cuda", gpus.index(item)) if type(item) is int else item

    def numbered(original: Callable[..., Any], by_position: bool) -> Callable[..., Any]:
        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            if by_position and int in map(type, args):
                args = tuple([device(item) for item in args])
            if type(kwargs.get("device")) is int:
                kwargs["device"] = device(kwargs["device"])
            return original(*args, **kwargs)

        return function

    for owner, name in ((torch.Tensor, "to"), (torch.Tensor, "cuda"), fake_cuda_devices.PARSE_TO):
        gpus.patches.set(owner, name, numbered(getattr(owner, name), True))
    for owner, name in fake_cuda_devices.FACTORIES:
        gpus.patches.set(owner, name, numbered(getattr(owner, name), False))


# --- types -----------------------------------------------------------------------------


class _Type(type):
    """The type of ``torch.cuda.FloatTensor`` and similar types, which only serve in type checks."""

    dtype: torch.dtype

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype == cls.dtype

    def __call__(cls, *args: Any) -> torch.Tensor:
        if args and not isinstance(args[0], (int, torch.Size)):
            return torch.tensor(args[0], dtype=cls.dtype, device="cuda")
        return torch.empty(*(args or (0,)), dtype=cls.dtype, device="cuda")


def _install_types(gpus: Gpus) -> None:
    known: dict[Any, torch.dtype] = {}
    for name, dtype in _TYPES.items():
        before = getattr(torch.cuda, name, None)
        kind = _Type(name, (), {"dtype": dtype, "__module__": "torch.cuda"})
        known |= {kind: dtype, f"torch.cuda.{name}": dtype}
        if before is not None:
            known[before] = dtype  # held by a module that imported it
            gpus.patches.set(torch.cuda, name, kind)
    original = torch.Tensor.type

    @functools.wraps(original)
    def convert(tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        found = known.get(dtype) if isinstance(dtype, (str, type)) else None
        if found is not None:
            there = tensor.device if tensor.is_cuda else gpus.device(torch.device("cuda"))
            return tensor.to(there, found, non_blocking)
        if dtype is None:
            return original(tensor)
        return original(tensor, dtype, non_blocking, **kwargs)

    gpus.patches.set(torch.Tensor, "type", convert)


# --- sparse tensors --------------------------------------------------------------------


def _install_sparse(gpus: Gpus) -> None:
    """Constructors that would copy indices and values to the GPU in C++."""

    def placed(original: Callable[..., Any], parts: int) -> Callable[..., Any]:
        @functools.wraps(original)
        def function(*args: Any, device: Any = None, **kwargs: Any) -> Any:
            if device is None or torch.device(device).type != "cuda":
                return original(*args, device=device, **kwargs)
            there = gpus.device(torch.device(device))
            moved = [torch.as_tensor(part, device=there) for part in args[:parts]]
            for name in kwargs.keys() & _PARTS:
                kwargs[name] = torch.as_tensor(kwargs[name], device=there)
            return original(*moved, *args[parts:], **kwargs)

        return function

    gpus.patches.set(torch, "sparse_coo_tensor", placed(torch.sparse_coo_tensor, 2))
    for layout in ("csr", "csc", "bsr", "bsc", "compressed"):
        name = f"sparse_{layout}_tensor"
        gpus.patches.set(torch, name, placed(getattr(torch, name), 3))
    nested = torch.nested.nested_tensor

    @functools.wraps(nested)
    def nested_tensor(*args: Any, **kwargs: Any) -> Any:
        there = torch.device(kwargs.get("device") or "cpu")
        if there.type == "cuda" and kwargs.get("layout") in (None, torch.strided):
            raise refusal("torch.nested.nested_tensor", "With layout=torch.jagged it is planned.")
        return nested(*args, **kwargs)

    gpus.patches.set(torch.nested, "nested_tensor", nested_tensor)


# --- torch.load ------------------------------------------------------------------------


class _Storages:
    """Storages that ``torch.load`` places on a GPU: read on the host, and copied there when tensors are
    created.

    Such a storage reports its GPU; tensors that share it also share its copy on the GPU.
    """

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus

    def install(self) -> None:
        gpus = self._gpus
        owner, name = fake_cuda_devices.RESTORE_LOCATION
        restore = getattr(owner, name)

        def restore_location(storage: Any, location: str) -> Any:
            if location.partition(":")[0] == "cuda":
                return self._put(storage, torch.device(location))
            return restore(storage, location)

        gpus.replace(owner, name, restore_location)

        def cuda(storage: Any, device: Any = None, non_blocking: bool = False) -> Any:
            return self._put(storage, torch.device("cuda", gpus.index(device)))

        gpus.patches.set(torch.UntypedStorage, "cuda", cuda)
        self._install_rebuilding()

    def _install_rebuilding(self) -> None:
        """Functions that create tensors from storages that were read from a file."""
        gpus = self._gpus
        owner, name = fake_cuda_devices.REBUILD_TENSOR
        rebuild = getattr(owner, name)

        def rebuild_tensor(storage: Any, offset: int, size: Any, stride: Any) -> torch.Tensor:
            there = _device_of(storage)
            if there is None:
                return rebuild(storage, offset, size, stride)
            read = functools.partial(rebuild, storage)
            return _placed(storage, (offset, size, stride), storage.dtype, there, read)

        gpus.replace(owner, name, rebuild_tensor)
        owner, name = fake_cuda_devices.REBUILD_TENSOR_OF_DTYPE
        rebuild_of_dtype = getattr(owner, name)

        def rebuild_tensor_of_dtype(
            storage: Any, offset: int, size: Any, stride: Any, requires_grad: bool, hooks: Any, *rest: Any
        ) -> torch.Tensor:
            def read(offset: int, size: Any, stride: Any) -> torch.Tensor:
                return rebuild_of_dtype(storage, offset, size, stride, False, hooks, *rest)

            there = _device_of(storage)
            if there is None:
                return rebuild_of_dtype(storage, offset, size, stride, requires_grad, hooks, *rest)
            made = _placed(storage, (offset, size, stride), rest[0], there, read)
            made._backward_hooks = hooks
            return made.requires_grad_(requires_grad)

        gpus.replace(owner, name, rebuild_tensor_of_dtype)
        unpickler, name = fake_cuda_devices.ALLOWED_WHEN_LOADING
        allowed = getattr(unpickler, name)
        rebuilt = f"{owner.__name__}.{rebuild_of_dtype.__name__}"
        gpus.replace(unpickler, name, lambda: {**allowed(), rebuilt: rebuild_tensor_of_dtype})

    def _put(self, storage: Any, device: torch.device) -> Any:
        storage._lazyviz_device = self._gpus.device(device)
        return storage


def _device_of(storage: Any) -> torch.device | None:
    """The GPU for a storage that was read from a file."""
    return getattr(storage._untyped_storage, "_lazyviz_device", None)


def _placed(
    storage: Any,
    view: tuple[int, Any, Any],
    dtype: torch.dtype,
    device: torch.device,
    read: Callable[[int, Any, Any], torch.Tensor],
) -> torch.Tensor:
    """A tensor on ``device`` with the memory of ``storage``, copied there once for all that share it."""
    untyped = storage._untyped_storage
    flat = getattr(untyped, "_lazyviz_copy", None)
    if flat is None or flat.dtype != dtype:
        flat = read(0, (untyped.nbytes() // dtype.itemsize,), (1,)).to(device)
        untyped._lazyviz_copy = flat
    offset, size, stride = view
    with dispatch_level.no_grad():
        tensor = torch.empty(0, dtype=dtype, device=device)
        tensor.data = flat.as_strided(size, stride, offset)  # the owner of the memory, not a view of it
    return tensor
