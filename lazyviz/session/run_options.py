"""Run options: backend, split, recompute, and others, and the check that rejects invalid combinations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..execute.backend_registry import find_backend
from ..execute.microbatch.ray_and_ipyparallel import is_cluster
from ..plan.batch.split_plan import BATCH_NEEDED, check_split
from ..plan.units import parse_bytes
from ..record.fake_cuda.generate_until_max_length import UNTIL_MAX_NEW_TOKENS
from .argument_type_checks import check_type

Recompute = int | str
"""A peak in bytes, ``"auto"`` or ``"off"``."""

CLUSTER_NEEDS_BATCH = "{backend!r} runs pieces of the batch: name its tensors (--batch, batch=)"


@dataclass(frozen=True)
class RunOptions:
    """How to run nodes, as requested; see :meth:`lazyviz.session.lazy_graph.LazyGraph.evaluate`.

    ``recompute`` is a budget in bytes, ``"auto"``, or ``"off"``.
    """

    backend: str = "eager"
    progress: Callable[[Any], None] | None = None
    cancel: threading.Event | None = None
    split: int | str = "off"
    recompute: Recompute = "off"
    summaries: bool | None = None
    timings: bool | None = None
    verify: bool = False

    def validate(self, *, has_batch: bool = True) -> None:
        """Raise ``ValueError`` unless the backend, ``split``, and ``recompute`` can be combined.

        ``has_batch``: the tensors of the batch are named.
        """
        backend, split = self.backend, self.split
        check_split(split)
        cluster = is_cluster(find_backend(backend))
        is_split = split not in (None, "off", 1)
        if cluster and not has_batch:
            raise ValueError(CLUSTER_NEEDS_BATCH.format(backend=backend))
        if is_split and not has_batch:
            raise ValueError(f"a split {BATCH_NEEDED}")
        if is_split and backend != "eager" and not cluster:
            raise ValueError(f"a split batch needs the backend 'eager', not {backend!r}")
        if self.recompute == "off":
            return
        if backend != "eager":
            raise ValueError(f"a run that recomputes needs the backend 'eager', not {backend!r}")
        if is_split and not split == self.recompute == "auto":
            raise ValueError(
                "recompute and split can be combined only when both are 'auto': the batch is split if that "
                "is enough; otherwise activations are recomputed"
            )


def recompute_option(given: Any) -> Recompute:
    """``"off"``, ``"auto"`` or a number of bytes.

    Raises ``ValueError`` for anything else.
    """
    if given is None:
        return "off"
    if given in ("off", "auto"):
        return str(given)
    try:
        return parse_bytes(given)
    except ValueError:
        raise ValueError(
            f"recompute must be 'off', 'auto', or a size such as '2 GiB', not {given!r}"
        ) from None


def assumptions(assume: Mapping[Any, Any] | str | None) -> dict[int | str, Any] | None:
    """``assume`` of :func:`lazyviz.lazy` as a mapping.

    Raises:
        TypeError: neither a mapping nor text.
        ValueError: text that is not :data:`UNTIL_MAX_NEW_TOKENS`.
    """
    if isinstance(assume, str):
        if assume != UNTIL_MAX_NEW_TOKENS:
            raise ValueError(f"assume must be {{LINE: VALUE}} or {UNTIL_MAX_NEW_TOKENS!r}, not {assume!r}")
        return {assume: True}
    check_type("assume", assume, Mapping, "{LINE: VALUE}", optional=True)
    return None if assume is None else dict[int | str, Any](assume.items())
