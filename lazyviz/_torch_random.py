"""Private torch APIs on random generators, each with the reason for it.

Beside :mod:`lazyviz._torch`, for recording.  ``tests/test_torch_private.py`` checks each entry.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch


def generator_identity(generator: torch.Generator) -> int:
    """Identity of a generator: the dispatcher hands on the default one in another Python object."""
    return generator._cdata  # type: ignore[attr-defined]


def replace_methods(methods: Mapping[str, Callable[..., Any]]) -> None:
    """Put ``methods`` in the place of torch.Generator's.

    Reading or copying a generator's state reaches neither a dispatch nor a function mode, and
    attributes of a static type of C cannot be set.  But it has a dictionary, which its read-only
    ``__dict__`` refers to.
    """
    (namespace,) = gc.get_referents(vars(torch.Generator))
    namespace.update(methods)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(torch.Generator))
