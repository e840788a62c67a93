"""Private torch APIs for random generators, and replacement of their methods.

Beside :mod:`lazyviz.torch_internals.private_api`, for recording.  ``tests/test_torch_internals.py`` checks
each entry.
"""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import torch

_modified = ctypes.pythonapi.PyType_Modified


def generator_identity(generator: torch.Generator) -> int:
    """Identity of a generator: the dispatcher hands on the default one in another Python object."""
    return generator._cdata  # type: ignore[attr-defined]


def dictionary_of(owner: Any) -> dict[str, Any]:
    """The attributes of a module or class itself; a class's read-only ``__dict__`` refers to this."""
    if isinstance(owner, type):
        (attributes,) = gc.get_referents(vars(owner))
        return attributes
    return vars(owner)


def has_changed(cls: type) -> None:
    """Have Python look again into the dictionary of a static type of C, where it remembers what it found.

    torch.Generator is one: reading or copying a generator's state reaches neither a dispatch nor a function
    mode, and attributes of such a type cannot be set.
    """
    _modified(ctypes.py_object(cls))
