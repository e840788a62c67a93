"""The reserved peak that a plan projects for an RTX 3060, against published peaks of real runs.

Each row of ``data/rtx3060_peaks.csv`` is recorded on this machine, without a GPU and without running
it: two training steps, the second with the optimizer's state there.  Compared is what the caching
allocator would hold at most with what NVML said, the CUDA context excluded on both sides; the stated
range is from what is allocated to what is held and the context, of which NVML's baseline had only a part.

    python benchmarks/rtx3060.py [--json FILE]
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import lazyviz

HERE = Path(__file__).parent
DATA = HERE / "data" / "rtx3060_peaks.csv"
RESULTS = HERE / "results" / "rtx3060.json"
CARD = "RTX-3060"


def rows() -> list[dict[str, str]]:
    lines = [line for line in DATA.read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


def record(row: dict[str, str]) -> lazyviz.LazyGraph:
    """Two steps of a language model's training: random text of 128 tokens, outputs kept alive."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    batch, length = int(row["batch"]), 128
    config = eval(row["config"], {"GPT2Config": transformers.GPT2Config})
    torch.manual_seed(0)
    with lazyviz.lazy(device=CARD) as graph:
        with torch.device("cuda"):
            model = transformers.GPT2LMHeadModel(config).train()
        optimizer = getattr(torch.optim, row["optimizer"])(model.parameters())
        ids = torch.randint(0, config.vocab_size, (batch, length), device="cuda")
        mask = torch.ones(batch, length, dtype=torch.long, device="cuda")
        for _ in range(2):
            out = model(input_ids=ids, attention_mask=mask, labels=ids)
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return graph


def compare(row: dict[str, str]) -> dict[str, Any]:
    start = time.perf_counter()
    graph = record(row)
    plan = graph.plan(device=CARD)
    seconds = time.perf_counter() - start
    measured = int(row["nvml_mb"]) * 1_000_000
    eager = plan.eager_reserved_bytes
    assert eager is not None
    result = {
        "model": row["model"],
        "batch": int(row["batch"]),
        "optimizer": row["optimizer"],
        "measured": measured,
        "reserved": eager,
        "error": eager / measured - 1,
        "range": plan.eager_driver_range,
        "our_run": plan.reserved_bytes,
        "xmem_error": float(row["xmem_error_pct"]) / 100,
        "dnnmem_error": float(row["dnnmem_error_pct"]) / 100,
        "nodes": len(graph.nodes),
        "seconds": seconds,
    }
    lazyviz.session.lazy_graph.reset()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    results = []
    for row in rows():
        result = compare(row)
        results.append(result)
        low, high = (size / 1e6 for size in result["range"])
        print(
            f"{result['model']:18} batch {result['batch']:3}  measured {result['measured'] / 1e6:7,.0f} MB  "
            f"projected {result['reserved'] / 1e6:7,.0f} MB ({100 * result['error']:+.2f} %, "
            f"range {low:,.0f} to {high:,.0f})  xMem {100 * result['xmem_error']:.1f} %  "
            f"{result['seconds']:.1f} s",
            flush=True,
        )
    errors = [abs(result["error"]) for result in results]
    total = {
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "outside_of_range": [
            f"{result['model']} {result['batch']}"
            for result in results
            if not result["range"][0] <= result["measured"] <= result["range"][1]
        ],
    }
    print(json.dumps(total, indent=1))
    options.json.write_text(
        json.dumps({"torch": torch.__version__, "summary": total, "runs": results}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
