"""Patches for compiled functions: ``torch.export`` sees real tensors, AOTAutograd accepts pending ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

from ...torch_internals import dynamo
from ..lazy_tensor import LazyTensor
from . import unpatched_imports
from .attribute_patches import Patches


class RunImmediately(Protocol):
    """Wraps a function: pending ops are evaluated first, and lazyviz is inactive while it runs."""

    def __call__(
        self, function: Callable[..., Any], cause: str, also: tuple[Any, ...] = ()
    ) -> Callable[..., Any]: ...


class _Types(tuple[type, ...]):
    """A tuple of types whose class identifies it as a replacement by lazyviz."""


class CompilerPatches:
    """While a block is recorded, exports see real tensors, and type checks of compiled code accept pending
    ones.
    """

    def __init__(self, run_immediately: RunImmediately) -> None:
        self._run_immediately = run_immediately
        self._patches = {name: Patches() for name in (dynamo.KEEPS_WHAT_IT_FINDS, dynamo.AOT_WRAPPERS)}

    def install(self) -> None:
        patch = {
            dynamo.KEEPS_WHAT_IT_FINDS: self._patch_export,
            dynamo.AOT_WRAPPERS: self._patch_check,
        }
        for name, patches in self._patches.items():
            if not patches and not patches.reapply():
                unpatched_imports.when_imported(name, patch[name])

    def remove(self) -> None:
        for name, patches in self._patches.items():
            unpatched_imports.forget(name)
            patches.restore()

    def _patch_check(self, module: ModuleType) -> None:
        """Let the first call of a compiled function accept pending tensors, whose class it would reject."""
        patches = self._patches[dynamo.AOT_WRAPPERS]
        known = getattr(module, dynamo.HANDLED_TYPES, None)
        if known is not None:
            patches.set(module, dynamo.HANDLED_TYPES, _Types((*known, LazyTensor)))
        patches.complete()

    def _patch_export(self, module: ModuleType) -> None:
        """Dynamo's ``export(f)`` returns a function that traces ``f`` on its arguments."""
        patches = self._patches[dynamo.KEEPS_WHAT_IT_FINDS]
        original = getattr(module, "export", None)
        if original is not None:

            @functools.wraps(original)
            def export(f: Any, *args: Any, **kwargs: Any) -> Any:
                if args:  # as it was called before torch 2.1
                    return self._run_immediately(original, dynamo.EXPORT)(f, *args, **kwargs)
                return self._run_immediately(original(f, **kwargs), dynamo.EXPORT, (f,))

            patches.set(module, "export", export)
        patches.complete()
