"""Text generation by an 8B model, planned for an absent GPU: seconds, and bytes of the KV cache.

transformers' ``generate`` is recorded as it is, with the cache that grows and with the static one.  Written
are the seconds of the whole and of a decode step (the median of the differences between two tokens), and
what the plan says of the cache beside two numbers a layer, head, position and sample: keys and values.

    python benchmarks/text_generation.py [--tokens 1024] [--caches dynamic,static] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lazyviz

RESULTS = Path(__file__).parent / "results" / "text_generation.json"
CARD = "RTX-4090"
PROMPT = 16
CONFIG: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip


class Clock:
    """A logits processor that notes the time of each token."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())
        return scores


def steps(times: list[float]) -> float:
    """Median milliseconds between two tokens, without the first, which fills lazyviz's caches."""
    return 1000 * statistics.median(b - a for a, b in itertools.pairwise(times[1:]))


def measured(cache: str, tokens: int) -> dict[str, Any]:
    lazyviz.reset()
    clock = Clock()
    start = time.perf_counter()
    with lazyviz.lazy(device=CARD) as graph, torch.no_grad():
        with torch.device("cuda"):
            model: Any = LlamaForCausalLM._from_config(LlamaConfig(**CONFIG), dtype=torch.bfloat16).eval()
            ids = torch.ones(1, PROMPT, dtype=torch.long)
        options = {} if cache == "dynamic" else {"cache_implementation": "static"}
        model.generate(
            ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0, logits_processor=[clock], **options
        )
    recorded = time.perf_counter()
    plan = graph.plan()
    position = len(graph.nodes) - 1
    held = plan.at(position).by_category["kv_cache"]
    heads, size = CONFIG["num_key_value_heads"], CONFIG["hidden_size"] // CONFIG["num_attention_heads"]
    length = PROMPT + tokens - 1  # the last token is not read again
    planned = time.perf_counter()
    return {
        "cache": cache,
        "tokens": tokens,
        "nodes": len(graph.nodes),
        "seconds to record": round(recorded - start, 1),
        "seconds to plan": round(planned - recorded, 1),
        "ms a step": round(steps(clock.wall), 2),
        "ms a step, CPU time": round(steps(clock.cpu), 2),
        "kv_cache at the end": held,
        "by the formula": 2 * CONFIG["num_hidden_layers"] * heads * size * length * 2,
        "peak": plan.peak_bytes,
        "fits": plan.fits,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--caches", default="dynamic,static")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    rows = []
    for cache in options.caches.split(","):
        rows.append(measured(cache, options.tokens))
        print(json.dumps(rows[-1]), flush=True)
    environment = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "card": CARD,
    }
    text = json.dumps({"environment": environment, "rows": rows}, indent=1)
    (options.json or RESULTS).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
