"""Options of a graph: its default backend, split, recompute, and value statistics."""

from __future__ import annotations

from importlib.util import find_spec

from ..execute.backend_registry import EXTRAS, backend_names, find_backend, is_loaded, missing, offered
from ..execute.microbatch.ray_and_ipyparallel import is_cluster
from .batch_specification import NamedBatch
from .run_options import CLUSTER_NEEDS_BATCH, Recompute, RunOptions


class GraphOptions:
    """The options of a graph's block, including later changes by code or widgets."""

    def __init__(
        self, backend: str, batch: NamedBatch | None, split: int | str, recompute: Recompute
    ) -> None:
        self.backend = backend
        self.batch = batch
        self.split = split
        self.recompute = recompute
        self.summaries = False

    @property
    def saves_memory(self) -> bool:
        """Whether runs split the batch, or drop and recompute activations."""
        return self.split not in ("off", 1) or self.recompute != "off"

    @property
    def is_plain(self) -> bool:
        """Whether runs call the recorded kernels in program order."""
        return self.backend == "eager" and not self.saves_memory

    def choose(self, *, backend: str | None, split: int | str | None, summaries: bool | None) -> None:
        """Change the given options.

        Raises:
            ValueError: the backend is unknown or not available, or the options exclude each other. Nothing
                has changed then.
        """
        backend = self.backend if backend is None else backend
        wanted = self.split if split is None else split
        has_batch = self.batch is not None
        RunOptions(backend, split=wanted, recompute=self.recompute).validate(has_batch=has_batch)
        self.backend, self.split = backend, wanted
        if summaries is not None:
            self.summaries = summaries

    def backends(self) -> list[tuple[str, str]]:
        """All backends, each with the reason why it cannot run this graph here, or ""."""
        return [
            (name, self._obstacle(name)) for name in sorted(backend_names(), key=lambda name: name != "eager")
        ]

    def _obstacle(self, name: str) -> str:
        if why := missing(name):
            return why
        if not is_loaded(name) and name not in EXTRAS:  # its own imports happen when it is chosen
            package = offered().get(name, "").partition(".")[0]
            return f"needs the package {package}" if package and find_spec(package) is None else ""
        if self.batch is None and (name in EXTRAS or is_cluster(find_backend(name))):
            return CLUSTER_NEEDS_BATCH.format(backend=name)
        return ""
