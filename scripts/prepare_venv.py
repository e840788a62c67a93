"""Prepares ``.venv`` for a target of the Makefile; quick if it is up to date.

    python3 scripts/prepare_venv.py demo|test|test-all|bench

Needs Python 3.10 or newer and pip, nothing else: only the standard library is imported.
A step whose inputs have not changed since it last succeeded is skipped (stamps in ``.venv``).
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

if sys.version_info < (3, 10):  # noqa: UP036  (an older Python runs this file first)
    sys.exit(f"lazyviz needs Python 3.10 or newer, not {platform.python_version()}: make PYTHON=python3.12")

import build_js_with_node as js_build
import build_native
from named_steps import OUT, ROOT, StepFailed, run, say

VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
EXTRAS = {
    "demo": "demo,native",
    "test": "dev,native",
    "test-all": "dev,libraries,native",
    "bench": "bench,native",
}
# For each target, others whose environment includes everything that it needs.
INCLUDED_IN = {"demo": ("test", "test-all"), "test": ("test-all",)}
TORCH = "2.13.0"
# PyTorch's documented index of CPU builds, used only if pip's configured sources have none.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

NO_VENV = """\
Could not make a virtual environment with {python}. On Debian or Ubuntu:
  apt-get install python3-venv
then run the same command again."""

NO_CHROMIUM = """\
The browser test needs Chromium, which is not installed, and this user cannot install it (no root, and
`sudo` needs a password). Install it and run again:
  apt-get install chromium          (or set CHROMIUM=/path/to/chromium)"""


def has_nvidia_gpu() -> bool:
    """Whether this machine has a working NVIDIA driver."""
    if Path("/proc/driver/nvidia/version").exists():
        return True
    program = shutil.which("nvidia-smi")
    return program is not None and subprocess.run([program, "-L"], capture_output=True).returncode == 0


def digest(*parts: str | Path) -> str:
    """A hash of texts, file contents, and the version of the running Python."""
    total = hashlib.sha256(sys.version.encode())
    for part in parts:
        total.update(part.read_bytes() if isinstance(part, Path) else part.encode())
        total.update(b"\0")
    return total.hexdigest()


def is_stamped(name: str, value: str) -> bool:
    """Whether step ``name`` last succeeded with the inputs whose digest is ``value``."""
    stamp = VENV / f".stamp-{name}"
    return stamp.exists() and stamp.read_text() == value


def put_stamp(name: str, value: str) -> None:
    """Record that step ``name`` succeeded."""
    (VENV / f".stamp-{name}").write_text(value)


def pip(title: str, *args: str | Path, quiet_failure: bool = False) -> None:
    """Run ``pip install ARGS`` in the virtual environment, as a step.

    Modules are not compiled to bytecode, because only a few of thousands are ever imported.
    """
    options = ("--disable-pip-version-check", "--no-input", "--no-compile")
    command = [PYTHON, "-m", "pip", "install", *options, *args]
    run(title, command, quiet_failure=quiet_failure)


def make_venv() -> None:
    """Create ``.venv`` with the first method that works.

    On Debian, ``ensurepip`` is in the package python3-venv. Without it, an empty environment can still be
    created, and the pip outside of it can install pip into it.
    """
    python = sys.executable
    ways: list[tuple[str, list[list[str | Path]]]] = [
        ("virtual environment in .venv", [[python, "-m", "venv", "--clear", VENV]]),
        (
            "virtual environment, pip brought from outside",
            [
                [python, "-m", "venv", "--without-pip", "--clear", VENV],
                [python, "-m", "pip", "--python", PYTHON, "install", "pip"],
            ],
        ),
        (
            "virtual environment, by virtualenv",
            [
                [python, "-m", "pip", "install", "--target", OUT / "virtualenv", "virtualenv"],
                [python, "-c", _RUN_VIRTUALENV, OUT / "virtualenv", VENV],
            ],
        ),
    ]
    if os.geteuid() == 0 and shutil.which("apt-get"):
        ways.append(
            (
                "virtual environment, with Debian's python3-venv",
                [["apt-get", "install", "-y", "python3-venv"], [python, "-m", "venv", "--clear", VENV]],
            )
        )
    for title, commands in ways:
        try:
            for command in commands:
                run(title, command, quiet_failure=True)
        except StepFailed:
            continue
        if PYTHON.exists():
            return
    raise StepFailed(NO_VENV.format(python=python))


_RUN_VIRTUALENV = """\
import sys
sys.path.insert(0, sys.argv[1])
import virtualenv
virtualenv.cli_run(["--clear", sys.argv[2]])
"""


def install_torch() -> list[str | Path]:
    """Install PyTorch, the CPU build if there is no NVIDIA GPU; returns pip's constraint arguments."""
    constraints: list[str | Path] = ["-c", ROOT / "constraints.txt"]
    if has_nvidia_gpu():
        return constraints  # pip's default build is the CUDA build
    cpu = ROOT / "constraints-cpu.txt"
    constraints += ["-c", cpu]
    if is_stamped("torch", digest(cpu)):
        return constraints
    if sys.platform != "linux":  # on other systems, the default build is the CPU build
        pip(f"PyTorch {TORCH}", f"torch=={TORCH}", "-c", cpu)
    else:
        local = f"torch=={TORCH}+cpu"
        try:
            pip(f"PyTorch {TORCH} for the CPU", local, "-c", cpu, quiet_failure=True)
        except StepFailed:
            # The usual case: PyPI has no +cpu builds, but PyTorch's index has.
            where = ("--extra-index-url", TORCH_CPU_INDEX)
            pip(f"PyTorch {TORCH} for the CPU, from PyTorch's index", local, "-c", cpu, *where)
    put_stamp("torch", digest(cpu))
    return constraints


def build_widget() -> None:
    """Build the JavaScript bundle, with Node.js from PyPI if the machine has none."""
    if js_build.find_node() is None and not is_stamped("node", js_build.NODE_PACKAGE):
        pip("Node.js, as a Python package", js_build.NODE_PACKAGE)
        put_stamp("node", js_build.NODE_PACKAGE)
    if js_build.is_stale():
        run("JavaScript of the widget", [PYTHON, "scripts/build_js_with_node.py", "build"])


def install_lazyviz(target: str, constraints: list[str | Path]) -> None:
    """Install lazyviz in editable mode, with the extra that ``target`` needs."""
    files = ("pyproject.toml", "constraints.txt", "constraints-cpu.txt", "hatch_build.py")
    value = digest(*(ROOT / name for name in files))
    done = [name for name in EXTRAS if is_stamped(name, value)]
    if not {target, *INCLUDED_IN.get(target, ())}.isdisjoint(done):
        return
    pip(f"lazyviz and what `make {target}` needs", "-e", f".[{EXTRAS[target]}]", *constraints)
    put_stamp(target, value)


def compile_modules(among: threading.Lock) -> None:
    """Build the native modules; without a compiler, lazyviz works without them, but is slower."""
    command: list[str | Path] = [PYTHON, "scripts/build_native.py"]
    try:
        run("native modules, compiled for this PyTorch (minutes)", command, env=compiler_cache(), among=among)
    except StepFailed as error:
        say(f"   {error}")
        return
    put_stamp("native", native_value())


def compiler_cache() -> dict[str, str]:
    """Environment variables that let ccache, if it is installed, reuse objects compiled in other clones."""
    compilers = {name: sysconfig.get_config_var(name) for name in ("CC", "CXX")}
    if shutil.which("ccache") is None or None in compilers.values() or compilers.keys() & os.environ.keys():
        return {}
    cached = {name: f"ccache {compiler}" for name, compiler in compilers.items()}
    return {**cached, "CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1"}


def native_value() -> str:
    """The digest of the inputs of the native modules."""
    return digest(ROOT / "constraints-cpu.txt", *(ROOT / name for name in build_native.SOURCES))


def install_and_compile(target: str, constraints: list[str | Path]) -> None:
    """Install lazyviz with its extra, and compile the native modules while pip waits for the network."""
    if os.environ.get("LAZYVIZ_PURE_PYTHON") or is_stamped("native", native_value()):
        install_lazyviz(target, constraints)
        return
    pip("what compiling native modules takes", *build_native.REQUIREMENTS, *constraints)
    with ThreadPoolExecutor(1) as pool:
        compiling = pool.submit(compile_modules, threading.Lock())
        install_lazyviz(target, constraints)
        compiling.result()


def find_chromium() -> str | None:
    """The Chromium for browser tests: ``$CHROMIUM``, or one on PATH."""
    named = os.environ.get("CHROMIUM")
    if named:
        return named
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((found for name in names if (found := shutil.which(name))), None)


def install_chromium() -> None:
    """Install Chromium with apt, if it is missing and apt is available."""
    if find_chromium():
        return
    as_root: list[str] | None = None
    if os.geteuid() == 0:
        as_root = []
    elif shutil.which("sudo") and subprocess.run(["sudo", "-n", "true"], capture_output=True).returncode == 0:
        as_root = ["sudo", "-n"]
    if as_root is None or shutil.which("apt-get") is None:
        raise StepFailed(NO_CHROMIUM)
    install = [*as_root, "apt-get", "install", "-y", "--no-install-recommends", "chromium"]
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        run("Chromium, through apt-get", install, env=quiet, quiet_failure=True)
    except StepFailed:  # a fresh machine has no package lists
        run("package lists, through apt-get", [*as_root, "apt-get", "update"], env=quiet)
        run("Chromium, through apt-get", install, env=quiet)


def main(target: str) -> int:
    """Prepare everything for ``target``; returns the exit status."""
    try:
        ours = (VENV / ".stamp-venv").exists()
        # A .venv of the user is not changed; one created by this script with another Python is recreated.
        if not PYTHON.exists() or (ours and not is_stamped("venv", digest())):
            make_venv()
        put_stamp("venv", digest())
        constraints = install_torch()
        build_widget()
        install_and_compile(target, constraints)
        if target in ("test", "test-all"):
            install_chromium()
    except StepFailed as error:
        say(f"make {target}: {error}")
        return 1
    except KeyboardInterrupt:
        say(f"make {target}: interrupted; run it again to continue")
        return 130
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in EXTRAS:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
