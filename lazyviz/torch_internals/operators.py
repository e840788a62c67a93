"""Operators of lazyviz in PyTorch's registry, which keeps those of a module whose import was interrupted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .private_api import OpOverload

_libraries: dict[str, torch.library.Library] = {}


def define(
    name: str,
    signature: str,
    *,
    kernel: Callable[..., Any] | None = None,
    shape: Callable[..., Any] | None = None,
    tags: Sequence[torch.Tag] = (),
) -> OpOverload:
    """Define the operator ``lazyviz::name``, with a kernel for all devices and one for shapes.

    An earlier definition, by a module that is now imported again, is replaced: PyTorch would refuse it.
    """
    if (earlier := _libraries.get(name)) is not None:
        earlier._destroy()
    library = _libraries[name] = torch.library.Library("lazyviz", "FRAGMENT")
    library.define(f"{name}{signature}", tags=tuple(tags))
    if kernel is not None:
        library.impl(name, kernel, "CompositeExplicitAutograd")
    if shape is not None:
        torch.library.register_fake(f"lazyviz::{name}", shape, lib=library)
    found: OpOverload = getattr(torch.ops.lazyviz, name).default
    return found
