"""The compiled recorder records the same objects as the Python recorder."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import subprocess
import sys
import weakref
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lazyviz
from lazyviz.graph.ir import Value
from lazyviz.record import native_recorder
from lazyviz.record.provenance import module_calls_and_phases
from lazyviz.record.recorder import Recorder
from lazyviz.record.tape import tape
from tests.models import MODELS


@pytest.fixture
def restored():
    before = native_recorder.active
    yield
    native_recorder.use(before)


def described(graph):
    """All that a record says, in plain data; objects by the order in which they appear."""
    values, storages = {}, {}

    def storage(item):
        return storages.setdefault(item, len(storages))

    def plain(item):
        if isinstance(item, Value):
            return (
                "value",
                values.setdefault(item, len(values)),
                storage(item.storage),
                item.meta,
                item.index,
            )
        if isinstance(item, (list, tuple)):
            return (type(item), [plain(entry) for entry in item])
        if isinstance(item, dict):
            return [(key, plain(entry)) for key, entry in item.items()]
        return "generator" if isinstance(item, torch.Generator) else item

    nodes = [
        {
            "op": node.op,
            "args": plain(node.args),
            "kwargs": plain(node.kwargs),
            "inputs": plain(node.inputs),
            "outputs": plain(list(node.outputs)),
            "writes": [storage(item) for item in node.writes],
            "after": [(other.graph is node.graph, other.index) for other in node.after],
            "place": (node.source, node.callers, node.module, node.root, node.phase),
            "forward": None if node.forward is None else node.forward.index,
            "modes": (node.grad_mode, node.inference_mode, node.state, node.at_once),
            "draws": node.draws is not None,
            "uses": [(value.uses, value.storage.uses) for value in node.inputs],
            "seen": [(value.tensor is not None, value.name) for value in node.outputs],
        }
        for node in graph.nodes
    ]
    memory = [
        {
            "size": (item.nbytes, item.device, item.external, item.created, item.dropped),
            "named": (item.role, item.name, item.variables, item.foreign, item.live, item.uses),
            "writer": None if item.writer is None else item.writer.index,
            "readers": [node.index for node in item.readers],
            "number": storages.get(item),
        }
        for item in graph.ir.storages
    ]
    inputs = [(values.get(item), item.name, item.given, item.meta) for item in graph.ir.inputs]
    return nodes, memory, inputs, graph.ir.calls, [str(point.cause) for point in graph.sync_points]


def recorded(make, compiled, monkeypatch):
    """``make()``'s program as it is recorded once every shape is known, what Python recorded, and results."""
    assert native_recorder.use(compiled) is compiled
    slow: Counter[str] = Counter()
    original = Recorder.record

    def record(recorder, op, args, kwargs):
        slow[str(op)] += 1
        return original(recorder, op, args, kwargs)

    # As if it were lazyviz's: code of the user's would be the line that recorded the op.
    record.__code__ = record.__code__.replace(co_filename=original.__code__.co_filename)

    for _ in range(2):
        torch.manual_seed(0)
        program = make()
        slow.clear()
        gc.collect()
        gc.disable()  # when it runs decides when a tensor in a cycle (checkpoint's) is dropped
        try:
            with monkeypatch.context() as patched, lazyviz.lazy() as graph:
                patched.setattr(Recorder, "record", record)
                kept = program()
        finally:
            gc.enable()
        description = described(graph)
        graph.evaluate()
        assert not tape.pending
        content = [item.detach().clone() for item in kept]
        del kept, program
    return description, slow, content


def training(name):
    def make():
        model_of, batch_of, loss_of = MODELS[name]
        model = model_of().train()
        batch = batch_of()
        optimizer = torch.optim.AdamW(model.parameters())

        def program():
            kept = []
            for _ in range(2):
                optimizer.zero_grad()
                loss = loss_of(model, *batch)[0]
                loss.sum().backward()
                optimizer.step()
                kept.append(loss)
            return [*kept, *model.parameters()]

        return program

    return make


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.spare = [nn.Dropout(0.5)]  # not registered

    def forward(self, x):
        hidden = checkpoint(self.first, x, use_reentrant=False)
        (slope,) = torch.autograd.grad(hidden.sum(), x, create_graph=True)  # inside of a module's call
        return self.spare[0](self.norm(hidden)) + slope


def modules():
    model = nn.Sequential(nn.Linear(4, 4), Inner(), nn.ReLU())

    def helper(x):
        return model(x)

    def program():
        x = torch.randn(6, 4, requires_grad=True)
        loss = helper(x).square().mean()
        loss.backward()
        return [loss, x.grad, *(p.grad for p in model.parameters()), *model.buffers()]

    return program


def memory():
    outside = torch.arange(12.0).reshape(3, 4)
    shared = torch.from_numpy(np.ones(4, dtype=np.float32))
    buffer = torch.zeros(4)

    def program():
        kept = [outside.t()[1:], outside[0] + shared]
        view = outside.view(-1)
        view[2:5].mul_(3)
        torch.add(kept[1], 1, out=buffer)
        total = [torch.ones(4) for _ in range(5)]
        torch._foreach_add_(total, [buffer, *[outside[1]] * 4], alpha=2)
        kept += [buffer * number for number in range(12)]  # read over and over, then written
        buffer.add_(kept[-1])
        buffer.copy_(buffer.flip(0))
        kept[3] = None
        strided = torch.empty(8).fill_(1).as_strided((2, 2), (3, 1))
        squeezed = torch.ones(1, 4)
        squeezed.squeeze_(0)
        kept += [strided, squeezed, buffer, *total, *torch.ones(6).chunk(3), *torch.ones(4, 4).max(0)]
        kept += [
            torch.randn(3),
            torch.nn.functional.dropout(torch.ones(9)),
            torch.complex(buffer, buffer).conj(),
        ]
        with torch.no_grad():
            kept.append(buffer * 2)
        with torch.inference_mode():
            kept.append(torch.ones(3)[1:] * 2)
        return [item for item in kept if item is not None]

    return program


PROGRAMS = {"modules": modules, "memory": memory} | {
    name: training(name) for name in ("gpt2", "resnet, eval")
}


@pytest.mark.slow
@pytest.mark.skipif(not native_recorder.active, reason="the compiled recorder is not built, or switched off")
@pytest.mark.parametrize("name", PROGRAMS)
def test_both_record_the_same(name, restored, monkeypatch):
    in_python, everything, expected = recorded(PROGRAMS[name], False, monkeypatch)
    compiled, slow, content = recorded(PROGRAMS[name], True, monkeypatch)
    for what, ours, theirs in zip(("nodes", "storages", "inputs", "calls", "syncs"), compiled, in_python):
        for number, (one, other) in enumerate(zip(ours, theirs)):
            assert one == other, f"{what} {number}"
        assert ours == theirs, what
    assert all(torch.equal(one, other) for one, other in zip(content, expected))
    assert sum(slow.values()) < 0.25 * sum(everything.values())


@pytest.mark.skipif(not native_recorder.active, reason="the compiled recorder is not built, or switched off")
def test_it_keeps_nothing_alive(restored):
    def step():
        x = torch.ones(7, requires_grad=True)
        (x * 2).sum().backward()
        return x.grad

    def references():
        with lazyviz.lazy() as graph:
            for _ in range(50):
                step()
        graph.evaluate()
        del graph
        gc.collect()
        return [sys.getrefcount(item) for item in (None, torch.float32, torch.ones, LINE, torch.Tensor)]

    native_recorder.use(True)
    references()
    before = references()
    after = references()
    assert all(abs(one - other) < 40 for one, other in zip(before[1:], after[1:]))


LINE = "a string of this module"


@pytest.mark.slow
def test_without_it_lazyviz_works_the_same():
    code = (
        "import torch, lazyviz\n"
        "with lazyviz.lazy() as graph:\n"
        "    y = torch.nn.Linear(3, 3)(torch.ones(2, 3)).sum()\n"
        "print(lazyviz.metrics()['compiled recorder'], len(graph.nodes) > 3, y.item() is not None)\n"
    )
    env = {**os.environ, "LAZYVIZ_PURE_PYTHON": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False", "True", "True"], done.stderr


def a_step(layer):
    layer.zero_grad()
    y = layer(torch.ones(2, 3))
    y.relu_()
    torch.cat([y, y * 2]).sum().backward()
    return y


def everything_in(graph):
    """The objects of a record that can be in a cycle."""
    for node in graph.nodes:
        yield node
        yield from (item for item in (node.args, node.inputs, node.outputs, node.after, node.writes) if item)
        for value in (*node.inputs, *node.outputs):
            yield value
            yield value.storage
            yield from (item for item in (value.storage.readers, value.tensor) if item)


@pytest.mark.skipif(not native_recorder.active, reason="the compiled recorder is not built, or switched off")
def test_the_collector_goes_over_a_record_once_its_owner_is_gone(restored):
    native_recorder.use(True)
    layer = nn.Linear(3, 3)
    for again in (True, True, False):
        with lazyviz.lazy() as graph:
            kept = a_step(layer)
        if again:
            graph.evaluate()
    assert not any(gc.is_tracked(node) for node in graph.nodes if node.op is torch.ops.aten.mul.Tensor)
    ir = graph.ir
    del graph
    assert [item for item in everything_in(ir) if not gc.is_tracked(item)] == []
    lazyviz.sync()
    assert kept.shape == (2, 3)


@pytest.mark.parametrize("evaluated", [True, False])
def test_a_graph_is_freed_when_nothing_refers_to_it(evaluated):
    layer = nn.Linear(3, 3)
    for _ in range(3):
        with lazyviz.lazy() as graph:
            a_step(layer)
        if evaluated:
            graph.evaluate()
        gone = weakref.ref(graph.ir)
    del graph
    if not evaluated:
        lazyviz.session.lazy_graph.reset()
    layer.zero_grad()
    gc.collect()
    assert gone() is None


def test_a_plan_survives_the_graph_that_it_is_of():
    layer = nn.Linear(3, 3)
    for _ in range(3):
        with lazyviz.lazy() as graph:
            a_step(layer)
        plan = graph.plan()
        said = plan.explain()
        graph.evaluate()
    del graph
    gc.collect()
    assert plan.explain() == said


def test_blocks_in_a_loop_leave_nothing():
    layer = nn.Linear(3, 3)

    def loop():
        for _ in range(5):
            with lazyviz.lazy() as graph:
                a_step(layer)
            graph.evaluate()
        del graph
        gc.collect()
        return len(gc.get_objects())

    loop()
    loop()
    before = loop()
    assert loop() <= before + 10


def test_pending_tensors_in_a_cycle_are_collected():
    x = torch.ones(3)
    for _ in range(3):
        with lazyviz.lazy() as graph:
            for _ in range(100):
                cycle = [x * 2 + 1]
                cycle.append(cycle)
            kept = cycle[0] + 1
            del cycle
            gc.collect()
        assert sum(value.tensor is not None for node in graph.nodes for value in node.outputs) == 1
        graph.evaluate()
    assert kept.tolist() == [4.0, 4.0, 4.0]


def calls_that_differ_in_little():
    x, small = torch.arange(12.0).reshape(3, 4), torch.arange(12, dtype=torch.int16).reshape(3, 4)
    yield from (
        (lambda dim=dim, keep=keep: x.sum(dim, keepdim=keep)) for dim in (0, 1) for keep in (False, True)
    )
    yield from ((lambda shape=shape: x.view(shape)) for shape in ((2, 6), (6, 2), (12,), (2, 2, 3)))
    yield from ((lambda dtype=dtype: x.sum(0, dtype=dtype)) for dtype in (None, torch.float64, torch.float32))
    yield from (
        (lambda number=number: small + number) for number in (1, 1.0, True, 2**40, -0.0, float("nan"))
    )
    yield from ((lambda fill=fill: torch.full((2,), fill)) for fill in (1, 1.0, True, 1j))
    yield from ((lambda size=size: torch.empty(size)) for size in (2, 3, 2**33))
    yield from ((lambda count=count: torch.cat([x] * count)) for count in (1, 2, 60, 90, 91, 150))
    yield from ((lambda form=form: x.t().clone(memory_format=form)) for form in (torch.contiguous_format,))
    yield lambda: x.t().clone()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):

        def by_default(dtype=dtype):
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                return torch.ones(2), small / 3
            finally:
                torch.set_default_dtype(before)

        yield by_default


def test_calls_that_differ_in_little_have_results_of_their_own(restored):
    def metas():
        with lazyviz.lazy() as graph:
            for call in calls_that_differ_in_little():
                call()
        return [value.meta for node in graph.nodes for value in node.outputs]

    native_recorder.use(False)
    expected = metas()
    if not native_recorder.use(True):
        pytest.skip("nothing is compiled")
    for _ in range(3):  # asked for, found by its key, found by its words
        assert metas() == expected


class Lookahead(torch.optim.Optimizer):
    """Steps another optimizer, fails when asked to, and keeps state with other keys and of other kinds."""

    def __init__(self, inner):
        super().__init__([each for group in inner.param_groups for each in group["params"]], {})
        self.inner, self.fails = inner, False

    def step(self):
        self.inner.step()
        if self.fails:
            raise ValueError("no luck")
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("calls", []).append(1)
            state["slow"] = state.get("slow", 0) * 0.5 + parameter.detach()
            state[7] = parameter.detach() * 2
        self.state["shared"] = [1, 2]


def plain_steps(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return lambda turn: optimizer.step()


def steps_with_exchanged_state(model):
    optimizer = torch.optim.Adam(model.parameters())

    def step(turn):
        if turn == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.step()

    return step


def nested_steps(model):
    optimizer = Lookahead(torch.optim.Adam(model.parameters()))
    return lambda turn: optimizer.step()


def failing_steps(model):
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    def step(turn):
        optimizer.fails = turn % 2 == 1
        with contextlib.suppress(ValueError):
            optimizer.step()

    return step


@pytest.mark.skipif(not native_recorder.active, reason="the compiled recorder is not built, or switched off")
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("stepping", [plain_steps, steps_with_exchanged_state, nested_steps, failing_steps])
def test_both_note_the_same_of_optimizers(stepping, reads, restored, monkeypatch):
    def make():
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))

        def program():
            step = stepping(model)
            for turn in range(4):
                model.zero_grad()
                loss = model(torch.ones(5, 4)).square().sum()
                loss.backward()
                step(turn)
                (loss * 2).sum()  # after a step that failed
                if reads:
                    loss.item()
            return [loss, *model.parameters()]

        return program

    in_python, _, expected = recorded(make, False, monkeypatch)
    compiled, _, content = recorded(make, True, monkeypatch)
    assert compiled == in_python
    assert all(torch.equal(one, other) for one, other in zip(content, expected))
    assert {"forward", "backward", "optimizer"} <= {node["place"][-1] for node in compiled[0]}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_what_modules_hold_is_the_same_in_both_ways():
    if native_recorder._module is None:
        pytest.skip("nothing is compiled")
    models = [make() for make, *_ in MODELS.values()]
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    modules = [module for model in (*models, nn.Identity(), scripted) for module in model.modules()]
    for held in (modules, [*modules[:3], None, *modules[3:]], []):
        assert native_recorder._module.content_of(held) == module_calls_and_phases.content_of(held)


@pytest.mark.skipif(not native_recorder.active, reason="the compiled recorder is not built, or switched off")
@pytest.mark.parametrize("number", [1.5, 3, True, -0.0, float("inf"), 2**62])
def test_numbers_are_recorded_without_a_tensor_object_for_them(number, monkeypatch):
    # PyTorch's own conversion makes a Python tensor of the number, to look for this attribute.
    asked = []
    made = property(lambda tensor: asked.append(tensor) or 0)
    x = torch.ones(3)
    with lazyviz.lazy():
        x * number  # the first time, PyTorch infers the shape
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "_wrapped_number", made, raising=False)
        with lazyviz.lazy() as graph:
            y = x * number
    assert asked == []
    (_, recorded) = graph.nodes[0].args
    assert type(recorded) is type(number) and str(recorded) == str(number)
    assert torch.equal(y, x * number)


def test_complex_numbers_are_recorded():
    x = torch.ones(3)
    with lazyviz.lazy() as graph:
        y = x * (1 + 2j)
    assert graph.nodes[0].args[1] == 1 + 2j and torch.equal(y, x * (1 + 2j))


CONSTRUCTORS = {
    "arange": lambda place: torch.arange(5, device=place),
    "arange with a step": lambda place: torch.arange(1, 2.5, 0.5, device=place),
    "scalar_tensor": lambda place: torch.scalar_tensor(-torch.inf, dtype=torch.bfloat16, device=place),
    "number for where": lambda place: torch.where(torch.ones(3, device=place) > 0, 0.0, -1.0),
    "ones": lambda place: torch.ones(2, 3, device=place),
    "full": lambda place: torch.full((2,), 3, device=place),
    "empty": lambda place: torch.empty(2, device=place, dtype=torch.int32),
    "linspace": lambda place: torch.linspace(0, 1, 5, device=place),
    "eye": lambda place: torch.eye(3, device=place),
    "randn": lambda place: torch.randn(4, device=place),
    "randint": lambda place: torch.randint(0, 9, (4,), device=place),
    "randperm": lambda place: torch.randperm(4, device=place),
    "ones_like": lambda place: torch.ones_like(torch.zeros(2), device=place),
    "new_zeros": lambda place: torch.zeros(2, device=place).new_zeros(3),
    "pinned": lambda place: torch.zeros(2, device="cpu", pin_memory=place != "cpu"),
    "tensor": lambda place: torch.tensor([1.0, 2.0], device=place),
}


@pytest.mark.skipif(not native_recorder.active, reason="the compiled recorder is not built, or switched off")
@pytest.mark.parametrize("place", [None, "cuda", "cuda:0", "cuda:1", "cpu"])
@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_tensors_that_are_made_on_an_absent_gpu_are_recorded_the_same(name, place, restored):
    found = []
    for compiled in (False, True):
        assert native_recorder.use(compiled) is compiled
        with lazyviz.lazy(device="RTX-4090") as graph:
            made = [CONSTRUCTORS[name](place) for _ in range(3)]
        found.append((described(graph), [(each.dtype, each.device, each.stride()) for each in made]))
        del made
        lazyviz.reset()
    assert found[0] == found[1]


@pytest.mark.skipif(not native_recorder.active, reason="the compiled recorder is not built, or switched off")
@pytest.mark.parametrize("place", ["cuda", "cpu"])
@pytest.mark.parametrize("name", ["arange", "scalar_tensor", "ones", "randn"])
def test_known_tensors_are_made_without_python(name, place, restored, monkeypatch):
    calls = []
    original = Recorder.record
    with lazyviz.lazy(device="RTX-4090"):
        CONSTRUCTORS[name](place)
        monkeypatch.setattr(
            Recorder, "record", lambda self, *args: calls.append(args) or original(self, *args)
        )
        CONSTRUCTORS[name](place)
    lazyviz.reset()
    assert not calls
