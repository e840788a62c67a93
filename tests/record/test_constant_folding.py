"""Reads of small values that are known without running the graph are no sync points, and are correct."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch

import lazyviz

from ..lazy_equals_eager import both


def test_a_view_of_an_outside_tensor_sees_what_is_written_through_another():
    counts = torch.zeros(4, dtype=torch.long)
    front = counts[:2]
    with lazyviz.lazy() as graph:
        before = front + 0
        counts.add_(1)
        assert front[0].item() == 1
        front[1] = 7
        assert counts.tolist() == [1, 7, 1, 1]
        assert before.tolist() == [0, 0]
    assert not graph.sync_points
    graph.evaluate()
    assert counts.tolist() == [1, 7, 1, 1]


def test_masks_and_positions_of_a_real_size_are_known_without_running():
    ids = torch.randint(0, 100, (8, 512))
    mask = torch.ones(8, 512, dtype=torch.long)
    mask[3, 400:] = 0
    with lazyviz.lazy(allow_sync=False) as graph:
        causal = torch.ones(512, 512, dtype=torch.bool).tril()
        assert not (causal[None] & mask[:, None].bool()).all()
        assert mask.sum(-1).min().item() == 400
        assert int(ids.max()) < 100
        positions = mask.cumsum(-1) - 1
        assert positions.max().item() == 511
    assert graph.pending == len(graph.nodes)


def test_shapes_that_depend_on_known_content_are_no_sync_points():
    ids = torch.tensor([[5, 2, 0], [7, 0, 0]])
    x = torch.randn(6, 2)
    with lazyviz.lazy(allow_sync=False) as graph:
        mask = ids != 0
        kept = ids.masked_select(mask)
        rows, columns = mask.nonzero(as_tuple=True)
        unique, counts = rows.unique(return_counts=True)
        result = x[rows * 3 + columns] * 2
        masked = (x.reshape(2, 3, 2) * 3)[mask]
        text = f"{kept.shape[0]} of {mask.sum()}"
    assert text == "3 of 3" and result.shape == (3, 2)
    graph.evaluate()
    assert kept.tolist() == [5, 2, 7] and unique.tolist() == [0, 1] and counts.tolist() == [2, 1]
    assert torch.equal(result, x[[0, 1, 3]] * 2)
    assert torch.equal(masked, x[[0, 1, 3]] * 3)


def test_tensors_without_elements_hold_nothing_that_only_running_tells():
    def program(x):
        sizes = torch.tensor(torch.Size([]))  # of the default dtype, not of integers
        return int(sizes.prod()), sizes.sum().item(), bool((sizes > 0).any()), x * 2

    graph = both(program, lambda: torch.randn(3))
    assert not graph.sync_points


def test_data_is_not_folded():
    x, weight = torch.randn(5), torch.nn.Parameter(torch.ones(()))
    with lazyviz.lazy() as graph:
        (x * 2).sum().item()
        (weight * 2).item()
        torch.rand(()).item()
    assert len(graph.sync_points) == 3


def test_a_real_tensor_without_a_pending_write_is_read_without_a_sync_point():
    x = torch.randn(())
    with lazyviz.lazy(allow_sync=False):
        assert x.item() == float(x)


def test_a_value_too_large_to_be_cheap_is_a_sync_point():
    with lazyviz.lazy() as graph:
        assert torch.zeros(4_000_000, dtype=torch.long).sum().item() == 0
    assert [point.cause for point in graph.sync_points] == ["item"]


def test_folded_values_survive_a_sync_in_between():
    data, count = torch.randn(3), torch.zeros((), dtype=torch.long)
    with lazyviz.lazy() as graph:
        for step in range(1, 4):
            count += 1
            assert count.item() == step
            (data * count).sum().item()
    assert [point.cause for point in graph.sync_points] == ["item"] * 3
    assert count.item() == 3


def test_an_unrecorded_write_is_noticed():
    count = torch.zeros(2, dtype=torch.long)
    with lazyviz.lazy():
        count += 1
        assert count[0].item() == 1
        count.resize_(1)  # a sync point: it exchanges memory
        count.copy_(torch.from_numpy(np.array([5])))
        assert (count + 1).item() == 6


@pytest.mark.parametrize("first", [7, 7.5, torch.tensor(2, dtype=torch.uint8), torch.tensor(1.5).bfloat16()])
@pytest.mark.parametrize("operand", [3, 0.1, -2, 1e300, 300])
def test_a_counter_that_is_written_and_read_in_each_step_has_eagers_values(first, operand):
    def steps():
        seen = []
        for write in ("add_", "sub_", "mul_", "div_"):
            count = torch.as_tensor(first).clone()
            for _ in range(3):
                try:
                    getattr(count, write)(operand)
                except RuntimeError as error:
                    seen.append(str(error))
                seen.append(count.item())
        return seen

    expected = steps()
    with lazyviz.lazy() as graph:
        assert repr(steps()) == repr(expected)
    if not any(isinstance(item, str) for item in expected):  # else it is tried at once
        assert not graph.sync_points
    graph.evaluate()


def test_an_unknown_write_ends_what_is_known_and_a_known_one_begins_it_again():
    count, data = torch.zeros((), dtype=torch.long), torch.randn(4)
    with lazyviz.lazy() as graph:
        count += 1
        assert count.item() == 1
        count += data.argmax()
        assert count.item() == 1 + int(data.argmax())
        count.fill_(3)
        count += 1
        assert count.item() == 4
    assert len(graph.sync_points) == 2  # argmax is not known, here and in the comparison
    graph.evaluate()
    assert count.item() == 4


@pytest.mark.parametrize("seed", range(40))
def test_reads_in_random_programs_of_views_and_writes_are_eagers(seed):
    expected = _program(seed, torch.arange(6))
    given = torch.arange(6)
    with lazyviz.lazy() as graph:
        reads, tensors = _program(seed, given)
    assert reads == expected[0]
    graph.evaluate()
    for ours, theirs in zip(tensors, expected[1]):
        assert torch.equal(ours, theirs)


def _program(seed: int, base: torch.Tensor) -> tuple[list[object], list[torch.Tensor]]:
    """Views, writes, reads and unknown data in random order on a few small tensors."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    tensors = [base, base[1:4], torch.arange(3) * 2]
    unknown = torch.randn(9).argsort()
    reads: list[object] = []
    for _ in range(40):
        one, other = dice.choice(tensors), dice.choice(tensors)
        move = dice.randrange(8)
        if move == 0 and len(one) > 1:
            tensors.append(one[dice.randrange(len(one) - 1) :])
        elif move == 1:
            tensors.append(one * 2 - 1)
        elif move == 2:
            one.add_(dice.randrange(5))
        elif move == 3 and len(other) >= len(one):
            one.copy_(other[: len(one)].clone())
        elif move == 4 and dice.random() < 0.3:
            one.add_(unknown[: len(one)])
        elif move == 5:
            tensors.append(torch.cat([one, other])[:9])
        elif move == 6:
            reads.append(one.tolist())
        else:
            reads.append((one.sum() + other[0]).item())
    return reads, tensors


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int8]
)
def test_a_counter_counts_as_in_eager_mode(dtype):
    """As an optimizer's does, also beside other writes, views and numbers that do not fit."""

    def program():
        count, other = torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype)
        view, seen = count[None], []
        for step in range(8):
            count += 100 if step == 6 else 1
            seen += [count.item(), view.item()]
            if step % 3 == 1:
                count.add_(other, alpha=2)
                count.mul_(2).add_(1)
                seen.append(count.item())
            if step == 4:
                view.add_(True)
                seen.append(count.item())
        return seen, count.clone()

    expected, last = program()
    with lazyviz.lazy() as graph:
        seen, count = program()
    assert seen == expected
    assert not graph.sync_points
    assert torch.equal(count, last)


@pytest.mark.parametrize(
    "compute",
    [
        lambda: torch.ones(1).std(),
        lambda: torch.zeros(1).var(),
        lambda: torch.add(torch.ones(3), 1, out=torch.ones(2)),
        lambda: torch.ones(2, dtype=torch.complex64).to(torch.float),
    ],
)
def test_a_warning_of_a_known_value_is_shown_once_as_in_eager_mode(compute):
    def shown(read):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            read()
        return [str(each.message) for each in found]

    def read():
        with lazyviz.lazy() as graph:
            compute().tolist()
        graph.evaluate()

    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        expected = shown(compute)
        assert len(expected) == 1
        assert shown(read) == expected
    finally:
        torch.set_warn_always(before)


def scalar_chains():
    """Numbers that are read after every op, mixed with writes, views, and reads of data."""
    seen = []
    x, y = torch.rand(()), torch.tensor(3)
    for _ in range(4):
        x = x * 1.01
        y = y * 2 - 1
        seen += [x.item(), y.item()]
        y += 1
        seen.append(y.item())
    z = x + y
    seen.append(z.item())
    z.mul_(2)
    seen += [z.item(), (-z).item(), torch.rsub(z, 1).item()]
    overwritten = torch.tensor(2.0)
    before = overwritten * 3
    overwritten.fill_(10)
    seen += [before.item(), (overwritten * 3).item(), (before + overwritten).item()]
    conjugate = torch.tensor(1 + 2j).conj() * 2
    seen += [conjugate.item(), (torch.tensor(True) * 3).item(), (torch.tensor(5) / 2).item()]
    leaf = torch.tensor(2.0, requires_grad=True)
    twice = leaf * 2
    seen.append(twice.item())
    twice.backward()
    return [*seen, leaf.grad.item()]


def test_chains_of_single_numbers_that_are_read_at_each_step():
    torch.manual_seed(0)
    expected = scalar_chains()
    torch.manual_seed(0)
    with lazyviz.lazy() as graph:
        assert scalar_chains() == expected
    assert len(graph.sync_points) <= 3  # of the drawn number, and of what requires gradients
    graph.evaluate()
