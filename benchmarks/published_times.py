"""Compares published whole-model times in ``data/published_times.csv`` with projections for their GPUs.

Each row's model is made from its configuration and recorded on this machine for the GPU, which is absent;
nothing of it runs, and nothing was fitted on these times.  Written are ``results/published_times.json`` and
the page ``docs/published_times.md``::

    PYTHONPATH=DIR/4.41.2 python benchmarks/published_times.py --rows text [--only TEXT]
    python benchmarks/published_times.py --rows images [--only TEXT]
    python benchmarks/published_times.py --page-only

with transformers as in ``published_memory.py`` for text.  The source's times are of transformers 4.38 with
``attn_implementation="eager"``, float32 without TF32; forward and backward, no optimizer.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DATA = HERE / "data" / "published_times.csv"
RESULTS = HERE / "results" / "published_times.json"
STEPS = HERE / "results" / "published_step_times.json"
PAGE = HERE.parent / "docs" / "published_times.md"
PLAIN_ATTENTION = "ViT, plain attention"  # timm's models from before PyTorch had SDPA
CONVOLUTIONAL = "convolutional"  # timm's models by name
IMAGES = ("ViT", CONVOLUTIONAL)
PEERS = {"neusight": "NeuSight", "habitat": "Habitat", "roofline": "a data sheet's roofline"}
Row = dict[str, str]
Result = dict[str, Any]


def model_of(row: Row) -> Any:
    """The row's model on the planned GPU, created from its configuration."""
    import torch
    import transformers

    if row["class"] == CONVOLUTIONAL:
        from models.convolutional import convolutional

        with torch.device("cuda"):
            return convolutional(row["model"])
    layers, width, heads = int(row["layers"]), int(row["width"]), int(row["heads"])
    inner, words, length = int(row["ffn"]), int(row["vocab"]), int(row["seq"])
    config: Any
    if row["class"].startswith("GPT2"):
        config = transformers.GPT2Config(
            n_layer=layers, n_embd=width, n_head=heads, n_inner=inner, vocab_size=words,
            n_positions=max(length, 1024),
        )  # fmt: skip
    elif row["class"].startswith("OPT"):
        config = transformers.OPTConfig(
            num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, ffn_dim=inner,
            vocab_size=words, word_embed_proj_dim=width, max_position_embeddings=2048,
        )  # fmt: skip
    elif row["class"].startswith("ViT"):
        from models.vision_transformer import Vit

        with torch.device("cuda"):
            return Vit(layers, width, heads, length, patch=words, fused=row["class"] != PLAIN_ATTENTION)
    else:
        config = transformers.BertConfig(
            num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, intermediate_size=inner,
            vocab_size=words,
        )  # fmt: skip
    with torch.device("cuda"):
        return getattr(transformers, row["class"])._from_config(config, attn_implementation="eager")


def outputs(out: Any) -> Any:
    """The value on which the source's training step calls backward: the sum of the logits."""
    if "logits" in out:
        return out.logits.sum()
    return out.prediction_logits.sum() + out.seq_relationship_logits.sum()


def inputs_of(row: Row) -> dict[str, Any]:
    """Token ids, or images whose side is the row's length."""
    import torch

    batch, length = int(row["batch"]), int(row["seq"])
    if row["class"].startswith(IMAGES):
        name = "pixel_values" if row["class"] == CONVOLUTIONAL else "pixels"
        return {name: torch.randn(batch, 3, length, length, device="cuda")}
    return {"input_ids": torch.ones(batch, length, dtype=torch.long, device="cuda")}


def training_step(row: Row, model: Any, inputs: dict[str, Any]) -> Callable[[], None]:
    """NeuSight's step, which has no loss and no optimizer, or that of timm's ``benchmark.py``."""
    import torch

    if not row["class"].startswith(IMAGES):
        return lambda: outputs(model(**inputs)).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, nesterov=True, foreach=False)
    classes = torch.zeros(int(row["batch"]), dtype=torch.long, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        out = model(**inputs)
        torch.nn.functional.cross_entropy(getattr(out, "logits", out), classes).backward()
        optimizer.step()

    return step


def record(row: Row) -> Result:
    """Projected seconds of one row: of training, the second step."""
    import torch

    import lazyviz

    torch.manual_seed(0)
    start = time.perf_counter()
    training = row["mode"] == "train"
    mixed = row["dtype"] == "float16 autocast"
    with lazyviz.lazy(device=row["gpu"], assume={"*": True}) as whole:
        model = model_of(row).train(training)
        inputs = inputs_of(row)
        step = training_step(row, model, inputs) if training else lambda: model(**inputs)
        with torch.set_grad_enabled(training):
            if training:
                with torch.autocast("cuda", torch.float16, enabled=mixed):
                    step()
            before = len(whole.nodes)
            with torch.autocast("cuda", torch.float16, enabled=mixed):
                step()
    projection = whole.plan(device=row["gpu"]).time_of(whole.nodes[before:])
    if projection is None:
        return {"projected": None}
    nodes = whole.nodes[before:]
    return {
        "projected": projection.seconds,
        "range": projection.seconds_range,
        "known": projection.known,
        "coverage": round(projection.coverage, 3),
        "roofline": roofline(row["gpu"], nodes),
        "flops": projection.flops,
        "nodes": len(nodes),
        "seconds": round(time.perf_counter() - start, 2),
    }


def roofline(gpu: str, nodes: Sequence[Any]) -> float:
    """The larger of FLOPs over the data sheet's peak and bytes over its bandwidth, op by op."""
    import torch

    from lazyviz.plan.devices.known_gpus import lookup
    from lazyviz.plan.runtime.bytes_and_launches import compute_dtype, work_of

    rates = lookup(gpu).rates
    assert rates is not None
    bandwidth = rates.gbps * 1e9
    total = 0.0
    for node in nodes:
        work = work_of(node)
        peak = rates.peak("half" if compute_dtype(node) == torch.float16 else "float32")
        total += max(work.flops / peak, work.bytes_moved / bandwidth)
    return total


def usable(row: Row) -> bool:
    """Eager rows whose work does not depend on data."""
    return row["execution"] == "eager" and row["class"].startswith(("GPT2", "OPT", "Bert", *IMAGES))


def errors(results: Sequence[Result], known: str, of: str = "projected") -> list[float]:
    return sorted(
        abs(each[of] / each["published"] - 1)
        for each in results
        if each["projected"] is not None and known in ("", each["known"])
    )


def within(results: Sequence[Result]) -> str:
    """The number of rows that are within their range."""
    rows = [each for each in results if each["projected"] is not None]
    inside = sum(each["range"][0] <= each["published"] <= each["range"][1] for each in rows)
    return f"{inside} of {len(rows)} published times are in the stated ranges."


def summary(results: Sequence[Result], roofline: bool = True) -> list[str]:
    """A table of errors by what is known about the GPU's rate."""
    peer = " roofline's median |" if roofline else ""
    lines = [
        f"| rate known | rows | median error | 90 % within |{peer}",
        "|---|---|---|---|" + ("---|" if roofline else ""),
    ]
    for known in ("measured", "rule", "power-limited", ""):
        if not (found := errors(results, known)):
            continue
        plain = f" {statistics.median(errors(results, known, 'roofline')):.1%} |" if roofline else ""
        nine = found[min(int(0.9 * len(found)), len(found) - 1)]
        lines.append(
            f"| {known or 'all'} | {len(found)} | {statistics.median(found):.1%} | {nine:.1%} |{plain}"
        )
    return lines


def error_of(result: Result, of: str) -> str:
    return f"{result[of] / result['published'] - 1:+.1%}" if of in result else ""


def peers(results: Sequence[Result]) -> list[str]:
    """Errors on the rows that all predictors have."""
    rows = [each for each in results if all(each.get(of) for of in ("projected", *PEERS))]
    lines = ["| predictor | rows | median error | 90 % within |", "|---|---|---|---|"]
    for name, of in (("lazyviz", "projected"), *((name, of) for of, name in PEERS.items())):
        found = errors(rows, "", of)
        nine = found[min(int(0.9 * len(found)), len(found) - 1)]
        lines.append(f"| {name} | {len(found)} | {statistics.median(found):.1%} | {nine:.1%} |")
    return lines


def kind_of(result: Result) -> str:
    """``"text"`` for NeuSight's rows, ``"ViT"``, or ``"convolutional"``."""
    if "vit" in result["model"]:
        return "ViT"
    return CONVOLUTIONAL if int(result["seq"]) in (160, 224) else "text"


def steps_of_other_sources() -> list[str]:
    """The section on single steps that documentation and repositories have times of."""
    results = json.loads(STEPS.read_text(encoding="utf-8"))
    lines = [
        "## Training steps in TF32, bfloat16 and float16, from other sources",
        "",
        "Steps of language models with AdamW, or forward and backward of transformers' attention benchmark",
        "(`benchmarks/published_step_times.py`, `benchmarks/data/published_step_times.csv`).",
        within(results),
        "On A100s, projections of 16-bit steps are too short; the rates of products as small as these in 16",
        "bit, and of attention with dropout, are not measured. That one multiprocessor computes at most",
        "0.9 TFLOP/s of products with unaligned rows, as measured on an RTX 4090, was added after a look at",
        "these rows.",
        "",
        *summary(results, roofline=False),
        "",
        "| source | GPU | step | precision | batch | length | published ms | projected ms | error "
        "| range (ms) | data covers |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in results:
        low, high = each["range"]
        lines.append(
            f"| [{each['source']}]({each['url']}) | {each['gpu']} | {each['title']} | {each['precision']} "
            f"| {each['batch']} | {each['length']} | {each['published'] * 1e3:,.1f} "
            f"| {each['projected'] * 1e3:,.1f} | {each['projected'] / each['published'] - 1:+.1%} "
            f"| {low * 1e3:,.0f} to {high * 1e3:,.0f} | {each['coverage']:.0%} |"
        )
    return [*lines, ""]


def page(results: Sequence[Result]) -> str:
    transformers = [each for each in results if kind_of(each) == "text"]
    inference = [each for each in results if kind_of(each) == "ViT" and each["mode"] == "inf"]
    training = [each for each in results if kind_of(each) == "ViT" and each["mode"] == "train"]
    convolutions = [each for each in results if kind_of(each) == CONVOLUTIONAL]
    text = [
        "# Projected times against published ones",
        "",
        "Generated by `benchmarks/published_times.py`. Whole models that others timed, each recorded for its",
        "GPU without having it. Nothing was fitted on these times: rates of products and of memory come from",
        "other measurements (`benchmarks/data/matmul_rates.csv` and",
        "`lazyviz/plan/runtime/gpu_kernel_calibration.json`).",
        "Sources: NeuSight (MIT), commit 6945927, `scripts/asplos/label`; timm (Apache 2.0), commit aa4b585,",
        "`results/benchmark-infer-amp-nchw-*`, and 5e7d47c, `results/benchmark-train-amp-nchw-pt112-*`.",
        "",
        "## float32 without TF32",
        "",
        within(transformers),
        "",
        *summary(transformers),
        "",
        "Predictors of others, as NeuSight's repository has them (`results/prediction`) for the same rows:",
        "",
        *peers(transformers),
        "",
        "## Inference in float16 by autocast, with SDPA",
        "",
        within(inference),
        "",
        *summary(inference),
        "",
        "## Training in float16 by autocast, with SGD",
        "",
        "Forward, loss, backward, and `step` of SGD with Nesterov momentum, without SDPA.",
        within(training),
        "",
        *summary(training),
        "",
        "## Convolutional networks in float16 by autocast",
        "",
        "Inference and training with SGD, without channels-last memory. There are no measurements for the",
        "backward pass of convolutions, for convolutions in groups, and for those in float16, so that ranges",
        "are wide. That batch norm reads its input twice in training was added after a look at these rows.",
        within(convolutions),
        "",
        *(
            line
            for mode, title in (("inf", "Inference"), ("train", "Training"))
            for line in (
                f"{title}:",
                "",
                *summary([each for each in convolutions if each["mode"] == mode]),
                "",
            )
        ),
        *steps_of_other_sources(),
        "## All rows",
        "",
        "A data sheet's roofline is the larger of FLOPs over peak and bytes over bandwidth, op by op.",
        "",
        "| GPU | model | mode | batch | length | published ms | projected ms | error | range (ms) "
        "| data covers | NeuSight | Habitat | roofline |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in results:
        if each["projected"] is None:
            continue
        low, high = each["range"]
        text.append(
            f"| {each['gpu']} | {each['model']} | {each['mode']} | {each['batch']} | {each['seq']} "
            f"| {each['published'] * 1e3:,.1f} | {each['projected'] * 1e3:,.1f} "
            f"| {each['projected'] / each['published'] - 1:+.1%} | {low * 1e3:,.0f} to {high * 1e3:,.0f} "
            f"| {each['coverage']:.0%} | {' | '.join(error_of(each, peer) for peer in PEERS)} |"
        )
    return "\n".join([*text, ""])


def key_of(row: Row | Result) -> tuple[str, ...]:
    """What tells a row, or its result, from the others."""
    milliseconds = float(row["ms"]) if "ms" in row else float(row["published"]) * 1e3
    names = (str(row[key]) for key in ("gpu", "model", "mode", "batch", "seq"))
    return (*names, f"{milliseconds:.4f}")


def measured(rows: Sequence[Row], say: Callable[[str], None]) -> list[Result]:
    results = []
    for row in rows:
        result: Result = {key: row[key] for key in ("gpu", "model", "mode", "batch", "seq")}
        result |= record(row)
        result["published"] = float(row["ms"]) / 1e3
        for peer in ("neusight", "habitat"):
            if row[f"{peer}_ms"]:
                result[peer] = float(row[f"{peer}_ms"]) / 1e3
        results.append(result)
        if result["projected"] is None:
            say(f"{row['gpu']} {row['model']}: not known")
            continue
        say(
            f"{row['gpu']:<10} {row['model']:<11} {row['mode']:<5} {row['batch']:>2} x {row['seq']:<5}"
            f"{result['published'] * 1e3:8.1f} ms, projected {result['projected'] * 1e3:8.1f} "
            f"({result['projected'] / result['published'] - 1:+.1%}), {result['seconds']} s"
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--rows", choices=("text", "images"), help="rows of models for text, or for images")
    parser.add_argument("--json", type=Path, default=RESULTS, help="results; those of other rows are kept")
    parser.add_argument("--only", default="", help="rows whose GPU or model has this in its name")
    parser.add_argument("--page-only", action="store_true", help="write the page from the last results")
    options = parser.parse_args()
    with options.data.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if usable(row)]
    known = json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else []
    results = {key_of(each): each for each in known}
    if not options.page_only:
        chosen = [
            row
            for row in rows
            if options.only in f"{row['gpu']} {row['model']} {row['mode']}"
            and options.rows in (None, "images" if row["class"].startswith(IMAGES) else "text")
        ]
        found = measured(chosen, lambda line: print(line, flush=True))
        print("\n".join(summary(found)))
        results |= {key_of(each): each for each in found}
        inside = [results[key] for row in rows if (key := key_of(row)) in results]
        options.json.write_text(json.dumps(inside, indent=1) + "\n", encoding="utf-8")
    if options.data == DATA and options.json == RESULTS:
        PAGE.write_text(page([results[key_of(row)] for row in rows]), encoding="utf-8")


if __name__ == "__main__":
    main()
