"""Architecture rules: imports between stages, sizes of folders and functions, and the folder map."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import lazyviz

PACKAGE = Path(lazyviz.__file__).parent
# What modules of a stage may import from the package. `graph.ir`, `graph.modules` and `graph.collective_info`
# are the vocabulary that recording writes in; the rest of `graph` comes after it.
MAY_IMPORT = {
    "process": {"process"},  # signals, transactions, tracebacks: of this process, for all
    "torch_internals": {"process", "torch_internals"},  # private PyTorch APIs, with nothing of lazyviz's
    "record": {
        "process",
        "torch_internals.private_api",
        "torch_internals.native_module_loader",
        "torch_internals.dynamo",
        "torch_internals.fake_cuda_devices",
        "torch_internals.storage_ownership",
        "torch_internals.generators",
        "torch_internals.composite_ops",
        "torch_internals.dispatcher_bypasses",
        "torch_internals.redispatch_from_dispatch_mode",
        "torch_internals.dispatch_level",
        "torch_internals.cudnn_rnn_buffer_sizes",
        "torch_internals.nccl",
        "torch_internals.operator_registration",
        "torch_internals.sparse_tensors",
        "record",
        "torch_internals.fake_process_groups",
        "graph.ir",
        "graph.modules",
        "graph.collective_info",
    },
    "graph": {"torch_internals.private_api", "graph"},
    "plan": {
        "process",
        "torch_internals.private_api",
        "torch_internals.native_module_loader",
        "torch_internals.cpu_kernel_selection",
        "torch_internals.cudnn_rnn_buffer_sizes",
        "graph",
        "plan",
    },
    "view": {"process", "torch_internals.private_api", "graph", "plan", "view"},
    "execute": {
        "process",
        "torch_internals.private_api",
        "torch_internals.native_module_loader",
        "torch_internals.fastest_op_calls",
        "torch_internals.dynamo",
        "torch_internals.fake_cuda_devices",
        "torch_internals.cuda_graph_capture",
        "torch_internals.functionalization",
        "torch_internals.operator_registration",
        "torch_internals.dispatch_level",
        "torch_internals.torchax_lowerings",
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
        "torch_internals.find_compiler_and_build_extensions",
        "torch_internals.after_optimizer_step_callbacks",
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
    "integrations": {"cli.plan_data", "plan", "execute.run_report", "session", "testing", "integrations"},
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
    # Every op goes through it, and calls cost more than lines do.
    "recorder.py: _prepared": 70,
    "recorder.pyx: attempt": 160,
    "recorder.pyx: outputs": 70,
    # One table, with a line for each entry.
    "recorder.pyx: connect": 85,
    "recorder.pyx: _find_slots": 75,
    "catalog.py: hugging_face": 100,
    "test_workspace.py: calls": 140,
    # The text of one page.
    "published_times.py: page": 75,
    # The key of the program cache, word by word.
    "node_passes.cpp: fingerprint": 75,
    # One visit to a notebook, and the script of one child process.
    "test_notebook.py: test_a_lazy_cell_is_seen_opened_evaluated_and_still_there_without_a_kernel": 95,
    "test_kernel_interrupts.py: test_cells_after_a_random_interrupt_are_right_and_pytorch_is_plain": 65,
}
"""Functions of more than 60 lines, docstrings aside, and why they stay in one piece.

Those of the widget are limited by eslint; exceptions have a comment with the reason.
"""
TREE = PACKAGE.parent
SCRIPTED = [
    path
    for folder in ("lazyviz", "scripts", "benchmarks", "tests", "docs")
    for path in sorted((TREE / folder).rglob("*.py"))
]
NATIVE = sorted((PACKAGE / "torch_internals" / "native").glob("*.[cp][py][px]"))


def python_functions(path: Path) -> Iterator[tuple[str, int]]:
    """Functions of a Python file with their lines, without docstrings."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node, clean=False) or ""
            yield node.name, (node.end_lineno or node.lineno) - node.lineno - docstring.count("\n")


def cython_functions(path: Path) -> Iterator[tuple[str, int]]:
    """Functions and methods of a Cython file, as its indentation shows them."""
    lines = [
        (n, line) for n, line in enumerate(path.read_text(encoding="utf-8").splitlines()) if line.strip()
    ]
    for at, (first, line) in enumerate(lines):
        begin = re.match(r"( *)(?:def|cp?def)\b[^=(]*?(\w+)\(", line)
        if begin is None:
            continue
        end = first
        for number, later in lines[at + 1 :]:
            if not later.startswith((begin[1] + " ", begin[1] + ")")):
                break
            end = number
        yield begin[2], end - first


def cpp_functions(path: Path) -> Iterator[tuple[str, int]]:
    """Functions and methods of a C++ file, as its indentation shows them."""
    begun: tuple[str, str, int] | None = None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        begin = re.match(r"( ? ?)(?!namespace|struct|class|enum|using|typedef)\w.*?([\w:]+)\(", line)
        if begun is None and begin and not line.endswith((";", "}")):
            begun = (begin[1], begin[2], number)
        elif begun and line.startswith(begun[0] + "}"):
            yield begun[1], number - begun[2]
            begun = None


@pytest.mark.parametrize(
    ("files", "functions", "least"),
    [
        (SCRIPTED, python_functions, 10_000),
        ([path for path in NATIVE if path.suffix == ".pyx"], cython_functions, 100),
        ([path for path in NATIVE if path.suffix == ".cpp"], cpp_functions, 200),
    ],
    ids=["Python", "Cython", "C++"],
)
def test_a_function_has_at_most_60_lines(files, functions, least):
    if not (TREE / "tests" / "conftest.py").exists():
        pytest.skip("only a part of the sources is part of an installation")
    found = [(name, lines, path.name) for path in files for name, lines in functions(path)]
    assert len(found) > least
    for name, lines, file in found:
        assert lines <= LONG.get(f"{file}: {name}", 60), f"{file}: {name}"


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


REFERENCE = re.compile(r"(?::\w+:|`)`~?(lazyviz\.\w+\.[\w.]+)(?:\(\))?`")
SIBLING = re.compile(r":mod:`\.(\w+)`")
RELATIVE = re.compile(r":\w+:`~?(\.\w+\.[\w.]+)`")


def test_modules_and_names_that_comments_refer_to_exist():
    """Also in comments of the compiled recorder, which no type checker reads."""
    files = {module_name(path): path for path in MODULES}
    found = 0
    for path in [*MODULES, *(each for each in NATIVE if each.suffix == ".pyx")]:
        text = path.read_text(encoding="utf-8")
        for name in SIBLING.findall(text):
            assert (path.parent / f"{name}.py").exists(), f"{path.name}: :mod:`.{name}`"
        package = ".".join(path.parent.relative_to(PACKAGE.parent).parts)
        relative = [package + reference for reference in RELATIVE.findall(text)]
        for reference in [*REFERENCE.findall(text), *relative]:
            *before, name = reference.split(".")
            within = ".".join(before)
            while reference not in files and within not in files:
                within, _, name = within.rpartition(".")
            words = re.findall(r"\w+", files.get(within, path).read_text(encoding="utf-8"))
            assert reference in files or name in words, f"{path.name}: {reference}"
            found += 1
    assert found > 100


def test_run_strategies_do_not_know_each_other():
    modules = {module_name(path) for path in MODULES}
    folder = PACKAGE / "session" / "run_strategies"
    kinds = [
        path for path in folder.glob("*.py") if path.stem not in ("__init__", "base", "strategy_selection")
    ]
    assert len(kinds) == 6
    for path in kinds:
        siblings = {
            name
            for name in imports_of_any_kind(path, modules)
            if name.startswith("lazyviz.session.run_strategies")
        }
        assert siblings == {"lazyviz.session.run_strategies.base"}, path.name


WIDGET = PACKAGE.parent / "js" / "src"
SCRIPTS = sorted(WIDGET.rglob("*.ts"))
# What a folder of the widget may import from the others; those that are not listed put the widget together.
MAY_IMPORT_IN_THE_PAGE = {
    "page": {"model", "deferred-bundle-entry"},
    "model": {"page"},
    "memory": {"model", "page"},
    "graph": {"model", "page"},
    "drawer": {"model", "page"},
    "table": {"model", "page"},
    "toolbar": {"model", "page"},
}


def scripts_imported_by(path: Path) -> set[Path]:
    """Modules of the widget that the file imports, for their types alone, too."""
    named = re.findall(r'(?:\bfrom|\bimport\() ?"(\.[^"]+)"', path.read_text("utf-8"))
    return {(path.parent / f"{name}.ts").resolve() for name in named}


@pytest.mark.skipif(not SCRIPTS, reason="the widget's sources are not part of an installation")
def test_no_modules_of_the_widget_import_each_other():
    graph = {path.resolve(): scripts_imported_by(path) for path in SCRIPTS}
    assert all(imported <= graph.keys() for imported in graph.values())
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules


@pytest.mark.parametrize("folder", MAY_IMPORT_IN_THE_PAGE)
@pytest.mark.skipif(not SCRIPTS, reason="the widget's sources are not part of an installation")
def test_a_folder_of_the_widget_imports_only_from_earlier_folders(folder):
    for path in (WIDGET / folder).glob("*.ts"):
        text = path.read_text(encoding="utf-8")
        imported = {name.split("/")[0] for name in re.findall(r'from "\.\./([^"]+)"', text)}
        assert imported <= MAY_IMPORT_IN_THE_PAGE[folder], path.name


NOT_SOURCES = {"build", "dist", "out", "node_modules", "__pycache__"}
MAP = TREE / "ARCHITECTURE.md"


def folders_with(pattern: str, root: Path) -> set[str]:
    """Folders that have files of this kind, relative to the repository."""
    return {path.parent.relative_to(TREE).as_posix() for path in root.rglob(pattern)}


@pytest.mark.skipif(not MAP.exists(), reason="the map is not part of an installation")
def test_every_folder_is_on_the_map():
    top = {
        path.name
        for path in TREE.iterdir()
        if path.is_dir() and not path.name.startswith(".") and path.name not in NOT_SOURCES
    }
    assert {"docs", "js", "scripts", "tests"} < top
    widget = folders_with("*.ts", WIDGET) | folders_with("*.css", WIDGET)
    rows = re.findall(r"^\| \[.*", MAP.read_text("utf-8"), re.M)
    named = set(re.findall(r"\]\(([^)]*)\)", "".join(rows)))
    assert folders_with("*.py", PACKAGE) | widget | (top - {"js"}) <= named
    assert all((TREE / folder).is_dir() for folder in named)


@pytest.mark.skipif(not MAP.exists(), reason="the map is not part of an installation")
def test_tests_are_in_the_folders_of_what_they_test():
    [row] = [line for line in MAP.read_text("utf-8").splitlines() if line.startswith("| [tests]")]
    beside = set(re.findall(r"`(\w+)`", row))
    for folder in folders_with("test_*.py", TREE / "tests") - {"tests"}:
        inside = folder.removeprefix("tests/")
        assert (PACKAGE / inside).is_dir() or inside.split("/")[0] in beside, folder
