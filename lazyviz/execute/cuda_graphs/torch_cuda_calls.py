"""Calls of ``torch.cuda`` for CUDA Graphs: all of them, in one place.

The capturing code (:mod:`lazyviz.execute.cuda_graphs.captured_graph`) uses a device only through
:class:`CaptureDevice`, so that tests can replace it by one that records calls and repeats them on the same
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from ...graph.ir import TensorMeta
from ...process.gc_pause import paused
from ...record.random_draw_order import READERS, state_of
from ...torch_internals import cuda_graph_capture, fake_cuda_devices, private_api
from ..backend_protocol import first_line


class CaptureFailed(RuntimeError):
    """The kernels cannot be captured; none of them has run."""


class Captured(Protocol):
    """Captured kernels."""

    def replay(self) -> None:
        """Launch them on the current stream.

        Random numbers are drawn from the current state of the default generator, which afterwards is the same
        as after eager's calls.
        """


class CaptureDevice(Protocol):
    """A device that can capture kernels and launch them again, reading and writing the same addresses."""

    alignment: int
    """The bytes of address alignment that affect kernel selection: another remainder changes the order of
    sums.
    """

    def obstacle(self) -> str:
        """Why nothing can be captured now; "" if it can."""

    def takes(self, meta: TensorMeta) -> bool:
        """Whether tensors like this are in memory that captured kernels may use."""

    def settings(self) -> Hashable:
        """The process's settings that affect which kernels an operator uses."""

    def warm_up(
        self, device: torch.device, run: Callable[[], Sequence[torch.Tensor]]
    ) -> Sequence[torch.Tensor]:
        """Call ``run`` like a capture would, and return its result: this performs one-time initialization."""

    def capture(self, device: torch.device, run: Callable[[], None]) -> Captured:
        """Capture the kernels that ``run`` launches, without running them.

        Memory that ``run`` allocates belongs to the graphs: only they use it again once its tensors are gone.

        Raises:
            CaptureFailed: the device refused, or ``run`` did.
        """


class CudaCaptures:
    """CUDA: one stream to capture on, and one memory pool for each device."""

    alignment = 256  # the alignment that cuBLAS gets (CUDABlas.cpp); new memory is at multiples of 512

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pools: dict[torch.device, tuple[cuda_graph_capture.Pool, torch.cuda.CUDAGraph]] = {}
        self.last: dict[torch.device, torch.cuda.Stream] = {}  # the last stream that used the pool
        self._broken = ""

    def obstacle(self) -> str:
        if why := fake_cuda_devices.missing_cuda() or self._broken:
            return why
        if torch.cuda.is_current_stream_capturing():
            return "another CUDA Graph capture is in progress"
        return ""

    def takes(self, meta: TensorMeta) -> bool:
        return meta.device.type == "cuda"

    def settings(self) -> Hashable:
        cuda: Any = torch.backends.cuda
        cudnn: Any = torch.backends.cudnn
        deterministic: Any = torch.utils.deterministic
        return (
            torch.get_default_dtype(),
            cuda.matmul.fp32_precision,
            cuda.matmul.allow_fp16_reduced_precision_reduction,
            cuda.matmul.allow_bf16_reduced_precision_reduction,
            cuda.matmul.allow_fp16_accumulation,
            cuda.preferred_blas_library(),
            cudnn.conv.fp32_precision,
            cudnn.rnn.fp32_precision,
            cudnn.enabled,
            cudnn.benchmark,
            cudnn.deterministic,
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            deterministic.fill_uninitialized_memory,
        )

    def warm_up(
        self, device: torch.device, run: Callable[[], Sequence[torch.Tensor]]
    ) -> Sequence[torch.Tensor]:
        side, current = self._stream(device), torch.cuda.current_stream(device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            results = run()
        current.wait_stream(side)
        for result in results:  # allocated on one stream, used on the other from now on
            if result.is_cuda:
                result.record_stream(current)
        return results

    def capture(self, device: torch.device, run: Callable[[], None]) -> Captured:
        # Like torch.cuda.graph, which leaves its stream current when a capture fails.
        with (
            torch.cuda.device(device),
            private_api.inference_mode(False),  # the generator's own tensors are created here
            paused(),  # no graph is destroyed meanwhile
            torch.cuda.stream(self._stream(device)),
        ):
            fake_cuda_devices.synchronize()
            torch.cuda.empty_cache()
            if device not in self._pools:
                pool: cuda_graph_capture.Pool = torch.cuda.graph_pool_handle()
                # The allocator forgets a pool without graphs, and would not accept it again.
                self._pools[device] = pool, _capture_one_kernel(device, pool)
            pool, _ = self._pools[device]
            cuda_graph_capture.clear_cublas_workspaces()
            graph = torch.cuda.CUDAGraph()
            generator = READERS["graphsafe_get_state"](torch.cuda.default_generators[device.index or 0])
            try:
                with _captured(graph, pool, device, self._recover):
                    run()
            finally:
                cuda_graph_capture.clear_cublas_workspaces()
        return _CudaGraph(self, graph, device, generator)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _recover(self, device: torch.device) -> None:
        """After a capture that failed in CUDA, do another one to tell the generator that capturing has ended.

        Until then, the generator refuses to draw outside of a capture (CUDAGeneratorState::increase).
        """
        try:
            _capture_one_kernel(device, None)
        except Exception as error:
            self._broken = f"is no longer used since a capture failed: {first_line(error)}"


def _capture_one_kernel(device: torch.device, pool: cuda_graph_capture.Pool | None) -> torch.cuda.CUDAGraph:
    """A graph of one kernel, captured on the current stream, because PyTorch warns about empty graphs."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # type: ignore[arg-type]
    torch.empty(1, device=device).zero_()
    graph.capture_end()
    return graph


@contextmanager
def _captured(
    graph: torch.cuda.CUDAGraph,
    pool: cuda_graph_capture.Pool,
    device: torch.device,
    mend: Callable[[torch.device], None],
) -> Iterator[None]:
    """Capture on the current stream; other threads may continue to use CUDA.

    Raises:
        CaptureFailed: CUDA refused to capture it.
    """
    # "global", the default, would forbid other threads to allocate; for example, a data loader's thread pins
    # memory.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # type: ignore[arg-type]
    raised: BaseException | None = None
    try:
        yield
    except BaseException as error:
        raised = error
        raise
    finally:
        try:
            graph.capture_end()
        except Exception as error:
            cuda_graph_capture.end_broken_capture(device.index or 0, pool)
            mend(device)
            if raised is None:
                raise CaptureFailed(f"CUDA could not capture it: {first_line(error)}") from error


class _CudaGraph:
    def __init__(
        self,
        captures: CudaCaptures,
        graph: torch.cuda.CUDAGraph,
        device: torch.device,
        generator: torch.Generator,
    ) -> None:
        self._captures, self._graph, self._device = captures, graph, device
        # Draw from the state that the graph uses, because the user may set another state in the default
        # generator.
        self._generator = generator

    def replay(self) -> None:
        device = self._device
        stream, last = torch.cuda.current_stream(device), self._captures.last
        if (before := last.get(device)) is not None and before != stream:
            stream.wait_stream(before)
        last[device] = stream
        default = torch.cuda.default_generators[device.index or 0]
        self._generator.set_state(state_of(default))
        self._graph.replay()
        default.set_state(state_of(self._generator))
