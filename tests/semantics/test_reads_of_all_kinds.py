"""Short programs with memory, numbers, masks, and derivatives: bit-equal to eager."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lazyviz

from ..lazy_equals_eager import both


def made(*shape, **options):
    return torch.randn(*shape, **options) * 1.5


def after(tensor, write, read=lambda tensor: tensor + 1):
    """What is read of a tensor once something has been written to it."""
    write(tensor)
    return read(tensor), tensor


READS = {
    "an outer product by NumPy": lambda: torch.as_tensor(np.add.outer(made(3).numpy(), made(2).numpy())),
    "NumPy's out": lambda: after(made(3), lambda x: np.multiply(x.numpy(), 2, out=x.numpy())),
    "bytes seen as integers": lambda: made(4).view(torch.int32).numpy().tolist(),
    "a storage is filled": lambda: after(made(4), lambda x: x.untyped_storage().fill_(0)),
    "a byte of a storage": lambda: after(made(4), lambda x: x.untyped_storage().__setitem__(0, 7)),
    "a storage's items": lambda: made(2).untyped_storage().tolist(),
    "a typed storage's items": lambda: list(made(3).storage()),
    "an item of a typed storage": lambda: after(made(3), lambda x: x.storage().__setitem__(1, 5.0)),
    "a clone of a storage": lambda: after(made(2), lambda x: x.untyped_storage().clone().fill_(0)),
    "set_ to a part": lambda: torch.empty(0).set_(made(6).untyped_storage(), 2, (2,), (1,)) + 1,
    "numbers in lists": lambda: torch.tensor([[made(3)[0], 2], [made(2)[1], 4]], dtype=torch.double),
    "numbers in a legacy constructor": lambda: torch.DoubleTensor([made(3)[0].double(), 1]),
    "bounds of a slice": lambda: torch.arange(9)[torch.randint(3, ()) : torch.randint(4, 9, ())],
    "an index of a list": lambda: [1, 2, 3][torch.randint(2, (1,))],
    "the largest by Python": lambda: max(made(3)),
    "sorted by Python": lambda: sorted(made(4)),
    "map_": lambda: torch.zeros(3).map_(made(3), lambda left, right: left + right * 2),
    "a capsule after a write": lambda: after(made(3), lambda x: torch.from_dlpack(x).mul_(2)),
    "two capsules": lambda: after(
        made(3), torch.from_dlpack, lambda x: (torch.from_dlpack(x).add_(1), x * 2)
    ),
    "NumPy's view of a capsule": lambda: after(made(3), np.from_dlpack, lambda x: x.add_(1)),
    "labels of one sample": lambda: F.multilabel_margin_loss(made(5), torch.tensor([1, 0, -1, 2, 2])),
    "margins of one sample": lambda: F.multi_margin_loss(made(5), torch.tensor(3), p=2, reduction="none"),
    "a margin that is no length": lambda: F.huber_loss(made(3), made(3), delta=-1),
}


@pytest.mark.parametrize("name", READS)
def test_reads_and_writes_past_ops(name):
    both(READS[name], syncs=None)


DUALS = {
    "times i": lambda x: x * 1j,
    "real part of a conjugate": lambda x: torch.real((x + 0j).conj()),
    "imaginary part of a conjugate": lambda x: (x * 1j).conj().imag,
    "there and back": lambda x: torch.fft.irfft(torch.fft.rfft(x)),
    "chosen": lambda x: x[x > 0.7],
    "written": lambda x: (x * 1).index_put_((torch.tensor([1]),), x[:1]),
    "copied": lambda x: torch.zeros(3, dtype=torch.double).copy_(x),
    "solved": lambda x: torch.linalg.solve(torch.diag(x), x),
}


@pytest.mark.parametrize("name", DUALS)
def test_forward_derivatives(name):
    def program():
        with fwAD.dual_level():
            value = torch.rand(3, dtype=torch.double) + 0.5
            result = DUALS[name](fwAD.make_dual(value, torch.rand(3, dtype=torch.double)))
            return [part for part in fwAD.unpack_dual(result) if part is not None]

    both(program, syncs=None, versions=False)


MASKS = {
    "any": lambda x, mask: x[~mask] * x[~mask],
    "of bytes": lambda x, mask: x[mask.to(torch.uint8)],
    "of rows": lambda x, mask: x.view(2, 3)[mask[:2]],
    "of columns": lambda x, mask: x.view(2, 3)[:, mask[:3]],
    "with a new dimension": lambda x, mask: x[mask, None],
    "of another size": lambda x, mask: x[mask[:4]],
    "a product": lambda x, mask: x[mask & (x > 0)].prod(),
    "written back": lambda x, mask: after(x * 1, lambda z: z.__setitem__(mask, x[mask] * 2)),
    "scattered": lambda x, mask: (x * 1).masked_scatter(mask, x * 2),
    "repeated": lambda x, mask: x.repeat_interleave(mask.long()),
}


@pytest.mark.parametrize("name", MASKS)
def test_gradients_through_masks(name):
    def program():
        x = torch.randn(6).requires_grad_()
        result = MASKS[name](x, torch.rand(6) > 0.5)
        (result[0] if isinstance(result, tuple) else result).sum().backward()
        return result, x

    both(program, syncs=None, versions=False)


LAYERS = {
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    "an LSTM": lambda x: nn.LSTM(4, 3)(x)[0],
    "heads": lambda x: nn.MultiheadAttention(4, 2)(x, x, x)[0],
    "an encoder": lambda x: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)(x),
    "singular values": torch.linalg.svdvals,
    "a grid": lambda x: F.grid_sample(x[None, None], torch.rand(1, 2, 2, 2), align_corners=False),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
}


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, *gradients):
        return None


@pytest.mark.parametrize("name", LAYERS)
def test_a_function_whose_gradient_is_none(name):
    def program():
        x = torch.randn(3, 4, requires_grad=True)
        (_Nothing.apply(LAYERS[name](x))[1].sum() + x.sum()).backward()
        return x

    both(program, syncs=None, versions=False)


WAYS_TO_ACCUMULATE = ("plain", "checkpoint", "hook", "penalty", "retain", "nan", "norm", "written")


def accumulate(way: str) -> tuple[list[float], list[torch.Tensor]]:
    """Two steps of four micro-batches, each with reads; activations are large enough to be freed early."""
    torch.manual_seed(0)
    hidden = nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.Tanh(), nn.Dropout(0.2))
    last = nn.Linear(512, 4)
    parameters = [*hidden.parameters(), *last.parameters()]
    updates = torch.optim.AdamW(parameters, lr=0.01)
    seen: list[float] = []
    if way == "hook":
        for parameter in parameters:
            parameter.register_hook(lambda gradient: seen.append(gradient.sum().item()))
    for _ in range(2):
        for _ in range(4):
            x = torch.randn(512, 64, requires_grad=way == "penalty")
            features = checkpoint(hidden, x, use_reentrant=False) if way == "checkpoint" else hidden(x)
            loss = F.cross_entropy(last(features), torch.randint(4, (512,)))
            if way == "penalty":
                loss = loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()
            if way == "retain":
                loss.backward(retain_graph=True)
                seen.append(loss.item())
            loss.backward()
            seen.append(bool(torch.isnan(loss)) if way == "nan" else loss.item())
            if way == "norm":
                seen.append(nn.utils.clip_grad_norm_(parameters, 1.0).item())
            if way == "written":
                with torch.no_grad():
                    last.weight.add_(0.001)
        updates.step()
        updates.zero_grad()
    return seen, [*map(torch.Tensor.detach, (*parameters, *hidden.buffers())), torch.get_rng_state()]


@pytest.mark.parametrize("way", WAYS_TO_ACCUMULATE)
def test_accumulated_gradients_with_reads_in_between_are_those_of_eager_pytorch(way):
    expected = accumulate(way)
    with lazyviz.lazy() as graph:
        found = accumulate(way)
    graph.evaluate()
    assert found[0] == expected[0]
    assert all(map(torch.equal, found[1], expected[1]))
