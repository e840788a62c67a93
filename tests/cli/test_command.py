"""``lazyviz plan``, ``view``, and ``run``: scripts behave as under ``python``."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from lazyviz.plan.units import format_bytes
from lazyviz.torch_internals import op_stream

from .process import lazyviz_command, python

pytestmark = pytest.mark.slow

TRAINING = """
    import sys
    import torch
    from torch import nn

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for step in range(5):
        x, y = torch.randn(32, 64, device=device), torch.randint(10, (32,), device=device)
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())
"""


@pytest.fixture
def write(tmp_path):
    """Writes a script, whose path it returns."""

    def write(text, name="train.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return name

    return write


def test_a_plan_shows_peak_lines_and_remedies_and_stops_after_the_steps(write, tmp_path):
    done = lazyviz_command("plan", write(TRAINING), "--steps", "3", "--json", "plan.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line[:2] for line in done.stdout.splitlines()[:3]] == ["0 ", "1 ", "tr"]  # two losses: it stopped
    for part in (
        "Peak of eager PyTorch: ",
        "Lines that allocated it",
        "train.py:14",
        "What would lower the peak",
    ):
        assert part in done.stdout
    assert "It fits: cpu" in done.stdout
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert (plan["script"], plan["steps"], plan["end"], plan["device"]) == ("train.py", 3, "stopped", "cpu")
    parameters = 4 * (64 * 256 + 256 + 256 * 10 + 10)
    assert plan["by_category"]["parameters"] == parameters
    assert plan["by_category"]["optimizer"] >= 2 * parameters
    assert plan["peak_line"]["line"] == 15
    assert plan["needed_bytes"] == plan["eager_peak_bytes"] >= 4 * parameters
    assert {"kind", "text", "saves_bytes"} <= set(plan["remedies"][0])


def test_a_remedy_names_the_line_in_the_function_that_the_plan_stopped_in(write, tmp_path):
    text = """
    import torch
    from torch import nn

    def train():
        layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.GELU())]
        net = nn.Sequential(*layers, nn.Linear(256, 10))
        optimizer = torch.optim.AdamW(net.parameters())
        for _ in range(4):
            x, y = torch.randn(1024, 256), torch.randint(0, 10, (128,))
            loss = nn.functional.cross_entropy(net(x.view(8, 128, 256).mean(0)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(loss.item())

    if __name__ == "__main__":
        train()
    """
    done = lazyviz_command("plan", write(text), cwd=tmp_path)
    assert "del x after its last use at train.py:11 " in done.stdout, done.stdout


INTERRUPTED = """
    import atexit, os, signal, time
    import torch

    atexit.register(print, "at exit")
    print(torch.ones(3).sum())
    if "fork" in os.environ:
        if child := os.fork():
            print("child:", os.waitpid(child, 0)[1], flush=True)
            raise SystemExit(0)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
"""


@pytest.mark.parametrize("env", [{}, {"fork": "1"}], ids=["script", "child"])
@pytest.mark.slow
def test_an_interrupted_script_ends_like_python(write, tmp_path, env):
    script = write(INTERRUPTED)
    eager = python(script, cwd=tmp_path, env=env, fresh=True)
    assert eager.returncode == (0 if env else -signal.SIGINT)
    for command in ("run", "plan"):
        done = lazyviz_command(command, script, cwd=tmp_path, env=env, fresh=True)
        assert done.returncode == eager.returncode
        assert done.stderr.count("KeyboardInterrupt") == eager.stderr.count("KeyboardInterrupt") == 1
        assert set(eager.stdout.splitlines()) <= set(done.stdout.splitlines())


def test_an_exit_code_of_the_script_is_not_taken_for_an_interrupt(write, tmp_path):
    done = lazyviz_command("run", write("raise SystemExit(130)"), cwd=tmp_path, fresh=True)
    assert done.returncode == 130


READING = """
    import torch
    from torch import nn

    net = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(2):
        for part in range(4):
            loss = net(torch.randn(256, 64)).pow(2).mean()
            loss.backward()
            print(loss.item())
        optimizer.step()
        optimizer.zero_grad()
"""


def test_tables_and_remedies_are_of_the_run_that_the_budget_is_about(write, tmp_path):
    done = lazyviz_command("plan", write(READING), "--json", "plan.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    # Reading the losses runs the forward passes only, whose activations an evaluation then has at once.
    assert plan["lazyviz_peak_bytes"] > plan["eager_peak_bytes"]
    assert sum(plan["by_category"].values()) == plan["peak_bytes"] == plan["needed_bytes"]
    assert plan["remedies"]
    for remedy in plan["remedies"]:
        assert remedy["peak_bytes"] + remedy["saves_bytes"] == plan["needed_bytes"], remedy
    assert "evaluated by lazyviz, it needs " in " ".join(done.stdout.split())


@pytest.mark.slow
def test_a_budget_decides_the_exit_code_and_github_shows_it_at_the_line(write, tmp_path):
    script = write(TRAINING)
    done = lazyviz_command(
        "plan", script, "--fail-above", "100KiB", cwd=tmp_path, env={"GITHUB_ACTIONS": "true"}
    )
    assert done.returncode == 3
    assert "above the 100 KiB of --fail-above" in done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("::")]
    assert lines[0].startswith("::error file=train.py,line=15,title=lazyviz%3A Projected peak::")
    assert "above the budget of 100 KiB" in lines[0]
    assert any(line.startswith("::notice") for line in lines[1:])
    done = lazyviz_command("plan", script, "--fail-above", "1GiB", "--annotations", cwd=tmp_path)
    assert done.returncode == 0
    assert "::notice file=train.py,line=15" in done.stdout


def test_an_absent_gpu_is_planned_up_to_the_first_value_that_only_it_could_compute(write, tmp_path):
    script = write(TRAINING)
    done = lazyviz_command("plan", script, "--device", "A100-80GB", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "planned for A100-80GB" in done.stdout
    words = " ".join(done.stdout.split())
    assert "operators, 1 of 2 optimizer steps, planned" in words
    assert "So far it fits: A100-80GB" in words
    assert "before this (1 of 2 optimizer steps): item at train.py:16" in words
    assert "--assume train.py:16=VALUE, or --assume '*=VALUE'" in words
    assert words.count("the plan covers") + words.count("The plan covers") == 1
    # The model was made before its only step.
    assert "train.py:8:" not in words.partition("Slowest lines")[2].partition("What would")[0]
    # A budget is not met by what was not seen.
    done = lazyviz_command(
        "plan", script, "--device", "A100-80GB", "--fail-above", "38GiB", cwd=tmp_path
    )  # fmt: skip
    assert done.returncode == 1
    assert "cannot be checked" in done.stderr
    for assumed in ("16=2.5", "train.py:16=2.5", "*=2.5"):
        done = lazyviz_command(
            "plan", script, "--device", "A100-80GB", "--assume", assumed, "--fail-above", "38GiB",
            "--json", "-", cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("0 2.5\n{")
        assert json.loads(done.stdout.partition("\n")[2])["steps"] == 2


def test_a_plan_for_a_gpu_that_the_script_does_not_use_says_so(write, tmp_path):
    on_cpu = TRAINING.replace('"cuda" if torch.cuda.is_available() else "cpu"', '"cpu"')
    for text, noted in ((on_cpu, True), (TRAINING, False)):
        done = lazyviz_command("plan", write(text), "--device", "RTX-3060", "--assume", "*=1.0", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        words = " ".join(done.stdout.split())
        assert ("the script as recorded does not use RTX-3060" in words) == noted


SPARSE = """
    import torch

    table = torch.nn.Embedding(100, 8, sparse=True).cuda()
    optimizer = torch.optim.SparseAdam(table.parameters())
    table(torch.arange(5, device="cuda")).sum().backward()
    optimizer.step()
"""
COMPILED = TRAINING.replace("(device)\n", '(device)\n    net = torch.compile(net, backend="eager")\n', 1)


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (
            COMPILED,
            ("--device", "RTX-3060", "--assume", "*=1.0"),
            "planned as run by eager PyTorch. Compiled",
        ),
        (COMPILED, (), "Ran immediately, at a sync point: torch.compile at train.py:"),
        (SPARSE, ("--device", "RTX-3060"), "Assumed: "),
    ],
)
def test_a_plan_says_what_it_assumes_and_does_not_know(write, tmp_path, text, options, said):
    done = lazyviz_command("plan", write(text), *options, "--json", "plan.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert said in " ".join(done.stdout.split())
    assert any(said in note for note in json.loads((tmp_path / "plan.json").read_text())["notes"])


def test_without_an_optimizer_or_with_fewer_steps_it_is_planned_as_far_as_it_goes(write, tmp_path):
    short = write(TRAINING.replace("range(5)", "range(1)") + "    sys.exit(0)\n")
    done = lazyviz_command("plan", short, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "The script ended after 1 of 2 optimizer steps." in done.stdout
    inference = "import torch\nprint(torch.nn.Linear(300, 300)(torch.ones(2, 300)).shape)\n"
    done = lazyviz_command("plan", write(inference, "infer.py"), "--json", "p.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "p.json").read_text())
    assert (plan["steps"], plan["end"]) == (0, "ended")
    assert plan["eager_peak_bytes"] >= 4 * 300 * 300
    done = lazyviz_command("plan", write("print('hello')\n", "empty.py"), cwd=tmp_path)
    assert (done.returncode, "there is nothing to plan" in done.stdout) == (0, True)
    assert "Child processes" in done.stdout


COUNTED = """
    import torch
    from torch import nn

    def network():
        return nn.Linear(4, 4)

    class Twice(torch.optim.SGD):  # a step of its own that takes two of another's
        def step(self, closure=None):
            inner.step()
            inner.step()
            return super().step(closure)

    a, b = network(), network()
    inner = torch.optim.SGD(b.parameters(), lr=0.1)
    outer = Twice(a.parameters(), lr=0.1)
    lbfgs = torch.optim.LBFGS(a.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def closure():
        lbfgs.zero_grad()
        loss = a(torch.ones(2, 4)).pow(2).sum()
        loss.backward()
        return loss

    for step in range(6):
        scaler.scale(a(torch.ones(2, 4)).sum() + b(torch.ones(2, 4)).sum()).backward()
        {step}
        print("after", step)
"""


@pytest.mark.parametrize(
    ("step", "printed"),
    [
        ("outer.step()", 1),
        ("lbfgs.step(closure)", 1),
        ("scaler.step(outer); scaler.update()", 1),
        ("(step % 2 == 0) and outer.step()", 2),  # gradients are accumulated
        ("outer.step(); inner.step(); inner.step()", 1),  # the first one counts
        ("torch.optim.lr_scheduler.StepLR(outer, 1); outer.step()", 1),
    ],
)
def test_steps_are_those_of_the_optimizer_that_steps_first(write, tmp_path, step, printed):
    script = write(COUNTED.replace("{step}", step))
    done = lazyviz_command("plan", script, "--steps", "2", "--json", "p.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sum(line.startswith("after ") for line in done.stdout.splitlines()) == printed
    assert json.loads((tmp_path / "p.json").read_text())["steps"] == 2


def test_a_script_that_catches_everything_is_stopped_at_its_next_step(write, tmp_path):
    script = write(
        TRAINING.replace("for step in range(5):", "for step in range(5):\n      try:").replace(
            "        ", "          "
        )
        + "      except:\n        print('caught')\n    print('the end')\n"
    )
    done = lazyviz_command("plan", script, "--steps", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("caught") == 5
    assert "1 optimizer step, planned" in done.stdout


AS_IT_IS = """
    import atexit
    import multiprocessing
    import os
    import pickle
    import sys
    import threading
    import helper
    import torch

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, number):
            return torch.full((3,), float(number))

    def child(queue):
        queue.put(__name__)

    def main():
        print(__name__, __file__, sys.argv, sys.path[0], __spec__, __package__, __cached__, helper.WORD)
        print(sys.modules["__main__"].Data is Data, pickle.loads(pickle.dumps(Data)) is Data)
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        print(queue.get())
        process.join()
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for x in torch.utils.data.DataLoader(Data(), 4, num_workers=2):
            loss = ((weight - x) ** 2).sum()
            loss.backward()
            optimizer.step()
            print(loss.item())
        thread = threading.Thread(target=lambda: print("thread", (weight * 2).sum().item()))
        thread.start()
        thread.join()
        print(input("name? "))
        os.chdir("/")
        sys.stdout.write("no newline")
        sys.stderr.write("to stderr")

    if __name__ == "__main__":
        atexit.register(print, "at exit")
        main()
        sys.exit(4)
"""


def test_a_script_that_is_run_cannot_tell(write, tmp_path):
    script = write(AS_IT_IS)
    write("WORD = 'helper'\n", "helper.py")
    arguments = ("a", "--b", "--", "-c")
    process = {"cwd": tmp_path, "stdin": "bob\n", "fresh": True}
    plain = python(script, *arguments, **process)
    lazily = lazyviz_command("run", "--quiet", script, "--", *arguments, **process)
    assert plain.returncode == lazily.returncode == 4, plain.stderr + lazily.stderr
    assert lazily.stdout == plain.stdout
    assert "__mp_main__" in plain.stdout
    assert lazily.stderr == plain.stderr == "to stderr"


MANY_STEPS = """
import torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(net.parameters())
for step in range(40):
    x = torch.randn(6, 4)
    loss = net(x).square().mean()
    if step == 20:
        loss = loss + net[0].weight.square().sum()
    if loss.isnan():
        break
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print(step, loss.item(), loss)
"""


@pytest.mark.slow
def test_steps_like_those_before_them_run_in_eager_mode(write, tmp_path):
    script = write(MANY_STEPS)
    plain = python(script, cwd=tmp_path)
    lazily = lazyviz_command("run", script, cwd=tmp_path)
    assert lazily.returncode == 0 and lazily.stdout == plain.stdout
    summary, *reads = lazily.stderr.splitlines()
    found = re.search(
        r"40 optimizer steps in .*; (\d+) steps like those before them ran in eager mode", summary
    )
    if op_stream.is_available:
        # The first steps are like no other, then eight; after the one with another loss, two are recorded.
        assert found is not None and 10 < int(found[1]) < 30
        assert reads and all(line.startswith("  sync point of a recorded step: ") for line in reads)
    else:
        assert found is None and reads and all(line.startswith("  sync point: ") for line in reads)


def test_a_module_is_run_as_python_runs_it(write, tmp_path):
    (tmp_path / "package").mkdir()
    train = "from .other import WORD\nimport sys\n"
    train += "print(__name__, __package__, __spec__.name, sys.argv[1:], WORD)\n"
    write(train, "package/train.py")
    write("WORD = 'other'\n", "package/other.py")
    write("", "package/__init__.py")
    plain = python("-m", "package.train", "x", cwd=tmp_path, fresh=True)
    lazily = lazyviz_command("run", "-q", "-m", "package.train", "--", "x", cwd=tmp_path, fresh=True)
    assert plain.returncode == lazily.returncode == 0, lazily.stderr
    assert lazily.stdout == plain.stdout
    done = lazyviz_command("run", "-m", "package.none", cwd=tmp_path)
    assert (done.returncode, "the module package.none" in done.stderr) == (2, True)


FAILING = """
    import torch

    def step(net, x):
        return net(x)

    def main():
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(5, 4))
        step(net, torch.randn(2, 4))

    main()
"""


@pytest.mark.parametrize("text", [FAILING, "import torch\nx = (1,\n", "import sys\nsys.exit('the end')\n"])
@pytest.mark.parametrize("command", ["plan", "run"])
def test_an_error_is_shown_as_python_shows_it(write, tmp_path, command, text):
    script = write(text)
    plain = python(script, cwd=tmp_path, fresh=True)
    options = ("--quiet",) if command == "run" else ()
    ours = lazyviz_command(command, *options, script, cwd=tmp_path, fresh=True)
    assert plain.returncode == ours.returncode == 1
    assert ours.stderr == plain.stderr


def test_exit_codes_of_scripts_are_passed_on_when_run_and_failures_when_planned(write, tmp_path):
    script = write("import sys\nimport torch\ntorch.ones(3) + 1\nsys.exit(9)\n")
    assert lazyviz_command("run", script, cwd=tmp_path).returncode == 9
    done = lazyviz_command("plan", script, cwd=tmp_path)
    assert done.returncode == 1
    assert "exited with code 9" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("plan", "none.py"), "cannot read none.py"),
        (("plan", "train.py", "--lr", "3"), "put the script's arguments after --"),
        (("plan", "train.py", "--stepz", "3"), "did you mean --steps"),
        (("compile", "--forced"), "There is no option --forced (did you mean --force?)."),
        (("plan", "train.py", "--json", "none/plan.json"), "there is no directory none"),
        (("plan", "train.py", "--json", "."), "it is a directory"),
        (("plan", "train.py", "--json", "x" * 300), "File name too long"),
        (("view", "train.py", "-o", "x" * 300 + ".svg"), "File name too long"),
        (("plan", "x" * 300), "File name too long"),
        (("view", "train.py", "-o", "none/graph.svg"), "there is no directory none"),
        (("plan", "train.py", "--device", "A1000"), "A1000"),
        (("plan", "train.py", "--torch-version", "1.13"), "is only for a GPU that is not on this machine"),
        (("view", "train.py", "--device", "V100-16GB", "--torch-version", "9"), "must be a PyTorch release"),
        (("plan", "train.py", "--fail-above", "much"), "not a size"),
        (("plan", "train.py", "--assume", "x"), "LINE=VALUE"),
        (("plan", "train.py", "--steps", "0"), "--steps"),
        (("view", "train.py", "-o", "a.gif"), "a.gif"),
        (("view", "train.py", "-o", "graph"), ".pickle, and there is none"),
        (("run", "train.py", "--backend", "none"), "unknown backend 'none'"),
        (("plan", "."), "is a directory"),
        (("plan", "a.ipynb"), "is a notebook"),
        (("compare", "train.py", "train.py"), "is not a JSON file"),
        (("compare", "none.json", "train.py"), "cannot read none.json"),
        (("nothing",), "nothing"),
    ],
)
def test_what_cannot_begin_is_one_sentence_and_exit_code_2(write, tmp_path, arguments, sentence):
    write("print('it has run')\n")
    done = lazyviz_command(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert "it has run" not in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_output_to_a_full_disk_is_one_sentence():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "lazyviz", "devices"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == "lazyviz: cannot write the output: No space left on device\n"


@pytest.mark.parametrize("command", ["plan", "view", "run"])
def test_an_invalid_environment_variable_is_one_sentence_before_the_script_runs(write, tmp_path, command):
    script = write("print('it has run')\n")
    done = lazyviz_command(command, script, cwd=tmp_path, env={"LAZYVIZ_THEME": "solar"}, fresh=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "lazyviz: LAZYVIZ_THEME=solar: theme must be one of light, dark, not 'solar'\n"


def test_a_plan_is_printed_although_its_file_cannot_be_written(write, tmp_path):
    folder = tmp_path / "plans"
    folder.mkdir()
    script = write(TRAINING + "        import shutil\n        shutil.rmtree('plans', ignore_errors=True)\n")
    done = lazyviz_command("plan", script, "--json", "plans/plan.json", cwd=tmp_path)
    assert done.returncode == 1
    assert "lazyviz: cannot write plans/plan.json: No such file or directory" in done.stderr
    assert "Peak of eager PyTorch" in done.stdout


def test_a_budget_is_not_met_by_a_script_without_operators(write, tmp_path):
    done = lazyviz_command("plan", write("print('hello')\n"), "--fail-above", "1GiB", cwd=tmp_path)
    assert done.returncode == 1
    assert "--fail-above cannot be checked: no PyTorch operator was recorded" in done.stderr


def test_a_view_shows_the_plan_that_the_command_prints(write, tmp_path):
    script = write(READING)
    planned = lazyviz_command("plan", script, "--steps", "1", "--json", "plan.json", cwd=tmp_path)
    drawn = lazyviz_command("view", script, "-o", "graph.svg", cwd=tmp_path)
    assert (planned.returncode, drawn.returncode) == (0, 0), drawn.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    peak, other = (format_bytes(plan[name]) for name in ("eager_peak_bytes", "lazyviz_peak_bytes"))
    picture = (tmp_path / "graph.svg").read_text()
    assert peak != other and peak in picture and other not in picture


def test_a_view_is_written_in_every_form_where_the_command_was_given(write, tmp_path):
    script = write("import os\nos.chdir('/')\n" + textwrap.dedent(TRAINING))
    done = lazyviz_command("view", script, "-o", "graph.html", "-o", "graph.svg", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "<title>train.py</title>" in (tmp_path / "graph.html").read_text()
    assert (tmp_path / "graph.svg").read_text().startswith("<svg")
    assert done.stdout == ""  # the loop's first line comes after its first step
    assert re.search(r"^graph\.svg: [\d,]+ operators, 1 optimizer step$", done.stderr, re.MULTILINE)


OWN_BLOCK = """
    import lazyviz
    import torch

    with lazyviz.lazy() as graph:
        net = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            loss = net(torch.ones(4, 8)).pow(2).mean()
            loss.backward()
            optimizer.step()
            print(loss.item())
        recorded = len(graph.nodes)
    print(recorded, "recorded")
"""


def test_blocks_that_a_script_opens_are_planned_drawn_and_counted_with_it(write, tmp_path):
    script, plain = write(OWN_BLOCK), write(OWN_BLOCK.replace("lazyviz.lazy()", "open(__file__)"), "plain.py")
    write((tmp_path / "plain.py").read_text().replace("len(graph.nodes)", "0"), "plain.py")
    plans = []
    for each in (script, plain):
        done = lazyviz_command("plan", each, "--fail-above", "1GiB", "--json", "plan.json", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        plans.append(json.loads((tmp_path / "plan.json").read_text()))
    for key in ("ops", "eager_peak_bytes", "by_category"):
        assert plans[0][key] == plans[1][key]
    assert [read["line"]["line"] for read in plans[0]["reads"]] == [13]
    drawn = lazyviz_command("view", script, "-o", "graph.svg", "-o", "graph.html", cwd=tmp_path)
    assert drawn.returncode == 0, drawn.stderr
    assert "optimizer.step()" in (tmp_path / "graph.svg").read_text() and "Exception" not in drawn.stderr
    ran = lazyviz_command("run", script, cwd=tmp_path)
    recorded = ran.stdout.split()[2]
    assert int(recorded) == plans[0]["ops"]
    assert "2 optimizer steps in " in ran.stderr and f" {recorded} operators recorded" in ran.stderr
    assert "sync point: item, train.py:13" in ran.stderr


SHOWN = """
    import logging
    import sys
    import torch
    from torch import nn

    logging.basicConfig(stream=sys.stdout)
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(2):
        loss = net(torch.ones(3, 4)).pow(2).sum()
        optimizer.zero_grad()
        loss.backward()
        print({"loss": loss}, [net.weight.grad])
        logging.warning("%s", [loss.detach()])
        net.bias.data.add_(1)
        print(f"{net.bias!r}", optimizer.state_dict())
        optimizer.step()
"""


def test_the_repr_of_a_tensor_in_a_script_shows_its_values(write, tmp_path):
    script = write(SHOWN)
    expected = python(script, cwd=tmp_path)
    assert expected.stdout.count("tensor(") >= 8
    done = lazyviz_command("run", "-q", script, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, expected.stdout)
    done = lazyviz_command("plan", script, cwd=tmp_path)
    assert done.stdout.startswith(expected.stdout)
    device = ("--device", "A100-40GB")  # nothing is invented there, and it is no reason to stop
    done = lazyviz_command("plan", script, *device, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 optimizer steps" in done.stdout


CONSECUTIVE = """
    import torch, lazyviz
    from torch import nn

    def train(seed):
        torch.manual_seed(seed)
        net = nn.Linear(8, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(20):
            loss = net(torch.ones(4, 8)).pow(2).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(seed, loss.item(), lazyviz.doctor().ok)

    train(0)
    train(1)
"""


def test_models_that_are_trained_one_after_the_other_are_run_step_by_step(write, tmp_path):
    script = write(CONSECUTIVE)
    done = lazyviz_command("run", script, cwd=tmp_path)
    assert done.stdout == python(script, cwd=tmp_path).stdout  # what `doctor` finds included
    assert "40 optimizer steps" in done.stderr


FORKING = """
    import os
    import sys
    import torch
    from torch import nn

    def train(steps, out):
        torch.manual_seed(0)
        net = nn.Linear(8, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(steps):
            loss = net(torch.ones(4, 8)).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            out(step, loss.item())

    shared = torch.zeros(1).share_memory_()
    for end in ("end", "exit", "raise", "message"):
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            torch.set_num_threads(1)
            train(4, lambda *_: None)
            shared += 1
            if end == "exit":
                sys.exit(3)
            if end == "raise":
                raise RuntimeError("in the child")
            if end == "message":
                sys.exit("a message of the child")
            break
        print(end, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    else:
        print(shared)
        train(2, print)
"""


LARGE_STEP_READ_AFTER_BACKWARD = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(2):
    loss = model(torch.ones(4096, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    assert model[0].weight.grad.isfinite().all()
    optimizer.step()
"""


def test_the_peak_of_a_run_counts_what_sync_points_ran(write, tmp_path):
    done = lazyviz_command("run", write(LARGE_STEP_READ_AFTER_BACKWARD), cwd=tmp_path)
    peak = re.search(r"; peak ([\d.]+) MiB", done.stderr)
    assert peak is not None and float(peak[1]) > 8, done.stderr  # two activations of 4 MiB


@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_child_that_the_script_forks_runs_as_under_python(write, tmp_path, command):
    script = write(FORKING)
    expected = python(script, cwd=tmp_path)
    assert expected.stdout.startswith("end 0\nexit 3\nraise 1\nmessage 1\ntensor([4.])\n")
    done = lazyviz_command(command, script, cwd=tmp_path)
    assert done.returncode == expected.returncode == 0, done.stderr
    losses = expected.stdout.splitlines()[5:]
    printed = expected.stdout if command == "run" else expected.stdout.replace(f"{losses[1]}\n", "")
    assert done.stdout.startswith(printed)
    assert done.stdout.count("2 optimizer steps") == (command == "plan")  # by the parent alone
    ends = ["RuntimeError: in the child", "a message of the child"]
    assert expected.stderr.splitlines()[-2:] == ends
    assert [line for line in done.stderr.splitlines() if line in ends] == ends
    assert done.stderr.count("lazyviz:") == (command == "run")


def test_of_several_ranks_the_first_one_tells(write, tmp_path):
    script = write(TRAINING)
    done = lazyviz_command("plan", script, "--json", "p.json", cwd=tmp_path, env={"RANK": "1"})
    assert done.returncode == 0, done.stderr
    assert "Peak" not in done.stdout
    assert not (tmp_path / "p.json").exists()


def test_plans_are_compared(write, tmp_path):
    small, large = write(TRAINING, "small.py"), write(TRAINING.replace("256", "512"), "large.py")
    for script in (small, large):
        assert lazyviz_command("plan", script, "--json", f"{script}.json", cwd=tmp_path).returncode == 0
    done = lazyviz_command("compare", "small.py.json", "large.py.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "small.py.json (small.py, cpu) -> large.py.json (large.py, cpu)" in done.stdout
    assert "needed" in done.stdout
    assert "+" in done.stdout
    assert "parameters" in done.stdout
    done = lazyviz_command("compare", "small.py.json", "small.py.json", cwd=tmp_path)
    assert "Alive at the peak: no change." in done.stdout


def test_a_comparison_tells_arguments_times_and_plans_that_lack_steps(write, tmp_path):
    text = TRAINING.replace("(64, 256)", "(64, int(sys.argv[1]))")
    with_times = ("--device", "A100-80GB", "--assume", "*=1.0", "--json")
    for width, code in (("256", 0), ("512", 1)):
        done = lazyviz_command(
            "plan", write(text), *with_times, f"{width}.json", "--", width, cwd=tmp_path
        )  # fmt: skip
        assert done.returncode == code, done.stderr
    assert "0 of 2 optimizer steps, planned" in done.stdout
    done = lazyviz_command("compare", "256.json", "512.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())
    assert "256.json (train.py 256, A100-80GB) -> 512.json (train.py 512, A100-80GB)" in words
    assert "512.json is not complete: the script failed after 0 of 2 optimizer steps." in words
    assert "256.json is not" not in words
    assert "after: So far it fits" in words
    assert "time of a step" in words


def test_a_script_that_fails_in_a_function_names_the_model_as_the_function_does(write, tmp_path):
    inside = """
        import torch
        from torch import nn

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = nn.Linear(64, 64), nn.Linear(8, 8)

            def forward(self, x):
                return self.second(self.first(x).relu())

        def main():
            model = Net()
            model(torch.randn(512, 64))

        main()
    """
    done = lazyviz_command("plan", write(inside), "--json", "plan.json", cwd=tmp_path)
    assert done.returncode == 1
    assert " in model " in json.loads((tmp_path / "plan.json").read_text())["peak_at"]


def test_sync_points_and_slow_lines_keep_their_columns_on_a_narrow_terminal(write, tmp_path):
    text = TRAINING.replace("net(x), y)", "net(x), y)" + " * 1.0" * 12)
    done = lazyviz_command("plan", write(text), "--device", "A100-80GB", "--assume", "*=1.0", cwd=tmp_path,
                           env={"COLUMNS": "80"})  # fmt: skip
    lines = done.stdout.splitlines()
    at = next(at for at, line in enumerate(lines) if re.match(r" +[\d.]+ \S+ +[\d.]+ %  train.py:11: ", line))
    assert lines[at + 1].startswith(" " * (lines[at].index("train.py") - 1))
    done = lazyviz_command("plan", write(TRAINING), cwd=tmp_path)
    table = done.stdout.partition("Values that the script reads (sync points)")[2].splitlines()
    assert table[1].split() == ["operators", "time", "read", "line", "code"]
    assert re.match(r" +[\d,]+ +[\d.]+ \S?s +item +train.py:16 +print", table[2]), table


def test_a_line_that_does_everything_is_broken_down_by_modules(write, tmp_path):
    inside = """
        from collections import OrderedDict
        import torch
        from torch import nn

        block = lambda: OrderedDict(up=nn.Linear(64, 512), act=nn.ReLU(), down=nn.Linear(512, 64))
        net = nn.Sequential(*[nn.Sequential(block()) for _ in range(4)])
        net.to("cuda")
        optimizer = torch.optim.SGD(net.parameters())
        for _ in range(2):
            net(torch.randn(4096, 64, device="cuda")).sum().backward(), optimizer.step()
    """
    done = lazyviz_command(
        "plan", write(inside), "--device", "A100-80GB", "--json", "plan.json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    modules = done.stdout.partition("Modules that hold it")[2].partition("Largest tensors")[0]
    assert "net.*.up × 4" in modules and "net.*.act × 4" in modules
    assert "*.down × 4" in done.stdout.partition("Slowest modules:")[2].partition("What would")[0]
    assert json.loads((tmp_path / "plan.json").read_text())["by_module"][0].keys() == {"module", "bytes"}
    done = lazyviz_command("plan", write(TRAINING), cwd=tmp_path)
    assert "Lines that allocated it" in done.stdout and "Modules that hold it" not in done.stdout


def test_tables_call_a_kv_cache_what_the_picture_calls_it(write, tmp_path):
    cached = (
        "import lazyviz, torch\nkeys = torch.zeros(64, 64)\nlazyviz.mark_kv_cache(keys)\nprint(keys + 1)\n"
    )
    script, without = write(cached), write(cached.replace("lazyviz.mark", "# lazyviz.mark"), "without.py")
    planned = lazyviz_command("plan", script, "--json", "with.json", cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    assert lazyviz_command("plan", without, "--json", "without.json", cwd=tmp_path).returncode == 0
    compared = lazyviz_command("compare", "without.json", "with.json", cwd=tmp_path)
    for done in (planned, compared):
        assert "KV cache" in done.stdout and "kv_cache" not in done.stdout


def test_a_plan_that_is_not_complete_is_one_sentence(write, tmp_path):
    assert lazyviz_command("plan", write(TRAINING), "--json", "plan.json", cwd=tmp_path).returncode == 0
    whole = json.loads((tmp_path / "plan.json").read_text())
    first = whole["by_line"][0]
    broken = [{name: item for name, item in whole.items() if name != each} for each in ("device", "by_line")]
    broken += [{"format": 1, "needed_bytes": 3}, {**whole, "ops": "many"}, {**whole, "by_category": [1]}]
    broken += [{**whole, "by_line": [{"bytes": first["bytes"]}]}, {**whole, "by_category": {"inputs": None}}]
    for data in broken:
        (tmp_path / "broken.json").write_text(json.dumps(data))
        done = lazyviz_command("compare", "plan.json", "broken.json", cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith("lazyviz: broken.json contains only a part of a plan"), done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
def test_a_script_is_planned_for_an_older_release(write, tmp_path):
    script = write(
        """
        import torch

        x = torch.randn(256, 256, device="cuda", requires_grad=True)
        (x * 2).softmax(1).sum().backward()
        """
    )
    peaks = {}
    for version in ("1.10", None):
        chosen = ["--torch-version", version] if version else []
        done = lazyviz_command(
            "plan", script, "--device", "V100-16GB", *chosen, "--json", "plan.json", cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        plan = json.loads((tmp_path / "plan.json").read_text())
        assert version is None or plan["torch_version"] == version
        assert ("Differences in PyTorch 1.10: " in done.stdout) is bool(version)
        peaks[version] = plan["eager_peak_bytes"]
    assert peaks["1.10"] - peaks[None] == 4 * 256 * 256  # softmax keeps its input


def test_devices_and_doctor_tell_what_is_here(tmp_path):
    done = lazyviz_command("devices", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "A100-80GB" in done.stdout
    assert "system memory" in done.stdout or "memory limit" in done.stdout
    done = lazyviz_command("doctor", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    for part in ("Versions:", "Native modules:", "Devices:", "Widget:", "Fonts for pictures:", "nothing"):
        assert part in done.stdout
    done = lazyviz_command("doctor", "--gpu", cwd=tmp_path)
    assert done.returncode == 1
    assert "needs a CUDA GPU that PyTorch can use" in done.stderr


def test_devices_in_time_records_a_script(write, tmp_path):
    script = write(TRAINING, "train.py")
    (tmp_path / "prices.csv").write_text("L4-24GB,0.7\n")
    done = lazyviz_command("devices", "--time", script, "--price", "prices.csv", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "RTX-4090" in done.stdout
    assert "cost of 1,000 steps" in done.stdout
    done = lazyviz_command("devices", "--price", "prices.csv", cwd=tmp_path)
    assert done.returncode == 2
    done = lazyviz_command("devices", "--time", script, "--price", "nowhere.csv", cwd=tmp_path)
    assert done.returncode == 2
    assert "nowhere.csv" in done.stderr


def test_output_without_a_reader_is_not_an_error(write, tmp_path):
    program = (
        "import subprocess, sys\n"
        "ours = subprocess.Popen([sys.executable, '-m', 'lazyviz', 'devices'], stdout=subprocess.PIPE,"
        " stderr=subprocess.PIPE)\n"
        "ours.stdout.close()\n"
        "print(ours.stderr.read().decode())\n"
    )
    done = python("-c", program, cwd=tmp_path)
    assert done.stdout.strip() == "", done.stdout


def test_a_plan_for_a_gpu_shows_the_time_of_a_step_and_what_limits_it(write, tmp_path):
    arguments = ("--device", "A100-80GB", "--assume", "*=0.5", "--json", "plan.json")
    done = lazyviz_command("plan", write(TRAINING), *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "A step's time" in done.stdout
    assert "What limits this step: launch" in " ".join(done.stdout.split())
    time = json.loads((tmp_path / "plan.json").read_text())["time"]
    assert time["range"][0] < time["seconds"] < time["range"][1]
    assert sum(time["by_bound"].values()) == pytest.approx(time["seconds"])
    assert time["flops"] == 2 * 32 * (2 * 64 * 256 + 3 * 256 * 10)  # the input has no gradient
