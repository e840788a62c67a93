"""The projected effect of autocast, compared with a recording that uses it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyviz
from lazyviz.torch_internals.cpu_kernel_selection import Instructions, onednn_instructions

from ..remedy_checks import check_autocast, unfolds_in_bfloat16

GPU = "RTX-3060"


class Added(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


class Joined(nn.Sequential):
    def forward(self, x):
        return torch.cat([x, super().forward(x)], 1)


class Scaled(nn.Module):
    """Multiplies by a learned number, a tensor without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return x * self.scale


def conv(inputs, outputs, **options):
    return nn.Conv2d(inputs, outputs, 3, padding=1, **options)


def repeated(*layers):
    """A stem, then what ``layers`` makes, a few times."""
    return nn.Sequential(conv(3, 16), *[nn.Sequential(*layers[0]()) for _ in range(3)])


IMAGES = (8, 3, 16, 16)
NETWORKS = {
    "plain": (lambda: repeated(lambda: (conv(16, 16), nn.ReLU())), IMAGES),
    "batch norm": (lambda: repeated(lambda: (conv(16, 16), nn.BatchNorm2d(16), nn.ReLU())), IMAGES),
    "residual": (
        lambda: repeated(
            lambda: (
                Added(conv(16, 16, bias=False), nn.BatchNorm2d(16), nn.ReLU(), conv(16, 16, bias=False)),
                nn.BatchNorm2d(16),
            )
        ),
        IMAGES,
    ),
    "batch norm's running statistics": (
        lambda: repeated(lambda: (conv(16, 16), nn.BatchNorm2d(16).eval(), nn.Hardswish())),
        IMAGES,
    ),
    "group norm": (lambda: repeated(lambda: (conv(16, 16), nn.GroupNorm(4, 16), nn.SiLU())), IMAGES),
    "instance norm": (
        lambda: repeated(lambda: (conv(16, 16), nn.InstanceNorm2d(16, affine=True), nn.LeakyReLU(0.1))),
        IMAGES,
    ),
    "learned slope": (lambda: repeated(lambda: (conv(16, 16), nn.PReLU(16))), IMAGES),
    "learned scale": (lambda: repeated(lambda: (conv(16, 16), Scaled(), nn.ReLU())), IMAGES),
    "dense": (
        lambda: nn.Sequential(
            conv(3, 16),
            Joined(nn.BatchNorm2d(16), nn.ReLU(), conv(16, 16)),
            Joined(nn.BatchNorm2d(32), nn.ReLU(), conv(32, 32)),
        ),
        IMAGES,
    ),
    "down and up": (
        lambda: nn.Sequential(
            *(conv(3, 16), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), conv(16, 32), nn.BatchNorm2d(32)),
            *(nn.ReLU(), nn.Upsample(scale_factor=2), nn.ConvTranspose2d(32, 16, 2, 2)),
        ),
        IMAGES,
    ),
    "layer norm": (
        lambda: nn.Sequential(
            *[nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(3)]
        ),
        (512, 64),
    ),
    "rows' batch norm": (
        lambda: nn.Sequential(
            *[nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()) for _ in range(3)]
        ),
        (512, 64),
    ),
}


def plan_of(make, shape, device, *, autocast):
    torch.manual_seed(0)
    with lazyviz.lazy(device=None if device == "cpu" else GPU) as graph:
        model = make().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(shape, device=device)
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    return graph.plan()


# On the CPU oneDNN's scratch memory in bfloat16 is not half of that in float32, and depends on the CPU.
@pytest.mark.parametrize(("device", "tolerance"), [("cpu", 0.05), ("cuda", 0)])
@pytest.mark.parametrize("name", NETWORKS)
def test_autocast_on_networks_with_norms_peaks_as_foreseen(name, device, tolerance):
    make, shape = NETWORKS[name]
    plan = plan_of(make, shape, device, autocast=False)
    actual = plan_of(make, shape, device, autocast=True)
    check_autocast(plan, actual, tolerance, may_cost=unfolds_in_bfloat16(device))


def test_autocast_is_not_offered_where_its_copies_take_what_it_saves():
    def make():
        return nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])

    plan = plan_of(make, (1, 256), "cpu", autocast=False)
    assert plan_of(make, (1, 256), "cpu", autocast=True).peak_bytes >= plan.peak_bytes
    assert not [each for each in plan.remedies if each.kind == "autocast"]


def test_autocast_names_the_line_of_the_first_op_that_it_changes():
    net = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU())])
    with lazyviz.lazy() as graph:
        angles = torch.linspace(0, 6, 512 * 256).reshape(512, 256)
        x = angles.sin() + torch.randn(512, 256)
        loss = net(x).square().mean()
        loss.backward()
    (remedy,) = [each for each in graph.plan().remedies if each.kind == "autocast"]
    assert remedy.source is not None and "net(x)" in remedy.source.text


class Recurrent(nn.Module):
    """Recurrent layers, and what reads their last result."""

    def __init__(self, layer, **options) -> None:
        super().__init__()
        self.layer = layer(64, 64, **options)
        self.head = nn.Linear(64 * (1 + self.layer.bidirectional), 8)

    def forward(self, x):
        return self.head(self.layer(x)[0])


@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 3, "batch_first": True}, {"bidirectional": True}], ids=str
)
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_autocast_on_recurrent_layers_peaks_about_as_foreseen(layer, options):
    def make():
        return Recurrent(layer, **options)

    plan = plan_of(make, (40, 30, 64), "cuda", autocast=False)
    (foreseen,) = [each.peak_bytes for each in plan.remedies if each.kind == "autocast"]
    assert foreseen == pytest.approx(plan_of(make, (40, 30, 64), "cuda", autocast=True).peak_bytes, rel=0.1)
    assert not [each for each in plan.remedies if each.kind == "bf16"]  # cuDNN's take none


LOSSES = {
    "cross entropy": lambda out, target: F.cross_entropy(out, target),
    "log of softmax": lambda out, target: out.log_softmax(-1).mean(),
    "binary cross entropy": lambda out, target: F.binary_cross_entropy_with_logits(out, torch.ones_like(out)),
    "sum": lambda out, target: out.sum(),
    "mean of squares": lambda out, target: out.square().mean(),
}


@pytest.mark.parametrize("device", [None, GPU])
@pytest.mark.parametrize("name", LOSSES)
def test_autocast_foresees_in_what_precision_a_loss_is_taken(name, device):
    place = "cuda" if device else "cpu"

    def step(*, autocast):
        with lazyviz.lazy(device=device) as graph:
            with torch.device(place):
                layer, x = nn.Linear(64, 500), torch.randn(1024, 64)
                target = torch.randint(0, 500, (1024,))
            with torch.autocast(place, torch.bfloat16, enabled=autocast):
                out = layer(x)
                loss = LOSSES[name](out, target)
            del out
            loss.backward()
        return graph.plan()

    plan, actual = step(autocast=False), step(autocast=True)
    check_autocast(plan, actual, 0.03, may_cost=True)
    if device or onednn_instructions() >= Instructions.AVX512_BF16:
        assert actual.peak_bytes < 1.03 * plan.peak_bytes


@pytest.mark.parametrize("device", [None, GPU])
def test_weights_in_bfloat16_are_offered_only_where_there_are_weights(device):
    with lazyviz.lazy(device=device) as graph:
        y = torch.linspace(0, 1, 100_000, device="cuda" if device else "cpu").sin()
    kinds = {remedy.kind for remedy in graph.plan().remedies}
    del y
    assert "bf16" not in kinds


def test_what_bfloat16_brings_is_about_so_much_where_another_kernel_does_attention():
    def step(dtype):
        with lazyviz.lazy(device="A100-40GB") as graph:
            with torch.device("cuda"):
                layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).to(dtype)
                x = torch.randn(4, 256, 64, dtype=dtype)
            layer(x).square().mean().backward()
        return graph.plan()

    (remedy,) = [each for each in step(torch.float32).remedies if each.kind == "bf16"]
    assert remedy.estimate and not remedy.at_best
    assert remedy.peak_bytes == pytest.approx(step(torch.bfloat16).peak_bytes, rel=0.1)
