"""Memory that older PyTorch releases used and that ``lazyviz.lazy(torch_version=)`` does not model.

It is visible in published figures, but not documented.  Projections of such runs are too low without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

# Until 2.1, flash attention copied its operands to (batch, length, heads, size), the layout of its result. If
# another layout is required, as in nn.MultiheadAttention, this is one more tensor per layer.
ATTENTION_PACKS = (2, 2)


def _packing(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attention(query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> Tensor:
        if query.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled("cuda"):
            query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value))
        return attend(query, key, value, *arguments, **options)

    return attention


@contextmanager
def of(release: tuple[int, int]) -> Iterator[None]:
    """Context in which attention uses memory as in that release."""
    if release >= ATTENTION_PACKS:
        yield
        return
    packing = _packing(F.scaled_dot_product_attention)
    with mock.patch.object(F, "scaled_dot_product_attention", packing):
        yield
