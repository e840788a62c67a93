"""LazyTensor: the tensor a user holds while its value is pending."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeGuard

import torch

from ..graph.ir import Failure, TensorMeta, failure_of
from ..torch_internals import cuda as torch_cuda
from ..torch_internals import private_api, tensor_memory
from .pending_classes import PendingClass, pending_class
from .storage import TensorRef, TrackedValue

_device_below = private_api.TensorBase.device.__get__
_LEGACY_TYPE = private_api.TensorBase.type
_STAND_INS = torch_cuda.STAND_INS


being_swapped: set[int] = set()  # `id` of tensors that exchange all they are: their classes, too
dispatch_unrecorded: Callable[[Any, Any, Any, Any], Any] | None = None  # the recorder's
detach: Callable[[torch.Tensor], torch.Tensor] | None = None  # the recorder's

MOST_TENSORS = 8
"""Tensors that may share a value by :func:`detached`: each that dies is looked for among them."""


class LazyTensor(torch.Tensor):
    """A tensor with true metadata whose value has not been computed yet.

    Once evaluated the same object is an ordinary ``torch.Tensor`` (or ``Parameter``).
    The methods that would read its memory below the dispatcher are patched on
    ``torch.Tensor`` itself while anything is pending (:mod:`lazyviz.record.interception.memory_reads`), since
    real tensors with a pending write need the same care.
    """

    _lazyviz: TrackedValue

    # With an override here, library fast paths would not take a LazyTensor for a tensor.
    __torch_function__ = private_api.disabled_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Reached where no dispatch mode of ours is active: on other threads."""
        assert dispatch_unrecorded is not None
        return dispatch_unrecorded(func, types, args, kwargs or {})

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        see_history(self)
        return describe(self._lazyviz)

    def __getattr__(self, name: str) -> Any:
        """Asked only for what is not there: the error names the class that the tensor has once it is real."""
        cls = self.__dict__.get("_lazyviz_class")
        if cls is None:
            cls = torch.nn.Parameter if "_is_param" in self.__dict__ else torch.Tensor
        raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}", name=name, obj=self)

    @property
    def _is_param(self) -> bool:
        """How ``nn.Parameter`` marks a tensor that it cannot give its class."""
        return bool(self.__dict__.get("_is_param", False))

    @_is_param.setter
    def _is_param(self, is_param: bool) -> None:
        self.__dict__["_is_param"] = is_param
        if is_param and (value := self.__dict__.get("_lazyviz")) is not None and value.storage.role is None:
            value.storage.role = "parameter"

    def detach(self) -> torch.Tensor:
        """Recorded as an op since the user's code calls it, unlike what autograd and ``.data`` detach."""
        assert detach is not None
        return detach(self)

    def _become(self, cls: type[torch.Tensor]) -> None:
        """``tensor.__class__ = cls``: the class that it is to have."""
        ours = cls is LazyTensor or isinstance(cls, PendingClass)
        if ours or id(self) in being_swapped or not (isinstance(cls, type) and issubclass(cls, torch.Tensor)):
            private_api.set_class(self, cls)
        elif lazy_class(cls) is None:
            self.untyped_storage()  # which evaluates it
            self.__class__ = cls
        else:
            take_class(self, cls)

    __class__ = property(type, _become)

    # What C++ says is not true of tensors on a planned, absent device.

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        value = self.__dict__.get("_lazyviz")
        if value is None:  # not tied to its value yet
            return torch_cuda.stands_for(_device_below(self))
        return value.meta.device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return self.device.type == "cuda"

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return self.device.type == "meta"

    def get_device(self) -> int:
        index = self.device.index
        return -1 if index is None else index

    def type(self, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not self.is_cuda:
            return super().type(*args, **kwargs)
        return f"torch.cuda.{_LEGACY_TYPE(torch.empty((), dtype=self.dtype)).removeprefix('torch.')}"


# PyTorch's messages and other people's name the class of what they were given: it is a tensor to the user.
LazyTensor.__name__ = LazyTensor.__qualname__ = torch.Tensor.__name__
LazyTensor.__module__ = torch.Tensor.__module__


def describe(value: TrackedValue) -> str:
    """The one-line form of a pending tensor: ``lazy[8, 512] float32 cuda:0, pending``."""
    meta = value.meta
    forgotten = value.node is not None and failure_of(value.node.error) is Failure.FORGOTTEN
    state = "forgotten" if forgotten else "pending"
    return f"lazy{list(meta.shape)} {str(meta.dtype).removeprefix('torch.')} {meta.device}, {state}"


def see_history(tensor: torch.Tensor) -> None:
    """Ask for ``grad_fn`` as eager's ``repr`` does.

    A view of what was written in place gets its new history only when somebody asks, and until
    then PyTorch refuses to write to it as "a leaf": looking at a tensor decides what the next line does.
    """
    with contextlib.suppress(RuntimeError):  # a history that in-place writes made invalid
        tensor.grad_fn  # noqa: B018


class Wrappers:
    """What makes tensors without memory; :mod:`lazyviz.record.native_recorder` has a compiled form of it."""

    make = staticmethod(tensor_memory.make_wrapper)


def memoryless(meta: TensorMeta, like: torch.Tensor | None = None) -> LazyTensor:
    """A LazyTensor with ``meta``'s metadata, not yet tied to a value.

    It is an inference tensor if ``like`` is one; without ``like`` the mode decides.
    """
    if like is not None and like.is_inference() != torch.is_inference_mode_enabled():
        with private_api.inference_mode(like.is_inference()):
            return memoryless(meta)
    absent = _STAND_INS.get(meta.device)
    if absent is not None:
        tensor = tensor_memory.make_wrapper(
            LazyTensor, meta.shape, meta.stride, meta.offset, meta.dtype, absent
        )
        torch_cuda.mark(tensor)
    else:
        tensor = Wrappers.make(LazyTensor, meta.shape, meta.stride, meta.offset, meta.dtype, meta.device)
    if meta.flags:
        private_api.set_conj(tensor, bool(meta.flags & 1))
        private_api.set_neg(tensor, bool(meta.flags & 2))
    return tensor


def wrap(value: TrackedValue, base: torch.Tensor | None = None) -> LazyTensor:
    """The tensor handed to the user for ``value``, a view of ``base`` if that is given."""
    tensor = memoryless(value.meta, base)
    tensor._lazyviz = value
    TensorRef(tensor, value)
    return tensor


def detached(tensor: LazyTensor) -> LazyTensor | None:
    """Another tensor of the same value, without history; ``None`` if many have it.

    Autograd detaches the results that it saves and the gradients that it stores, and ``.data`` its tensor.
    In eager mode no kernel runs for these, so they are not nodes of the graph.
    """
    value = tensor._lazyviz
    if sum(1 for _ in value.refs()) >= MOST_TENSORS:
        return None
    return wrap(value, tensor)


def make_pending(tensor: torch.Tensor, value: TrackedValue, data: torch.Tensor) -> None:
    """Rebind an existing tensor object (``p.data = data``) to ``value``, keeping its identity."""
    wrapper = memoryless(value.meta, data)
    with torch_cuda.as_on_cpu(tensor, wrapper) if _STAND_INS else contextlib.nullcontext():
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
    """Our op has returned a view of ``tensor``; autograd now notes how to make it again: as in eager mode."""
    private_api.show_as_wrapper(tensor, False)
    value: TrackedValue = tensor._lazyviz  # type: ignore[attr-defined]
    return value.ref_to(tensor)


def is_lazy(tensor: object) -> TypeGuard[LazyTensor]:
    """Whether ``tensor`` is without a value: its class is LazyTensor, or derives from it and the user's."""
    cls = type(tensor)
    return cls is LazyTensor or isinstance(cls, PendingClass)


def lazy_class(cls: type[torch.Tensor]) -> type[torch.Tensor] | None:
    """The class of pending tensors that are to be of class ``cls``; ``None`` if these cannot be pending."""
    return pending_class(cls, LazyTensor)


def take_class(tensor: torch.Tensor, cls: type[torch.Tensor]) -> None:
    """Remember that the pending ``tensor`` is to be of class ``cls`` once it is real."""
    private_api.set_class(tensor, lazy_class(cls) or LazyTensor)
    attributes = tensor.__dict__
    attributes["_lazyviz_class"] = cls
    attributes.pop("_is_param", None)
    if issubclass(cls, torch.nn.Parameter):
        LazyTensor._is_param.__set__(tensor, True)  # type: ignore[attr-defined]


def class_of(tensor: torch.Tensor) -> type[torch.Tensor]:
    """The class of ``tensor``; of a pending one that which it will have."""
    if not is_lazy(tensor):
        return type(tensor)
    attributes = tensor.__dict__
    cls: type[torch.Tensor] | None = attributes.get("_lazyviz_class")
    if cls is None:
        # nn.Parameter marks wrapper subclasses with `_is_param` instead of giving them its class.
        # Others put the mark on tensors with history, which stay what they are.
        marked = "_is_param" in attributes and tensor.is_leaf
        cls = torch.nn.Parameter if marked else torch.Tensor
    return cls


def pending_parameter(cls: type[torch.Tensor], data: torch.Tensor, requires_grad: bool = False) -> Any:
    """``Tensor._make_subclass(cls, data, requires_grad)`` of a pending tensor."""
    tensor = data.detach().requires_grad_(requires_grad)
    take_class(tensor, cls)
    return tensor


def is_plain_class(tensor: object) -> bool:
    """Whether ``tensor`` is a tensor or a parameter, pending or not, and of no class of the user's."""
    return isinstance(tensor, torch.Tensor) and class_of(tensor) in (torch.Tensor, torch.nn.Parameter)


def make_real(tensor: torch.Tensor, real: torch.Tensor) -> None:
    """Turn the user's pending ``tensor`` into an ordinary one on ``real``'s memory."""
    attributes = tensor.__dict__
    cls = class_of(tensor)
    if _STAND_INS:  # it may have been planned
        with torch_cuda.as_on_cpu(tensor):
            private_api.become_real(tensor, real, cls)
    else:
        private_api.become_real(tensor, real, cls)
    attributes.pop("_lazyviz", None)
    attributes.pop("_lazyviz_class", None)
    if issubclass(cls, torch.nn.Parameter):
        attributes.pop("_is_param", None)


def is_pending(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a lazy tensor that has not been evaluated."""
    return is_lazy(tensor) or "_lazyviz" in tensor.__dict__


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether what ``tensor`` holds stands in the host's memory as it is."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
