"""Stages of a pipeline, recorded as one rank runs them: the schedules of torch.distributed.pipelining."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.graph.collective_info import collective_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
GPU = "H100-80GB"
ROOT = Path(__file__).parents[3]
WIDTH, RANKS, PIECES = 32, 4, 8
SENT = PIECES * 4 * WIDTH * 4  # bytes of all micro-batches between two stages
# Whether stages vote on how they learn their shapes, and send those of gradients; before, nothing is assumed.
VOTES = torch.__version__ >= torch.torch_version.TorchVersion("2.13")


@pytest.fixture(autouse=True)
def reset():
    yield
    lazyviz.reset()


def step(name, rank, told=True, stages=1):
    """One training step of a schedule's rank; the losses of the rank with the last stage."""
    from torch.distributed.pipelining import PipelineStage, schedules

    count = RANKS * stages
    indices = range(rank, count, RANKS)
    sent = torch.empty(4, WIDTH, device="meta", requires_grad=True)
    here = [
        PipelineStage(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()).cuda(),
            index,
            count,
            torch.device("cuda"),
            **({"input_args": sent if index else sent.detach(), "output_args": sent} if told else {}),
        )
        for index in indices
    ]
    schedule = getattr(schedules, name)(
        here if stages > 1 else here[0], n_microbatches=PIECES, loss_fn=nn.functional.mse_loss
    )
    batch = torch.ones(4 * PIECES, WIDTH, device="cuda")
    losses: list = []
    last = {"target": batch, "losses": losses} if indices[-1] == count - 1 else {}
    schedule.step(*([] if rank else [batch]), **last)
    return losses


def sent(graph):
    found = [collective_of(node) for node in graph.nodes]
    return sum(each.nbytes for each in found if each is not None and each.kind == "send")


@pytest.mark.parametrize("name", ["ScheduleGPipe", "Schedule1F1B"])
@pytest.mark.parametrize(("rank", "neighbors"), [(0, 1), (1, 2), (3, 1)])
def test_a_stage_sends_what_it_makes_to_both_sides(name, rank, neighbors):
    with lazyviz.lazy(device=GPU, mesh=(RANKS,), rank=rank) as graph:
        losses = step(name, rank)
    assert len(losses) == (PIECES if rank == RANKS - 1 else 0)
    assert sent(graph) == pytest.approx(neighbors * SENT, abs=64)  # and the votes, of a number each
    assert ("all stages of the pipeline" in graph.plan().explain()) is VOTES


@pytest.mark.parametrize(
    "name", ["ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble"]
)
def test_schedules_of_several_stages_a_rank_are_recorded(name):
    with lazyviz.lazy(device=GPU, mesh=(RANKS,), rank=1) as graph:
        step(name, 1, stages=2)
    assert sent(graph) == pytest.approx(4 * SENT, abs=64)
    phases = [node.phase for node in graph.nodes]
    assert "backward" in phases


@pytest.mark.slow
def test_a_pipeline_that_is_imported_in_a_later_block_is_recorded():
    """Where nothing else was waited for when the block was opened: Dynamo and transformers are there."""
    program = f"""
import sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import torch, torch._dynamo, transformers.cache_utils
import lazyviz
from models.multi_gpu_programs import PROGRAMS
assert "torch.distributed.pipelining.schedules" not in sys.modules
with lazyviz.lazy(device="cpu", mesh=(2,)) as graph:
    kept = PROGRAMS["pipeline, GPipe"].run(torch.device("cpu"), 2)
print(len(graph.nodes) > 100)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.strip().endswith("True"), done.stderr[-2000:]


def test_1f1b_takes_less_memory_than_gpipe():
    peaks = []
    for name in ("ScheduleGPipe", "Schedule1F1B"):
        with lazyviz.lazy(device=GPU, mesh=(RANKS,), rank=3) as graph:
            step(name, 3)
        peaks.append(graph.plan().peak_bytes)
        lazyviz.reset()
    assert peaks[1] < peaks[0]


def test_the_first_stage_finds_its_own_shapes():
    with lazyviz.lazy(device=GPU, mesh=(RANKS,), rank=0) as graph:
        step("Schedule1F1B", 0, told=False)
    assert ("gradients sent between pipeline stages" in graph.plan().explain()) is VOTES
    assert "backward" in {node.phase for node in graph.nodes}


def test_a_later_stage_needs_given_shapes():
    with pytest.raises(lazyviz.AbsentDeviceError, match="input_args") as caught:
        with lazyviz.lazy(device=GPU, mesh=(RANKS,), rank=2):
            step("Schedule1F1B", 2, told=False)
    assert "stage 1" in str(caught.value)
