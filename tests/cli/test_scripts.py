"""Training scripts as people write them, through ``lazyviz run`` and ``lazyviz plan``, unchanged.

Run, they print what ``python train.py`` prints.  Planned, the peak is the one that PyTorch's profiler
measures in a process without lazyviz.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from lazyviz.record import native_recorder

from .process import BITS, SCRIPTS, lazyviz_command, python

pytestmark = pytest.mark.slow

HF = (
    "--max_steps=5 --logging_steps=2 --per_device_train_batch_size=2 --report_to=none --save_strategy=no "
    "--disable_tqdm=True"
)
# Script: what it needs, its arguments.
PROGRAMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cnn_argparse": ((), ("--lr", "0.9", "--epochs=1")),
    "nano_gpt": ((), ("--max_iters=4",)),
    "gan": ((), ()),
    "rl_loop": ((), ("--episodes", "3")),
    "torchrun_ddp": ((), ()),
    "hf_run_clm": (("transformers", "accelerate"), tuple(HF.split())),
    "lightning_module": (("lightning",), ()),
    "gcn": (("torch_geometric",), ("--hidden_channels", "8")),
    "diffusion": (("diffusers", "accelerate"), ()),
    "lora": (("peft", "transformers"), ("--r", "2")),
    "hydra_mlp": (("hydra",), ("lr=0.02", "model.width=16")),
}
DAILY = ("cnn_argparse", "nano_gpt", "gan")


@pytest.fixture(params=PROGRAMS)
def program(request, tmp_path):
    """The script's path, its arguments, and the environment that its launcher would set."""
    name = request.param
    if request.config.getoption("--daily") and name not in DAILY:
        pytest.skip("a few of them while one works")
    needed, arguments = PROGRAMS[name]
    for library in needed:
        if find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    if name == "hf_run_clm":
        arguments = (f"--output_dir={tmp_path}", *arguments)
    env = {}
    if name == "torchrun_ddp":
        env = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",  # any free one
        }
    return str(SCRIPTS / f"{name}.py"), arguments, env


def results(text: str) -> list[str]:
    """What a script has printed, without how long it took."""
    return [line for line in text.splitlines() if "runtime" not in line]


def test_a_script_prints_the_same_when_it_is_run_lazily(program, tmp_path):
    script, arguments, env = program
    if "torchrun" in script and native_recorder._dispatcher is None:
        pytest.skip("DDP reads parameters in C++, which Python alone cannot intercept: see docs/limits.md")
    env = {**env, "PYTHONPATH": str(BITS)}
    plain = python(script, *arguments, env=env, cwd=tmp_path)
    lazily = lazyviz_command("run", script, "--", *arguments, env=env, cwd=tmp_path)
    assert plain.returncode == lazily.returncode == 0, plain.stderr + lazily.stderr
    assert any("loss" in line or line.startswith(("epoch", "[")) for line in results(plain.stdout))
    assert results(lazily.stdout) == results(plain.stdout)
    assert plain.stdout.splitlines()[-1].startswith("bits ")  # of parameters and the optimizers' states
    assert "optimizer steps" in lazily.stderr.splitlines()[-1] or "sync point:" in lazily.stderr


def test_the_plan_of_a_script_has_the_peak_that_is_measured(program, tmp_path):
    script, arguments, env = program
    measured = python(
        str(Path(__file__).parent / "measured_peak_of_script.py"),
        "2",
        script,
        *arguments,
        env=env,
        cwd=tmp_path,
    )
    assert measured.returncode == 0, measured.stderr
    peak = int(measured.stdout.splitlines()[-1])
    written = tmp_path / "plan.json"
    done = lazyviz_command("plan", script, "--json", str(written), "--", *arguments, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    plan = json.loads(written.read_text())
    assert (plan["end"], plan["steps"]) == ("stopped", 2)
    low, high = plan["eager_peak_range"]
    close = 0.005 * peak
    assert low - close <= peak <= high + close
    assert abs(plan["eager_peak_bytes"] - peak) <= close or low != high
    assert "Peak of eager PyTorch" in done.stdout


LAUNCHERS = {
    "torchrun": (("-m", "torch.distributed.run", "--nproc-per-node=1"), "torchrun_ddp", ()),
    "accelerate": (
        ("-m", "accelerate.commands.launch", "--cpu", "--num_processes=1", "--num_machines=1",
         "--mixed_precision=no", "--dynamo_backend=no"),
        "diffusion",
        ("accelerate", "diffusers"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAUNCHERS)
@pytest.mark.slow
def test_a_launcher_starts_the_command_as_it_starts_a_script(name, request, tmp_path):
    launcher, script, needed = LAUNCHERS[name]
    if request.config.getoption("--daily"):
        pytest.skip("a few of them while one works")
    for library in needed:
        if find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    path = str(SCRIPTS / f"{script}.py")
    env = {"PYTHONPATH": str(BITS)}
    module = "--module" if name == "accelerate" else "-m"
    plain = python(*launcher, path, env=env, cwd=tmp_path, fresh=True)
    lazily = python(*launcher, module, "lazyviz", "run", path, env=env, cwd=tmp_path, fresh=True)
    assert plain.returncode == lazily.returncode == 0, plain.stderr + lazily.stderr
    assert results(lazily.stdout) == results(plain.stdout)
    assert "bits " in plain.stdout and "optimizer steps" in lazily.stderr
    plan = (*launcher, module, "lazyviz", "plan", path, "--fail-above=1KiB")
    planned = python(*plan, env=env, cwd=tmp_path, fresh=True)
    assert "Peak of eager PyTorch" in planned.stdout
    assert planned.returncode != 0 and "above the 1.00 KiB of --fail-above" in planned.stderr
