"""Inferred outputs: the result metadata of an op, as shape inference caches it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...graph.ir import TensorMeta
from .operator_schema_properties import OpInfo


class OutputSpec:
    """One output: on fresh memory (``source`` None), a view of input ``source``, or that input itself."""

    __slots__ = ("fresh", "itself", "meta", "nbytes", "source")

    def __init__(self, meta: TensorMeta, source: int | None, itself: bool, fresh: int, nbytes: int) -> None:
        self.meta = meta
        self.source = source  # position among the call's tensor inputs
        self.itself = itself
        self.fresh = fresh  # outputs with the same number share one new storage
        self.nbytes = nbytes  # of that storage


# Sizes that are returned beside tensors are numbers that metadata determines.
Output = OutputSpec | int | None


class Inferred:
    """The cached answer for one call."""

    __slots__ = ("container", "dtype", "on_meta", "outputs", "restructured", "special", "to_cpu")

    def __init__(
        self,
        info: OpInfo,
        container: Callable[[list[Any]], Any] | None,
        outputs: list[Output],
        restructured: list[tuple[int, TensorMeta]],
        from_cpu: bool,
    ) -> None:
        self.container = (
            container  # creates the tuple or list that the op returns, None for a bare tensor or nothing
        )
        self.outputs = outputs
        self.restructured = restructured  # inputs whose metadata the op changes in place
        meta = next((spec.meta for spec in outputs if isinstance(spec, OutputSpec)), None)
        self.on_meta = meta is not None and meta.device.type == "meta"
        self.to_cpu = (
            info.name in ("_to_copy", "copy_", "to")
            and not from_cpu
            and meta is not None
            and meta.device.type == "cpu"
        )
        self.dtype = meta.dtype if info.fills_dtype and meta is not None else None
        self.special = self.to_cpu or self.dtype is not None or bool(restructured)
