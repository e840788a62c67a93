"""Code outside of blocks sees the same values as in eager PyTorch."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
import torch

import lazyviz
from lazyviz.record import intercept_ops_outside_blocks, native_recorder

from ..bit_equality import difference


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


def train(steps: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    x = torch.ones(4, 6)
    for _ in range(steps):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


@pytest.mark.skipif(native_recorder._dispatcher is None, reason="no compiled dispatcher is installed")
def test_a_plain_loop_beside_pending_ops_does_not_go_through_python(monkeypatch):
    expected = train()
    met = []
    dispatch = intercept_ops_outside_blocks.dispatch

    def noted(tape, op, args, kwargs):
        met.append(op)
        return dispatch(tape, op, args, kwargs)

    outside = torch.ones(3)
    with lazyviz.lazy() as graph:
        kept = outside * 2
    train()  # the operators are taken when they are met first
    monkeypatch.setattr(intercept_ops_outside_blocks, "dispatch", noted)
    actual = train()
    assert [op for op in met if torch.Tag.nondeterministic_seeded not in op.tags] == []
    assert graph.pending == 1
    assert all(torch.equal(one, other) for one, other in zip(expected, actual))
    assert kept.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "use",
    [
        lambda t: torch.cat([torch.zeros(1), t[:2]]),
        lambda t: torch.stack([t, t]),
        lambda t: torch._foreach_add([t, t], 1),
        lambda t: torch.zeros(4)[:2].copy_(t[1:3]),
        lambda t: torch.add(t, 1, out=torch.empty(4)),
        lambda t: torch.zeros(8).index_put_((torch.tensor([1, 2, 3, 0]),), t),
        lambda t: torch.where(t > 1, t, -t),
        lambda t: t.view(2, 2).t().contiguous(),
        lambda t: torch.einsum("i,i->", t, t),
    ],
)
def test_plain_ops_see_pending_writes_of_their_memory(use):
    def written(block):
        torch.manual_seed(0)
        base = torch.arange(8.0)
        tensor = base[2:6]
        torch.ones(4) + 1  # operators are taken when they are met first
        use(torch.arange(4.0))
        with block:
            base.mul_(3).add_(1)
        return use(tensor), base

    expected, actual = written(contextlib.nullcontext()), written(lazyviz.lazy())
    assert difference(expected, actual) is None


@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.add_(1),
        lambda t: t[1:].zero_(),
        lambda t: torch._foreach_mul_([t], 5),
        lambda t: torch.neg(torch.ones(4), out=t),
        lambda t: t.view(2, 2).t().copy_(torch.ones(2, 2)),
        lambda t: t.detach().index_fill_(0, torch.tensor([2]), 7),
        lambda t: t.copy_(torch.zeros(4)),
    ],
)
def test_plain_writes_wait_for_pending_reads(write):
    x = torch.arange(4.0)
    write(torch.arange(4.0))
    for _ in range(2):
        with lazyviz.lazy():
            y = x.clone() * 2
        before = x.clone() * 2
        write(x)
        assert torch.equal(y, before)


def test_plain_writes_of_an_array_wait_for_pending_reads():
    array = np.ones(4, dtype=np.float32)
    x, alias = torch.from_numpy(array), torch.from_numpy(array)
    torch.ones(4).mul_(1)
    with lazyviz.lazy():
        x.add_(1)
    alias.mul_(10)
    assert array.tolist() == [20] * 4


def test_bits_of_conjugates_reach_plain_kernels():
    x = torch.tensor([1 + 2j, 3 - 1j])
    expected = [x.conj() @ x, x.conj().clone(), x.conj().imag + 1, torch.stack([x.conj(), x])]
    outside = torch.ones(2)
    for _ in range(2):
        with lazyviz.lazy() as graph:
            kept = outside + 1
        actual = [x.conj() @ x, x.conj().clone(), x.conj().imag + 1, torch.stack([x.conj(), x])]
        assert graph.pending == 1
        assert difference(expected, actual) is None
        del kept


@pytest.mark.skipif(native_recorder._dispatcher is None, reason="no compiled dispatcher is installed")
def test_pytorch_is_plain_after_an_op_that_evaluated_everything():
    x = torch.ones(3)
    for _ in range(2):  # the operators are taken when they are met first
        with lazyviz.lazy():
            y = x * 2
        z = y + 1
    assert z.tolist() == [3, 3, 3]
    assert dispatch_modes() == 0
    with lazyviz.lazy():
        y = x * 2
    with torch.inference_mode():
        z = y + 1
        assert dispatch_modes() == 1  # leaving the context would restore its keys
    assert (x + z).tolist() == [4, 4, 4]
    assert dispatch_modes() == 0


READ_VALUES = {
    "max": lambda x: x.max(),
    "masked_fill": lambda x: x.masked_fill(x > 0, x.sum()).sum(),
    "median": lambda x: x.median(),
    "prod": lambda x: (x * torch.tensor([0.0, 1, 1, 1])).prod(),
    "eigh": lambda x: torch.linalg.eigh(torch.outer(x, x).to(torch.cfloat))[0].sum(),
}


def gradient(function, x):
    leaf = x.clone().requires_grad_()
    function(leaf).backward()
    return leaf.grad


@pytest.mark.parametrize("name", READ_VALUES)
def test_a_plain_backward_pass_that_reads_values_leaves_other_ops_pending(name):
    x = torch.tensor([0.5, -1.0, 2.0, 2.0])
    expected = gradient(READ_VALUES[name], x)
    with lazyviz.lazy() as graph:
        kept = x * 2
    for _ in range(2):
        assert torch.equal(gradient(READ_VALUES[name], x), expected)
    assert graph.pending == 1
    assert kept.tolist() == [1, -2, 4, 4]
    assert dispatch_modes() == 0


@pytest.mark.parametrize("name", READ_VALUES)
def test_pytorch_is_plain_after_a_backward_pass_that_evaluated_everything(name):
    x = torch.tensor([0.5, -1.0, 2.0, 2.0])
    expected = gradient(READ_VALUES[name], x)
    leaf = x.clone().requires_grad_()
    with lazyviz.lazy() as graph:
        result = READ_VALUES[name](leaf)
    result.backward()
    assert graph.pending == 0
    assert torch.equal(leaf.grad, expected)
    if native_recorder.active:  # in Python, a mode cannot be removed while it handles the op that evaluates
        assert dispatch_modes() == 0


def test_a_pending_write_comes_before_a_backward_pass_that_was_recorded_before_it():
    x = torch.tensor([1.0, 2, 3, 0])

    def program(block):
        leaf = x.clone().requires_grad_()
        result = leaf.prod()
        with block:
            leaf.data.add_(1)
        result.backward()
        return leaf.grad

    assert torch.equal(program(contextlib.nullcontext()), program(lazyviz.lazy()))


@pytest.mark.skipif(native_recorder._dispatcher is None, reason="no compiled dispatcher is installed")
def test_plain_code_on_memory_of_arrays_does_not_go_through_python(monkeypatch):
    rows, weights = np.arange(32, dtype=np.float32).reshape(8, 4), np.ones((4, 2), dtype=np.float32)

    def scores():
        data = torch.stack([torch.from_numpy(row) / 2 for row in rows])
        return torch.from_numpy(weights).mul(3).t() @ data.t()

    expected = scores()
    met = []
    dispatch = intercept_ops_outside_blocks.dispatch

    def noted(tape, op, args, kwargs):
        met.append(op)
        return dispatch(tape, op, args, kwargs)

    outside = torch.ones(3)
    with lazyviz.lazy() as graph:
        kept = outside * 2
    scores()  # the operators are taken when they are met first
    monkeypatch.setattr(intercept_ops_outside_blocks, "dispatch", noted)
    actual = scores()
    assert met == []
    assert graph.pending == 1
    assert torch.equal(actual, expected)
    assert kept.tolist() == [2, 2, 2]


@pytest.mark.parametrize("write", [lambda t: t.mul_(-1), lambda t: torch._foreach_add_([t], 5)])
def test_plain_writes_wait_for_pending_reads_of_the_same_array(write):
    array = np.arange(6, dtype=np.float32)
    write(torch.from_numpy(array.copy()))
    for _ in range(2):
        whole, part = torch.from_numpy(array), torch.from_numpy(array[2:])
        before = array.copy()
        with lazyviz.lazy():
            kept = whole * 2
        write(part)
        assert kept.tolist() == (before * 2).tolist()
        assert array[:2].tolist() == before[:2].tolist()
        after = torch.from_numpy(before)
        write(after)
        assert array[2:].tolist() == after[2:].tolist()


def batches(data: torch.Tensor) -> list[torch.Tensor]:
    """The batches of a data set whose items are computed from ``data``, in a random order."""
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=4, shuffle=True)
    return [batch.clone() for (batch,) in loader]


@pytest.mark.skipif(native_recorder._dispatcher is None, reason="no compiled dispatcher is installed")
def test_ops_of_a_data_loader_in_a_block_do_not_go_through_python(monkeypatch):
    data = torch.arange(64.0).view(16, 4)
    expected = batches(data)
    met = []
    dispatch = intercept_ops_outside_blocks.dispatch

    def noted(tape, op, args, kwargs):
        met.append(op)
        return dispatch(tape, op, args, kwargs)

    with lazyviz.lazy() as graph:
        outside = torch.ones(3) * 2
        batches(data)  # the operators are taken when they are met first
        monkeypatch.setattr(intercept_ops_outside_blocks, "dispatch", noted)
        actual = batches(data)
        assert [op for op in met if torch.Tag.nondeterministic_seeded not in op.tags] == []
        assert graph.pending
    assert all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))
    assert outside.tolist() == [2, 2, 2]


class Changing(torch.utils.data.Dataset):
    """Items that are read from ``data``, which the block writes, and counted in ``seen``, which it reads."""

    def __init__(self, data: torch.Tensor, seen: torch.Tensor) -> None:
        self.data, self.seen = data, seen

    def __len__(self) -> int:
        return 6

    def __getitem__(self, at: int) -> torch.Tensor:
        self.seen[at] += 1
        self.seen.mul_(2)
        return torch.cat([self.data[at], self.data[at] * 2, self.seen[at : at + 1]])


def test_a_data_loader_in_a_block_waits_for_the_pending_ops_of_its_memory():
    def epochs(block):
        data, seen = torch.arange(12.0).view(6, 2), torch.zeros(6)
        loader = torch.utils.data.DataLoader(Changing(data, seen), batch_size=2)
        found = list(loader)
        with block:
            for number in range(3):
                data.mul_(1.5)
                data[number].neg_()
                before = seen * 3
                for batch in loader:
                    found += [batch * 2, before.clone()]
                    data.add_(batch.sum())
            found += [data.clone(), seen + 1]
        lazyviz.sync()
        return found

    assert difference(epochs(contextlib.nullcontext()), epochs(lazyviz.lazy())) is None
