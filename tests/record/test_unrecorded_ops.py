"""Code outside of blocks sees the same values as in eager PyTorch."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

import lazyviz


def dispatch_modes() -> int:
    return torch._C._len_torch_dispatch_stack()


def test_reading_a_real_tensor_with_a_pending_write():
    weight = torch.ones(3)
    with lazyviz.lazy():
        weight.add_(1)
    assert (weight * 1).tolist() == [2, 2, 2]
    assert dispatch_modes() == 0 or not lazyviz.metrics()["ops pending"]


def test_reading_through_a_view_made_before():
    weight = torch.ones(4)
    view = weight[:2]
    with lazyviz.lazy():
        weight.mul_(3)
    assert view.tolist() == [3, 3]


def test_writing_a_tensor_that_pending_ops_read():
    x = torch.ones(3)
    with lazyviz.lazy():
        y = x + 1
    x.zero_()
    assert y.tolist() == [2, 2, 2]
    assert x.tolist() == [0, 0, 0]


def test_writing_inside_the_block_keeps_program_order():
    x = torch.ones(3)
    with lazyviz.lazy() as graph:
        y = x + 1
        x.zero_()
        z = x + 1
    lazyviz.evaluate(z)
    assert z.tolist() == [1, 1, 1]
    assert y.tolist() == [2, 2, 2]
    assert graph.pending == 0


def test_partial_evaluation_leaves_the_rest_pending():
    x = torch.ones(3)
    with lazyviz.lazy() as graph:
        y = x + 1
        z = y * 2
        w = x * 5
    lazyviz.evaluate(y)
    assert type(y) is torch.Tensor
    assert graph.pending == 2
    y.add_(100)  # z must still see the old y
    assert z.tolist() == [4, 4, 4]
    assert graph.pending == 1
    assert w.tolist() == [5, 5, 5]


def test_drawing_and_seeding_outside():
    torch.manual_seed(3)
    expected = [torch.rand(3), torch.rand(3), torch.rand(2)]
    torch.manual_seed(3)
    with lazyviz.lazy():
        first = torch.rand(3)
        second = torch.rand(3)
    third = torch.rand(2)
    assert torch.equal(third, expected[2])
    assert torch.equal(second, expected[1])
    assert torch.equal(first, expected[0])


def test_reseeding_outside_does_not_change_pending_draws():
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    with lazyviz.lazy():
        draw = torch.rand(3)
    torch.manual_seed(5)
    after = torch.rand(3)
    assert torch.equal(draw, expected)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))


def test_the_users_own_mode_survives_ours():
    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Count.seen += 1
            return func(*args, **(kwargs or {}))

    x = torch.ones(3)
    with Count():
        with lazyviz.lazy() as graph:
            y = x + 1
        before = Count.seen
        graph.evaluate()
        assert Count.seen == before
        x + 1
        assert Count.seen == before + 1
    assert dispatch_modes() == 0
    assert y.tolist() == [2, 2, 2]


def test_a_device_context_survives():
    x = torch.ones(3)
    with torch.device("meta"):
        with lazyviz.lazy() as graph:
            y = x + 1
        graph.evaluate()
        assert torch.empty(3).device.type == "meta"
    assert y.tolist() == [2, 2, 2]


def test_numpy_memory_is_snapshotted_at_each_read():
    buffer = np.zeros(3, dtype=np.float32)
    results = []
    with lazyviz.lazy() as graph:
        for fill in range(3):
            buffer[:] = fill
            results.append(torch.from_numpy(buffer) + 1)
        shared = torch.from_numpy(buffer)
        first = shared * 2
        buffer[:] = 50
        second = shared * 2
    graph.evaluate()
    assert [r.tolist() for r in results] == [[1, 1, 1], [2, 2, 2], [3, 3, 3]]
    assert first.tolist() == [4, 4, 4]
    assert second.tolist() == [100, 100, 100]


def test_numpy_memory_is_snapshotted_after_an_empty_view_of_it_was_read():
    buffer = np.arange(6, dtype=np.float32)
    shared = torch.from_numpy(buffer)
    with lazyviz.lazy():
        nothing = shared[6:] + 1
        total = shared.sum()
        buffer[:] = 0
    assert total.item() == 15
    assert nothing.shape == (0,)


def test_writing_to_numpy_memory_reaches_the_array():
    buffer = np.zeros(3, dtype=np.float32)
    with lazyviz.lazy():
        torch.from_numpy(buffer).add_(1)
        assert buffer.tolist() == [1, 1, 1]


def test_another_thread_that_uses_a_pending_tensor_gets_its_value():
    x = torch.ones(3)
    with lazyviz.lazy():
        y = x + 1
    got = []
    thread = threading.Thread(target=lambda: got.append((y * 2).tolist()))
    thread.start()
    thread.join()
    assert got == [[4, 4, 4]]


def test_nothing_is_left_behind():
    before = {
        name: torch.Tensor.__dict__.get(name) for name in ("numpy", "tolist", "data", "__repr__", "__str__")
    }
    call = torch.nn.Module.__call__
    with lazyviz.lazy() as graph:
        y = torch.ones(3) * 2
    graph.evaluate()
    assert y.tolist() == [2, 2, 2]
    assert {name: torch.Tensor.__dict__.get(name) for name in before} == before
    assert torch.nn.Module.__call__ is call
    assert dispatch_modes() == 0


def test_an_exception_leaves_earlier_ops_pending_and_torch_eager():
    x = torch.ones(2, 3)
    with pytest.raises(RuntimeError, match="mat1 and mat2|size|shape"):
        with lazyviz.lazy() as graph:
            y = x + 1
            y @ x
    assert graph.pending == 1
    assert y.tolist() == [[2, 2, 2], [2, 2, 2]]
    assert type(torch.ones(1) + 1) is torch.Tensor


def test_a_kernel_of_the_users_own_may_read_its_inputs_with_numpy():
    @torch.library.custom_op("lazyviz_tests::doubled_in_numpy", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)

    @doubled.register_fake
    def _(x):
        return torch.empty_like(x)

    x = torch.arange(3.0)
    with lazyviz.lazy() as graph:
        y = doubled(x)
    graph.evaluate()
    assert not graph.sync_points
    assert y.tolist() == [0, 2, 4]
