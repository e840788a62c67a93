"""Projected time: matrix products by waves, memory, launches, the host, ranges, and unknown ops."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyviz
from lazyviz.plan.devices.gpu_rates import Rates
from lazyviz.plan.devices.known_gpus import PROFILES
from lazyviz.plan.runtime.gpu_kernel_times import Product, least_width, product_seconds
from lazyviz.plan.runtime.gpu_timeline import duration


def _projected(device, step):
    with lazyviz.lazy(device=device) as graph:
        step()
    return graph.plan(device=device).time


def _product(n, dtype=torch.float32):
    def step():
        a = torch.randn(n, n, device="cuda", dtype=dtype)
        return a @ a

    return step


@pytest.mark.parametrize("name", PROFILES)
def test_every_known_gpu_has_rates_and_projects(name):
    time = _projected(name, _product(4096))
    product = next(each for each in time.ops if each.work.flops)
    rates = PROFILES[name].rates
    assert product.bound == "compute"
    attained = product.work.flops / (product.seconds - product.waiting) / rates.peak("float32")
    assert 0.8 * rates.fraction("float32") < attained <= rates.fraction("float32")
    low, high = time.seconds_range
    assert low < time.seconds < high


def test_waves_of_tiles_are_a_staircase():
    rates = PROFILES["A100-40GB"].rates
    one = product_seconds(Product(1, 128 * 12, 128 * 9, 4096), rates, "float32")
    same = product_seconds(Product(1, 128 * 12 - 100, 128 * 9, 4096), rates, "float32")
    more = product_seconds(Product(1, 128 * 12, 128 * 9 + 8, 4096), rates, "float32")
    assert same == one < more


def test_batched_products_in_float32_have_their_own_rate_and_tiles():
    profile = PROFILES["P100-16GB"]
    rates, width = profile.rates, least_width(profile.compute_capability)
    of_one = product_seconds(Product(1, 4096, 4096, 4096), rates, "float32")
    of_many = product_seconds(Product(1, 4096, 4096, 4096, "batched"), rates, "float32")
    # cuBLAS's kernels for one product and for many reach 0.80 and 0.95 of the peak.
    assert of_many / of_one == pytest.approx(0.799 / 0.95, rel=0.01)
    # The narrowest of its tiles for many are 128 wide: half of each is empty in a product 64 wide.
    narrow = product_seconds(Product(128, 1024, 64, 1024, "batched"), rates, "float32", width)
    wide = product_seconds(Product(128, 1024, 128, 1024, "batched"), rates, "float32", width)
    assert (width, narrow) == (128, wide)

    def step():
        torch.bmm(torch.randn(128, 1024, 1024, device="cuda"), torch.randn(128, 1024, 64, device="cuda"))

    assert _projected("P100-16GB", step).ops[-1].seconds > narrow


def test_partial_sums_of_a_split_product_are_written():
    rates = PROFILES["A100-40GB"].rates
    slow = replace(rates, gbps=rates.gbps / 100)
    few, many = Product(1, 128, 128, 65536), Product(1, 128 * 108, 128 * 64, 4096)
    assert product_seconds(few, slow, "float32") > product_seconds(few, rates, "float32")
    assert product_seconds(many, slow, "float32") == product_seconds(many, rates, "float32")


def test_a_product_with_a_long_inner_dimension_is_split_until_all_multiprocessors_work():
    rates = PROFILES["A100-80GB"].rates
    weights = product_seconds(Product(1, 64, 64, 400_000), rates, "float32")  # their gradient
    inputs = product_seconds(Product(1, 400_000, 64, 64), rates, "float32")
    assert weights < 2 * inputs


def test_rows_that_tensor_cores_cannot_load_whole_take_longer():
    def step(words, dtype):
        weight = torch.randn(words, 768, device="cuda", dtype=dtype)
        return lambda: torch.nn.functional.linear(torch.randn(4096, 768, device="cuda", dtype=dtype), weight)

    def seconds(words, dtype):
        return _projected("RTX-4090", lambda: step(words, dtype)()).ops[-1].seconds

    assert seconds(50257, torch.bfloat16) > 1.3 * seconds(50264, torch.bfloat16)
    assert seconds(50257, torch.float32) < 1.01 * seconds(50264, torch.float32)


def test_unaligned_products_take_almost_three_times_as_long_on_an_a100():
    # GPT-2's output layer on 12 x 1024 tokens: padding it saved 26 ms (PyTorch's blog).
    rates = PROFILES["A100-80GB"].rates
    products = [(12288, 50257, 768), (12288, 768, 50257), (50257, 768, 12288)]

    def seconds(aligned):
        return sum(
            product_seconds(Product(1, m, n, k, aligned=aligned), rates, "half") for m, n, k in products
        )

    assert seconds(False) > 2.7 * seconds(True)
    assert seconds(False) - seconds(True) == pytest.approx(26e-3, rel=0.05)


@pytest.mark.parametrize(("gpu", "share"), [("A100-40GB", 0.88), ("RTX-3090", 0.5)])
def test_16_bit_elements_take_as_many_instructions(gpu, share):
    def seconds(step):
        return _projected(gpu, step).ops[-1].seconds

    half = seconds(lambda: torch.ones(1 << 26, device="cuda", dtype=torch.float16).exp())
    single = seconds(lambda: torch.ones(1 << 26, device="cuda").exp())
    assert half == pytest.approx(share * single, rel=0.02)


def test_a_cast_on_an_a100_takes_as_long_as_was_measured():
    cast = _projected("A100-40GB", lambda: torch.ones(1 << 26, device="cuda", dtype=torch.bfloat16).float())
    assert 322e-6 < cast.ops[-1].seconds < 362e-6  # in a later release, and before


@pytest.mark.parametrize("function", [lambda x: x.softmax(-1), lambda x: F.layer_norm(x, x.shape[1:])])
def test_long_rows_are_read_more_than_once(function):
    def seconds(row):
        return (
            _projected("V100-32GB", lambda: function(torch.randn(2**28 // row, row, device="cuda")))
            .ops[-1]
            .seconds
        )

    assert seconds(16384) > 1.2 * seconds(1024)


def test_a_large_elementwise_op_is_bound_by_memory():
    def step():
        return torch.ones(1 << 28, device="cuda").exp()

    time = _projected("V100-32GB", step)
    exp = time.ops[-1]
    assert exp.bound == "memory"
    assert exp.seconds == pytest.approx(2 * 4 * 2**28 / (900e9 * 0.915), rel=0.02)
    assert time.coverage == 1


def test_many_tiny_ops_wait_for_the_host():
    def step():
        x = torch.ones(8, device="cuda")
        for _ in range(100):
            x = x + 1

    time = _projected("H100-80GB", step)
    assert time.by_bound["launch"] > 0.9 * time.seconds
    assert math.isclose(sum(each.seconds for each in time.ops), time.seconds)


def test_a_user_defined_gpu_without_rates_has_no_projected_time():
    gpu = lazyviz.DeviceProfile("mine", "8 GiB", compute_capability=(8, 0))
    with lazyviz.lazy(device=gpu) as graph:
        _product(64)()
    plan = graph.plan(device=gpu)
    assert plan.time is None and plan.seconds is None and plan.seconds_range is None
    assert plan.flops == 2 * 64**3
    assert plan.by_phase == {}
    assert "takes" not in plan.explain()


def test_a_user_defined_gpu_with_rates_has_a_projected_time():
    rates = Rates(10, 0, 0, 500, 40, 200, 8, "GDDR6")
    gpu = lazyviz.DeviceProfile("mine", "8 GiB", compute_capability=(8, 6), rates=rates)
    assert _projected(gpu, _product(2048)).known == "rule"
    assert _projected(gpu, _product(2048, torch.bfloat16)) is None  # no data on 16 bits: no time


def test_precision_decides_which_units_compute():
    single = _projected("A100-80GB", _product(8192)).seconds
    half = _projected("A100-80GB", _product(8192, torch.bfloat16)).seconds
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        tf32 = _projected("A100-80GB", _product(8192)).seconds
    finally:
        torch.set_float32_matmul_precision(before)
    assert half < tf32 < single
    assert _projected("P100-16GB", _product(512, torch.bfloat16)) is None


def test_ranges_say_how_a_rate_is_known():
    def margin(name, dtype=torch.float32):
        time = _projected(name, _product(8192, dtype))
        return time.known, time.margin

    assert margin("V100-32GB") == ("measured", pytest.approx(0.1))
    assert margin("RTX-3090") == ("measured", pytest.approx(0.1))
    assert margin("RTX-4080") == ("rule", pytest.approx(0.2))
    assert margin("T4-16GB") == ("power-limited", pytest.approx(0.35))
    known, wide = margin("RTX-4080", torch.float16)  # no measurement of its tensor cores
    assert known == "rule" and wide > 0.5


def test_the_work_of_ops_of_unknown_duration_is_counted_in_its_phase_module_and_line():
    weight, layer = torch.randn(32, 32, dtype=torch.complex64), nn.Linear(512, 512)

    def step():
        layer.to("cuda")(torch.randn(512, 512, device="cuda")).sum().backward()
        return weight.cuda() @ weight.cuda()

    with lazyviz.lazy(device="A100-40GB") as graph:
        kept = step()
    plan = graph.plan()
    time = plan.time
    assert [node.op for node in time.unknown] == [torch.ops.aten.mm.default]
    assert sum(flops for _, flops, _ in plan.by_phase.values()) == time.flops == plan.flops
    for groups in (time.by_module, time.by_line):
        assert sum(work.flops for _, work in groups.values()) == plan.flops
    assert math.isclose(sum(found[0] for found in plan.by_phase.values()), time.seconds)
    timed = sum(each.work.flops for each in time.ops)
    assert time.mfu == timed / time.seconds / time.peak_flops
    del kept
    lazyviz.reset()


def test_the_parts_of_a_step_add_up():
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 64))

    def step():
        gpu = model.to("cuda")
        optimizer = torch.optim.AdamW(gpu.parameters())
        F.cross_entropy(
            gpu(torch.randn(256, 512, device="cuda")), torch.zeros(256, dtype=torch.long, device="cuda")
        ).backward()
        optimizer.step()

    time = _projected("A100-40GB", step)
    assert math.isclose(sum(seconds for seconds, _ in time.by_module.values()), time.seconds)
    assert math.isclose(sum(seconds for seconds, _ in time.by_line.values()), time.seconds)
    assert math.isclose(sum(found[0] for found in time.by_phase.values()), time.seconds)
    assert math.isclose(sum(time.by_bound.values()), time.seconds)
    assert {"forward", "backward", "optimizer"} <= set(time.by_phase)
    forward, backward = time.by_phase["forward"][1], time.by_phase["backward"][1]
    assert backward == 2 * forward - 2 * 256 * 512 * 512  # the input needs no gradient
    assert 0 < time.mfu < 1
    assert time.of(each.node for each in time.ops) == pytest.approx(time.seconds)


def test_nothing_runs_and_the_same_op_is_timed_once(monkeypatch):
    from lazyviz.plan.runtime import gpu_kernel_times

    asked = []
    timed = gpu_kernel_times._timed
    monkeypatch.setattr(gpu_kernel_times, "_timed", lambda node, gpu: asked.append(node) or timed(node, gpu))
    monkeypatch.setattr(gpu_kernel_times, "_memo", {})

    def step():
        x = torch.ones(16, 16, device="cuda")
        for _ in range(50):
            x = (x @ x).relu()

    time = _projected("L4-24GB", step)
    assert len(time.ops) == 101 and len(asked) == 3


@pytest.mark.parametrize("device", ["cpu", "A100-40GB"])
def test_explain_names_the_ops_that_prevent_a_projection(monkeypatch, tmp_path, device):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lazyviz.calibrate()
    with lazyviz.lazy(device=None if device == "cpu" else device) as graph:
        matrix = torch.eye(64, device="cpu" if device == "cpu" else "cuda")
        torch.linalg.svd(matrix + 1)
    plan = graph.plan(device=device)
    assert plan.time is None
    assert f"Projected time on {device}: not given" in plan.explain()
    assert "may take most of it: _linalg_svd." in plan.explain()
    lazyviz.reset()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.9996e-3, "1 ms"),
        (0.9994e-3, "999 µs"),
        (0.99996, "1 s"),
        (9.996e-3, "10 ms"),
        (1234.5, "1,234 s"),
        (999.6, "1,000 s"),
        (12.34e-9, "12.3 ns"),
        (0.0, "0 ns"),
    ],
)
def test_durations_are_never_shown_as_powers_of_ten(seconds, text):
    assert duration(seconds) == text
