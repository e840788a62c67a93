"""Lightning: its Trainer, fitted and validated."""

from __future__ import annotations

import tempfile
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ..catalog import COPIED, LOADING, SAVED, program


class Classifier(lightning.LightningModule):
    """Two layers that log what they lose."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3)
        )

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        inputs, labels = batch
        loss = F.cross_entropy(self.layers(inputs), labels)
        self.log("train", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        inputs, labels = batch
        scores = self.layers(inputs)
        self.log("loss", F.cross_entropy(scores, labels))
        self.log("accuracy", (scores.argmax(-1) == labels).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class TwoOptimizers(Classifier):
    """Steps by hand, one optimizer for each half."""

    automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        inputs, labels = batch
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self.layers(inputs), labels))
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layers[0].parameters(), lr=0.1), torch.optim.Adam(
            self.layers[4].parameters()
        )


def loader(count: int = 32) -> DataLoader:
    data = TensorDataset(torch.randn(count, 8), torch.randint(0, 3, (count,)))
    return DataLoader(data, batch_size=8, shuffle=count == 32)


def fitted(model: lightning.LightningModule, **options: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        defaults = {"max_epochs": 2, "logger": False, "enable_checkpointing": False}
        trainer = lightning.Trainer(
            **{**defaults, **options},
            default_root_dir=folder,
            accelerator="cpu",
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, loader(), loader(16))
        return model, trainer.optimizers, dict(trainer.callback_metrics)


@program(
    {
        "random_": LOADING,
        "get_rng_state": "the state of the generators is kept around the first validation",
    }
)
def fitted_and_validated_each_epoch() -> Any:
    return fitted(Classifier())


@program(
    {
        "random_": LOADING,
        "get_rng_state": "the state of the generators is kept around the first validation",
    }
)
def accumulated_and_clipped() -> Any:
    return fitted(Classifier(), accumulate_grad_batches=2, gradient_clip_val=0.5)


@program(
    {
        "random_": LOADING,
        "get_rng_state": "the state of the generators is kept around the first validation",
    }
)
def steps_by_hand() -> Any:
    return fitted(TwoOptimizers())


@program(
    {
        "random_": LOADING,
        "get_rng_state": "the state of the generators is kept around the first validation",
        "item": "whether the measured loss is finite and better",
        "storage access": COPIED,
        "pickle": SAVED,
    }
)
def stopped_early_with_the_best_checkpoint() -> Any:
    callbacks = [EarlyStopping("loss", patience=1), ModelCheckpoint(monitor="loss", save_weights_only=False)]
    return fitted(Classifier(), max_epochs=4, callbacks=callbacks, enable_checkpointing=True)


@program(
    {
        "random_": LOADING,
        "get_rng_state": "the state of the generators is kept around the first validation",
    }
)
def averaged_weights() -> Any:
    return fitted(Classifier(), max_epochs=4, callbacks=[StochasticWeightAveraging(1e-2, swa_epoch_start=2)])


@program(
    {
        "random_": LOADING,
        "deepcopy": COPIED,
        "item": "results are returned as numbers",
    }
)
def validated_and_predicted() -> Any:
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    model = Classifier()
    return trainer.validate(model, loader(16), verbose=False)
