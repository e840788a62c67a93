"""Unmodified training scripts of tests/cli/scripts through ``lazyviz run`` and ``lazyviz plan``.

    python benchmarks/training_scripts.py [NAME ...] [--rounds N] [--page]

For each script: whether ``lazyviz run`` leaves the bits that ``python`` leaves (parameters and the state of
the optimizers), the plan's peak beside what PyTorch's profiler measures in a process without lazyviz, and the
processor time of a step both ways, a mean over the second half of the steps; processes alternate.  What is
found goes into benchmarks/results/training_scripts.json and from there into docs/training_scripts.md;
``--page`` writes the page alone.  A script whose library is missing keeps the row that it had.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CLI = ROOT / "tests" / "cli"
RESULT = ROOT / "benchmarks" / "results" / "training_scripts.json"
PAGE = ROOT / "docs" / "training_scripts.md"


@dataclass(frozen=True)
class Script:
    """A script: its description, its requirements besides PyTorch, and arguments for enough steps to time."""

    what: str
    needs: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


SCRIPTS = {
    "cnn_argparse": Script("a CNN with argparse, a loader's worker and validation", (), ("--epochs=8",)),
    "nano_gpt": Script("a GPT as nanoGPT trains one", (), ("--max_iters=60",)),
    "gan": Script("a GAN: two networks, two optimizers", (), ("--niter=40",)),
    "rl_loop": Script("REINFORCE on an environment of its own", (), ("--episodes=40",)),
    "torchrun_ddp": Script("DistributedDataParallel, one process of torchrun"),
    "hydra_mlp": Script("settings by Hydra", ("hydra-core",), ("steps=60",)),
    "hf_run_clm": Script(
        "transformers' Trainer, as run_clm",
        ("transformers", "accelerate"),
        ("--output_dir=output", "--max_steps=60", "--logging_steps=10", "--per_device_train_batch_size=2",
         "--report_to=none", "--save_strategy=no", "--disable_tqdm=True"),
    ),
    "lightning_module": Script("a LightningModule and its Trainer", ("lightning",), ("20",)),
    "gcn": Script("a graph network of PyTorch Geometric", ("torch-geometric",), ("--epochs=60",)),
    "diffusion": Script(
        "diffusers' U-Net with accelerate, as train_unconditional",
        ("diffusers", "accelerate"),
        ("--num_epochs=3",),
    ),
    "lora": Script("LoRA by peft", ("peft", "transformers"), ("--steps=40",)),
}  # fmt: skip
_IMPORTED_AS = {"hydra-core": "hydra", "torch-geometric": "torch_geometric"}


def call(*words: str, cwd: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """``python WORDS`` with this tree's lazyviz, one thread, and a single rank if it needs ranks.

    Raises:
        SystemExit: it failed; its stderr is shown.
    """
    rank = {
        "EPOCHS": "10",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # any free port
    }
    folders = [str(CLI / "parameter_digest"), str(ROOT), os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(filter(None, folders))
    known = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    needs_rank = any(word.endswith("torchrun_ddp.py") for word in words)
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, **known, **(rank if needs_rank else {}), **(env or {})},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stderr[-4000:]}")
    return done


def processor_seconds() -> float:
    """Processor time of the child processes that have ended; it depends little on the load of the machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The printed lines without running times."""
    return [line for line in done.stdout.splitlines() if "runtime" not in line]


def measure(name: str, rounds: int) -> dict[str, Any]:
    """One row of the results: see the module docstring."""
    script = SCRIPTS[name]
    path, arguments = str(CLI / "scripts" / f"{name}.py"), script.arguments
    plainly, lazily = (path, *arguments), ("-m", "lazyviz", "run", "--quiet", path, "--", *arguments)
    with tempfile.TemporaryDirectory() as cwd:
        same = lines(call(*plainly, cwd=cwd)) == lines(call(*lazily, cwd=cwd))
        measured = call(
            str(CLI / "measured_peak_of_script.py"),
            "2",
            path,
            *arguments,
            cwd=cwd,
            env={"PYTHONPATH": str(ROOT)},
        )
        begin = processor_seconds()
        call("-m", "lazyviz", "plan", path, "--json", "plan.json", "--", *arguments, cwd=cwd)
        planning = processor_seconds() - begin
        plan = json.loads(Path(cwd, "plan.json").read_text(encoding="utf-8"))
        steps = 0
        times: dict[str, list[tuple[float, float]]] = {"plain": [], "lazy": []}
        for _ in range(rounds):
            for kind, words in (("plain", plainly), ("lazy", lazily)):
                begin = processor_seconds()
                last = call(*words, cwd=cwd, env={"LAZYVIZ_TEST_TIMES": "1"}).stdout.splitlines()[-1].split()
                steps = int(last[1])
                times[kind].append((processor_seconds() - begin, float(last[3])))
    whole, step = (
        {kind: statistics.median(pair[at] for pair in found) for kind, found in times.items()}
        for at in (0, 1)
    )
    return {
        "what": script.what,
        "steps": steps,
        "same": same,
        "measured_bytes": int(measured.stdout.splitlines()[-1]),
        "planned_bytes": plan["eager_peak_bytes"],
        "planned_range": plan["eager_peak_range"],
        "plan_seconds": round(planning, 2),
        "seconds": round(whole["plain"], 2),
        "lazy_seconds": round(whole["lazy"], 2),
        "step_seconds": round(step["plain"], 6),
        "lazy_step_seconds": round(step["lazy"], 6),
        "versions": {package: version(package) for package in ("torch", *script.needs)},
    }


HEAD = """# Training scripts through the command

Scripts as people write them, in [tests/cli/scripts](../tests/cli/scripts), each run by `python`, by
`lazyviz run` and by `lazyviz plan`, unmodified. *Same* means: what they print, and every bit of parameters
and of the optimizers' states at the end. *Planned* is the peak of plain PyTorch over the first two optimizer
steps as `lazyviz plan` projects it, *measured* what PyTorch's profiler sees in a process without lazyviz. A
step is the mean of the second half of the steps, *whole* is the process from start to exit with its imports
(medians over {rounds} rounds of processes that alternate); *plan* is all that `lazyviz plan` takes. Times are
the processor's. These scripts are tiny, where recording costs most: see [what it costs](performance.md).

"""
PEAKS = "| script | what it is | steps | same | planned | measured | off |\n" + "|---" * 7 + "|\n"
TIMES = "| script | step | lazily | ratio | whole | lazily | plan |\n" + "|---" * 7 + "|\n"


def page(results: Mapping[str, Any]) -> str:
    """The content of docs/training_scripts.md for the results."""
    peaks, times = [PEAKS], [TIMES]
    for name, row in results["scripts"].items():
        off = row["planned_bytes"] / row["measured_bytes"] - 1
        kib = [f"{row[key] / 1024:,.1f} KiB" for key in ("planned_bytes", "measured_bytes")]
        peaks.append(
            f"| {name} | {row['what']} | {row['steps']} | {'yes' if row['same'] else '**no**'} | {kib[0]} | "
            f"{kib[1]} | {off:+.2%} |\n"
        )
        times.append(
            f"| {name} | {row['step_seconds'] * 1e3:.2f} ms | {row['lazy_step_seconds'] * 1e3:.2f} ms | "
            f"{row['lazy_step_seconds'] / row['step_seconds']:.2f} | {row['seconds']:.1f} s | "
            f"{row['lazy_seconds']:.1f} s | {row['plan_seconds']:.1f} s |\n"
        )
    versions: dict[str, str] = {}
    for row in results["scripts"].values():
        versions |= row["versions"]
    known = ", ".join(f"{package} {number}" for package, number in versions.items())
    foot = f"\nBy `benchmarks/training_scripts.py`: one thread, {results['machine']}, {known}.\n"
    head = HEAD.format(rounds=results["rounds"])
    if results["rounds"] == 1:
        head = head.replace("medians over 1 rounds of processes that alternate", "one process each way")
    return head + "".join(peaks) + "\n" + "".join(times) + foot


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    known: dict[str, Any] = (
        json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {"scripts": {}}
    )
    for name in [] if options.page else options.names or SCRIPTS:
        missing = [
            package
            for package in SCRIPTS[name].needs
            if find_spec(_IMPORTED_AS.get(package, package)) is None
        ]
        if missing:
            print(f"{name}: {', '.join(missing)} not installed", flush=True)
            continue
        row = known["scripts"][name] = measure(name, options.rounds)
        print(f"{name}: {row}", flush=True)
        known["rounds"] = options.rounds
        known["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        known["scripts"] = {each: known["scripts"][each] for each in SCRIPTS if each in known["scripts"]}
        RESULT.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
    PAGE.write_text(page(known), encoding="utf-8")


if __name__ == "__main__":
    main()
