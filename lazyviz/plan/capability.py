"""CUDA compute capability of known cards, by which PyTorch chooses kernels.

From NVIDIA's list "CUDA GPU Compute Capability" (developer.nvidia.com/cuda-gpus).
"""

from __future__ import annotations

from .devices import Device, DeviceProfile

DEFAULT = (8, 0)
"""Assumed of a card that is not in the list: kernels are chosen as for an A100."""

# By how a card's name begins, the longest first; "NVIDIA" and "GeForce" left out.
_OF: dict[str, tuple[int, int]] = {
    "A100": (8, 0), "A30": (8, 0), "A800": (8, 0),
    "A10": (8, 6), "A16": (8, 6), "A2": (8, 6), "A40": (8, 6), "RTX-A": (8, 6), "A6000": (8, 6),
    "L4": (8, 9), "L40": (8, 9), "RTX-6000-ADA": (8, 9),
    "H100": (9, 0), "H200": (9, 0), "H20": (9, 0), "H800": (9, 0), "GH200": (9, 0),
    "B100": (10, 0), "B200": (10, 0), "GB200": (10, 0), "B300": (10, 3), "GB300": (10, 3),
    "RTX-PRO": (12, 0),
    "RTX-50": (12, 0), "RTX-40": (8, 9), "RTX-30": (8, 6), "RTX-20": (7, 5),
    "T4": (7, 5), "TITAN-RTX": (7, 5), "QUADRO-RTX": (7, 5), "GTX-16": (7, 5),
    "V100": (7, 0), "TITAN-V": (7, 0),
    "P100": (6, 0), "P40": (6, 1), "P4": (6, 1), "GTX-10": (6, 1),
}  # fmt: skip


def capability_of(target: Device | DeviceProfile) -> tuple[int, int]:
    """The compute capability of a card, ``DEFAULT`` if it is not known."""
    given = getattr(target, "compute_capability", None)
    if given is not None:
        return given
    name = target.model if isinstance(target, Device) else target.name
    name = name.upper().replace(" ", "-")
    for brand in ("NVIDIA-", "GEFORCE-", "TESLA-"):
        name = name.removeprefix(brand)
    known = [prefix for prefix in _OF if name.startswith(prefix)]
    return _OF[max(known, key=len)] if known else DEFAULT
