"""A graph convolutional network of PyTorch Geometric on a random graph."""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

parser = argparse.ArgumentParser()
parser.add_argument("--hidden_channels", type=int, default=16)
parser.add_argument("--epochs", type=int, default=5)
args = parser.parse_args()
torch.manual_seed(5)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
nodes = 60
data = Data(x=torch.randn(nodes, 12), edge_index=torch.randint(nodes, (2, 240)), y=torch.randint(4, (nodes,)))
data.train_mask = torch.arange(nodes) < 40
data.val_mask = ~data.train_mask
data = data.to(device)


class GCN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(12, args.hidden_channels), GCNConv(args.hidden_channels, 4)

    def forward(self, x, edge_index):
        x = F.dropout(x, p=0.5, training=self.training)
        x = F.dropout(self.conv1(x, edge_index).relu(), p=0.5, training=self.training)
        return self.conv2(x, edge_index)


model = GCN().to(device)
optimizer = torch.optim.Adam(
    [dict(params=model.conv1.parameters(), weight_decay=5e-4), dict(params=model.conv2.parameters())], lr=0.01
)
for epoch in range(args.epochs):
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        pred = model(data.x, data.edge_index).argmax(dim=-1)
    accuracy = int((pred[data.val_mask] == data.y[data.val_mask]).sum()) / int(data.val_mask.sum())
    print(f"epoch {epoch} loss {float(loss):.7f} val {accuracy:.3f}")
