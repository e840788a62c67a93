"""``torch.save`` and other ways to save: tensors that are saved together are evaluated at one sync point.

``torch.save``, ``safetensors.save_file``, and ``save_pretrained`` read one tensor after the other without the
dispatcher.  The tensors that they will read next are in the arguments of the running functions.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, GetSetDescriptorType, MemberDescriptorType
from typing import TYPE_CHECKING, Any

import torch

from ...process.install_paths import PACKAGE
from ...process.traced_frames import may_be_traced
from ...torch_internals import private_api
from ..intercept_ops_outside_blocks import nodes_before_access
from ..lazy_tensor import is_pending
from ..provenance.source_lines import is_user_file
from ..sparse.components import is_sparse, parts_of
from ..tracked_storages import TrackedNode

if TYPE_CHECKING:
    from ..tape import Tape

CAUSES = frozenset({"pickle", "storage access", "data_ptr", "numpy", "share_memory_"})
"""Reads with which tensors are saved, or passed on."""
_MOST = 100_000  # examined objects


def read_with(tape: Tape, tensor: torch.Tensor, *, write: bool, frame: FrameType | None) -> list[TrackedNode]:
    """Pending nodes for the other tensors that a library above ``frame`` received together with ``tensor``.

    ``write``: code that gets the memory may write it.
    """
    while frame is not None and _is_wrapper(frame.f_code):
        frame = frame.f_back
    if frame is None or not _is_library(frame.f_code):  # the user's own code reads it
        return []
    if tensor.layout != torch.strided and not is_sparse(tensor):  # of oneDNN
        return []
    place = _place(tensor)
    nodes: dict[TrackedNode, None] = {}
    with tape.recording.paused(), private_api.no_function_modes():
        while frame is not None and _is_library(frame.f_code):
            pickles = frame.f_code.co_filename in _PICKLING
            for given in _arguments(frame, pickles):
                tensors = list(_tensors(given, pickles))
                if any(_place(each) == place for each in tensors):
                    for each in tensors:
                        nodes.update(dict.fromkeys(nodes_before_access(tape, each, write=write)))
            frame = frame.f_back
    # A failed tensor must not prevent reads of others.
    return [node for node in nodes if node.state == "pending"]


def seen(original: Callable[..., Any]) -> Callable[..., Any]:
    """``original``, a C function, wrapped in a Python frame that has its arguments."""

    @functools.wraps(original)
    def function(obj: Any, *args: Any, **kwargs: Any) -> Any:
        return original(obj, *args, **kwargs)

    return function


def _is_wrapper(code: CodeType) -> bool:
    """Whether it is a function of lazyviz between a read and its caller, which receives no other tensors."""
    return code.co_filename.startswith(PACKAGE) and code.co_filename != seen.__code__.co_filename


def _is_library(code: CodeType) -> bool:
    """Whether it is a library function: user functions do not necessarily save their arguments."""
    return bool(code.co_flags & inspect.CO_OPTIMIZED) and not is_user_file(code.co_filename)


def _place(tensor: torch.Tensor) -> int:
    """A key that is equal for tensors that share memory; for sparse tensors, the memory of their values."""
    if is_sparse(tensor):
        return _place(parts_of(tensor)[-1])
    if is_pending(tensor):
        return id(tensor._lazyviz.storage)  # type: ignore[attr-defined]
    return private_api.storage_address(tensor)


_PICKLING = frozenset({torch.serialization.__file__, seen.__code__.co_filename})
"""Files of functions that save whole objects; others, such as a trainer's methods, save a part of theirs."""


def _arguments(frame: FrameType, pickles: bool) -> list[Any]:
    """The containers and modules among the arguments of a running function, and the user's objects if it
    ``pickles`` them.
    """
    variables = frame.f_locals
    found = [
        content for name in _names(frame.f_code) if _is_looked_into(content := variables.get(name), pickles)
    ]
    content = None
    # Up to Python 3.12, the frame keeps this dictionary, and all its content, alive; see `variables_of`.
    if type(variables) is dict and sys.getrefcount(variables) == 3 and not may_be_traced(frame):
        variables.clear()
    return found


def _names(code: CodeType) -> tuple[str, ...]:
    varying = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + varying]


_CONTAINERS = (dict, list, tuple, torch.nn.Module, torch.optim.Optimizer)


def _is_looked_into(item: Any, pickles: bool) -> bool:
    return isinstance(item, _CONTAINERS) or (pickles and _has_only_attributes(type(item)))


def _has_only_attributes(cls: type) -> bool:
    """Whether it is a class of the user's whose objects are pickled by their attributes."""
    if cls.__module__ == "builtins":  # most are numbers and strings
        return False
    default: Any = object
    if cls.__reduce_ex__ is not default.__reduce_ex__ or cls.__reduce__ is not default.__reduce__:
        return False
    if getattr(cls, "__getstate__", None) is not getattr(default, "__getstate__", None):
        return False  # `object` has it since Python 3.11
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    return cls.__module__ == "__main__" or (file is not None and is_user_file(file))


def _tensors(given: Any, pickles: bool) -> Iterator[torch.Tensor]:
    """The plain tensors in a container, and the sparse ones, at any depth."""
    stack = [given]
    seen: set[int] = set()
    while stack and len(seen) < _MOST:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            plain = type(item) in (torch.Tensor, torch.nn.Parameter) or is_pending(item)
            if plain and (item.layout == torch.strided or is_sparse(item)) and not item.is_nested:
                yield item
        elif _is_looked_into(item, pickles) and id(item) not in seen:
            seen.add(id(item))
            stack += _contents(item)


def _contents(item: Any) -> list[Any]:
    """The content of a container or object, without calling its own methods."""
    if isinstance(item, torch.nn.Module):
        return [vars(item).get(name) for name in ("_parameters", "_buffers", "_modules")]
    if isinstance(item, torch.optim.Optimizer):
        return [vars(item).get(name) for name in ("state", "param_groups")]
    if isinstance(item, dict):
        return list(dict.values(item))
    if isinstance(item, (list, tuple)):
        return list(list.__iter__(item) if isinstance(item, list) else tuple.__iter__(item))
    attributes = [
        attribute
        for cls in type(item).__mro__
        for name, attribute in vars(cls).items()
        if type(attribute) is MemberDescriptorType
        or (name == "__dict__" and type(attribute) is GetSetDescriptorType)
    ]
    found = []
    for attribute in attributes:
        with contextlib.suppress(AttributeError):  # an empty slot
            found.append(attribute.__get__(item))
    return found
