"""Memory-saving training techniques in their usual form; each program trains for two steps.

``PROGRAMS[name](device)``.  Those of :data:`LIBRARIES` need a library that may not be installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Program = Callable[[str], Any]
STEPS = 2
WIDTH, BATCH, CLASSES = 256, 2048, 10


def perceptron(
    device: str, width: int = WIDTH, batch: int = BATCH
) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(width, CLASSES)).to(device)
    return model, torch.randn(batch, width, device=device), torch.randint(CLASSES, (batch,), device=device)


def train(loss: Callable[[], torch.Tensor], *optimizers: torch.optim.Optimizer) -> None:
    for _ in range(STEPS):
        loss().backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def plain(device: str) -> Any:
    model, x, y = perceptron(device)
    optimizer = torch.optim.Adam(model.parameters())
    train(lambda: F.cross_entropy(model(x), y), optimizer)
    return model, optimizer


def saved_on_cpu(device: str) -> Any:
    model, x, y = perceptron(device)
    optimizer = torch.optim.Adam(model.parameters())

    def loss() -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=device != "cpu"):
            return F.cross_entropy(model(x), y)

    train(loss, optimizer)
    return model, optimizer


def offloaded_by_hooks(device: str) -> Any:
    """Activations are moved to the CPU in half precision."""
    model, x, y = perceptron(device)
    optimizer = torch.optim.Adam(model.parameters())

    def pack(tensor: torch.Tensor) -> tuple[torch.device, torch.dtype, torch.Tensor]:
        kept = tensor.to("cpu", torch.float16) if tensor.is_floating_point() else tensor
        return tensor.device, tensor.dtype, kept

    def unpack(packed: tuple[torch.device, torch.dtype, torch.Tensor]) -> torch.Tensor:
        place, dtype, kept = packed
        return kept.to(place, dtype)

    def loss() -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return F.cross_entropy(model(x), y)

    train(loss, optimizer)
    return model, optimizer


def small_batch(device: str) -> Any:
    """Most of the memory is weights, gradients, and optimizer state."""
    model, x, y = perceptron(device, 512, 64)
    optimizer = torch.optim.Adam(model.parameters())
    train(lambda: F.cross_entropy(model(x), y), optimizer)
    return model, optimizer


def optimizer_in_backward(device: str) -> Any:
    model, x, y = perceptron(device, 512, 64)
    optimizers: dict[torch.Tensor, torch.optim.Optimizer] = {
        each: torch.optim.Adam([each]) for each in model.parameters()
    }

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    train(lambda: F.cross_entropy(model(x), y))
    return model, optimizers


def data_parallel(device: str) -> Any:
    model, x, y = perceptron(device)
    model = nn.DataParallel(model) if device != "cpu" else model
    optimizer = torch.optim.Adam(model.parameters())
    train(lambda: F.cross_entropy(model(x), y), optimizer)
    return model, optimizer


def ctc(device: str) -> Any:
    model = nn.Linear(40, 20).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    frames = torch.randn(100, 8, 40, device=device)
    words = torch.randint(1, 20, (8, 30), device=device)
    lengths = torch.full((8,), 100), torch.randint(10, 31, (8,))
    train(lambda: nn.CTCLoss()(model(frames).log_softmax(-1), words, *lengths), optimizer)
    return model, optimizer


def dense_bags(device: str) -> Any:
    model = nn.EmbeddingBag(2000, 64, mode="mean").to(device)
    optimizer = torch.optim.Adam(model.parameters())
    ids, starts = torch.randint(2000, (512,), device=device), torch.arange(0, 512, 16, device=device)
    train(lambda: model(ids, starts).square().mean(), optimizer)
    return model, optimizer


def _adapted(device: str, **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=1000, bos_token_id=1, eos_token_id=1)
    base = GPT2LMHeadModel(config)
    if options.pop("checkpointing", False):
        base.gradient_checkpointing_enable()
        base.enable_input_require_grads()
    model = get_peft_model(base, LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True, **options))
    model = model.to(device)
    ids = torch.randint(1000, (4, 64), device=device)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    train(lambda: model(input_ids=ids, labels=ids, use_cache=False).loss, optimizer)
    return model, optimizer


def lora(device: str) -> Any:
    return _adapted(device, lora_dropout=0.1)


def dora(device: str) -> Any:
    return _adapted(device, use_dora=True, checkpointing=True)


def torchao_optimizer(name: str) -> Program:
    """One of torchao's optimizers, whose update uses ``torch.compile``; here it runs in eager mode."""

    def run(device: str) -> Any:
        import torchao.optim

        model, x, y = perceptron(device, 512, 64)
        optimizer = getattr(torchao.optim, name)(model.parameters())
        with torch.compiler.set_stance("force_eager"):
            train(lambda: F.cross_entropy(model(x), y), optimizer)
        return model, optimizer

    return run


def torchao_weights(name: str) -> Program:
    """Inference with a perceptron whose weights torchao has quantized."""

    def run(device: str) -> Any:
        import torchao.quantization

        model, x, _ = perceptron(device, 512, 64)
        torchao.quantization.quantize_(model, getattr(torchao.quantization, name)())
        with torch.no_grad():
            return model, model(x)

    return run


PROGRAMS: dict[str, Program] = {
    "plain": plain,
    "save_on_cpu": saved_on_cpu,
    "offload by saved_tensors_hooks": offloaded_by_hooks,
    "small batch": small_batch,
    "optimizer in backward": optimizer_in_backward,
    "DataParallel": data_parallel,
    "CTC loss": ctc,
    "EmbeddingBag": dense_bags,
    "LoRA": lora,
    "DoRA, recomputed": dora,
    "AdamW8bit": torchao_optimizer("AdamW8bit"),
    "AdamW4bit": torchao_optimizer("AdamW4bit"),
    "AdamWFp8": torchao_optimizer("AdamWFp8"),
    "int8 weights": torchao_weights("Int8WeightOnlyConfig"),
    "int8 weights and activations": torchao_weights("Int8DynamicActivationInt8WeightConfig"),
    "float8 weights": torchao_weights("Float8WeightOnlyConfig"),
}
LIBRARIES: dict[str, tuple[str, ...]] = {
    "LoRA": ("peft", "transformers"),
    "DoRA, recomputed": ("peft", "transformers"),
    **dict.fromkeys(list(PROGRAMS)[-6:], ("torchao",)),
}
NOT_DEFERRED = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
"""What is compiled runs at once where it can; only a planned GPU has it recorded."""


def names(installed: Callable[[str], bool]) -> Iterable[str]:
    """The programs whose libraries are installed."""
    return [name for name in PROGRAMS if all(map(installed, LIBRARIES.get(name, ())))]
