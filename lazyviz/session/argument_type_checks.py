"""Argument checks: one ``TypeError`` that names the argument, before anything else happens."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch


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


def check_save(path: Any, format: Any, title: Any, show: Any, **switches: Any) -> None:
    """Raise ``TypeError`` for wrong arguments of :meth:`lazyviz.session.lazy_graph.LazyGraph.save`."""
    check_type("path", path, (str, os.PathLike), "text or a path")
    check_type("format", format, str, "text, such as 'svg'", optional=True)
    check_type("title", title, str, "text", optional=True)
    check_type("show", show, Iterable, "the name of a part, or several", optional=True)
    for name, given in switches.items():
        check_type(name, given, bool, "True or False", optional=name == "legend")
