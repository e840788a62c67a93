"""The ``__dict__`` of a pending tensor, as a program sees it: without our entries.

A program may copy all attributes of a tensor to another one, as in ``new.__dict__.update(old.__dict__)``, or
clear them.  The entry that ties a pending tensor to its value must be neither copied nor lost.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch

OURS = ("_lazyviz", "_lazyviz_class", "_is_param")
"""Entries of a pending tensor that only code which knows their names finds."""

_DESCRIPTOR: Any = torch.Tensor.__dict__["__dict__"]
own_attributes: Callable[[torch.Tensor], dict[str, Any]] = _DESCRIPTOR.__get__
"""The dictionary itself."""
set_own_attributes: Callable[[torch.Tensor, Any], None] = _DESCRIPTOR.__set__


class Attributes(dict[str, Any]):
    """The attributes of a pending tensor: a copy without our entries, which passes changes on to ``own``.

    It is a dictionary, because C code and ``**attributes`` read one directly.
    """

    __slots__ = ("own",)

    def __init__(self, own: dict[str, Any]) -> None:
        super().__init__((name, value) for name, value in own.items() if name not in OURS)
        self.own = own

    def __contains__(self, name: object) -> bool:
        return name in self.own

    def __missing__(self, name: str) -> Any:
        return self.own[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.own.get(name, default)

    def __setitem__(self, name: str, value: Any) -> None:
        self.own[name] = value
        if name not in OURS:
            super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        del self.own[name]
        super().pop(name, None)

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    # In terms of the above.
    pop = MutableMapping.pop
    popitem = MutableMapping.popitem
    clear = MutableMapping.clear
    update = MutableMapping.update
    setdefault = MutableMapping.setdefault


def set_attributes(tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    """``tensor.__dict__ = attributes``, which keeps our entries."""
    before = own_attributes(tensor)
    ours = {name: before[name] for name in OURS if name in before}
    set_own_attributes(tensor, {**attributes, **ours} if isinstance(attributes, dict) else attributes)
