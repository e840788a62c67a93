"""Sparse, quantized, and nested tensors: named sync points if not deferrable, and correct values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyviz

from ..lazy_equals_eager import both

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC|invariant).*"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:.*(Q|q)uantiz.*"),
    pytest.mark.filterwarnings("ignore:.*torch.ao.*"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage.*"),
]


def matrix():
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    return x * (x > 0)


INDICES = [[0, 1, 1], [2, 0, 2]]

SPARSE = {
    "to_sparse": lambda x: (x * 2).to_sparse(),
    "to_dense": lambda x: (x * 2).to_sparse().to_dense() + 1,
    "coo": lambda x: torch.sparse_coo_tensor(INDICES, x[0, :3], (2, 3)),
    "coo of duplicates": lambda x: torch.sparse_coo_tensor([[0, 0], [1, 1]], x[2, 2:], (2, 3)).coalesce(),
    "csr": lambda x: torch.sparse_csr_tensor([0, 1, 3], [1, 0, 2], x[2, :3], (2, 3)),
    "to csr": lambda x: (x * 2).to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x[:2].to_sparse_bsr((1, 2)),
    "mm": lambda x: torch.sparse.mm(x.to_sparse(), x.t()) * 2,
    "matmul csr": lambda x: x.to_sparse_csr() @ x.t(),
    "addmm": lambda x: torch.sparse.addmm(torch.ones(3, 3), x.to_sparse(), x.t()),
    "add": lambda x: x.to_sparse() + x.to_sparse() * 3,
    "add dense": lambda x: x + x.to_sparse(),
    "sum": lambda x: torch.sparse.sum(x.to_sparse(), dim=0),
    "softmax": lambda x: torch.sparse.softmax(x.to_sparse(), dim=1).to_dense(),
    "indices and values": lambda x: (x.to_sparse().indices() + 1, x.to_sparse().values() * 2),
    "crow indices": lambda x: (x.to_sparse_csr().crow_indices() + 1, x.to_sparse_csr().values() * 2),
    "in place": lambda x: x.to_sparse().mul_(2).to_dense(),
    "index_select": lambda x: x.to_sparse().index_select(0, torch.tensor([0, 2])).to_dense(),
    "sparse_mask": lambda x: (x + 1).sparse_mask(x.to_sparse()),
    "transpose": lambda x: x.to_sparse().t().to_dense(),
    "cat": lambda x: torch.cat([x.to_sparse(), x.to_sparse()]).to_dense(),
    "nnz": lambda x: ((x * 1).to_sparse()._nnz(), x.to_sparse().is_coalesced()),
    "bmm": lambda x: torch.bmm(torch.stack([x, x]).to_sparse(), torch.stack([x.t(), x.t()])),
}


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_tensors(name):
    both(SPARSE[name], matrix, syncs=None)


GRADIENTS = ["to_dense", "mm", "matmul csr", "add dense", "softmax", "addmm", "sum"]


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_through_sparse_tensors(name):
    def program(x):
        out = SPARSE[name](x * 1)
        out = out.to_dense() if out.layout != torch.strided else out
        (out * out).sum().backward()
        return out

    both(program, lambda: matrix().requires_grad_(), syncs=None, versions=False)


def test_a_real_sparse_tensor_is_used_without_a_sync_point():
    both(lambda sparse, x: sparse @ (x * 2), lambda: (matrix().to_sparse(), matrix().t()))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad])
def test_sparse_gradients_of_embeddings(optimizer):
    def program(model, ids):
        opt = optimizer(model.parameters(), lr=0.1)
        for _ in range(2):
            opt.zero_grad()
            loss = model(ids).pow(2).sum()
            loss.backward()
            opt.step()
        return loss, model.weight.grad.coalesce()

    def make():
        return nn.Embedding(6, 3, sparse=True), torch.tensor([[1, 4], [4, 2]])

    both(program, make, syncs=None, versions=False)


def test_embedding_bags():
    def program(model, ids, offsets):
        out = model(ids, offsets)
        out.sum().backward()
        return out

    for mode in ("sum", "mean", "max"):
        both(
            program,
            lambda mode=mode: (
                nn.EmbeddingBag(6, 3, mode=mode),
                torch.tensor([1, 4, 4, 2]),
                torch.tensor([0, 2]),
            ),
            syncs=None,
        )


QUANTIZED = {
    "per tensor": lambda x: torch.quantize_per_tensor(x * 2, 0.1, 3, torch.quint8),
    "per channel": lambda x: torch.quantize_per_channel(
        x * 2, torch.full((3,), 0.1), torch.zeros(3, dtype=torch.int64), 0, torch.qint8
    ),
    "dequantize": lambda x: torch.quantize_per_tensor(x * 2, 0.1, 3, torch.quint8).dequantize() + 1,
    "int_repr": lambda x: torch.quantize_per_tensor(x * 2, 0.1, 3, torch.quint8).int_repr() + 1,
    "relu": lambda x: torch.relu(torch.quantize_per_tensor(x * 2, 0.1, 3, torch.quint8)),
    "view": lambda x: torch.quantize_per_tensor(x * 2, 0.1, 3, torch.quint8)[1:].t(),
    "scale": lambda x: (lambda q: (q.q_scale(), q.q_zero_point()))(
        torch.quantize_per_tensor(x * 2, 0.1, 3, torch.quint8)
    ),
    "dynamic": lambda x: torch.quantize_per_tensor_dynamic(x * 2, torch.quint8, False),
    "fake per tensor": lambda x: torch.fake_quantize_per_tensor_affine(x * 2, 0.1, 0, -128, 127),
    "fake per channel": lambda x: torch.fake_quantize_per_channel_affine(
        x * 2, torch.full((3,), 0.1), torch.zeros(3), 0, -128, 127
    ),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_tensors(name):
    both(QUANTIZED[name], matrix, syncs=None)


def test_gradients_through_fake_quantization():
    def program(x):
        out = torch.fake_quantize_per_tensor_affine(x * 2, 0.1, 0, -8, 7)
        (out * out).sum().backward()
        return out

    both(program, lambda: matrix().requires_grad_(), syncs=None)


def test_a_dynamically_quantized_model():
    def make():
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}), torch.randn(3, 4)

    def program(model, x):
        return model(x * 2)

    both(program, make, syncs=None)


def nested(layout):
    def make():
        pieces = [torch.linspace(0, 1, n * 3).reshape(n, 3) for n in (2, 4)]
        return torch.nested.nested_tensor(pieces, layout=layout, requires_grad=True)

    return make


NESTED = {
    "pointwise": lambda n: (n * 2).sin(),
    "unbind": lambda n: [piece * 2 for piece in n.unbind()],
    "to_padded_tensor": lambda n: torch.nested.to_padded_tensor(n * 2, 0.0) + 1,
    "linear": lambda n: F.linear(n, torch.ones(2, 3)),
    "softmax": lambda n: F.softmax(n, -1),
    "layer_norm": lambda n: F.layer_norm(n, (3,)),
    "add": lambda n: n + n * 3,
    "of pending pieces": lambda n: torch.nested.as_nested_tensor(
        [piece * 2 for piece in n.detach().unbind()], layout=n.layout
    ),
    "made inside": lambda n: torch.nested.nested_tensor(
        [torch.ones(2, 3), torch.zeros(1, 3)], layout=n.layout
    ),
}


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("name", NESTED)
def test_nested_tensors(layout, name):
    def program(n):
        out = NESTED[name](n)
        return list(out.unbind()) if isinstance(out, torch.Tensor) and out.is_nested else out

    both(lambda: program(nested(layout)()), syncs=None, versions=False)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_gradients_through_nested_tensors(layout):
    def program(x, y):
        n = torch.nested.as_nested_tensor([x * 2, y * 3], layout=layout)
        out = (n * n).unbind()
        (out[0].sum() + out[1].sum()).backward()
        return list(out)

    def make():
        return torch.ones(2, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True)

    both(program, make, syncs=None, versions=False)


def test_mkldnn_tensors():
    both(lambda x: (x * 2).to_mkldnn().to_dense() + 1, matrix, syncs=None)


def test_complex_tensors_and_their_lazy_flags():
    def program(x):
        z = torch.complex(x, x * 2)
        return z.conj(), z.conj().imag, z.imag.neg(), (z.conj() @ z.t()).real, z.conj().resolve_conj(), z.mH

    both(program, matrix)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_that_packs_its_batch_into_a_nested_tensor():
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2).eval()
    x, mask = torch.randn(2, 4, 16), torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1]]).bool()
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=mask)
        with lazyviz.lazy():
            found = encoder(x, src_key_padding_mask=mask)
    assert torch.equal(found, expected)
