"""Private torch APIs for random generators, and replacement of their methods.

In addition to :mod:`lazyviz.torch_internals.private_api`, for recording.
``tests/torch_internals/test_private_apis.py`` checks each entry.
"""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import torch

_modified = ctypes.pythonapi.PyType_Modified


def generator_identity(generator: torch.Generator) -> int:
    """Identity of a generator: the dispatcher passes the default one in another Python object."""
    return generator._cdata  # type: ignore[attr-defined]


def dictionary_of(owner: Any) -> dict[str, Any]:
    """The attribute dictionary of a module or class itself; a class's read-only ``__dict__`` refers to it."""
    if isinstance(owner, type):
        (attributes,) = gc.get_referents(vars(owner))
        return attributes
    return vars(owner)


def has_changed(cls: type) -> None:
    """Make Python read the dictionary of a static C type again, whose lookups it caches.

    torch.Generator is such a type: reading or copying a generator's state reaches neither a dispatch mode nor
    a function mode, and attributes of such a type cannot be set.
    """
    _modified(ctypes.py_object(cls))
