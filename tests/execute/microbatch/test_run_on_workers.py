"""Pieces of a split run on workers: in this process, on engines of ipyparallel, on actors of Ray."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from IPython.core.error import UsageError
from torch import nn

import lazyviz
from lazyviz.execute import backend_registry
from lazyviz.execute.microbatch import ray_and_ipyparallel, tensor_serialization, worker
from lazyviz.execute.microbatch.ray_and_ipyparallel import (
    IPyParallelBackend,
    LostWorkerError,
    RayBackend,
)

from .in_process_cluster import Here

SAMPLES = 24
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}


def model(dropout=0.0):
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 10))


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y, ignore_index=3)


def masked_mean(model, x, y):
    kept = (y > 4).to(x.dtype)
    return (model(x).pow(2).sum(-1) * kept).sum() / kept.sum()


def contrastive(model, x, y):
    z = F.normalize(model(x), dim=-1)
    return F.cross_entropy(z @ z.t() / 0.1, torch.arange(len(x)))


@pytest.fixture(autouse=True)
def one_thread():
    """Workers share this machine's cores with others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


LOSSES = {
    "cross-entropy": (cross_entropy, 0.0),
    "masked mean": (masked_mean, 0.0),
    "contrastive": (contrastive, 0.0),
    "dropout": (cross_entropy, 0.3),
}


class Step:
    """A training step: eager, or with a backend; what it left behind is in ``results``."""

    def __init__(self, loss="cross-entropy", dtype=torch.float64, record=True):
        function, dropout = LOSSES[loss]
        torch.manual_seed(0)
        self.model = model(dropout).to(dtype)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.x, self.y = torch.randn(SAMPLES, 16, dtype=dtype), torch.randint(10, (SAMPLES,))
        torch.manual_seed(1)
        if record:
            with lazyviz.lazy(batch=[self.x, self.y]) as self.graph:
                self.run(function)
        else:
            self.run(function)

    def run(self, function):
        self.loss = function(self.model, self.x, self.y)
        self.loss.backward()
        self.optimizer.step()
        self.scores = self.model(self.x)  # each sample's own, with the new weights

    @property
    def results(self):
        gradients = [parameter.grad for parameter in self.model.parameters()]
        state = torch.rand(3)  # the generator goes on where eager's does
        return [self.loss.detach(), self.scores.detach(), *self.model.parameters(), *gradients, state]


def close_to_eager(step, loss="cross-entropy", dtype=torch.float64):
    results = step.results  # before the seed is set again
    expected = Step(loss, dtype, record=False).results
    for ours, theirs in zip(results, expected, strict=True):
        assert ours.stride() == theirs.stride() and type(ours) is type(theirs)
        scale = theirs.abs().max().item() or 1.0
        assert (ours - theirs).abs().max().item() <= TOLERANCE[dtype] * scale


@pytest.fixture
def use(monkeypatch):
    """Have a backend known as "workers"."""

    def register(backend):
        monkeypatch.setitem(backend_registry._backends, "workers", backend)
        return backend

    return register


@pytest.fixture
def shell(new_shell):
    lazyviz.load_ipython_extension(new_shell)
    return new_shell


# --- who gets what -------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("pieces", [1, 2, 7, SAMPLES])
def test_pieces_elsewhere_give_what_eager_gives(use, loss, pieces):
    use(Here())
    step = Step(loss)
    report = step.graph.evaluate(backend="workers", split=pieces)
    assert report.pieces == pieces and report.backend == "workers"
    assert 0.2 < report.share < 1.0  # what the pieces run; the optimizer ran here
    close_to_eager(step, loss)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_bits_are_those_of_the_same_pieces_in_this_process(use, loss):
    use(Here(last_first=True))
    here, elsewhere = Step(loss), Step(loss)
    here.graph.evaluate(split=5)
    elsewhere.graph.evaluate(backend="workers", split=5)
    pairs = zip(here.results[:-1], elsewhere.results[:-1], strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_weights_go_to_each_worker_once_a_pass_and_the_batch_in_parts(use):
    cluster = use(Here(workers=3))
    torch.manual_seed(0)
    layer = nn.Linear(64, 512)
    x = torch.randn(SAMPLES, 64)
    with lazyviz.lazy(batch=x) as graph:
        layer(x).pow(2).mean().backward()
    graph.evaluate(backend="workers", split=6)
    weights = 4 * (64 * 512 + 512)
    sizes = [size for _, _, size in cluster.named("prepare")]
    assert len(sizes) == 3
    assert all(
        weights <= size < 1.1 * weights + 10_000 for size in sizes
    )  # once, though it is read as `weight.t()` too
    parts = [size for _, _, size in cluster.named("run_piece")]
    assert len(parts) == 6
    assert all(size < x.nbytes / 6 + 5_000 for size in parts)
    assert len(cluster.named("forget")) == 3 and not worker._passes


def test_without_a_number_there_is_a_piece_for_each_worker(use):
    cluster = use(Here(workers=3))
    step = Step()
    assert step.graph.evaluate(backend="workers").pieces == 3
    assert {name for name, _ in cluster.pieces} == {0, 1, 2}
    close_to_eager(step)


def test_workers_are_not_asked_for_more_than_there_are_pieces(use):
    cluster = use(Here(workers=8))
    Step().graph.evaluate(backend="workers", split=2)
    assert {name for name, _, _ in cluster.calls} == {0, 1}


def test_a_sync_point_in_the_block_runs_on_the_workers_too(use):
    cluster = use(Here())
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 8), torch.randn(6, 8)
    with lazyviz.lazy(batch=x, backend="workers", split=3):
        value = layer(x).pow(2).mean().item()
    assert len(cluster.pieces) == 3
    assert value == pytest.approx(layer(x).pow(2).mean().item(), rel=1e-6)


def test_progress_counts_pieces(use):
    use(Here())
    seen = []
    step = Step()
    step.graph.evaluate(
        backend="workers", split=4, progress=lambda progress: seen.append((progress.done, progress.total))
    )
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1][0] == seen[-1][1]


def test_draws_within_a_kernel_differ_from_piece_to_piece_where_the_user_allows_it(use):
    use(Here())
    x = torch.full((6, 1000), 0.5)
    with lazyviz.lazy(batch=x, independent_rng=True) as graph:
        drawn = torch.bernoulli(x)
    graph.evaluate(backend="workers", split=3)
    assert abs(drawn.mean().item() - 0.5) < 0.05
    assert not torch.equal(drawn[:2], drawn[2:4]) and not torch.equal(drawn[2:4], drawn[4:])


# --- what goes wrong -------------------------------------------------------------------------


@pytest.mark.parametrize("losing", [{0}, {3}, {1, 2}])
def test_the_piece_of_a_lost_worker_runs_on_another(use, losing):
    cluster = use(Here(workers=3, losing=losing))
    step = Step("dropout")
    report = step.graph.evaluate(backend="workers", split=5)
    assert report.pieces == 5 and len(cluster.there) == 3 - len(losing)
    close_to_eager(step, "dropout")


def test_the_piece_that_all_others_wait_for_may_be_the_lost_one(use):
    class Slow(Here):
        """The first piece ends after all that can be had meanwhile."""

        def finished(self, jobs, seconds):
            first = [job for job in jobs if job in self.first]
            return [job for job in jobs if job not in first] or first

        def submit(self, name, function, *arguments):
            before = len(self.pieces)
            job = super().submit(name, function, *arguments)
            if len(self.pieces) > before and self.pieces[-1][1].start == 0:
                self.first.add(job)
            return job

    cluster = Slow(losing={0})
    cluster.first = set()
    use(cluster)
    step = Step("dropout")
    step.graph.evaluate(backend="workers", split=12)
    starts = [piece.start for _, piece in cluster.pieces]
    assert starts.count(0) > starts.count(2)  # it ran again
    close_to_eager(step, "dropout")


def test_a_worker_without_memory_gets_a_smaller_piece(use):
    cluster = use(Here(short={1}))
    step = Step("dropout")
    assert (
        step.graph.evaluate(backend="workers", split=4).pieces == 7
    )  # those that nobody had yet are cut, too
    assert sorted({piece.samples for _, piece in cluster.pieces}) == [3, 6]
    close_to_eager(step, "dropout")


def test_one_sample_that_does_not_fit_is_an_error_that_names_the_line(use):
    use(Here(short=range(1000)))
    step = Step()
    with pytest.raises(torch.OutOfMemoryError, match=r"no memory\n.* was recorded at "):
        step.graph.evaluate(backend="workers", split=3)
    step.graph.evaluate()
    close_to_eager(step)


def test_a_worker_too_small_for_the_weights_gets_no_pieces(use):
    cluster = use(Here(workers=3, small={1}))
    step = Step()
    step.graph.evaluate(backend="workers", split=4)
    assert {name for name, _ in cluster.pieces} == {0, 2}
    close_to_eager(step)


def test_when_no_worker_is_left_everything_is_pending_and_goes_on_elsewhere(use):
    use(Here(workers=2, losing={5, 6}))  # in the second way over the pieces, with forward and backward
    step = Step("dropout")
    with pytest.raises(lazyviz.NoWorkersError, match=r"no worker is left: worker \d died"):
        step.graph.evaluate(backend="workers", split=4)
    assert step.graph.state == "failed" and step.graph.pending > 10
    assert repr(step.loss).startswith("lazy[")
    step.graph.evaluate()  # in this process
    close_to_eager(step, "dropout")


def test_where_there_are_no_workers_the_error_says_so_and_nothing_has_run(use):
    use(Here(workers=0))
    step = Step()
    with pytest.raises(lazyviz.NoWorkersError, match="nobody is here"):
        step.graph.evaluate(backend="workers", split=2)
    assert step.graph.pending == len(step.graph.nodes)
    step.graph.evaluate()
    close_to_eager(step)


def test_a_piece_that_ends_every_worker_is_halved(use):
    class Reborn(Here):
        def workers(self, cuda):
            while len(self.there) < 2:
                self.there.append(len(self.calls) + 100)
            return list(self.there)

    cluster = use(Reborn(losing={0, 2, 3}))
    step = Step()
    report = step.graph.evaluate(backend="workers", split=2)
    deadly = [piece for _, piece in cluster.pieces if piece.start == 0]
    assert [piece.samples for piece in deadly[:4]] == [12, 12, 12, 6] and report.pieces == 3
    close_to_eager(step)


def test_a_cancelled_run_goes_on_from_the_pieces_that_ended(use):
    cluster = use(Here(workers=1))
    step = Step("dropout")
    cancel = threading.Event()

    def progress(progress):
        if len(cluster.pieces) == 3:
            cancel.set()

    with pytest.raises(lazyviz.Interrupted, match="after 3 of 6 pieces"):
        step.graph.evaluate(backend="workers", split=6, cancel=cancel, progress=progress)
    assert step.graph.state == "interrupted" and step.graph.pending
    step.graph.evaluate(backend="workers")
    starts = [piece.start for _, piece in cluster.pieces]
    assert starts[:6] == [0, 4, 8, 12, 16, 20]
    close_to_eager(step, "dropout")


def test_the_error_of_a_kernel_names_the_users_line(use):
    use(Here())
    table, x = nn.Embedding(5, 3), torch.tensor([0, 1, 2, 9])
    with lazyviz.lazy(batch=x) as graph:
        table(x).sum()
    with pytest.raises(
        IndexError, match=r"embedding\.default was recorded at .*test_run_on_workers.py:\d+: table\(x\)"
    ):
        graph.evaluate(backend="workers", split=2)
    assert graph.state == "failed" and graph.nodes[0].state == "failed"


def test_a_batch_that_cannot_be_cut_is_refused_as_ever(use):
    cluster = use(Here())
    x = torch.randn(4, 3)
    with lazyviz.lazy(batch=x) as graph:
        y = x.cumsum(0)
    with pytest.raises(lazyviz.SplitError, match="cumsum"):
        graph.evaluate(backend="workers", split=2)
    assert not cluster.calls
    assert repr(y).startswith("lazy[")


def test_without_a_batch_it_is_an_error_that_says_how_to_name_one(use):
    use(Here())
    with pytest.raises(ValueError, match="name its tensors"):
        with lazyviz.lazy(backend="workers"):
            pass
    with lazyviz.lazy() as graph:
        torch.ones(3) + 1
    with pytest.raises(ValueError, match="name its tensors"):
        graph.evaluate(backend="workers")


@pytest.mark.parametrize("name", ["ipyparallel", "ray"])
def test_without_its_package_a_backend_names_the_extra(name, monkeypatch, shell):
    monkeypatch.setattr(ray_and_ipyparallel, "find_spec", lambda package: None)
    monkeypatch.delitem(backend_registry._backends, name, raising=False)
    with pytest.raises(ValueError, match=rf"pip install 'lazyviz\[{name}\]'"):
        with lazyviz.lazy(backend=name, batch=torch.ones(2)):
            pass
    with pytest.raises(UsageError, match=rf"lazyviz\[{name}\]"):
        shell.run_cell_magic("lazy", f"--backend {name} --batch x", "ran = True")
    assert "ran" not in shell.user_ns


def test_the_cell_magic_takes_a_cluster(use, shell):
    cluster = use(Here())
    shell.user_ns.update(x=torch.ones(4, 3), torch=torch)
    shell.run_cell(
        "%%lazy --backend workers --batch x --split 2 --now --no-widget\ny = (x * 2).sum(1)"
    ).raise_error()
    assert shell.user_ns["y"].tolist() == [6, 6, 6, 6] and len(cluster.pieces) == 2


def test_the_extras_are_declared():
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    for name in ("ipyparallel", "ray"):
        assert f'\n{name} = ["{name}>=' in project
    assert re.search(r'"lazyviz\[[^]]*ipyparallel[^]]*ray[^]]*\]"', project)  # the tests have them


def test_what_is_no_cluster_is_refused():
    with pytest.raises(TypeError, match="compile.*Cluster"):
        lazyviz.register_backend("workers", object())


# --- what travels ----------------------------------------------------------------------------


def test_tensors_travel_with_their_strides_and_shared_memory_once():
    base = torch.randn(40, 30, dtype=torch.bfloat16)
    tensors = {
        "whole": base,
        "transposed": base.t(),
        "row": base[3],
        "expanded": base[0].expand(7, 30),
        "every 10th": torch.arange(1000)[::10],
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(3.5),
        "bool": torch.tensor([True, False]),
        "complex": torch.randn(3, dtype=torch.complex64).conj(),
    }
    sent = tensor_serialization.pack(tensors)
    received = tensor_serialization.unpack(sent, lambda device: device)
    for name, tensor in tensors.items():
        assert torch.equal(received[name], tensor.resolve_conj()) and received[name].dtype == tensor.dtype
        if name != "every 10th":
            assert received[name].stride() == tensor.stride()
    assert sent.nbytes == 40 * 30 * 2 + 100 * 8 + 4 + 2 + 3 * 8
    received["whole"].zero_()
    assert base.abs().sum() > 0 and received["row"].abs().sum() == 0
    with pytest.raises(ValueError, match="sparse"):
        tensor_serialization.pack({"sparse": torch.ones(2).to_sparse()})


def test_a_worker_computes_with_the_senders_settings_and_gives_its_own_back():
    before = worker.settings()
    wanted = {**before, "dtype": torch.float64, "deterministic": (True, True)}
    if not torch.backends.flags_frozen():  # as PyTorch's own test helpers leave them, for good
        wanted["backends.cudnn.deterministic"] = True
    state = torch.get_rng_state()
    with worker._as_sent(wanted, torch.device("cpu")):
        assert worker.settings() == wanted
        torch.rand(3)
    assert worker.settings() == before and torch.equal(torch.get_rng_state(), state)


# --- real workers ----------------------------------------------------------------------------

PAUSE = "import time; time.sleep({seconds})"
ONCE_WITHOUT_MEMORY = """
import torch
from lazyviz.execute.microbatch import worker
own = worker._PieceOnWorker.run
def run(self, number, step):
    worker._PieceOnWorker.run = own
    raise torch.OutOfMemoryError("no memory, once")
worker._PieceOnWorker.run = run
"""


@pytest.fixture(scope="module")
def engines():
    ipyparallel = pytest.importorskip("ipyparallel")
    cluster = ipyparallel.Cluster(n=2)
    cluster.start_cluster_sync()
    try:
        client = cluster.connect_client_sync()
        client.wait_for_engines(2, timeout=120)
        client[:].apply_sync(torch.set_num_threads, 1)
        yield IPyParallelBackend(client)
        client.close()
    finally:
        cluster.stop_cluster_sync()


@pytest.fixture(scope="module")
def actors():
    ray = pytest.importorskip("ray")
    yield RayBackend("local", workers=2, num_cpus=2, include_dashboard=False)
    ray.shutdown()


@pytest.fixture(params=["engines", "actors"])
def two(request, use):
    """A backend with two worker processes on this machine."""
    return use(request.getfixturevalue(request.param))


def call(backend, name, function, *arguments):
    job = backend.submit(name, function, *arguments)
    while not backend.finished([job], 1.0):
        pass
    return backend.result(job)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_two_processes_give_eagers_gradients(two, loss, dtype):
    step = Step(loss, dtype)
    report = step.graph.evaluate(backend="workers", split=3)
    assert report.pieces == 3
    close_to_eager(step, loss, dtype)
    assert Step(loss, dtype).graph.evaluate(backend="workers").pieces == 2  # one for each


@pytest.mark.slow
def test_a_process_without_memory_gets_a_smaller_piece(two):
    call(two, two.workers(False)[0], exec, ONCE_WITHOUT_MEMORY, {})
    for _ in range(20):  # the other process may have run both pieces before this one was ready for any
        step = Step("dropout")
        pieces = step.graph.evaluate(backend="workers", split=2).pieces
        close_to_eager(step, "dropout")
        if pieces != 2:
            break
    assert pieces in (3, 4)  # cut before the other had its own, or after


@pytest.fixture(scope="module")
def twice():
    """A pointwise operator that only this process has."""
    library = torch.library.Library("lazyviz_test_distributed", "DEF")
    library.define("twice(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))
    library.impl("twice", lambda x: 2 * x, "CompositeExplicitAutograd")
    yield torch.ops.lazyviz_test_distributed.twice
    library._destroy()


def test_an_operator_that_only_the_notebook_has_is_named(two, twice):
    x = torch.ones(4)
    with lazyviz.lazy(batch=x) as graph:
        y = twice(x)
    with pytest.raises(LookupError, match="does not know the operator lazyviz_test_distributed::twice"):
        graph.evaluate(backend="workers", split=2)
    graph.evaluate()
    assert y.tolist() == [2, 2, 2, 2]


@pytest.mark.slow
def test_a_killed_process_loses_only_its_piece(two):
    first = two.workers(False)[0]
    number = call(two, first, os.getpid)
    killed = []

    def progress(progress):
        if not killed:  # the second piece is running, or the first
            killed.append(number)
            os.kill(number, signal.SIGKILL)

    step = Step("dropout")
    report = step.graph.evaluate(backend="workers", split=6, progress=progress)
    assert killed and report.pieces == 6
    close_to_eager(step, "dropout")
    with pytest.raises(LostWorkerError):
        for _ in range(100):
            call(two, first, time.sleep, 0.1)
    assert first not in two.workers(False)


def test_nothing_is_kept_of_jobs_that_are_over_or_were_left(two):
    def kept():
        if isinstance(two, RayBackend):
            return len(two._jobs)
        two._purge()
        return len(two.client.results) + len(two.client._futures)

    def stop(progress):
        if progress.piece:  # of one that is back; another one is running
            cancel.set()

    before = kept()
    for _ in range(3):
        step, cancel = Step(), threading.Event()
        with pytest.raises(lazyviz.Interrupted):
            step.graph.evaluate(backend="workers", split=6, cancel=cancel, progress=stop)
        step.graph.evaluate(backend="workers", split=6)
    until = time.monotonic() + 30
    while kept() > before and time.monotonic() < until:
        time.sleep(0.05)
    assert kept() <= before


@pytest.mark.slow
def test_when_all_processes_are_killed_the_run_goes_on_here(engines, use):
    use(engines)
    step = Step()
    for name in engines.workers(False):
        engines.submit(name, os._exit, 1)
    with pytest.raises(lazyviz.NoWorkersError):
        step.graph.evaluate(backend="workers", split=3)
    step.graph.evaluate()
    close_to_eager(step)


@pytest.mark.skipif(find_spec("ipyparallel") is None, reason="ipyparallel is not installed")
def test_where_no_cluster_runs_the_error_says_how_to_start_one(use, tmp_path):
    use(IPyParallelBackend(connection_info=str(tmp_path / "none.json")))
    step = Step()
    with pytest.raises(lazyviz.NoWorkersError, match="ipcluster start"):
        step.graph.evaluate(backend="workers", split=2)
    step.graph.evaluate()
    close_to_eager(step)
