"""sentence-transformers: a model from a configuration, fitted and used."""

from __future__ import annotations

import tempfile
from typing import Any

import datasets
import sentence_transformers
import tokenizers
import transformers
from sentence_transformers.sentence_transformer import losses, modules

from ..catalog import SAVED, program

WORDS = [
    "the",
    "cat",
    "dog",
    "sat",
    "ran",
    "on",
    "under",
    "a",
    "mat",
    "hill",
    "red",
    "blue",
    "small",
    "large",
    "and",
    "then",
]


def sentence(number: int) -> str:
    return " ".join(WORDS[(number * step + step) % len(WORDS)] for step in range(2, 7))


def model(folder: str) -> sentence_transformers.SentenceTransformer:
    vocabulary = {word: at for at, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    words = modules.Transformer(folder, max_seq_length=16)
    pooling = modules.Pooling(words.get_embedding_dimension())
    return sentence_transformers.SentenceTransformer(modules=[words, pooling], device="cpu")


@program(
    {
        "storage access": SAVED,
        "item": "whether the loss is a number, at each step",
        "numpy": "embeddings are arrays",
    }
)
def fitted_to_similarities() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        encoder = model(folder)
        data = datasets.Dataset.from_dict(
            {
                "sentence1": [sentence(number) for number in range(24)],
                "sentence2": [sentence(number + 1) for number in range(24)],
                "score": [number % 5 / 4 for number in range(24)],
            }
        )
        arguments = sentence_transformers.SentenceTransformerTrainingArguments(
            folder,
            max_steps=6,
            per_device_train_batch_size=4,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
        )
        sentence_transformers.SentenceTransformerTrainer(
            encoder, arguments, data, loss=losses.CosineSimilarityLoss(encoder)
        ).train()
    return encoder, encoder.encode([sentence(3), sentence(8)])


@program(
    {
        "storage access": SAVED,
        "tolist": "the best of the similarities are returned as numbers",
    }
)
def embeddings_and_their_similarities() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        encoder = model(folder)
        found = encoder.encode(
            [sentence(number) for number in range(10)],
            batch_size=4,
            convert_to_tensor=True,
            normalize_embeddings=True,
        )
    hits = sentence_transformers.util.semantic_search(found[:3], found, top_k=2)
    return found, encoder.similarity(found, found), hits


@program(
    {
        "storage access": SAVED,
        "item": "whether the loss is a number, at each step",
    }
)
def a_ranking_loss_with_negatives_of_the_batch() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        encoder = model(folder)
        data = datasets.Dataset.from_dict(
            {
                "anchor": [sentence(number) for number in range(16)],
                "positive": [sentence(number + 1) for number in range(16)],
            }
        )
        arguments = sentence_transformers.SentenceTransformerTrainingArguments(
            folder,
            num_train_epochs=1,
            per_device_train_batch_size=4,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
        )
        sentence_transformers.SentenceTransformerTrainer(
            encoder, arguments, data, loss=losses.MultipleNegativesRankingLoss(encoder)
        ).train()
    return encoder
