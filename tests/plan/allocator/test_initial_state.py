"""A GPU that this process already uses: the plan starts from the allocator's current memory.

The snapshots have the keys of ``torch.cuda.memory_snapshot()``, which a machine without CUDA cannot ask.
"""

from __future__ import annotations

import pytest
import torch

from lazyviz.plan.allocator.memory_history import trace
from lazyviz.plan.devices.device_lookup import Device
from lazyviz.plan.make_plan import make_plan
from lazyviz.plan.uncertainty import RESERVED, widened
from lazyviz.plan.workspace.cublas import CUBLAS_WORKSPACE_BYTES

from ..conftest import Program

MIB = 2**20
CUDA = torch.device("cuda:0")
FREE, TAKEN = "inactive", "active_allocated"


def segment(address, *blocks, device=0):
    """One segment of (bytes, state) blocks."""
    total = sum(size for size, _ in blocks)
    entries = []
    for size, state in blocks:
        at = address + sum(entry["size"] for entry in entries)
        asked = size if state == TAKEN else 0
        entries.append({"address": at, "size": size, "requested_size": asked, "state": state, "frames": []})
    active = sum(entry["requested_size"] for entry in entries)
    return {
        "device": device,
        "address": address,
        "total_size": total,
        "allocated_size": active,
        "active_size": active,
        "requested_size": active,
        "stream": 0,
        "segment_type": "large" if total > 2 * MIB else "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": entries,
    }


@pytest.fixture
def plan(monkeypatch):
    """A plan for a GPU in use, of which the driver says that ``free`` bytes are left."""

    def make(program, *segments, free=2**33):
        here = [entry for entry in segments if entry["device"] == 0]
        reserved = sum(entry["total_size"] for entry in here)
        allocated = sum(entry["allocated_size"] for entry in here)
        for name, answer in (
            ("is_initialized", lambda: True),
            ("memory_snapshot", lambda: list(segments)),
            ("memory_reserved", lambda device: reserved),
            ("memory_allocated", lambda device: allocated),
            ("get_per_process_memory_fraction", lambda device: 1.0),
            ("get_device_capability", lambda device: (8, 0)),
        ):
            monkeypatch.setattr(torch.cuda, name, answer)
        gpu = Device("cuda:0", "a GPU", 2**34, free, reserved)
        return make_plan(program.graph, device=gpu)

    return make


@pytest.fixture
def program():
    return Program(CUDA)


def weight(program, nbytes, place):
    value = program.outside(nbytes, role="parameter")
    value.storage.place = place
    return value


def test_existing_tensors_count_once_and_cached_blocks_are_reused(program, plan):
    w = weight(program, 40 * MIB, 2**30)
    program.op([w], 16 * MIB)
    found = plan(program, segment(2**30, (40 * MIB, TAKEN), (20 * MIB, FREE)))
    assert found.reserved_bytes == 60 * MIB
    assert found.peak_bytes == 56 * MIB
    assert found.capacity_bytes == 2**33 + 60 * MIB


def test_free_blocks_that_are_too_small_are_not_reused(program, plan):
    w = weight(program, 40 * MIB, 2**30)
    program.op([w], 30 * MIB)
    held = segment(2**30, (40 * MIB, TAKEN), (20 * MIB, FREE), (2 * MIB, TAKEN), (20 * MIB, FREE))
    found = plan(program, held)
    assert found.reserved_bytes == (82 + 30) * MIB
    assert "2.00 MiB of it for tensors that this graph does not use" in found.explain()
    tight = plan(program, held, free=29 * MIB)
    assert not tight.fits and "30.0 MiB would fail" in tight.verdict()
    assert plan(program, held, free=30 * MIB).fits


def test_a_tensor_with_an_unknown_address_counts_as_a_block_of_its_size(program, plan):
    a, b = program.outside(40 * MIB), weight(program, 40 * MIB, 2**31)
    program.op([a, b], 30 * MIB)
    found = plan(program, segment(2**30, (40 * MIB, TAKEN)), segment(2**31, (40 * MIB, TAKEN)))
    assert found.reserved_bytes == (80 + 30) * MIB
    assert "does not use" not in found.explain()


def test_a_tensor_that_is_not_in_the_snapshot_is_allocated(program, plan):
    program.op([program.outside(40 * MIB)], 30 * MIB)
    assert plan(program, segment(2**30, (2 * MIB, TAKEN), (18 * MIB, FREE))).reserved_bytes == 90 * MIB


def test_what_is_freed_leaves_its_own_place(program, plan):
    w = weight(program, 40 * MIB, 2**30)
    x = program.op([w], 20 * MIB)
    program.drop(w)
    program.op([x], 40 * MIB)
    found = plan(program, segment(2**30, (40 * MIB, TAKEN)))
    assert found.reserved_bytes == 60 * MIB


def test_ops_that_have_run_already_run_again_in_the_plan(program, plan):
    x = program.op([], 40 * MIB)
    program.op([x], 20 * MIB)
    program.graph.nodes[0].state = "done"
    assert plan(program, segment(2**30, (40 * MIB, TAKEN))).reserved_bytes == 60 * MIB


def test_a_workspace_that_is_there_is_not_taken_again(program, plan):
    x = program.op([], 20 * MIB)
    node = program.graph.nodes[0]
    node.op = torch.ops.aten.mm.default
    size = CUBLAS_WORKSPACE_BYTES
    assert x.node is node and size % 512 == 0
    fresh = plan(program, segment(2**30, (2 * MIB, TAKEN)))
    found = plan(program, segment(2**30, (2 * MIB, TAKEN)), segment(2**31, (size, TAKEN)))
    assert found.reserved_bytes == 22 * MIB + size
    assert fresh.reserved_bytes > 22 * MIB + size - MIB
    assert "2.00 MiB of it for tensors" in found.explain()


def test_other_gpus_do_not_matter(program, plan):
    program.op([], 20 * MIB)
    found = plan(program, segment(2**30, (200 * MIB, TAKEN), device=1))
    assert found.reserved_bytes == 20 * MIB


def test_a_profile_is_an_empty_gpu(program, plan):
    program.op([], 20 * MIB)
    plan(program, segment(2**30, (200 * MIB, TAKEN)))
    assert make_plan(program.graph, device="A100-40GB").reserved_bytes == 20 * MIB


def test_the_range_and_eager_pytorch_start_from_it_too(program, plan):
    w = weight(program, 40 * MIB, 2**30)
    program.op([w], 16 * MIB)
    found = plan(program, segment(2**30, (40 * MIB, TAKEN), (20 * MIB, FREE)))
    assert (
        found.reserved_range == found.eager_reserved_range == widened(60 * MIB, 60 * MIB, 60 * MIB, RESERVED)
    )
    assert found.eager_reserved_bytes == 60 * MIB


def test_a_remedy_fits_if_the_memory_that_it_frees_is_reused(program, plan):
    w = weight(program, 40 * MIB, 2**30)
    kept = program.op([w], 40 * MIB)
    kept.storage.variables = ("kept",)
    program.op([program.op([w], 30 * MIB)], 30 * MIB)
    held = segment(2**30, (40 * MIB, TAKEN))
    # The 40 MiB that are freed serve one of the two; without that 100 MiB are needed beside what is there.
    for free, fits in ((100, True), (70, True), (69, False)):
        found = plan(program, held, free=free * MIB)
        (remedy,) = [each for each in found.remedies if each.kind == "variable"]
        assert remedy.saves_bytes == 40 * MIB and remedy.fits is fits
        assert found.fits is (free == 100)


def test_the_exported_trace_has_what_was_there_as_the_plan_s_own(program, plan):
    w = weight(program, 40 * MIB, 2**30)
    x = program.op([w], 16 * MIB)
    program.drop(w, x)
    recorded = trace(plan(program, segment(2**30, (40 * MIB, TAKEN), (20 * MIB, FREE))))
    assert [entry.key for entry in recorded.entries if entry.action == "alloc"] == [w.storage, x.storage]
