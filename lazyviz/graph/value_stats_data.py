"""Value statistics as data: a few numbers instead of the tensor."""

from __future__ import annotations

from dataclasses import dataclass

BINS = 16


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics of the values of one tensor; for complex tensors, of their absolute values.

    ``least``, ``largest``, and ``mean`` cover the ``finite`` values among ``count`` (``None`` if there are
    none); ``nan``, ``plus_inf``, and ``minus_inf`` count the others. ``histogram`` counts the finite values
    in equal bins from ``least`` to ``largest``; it is empty if these are equal.
    """

    count: int
    nan: int
    plus_inf: int
    minus_inf: int
    least: float | None
    largest: float | None
    mean: float | None
    histogram: tuple[int, ...] = ()

    @property
    def finite(self) -> int:
        return self.count - self.nan - self.inf

    @property
    def inf(self) -> int:
        """The number of infinities of either sign."""
        return self.plus_inf + self.minus_inf

    @property
    def nan_share(self) -> float:
        """The share of values that are NaN, from 0 to 1."""
        return self.nan / self.count if self.count else 0.0

    @property
    def inf_share(self) -> float:
        """The share of values that are infinite, from 0 to 1."""
        return self.inf / self.count if self.count else 0.0

    def __str__(self) -> str:
        parts = [f"{self.count:,} value{'' if self.count == 1 else 's'}"]
        if self.count == 1 and self.mean is not None:
            parts.append(f"{self.mean:.4g}")
        elif self.least is not None and self.largest is not None and self.mean is not None:
            parts.append(f"{self.least:.4g} to {self.largest:.4g}, mean {self.mean:.4g}")
        if self.nan:
            parts.append(f"{share_text(self.nan_share)} NaN")
        if self.inf:
            parts.append(f"{share_text(self.inf_share)} infinite")
        return ", ".join(parts)


def share_text(share: float) -> str:
    """``0.123`` -> ``"12.3 %"``; nonzero shares are not rounded to 0 %, nor shares below 1 to 100 %."""
    if 0 < share < 0.001:
        return "under 0.1 %"
    if 0.999 < share < 1:
        return "over 99.9 %"
    return f"{100 * share:.3g} %"
