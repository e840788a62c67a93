"""Small models of known architectures, with a batch and a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

Step = Callable[..., tuple[Tensor, Tensor]]
B, T, WORDS = 8, 12, 61


def words() -> tuple[Tensor, ...]:
    torch.manual_seed(11)
    tokens, labels = torch.randint(3, WORDS, (B, T)), torch.randint(3, WORDS, (B, T))
    labels[:, -3:] = -100
    return tokens, labels


def images() -> tuple[Tensor, ...]:
    torch.manual_seed(11)
    return torch.randn(B, 3, 32, 32), torch.randint(0, 10, (B,))


def language(model: nn.Module, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    found: Any = model(input_ids=tokens, labels=labels)
    return found.loss, found.logits


def classify(model: nn.Module, pictures: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    found: Any = model(pictures)
    scores = getattr(found, "logits", found)
    return F.cross_entropy(scores, labels), scores


def segment(model: nn.Module, pictures: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    scores = model(pictures)
    return F.cross_entropy(scores, labels[:, None, None].expand(-1, *scores.shape[2:])), scores


def tag(model: nn.Module, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    scores = model(tokens)
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten()), scores


class Residual(nn.Module):
    """Convolutions with a way past them."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), norm(16), nn.ReLU(inplace=True))
        self.body = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(16, 16, 3, padding=1, bias=False),
                norm(16),
                nn.ReLU(inplace=True),
                nn.Conv2d(16, 16, 3, padding=1, bias=False),
                norm(16),
            )
            for _ in range(2)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.stem(x), 2)
        for block in self.body:
            x = F.relu(x + block(x))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class UNet(nn.Module):
    """Down and up again, with what was seen on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.SiLU())
        self.deep = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Conv2d(16, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        above = self.down(x)
        below = F.interpolate(self.deep(F.avg_pool2d(above, 2)), scale_factor=1.0)
        return self.out(torch.cat([above, self.up(below)], dim=1))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.recur = nn.LSTM(16, 16, num_layers=2, bidirectional=True, dropout=0.2)
        self.out = nn.Linear(32, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        result, _ = self.recur(self.words(tokens).transpose(0, 1))
        return self.out(result).transpose(0, 1)


def _gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS, n_positions=T, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
        )
    )


def _bert() -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
        )
    )


def _llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=WORDS,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def _t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
    )


def _vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            image_size=32,
            patch_size=8,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            num_labels=10,
        )
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]], Step]] = {
    "gpt2": (_gpt2, words, language),
    "bert": (_bert, words, language),
    "llama": (_llama, words, language),
    "t5": (_t5, words, language),
    "vit": (_vit, images, classify),
    "resnet, eval": (lambda: Residual(nn.BatchNorm2d).eval(), images, classify),
    "resnet, group norm": (lambda: Residual(lambda count: nn.GroupNorm(4, count)), images, classify),
    "unet": (UNet, images, segment),
    "lstm tagger": (Tagger, words, tag),
}
