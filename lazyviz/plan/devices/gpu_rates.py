"""Rates of GPUs: data-sheet peaks, and measured throughput of large matrix products.

Peaks are from NVIDIA's data sheets, without sparsity, in TFLOP/s: float32 outside tensor cores, TF32, and
float16 with float32 accumulation (on GeForce GPUs half the rate of float16 accumulation).  Bandwidth is in
GB/s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

Known = Literal["measured", "rule", "power-limited", "calibrated"]
Unit = Literal["float32", "tf32", "half"]
"""The unit that computes a matrix product: FMA units, or tensor cores with TF32 or 16-bit inputs."""

ProductKernel = Literal["single", "batched", "convolution"]
"""The kernels of one matrix product, as in ``nn.Linear``, and of a batch of them, whose rates in float32
differ by up to a fifth; and of a product within a convolution."""

NEUSIGHT = (
    "NeuSight's kernel measurements (MIT), commit 6945927: the rate with which the median of the projected "
    "times of large aligned products is the measured one (benchmarks/fit_product_rates.py)"
)
THROTTLED = (
    f"{NEUSIGHT}; of products that take at least 0.3 s, or 0.03 s in batches: the rate is 0.874, or 0.698 in "
    "batches, for the shortest, and falls the longer they take"
)
MAMF = (
    "github.com/stas00/ml-engineering, commit 744d01e, compute/accelerator: "
    "maximum achievable matmul FLOPS, BF16"
)
TORCH_MM = (
    "github.com/zzc0721/torch-performance-test-data, commit 9d82827, and "
    "github.com/chsasank/device-benchmarks, commit 7ccc883: square products in PyTorch, the best size"
)
"""Median of the reports for a GPU, without those below three quarters of the best one; all reports are in
``benchmarks/data/matmul_rates.csv``.
"""


@dataclass(frozen=True)
class Rates:
    """Peak compute and memory rates of a GPU, and their sources.

    ``fp32``, ``tf32``, and ``half``: dense peaks in TFLOP/s, 0 if the GPU has no such units; ``gbps``: memory
    bandwidth in GB/s; ``memory``: kind of memory; ``sms``: multiprocessors; ``watts``: board power;
    ``process``: nm; ``lanes``: float32 units per multiprocessor. ``sustained``: for a kind of unit, the
    measured share of the peak that large products reach, and the source. ``link_gbps``: bus bandwidth of
    collectives within one machine in GB/s, 0 if none was published.
    """

    fp32: float
    tf32: float
    half: float
    gbps: float
    sms: int
    watts: float
    process: int
    memory: str
    lanes: int = 128
    sustained: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    link_gbps: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "sustained", MappingProxyType(dict(self.sustained)))

    def __hash__(self) -> int:
        return hash((self.fp32, self.half, self.gbps, self.sms, self.watts))

    def peak(self, unit: Unit) -> float:
        """The peak of one kind of unit in FLOP/s; 0 if there is none."""
        return {"float32": self.fp32, "tf32": self.tf32, "half": self.half}[unit] * 1e12

    def fraction(self, unit: Unit, kernel: ProductKernel = "single") -> float:
        """The share of the peak that large products reach: as measured, otherwise by rule."""
        if (by_kernel := f"{unit} {kernel}") in self.sustained:
            return self.sustained[by_kernel][0]
        if unit in self.sustained:
            return self.sustained[unit][0]
        return min(self._cap(unit), self._by_watts()) if unit == "float32" else self._cap(unit)

    def known(self, unit: Unit) -> Known:
        """The source of :meth:`fraction`. The speed of GPUs of up to 75 W depends on their momentary power
        limit.
        """
        if self.watts <= 75:
            return "power-limited"
        if unit in self.sustained:
            return "measured"
        return "power-limited" if unit == "float32" and self._by_watts() < 0.5 else "rule"

    def _cap(self, unit: Unit) -> float:
        if unit == "float32":
            if self.lanes == 64:
                return 0.93
            # Two operations per issue slot: registers and power cannot feed all 128 lanes of Ampere and
            # later.
            return 0.65 if self.process <= 8 and not self.memory.startswith("HBM") else 0.78
        if self.watts <= 75:
            return 0.5
        # Tensor cores at half rate are not limited by power, and GeForce GPUs clock higher than their data
        # sheets say: the measured ones reach 0.91 to 1.13, those at full rate 0.74 to 0.87, except an RTX
        # 2080 Ti (1.09) and an A10 with its 150 W (0.44).
        return 1.05 if self.half < 2.1 * self.fp32 else 0.8

    def _by_watts(self) -> float:
        """The share of the peak that the power limit allows, from the watts per TFLOP/s of float32 by
        process: from the measured P100 and V100 (16 and 12 nm, not limited), T4 (12), A100 (7), and L4 (4).
        """
        need = {16: 17.0, 12: 17.0, 8: 13.0, 7: 15.3}.get(self.process, 8.0)
        return self.watts / self.fp32 / need


def _fp32(single: float, batched: float, source: str = NEUSIGHT) -> dict[str, tuple[float, str]]:
    return {"float32": (single, source), "float32 batched": (batched, source)}


def _mm(**fractions: float) -> dict[str, tuple[float, str]]:
    return {unit: (fraction, TORCH_MM) for unit, fraction in fractions.items()}


def _half(fraction: float) -> dict[str, tuple[float, str]]:
    return {"half": (fraction, MAMF)}


_HOPPER = _half(0.803)
RATES: dict[str, Rates] = {
    "B300-288GB": Rates(80, 1125, 2250, 8000, 148, 1400, 4, "HBM3e", sustained=_half(0.786)),
    "B200-180GB": Rates(
        80, 1125, 2250, 8000, 148, 1000, 4, "HBM3e", sustained=_half(0.776) | _mm(float32=0.828)
    ),
    "H200-141GB": Rates(
        66.9, 494.5, 989, 4800, 132, 700, 4, "HBM3e", sustained=_HOPPER | _mm(float32=0.767), link_gbps=370
    ),
    "GH200-96GB": Rates(66.9, 494.5, 989, 4000, 132, 900, 4, "HBM3", sustained=_half(0.838)),
    "H100-80GB": Rates(
        66.9,
        494.5,
        989,
        3352,
        132,
        700,
        4,
        "HBM3",
        sustained=_fp32(0.773, 0.814) | _HOPPER | _mm(tf32=0.813),
        link_gbps=370,
    ),
    "H100-NVL-94GB": Rates(60, 417.5, 835, 3900, 132, 400, 4, "HBM3"),
    "A100-40GB": Rates(
        19.5,
        156,
        312,
        1555,
        108,
        400,
        7,
        "HBM2",
        64,
        _fp32(0.854, 0.879) | _half(0.811) | _mm(tf32=0.694),
        link_gbps=235,
    ),
    "A100-80GB": Rates(
        19.5, 156, 312, 2039, 108, 400, 7, "HBM2e", 64, _fp32(0.942, 0.963) | _half(0.869), link_gbps=235
    ),
    "A40-48GB": Rates(37.4, 74.8, 149.7, 696, 84, 300, 8, "GDDR6"),
    "A10-24GB": Rates(31.2, 62.5, 125, 600, 72, 150, 8, "GDDR6", sustained=_mm(float32=0.449, half=0.44)),
    "A10G-24GB": Rates(31.5, 35, 70, 600, 80, 300, 8, "GDDR6"),
    "A16-16GB": Rates(4.5, 9, 17.9, 200, 10, 62, 8, "GDDR6"),
    "A2-16GB": Rates(4.5, 9, 18, 200, 10, 60, 8, "GDDR6"),
    "L40S-48GB": Rates(91.6, 183, 362, 864, 142, 350, 4, "GDDR6", sustained=_mm(float32=0.512, half=0.736)),
    "L40-48GB": Rates(90.5, 90.5, 181, 864, 142, 300, 4, "GDDR6"),
    "L4-24GB": Rates(
        30.3, 60, 121, 300, 58, 72, 4, "GDDR6", sustained=_fp32(0.318, 0.26) | _mm(tf32=0.531, half=0.577)
    ),
    "T4-16GB": Rates(8.1, 0, 65, 320, 40, 70, 12, "GDDR6", 64, _fp32(0.512, 0.472) | _mm(half=0.645)),
    "P4-8GB": Rates(5.5, 0, 0, 192, 20, 75, 16, "GDDR5", sustained=_fp32(0.638, 0.515, THROTTLED)),
    "P100-16GB": Rates(9.3, 0, 0, 732, 56, 250, 16, "HBM2", 64, _fp32(0.799, 0.95)),
    "V100-16GB": Rates(15.7, 0, 125, 900, 80, 300, 12, "HBM2", 64, sustained=_mm(float32=0.896, half=0.759)),
    "V100-32GB": Rates(14.1, 0, 112, 900, 80, 250, 12, "HBM2", 64, _fp32(0.992, 0.982)),
    "RTX-PRO-6000-96GB": Rates(
        125, 251.9, 503.8, 1792, 188, 600, 4, "GDDR7", sustained=_mm(float32=0.617, half=0.813)
    ),
    "RTX-6000-Ada-48GB": Rates(91.1, 182.1, 364.2, 960, 142, 300, 4, "GDDR6"),
    "RTX-A6000-48GB": Rates(
        38.7, 77.4, 154.8, 768, 84, 300, 8, "GDDR6", sustained=_mm(float32=0.618, half=0.788)
    ),
    "RTX-A5000-24GB": Rates(27.8, 55.6, 111.1, 768, 64, 230, 8, "GDDR6"),
    "RTX-A4000-16GB": Rates(
        19.2, 38.3, 76.7, 448, 48, 140, 8, "GDDR6", sustained=_mm(float32=0.62, tf32=0.896, half=0.836)
    ),
    "RTX-5090": Rates(
        104.8, 104.8, 209.5, 1792, 170, 575, 4, "GDDR7", sustained=_mm(float32=0.652, tf32=1.166, half=1.123)
    ),
    "RTX-5080": Rates(
        56.3, 56.3, 112.6, 960, 84, 360, 4, "GDDR7", sustained=_mm(float32=0.598, tf32=0.9, half=0.912)
    ),
    "RTX-5070-Ti": Rates(
        43.9, 43.9, 87.9, 896, 70, 300, 4, "GDDR7", sustained=_mm(float32=0.754, tf32=1.149, half=1.125)
    ),
    "RTX-5070": Rates(
        30.9, 30.9, 61.7, 672, 48, 250, 4, "GDDR7", sustained=_mm(float32=0.78, tf32=1.093, half=1.091)
    ),
    "RTX-4090": Rates(
        82.6, 82.6, 165.2, 1008, 128, 450, 4, "GDDR6X", sustained=_mm(float32=0.657, tf32=1.037, half=1.004)
    ),
    "RTX-4080": Rates(48.7, 48.7, 97.5, 717, 76, 320, 4, "GDDR6X"),
    "RTX-4070-Ti": Rates(40.1, 40.1, 80.2, 504, 60, 285, 4, "GDDR6X"),
    "RTX-4070": Rates(29.1, 29.1, 58.3, 504, 46, 200, 4, "GDDR6X"),
    "RTX-4060-Ti-16GB": Rates(
        22.1, 22.1, 44.1, 288, 34, 165, 4, "GDDR6", sustained=_mm(float32=0.543, half=0.998)
    ),
    "RTX-4060": Rates(
        15.1, 15.1, 30.2, 272, 24, 115, 4, "GDDR6", sustained=_mm(float32=0.552, tf32=1.033, half=1.057)
    ),
    "RTX-3090-Ti": Rates(40.0, 40.0, 80.0, 1008, 84, 450, 8, "GDDR6X"),
    "RTX-3090": Rates(35.6, 35.6, 71.2, 936, 82, 350, 8, "GDDR6X", sustained=_mm(float32=0.696, half=1.069)),
    "RTX-3080": Rates(
        29.8, 29.8, 59.5, 760, 68, 320, 8, "GDDR6X", sustained=_mm(float32=0.707, tf32=1.075, half=1.077)
    ),
    "RTX-3070": Rates(20.3, 20.3, 40.6, 448, 46, 220, 8, "GDDR6", sustained=_mm(float32=0.674, half=1.04)),
    "RTX-3060": Rates(12.7, 12.7, 25.5, 360, 28, 170, 8, "GDDR6", sustained=_mm(float32=0.583, half=1.02)),
    "RTX-2080-Ti": Rates(
        13.4, 0, 53.8, 616, 68, 250, 12, "GDDR6", 64, sustained=_mm(float32=0.973, half=1.089)
    ),
    "GTX-1080-Ti": Rates(11.3, 0, 0, 484, 28, 250, 16, "GDDR5X"),
}
