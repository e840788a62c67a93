"""Base class of objects that cannot be pickled or deep-copied, because they belong to this process."""

from __future__ import annotations

from typing import Any, NoReturn, SupportsIndex


class Unpicklable:
    """Cannot be pickled or deep-copied, because it refers to recorded operations and, through them, to
    tensors.

    Without this class, Python's error would name a class that users do not know.
    """

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} refers to operations that this process has recorded, so it can be"
            " neither pickled nor deep-copied; keep its numbers, plan.explain() or graph.text(), or a file"
            " of graph.save()"
        )

    def __copy__(self) -> Any:
        return self
