"""A LightningModule and its Trainer."""

import logging
import sys
import warnings

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


class AutoEncoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(28, 16), nn.ReLU(), nn.Linear(16, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 28))
        self.seen = []

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        self.seen.append(loss.detach())
        return loss

    def on_train_epoch_end(self):
        print("epoch", self.current_epoch, [round(loss.item(), 7) for loss in self.seen])
        self.seen.clear()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    L.seed_everything(11, verbose=False)
    loader = DataLoader(TensorDataset(torch.randn(48, 28)), batch_size=16, shuffle=True)
    trainer = L.Trainer(
        max_epochs=int(sys.argv[1]) if len(sys.argv) > 1 else 2,
        accelerator="auto", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(AutoEncoder(), loader)
