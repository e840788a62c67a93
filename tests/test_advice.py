"""Advice: strategies and cards compared, every row from recordings."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import lazyviz

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a card is here"),
    pytest.mark.filterwarnings("ignore"),  # of PyTorch's distributed packages
]
SMALL = lazyviz.DeviceProfile("small", 2 * 2**30)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def model() -> nn.Module:
    return nn.Sequential(*[Block(512) for _ in range(3)])


def step(made: nn.Module, batch_size: int) -> torch.Tensor:
    return made(torch.randn(batch_size * 64, 512, device="cuda")).square().mean()


def test_every_strategy_is_a_row_from_a_recording():
    styles = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
    found = lazyviz.advise(
        step,
        ["A100-40GB"],
        model=model,
        world_size=4,
        tensor_parallel=styles,
        tensor_parallel_sizes=(2,),
        largest_batch=False,
    )
    rows = {row.strategy: row for row in found}
    plain = ["one card", "DDP x 4", "FSDP2 x 4", "FSDP2 by layer x 4", "tensor parallel x 2"]
    assert set(plain) <= set(rows)
    assert not [row.failure for row in found if row.failure]
    assert all(f"{name}, recomputing" in rows for name in plain)
    one = rows["one card"].peak_bytes
    assert rows["tensor parallel x 2"].peak_bytes < 0.7 * one < one <= rows["DDP x 4"].peak_bytes
    assert rows["FSDP2 by layer x 4"].peak_bytes < rows["FSDP2 x 4"].peak_bytes
    assert all(row.max_batch_size is None and row.fits for row in found)
    assert "FSDP2 by layer x 4" in found.table().text() and "<table>" in found._repr_html_()


def test_the_largest_batch_fits_and_one_more_does_not():
    (row,) = [
        row
        for row in lazyviz.advise(step, [SMALL], model=model, world_size=1, recompute=False)
        if row.strategy == "one card"
    ]
    assert row.max_batch_size
    for size, fits in ((row.max_batch_size, True), (row.max_batch_size + 1, False)):
        (again,) = [
            other
            for other in lazyviz.advise(
                step,
                [SMALL],
                model=model,
                world_size=1,
                recompute=False,
                batch_size=size,
                largest_batch=False,
            )
            if other.strategy == "one card"
        ]
        assert again.fits is fits


def test_a_step_without_a_model_is_recorded_as_it_is_written():
    def whole() -> None:
        made = model().cuda()
        step(made, 2).backward()
        torch.optim.SGD(made.parameters(), lr=0.1).step()

    with lazyviz.lazy(device="A100-40GB") as graph:
        whole()
    (row,) = lazyviz.advise(whole, ["A100-40GB"])
    assert (row.strategy, row.peak_bytes) == ("as written", graph.plan().peak_bytes)
    assert row.max_batch_size is None


def test_what_fails_is_a_row_that_says_why():
    def failing(made: nn.Module, batch_size: int) -> torch.Tensor:
        raise RuntimeError("no such layer")

    found = lazyviz.advise(failing, ["A100-40GB"], model=model, world_size=1, recompute=False)
    assert {row.failure for row in found} == {"no such layer"}
    with pytest.raises(ValueError, match="devices"):
        lazyviz.advise(step, [])
