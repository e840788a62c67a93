"""Registered backends run whole segments; draws stay eager's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.execute import backend_registry
from lazyviz.execute.backend_protocol import Compiled
from lazyviz.execute.compiler.numerical_verification import run_recorded


class Interpreter:
    """The smallest backend: calls each op of the segment."""

    def __init__(self):
        self.compiled = []

    def compile(self, segment, inputs):
        self.compiled.append(len(segment.nodes))

        def run(*tensors):
            values = dict(zip(segment.inputs, tensors))

            def read(item):
                if isinstance(item, (list, tuple)):
                    return type(item)(read(entry) for entry in item)
                return values.get(item, item) if item.__hash__ is not None else item

            for node in segment.nodes:
                result = node.op(*read(node.args), **{k: read(v) for k, v in node.kwargs.items()})
                results = list(result) if isinstance(result, (list, tuple)) else [result]
                results = [item for item in results if item is not None]
                for value in node.outputs:
                    if value.node is node:
                        values[value] = results[value.index]
            return [values[value] for value in segment.outputs]

        return run


@pytest.fixture
def interpreter():
    backend = Interpreter()
    lazyviz.register_backend("interpreter", backend)
    yield backend
    del backend_registry._backends["interpreter"]


def test_a_training_step_on_a_registered_backend(interpreter):
    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        return model, torch.optim.AdamW(model.parameters())

    x = torch.randn(6, 4)
    eager_model, eager_optimizer = make()
    model, optimizer = make()
    torch.manual_seed(1)
    expected = step(eager_model, eager_optimizer, x)
    torch.manual_seed(1)
    with lazyviz.lazy(backend="interpreter") as graph:
        loss = step(model, optimizer, x)
    report = graph.evaluate()
    assert report.backend == "interpreter"
    draw = next(index for index, node in enumerate(graph.nodes) if node.draws is not None)
    assert interpreter.compiled == [draw, len(graph.nodes) - draw - 1]  # dropout's draw is between them
    assert report.share == 1 - 1 / len(graph.nodes)
    assert torch.equal(loss, expected)
    for ours, theirs in zip(model.parameters(), eager_model.parameters()):
        assert type(ours) is nn.Parameter
        assert torch.equal(ours, theirs) and torch.equal(ours.grad, theirs.grad)
    assert graph.pending == 0


def test_a_backend_that_fails_leaves_everything_pending():
    class Broken:
        def compile(self, segment, inputs):
            return lambda *tensors: []

    lazyviz.register_backend("broken", Broken())
    try:
        x = torch.ones(3)
        with lazyviz.lazy() as graph:
            y = x + 1
        with pytest.raises(ValueError, match="0 tensors for a segment with 1"):
            graph.evaluate(backend="broken")
        assert graph.pending == 1
        assert y.tolist() == [2, 2, 2]
    finally:
        del backend_registry._backends["broken"]


def test_results_that_share_memory_otherwise_than_was_recorded_are_given_to_no_code(interpreter):
    @torch.library.custom_op("lazyviz_tests::twins", mutates_args=())
    def twins(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, x + 1

    @twins.register_fake
    def shape_rule(x):
        one = torch.empty_like(x)
        return one, one  # which is not what the kernel does

    interpreter.refuses = lambda node: "by itself" if "twins" in str(node.op) else None
    x = torch.ones(3)
    with lazyviz.lazy(backend="interpreter") as graph:
        first, second = twins(x)
        first.mul_(5)
        view = second.view(3, 1) * 1
    report = graph.evaluate()
    assert (
        first.tolist() == [10, 10, 10] and view.tolist() == [[2], [2], [2]] and second.tolist() == [2, 2, 2]
    )
    assert report.share == 0 and interpreter.compiled == []
    assert "twins_0 at " in report.fallbacks[1] and "does not share memory" in report.fallbacks[1]


class Spoilt:
    """Runs the recorded ops, and then does something wrong; says so (``known``) of code that ran before."""

    def __init__(self, spoil, known=False):
        self.spoil, self.known = spoil, known

    def compile(self, segment, inputs):
        def run(*tensors):
            return self.spoil(run_recorded(segment, tensors))

        return Compiled(run, cache_hit=True) if self.known else run


def boom(results):
    raise ZeroDivisionError("a bug")


@pytest.fixture
def spoilt():
    def register(spoil, known=False):
        lazyviz.register_backend("spoilt", Spoilt(spoil, known))

    yield register
    backend_registry._backends.pop("spoilt", None)


@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (boom, ZeroDivisionError, "a bug"),
        (lambda results: results[:-1], ValueError, "returned 0 tensors for a segment with 1"),
        (
            lambda results: [each.double() for each in results],
            ValueError,
            r"\[2, 3\] float64 cpu for the result",
        ),
        (
            lambda results: [each[0] for each in results],
            ValueError,
            r"\[3\] float32 cpu for the result of mul_1",
        ),
        (
            lambda results: [each.t().contiguous().t() for each in results],
            ValueError,
            r"strides \[1, 2\] for",
        ),
        (lambda results: [None for each in results], ValueError, "NoneType for the result of mul_1"),
    ],
    ids=["raises", "too few", "dtype", "shape", "strides", "none"],
)
def test_new_code_that_fails_loses_nothing_even_after_it_wrote(spoilt, spoil, error, words):
    spoilt(spoil)
    a = torch.ones(2, 3)
    with lazyviz.lazy(backend="spoilt") as graph:
        a.add_(1)
        b = a * 2
    with pytest.raises(error, match=rf"{words}[\s\S]*2 ops from add__0 at .*_registry.py:\d+: a.add_"):
        graph.evaluate()
    assert graph.pending == 2
    graph.evaluate(backend="eager")
    assert a.tolist() == [[2] * 3] * 2 and b.tolist() == [[4] * 3] * 2  # written once


def stopped(spoilt, known=True):
    """A tensor, a parameter, a result and a graph: code that ran before has failed, and may have written."""
    a, weight = torch.ones(2, 3), nn.Parameter(torch.ones(3))
    spoilt(boom, known)
    with lazyviz.lazy(backend="spoilt") as graph, torch.no_grad():
        a.add_(1)
        weight.mul_(2)
        b = a * weight
    with pytest.raises(
        RuntimeError, match=r"stopped midway[\s\S]*3 ops from add__0 at .*a.add_\(1\).*a bug"
    ) as raised:
        graph.evaluate()
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    for read in (a.tolist, weight.tolist, b.tolist, graph.evaluate, lazyviz.sync):
        with pytest.raises(RuntimeError, match=r"partially written[\s\S]*add__0 at .*_registry.py"):
            read()
    return a, weight, b, graph


@pytest.mark.parametrize("inside", [False, True], ids=["plain", "recorded"])
@pytest.mark.parametrize(
    "overwrite",
    [
        lambda a: a.fill_(7.0),
        lambda a: a.copy_(torch.full((2, 3), 7.0)),
        lambda a: a.zero_().add_(7),
        lambda a: a.view(-1).uniform_().mul_(0).add_(7),
        lambda a: a.t().copy_(torch.full((3, 2), 7.0)),
        lambda a: torch._foreach_copy_([a], [torch.full((2, 3), 7.0)]),
    ],
    ids=["fill", "copy", "zero", "uniform", "transposed", "foreach"],
)
def test_what_was_left_half_written_can_be_overwritten_whole(spoilt, overwrite, inside):
    a, weight, b, _ = stopped(spoilt)
    if inside:
        with lazyviz.lazy() as later:
            overwrite(a)
            total = a.sum()
        later.evaluate()
        assert total.item() == 42
    else:
        overwrite(a)
    assert a.tolist() == [[7] * 3] * 2
    with pytest.raises(RuntimeError, match="partially written"):
        weight.tolist()  # not overwritten yet
    module = nn.Module()
    module.weight = weight
    module.load_state_dict({"weight": torch.zeros(3)})
    assert weight.tolist() == [0, 0, 0]
    with lazyviz.lazy():
        y = a + 1
    lazyviz.sync()
    assert type(y) is torch.Tensor and y[0, 0].item() == 8
    with pytest.raises(RuntimeError, match="partially written"):
        b.tolist()
    assert a.add_(1)[0, 0].item() == 8  # nothing of what failed runs again


@pytest.mark.parametrize(
    "part",
    [lambda a: a[0].fill_(7.0), lambda a: a.copy_(a), lambda a: a.add_(1), lambda a: a.copy_(a.t().t() * 2)],
    ids=["a part", "itself", "read", "read first"],
)
def test_what_does_not_overwrite_all_of_it_is_refused(spoilt, part):
    a, *_ = stopped(spoilt)
    with pytest.raises(RuntimeError, match="partially written"):
        part(a)
    with lazyviz.lazy() as later:
        part(a)
    with pytest.raises(RuntimeError, match="partially written"):
        later.evaluate()
    with pytest.raises(RuntimeError, match="partially written"):
        a.tolist()


def test_what_has_nothing_to_do_with_a_segment_that_stopped_runs_and_reset_forgets_it(spoilt):
    a, *_ = stopped(spoilt)
    with lazyviz.lazy():
        y = torch.ones(2) + 1
    with pytest.raises(RuntimeError, match="partially written"):
        lazyviz.sync()
    assert type(y) is torch.Tensor
    lazyviz.session.lazy_graph.reset()
    assert a.shape == (2, 3) and lazyviz.sync().ops_run == 0 and len(a.tolist()) == 2


def test_unknown_and_unfit_backends_are_clear_errors():
    with pytest.raises(ValueError, match=r"unknown backend 'nope'; available: .*cudagraphs, eager"):
        with lazyviz.lazy(backend="nope"):
            pass
    with pytest.raises(TypeError, match="compile"):
        lazyviz.register_backend("empty", object())
    with pytest.raises(ValueError, match="built-in"):
        lazyviz.register_backend("eager", Interpreter())
