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
    "_torch": {"_torch_modes"},
    "_torch_modes": set(),  # the dispatch modes of a thread
    "_torch_calls": {"_torch", "_transaction"},  # what a recorded operator is called by: for execution alone
    "_torch_level": {"_torch"},  # where recorded kernels run
    "_torch_handlers": {"_torch"},  # what the handler of our mode leaves to others: for recording alone
    "_kernels": {"_torch"},  # private APIs too, on what kernels choose: for the plan alone
    "_torch_cuda": {"_torch", "_transaction"},
    "_torch_cuda_graphs": set(),  # around the capture of CUDA Graphs: for that backend alone
    "_torch_random": set(),  # on generators: for recording alone
    "_torch_owners": set(),  # on who owns a storage's memory: for recording alone
    "_torch_composites": {"_tracebacks"},  # functions made of others: likewise
    "_transaction": set(),  # how state is exchanged and given back: for all that does
    "_tracebacks": set(),  # what errors show: for all that user code calls
    "_torch_memory": {"_torch"},  # who gets at it past the dispatcher: likewise
    "_torch_compile": set(),  # around `torch.compile`: for recording, and for the backend that compiles
    "_torch_functional": set(),  # makes programs functional, for the backend that hands them to JAX
    "_torchax": set(),  # torchax's table, without what importing it does to the process
    "_cudnn": set(),  # sizes: record makes tensors of them, the plan their range
    "_signals": set(),  # their handlers wait while state is exchanged: for whoever runs nodes
    "_compiled": set(),  # finds the modules that are compiled on installation
    "metrics": set(),
    "cell": {"_tracebacks", "record"},
    "magic_options": {"absence", "batching", "recomputing", "plan", "execute"},
    "record": {
        "_compiled",
        "_torch",
        "_tracebacks",
        "_transaction",
        "_torch_compile",
        "_torch_cuda",
        "_torch_owners",
        "_torch_random",
        "_torch_composites",
        "_torch_memory",
        "_torch_handlers",
        "_torch_level",
        "_cudnn",
        "record",
        "graph.ir",
    },
    "graph": {"_torch", "graph"},
    "plan": {"_torch", "_kernels", "_cudnn", "_transaction", "graph", "plan"},
    "view": {"_torch", "_tracebacks", "graph", "plan", "view"},
    "execute": {
        "_compiled",
        "_signals",
        "_torch",
        "_torch_calls",
        "_torch_compile",
        "_torch_cuda",
        "_torch_cuda_graphs",
        "_torch_functional",
        "_torch_level",
        "_torchax",
        "_transaction",
        "record",
        "graph",
        "plan",
        "execute",
    },
    "absence": {"_torch_cuda", "_transaction", "record", "graph", "plan"},  # a part of session
    "block": {
        "_tracebacks",
        "_transaction",
        "absence",
        "batching",
        "evaluation",
        "recomputing",
        "record",
        "graph",
        "plan",
        "execute",
        "session",
    },  # another
    "batching": {"_torch", "record", "graph", "plan", "execute", "session"},  # another
    "choices": {"_tracebacks", "batching", "recomputing", "record", "graph", "plan", "execute"},  # another
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
    "self_check": {"_compiled", "block", "evaluation", "record", "plan"},  # another
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
        "_signals",
        "_transaction",
        "_torch_cuda",
        "absence",
        "record",
        "graph",
        "plan",
        "execute",
        "metrics",
        "session",
        "ways",
    },  # another
    "sync_runs": {
        "_signals",
        "_torch_cuda",
        "_transaction",
        "evaluation",
        "record",
        "plan",
        "execute",
        "session",
    },  # another
    "ways": {
        "_torch_cuda",
        "batching",
        "recomputing",
        "record",
        "plan",
        "execute",
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
