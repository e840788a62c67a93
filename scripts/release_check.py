"""Builds sdist and wheel, and proves in empty environments that each installs and works.

.venv/bin/python scripts/release_check.py [--python 3.12 ...] [--torch 2.13.0 ...] [--no-compile]

Each environment gets one PyTorch and one distribution, from where pip finds packages, and runs a small
program outside of the checkout: in Python alone, then, where there is a compiler, with the native modules
that ``lazyviz compile`` makes there.  Results go to out/release/report.json, and a line each to the terminal.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from environment import TORCH
from steps import OUT, ROOT, StepFailed, run, say

FOLDER = OUT / "release"
# Eager PyTorch and lazyviz from one seed; the plan, the picture, the command and the extension.
SMOKE = """\
import sys, torch, lazyviz
from lazyviz.session.self_check import doctor

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


@dataclass
class Tried:
    """One distribution in one environment; times in seconds."""

    distribution: str
    python: str
    torch: str
    compiled: bool
    install_seconds: float
    smoke_seconds: float


def build() -> list[Path]:
    """The distributions of this checkout, made anew."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    for target in ("sdist", "wheel"):
        run(f"build the {target}", [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", FOLDER])
    made = sorted(FOLDER.glob("lazyviz-*"))
    for path in made:
        say(f"   {path.name}: {path.stat().st_size / 1e6:.2f} MB")
    if not any(path.name.endswith("-py3-none-any.whl") for path in made):
        raise StepFailed("the wheel is not one of Python alone")
    return made


def interpreter(version: str) -> str:
    """The interpreter of a version of Python, this one's own for its own."""
    if version == ".".join(map(str, sys.version_info[:2])):
        return sys.executable
    found = shutil.which(f"python{version}")
    if found is None:
        raise StepFailed(f"no python{version} on PATH")
    return found


def attempt(distribution: Path, version: str, torch: str, compile_too: bool) -> list[Tried]:
    """Install one distribution into an empty environment and try it."""
    name = f"{distribution.name} on Python {version}, PyTorch {torch}"
    place = FOLDER / "environment"
    shutil.rmtree(place, ignore_errors=True)
    run(f"{name}: environment", [interpreter(version), "-m", "venv", place])
    python = place / "bin" / "python"
    # Nothing of the checkout or of another environment is to be found.
    env = dict.fromkeys(("PYTHONPATH", "VIRTUAL_ENV", "LAZYVIZ_PURE_PYTHON"), "")
    pip: list[str | Path] = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
    ]
    run(f"{name}: PyTorch", [*pip, f"torch=={torch}"], env=env)
    begin = time.monotonic()
    run(f"{name}: install", [*pip, distribution, "-c", ROOT / "constraints.txt"], env=env)
    installed = time.monotonic() - begin
    work = place / "work"
    work.mkdir()
    smoke = work / "smoke.py"
    smoke.write_text(SMOKE)
    results = []
    for kind in ("python", "compiled") if compile_too else ("python",):
        if kind == "compiled":
            run(f"{name}: what compiling takes", [*pip, "cython>=3.1", "setuptools>=68"], env=env)
            run(f"{name}: lazyviz compile", [python, "-m", "lazyviz", "compile"], env=env, cwd=work)
        begin = time.monotonic()
        run(f"{name}: smoke test ({kind})", [python, smoke, kind], env=env, cwd=work)
        seconds = time.monotonic() - begin
        results.append(
            Tried(
                distribution.name, version, torch, kind == "compiled", round(installed, 1), round(seconds, 1)
            )
        )
    shutil.rmtree(place)
    return results


def main(args: list[str]) -> int:
    """Build, try everywhere, write the report; returns the exit status."""
    here = ".".join(map(str, sys.version_info[:2]))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", nargs="+", default=[here], help="versions of Python, each on PATH")
    parser.add_argument("--torch", nargs="+", default=[TORCH], help="versions of PyTorch")
    parser.add_argument("--no-compile", action="store_true", help="in Python alone")
    options = parser.parse_args(args)
    compile_too = not options.no_compile and shutil.which("c++") is not None
    try:
        distributions = build()
        tried = [
            result
            for version in options.python
            for torch in options.torch
            for distribution in distributions
            for result in attempt(distribution, version, torch, compile_too and distribution.suffix == ".whl")
        ]
    except StepFailed as error:
        say(f"make release-check: {error}")
        return 1
    (FOLDER / "report.json").write_text(json.dumps([asdict(each) for each in tried], indent=2) + "\n")
    for each in tried:
        kind = "compiled" if each.compiled else "Python alone"
        say(f"   {each.distribution}, Python {each.python}, PyTorch {each.torch}, {kind}: works")
    return 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main(sys.argv[1:]))
