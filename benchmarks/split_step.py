"""A split step: memory and time compared with the whole batch, and with a hand-written micro-batch loop.

    python benchmarks/split_step.py [--pieces 8] [--rounds 5] [--out benchmarks/results/split_step.json]

Per model: the batch-dependent bytes at the measured peak, in pieces over whole; the median over rounds
(old and new in turn) of the process's time for the split evaluation over that of the loop by hand, which
divides the loss by the number of pieces; recording and planning are counted apart.  One thread.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from models import small
from torch import Tensor, nn

import lazyviz

Made = tuple[nn.Module, tuple[Tensor, ...], Callable[..., Tensor]]


def gpt2() -> Made:
    config = transformers.GPT2Config(
        n_layer=4, n_embd=384, n_head=6, vocab_size=4000, n_positions=128, bos_token_id=1, eos_token_id=2
    )
    tokens = torch.randint(0, 4000, (16, 128))
    return transformers.GPT2LMHeadModel(config), (tokens,), lambda m, x: m(input_ids=x, labels=x).loss


def bert() -> Made:
    config = transformers.BertConfig(
        num_hidden_layers=4, hidden_size=384, num_attention_heads=6, intermediate_size=1536, vocab_size=4000
    )
    tokens = torch.randint(0, 4000, (16, 128))
    return transformers.BertForMaskedLM(config), (tokens,), lambda m, x: m(input_ids=x, labels=x).loss


def vit() -> Made:
    config = transformers.ViTConfig(
        num_hidden_layers=4,
        hidden_size=384,
        num_attention_heads=6,
        intermediate_size=1536,
        image_size=128,
        patch_size=16,
    )
    config.num_labels = 100
    batch = torch.randn(16, 3, 128, 128), torch.randint(0, 100, (16,))
    return (
        transformers.ViTForImageClassification(config),
        batch,
        lambda m, x, y: F.cross_entropy(m(x).logits, y),
    )


def tagger() -> Made:
    tokens, labels = torch.randint(0, 2000, (32, 64)), torch.randint(0, 2000, (32, 64))
    return (
        small.Tagger(nn.LSTM),
        (tokens, labels),
        lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), y.flatten()),
    )


MODELS: dict[str, Callable[[], Made]] = {"gpt2": gpt2, "bert": bert, "vit": vit, "lstm tagger": tagger}


def measured(make: Callable[[], Made], pieces: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model, batch, loss = make()

    def by_hand() -> None:
        model.zero_grad()
        for part in zip(*(tensor.chunk(pieces) for tensor in batch)):
            (loss(model, *part) / pieces).backward()

    def recorded() -> Any:
        model.zero_grad()
        with lazyviz.lazy(batch=list(batch), split=pieces) as graph:
            loss(model, *batch).backward()
        return graph

    whole, cut = (_of_the_batch(recorded(), split) for split in ("off", pieces))
    by_hand()
    hand, ours = [], []
    for _ in range(rounds):
        start = time.process_time()
        by_hand()
        hand.append(time.process_time() - start)
        graph = recorded()
        start = time.process_time()
        graph.evaluate()
        ours.append(time.process_time() - start)
    return {
        "whole_bytes": whole,
        "in_pieces_bytes": cut,
        "memory_ratio": round(cut / whole, 4),
        "by_hand_seconds": round(statistics.median(hand), 3),
        "seconds": round(statistics.median(ours), 3),
        "time_ratio": round(statistics.median(ours) / statistics.median(hand), 3),
    }


def _of_the_batch(graph: Any, split: Any) -> int:
    """Bytes at the measured peak that depend on the batch: all but weights, their gradients, and the inputs.

    The categories come from the plan, whose peak must equal the measured one.
    """
    plan = graph.plan(split=split)
    peak = graph.evaluate(split=split).peak_bytes
    if abs(peak - plan.tensor_peak_bytes) > 0.001 * peak:
        raise AssertionError(f"the peak was {peak}, projected {plan.tensor_peak_bytes}")
    stays = ("parameters", "gradients", "buffers", "inputs")
    return peak - sum(plan.by_category[name] for name in stays)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--pieces", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "pieces": options.pieces,
        "models": {},
    }
    for name in options.models:
        found = result["models"][name] = measured(MODELS[name], options.pieces, options.rounds)
        print(f"{name:12} memory {found['memory_ratio']:.3f}  time {found['time_ratio']:.3f}", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
