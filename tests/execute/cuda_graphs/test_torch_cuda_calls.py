"""CUDA capture: the order of the calls, and cleanup when one of them fails.

Without a GPU: ``torch.cuda`` is stood in for, and CPU generators stand for CUDA's.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from lazyviz.execute.cuda_graphs import torch_cuda_calls as capture_device
from lazyviz.execute.cuda_graphs.torch_cuda_calls import CaptureFailed, CudaCaptures
from lazyviz.record.random_draw_order import state_of
from lazyviz.torch_internals import cuda_graph_capture, fake_cuda_devices

DEVICE = torch.device("cuda", 0)


class Stream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


class FakeCuda:
    """What is used of ``torch.cuda``, noted in ``log``."""

    def __init__(self):
        self.log = []
        self.current = Stream("current", self.log)
        self.broken = False  # the next captures end with an error
        self.default_generators = [torch.Generator()]
        self.drawn_from = torch.Generator()  # the state that captures draw from
        cuda = self

        class Graph:
            def __init__(self):
                self.number = len(cuda.graphs)
                cuda.graphs.append(self)

            def capture_begin(self, pool=None, capture_error_mode="global"):
                assert capture_error_mode == "thread_local"
                assert cuda.current.name == "side"
                assert not torch.is_inference_mode_enabled()
                cuda.log.append(f"begin {self.number} in {pool}")

            def capture_end(self):
                assert cuda.current.name == "side"
                cuda.log.append(f"end {self.number}")
                if cuda.broken and self.number != cuda.spared:
                    cuda.broken = False
                    raise RuntimeError("CUDA error: capture invalidated\nmore of it")

            def replay(self):
                cuda.log.append(f"replay {self.number}")
                torch.rand(1, generator=cuda.drawn_from)

        self.graphs, self.spared = [], 0
        self.CUDAGraph = Graph

    def Stream(self, device):
        return Stream("side", self.log)

    def current_stream(self, device):
        return self.current

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def device(self, device):
        yield

    def empty_cache(self):
        self.log.append("empty cache")

    def graph_pool_handle(self):
        return (0, 7)


@pytest.fixture
def cuda(monkeypatch):
    cuda = FakeCuda()
    for name in (
        "CUDAGraph",
        "Stream",
        "current_stream",
        "stream",
        "device",
        "empty_cache",
        "graph_pool_handle",
    ):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch.cuda, "default_generators", cuda.default_generators)
    monkeypatch.setattr(fake_cuda_devices, "synchronize", lambda: cuda.log.append("synchronize"))
    monkeypatch.setattr(
        cuda_graph_capture, "clear_cublas_workspaces", lambda: cuda.log.append("clear cuBLAS")
    )
    monkeypatch.setattr(
        cuda_graph_capture, "end_broken_capture", lambda *where: cuda.log.append(f"end broken {where}")
    )
    monkeypatch.setitem(capture_device.READERS, "graphsafe_get_state", lambda generator: cuda.drawn_from)
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **options: real(*size, **options))
    return cuda


def test_a_capture_is_made_as_torch_makes_one(cuda):
    captures = CudaCaptures()
    captures.capture(DEVICE, lambda: cuda.log.append("run"))
    assert cuda.log == [
        "synchronize",
        "empty cache",
        "begin 0 in (0, 7)",  # a graph that keeps the pool
        "end 0",
        "clear cuBLAS",
        "begin 1 in (0, 7)",
        "run",
        "end 1",
        "clear cuBLAS",
    ]
    cuda.log.clear()
    captures.capture(DEVICE, lambda: None)
    assert "begin 2 in (0, 7)" in cuda.log and len(cuda.graphs) == 3
    assert cuda.current.name == "current"


def test_a_capture_in_inference_mode_leaves_the_generator_usable(cuda):
    with torch.inference_mode():
        CudaCaptures().capture(DEVICE, lambda: None)
        assert torch.is_inference_mode_enabled()


def test_a_capture_that_cuda_ends_is_mended(cuda):
    captures = CudaCaptures()
    cuda.broken = True
    with pytest.raises(CaptureFailed, match="^CUDA could not capture it: CUDA error: capture invalidated$"):
        captures.capture(DEVICE, lambda: None)
    after = cuda.log[cuda.log.index("end 1") + 1 :]
    assert after == ["end broken (0, (0, 7))", "begin 2 in None", "end 2", "clear cuBLAS"]
    assert cuda.current.name == "current"
    captures.capture(DEVICE, lambda: None)  # the next one is made


def test_an_op_that_fails_raises_its_own_error(cuda):
    captures = CudaCaptures()
    cuda.broken = True  # CUDA has ended the capture because of it

    def run():
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        captures.capture(DEVICE, run)
    assert "end broken (0, (0, 7))" in cuda.log and "begin 2 in None" in cuda.log
    assert cuda.current.name == "current"


def test_an_error_before_the_end_is_no_broken_capture(cuda):
    def run():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        CudaCaptures().capture(DEVICE, run)
    assert "end 1" in cuda.log and not any("broken" in call for call in cuda.log)


def test_a_replay_draws_from_the_default_generators_state_and_moves_it_on(cuda):
    graph = CudaCaptures().capture(DEVICE, lambda: None)
    default = cuda.default_generators[0]
    default.manual_seed(11)
    twin = torch.Generator().manual_seed(11)
    for _ in range(3):
        graph.replay()
        torch.rand(1, generator=twin)
        assert torch.equal(state_of(default), state_of(twin))


def test_a_replay_on_another_stream_waits_for_the_last_one(cuda):
    captures = CudaCaptures()
    graph = captures.capture(DEVICE, lambda: None)
    graph.replay()
    other = Stream("other", cuda.log)
    with cuda.stream(other):
        graph.replay()
    assert cuda.log[-2:] == ["other waits for current", "replay 1"]


def test_a_warm_up_runs_on_the_stream_that_captures(cuda):
    result = CudaCaptures().warm_up(DEVICE, lambda: [cuda.log.append(cuda.current.name) or torch.ones(1)])
    assert cuda.log == ["side waits for current", "side", "current waits for side"] and len(result) == 1


@pytest.mark.skipif(torch.version.cuda is None, reason="this PyTorch is built without CUDA")
def test_the_private_functions_are_there():
    for name in ("_cuda_clearCublasWorkspaces", "_cuda_endAllocateToPool", "_cuda_releasePool"):
        assert callable(getattr(torch._C, name))


@pytest.mark.skipif(torch.version.cuda is None, reason="this PyTorch is built without CUDA")
def test_every_setting_is_heard():
    captures = CudaCaptures()
    for place, name, value in (
        (torch.backends.cuda.matmul, "allow_tf32", not torch.backends.cuda.matmul.allow_tf32),
        (torch.backends.cuda.matmul, "allow_fp16_accumulation", True),
        (torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark),
        (torch.backends.cudnn, "deterministic", not torch.backends.cudnn.deterministic),
        (torch.backends.cudnn, "allow_tf32", not torch.backends.cudnn.allow_tf32),
    ):
        before, was = captures.settings(), getattr(place, name)
        hash(before)
        setattr(place, name, value)
        try:
            assert captures.settings() != before, name
        finally:
            setattr(place, name, was)
