"""accelerate: a training loop of one's own, with what `prepare` makes of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ..catalog import LOADING, program


def data() -> TensorDataset:
    return TensorDataset(torch.randn(44, 8), torch.randint(0, 3, (44,)))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def accelerator_of_a_new_process(**options: Any) -> Accelerator:
    """accelerate keeps the first one's settings for the life of a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True, **options)


@program(
    {
        "random_": LOADING,
    }
)
def accumulated_gradients_clipping_and_a_schedule() -> Any:
    accelerator = accelerator_of_a_new_process(gradient_accumulation_steps=2)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20)
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, DataLoader(data(), batch_size=8, shuffle=True), schedule
    )
    losses = []
    for _ in range(2):
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
    return model, optimizer.optimizer, losses, schedule.get_last_lr()


@program(
    {
        "random_": LOADING,
        "item": "the program reads its result",
    }
)
def evaluation_gathers_predictions() -> Any:
    accelerator = accelerator_of_a_new_process()
    model, loader = accelerator.prepare(network().eval(), DataLoader(data(), batch_size=8))
    found = []
    with torch.no_grad():
        for inputs, labels in loader:
            found.append(accelerator.gather_for_metrics((model(inputs).argmax(-1), labels)))
    predictions, labels = (torch.cat(parts) for parts in zip(*found))
    return predictions, (predictions == labels).float().mean().item()


@program(
    {
        "random_": LOADING,
    }
)
def bfloat16_autocast() -> Any:
    accelerator = accelerator_of_a_new_process(mixed_precision="bf16")
    model = network()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), DataLoader(data(), batch_size=8)
    )
    for inputs, labels in loader:
        with accelerator.autocast():
            loss = F.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.unwrap_model(model, keep_fp32_wrapper=False), optimizer.optimizer, loss
