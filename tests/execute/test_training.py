"""Whole training steps: deferred without a sync point, and bit-equal to eager."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lazyviz


def assert_same_training(make, step, *, seed=7, rounds=2, sync_points=0):
    """``step(model, optimizer)`` run eagerly and lazily from the same state must leave the same bits."""
    torch.manual_seed(0)
    eager_model, eager_optimizer = make()
    torch.manual_seed(0)
    model, optimizer = make()
    graphs = []
    for _ in range(rounds):
        torch.manual_seed(seed)
        expected = step(eager_model, eager_optimizer)
        after = torch.rand(3)
        torch.manual_seed(seed)
        with lazyviz.lazy() as graph:
            result = step(model, optimizer)
        assert len(graph.sync_points) == sync_points, graph.sync_points
        if not sync_points:
            assert graph.pending == len(graph.nodes)
        graph.evaluate()
        assert graph.pending == 0
        assert torch.equal(torch.rand(3), after), "the generator is not where eager left it"
        assert type(result) is torch.Tensor
        assert torch.equal(result, expected)
        graphs.append(graph)
    for (name, ours), theirs in zip(model.named_parameters(), eager_model.parameters()):
        assert type(ours) is nn.Parameter
        assert torch.equal(ours, theirs), name
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            assert type(ours.grad) is torch.Tensor
            assert torch.equal(ours.grad, theirs.grad), name
            assert ours.grad.stride() == theirs.grad.stride(), name
    for ours, theirs in zip(model.buffers(), eager_model.buffers()):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(model.parameters(), eager_model.parameters()):
        state, expected_state = optimizer.state[ours], eager_optimizer.state[theirs]
        assert state.keys() == expected_state.keys()
        for key, value in expected_state.items():
            if isinstance(value, torch.Tensor):
                assert type(state[key]) is torch.Tensor
                assert torch.equal(state[key], value), key
    return graphs


def gpt2(**options):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=3,
        n_embd=64,
        n_head=4,
        vocab_size=211,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
        **options,
    )
    return transformers.GPT2LMHeadModel(config).train()


IDS = torch.randint(0, 211, (4, 32), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("foreach", [False, True])
def test_three_adamw_steps_of_gpt2_with_dropout_and_clipping(foreach):
    def make():
        model = gpt2()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=foreach)

    def step(model, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(IDS, labels=IDS).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return loss

    graphs = assert_same_training(make, step)
    phases = {node.phase for node in graphs[0].nodes}
    assert phases == {"forward", "backward", "optimizer"}
    backward = [node for node in graphs[0].nodes if node.phase == "backward"]
    assert sum(node.forward is not None for node in backward) > 0.7 * len(backward)
    assert any(node.module.startswith("transformer.h.1.attn") for node in backward)
    assert all(node.source is not None for node in graphs[0].nodes)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, groups=2, dilation=2)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.drop = nn.Dropout2d(0.2)
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(self.bn(self.conv1(x)).relu(), 2, padding=1)
        x = self.drop(self.pool(F.gelu(self.conv2(x))))
        return self.head(x.flatten(1))


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-4),
        lambda p: torch.optim.SGD(p, 0.1, foreach=True),
        lambda p: torch.optim.Adam(p, 1e-3, amsgrad=True),
        lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
        lambda p: torch.optim.RMSprop(p, 1e-3, centered=True, momentum=0.5),
        lambda p: torch.optim.Adagrad(p, 1e-2),
        lambda p: torch.optim.NAdam(p, 1e-3),
        lambda p: torch.optim.RAdam(p, 1e-3),
        lambda p: torch.optim.Adamax(p, 1e-3),
    ],
)
def test_a_convolutional_net_with_every_kind_of_optimizer(optimizer):
    x = torch.randn(6, 1, 28, 28, generator=torch.Generator().manual_seed(2))
    y = torch.arange(6)

    def make():
        model = ConvNet()
        return model, optimizer(model.parameters())

    def step(model, opt):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        loss.backward()
        opt.step()
        return loss

    assert_same_training(make, step)


def test_an_optimizer_that_reads_values_syncs_at_its_line_and_stays_right():
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))

    def train(model, optimizer):
        optimizer.zero_grad()
        loss = model(x).pow(2).sum()
        loss.backward()
        optimizer.step()  # Adafactor scales its step by norms that it reads
        return loss

    torch.manual_seed(0)
    eager_model = nn.Linear(4, 3)
    model = copy.deepcopy(eager_model)
    expected = train(eager_model, torch.optim.Adafactor(eager_model.parameters()))
    with lazyviz.lazy() as graph:
        result = train(model, torch.optim.Adafactor(model.parameters()))
    assert graph.sync_points
    assert {point.source.text.partition("  #")[0] for point in graph.sync_points} == {"optimizer.step()"}
    graph.evaluate()
    assert torch.equal(result, expected)
    assert torch.equal(model.weight, eager_model.weight)


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_nets(cell):
    x = torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(2))

    def make():
        model = cell(8, 16, num_layers=2, dropout=0.3, bidirectional=True)
        return model, torch.optim.Adam(model.parameters())

    def step(model, optimizer):
        optimizer.zero_grad()
        out, _ = model(x)
        loss = out.pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    assert_same_training(make, step)


def test_autocast():
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(2))

    def make():
        model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4))
        return model, torch.optim.AdamW(model.parameters())

    def step(model, optimizer):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    assert_same_training(make, step)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(2))

    def make():
        model = nn.Sequential(
            *[nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.GELU()) for _ in range(3)]
        )
        return model, torch.optim.SGD(model.parameters(), 0.1)

    def step(model, optimizer):
        optimizer.zero_grad()
        h = (x * 1).requires_grad_()
        for block in model:
            h = checkpoint(block, h, use_reentrant=reentrant)
        loss = h.sum()
        loss.backward()
        optimizer.step()
        return loss

    torch.manual_seed(0)
    eager_model, eager_optimizer = make()
    model = copy.deepcopy(eager_model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(1)
    expected = step(eager_model, eager_optimizer)
    torch.manual_seed(1)
    with lazyviz.lazy() as graph:
        result = step(model, optimizer)
    graph.evaluate()
    assert torch.equal(result, expected)
    for ours, theirs in zip(model.parameters(), eager_model.parameters()):
        assert torch.equal(ours.grad, theirs.grad)


def test_inference_mode_and_no_grad():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    x = torch.randn(2, 5, 16)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            expected = model(x)
        with lazyviz.lazy() as graph, context():
            out = model(x)
        assert not graph.sync_points
        graph.evaluate()
        assert torch.equal(out, expected)
        assert out.is_inference() == expected.is_inference()
        assert not out.requires_grad


def test_a_loader_inside_the_block_gives_eagers_batches():
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.randn(20, 4, generator=torch.Generator().manual_seed(3)), torch.arange(20) % 3)

    def make():
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        return model, torch.optim.Adam(model.parameters())

    def step(model, optimizer):
        for x, y in DataLoader(data, batch_size=6, shuffle=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        return loss

    torch.manual_seed(0)
    eager_model, eager_optimizer = make()
    torch.manual_seed(0)
    model, optimizer = make()
    torch.manual_seed(1)
    expected = [step(eager_model, eager_optimizer) for _ in range(2)][-1]
    torch.manual_seed(1)
    with lazyviz.lazy() as graph:
        result = [step(model, optimizer) for _ in range(2)][-1]
    graph.evaluate()
    assert torch.equal(result, expected)


def test_custom_functions_hooks_and_double_backward():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 3 * x**2 * grad

    def program(w):
        w.register_hook(lambda g: g * 2)
        y = Cube.apply(w).sum()
        (g,) = torch.autograd.grad(y, w, create_graph=True)
        (g * w).sum().backward()
        return g

    w1 = torch.linspace(-1, 1, 5).requires_grad_()
    w2 = w1.detach().clone().requires_grad_()
    expected = program(w1)
    with lazyviz.lazy() as graph:
        result = program(w2)
    assert not graph.sync_points
    graph.evaluate()
    assert torch.equal(result, expected)
    assert torch.equal(w1.grad, w2.grad)


def test_scheduler_gradscaler_and_ema_need_no_sync():
    x = torch.randn(8, 4)

    def make():
        model = nn.Linear(4, 4)
        return model, torch.optim.AdamW(model.parameters(), 1e-2)

    def step(model, optimizer):
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        ema = torch.optim.swa_utils.AveragedModel(copy.deepcopy(model), multi_avg_fn=None)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(x).pow(2).sum()
            loss.backward()
            optimizer.step()
            scheduler.step()
        ema.update_parameters(model)
        return loss

    assert_same_training(make, step, rounds=1)
