"""LazyTensor: the tensor a user holds while its value is pending."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, ClassVar, TypeGuard

import torch

from ..graph.ir import Failure, TensorMeta, failure_of
from ..torch_internals import dispatcher_bypasses, fake_cuda_devices, private_api
from .interception.attribute_dictionary import Attributes, own_attributes, set_attributes, set_own_attributes
from .lazy_tensors_of_user_classes import PendingClass, pending_class
from .tracked_storages import FORGOTTEN, TensorRef, TrackedValue

_device_below = private_api.TensorBase.device.__get__
_LEGACY_TYPE = private_api.TensorBase.type
_STAND_INS = fake_cuda_devices.STAND_INS
_NEW_PARAMETER = torch.nn.Parameter.__new__.__code__


being_swapped: set[int] = set()  # `id` of tensors that are exchanging everything, including their classes
dispatch_unrecorded: Callable[[Any, Any, Any, Any], Any] | None = None  # set by the recorder
detach: Callable[[torch.Tensor], torch.Tensor] | None = None  # set by the recorder
shown: Callable[[torch.Tensor], str | None] | None = None
"""In a script that must not notice recording: what ``repr`` returns, as ``str`` does, after evaluating the
tensor.  ``None``: only an absent GPU could compute it.
"""

MOST_TENSORS = 8
"""Tensors that may share a value because of :func:`detached`; a tensor that dies is looked up here."""


def _device_of(tensor: Any) -> torch.device:
    value = own_attributes(tensor).get("_lazyviz")
    if value is None:  # not tied to its value yet
        return fake_cuda_devices.stands_for(_device_below(tensor))
    device: torch.device = value.meta.device
    return device


def _read_only(name: str, get: Callable[[Any], Any]) -> property:
    """An attribute with the errors that PyTorch's has where it is set or deleted."""
    original = getattr(private_api.TensorBase, name)
    return property(get, original.__set__, original.__delete__)


class LazyTensor(torch.Tensor, metaclass=PendingClass):
    """A tensor with true metadata whose value has not been computed yet.

    Once evaluated the same object is an ordinary ``torch.Tensor`` (or ``Parameter``).
    The methods that would read its memory below the dispatcher are patched on
    ``torch.Tensor`` itself while anything is pending (:mod:`lazyviz.record.interception.print_numpy_tolist`),
    since real tensors with a pending write need the same care.
    """

    _lazyviz: TrackedValue
    _lazyviz_of: ClassVar[type[torch.Tensor]] = torch.Tensor

    # With an override here, fast paths of libraries would not treat a LazyTensor as a plain tensor.
    __torch_function__ = private_api.disabled_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Called only where our dispatch mode is not active: on other threads."""
        assert dispatch_unrecorded is not None
        return dispatch_unrecorded(func, types, args, kwargs or {})

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        see_history(self)
        values = shown(self) if shown is not None else None
        return values if values is not None else describe(self._lazyviz)

    @property
    def _is_param(self) -> bool:
        """How ``nn.Parameter`` marks a tensor whose class it cannot set."""
        return bool(own_attributes(self).get("_is_param", False))

    @_is_param.setter
    def _is_param(self, is_param: bool) -> None:
        own_attributes(self)["_is_param"] = is_param
        # Other code than nn.Parameter marks tensors with a history, too: they stay tensors.
        if type(self) is LazyTensor or type(self) is LazyParameter:
            private_api.set_class(self, LazyParameter if is_param and self.is_leaf else LazyTensor)
        if (
            is_param
            and (value := own_attributes(self).get("_lazyviz")) is not None
            and value.storage.role is None
        ):
            value.storage.role = "parameter"

    def detach(self) -> torch.Tensor:
        """Recorded as an op because user code calls it, unlike the detaching of autograd and ``.data``."""
        assert detach is not None
        return detach(self)

    def _become(self, cls: type[torch.Tensor]) -> None:
        """``tensor.__class__ = cls``: sets the class that the tensor will have."""
        ours = isinstance(cls, PendingClass)
        if ours or id(self) in being_swapped or not (isinstance(cls, type) and issubclass(cls, torch.Tensor)):
            private_api.set_class(self, cls)
        elif lazy_class(cls) is None:
            self.untyped_storage()  # this evaluates it
            self.__class__ = cls
        else:
            take_class(self, cls)

    __class__ = property(type, _become)

    def _lazyviz_attributes(self) -> dict[str, Any]:
        own = own_attributes(self)
        return own if id(self) in being_swapped else Attributes(own)

    def _lazyviz_set_attributes(self, attributes: dict[str, Any]) -> None:
        (set_own_attributes if id(self) in being_swapped else set_attributes)(self, attributes)

    __dict__ = property(_lazyviz_attributes, _lazyviz_set_attributes)

    # C++ reports wrong properties for tensors on a planned, absent device.

    device = _read_only("device", _device_of)
    is_cuda = _read_only("is_cuda", lambda self: self.device.type == "cuda")
    is_meta = _read_only("is_meta", lambda self: self.device.type == "meta")

    def get_device(self) -> int:
        index = self.device.index
        return -1 if index is None else index

    def type(self, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not self.is_cuda:
            return super().type(*args, **kwargs)
        like = torch.empty((), dtype=self.dtype, device="cpu")
        return f"torch.cuda.{_LEGACY_TYPE(like).removeprefix('torch.')}"


class LazyParameter(LazyTensor):  # type: ignore[metaclass]
    """A pending tensor that will be an ``nn.Parameter``: its class compares equal to that class."""

    __slots__ = ()
    _lazyviz_of = torch.nn.Parameter

    def detach(self) -> torch.Tensor:
        """A tensor; for ``nn.Parameter(p)`` a parameter, because that requires the result to have the same
        class.
        """
        tensor = super().detach()
        if sys._getframe(1).f_code is _NEW_PARAMETER:
            private_api.set_class(tensor, LazyParameter)
        return tensor


# Error messages of PyTorch and other libraries name the class of their argument: the user sees a tensor.
for _cls in (LazyTensor, LazyParameter):
    for _name in ("__name__", "__qualname__", "__module__"):
        type.__setattr__(_cls, _name, getattr(_cls._lazyviz_of, _name))


def describe(value: TrackedValue) -> str:
    """The one-line form of a pending tensor: ``lazy[8, 512] float32 cuda:0, pending``."""
    meta = value.meta
    forgotten = value.node is not None and failure_of(value.node.error) is Failure.FORGOTTEN
    state = "forgotten" if forgotten else "pending"
    return f"lazy{list(meta.shape)} {str(meta.dtype).removeprefix('torch.')} {meta.device}, {state}"


def refusal(value: TrackedValue) -> str:
    """Why a forgotten tensor cannot be read."""
    error = value.node.error if value.node is not None else None
    return f"{describe(value)}; {error if failure_of(error) is Failure.FORGOTTEN else FORGOTTEN}"


def see_history(tensor: torch.Tensor) -> None:
    """Read ``grad_fn`` as eager PyTorch's ``repr`` does.

    After an in-place write, a view gets its new history only when ``grad_fn`` is read. Until then, PyTorch
    refuses to write to it as "a leaf", so printing a tensor changes what the next line does.
    """
    with contextlib.suppress(RuntimeError):  # a history that in-place writes made invalid
        tensor.grad_fn  # noqa: B018


class Wrappers:
    """Creates tensors without memory; :mod:`lazyviz.record.native_recorder` has a compiled form."""

    make = staticmethod(dispatcher_bypasses.make_wrapper)


def memoryless(meta: TensorMeta, like: torch.Tensor | None = None) -> LazyTensor:
    """A LazyTensor with ``meta``'s metadata, not yet tied to a value.

    It is an inference tensor if ``like`` is one; without ``like`` the mode decides.
    """
    if like is not None and like.is_inference() != torch.is_inference_mode_enabled():
        with private_api.inference_mode(like.is_inference()):
            return memoryless(meta)
    absent = _STAND_INS.get(meta.device)
    if absent is not None:
        tensor = dispatcher_bypasses.make_wrapper(
            LazyTensor, meta.shape, meta.stride, meta.offset, meta.dtype, absent
        )
        fake_cuda_devices.mark(tensor)
    else:
        tensor = Wrappers.make(LazyTensor, meta.shape, meta.stride, meta.offset, meta.dtype, meta.device)
    if meta.flags:
        private_api.set_conj(tensor, bool(meta.flags & 1))
        private_api.set_neg(tensor, bool(meta.flags & 2))
    return tensor


def wrap(value: TrackedValue, base: torch.Tensor | None = None) -> LazyTensor:
    """The tensor that the user gets for ``value``, a view of ``base`` if that is given."""
    tensor = memoryless(value.meta, base)
    tensor._lazyviz = value
    TensorRef(tensor, value)
    return tensor


def detached(tensor: LazyTensor) -> LazyTensor | None:
    """Another tensor with the same value, without history; ``None`` if too many tensors have it.

    Autograd detaches the results that it saves and the gradients that it stores, and ``.data`` detaches its
    tensor. In eager mode no kernel runs for these, so they are not nodes of the graph.
    """
    value = tensor._lazyviz
    if sum(1 for _ in value.refs()) >= MOST_TENSORS:
        return None
    return wrap(value, tensor)


def make_pending(tensor: torch.Tensor, value: TrackedValue, data: torch.Tensor) -> None:
    """Rebind an existing tensor object (``p.data = data``) to ``value``, keeping its identity."""
    wrapper = memoryless(value.meta, data)
    with fake_cuda_devices.as_on_cpu(tensor, wrapper) if _STAND_INS else contextlib.nullcontext():
        if is_lazy(tensor):
            private_api.set_metadata(tensor, wrapper)
        else:
            cls = type(tensor)
            private_api.become_pending(tensor, wrapper, lazy_class(cls) or LazyTensor)
            take_class(tensor, cls)
    tensor._lazyviz = value  # type: ignore[attr-defined]
    TensorRef(tensor, value)
    if value.storage.role is None and isinstance(tensor, torch.nn.Parameter):
        value.storage.role = "parameter"


def view_is_being_made(tensor: torch.Tensor) -> TensorRef | None:
    """Our op has returned a view of ``tensor``; autograd now records how to recreate it, as in eager mode."""
    private_api.show_as_wrapper(tensor, False)
    value: TrackedValue = tensor._lazyviz  # type: ignore[attr-defined]
    return value.ref_to(tensor)


def is_lazy(tensor: object) -> TypeGuard[LazyTensor]:
    """Whether ``tensor`` has no value yet."""
    return isinstance(type(tensor), PendingClass)


def lazy_class(cls: type[torch.Tensor]) -> type[torch.Tensor] | None:
    """The class of pending tensors that will have class ``cls``; ``None`` if these cannot be pending."""
    return LazyParameter if cls is torch.nn.Parameter else pending_class(cls, LazyTensor)


def take_class(tensor: torch.Tensor, cls: type[torch.Tensor]) -> None:
    """Remember that the pending ``tensor`` will have class ``cls`` once it is real."""
    private_api.set_class(tensor, lazy_class(cls) or LazyTensor)
    attributes = own_attributes(tensor)
    attributes["_lazyviz_class"] = cls
    attributes.pop("_is_param", None)
    if issubclass(cls, torch.nn.Parameter):
        LazyTensor._is_param.__set__(tensor, True)  # type: ignore[attr-defined]


def class_of(tensor: torch.Tensor) -> type[torch.Tensor]:
    """The class of ``tensor``; for a pending tensor, the class that it will have."""
    if not is_lazy(tensor):
        return type(tensor)
    attributes = own_attributes(tensor)
    cls: type[torch.Tensor] | None = attributes.get("_lazyviz_class")
    if cls is None:
        # nn.Parameter marks wrapper subclasses with `_is_param` instead of setting their class. Other code
        # marks tensors that have a history, and these keep their class.
        marked = "_is_param" in attributes and tensor.is_leaf
        cls = torch.nn.Parameter if marked else torch.Tensor
    return cls


def pending_parameter(cls: type[torch.Tensor], data: torch.Tensor, requires_grad: bool = False) -> Any:
    """``Tensor._make_subclass(cls, data, requires_grad)`` of a pending tensor."""
    tensor = data.detach().requires_grad_(requires_grad)
    take_class(tensor, cls)
    return tensor


def is_plain_class(tensor: object) -> bool:
    """Whether ``tensor`` is a tensor or a parameter, pending or not, without a user-defined class."""
    return isinstance(tensor, torch.Tensor) and class_of(tensor) in (torch.Tensor, torch.nn.Parameter)


def make_real(tensor: torch.Tensor, real: torch.Tensor) -> None:
    """Turn the user's pending ``tensor`` into an ordinary one on ``real``'s memory."""
    attributes = own_attributes(tensor)
    cls = class_of(tensor)
    if _STAND_INS:  # it may only be planned
        with fake_cuda_devices.as_on_cpu(tensor):
            private_api.become_real(tensor, real, cls)
    else:
        private_api.become_real(tensor, real, cls)
    attributes.pop("_lazyviz", None)
    attributes.pop("_lazyviz_class", None)
    if issubclass(cls, torch.nn.Parameter):
        attributes.pop("_is_param", None)


def is_pending(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a lazy tensor that has not been evaluated."""
    return is_lazy(tensor) or "_lazyviz" in own_attributes(tensor)


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether the content of ``tensor`` is in host memory in its plain form."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
