"""Every private torch API lazyviz relies on, each with the reason for it.

A torch upgrade has this one module to look at; ``tests/test_torch_private.py`` checks
each entry against the installed torch.
"""

from __future__ import annotations

from torch._ops import OpOverload as OpOverload  # the class of torch.ops.aten.add.Tensor, for annotations
