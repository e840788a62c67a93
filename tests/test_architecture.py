"""The house keeps its floor plan: data flows one way, and imports with it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import lazyviz

PACKAGE = Path(lazyviz.__file__).parent
# What modules of a stage may import from the package. `graph.ir` is the vocabulary that recording
# writes in; the rest of `graph` comes after it.
MAY_IMPORT = {
    "process": {"process"},  # signals, transactions, tracebacks: of this process, for all
    "torch_internals": {"process", "torch_internals"},  # private PyTorch APIs, with nothing of lazyviz's
    "record": {
        "process",
        "torch_internals.private_api",
        "torch_internals.native_modules",
        "torch_internals.dynamo",
        "torch_internals.cuda",
        "torch_internals.storage_owners",
        "torch_internals.generators",
        "torch_internals.composite_ops",
        "torch_internals.tensor_memory",
        "torch_internals.dispatch_handlers",
        "torch_internals.dispatch_level",
        "torch_internals.cudnn_sizes",
        "record",
        "graph.ir",
    },
    "graph": {"torch_internals.private_api", "graph"},
    "plan": {
        "process",
        "torch_internals.private_api",
        "torch_internals.kernel_selection",
        "torch_internals.cudnn_sizes",
        "graph",
        "plan",
    },
    "view": {"process", "torch_internals.private_api", "graph", "plan", "view"},
    "execute": {
        "process",
        "torch_internals.private_api",
        "torch_internals.native_modules",
        "torch_internals.op_calls",
        "torch_internals.dynamo",
        "torch_internals.cuda",
        "torch_internals.cuda_graph_capture",
        "torch_internals.functionalization",
        "torch_internals.dispatch_level",
        "torch_internals.torchax_table",
        "record",
        "graph",
        "plan",
        "execute",
    },
    # The composition: it alone brings recording, planning, running and pictures together.
    "session": {"process", "torch_internals", "record", "graph", "plan", "view", "execute", "session"},
    "notebook": {"process", "record", "graph", "plan", "view", "execute", "session", "notebook"},
    "testing": {"graph", "plan", "execute", "session", "testing"},
}
MODULES = sorted(PACKAGE.rglob("*.py"))


def imports_of(path: Path) -> set[str]:
    """Modules of this package that the file imports, as dotted names below the package."""
    inside = path.relative_to(PACKAGE).with_suffix("").parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*inside[: len(inside) - node.level], *(node.module.split(".") if node.module else [])]
            if (PACKAGE.joinpath(*base)).is_dir():
                found |= {".".join([*base, name.name]) for name in node.names}
            else:
                found.add(".".join(base))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lazyviz"):
            found.add((node.module or "").removeprefix("lazyviz").lstrip("."))
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_from_earlier_stages(path):
    stage = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if stage not in MAY_IMPORT:
        assert stage == "__init__", f"{stage} has no place in the house"
        return
    for module in imports_of(path):
        allowed = any(module == name or module.startswith(f"{name}.") for name in MAY_IMPORT[stage])
        assert allowed, f"{path.name} imports {module}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_fits_in_a_head(path):
    assert len(path.read_text().splitlines()) <= 520
