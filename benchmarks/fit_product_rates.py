"""Fits what the projection of matrix products takes from kernel measurements, and prints it.

Two sources, neither of which has times of whole models::

    python benchmarks/fit_product_rates.py DIR

``DIR`` is a checkout of NeuSight (commit 6945927), for float32: the rates of ``plan/devices/gpu_rates.py``,
and the errors with them.  Its times are between two events, and begin before Python has launched the kernel:
the least time of each kind of product on a GPU is subtracted.  ``data/matmul_rates_by_size.csv`` has products
of square matrices on tensor cores, for the prologue of their tiles.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from lazyviz.plan.devices.gpu_rates import RATES, ProductKernel, Rates
from lazyviz.plan.devices.known_gpus import lookup
from lazyviz.plan.runtime import gpu_kernel_times
from lazyviz.plan.runtime.gpu_kernel_times import CALIBRATED, Gpu, Product, product_seconds

HERE = Path(__file__).parent
GPUS = {
    "NVIDIA A100-PCIE-40GB": "A100-40GB", "NVIDIA A100 80GB PCIe": "A100-80GB", "NVIDIA L4": "L4-24GB",
    "NVIDIA H100 80GB HBM3": "H100-80GB", "Tesla P100-PCIE-16GB": "P100-16GB", "Tesla P4": "P4-8GB",
    "Tesla T4": "T4-16GB", "Tesla V100-PCIE-32GB": "V100-32GB",
}  # fmt: skip
# Microseconds from the first event to the kernel, of nn.Linear and torch.bmm: the least time of a small
# product; for the GPUs without small products (A100-80GB, H100, L4), below the least time they have.
LAUNCH = {
    "A100-40GB": (50, 27), "A100-80GB": (45, 27), "H100-80GB": (30, 17), "L4-24GB": (50, 30),
    "P100-16GB": (75, 35), "P4-8GB": (45, 25), "T4-16GB": (50, 29), "V100-32GB": (60, 35),
}  # fmt: skip
SIZES = (1024, 2048, 4096, 8192, 10240)


class Measured(NamedTuple):
    gpu: str
    product: Product
    seconds: float
    test: bool = False


def neusight(checkout: Path) -> Iterator[Measured]:
    """The aligned products of at least 0.3 ms among the kernel measurements."""
    data = checkout / "scripts" / "asplos" / "data" / "dataset"
    for column, kind in enumerate(("linear", "bmm")):
        for path in (data / "test" / f"{kind}.csv", *data.glob(f"train/collect/{kind}/p2.1.0/*.csv")):
            with path.open(encoding="utf-8", newline="") as file:
                for row in csv.DictReader(file):
                    if row["OPName"] != kind or row["Device"] not in GPUS:
                        continue
                    gpu = GPUS[row["Device"]]
                    count, m, k, n = (int(float(row[name])) for name in "BMNK")
                    if column == 0:
                        product = Product(1, count * m, n, k)
                    else:
                        product = Product(count, m, n, k, "batched")
                    seconds = float(row["Latency"]) / 1e3 - LAUNCH[gpu][column] / 1e6
                    sizes = product.m, product.n, product.k
                    if seconds > 3e-4 and min(sizes) >= 64 and not any(size % 4 for size in sizes):
                        yield Measured(gpu, product, seconds, path.parent.name == "test")


def is_typical(product: Product) -> bool:
    """Whether a layer of a transformer has such products."""
    if product.kernel == "batched":
        return product.k <= 8192
    return 256 <= product.k <= 8192 and product.m >= 1024 and 512 <= product.n <= 16384


def is_large(product: Product) -> bool:
    flops = 2 * product.batch * product.m * product.n * product.k
    return product.kernel == "single" or (
        min(product.m, product.n) >= 128 and 256 <= product.k <= 4096 and flops > 2e10
    )


def projected(each: Measured, rates: Rates) -> float:
    """As :func:`~lazyviz.plan.runtime.gpu_kernel_times.kernel_time`."""
    count, m, n, k = each.product[:4]
    profile = lookup(each.gpu)
    gpu = Gpu(each.gpu, rates, profile.compute_capability, False, False)
    batched = each.product.kernel == "batched"
    width = gpu_kernel_times.least_width(profile.compute_capability) if batched else 0
    computing = product_seconds(each.product, rates, "float32", width)
    moving = 4 * count * (m * n + m * k + n * k) / (rates.gbps * 1e9 * gpu.share("elementwise"))
    return float(CALIBRATED["kernel_seconds"]) + (computing**4 + moving**4) ** 0.25


def with_rate(rates: Rates, kernel: ProductKernel, fraction: float) -> Rates:
    name = "float32 batched" if kernel == "batched" else "float32"
    return replace(rates, sustained={**rates.sustained, name: (fraction, "")})


def fit(rows: list[Measured]) -> tuple[float, float, float]:
    """The rate of one kind of product on one GPU; the median error, and its size, with it."""
    rates, kernel = RATES[rows[0].gpu], rows[0].product.kernel
    large = [each for each in rows if is_large(each.product)]
    if len(large) < 50:  # too few
        large = rows
    fraction = rates.fraction("float32", kernel)
    for _ in range(4):
        known = with_rate(rates, kernel, fraction)
        product_seconds.cache_clear()  # two rates differ only in what is no part of their hash
        fraction *= statistics.median(projected(each, known) / each.seconds for each in large)
    known = with_rate(rates, kernel, fraction)
    errors = [projected(each, known) / each.seconds - 1 for each in rows]
    return fraction, statistics.median(errors), statistics.median(map(abs, errors))


def float32(checkout: Path) -> None:
    groups = defaultdict(list)
    for each in neusight(checkout):
        if is_typical(each.product):
            groups[each.product.kernel, each.gpu].append(each)
    print("kernel   GPU         rate    products  median error  of magnitude")
    for (kernel, gpu), rows in sorted(groups.items()):
        fraction, bias, error = fit(rows)
        print(f"{kernel:8} {gpu:10} {fraction:6.3f} {len(rows):9} {bias:+12.1%} {error:13.1%}")


def by_duration(checkout: Path) -> None:
    """The rate of products by how long they take: that of a GPU which throttles falls.

    Of the test series, which has all GPUs. The rates of a P4 are those of the longest products.
    """
    groups = defaultdict(list)
    for each in neusight(checkout):
        if each.test and is_typical(each.product):
            groups[each.product.kernel, each.gpu].append(each)
    print("kernel   GPU         rate of products that take at least so many seconds (number)")
    for (kernel, gpu), rows in sorted(groups.items()):
        cells = []
        for least, most in pairwise((3e-4, 3e-3, 0.03, 0.1, 0.3, math.inf)):
            chosen = [each for each in rows if least <= each.seconds < most]
            if len(chosen) >= 5:
                cells.append(f"{least:g}: {fit(chosen)[0]:.3f} ({len(chosen)})")
        print(f"{kernel:8} {gpu:10} {', '.join(cells)}")


def tensor_cores() -> None:
    """The errors on square products for prologues of tiles, with the rate that fits the largest ones."""
    with (HERE / "data" / "matmul_rates_by_size.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    table: dict[str, Any] = CALIBRATED["tiles"]["tensor"]
    for prologue in (0, 32, 64, 96, 128):
        table["prologue"] = prologue
        errors = defaultdict(list)
        for row in rows:
            speeds = {size: float(row[str(size)]) for size in SIZES}
            peak, found = max(speeds.values()), dict[int, float]()
            for _ in range(10):
                product_seconds.cache_clear()
                rates = Rates(1, 0, peak, 1e6, int(row["sms"]), 1e3, 4, "", sustained={"half": (1.0, "")})
                found = {
                    size: (product_seconds(Product(1, size, size, size), rates, "half") + 2.5e-6)
                    / (2 * size**3 / (speed * 1e12))
                    for size, speed in speeds.items()
                }
                peak *= statistics.median(found[size] for size in SIZES[2:])
            for size in SIZES:
                errors[size].append(abs(found[size] - 1))
        medians = (f"{size}: {statistics.median(each):.1%}" for size, each in errors.items())
        print(f"prologue {prologue:3}: median error by size {', '.join(medians)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("neusight", type=Path, nargs="?", help="a checkout of NeuSight")
    options = parser.parse_args()
    tensor_cores()
    if options.neusight is not None:
        float32(options.neusight)
        by_duration(options.neusight)


if __name__ == "__main__":
    main()
