"""Formatting of nodes, lines, and modules for the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from ..graph.ir import Node, SourceLine
from ..graph.modules import known_path

N = TypeVar("N", int, float)


def where(node: Node) -> str:
    """``"addmm_12 in net.h.0.mlp (forward) at line 3"``."""
    parts = [node.name]
    if module := known_path(node):
        parts.append(f"in {module}")
    if node.phase != "other" and not _initializes(node):
        parts.append(f"({node.phase})")
    if node.source is not None:
        parts.append(f"at {line_text(node.source)}")
    return " ".join(parts)


def _initializes(node: Node) -> bool:
    """Whether ``node`` fills a model's parameters or buffers, such as ``net.cuda()``: it is of no pass."""
    filled = [value.storage.role in ("parameter", "buffer") for value in node.outputs]
    return node.phase == "forward" and not node.root and not node.module and bool(filled) and all(filled)


def line_text(source: SourceLine) -> str:
    """``"cell [7], line 3"``, ``"train.py:3"`` of a file: a position that the user can find."""
    return source.short


def line_with_text(source: SourceLine) -> str:
    text = source.text.strip()
    return f"{line_text(source)}: {text}" if text else line_text(source)


def category_text(name: object) -> str:
    """The displayed name of a category: ``"KV cache"`` for ``"kv_cache"``."""
    return "KV cache" if str(name) == "kv_cache" else str(name)


def family(module: str) -> str:
    """The path with every number as ``*``: ``"h.3.attn"`` -> ``"h.*.attn"``."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def folded_modules(by_module: Mapping[str, N]) -> dict[str, N]:
    """Modules that differ only in numbers as one: ``"h.*.mlp × 12"``; fewer than three stay as they are."""
    families: dict[str, list[str]] = {}
    for module in by_module:
        families.setdefault(family(module), []).append(module)
    folded: dict[str, N] = {}
    for pattern, modules in families.items():
        if len(modules) < 3:
            folded |= {module: by_module[module] for module in modules}
        else:
            folded[f"{pattern} × {len(modules)}"] = sum(by_module[module] for module in modules)
    return folded
