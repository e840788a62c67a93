"""All architectures of the benchmarks: family, and functions that create the model and a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import small


class Case(NamedTuple):
    """``make`` builds the model, ``batch`` its inputs and target, ``run`` computes output and loss."""

    family: str
    make: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Any]]
    run: Callable[[nn.Module, dict[str, Any]], tuple[Any, Tensor | None]]


def _plain(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., tuple[Any, Tensor | None]]:
    def run(model: nn.Module, batch: dict[str, Any]) -> tuple[Any, Tensor | None]:
        output = model(*batch["inputs"])
        return output, loss(output, batch["target"])

    return run


def _words(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def _hugging_face(model: nn.Module, batch: dict[str, Any]) -> tuple[Any, Tensor | None]:
    output = model(**batch)
    loss = getattr(output, "loss", None)
    return output, loss if loss is not None else output.logits.float().square().mean()


def _images(count: int, size: int, classes: int = 100) -> Callable[[], dict[str, Any]]:
    return lambda: {
        "inputs": (torch.randn(count, 3, size, size),),
        "target": torch.randint(0, classes, (count,)),
    }


def _text(count: int, length: int, words: int) -> Callable[[], dict[str, Any]]:
    return lambda: {
        "inputs": (torch.randint(0, words, (count, length)),),
        "target": torch.randint(0, words, (count, length)),
    }


def _graph() -> dict[str, Any]:
    nodes, edges = 2000, 12000
    return {
        "inputs": (torch.randn(nodes, 64), torch.randint(0, nodes, (2, edges))),
        "target": torch.randint(0, 16, (nodes,)),
    }


def by_hand() -> dict[str, Case]:
    label, words = _plain(F.cross_entropy), _plain(_words)
    square = _plain(F.mse_loss)
    text = _text(8, 48, 2000)
    noise = lambda: {"inputs": (torch.randn(8, 64, 1, 1),), "target": torch.randn(8, 3, 32, 32)}  # noqa: E731
    picture = lambda: {"inputs": (torch.randn(4, 3, 64, 64),), "target": torch.randn(4, 3, 64, 64)}  # noqa: E731
    cloud = lambda: {"inputs": (torch.randn(8, 3, 512),), "target": torch.randint(0, 40, (8,))}  # noqa: E731
    film = lambda: {"inputs": (torch.randn(2, 3, 8, 32, 32),), "target": torch.randint(0, 100, (2,))}  # noqa: E731
    sound = lambda: {"inputs": (torch.randn(4, 1, 2000),), "target": torch.randint(0, 16, (4, 2000))}  # noqa: E731
    mask = lambda: {"inputs": (torch.randn(2, 3, 64, 64),), "target": torch.randint(0, 4, (2, 64, 64))}  # noqa: E731
    clicks = lambda: {  # noqa: E731
        "inputs": (torch.randn(64, 13), *(torch.randint(0, 5000, (64, 6)) for _ in range(4))),
        "target": torch.rand(64, 1),
    }
    return {
        "resnet18": Case("convolutional", small.resnet18, _images(4, 96), label),
        "resnet50": Case("convolutional", small.resnet50, _images(4, 64), label),
        "mobilenet_v2": Case("convolutional", small.mobilenet, _images(4, 96), label),
        "vgg16": Case("convolutional", small.vgg, _images(4, 64), label),
        "densenet": Case("convolutional", small.densenet, _images(8, 32), label),
        "unet": Case("convolutional", small.UNet, mask, label),
        "wavenet": Case("convolutional", small.WaveNet, sound, label),
        "video3d": Case("convolutional", small.video, film, label),
        "dcgan": Case("convolutional", small.generator, noise, square),
        "vae": Case("convolutional", small.Autoencoder, picture, square),
        "pointnet": Case("convolutional", small.PointNet, cloud, label),
        "lstm": Case("recurrent", lambda: small.Tagger(nn.LSTM), text, words),
        "bilstm": Case("recurrent", lambda: small.Tagger(nn.LSTM, True), text, words),
        "gru": Case("recurrent", lambda: small.Tagger(nn.GRU), text, words),
        "rnn": Case("recurrent", lambda: small.Tagger(nn.RNN), text, words),
        "lstm_cell": Case("recurrent", small.Cells, text, words),
        "gcn": Case("graph", small.GraphNet, _graph, label),
        "gat": Case("graph", small.GraphAttention, _graph, label),
        "switch": Case("experts", small.Switch, _text(8, 64, 1000), words),
        "dlrm": Case("other", small.Recommender, clicks, _plain(F.binary_cross_entropy_with_logits)),
        "encoder": Case("attention", small.Encoder, _text(8, 64, 1000), words),
    }


def hugging_face() -> dict[str, Case]:
    """Architectures of the transformers library, with random weights."""
    import transformers

    hf: Any = transformers

    sizes = {
        "vocab_size": 1000,
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 512,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    vision = {
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 512,
        "image_size": 64,
        "patch_size": 8,
    }

    def text() -> dict[str, Any]:
        ids = torch.randint(3, 1000, (4, 64))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    def picture() -> dict[str, Any]:
        return {"pixel_values": torch.randn(4, 3, 64, 64)}

    def both() -> dict[str, Any]:
        batch = text() | picture() | {"return_loss": True}
        del batch["labels"]
        return batch

    def speech() -> dict[str, Any]:
        return {
            "input_features": torch.randn(2, 16, 200),
            "decoder_input_ids": torch.randint(3, 1000, (2, 32)),
        }

    def t5() -> Any:
        return hf.T5Config(
            vocab_size=1000,
            d_model=128,
            d_kv=32,
            d_ff=512,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        )

    def case(family: str, cls: Any, config: Any, batch: Callable[[], dict[str, Any]]) -> Case:
        return Case(family, lambda: cls(config), batch, _hugging_face)

    grouped = sizes | {"num_key_value_heads": 2}
    gpt2 = hf.GPT2Config(vocab_size=1000, n_positions=128, n_embd=128, n_layer=3, n_head=4)
    switch = hf.SwitchTransformersConfig(
        vocab_size=1000, d_model=128, d_kv=32, d_ff=256, num_layers=2, num_decoder_layers=2, num_heads=4,
        num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, decoder_start_token_id=0,
    )  # fmt: skip
    whisper = hf.WhisperConfig(
        vocab_size=1000, d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=512, decoder_ffn_dim=512, num_mel_bins=16,
        max_source_positions=100, max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    clip = hf.CLIPConfig(text_config=dict(sizes), vision_config=dict(vision))
    convnext = hf.ConvNextConfig(hidden_sizes=[32, 64, 128], depths=[2, 2, 2], num_stages=3, image_size=64)
    swin = hf.SwinConfig(
        image_size=64, patch_size=4, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4
    )
    mamba = hf.MambaConfig(vocab_size=1000, hidden_size=128, num_hidden_layers=2, state_size=8)
    rwkv = hf.RwkvConfig(vocab_size=1000, hidden_size=128, num_hidden_layers=2, attention_hidden_size=128)
    return {
        "gpt2": case("attention", hf.GPT2LMHeadModel, gpt2, text),
        "bert": case("attention", hf.BertForMaskedLM, hf.BertConfig(**sizes), text),
        "llama": case("attention", hf.LlamaForCausalLM, hf.LlamaConfig(**grouped), text),
        "t5": case("attention", hf.T5ForConditionalGeneration, t5(), text),
        "vit": case("attention", hf.ViTForImageClassification, hf.ViTConfig(**vision), picture),
        "swin": case("attention", hf.SwinForImageClassification, swin, picture),
        "convnext": case("convolutional", hf.ConvNextForImageClassification, convnext, picture),
        "whisper": case("attention", hf.WhisperForConditionalGeneration, whisper, speech),
        "clip": case("attention", hf.CLIPModel, clip, both),
        "deberta": case(
            "attention", hf.DebertaV2ForMaskedLM, hf.DebertaV2Config(**sizes, type_vocab_size=0), text
        ),
        "mixtral": case(
            "experts", hf.MixtralForCausalLM, hf.MixtralConfig(**grouped, num_local_experts=4), text
        ),
        "switch_t5": case("experts", hf.SwitchTransformersForConditionalGeneration, switch, text),
        "mamba": case("recurrent", hf.MambaForCausalLM, mamba, text),
        "rwkv": case("recurrent", hf.RwkvForCausalLM, rwkv, text),
    }
