"""Devices and profiles: names, states, memory limits, and drivers that fail."""

from __future__ import annotations

import dataclasses
import os
import types

import psutil
import pynvml
import pytest
import torch

import lazyviz
from lazyviz.plan.devices import device_lookup as module
from lazyviz.plan.devices.device_lookup import (
    PROFILES,
    Device,
    DeviceProfile,
    capacity,
    devices,
    lookup,
    resolve,
)
from lazyviz.plan.devices.nvml import LiveMemory
from lazyviz.plan.units import format_bytes


class FakeNvml:
    """Stands in for the driver: two GPUs, of which the second does not answer."""

    def __init__(self, monkeypatch, count=2, init_error=None):
        self.open = 0
        self.count = count
        self.init_error = init_error
        for name in (
            "nvmlInit",
            "nvmlShutdown",
            "nvmlDeviceGetCount",
            "nvmlDeviceGetHandleByIndex",
            "nvmlDeviceGetName",
            "nvmlDeviceGetMemoryInfo",
        ):
            monkeypatch.setattr(pynvml, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def nvmlInit(self):
        if self.init_error is not None:
            raise pynvml.NVMLError(self.init_error)
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetName(self, handle):
        return b"NVIDIA Test"

    def nvmlDeviceGetMemoryInfo(self, handle):
        if handle == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return types.SimpleNamespace(total=1000, free=600, used=400)


def test_every_gpu_is_listed_even_one_that_does_not_answer(monkeypatch):
    nvml = FakeNvml(monkeypatch)
    found = devices()
    assert found[0] == Device("cuda:0", "NVIDIA Test", 1000, 600, 400)
    assert found[1].name == "cuda:1"
    assert found[1].total_bytes is None
    assert "does not respond" in found[1].state
    assert found.cuda_state == "2 GPUs"
    assert nvml.open == 0
    assert capacity(found[1], 5) is None
    assert "600 B free of 1000 B" in repr(found)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no NVIDIA driver"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "no NVIDIA driver"),
        (pynvml.NVML_ERROR_UNKNOWN, "does not respond"),
    ],
)
def test_a_missing_or_failing_driver_is_reported_as_text(monkeypatch, error, words):
    FakeNvml(monkeypatch, init_error=error)
    found = devices()
    assert words in found.cuda_state
    assert found[0].name == "cpu"
    with pytest.raises(ValueError, match=words):
        resolve("cuda")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH), "without a reboot"),
        (pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION), "no permission"),
        (OSError("libnvidia-ml.so.1: file too short"), "file too short"),
        (AttributeError("undefined symbol"), "undefined symbol"),
    ],
)
def test_a_broken_driver_never_raises(monkeypatch, error, words):
    FakeNvml(monkeypatch)

    def fail(*_):
        raise error

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert words in devices().cuda_state
    monkeypatch.undo()
    nvml = FakeNvml(monkeypatch)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", fail)
    assert words in devices().cuda_state
    assert nvml.open == 0


def test_one_lost_gpu_does_not_hide_the_others(monkeypatch):
    FakeNvml(monkeypatch, count=3)

    def handle(index):
        if index == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return index

    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handle)
    found = devices()
    assert [device.name for device in found[:3]] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [device.state for device in found[:3]] == ["ready", found[1].state, "ready"]
    assert "fallen off the bus" in found[1].state and found[1].total_bytes is None
    assert found.cuda_state == "3 GPUs"
    assert LiveMemory(1).read() is None
    assert LiveMemory(2).read() == (400, 1000)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    assert [device.state == "ready" for device in devices()[:2]] == [False, True]


def test_a_driver_that_fails_on_shutdown_raises_nothing(monkeypatch):
    FakeNvml(monkeypatch)

    def fail():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)

    monkeypatch.setattr(pynvml, "nvmlShutdown", fail)
    assert devices()[0].free_bytes == 600
    live = LiveMemory(0)
    assert live.read() == (400, 1000)
    live.close()
    assert live.read() is None


@pytest.mark.parametrize("number", ["²", "٣", "one"])
def test_what_only_looks_like_a_number_is_no_gpu(monkeypatch, number):
    FakeNvml(monkeypatch)
    with pytest.raises(ValueError, match="Unknown device"):
        resolve(f"cuda:{number}")
    with pytest.raises(ValueError, match="Unknown device"):
        lazyviz.lazy(device=f"cuda:{number}").__enter__()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", number)
    assert devices().cuda_state.startswith("driver present, no GPU visible")


def test_memory_of_other_processes_is_reported(monkeypatch):
    FakeNvml(monkeypatch, count=1)
    process = types.SimpleNamespace
    running = [process(pid=os.getpid(), usedGpuMemory=100), process(pid=1, usedGpuMemory=250)]
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda handle: running)
    graphics = [process(pid=1, usedGpuMemory=250), process(pid=2, usedGpuMemory=30)]
    monkeypatch.setattr(pynvml, "nvmlDeviceGetGraphicsRunningProcesses", lambda handle: graphics)
    assert devices()[0].other_bytes == 280
    assert "280 B used by other processes" in repr(devices())
    graphics.append(process(pid=3, usedGpuMemory=None))  # as on Windows
    assert devices()[0].other_bytes is None


class FakeMig(FakeNvml):
    """One whole GPU, and one in MIG mode with two slices of which one place is empty."""

    def __init__(self, monkeypatch):
        super().__init__(monkeypatch)
        for name in (
            "nvmlDeviceGetMigMode",
            "nvmlDeviceGetMaxMigDeviceCount",
            "nvmlDeviceGetMigDeviceHandleByIndex",
            "nvmlDeviceIsMigDeviceHandle",
            "nvmlDeviceGetUUID",
        ):
            monkeypatch.setattr(pynvml, name, getattr(self, name))

    def nvmlDeviceGetMigMode(self, handle):
        if handle == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [pynvml.NVML_DEVICE_MIG_ENABLE, pynvml.NVML_DEVICE_MIG_ENABLE]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return 3

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, index):
        if index == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return f"slice {index}"

    def nvmlDeviceIsMigDeviceHandle(self, handle):
        return isinstance(handle, str)

    def nvmlDeviceGetUUID(self, handle):
        return f"MIG-{handle}" if isinstance(handle, str) else f"GPU-{handle}"

    def nvmlDeviceGetMemoryInfo(self, handle):
        size = 70 if isinstance(handle, str) else 1000
        return types.SimpleNamespace(total=size, free=size - 10, used=10)


def test_of_a_gpus_slices_one_is_a_device_as_a_cuda_process_sees_them(monkeypatch):
    FakeMig(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = devices()
    assert [(each.name, each.total_bytes) for each in found[:3]] == [
        ("cuda:0", 1000),
        ("cuda:1", 70),
        ("cpu", found[2].total_bytes),
    ]
    assert found.cuda_state == "2 GPUs (1 more MIG slice; a CUDA process can use only one)"


@pytest.mark.parametrize(
    ("visible", "sizes", "state"),
    [
        ("1", [70], "1 MIG slice (CUDA_VISIBLE_DEVICES=1)"),
        ("1,0", [70, 1000], "2 GPUs (CUDA_VISIBLE_DEVICES=1,0)"),
        ("MIG-slice 2", [70], "1 MIG slice (CUDA_VISIBLE_DEVICES=MIG-slice 2)"),
        ("GPU-0", [1000], "1 GPU (CUDA_VISIBLE_DEVICES=GPU-0)"),
        ("0,9,1", [1000], "1 GPU (CUDA_VISIBLE_DEVICES=0,9,1)"),
        ("-1", [], "driver present, no GPU visible (CUDA_VISIBLE_DEVICES=-1)"),
        ("", [], "driver present, no GPU visible (CUDA_VISIBLE_DEVICES=)"),
    ],
)
def test_gpus_that_cuda_does_not_see_are_left_out(monkeypatch, visible, sizes, state):
    FakeMig(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = devices()
    assert [each.total_bytes for each in found if each.name.startswith("cuda")] == sizes
    assert found.cuda_state == state


def test_live_memory_is_read_until_it_is_closed(monkeypatch):
    nvml = FakeNvml(monkeypatch)
    live = LiveMemory(0)
    assert live.read() == (400, 1000)
    live.close()
    assert live.read() is None
    silent = LiveMemory(1)
    assert silent.read() is None
    silent.close()
    assert nvml.open == 0


def test_live_memory_is_none_where_nvml_answers_nothing(monkeypatch):
    nvml = FakeNvml(monkeypatch)
    live = LiveMemory(0)
    empty = types.SimpleNamespace(used=None, total=None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda handle: empty)
    assert live.read() is None
    live.close()
    assert nvml.open == 0


def test_live_memory_without_a_driver_is_none(monkeypatch):
    FakeNvml(monkeypatch, init_error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    live = LiveMemory(0)
    assert live.read() is None
    live.close()


def test_a_driver_without_a_gpu_is_reported_as_text(monkeypatch):
    FakeNvml(monkeypatch, count=0)
    assert devices().cuda_state == "driver present, no GPU visible"


def test_cuda_without_a_number_is_the_first_gpu(monkeypatch):
    FakeNvml(monkeypatch)
    assert resolve("cuda").name == "cuda:0"
    assert resolve(torch.device("cuda", 1)).name == "cuda:1"
    with pytest.raises(ValueError, match="cuda:7"):
        resolve("cuda:7")


def test_the_cpu_tells_its_memory():
    cpu = resolve("cpu")
    assert isinstance(cpu, Device)
    assert 0 < cpu.free_bytes <= cpu.total_bytes
    assert cpu.used_bytes == cpu.total_bytes - cpu.free_bytes


def test_a_container_limit_below_the_machine_is_what_counts(monkeypatch, tmp_path):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("600000\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 50000\n")
    assert module._cgroup_memory(tmp_path) == (1000000, 450000)
    monkeypatch.setattr(module, "_cgroup_memory", lambda: (1000000, 450000))
    cpu = module.cpu_device()
    assert (cpu.total_bytes, cpu.free_bytes, cpu.used_bytes) == (1000000, 450000, 550000)
    assert "container" in cpu.model


def test_a_container_without_a_limit_has_the_machine_s_memory(monkeypatch, tmp_path):
    (tmp_path / "memory.max").write_text("max\n")
    assert module._cgroup_memory(tmp_path) is None
    monkeypatch.setattr(module, "_cgroup_memory", lambda: (1 << 62, 1 << 62))  # cgroup v1's "no limit"
    assert module.cpu_device().total_bytes == psutil.virtual_memory().total


@pytest.mark.parametrize(
    "error", [FileNotFoundError("/proc/meminfo"), psutil.NoSuchProcess(1), KeyError(b"MemTotal:")]
)
def test_memory_that_the_system_does_not_tell_is_unknown_and_plans_are_made_all_the_same(monkeypatch, error):
    def fails(*_):
        raise error

    monkeypatch.setattr(psutil, "virtual_memory", fails)
    monkeypatch.setattr(psutil, "Process", fails)
    monkeypatch.setattr(module, "_cgroup_memory", lambda: None)
    cpu = module.cpu_device()
    assert (cpu.total_bytes, cpu.free_bytes, cpu.used_bytes) == (None, None, None)
    with lazyviz.lazy() as graph:
        torch.ones(1000).sum()
    plan = graph.plan()
    assert plan.peak_bytes == 4004
    assert (plan.capacity_bytes, plan.fits) == (None, None)
    assert "unknown" in plan.verdict()
    assert "cpu" in str(lazyviz.devices())
    monkeypatch.setattr(module, "_cgroup_memory", lambda: (1000000, 450000))
    assert module.cpu_device().free_bytes == 450000


def test_profiles_name_a_plausible_size_and_its_source():
    for name, profile in PROFILES.items():
        assert profile.name == name
        assert 7 << 30 < profile.total_bytes < 300 << 30
        assert profile.compute_capability is not None
        assert any(maker in profile.source for maker in ("NVIDIA", "GeForce"))
    assert {"A100-40GB", "H100-80GB", "RTX-4090", "RTX-3060"} <= set(PROFILES)
    assert len(PROFILES) >= 25


def test_device_profiles_are_found_regardless_of_case():
    assert lookup("a100-40gb") is PROFILES["A100-40GB"]
    assert resolve("RTX-4090") is PROFILES["RTX-4090"]
    assert resolve("NVIDIA GeForce RTX 4090") is PROFILES["RTX-4090"]


@pytest.mark.parametrize(
    ("name", "near"),
    [("H100", "H100-80GB"), ("A100", "A100-40GB"), ("RTX4091", "RTX-4090"), ("v100-16", "V100-16GB")],
)
def test_an_unknown_name_gets_its_near_matches(name, near):
    with pytest.raises(ValueError, match=near):
        lookup(name)


def test_a_name_like_nothing_gets_the_whole_list():
    with pytest.raises(ValueError, match="known: cpu, cuda, A100-40GB"):
        resolve("zzzzzz")


def test_a_user_can_bring_a_profile():
    mine = DeviceProfile("mine", 5)
    assert resolve(mine) is mine
    assert capacity(mine, 100) == 5
    with pytest.raises(ValueError, match="positive"):
        DeviceProfile("none", 0)


def test_a_profile_s_sizes_may_be_text():
    mine = DeviceProfile("mine", "8 GiB", context_bytes="400 MiB")
    assert (mine.total_bytes, mine.context_bytes) == (8 << 30, 400 << 20)
    assert mine == DeviceProfile("mine", 8 << 30, context_bytes=400 << 20)
    assert dataclasses.replace(mine, name="other").total_bytes == mine.total_bytes


@pytest.mark.parametrize("size", ["much", 1.5, -1, None, True, "8 GiB of HBM"])
def test_a_profile_of_no_size_is_refused(size):
    with pytest.raises(ValueError, match="not a size"):
        DeviceProfile("mine", size)
    with pytest.raises(ValueError, match="not a size"):
        DeviceProfile("mine", "8 GiB", context_bytes=size)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1536, "1.50 KiB"), (10 << 20, "10.0 MiB"),
     (1023 << 20, "1023 MiB"), ((1 << 30) - 1, "1.00 GiB"), (-2048, "-2.00 KiB"), (5 << 60, "5120 PiB")],
)  # fmt: skip
def test_bytes_read_with_three_significant_digits(nbytes, text):
    assert format_bytes(nbytes) == text


def test_sizes_of_devices_are_aligned():
    lines = repr(lazyviz.devices()).splitlines()[1:]
    names = [item.name for item in lazyviz.devices()]
    width = max(map(len, names))
    assert [line[: width + 1].rstrip() for line in lines] == names
    assert all(line[width + 1] not in " " for line in lines)
