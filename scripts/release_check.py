"""Builds sdist and wheel, and checks in empty environments that each installs and works.

.venv/bin/python scripts/release_check.py [--python 3.12 ...] [--torch 2.13.0 ...] [--no-compile] [--keep]
                                          [--tests tests/record ...]

Each environment gets one PyTorch and, one after the other, each distribution, from where pip finds packages,
and runs a small program outside of the checkout: in Python alone; where no compiler is found, ``lazyviz
compile`` has to say so; then, where there is one, with the native modules that it makes.  ``--tests`` are run
there as well, on the installed wheel.  Results go to out/release/report.json, and a line each to the
terminal.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from named_steps import OUT, ROOT, StepFailed, run, say
from prepare_venv import TORCH

FOLDER = OUT / "release"
# Eager PyTorch and lazyviz from one seed; the plan, the picture, the command and the extension.
SMOKE = """\
import sys, torch, lazyviz
from lazyviz.session.doctor import doctor

def step():
    torch.manual_seed(0)
    nn = torch.nn
    net = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(net.parameters())
    loss = net(torch.randn(4, 16)).square().mean()
    loss.backward()
    optimizer.step()
    return [loss.detach(), *(p.detach() for p in net.parameters())]

expected = step()
with lazyviz.lazy() as graph:
    found = step()
assert graph.pending, "nothing was recorded"
assert graph.plan().peak_bytes > 0
graph.save("graph.svg"); graph.save("graph.html")
graph.evaluate()
assert all(torch.equal(a, b) for a, b in zip(expected, found)), "not what eager PyTorch computes"
with lazyviz.lazy(device="A100-40GB") as planned:
    torch.nn.Linear(8, 8).cuda()(torch.ones(2, 8, device="cuda")).sum().backward()
assert planned.plan().fits
from IPython.core.interactiveshell import InteractiveShell
InteractiveShell.instance().run_line_magic("load_ext", "lazyviz")
compiled = doctor().compiled
assert all(compiled.values()) == (sys.argv[1] == "compiled"), compiled
print(lazyviz.__version__, torch.__version__, sum(compiled.values()), "native modules")
"""


# PATH has no compiler here; lazyviz must say so in one sentence, and work without it.
WITHOUT_COMPILER = """\
import subprocess, sys
done = subprocess.run([sys.executable, "-m", "lazyviz", "compile"], capture_output=True, text=True)
assert done.returncode == 1 and "Traceback" not in done.stderr, done
assert done.stderr.count("no C and C++ compiler") == 1 and "works without" in done.stderr, done.stderr
"""
TEST_NEEDS = ("pytest>=8.2", "expecttest>=0.3", "hypothesis>=6.100", "setuptools>=68", "transformers>=4.50")


@dataclass
class Tried:
    """One distribution in one environment; times in seconds, sizes in megabytes.

    ``install_seconds`` and ``installed_mb`` are for lazyviz and its dependencies without PyTorch.
    """

    distribution: str
    python: str
    torch: str
    compiled: bool
    distribution_mb: float
    torch_seconds: float
    torch_mb: float
    install_seconds: float
    installed_mb: float
    compile_seconds: float
    smoke_seconds: float


@dataclass
class Environment:
    """An empty environment with one PyTorch."""

    place: Path
    version: str
    torch: str
    seconds: float = 0.0
    size: float = 0.0

    @property
    def python(self) -> Path:
        return self.place / "bin" / "python"

    @property
    def name(self) -> str:
        return f"Python {self.version}, PyTorch {self.torch}"

    @property
    def work(self) -> Path:
        """A working directory outside of the checkout's packages."""
        folder = self.place / "work"
        folder.mkdir(exist_ok=True)
        return folder

    def run(self, title: str, *words: str | Path, env: dict[str, str] | None = None) -> float:
        """Run ``python WORDS`` isolated from the checkout and from other environments."""
        alone = dict.fromkeys(("PYTHONPATH", "VIRTUAL_ENV", "LAZYVIZ_PURE_PYTHON"), "")
        return run(
            f"{self.name}: {title}", [self.python, *words], env={**alone, **(env or {})}, cwd=self.work
        )

    def pip(self, title: str, *words: str | Path) -> float:
        return self.run(title, "-m", "pip", "install", *QUIETLY, *words)

    def make(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        run(f"{self.name}: environment", [interpreter(self.version), "-m", "venv", self.place])
        before = megabytes(self.place)
        self.seconds = self.pip("PyTorch", f"torch=={self.torch}")
        self.size = megabytes(self.place) - before


QUIETLY = ("--quiet", "--disable-pip-version-check", "--no-input")


def megabytes(folder: Path) -> float:
    """The total size of the files in a folder, in megabytes."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files) / 1e6


def build() -> list[Path]:
    """Rebuild the distributions of this checkout."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.glob("lazyviz-*"):
        old.unlink()
    for target in ("sdist", "wheel"):
        run(f"build the {target}", [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", FOLDER])
    # The wheel is last, so that its compiled modules remain.
    made = sorted(FOLDER.glob("lazyviz-*"), reverse=True)
    for path in made:
        say(f"   {path.name}: {path.stat().st_size / 1e6:.2f} MB")
    if not any(path.name.endswith("-py3-none-any.whl") for path in made):
        raise StepFailed("the wheel is not pure Python")
    return made


def interpreter(version: str) -> str:
    """The interpreter of a Python version; the running one for its own version."""
    if version == ".".join(map(str, sys.version_info[:2])):
        return sys.executable
    found = shutil.which(f"python{version}")
    if found is None:
        raise StepFailed(f"no python{version} on PATH")
    return found


def attempt(where: Environment, distribution: Path, compile_too: bool) -> list[Tried]:
    """Install one distribution in an environment and test it."""
    before = megabytes(where.place)
    installed = where.pip(f"install {distribution.name}", distribution, "-c", ROOT / "constraints.txt")
    size = megabytes(where.place) - before
    smoke = where.work / "smoke.py"
    smoke.write_text(SMOKE)
    results = []

    def tried(kind: str, compiled: float) -> None:
        seconds = where.run(f"smoke test of {distribution.name}, {kind}", smoke, kind)
        times = (round(each, 1) for each in (installed, size, compiled, seconds))
        results.append(
            Tried(
                distribution.name,
                where.version,
                where.torch,
                kind == "compiled",
                round(distribution.stat().st_size / 1e6, 2),
                round(where.seconds, 1),
                round(where.size),
                *times,
            )
        )

    tried("python", 0.0)
    if distribution.suffix == ".whl":
        where.run("lazyviz compile without a compiler", "-c", WITHOUT_COMPILER, env={"PATH": str(where.work)})
    if compile_too and distribution.suffix == ".whl":
        where.pip("what compiling takes", "cython>=3.1", "setuptools>=68")
        tried("compiled", where.run("lazyviz compile", "-m", "lazyviz", "compile"))
    return results


def run_tests(where: Environment, tests: Sequence[str]) -> None:
    """Run tests of the checkout on the lazyviz installed in the environment."""
    where.pip("what tests take", *TEST_NEEDS, "-c", ROOT / "constraints.txt")
    copy = where.work / "tests"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(ROOT / "tests", copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", where.work)
    where.run("tests", "-m", "pytest", "-q", "-x", "--daily", "-p", "no:cacheprovider", *tests)


def report(tried: Sequence[Tried]) -> None:
    """Write out/release/report.json, and print a line for each result."""
    (FOLDER / "report.json").write_text(json.dumps([asdict(each) for each in tried], indent=2) + "\n")
    for each in tried:
        kind = f"compiled in {each.compile_seconds:.0f} s" if each.compiled else "Python alone"
        what = f"{each.distribution} ({each.distribution_mb:.2f} MB), Python {each.python}"
        say(
            f"   {what}, PyTorch {each.torch} ({each.torch_mb:,.0f} MB), {kind}: works; installed in "
            f"{each.install_seconds:.0f} s, smoke test {each.smoke_seconds:.0f} s"
        )


def main(args: list[str]) -> int:
    """Build, test in all environments, write the report; returns the exit status."""
    here = ".".join(map(str, sys.version_info[:2]))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", nargs="+", default=[here], help="versions of Python, each on PATH")
    parser.add_argument("--torch", nargs="+", default=[TORCH], help="versions of PyTorch")
    parser.add_argument("--no-compile", action="store_true", help="in Python alone")
    parser.add_argument("--keep", action="store_true", help="leave the environments in out/release")
    parser.add_argument("--tests", nargs="+", default=[], help="files and folders of tests to run there, too")
    options = parser.parse_args(args)
    compile_too = not options.no_compile and shutil.which("c++") is not None
    tried: list[Tried] = []
    try:
        distributions = build()
        for version in options.python:
            for torch in options.torch:
                where = Environment(FOLDER / f"python{version}-torch{torch}", version, torch)
                where.make()
                for distribution in distributions:
                    tried += attempt(where, distribution, compile_too)
                    if distribution is not distributions[-1]:
                        where.run("uninstall", "-m", "pip", "uninstall", "--yes", *QUIETLY, "lazyviz")
                if options.tests:
                    run_tests(where, options.tests)
                if not options.keep:
                    shutil.rmtree(where.place)
    except StepFailed as error:
        say(f"make release-check: {error}")
        return 1
    finally:
        if tried:
            report(tried)
    return 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main(sys.argv[1:]))
