"""Operators of lazyviz in PyTorch's registry, which keeps those of a module whose import was interrupted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .private_api import OpOverload

NAMESPACE = "lazyviz"
_libraries: dict[str, torch.library.Library] = {}


def define(
    name: str,
    signature: str,
    *,
    overload: str = "",
    kernel: Callable[..., Any] | None = None,
    shape: Callable[..., Any] | None = None,
    tags: Sequence[torch.Tag] = (),
) -> OpOverload:
    """Define the operator ``lazyviz::name.overload``, with a kernel for all devices and one for shapes.

    An earlier definition, by a module that is now imported again, is replaced: PyTorch would refuse it.
    """
    full = f"{name}.{overload}" if overload else name
    if (earlier := _libraries.get(full)) is not None:
        earlier._destroy()
    library = _libraries[full] = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(f"{full}{signature}", tags=tuple(tags))
    if kernel is not None:
        library.impl(full, kernel, "CompositeExplicitAutograd")
    if shape is not None:
        torch.library.register_fake(f"{NAMESPACE}::{full}", shape, lib=library)
    found: OpOverload = getattr(getattr(torch.ops.lazyviz, name), overload or "default")
    return found
