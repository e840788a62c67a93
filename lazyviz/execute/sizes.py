"""Sizes as functions of one that varies: what two recordings of the same program tell.

Two steps that differ in their batch differ in many numbers: shapes, strides, arguments of views.  Each is
guessed to be a function of the one input dimension that differs first.  A guess needs no proof: code made
for it is run only for recordings whose every number it gives (:meth:`Sizes.fits`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..graph.ir import TensorMeta

HIGHEST_POWER = 3


@dataclass(frozen=True, slots=True)
class Size:
    """``factor * n ** power + rest`` of the varying size ``n``."""

    factor: int
    power: int
    rest: int = 0

    def __call__(self, n: Any) -> Any:
        """The value at ``n``, which may be a compiler's symbol or node."""
        result = n
        for _ in range(self.power - 1):
            result = result * n
        result = result * self.factor if self.factor != 1 else result
        return result + self.rest if self.rest else result


def at(size: int | Size, n: Any) -> Any:
    """``size``, which may be one that does not vary, at ``n``."""
    return size if isinstance(size, int) else size(n)


@dataclass(frozen=True, slots=True)
class Shapes:
    """Every number of a program that may follow a size: of its tensors and among its arguments.

    Where in its memory a tensor begins is none, but for inputs on one memory that is written (``offsets``).
    """

    inputs: tuple[TensorMeta, ...]
    made: tuple[TensorMeta, ...]
    offsets: tuple[int, ...]
    arguments: tuple[int, ...]

    def numbers(self) -> list[int]:
        found: list[int] = []
        for meta in (*self.inputs, *self.made):
            found += (*meta.shape, *meta.stride)
        return [*found, *self.offsets, *self.arguments]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers of a program as functions of one size: that of ``dimension`` (an input, its dimension)."""

    dimension: tuple[int, int]
    inputs: tuple[tuple[tuple[int | Size, ...], tuple[int | Size, ...]], ...]  # shapes and strides
    arguments: tuple[int | Size, ...]
    every: tuple[int | Size, ...]  # in the order of Shapes.numbers

    def of(self, shapes: Shapes) -> int:
        """The varying size of a recording."""
        return shapes.inputs[self.dimension[0]].shape[self.dimension[1]]

    def dimensions(self, n: Any) -> list[tuple[list[Any], list[Any]]]:
        """Shape and strides of every input at ``n``, which may be a compiler's symbol."""
        return [
            ([at(item, n) for item in shape], [at(item, n) for item in stride])
            for shape, stride in self.inputs
        ]

    def fits(self, shapes: Shapes) -> bool:
        """Whether these functions give every number of ``shapes``."""
        n = self.of(shapes)
        numbers = shapes.numbers()
        return len(numbers) == len(self.every) and all(
            mine == at(given, n) for mine, given in zip(numbers, self.every)
        )


def follow(known: Shapes, new: Shapes) -> Sizes | None:
    """Two recordings' numbers as functions of the first input dimension that differs; None: they are none.

    Both are of one program, so that they have the same tensors with the same dimensions.
    """
    varying = next(
        (
            (number, dim)
            for number, (one, other) in enumerate(zip(known.inputs, new.inputs, strict=True))
            for dim, (before, now) in enumerate(zip(one.shape, other.shape, strict=True))
            if before != now
        ),
        None,
    )
    if varying is None:
        return None
    old, now = (each.inputs[varying[0]].shape[varying[1]] for each in (known, new))
    functions: list[int | Size] = []
    for one, other in zip(known.numbers(), new.numbers(), strict=True):
        function = one if one == other else _through(old, one, now, other)
        if function is None:
            return None
        functions.append(function)
    inputs = []
    position = 0
    for meta in new.inputs:
        rank = len(meta.shape)
        shape, stride = functions[position : position + rank], functions[position + rank :][:rank]
        inputs.append((tuple(shape), tuple(stride)))
        position += 2 * rank
    arguments = functions[len(functions) - len(new.arguments) :]
    return Sizes(varying, tuple(inputs), tuple(arguments), tuple(functions))


def _through(old: int, one: int, now: int, other: int) -> Size | None:
    """A function with the value ``one`` at ``old`` and ``other`` at ``now``; the likeliest is a product."""
    for power in range(1, HIGHEST_POWER + 1):
        if one % old**power == 0 and other == one // old**power * now**power:
            return Size(one // old**power, power)
    factor, left = divmod(other - one, now - old)
    return None if left else Size(factor, 1, one - factor * old)
