"""Replays in C++ behave like eager PyTorch and like Python replays: bits, memory, errors, interrupts."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time
import warnings

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.execute.replay import native_codegen
from lazyviz.execute.replay.node_instructions import NOWHERE
from lazyviz.execute.replay.program_cache import replays
from lazyviz.torch_internals import dispatch_level

from ...bit_equality import difference

pytestmark = pytest.mark.skipif(not native_codegen.active, reason="lazyviz was installed without it")

COMPILED, PYTHON = True, False
CPU_ONLY = [torch.profiler.ProfilerActivity.CPU]
INDEX = torch.tensor([2, 0, 1])


@pytest.fixture(autouse=True)
def nothing_known():
    replays.clear()
    yield
    replays.clear()
    native_codegen.use(True)


@pytest.fixture(autouse=True, scope="module")
def custom_ops():
    """Operators whose kernels are in Python."""

    @torch.library.custom_op("lazyviz_program::scaled", mutates_args=())
    def scaled(x: torch.Tensor, factors: list[float], rows: list[torch.Tensor]) -> torch.Tensor:
        factors.append(1.0)  # its own list, each time
        return x * sum(factors) + sum(rows)

    scaled.register_fake(lambda x, factors, rows: torch.empty_like(x))

    @torch.library.custom_op("lazyviz_program::count", mutates_args=("into",))
    def count(into: torch.Tensor) -> None:
        into.add_(1)

    @torch.library.custom_op("lazyviz_program::act", mutates_args=())
    def act(x: torch.Tensor) -> torch.Tensor:
        ACT()
        return x.clone()

    act.register_fake(torch.empty_like)


def ACT():
    """What ``act`` does."""


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def kinds():
    """What runs the subgraphs that are known."""
    return {type(known.code).__name__ for known in replays._known.values() if known.code is not None}


def replayed(program, make=tuple, runs=4):
    """``program(*make())`` eagerly and as a replay in C++, run after run."""
    for run in range(runs):
        results = []
        for block in (contextlib.nullcontext(), lazyviz.lazy()):
            torch.manual_seed(run)
            inputs = make()
            with block as graph:
                result = program(*inputs)
            if graph is not None:
                hit = graph.evaluate().cache_hit
            results.append((inputs, result, torch.get_rng_state()))
        assert difference(*results) is None
        assert hit == (run > 0)
    assert kinds() == {"Program"}


def indexing(x, rows):
    x[:, INDEX] = 2.0
    x.index_put_((INDEX, INDEX), rows[0, :3], accumulate=True)
    picked = x[INDEX, :, None], x[:, [0, 2]], x[INDEX > 0], x[None, INDEX, ..., INDEX]
    added = torch.zeros(3, 4).scatter_add(0, INDEX.expand(2, 3).T, rows.T[:, :2].contiguous())
    most = x.scatter_reduce(0, INDEX[None], x.flip(0), "amax", include_self=False)
    return x, *picked, added, most, x.take_along_dim(INDEX[:, None], 0), torch.index_select(x, 1, INDEX)


def numbers(x, rows):
    halves = torch.where(x > 0, 0.5, 2), torch.where(x > 0, x, 1), 2 - x, 2**x, x // 2, x % 0.3, -x / 3
    floors = torch.div(x, 0.7, rounding_mode="floor"), torch.clamp(x, max=0.5), x.clamp(rows[0, :3].abs())
    filled = x.masked_fill(x > 0, 3), torch.full((2,), True), x.new_full((2,), 7), torch.tensor(2.0) * x
    x.lerp_(x.flip(0), 0.25).addcmul_(x, x, value=-2)
    return *halves, *floors, *filled, x, torch.arange(1, 7, 2), torch.linspace(0, 1, 5)


def kinds_of_memory(x, rows):
    image = torch.ones(1, 3, 2, 2).contiguous(memory_format=torch.channels_last) + 1
    out, places = torch.empty(0), torch.empty(0, dtype=torch.long)
    torch.sort(x, dim=1, out=(out, places))
    torch.add(x, 1, out=x)
    halves = x.to(torch.bfloat16), x.double().to(torch.int32), x.to(torch.float16, copy=True)
    parts = [
        *x.unbind(1),
        *x.split([1, 2]),
        *torch.meshgrid(x[0], x[1], indexing="ij"),
        *torch.std_mean(x, 0),
    ]
    return image, out, places, *halves, *parts, nn.functional.gelu(x, approximate="tanh"), x.T.max(0)


def complexes(x, rows):
    z = torch.complex(x, x.flip(0)) * (1 + 2j)
    y = z.conj() @ z.mT + z.imag
    return z, y, torch.view_as_real(z), y.abs(), torch.fft.fft(x), z.conj().sum(), z * 2.5, x * 2j


def drawing(x, rows):
    generator = torch.Generator().manual_seed(5)
    drawn = torch.rand(3, generator=generator), torch.randperm(5, generator=generator), torch.randn(2)
    x.bernoulli_(0.4, generator=generator)
    masks = nn.functional.dropout(x, 0.3), torch.multinomial(rows.abs(), 2), torch.normal(x, 1.0)
    torch.manual_seed(9)
    return *drawn, x, *masks, torch.rand(2), generator.get_state()


def left_out(x, rows):
    """Gradients that nobody needs, which kernels leave out."""
    weight = torch.ones(2, 1, 2, 2)
    image = x[None, None].clone().requires_grad_()
    nn.functional.conv2d(image, weight).sum().backward()
    nn.functional.conv2d(x[None, None], weight.requires_grad_()).sum().backward()
    y = x.clone().requires_grad_()
    nn.functional.layer_norm(y, (3,), rows[0, :3], None).square().sum().backward()
    nn.functional.batch_norm(y, None, None, training=True).exp().sum().backward()
    return image.grad, weight.grad, y.grad


def customs(x, rows):
    ops = torch.ops.lazyviz_program
    y = ops.scaled(x, [0.5, 2.0], [rows[:, :3][:3], x])
    ops.count(y)
    return y, ops.scaled(y, [], [x]), ops.act(y)


def foreach(x, rows):
    some = [x.clone(), x + 1, rows.abs()]
    torch._foreach_add_(some, 0.1)
    torch._foreach_addcdiv_(some, some, [*torch._foreach_add(some, 3)], [0.1, 0.2, 0.3])
    return *some, *torch._foreach_norm(some), *torch._foreach_mul(some, [1.0, 2.0, -3.0])


@pytest.mark.parametrize(
    "program",
    [indexing, numbers, kinds_of_memory, complexes, drawing, left_out, customs, foreach],
    ids=lambda program: program.__name__,
)
def test_ops_of_every_kind_are_replayed_as_eager(program):
    replayed(program, lambda: (torch.randn(3, 3), torch.randn(3, 4)))


def test_the_grad_mode_is_each_op_s_own():
    def program(x):
        y = x * 2
        with torch.no_grad():
            z = y.exp()
        z = (z + y).sin()
        x.grad = None
        z.sum().backward()
        return y, z, x.grad

    replayed(program, lambda: (torch.randn(3, requires_grad=True),))


class Convolving(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        )
        self.down = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        x = self.layers(x)
        return (x + self.down(x)).mean((2, 3))


class Recurring(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.lstm = nn.LSTM(6, 5, 2, dropout=0.2, bidirectional=True)

    def forward(self, x):
        states, (hidden, cells) = self.lstm(self.embed(x))
        return states.mean((0, 1)) + hidden.sum() + cells[0].mean()


def attending():
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)


@pytest.mark.parametrize(
    ("model", "optimizer", "data"),
    [
        (Convolving, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), lambda: torch.randn(4, 3, 9, 9)),
        (Recurring, lambda p: torch.optim.Adam(p, 0.1, foreach=False), lambda: torch.randint(10, (4, 3))),
        (attending, lambda p: torch.optim.AdamW(p, 0.1, foreach=True), lambda: torch.randn(2, 5, 8)),
        (attending, lambda p: torch.optim.AdamW(p, 0.1, fused=True), lambda: torch.randn(2, 5, 8)),
    ],
    ids=["SGD with momentum", "LSTM", "AdamW", "fused AdamW"],
)
def test_training_is_replayed_as_eager(model, optimizer, data):
    def trained(lazily):
        torch.manual_seed(1)
        module = model()
        steps = optimizer(module.parameters())
        losses = []
        for _ in range(5):
            x = data()
            with lazyviz.lazy() if lazily else contextlib.nullcontext() as graph:
                steps.zero_grad()
                loss = module(x).square().mean()
                loss.backward()
                steps.step()
            losses.append(loss)
            if lazily:
                hit = graph.evaluate().cache_hit
        assert not lazily or hit
        grads = [parameter.grad for parameter in module.parameters()]
        return losses, module.state_dict(), grads, steps.state_dict(), torch.get_rng_state()

    assert difference(trained(False), trained(True)) is None
    assert kinds() == {"Program"}


def allocations(compiled):
    """The bytes that come and go, in order, while a training step is replayed; small numbers left out.

    Only what came goes: PyTorch reports the end of a block it was not watching when an earlier
    profile ended with another one at that address.
    """
    native_codegen.use(compiled)
    replays.clear()
    torch.manual_seed(1)
    model, data = attending(), torch.randn(2, 5, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for number in range(4):
        with lazyviz.lazy() as graph:
            optimizer.zero_grad()
            loss = model(data).square().mean()
            loss.backward()
            optimizer.step()
        gc.collect()
        if number < 3:
            graph.evaluate()
            continue
        with torch.profiler.profile(
            profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
        ) as p:
            report = graph.evaluate()
    assert report.cache_hit and kinds() == {"Program" if compiled else "function"}
    waiting = list(p.profiler.kineto_results.experimental_event_tree())
    events = []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == "[memory]" and abs(event.extra_fields.alloc_size) > 64:
            events.append((event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr))
    sizes, there = [], set()
    for _, size, address in sorted(events):
        if size > 0:
            there.add(address)
        elif address not in there:
            continue
        else:
            there.remove(address)
        sizes.append(size)
    return sizes, report.peak_bytes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # PyTorch 2.11, before the only cycle
def test_memory_comes_and_goes_as_in_python():
    in_cpp, peak = allocations(COMPILED)
    assert len(in_cpp) > 50
    assert (in_cpp, peak) == allocations(PYTHON)


class OfItsOwnError(Exception):
    pass


def raising():
    raise OfItsOwnError("not today")


@pytest.mark.parametrize("compiled", [COMPILED, PYTHON], ids=["C++", "Python"])
def test_what_a_kernel_in_python_raises_is_raised_and_the_rest_is_run_later(compiled, monkeypatch):
    native_codegen.use(compiled)

    def run():
        x = torch.zeros(3)
        with lazyviz.lazy() as graph:
            a = x + 1
            x.add_(a)
            b = torch.ops.lazyviz_program.act(a)
            c = b + x
            x.add_(c)
        return x, a, c, graph

    for _ in range(3):
        run()[-1].evaluate()
    x, a, c, graph = run()
    monkeypatch.setitem(globals(), "ACT", raising)
    with pytest.raises(OfItsOwnError, match=r"not today[\s\S]*test_interpreter.py:\d+: b = torch.ops"):
        graph.evaluate()
    assert [node.state for node in graph.nodes] == ["done", "done", "failed", "pending", "pending"]
    assert type(a) is torch.Tensor and lazyviz.is_lazy(c)
    monkeypatch.undo()
    assert x.tolist() == [3, 3, 3] and c.tolist() == [2, 2, 2]
    assert graph.state == "done"


@pytest.mark.parametrize("compiled", [COMPILED, PYTHON], ids=["C++", "Python"])
def test_an_interrupt_while_a_kernel_runs_lands_after_it(compiled, monkeypatch):
    native_codegen.use(compiled)

    def run():
        x = torch.zeros(3)
        with lazyviz.lazy() as graph:
            a = torch.ops.lazyviz_program.act(x + 1)
            x.add_(a)
            b = a * x
        return x, b, graph

    for _ in range(3):
        run()[-1].evaluate()
    x, b, graph = run()
    monkeypatch.setitem(globals(), "ACT", lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match="after 2 of 4"):
        graph.evaluate()
    assert graph.pending == 2
    assert b.tolist() == [1, 1, 1] and x.tolist() == [1, 1, 1]


@pytest.mark.parametrize("compiled", [COMPILED, PYTHON], ids=["C++", "Python"])
def test_an_interrupt_is_seen_among_kernels_that_need_nothing_of_python_s(compiled, one_thread):
    native_codegen.use(compiled)
    square = torch.eye(300)

    def run():
        with lazyviz.lazy() as graph:
            first = square + 0
            last = first
            for _ in range(600):
                last = last @ square
        return first, last, graph

    run()[-1].evaluate()
    first, last, graph = run()
    main = threading.get_ident()

    def interrupt():
        while lazyviz.is_lazy(first):
            time.sleep(0.001)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt, match="of 601 ops"):
            graph.evaluate()
    finally:
        thread.join()
    assert 0 < graph.pending < 600
    assert torch.equal(last, square)


def test_a_kernel_s_warning_is_python_s():
    def run():
        x = torch.ones(1)
        with lazyviz.lazy() as graph:
            y = (x * 2).exp().std() + 1
        return y, graph

    y, graph = run()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # operators called from Python warn there since torch 2.15
        graph.evaluate()
    y, graph = run()
    with pytest.warns(UserWarning, match="degrees of freedom"):
        graph.evaluate()
    y, graph = run()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="degrees of freedom"):
            graph.evaluate()
    assert [node.state for node in graph.nodes][2] == "failed"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert y.isnan().item()


def test_python_runs_elsewhere_while_a_kernel_does():
    big = torch.randn(700, 700)
    x = torch.ones(3)
    for _ in range(3):
        with lazyviz.lazy() as graph:
            y = ((big @ big) @ big) @ big
            z = x + y.sum()
        graph.evaluate()
    with lazyviz.lazy() as graph:
        y = ((big @ big) @ big) @ big
        z = x + y.sum()
    counted, stop = [], threading.Event()

    def count():
        while not stop.wait(0.0005):
            counted.append(1)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        before = len(counted)
        graph.evaluate()
        assert len(counted) > before
    finally:
        stop.set()
        thread.join()
    assert z.shape == (3,)


@pytest.mark.parametrize(
    ("name", "overload", "arguments", "results", "why"),
    [
        ("aten::no_such_op", "", (), (), "does not have"),
        ("aten::add", "Tensor", ((0, 1, 0),), (), "an argument is missing"),
        ("aten::relu", "", ((0, 0, INDEX),), (), "a tensor that is a constant"),
        ("aten::relu", "", ((0, 1, 0), ("more", 0, 1)), (), "does not have"),
        ("aten::relu", "", ((0, 1, 0), (1, 0, 1)), (), "more arguments"),
        ("aten::cat", "", ((0, 2, (0, NOWHERE)),), (), "None in a list"),
        ("aten::sum", "dim_IntList", ((0, 1, 0), (1, 2, (0,))), (), "tensors in a list of others"),
        ("aten::transpose", "int", ((0, 1, 0), (1, 1, 0), (2, 0, 1)), (), "in place of something else"),
        ("aten::transpose", "int", ((0, 1, 0), (1, 0, "x"), (2, 0, 1)), (), "Expected a value of type 'int'"),
        ("aten::relu", "", ((0, 1, 0),), ((1, 0, -1, -1),), "a result that is not there"),
        ("aten::item", "", ((0, 1, 0),), ((0, 0, -1, -1),), "a result that is no tensor"),
    ],
)
def test_what_is_not_represented_is_refused(name, overload, arguments, results, why):
    module = native_codegen._module
    node = (name, overload, 1, NOWHERE, arguments, results, ())
    with pytest.raises(module.Refused, match=why):
        module.Program(1, (0,), [node], None, None)


def test_what_is_refused_runs_in_python(monkeypatch):
    def refused(*described):
        raise native_codegen._module.Refused("not this one")

    def run():
        x = torch.ones(3)
        with lazyviz.lazy() as graph:
            y = (x + 1).exp().log().neg()
        return graph.evaluate().cache_hit, y.tolist()

    expected = run()[1]
    monkeypatch.setattr(native_codegen, "_argument", refused)
    assert run() == (True, expected)
    assert kinds() == {"function"}


def test_what_becomes_of_pending_tensors_is_the_same_as_in_python():
    class Marked(nn.Parameter):
        pass

    def step():
        with lazyviz.lazy() as graph:
            kept = nn.Parameter(torch.ones(3) * 2)
            marked = Marked(torch.ones(3) * 3)
            result = (kept * 2).exp()
            result.note = "mine"
            turned = torch.ones(2, dtype=torch.complex64).mul(2j).conj()
            gone = kept + 1
            gone.sum()
        del gone
        return graph, [kept, marked, result, turned]

    left = []
    for compiled in (PYTHON, COMPILED):
        native_codegen.use(compiled)
        replays.clear()
        for run in range(3):
            graph, tensors = step()
            assert graph.evaluate().cache_hit == bool(run)
        left.append([(type(tensor), dict(tensor.__dict__), tensor.is_conj()) for tensor in tensors])
        values = [value for node in graph.nodes for value in node.outputs]
        memories = [value.memory for value in values if value.memory is not None]
        there = {memory.storage().data_ptr() for memory in memories}
        assert there == {tensor.untyped_storage().data_ptr() for tensor in tensors}
        del tensors, graph, values
        gc.collect()
        assert [memory.storage() for memory in memories] == [None] * len(memories)
    assert left[0] == left[1]
    assert left[0][2][1] == {"note": "mine"}


def level():
    """What decides where an op begins on this thread."""
    return (
        torch._C._dispatch_tls_local_include_set().raw_repr(),
        torch._C._dispatch_tls_local_exclude_set().raw_repr(),
        torch._C._is_torch_function_enabled(),
        torch._C._is_torch_function_all_disabled(),
        len(lazyviz.torch_internals.private_api.dispatch_modes()),
    )


@pytest.mark.parametrize("around", ["nothing", "modes", "functions disabled", "inference", "below autograd"])
def test_the_level_of_kernels_is_the_same_as_in_python(around):
    class Mode(lazyviz.torch_internals.private_api.TorchDispatchMode):
        pass

    with contextlib.ExitStack() as stack:
        if around == "modes":
            stack.enter_context(Mode())
            stack.enter_context(lazyviz.torch_internals.private_api.FakeTensorMode())
            stack.enter_context(torch.device("meta"))
        if around == "functions disabled":
            stack.enter_context(torch._C.DisableTorchFunctionSubclass())
        if around == "inference":
            stack.enter_context(torch.inference_mode())
        if around == "below autograd":
            stack.enter_context(torch._C._AutoDispatchBelowAutograd())
        before, modes = level(), lazyviz.torch_internals.private_api.dispatch_modes()
        found = []
        for compiled in (PYTHON, COMPILED):
            native_codegen.use(compiled)
            with dispatch_level.kernels_only():
                found.append(level())
                with dispatch_level.kernels_only():
                    found.append(level())
            assert level() == before and lazyviz.torch_internals.private_api.dispatch_modes() == modes
            with pytest.raises(ZeroDivisionError), dispatch_level.kernels_only():
                _ = 1 // 0
            assert level() == before
    assert len(set(found)) == 1
