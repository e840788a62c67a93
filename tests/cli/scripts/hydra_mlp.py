"""A regression whose settings are Hydra's: a dataclass, and what the command line overrides."""

from dataclasses import dataclass, field

import hydra
import torch
from hydra.core.config_store import ConfigStore
from torch import nn


@dataclass
class ModelConfig:
    width: int = 32
    depth: int = 2


@dataclass
class TrainConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    lr: float = 1e-2
    steps: int = 6
    seed: int = 0


ConfigStore.instance().store(name="train", node=TrainConfig)


@hydra.main(version_base=None, config_path=None, config_name="train")
def main(cfg):
    torch.manual_seed(cfg.seed)
    layers = [nn.Linear(8, cfg.model.width)]
    for _ in range(cfg.model.depth):
        layers += [nn.Tanh(), nn.Linear(cfg.model.width, cfg.model.width)]
    model = nn.Sequential(*layers, nn.Linear(cfg.model.width, 1))
    optimizer = hydra.utils.instantiate(
        {"_target_": "torch.optim.RMSprop", "lr": cfg.lr}, params=model.parameters()
    )
    x = torch.randn(64, 8)
    y = x.square().sum(1, keepdim=True)
    for step in range(cfg.steps):
        loss = nn.functional.smooth_l1_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.8f}")


if __name__ == "__main__":
    main()
