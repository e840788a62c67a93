"""The graphs of the golden pictures: typical programs, the same on every machine.

Each is built once a process.  Nothing depends on the machine: weights and data are seeded, the
memory to fit into is named, and one thread is planned for, since kernels' scratch memory
is by thread.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lazyviz
from lazyviz.plan.runtime.cpu_op_times import CpuRates, cache_file

MEMORY = "cpu:1GiB"  # as if the machine had no more
RATES = CpuRates(  # as if it had been calibrated so
    call=2e-6,
    issue=2e-6,
    operators={},
    matmul=((1e5, 5e9), (1e8, 5e10)),
    convolution=((1e6, 5e9), (1e9, 4e10)),
    elementwise=((1e4, 5e9), (1e8, 1e10)),
    function=((1e4, 1e9), (1e8, 2e9)),
    copy=((1e4, 5e9), (1e8, 1e10)),
    softmax=((1e4, 1e9), (1e8, 2e9)),
    norm=((1e4, 1e9), (1e8, 2e9)),
)


@contextmanager
def same_speed() -> Iterator[None]:
    """Times are projected as for a machine of :data:`RATES`, whatever this one is."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, XDG_CACHE_HOME=folder):
        file = cache_file()
        file.parent.mkdir()
        file.write_text(RATES.text(), encoding="utf-8")
        yield


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 128)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.hidden(x)))


class Block(nn.Module):
    """A basic block of a residual network."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        even = inside == outside and stride == 1
        self.shortcut = nn.Identity() if even else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        widths = (64, 64, 128, 256, 512)
        self.stages = nn.Sequential(
            *(nn.Sequential(Block(a, b, 1 if a == b else 2), Block(b, b, 1)) for a, b in pairwise(widths))
        )
        self.head = nn.Linear(512, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


class Tagger(nn.Module):
    """An LSTM that is called step by step, as people write it by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, 32)
        self.cell = nn.LSTMCell(32, 64)
        self.head = nn.Linear(64, 12)

    def forward(self, words: Tensor) -> Tensor:
        hidden = words.new_zeros(words.shape[0], 64, dtype=torch.float32)
        memory = torch.zeros_like(hidden)
        found = []
        for step in range(words.shape[1]):
            hidden, memory = self.cell(self.embed(words[:, step]), (hidden, memory))
            found.append(self.head(hidden))
        return torch.stack(found, 1)


def mlp() -> tuple[Any, Any]:
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
    with lazyviz.lazy(MEMORY, batch=[x, y]) as graph:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return graph, (model, optimizer, loss)


def resnet() -> tuple[Any, Any]:
    model = ResNet18()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = torch.randn(8, 3, 224, 224), torch.randint(0, 1000, (8,))
    with lazyviz.lazy(MEMORY) as graph:
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    return graph, (model, optimizer, loss)


def gpt2() -> tuple[Any, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config()).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 50257, (2, 128))
    with lazyviz.lazy(MEMORY, batch=[tokens]) as graph:
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
    return graph, (model, optimizer, loss)


def llama() -> tuple[Any, Any]:
    """Llama-3-70B's step for a GPU that is not there."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    with lazyviz.lazy(device="H100-80GB") as graph:
        with torch.device("cuda"):
            model: Any = transformers.LlamaForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters())
        tokens = torch.randint(0, config.vocab_size, (1, 2048), device="cuda")
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
    return graph, (model, optimizer, loss)


def lstm() -> tuple[Any, Any]:
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters())
    words, tags = torch.randint(0, 500, (16, 200)), torch.randint(0, 12, (16, 200))
    with lazyviz.lazy(MEMORY) as graph:
        loss = F.cross_entropy(model(words).flatten(0, 1), tags.flatten())
        loss.backward()
        optimizer.step()
    return graph, (model, optimizer, loss)


def syncs() -> tuple[Any, Any]:
    """A cell that reads values at three places."""
    model = MLP()
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
    with lazyviz.lazy(MEMORY) as graph:
        scores = model(x)
        right = (scores.argmax(1) == y).nonzero()
        loss = F.cross_entropy(scores, y)
        if loss > 0.1:
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return graph, (model, loss, right, norm)


def failed() -> tuple[Any, Any]:
    """A word that the embedding does not have, which only running the cell shows."""
    model = Tagger()
    words, tags = torch.randint(0, 500, (4, 6)), torch.randint(0, 12, (4, 6))
    words[2, 3] = 700
    with lazyviz.lazy(MEMORY) as graph:
        loss = F.cross_entropy(model(words).flatten(0, 1), tags.flatten())
        loss.backward()
    return graph, (model, loss)


def gan() -> tuple[Any, Any]:
    """Two models of one class in one step, one of them called twice."""
    G = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 784), nn.Tanh())
    D = nn.Sequential(nn.Linear(784, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1))
    of_g, of_d = torch.optim.Adam(G.parameters()), torch.optim.Adam(D.parameters())
    z, real = torch.randn(64, 64), torch.randn(64, 784)
    with lazyviz.lazy(MEMORY) as graph:
        fake = G(z)
        bce = F.binary_cross_entropy_with_logits
        ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)
        lossD = bce(D(real), ones) + bce(D(fake.detach()), zeros)
        lossD.backward()
        of_d.step()
        of_g.zero_grad()
        lossG = bce(D(fake), ones)
        lossG.backward()
        of_g.step()
    return graph, (G, D, of_g, of_d, lossD, lossG)


class Down(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, padding=1)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1)
        self.norm = nn.GroupNorm(8, outside)
        self.time = nn.Linear(128, outside)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = F.silu(self.norm(self.conv1(x))) + self.time(t)[:, :, None, None]
        return F.silu(self.conv2(h))


class UNet(nn.Module):
    """Of a diffusion model: what goes down is kept and joined on the way up."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128)) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 128)
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        self.down1 = Down(widths[0], widths[0])
        self.down2 = Down(widths[0], widths[1])
        self.middle = Down(widths[1], widths[2])
        self.up2 = Down(widths[2] + widths[1], widths[1])
        self.up1 = Down(widths[1] + widths[0], widths[0])
        self.out = nn.Conv2d(widths[0], 3, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        t = F.silu(self.embed(t))
        x = self.stem(x)
        a = self.down1(x, t)
        b = self.down2(F.avg_pool2d(a, 2), t)
        c = self.middle(F.avg_pool2d(b, 2), t)
        u = self.up2(torch.cat([F.interpolate(c, scale_factor=2.0), b], 1), t)
        u = self.up1(torch.cat([F.interpolate(u, scale_factor=2.0), a], 1), t)
        return self.out(u)


def unet() -> tuple[Any, Any]:
    net = UNet()
    optimizer = torch.optim.AdamW(net.parameters())
    images, noise, t = torch.randn(4, 3, 64, 64), torch.randn(4, 3, 64, 64), torch.rand(4, 1)
    with lazyviz.lazy(MEMORY) as graph:
        noisy = images * (1 - t[:, :, None, None]) + noise * t[:, :, None, None]
        loss = F.mse_loss(net(noisy, t), noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return graph, (net, optimizer, loss)


class Experts(nn.Module):
    """A mixture of experts, each of which takes the same tokens."""

    def __init__(self, width: int = 128, count: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return sum(
            (weights[..., at, None] * expert(x) for at, expert in enumerate(self.experts)), torch.zeros(())
        )


def moe() -> tuple[Any, Any]:
    moe = Experts()
    optimizer = torch.optim.AdamW(moe.parameters())
    x = torch.randn(8, 64, 128)
    with lazyviz.lazy(MEMORY, batch=[x]) as graph:
        loss = (moe(x) - x).pow(2).mean()
        loss.backward()
        optimizer.step()
    return graph, (moe, optimizer, loss)


def loop() -> tuple[Any, Any]:
    """Twelve steps that each read their loss."""
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, y = torch.randn(64, 32), torch.randn(64, 1)
    total = 0.0
    with lazyviz.lazy(MEMORY) as graph:
        for _ in range(12):
            optimizer.zero_grad()
            loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return graph, (net, optimizer, loss)


def shapes() -> tuple[Any, Any]:
    """A layer that does not take what the one before gives."""
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(4, 8)
    found: list[Any] = []
    try:
        with lazyviz.lazy(MEMORY) as graph:
            found.append(graph)
            h = net[0](x)
            h2 = net[1](h)
            y = net[2](h2)
            y.sum().backward()
    except RuntimeError:
        pass
    return found[0], (net, x)


def many() -> tuple[Any, Any]:
    """About 20,000 ops: a deep network, fifty steps."""
    net = nn.Sequential(*[layer for _ in range(16) for layer in (nn.Linear(64, 64), nn.Tanh())])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, foreach=False)
    x = torch.randn(32, 64)
    with lazyviz.lazy(MEMORY) as graph:
        for _ in range(60):
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
    return graph, (net, optimizer, loss)


PICTURES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "mlp": mlp,
    "gpt2": gpt2,
    "resnet": resnet,
    "lstm": lstm,
    "gan": gan,
    "unet": unet,
    "moe": moe,
    "loop": loop,
    "shapes": shapes,
    "many": many,
    "syncs": syncs,
    "llama-70b": llama,
    "failed": failed,
}
TWELVE = tuple(name for name in PICTURES if name != "failed")  # the cells that the widget is judged by


_kept: dict[str, tuple[Any, Any]] = {}


def recorded(name: str) -> tuple[Any, Any]:
    """The graph of one picture, and what has to stay alive for it; recorded once in each test.

    Between two tests what is pending is forgotten: its ops have failed, and another picture is drawn of them.
    """
    if name not in _kept or any(node.state == "failed" for node in _kept[name][0].nodes):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        torch.manual_seed(0)
        try:
            _kept[name] = PICTURES[name]()
        finally:
            torch.set_num_threads(threads)
    return _kept[name]
