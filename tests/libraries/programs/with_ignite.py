"""ignite: engines, handlers and metrics."""

from __future__ import annotations

from typing import Any

import torch
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import EarlyStopping, EMAHandler, LRScheduler
from ignite.metrics import Accuracy, ConfusionMatrix, Fbeta, Loss, RunningAverage
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ..catalog import LOADING, program


def loader(count: int = 32) -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(count, 8), torch.randint(0, 3, (count,))), batch_size=8)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


@program(
    {
        "random_": LOADING,
        "item": "the loss of each batch and measures are returned as numbers",
        "the result of aten.bincount.default depends on data": "counts for the confusion matrix",
    }
)
def supervised_training_with_metrics() -> Any:
    model, loss = network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = create_supervised_trainer(model, optimizer, loss)
    metrics = {"accuracy": Accuracy(), "loss": Loss(loss), "f1": Fbeta(1), "confusion": ConfusionMatrix(3)}
    evaluator = create_supervised_evaluator(model, metrics)
    RunningAverage(output_transform=lambda output: output).attach(trainer, "running")
    validation, found = loader(16), []

    @trainer.on(Events.EPOCH_COMPLETED)
    def measure(engine: Engine) -> None:
        evaluator.run(validation)
        found.append((engine.state.metrics["running"], dict(evaluator.state.metrics)))

    trainer.run(loader(), max_epochs=2)
    return model, optimizer, found


@program(
    {
        "random_": LOADING,
        "item": "the program reads the loss, to stop early",
    }
)
def a_step_of_ones_own_with_an_average_of_the_weights() -> Any:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(engine: Engine, batch: Any) -> torch.Tensor:
        inputs, labels = batch
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        return loss.detach()

    trainer = Engine(step)
    average = EMAHandler(model, momentum=0.1)
    average.attach(trainer, event=Events.ITERATION_COMPLETED)
    schedule = LRScheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
    trainer.add_event_handler(Events.ITERATION_STARTED, schedule)
    stopping = EarlyStopping(2, lambda engine: -engine.state.output.item(), trainer)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, stopping)
    trainer.run(loader(), max_epochs=3)
    return model, average.ema_model, optimizer, trainer.state.output
