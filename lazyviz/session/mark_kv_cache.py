"""``lazyviz.mark_kv_cache``: marks KV caches that lazyviz does not detect."""

from __future__ import annotations

from typing import Any

from ..record.interception import kv_cache_detection
from ..record.tape import tape


def mark_kv_cache(*caches: Any) -> None:
    """Count tensors as KV cache (``plan.by_category["kv_cache"]``).

    Caches of transformers, and buffers of modules of a class named ``KVCache``, are detected without it.
    Call it where the tensors are created, and again whenever other tensors replace them.

    Args:
        caches: tensors, lists and dictionaries of them, modules (their buffers), or objects that have
            tensors as attributes.

    Raises:
        TypeError: an argument, such as a number or string, holds no tensors.
    """
    for cache in caches:
        if not kv_cache_detection.note(tape, cache):
            raise TypeError(
                "a KV cache must be tensors or an object that holds tensors: this "
                f"{type(cache).__name__} holds none"
            )
