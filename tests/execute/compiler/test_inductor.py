"""Whole recorded steps, compiled by Inductor: eager's numbers within rounding, compiled once."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import threading
import time
import weakref

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.execute import backend_registry
from lazyviz.execute.backend_protocol import Refused
from lazyviz.execute.compiler import inductor_backend as inductor_module
from lazyviz.execute.compiler import numerical_verification
from lazyviz.execute.compiler.convolution_layouts import channels_last, row_major
from lazyviz.execute.compiler.fx_lowering import lower
from lazyviz.execute.compiler.inductor_backend import InductorBackend
from lazyviz.execute.compiler.single_segment_runs import cached_segments
from lazyviz.testing import check_backend
from lazyviz.torch_internals.dynamo import Compiled

from ...plan.profiler import allocated_by
from ..compiled_training import reports_of_training_as_eager_does

pytestmark = pytest.mark.slow


@pytest.fixture
def inductor():
    """A backend of its own, with nothing compiled yet."""
    backend = InductorBackend()
    lazyviz.register_backend("inductor", backend)
    yield backend
    del backend_registry._backends["inductor"]


def report_of_draws_as_eager_does(program, **how):
    """Of ``program``, run once with the backend: its tensors, and the generator's state, are eager's."""
    torch.manual_seed(3)
    expected = program()
    state = torch.get_rng_state()
    torch.manual_seed(3)
    with lazyviz.lazy(backend="inductor") as graph:
        results = program()
    report = graph.evaluate(**how)
    assert torch.equal(torch.get_rng_state(), state)
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.stride() == theirs.stride()
    return report


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1, bias=False)  # before a norm its gradient is rounding alone
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.25)
        self.out = nn.Linear(4 * 16, 3)

    def forward(self, x):
        return self.out(self.drop(torch.relu(self.norm(self.conv(x)))).flatten(1))


@pytest.mark.slow
def test_training_is_eagers_and_is_compiled_for_the_first_and_for_all_later_steps(inductor):
    reports = reports_of_training_as_eager_does("inductor", Net, (5, 1, 4, 4))
    assert "first program" in reports[0].cache_miss_reason
    assert "aten" in reports[1].cache_miss_reason and "compiled_training.py" in reports[1].cache_miss_reason
    assert reports[2].cache_miss_reason is None


def test_a_new_shape_is_a_miss_that_names_the_op_and_both_shapes(inductor):
    def run(rows):
        x = torch.ones(rows, 3)
        with lazyviz.lazy(backend="inductor") as graph:
            y = (x * 2).exp()
        report = graph.evaluate()
        assert torch.equal(y, (x * 2).exp())
        return report

    assert not run(4).cache_hit
    assert run(4).cache_hit
    miss = run(5)
    assert "mul" in miss.cache_miss_reason
    assert "[5, 3] float32 cpu, was [4, 3] float32 cpu" in miss.cache_miss_reason
    assert run(2).cache_hit and run(90).cache_hit  # what was compiled for the second size is for any
    alone = run(1)
    assert not alone.cache_hit and "[1, 3] float32 cpu" in alone.cache_miss_reason
    assert run(1).cache_hit and run(4).cache_hit


def test_another_batch_of_a_whole_training_step_needs_no_new_code(inductor):
    torch.manual_seed(0)
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, twin)]

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).relu(), y) + (x.view(-1) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss

    hits = []
    for batch in (4, 6, 8, 5, 2):
        x, y = torch.randn(batch, 3), torch.randint(0, 2, (batch,))
        expected = step(twin, optimizers[1], x, y)
        with lazyviz.lazy(backend="inductor") as graph:
            loss = step(model, optimizers[0], x, y)
        report = graph.evaluate(verify=True)
        assert report.share == 1.0 and not report.fallbacks
        hits.append(report.cache_hit)
        torch.testing.assert_close(loss, expected)
        for ours, theirs in zip(model.parameters(), twin.parameters()):
            torch.testing.assert_close(ours, theirs)
            torch.testing.assert_close(ours.grad, theirs.grad)
    assert hits == [False, False, True, True, True]


def test_gradients_of_interpolations_are_compiled_for_all_batches(inductor):
    # Each operator's shapes are in tests/torch_internals/test_private_apis.py.
    modes = {"linear": torch.contiguous_format, "bilinear": torch.channels_last}

    def step(inputs):
        inputs = [each.detach().clone().requires_grad_() for each in inputs]
        results = [nn.functional.interpolate(x, scale_factor=2, mode=mode) for mode, x in zip(modes, inputs)]
        return torch.autograd.grad([each.square().sum() for each in results], inputs)

    hits = []
    for batch in (4, 6, 5, 9):
        shapes = (batch, 3, 4), (batch, 3, 4, 4)
        inputs = [
            torch.randn(shape).contiguous(memory_format=layout)
            for shape, layout in zip(shapes, modes.values())
        ]
        expected = step(inputs)
        with lazyviz.lazy(backend="inductor") as graph:
            gradients = step(inputs)
        report = graph.evaluate()
        assert report.share == 1.0 and not report.fallbacks
        hits.append(report.cache_hit)
        for mine, theirs in zip(gradients, expected):
            torch.testing.assert_close(mine, theirs)
            assert mine.stride() == theirs.stride()
    assert hits == [False, False, True, True]


def test_sizes_that_follow_no_product_of_the_batch_are_recompiled_and_never_wrong(inductor):
    def run(size):
        x = torch.arange(float(size))
        with lazyviz.lazy(backend="inductor") as graph:
            pairs = (x[:, None] * x[None, :]).view(size * size)[: 2**size % 7 + 1]
        hit = graph.evaluate().cache_hit
        assert torch.equal(pairs, torch.outer(x, x).view(-1)[: 2**size % 7 + 1])
        return hit

    # The third is not what the first two let one guess.
    assert [run(size) for size in (3, 4, 6)] == [False, False, False]


def test_a_number_that_changes_from_step_to_step_is_compiled_for_once(inductor):
    x, whole = torch.randn(4), torch.arange(4)

    def run(step):
        with lazyviz.lazy(backend="inductor") as graph:
            y = x * step + 0.9**step
            z = whole * step - 3
            odd = torch.where(x > step % 2, x, step)
            filled = torch.full((2,), step)
        report = graph.evaluate(verify=True)
        assert report.share == 1.0
        torch.testing.assert_close(y, x * step + 0.9**step)
        assert torch.equal(z, whole * step - 3) and z.dtype == torch.int64
        torch.testing.assert_close(odd, torch.where(x > step % 2, x, step))
        assert filled.tolist() == [step, step]
        return report

    reports = [run(step) for step in (0, 1, 2, 3, 2**40, -7)]
    assert [report.cache_hit for report in reports] == [False, False, True, True, True, True]
    assert "a number that was compiled as a constant has changed: 1, was 0" in reports[1].cache_miss_reason


def test_views_of_one_memory_and_writes_to_outside_memory_stay_what_they_are(inductor):
    base, other = torch.arange(6.0), torch.arange(6.0)
    with lazyviz.lazy(backend="inductor") as graph:
        view = base.view(2, 3)
        made = (view + 1).t()
        part = made[1]
        part.mul_(10)
        base.add_(1)
    assert graph.evaluate().share == 1.0
    eager = (other.view(2, 3) + 1).t()
    eager[1].mul_(10)
    other.add_(1)
    assert torch.equal(made, eager) and made.stride() == eager.stride()
    assert torch.equal(base, other) and torch.equal(view, other.view(2, 3))
    part.zero_()
    assert made[1].eq(0).all()
    view.zero_()
    assert base.eq(0).all()


def test_what_cannot_be_compiled_runs_op_by_op_and_the_report_says_why(inductor):
    x = torch.arange(12.0)
    with lazyviz.lazy(backend="inductor") as graph:
        windows = (x + 1).as_strided((3, 4), (2, 1))
        y = windows.sum(1)
    report = graph.evaluate()
    assert torch.equal(y, (x + 1).as_strided((3, 4), (2, 1)).sum(1))
    assert report.share < 1
    assert any("as_strided" in reason and "test_inductor.py" in reason for reason in report.fallbacks)


def test_code_met_again_hands_out_each_memory_whichever_views_are_left(inductor):
    x = torch.arange(4.0)

    def run(keep):
        with lazyviz.lazy(backend="inductor") as graph:
            first = x + 1
            second = x * 10
            view = first.detach()  # does not keep the tensor that it is a view of
            kept = keep(first, second, view)
            del first, second, view
        return kept, graph.evaluate()

    (first, second), _ = run(lambda first, second, view: (first, second))
    assert first.tolist() == [1, 2, 3, 4] and second.tolist() == [0, 10, 20, 30]
    (view, second), report = run(lambda first, second, view: (view, second))
    assert report.cache_hit
    assert view.tolist() == [1, 2, 3, 4] and second.tolist() == [0, 10, 20, 30]


def test_shapes_changed_in_place_and_writes_that_no_schema_names_run_by_themselves(inductor):
    x = torch.arange(9.0).view(3, 3)
    batch, mean, variance = torch.randn(4, 3), torch.zeros(3), torch.ones(3)
    with lazyviz.lazy(backend="inductor") as graph:
        y = x + 1
        y.t_()
        z = y * 2
        statistics = torch.batch_norm_update_stats(batch, mean, variance, 0.5)
    report = graph.evaluate()
    assert torch.equal(y, (x + 1).t()) and torch.equal(z, 2 * (x + 1).t())
    torch.testing.assert_close(mean, 0.5 * batch.mean(0))
    torch.testing.assert_close(statistics[0], batch.mean(0))
    assert any("in place" in reason for reason in report.fallbacks)
    assert any("batch_norm_update_stats" in reason for reason in report.fallbacks)


def test_memory_that_compiled_code_takes_on_a_cpu_is_not_said_to_be_measured(inductor):
    before = lazyviz.metrics()["compiles"]
    x = torch.ones(8)
    with lazyviz.lazy(backend="inductor") as graph:
        y = (x + 1).exp()
    report = graph.evaluate()
    assert report.peak_bytes is None and not report.timeline
    assert lazyviz.metrics()["compiles"] == before + 1
    assert y.shape == (8,)


def test_metrics_tell_hits_and_misses_and_what_was_new(inductor):
    before = lazyviz.metrics()

    def run(rows):
        x = torch.ones(rows)
        with lazyviz.lazy(backend="inductor") as graph:
            keep = (x + 1).exp()
        graph.evaluate()
        return keep

    for rows in (3, 3, 3, 5, 7):
        run(rows)
    now = lazyviz.metrics()
    assert now["compiles"] - before["compiles"] == 2
    assert now["compiled segments reused"] - before["compiled segments reused"] == 3
    assert now["compiled programs"]["inductor"] == 2
    assert "first program" in now["compile reasons"][-2]
    for said in (now["compile reasons"][-1], lazyviz.why()):
        assert "[5] float32 cpu, was [3] float32 cpu" in said and "test_inductor.py" in said
    assert now["compile"]["count"] - before.get("compile", {"count": 0})["count"] == 2


def test_what_a_notebook_keeps_and_what_changes_from_step_to_step_is_no_new_program(inductor):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    x = torch.randn(5, 3)
    missed = []
    for step, keeps in enumerate(["nothing", "nothing", "nothing", "loss", "nothing", "all", "loss", "all"]):
        if step % 3 == 1:
            torch.manual_seed(step)
        with lazyviz.lazy(backend="inductor") as graph:
            optimizer.zero_grad()
            out = model(x)
            loss = (out.square().mean() + out.abs().sum()) * (step + 1)
            loss.backward()
            optimizer.step()
            schedule.step()
            values = {"loss": loss, "out": out} if keeps == "all" else {"loss": loss}
            if keeps == "nothing":
                values.clear()
            del loss, out
        report = graph.evaluate(verify=True)
        assert report.share == 1.0
        missed.append(report.cache_miss_reason)
        assert all(type(each) is torch.Tensor for each in values.values())
    # The first step makes Adam's state, the third is the first with another counter; a loss may always be
    # asked for, and other results cost one compilation.
    assert [reason is None for reason in missed] == [False, False, False, True, True, False, True, True]
    assert "was compiled as a constant" in missed[2]
    assert "addmm" in missed[5] and "its result is needed later, and was not before" in missed[5]


def test_batches_cut_from_one_tensor_are_one_program(inductor):
    data, total = torch.randn(20, 3), torch.zeros(3)
    hits = []
    for start in (0, 4, 9, 12):
        x = data[start : start + 4]
        with lazyviz.lazy(backend="inductor") as graph:
            total += (x[1:] * 2).sum(0)
            view = x[2]
        hits.append(graph.evaluate(verify=True).cache_hit)
        assert view.data_ptr() == data[start + 2].data_ptr()
    torch.testing.assert_close(total, sum((data[s + 1 : s + 4] * 2).sum(0) for s in (0, 4, 9, 12)))
    assert hits == [False, True, True, True]


def test_parts_cut_in_the_block_itself_are_one_program_too(inductor):
    data, table = torch.randn(20, 3), torch.zeros(20, 3)
    hits = []
    for start in (0, 4, 8, 12):
        with lazyviz.lazy(backend="inductor") as graph:
            x = data[start : start + 4]
            table[start : start + 4].add_(x * 2)
            table[0].mul_(3)
            row = data[start]
        report = graph.evaluate(verify=True)
        hits.append(report.cache_hit)
        assert report.share == 1.0 and not report.fallbacks
        assert row.data_ptr() == data[start].data_ptr() == x.data_ptr()
    expected = torch.zeros(20, 3)
    for start in (0, 4, 8, 12):
        expected[start : start + 4] += data[start : start + 4] * 2
        expected[0] *= 3
    torch.testing.assert_close(table, expected)
    # Where a part is that is written is an argument like any other: once it has changed, it is followed.
    assert hits == [False, False, True, True]

    hits.clear()
    for start in (0, 4, 8, 12):
        with lazyviz.lazy(backend="inductor") as graph:
            y = (data[start : start + 4] * 2)[start // 4]  # of a result: another part is another argument
            z = data[start].exp()
        hits.append(graph.evaluate().cache_hit)
        torch.testing.assert_close(y, data[start + start // 4] * 2)
        torch.testing.assert_close(z, data[start].exp())
    assert hits == [False, False, False, True]  # 1 is no size to follow

    hits.clear()
    for start in (0, 4, 8, 12):
        with lazyviz.lazy(backend="inductor") as graph:
            y = data[start : start + 4].exp() + data[start + 1]
        hits.append(graph.evaluate().cache_hit)
        torch.testing.assert_close(y, data[start : start + 4].exp() + data[start + 1])
    assert hits == [False, True, True, True]


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_a_program_that_is_another_each_time_is_not_compiled_for_ever(inductor):
    x = torch.randn(12)
    for at in range(10):
        with lazyviz.lazy(backend="inductor") as graph:
            y = x * complex(at, 1)  # which is no input of compiled code
        report = graph.evaluate()
        torch.testing.assert_close(y, x * complex(at, 1))
    assert report.share == 0 and "compiled 8 times already, and differs again" in report.fallbacks[0]


def test_a_seed_set_in_between_is_heard_by_code_that_was_met_before(inductor):
    x = torch.ones(64)

    def draws(seeded):
        first = torch.nn.functional.dropout(x) + torch.rand(64)
        if seeded:
            torch.manual_seed(7)
        return first, torch.nn.functional.dropout(x * 2) + torch.rand(64)

    for seeded in (False, False, True, False, True):
        report_of_draws_as_eager_does(functools.partial(draws, seeded))


def test_code_that_is_kept_keeps_no_recording(inductor):
    x = torch.ones(3)
    refs = []
    for _ in range(3):
        with lazyviz.lazy(backend="inductor") as graph:
            y = ((x + 1) * 2).exp().log()
        assert graph.evaluate().share == 1.0
        refs.append(weakref.ref(graph.nodes[1].outputs[0]))
        del graph
    del y
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3


def test_where_inputs_begin_in_memory_that_they_share_is_structure(inductor):
    data = torch.arange(12.0)
    for start in (2, 3, 4):
        one, other = data[:6], data[start : start + 6]
        expected = data.clone()
        expected[:6].mul_(2)
        result = expected[start : start + 6] + 1
        with lazyviz.lazy(backend="inductor") as graph:
            one.mul_(2)
            y = other + 1
        graph.evaluate(verify=True)
        assert torch.equal(y, result) and torch.equal(data, expected)


def test_a_reduction_of_an_empty_tensor_falls_back_to_eager_kernels(inductor):
    nothing = torch.ones(0, 3)
    with lazyviz.lazy(backend="inductor") as graph:
        mean, total = (nothing * 2).mean(0), (nothing * 2).sum()
    report = graph.evaluate()
    assert mean.isnan().all() and total == 0
    assert any("an empty tensor" in reason for reason in report.fallbacks)


def wrong(code):
    return lambda *inputs: [tensor + 1 for tensor in code(*inputs)]


def failing(code):
    def run(*inputs):
        code(*inputs)
        raise RuntimeError("no such kernel")

    return run


@pytest.mark.parametrize(
    ("spoil", "verify", "says"), [(wrong, True, "was wrong"), (failing, False, "no such kernel")]
)
def test_wrong_or_failing_code_gives_way_to_the_recorded_ops(inductor, monkeypatch, spoil, verify, says):
    made = inductor._code
    monkeypatch.setattr(inductor, "_code", lambda *args: Compiled(spoil(made(*args).code)))
    weight = torch.ones(4)
    for _ in range(2):  # what was found wrong is not tried again
        with lazyviz.lazy(backend="inductor") as graph:
            y = weight * 3
            weight.add_(y)
        report = graph.evaluate(verify=verify)
        assert report.share == 0
        assert any(says in reason for reason in report.fallbacks)
    assert weight.tolist() == [16.0] * 4 and y.tolist() == [12.0] * 4


def test_checking_allows_for_what_the_program_itself_makes_of_rounding(inductor):
    torch.manual_seed(0)
    logits, shift = torch.randn(64, 9), nn.Parameter(torch.zeros(1))
    labels = torch.randint(0, 9, (64,))
    optimizer = torch.optim.Adam([shift], lr=1.0)
    with lazyviz.lazy(backend="inductor") as graph:
        loss = nn.functional.cross_entropy(logits + shift, labels)
        loss.backward()  # a shift changes nothing: the gradient is rounding, which Adam makes a step of
        optimizer.step()
    report = graph.evaluate(verify=True)
    assert report.share == 1.0 and not report.fallbacks
    assert shift.grad.abs() < 1e-6 < shift.abs()

    meta = next(value for value in graph.nodes[0].inputs)
    exact, off = [torch.ones(3)], [torch.tensor([1.0, 1.0, 1.01])]
    assert numerical_verification.first_mismatch([meta], off, exact, {}) is not None
    assert numerical_verification.first_mismatch([meta], off, exact, {}, [torch.full((3,), 0.99)]) is None
    assert (
        numerical_verification.first_mismatch([meta], off, exact, {}, [torch.full((3,), 0.9999)]) is not None
    )


def test_inputs_are_nudged_by_one_rounding_where_they_share_memory_once(inductor):
    whole = torch.rand(6) + 1
    with lazyviz.lazy() as graph:
        y = whole[:3] + whole[3:] + whole.view(2, 3).sum()
    base, *_ = graph.nodes[0].inputs
    one, other = numerical_verification.Copies([base, base], [whole, whole[2:]], nudge=1e-9).tensors
    assert torch.equal(one[2:], other) and other.data_ptr() == one[2:].data_ptr()
    assert 0 < (one - whole).abs().max() <= 2 * torch.finfo(torch.float32).eps * 2
    assert y.shape == (3,)


def test_where_random_numbers_are_not_eagers_checking_gives_eagers_and_the_generator_goes_on_from_them(
    monkeypatch,
):
    monkeypatch.setitem(backend_registry._backends, "inductor", InductorBackend(exact_random=False))
    report = report_of_draws_as_eager_does(lambda: (torch.rand(3), torch.randn(5, 4) + 1), verify=True)
    assert report.share == 0 and "the eager results are used" in report.fallbacks[0]


@pytest.mark.parametrize("around", [lambda: torch.autocast("cpu"), lambda: torch.device("meta")])
def test_what_is_around_an_evaluation_is_no_part_of_its_code(inductor, around):
    torch.manual_seed(0)
    x, weight, mean = torch.randn(8, 64), torch.randn(64, 64), torch.zeros(8, 64)

    def run(scale, around):
        with lazyviz.lazy(backend="inductor") as graph:
            y = (x @ weight).lerp(mean, scale).softmax(1)
        with around():
            report = graph.evaluate()
        assert report.share == 1.0 and not report.fallbacks and y.dtype == torch.float32
        torch.testing.assert_close(y, (x @ weight).lerp(mean, scale).softmax(1))

    for scale in (0.1, 0.2):  # the second makes it an input
        run(scale, around)
    run(0.3, contextlib.nullcontext)  # by the same code


def test_cancelling_a_compilation_loses_nothing(inductor, monkeypatch):
    def slow(*args):
        for _ in range(400):
            time.sleep(0.02)
        raise AssertionError("was not stopped")

    code = inductor._code
    monkeypatch.setattr(inductor, "_code", slow)
    x = torch.ones(3)
    with lazyviz.lazy(backend="inductor") as graph:
        y = x + 1
    cancel = threading.Event()
    threading.Timer(0.3, cancel.set).start()
    start = time.perf_counter()
    with pytest.raises(lazyviz.Interrupted, match="while 1 ops were being compiled"):
        graph.evaluate(cancel=cancel)
    assert time.perf_counter() - start < 5
    assert graph.pending == 1
    monkeypatch.setattr(inductor, "_code", code)
    graph.evaluate()
    assert y.tolist() == [2, 2, 2]


def test_progress_says_what_is_being_compiled_and_for_how_long(inductor, monkeypatch):
    code = inductor._code
    monkeypatch.setattr(inductor, "_code", lambda *args: time.sleep(1.4) or code(*args))
    x = torch.ones(3)
    with lazyviz.lazy(backend="inductor") as graph:
        y = x + 1
    told = []
    graph.evaluate(progress=told.append)
    compiling = [each for each in told if each.compiling]
    assert "compiling segment 1 of 1 (1 ops), " in compiling[0].label and compiling[0].done == 0
    assert len(compiling) >= 2
    assert not told[-1].compiling and told[-1].done == 1 and y.tolist() == [2, 2, 2]


def test_the_cache_is_bounded_and_forgets_what_was_used_least_recently(inductor):
    inductor.programs._known.limit = 2
    code = inductor._code
    compiled = []
    inductor._code = lambda *args: compiled.append(1) or code(*args)

    def run(times):
        x = torch.ones(2)
        with lazyviz.lazy(backend="inductor") as graph:
            for _ in range(times):
                x = x + 1
        graph.evaluate()
        return x

    for times in (2, 3, 2, 4, 2, 3):
        run(times)
    assert len(inductor.programs) == 2
    assert len(compiled) == 4  # 2, 3, 4, and 3 once more


def test_if_compiled_code_refuses_its_inputs_the_recorded_ops_run(inductor, monkeypatch):
    x = torch.ones(4)

    def run():
        with lazyviz.lazy(backend="inductor") as graph:
            keep = [x]
            for _ in range(4):
                keep.append(keep[-1] + 1)
        return keep[-1], graph.evaluate()

    assert run()[1].share == 1.0 and run()[1].cache_hit
    made = backend_registry.find_backend("inductor").programs
    variant = next(iter(made._known.values())).variants[0]

    def refuses(*inputs):
        raise Refused("an index is out of range")

    variant.compiled = refuses
    y, report = run()
    assert y.tolist() == [5.0] * 4
    assert report.share == 0 and "out of range" in report.fallbacks[0]


@pytest.mark.parametrize(
    "program", ["views and writes in place", "numbers of all kinds", "partly in inference mode"]
)
def test_programs_for_any_backend(inductor, program):
    assert check_backend("inductor", program) > (
        0.9 if "numbers" in program else 0.99
    )  # inf * 0 runs by itself


def test_what_a_structure_leaves_open_is_heard_each_time_it_comes(inductor):
    data = torch.randn(6, 4)

    def step(at, number):
        part = data[at]
        scaled = torch.add(part * part, part, alpha=number)
        return part, scaled, 1 / (scaled - scaled) * number

    reports = []
    for at, number in [
        (0, 0.5),
        (0, 0.5),
        (0, 0.5),
        (2, 0.5),
        (2, -0.0),
        (2, 0.0),
        (2, 1),
        (2, 1.0),
        (0, 0.5),
    ]:
        expected = step(at, number)
        with lazyviz.lazy(backend="inductor") as graph:
            part, *results = step(at, number)
        reports.append(graph.evaluate())
        assert part.data_ptr() == data[at].data_ptr()
        for ours, theirs in zip(results, expected[1:]):
            torch.testing.assert_close(ours, theirs, equal_nan=True)
            assert torch.equal(ours.signbit(), theirs.signbit())
    assert [report.share for report in reports] == [1.0] * len(reports)
    assert reports[1].cache_hit and reports[2].cache_hit and reports[-1].cache_hit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_averages_whose_weight_varies_are_compiled_for_every_weight(inductor, dtype):
    torch.manual_seed(0)
    new = torch.randn(3, 5).to(dtype)
    average, twin = (torch.ones(3, 5, dtype=dtype) for _ in range(2))
    reports = []
    for weight in (0.25, 0.375, 0.9, 0.999, 0.5):  # ATen has another formula from a half on
        expected = twin.lerp(new, weight)
        twin.lerp_(new * 2, weight)
        with lazyviz.lazy(backend="inductor") as graph:
            result = average.lerp(new, weight)
            average.lerp_(new * 2, weight)
            result * 1
        reports.append(graph.evaluate(verify=True))
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(average, twin)
    assert [report.fallbacks for report in reports] == [()] * 5
    assert [report.cache_hit for report in reports] == [False, False, True, True, True]


def test_a_program_in_bfloat16_is_checked_by_what_bfloat16_can_tell(inductor, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))

    def check():
        model.zero_grad()
        with lazyviz.lazy(backend="inductor") as graph:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
        return graph.evaluate(verify=True)

    report = check()
    assert report.share == 1.0 and not report.fallbacks
    lazyviz.session.lazy_graph.reset()
    monkeypatch.setattr(inductor, "programs", type(inductor.programs)())
    cached_segments._known.clear()
    made = inductor._code
    wrong = lambda code: lambda *inputs: [each * 1.1 for each in code(*inputs)]  # noqa: E731
    monkeypatch.setattr(inductor, "_code", lambda *args: Compiled(wrong(made(*args).code)))
    report = check()
    assert "was wrong" in report.fallbacks[0]


def test_a_loss_in_memory_of_the_size_of_all_its_elements_is_compiled(inductor):
    model, x, y = nn.Linear(3, 2), torch.randn(4, 3), torch.randn(4, 2)
    for _ in range(2):
        model.zero_grad()
        expected = nn.functional.mse_loss(model(x), y)
        with lazyviz.lazy(backend="inductor") as graph:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
        report = graph.evaluate(verify=True)
        assert report.share == 1.0 and not report.fallbacks
        torch.testing.assert_close(loss, expected)
        assert loss.untyped_storage().nbytes() == expected.untyped_storage().nbytes() == 4 * 8
    assert report.cache_hit


@pytest.mark.parametrize("drops", [False, True])
def test_convolutions_keep_one_layout_and_return_the_recorded_one(inductor, drops, monkeypatch):
    torch.manual_seed(0)
    made, layouts = inductor._compiled, []
    monkeypatch.setattr(inductor, "_compiled", lambda *args: layouts.append(args[-1]) or made(*args))
    drop = nn.Sequential(nn.Dropout(0.5), nn.Dropout2d(0.5)) if drops else nn.Identity()
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), drop,
        nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 3),
    )  # fmt: skip
    twin = copy.deepcopy(model)
    x = torch.randn(4, 3, 8, 8, requires_grad=True)
    other = x.detach().clone().requires_grad_()

    def step(model, x):
        model.zero_grad()
        x.grad = None
        hidden = model[:4](x)
        if drops:
            hidden = hidden * torch.rand_like(hidden) + torch.empty_like(hidden).normal_()
        halves = hidden.view(4, 2, 4, 8, 8)  # of the layout that was recorded
        loss = model[4:](hidden).square().mean() + halves[:, 1].mean()
        loss.backward()
        return hidden, loss

    for seed in range(2):
        torch.manual_seed(seed)
        expected = step(twin, other)
        torch.manual_seed(seed)
        with lazyviz.lazy(backend="inductor") as graph:
            results = step(model, x)
        report = graph.evaluate(verify=True)
        assert report.share == 1.0 and not report.fallbacks
        for ours, theirs in zip((*results, x.grad), (*expected, other.grad)):
            torch.testing.assert_close(ours, theirs)
            assert ours.stride() == theirs.stride()
        for ours, theirs in zip(model.parameters(), twin.parameters()):
            torch.testing.assert_close(ours.grad, theirs.grad)
            assert ours.grad.stride() == theirs.grad.stride()
    assert report.cache_hit
    assert layouts == [True]  # random numbers are drawn in the recorded layout all the same


def test_convolutions_with_more_weights_than_images_keep_the_recorded_layout(inductor, monkeypatch):
    torch.manual_seed(0)
    made, calls = inductor._compiled, []
    monkeypatch.setattr(inductor, "_compiled", lambda *args: calls.append(args[1:]) or made(*args))
    model = nn.Sequential(nn.Conv2d(8, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU())
    twin = copy.deepcopy(model)
    x = torch.randn(1, 8, 6, 6)

    def step(model):
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    expected = step(twin)
    with lazyviz.lazy(backend="inductor") as graph:
        loss = step(model)
    report = graph.evaluate(verify=True)
    assert report.share == 1.0 and not report.fallbacks
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad)
        assert ours.grad.stride() == theirs.grad.stride()
    ((options, channels_last),) = calls
    assert options["layout_optimization"] is False and not channels_last


def test_gradients_of_weights_are_laid_out_once_before_an_optimizer_reads_them(inductor, monkeypatch):
    torch.manual_seed(0)
    laid_out = []

    def lowered(nodes, *args, **kwargs):
        module = lower(nodes, *args, **kwargs)
        targets = [node.target for node in module.graph.nodes]
        laid_out.append((targets.count(row_major), targets.count(channels_last)))
        return module

    monkeypatch.setattr(inductor_module, "lower", lowered)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(),
        nn.Conv2d(8, 8, 1), nn.ReLU(),  # one place: either layout
        nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(),  # one channel
        nn.Conv2d(8, 8, 3, groups=2), nn.ReLU(),
        nn.Conv2d(8, 4, 2).to(memory_format=torch.channels_last), nn.Flatten(),
    )  # fmt: skip
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (model, twin)]

    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    for batch in (4, 4, 6, 8):
        x = torch.randn(batch, 3, 8, 8)
        expected = step(twin, optimizers[1], x)
        with lazyviz.lazy(backend="inductor") as graph:
            loss = step(model, optimizers[0], x)
        report = graph.evaluate()
        assert report.share == 1.0 and not report.fallbacks
        torch.testing.assert_close(loss, expected)
        for ours, theirs in zip(model.parameters(), twin.parameters()):
            torch.testing.assert_close(ours, theirs)
            torch.testing.assert_close(ours.grad, theirs.grad)
            assert ours.grad.stride() == theirs.grad.stride() and ours.stride() == theirs.stride()
    assert report.cache_hit
    assert set(laid_out) == {(2, 2)}


def test_copies_of_weights_for_the_backward_pass_are_not_held_from_the_forward_pass_on(inductor):
    torch.manual_seed(0)
    layers = [nn.Conv2d(64, 64, 3, padding=1, bias=False) for _ in range(5)]
    model = nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())])
    x = torch.randn(2, 64, 20, 20)

    def step():
        model.zero_grad()
        model(x).square().mean().backward()

    def lazily():
        with lazyviz.lazy(backend="inductor") as graph:
            step()
        graph.evaluate()

    step()
    eager, _ = allocated_by(step)
    for _ in range(2):
        lazily()
    compiled, _ = allocated_by(lazily)
    weight = layers[0].weight.nbytes
    assert weight < x.nbytes
    assert compiled < eager + 3 * weight  # one copy, and what oneDNN needs for a gradient in this layout


def test_several_draws_are_eagers_whatever_uses_them(inductor):
    """Of one shape, used in another order than drawn, by kernels that are fused or not."""

    def program(x):
        layers = [nn.Linear(4, 4) for _ in range(2)]  # each draws twice
        masks = [nn.functional.dropout(torch.ones(4, 4), 0.5) for _ in range(4)]
        noise = [torch.randn(4, 4) for _ in range(4)]
        y = layers[1](layers[0](x * masks[3] + noise[2]))
        y = y * masks[1] + noise[3] @ masks[0]
        z = (noise[0] - masks[2]).relu() * y.softmax(1) + noise[1]
        return [z, y, *(parameter for layer in layers for parameter in layer.parameters())]

    x = torch.randn(4, 4)
    report = report_of_draws_as_eager_does(functools.partial(program, x))
    assert report.share == 1.0 and not report.fallbacks


@pytest.mark.parametrize("exact", [True, False], ids=["eager's numbers", "others"])
def test_a_mask_is_drawn_before_anything_reads_it(exact, inductor, monkeypatch):
    """In forward and backward of one program, where the kernels around it are fused."""
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
    weights = [parameter for layer in layers for parameter in layer.parameters()]
    x = torch.randn(5, 1, 4, 4)

    def step():
        for weight in weights:
            weight.grad = None
        y = nn.functional.dropout(layers[1](layers[0](x)).relu(), 0.25)
        y.square().mean().backward()
        return [y.detach(), *(weight.grad for weight in weights)]

    torch.manual_seed(1)
    expected = step()
    torch.manual_seed(1)
    monkeypatch.setitem(backend_registry._backends, "inductor", InductorBackend(exact_random=exact))
    with lazyviz.lazy(backend="inductor") as graph:
        results = step()
    assert graph.evaluate().share == 1.0
    if exact:
        for result, wanted in zip(results, expected):
            torch.testing.assert_close(result, wanted)
    kept = results[0] != 0
    assert 0.2 < kept.float().mean() < 0.6  # three quarters of what is above zero
    both = kept & (expected[0] != 0)
    torch.testing.assert_close(results[0][both], expected[0][both])


def _strided_masks(x):
    """Draws into memory of other strides, of a part, twice the same, and one that nobody reads."""
    y = (x @ x.transpose(1, 2)).transpose(0, 1)
    mask = torch.empty_like(y).bernoulli_(0.5).div_(0.5)
    whole = torch.zeros(len(x), 8)
    whole[:, 2:5].normal_()
    whole[::2].bernoulli_(0.5)
    torch.empty(2, 3).bernoulli_(0.5)
    image = torch.empty(2, 3, 8, 8).bernoulli_(0.5)
    weight = torch.linspace(-1, 1, 54).view(2, 3, 3, 3)
    noise = torch.rand_like(y), torch.randn(2, 3), torch.randint(9, (4,)), torch.randperm(7)
    dropped = torch.native_dropout(y, 0.3, True)[0]
    return y * mask, mask, whole * 2, torch.nn.functional.conv2d(image, weight), *noise, dropped


def test_random_numbers_are_eagers_in_whichever_layout_and_order_compiled_code_computes(inductor):
    for count in (4, 6, 7, 7):
        report = report_of_draws_as_eager_does(functools.partial(_strided_masks, torch.randn(count, 5, 5)))
        assert report.share == 1.0 and not report.fallbacks
    assert report.cache_hit


def test_a_draw_that_needs_values_runs_by_itself_in_its_turn(inductor):
    x = torch.rand(4, 6)

    def program():
        first = torch.nn.functional.dropout(x.t() * 2)
        return first, torch.bernoulli(first.sigmoid()), torch.nn.functional.dropout(x + 1)

    report = report_of_draws_as_eager_does(program, verify=True)
    assert len(report.fallbacks) == 1
    assert "aten.bernoulli.default" in report.fallbacks[0] and "draws random numbers" in report.fallbacks[0]
