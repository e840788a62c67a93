"""Compares published times of training steps in ``data/published_step_times.csv`` with projections.

TF32, bf16 and fp16, most of them with SDPA or an optimizer: from documentation and repositories, not from one
benchmark suite.  No constant was fitted on these times; the cap on products with unaligned rows was added
after a look at them, as the page says.  Rows of transformers' documentation are those that take
at least 1.3 times as long as the fastest row of their column: in the others, the GPU waits for Python on a
host that is not described.  Written are ``results/published_step_times.json``, and with ``published_times.py
--page-only`` a section of ``docs/published_times.md``::

    PYTHONPATH=DIR/4.46.3 python benchmarks/published_step_times.py [--only TEXT]

with transformers as in ``published_memory.py``.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from models.models_of_published_figures import Gpt
from torch import Tensor, nn

import lazyviz

HERE = Path(__file__).parent
DATA = HERE / "data" / "published_step_times.csv"
RESULTS = HERE / "results" / "published_step_times.json"
OPT_350M = {
    "vocab_size": 50272, "hidden_size": 1024, "num_hidden_layers": 24, "ffn_dim": 4096,
    "num_attention_heads": 16, "word_embed_proj_dim": 512, "do_layer_norm_before": False,
    "max_position_embeddings": 2048,
}  # fmt: skip
EVALUATED = 2 / 15
"""Forward passes of evaluation in the time of a step of ``gpt_from_scratch``: two every 15 steps."""
Step = Callable[[], None]


def _tokens(batch: int, length: int, words: int) -> Tensor:
    return torch.randint(1, words - 1, (batch, length), device="cuda")


def attention(batch: int, length: int, model: str, attention: str) -> tuple[Step, Step | None]:
    """Forward and backward in float16 without an optimizer, the sum of the logits for a loss."""
    kind = getattr(transformers, model)
    kind.warn_if_padding_and_no_attention_mask = lambda *arguments, **options: None  # reads the tokens
    settings = kind.config_class(**(OPT_350M if "OPT" in model else {}))
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("cuda"):
            network = kind._from_config(settings, attn_implementation=attention).train()
    finally:
        torch.set_default_dtype(torch.float32)
    ids = _tokens(batch, length, settings.vocab_size)

    def step() -> None:
        network.zero_grad()
        network(input_ids=ids).logits.sum().backward()

    return step, None


def gpt_from_scratch(
    batch: int, length: int, form: str, plain: bool, fused: bool, half: bool
) -> tuple[Step, Step | None]:
    """GPT-2 small with AdamW."""
    words = 50257
    with torch.device("cuda"):
        model = Gpt(words, length, form, plain).train()
    if half:
        model = model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1, fused=fused)

    def loss() -> Tensor:
        ids, targets = (_tokens(batch, length, words) for _ in range(2))
        return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            loss()
        model.train()

    return step, evaluate


def reproduce_gpt2(batch: int, length: int) -> tuple[Step, Step | None]:
    """GPT-2 small without dropout, attention by products and softmax, and AdamW."""
    settings = transformers.GPT2Config(
        activation_function="gelu_pytorch_tanh", attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0
    )
    with torch.device("cuda"):
        model: nn.Module = transformers.GPT2LMHeadModel._from_config(settings, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    ids, targets = (_tokens(batch, length, settings.vocab_size) for _ in range(2))

    def step() -> None:
        optimizer.zero_grad()
        logits = model(ids, use_cache=False).logits
        F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1)).backward()
        optimizer.step()

    return step, None


PROGRAMS: dict[str, Callable[..., tuple[Step, Step | None]]] = {
    each.__name__: each for each in (attention, gpt_from_scratch, reproduce_gpt2)
}


def projected(row: dict[str, str]) -> Any:
    """The projection of a row's second step, and the seconds of evaluation per step."""
    torch.manual_seed(0)
    arguments = json.loads(row["arguments"])
    if row["program"] == "gpt_from_scratch":
        arguments["half"] = row["precision"] == "bf16"
    torch.set_float32_matmul_precision("high" if row["precision"] == "tf32" else "highest")
    mixed = "autocast" in row["precision"]
    try:
        with lazyviz.lazy(device=row["gpu"], assume={"*": True}) as whole:
            step, evaluate = PROGRAMS[row["program"]](int(row["batch"]), int(row["length"]), **arguments)
            with torch.autocast("cuda", torch.bfloat16, enabled=mixed):
                step()
                first = len(whole.nodes)
                step()
                second = len(whole.nodes)
                if evaluate is not None:
                    evaluate()
        plan = whole.plan(device=row["gpu"])
        found = plan.time_of(whole.nodes[first:second])
        evaluation = plan.time_of(whole.nodes[second:]) if evaluate is not None else None
        return found, evaluation.seconds * EVALUATED if evaluation is not None else 0.0
    finally:
        torch.set_float32_matmul_precision("highest")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="rows whose GPU or title has this in it")
    options = parser.parse_args()
    with DATA.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if options.only in f"{row['gpu']} {row['title']}"]
    results = []
    for row in rows:
        found, extra = projected(row)
        seconds, published = found.seconds + extra, float(row["ms"]) / 1e3
        low, high = (each + extra for each in found.seconds_range)
        kept = ("source", "url", "gpu", "title", "precision", "batch", "length")
        results.append(
            {key: row[key] for key in kept}
            | {"published": published, "projected": seconds, "range": (low, high)}
            | {"known": found.known, "coverage": round(found.coverage, 3), "waiting": found.waiting}
        )
        print(
            f"{row['gpu']:10} {row['title']:45} {row['precision']:13} {row['batch']:>2} x {row['length']:<5}"
            f"{published * 1e3:8.1f} ms, projected {seconds * 1e3:8.1f} ({seconds / published - 1:+.1%}), "
            f"waiting {found.waiting / found.seconds:.0%}",
            flush=True,
        )
    if not options.only:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
