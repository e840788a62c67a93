"""A kernel that fails after writing: its writes are undone or refused, in every way to run it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.execute import write_rollback
from lazyviz.execute.replay import native_codegen
from lazyviz.execute.replay.program_cache import replays
from lazyviz.record.tape import tape

from ..bit_equality import difference
from .support.faulty_kernels import FaultyKernels, KernelError, error_after_it

ops = torch.ops.aten
SMALL, LARGE = 100, write_rollback.MOST_COPIED // 4 + 1


def batch_norm(size):
    norm = nn.BatchNorm1d(size)
    return list(norm.buffers()), lambda: norm(torch.ones(4, 1) * torch.arange(size))


def index_put(size):
    x, at = torch.zeros(size), torch.tensor([1, 1, 3])
    return [x], lambda: x.index_put_((at,), torch.ones(3), accumulate=True)


def index_add(size):
    x, at = torch.zeros(size), torch.tensor([1, 1, 3])
    return [x], lambda: x.index_add_(0, at, torch.ones(3))


def over_a_list(size):
    tensors = [torch.full((size,), float(number)) for number in range(3)]
    return tensors, lambda: torch._foreach_add_(tensors, 1.0)


def fused_adamw(size):
    weight = nn.Parameter(torch.ones(size))
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.grad = torch.ones(size)
    optimizer.step()
    return [weight.detach(), weight.grad, *optimizer.state[weight].values()], optimizer.step


def cumulative(size):
    x = torch.ones(size)
    return [x], lambda: x.cumsum_(0)


def divide_integers(size):
    x = torch.full((size,), 100)
    return [x], lambda: x.floor_divide_(torch.full((size,), 3))


KINDS = {
    batch_norm: ops.native_batch_norm.default,
    index_put: ops.index_put_.default,
    index_add: ops.index_add_.default,
    over_a_list: ops._foreach_add_.Scalar,
    fused_adamw: ops._fused_adamw_.default,
    cumulative: ops.cumsum_.default,
    divide_integers: ops.floor_divide_.Tensor,
}
WAYS = ("op by op", "replay, C++", "replay, Python", "sync point")


@pytest.fixture(params=WAYS)
def way(request):
    native_codegen.use(request.param != "replay, Python")
    replays.clear()
    yield request.param
    native_codegen.use(True)
    replays.clear()


def failed(kind, size, way):
    """What a program has written, its graph, and the error; its kernel has failed when it had written."""
    op = KINDS[kind]

    def recorded():
        torch.manual_seed(0)
        written, program = kind(size)
        with lazyviz.lazy() as graph:
            program()
            [torch.ones(2) + number for number in range(4)]
        assert op in [node.op for node in graph.nodes]
        return written, graph

    if way.startswith("replay"):
        for _ in range(2):
            recorded()[1].evaluate()
    written, graph = recorded()
    read = written[0].sum if way == "sync point" else graph.evaluate
    kernels, evaluator = FaultyKernels({op}), tape.runs.evaluator

    def evaluate(nodes, cause):
        with kernels.active():
            evaluator(nodes, cause)

    kernels.arm(0, error_after_it)
    tape.runs.evaluator = evaluate
    try:
        with pytest.raises(KernelError, match="after it has written") as raised, kernels.active():
            read()
    finally:
        tape.runs.evaluator = evaluator
        kernels.restore()
    return written, graph, str(raised.value)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_little_is_put_back_and_written_once(kind, way):
    expected, program = kind(SMALL)
    program()
    written, graph, words = failed(kind, SMALL, way)
    assert "stay pending" in words
    graph.evaluate()
    assert difference(expected, written) is None


def test_running_statistics_are_put_back_however_many_there_are(way):
    expected, program = batch_norm(LARGE)
    program()
    written, graph, _ = failed(batch_norm, LARGE, way)
    graph.evaluate()
    assert difference(expected, written) is None


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind is not batch_norm], ids=lambda kind: kind.__name__
)
def test_much_is_refused_until_it_is_overwritten(kind, way):
    written, graph, words = failed(kind, LARGE, way)
    assert "partially written" in words
    assert graph.state == "failed"
    for read in (written[0].tolist, graph.evaluate, lazyviz.sync):
        with pytest.raises(RuntimeError, match=r"a kernel .* stopped midway[\s\S]*test_partial_writes.py"):
            read()
    with lazyviz.lazy():
        other = torch.ones(2) + 1
    assert other.tolist() == [2, 2]
    for tensor in written:
        tensor.zero_()
    assert written[0].sum().item() == 0
    lazyviz.sync()


def test_what_a_failed_kernel_has_only_read_may_be_written(way):
    x, at, source = torch.zeros(LARGE), torch.tensor([1]), torch.ones(1)
    with lazyviz.lazy() as graph:
        x.index_add_(0, at, source)
    kernels = FaultyKernels({ops.index_add_.default})
    kernels.arm(0, error_after_it)
    try:
        with pytest.raises(KernelError), kernels.active():
            graph.evaluate()
    finally:
        kernels.restore()
    source.add_(1)
    with lazyviz.lazy() as later:
        source.mul_(2)
    later.evaluate()
    assert source.tolist() == [4]
    lazyviz.reset()


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_an_index_that_is_out_of_range_leaves_nothing_half_written_unsaid(size, way):
    """ATen's kernel adds as it goes, and finds the index when it comes to it."""

    def program():
        x = torch.zeros(size)
        with lazyviz.lazy() as graph:
            x.index_put_((torch.tensor([0, 1, size]),), torch.ones(3), accumulate=True)
        return x, graph

    for _ in range(3):
        x, graph = program()
        with pytest.raises(IndexError):
            graph.evaluate()
        with pytest.raises(IndexError if size == SMALL else RuntimeError):
            x.tolist()
        lazyviz.reset()
        assert size == LARGE or not x.any()


def test_what_writes_all_of_it_or_fails_before_is_run_again():
    x, y = torch.ones(LARGE), torch.ones(LARGE)
    with lazyviz.lazy() as graph:
        x.add_(1)
        y.copy_(x)
        y.mul_(2)
        torch.mm(torch.ones(2, 2), torch.ones(2, 2), out=torch.empty(2, 2))
    risky = [
        str(node.op) for node in graph.nodes if write_rollback.is_refused(node) or write_rollback.copied(node)
    ]
    assert risky == []
    lazyviz.reset()


def test_a_third_party_operator_may_fail_midway(way):
    @torch.library.custom_op("lazyviz_tests::adds_twice", mutates_args=("x",))
    def adds_twice(x: torch.Tensor) -> None:
        x.add_(1)
        if fails:
            raise KeyboardInterrupt
        x.add_(1)

    for size in (SMALL, LARGE):
        fails = False
        for _ in range(2):
            x = torch.zeros(size)
            with lazyviz.lazy() as graph:
                adds_twice(x)
                [torch.ones(2) + number for number in range(4)]
            if way.startswith("replay"):
                graph.evaluate()
            else:
                lazyviz.reset()
        x = torch.zeros(size)
        with lazyviz.lazy() as graph:
            adds_twice(x)
            [torch.ones(2) + number for number in range(4)]
        fails = True
        with pytest.raises(KeyboardInterrupt):
            graph.evaluate()
        fails = False
        if size == SMALL:
            graph.evaluate()
            assert x.unique().tolist() == [2]
        else:
            with pytest.raises(RuntimeError, match="partially written"):
                graph.evaluate()
            lazyviz.reset()
