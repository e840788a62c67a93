"""``lazyviz devices`` and ``lazyviz doctor``: list devices, and check the installation."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

import lazyviz

from ..plan.devices.device_lookup import Device, devices
from ..plan.units import format_bytes
from ..session.doctor import Diagnosis, doctor
from ..torch_internals import find_compiler_and_build_extensions
from .doctor_gpu_check import check
from .plan_command import FAILED, FINE
from .plan_tables import console, table

_WIDGET_FILES = ("widget.js", "deferred.js", "widget.css", "page.js")
_OTHERS = ("jupyterlab", "notebook", "ipykernel", "tqdm", "numpy", "triton")


def show_devices() -> int:
    """Print the devices of this machine and the known GPU profiles; return the exit code."""
    found = devices()
    to = console()
    to.print(f"NVIDIA: {found.cuda_state}")
    rows = []
    for item in found:
        if isinstance(item, Device):
            known = item.total_bytes is not None and item.free_bytes is not None
            free = f"{format_bytes(item.free_bytes or 0)} free" if known else item.state
            rows.append(
                (item.name, format_bytes(item.total_bytes) if item.total_bytes else "", free, item.model)
            )
        else:
            rows.append((item.name, format_bytes(item.total_bytes), "profile", item.source))
    to.print(table("", ("device", "memory", "state", "description"), rows, 0))
    return FINE


def examine(*, gpu: bool) -> int:
    """Print a diagnosis of the installation; with ``gpu``, test lazyviz on a GPU. Return the exit code."""
    to = console()
    diagnosis = doctor()
    for title, lines in {
        "Versions": _versions(diagnosis),
        "Native modules": _native(diagnosis),
        "Devices": _devices(diagnosis),
        "Widget": _widget(),
        "Fonts for pictures": _fonts(),
        "Possible improvements": _improvements(diagnosis),
        "Left behind in this process": [str(each) for each in diagnosis.leftovers] or ["nothing"],
    }.items():
        to.print(f"{title}:", style="bold")
        for line in lines:
            to.print(f"  {line}", soft_wrap=True)
    if not gpu:
        return FINE if diagnosis.ok else FAILED
    to.print()
    if not torch.cuda.is_available():
        why = "this PyTorch is built without CUDA" if torch.version.cuda is None else "it finds no device"
        print(f"lazyviz doctor --gpu needs a CUDA GPU that PyTorch can use: {why}.", file=sys.stderr)
        return FAILED
    return FINE if check("cuda", to) else FAILED


def _versions(diagnosis: Diagnosis) -> list[str]:
    found = dict(diagnosis.versions)
    for name in _OTHERS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    threads = torch.get_num_threads()
    return [
        ", ".join(f"{name} {version}" for name, version in found.items()),
        f"{platform.platform()}, {platform.machine()}, {os.cpu_count()} CPUs, "
        f"{threads} PyTorch thread{'' if threads == 1 else 's'}, {torch.backends.cpu.get_cpu_capability()}",
        f"lazyviz in {Path(lazyviz.__file__).parent}",
    ]


def _native(diagnosis: Diagnosis) -> list[str]:
    used = [name for name, in_use in diagnosis.compiled.items() if in_use]
    rest = [name for name, in_use in diagnosis.compiled.items() if not in_use]
    lines = [f"in use: {', '.join(used) or 'none'}"]
    if rest:
        lines.append(f"not in use: {', '.join(rest)}")
    lines += [f"  {why}" for why in dict.fromkeys(diagnosis.refused.values())]
    if os.environ.get("LAZYVIZ_PURE_PYTHON"):
        lines.append("LAZYVIZ_PURE_PYTHON is set, so none is used")
    return lines


def _devices(diagnosis: Diagnosis) -> list[str]:
    built = (
        f"PyTorch built for CUDA {torch.version.cuda}" if torch.version.cuda else "PyTorch built without CUDA"
    )
    return [built, *diagnosis.devices]


def _widget() -> list[str]:
    folder = Path(lazyviz.__file__).parent / "static"
    missing = [name for name in _WIDGET_FILES if not (folder / name).exists()]
    if missing:
        return [f"files are missing in {folder}: {', '.join(missing)}; reinstall lazyviz"]
    lines = [
        f"all files found, {sum((folder / name).stat().st_size for name in _WIDGET_FILES) // 1024:,} KiB"
    ]
    if find_spec("jupyterlab") is None and find_spec("notebook") is None:
        lines.append(
            "JupyterLab and Notebook are not installed in this environment (another one may serve its "
            "kernels)"
        )
    return lines


def _fonts() -> list[str]:
    """The fonts of pictures that are saved as PNG or PDF; in other pictures, the viewer chooses."""
    program = shutil.which("fc-match")
    if program is None:
        return [
            "fontconfig is not installed; .svg and .html use the viewer's fonts, .png and .pdf need "
            "installed fonts"
        ]
    lines = []
    for family in ("sans-serif", "monospace"):
        done = subprocess.run([program, "-f", "%{family} (%{file})", family], capture_output=True, text=True)
        lines.append(f"{family}: {done.stdout.strip() or 'none'}")
    return lines


def _improvements(diagnosis: Diagnosis) -> list[str]:
    lines = []
    if not all(diagnosis.compiled.values()) and not os.environ.get("LAZYVIZ_PURE_PYTHON"):
        compiler = (
            shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
        )
        missing = [name for name in ("Cython", "setuptools") if find_spec(name) is None]
        how = "lazyviz compile"
        if missing:
            needed = " ".join(f"'{name}'" for name in find_compiler_and_build_extensions.REQUIREMENTS)
            how = f"pip install {needed}; {how}"
        if compiler is None:
            how = f"install a C++ compiler; {how}"
        lines.append(f"faster recording and small steps: {how}")
    if os.environ.get("LAZYVIZ_PURE_PYTHON"):
        lines.append("faster recording and small steps: unset LAZYVIZ_PURE_PYTHON")
    if torch.version.cuda is None and shutil.which("nvidia-smi") is not None:
        lines.append(
            "an NVIDIA driver is installed, but PyTorch is built without CUDA: see pytorch.org/get-started"
        )
    lines += list(diagnosis.missing)
    return lines or ["none found"]
