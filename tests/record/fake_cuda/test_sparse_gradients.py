"""Sparse gradients of embeddings on a planned GPU: planned with as many entries as there are indices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazyviz

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
]
ROWS, WIDTH, COUNT = 5000, 32, 512 * 6
TABLE, ROWS_OF_ALL, INDICES = ROWS * WIDTH * 4, COUNT * WIDTH * 4, COUNT * 8


def ids(device="cuda"):
    return torch.randint(ROWS, (512, 6), device=device)


def plan_of(program, **options):
    with lazyviz.lazy(device="A100-40GB", **options) as graph:
        kept = program("cuda")
    plan = graph.plan()
    del kept
    return plan


def on_cpu(program):
    with lazyviz.lazy() as graph:
        kept = program("cpu")
    del kept
    return graph.plan().eager_peak_bytes


def embedding(device, **options):
    return nn.Embedding(ROWS, WIDTH, sparse=True, **options).to(device)


def with_sgd(device, momentum=0.0):
    table = embedding(device)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=momentum)
    for _ in range(2):
        optimizer.zero_grad()
        table(ids(device)).pow(2).sum().backward()
        optimizer.step()
    return table, optimizer


def with_momentum(device):
    return with_sgd(device, 0.9)


def used_twice(device):
    table = embedding(device)
    (table(ids(device)).sum() + table(ids(device)).pow(2).sum()).backward()
    return table


def accumulated(device):
    table = embedding(device)
    for _ in range(2):
        table(ids(device)).pow(2).sum().backward()
    return table


def made_dense(device):
    table = embedding(device)
    table(ids(device)).pow(2).sum().backward()
    return table, table.weight.grad.to_dense()


def tied(device):
    table, head = embedding(device), nn.Linear(WIDTH, ROWS, bias=False).to(device)
    head.weight = table.weight
    head(table(ids(device))).sum().backward()
    return head


def bags(device):
    table = nn.EmbeddingBag(ROWS, WIDTH, sparse=True).to(device)
    table(ids(device)).pow(2).sum().backward()
    return table


@pytest.mark.parametrize(
    "program", [with_sgd, with_momentum, used_twice, accumulated, made_dense, tied, bags]
)
def test_what_coalesces_nothing_takes_what_it_takes_on_the_cpu(program):
    plan = plan_of(program)
    # A bag's tensors on the side differ: the CPU has 4 KiB more of them.
    assert plan.peak_bytes == pytest.approx(on_cpu(program), abs=4096 if program is bags else 64)
    assert "Assumed" not in str(plan.explain())


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, torch.optim.Adagrad])
def test_what_coalesces_is_planned_as_if_all_indices_differ(layer, optimizer):
    def program(device):
        table = layer(ROWS, WIDTH, sparse=True).to(device)
        chosen = optimizer(list(table.parameters()), lr=0.1)
        for _ in range(2):
            chosen.zero_grad()
            table(ids(device)).pow(2).sum().backward()
            chosen.step()
        return table, chosen

    plan = plan_of(program)
    assert "Assumed: all indices of a sparse gradient differ." in str(plan.explain())
    # The CPU coalesced indices some of which were equal; a GPU sorts them with their places.
    least = on_cpu(program)
    assert least <= plan.peak_bytes <= least + 2 * (ROWS_OF_ALL + 4 * INDICES)
    assert plan.by_category["optimizer"] == (2 if optimizer is torch.optim.SparseAdam else 1) * TABLE


def test_rows_of_the_padding_index_are_left_out_by_copying_the_others():
    def program(device):
        table = embedding(device, padding_idx=0)
        table(ids(device)).pow(2).sum().backward()
        return table

    plan = plan_of(program)
    assert "Assumed: no index of a sparse embedding is the padding index." in str(plan.explain())
    # At last: the table, its gradient, and the two numbers of the loss and its own gradient.
    assert plan.eager_timeline[-1][1] == TABLE + ROWS_OF_ALL + INDICES + 8


def test_a_sparse_gradient_is_one_to_the_program():
    with lazyviz.lazy(device="A100-40GB", mesh=(2,)) as graph:
        table = embedding("cuda")
        kept = []
        table.weight.register_hook(kept.append)
        table(ids()).pow(2).sum().backward()
        grad = table.weight.grad
        assert grad.is_sparse and grad.layout == torch.sparse_coo and grad.is_cuda
        assert grad.device == torch.device("cuda", 0) and grad.get_device() == 0 and not grad.is_meta
        assert grad.type() == "torch.cuda.sparse.FloatTensor"
        assert grad._nnz() == COUNT and grad.sparse_dim() == grad.dense_dim() == 1
        assert grad._indices().shape == (1, COUNT) and grad._values().shape == (COUNT, WIDTH)
        assert not grad.is_coalesced() and grad.coalesce().is_coalesced()
        assert repr(grad) == "lazy[5000, 32] float32 cuda:0, sparse, nnz=3072, pending"
        assert (2 * grad).dtype == grad.dtype and grad.half().dtype == torch.float16
        with pytest.raises(RuntimeError, match="Adam does not support sparse gradients"):
            torch.optim.Adam(table.parameters()).step()
        with pytest.raises(lazyviz.AbsentDeviceError, match="linalg_vector_norm.* of a sparse tensor"):
            nn.utils.clip_grad_norm_(table.parameters(), 1.0)
        with pytest.raises(lazyviz.AbsentDeviceError, match="cannot be copied to another device"):
            grad.cpu()
    assert kept[0]._values().data_ptr is not None and graph.pending
    assert grad.device == torch.device("cuda", 0)  # after the block, too


def test_scaled_and_replicated_gradients_are_planned():
    def scaled(device):
        table = embedding(device)
        optimizer, scaler = torch.optim.SGD(table.parameters(), lr=0.1), torch.amp.GradScaler(device)
        scaler.scale(table(ids(device)).pow(2).sum()).backward()
        scaler.step(optimizer)
        return table

    def replicated(device):
        table = nn.DataParallel(embedding(device), [0, 1])
        table(ids(device)).pow(2).sum().backward()
        return table

    assert plan_of(scaled).peak_bytes == on_cpu(scaled)
    assert set(plan_of(replicated).devices) >= {"cuda:0", "cuda:1"}


def test_sparse_tensors_with_history_are_refused_by_name():
    with lazyviz.lazy(device="A100-40GB"):
        values = torch.randn(100, 8, device="cuda", requires_grad=True)
        with pytest.raises(lazyviz.AbsentDeviceError, match="COO tensors without autograd history"):
            torch.sparse_coo_tensor(torch.zeros(1, 100, dtype=torch.long, device="cuda"), values, (50, 8))


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_layer_on_the_cpu_trains_as_without_a_planned_gpu(mode):
    def step(**options):
        torch.manual_seed(0)
        with lazyviz.lazy(**options):
            table = nn.EmbeddingBag(50, 16, mode=mode, sparse=True)
            table(torch.randint(50, (8, 5))).square().sum().backward()
        return table.weight.grad.to_dense()

    assert torch.equal(step(device="A100-40GB"), step())
