"""Classes with a ``__torch_function__`` see in a block what they see in eager mode."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

import lazyviz

METHODS = (
    "numpy", "tolist", "data_ptr", "untyped_storage", "apply_", "map_", "map2_", "resize_", "set_",
    "share_memory_", "is_shared", "as_subclass", "new_tensor", "type", "__array__", "__deepcopy__",
    "__dlpack__", "__reduce_ex__", "__repr__", "__format__",
    "__bool__", "__int__", "__float__", "__complex__", "__index__",
)  # fmt: skip
HELD = {name: getattr(torch.Tensor, name) for name in METHODS}
ARGUMENTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "apply_": lambda: (lambda value: value + 1,),
    "map_": lambda: (torch.ones(1), lambda a, b: a + b),
    "map2_": lambda: (torch.ones(1), torch.ones(1), lambda a, b, c: a + b + c),
    "resize_": lambda: (2,),
    "set_": lambda: (torch.ones(1),),
    "as_subclass": lambda: (torch.Tensor,),
    "new_tensor": lambda: ([1.0],),
    "__deepcopy__": lambda: ({},),
    "__reduce_ex__": lambda: (2,),
    "__format__": lambda: ("",),
}


class WithTable(torch.Tensor):
    """It handles the methods in a table made outside of blocks, as classes of libraries do."""

    handled: ClassVar[dict[Any, str]] = {function: name for name, function in HELD.items()}

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in cls.handled:
            return f"handled {cls.handled[func]}"
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("set_", "as_subclass")])
def test_a_table_of_methods_made_outside_of_the_block_has_them(name):
    arguments = ARGUMENTS.get(name, tuple)
    tensor = torch.ones(1).as_subclass(WithTable)
    expected = getattr(torch.Tensor, name)(tensor, *arguments())
    assert expected == f"handled {name}"
    listed = torch.overrides.is_tensor_method_or_property(HELD[name])
    with lazyviz.lazy():
        kept = torch.ones(1) + 1
        assert getattr(torch.Tensor, name)(tensor, *arguments()) == expected
        assert getattr(torch.Tensor, name) in {HELD[name]} and HELD[name] in {getattr(torch.Tensor, name)}
        assert torch.overrides.is_tensor_method_or_property(getattr(torch.Tensor, name)) == listed
    assert kept.item() == 2


@pytest.mark.parametrize("attribute", ["data", "__cuda_array_interface__"])
def test_getters_equal_those_that_they_replace(attribute):
    held = getattr(torch.Tensor, attribute).__get__
    with lazyviz.lazy():
        kept = torch.ones(1) + 1
        found = getattr(torch.Tensor, attribute).__get__
        assert found in {held} and type(found).__name__ == "method-wrapper"
    assert kept.item() == 2


def test_functions_have_their_names_for_torch_overrides():
    with lazyviz.lazy():
        assert torch.overrides.resolve_name(torch.ctc_loss) == "torch.ctc_loss"
        found = pickle.loads(pickle.dumps([torch.Tensor.numpy, torch.Tensor.__deepcopy__]))
        assert found == [HELD["numpy"], HELD["__deepcopy__"]]
    assert found == [HELD["numpy"], HELD["__deepcopy__"]]


class Redispatching(torch.Tensor):
    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func.__name__)
        assert len(cls.seen) < 200
        return torch.overrides.redispatch_function(func, types, args, kwargs or {})


CALLS: dict[str, Callable[[Any], Any]] = {
    **{name: lambda x, name=name: getattr(x, name)(*ARGUMENTS.get(name, tuple)()) for name in METHODS},
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "str": str,
    "format": lambda x: f"{x}",
    "save": lambda x: torch.save(x, io.BytesIO()),
    "data": lambda x: x.data,
    "add": lambda x: x + 1,
    "bool": bool,
    "list": lambda x: torch.tensor([x]).shape,
}


@pytest.mark.skipif(not hasattr(torch.overrides, "redispatch_function"), reason="new in torch 2.13")
@pytest.mark.parametrize("beside", ["nothing", "a planned GPU"])
@pytest.mark.parametrize("name", CALLS)
def test_a_class_that_redispatches_sees_the_same_calls(name, beside):
    def calls():
        tensor = torch.ones(1, dtype=torch.int64 if name == "__index__" else None).as_subclass(Redispatching)
        Redispatching.seen.clear()
        try:
            result = CALLS[name](tensor)
        except (RuntimeError, TypeError) as error:
            result = error
        return type(result), list(Redispatching.seen)

    expected = calls()
    if beside == "a planned GPU":
        with lazyviz.lazy(device="A100-40GB"):
            planned = torch.ones(2, device="cuda") + 1
    else:
        planned = None
    with lazyviz.lazy():
        kept = torch.ones(1) + 1
        assert calls() == expected
    assert kept.item() == 2
    del planned


class Wrapper:
    """A tensor with a unit, after PyTorch's notes on extending it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return func(*(arg.tensor if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))


@pytest.mark.parametrize("name", ["numpy", "tolist", "__float__", "__bool__", "__repr__", "__deepcopy__"])
def test_a_wrapper_hands_its_pending_tensor_to_the_method(name):
    """Also to a method that was taken from the class in the block."""
    with lazyviz.lazy():
        pending = torch.ones(1) * 3
        method = getattr(torch.Tensor, name)
        found = Wrapper.__torch_function__(method, (), (Wrapper(pending), *ARGUMENTS.get(name, tuple)()))
        expected = pending if name == "__deepcopy__" else found
    if isinstance(expected, torch.Tensor):
        assert found.tolist() == expected.tolist() == [3.0]
    elif name != "__repr__":
        assert found == HELD[name](torch.ones(1) * 3)
