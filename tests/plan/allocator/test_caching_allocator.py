"""The simulated CUDA caching allocator: compared with the library, by hand, and by its invariants."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyviz.plan.allocator.simulate_events import AllocatorConfig, CachingAllocator, simulate

MIB = 2**20
DATA = Path(__file__).parent / "data"
Event = tuple[int, int]


# What PyTorch's library did, byte for byte: benchmarks/cuda_allocator_reference_traces.py made the data and
# describes it.


def load(name: str) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes()))["traces"]


TRAINING = load("allocator_training")
RANDOM = load("allocator_random")


def named(trace: dict[str, Any]) -> Iterator[tuple[int, int, int]]:
    """The events as (key, bytes, stream); 0 bytes is a free, and of key 0 an emptied cache."""
    count = 0
    for number in trace["events"]:
        if number > 0:
            count += 1
            yield count, number, trace["streams"][count - 1] if trace["streams"] else 0
        else:
            yield -number, 0, 0


def make(run: dict[str, Any], segments: list[dict[str, Any]] = []) -> CachingAllocator:  # noqa: B006
    config = AllocatorConfig.parse(run["config"])
    return CachingAllocator(config, capacity=run["capacity"], total=run["total"], segments=segments)


def play(
    allocator: CachingAllocator,
    steps: list[tuple[int, int, int]],
    lost: set[int],
    address_of: dict[int, int] | None = None,
) -> list[tuple[bool, int, int]]:
    """Whether each step failed, then the allocated and reserved bytes; ``lost`` collects failed keys."""
    result = []
    for key, nbytes, stream in steps:
        failed = False
        if nbytes:
            failed = not allocator.allocate(key, nbytes, stream)
            lost |= {key} if failed else set()
        elif not key:
            allocator.empty_cache()
        elif key not in lost:
            allocator.free((address_of or {}).get(key, key))
        result.append((failed, allocator.allocated, allocator.reserved))
    return result


def truth(run: dict[str, Any]) -> list[tuple[bool, int, int]]:
    failed = set(run["failed"])
    sums = zip(accumulate(run["allocated"]), accumulate(run["reserved"]))
    return [(index in failed, allocated, reserved) for index, (allocated, reserved) in enumerate(sums)]


@pytest.mark.parametrize("trace", TRAINING + RANDOM, ids=lambda trace: trace["name"])
def test_every_step_is_the_library_s_to_the_byte(trace):
    steps = list(named(trace))
    for run in trace["runs"]:
        allocator = make(run)
        assert play(allocator, steps, set()) == truth(run), run["config"]
        assert allocator.retries == run["retries"], run["config"]
        peaks = [allocator.allocated_peak, allocator.reserved_peak, allocator.requested_peak]
        assert peaks == run["peaks"], run["config"]


def test_the_data_has_runs_that_fit_that_release_their_cache_and_that_fail():
    runs = [run for trace in TRAINING for run in trace["runs"]]
    assert any(not run["failed"] and not run["retries"] for run in runs)
    assert any(not run["failed"] and run["retries"] for run in runs)
    assert any(run["failed"] for run in runs)
    assert len({run["config"] for run in runs}) == 10


@pytest.mark.parametrize("trace", RANDOM, ids=lambda trace: trace["name"])
def test_a_run_goes_on_from_the_library_s_snapshot_as_the_library_did(trace):
    steps = list(named(trace))
    for run in trace["runs"]:
        expected, middle = truth(run), run["snapshot_at"]
        if "garbage" in run["config"]:
            continue  # how long a segment has been unused is not in a snapshot
        allocator = make(run, run["segments"])
        assert (allocator.allocated, allocator.reserved) == expected[middle - 1][1:]
        lost = {key for (key, nbytes, _), step in zip(steps, expected) if nbytes and step[0]}
        address_of = {int(key): address for key, address in run["alive"].items()}
        fields = play(allocator, steps[middle:], lost, address_of)
        assert fields == expected[middle:], run["config"]


def test_simulate_tells_peaks_their_places_and_the_first_failure():
    for trace in TRAINING:
        steps = [(key, nbytes) for key, nbytes, _ in named(trace)]
        for run in trace["runs"]:
            config = AllocatorConfig.parse(run["config"])
            outcome = simulate(steps, config, capacity=run["capacity"], total=run["total"], timeline=True)
            _, allocated, reserved = zip(*truth(run))
            stop = run["failed"][0] if run["failed"] else len(steps)
            assert (outcome.failure.index if outcome.failure else len(steps)) == stop
            assert (*outcome.allocated, *outcome.reserved) == (*allocated[:stop], *reserved[:stop])
            assert outcome.allocated_peak == max(allocated[:stop])
            assert outcome.allocated_at == allocated.index(outcome.allocated_peak)
            if not run["failed"]:
                assert outcome.reserved_peak == run["peaks"][1]


# By hand


def block_of(nbytes: int, options: str = "") -> int:
    return AllocatorConfig.parse(options).rounded(nbytes)


@pytest.mark.parametrize(
    ("nbytes", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 11 * MIB, 12 * MIB),
    ],
)
def test_a_request_is_rounded_to_a_block_and_its_segment_to_a_few_sizes(nbytes, block, segment):
    config = AllocatorConfig()
    assert config.rounded(nbytes) == block
    assert config.segment(block) == segment


def test_power_of_two_divisions_round_up_within_their_interval():
    assert block_of(1200, "roundup_power2_divisions:2") == 1536  # between 1024 and 2048 in steps of 512
    assert block_of(1200, "roundup_power2_divisions:4") == 1536  # too small for four steps of 512
    assert block_of(5 * MIB + 1, "roundup_power2_divisions:[4:4]") == 6 * MIB
    assert block_of(9 * MIB + 1, "roundup_power2_divisions:[4:4]") == 9 * MIB + 512  # another interval
    assert block_of(8 * MIB, "roundup_power2_divisions:8") == 8 * MIB


def test_small_requests_share_a_segment_and_large_ones_split_it():
    small = simulate([(key, 1000) for key in range(2048)])
    assert (small.requested_peak, small.allocated_peak, small.reserved_peak) == (2_048_000, 2 * MIB, 2 * MIB)
    assert simulate([(key, 1000) for key in range(2049)]).reserved_peak == 4 * MIB
    assert simulate([(1, 3 * MIB), (2, 8 * MIB), (3, 9 * MIB)]).reserved_peak == 20 * MIB
    # A rest of at most 1 MiB stays with the large block.
    unsplit = simulate([(1, 11 * MIB)])
    assert (unsplit.allocated_peak, unsplit.requested_peak) == (12 * MIB, 11 * MIB)


def test_the_smallest_block_that_fits_is_reused():
    events = [(1, 30 * MIB), (2, 12 * MIB), (1, 0), (2, 0), (3, 12 * MIB), (4, 30 * MIB)]
    assert simulate(events).reserved_peak == 42 * MIB


def test_a_failure_names_the_allocation_and_the_fragments():
    events = [(1, 12 * MIB), (2, 12 * MIB), (3, 12 * MIB), (2, 0), (4, 4 * MIB), (5, 20 * MIB)]
    failure = simulate(events, capacity=40 * MIB).failure
    assert failure is not None
    assert (failure.index, failure.key, failure.nbytes, failure.segment) == (5, 5, 20 * MIB, 20 * MIB)
    assert (failure.reserved, failure.allocated) == (36 * MIB, 28 * MIB)
    assert (failure.fragmented, failure.largest_free) == (8 * MIB, 8 * MIB)
    assert simulate(events, capacity=56 * MIB).failure is None


def test_expandable_segments_avoid_the_fragments():
    # 36 MiB in each of three segments of 60 MiB leave 72 MiB, in three pieces or in one.
    events = [(key, 60 * MIB) for key in range(3)] + [(key, 0) for key in range(3)]
    events += [(key, 36 * MIB) for key in range(3)] + [(3, 70 * MIB)]
    failure = simulate(events, capacity=180 * MIB).failure
    assert failure is not None and failure.fragmented == 72 * MIB
    expandable = AllocatorConfig(expandable_segments=True)
    assert simulate(events, expandable, capacity=180 * MIB).failure is None


def test_an_expandable_segment_grows_by_pages_and_gives_free_ones_back():
    expandable = AllocatorConfig(expandable_segments=True)
    allocator = CachingAllocator(expandable, capacity=100 * MIB)
    for key in range(3):
        allocator.allocate(key, 18 * MIB)
    assert allocator.reserved == 60 * MIB  # 54 MiB, in pages of 20 MiB
    allocator.allocate("small", 1000)
    assert allocator.reserved == 62 * MIB
    allocator.free(1)
    allocator.empty_cache()
    assert allocator.reserved == 62 * MIB  # from 18 to 36 MiB there is no whole page
    allocator.free(0)
    allocator.empty_cache()
    assert allocator.reserved == 42 * MIB  # from 0 to 36 MiB there is one
    assert not allocator.allocate("large", 70 * MIB)  # 6 MiB at the end, and four pages more: too much
    assert allocator.allocate("less", 40 * MIB)
    assert allocator.reserved == 82 * MIB


def test_more_memory_can_fail_where_less_does_not_as_in_the_library():
    sizes = [(5, 3), (6, 14), (5, 0), (7, 14), (8, 14), (7, 0), (8, 0), (6, 0), (10, 22), (10, 0)]
    sizes += [(12, 3), (13, 12), (15, 14), (13, 0), (16, 19), (17, 22)]
    events = [(key, size * MIB) for key, size in sizes]
    assert simulate(events, capacity=64 * MIB).failure is None
    failure = simulate(events, capacity=70 * MIB).failure
    assert failure is not None and failure.key == 17


def test_garbage_is_collected_only_below_a_full_memory_fraction():
    events = [(1, 40 * MIB), (1, 0), (2, 4 * MIB), (3, 50 * MIB), (3, 0), (4, 60 * MIB)]
    config = AllocatorConfig(garbage_collection_threshold=0.1)
    assert simulate(events, config, capacity=300 * MIB).reserved_peak == 154 * MIB - 4 * MIB
    limited = simulate(events, config, capacity=300 * MIB, memory_fraction=0.9, timeline=True)
    assert limited.reserved[-1] == 100 * MIB


def test_a_memory_fraction_is_of_the_device_s_memory():
    events = [(1, 100 * MIB), (2, 100 * MIB)]
    assert simulate(events, capacity=300 * MIB, total=400 * MIB, memory_fraction=0.5).failure is None
    assert simulate(events, capacity=300 * MIB, total=390 * MIB, memory_fraction=0.5).failure is not None


def test_streams_share_no_blocks():
    allocator = CachingAllocator()
    allocator.allocate("a", 12 * MIB, stream=1)
    allocator.free("a")
    allocator.allocate("b", 12 * MIB, stream=2)
    assert allocator.reserved == 24 * MIB


def test_no_bytes_take_no_memory():
    allocator = CachingAllocator(capacity=0)
    assert allocator.allocate("nothing", 0)
    allocator.free("nothing")
    assert allocator.reserved == 0


def test_private_pools_and_blocks_that_wait_count_as_what_they_are():
    def segment(address: int, pool: tuple[int, int], state: str) -> dict[str, Any]:
        blocks = [{"size": 20 * MIB, "requested_size": 20 * MIB, "state": state}]
        kind = {"segment_type": "large", "segment_pool_id": pool, "is_expandable": False}
        return {"address": address, "total_size": 20 * MIB, "stream": 0, "blocks": blocks, **kind}

    segments = [segment(2**30, (0, 1), "inactive"), segment(2**31, (0, 0), "active_pending_free")]
    allocator = CachingAllocator(segments=segments)
    assert (allocator.reserved, allocator.allocated) == (40 * MIB, 0)
    allocator.allocate("a", 20 * MIB)
    assert allocator.reserved == 40 * MIB  # the one that waited is free, the private one is not ours
    allocator.allocate("b", 20 * MIB)
    assert allocator.reserved == 60 * MIB


# The options


def test_options_are_read_as_pytorch_writes_them():
    config = AllocatorConfig.parse(
        "expandable_segments:True, max_split_size_mb:128,garbage_collection_threshold:0.8,"
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8],pinned_use_background_threads:True"
    )
    assert config.expandable_segments
    assert config.max_split_size_mb == 128
    assert config.garbage_collection_threshold == 0.8
    assert config.roundup_power2_divisions == (*[1] * 9, 2, 4, *[8] * 5)
    assert AllocatorConfig.parse("") == AllocatorConfig()
    assert AllocatorConfig.parse("roundup_power2_divisions:4").roundup_power2_divisions == (4,) * 16


def test_pytorch_cuda_alloc_conf_comes_before_the_general_variable():
    both = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:40", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:50"}
    assert AllocatorConfig.from_environment(both).max_split_size_mb == 50
    del both["PYTORCH_CUDA_ALLOC_CONF"]
    assert AllocatorConfig.from_environment(both).max_split_size_mb == 40
    assert AllocatorConfig.from_environment({}) == AllocatorConfig()


@pytest.mark.parametrize(
    "text",
    [
        "expandable_segments:true",
        "max_split_size_mb:19",
        "max_split_size_mb:many",
        "max_split_size_mb",
        "max_split_size_mb:30,large_segment_size_mb:40",
        "max_non_split_rounding_mb:10",
        "large_segment_size_mb:10",
        "garbage_collection_threshold:1.0",
        "per_process_memory_fraction:1.5",
        "roundup_power2_divisions:3",
        "roundup_power2_divisions:[3:4]",
        "roundup_power2_divisions:[4:3]",
        "backend:magic",
    ],
)
def test_a_value_that_pytorch_refuses_is_refused_by_name(text):
    with pytest.raises(ValueError, match=text.split(",")[0].partition(":")[0]):
        AllocatorConfig.parse(text)


# What must always hold

CONFIGS = [
    AllocatorConfig.parse(text)
    for text in (
        "",
        "expandable_segments:True",
        "max_split_size_mb:20",
        "garbage_collection_threshold:0.2,per_process_memory_fraction:0.9",
        "roundup_power2_divisions:4,large_segment_size_mb:30",
        "expandable_segments:True,max_split_size_mb:32",
    )
]
SIZES = st.one_of(st.integers(1, 4000), st.integers(1, MIB), st.integers(1, 30 * MIB))


@st.composite
def programs(draw: st.DrawFn) -> list[Event]:
    """Allocations and frees, each freed at most once and after it was made."""
    result: list[Event] = []
    alive: list[int] = []
    for key in range(draw(st.integers(1, 40))):
        result.append((key, draw(SIZES)))
        alive.append(key)
        frees = draw(st.integers(0, min(2, len(alive))))
        result += [(alive.pop(draw(st.integers(0, len(alive) - 1))), 0) for _ in range(frees)]
    return result


def examine(allocator: CachingAllocator) -> None:
    """That blocks tile their segments and no two free ones are neighbors."""
    mapped = used = 0
    for segment in allocator.blocks():
        for block, following in zip(segment, [*segment[1:], None]):
            assert block.size > 0
            assert block.next is following
            mapped += block.size * block.mapped
            used += block.size * block.used
            assert block.mapped or not block.used
            if following is not None:
                assert following.address == block.address + block.size
                free = not block.used and not following.used
                assert not (free and block.mapped == following.mapped)
    assert (used, mapped) == (allocator.allocated, allocator.reserved)


@given(programs(), st.sampled_from(CONFIGS), st.integers(2 * MIB, 200 * MIB))
@settings(max_examples=200, deadline=None)
def test_the_state_is_sound_after_every_step(program, config, capacity):
    allocator = CachingAllocator(config, capacity=capacity)
    lost = set()
    for key, nbytes in program:
        reserved, retries = allocator.reserved, allocator.retries
        if nbytes and not allocator.allocate(key, nbytes):
            lost.add(key)
        elif not nbytes and key not in lost:
            allocator.free(key)
            assert allocator.reserved == reserved
        assert allocator.requested <= allocator.allocated <= allocator.reserved <= capacity
        released = (
            allocator.retries > retries or config.max_split_size_mb or config.garbage_collection_threshold
        )
        assert allocator.reserved >= reserved or released
        examine(allocator)
    assert allocator.reserved <= allocator.reserved_peak <= capacity


@given(programs(), st.sampled_from(CONFIGS))
@settings(max_examples=100, deadline=None)
def test_what_is_wholly_free_is_one_block_and_can_be_given_back(program, config):
    allocator = CachingAllocator(config)
    alive = set()
    for key, nbytes in program:
        if nbytes:
            assert allocator.allocate(key, nbytes)
            alive.add(key)
        else:
            allocator.free(key)
            alive.discard(key)
    for key in alive:
        allocator.free(key)
    assert allocator.allocated == allocator.requested == 0
    for segment in allocator.blocks():
        assert sum(block.mapped for block in segment) <= 1
    allocator.empty_cache()
    assert allocator.reserved == 0
    assert allocator.blocks() == []


@given(programs(), st.sampled_from(CONFIGS))
@settings(max_examples=100, deadline=None)
def test_memory_for_the_unlimited_run_s_peak_is_enough_and_changes_nothing(program, config):
    unlimited = simulate(program, config, timeline=True, total=2**40, memory_fraction=1.0)
    capacity = unlimited.reserved_peak
    assert (
        simulate(program, config, capacity=capacity, total=2**40, memory_fraction=1.0, timeline=True)
        == unlimited
    )


@given(programs(), st.sampled_from(CONFIGS), st.integers(2 * MIB, 200 * MIB))
@settings(max_examples=100, deadline=None)
def test_names_do_not_matter_and_a_failure_had_a_reason(program, config, capacity):
    outcome = simulate(program, config, capacity=capacity, timeline=True)
    again = simulate(
        [(f"tensor {key}", nbytes) for key, nbytes in program], config, capacity=capacity, timeline=True
    )
    assert (outcome.allocated, outcome.reserved) == (again.allocated, again.reserved)
    failure = outcome.failure
    if failure is not None:
        assert program[failure.index] == (failure.key, failure.nbytes)
        limit = min(capacity, int(config.per_process_memory_fraction * capacity))
        page = 20 * MIB if config.expandable_segments else 1  # mapped are whole pages
        assert failure.reserved + -(-failure.segment // page) * page > limit
        assert failure.reserved - failure.allocated == failure.fragmented >= 0
