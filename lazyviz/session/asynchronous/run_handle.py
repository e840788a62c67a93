"""Run handles: the result of an evaluation with ``wait=False``."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from ...execute.run_report import Report
from ...record.tape import tape
from ..evaluation import AsyncEvaluation

_INTERVAL = 0.05  # seconds between two checks of another thread


class Run:
    """An evaluation that may still be running, as returned by ``graph.evaluate(wait=False)``.

    Its kernels run on another thread while the program continues.  Anything that needs their results waits
    for it, and so does the next evaluation.  Errors of kernels are raised there, or by :meth:`result`.
    """

    def __init__(self, evaluation: AsyncEvaluation) -> None:
        self._evaluation = evaluation

    @property
    def waited(self) -> str | None:
        """The reason why the evaluation was synchronous after all; ``None`` if it was not."""
        return self._evaluation.reason

    def done(self) -> bool:
        """Whether all kernels have finished."""
        started = self._evaluation.started
        return started is None or started.is_over

    def result(self, timeout: float | None = None) -> Report:
        """Wait for at most ``timeout`` seconds, and return the report.

        Raises:
            TimeoutError: it is still running.
            Exception: a kernel raised it; the message includes the line that recorded the op.
        """
        self._wait(timeout)
        self._evaluation.finish()
        if self._evaluation.error is not None:
            raise self._evaluation.error
        assert self._evaluation.report is not None
        return self._evaluation.report

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for at most ``timeout`` seconds, and return the exception that stopped it, if any.

        Raises:
            TimeoutError: it is still running.
        """
        try:
            self.result(timeout)
        except BaseException as error:
            if error is not self._evaluation.error:
                raise
            return error
        return None

    def cancel(self) -> None:
        """Stop it between two ops; the rest stays pending, and :meth:`result` raises ``Interrupted``."""
        self._evaluation.cancel()

    def follow(self) -> None:
        """Let another thread finish the run when its kernels have ended, unless it was finished before.

        Its graphs and their widgets are notified; an error is raised where a result is read.
        """
        if self._evaluation.started is not None:
            threading.Thread(target=self._finish_once_over, name="lazyviz follows a run", daemon=True).start()

    def _finish_once_over(self) -> None:
        evaluation = self._evaluation
        while (started := evaluation.started) is not None:
            if not started.wait(_INTERVAL):
                continue
            with tape.runs.lock:
                if tape.recording.graph is None:  # a recorder must not see the recording change
                    with suppress(Exception):
                        evaluation.finish()
                    return
            time.sleep(_INTERVAL)

    def _wait(self, timeout: float | None) -> None:
        started = self._evaluation.started
        if timeout is None or started is None:
            return
        end = time.monotonic() + timeout
        while not started.is_over:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"the evaluation is still running after {timeout:g} seconds")
            started.wait(min(left, _INTERVAL))  # wakes up so that signals are handled

    def __repr__(self) -> str:
        evaluation = self._evaluation
        if evaluation.error is not None:
            return f"<lazyviz.Run: {type(evaluation.error).__name__}>"
        if evaluation.report is not None:
            return f"<lazyviz.Run: done, {evaluation.report.ops_run:,} ops>"
        return f"<lazyviz.Run: {len(evaluation.nodes):,} ops, {'run' if self.done() else 'running'}>"
