import argparse

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--steps", type=int, default=10)
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, options.width), nn.ReLU(), nn.Linear(options.width, 10)).to(device)
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(options.steps):
    x, y = torch.randn(128, 64, device=device), torch.randint(10, (128,), device=device)
    loss = F.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.4f}")
