"""Planning Llama-3-70B's training step for eight known GPUs, on a machine without a GPU: time and memory.

The step is recorded once (float32 parameters, AdamW, one sequence of 2048 tokens, no checkpointing), then
planned for each GPU::

    python benchmarks/llama_70b_on_known_gpus.py [--layers 80] [--out FILE]

It writes seconds, the peak of this process's memory, and for each GPU the verdict beside a count by hand:
parameters, gradients, AdamW's two moments, and the square roots of all second moments, which its foreach
form computes at once, take 20 bytes per parameter.  The results are in
``benchmarks/results/llama_70b_on_known_gpus.json``.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import lazyviz

CARDS = (
    "A100-40GB", "A100-80GB", "H100-80GB", "H200-141GB", "L4-24GB", "L40S-48GB", "RTX-4090", "T4-16GB",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    config = transformers.LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=options.layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    start = time.perf_counter()
    with lazyviz.lazy(device="H100-80GB") as graph:
        model: Any = transformers.LlamaForCausalLM(config)
        model.cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        tokens = torch.randint(0, config.vocab_size, (1, 2048), device="cuda")
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
    recorded = time.perf_counter()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    cards = {}
    for name in CARDS:
        plan = graph.plan(name)
        cards[name] = {"fits": plan.fits, "peak": plan.peak_bytes, "capacity": plan.capacity_bytes}
        print(f"{name:<12} {plan.verdict()}")
    result = {
        "ops": len(graph.nodes),
        "parameters": parameters,
        "by hand: 20 bytes a parameter": 20 * parameters,
        "seconds to record": round(recorded - start, 2),
        "seconds for eight plans": round(time.perf_counter() - recorded, 2),
        "peak of this process, GiB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "cards": cards,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    print(json.dumps({key: value for key, value in result.items() if key != "cards"}, indent=2))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
