"""Known GPUs: their device profiles, and a way to describe others."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from ..units import parse_bytes
from .cuda_context import CONTEXT_BYTES
from .gpu_rates import RATES, Rates


@dataclass(frozen=True, slots=True, init=False)
class DeviceProfile:
    """A GPU model to plan for, present or not.

    ``total_bytes`` is its memory, in bytes or as text (``"8 GiB"``); ``source`` says where that number is
    from. ``context_bytes`` is the memory of a CUDA context; if given, a plan compares the memory that
    PyTorch's caching allocator would hold with the remaining memory.  **Without it (0, the default for your
    own profiles), a plan counts only tensors**, and its verdict says so.  ``compute_capability`` determines
    which kernels PyTorch chooses on the GPU; ``None``: unknown.  Projected times are computed from ``rates``;
    without them, there are none.

    Raises ``ValueError`` for an invalid size.
    """

    name: str
    total_bytes: int
    source: str
    context_bytes: int
    compute_capability: tuple[int, int] | None
    rates: Rates | None

    def __init__(
        self,
        name: str,
        total_bytes: int | str,
        source: str = "defined by the user",
        context_bytes: int | str = 0,
        compute_capability: tuple[int, int] | None = None,
        rates: Rates | None = None,
    ) -> None:
        total = parse_bytes(total_bytes)
        if total <= 0:
            raise ValueError(f"A device profile needs a positive total_bytes, got {total_bytes!r}.")
        for field, value in (
            ("name", name),
            ("total_bytes", total),
            ("source", source),
            ("context_bytes", parse_bytes(context_bytes)),
            ("compute_capability", compute_capability),
            ("rates", rates),
        ):
            object.__setattr__(self, field, value)  # because the class is frozen

    @property
    def present(self) -> bool:
        return False


# (name, MiB, compute capability, data sheet). MiB is the memory that the driver reports (nvidia-smi,
# "Memory-Usage") and a program can allocate: up to 7 % more or less than the advertised "GB", depending on
# ECC and the vendor's definition of a gigabyte.  Capabilities are NVIDIA's list
# "CUDA GPU Compute Capability".
_GPUS: dict[str, tuple[tuple[str, int, tuple[int, int], str], ...]] = {
    "Data center GPUs": (
        ("B300-288GB", 275040, (10, 3), "NVIDIA Blackwell Ultra datasheet: 288 GB HBM3e"),
        ("B200-180GB", 183359, (10, 0), "NVIDIA DGX B200 datasheet: 180 GB HBM3e each"),
        ("H200-141GB", 143771, (9, 0), "NVIDIA H200 datasheet: 141 GB HBM3e"),
        ("GH200-96GB", 97871, (9, 0), "NVIDIA GH200 datasheet: 96 GB HBM3"),
        ("H100-80GB", 81559, (9, 0), "NVIDIA H100 datasheet: 80 GB HBM3"),
        ("H100-NVL-94GB", 95830, (9, 0), "NVIDIA H100 NVL datasheet: 94 GB HBM3"),
        ("A100-40GB", 40960, (8, 0), "NVIDIA A100 datasheet: 40 GB HBM2"),
        ("A100-80GB", 81920, (8, 0), "NVIDIA A100 datasheet: 80 GB HBM2e"),
        ("A40-48GB", 46068, (8, 6), "NVIDIA A40 datasheet: 48 GB GDDR6, ECC on"),
        ("A10-24GB", 23028, (8, 6), "NVIDIA A10 datasheet: 24 GB GDDR6, ECC on"),
        ("A10G-24GB", 23028, (8, 6), "Amazon EC2 G5 instances: NVIDIA A10G, 24 GB, ECC on"),
        ("A16-16GB", 15356, (8, 6), "NVIDIA A16 datasheet: 4 x 16 GB GDDR6, ECC on, one of the four"),
        ("A2-16GB", 15356, (8, 6), "NVIDIA A2 datasheet: 16 GB GDDR6, ECC on"),
        ("L40S-48GB", 46068, (8, 9), "NVIDIA L40S datasheet: 48 GB GDDR6, ECC on"),
        ("L40-48GB", 46068, (8, 9), "NVIDIA L40 datasheet: 48 GB GDDR6, ECC on"),
        ("L4-24GB", 23034, (8, 9), "NVIDIA L4 datasheet: 24 GB GDDR6, ECC on"),
        ("T4-16GB", 15360, (7, 5), "NVIDIA T4 datasheet: 16 GB GDDR6, ECC on"),
        ("P4-8GB", 7611, (6, 1), "NVIDIA P4 datasheet: 8 GB GDDR5, ECC on"),
        ("P100-16GB", 16280, (6, 0), "NVIDIA P100 datasheet: 16 GB HBM2"),
        ("V100-16GB", 16384, (7, 0), "NVIDIA V100 datasheet: 16 GB HBM2"),
        ("V100-32GB", 32768, (7, 0), "NVIDIA V100 datasheet: 32 GB HBM2"),
    ),
    "Workstation GPUs": (
        ("RTX-PRO-6000-96GB", 97887, (12, 0), "NVIDIA RTX PRO 6000 Blackwell datasheet: 96 GB GDDR7"),
        ("RTX-6000-Ada-48GB", 49140, (8, 9), "NVIDIA RTX 6000 Ada Generation datasheet: 48 GB GDDR6"),
        ("RTX-A6000-48GB", 49140, (8, 6), "NVIDIA RTX A6000 datasheet: 48 GB GDDR6"),
        ("RTX-A5000-24GB", 24564, (8, 6), "NVIDIA RTX A5000 datasheet: 24 GB GDDR6"),
        ("RTX-A4000-16GB", 16376, (8, 6), "NVIDIA RTX A4000 datasheet: 16 GB GDDR6"),
    ),
    "Consumer GPUs": (
        ("RTX-5090", 32607, (12, 0), "GeForce RTX 5090 specifications: 32 GB GDDR7"),
        ("RTX-5080", 16303, (12, 0), "GeForce RTX 5080 specifications: 16 GB GDDR7"),
        ("RTX-5070-Ti", 16303, (12, 0), "GeForce RTX 5070 Ti specifications: 16 GB GDDR7"),
        ("RTX-5070", 12227, (12, 0), "GeForce RTX 5070 specifications: 12 GB GDDR7"),
        ("RTX-4090", 24564, (8, 9), "GeForce RTX 4090 specifications: 24 GB GDDR6X"),
        ("RTX-4080", 16376, (8, 9), "GeForce RTX 4080 specifications: 16 GB GDDR6X"),
        ("RTX-4070-Ti", 12282, (8, 9), "GeForce RTX 4070 Ti specifications: 12 GB GDDR6X"),
        ("RTX-4070", 12282, (8, 9), "GeForce RTX 4070 specifications: 12 GB GDDR6X"),
        ("RTX-4060-Ti-16GB", 16380, (8, 9), "GeForce RTX 4060 Ti specifications: 16 GB GDDR6"),
        ("RTX-4060", 8188, (8, 9), "GeForce RTX 4060 specifications: 8 GB GDDR6"),
        ("RTX-3090-Ti", 24564, (8, 6), "GeForce RTX 3090 Ti specifications: 24 GB GDDR6X"),
        ("RTX-3090", 24576, (8, 6), "GeForce RTX 3090 specifications: 24 GB GDDR6X"),
        ("RTX-3080", 10240, (8, 6), "GeForce RTX 3080 specifications: 10 GB GDDR6X"),
        ("RTX-3070", 8192, (8, 6), "GeForce RTX 3070 specifications: 8 GB GDDR6"),
        ("RTX-3060", 12288, (8, 6), "GeForce RTX 3060 specifications: 12 GB GDDR6"),
        ("RTX-2080-Ti", 11264, (7, 5), "GeForce RTX 2080 Ti specifications: 11 GB GDDR6"),
        ("GTX-1080-Ti", 11264, (6, 1), "GeForce GTX 1080 Ti specifications: 11 GB GDDR5X"),
    ),
}

PROFILES: dict[str, DeviceProfile] = {
    name: DeviceProfile(
        name, mib << 20, f"{datasheet}; nvidia-smi shows {mib} MiB", CONTEXT_BYTES, capability, RATES[name]
    )
    for gpus in _GPUS.values()
    for name, mib, capability, datasheet in gpus
}

KINDS: dict[str, list[str]] = {kind: [gpu[0] for gpu in gpus] for kind, gpus in _GPUS.items()}


def lookup(name: str) -> DeviceProfile:
    """The known profile called ``name``; case, spaces, and the vendor's name do not matter.

    Raises ``ValueError`` for an unknown name, with the most similar known ones.
    """
    by_plain = {_plain(known): profile for known, profile in PROFILES.items()}
    wanted = _plain(name)
    profile = by_plain.get(wanted)
    if profile is not None:
        return profile
    # A name without its memory size ("H100") is a prefix of the full name.
    near = [known for known in PROFILES if wanted and _plain(known).startswith(wanted)]
    close = difflib.get_close_matches(wanted, by_plain, n=3, cutoff=0.5)
    near += [by_plain[match].name for match in close if by_plain[match].name not in near]
    if near:
        raise ValueError(f"Unknown device {name!r}; did you mean {' or '.join(near[:3])}?")
    raise ValueError(
        f"Unknown device {name!r}; known: cpu, cuda, {', '.join(WELL_KNOWN)} and others, "
        "which lazyviz.devices() lists."
    )


WELL_KNOWN = ("A100-40GB", "H100-80GB", "L4-24GB", "T4-16GB", "RTX-3060", "RTX-4090")


def _plain(name: str) -> str:
    letters = "".join(letter for letter in name.lower() if letter.isalnum())
    return letters.removeprefix("nvidia").removeprefix("geforce").removeprefix("tesla")
