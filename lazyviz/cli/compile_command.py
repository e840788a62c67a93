"""``lazyviz compile``: compile the native modules for the installed PyTorch."""

from __future__ import annotations

import sys

from ..torch_internals import find_compiler_and_build_extensions
from .plan_command import FAILED, FINE


def compile_modules(*, force: bool) -> int:
    """Compile modules that are missing or built for another PyTorch; return the exit code."""
    print("lazyviz: compiling the native modules can take a few minutes.", flush=True)
    files, reasons = find_compiler_and_build_extensions.build_all(
        anew=force, report=lambda text: print(f"  {text}", flush=True)
    )
    if files:
        print(f"lazyviz: {len(files)} native module{'' if len(files) == 1 else 's'} compiled.")
    elif not reasons:
        print("lazyviz: all native modules are up to date for this PyTorch; --force recompiles them.")
    for reason in reasons:
        print(f"lazyviz: not compiled: {reason}", file=sys.stderr)
    if reasons:
        needed = " ".join(f"'{name}'" for name in find_compiler_and_build_extensions.REQUIREMENTS)
        print(
            f"lazyviz works without them, but more slowly. To compile them: pip install {needed}, and "
            "a C and C++ compiler.",
            file=sys.stderr,
        )
    return FAILED if reasons else FINE
