"""transformers: text from models without training."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from ..catalog import COPIED, program

WORDS = 61
STOP = "whether every sentence has ended, after each word; whether the prompt is padded"


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config).eval()


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).eval()


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config).eval()


def prompt() -> dict[str, torch.Tensor]:
    words = torch.randint(3, WORDS, (2, 6))
    return {"input_ids": words, "attention_mask": torch.ones_like(words)}


def padded_prompt() -> dict[str, torch.Tensor]:
    given = prompt()
    given["input_ids"][0, :2] = 0
    given["attention_mask"][0, :2] = 0
    return given


@program(
    {
        "item": STOP,
    }
)
def greedy() -> Any:
    return gpt2().generate(**prompt(), max_new_tokens=16, do_sample=False, pad_token_id=0)


@program(
    {
        "item": STOP,
    }
)
def sampled() -> Any:
    return llama().generate(
        **padded_prompt(), max_new_tokens=16, do_sample=True, top_k=20, top_p=0.9, temperature=0.8
    )


@program(
    {
        "item": STOP,
    }
)
def beams() -> Any:
    return gpt2().generate(**prompt(), max_new_tokens=12, num_beams=4, do_sample=False, pad_token_id=0)


@program(
    {
        "item": STOP,
    }
)
def beams_of_an_encoder_and_a_decoder() -> Any:
    return t5().generate(
        **padded_prompt(), max_new_tokens=12, num_beams=3, num_return_sequences=2, length_penalty=0.8
    )


@program(
    {
        "item": STOP,
    }
)
def scores_with_a_repetition_penalty() -> Any:
    found = llama().generate(
        **prompt(),
        max_new_tokens=12,
        do_sample=False,
        repetition_penalty=1.2,
        no_repeat_ngram_size=2,
        output_scores=True,
        return_dict_in_generate=True,
    )
    return found.sequences, found.scores


@program(
    {
        "item": STOP,
        "tolist": "how sure the small model is of its words",
        "storage access": COPIED,
    }
)
def assisted_by_a_smaller_model() -> Any:
    words = prompt()["input_ids"][:1]
    return llama().generate(input_ids=words, max_new_tokens=12, do_sample=False, assistant_model=llama())


@program(
    {
        "item": STOP,
    }
)
def with_a_static_cache() -> Any:
    return llama().generate(
        **prompt(), max_new_tokens=12, do_sample=False, cache_implementation="static", disable_compile=True
    )
