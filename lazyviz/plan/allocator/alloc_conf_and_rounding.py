"""Allocator configuration (``PYTORCH_CUDA_ALLOC_CONF``), and the sizes that requests are rounded to.

It follows ``c10/core/AllocatorConfig.h`` and ``.cpp``, and ``c10/cuda/CUDAAllocatorConfig.h`` of PyTorch
2.13; their names are in brackets below.  All sizes are bytes unless a name says ``_mb``, which is MiB as in
PyTorch's options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

MIB = 2**20
# All from c10/core/AllocatorConfig.h.
BLOCK_GRAIN = 512  # kMinBlockSize: block sizes are multiples of it
SMALL_LIMIT = MIB  # kSmallSize: the largest block of the small pool
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer: a segment of the small pool
MIDDLE_LIMIT = 10 * MIB  # kMinLargeAlloc: below it, requests of the large pool share segments
LARGE_GRAIN = 2 * MIB  # kRoundLarge: larger requests get their own segment, rounded up to this
LARGE_SEGMENT_MB = 20  # large_segment_size_: default size of shared segments
# kRoundUpPowerOfTwoIntervals in c10/core/AllocatorConfig.cpp: 1 MiB, 2 MiB, ... 32 GiB and more.
ROUNDING_INTERVALS = 16


@dataclass(frozen=True, slots=True)
class AllocatorConfig:
    """The options of ``PYTORCH_CUDA_ALLOC_CONF`` that affect reserved memory; the defaults are PyTorch's.

    ``None`` for a size means "unlimited" (``max_split_size_mb``) or "as ``large_segment_size_mb``"
    (``max_non_split_rounding_mb``).  ``roundup_power2_divisions`` has one number for each of the
    16 intervals from 1 MiB up; 0 and 1 are off.  Only the ``"native"`` backend is simulated:
    for other backends, the reserved bytes are unknown.
    """

    expandable_segments: bool = False
    max_split_size_mb: int | None = None
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: tuple[int, ...] = (0,) * ROUNDING_INTERVALS
    max_non_split_rounding_mb: int | None = None
    large_segment_size_mb: int = LARGE_SEGMENT_MB
    per_process_memory_fraction: float = 1.0
    backend: str = "native"

    @classmethod
    def parse(cls, text: str) -> AllocatorConfig:
        """The configuration for ``PYTORCH_CUDA_ALLOC_CONF=text``.

        Keys other than the fields' names are ignored. A value that PyTorch rejects raises a ``ValueError``
        with key and value.
        """
        found = cls()
        for key, value in _options(text):
            reader = _READERS.get(key)
            if reader is None:
                continue
            try:
                found = replace(found, **{key: reader(value)})
            except ValueError as error:
                reason = f"{key}:{value} in the CUDA allocator's options is not valid: {error}"
                raise ValueError(reason) from None
        segment = found.large_segment_size_mb
        for key in ("max_split_size_mb", "max_non_split_rounding_mb"):
            if (size := getattr(found, key)) is not None and size < segment:
                raise ValueError(f"{key}:{size} in the CUDA allocator's options is below {segment} MiB.")
        return found

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> AllocatorConfig:
        """The value of ``PYTORCH_CUDA_ALLOC_CONF``, or else of ``PYTORCH_ALLOC_CONF``."""
        return cls.parse(
            environment.get("PYTORCH_CUDA_ALLOC_CONF") or environment.get("PYTORCH_ALLOC_CONF") or ""
        )

    def rounded(self, nbytes: int) -> int:
        """The minimum size of the block for a request of ``nbytes`` [round_size]."""
        interval = min(max(nbytes.bit_length() - 21, 0), ROUNDING_INTERVALS - 1)
        divisions = self.roundup_power2_divisions[interval]
        if divisions > 1 and nbytes > BLOCK_GRAIN * divisions:
            # Up to the next of `divisions` equal steps between two powers of two.
            step = 1 << (nbytes.bit_length() - divisions.bit_length())
            return (nbytes + step - 1) & -step
        return max(nbytes + BLOCK_GRAIN - 1, BLOCK_GRAIN) & -BLOCK_GRAIN

    def segment(self, size: int) -> int:
        """The size requested from CUDA for a block of ``size`` if there is no cached one
        [get_allocation_size].
        """
        if size <= SMALL_LIMIT:
            return SMALL_SEGMENT
        if size < MIDDLE_LIMIT:
            return self.large_segment_size_mb * MIB
        return (size + LARGE_GRAIN - 1) // LARGE_GRAIN * LARGE_GRAIN


def _options(text: str) -> list[tuple[str, str]]:
    """``"a:1,b:[1:2,3:4]"`` as pairs of key and value; commas in brackets do not separate options."""
    depth, parts = 0, [""]
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == "," and not depth:
            parts.append("")
        elif not character.isspace():
            parts[-1] += character
    pairs = [part.partition(":") for part in parts if part]
    for key, colon, value in pairs:
        if not colon or not value:
            raise ValueError(f"The CUDA allocator's option {key!r} has no value.")
    return [(key, value) for key, _, value in pairs]


def _flag(value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError("True or False was expected.")
    return value == "True"


def _fraction(value: str) -> float:
    number = float(value)
    if not 0 <= number <= 1:
        raise ValueError("a number from 0 to 1 was expected.")
    return number


def _threshold(value: str) -> float:
    number = float(value)
    if not 0 < number < 1:
        raise ValueError("a number between 0 and 1 was expected.")
    return number


def _size_mb(value: str) -> int:
    number = int(value)
    if number <= 0:
        raise ValueError("a number of MiB above 0 was expected.")
    return number


def _segment_mb(value: str) -> int:
    number = int(value)
    if number * MIB <= MIDDLE_LIMIT:
        raise ValueError(f"more than {MIDDLE_LIMIT // MIB} MiB was expected.")
    return number


def _backend(value: str) -> str:
    if value not in ("native", "cudaMallocAsync"):
        raise ValueError("native or cudaMallocAsync was expected.")
    return value


def _divisions(value: str) -> tuple[int, ...]:
    if not value.startswith("["):
        return (_power_of_two(value),) * ROUNDING_INTERVALS
    result = [0] * ROUNDING_INTERVALS
    last = -1
    for pair in value.strip("[],").split(","):
        limit, _, number = pair.partition(":")
        divisions = 0 if number == "0" else _power_of_two(number)
        if limit == ">":
            start = max(last, 0) + 1  # also if there was no limit before it, as in PyTorch
            result[start:] = [divisions] * (ROUNDING_INTERVALS - start)
            continue
        index = min(_power_of_two(limit).bit_length() - 1, ROUNDING_INTERVALS - 1)
        if last < 0:
            result[:index] = [divisions] * index
        result[index] = divisions
        last = index
    return tuple(result)


def _power_of_two(value: str) -> int:
    number = int(value)
    if number < 1 or number & (number - 1):
        raise ValueError(f"{value} is not a power of two.")
    return number


_READERS: dict[str, Callable[[str], Any]] = {
    "expandable_segments": _flag,
    "max_split_size_mb": _size_mb,
    "garbage_collection_threshold": _threshold,
    "roundup_power2_divisions": _divisions,
    "max_non_split_rounding_mb": _size_mb,
    "large_segment_size_mb": _segment_mb,
    "per_process_memory_fraction": _fraction,
    "backend": _backend,
}
