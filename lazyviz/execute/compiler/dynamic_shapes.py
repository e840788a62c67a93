"""Dynamic shapes: sizes as functions of one varying size, inferred from several recordings.

Two steps with different batch sizes differ in many numbers: shapes, strides, arguments of views.  Each of
these is assumed to be a function of the size that differs first.  The assumption needs no proof, because code
compiled for it runs only for recordings for which it gives every number correctly (:meth:`Sizes.fits`).  More
recordings leave fewer possible functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...graph.ir import TensorMeta

HIGHEST_POWER = 3
HIGHEST_DIVISOR = 8
# The numbers that may be added before a division: 0 first, because halves are more frequent than strides of
# windows.
_SHIFTS = sorted(range(-HIGHEST_DIVISOR, HIGHEST_DIVISOR + 1), key=abs)


@dataclass(frozen=True, slots=True)
class Size:
    """``factor * ((n + shift) // divisor) ** power + rest`` of the varying size ``n``."""

    factor: int
    power: int
    rest: int = 0
    divisor: int = 1
    shift: int = 0

    def __call__(self, n: Any) -> Any:
        """The value at ``n``, which may be a compiler's symbol or node."""
        n = n + self.shift if self.shift else n
        n = n // self.divisor if self.divisor != 1 else n
        result = n
        for _ in range(self.power - 1):
            result = result * n
        result = result * self.factor if self.factor != 1 else result
        return result + self.rest if self.rest else result


def at(size: int | Size, n: Any) -> Any:
    """``size``, which may be constant, at ``n``."""
    return size if isinstance(size, int) else size(n)


@dataclass(frozen=True, slots=True)
class Shapes:
    """All numbers of a program that may depend on a size: those of its tensors and those among its arguments.

    The offset of a tensor in its memory is not one, except for inputs on one memory that is written
    (``offsets``).
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
    """The numbers of a program as functions of one size.

    This size is that of ``dimension``: an input and its dimension, or, if a program creates its data itself,
    the argument at that position.
    """

    dimension: tuple[int, int] | int
    inputs: tuple[tuple[tuple[int | Size, ...], tuple[int | Size, ...]], ...]  # shapes and strides
    arguments: tuple[int | Size, ...]
    every: tuple[int | Size, ...]  # in the order of Shapes.numbers

    def of(self, shapes: Shapes) -> int:
        """The varying size of a recording."""
        return _size_at(shapes, self.dimension)

    def dimensions(self, n: Any) -> list[tuple[list[Any], list[Any]]]:
        """Shape and strides of every input at ``n``, which may be a compiler's symbol."""
        return [
            ([at(item, n) for item in shape], [at(item, n) for item in stride])
            for shape, stride in self.inputs
        ]

    def fits(self, shapes: Shapes) -> bool:
        """Whether these functions are right for every number of ``shapes``."""
        n = self.of(shapes)
        numbers = shapes.numbers()
        return len(numbers) == len(self.every) and all(
            mine == at(given, n) for mine, given in zip(numbers, self.every)
        )


def follow(known: Sequence[Shapes], new: Shapes) -> Sizes | None:
    """The numbers of several recordings as functions of the first size that differs; None if there are no
    such functions.

    All are of one program, so they have the same tensors with the same dimensions. Of ``known``, oldest
    first, the latest recordings are used for which there are such functions.
    """
    for oldest in range(len(known)):
        if (found := _followed([*known[oldest:], new])) is not None:
            return found
    return None


def _size_at(shapes: Shapes, place: tuple[int, int] | int) -> int:
    return shapes.arguments[place] if isinstance(place, int) else shapes.inputs[place[0]].shape[place[1]]


def _followed(recordings: Sequence[Shapes]) -> Sizes | None:
    new = recordings[-1]
    dimensions = ((number, dim) for number, meta in enumerate(new.inputs) for dim in range(len(meta.shape)))
    places: list[tuple[int, int] | int] = [*dimensions, *range(len(new.arguments))]
    for place in places:
        sizes = [_size_at(each, place) for each in recordings]
        if len(set(sizes)) > 1:
            break
    else:
        return None
    functions: list[int | Size] = []
    for numbers in zip(*[each.numbers() for each in recordings], strict=True):
        function = numbers[0] if len(set(numbers)) == 1 else _through(sizes, numbers)
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
    return Sizes(place, tuple(inputs), tuple(arguments), tuple(functions))


def _through(sizes: Sequence[int], numbers: Sequence[int]) -> Size | None:
    """A function with these values at these sizes; products are most likely, then sums, then quotients."""

    def product(divisor: int, shift: int) -> Size | None:
        parts = [(size + shift) // divisor for size in sizes]
        for power in range(1, HIGHEST_POWER + 1):
            factor, left = divmod(numbers[-1], parts[-1] ** power) if parts[-1] > 0 else (0, 0)
            if factor and not left and all(n == factor * m**power for n, m in zip(numbers, parts)):
                return Size(factor, power, 0, divisor, shift)
        return None

    def line(divisor: int, shift: int) -> Size | None:
        parts = [(size + shift) // divisor for size in sizes]
        at = next((at for at, part in enumerate(parts) if part != parts[-1]), None)
        if at is None:
            return None
        factor, left = divmod(numbers[at] - numbers[-1], parts[at] - parts[-1])
        function = Size(factor, 1, numbers[-1] - factor * parts[-1], divisor, shift)
        return function if not left and all(n == function(m) for n, m in zip(numbers, sizes)) else None

    divisions = [(divisor, shift) for shift in _SHIFTS for divisor in range(2, HIGHEST_DIVISOR + 1)]
    return (
        product(1, 0)
        or line(1, 0)
        or next((found for each in divisions if (found := product(*each)) is not None), None)
        # Two points allow too many of these.
        or (
            next((found for each in divisions if (found := line(*each)) is not None), None)
            if len(set(sizes)) > 2
            else None
        )
    )
