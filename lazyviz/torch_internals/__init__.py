"""Private PyTorch APIs that lazyviz relies on, each with its reason, and the native modules.

``pip install torch`` does not install NumPy. The first PyTorch module that creates a tensor on import warns
about it, which is irrelevant to users; calling ``.numpy()`` raises an error anyway. Importing this package
imports such a module without the warning.
"""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    import torch._subclasses.functional_tensor  # noqa: F401
