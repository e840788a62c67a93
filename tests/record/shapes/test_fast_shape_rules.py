"""A first recording calls no PyTorch shape rule for known shapes, and imports nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lazyviz
from lazyviz.record import native_recorder
from lazyviz.record.shapes.shape_inference_cache import ShapeCache
from lazyviz.record.tape import tape

from ...bit_equality import difference
from ...lazy_equals_eager import both


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(24), nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4)
        query, key, value = (qkv[:, :, part].transpose(1, 2) for part in range(3))
        scores = F.dropout((query @ key.transpose(-1, -2) / 3).softmax(-1), 0.1)
        return x + self.out((scores @ value).transpose(1, 2).reshape(batch, length, width))


def mlp():
    return nn.Sequential(nn.Linear(11, 13), nn.ReLU(), nn.Linear(13, 7)), torch.randn(5, 11)


def transformer():
    return nn.Sequential(
        nn.Embedding(50, 24), Attention(), Attention(), nn.Linear(24, 7), nn.Flatten(0, 1)
    ), (torch.randint(0, 50, (3, 6)))


def convolutional():
    layers = [nn.Conv2d(3, 9, 3, 2, 1, bias=False), nn.BatchNorm2d(9), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(9, 7)), torch.randn(
        4, 3, 14, 14
    )


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW], ids=["SGD", "AdamW"])
@pytest.mark.parametrize("made", [mlp, transformer, convolutional])
def test_a_training_step_of_common_layers_asks_no_shape_rule(made, optimizer, monkeypatch):
    torch.manual_seed(0)
    model, x = made()
    target = torch.randint(0, 7, (len(model(x)),))
    updates = optimizer(model.parameters(), lr=0.1)

    def asked(cache, op, *_):
        raise AssertionError(f"{op} is not known")

    monkeypatch.setattr(ShapeCache, "_ask", asked)
    with lazyviz.lazy() as graph:
        F.cross_entropy(model(x), target).backward()
        updates.step()
    assert not graph.sync_points
    lazyviz.session.lazy_graph.reset()


FIRST = """
import json, sys
import torch
from torch import nn
import lazyviz

model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(1), nn.Linear(288, 5))
updates = torch.optim.{optimizer}(model.parameters(), lr=0.1)
x, target = torch.randn(2, 3, 8, 8), torch.randint(0, 5, (2,))
before = set(sys.modules)
with lazyviz.lazy() as graph:
    updates.zero_grad()
    nn.functional.cross_entropy(model(x), target).backward()
    updates.step()
    y = x.sum()
imported = sorted(set(sys.modules) - before)
print(json.dumps([len(graph.nodes), imported]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_a_first_block_imports_nothing(optimizer):
    source = textwrap.dedent(FIRST.format(optimizer=optimizer))
    done = subprocess.run([sys.executable, "-c", source], check=True, capture_output=True, text=True)
    ops, imported = json.loads(done.stdout)
    assert ops > 30
    assert imported == []


@pytest.mark.slow
def test_importing_lazyviz_changes_nothing_but_how_exports_are_made():
    source = """
    import torch
    from torch import nn
    before = {name: vars(torch.Tensor).get(name) for name in dir(torch.Tensor)}
    call, export = nn.Module.__call__, torch.export.export
    import lazyviz
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as modes
    changed = [name for name, item in before.items() if vars(torch.Tensor).get(name) is not item]
    assert changed == ["__dlpack__"], changed  # which leaves no trace that could be found later
    assert nn.Module.__call__ is call and torch.export.export is export
    assert not modes()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(source)], check=True)


@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.complex64, torch.bfloat16])
@pytest.mark.parametrize("number", [2, 2.5, float("inf"), True, 2j])
def test_numbers_that_are_taken_for_tensors(number, dtype):
    def program(x):
        copied, half = x.clone().copy_(number), x.clone()
        half[0].copy_(number)
        return copied, half, x * number, number - x if dtype != torch.bool else x, torch.eq(x, number)

    both(program, lambda: torch.ones(2, 3).to(dtype), orders=("at once",))


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x @ x,
        lambda x: torch.addmm(torch.ones(5), x, x.t()),
        lambda x: torch.bmm(x[None], x[None]),
        lambda x: x + torch.ones(4),
        lambda x: x.add_(torch.ones(4, 2, 3)),
        lambda x: x.sum(2),
        lambda x: x.mean((0, 0)),
        lambda x: x.softmax(5),
        lambda x: F.gelu(x, approximate="none of them"),
        lambda x: x.double() @ x.t(),
        lambda x: torch.cat([x, x.t()]),
        lambda x: x.view(4),
        lambda x: x.select(0, 5),
        lambda x: x.expand(7, 2, 4),
        lambda x: x.t().view(6),
        lambda x: F.layer_norm(x, (4,)),
        lambda x: F.batch_norm(x, torch.ones(4), torch.ones(4), training=True),
        lambda x: F.conv2d(x[None, None], torch.ones(1, 2, 1, 1)),
        lambda x: F.conv2d(x[None, None], torch.ones(1, 1, 5, 5)),
        lambda x: F.conv2d(x[None, None], torch.ones(1, 1, 1, 1), torch.ones(3)),
        lambda x: F.conv2d(x[None, None], torch.ones(1, 1, 1, 1), stride=0),
        lambda x: F.max_pool2d(x[None, None], 2, padding=3),
        lambda x: F.max_pool2d(x[None, None], 9),
        lambda x: F.embedding(x, x),
        lambda x: F.nll_loss(x, torch.zeros(3, dtype=torch.int64)),
        lambda x: F.nll_loss(x, torch.zeros(2)),
        lambda x: x.expand(2, 2, 3).add_(1),
        lambda x: x.bernoulli_(1.5),
        lambda x: x.normal_(0, -1),
        lambda x: x.uniform_(2, 1),
        lambda x: x.clamp_(),
        lambda x: torch.empty(2, -1) + x,
        lambda x: x.long().add_(0.5),
        lambda x: torch.where(x, x, x),
        lambda x: x - True,
        lambda x: True - x,
        lambda x: x.sub_(True),
        lambda x: torch.add(x, 1, alpha=True),
        lambda x: x.clamp(1j),
        lambda x: x < 1j,
        lambda x: x.add_(1j),
        lambda x: x.copy_("1"),
        lambda x: torch.ops.aten.copy_.default(x, None),
    ],
)  # fmt: skip
def test_kernel_errors_are_raised_at_their_line_with_the_kernels_message(program):
    with pytest.raises(Exception) as eager:
        program(torch.ones(2, 3))
    with pytest.raises(type(eager.value)) as lazy, lazyviz.lazy():
        made = torch.ones(2, 3) * 2
        program(made)
    assert str(lazy.value) == str(eager.value)
    lazyviz.session.lazy_graph.reset()


@pytest.mark.parametrize("size", [(5, 4), (1, 4), (5, 1), (0, 4), (2, 3, 5, 4)])
def test_results_are_laid_out_as_eagers_for_any_strides(size):
    def program(x):
        x = x.transpose(-1, -2)
        return [
            x.clone(),
            x * 2,
            torch.zeros_like(x),
            x.sum(-1, keepdim=True),
            (x > 0),
            x.softmax(-1),
            x + x[0],
        ]

    x = torch.randn(size)
    expected = program(x)
    with lazyviz.lazy() as graph:
        found = program(x * 1)
        described = [(each.shape, each.stride(), each.dtype, each.storage_offset()) for each in found]
    assert described == [(each.shape, each.stride(), each.dtype, each.storage_offset()) for each in expected]
    graph.evaluate()
    assert not difference(found, expected)


def test_the_compiled_recorder_and_pythons_find_the_same():
    found = []
    active = native_recorder.active

    def program():
        x = torch.randn(17, 19)
        return (x.view(19, 17).t() @ x.t()).relu().sum(0)

    for compiled in (True, False):
        native_recorder.use(compiled)
        tape.shapes.entries.clear()
        before = tape.shapes.misses
        try:
            with lazyviz.lazy() as graph:
                program()
        finally:
            native_recorder.use(active)
        found.append((tape.shapes.misses - before, [node.outputs[0].meta for node in graph.nodes]))
        lazyviz.session.lazy_graph.reset()
    assert found[0] == found[1] and found[0][0] >= 6
