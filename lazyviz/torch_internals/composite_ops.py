"""Private torch APIs for composite ATen functions, each with its reason.

In addition to :mod:`lazyviz.torch_internals.private_api`, for recording.
``tests/torch_internals/test_private_apis.py`` checks each entry.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

from ..process.global_state_transaction import Transaction
from ..process.tracebacks import shorten

linalg_eigh = torch.ops.aten._linalg_eigh.default
linalg_eigvals = torch.ops.aten._linalg_eigvals.default
linalg_svd = torch.ops.aten._linalg_svd.default
is_functorch_wrapper = torch._C._functorch.is_functorch_wrapped_tensor
_content = torch._C._functorch.get_unwrapped
_is_left = torch._C._functorch.is_dead_tensor_wrapper  # type: ignore[attr-defined]
_CPU_KEYS = DispatchKeySet(DispatchKey.CPU)


class requires_grad_allowed(Transaction):
    """Context in which ``requires_grad_`` may be called inside of functorch's transforms.

    ``nn.Parameter`` calls it for subclasses of tensors, and not for plain tensors.
    """

    def begin(self) -> None:
        allow = torch._C._functorch.set_inplace_requires_grad_allowed
        self.undo_by(functools.partial(allow, torch._C._functorch.get_inplace_requires_grad_allowed()))
        allow(True)


def below_functorch(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside of functorch's wrappers, which have no memory of their own."""
    while is_functorch_wrapper(tensor):
        tensor = _content(tensor)
    return tensor


def is_of_transform(tensor: torch.Tensor) -> bool:
    """Whether it is wrapped by a functorch transform that is still active."""
    return is_functorch_wrapper(tensor) and not _is_left(tensor)


def composite_kernel(name: str) -> Callable[..., Any]:
    """ATen's own kernel of a composite such as ``matmul.out``."""
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")  # the same for all devices
    return functools.partial(kernel.call_boxed, _CPU_KEYS)


_full_after = torch._C._dispatch_keyset_full_after
_BELOW_AUTOGRAD = torch._C._after_ADInplaceOrView_keyset
_AFTER_SNAPSHOT = _full_after(DispatchKey.PythonTLSSnapshot)
# The keys above autograd: autocast and functorch's layers. (As bits, because every intersection of a key set
# keeps its backends.)
_TRANSFORMS = _AFTER_SNAPSHOT.raw_repr() ^ _full_after(DispatchKey.AutocastCPU).raw_repr()


class CompositeCall:
    """A call of a composite op, intercepted at its first dispatch key; calling it continues with ATen's."""

    __slots__ = ("_go_on", "_keys")

    def __init__(self, go_on: Callable[..., Any], keys: Any) -> None:
        self._go_on = go_on
        self._keys = keys & _AFTER_SNAPSHOT

    @property
    def is_next(self) -> bool:
        """Whether ATen's kernel is next, without autocast or functorch layers, which would redispatch."""
        return not self._keys.raw_repr() & _TRANSFORMS

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _STATE_IS_NEEDED:
            with _state_on_entry():
                return self._go_on(self._keys, *args, **kwargs)
        return self._go_on(self._keys, *args, **kwargs)

    def whole(self, *args: Any, **kwargs: Any) -> Any:
        """The result without a gradient; modes see the call as a single op (as in inference mode)."""
        state = _state_on_entry() if _STATE_IS_NEEDED else contextlib.nullcontext()
        with torch._C._AutoDispatchBelowAutograd(), state:
            return self._go_on(self._keys & _BELOW_AUTOGRAD, *args, **kwargs)


# The next key (in inference mode, or below autograd) is that of dispatch modes. In torch 2.11, its kernel
# requires the thread state on entry, which the kernel of PythonTLSSnapshot stores, but our kernels replace
# that one; torch 2.13 does not need it.
_STATE_IS_NEEDED = torch.__version__ < "2.13"


@functools.cache
def _entry_and_exit() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Constructor and destructor of ``at::impl::MaybeSetTLSOnEntryGuard``, which has no Python binding.

    Looked up only once: a ctypes function refers to itself, so each one would stay alive until garbage
    collection.
    """
    library = ctypes.PyDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
    name = "_ZN2at4impl23MaybeSetTLSOnEntryGuard"
    return library[f"{name}C1Ev"], library[f"{name}D1Ev"]


_Guard = ctypes.c_char * 8  # cached, because the class would also stay alive until garbage collection


@contextlib.contextmanager
def _state_on_entry() -> Iterator[None]:
    """Context with the effect of a ``MaybeSetTLSOnEntryGuard``."""
    enter, leave = _entry_and_exit()
    guard = _Guard()
    enter(ctypes.byref(guard))
    try:
        yield
    finally:
        leave(ctypes.byref(guard))


Quick = Callable[[str, Callable[..., Any]], Any]


def override_composites(
    kernels: Mapping[str, Callable[..., Any]], undo: list[Callable[[], object]], quick: Quick | None = None
) -> None:
    """Register ``kernels`` that run before ATen's composites; the first entry in ``undo`` removes them.

    They are called with a :class:`CompositeCall` and the arguments, if a dispatch mode is active or a tensor
    is a wrapper subclass (only such calls have the key ``PythonTLSSnapshot``). ``quick`` is
    ``override_composite`` of the compiled dispatcher: it calls some of them only if they are needed.
    """
    library: Any = _spare.pop() if _spare else torch._C._dispatch_library("IMPL", "aten", "", __file__, 0)
    overrides: list[Any] = []
    undo += [functools.partial(_take_away, library), overrides.clear]
    for name, kernel in kernels.items():
        base, _, overload = name.partition(".")
        handle = getattr(getattr(torch.ops.aten, base), overload or "default")._handle
        before = _before_composite(handle.redispatch_boxed, kernel)
        overrides.append(quick(name, _with_key_set(before)) if quick is not None else None)
        if overrides[-1] is None:
            library.impl(name, _SNAPSHOT, before, True)  # gets the key set


_spare: list[Any] = []
"""The object behind ``torch.library.Library``; each one leaves some bytes behind, which add up."""


def _take_away(library: Any) -> None:
    library.reset()
    if all(library is not other for other in _spare):
        _spare.append(library)


def _with_key_set(before: Callable[..., Any]) -> Callable[..., Any]:
    return lambda bits, *args, **kwargs: before(DispatchKeySet.from_raw_repr(bits), *args, **kwargs)


_SNAPSHOT = "PythonTLSSnapshot"


def _before_composite(go_on: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    def before(keys: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return kernel(CompositeCall(go_on, keys), *args, **kwargs)
        except BaseException as error:
            shorten(error)
            raise

    return before
