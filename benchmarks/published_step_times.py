"""Compares published times of steps in ``data/published_step_times.csv`` with projections.

TF32, bf16 and fp16, most of them with SDPA or an optimizer: from documentation and repositories, not from one
benchmark suite.  No constant was fitted on these times; what was added after a look at them is said on the
page.  Rows of transformers' and diffusers' documentation are those that take at least 1.3 times as long as
the fastest row of their column: in the others, the GPU waits for Python on a host that is not described.
Written are ``results/published_step_times.json``, and with ``published_times.py --page-only`` a section of
``docs/published_times.md``::

    PYTHONPATH=DIR/4.46.3:DIR/diffusers python benchmarks/published_step_times.py [--only TEXT]

with transformers as in ``published_memory.py``, and diffusers put there by::

    pip install --no-deps --target DIR/diffusers diffusers==0.31.0 filelock importlib_metadata zipp
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import known_by_data_sheet
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
    network = _in_half(lambda: kind._from_config(settings, attn_implementation=attention).train())
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


def clip_images(batch: int, length: int, attention: str) -> tuple[Step, Step | None]:
    """Inference of the image encoder of CLIP ViT-L/14 in float16, on images with sides of ``length``."""
    settings = transformers.CLIPVisionConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, patch_size=14
    )
    network = _in_half(
        lambda: transformers.CLIPVisionModel._from_config(settings, attn_implementation=attention)
    )
    images = torch.randn(batch, 3, length, length, dtype=torch.float16, device="cuda")
    return _without_gradients(lambda: network.eval()(pixel_values=images)), None


def diffusion_unet(batch: int, length: int) -> tuple[Step, Step | None]:
    """One denoising step of Stable Diffusion 1.5 in float16, with guidance: two latents per image.

    ``length``: the side of the latents. Weights are channels-last. The scheduler's small ops are left out.
    """
    import diffusers

    network = _in_half(
        lambda: diffusers.UNet2DConditionModel(
            sample_size=length, cross_attention_dim=768, attention_head_dim=8
        )
    ).to(memory_format=torch.channels_last)
    latents = torch.randn(2 * batch, 4, length, length, dtype=torch.float16, device="cuda")
    words = torch.randn(2 * batch, 77, 768, dtype=torch.float16, device="cuda")
    time = torch.ones((), dtype=torch.long, device="cuda")
    return _without_gradients(lambda: network.eval()(latents, time, encoder_hidden_states=words)), None


def _in_half(create: Callable[[], Any]) -> Any:
    """A model created on the GPU in float16."""
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("cuda"):
            return create()
    finally:
        torch.set_default_dtype(torch.float32)


def _without_gradients(forward: Callable[[], Any]) -> Step:
    def step() -> None:
        with torch.no_grad():
            forward()

    return step


def trainer_bert_large(
    batch: int, length: int, accumulate: int, checkpoint: bool
) -> tuple[Step, Step | None]:
    """BERT large with two classes under float16 autocast, as transformers' Trainer of early 2022.

    AdamW works on one parameter at a time; that release adds a float32 mask even where nothing is masked.
    """
    settings = transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    with torch.device("cuda"):
        model = transformers.BertForSequenceClassification._from_config(settings, attn_implementation="eager")
    model.train()
    if checkpoint:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    scaler = torch.amp.GradScaler("cuda")

    def step() -> None:
        for _ in range(accumulate):
            labels = torch.randint(0, 2, (batch,), device="cuda")
            mask = torch.ones(batch, length, device="cuda")
            ids = _tokens(batch, length, settings.vocab_size)
            with torch.autocast("cuda", torch.float16):
                loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
            scaler.scale(loss / accumulate).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()

    return step, None


def transformer_block(batch: int, length: int, model: str, backward: bool) -> tuple[Step, Step | None]:
    """One block of BERT large or GPT-2 medium in float16 with dropout, or its forward pass."""
    network = _in_half(lambda: _block(model).train())
    x = torch.randn(batch, length, 1024, dtype=torch.float16, device="cuda")

    def step() -> None:
        out = network(x)[0]
        if backward:
            out.sum().backward()

    return step, None


def _block(model: str) -> nn.Module:
    from transformers.models.bert.modeling_bert import BertLayer
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    eager: dict[str, Any] = {"attn_implementation": "eager"}
    if model == "BERT large":
        return BertLayer(
            transformers.BertConfig(hidden_size=1024, num_attention_heads=16, intermediate_size=4096, **eager)
        )
    return GPT2Block(transformers.GPT2Config(n_embd=1024, n_head=16, **eager), layer_idx=0)


PROGRAMS: dict[str, Callable[..., tuple[Step, Step | None]]] = {
    each.__name__: each
    for each in (
        attention,
        gpt_from_scratch,
        reproduce_gpt2,
        clip_images,
        diffusion_unet,
        trainer_bert_large,
        transformer_block,
    )
}


def projected(row: dict[str, str]) -> tuple[Any, float, Any]:
    """The projection of a row's second step, the seconds of evaluation per step, and the step's projection by
    the GPU's data sheet alone.
    """
    torch.manual_seed(0)
    arguments = json.loads(row["arguments"])
    if row["program"] == "gpt_from_scratch":
        arguments["half"] = row["precision"] == "bf16"
    torch.set_float32_matmul_precision("high" if row["precision"] == "tf32" else "highest")
    mixed = row["precision"] == "bf16 autocast"  # programs in float16 have autocast around the forward pass
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
        by_sheet = known_by_data_sheet.projected(whole, row["gpu"], whole.nodes[first:second])
        return found, evaluation.seconds * EVALUATED if evaluation is not None else 0.0, by_sheet
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
        found, extra, by_sheet = projected(row)
        seconds, published = found.seconds + extra, float(row["ms"]) / 1e3
        low, high = (each + extra for each in found.seconds_range)
        kept = ("source", "url", "gpu", "title", "precision", "batch", "length")
        results.append(
            {key: row[key] for key in kept}
            | {"published": published, "projected": seconds, "range": (low, high)}
            | {"by sheet": by_sheet and {**by_sheet, "seconds": by_sheet["seconds"] + extra}}
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
