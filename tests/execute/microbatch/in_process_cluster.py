"""A cluster in this process, for tests: workers run calls immediately, and can be made to fail."""

from __future__ import annotations

import torch

from lazyviz.execute.microbatch import message_framing, worker
from lazyviz.execute.microbatch.message_types import PieceWork
from lazyviz.execute.microbatch.ray_and_ipyparallel import LostWorkerError, NoWorkersError


class Here:
    """Workers 0, 1, ...; ``losing`` and ``short`` say at which calls of ``run_piece`` (from 0) one is lost,
    or out of memory; ``last_first`` has jobs end in the opposite order of their beginning.
    """

    def __init__(self, workers=2, *, losing=(), short=(), last_first=False, small=()):
        self.there = list(range(workers))
        self.losing, self.short, self.last_first, self.small = losing, short, last_first, small
        self.calls = []  # (worker, name of the function, bytes of its arguments)
        self.pieces = []
        self.results = {}

    def workers(self, cuda):
        if not self.there:
            raise NoWorkersError("nobody is here")
        return list(self.there)

    def device(self, worker):
        return "cuda:0"

    def share(self, data):
        return data

    def submit(self, name, function, *arguments):
        if name not in self.there:
            raise LostWorkerError(f"worker {name} is gone")
        size = sum(len(argument) for argument in arguments if isinstance(argument, bytes))
        self.calls.append((name, function.__name__, size))
        job = len(self.calls)
        if function is worker.run_piece:
            self.pieces.append((name, message_framing.loads(arguments[1], PieceWork).piece))
            if len(self.pieces) - 1 in self.losing:
                self.there.remove(name)
                self.results[job] = LostWorkerError(f"worker {name} died")
                return job
            if len(self.pieces) - 1 in self.short:
                self.results[job] = worker._failed(0, torch.OutOfMemoryError("no memory"))
                return job
        if function is worker.prepare and name in self.small:
            self.results[job] = worker._failed(None, torch.OutOfMemoryError("too small"))
            return job
        self.results[job] = function(*arguments)
        return job

    def finished(self, jobs, seconds):
        return [max(jobs)] if self.last_first else list(jobs)

    def result(self, job):
        result = self.results.pop(job)
        if isinstance(result, Exception):
            raise result
        return result

    def named(self, name):
        """The calls of the function of that name."""
        return [call for call in self.calls if call[1] == name]
