"""Unpatched imports: modules of PyTorch that are first imported in a block must see the others unpatched.

Importing Dynamo takes most of a second, so lazyviz imports it only on first use: by an optimizer, a shape
rule, or a compiler. That can happen inside a block, and modules of Dynamo and Inductor store functions of
PyTorch in tables, which would keep lazyviz's replacements, replace others, or import modules that only CUDA
builds have if a GPU seems to be present. Therefore everything of lazyviz is removed during the import:
patches, and the mode of the importing thread. If another thread reads pending tensors during that time, it
reads them as an operator would.

This module also calls registered functions after a block has imported a library.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from ...torch_internals import private_api
from .attribute_patches import out_of_place

_importing = threading.local()  # `unpatched`: this thread is in such an import, which may import others
ACTIONS: dict[str, Callable[[ModuleType], None]] = {}
"""By module name: called with the module when a block has imported it."""


def when_imported(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call ``action`` now if the module is loaded, otherwise when a block imports it; :func:`forget` cancels
    this.
    """
    module = sys.modules.get(name)
    if module is not None:
        action(module)
    else:
        ACTIONS[name] = action


def forget(name: str) -> None:
    ACTIONS.pop(name, None)


class LateImports(MetaPathFinder):
    """While installed, such imports take place without ``mode`` and without patches."""

    def __init__(self, mode: private_api.TorchDispatchMode) -> None:
        self._mode = mode

    def install(self) -> None:
        # Also if no module is registered yet, because one may be registered inside a block.
        if not self.installed:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        with suppress(ValueError):  # not installed, or a signal handler has removed it
            sys.meta_path.remove(self)

    @property
    def installed(self) -> bool:
        return self in sys.meta_path

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        unpatched = name.startswith("torch.") and not getattr(_importing, "unpatched", False)
        if not unpatched and name not in ACTIONS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            if unpatched:
                spec.loader = _UnpatchedLoader(spec.loader, self._mode)
            if name in ACTIONS:
                spec.loader = _NotifyingLoader(spec.loader, ACTIONS[name])
        return spec


class _LoaderWrapper(Loader):
    """Replaces ``loader`` until the module is executed."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)


class _UnpatchedLoader(_LoaderWrapper):
    """Runs ``loader`` without any of our patches and modes."""

    def __init__(self, loader: Loader, mode: private_api.TorchDispatchMode) -> None:
        super().__init__(loader)
        self._mode = mode

    def exec_module(self, module: ModuleType) -> None:
        _importing.unpatched = True
        try:
            with _without(self._mode), out_of_place():
                super().exec_module(module)
        finally:
            _importing.unpatched = False


class _NotifyingLoader(_LoaderWrapper):
    """Runs ``loader``, and then ``action``."""

    def __init__(self, loader: Loader, action: Callable[[ModuleType], None]) -> None:
        super().__init__(loader)
        self._action = action

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        self._action(module)


@contextmanager
def _without(mode: private_api.TorchDispatchMode) -> Iterator[None]:
    was_there = private_api.remove_mode(mode)  # false if it is handling an op
    try:
        yield
    finally:
        if was_there:
            private_api.insert_mode_at_bottom(mode)
