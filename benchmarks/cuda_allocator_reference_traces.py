"""Runs lazyviz's events through PyTorch's own CUDA caching allocator: data for the simulator's test.

The allocator is C++ that needs a GPU only for ``cudaMalloc`` and its kin.  Here it is the compiled
library of a CUDA build of PyTorch, on a CUDA runtime of our own that only counts
(``allocator/fake_cudart.cpp``), driven by ``allocator/drive_cuda_caching_allocator.cpp``.  Replayed are
training steps recorded with lazyviz and random events, in many configurations, with enough, scarce and too
little memory.  Written is, for each event, what was allocated and reserved after it.

To run it again, on Linux with g++ and no GPU (the wheel is half a gigabyte)::

    pip download --no-deps --index-url https://pypi.org/simple -d wheels \\
        torch==2.13.0 "nvidia-cuda-runtime==13.0.*" "nvidia-cuda-crt==13.0.*"
    for wheel in wheels/*.whl; do unzip -q -o $wheel -d unpacked; done
    python benchmarks/cuda_allocator_reference_traces.py --torch unpacked/torch \\
        --cuda unpacked/nvidia/cu13/include

``--check N`` compares the simulator with the library on N more random runs instead of writing data.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

import lazyviz
from lazyviz.plan.allocator.simulate_events import AllocatorConfig, CachingAllocator
from lazyviz.plan.liveness.lifetimes import events, lifetimes

HERE = Path(__file__).resolve().parent
DATA = HERE.parent / "tests" / "plan" / "data"
GIB = 2**30
# A trace is a list of numbers: n > 0 allocates n bytes, -k frees what the k-th allocation got, 0
# empties the cache.
Trace = list[int]
CONFIGURATIONS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "max_split_size_mb:100,max_non_split_rounding_mb:40",
    "garbage_collection_threshold:0.6,per_process_memory_fraction:0.9",
    "roundup_power2_divisions:[2:8,16:4,>:2]",
    "large_segment_size_mb:64",
    "max_split_size_mb:20,garbage_collection_threshold:0.3,per_process_memory_fraction:0.95",
    "expandable_segments:True,roundup_power2_divisions:8,max_split_size_mb:32",
    "expandable_segments:True,large_segment_size_mb:32",
)


class Library:
    """The compiled allocator, with a driver program that replays traces."""

    def __init__(self, torch_directory: Path, cuda_headers: Path, work: Path) -> None:
        self.program = work / "player"
        self.work = work
        libraries = torch_directory.resolve() / "lib"
        runtime = work / "libcudart.so.13"
        names = subprocess.check_output(["nm", "-D", libraries / "libc10_cuda.so"], text=True)
        own = (HERE / "allocator" / "fake_cudart.cpp").read_text()
        wanted = {line.split()[-1].partition("@")[0] for line in names.splitlines() if " U cuda" in line}
        rest = "\n".join(f"int {name}() {{ return 0; }}" for name in sorted(wanted) if f" {name}(" not in own)
        (work / "rest.cpp").write_text(f'extern "C" {{\n{rest}\n}}\n')
        (work / "versions").write_text("libcudart.so.13 { global: cuda*; local: *; };\n")
        compiler: list[str | Path] = ["g++", "-O1", f"-I{cuda_headers}"]
        subprocess.run(
            [
                *(*compiler, "-std=c++17", "-fPIC", "-shared", HERE / "allocator" / "fake_cudart.cpp"),
                *(work / "rest.cpp", "-Wl,-soname,libcudart.so.13", "-o", runtime),
                f"-Wl,--version-script={work / 'versions'}",
            ],
            check=True,
        )
        subprocess.run(
            [
                *(*compiler, "-std=c++20", f"-I{torch_directory / 'include'}", "-w"),
                *(
                    HERE / "allocator" / "drive_cuda_caching_allocator.cpp",
                    f"-L{libraries}",
                    "-lc10_cuda",
                    "-lc10",
                    runtime,
                ),
                *(f"-Wl,-rpath,{libraries}", f"-Wl,-rpath,{work}", "-o", self.program),
            ],
            check=True,
        )

    def play(self, trace: Trace, streams: list[int], run: dict[str, Any], snapshot_at: int = -1) -> list[str]:
        lines = []
        for index, (number, stream) in enumerate(named(trace, streams)):
            if index == snapshot_at:
                lines.append("s")
            key, nbytes = number
            lines.append(f"a {key} {nbytes} {stream}" if nbytes else f"f {key}" if key else "e")
        environment = os.environ | {
            "LD_LIBRARY_PATH": str(self.work),
            "FAKE_CAPACITY": str(run["capacity"]),
            "FAKE_TOTAL": str(run["total"]),
            "PYTORCH_CUDA_ALLOC_CONF": run["config"],
        }
        done = subprocess.run(
            [self.program],
            input="\n".join(lines) + "\n",
            text=True,
            capture_output=True,
            env=environment,
            check=True,
        )
        return done.stdout.splitlines()


def named(trace: Trace, streams: list[int]) -> Iterator[tuple[tuple[int, int], int]]:
    """The events as ``(key, nbytes), stream``: 0 bytes is a free, key 0 an emptied cache."""
    count = 0
    for number in trace:
        if number > 0:
            count += 1
            yield (count, number), streams[count - 1] if streams else 0
        else:
            yield (-number, 0), 0


def run_library(
    library: Library, trace: Trace, streams: list[int], run: dict[str, Any], snapshot_at: int = -1
) -> dict[str, Any]:
    """``run`` with the results of the library; sums are stored as differences, which compress well."""
    lines = library.play(trace, streams, run, snapshot_at)
    steps = [[int(word) for word in line.split()] for line in lines if line[0] not in "SLE"]
    retries, *peaks = (int(word) for word in lines[-1].split()[1:])
    result = {
        **run,
        "failed": [index for index, step in enumerate(steps) if step[0]],
        "allocated": differences([step[1] for step in steps]),
        "reserved": differences([step[2] for step in steps]),
        "retries": retries,
        "peaks": peaks,
    }
    if snapshot_at >= 0:
        result |= {"snapshot_at": snapshot_at, **read_snapshot(lines)}
    return result


def differences(numbers: list[int]) -> list[int]:
    return [after - before for before, after in pairwise([0, *numbers])]


def read_snapshot(lines: list[str]) -> dict[str, Any]:
    """The driver's snapshot in the form of ``torch.cuda.memory_snapshot()``."""
    segments = []
    for words in (line.split() for line in lines if line.startswith("S ")):
        address, size, stream, large, expandable = (int(word) for word in words[1:6])
        blocks = []
        for word in words[6:]:
            block, requested, used = (int(part) for part in word.split(":"))
            state = "active_allocated" if used else "inactive"
            blocks.append({"size": block, "requested_size": requested, "state": state})
        segments.append(
            {
                "address": address,
                "total_size": size,
                "stream": stream,
                "segment_type": "large" if large else "small",
                "is_expandable": bool(expandable),
                "segment_pool_id": [0, 0],
                "blocks": blocks,
            }
        )
    alive = dict(line.split()[1:] for line in lines if line.startswith("L "))
    return {"segments": segments, "alive": {key: int(address) for key, address in alive.items()}}


# Traces


def gpt2() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    config = GPT2Config(
        n_layer=3, n_embd=768, vocab_size=8000, n_positions=512, bos_token_id=0, eos_token_id=0
    )
    tokens = torch.randint(0, config.vocab_size, (4, 512))
    return GPT2LMHeadModel(config), lambda model: model(tokens, labels=tokens).loss


def bert() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    config = BertConfig(num_hidden_layers=2, vocab_size=6000, hidden_size=384, intermediate_size=1536)
    tokens = torch.randint(0, config.vocab_size, (16, 128))
    return BertForMaskedLM(config), lambda model: model(tokens, labels=tokens).loss


class Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    widths = [32, 32, 64, 128, 256]
    blocks = [Residual(before, after, 1 + (before != after)) for before, after in pairwise(widths)]
    model = nn.Sequential(
        nn.Conv2d(3, 32, 7, 2, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 100)
    )
    images, labels = torch.randn(24, 3, 224, 224), torch.randint(0, 100, (24,))
    return model, lambda model: nn.functional.cross_entropy(model(images), labels)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5000, 256)
        self.cell = nn.LSTMCell(256, 512)
        self.head = nn.Linear(512, 5000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        state, outputs = None, []
        for word in self.embedding(tokens).unbind(1):
            state = self.cell(word, state)
            outputs.append(self.head(state[0]))
        return torch.stack(outputs, 1)


def lstm() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    tokens = torch.randint(0, 5000, (32, 24))
    return Tagger(), lambda model: nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def training(
    make: Callable[[], tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]],
    optimizer: Callable[..., torch.optim.Optimizer],
    steps: int = 2,
) -> Trace:
    """The eager timeline of a few training steps, which are recorded but not run."""
    torch.manual_seed(0)
    model, compute_loss = make()
    step = optimizer(model.train().parameters())
    with lazyviz.lazy() as graph:
        for _ in range(steps):
            step.zero_grad()
            loss = compute_loss(model)
            loss.backward()
            step.step()
    ordinals: dict[object, int] = {}
    trace = []
    for _, nbytes, storage in events(lifetimes(graph.graph), eager=True):
        if nbytes > 0:
            ordinals[storage] = len(ordinals) + 1
            trace.append(nbytes)
        else:
            trace.append(-ordinals[storage])
    return trace


def random_trace(generator: random.Random, length: int, streams: int) -> tuple[Trace, list[int]]:
    """Random allocations, some of repeated sizes, freed soon or at random; sometimes the cache is emptied."""
    largest = generator.choice([21, 23, 25, 27])
    emptied = generator.choice([0.0, 0.0, 0.01])
    usual = [
        generator.randint(1, 2 ** generator.randint(4, largest)) for _ in range(generator.choice([4, 12, 60]))
    ]
    trace: Trace = []
    alive: list[int] = []
    placed = []
    for _ in range(length):
        if generator.random() < emptied:
            trace.append(0)
        elif alive and generator.random() < generator.choice([0.3, 0.5, 0.6]):
            youngest = generator.random() < 0.4
            trace.append(-alive.pop(-1 if youngest else generator.randrange(len(alive))))
        else:
            own = generator.randint(1, 2 ** generator.randint(4, largest))
            trace.append(generator.choice(usual) if generator.random() < 0.7 else own)
            placed.append(generator.randrange(streams))
            alive.append(len(placed))
    return trace, placed if streams > 1 else []


def runs_of(trace: Trace, streams: list[int], configurations: tuple[str, ...]) -> list[dict[str, Any]]:
    """Each configuration with enough, scarce (cached memory must be released), and too little memory."""
    result: list[dict[str, Any]] = []
    for config in configurations:
        needed = simulate_run(trace, streams, {"config": config, "capacity": 1024 * GIB, "total": 1024 * GIB})
        allocated, reserved = needed.allocated_peak, needed.reserved_peak
        capacities = (
            2 * reserved,
            (allocated + 3 * reserved) // 4,
            (allocated + reserved) // 2,
            int(0.7 * allocated),
        )
        result += [{"config": config, "capacity": size, "total": size + size // 10} for size in capacities]
    return result


def simulate_run(trace: Trace, streams: list[int], run: dict[str, Any]) -> CachingAllocator:
    allocator = CachingAllocator(
        AllocatorConfig.parse(run["config"]), capacity=run["capacity"], total=run["total"]
    )
    failed = set()
    allocated, reserved = [], []
    for (key, nbytes), stream in named(trace, streams):
        if nbytes and not allocator.allocate(key, nbytes, stream):
            failed.add(key)
        elif not nbytes and key and key not in failed:
            allocator.free(key)
        elif not key:
            allocator.empty_cache()
        allocated.append(allocator.allocated)
        reserved.append(allocator.reserved)
    run["simulated"] = differences(allocated), differences(reserved), allocator.retries
    return allocator


def write(name: str, made_by: str, traces: list[dict[str, Any]]) -> None:
    path = DATA / f"{name}.json.gz"
    text = json.dumps({"torch": made_by, "traces": traces}, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    runs = sum(len(trace["runs"]) for trace in traces)
    print(f"{path.name}: {len(traces)} traces, {runs} runs, {path.stat().st_size:,} B")


def check(library: Library, count: int) -> int:
    """The number of ``count`` random runs for which the simulator's results are wrong."""
    wrong = 0
    for seed in range(count):
        generator = random.Random(seed)
        trace, streams = random_trace(generator, 1000, generator.choice([1, 1, 3]))
        run = generator.choice(runs_of(trace, streams, (generator.choice(CONFIGURATIONS),)))
        truth = run_library(library, trace, streams, run)
        simulate_run(trace, streams, run)
        if run["simulated"] != (truth["allocated"], truth["reserved"], truth["retries"]):
            wrong += 1
            print(f"seed {seed}: differs with {run['config'] or 'no options'!r}")
    print(f"{count} random runs, {wrong} differ")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch", type=Path, required=True, help="torch/ of an unpacked CUDA wheel")
    parser.add_argument("--cuda", type=Path, required=True, help="headers of the CUDA runtime")
    parser.add_argument("--check", type=int, default=0, metavar="N", help="only compare N random runs")
    arguments = parser.parse_args()
    version: dict[str, str] = {}
    exec((arguments.torch / "version.py").read_text(), version)
    with tempfile.TemporaryDirectory() as work:
        library = Library(arguments.torch, arguments.cuda, Path(work))
        if arguments.check:
            sys.exit(check(library, arguments.check) > 0)
        adamw = lambda parameters: torch.optim.AdamW(parameters, foreach=True)  # noqa: E731
        sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)  # noqa: E731
        traces = []
        for make, optimizer in ((gpt2, adamw), (bert, adamw), (resnet, sgd), (lstm, adamw)):
            trace = training(make, optimizer)
            runs = [run_library(library, trace, [], run) for run in runs_of(trace, [], CONFIGURATIONS)]
            traces.append({"name": make.__name__, "events": trace, "streams": [], "runs": runs})
        write("allocator_training", version["__version__"], traces)
        traces = []
        for seed in range(60):
            generator = random.Random(seed)
            trace, streams = random_trace(generator, 400, 3 if seed % 5 == 4 else 1)
            config = CONFIGURATIONS[seed % len(CONFIGURATIONS)]
            middle = len(trace) // 2
            runs = [
                run_library(library, trace, streams, run, middle)
                for run in runs_of(trace, streams, (config,))
            ]
            traces.append({"name": f"random-{seed}", "events": trace, "streams": streams, "runs": runs})
        write("allocator_random", version["__version__"], traces)


if __name__ == "__main__":
    main()
