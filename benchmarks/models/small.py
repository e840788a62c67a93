"""Hand-written architectures: convolutional, recurrent, graph, mixtures of experts, and others."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def conv(inside: int, outside: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, outside, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outside),
    )


class Residual(nn.Module):
    """A basic or bottleneck block of a residual network."""

    def __init__(self, inside: int, outside: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        inner = outside // 4 if bottleneck else outside
        layers: list[nn.Module] = []
        if bottleneck:
            layers = [conv(inside, inner, 1), nn.ReLU(inplace=True), conv(inner, inner, 3, stride)]
            layers += [nn.ReLU(inplace=True), conv(inner, outside, 1)]
        else:
            layers = [conv(inside, outside, 3, stride), nn.ReLU(inplace=True), conv(outside, outside)]
        self.layers = nn.Sequential(*layers)
        even = inside == outside and stride == 1
        self.shortcut = nn.Identity() if even else conv(inside, outside, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layers(x) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, depths: tuple[int, ...], widths: tuple[int, ...], bottleneck: bool) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        blocks: list[nn.Module] = []
        inside = 64
        for stage, (depth, width) in enumerate(zip(depths, widths)):
            for index in range(depth):
                stride = 2 if stage and not index else 1
                blocks.append(Residual(inside, width, stride, bottleneck))
                inside = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inside, 100)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1).flatten(1))


def resnet18() -> nn.Module:
    return ResNet((2, 2, 2, 2), (64, 128, 256, 512), bottleneck=False)


def resnet50() -> nn.Module:
    return ResNet((3, 4, 6, 3), (256, 512, 1024, 2048), bottleneck=True)


class Inverted(nn.Module):
    """An inverted residual with a depthwise convolution (MobileNetV2)."""

    def __init__(self, inside: int, outside: int, stride: int, expand: int) -> None:
        super().__init__()
        inner = inside * expand
        self.layers = nn.Sequential(
            conv(inside, inner, 1),
            nn.ReLU6(inplace=True),
            conv(inner, inner, 3, stride, groups=inner),
            nn.ReLU6(inplace=True),
            conv(inner, outside, 1),
        )
        self.shortcut = stride == 1 and inside == outside

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        return x + y if self.shortcut else y


def mobilenet() -> nn.Module:
    layers: list[nn.Module] = [conv(3, 32, 3, 2), nn.ReLU6(inplace=True)]
    inside = 32
    for outside, stride, expand, count in (
        (16, 1, 1, 1),
        (24, 2, 6, 2),
        (32, 2, 6, 3),
        (64, 2, 6, 4),
        (96, 1, 6, 3),
        (160, 2, 6, 3),
    ):
        for index in range(count):
            layers.append(Inverted(inside, outside, stride if not index else 1, expand))
            inside = outside
    layers += [conv(inside, 1280, 1), nn.ReLU6(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(1280, 100))


def vgg() -> nn.Module:
    layers: list[nn.Module] = []
    inside = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(inside, width, 3, padding=1), nn.ReLU(inplace=True)]
            inside = width
        layers.append(nn.MaxPool2d(2))
    head = [nn.Flatten(), nn.Linear(512 * 4, 1024), nn.ReLU(), nn.Dropout(), nn.Linear(1024, 100)]
    return nn.Sequential(*layers, *head)


class Dense(nn.Module):
    def __init__(self, inside: int, growth: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(inside + index * growth),
                nn.ReLU(inplace=True),
                nn.Conv2d(inside + index * growth, growth, 3, padding=1, bias=False),
            )
            for index in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


def densenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        Dense(32, 16, 6),
        nn.Conv2d(128, 64, 1),
        nn.AvgPool2d(2),
        Dense(64, 16, 8),
        nn.BatchNorm2d(192),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(192, 100),
    )


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()

        def double(inside: int, outside: int) -> nn.Module:
            return nn.Sequential(conv(inside, outside), nn.ReLU(), conv(outside, outside), nn.ReLU())

        widths = (32, 64, 128, 256)
        self.down = nn.ModuleList(double(a, b) for a, b in zip((3, *widths), widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in itertools.pairwise(widths))
        self.merge = nn.ModuleList(double(2 * a, a) for a in widths[:-1])
        self.head = nn.Conv2d(32, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down[:-1]:
            x = block(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.down[-1](x)
        for up, merge in zip(reversed(self.up), reversed(self.merge)):
            x = merge(torch.cat([up(x), kept.pop()], 1))
        return self.head(x)


class WaveNet(nn.Module):
    """Gated dilated convolutions over a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Conv1d(1, 32, 1)
        self.steps = [2**index for index in range(8)]
        self.layers = nn.ModuleList(nn.Conv1d(32, 64, 2, dilation=step) for step in self.steps)
        self.mix = nn.ModuleList(nn.Conv1d(32, 32, 1) for _ in range(8))
        self.end = nn.Conv1d(32, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for step, layer, mix in zip(self.steps, self.layers, self.mix):
            gate, value = layer(F.pad(x, (step, 0))).chunk(2, 1)
            x = x + mix(torch.sigmoid(gate) * torch.tanh(value))
        return self.end(F.relu(x))


def video() -> nn.Module:
    """Convolutions over space and time."""
    return nn.Sequential(
        nn.Conv3d(3, 32, 3, padding=1),
        nn.BatchNorm3d(32),
        nn.ReLU(),
        nn.Conv3d(32, 64, 3, stride=2, padding=1),
        nn.BatchNorm3d(64),
        nn.ReLU(),
        nn.Conv3d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(64, 100),
    )


def generator() -> nn.Module:
    """Images from noise, by transposed convolutions (DCGAN)."""
    layers: list[nn.Module] = []
    for inside, outside, stride, pad in ((64, 256, 1, 0), (256, 128, 2, 1), (128, 64, 2, 1)):
        layers += [
            nn.ConvTranspose2d(inside, outside, 4, stride, pad, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers, nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh())


class Autoencoder(nn.Module):
    """A variational autoencoder of convolutions and interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(3, 32, 4, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 4, 2, 1), nn.ReLU(), nn.Flatten()
        )
        self.mean, self.spread = nn.Linear(64 * 256, 64), nn.Linear(64 * 256, 64)
        self.start = nn.Linear(64, 64 * 64)
        self.decode = nn.Sequential(
            nn.Upsample(scale_factor=2),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.GroupNorm(8, 64),
            nn.SiLU(),
            nn.Upsample(scale_factor=4, mode="bilinear"),
            nn.Conv2d(64, 3, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.encode(x)
        mean, spread = self.mean(h), self.spread(h)
        z = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        return self.decode(self.start(z).view(-1, 64, 8, 8))


class Tagger(nn.Module):
    """A recurrent network over words."""

    def __init__(self, kind: Callable[..., nn.Module], bidirectional: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(2000, 128)
        self.rnn = kind(128, 256, 2, batch_first=True, dropout=0.1, bidirectional=bidirectional)
        self.head = nn.Linear(512 if bidirectional else 256, 2000)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(ids))[0])


class Cells(nn.Module):
    """A recurrent cell called step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2000, 128)
        self.cell = nn.LSTMCell(128, 256)
        self.head = nn.Linear(256, 2000)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        h = c = x.new_zeros(x.shape[0], 256)
        outputs = []
        for step in range(x.shape[1]):
            h, c = self.cell(x[:, step], (h, c))
            outputs.append(h)
        return self.head(torch.stack(outputs, 1))


class Convolve(nn.Module):
    """One layer of a graph convolution: neighbors' features, summed (GCN)."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inside, outside)

    def forward(self, x: Tensor, edges: Tensor, norm: Tensor) -> Tensor:
        source, target = edges
        messages = self.linear(x)[source] * norm[:, None]
        return x.new_zeros(x.shape[0], messages.shape[1]).index_add(0, target, messages)


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Convolve(a, b) for a, b in ((64, 128), (128, 128), (128, 16)))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        degree = torch.zeros(x.shape[0]).index_add(0, edges[1], torch.ones(edges.shape[1]))
        norm = degree.clamp(min=1).rsqrt()
        norm = norm[edges[0]] * norm[edges[1]]
        for index, layer in enumerate(self.layers):
            x = layer(x, edges, norm)
            if index < 2:
                x = F.dropout(F.relu(x), 0.5, self.training)
        return x


class GraphAttention(nn.Module):
    """Attention over the edges of a graph (GAT)."""

    def __init__(self, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Linear(64, width)
        self.source = nn.Parameter(torch.randn(heads, width // heads) * 0.1)
        self.target = nn.Parameter(torch.randn(heads, width // heads) * 0.1)
        self.head = nn.Linear(width, 16)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        h = self.embed(x).view(x.shape[0], self.heads, -1)
        score = F.leaky_relu((h * self.source).sum(-1)[source] + (h * self.target).sum(-1)[target], 0.2)
        top = torch.zeros(x.shape[0], self.heads).scatter_reduce(
            0, target[:, None].expand_as(score), score, "amax", include_self=False
        )
        weight = (score - top[target]).exp()
        total = torch.zeros(x.shape[0], self.heads).index_add(0, target, weight)
        weight = weight / total[target].clamp(min=1e-9)
        mixed = torch.zeros_like(h).index_add(0, target, h[source] * weight[..., None])
        return self.head(F.elu(mixed.flatten(1)))


class Switch(nn.Module):
    """Each token goes to the expert that its gate prefers (Switch Transformer), sorted by capacity."""

    def __init__(self, width: int = 128, experts: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.gate = nn.Linear(width, experts)
        self.inner = nn.Parameter(torch.randn(experts, width, 4 * width) * 0.02)
        self.outer = nn.Parameter(torch.randn(experts, 4 * width, width) * 0.02)
        self.head = nn.Linear(width, 1000)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        flat = x.flatten(0, 1)
        chance = self.gate(flat).softmax(-1)
        capacity = flat.shape[0] // chance.shape[1]
        weight, tokens = chance.t().topk(capacity, -1)  # experts choose
        h = F.gelu(torch.bmm(flat[tokens], self.inner))
        y = torch.bmm(h, self.outer) * weight[..., None]
        mixed = torch.zeros_like(flat).index_add(0, tokens.flatten(), y.flatten(0, 1))
        return self.head((flat + mixed).view_as(x))


class Recommender(nn.Module):
    """Embeddings of categories and a small network (DLRM)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(5000, 32, mode="sum") for _ in range(4))
        self.dense = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 32))
        self.top = nn.Sequential(nn.Linear(32 + 10, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x: Tensor, *ids: Tensor) -> Tensor:
        dense = self.dense(x)
        parts = torch.stack([dense, *(table(i) for table, i in zip(self.tables, ids))], 1)
        products = torch.bmm(parts, parts.transpose(1, 2))
        upper = torch.triu_indices(5, 5, 1)
        return self.top(torch.cat([dense, products[:, upper[0], upper[1]]], 1))


class PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for a, b in ((3, 64), (64, 128), (128, 512)):
            layers += [nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU()]
        self.points = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, 40))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.points(x).max(2).values)


class Encoder(nn.Module):
    """torch.nn's own transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(128, 1000)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(ids)))
