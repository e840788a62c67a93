"""Projected time on this CPU: calibration per machine, and comparison with measured time."""

import copy
import itertools
import pickle
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.plan.runtime import (
    cpu_calibration,
    cpu_convolutions,
    cpu_counted_kernels,
    cpu_timed_kernels,
)
from lazyviz.plan.runtime.bytes_and_launches import operator_class
from lazyviz.plan.runtime.cpu_counted_kernels import counted
from lazyviz.plan.runtime.cpu_op_times import (
    ALWAYS_NEW,
    ATTENTION,
    OUTER,
    POINTWISE,
    THIN,
    CpuRates,
    cache_file,
    known_rates,
    project_on_cpu,
    rate_at,
    rates_from,
)
from lazyviz.plan.runtime.gpu_timeline import duration
from lazyviz.plan.runtime.match_profiler_times_to_ops import Pair, TimesCompared
from lazyviz.plan.runtime.op_classes import short_name

FLAT = ((1e3, 1e9), (1e6, 1e9))
RATES = CpuRates(1e-6, 1e-6, {}, FLAT, FLAT, FLAT, FLAT, FLAT, FLAT, FLAT)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def _keep(rates):
    cache_file().parent.mkdir(parents=True, exist_ok=True)
    cache_file().write_text(rates.text())


def test_without_a_calibration_no_time_is_given_and_nothing_is_measured():
    with lazyviz.lazy() as graph:
        torch.ones(64, 64) @ torch.ones(64, 64)
    plan = graph.plan()
    assert plan.time is None and plan.seconds is None
    assert graph.evaluate().projected_seconds is None
    assert not cache_file().exists()


def test_calibrating_takes_two_seconds_and_is_kept():
    before = torch.get_rng_state()
    start = time.process_time()
    made = lazyviz.calibrate()
    assert time.process_time() - start < 2 * max(torch.get_num_threads(), 1) + 0.5
    assert torch.equal(torch.get_rng_state(), before)
    assert made.file == cache_file() and made.file.exists()
    assert known_rates() == made.rates
    assert all(rate > 0 for curve in (made.rates.matmul, made.rates.elementwise) for _, rate in curve)
    assert "GFLOP/s" in repr(made) and "stored in" in made.table().text()
    with lazyviz.lazy() as graph:
        torch.ones(64, 64) @ torch.ones(64, 64)
    plan = graph.plan()
    low, high = plan.seconds_range
    assert low < plan.seconds < high
    assert "What limits this step" in plan.explain()


def test_calibrating_times_the_usual_dtype_whatever_the_users_default_is(monkeypatch):
    monkeypatch.setattr(cpu_calibration, "SECONDS", 0.1)
    torch.set_default_dtype(torch.float64)
    try:
        made = cpu_calibration.measure()
        kernels = cpu_timed_kernels.moving_kernels(lambda *shape: torch.rand(*shape, dtype=torch.float32), 16)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {*made.elements} == {*cpu_timed_kernels.counted_kernels(_tensor)}
    x = torch.rand(16, 256)
    for function in kernels.values():
        result = function(x, x)
        assert (result[0] if isinstance(result, tuple) else result).dtype == torch.float32


def test_a_block_refuses_calibration():
    with lazyviz.lazy(), pytest.raises(RuntimeError, match="outside the block"):
        lazyviz.calibrate()


def test_where_nothing_can_be_written_it_is_said(monkeypatch, tmp_path):
    file = tmp_path / "a file"
    file.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    made = lazyviz.calibrate()
    assert made.file is None and "could not be stored" in made.table().text()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 0}',
        '{"format": 4, "call": 1}',
        '{"format": 4}',
        RATES.text().replace('"operators": {}', '"operators": []'),
        RATES.text().replace('"operators": {}', '"operators": {"mm": 0}'),
        RATES.text().replace('"kernels": {}', '"kernels": {"sum": [[8, 0]]}'),
        RATES.text().replace('"elements": {}', '"elements": {"exp": 0}'),
        RATES.text().replace('"repeated": {}', '"repeated": {"mm": -1}'),
        RATES.text().replace('"fault": 0.0', '"fault": -1'),
    ],
)
def test_a_file_of_another_kind_is_no_calibration(text):
    assert rates_from(text) is None
    assert rates_from(RATES.text()) == RATES


def test_rates_between_sizes_lie_between():
    curve = ((1e3, 1e9), (1e5, 4e9))
    assert rate_at(curve, 10) == 1e9
    assert rate_at(curve, 1e4) == pytest.approx(2e9)
    assert rate_at(curve, 1e9) == 4e9


def test_seconds_are_calls_products_and_traffic():
    with lazyviz.lazy() as graph:
        a = torch.ones(100, 100)
        (a @ a).t()
    ones, product, view = (
        project_on_cpu(graph.nodes, RATES).ops[0],
        *project_on_cpu(graph.nodes, RATES).ops[-2:],
    )
    assert ones.seconds == pytest.approx(1e-6 + 40_000 / 1e9)
    assert product.seconds == pytest.approx(1e-6 + 2e6 / 1e9)
    assert (ones.bound, product.bound, view.bound) == ("memory", "compute", "launch")


def test_a_report_has_projected_and_measured_seconds():
    _keep(RATES)
    model = nn.Linear(64, 64)
    with lazyviz.lazy() as graph:
        model(torch.ones(8, 64)).sum().backward()
    report = graph.evaluate()
    assert report.projected_seconds == pytest.approx(project_on_cpu(graph.nodes, RATES).seconds)
    projected = report.projected_seconds
    assert projected is not None
    assert f"(projected {duration(projected)}, " in report.table().text()  # not 0.000 of a short step
    assert pickle.loads(pickle.dumps(report)) == report
    copied = copy.deepcopy(report)
    del graph, model
    assert copied.ops_run == report.ops_run


def test_a_report_keeps_no_graph():
    _keep(RATES)
    with lazyviz.lazy() as graph:
        torch.ones(3) + 1
    report = graph.evaluate()
    assert report._record() is graph.ir
    del graph
    import gc

    gc.collect()
    assert report.projected_seconds is None


def test_operators_have_their_own_overhead_and_plain_pytorch_waits_for_python():
    rates = replace(RATES, issue=9e-6, operators={"mm": 5e-6})
    with lazyviz.lazy() as graph:
        a = torch.ones(100, 100)
        (a @ a).t()
    product, view = project_on_cpu(graph.nodes, rates).ops[-2:]
    assert product.seconds == pytest.approx(5e-6 + 2e6 / 1e9 + 8e-6)
    assert product.waiting == pytest.approx(8e-6) and view.seconds == pytest.approx(4.5e-6)
    _keep(rates)
    projection, report = project_on_cpu(graph.nodes, rates), graph.evaluate()
    # A run of lazyviz's does not wait for Python.
    assert report.projected_seconds == pytest.approx(projection.seconds - projection.waiting)
    assert sum(pair.projected for pair in report.times.ops.values()) == pytest.approx(
        report.projected_seconds
    )


def test_calls_take_longer_when_the_caches_have_lost_their_code():
    rates = replace(RATES, operators={"mm": 9e-6, "add": 5e-6}, repeated={"mm": 2e-6, "add": 1e-6})
    small, large = torch.ones(4, 4), torch.ones(2**20)
    seconds = []
    for between in (1, 2**20):
        with lazyviz.lazy() as graph, torch.no_grad():
            for _ in range(3):
                small @ small
                large[:between].neg()
        of_op = {each.node: each for each in project_on_cpu(graph.nodes, rates).ops}
        busy = [of_op[node].seconds for node in graph.nodes if short_name(node.op) == "mm"]
        assert busy[0] == busy[1] == busy[2]  # it is a loop
        seconds.append(busy[0] - 2 * 4**3 / 1e9)
    assert seconds == pytest.approx([2e-6, 9e-6])


def test_sums_of_few_terms_have_their_own_rate():
    rates = replace(RATES, convolution=((36.0, 1e8), (576.0, 1e9)))
    seconds = []
    for channels in (4, 64):
        x, weight = torch.ones(2, channels, 8, 8), torch.ones(16, channels, 3, 3)
        with lazyviz.lazy() as graph, torch.no_grad():
            nn.functional.conv2d(x, weight)
        (op,) = [each for each in project_on_cpu(graph.nodes, rates).ops if each.work.flops]
        seconds.append((op.seconds - 1e-6) / op.work.executed)
    assert seconds == pytest.approx([1e-8, 1e-9])


def test_the_ops_of_the_timed_step_are_counted_right():
    layers = [layer for _ in range(cpu_calibration.ISSUED_LAYERS) for layer in (nn.Linear(8, 8), nn.Tanh())]
    model, x = nn.Sequential(*layers), torch.randn(2, 8)
    model(x).sum().backward()
    with lazyviz.lazy() as graph:
        model(x).sum().backward()
    halves = sum(1 if operator_class(node) in ("view", "allocation") else 2 for node in graph.nodes)
    assert halves / 2 == cpu_calibration.ISSUED_OPS


def _tensor(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


def test_the_timed_operators_have_the_names_of_recorded_ones():
    x = _tensor(16, 256)
    made = cpu_timed_kernels.moving_kernels(_tensor, 16)
    kernels = {name: lambda call=call: call(x, x) for name, call in made.items()}
    for name in ("elementwise", "function", "copy"):  # classes of operators
        del kernels[name]
    for name, call in itertools.chain(cpu_timed_kernels.operators(_tensor).items(), kernels.items()):
        with lazyviz.lazy() as graph, torch.no_grad():
            call()
        assert name in [short_name(node.op) for node in graph.nodes], name


def test_of_a_counted_kernel_as_many_elements_are_timed_as_are_counted():
    for name, (call, count) in cpu_timed_kernels.counted_kernels(_tensor).items():
        with lazyviz.lazy() as graph, torch.no_grad():
            call()
        counts = dict(pair for node in graph.nodes for pair in counted(node))
        assert counts.pop(name) == pytest.approx(count), name
        assert all(abs(others) < 1e-6 for others in counts.values()), name


def test_each_counted_kernel_is_timed():
    names = {kernel for kernel, _ in cpu_counted_kernels._RULES.values()}
    assert names <= set(cpu_timed_kernels.counted_kernels(_tensor))


def _counts(call):
    with lazyviz.lazy() as graph, torch.no_grad():
        call()
    return dict(pair for node in graph.nodes for pair in counted(node))


def test_draws_take_longer_the_less_predictable_they_are():
    x = torch.empty(1000)
    assert _counts(lambda: x.bernoulli_(0.9)) == pytest.approx({"bernoulli_ 0.1": 1000, "bernoulli_ 0.5": 0})
    between = _counts(lambda: x.bernoulli_(0.25))
    assert 0 < between["bernoulli_ 0.5"] < 1000 and sum(between.values()) == pytest.approx(1000)


def test_pooling_is_linear_in_the_window():
    x = torch.rand(1, 2, 8, 8)
    counts = _counts(lambda: nn.functional.max_pool2d(x, 4, return_indices=True))
    assert counts == pytest.approx({"max_pool 4": 8 * (1 - 12 / 5), "max_pool 9": 8 * 12 / 5})


CONVOLUTIONS = {
    "one pixel": ((4, 8, 6, 6), (8, 8, 1, 1), {}),
    "one pixel, many images": ((16, 8, 6, 6), (8, 8, 1, 1), {}),
    "one pixel, strided": ((2, 8, 6, 6), (8, 8, 1, 1), {"stride": 2}),
    "one image": ((1, 8, 6, 6), (8, 8, 3, 3), {}),
    "one large image": ((1, 8, 60, 60), (8, 8, 3, 3), {}),
    "one image, large kernel": ((1, 8, 6, 6), (8, 8, 5, 5), {}),
    "two images": ((2, 8, 6, 6), (8, 8, 3, 3), {}),
    "groups": ((1, 8, 6, 6), (8, 4, 3, 3), {"groups": 2}),
    "a row": ((2, 8, 16), (8, 8, 3), {}),
    "a row, one pixel": ((2, 8, 16), (8, 8, 1), {}),
    "volumes": ((2, 8, 6, 6, 6), (8, 8, 3, 3, 3), {}),
    "doubles": ((2, 8, 6, 6), (8, 8, 3, 3), {"dtype": torch.float64}),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_library_of_a_convolution_is_the_one_that_pytorch_chooses(name):
    shape, weights, options = CONVOLUTIONS[name]
    options = dict(options)
    dtype = options.pop("dtype", torch.float32)
    rank = len(shape) - 2
    x, weight = torch.ones(shape, dtype=dtype), torch.ones(weights, dtype=dtype)
    convolve = {1: nn.functional.conv1d, 2: nn.functional.conv2d, 3: nn.functional.conv3d}[rank]
    with lazyviz.lazy() as graph, torch.no_grad():
        convolve(x, weight, **options)
    (node,) = [each for each in graph.nodes if short_name(each.op) == "convolution"]
    if rank == 1:  # as PyTorch does before it chooses
        x, weight = x[:, :, None], weight[:, :, None]
    strides, zeros, ones = [options.get("stride", 1)] * max(rank, 2), [0] * max(rank, 2), [1] * max(rank, 2)
    chosen = torch._C._select_conv_backend(
        x, weight, None, strides, zeros, ones, False, zeros, options.get("groups", 1)
    )
    assert cpu_convolutions.in_onednn(node) == ("Mkldnn" in str(chosen)), chosen


def test_channels_are_padded_to_whole_vectors():
    x = torch.ones(2, 3, 8, 8, requires_grad=True)
    with lazyviz.lazy() as graph:
        nn.functional.conv2d(x, torch.ones(40, 3, 3, 3, requires_grad=True)).sum().backward()
    found = {short_name(node.op): node for node in graph.nodes}
    lanes = 16 if "512" in torch.backends.cpu.get_cpu_capability() else 8
    made = -(-40 // lanes) * lanes / 40
    assert cpu_convolutions.padding(found["convolution"]) == made
    assert cpu_convolutions.padding(found["convolution_backward"]) == pytest.approx((lanes / 3 + made) / 2)


def test_products_with_few_rows_wait_for_their_operands():
    rates = replace(RATES, kernels={THIN: ((1.0, 1e8),), OUTER: ((1.0, 1e7),)})
    with lazyviz.lazy() as graph, torch.no_grad():
        torch.ones(4, 512) @ torch.ones(512, 256)
        torch.ones(256, 4) @ torch.ones(4, 256)
    slow, fast = (
        [each.seconds for each in project_on_cpu(graph.nodes, of).ops if each.work.flops]
        for of in (rates, RATES)
    )
    more = 4 * (4 * 512 + 512 * 256 + 4 * 256 - 3 * (4 * 512 * 256) ** (2 / 3))
    assert slow[0] - fast[0] == pytest.approx(more / 1e8)
    more = 4 * (2 * 256 * 4 + 256 * 256 - 3 * (4 * 256 * 256) ** (2 / 3))
    assert slow[1] - fast[1] == pytest.approx(more / 1e8 + 4 * 256 * 256 / 1e7)


def test_small_images_are_multiplied_one_by_one_at_their_own_rate(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # with more, oneDNN convolves them
    of_pixels = {cpu_convolutions.FORWARD: ((4.0, 1e7), (36.0, 1e9))}
    rates = replace(RATES, kernels=of_pixels)
    seconds = []
    for size in (2, 6):
        with lazyviz.lazy() as graph, torch.no_grad():
            nn.functional.conv2d(torch.ones(1, 8, size, size), torch.ones(8, 8, 1, 1))
        seconds += [each.seconds for each in project_on_cpu(graph.nodes, rates).ops if each.work.flops]
    assert seconds == pytest.approx([1e-6 + 2 * 64 * 4 / 1e7, 1e-6 + 2 * 64 * 36 / 1e9])


def test_heads_of_attention_have_their_own_rates():
    q = torch.ones(2, 3, 16, 8)
    with lazyviz.lazy() as graph, torch.no_grad():
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(q, q, q)
    (op,) = [each for each in project_on_cpu(graph.nodes, RATES).ops if each.work.flops]
    one = 4 * 16 * 16 * 8
    rates = replace(RATES, kernels={ATTENTION: ((one / 2, 1e8), (one, 1e7))})
    (slower,) = [each for each in project_on_cpu(graph.nodes, rates).ops if each.work.flops]
    assert slower.seconds - op.seconds == pytest.approx(6 * one * (1 / 1e7 - 1 / 1e9))


CACHES = ((2e6, 4e9), (3e6, 1e9))
"""Rates of memory that was touched recently, and of other memory."""
MIB = 2**20


def _busy(graph, rates):
    """Seconds of each op of a class, without the overhead of calls."""
    projection = project_on_cpu(graph.nodes, rates)
    return [each.seconds - each.waiting - 1e-6 for each in projection.ops if each.work.bytes_moved]


def test_what_was_touched_recently_is_read_faster():
    rates = replace(RATES, elementwise=CACHES)
    x = torch.ones(MIB // 8)  # 0.5 MiB
    with lazyviz.lazy() as graph:
        near = [x.add_(1) for _ in range(2)]
    first, second = _busy(graph, rates)
    assert first == pytest.approx(second) == pytest.approx(MIB / 4e9)  # nothing else is in use
    others = [torch.ones(MIB // 8) for _ in range(8)]
    with lazyviz.lazy() as graph:
        x.add_(1)
        x.add_(1)
        for each in others:
            each.add_(1)
        x.add_(1)
    seconds = _busy(graph, rates)
    far = MIB / 2 / 1e9 + MIB / 2 / 4e9  # read from memory, written to the cache
    assert seconds[0] == pytest.approx(far)  # in a loop, too
    assert seconds[1] == pytest.approx(MIB / 4e9)
    assert seconds[-1] == pytest.approx(far)
    assert near


def test_results_are_written_to_memory_that_is_free():
    rates = replace(RATES, elementwise=CACHES)
    x = torch.ones(MIB // 8)
    with lazyviz.lazy() as graph:
        kept = [x + 1 for _ in range(8)]
    with lazyviz.lazy() as reusing:
        for _ in range(8):
            x + 1
    assert len(kept) == 8
    assert _busy(graph, rates)[-1] == pytest.approx(MIB / 2 / 4e9 + MIB / 2 / 1e9)
    assert _busy(reusing, rates)[-1] == pytest.approx(MIB / 4e9)


def test_products_wait_for_operands_that_are_not_in_the_cache():
    rates = replace(RATES, elementwise=CACHES)
    weights = [torch.ones(512, 512) for _ in range(4)]
    x, bias = torch.ones(512, 512), torch.ones(512)
    with lazyviz.lazy() as graph:
        for weight in weights:
            x = x @ weight
    product, slower = 2 * 512**3 / 1e9, 1e-9 - 0.25e-9
    assert _busy(graph, rates)[-1] - product > MIB * slower
    with lazyviz.lazy() as graph:
        torch.addmm(bias, x, weights[0])
        torch.mm(x, weights[0])
    with_bias, without = _busy(graph, RATES)
    assert with_bias - without == pytest.approx(MIB / 1e9)  # the bias is copied to the result


def test_convolutions_convert_images():
    rates = replace(RATES, kernels={"convolution": ((1.0, 1e6),)})
    x, weight = torch.ones(2, 3, 8, 8, requires_grad=True), torch.ones(5, 3, 3, 3, requires_grad=True)
    with lazyviz.lazy() as graph:
        nn.functional.conv2d(x, weight, padding=1).sum().backward()
    seconds = {each.node: each.seconds for each in project_on_cpu(graph.nodes, rates).ops}
    without = {each.node: each.seconds for each in project_on_cpu(graph.nodes, RATES).ops}
    images = 4 * 2 * 64 * (3 + 5) / 1e6
    more = {short_name(node.op): seconds[node] - without[node] for node in seconds}
    assert more["convolution"] == pytest.approx(images)
    assert more["convolution_backward"] == pytest.approx(2 * images)
    x = torch.ones(16, 3, 8, 8)
    images = 4 * 16 * 64 * (3 + 5) / 1e6
    with lazyviz.lazy() as graph, torch.no_grad():
        nn.functional.conv2d(x, torch.ones(5, 3, 1, 1))
    pointwise = replace(rates, kernels=rates.kernels | {POINTWISE: ((1.0, 1e9),)})
    slow, fast = (project_on_cpu(graph.nodes, each).seconds for each in (rates, pointwise))
    assert slow == pytest.approx(project_on_cpu(graph.nodes, RATES).seconds)
    assert fast - slow == pytest.approx(images / 1e3)


def test_batch_norm_with_known_statistics_works_by_element():
    rates = replace(RATES, kernels={"native_batch_norm": ((1.0, 1e6),)}, elementwise=((1.0, 4e9),))
    x, norm = torch.ones(4, 3, 8, 8), nn.BatchNorm2d(3)
    seconds = []
    for training in (True, False):
        norm.train(training)
        with lazyviz.lazy() as graph, torch.no_grad():
            norm(x)
        of_op = {short_name(each.node.op): each for each in project_on_cpu(graph.nodes, rates).ops}
        seconds.append(of_op["native_batch_norm"].seconds)
    assert seconds[0] > x.nbytes / 1e6
    assert seconds[1] == pytest.approx(1e-6 + (2 * x.nbytes + 4 * 12) / 4e9, rel=0.01)


def test_large_tensors_wait_for_new_memory():
    rates = replace(RATES, fault=1e-9)
    x = torch.ones(ALWAYS_NEW // 4)
    with lazyviz.lazy() as graph:
        y = x + 1
        y.add_(1)
        x[1:] + 1
    new, in_place, smaller = (
        after - before for before, after in zip(_busy(graph, RATES), _busy(graph, rates))
    )
    assert (new, in_place, smaller) == pytest.approx((ALWAYS_NEW * 1e-9, 0.0, 0.0))


def _times(projected, measured, count=10):
    with lazyviz.lazy() as graph:
        x = torch.ones(1)
        for _ in range(count):
            x = x + 1
    nodes = graph.nodes[-count:]
    return TimesCompared("cpu", {node: Pair(projected, measured) for node in nodes})


def test_a_calibration_of_another_state_of_the_machine_is_noticed():
    assert _times(0.06, 0.01).misfit == pytest.approx(6.0)
    assert _times(0.01, 0.06).misfit == pytest.approx(1 / 6)
    assert _times(0.013, 0.01).misfit is None  # within what is claimed
    assert _times(0.003, 0.001).misfit is None  # too short to judge by
    assert _times(3e-5, 1e-5, count=3000).misfit is None  # small ops have other costs


def test_the_report_says_that_the_calibration_does_not_fit():
    slow = tuple((amount, rate / 1e5) for amount, rate in FLAT)
    _keep(replace(RATES, matmul=slow))
    a = torch.ones(300, 300)
    with lazyviz.lazy() as graph:
        for _ in range(3):
            a = a @ a / 300
    report = graph.evaluate()
    assert report.times.misfit > 2
    assert "lazyviz.calibrate() again" in report.table().text()
