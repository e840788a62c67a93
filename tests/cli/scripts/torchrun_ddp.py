"""DistributedDataParallel by the variables that torchrun sets; one process here."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    rank, local_rank, world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        torch.manual_seed(3)
        device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
        model = DistributedDataParallel(
            nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        dataset = TensorDataset(torch.randn(64, 20), torch.randn(64, 1))
        sampler = DistributedSampler(dataset)
        loader = DataLoader(dataset, batch_size=16, sampler=sampler)
        for epoch in range(int(os.environ.get("EPOCHS", "2"))):
            sampler.set_epoch(epoch)
            for x, y in loader:
                loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if rank == 0:
                print(f"epoch {epoch} of {world_size} loss {loss.item():.6f}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
