"""Option checks: rejected values and combinations of split, recompute, and backend."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..execute.microbatch.clusters import is_cluster
from ..execute.registry import find_backend
from ..plan.batch.split import BATCH_NEEDED, check_split
from ..plan.units import parse_bytes
from ..record.fake_cuda.generation import UNTIL_MAX_NEW_TOKENS

Recompute = int | str
"""A peak in bytes, ``"auto"`` or ``"off"``."""

CLUSTER_NEEDS_BATCH = "{backend!r} runs pieces of the batch: name its tensors (--batch, batch=)"


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


def check_type(
    name: str, given: Any, kinds: type | tuple[type, ...], expected: str, *, optional: bool = False
) -> None:
    """Raise ``TypeError`` unless ``given`` is of one of ``kinds``, described as ``expected``, or an optional
    ``None``.
    """
    if (given is None and optional) or isinstance(given, kinds):
        return
    raise TypeError(f"{name} must be {expected}, not {type(given).__name__}")


def check_texts(name: str, given: Any, example: str, count: int | None = None) -> None:
    """Raise ``TypeError`` unless ``given`` is a list or tuple of text, with ``count`` elements if given."""
    is_right = isinstance(given, Sequence) and not isinstance(given, str)
    if not is_right or not all(isinstance(each, str) for each in given) or count not in (None, len(given)):
        raise TypeError(f"{name} must be like {example}, not {given!r}")


def check_tensors(function: str, given: Sequence[Any]) -> None:
    """Raise ``TypeError`` unless all of ``given`` are tensors, with the way to pass those of a list."""
    for each in given:
        if not isinstance(each, torch.Tensor):
            remedy = f", use {function}(*tensors)" if isinstance(each, (list, tuple)) else ""
            raise TypeError(f"{function} takes tensors, not {type(each).__name__}{remedy}")


def check_evaluate(tensors: Sequence[Any], progress: Any, cancel: Any, nodes: Any) -> None:
    """Raise ``TypeError`` for wrong arguments of :meth:`lazyviz.session.lazy_graph.LazyGraph.evaluate`."""
    check_tensors("evaluate", tensors)
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be a function, not {type(progress).__name__}")
    if cancel is not None and not callable(getattr(cancel, "is_set", None)):
        raise TypeError(f"cancel must be a threading.Event, not {type(cancel).__name__}")
    check_type("nodes", nodes, Iterable, "a sequence of nodes", optional=True)


def check_save(path: Any, format: Any, title: Any, show: Any) -> None:
    """Raise ``TypeError`` for wrong arguments of :meth:`lazyviz.session.lazy_graph.LazyGraph.save`."""
    check_type("path", path, (str, os.PathLike), "text or a path")
    check_type("format", format, str, "text, such as 'svg'", optional=True)
    check_type("title", title, str, "text", optional=True)
    check_type("show", show, Iterable, "the name of a part, or several", optional=True)


def validate(
    *, split: int | str | None, recompute: int | str = "off", backend: str = "eager", has_batch: bool = True
) -> None:
    """Raise ``ValueError`` unless ``split``, ``recompute``, and ``backend`` can be combined.

    ``split`` and ``recompute`` are as in :meth:`lazyviz.session.lazy_graph.LazyGraph.evaluate`, with a budget
    in bytes; ``has_batch``: the tensors of the batch are named.
    """
    check_split(split)
    cluster = is_cluster(find_backend(backend))
    is_split = split not in (None, "off", 1)
    if cluster and not has_batch:
        raise ValueError(CLUSTER_NEEDS_BATCH.format(backend=backend))
    if is_split and not has_batch:
        raise ValueError(f"a split {BATCH_NEEDED}")
    if is_split and backend != "eager" and not cluster:
        raise ValueError(f"a split batch needs the backend 'eager', not {backend!r}")
    if recompute == "off":
        return
    if backend != "eager":
        raise ValueError(f"a run that recomputes needs the backend 'eager', not {backend!r}")
    if is_split and not split == recompute == "auto":
        raise ValueError(
            "recompute and split can be combined only when both are 'auto': the batch is split if that is "
            "enough; otherwise activations are recomputed"
        )
