"""Compiled strategy: a compiling backend runs segments, and eager kernels the rest."""

from __future__ import annotations

from ...execute import eager_backend
from ...execute.backend_protocol import Backend, Compiled
from ...execute.replay.program_cache import Projection
from ...execute.replay.program_key import Subgraph
from ...record.tape import tape
from .base import Cancelled, Request, Strategy


class CompiledRun(Strategy):
    """``subgraph``: the structure of the nodes; ``code``: the backend's code for all of them, if any."""

    def __init__(
        self, request: Request, compiler: Backend, subgraph: Subgraph | None, code: Compiled | None
    ) -> None:
        super().__init__(request)
        self.compiler, self.subgraph, self.code = compiler, subgraph, code
        self.is_known = code is not None
        self.is_hidden = not self.cuda

    def _projected(self) -> Projection | None:
        return None if self.is_hidden or self.is_known else super()._projected()

    def _start(self) -> str | None:
        return f"the backend {self.wanted.backend!r} runs it"

    def _run(self, on_progress: eager_backend.Progress | None, cancelled: Cancelled) -> None:
        from ...execute.compiler.partitioned_run import Outcome, run_with_backend
        from ...execute.compiler.single_segment_runs import run_compiled

        nodes, subgraph, code = self.nodes, self.subgraph, self.code
        if (
            code is not None
            and subgraph is not None
            and run_compiled(tape, subgraph, code, progress=on_progress, cancelled=cancelled)
        ):
            self.compiled = Outcome(hits=1)
            self.compiled.ran(len(nodes), code)
        else:
            self.compiled = run_with_backend(
                tape,
                nodes,
                self.compiler,
                self.resident,
                progress=on_progress,
                cancelled=cancelled,
                verify=self.wanted.verify,
                seen=self.seen,
                compiles=self._compiles,
                subgraph=subgraph,
            )
        outcome = self.compiled
        self.share = outcome.share
        self.cache_hit = outcome.hits > 0 and not outcome.misses
        self.cache_miss_reason = "; ".join(outcome.missed) or None

    def _compiles(self, what: str | None) -> None:
        self.live.compiles(what)
        if self.wanted.progress is not None and what is not None:
            self.wanted.progress(self.live.now())
