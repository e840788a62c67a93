"""x-transformers: variants of attention, trained and sampled from."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from x_transformers import (
    AutoregressiveWrapper,
    Decoder,
    Encoder,
    TransformerWrapper,
    ViTransformerWrapper,
    XTransformer,
)

from ..catalog import program

WORDS = 40


def trained(model: nn.Module, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(2):
        loss = model(*inputs, **named)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, loss


def language_model(**options: Any) -> AutoregressiveWrapper:
    layers = Decoder(dim=32, depth=2, heads=2, attn_dim_head=16, **options)
    return AutoregressiveWrapper(TransformerWrapper(num_tokens=WORDS, max_seq_len=24, attn_layers=layers))


@program()
def a_decoder_with_rotary_embeddings() -> Any:
    model = language_model(rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True, attn_dropout=0.1)
    return trained(model, torch.randint(0, WORDS, (2, 16)))


@program()
def a_decoder_with_alibi_and_flash_attention() -> Any:
    return trained(language_model(alibi_pos_bias=True, attn_flash=True), torch.randint(0, WORDS, (2, 16)))


@program()
def text_is_generated() -> Any:
    model = language_model(rotary_pos_emb=True).eval()
    prompt = torch.randint(0, WORDS, (2, 4))
    return model.generate(prompt, 8), model.generate(prompt, 8, temperature=0.0)


@program()
def an_encoder_of_pictures() -> Any:
    model = ViTransformerWrapper(
        image_size=16, patch_size=8, num_classes=5, attn_layers=Encoder(dim=32, depth=2, heads=2)
    )
    scores = model(torch.randn(2, 3, 16, 16))
    loss = nn.functional.cross_entropy(scores, torch.tensor([1, 3]))
    loss.backward()
    return model, loss


@program()
def an_encoder_and_a_decoder() -> Any:
    model = XTransformer(
        dim=32,
        enc_num_tokens=WORDS,
        enc_depth=1,
        enc_heads=2,
        enc_max_seq_len=12,
        dec_num_tokens=WORDS,
        dec_depth=1,
        dec_heads=2,
        dec_max_seq_len=12,
    )
    source, target = torch.randint(0, WORDS, (2, 12)), torch.randint(0, WORDS, (2, 12))
    return trained(model, source, target, mask=torch.ones_like(source).bool())
