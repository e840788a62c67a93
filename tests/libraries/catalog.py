"""The libraries that have programs here, the packages each needs, and which run on a given day."""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# What follows `with_` in the name of a module of `programs` -> the packages that it imports.
LIBRARIES: dict[str, tuple[str, ...]] = {
    "transformers_trainer": ("transformers", "accelerate"),
    "transformers_generate": ("transformers",),
    "accelerate": ("accelerate",),
    "peft": ("peft", "transformers"),
    "diffusers": ("diffusers",),
    "sentence_transformers": ("sentence_transformers", "datasets"),
    "lightning": ("lightning",),
    "torchmetrics": ("torchmetrics",),
    "torch_geometric": ("torch_geometric",),
    "skorch": ("skorch",),
    "ignite": ("ignite",),
    "gpytorch": ("gpytorch",),
    "botorch": ("botorch",),
    "captum": ("captum",),
    "torchdiffeq": ("torchdiffeq",),
    "monai": ("monai",),
    "kornia": ("kornia",),
    "einops": ("einops",),
    "x_transformers": ("x_transformers",),
    "schedulefree": ("schedulefree",),
    "lion_pytorch": ("lion_pytorch",),
    "torchopt": ("torchopt",),
}
ALWAYS = ("transformers_trainer", "transformers_generate")  # `make test` has transformers anyway
# Reasons of sync points that several libraries have.
LOADING = "data loaders work eagerly, and what they fetch or draw was pending"
SAVED = "weights are written to a file"
COPIED = "a deep copy"
DAYS = 7  # in so many days in a row every library has its turn


@dataclass(frozen=True)
class Program:
    """One program of a library, and the sync points it is known to have: cause -> why it needs data."""

    library: str
    run: Callable[[], Any]
    syncs: Mapping[str, str]

    @property
    def name(self) -> str:
        """What it does, as its function is called."""
        return self.run.__name__

    @property
    def title(self) -> str:
        """The same in words."""
        return self.name.replace("_", " ")


_programs: dict[str, list[Program]] = {}


def program(syncs: Mapping[str, str] | None = None) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a function as a program; ``syncs`` are the causes of its sync points, each with its reason."""

    def register(run: Callable[[], Any]) -> Callable[[], Any]:
        library = run.__module__.rpartition(".with_")[2]
        _programs.setdefault(library, []).append(Program(library, run, syncs or {}))
        return run

    return register


def missing(library: str) -> list[str]:
    """The packages of a library that are not installed."""
    return [name for name in LIBRARIES[library] if importlib.util.find_spec(name) is None]


def programs(library: str) -> list[Program]:
    """Its programs, in order; imports the library."""
    if library not in _programs:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what libraries warn of when they are imported
            importlib.import_module(f"{__package__}.programs.with_{library}")
    return _programs[library]


def due(day: datetime.date) -> list[str]:
    """The libraries whose turn it is on a day, and those that always have theirs."""
    others = [library for library in LIBRARIES if library not in ALWAYS]
    return [*ALWAYS, *others[day.toordinal() % DAYS :: DAYS]]
