"""Imports modules without PyTorch's warning about missing NumPy.

``pip install torch`` does not install NumPy.  The first PyTorch module that creates a tensor on import warns
about it, which is irrelevant to users; calling ``.numpy()`` raises an error anyway.  ``lazyviz`` imports this
first.
"""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    import torch._subclasses.functional_tensor  # noqa: F401
