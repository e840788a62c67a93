"""Lifetimes of storages, in eager PyTorch and in a lazyviz run."""

from __future__ import annotations

import torch

from lazyviz.graph.ir import Graph
from lazyviz.plan.liveness.lifetimes import allocated, events, lifetimes, main_device


def timelines(graph: Graph) -> tuple[list[int], list[int]]:
    spans = lifetimes(graph)
    count = len(graph.nodes)
    return allocated(spans, count), allocated(spans, count, eager=True)


def test_a_temporary_lives_from_its_node_to_the_node_after_its_drop(program):
    x = program.outside(100)
    a = program.op([x], 10)
    b = program.op([a], 20)
    program.drop(a)
    program.op([b], 30)
    ours, eager = timelines(program.graph)
    assert eager == [110, 130, 150]  # a (10 B) is gone during node 2
    assert ours == eager


def test_our_run_frees_after_the_last_use_even_where_user_code_kept_the_name(program):
    x = program.outside(100)
    a = program.op([x], 10)
    b = program.op([a], 20)
    c = program.op([b], 30)
    program.drop(a)  # the variable was rebound two nodes after its last use
    program.op([c], 40)
    ours, eager = timelines(program.graph)
    assert eager == [110, 130, 160, 190]
    assert ours == [110, 130, 150, 190]


def test_what_the_user_still_references_stays_to_the_end(program):
    x = program.outside(100)
    program.op([x], 10)
    program.op([x], 20)
    ours, eager = timelines(program.graph)
    assert ours == eager == [110, 130]


def test_an_output_dropped_at_once_is_alive_during_its_own_node(program):
    x = program.outside(1)
    a = program.op([x], 10)
    program.drop(a)
    a.storage.dropped = a.storage.created  # dropped before the node was even appended
    program.op([x], 5)
    ours, eager = timelines(program.graph)
    assert ours == eager == [11, 6]


def test_views_and_in_place_ops_allocate_nothing_and_extend_the_life_of_their_storage(program):
    x = program.outside(1)
    a = program.op([x], 10)
    v = program.view(a)
    program.op([v])
    program.drop(a)
    program.op([x], 100)
    ours, _ = timelines(program.graph)
    assert ours == [11, 11, 11, 101]
    span = lifetimes(program.graph)[1]
    assert span.last_use is program.graph.nodes[2]


def test_a_write_counts_as_a_use(program):
    x = program.outside(1)
    a = program.op([x], 10)
    program.op([x], 0, writes=[a])
    program.drop(a)
    program.op([x], 100)
    ours, _ = timelines(program.graph)
    assert ours == [11, 11, 101]


def test_an_outside_storage_that_user_code_dropped_is_held_until_its_last_use(program):
    w = program.outside(100)
    x = program.outside(10)
    program.op([w, x], 1)
    program.drop(x)
    program.op([w], 1)
    program.op([w], 1)
    ours, eager = timelines(program.graph)
    assert eager == [111, 102, 103]
    assert ours == [111, 102, 103]
    assert [span.held for span in lifetimes(program.graph)] == [False, True, False, False, False]


def test_an_outside_storage_dropped_late_is_freed_early_by_our_run_and_late_by_eager(program):
    x = program.outside(10)
    a = program.op([x], 1)
    program.op([a], 1)
    program.drop(x)
    program.op([a], 1)
    ours, eager = timelines(program.graph)
    assert eager == [11, 12, 3]
    assert ours == [11, 2, 3]


def test_a_loop_s_batches_are_all_held_by_our_run_and_one_at_a_time_by_eager(program):
    w = program.outside(100, role="parameter")
    total = program.op([w], 1)
    for _ in range(3):
        batch = program.outside(50)
        program.op([total, batch])
        program.drop(batch)
    ours, eager = timelines(program.graph)
    assert ours == [251, 251, 201, 151]
    assert eager == [101, 151, 151, 151]


def test_events_balance_and_free_before_they_allocate(program):
    x = program.outside(10)
    a = program.op([x], 1)
    b = program.op([a], 2)
    program.drop(a)
    program.op([b], 3)
    timeline = events(lifetimes(program.graph))
    assert [(event.position, event.nbytes) for event in timeline] == [
        (-1, 10),
        (0, 1),
        (1, 2),
        (2, -1),
        (2, 3),
        (3, -10),
        (3, -2),
        (3, -3),
    ]
    assert sum(event.nbytes for event in timeline) == 0


def test_the_running_sum_of_the_events_is_what_is_allocated(program):
    x = program.outside(1 << 10)
    values = [x]
    for index in range(40):
        values.append(program.op([values[index * 7 % len(values)]], 1 + index * index % 13))
        if index % 3:
            program.drop(values[index // 2])
    spans = lifetimes(program.graph)
    for eager in (False, True):
        timeline = events(spans, eager=eager)
        sums = [
            sum(event.nbytes for event in timeline if event.position <= index)
            for index in range(len(program.graph.nodes))
        ]
        assert allocated(spans, len(program.graph.nodes), eager=eager) == sums


def test_the_main_device_is_the_one_with_most_bytes(program):
    cuda = torch.device("cuda", 0)
    x = program.outside(10)
    program.op([x], 5)
    assert main_device(lifetimes(program.graph)) == torch.device("cpu")
    program.op([x], 50, device=cuda)
    assert main_device(lifetimes(program.graph)) == cuda


def test_storages_of_an_earlier_graph_are_outside_storages(program):
    w = program.outside(1000, role="parameter")
    h = program.op([w], 100)
    later = type(program)()
    a = later.op([w, h], 10)
    program.op([h], 1)
    program.drop(h)  # h.dropped counts the first graph's nodes
    later.op([a], 10)
    ours, eager = timelines(later.graph)
    assert ours == eager == [1110, 1020]
    assert [(span.storage.nbytes, span.start, span.held) for span in lifetimes(later.graph)] == [
        (10, 0, False),
        (10, 1, False),
        (1000, -1, False),
        (100, -1, True),
    ]


def test_backward_marks_what_it_reads_not_what_it_makes(program):
    x = program.outside(10)
    a = program.op([x], 1)
    program.op([a], 2, phase="backward")
    assert [span.in_backward for span in lifetimes(program.graph)] == [False, True, False]


def test_an_empty_graph_has_no_lifetimes_and_lives_on_the_cpu():
    graph = Graph()
    assert lifetimes(graph) == []
    assert main_device([]) == torch.device("cpu")
    assert allocated([], 0) == []
