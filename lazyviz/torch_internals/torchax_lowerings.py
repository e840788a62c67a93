"""torchax's table of lowerings, without the side effects of importing torchax.

torchax 0.0.13 registers a device named jax, which breaks ``torch.compile`` from then on, disables a fast path
of ``nn.MultiheadAttention`` globally, sets a JAX option and an environment variable for telemetry, and uses
two overloads for named dimensions that PyTorch 2.13 no longer has.  lazyviz only needs its functions on
arrays, so its modules are imported without these side effects and then removed: the user's own ``import
torchax`` starts from scratch. ``tests/execute/xla/test_xla.py`` checks that.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import torch

_GONE = (("prod", "dim_Dimname"), ("index_copy", "dimname"))


@functools.cache
def lowerings() -> dict[Any, Callable[..., Any]]:
    """Functions on JAX arrays by ATen operator, or by the packet of all of its overloads."""
    with _undone():
        from torchax.ops import jaten, ops_registry  # noqa: F401  (jaten fills the registry)
    table = ops_registry.all_aten_ops
    return {op: entry.func for op, entry in table.items() if entry.is_jax_function and not entry.needs_env}


@contextmanager
def _undone() -> Iterator[None]:
    """Prevents or undoes all side effects of importing torchax in the block, except filling its tables."""
    if "torchax" in sys.modules:  # a module that the user has imported stays unchanged
        yield
        return
    stand_ins = []
    for name, overload in _GONE:
        packet = getattr(torch.ops.aten, name)
        if overload not in packet.overloads():
            setattr(packet, overload, object())  # a key of a table that is not used here
            stand_ins.append((packet, overload))
    aside: list[tuple[Any, str, Any]] = [
        (owner, name, getattr(owner, name))
        for owner, name in (
            (torch.utils, "rename_privateuse1_backend"),
            (torch, "_register_device_module"),
            (torch.backends.mha, "set_fastpath_enabled"),
            (jax.config, "update"),
        )
    ]
    environment = dict(os.environ)
    try:
        for owner, name, _ in aside:
            setattr(owner, name, lambda *args, **options: None)
        yield
    finally:
        for owner, name, function in aside:
            setattr(owner, name, function)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        for packet, overload in stand_ins:
            delattr(packet, overload)
        for module in [name for name in sys.modules if name.partition(".")[0] == "torchax"]:
            del sys.modules[module]
