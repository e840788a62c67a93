"""Clusters of workers: ipyparallel's engines and Ray's actors.

A :class:`Cluster` transports calls of functions on bytes to worker processes, and reports lost workers.
:mod:`lazyviz.execute.microbatch.worker` has the functions, and
:mod:`lazyviz.execute.microbatch.run_on_workers` assigns the work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Protocol, TypeGuard, runtime_checkable


class NoWorkersError(RuntimeError):
    """There are no workers, or none are left; the remaining ops are pending and can be run in another way."""


class LostWorkerError(RuntimeError):
    """A worker is lost, together with its current job."""


@runtime_checkable
class Cluster(Protocol):
    """Worker processes, each with its own device. The cluster defines the types of workers and jobs.

    Workers are trusted: the program continues with their results. An attribute ``patience`` is the number of
    seconds without an answer after which a worker counts as lost (default: 1800). A method ``drop``, if there
    is one, is called with jobs whose results will not be requested, whether or not they have ended.
    """

    def workers(self, cuda: bool, /) -> Sequence[Any]:
        """The available workers, with one GPU each if ``cuda``.

        Raises :class:`NoWorkersError` with advice if there are none.
        """

    def device(self, worker: Any, /) -> str:
        """Where ``worker`` places tensors that are on a GPU here: ``"cuda:0"``."""

    def share(self, data: bytes, /) -> Any:
        """``data`` in the form in which several workers receive it as an argument."""

    def submit(self, worker: Any, function: Callable[..., Any], /, *arguments: Any) -> Any:
        """Let ``worker`` call ``function``, after its earlier calls; returns the job."""

    def finished(self, jobs: Sequence[Any], seconds: float, /) -> Sequence[Any]:
        """Those of ``jobs`` that have ended; waits for at most that long for one."""

    def result(self, job: Any, /) -> Any:
        """The return value of an ended job's call.

        Raises :class:`LostWorkerError` if its worker is lost, which is then no longer among the workers.
        """


def is_cluster(backend: object) -> TypeGuard[Cluster]:
    """Whether ``backend`` is a :class:`Cluster`."""
    # One method first: ``isinstance`` with a protocol looks at all of them, before each run.
    return hasattr(backend, "submit") and isinstance(backend, Cluster)


def require(package: str) -> None:
    """Raise ``ValueError`` unless the package is installed; it is an extra of the same name."""
    if find_spec(package) is None:
        raise ValueError(
            f"the backend {package!r} needs the package {package}: pip install 'lazyviz[{package}]'"
        )


class IPyParallelBackend:
    """Pieces on the engines of an ipyparallel cluster, started by any of its launchers (SSH, Slurm, MPI).

    Args:
        client: an ``ipyparallel.Client``; default: created with ``options`` when first needed.
        device: the engine's device for tensors that are on a GPU here; engines that see several GPUs need
            ``{engine id: device}``.
        options: for ``ipyparallel.Client``, such as ``profile="mycluster"`` or ``cluster_id=...``.
    """

    def __init__(
        self, client: Any = None, *, device: str | Mapping[int, str] = "cuda:0", **options: Any
    ) -> None:
        require("ipyparallel")
        self._client, self._device, self._options = client, device, options
        self._dropped: list[Any] = []

    @property
    def client(self) -> Any:
        """The connected client; raises :class:`NoWorkersError` if there is no cluster."""
        import ipyparallel

        if self._client is None or self._client._closed:
            try:
                self._client = ipyparallel.Client(**self._options)
            except (OSError, TimeoutError, ipyparallel.TimeoutError) as error:
                raise NoWorkersError(f"no ipyparallel cluster responds ({error}); {_START_ENGINES}") from None
        return self._client

    def workers(self, cuda: bool, /) -> Sequence[Any]:
        engines = list(self.client.ids)
        if not engines:
            raise NoWorkersError(f"the ipyparallel cluster has no engines; {_START_ENGINES}")
        return engines

    def device(self, worker: Any, /) -> str:
        return self._device if isinstance(self._device, str) else self._device[worker]

    def share(self, data: bytes, /) -> Any:
        return data

    def submit(self, worker: Any, function: Callable[..., Any], /, *arguments: Any) -> Any:
        import ipyparallel

        self._purge()
        try:
            return self.client[worker].apply_async(function, *arguments)
        except (IndexError, ipyparallel.error.NoEnginesRegistered) as error:
            raise LostWorkerError(f"engine {worker} was lost: {error}") from None

    def finished(self, jobs: Sequence[Any], seconds: float, /) -> Sequence[Any]:
        end = time.monotonic() + seconds
        while True:
            found = [job for job in jobs if job.ready()]
            if found or time.monotonic() >= end:
                return found
            time.sleep(0.002)

    def result(self, job: Any, /) -> Any:
        import ipyparallel

        try:
            return job.get()
        except ipyparallel.error.RemoteError as error:
            if error.ename == "EngineError":
                raise LostWorkerError(str(error.evalue)) from None
            raise RuntimeError(f"an ipyparallel engine failed: {error.ename}: {error.evalue}") from error
        finally:
            self.drop(job)

    def drop(self, job: Any, /) -> None:
        """The result of ``job`` will not be requested (again)."""
        self._dropped.append(job)
        self._purge()

    def _purge(self) -> None:
        """The client keeps every result, including sums as large as the weights, until it is purged.

        Only results of ended jobs can be purged.
        """
        waiting = []
        for job in self._dropped:
            if not job.ready():
                waiting.append(job)
            elif self._client is not None:
                self._client.purge_local_results(job)
        self._dropped = waiting


_START_ENGINES = "start one (ipcluster start -n 2) or name it: IPyParallelBackend(profile=...)"


class RayBackend:
    """Pieces on Ray actors, which keep running until :meth:`close` or the end of this process.

    Args: address: of the cluster, as for ``ray.init``; default: the one that Ray finds, otherwise a new local
        one. workers: number of actors; default: one for each GPU of the cluster if tensors are on a GPU,
        otherwise one for each ``cpus`` CPU cores. cpus: CPU cores per actor. options: further arguments of
        ``ray.init``.
    """

    def __init__(
        self, address: str | None = None, *, workers: int | None = None, cpus: float = 1, **options: Any
    ) -> None:
        require("ray")
        self._address, self._count, self._cpus, self._options = address, workers, cpus, options
        self._actors: dict[int, Any] = {}
        self._workers: list[int] = []
        self._named = 0
        self._jobs: dict[Any, int] = {}  # the worker of each job
        self._cuda = False

    def workers(self, cuda: bool, /) -> Sequence[Any]:
        import ray

        if not ray.is_initialized():
            self._actors.clear()
            try:
                ray.init(self._address, **{"log_to_driver": False, **self._options})
            except (ConnectionError, ValueError) as error:
                raise NoWorkersError(f"no Ray cluster responds: {error}") from None
        if cuda != self._cuda:
            self.close()
            self._cuda = cuda
        resources = ray.cluster_resources()
        room = int(resources.get("GPU", 0) if cuda else resources.get("CPU", 0) // self._cpus)
        count = self._count if self._count is not None else room
        if not count:
            raise NoWorkersError(f"the Ray cluster has no {'GPU' if cuda else 'CPU'} for a worker")
        while len(self._workers) < count:  # a lost one is replaced
            self._workers.append(self._named)
            self._named += 1
        return list(self._workers)

    def device(self, worker: Any, /) -> str:
        return "cuda:0"  # Ray lets an actor see only its own

    def share(self, data: bytes, /) -> Any:
        import ray

        return ray.put(data)

    def submit(self, worker: Any, function: Callable[..., Any], /, *arguments: Any) -> Any:
        import ray

        if worker not in self._workers:
            raise LostWorkerError(f"the Ray worker {worker} was lost")
        if worker not in self._actors:
            options = {"num_cpus": self._cpus, "num_gpus": int(self._cuda), "max_restarts": 0}
            self._actors[worker] = ray.remote(_Actor).options(**options).remote()
        job = self._actors[worker].call.remote(function, *arguments)
        self._jobs[job] = worker
        return job

    def finished(self, jobs: Sequence[Any], seconds: float, /) -> Sequence[Any]:
        import ray

        return ray.wait(list(jobs), timeout=seconds, fetch_local=False)[0]

    def result(self, job: Any, /) -> Any:
        import ray

        worker = self._jobs.pop(job)
        try:
            return ray.get(job)
        except (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError) as error:
            self._lose(worker)
            raise LostWorkerError(str(error)) from None
        except ray.exceptions.OutOfMemoryError as error:  # Ray's own monitor of a machine's memory
            self._lose(worker)
            raise LostWorkerError(f"Ray killed it because the node ran out of memory: {error}") from None
        except ray.exceptions.RayTaskError as error:
            raise RuntimeError(f"a Ray worker failed: {error}") from error

    def drop(self, job: Any, /) -> None:
        """The result of ``job`` is not needed: Ray frees it as soon as it arrives."""
        self._jobs.pop(job, None)

    def _lose(self, worker: int) -> None:
        self._actors.pop(worker, None)
        if worker in self._workers:
            self._workers.remove(worker)

    def close(self) -> None:
        """Terminate the actors; the next run starts new ones."""
        import ray

        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()
        self._workers.clear()


class _Actor:
    """A worker: it calls the functions that it receives."""

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)
