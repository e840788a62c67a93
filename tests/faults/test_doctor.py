"""``lazyviz.doctor()`` reports changed state, and ``lazyviz.reset()`` restores it, from any state."""

from __future__ import annotations

import gc
import signal
import threading

import pynvml
import pytest
import torch

import lazyviz
from lazyviz.process.gc_pause import patience
from lazyviz.record.interception.attribute_patches import everything
from lazyviz.record.tape import tape
from lazyviz.session import evaluation
from lazyviz.torch_internals import private_api
from lazyviz.torch_internals.find_compiler_and_build_extensions import SOURCES

from .support.inject_faults import State, is_plain


def keep_patches():
    """Of an open block, forgotten by all who could take them back."""
    lazyviz.lazy().__enter__()
    for patches in list(everything):
        patches._set, patches._again = [], False
    evaluation.watch._reads.installed = False


def record_for_nobody():
    lazyviz.lazy().__enter__()
    from lazyviz.session import block

    block._open.clear()
    block._claims.clear()


def leave_the_mode():
    private_api.insert_mode_at_bottom(evaluation.watch._mode)
    evaluation.watch._thread.entered = 3


guards = []


def leave_keys_out():
    for guard in (private_api.below_autograd(), private_api.excluding_python()):
        guard.__enter__()
        guards.append(guard)  # whose end would bring the keys back


def raise_thresholds():
    patience.begin()


def keep_hooks():
    evaluation.watch._scopes._steps.install()


def keep_code():
    evaluation.watch._scopes.install()
    evaluation.watch._scopes._call._before = None


def pause():
    lazyviz.lazy().__enter__()
    tape.recording.pauses = 7


def hold_the_lock():
    tape.runs.lock.acquire()


def hold_the_lock_on_a_thread_that_ends():
    thread = threading.Thread(target=tape.runs.lock.acquire)
    thread.start()
    thread.join()


def plan_for_an_absent_gpu():
    lazyviz.lazy(device="A100-40GB").__enter__()


def stay_away():
    lazyviz.lazy().__enter__()
    evaluation.watch._suspended("torch.compile").__enter__()


BROKEN = [
    keep_patches, record_for_nobody, leave_the_mode, leave_keys_out, raise_thresholds, keep_hooks, keep_code,
    pause, hold_the_lock, hold_the_lock_on_a_thread_that_ends, plan_for_an_absent_gpu, stay_away,
]  # fmt: skip


@pytest.fixture
def state():
    lazyviz.reset()
    return State()


@pytest.mark.parametrize("breaking", BROKEN, ids=lambda function: function.__name__)
def test_a_reset_puts_everything_right(breaking, state):
    breaking()
    during = lazyviz.doctor()
    assert during.leftovers or during.recording
    lazyviz.reset()
    after = lazyviz.doctor()
    assert after.ok, after
    assert not after.recording and not state.differences()
    assert is_plain()
    weight = torch.zeros(2)
    with lazyviz.lazy() as graph:
        weight.add_(1)
        total = (weight * 2).sum()
    assert len(graph.nodes) == 3 and total.item() == 4 and weight.tolist() == [1, 1]
    assert lazyviz.doctor().ok and not state.differences()


@pytest.mark.parametrize(
    ("breaking", "name"),
    [
        (leave_the_mode, "dispatch mode"),
        (leave_keys_out, "dispatch key Python left out"),
        (raise_thresholds, "thresholds of the garbage collector"),
        (keep_hooks, "torch.optim's global step hooks"),
        (keep_code, "code of torch.nn.modules.module"),
        (hold_the_lock, "lock of evaluations"),
        (record_for_nobody, "records without an open block"),
    ],
)
def test_what_is_left_behind_is_named(breaking, name, state):
    breaking()
    try:
        found = lazyviz.doctor()
        assert not found.ok and not found
        assert any(name in str(leftover) for leftover in found.leftovers), found
        assert name in str(found)
    finally:
        lazyviz.reset()


def test_a_healthy_process_is_reported(state):
    found = lazyviz.doctor()
    assert found.ok and found
    assert found.versions["torch"] == torch.__version__ and "No leftover state" in repr(found)
    assert any(line.startswith("NVML") for line in found.devices)
    with lazyviz.lazy():
        torch.ones(2) + 1
        during = lazyviz.doctor()
        assert len(during.recording) == 1 and during.pending == 2
        assert "torch.Tensor.tolist" in during.patched and during.ok


def test_every_native_module_is_named_whether_it_is_in_use_or_not():
    compiled = lazyviz.doctor().compiled
    assert set(compiled) == {source.stem for source in SOURCES}
    assert sorted(name for name, used in compiled.items() if used) == lazyviz.metrics()["compiled modules"]


def test_looking_changes_nothing(state):
    with lazyviz.lazy():
        value = torch.ones(2) + 1
    lazyviz.doctor()
    assert lazyviz.is_lazy(value) and value.tolist() == [2, 2]
    lazyviz.sync()
    thresholds = gc.get_threshold()
    lazyviz.doctor()
    assert gc.get_threshold() == thresholds and not state.differences()


def test_a_handler_asks_while_the_driver_is_asked(monkeypatch):
    """The driver's binding holds a lock meanwhile, which the same thread cannot take again."""
    taken, lock, initialize = [], threading.Lock(), pynvml.nvmlInit

    def initialize_locked():
        taken.append(lock.acquire(blocking=False))
        try:
            if len(taken) == 1:
                signal.raise_signal(signal.SIGUSR1)
        finally:
            lock.release()
        initialize()

    monkeypatch.setattr(pynvml, "nvmlInit", initialize_locked)
    before = signal.signal(signal.SIGUSR1, lambda number, frame: lazyviz.devices())
    try:
        lazyviz.doctor()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert taken == [True, True]
