"""The sentences of the public interface's section "Semantics", one test each, in order."""

from __future__ import annotations

import copy
import io
import pickle
import signal
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.session import lazy_graph

from ..lazy_equals_eager import both


def data():
    return torch.linspace(-1, 1, 12).reshape(4, 3)


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


# --- what a lazy tensor is ----------------------------------------------------------------


def test_every_call_in_the_block_is_recorded():
    model, x = net(), data()
    with lazyviz.lazy() as graph:
        loss = model(x).pow(2).mean()
        loss.backward()
        made = torch.arange(3) + torch.zeros(3)
    assert graph.pending == len(graph.nodes) > 20 and not graph.sync_points
    assert lazyviz.is_lazy(loss) and lazyviz.is_lazy(made) and lazyviz.is_lazy(model[0].weight.grad)


def test_ops_of_the_autograd_engines_threads_are_recorded():
    w = torch.ones(3, requires_grad=True)
    threads = set()

    class Remembers(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            threads.add(threading.get_ident())
            return grad * 2

    with lazyviz.lazy() as graph:
        loss = Remembers.apply(w).sum()
        loss.backward()
    assert threads and graph.pending == len(graph.nodes)
    assert any(node.phase == "backward" and node.op is torch.ops.aten.mul.Tensor for node in graph.nodes)
    assert w.grad.tolist() == [2, 2, 2]


def test_a_lazy_tensor_is_a_tensor_in_every_respect_that_metadata_tells():
    def program(x):
        w = (x * 2).requires_grad_()
        y = w.t()[1:]
        z = y.conj().view(2, 4) if y.is_contiguous() else y.reshape(-1)
        facts = [
            (
                isinstance(t, torch.Tensor), t.shape, t.stride(), t.dtype, t.device, t.layout,
                t.requires_grad,
                t.is_leaf, t.grad_fn is None, t.storage_offset(), t.dim(), t.numel(), t.nbytes, t.itemsize,
                t.element_size(), t.is_contiguous(), t.is_floating_point(), t.is_complex(), len(t), t.ndim,
                t._is_view(), t.output_nr, t.is_sparse, t.is_cuda, t.is_meta,
            )
            for t in (w, y, z)
        ]  # fmt: skip
        return facts, y._base is w, torch.is_tensor(y), torch.result_type(y, 1.0), y.type()

    both(program, data)


def test_views_and_aliases_are_eagers():
    def program(x):
        y = x * 2
        same = [y.detach(), y.view(-1), y[0], y.T, y.expand(4, 3), y.contiguous(), y.reshape(3, 4)]
        other = [y.clone(), y.t().contiguous(), y[[0, 1]], y.flip(0)]
        y.add_(1)
        return same, other, [t._base is y for t in same], [t._is_view() for t in other]

    both(program, data)


# --- after evaluation ---------------------------------------------------------------------


def test_after_evaluation_the_same_objects_are_ordinary_tensors():
    x = data()
    with lazyviz.lazy() as graph:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        y = model(x)
        y.pow(2).sum().backward()
        optimizer.step()
    everything = [
        *model.parameters(),
        *(p.grad for p in model.parameters()),
        *(t for state in optimizer.state.values() for t in state.values()),
        y,
    ]
    ids = [id(tensor) for tensor in everything]
    assert all(lazyviz.is_lazy(t) for t in everything if t.numel() > 1)
    graph.evaluate()
    after = [
        *model.parameters(),
        *(p.grad for p in model.parameters()),
        *(t for state in optimizer.state.values() for t in state.values()),
        y,
    ]
    assert [id(tensor) for tensor in after] == ids
    assert [type(tensor) for tensor in after[:4]] == [nn.Parameter] * 4
    assert {type(tensor) for tensor in after[4:]} == {torch.Tensor}
    assert not any(vars(tensor) for tensor in after)


def test_backward_in_a_later_cell_gives_every_leaf_its_gradient():
    def losses(model, x, scale):
        return (model(x) * scale).pow(2).sum()

    expected, x = net(), data().requires_grad_()
    model, y = copy.deepcopy(expected), data().requires_grad_()
    scale, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    losses(expected, x, scale).backward()
    with lazyviz.lazy() as graph:
        loss = losses(model, y, other)
    graph.evaluate()
    loss.backward()
    for ours, theirs in zip((*model.parameters(), y, other), (*expected.parameters(), x, scale)):
        assert torch.equal(ours.grad, theirs.grad) and type(ours.grad) is torch.Tensor


# --- later cells --------------------------------------------------------------------------

LATER = {
    "an op reads": lambda t: (t * 1).tolist(),
    "numpy": lambda t: t.numpy().tolist(),
    "print": lambda t: str(t),
    "tolist": lambda t: t.tolist(),
    "a view made before": lambda t: (t._base if t._base is not None else t)[0].item(),
    "pickle": lambda t: pickle.loads(pickle.dumps(t)).tolist(),
    "equal": lambda t: torch.equal(t, torch.full((3,), 2.0)),
    "a module": lambda t: nn.functional.linear(t, torch.ones(2, 3)).tolist(),
}


@pytest.mark.parametrize("name", LATER)
def test_reading_a_tensor_with_a_pending_write_evaluates_it_first(name):
    eager = torch.ones(3).add_(1)
    expected = LATER[name](eager)
    t = torch.ones(3)
    with lazyviz.lazy() as graph:
        t.add_(1)
        unrelated = torch.ones(2) * 5
    assert LATER[name](t) == expected
    assert graph.pending and lazyviz.is_lazy(unrelated)  # only what was needed


WRITES = {
    "in place": lambda t: t.mul_(0),
    "through a view": lambda t: t[1:].fill_(9),
    "out": lambda t: torch.zeros(3, out=t),
    "copy_": lambda t: t.copy_(torch.zeros(3)),
    "numpy": lambda t: t.numpy().fill(7),
    "data": lambda t: t.data.zero_(),
    "set_": lambda t: t.set_(torch.zeros(3)),
    "resize_": lambda t: t.resize_(5),
    "foreach": lambda t: torch._foreach_zero_([t]),
    "an optimizer": lambda t: torch.optim.SGD([t], 1.0).zero_grad(),
}


@pytest.mark.parametrize("name", WRITES)
def test_writing_a_tensor_that_pending_ops_read_evaluates_them_first(name):
    t = torch.ones(3)
    with lazyviz.lazy():
        y = t * 2
    WRITES[name](t)
    assert y.tolist() == [2, 2, 2]


def test_drawing_or_seeding_with_pending_draws_in_any_cell():
    def cells(run):
        torch.manual_seed(5)
        first = run(lambda: torch.rand(2))
        second = torch.rand(2)
        third = run(lambda: torch.rand(2))
        state = torch.get_rng_state()
        fourth = run(lambda: torch.randperm(5))
        torch.manual_seed(6)
        fifth = run(lambda: torch.rand(2))
        return [first, second, third, state, fourth, fifth, torch.rand(2)]

    def in_a_cell(draw):
        with lazyviz.lazy():
            return draw()

    expected = cells(lambda draw: draw())
    result = cells(in_a_cell)
    for left, right in reversed(list(zip(expected, result))):
        assert torch.equal(left, right)


def test_ops_recorded_before_an_exception_stay_pending():
    x, weight = data(), torch.zeros(3)
    with pytest.raises(ZeroDivisionError):
        with lazyviz.lazy() as graph:
            y = x * 2
            weight.add_(1)
            1 / 0
            weight.add_(100)
    assert graph.pending == 2
    assert weight.tolist() == [1, 1, 1]
    assert torch.equal(y, x * 2)


def test_a_result_kept_anywhere_is_a_live_reference():
    kept = {}
    with lazyviz.lazy():
        kept[5] = (data() * 2, [data() + 1])
    lazy_graph.cell_boundary()
    assert torch.equal(kept[5][0], data() * 2) and torch.equal(kept[5][1][0], data() + 1)


# --- sync points --------------------------------------------------------------------------

SYNC = {
    "print": (lambda t: print(t), "print"),
    "str": (lambda t: str(t), "print"),
    "format": (lambda t: f"{t.sum():.2f}", "format"),
    "item": (lambda t: t.sum().item(), "item"),
    "float": (lambda t: float(t.sum()), "item"),
    "int": (lambda t: int(t.sum()), "item"),
    "bool": (lambda t: bool(t.sum()), "item"),
    "if": (lambda t: 1 if (t > 0).any() else 2, "item"),
    "tolist": (lambda t: t.tolist(), "tolist"),
    "numpy": (lambda t: t.numpy(), "numpy"),
    "__array__": (lambda t: np.asarray(t), "numpy"),
    "data_ptr": (lambda t: t.data_ptr(), "data_ptr"),
    "DLPack": (lambda t: torch.from_dlpack(t), "DLPack"),
    "storage": (lambda t: t.untyped_storage(), "storage access"),
    "pickle": (lambda t: pickle.dumps(t), "pickle"),
    "save": (lambda t: torch.save(t, io.BytesIO()), None),
    "equal": (lambda t: torch.equal(t, t + 1), "equal"),
    "allclose": (lambda t: torch.allclose(t, t + 1), None),
    "nonzero": (lambda t: t.nonzero(), "the result of aten.nonzero.default depends on data"),
    "mask": (lambda t: t[t > 0], None),
    "unique": (lambda t: t.unique(), None),
}


@pytest.mark.parametrize("name", SYNC)
def test_a_sync_point_has_its_name_and_line(name, capsys):
    read, cause = SYNC[name]
    x = data()
    with lazyviz.lazy() as graph:
        y = x * 2
        read(y)
    assert graph.sync_points
    point = graph.sync_points[0]
    assert cause is None or point.cause == cause
    assert point.source is not None and point.ops >= 1 and point.seconds >= 0 and point.bytes >= 0
    assert not lazyviz.is_lazy(y)


def test_an_op_without_shape_inference_is_a_sync_point():
    @torch.library.custom_op("lazyviz_sentences::shapeless", mutates_args=())
    def shapeless(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    with lazyviz.lazy() as graph:
        y = shapeless(data() * 2)
    assert [point.cause for point in graph.sync_points] == [
        "no shape rule for lazyviz_sentences.shapeless.default"
    ]
    assert torch.equal(y, data() * 2 + 1)


LOOKS = {
    "repr": lambda t: repr(t),
    "in a list": lambda t: repr([t]),
    "in a dict": lambda t: str({"t": t}),
    "f-string !r": lambda t: f"{t!r}",
    "shape": lambda t: (t.shape, t.dtype, t.device, t.stride(), t.is_contiguous(), len(t), t.nbytes),
    "dir": lambda t: [dir(t), hasattr(t, "nothing")],
    "vars": lambda t: list(vars(t)),
    "hash": lambda t: hash(t),
    "identity": lambda t: [t is t, id(t), t in [t]],
    "weakref": lambda t: weakref.ref(t)() is t,
    "isinstance": lambda t: (isinstance(t, torch.Tensor), torch.is_tensor(t), type(t).__mro__),
    "grad_fn": lambda t: t.grad_fn,
    "completer": lambda t: [getattr(type(t), name, None) for name in dir(t)[:50]],
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_look_is_no_sync_point(name):
    with lazyviz.lazy() as graph:
        y = data() * 2
        LOOKS[name](y)
    LOOKS[name](y)
    assert lazyviz.is_lazy(y) and not graph.sync_points


def test_what_a_look_shows():
    weight = nn.Parameter(torch.ones(3))
    with lazyviz.lazy():
        y = torch.zeros(8, 512) * 2
        with torch.no_grad():
            weight.mul_(2)
        assert repr(y) == f"{y!r}" == "lazy[8, 512] float32 cpu, pending"
        assert repr((y, 1)) == "(lazy[8, 512] float32 cpu, pending, 1)"
    assert repr(weight) == "Parameter[3] float32 cpu, pending write"
    assert weight.tolist() == [2, 2, 2]
    assert repr(weight) == "Parameter containing:\ntensor([2., 2., 2.], requires_grad=True)"


# --- random numbers, evaluation, errors ---------------------------------------------------


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3], [3]])
def test_random_numbers_are_eagers_in_any_order_of_evaluation(order):
    def draws():
        torch.manual_seed(9)
        generator = torch.Generator().manual_seed(3)
        a = torch.randn(4)
        b = nn.functional.dropout(torch.ones(20), 0.4)
        c = torch.rand(3, generator=generator)
        d = torch.empty(5).uniform_(2, 3) + torch.randperm(5)
        e = torch.multinomial(torch.ones(6), 3)
        return [a, b, c, d, e, torch.rand(2, generator=generator)]

    expected = draws()
    after = torch.rand(2)
    with lazyviz.lazy() as graph:
        result = draws()
    for at in order:
        lazyviz.evaluate(result[at])
        assert torch.equal(result[at], expected[at])
    graph.evaluate()
    assert all(torch.equal(x, y) for x, y in zip(result, expected))
    assert torch.equal(torch.rand(2), after)


def test_evaluating_twice_runs_nothing_twice():
    counter, x = torch.zeros(1), data()
    with lazyviz.lazy() as graph:
        counter.add_(1)
        y = x * 2
    assert graph.evaluate(y).ops_run == 1
    assert graph.evaluate().ops_run == 1
    assert [graph.evaluate().ops_run, lazyviz.evaluate(y).ops_run, lazyviz.sync().ops_run] == [0, 0, 0]
    assert counter.item() == 1


@pytest.mark.parametrize("how", ["interrupt", "cancel", "error"])
def test_what_is_finished_stays_and_evaluating_again_goes_on(how):
    counter, index = torch.zeros(1), torch.tensor([0, 0])
    with lazyviz.lazy() as graph:
        counter.add_(1)
        first = counter * 1
        bad = data()[index + 7] if how == "error" else counter + 5
        counter.add_(1)
        last = counter * 1
    cancel = threading.Event()

    def stop(progress):
        if progress.done == 2 and how == "interrupt":
            signal.raise_signal(signal.SIGINT)
        elif progress.done == 2 and how == "cancel":
            cancel.set()

    expected = {"interrupt": KeyboardInterrupt, "cancel": lazyviz.Interrupted, "error": IndexError}[how]
    with pytest.raises(expected):
        graph.evaluate(progress=stop, cancel=cancel)
    assert type(first) is torch.Tensor and first.item() == 1
    assert lazyviz.is_lazy(bad) and lazyviz.is_lazy(last)
    assert last.item() == 2 and counter.item() == 2  # not three: nothing ran twice
    if how == "error":
        with pytest.raises(IndexError):
            graph.evaluate()
        assert graph.pending
    else:
        graph.evaluate()
        assert bad.item() == 6 and not graph.pending


def test_an_exception_names_the_line_that_recorded_the_op():
    table, index = data(), torch.tensor([9])
    with lazyviz.lazy() as graph:
        picked = table[index]  # the user's line
    with pytest.raises(IndexError, match=r"picked = table\[index\]  # the user's line"):
        graph.evaluate()
    assert lazyviz.is_lazy(picked)


def test_a_backward_node_carries_its_forward_line_and_the_backward_line():
    w = torch.ones(3, requires_grad=True)
    with lazyviz.lazy() as graph:
        y = w.exp()  # forward
        y.sum().backward()  # backward
    (node,) = [n for n in graph.nodes if n.phase == "backward" and n.op is torch.ops.aten.mul.Tensor]
    assert node.source.text == "y.sum().backward()  # backward"
    assert node.forward.source.text == "y = w.exp()  # forward"


def test_the_share_of_a_report_is_that_of_the_backend():
    with lazyviz.lazy() as graph:
        data() * 2 + 1
    assert graph.evaluate().share == 1.0
