"""Which run a plan describes: eager PyTorch on an absent GPU, an evaluation on a present device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.plan.liveness.allocation_trace import program_of
from lazyviz.plan.make_plan import make_plan
from lazyviz.testing.peak_assertion import PeakExceeded
from lazyviz.view.scene.memory_chart import other_run, verdict

GIB = 2**30
MIB = 2**20
GPU = "RTX-3090"


def holding(count: int, width: int, device: str | None = GPU) -> lazyviz.LazyGraph:
    """Every intermediate result has a name until the function returns, though none is read again."""

    def run(x: torch.Tensor) -> torch.Tensor:
        names = []
        for _ in range(count):
            x = x + 1
            names.append(x)
        return x.sum()

    with lazyviz.lazy(device=device) as graph, torch.no_grad():
        total = run(torch.zeros(width, device="cuda" if device else "cpu"))
    del total
    return graph


class Model(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended, _ = self.attention(x, x, x, need_weights=False)
        y = x + attended
        z = self.mlp(y)
        return y + z


def training(optimizer: str, steps: int = 2, *, foreach: bool | None = None) -> lazyviz.LazyGraph:
    with lazyviz.lazy(device=GPU) as graph:
        model = nn.Sequential(*[Model() for _ in range(2)]).cuda()
        update = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1, foreach=foreach)
        for _ in range(steps):
            x = torch.randn(8, 32, 64, device="cuda")
            update.zero_grad()
            loss = (model(x) ** 2).mean()
            loss.backward()
            update.step()
    return graph


def test_on_an_absent_gpu_everything_is_of_plain_pytorch():
    plan = holding(8, 4 * MIB).plan()
    ours = make_plan(plan._graph, device=GPU, of="lazyviz")
    assert plan.verdict_of == "eager" and ours.verdict_of == "lazyviz"
    assert plan.peak_bytes == plan.eager_peak_bytes == ours.eager_peak_bytes == 8 * 16 * MIB + 4
    assert ours.peak_bytes == plan.lazyviz_peak_bytes == ours.lazyviz_peak_bytes == 2 * 16 * MIB
    assert [nbytes for _, nbytes in plan.timeline] == [nbytes for _, nbytes in plan.eager_timeline]
    assert (
        sum(each.nbytes for each in plan.alive_at_peak) == sum(plan.by_category.values()) == plan.peak_bytes
    )
    assert plan.reserved_bytes == plan.eager_reserved_bytes == ours.eager_reserved_bytes > ours.reserved_bytes
    assert plan.needed_bytes == plan.eager_needed_bytes == ours.eager_needed_bytes
    assert plan.lazyviz_needed_bytes == ours.needed_bytes == ours.lazyviz_needed_bytes
    assert plan.devices["cuda:0"].peak_bytes == plan.peak_bytes


def test_what_plain_pytorch_cannot_hold_does_not_fit_though_an_evaluation_would():
    graph = holding(30, 256 * MIB)
    plan = graph.plan()
    assert plan.lazyviz_needed_bytes < plan.capacity_bytes < plan.needed_bytes
    assert plan.fits is False and plan.eager_fits is False and not plan.devices["cuda:0"].fits
    text = plan.explain()
    assert "Projected peak on RTX-3090: 30.0 GiB allocated by plain eager PyTorch" in text
    assert "Evaluated by lazyviz: 2.00 GiB" in text
    assert "It does not fit: RTX-3090 has 24.0 GiB" in text
    assert (
        f"Plain PyTorch {plan.torch_version} needs 30.6 GiB; evaluated by lazyviz, it needs 2.59 GiB" in text
    )
    assert "reserve 30.0 GiB;" in text and "CUDA context takes about 600 MiB" in text
    assert verdict(plan)[0] == "too-big"
    assert other_run(plan) == "evaluated by lazyviz: 2.00 GiB"


def test_on_a_present_device_the_verdict_names_its_run_and_shows_the_other():
    plan = holding(8, 4 * MIB, device=None).plan()
    assert plan.verdict_of == "lazyviz" and plan.fits and plan.eager_fits
    assert plan.peak_bytes == plan.lazyviz_peak_bytes < plan.eager_peak_bytes
    words = f"Evaluating it needs 32.0 MiB; plain PyTorch {torch.__version__.partition('+')[0]} 128 MiB."
    assert plan.verdict().endswith(words) and words in plan.explain()
    assert other_run(plan) == "plain eager PyTorch: 128 MiB"
    narrow = holding(8, 4 * MIB, device=None).plan(device="cpu:100MiB")
    assert narrow.verdict_of == "lazyviz" and narrow.fits and narrow.eager_fits is False
    assert "128 MiB, which would not fit." in narrow.verdict()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam"])
def test_remedies_change_the_program_that_the_plan_is_of(optimizer, foreach):
    plan = training(optimizer, foreach=foreach).plan()
    program = program_of(plan._nodes, plan._lifetimes.values())
    assert program.timeline() == [nbytes for _, nbytes in plan.eager_timeline]
    for remedy in plan.remedies:
        assert remedy.peak_bytes + remedy.saves_bytes == plan.peak_bytes


def test_a_run_in_pieces_or_recomputed_is_lazyviz_s():
    def recorded() -> lazyviz.LazyGraph:
        x = torch.randn(2048, 256)
        with lazyviz.lazy(device=GPU, batch=[x]) as graph:
            model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)])
            model(x).square().mean().backward()
        return graph

    graph = recorded()
    assert graph.plan(split=4).verdict_of == "lazyviz" and graph.plan(split="auto").verdict_of == "eager"
    assert graph.plan(recompute="auto").verdict_of == "eager"  # it fits as it is
    whole = graph.plan()
    budget = whole.lazyviz_peak_bytes - 100_000
    again = graph.plan(recompute=budget)
    assert again.verdict_of == "lazyviz" and again.recompute.nodes and again.peak_bytes <= budget
    assert graph.plan(recompute=whole.peak_bytes).verdict_of == "eager"
    tight = lazyviz.DeviceProfile("tight", whole.peak_bytes - 150_000)
    assert graph.plan(device=tight).fits is False
    cut = graph.plan(device=tight, split="auto")
    assert cut.verdict_of == "lazyviz" and cut.split.pieces > 1 and cut.fits


@pytest.mark.parametrize("name", ["T4-16GB", "RTX-3060", "A100-40GB"])
def test_the_largest_batch_fits_for_the_allocator_of_plain_pytorch_and_one_more_does_not(name):
    x = torch.zeros(64, 128, 256)
    with lazyviz.lazy(device=name, batch=[x]) as graph:
        model = nn.Sequential(*[Model(256) for _ in range(4)]).cuda()
        model(x.cuda()).square().mean().backward()
    plan = graph.plan()
    largest = plan.max_batch_size
    assert largest
    for size, fits in ((largest, True), (largest + 1, False)):
        sized = graph.plan(batch_size=size)
        assert sized.verdict_of == "eager" and sized.fits is fits
        assert (sized._reservation.failure is None) is fits
        assert (sized.eager_needed_bytes <= sized.capacity_bytes) is fits


def test_budgets_apply_to_plain_pytorch_by_default():
    def run() -> None:
        x = torch.zeros(4 * MIB)
        names = []
        for _ in range(8):
            x = x + 1
            names.append(x)

    with pytest.raises(
        PeakExceeded, match=r"cpu would need 128 MiB, .* above the limit .*, for eager PyTorch"
    ):
        lazyviz.assert_peak_below("100 MiB")(run)()
    with lazyviz.assert_peak_below("100 MiB", of="lazyviz"):
        run()
    with pytest.raises(PeakExceeded, match="for an evaluation by lazyviz"):
        with lazyviz.assert_peak_below("20 MiB", of="lazyviz"):
            run()
    with pytest.raises(ValueError, match="of must be 'eager'"):
        lazyviz.assert_peak_below("1 GiB", of="both")
