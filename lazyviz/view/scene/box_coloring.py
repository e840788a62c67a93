"""Box attributes for coloring: dtype, module, and bytes alive at the plan's peak."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from ...graph.ir import Node
from ...graph.modules import full_name, module_path, root_key, root_name
from .boxes import Box, Hierarchy

if TYPE_CHECKING:
    from .plan_protocol import AllocationLike

MIXED = "mixed"


class Facts:
    """Facts about every box of a hierarchy; a group combines the facts of the boxes inside it."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._hierarchy = hierarchy
        self._dtypes: dict[Box, torch.dtype | None] = {}  # None: several
        self._modules: dict[Box, str] = {}
        roots = {root_key(node.root) for node in hierarchy.graph.nodes if node.root}
        self._only_root = len(roots) == 1
        # Children come after their parents in `boxes`.
        for box in reversed(hierarchy.boxes.values()):
            if box.node is not None:
                value = next(iter(box.node.outputs), None)
                if value is not None:
                    self._dtypes[box] = value.dtype
                self._modules[box] = self._module(box.node)
            elif box.values and not box.children:
                self._dtypes[box] = box.values[0].dtype
            parent = box.parent
            if (
                parent is None
                or box.kind == "input"
                or box.kind in ("output", "error")
                or box.sync is not None
            ):
                continue
            if box in self._dtypes:
                known = self._dtypes.setdefault(parent, self._dtypes[box])
                if known is not self._dtypes[box]:
                    self._dtypes[parent] = _of_both(known, self._dtypes[box])
            module = self._modules.get(box, "")
            before = self._modules.setdefault(parent, module)
            if before != module:
                self._modules[parent] = _common(before, module)

    def dtype(self, box: Box) -> str:
        """``"float32"``, ``"mixed"`` for a group with several dtypes, ``""`` if nothing is created."""
        if box not in self._dtypes:
            return ""
        dtype = self._dtypes[box]
        return MIXED if dtype is None else str(dtype).removeprefix("torch.")

    def module(self, box: Box) -> str:
        """The path of the innermost module that contains all of ``box``, ``""`` if there is none."""
        return self._modules.get(box, "")

    def held(self, alive: Iterable[AllocationLike]) -> dict[Box, dict[str, int]]:
        """For each box, the bytes of its op results and weights among ``alive``, by category."""
        result: dict[Box, dict[str, int]] = {}
        of_storage: dict[int, Box] = {}
        for box in self._hierarchy.boxes.values():
            if box.kind == "input":
                for value in box.values:
                    of_storage.setdefault(value.storage.id, box)
        for allocation in alive:
            storage = getattr(allocation, "storage", None)
            if allocation.node is not None:
                maker: Box | None = self._hierarchy.box_of[allocation.node.index]
            else:
                maker = of_storage.get(storage.id) if storage is not None else None
            while maker is not None:
                sizes = result.setdefault(maker, {})
                category = str(allocation.category)
                sizes[category] = sizes.get(category, 0) + allocation.nbytes
                maker = maker.parent
        return result

    def _module(self, node: Node) -> str:
        """The module of an op; for an optimizer's op, that of the parameter that it writes."""
        if node.phase == "optimizer":
            names = [storage.name for storage in node.writes if storage.role == "parameter"]
            name = names[0] if len(names) == 1 else ""
            return (name if self._only_root else full_name(name)).rpartition(".")[0]
        if self._only_root:
            return node.module or root_name(node.root)
        return module_path(node)


def _of_both(one: torch.dtype | None, other: torch.dtype | None) -> torch.dtype | None:
    """The dtype of a group that contains both, ``None`` if mixed.

    A group with a single floating-point or complex dtype counts as that dtype, even if it also contains
    integers or booleans.
    """
    if one is None or other is None or one is other:
        return None if one is not other else one
    computes = [dtype for dtype in (one, other) if dtype.is_floating_point or dtype.is_complex]
    return computes[0] if len(computes) == 1 else None


def _common(one: str, other: str) -> str:
    """The longest common prefix of two module paths."""
    parts = []
    for a, b in zip(one.split("."), other.split("."), strict=False):
        if a != b:
            break
        parts.append(a)
    return ".".join(parts)
