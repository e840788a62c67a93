"""Models of published memory figures that are in no installed package: same layers, same parameters.

They follow the public descriptions of the architectures, and are checked by their number of parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _EncoderBlock(nn.Module):
    """A block of a vision transformer; attention is ``nn.MultiheadAttention`` or one fused projection."""

    def __init__(self, width: int, heads: int, hidden: int, fused: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.heads, self.fused = heads, fused
        if fused:
            self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        else:
            self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def attend(self, x: Tensor) -> Tensor:
        if not self.fused:
            return self.attention(x, x, x, need_weights=False)[0]
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        x = F.scaled_dot_product_attention(query, key, value)
        return self.proj(x.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """ViT with a class token: L/16 as in torchvision (``fused=False``), H/14 as in timm (``fused=True``)."""

    def __init__(
        self, width: int, depth: int, heads: int, hidden: int, patch: int, classes: int, fused: bool = False
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, (224 // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(_EncoderBlock(width, heads, hidden, fused) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(len(x), -1, -1), x), dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class _PlainNorm(nn.Module):
    """Layer normalization composed of single operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        centered = x - x.mean(dim=-1, keepdim=True)
        deviation = torch.sqrt(x.var(dim=-1, keepdim=True, unbiased=False) + 1e-5)
        return self.scale * (centered / deviation) + self.shift


class _PlainGelu(nn.Module):
    """The tanh form of GELU composed of single operators."""

    def forward(self, x: Tensor) -> Tensor:
        factor = torch.sqrt(torch.tensor(2.0 / torch.pi))
        return 0.5 * x * (1 + torch.tanh(factor * (x + 0.044715 * torch.pow(x, 3))))


class _GptAttention(nn.Module):
    def __init__(self, width: int, heads: int, length: int, dropout: float, form: str) -> None:
        super().__init__()
        self.heads, self.form, self.rate = heads, form, dropout
        if form == "flash":
            self.qkv = nn.Linear(width, 3 * width, bias=False)
        else:
            self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.proj = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        if form == "kept mask":
            self.register_buffer("mask", torch.triu(torch.ones(length, length), diagonal=1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        size = width // self.heads
        if self.form == "flash":
            qkv = self.qkv(x).view(batch, length, 3, self.heads, size).permute(2, 0, 3, 1, 4)
            query, key, value = qkv
            rate = self.rate if self.training else 0.0
            x = F.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=True)
            return self.proj(x.transpose(1, 2).contiguous().view(batch, length, width))
        key, query, value = (
            layer(x).view(batch, length, self.heads, size) for layer in (self.key, self.query, self.value)
        )
        key, query, value = key.transpose(1, 2), query.transpose(1, 2), value.transpose(1, 2)
        scores = query @ key.transpose(2, 3)
        if self.form == "kept mask":
            kept: Tensor = self.mask  # type: ignore[assignment]
            mask = kept.bool()[:length, :length]
        else:
            mask = torch.triu(torch.ones(length, length, dtype=torch.bool, device=x.device), diagonal=1)
        scores.masked_fill_(mask, -torch.inf)
        weights = self.dropout(torch.softmax(scores / size**0.5, dim=-1))
        return self.proj((weights @ value).transpose(1, 2).reshape(batch, length, width))


class _GptBlock(nn.Module):
    def __init__(self, width: int, heads: int, length: int, dropout: float, form: str, plain: bool) -> None:
        super().__init__()
        norm: type[nn.Module] = _PlainNorm if plain else nn.LayerNorm
        self.attention = _GptAttention(width, heads, length, dropout, form)
        activation = _PlainGelu() if plain else nn.GELU(approximate="tanh")
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), activation, nn.Linear(4 * width, width))
        self.norm1, self.norm2 = norm(width), norm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.attention(self.norm1(x))) + x
        return self.dropout(self.mlp(self.norm2(x))) + x


class Gpt(nn.Module):
    """GPT-2 small with untied weights.

    ``form`` of the attention: ``"kept mask"`` (a buffer), ``"made mask"`` (made in every call) or
    ``"flash"``; ``plain``: normalization and GELU composed of single operators instead of PyTorch's modules.
    """

    def __init__(self, words: int, length: int, form: str, plain: bool, dropout: float = 0.1) -> None:
        super().__init__()
        width, heads, depth = 768, 12, 12
        self.tokens, self.positions = nn.Embedding(words, width), nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(_GptBlock(width, heads, length, dropout, form, plain) for _ in range(depth))
        )
        self.norm = _PlainNorm(width) if plain else nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(self.dropout(x))))


def _conv(inputs: int, outputs: int, size: int = 1, stride: int = 1, dilation: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, dilation * (size // 2), dilation, bias=False)


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int, dilation: int, first: bool) -> None:
        super().__init__()
        self.conv1, self.conv3 = _conv(inputs, width), _conv(width, 4 * width)
        self.conv2 = _conv(width, width, 3, stride, dilation)
        self.bn1, self.bn2, self.bn3 = (nn.BatchNorm2d(size) for size in (width, width, 4 * width))
        self.shortcut = (
            nn.Sequential(_conv(inputs, 4 * width, 1, stride), nn.BatchNorm2d(4 * width)) if first else None
        )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = F.relu(self.bn2(self.conv2(out)), inplace=True)
        out = self.bn3(self.conv3(out))
        out += x if self.shortcut is None else self.shortcut(x)
        return F.relu(out, inplace=True)


def _convolution_module(inputs: int, outputs: int, size: int, dilation: int = 1) -> nn.Sequential:
    conv = _conv(inputs, outputs, size, dilation=dilation)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class Segmentation(nn.Module):
    """FCN, PSPNet or DeepLabV3 on a dilated ResNet: output stride 8, a stem of three convolutions, an
    auxiliary head.

    Normalization uses only the process's own images; it saves the same tensors for the backward pass as the
    synchronized form.
    """

    def __init__(self, head: str, depths: Sequence[int], classes: int = 19) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _conv(3, 32, 3, 2), nn.BatchNorm2d(32), nn.ReLU(inplace=True),
            _conv(32, 32, 3), nn.BatchNorm2d(32), nn.ReLU(inplace=True),
            _conv(32, 64, 3), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )  # fmt: skip
        stages, inputs = [], 64
        plan = zip(depths, (64, 128, 256, 512), (1, 2, 1, 1), (1, 1, 2, 4))
        for depth, width, stride, dilation in plan:
            blocks = []
            for index in range(depth):
                # The first block of a dilated stage has half its dilation.
                own = dilation // 2 if index == 0 and dilation > 1 else dilation
                blocks.append(_Bottleneck(inputs, width, stride if index == 0 else 1, own, first=index == 0))
                inputs = 4 * width
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.ModuleList(stages)
        self.pools: nn.ModuleList | None = None
        self.dilated: nn.ModuleList | None = None
        if head == "psp":
            self.pools = nn.ModuleList(
                nn.Sequential(nn.AdaptiveAvgPool2d(scale), _convolution_module(2048, 512, 1))
                for scale in (1, 2, 3, 6)
            )
            self.bottleneck = _convolution_module(2048 + 4 * 512, 512, 3)
        elif head == "aspp":
            pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), _convolution_module(2048, 512, 1))
            self.pools = nn.ModuleList([pooled])
            self.dilated = nn.ModuleList(
                _convolution_module(2048, 512, 1 if dilation == 1 else 3, dilation)
                for dilation in (1, 12, 24, 36)
            )
            self.bottleneck = _convolution_module(5 * 512, 512, 3)
        else:
            self.convs = nn.Sequential(_convolution_module(2048, 512, 3), _convolution_module(512, 512, 3))
            self.cat = _convolution_module(2048 + 512, 512, 3)
        self.classify = nn.Conv2d(512, classes, 1)
        self.auxiliary = nn.Sequential(
            _convolution_module(1024, 256, 3), nn.Dropout2d(0.1), nn.Conv2d(256, classes, 1)
        )
        self.dropout = nn.Dropout2d(0.1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(images)
        features = []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        if self.pools is not None:
            size = x.shape[2:]
            pooled = [
                F.interpolate(pool(x), size=size, mode="bilinear", align_corners=False) for pool in self.pools
            ]
            kept = [x] if self.dilated is None else [each(x) for each in self.dilated]
            out = self.bottleneck(torch.cat([*kept, *pooled], dim=1))
        else:
            out = self.cat(torch.cat([x, self.convs(x)], dim=1))
        return self.classify(self.dropout(out)), self.auxiliary(features[2])
