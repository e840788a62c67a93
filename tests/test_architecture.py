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
    "_torch": set(),
    "_torch_calls": {"_torch"},  # what a recorded operator is called by: for execution alone
    "_torch_level": {"_torch"},  # where recorded kernels run
    "_kernels": {"_torch"},  # private APIs too, on what kernels choose: for the plan alone
    "_torch_cuda": {"_torch"},
    "_torch_cuda_graphs": set(),  # around the capture of CUDA Graphs: for that backend alone
    "_torch_random": set(),  # on generators: for recording alone
    "_torch_owners": set(),  # on who owns a storage's memory: for recording alone
    "_torch_composites": {"_tracebacks"},  # functions made of others: likewise
    "_tracebacks": set(),  # what errors show: for all that user code calls
    "_torch_memory": {"_torch"},  # who gets at it past the dispatcher: likewise
    "_torch_compile": set(),  # around `torch.compile`: for recording, and for the backend that compiles
    "_torch_functional": set(),  # makes programs functional, for the backend that hands them to JAX
    "_torchax": set(),  # torchax's table, without what importing it does to the process
    "_cudnn": set(),  # sizes: record makes tensors of them, the plan their range
    "_compiled": set(),  # finds the modules that are compiled on installation
    "metrics": set(),
    "cell": {"_tracebacks", "record"},
    "magic_options": {"absence", "batching", "recomputing", "plan", "execute"},
    "record": {
        "_compiled",
        "_torch",
        "_tracebacks",
        "_torch_compile",
        "_torch_cuda",
        "_torch_owners",
        "_torch_random",
        "_torch_composites",
        "_torch_memory",
        "_torch_level",
        "_cudnn",
        "record",
        "graph.ir",
    },
    "graph": {"_torch", "graph"},
    "plan": {"_torch", "_kernels", "_cudnn", "graph", "plan"},
    "view": {"_torch", "graph", "plan", "view"},
    "execute": {
        "_compiled",
        "_torch",
        "_torch_calls",
        "_torch_compile",
        "_torch_cuda",
        "_torch_cuda_graphs",
        "_torch_functional",
        "_torch_level",
        "_torchax",
        "record",
        "graph",
        "plan",
        "execute",
    },
    "absence": {"_torch_cuda", "record", "graph", "plan"},  # a part of session
    "batching": {"_torch", "record", "graph", "plan", "execute", "session"},  # another
    "choices": {"batching", "recomputing", "record", "graph", "plan", "execute"},  # another
    "recomputing": {"record", "graph", "plan", "session"},  # another
    "diagnostics": {
        "_compiled",
        "evaluate_all",
        "evaluation",
        "record",
        "graph",
        "plan",
        "execute",
        "session",
    },  # another
    "evaluate_all": {
        "absence",
        "batching",
        "evaluation",
        "recomputing",
        "record",
        "plan",
        "execute",
        "session",
    },  # another
    "showing": {"graph", "plan", "view"},  # another
    "evaluation": {
        "_torch_cuda",
        "absence",
        "batching",
        "recomputing",
        "record",
        "graph",
        "plan",
        "execute",
        "metrics",
        "session",
    },  # another
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
        assert stage in ("__init__", "session", "magic", "budget", "testing"), (
            f"{stage} has no place in the house"
        )
        return
    for module in imports_of(path):
        allowed = any(module == name or module.startswith(f"{name}.") for name in MAY_IMPORT[stage])
        assert allowed, f"{path.name} imports {module}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_fits_in_a_head(path):
    assert len(path.read_text().splitlines()) <= 500
