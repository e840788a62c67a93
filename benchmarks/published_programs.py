"""The programs of published memory figures, rewritten: each trains two steps like the original run.

Each is called inside of ``lazyviz.lazy(device=...)``, where ``"cuda"`` is the planned GPU, with the
arguments of its row in ``data/published_memory.csv``.  The row has the facts from the source; its note says
what is inferred.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from models.models_of_published_figures import Gpt, Segmentation, VisionTransformer
from torch import Tensor, nn

STEPS = 2
CUDA = torch.device("cuda")


def _of(kind: str, config: Any, dtype: torch.dtype, attention: str | None = None) -> Any:
    """A transformers model with random weights, created on the GPU in ``dtype``."""
    torch.set_default_dtype(dtype)
    try:
        with CUDA:
            options = {} if attention is None else {"attn_implementation": attention}
            return getattr(transformers, kind)._from_config(config, **options)
    finally:
        torch.set_default_dtype(torch.float32)


def _tokens(batch: int, length: int, words: int) -> Tensor:
    return torch.randint(1, words - 1, (batch, length), device="cuda")


# Whether nothing is masked: transformers reads this in every call of models with attention masks.
def _call(model: Any, **inputs: Any) -> Any:
    return model(**inputs)  # reads: nothing is masked


ASSUMED = {
    number: True
    for number, line in enumerate(Path(__file__).read_text(encoding="utf-8").splitlines(), 1)
    if line.endswith("# reads: nothing is masked")
}


def causal_language_model(batch: int, config: dict[str, Any], length: int, optimizer: str) -> None:
    """GPT-2 on random text with labels and a mask; gradients cleared after the step."""
    settings = transformers.GPT2Config(**config)
    with CUDA:
        model = transformers.GPT2LMHeadModel(settings).train()
    optim = getattr(torch.optim, optimizer)(model.parameters())
    ids = torch.randint(0, settings.vocab_size, (batch, length), device="cuda")
    mask = torch.ones(batch, length, dtype=torch.long, device="cuda")
    for _ in range(STEPS):
        out = _call(model, input_ids=ids, attention_mask=mask, labels=ids)
        out.loss.backward()
        optim.step()
        optim.zero_grad()


def attention_benchmark(
    batch: int, model: str, config: dict[str, Any], length: int, attention: str, half: bool
) -> None:
    """Forward and backward without an optimizer, the sum of the logits for a loss, no mask given."""
    kind = getattr(transformers, model)
    # A warning of some versions, which reads the tokens.
    kind.warn_if_padding_and_no_attention_mask = lambda *arguments, **options: None
    settings = kind.config_class(**config)
    network = _of(model, settings, torch.float16 if half else torch.float32, attention).train()
    ids = _tokens(batch, length, settings.vocab_size)
    for _ in range(STEPS):
        network.zero_grad()
        outputs = _call(network, input_ids=ids)
        loss = outputs.logits.sum()
        loss.backward()


def bert_inference(batch: int, length: int) -> None:
    """BERT base without a head: a forward pass of the benchmark utility."""
    model = _of("BertModel", transformers.BertConfig(), torch.float32, "eager").eval()
    ids = _tokens(batch, length, 30522)
    with torch.no_grad():
        for _ in range(STEPS):
            _call(model, input_ids=ids)


def bert_large_trainer(
    batch: int, optimizer: str, accumulate: int = 1, checkpoint: bool = False, half: bool = False
) -> None:
    """BERT large, two classes, 512 tokens, as the Trainer: gradients clipped, cleared after the step."""
    config = transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    model = _of("BertForSequenceClassification", config, torch.float32, "eager").train()
    if checkpoint:
        model.gradient_checkpointing_enable()
    if optimizer == "Adafactor":
        optim: Any = transformers.Adafactor(
            model.parameters(), lr=5e-5, scale_parameter=False, relative_step=False
        )
    else:
        optim = torch.optim.AdamW(model.parameters(), foreach=False)
    scaler = torch.amp.GradScaler("cuda", enabled=half)
    for _ in range(STEPS):
        for _ in range(accumulate):
            ids = torch.randint(100, 30000, (batch, 512), device="cuda")
            labels = torch.randint(0, 2, (batch,), device="cuda")
            # That release added a mask even where nothing is masked, in the dtype of the weights: the sum of
            # half-precision scores and the mask, which softmax keeps, is in float32.
            mask = torch.zeros(batch, 1, 1, 512, device="cuda")
            with torch.autocast("cuda", torch.float16, enabled=half):
                loss = _call(model, input_ids=ids, attention_mask=mask, labels=labels)["loss"]
            scaler.scale(loss / accumulate).backward()
        scaler.unscale_(optim)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        scaler.step(optim)
        scaler.update()
        model.zero_grad()


def vit_l_fabric(batch: int, precision: str, optimizer: str, accumulate: int = 1) -> None:
    """ViT-L/16 with ten classes, as a Fabric script: gradients cleared between forward and backward."""
    with CUDA:
        model = VisionTransformer(1024, 24, 16, 4096, 16, 10).train()
    if precision == "bf16-true":
        model = model.bfloat16()
    optim = getattr(torch.optim, optimizer)(model.parameters(), lr=5e-5)
    mixed = precision == "16-mixed"
    scaler = torch.amp.GradScaler("cuda", enabled=mixed)
    for _ in range(STEPS):
        for index in range(accumulate):
            features = torch.randn(batch, 3, 224, 224, device="cuda")
            targets = torch.randint(0, 10, (batch,), device="cuda")
            inputs = features.bfloat16() if precision == "bf16-true" else features
            with torch.autocast("cuda", torch.float16, enabled=mixed):
                logits = model(inputs)
            logits = logits.float()
            del inputs
            loss = F.cross_entropy(logits, targets)
            if accumulate == 1:
                optim.zero_grad()
            scaler.scale(loss).backward()
            if index == accumulate - 1:
                scaler.step(optim)
                scaler.update()
                if accumulate > 1:
                    optim.zero_grad()


def vit_l_tutorial(batch: int, in_backward: bool) -> None:
    """ViT-L/16 with 1000 classes and one Adam, or one per parameter that steps when its gradient arrives."""
    with CUDA:
        model = VisionTransformer(1024, 24, 16, 4096, 16, 1000).train()
    image = torch.randn(batch, 3, 224, 224, device="cuda")
    optim: torch.optim.Adam | None = None
    if in_backward:
        optimizers: dict[Tensor, torch.optim.Adam] = {
            weight: torch.optim.Adam([weight], foreach=False) for weight in model.parameters()
        }

        def step(weight: Tensor) -> None:
            optimizers[weight].step()
            optimizers[weight].zero_grad()

        for weight in model.parameters():
            weight.register_post_accumulate_grad_hook(step)
    else:
        optim = torch.optim.Adam(model.parameters())
    for _ in range(STEPS):
        model(image).sum().backward()
        if optim is not None:
            optim.step()
            optim.zero_grad()


def gpt_from_scratch(
    batch: int, form: str, plain: bool, half: bool, fused: bool, words: int = 50257, length: int = 1024
) -> None:
    """GPT-2 small with AdamW; evaluates two batches after a step, as the run did every few steps."""
    with CUDA:
        model = Gpt(words, length, form, plain).train()
    if half:
        model = model.bfloat16()
    optim = torch.optim.AdamW(model.parameters(), weight_decay=0.1, fused=fused)

    def loss_of() -> Tensor:
        ids, targets = (torch.randint(0, words, (batch, length), device="cuda") for _ in range(2))
        logits = model(ids)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    for _ in range(STEPS):
        optim.zero_grad()
        loss = loss_of()
        loss.backward()
        optim.step()
        model.eval()
        with torch.no_grad():
            for _ in range(2):
                loss_of()
        model.train()


def vit_h_low_bit(batch: int, optimizer: str) -> None:
    """ViT-H/14 with 45 classes under bfloat16 autocast; gradients cleared after the step."""
    with CUDA:
        model = VisionTransformer(1280, 32, 16, 5120, 14, 45, fused=True).train()
    optim = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-4)
    for _ in range(STEPS):
        images = torch.randn(batch, 3, 224, 224, device="cuda")
        labels = torch.randint(0, 45, (batch,), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optim.step()
        optim.zero_grad()


def segmentation(batch: int, head: str, depth: int, height: int, width: int, classes: int = 19) -> None:
    """A segmentation model with two losses, and with DistributedDataParallel's buckets in memory."""
    depths = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}[depth]
    with CUDA:
        model = Segmentation(head, depths, classes).train()
    weights = list(model.parameters())
    optim = torch.optim.SGD(weights, lr=0.01, momentum=0.9, weight_decay=5e-4)
    buckets = torch.empty(sum(weight.numel() for weight in weights), device="cuda")
    for _ in range(STEPS):
        images = torch.randn(batch, 3, height, width, device="cuda")
        labels = torch.randint(0, classes, (batch, height, width), device="cuda")
        losses = []
        for logits, weight in zip(model(images), (1.0, 0.4)):
            full = F.interpolate(logits, size=(height, width), mode="bilinear", align_corners=False)
            loss = F.cross_entropy(full, labels, reduction="none", ignore_index=255)
            losses.append(weight * loss.mean())
        optim.zero_grad()
        sum(losses).backward()  # type: ignore[union-attr]
        optim.step()
    del buckets


PROGRAMS: dict[str, Callable[..., None]] = {
    program.__name__: program
    for program in (
        causal_language_model,
        attention_benchmark,
        bert_inference,
        bert_large_trainer,
        vit_l_fabric,
        vit_l_tutorial,
        gpt_from_scratch,
        vit_h_low_bit,
        segmentation,
    )
}
