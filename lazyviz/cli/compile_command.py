"""``lazyviz compile``: the native modules, made for the PyTorch that is installed."""

from __future__ import annotations

import sys

from ..torch_internals import native_build
from .plan_command import FAILED, FINE


def compile_modules(*, force: bool) -> int:
    """Compile what is missing or made for another PyTorch; the exit code."""
    print("lazyviz: native modules take up to some minutes to compile.", flush=True)
    files, reasons = native_build.build_all(anew=force, report=lambda text: print(f"  {text}", flush=True))
    if files:
        print(f"lazyviz: {len(files)} native module{'' if len(files) == 1 else 's'} compiled.")
    elif not reasons:
        print("lazyviz: all native modules are there, for this PyTorch; --force compiles them anew.")
    for reason in reasons:
        print(f"lazyviz: not compiled: {reason}", file=sys.stderr)
    if reasons:
        needed = " ".join(f"'{name}'" for name in native_build.REQUIREMENTS)
        print(
            f"lazyviz works without, more slowly. What it takes: pip install {needed}, a C and C++ compiler.",
            file=sys.stderr,
        )
    return FAILED if reasons else FINE
