"""Signals while an op is recorded: what their handlers raise comes out, and nothing else changes.

A call of new shapes asks PyTorch's shape rules and kernels, in modes and settings of their own, and takes
errors for answers.  A handler's exception is no answer.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import signal
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import grad_mode
from torch.utils._python_dispatch import TorchDispatchMode

import lazyviz
from lazyviz.process import deferred_signals
from lazyviz.process.deferred_signals import Deferred
from lazyviz.record import native_recorder
from lazyviz.record.tape import tape
from lazyviz.session import lazy_graph
from lazyviz.torch_internals import private_api

from .support.faulty_kernels import Alarm, Calls
from .support.inject_faults import (
    PACKAGE,
    Fault,
    State,
    call_at,
    everywhere,
    inject,
    is_plain,
    points,
    sampled,
)
from .test_reentry import recorded_natively

DEEPCOPY = inspect.unwrap(torch.Tensor.__deepcopy__)
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def known_rules(x):
    return [
        F.gelu(x),
        x.softmax(-1),
        x.cumsum(0),
        x[:, 1:],
        x.view(-1),
        F.conv1d(x[None], torch.ones(1, 2, 3)),
    ]


def rules_of_pytorch(x):
    return [torch.fft.rfft(x), F.interpolate(x[None], scale_factor=2, mode="linear"), x.T.matrix_exp()[0]]


def probed_kernels(x):
    target = torch.zeros(2, dtype=torch.long)
    return [
        F.nll_loss(x.log_softmax(-1), target),
        F.adaptive_avg_pool1d(x[None], 2),
        x.index_select(0, target),
    ]


def gradients(x):
    w = torch.ones(5, 5, requires_grad=True)
    F.elu(x @ w).sum().backward()
    return [w.grad]


def contents(x):
    at = torch.arange(3)
    return [x[at[1:] - 1], at.nonzero(), x.repeat_interleave(at[1:], 0)[: int(at[-1])]]


def copies(x):
    return [copy.deepcopy(x), copy.deepcopy(nn.Parameter(x)), nn.Parameter(x) * 1]


def sparse(x):
    at = torch.tensor([[0, 1, 1], [4, 0, 2]])
    values = torch.ones(3, requires_grad=True)
    matrix = torch.sparse_coo_tensor(at, values, (2, 5), check_invariants=True)
    (torch.sparse.mm(matrix, x.T) + matrix.t().to_dense().sum()).sum().backward()
    rows = torch.sparse_csr_tensor([0, 1, 3], [4, 0, 2], x[0, :3] * 2, (2, 5), check_invariants=False)
    return [values.grad, rows @ x.T, matrix.coalesce().values(), (matrix.detach() * 2).to_dense()]


with torch.inference_mode():
    made_in_inference_mode = torch.ones(2, 5)


def inference(x):
    return [x * 2, made_in_inference_mode * 2, made_in_inference_mode[:, 1:].add(1)]


def outside_of_deepcopy(frame):
    """Not in PyTorch's own ``Tensor.__deepcopy__``, or as it enters its ``no_grad``, which a signal can leave
    in effect.
    """
    included = everywhere(frame)
    while frame.f_code.co_filename == grad_mode.__file__ and frame.f_back is not None:
        frame = frame.f_back
    return included and frame.f_code is not DEEPCOPY.__code__


CALLS = [known_rules, rules_of_pytorch, probed_kernels, gradients, contents, copies, inference, sparse]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_what_a_signal_handler_raises_while_an_op_is_recorded_comes_out(call, request):
    x = torch.arange(10.0).view(2, 5) if call is not rules_of_pytorch else torch.ones(2, 2)
    expected = [tensor.detach().clone() for tensor in call(x)]
    tape.shapes.entries.clear()
    with lazyviz.lazy():
        call(x)  # the first call of a rule imports modules, which add warnings filters
    state = State()
    weight = torch.zeros(3)

    def action():
        tape.shapes.entries.clear()
        with lazyviz.lazy() as graph:
            weight.add_(1)
            call(x)
        graph.evaluate()

    most = 20_000 if request.config.getoption("--all") else 40
    for at in sampled(points(action, where=outside_of_deepcopy), most, seed=len(call.__name__)):
        weight.zero_()
        raised = inject(action, at, Fault, where=outside_of_deepcopy, by_signal=True)
        assert raised is None or type(raised) is Fault, (raised, raised.__notes__)
        assert is_plain(), raised and raised.__notes__
        assert weight.tolist() in ([0, 0, 0], [1, 1, 1])
        lazyviz.sync()
        assert not state.differences(), raised and raised.__notes__
    with lazyviz.lazy():
        found = call(x)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt])
def test_a_step_counter_is_advanced_once_although_a_signal_comes_when_it_is_read(error, state, request):
    def handler(number, frame):
        raise error

    def action():
        with lazyviz.lazy():
            for _ in range(3):
                counter.add_(1)
                read.append(counter.item())
        for _ in range(2):
            counter.add_(1)

    counter, read = torch.zeros(()), []
    for at in sampled(points(action), 20_000 if request.config.getoption("--all") else 150):
        counter, read = torch.zeros(()), []
        raised = inject(action, at, error, by_signal=True)
        assert raised is None or type(raised) is error
        assert read == [1.0, 2.0, 3.0][: len(read)], raised and raised.__notes__
        with lazyviz.lazy():
            counter.add_(1)
            known = counter.item()
        assert counter.item() == known and known - len(read) in (1, 2, 3), raised and raised.__notes__
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_signal_during_the_first_ones_handler_leaves_the_level_of_kernels(state, request):
    """It comes when the state around the handler is put back."""

    def handler(number, frame):
        raise Fault

    weight, before = torch.zeros(3), signal.getsignal(signal.SIGUSR2)

    def action():
        signal.signal(signal.SIGUSR2, handler)
        with lazyviz.lazy() as graph:
            weight.add_(1)
            torch.rand(2)
            weight.mul_(2)
        with contextlib.suppress(Fault):
            graph.evaluate(progress=lambda fraction: signal.raise_signal(signal.SIGUSR2))

    try:
        for at in sampled(points(action), 20_000 if request.config.getoption("--all") else 100):
            weight.zero_()
            raised = inject(action, at, Fault, by_signal=True)
            signal.signal(signal.SIGUSR2, before)
            assert is_plain()
            lazyviz.sync()
            assert not state.differences(), raised and raised.__notes__
            assert weight.tolist() in ([0, 0, 0], [1, 1, 1], [2, 2, 2])
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_signals_are_deferred_again_whatever_a_handler_raises_where_that_ends(state):
    def action():
        with Deferred():
            pass

    for at in range(points(action)):
        inject(action, at, Fault, by_signal=True)
        assert not Deferred.current
        with Deferred() as arrived:
            assert Deferred.current and not arrived


def test_a_handler_that_comes_while_handlers_are_set_back_may_set_all_of_them_back(monkeypatch, state):
    set_handler = deferred_signals._signal.signal
    back = []

    def signal_and_reset(number, handler):
        set_handler(number, handler)
        if not back:
            back.append(number)
            deferred._restore()  # as `lazyviz.reset` does

    with Deferred() as deferred:
        monkeypatch.setattr(deferred_signals._signal, "signal", signal_and_reset)
    monkeypatch.undo()
    assert back and not Deferred.current


def test_gradients_are_computed_after_a_signal_in_what_a_planned_gpu_does_without_them(state, request):
    def action():
        with lazyviz.lazy(device="A100-40GB"):
            layer = nn.LSTM(2, 2).cuda()
            copy.deepcopy(layer.weight_hh_l0)

    for at in sampled(points(action), 2000 if request.config.getoption("--all") else 60):
        raised = inject(action, at, Fault, by_signal=True)
        assert torch.is_grad_enabled() and is_plain(), raised and raised.__notes__
        del raised
        lazyviz.reset()  # the generator is owed the draws that the GPU would have made


def test_an_exception_of_another_thread_before_a_rule_is_asked_is_no_answer(monkeypatch, state):
    def stop():
        raise Fault("PyThreadState_SetAsyncExc")

    x = torch.ones(3, 7)
    with lazyviz.lazy() as graph:
        monkeypatch.setattr(private_api, "quiet_shape_rules", stop)
        with pytest.raises(Fault):
            torch.fft.rfft(x)
        monkeypatch.undo()
        y = torch.fft.rfft(x)
    assert len(graph.nodes) == 1
    assert torch.equal(y, torch.fft.rfft(x))


@pytest.mark.parametrize("natively", [True, False])
def test_exceptions_of_another_thread_while_shapes_are_inferred_leave_nothing(natively, state, request):
    """Not even that PyTorch's rule fails for an op, which would be a sync point from then on."""
    x = torch.arange(12.0).reshape(3, 4)

    def record():
        tape.shapes.entries.clear()
        tape.shapes.dependent.clear()
        with lazyviz.lazy() as graph:
            torch.fft.rfft(x)
            torch.linalg.solve(torch.eye(3) * 2, x)
            torch.randn(3).add_(1)
            with contextlib.suppress(RuntimeError):
                x @ torch.ones(3, 3)
        return graph

    def interrupted(at):
        calls = Calls(at, (PACKAGE, contextlib.__file__))
        try:
            with calls.watching():
                record()
        except Alarm as error:
            return calls, error
        return calls, None

    most = 3000 if request.config.getoption("--all") else 80
    with recorded_natively(natively):
        record()
        count = interrupted(-1)[0].count
        for at in sampled(count, most, seed=natively):
            calls, raised = interrupted(at)
            lazyviz.sync()
            assert not state.differences() and torch._C._is_torch_function_enabled(), calls.place
            assert raised is None or raised.__traceback__ is not None
            del raised  # and with it frames that may have contexts to exit
            assert not state.differences() and torch._C._is_torch_function_enabled(), calls.place
            with lazyviz.lazy() as graph:
                torch.linalg.solve(torch.eye(3) * 2, x)
            assert not graph.sync_points, calls.place
            lazyviz.sync()


def test_the_self_check_finds_what_defers_signals_and_reset_ends_it(state):
    signals = Deferred()
    signals.__enter__()  # and another thread's exception has stopped its end
    assert "handler of SIGINT: deferred" in map(str, lazyviz.doctor().leftovers)
    lazyviz.reset()
    assert lazyviz.doctor().ok and not state.differences()
    signals.__enter__()
    lazy_graph.cell_boundary()
    assert lazyviz.doctor().ok and not state.differences()


def test_the_self_check_finds_keys_of_fake_tensors_and_reset_removes_them(state):
    torch._C._set_meta_in_tls_dispatch_include(True)
    assert not lazyviz.doctor().ok
    lazyviz.reset()
    assert lazyviz.doctor().ok and not state.differences()


@pytest.mark.parametrize("guard", [torch.inference_mode, private_api.with_autograd])
def test_interrupts_as_guards_of_keys_are_entered_and_left_leave_nothing(guard, state):
    def enter_and_leave():
        with guard():
            pass

    def pending():
        with lazyviz.lazy():
            return torch.ones(2) + 1

    value = pending()  # guards are watched while something is pending
    for at in range(points(enter_and_leave)):
        raised = inject(enter_and_leave, at)
        del raised  # frees a guard that was not exited, as in eager mode
        assert value.tolist() == [2, 2] and is_plain()
        lazyviz.sync()
        assert not state.differences(), at
        value = pending()


@pytest.mark.parametrize("draw", ["text", "scene", "plan"])
def test_ops_of_a_handler_wait_while_its_thread_draws_the_open_block(draw, state):
    made = []

    def program():
        made.clear()
        with lazyviz.lazy() as graph:
            x = torch.ones(3)
            for _ in range(4):
                x = (x * 2 + 1).relu()
            call_at(getattr(graph, draw), program.at, lambda: made.append(torch.ones(3) * 5))
        return x

    program.at = -1
    with lazyviz.lazy() as graph:
        (torch.ones(3) * 2 + 1).relu()
        count = points(getattr(graph, draw))
    for program.at in sampled(count, 60, seed=len(draw)):
        x = program()
        assert x.tolist() == [31, 31, 31] and made[0].tolist() == [5, 5, 5]
        lazyviz.sync()
        assert not state.differences()


@pytest.mark.skipif(native_recorder._module is None, reason="without it, nothing is called at collections")
def test_interrupts_as_the_garbage_collector_calls_lazyviz_within_an_op_leave_nothing(state):
    around = native_recorder._module.around_collection

    class Within(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            within()
            return func(*args, **(kwargs or {}))

    def collect():
        around("start", {})
        around("stop", {})

    def program():
        with lazyviz.lazy():
            value = torch.ones(2) + 1
        with Within():
            torch.zeros(())
        assert value.tolist() == [2, 2]
        lazyviz.sync()

    counts = []
    within = lambda: counts.append(points(collect))  # noqa: E731
    program()
    for at in range(max(counts)):
        within = partial(inject, collect, at)
        program()
        assert is_plain() and not state.differences(), at
