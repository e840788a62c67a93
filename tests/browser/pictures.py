"""The graphs of the golden pictures: what people record, the same on every machine.

Each is built once a process.  Nothing depends on the machine: weights and data are seeded, the
memory to fit into is named, and one thread is planned for, since kernels' scratch memory
is by thread.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lazyviz

MEMORY = "cpu:1GiB"  # as if the machine had no more


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
    """Llama-3-70B's step for a card that is not there."""
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


PICTURES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "mlp": mlp,
    "resnet": resnet,
    "gpt2": gpt2,
    "llama-70b": llama,
    "lstm": lstm,
    "syncs": syncs,
    "failed": failed,
}


_kept: dict[str, tuple[Any, Any]] = {}


def recorded(name: str) -> tuple[Any, Any]:
    """The graph of one picture, and what has to stay alive for it; recorded once, unless it is to be run."""
    if name not in _kept or name == "failed":
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        torch.manual_seed(0)
        try:
            _kept[name] = PICTURES[name]()
        finally:
            torch.set_num_threads(threads)
    return _kept[name]
