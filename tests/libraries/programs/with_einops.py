"""einops: axes by their names."""

from __future__ import annotations

from typing import Any

import torch
from einops import einsum, pack, rearrange, reduce, repeat, unpack
from einops.layers.torch import EinMix, Rearrange, Reduce
from torch import nn

from ..catalog import program


@program()
def functions() -> Any:
    images = torch.randn(4, 3, 8, 8, requires_grad=True)
    patches = rearrange(images, "b c (h p) (w q) -> b (h w) (p q c)", p=4, q=4)
    packed, shapes = pack([patches, torch.randn(4, 48)], "b * d")
    loss = einsum(packed, packed, "b i d, b j d -> b i j").sum()
    loss = loss + repeat(reduce(images, "b c h w -> b c", "mean"), "b c -> (b n) c", n=3).pow(2).sum()
    loss.backward()
    return images, loss, unpack(packed, shapes, "b * d"), reduce(images, "b c (h p) w -> b h", "max", p=2)


@program()
def layers() -> Any:
    model = nn.Sequential(
        Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=4, q=4),
        nn.Linear(48, 16),
        EinMix("b t (g i) -> b t (g o)", weight_shape="g i o", bias_shape="g o", g=2, i=8, o=6),
        Reduce("b t c -> b c", "mean"),
        nn.Linear(12, 5),
    )
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(torch.randn(4, 3, 8, 8)), torch.randint(0, 5, (4,)))
        loss.backward()
        optimizer.step()
    return model, optimizer, loss
