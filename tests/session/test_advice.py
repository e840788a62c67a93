"""``lazyviz.advise``: strategies and GPUs compared, every row from recordings."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import lazyviz

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here"),
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


@pytest.mark.slow
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
    plain = ["one GPU", "DDP x 4", "FSDP2 x 4", "FSDP2 by layer x 4", "tensor parallel x 2"]
    assert set(plain) <= set(rows)
    assert not [row.failure for row in found if row.failure]
    assert all(f"{name}, recomputing" in rows for name in plain)
    one = rows["one GPU"].peak_bytes
    assert rows["tensor parallel x 2"].peak_bytes < 0.7 * one < one <= rows["DDP x 4"].peak_bytes
    assert rows["FSDP2 by layer x 4"].peak_bytes < rows["FSDP2 x 4"].peak_bytes
    assert all(row.max_batch_size is None and row.fits for row in found)
    assert "FSDP2 by layer x 4" in found.table().text() == str(found) and "<table>" in found._repr_html_()


@pytest.mark.slow
def test_the_largest_batch_fits_and_one_more_does_not():
    (row,) = [
        row
        for row in lazyviz.advise(step, [SMALL], model=model, world_size=1, recompute=False)
        if row.strategy == "one GPU"
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
            if other.strategy == "one GPU"
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


def test_the_time_of_a_row_is_that_of_one_step():
    (row,) = (
        each
        for each in lazyviz.advise(step, ["H100-80GB"], model=model, largest_batch=False).rows
        if each.strategy == "one GPU"
    )
    with lazyviz.lazy(device="H100-80GB") as graph:
        made = model().cuda()
        optimizer = torch.optim.AdamW(made.parameters())
        for _ in range(2):
            start = len(graph.nodes)
            step(made, 1).backward()
            optimizer.step()
            optimizer.zero_grad()
    time = graph.plan().time_of(graph.nodes[start:])
    assert row.seconds == pytest.approx(time.seconds, rel=0.05)


def recorded() -> lazyviz.LazyGraph:
    with lazyviz.lazy() as graph:
        torch.ones(2) * 2
    return graph


@pytest.mark.parametrize("make", [recorded, lambda: nn.Linear(2, 2), lambda: 3])
def test_advice_asks_for_the_function_of_a_step(make):
    step = make()
    with pytest.raises(TypeError, match=f"function of a step.*not a {type(step).__name__}"):
        lazyviz.advise(step)


def test_what_fails_is_a_row_that_says_why():
    def failing(made: nn.Module, batch_size: int) -> torch.Tensor:
        raise RuntimeError("no such layer")

    found = lazyviz.advise(failing, ["A100-40GB"], model=model, world_size=1, recompute=False)
    assert {row.failure for row in found} == {"no such layer"}
    with pytest.raises(ValueError, match="devices"):
        lazyviz.advise(step, [])


class Normed(nn.Module):
    """A block of which a tensor-parallel plan leaves a part as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.block = nn.LayerNorm(512), Block(512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.norm(x))


def test_parameters_that_stay_tensors_are_stepped_beside_dtensors():
    found = lazyviz.advise(
        step,
        ["A100-40GB"],
        model=lambda: nn.Sequential(*[Normed() for _ in range(3)]),
        world_size=1,
        tensor_parallel={"*.block.up": ColwiseParallel(), "*.block.down": RowwiseParallel()},
        tensor_parallel_sizes=(2, 4),
        recompute=False,
        largest_batch=False,
    )
    rows = {row.strategy: row for row in found}
    assert not [row.failure for row in found if row.failure]
    two, four = rows["tensor parallel x 2"], rows["tensor parallel x 4"]
    assert four.peak_bytes < two.peak_bytes < rows["one GPU"].peak_bytes


def test_rows_with_an_8_bit_optimizer_have_less_state_and_no_seconds():
    """Another library's optimizer stands in, whose state is a byte a number."""

    class Small(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                if not state:
                    state["m"], state["v"] = (
                        torch.zeros_like(parameter, dtype=torch.uint8) for _ in range(2)
                    )
                parameter.sub_(parameter.grad, alpha=1e-3)

    found = lazyviz.advise(
        step, ["A100-40GB"], model=model, world_size=2, eight_bit=Small, recompute=False, largest_batch=False
    )
    rows = {row.strategy: row for row in found}
    assert not [row.failure for row in found if row.failure]
    for name in ("one GPU", "DDP x 2", "FSDP2 x 2"):
        assert rows[f"{name}, 8-bit optimizer"].peak_bytes < rows[name].peak_bytes
        assert rows[f"{name}, 8-bit optimizer"].seconds is None and rows[name].seconds
    assert any("8-bit optimizers are planned as run by eager" in note for note in found.notes)


@pytest.mark.parametrize("frozen", [False, True])
def test_objects_from_before_are_not_visited_by_the_garbage_collector(frozen):
    visited = []

    def note(phase, info):
        if phase == "start" and info["generation"] == 2:
            visited.append(len(gc.get_objects()))

    def step():
        torch.ones(8, device="cuda") * 2

    lazyviz.advise(step, ["RTX-4090"])  # imports what a process imports once
    gc.unfreeze()
    gc.collect()
    count = len(gc.get_objects())
    if frozen:  # by the user
        gc.freeze()
    gc.callbacks.append(note)
    try:
        lazyviz.advise(step, ["RTX-4090"])
        assert (gc.get_freeze_count() > count / 2) is frozen
    finally:
        gc.callbacks.remove(note)
        gc.freeze()  # as the process that runs tests has it
    assert visited and min(visited) < count / 2
