"""The measured programs: models with their batch and loss, as training steps of ordinary PyTorch.

The models of :func:`small` are written with operators that Lazy Tensor Core has itself, so that all
recorders can be given the same program.  What it lacks: ``split``, ``chunk`` and ``unbind`` (fused
attention projections and ``nn.LSTM`` use them) come back as CPU tensors, on which the next lazy
operator fails; ``nn.LSTMCell`` and ``nn.MultiheadAttention`` need others.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))
from models.small import ResNet

LEARNING_RATE = 1e-3
Optimizer = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


@dataclass(frozen=True)
class Program:
    """A model, its inputs and its target; ``loss(model(*inputs), target)`` is a scalar."""

    name: str
    model: nn.Module
    inputs: tuple[Tensor, ...]
    target: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]

    def on(self, device: str) -> Program:
        """The same program with a copy of the model on ``device``."""
        model = copy.deepcopy(self.model).to(device)
        inputs = tuple(tensor.to(device) for tensor in self.inputs)
        return Program(self.name, model, inputs, self.target.to(device), self.loss)

    def value(self) -> Tensor:
        """The loss."""
        return self.loss(self.model(*self.inputs), self.target)

    def pass_both_ways(self) -> Callable[[], Tensor]:
        """Forward and backward pass, with new gradients each time."""

        def run() -> Tensor:
            self.model.zero_grad()
            loss = self.value()
            loss.backward()
            return loss

        return run

    def training_step(self, optimizer: Optimizer = sgd) -> Callable[[], Tensor]:
        """Forward, backward and optimizer."""
        updates = optimizer(self.model.parameters())

        def step() -> Tensor:
            updates.zero_grad()
            loss = self.value()
            loss.backward()
            updates.step()
            return loss

        return step


def words(scores: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy over all positions."""
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def squares(scores: Tensor, target: Tensor) -> Tensor:
    """The mean of squares; ``mse_loss`` is another operator that Lazy Tensor Core lacks."""
    return (scores - target).pow(2).mean()


class Block(nn.Module):
    """A layer of GPT-2: attention and two linear layers, each after a layer norm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = (qkv[:, :, part].transpose(1, 2) for part in range(3))
        scores = query @ key.transpose(-1, -2) / math.sqrt(width // self.heads) + mask
        attended = self.dropout(scores.softmax(-1)) @ value
        x = x + self.dropout(self.projection(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.before_mlp(x)), approximate="tanh")))


class GPT2(nn.Module):
    """GPT-2 in plain PyTorch."""

    mask: Tensor
    positions: Tensor

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("mask", torch.full((length, length), -math.inf).triu(1))
        self.register_buffer("positions", torch.arange(length))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.words(tokens) + self.places(self.positions))
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(self.norm(x))


class LSTM(nn.Module):
    """A recurrent layer over words, with its cell written out."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.inside, self.across = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)

    def forward(self, tokens: Tensor) -> Tensor:
        entered = self.inside(self.words(tokens))
        batch, length, width = entered.shape[0], entered.shape[1], entered.shape[2] // 4
        hidden = cell = entered.new_zeros(batch, width)
        outputs = []
        for position in range(length):
            gates = (entered[:, position] + self.across(hidden)).view(batch, 4, width)
            keep, write, show = gates[:, 0].sigmoid(), gates[:, 1].sigmoid(), gates[:, 2].sigmoid()
            cell = keep * cell + write * gates[:, 3].tanh()
            hidden = show * cell.tanh()
            outputs.append(hidden)
        return self.head(torch.stack(outputs, 1))


def mlp(depth: int = 8, width: int = 64, batch: int = 8) -> Program:
    model = nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())))
    return Program("MLP", model, (torch.randn(batch, width),), torch.randn(batch, width), squares)


def gpt2(layers: int = 12, width: int = 64, batch: int = 1, length: int = 16) -> Program:
    vocabulary = 500
    tokens = torch.randint(0, vocabulary, (batch, length))
    return Program("GPT-2", GPT2(layers, width, 4, vocabulary, length), (tokens,), tokens, words)


def resnet(
    batch: int = 2,
    size: int = 32,
    depths: tuple[int, ...] = (2, 2, 2, 2),
    widths: tuple[int, ...] = (64, 128, 256, 512),
) -> Program:
    """ResNet-18, or a ResNet of another size."""
    model = ResNet(depths, widths, bottleneck=False)
    images, target = torch.randn(batch, 3, size, size), torch.randint(0, 100, (batch,))
    return Program("ResNet", model, (images,), target, F.cross_entropy)


def lstm(batch: int = 4, length: int = 32) -> Program:
    tokens = torch.randint(0, 500, (batch, length))
    return Program("LSTM", LSTM(500, 64), (tokens,), tokens, words)


def small() -> list[Program]:
    """Training steps whose cost is dominated by the number of operators, not by their kernels."""
    return [mlp(), gpt2(), resnet(), lstm()]


def transformer() -> Program:
    """The small transformer: 4 layers of width 64."""
    program = gpt2(layers=4, width=64, batch=4)
    return Program(
        "transformer of 4 layers of 64", program.model, program.inputs, program.target, program.loss
    )


class Logits(nn.Module):
    """A transformers language model as a function of tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, use_cache=False).logits


def gpt2_of_transformers(layers: int = 12, width: int = 768, batch: int = 8, length: int = 128) -> Program:
    """GPT-2 small, as the transformers library has it, with random weights."""
    import transformers

    config = transformers.GPT2Config(
        n_layer=layers, n_embd=width, n_head=width // 64, bos_token_id=0, eos_token_id=0
    )
    tokens = torch.randint(0, config.vocab_size, (batch, length))
    size = "small" if (layers, width) == (12, 768) else f"with {layers} layers of {width}"
    name = f"GPT-2 {size}, batch {batch} x {length}"
    return Program(name, Logits(transformers.GPT2LMHeadModel(config)), (tokens,), tokens, words)


def prepare(device: str, threads: int) -> None:
    """Set the seed, so that all runs are identical, and the number of threads."""
    torch.manual_seed(0)
    if threads:
        torch.set_num_threads(threads)
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("--device cuda: there is no GPU that PyTorch can use here")
