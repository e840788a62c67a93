"""peft: adapters of a language model."""

from __future__ import annotations

from typing import Any

import peft
import torch
from torch import nn

from ..catalog import program
from .with_transformers_trainer import WORDS, gpt2


def trained(model: nn.Module, steps: int = 3) -> Any:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    words = torch.randint(3, WORDS, (4, 8))
    losses = []
    for _ in range(steps):
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return model, optimizer, losses


@program()
def lora() -> Any:
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=8,
        lora_dropout=0.1,
        target_modules=["c_attn"],
        fan_in_fan_out=True,
    )
    return trained(peft.get_peft_model(gpt2(), config))


@program(
    {
        "data_ptr": "whether two layers have one weight",
    }
)
def lora_merged() -> Any:
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True
    )
    model, _, _ = trained(peft.get_peft_model(gpt2(), config))
    return model.merge_and_unload()(torch.randint(3, WORDS, (2, 6))).logits


@program()
def dora_with_pissa() -> Any:
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        use_dora=True,
        init_lora_weights="pissa",
        target_modules=["c_attn"],
        fan_in_fan_out=True,
    )
    return trained(peft.get_peft_model(gpt2(), config))


@program()
def ia3() -> Any:
    config = peft.IA3Config(
        task_type="CAUSAL_LM",
        target_modules=["c_attn", "c_fc"],
        feedforward_modules=["c_fc"],
        fan_in_fan_out=True,
    )
    return trained(peft.get_peft_model(gpt2(), config))


@program()
def prompt_tuning() -> Any:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return trained(peft.get_peft_model(gpt2(), config))
