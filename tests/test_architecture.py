"""Architecture rules: imports between stages, sizes of folders and functions, and the folder map."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import lazyviz

PACKAGE = Path(lazyviz.__file__).parent
# What modules of a stage may import from the package. `graph.ir`, `graph.modules` and `graph.collectives` are
# the vocabulary that recording writes in; the rest of `graph` comes after it.
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
        "torch_internals.nccl",
        "torch_internals.operators",
        "record",
        "torch_internals.process_groups",
        "graph.ir",
        "graph.modules",
        "graph.collectives",
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
        "torch_internals.operators",
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
    "cli": {
        "process",
        "torch_internals.native_build",
        "torch_internals.optimizer_steps",
        "record",
        "graph",
        "plan",
        "view",
        "execute",
        "session",
        "cli",
        "__version__",
    },
    "__main__": {"cli"},
    "integrations": {"cli.result", "plan", "execute.report", "session", "testing", "integrations"},
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
        assert stage == "__init__", f"{stage} has no stage of its own"
        return
    for module in imports_of(path):
        allowed = any(module == name or module.startswith(f"{name}.") for name in MAY_IMPORT[stage])
        assert allowed, f"{path.name} imports {module}"


SOURCES = (".py", ".pyx", ".cpp", ".ts", ".js", ".mjs", ".css")
ROOTS = [PACKAGE, *(PACKAGE.parent / name for name in ("js", "tests", "benchmarks", "scripts", "docs"))]


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.name)
def test_a_folder_has_at_most_25_source_files(root):
    if not root.exists():
        pytest.skip("this folder is not part of an installation")
    folders = [
        folder
        for folder in (root, *root.rglob("*/"))
        if folder.is_dir() and "node_modules" not in folder.parts
    ]
    for folder in folders:
        sources = [path for path in folder.iterdir() if path.suffix in SOURCES]
        assert len(sources) <= 25, folder.relative_to(PACKAGE.parent)


LONG = {
    "_prepared": 90,  # every op that the compiled recorder does not take: calls cost more than lines do
    "_connect": 85,  # one table of what the compiled recorder is given
}
"""Functions of more than 60 lines, docstrings aside, and why they stay in one piece."""


def test_a_function_has_at_most_60_lines():
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                docstring = ast.get_docstring(node, clean=False) or ""
                length = (node.end_lineno or node.lineno) - node.lineno - docstring.count("\n")
                assert length <= LONG.get(node.name, 60), f"{path.name}: {node.name}"


def module_name(path: Path) -> str:
    """The dotted name of a module; that of a package for its ``__init__.py``."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of_any_kind(path: Path, modules: set[str]) -> set[str]:
    """Modules of this package that the file imports: relative or absolute, in functions and for type
    checkers, too."""
    package = path.relative_to(PACKAGE.parent).parent.parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                module = ".".join([*base, alias.name])
                found.add(module if module in modules else ".".join(base))
    return found & modules - {module_name(path)}


def test_no_modules_import_each_other():
    modules = {module_name(path) for path in MODULES}
    graph = {module_name(path): imports_of_any_kind(path, modules) for path in MODULES}
    assert sum(map(len, graph.values())) > 1000
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules


def test_run_strategies_do_not_know_each_other():
    modules = {module_name(path) for path in MODULES}
    folder = PACKAGE / "session" / "strategies"
    kinds = [path for path in folder.glob("*.py") if path.stem not in ("__init__", "base", "selection")]
    assert len(kinds) == 6
    for path in kinds:
        siblings = {
            name
            for name in imports_of_any_kind(path, modules)
            if name.startswith("lazyviz.session.strategies")
        }
        assert siblings == {"lazyviz.session.strategies.base"}, path.name


def test_every_folder_is_on_the_map():
    text = (PACKAGE.parent / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for folder in {path.parent.relative_to(PACKAGE.parent) for path in MODULES}:
        assert f"]({folder.as_posix()})" in text, folder


WIDGET = PACKAGE.parent / "js" / "src"
SCRIPTS = sorted(WIDGET.rglob("*.ts"))
# What a folder of the widget may import from the others; those that are not listed put the widget together.
MAY_IMPORT_IN_THE_PAGE = {
    "page": {"model", "deferred"},
    "model": {"page"},
    "strip": {"model", "page"},
    "graph": {"model", "page", "strip"},
    "drawer": {"model", "page", "strip"},
    "table": {"model", "page", "strip"},
    "toolbar": {"model", "page"},
}


def scripts_imported_by(path: Path) -> set[Path]:
    """Modules of the widget that the file imports, except as types only."""
    named = re.findall(r'^(?:import|export) (?!type )[^;]*?from "(\.[^"]+)"', path.read_text("utf-8"), re.M)
    return {(path.parent / f"{name}.ts").resolve() for name in named}


@pytest.mark.skipif(not SCRIPTS, reason="the widget's sources are not part of an installation")
def test_no_modules_of_the_widget_import_each_other():
    graph = {path.resolve(): scripts_imported_by(path) for path in SCRIPTS}
    assert all(imported <= graph.keys() for imported in graph.values())
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules


@pytest.mark.parametrize("folder", MAY_IMPORT_IN_THE_PAGE)
@pytest.mark.skipif(not SCRIPTS, reason="the widget's sources are not part of an installation")
def test_a_folder_of_the_widget_imports_only_what_it_builds_on(folder):
    for path in (WIDGET / folder).glob("*.ts"):
        text = path.read_text(encoding="utf-8")
        imported = {name.split("/")[0] for name in re.findall(r'from "\.\./([^"]+)"', text)}
        assert imported <= MAY_IMPORT_IN_THE_PAGE[folder], path.name
