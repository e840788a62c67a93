"""Detection of KV caches: tensors that a model keeps for earlier tokens, a separate category in plans.

For caches of transformers, these are the tensors of their layers.  For others, these are buffers of modules
of a class named ``KVCache``, and tensors passed to :func:`lazyviz.mark_kv_cache`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch

from ..tape import Tape
from . import unpatched_imports
from .attribute_patches import Patches

_MODULE = "transformers.cache_utils"
_LAYERS = ("CacheLayerMixin", "LinearAttentionCacheLayerMixin")


class CachePatches:
    """Notes the tensors that layers of transformers' caches receive while a block is recorded."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._patches = Patches()

    def install(self) -> None:
        if not self._patches and not self._patches.reapply():
            unpatched_imports.when_imported(_MODULE, self._patch)

    def remove(self) -> None:
        unpatched_imports.forget(_MODULE)
        self._patches.restore()

    def _patch(self, module: ModuleType) -> None:
        tape = self._tape

        def keeping(cls: type) -> Any:
            set_attribute: Any = cls.__setattr__

            @functools.wraps(set_attribute)
            def __setattr__(layer: Any, name: str, item: Any) -> None:
                if isinstance(item, torch.Tensor) and item.dim():  # not the count of tokens
                    note(tape, item)
                set_attribute(layer, name, item)

            return __setattr__

        for name in _LAYERS:
            cls = getattr(module, name, None)
            if cls is not None:
                self._patches.set(cls, "__setattr__", keeping(cls))
        cache = getattr(module, "Cache", None)
        update = getattr(cache, "update", None)
        if cache is not None and update is not None:

            @functools.wraps(update)
            def updated(
                kept: Any, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any
            ) -> Any:
                layers = getattr(kept, "layers", ())
                before = vars(layers[layer_idx]) if layer_idx < len(layers) else {}
                for item in list(before.values()):  # created before this block
                    if isinstance(item, torch.Tensor) and item.dim():
                        note(tape, item)
                return update(kept, key_states, value_states, layer_idx, *args, **kwargs)

            self._patches.set(cache, "update", updated)
        self._patches.complete()


def note(tape: Tape, what: Any) -> int:
    """Mark the tensors in ``what`` as a KV cache: a tensor, or those in a container, buffers, or attributes.

    Returns their number.
    """
    if isinstance(what, torch.Tensor):  # a layer of a generated token notes several
        tape.scopes.learn_cache(what, tape.tensors.value_of)
        return 1
    count = 0
    for tensor in _tensors(what, set()):
        if not tensor.dim():  # a count beside it
            continue
        tape.scopes.learn_cache(tensor, tape.tensors.value_of)
        count += 1
    return count


def _tensors(what: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Each tensor once, although objects may refer to each other in cycles."""
    if id(what) in seen:
        return
    seen.add(id(what))
    inner: Iterable[Any] = ()
    if isinstance(what, torch.Tensor):
        yield what
    elif isinstance(what, torch.nn.Module):
        inner = what.buffers()
    elif isinstance(what, Mapping):
        inner = what.values()
    elif isinstance(what, (list, tuple)):
        inner = what
    elif not isinstance(what, (type, ModuleType)):
        inner = getattr(what, "__dict__", {}).values()
    for item in list(inner):
        yield from _tensors(item, seen)
