"""PyG: networks on graphs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import (
    GATConv,
    GCNConv,
    GINConv,
    SAGEConv,
    TransformerConv,
    global_max_pool,
    global_mean_pool,
)
from torch_geometric.utils import add_self_loops, dropout_edge, to_undirected

from ..catalog import LOADING, program


def graph(nodes: int = 30, edges: int = 90) -> Data:
    where = to_undirected(torch.randint(0, nodes, (2, edges)))
    return Data(x=torch.randn(nodes, 8), edge_index=where, y=torch.randint(0, 3, (nodes,)))


def trained(make: Any, data: Data, steps: int = 3, hidden: int = 16) -> Any:
    first, second = make(8, 16), make(hidden, 3)
    layers = nn.ModuleList([first, second])
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-2, weight_decay=5e-4)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        inside = F.dropout(F.relu(first(data.x, data.edge_index)), 0.5)
        loss = F.cross_entropy(second(inside, data.edge_index)[:20], data.y[:20])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return layers, optimizer, losses


@program(
    {
        "item": "the number of nodes; whether edges are there twice",
        "the result of aten.index.Tensor depends on data": "edges that are loops",
    }
)
def gcn() -> Any:
    return trained(GCNConv, graph())


@program(
    {
        "item": "the number of nodes; whether edges are there twice",
        "the result of aten.index.Tensor depends on data": "edges that are loops",
    }
)
def gcn_with_a_cache() -> Any:
    return trained(lambda inside, outside: GCNConv(inside, outside, cached=True), graph())


@program(
    {
        "item": "the number of nodes; whether edges are there twice",
        "the result of aten.index.Tensor depends on data": "edges that are loops",
    }
)
def gat() -> Any:
    return trained(
        lambda inside, outside: GATConv(inside, outside, heads=2, concat=False, dropout=0.2), graph()
    )


@program(
    {
        "item": "the number of nodes; whether edges are there twice",
    }
)
def sage() -> Any:
    return trained(lambda inside, outside: SAGEConv(inside, outside, aggr="max"), graph())


@program(
    {
        "item": "the number of nodes; whether edges are there twice",
    }
)
def graph_transformer() -> Any:
    return trained(lambda inside, outside: TransformerConv(inside, outside, heads=2, concat=False), graph())


@program(
    {
        "item": "the number of nodes; whether edges are there twice",
        "random_": LOADING,
        "add": LOADING,
    }
)
def batches_of_graphs() -> Any:
    graphs = [graph(10 + number, 20) for number in range(12)]
    for number, one in enumerate(graphs):
        one.y = torch.tensor([number % 2])
    layer = GINConv(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16)), train_eps=True)
    head = nn.Linear(32, 2)
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()])
    for batch in DataLoader(graphs, batch_size=4, shuffle=True):
        optimizer.zero_grad()
        inside = layer(batch.x, batch.edge_index).relu()
        pooled = [pool(inside, batch.batch) for pool in (global_mean_pool, global_max_pool)]
        loss = F.cross_entropy(head(torch.cat(pooled, 1)), batch.y)
        loss.backward()
        optimizer.step()
    return layer, head, optimizer, loss


@program(
    {
        "item": "the number of nodes; whether edges are there twice",
        "the result of aten.index.Tensor depends on data": "edges that are kept",
    }
)
def edges_added_and_dropped() -> Any:
    data = graph()
    where, _ = add_self_loops(data.edge_index, num_nodes=data.num_nodes)
    kept, mask = dropout_edge(where, p=0.3)
    return where, kept, mask, GCNConv(8, 4)(data.x, kept)
