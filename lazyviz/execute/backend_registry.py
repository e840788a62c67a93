"""Backend registry: built-in and registered backends, and those of installed packages, by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sized
from importlib.metadata import entry_points
from importlib.util import find_spec

from ..torch_internals.fake_cuda_devices import missing_cuda
from .backend_protocol import Backend
from .microbatch.ray_and_ipyparallel import Cluster, IPyParallelBackend, RayBackend

_backends: dict[str, Backend | Cluster | None] = {"eager": None}  # built in: lazyviz.execute.eager_backend


def _inductor() -> Backend:
    from .compiler.inductor_backend import InductorBackend  # which imports Inductor

    return InductorBackend()


def _xla() -> Backend:
    if why := missing("xla"):
        raise ValueError(f"the backend 'xla' {why}")
    from .xla.backend import XlaBackend  # which imports JAX

    return XlaBackend()


def _cudagraphs() -> Backend:
    if why := missing("cudagraphs"):
        raise ValueError(f"the backend 'cudagraphs' {why}")
    from .cuda_graphs.backend import CudaGraphsBackend

    return CudaGraphsBackend()


_COMPILERS: dict[str, Callable[[], Backend]] = {
    "inductor": _inductor,
    "cudagraphs": _cudagraphs,
    "xla": _xla,
}
PACKAGES = {"ipyparallel": ("ipyparallel",), "ray": ("ray",), "xla": ("jax", "torchax")}
"""Packages that backends need in addition to PyTorch, installed by the extra of the same name."""
EXTRAS: dict[str, Callable[[], Cluster]] = {"ipyparallel": IPyParallelBackend, "ray": RayBackend}
"""Created on first use, because they import compilers."""


def missing(name: str) -> str:
    """What a built-in backend needs that is not installed, and how to install it; "" if nothing is
    missing.
    """
    if name == "cudagraphs":
        return missing_cuda()
    lacking = [package for package in PACKAGES.get(name, ()) if find_spec(package) is None]
    if not lacking:
        return ""
    noun = "package" if len(lacking) == 1 else "packages"
    return f"needs the {noun} {' and '.join(lacking)}: pip install 'lazyviz[{name}]'"


def register_backend(name: str, backend: Backend | Cluster) -> None:
    """Make ``backend`` available as ``backend=name``.

    A backend with a method ``compile`` runs segments of a graph; one with ``workers`` (a
    :class:`lazyviz.execute.microbatch.ray_and_ipyparallel.Cluster`) runs the pieces of a split batch.

    Raises:
        TypeError: ``backend`` has neither.
        ValueError: the name is that of the built-in backend.
    """
    if name == "eager":
        raise ValueError("the name 'eager' is taken by the built-in backend")
    if not isinstance(backend, (Backend, Cluster)):
        raise TypeError(
            f"a backend needs a method compile(segment, inputs), or those of a Cluster; "
            f"{type(backend).__name__} has neither"
        )
    _backends[name] = backend


@functools.cache
def offered() -> dict[str, str]:
    """The backends of installed packages (entry points ``lazyviz.backends``), each with its module.

    Looked up only once, because this reads the metadata of all installed packages.
    """
    return {point.name: point.module for point in entry_points(group="lazyviz.backends")}


def backend_names() -> list[str]:
    """The names of built-in and registered backends, and of those in installed packages."""
    return sorted({*_backends, *_COMPILERS, *EXTRAS, *offered()})


def is_loaded(name: str) -> bool:
    """Whether :func:`find_backend` can return it without importing anything."""
    return name in _backends or (name in _COMPILERS and name not in PACKAGES and not missing(name))


def compiled_programs() -> dict[str, int]:
    """The number of compiled programs that each backend in use caches (its ``programs``, if it has any)."""
    held = {name: getattr(backend, "programs", None) for name, backend in _backends.items()}
    return {name: len(programs) for name, programs in held.items() if isinstance(programs, Sized)}


def backend_counters() -> dict[str, dict[str, int]]:
    """The ``counters`` of each backend in use that has them."""
    found = {name: getattr(backend, "counters", None) for name, backend in _backends.items()}
    return {name: dict(counters) for name, counters in found.items() if isinstance(counters, Mapping)}


def find_backend(name: str) -> Backend | Cluster | None:
    """The backend of that name; None means the built-in eager backend.

    Raises:
        ValueError: the backend is unknown (the message lists the available ones), or it needs a package.
    """
    if name not in _backends:
        for point in entry_points(group="lazyviz.backends"):
            if point.name == name:
                register_backend(name, point.load()())
                break
        else:
            make = _COMPILERS.get(name) or EXTRAS.get(name)
            if make is None:
                raise ValueError(f"unknown backend {name!r}; available: {', '.join(backend_names())}")
            _backends[name] = make()
    return _backends[name]
