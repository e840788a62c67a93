"""``lazyviz.mark_kv_cache``: marks KV caches that lazyviz does not detect."""

from __future__ import annotations

from typing import Any

from ..record.interception import kv_caches
from ..record.tape import tape


def mark_kv_cache(*caches: Any) -> None:
    """Count tensors as KV cache (``plan.by_category["kv_cache"]``), whatever made them.

    transformers' caches and buffers of modules of a class named ``KVCache`` are known without.  Call it where
    the tensors are made, each time that others take their place.

    Args:
        caches: tensors, lists and dictionaries of them, modules (their buffers), or objects that have
            tensors as attributes.

    Raises:
        TypeError: a number, a string or something else that holds no tensors.
    """
    for cache in caches:
        if not kv_caches.note(tape, cache):
            raise TypeError(
                "a KV cache must be tensors or an object that holds tensors: this "
                f"{type(cache).__name__} holds none"
            )
