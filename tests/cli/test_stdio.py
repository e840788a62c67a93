"""``lazyviz`` where a script, or whoever started the command, has changed the standard streams."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from lazyviz.process import stdio

from .. import warm_python
from .process import lazyviz_command, python

TRAINING = """
import torch

torch.manual_seed(0)
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    loss = net(torch.ones(2, 4)).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())  # \N{MICRO SIGN}s
"""
TEE = """
import sys

class Tee:
    def __init__(self, stream):
        self.stream, self.log = stream, open("log.txt", "a")

    def write(self, text):
        self.stream.write(text)
        self.log.write(text)

    def flush(self):
        self.stream.flush()
        self.log.flush()

sys.stdout, sys.stderr = Tee(sys.stdout), Tee(sys.stderr)
"""
DETACH = """
import io, sys
sys.stdout = io.TextIOWrapper(sys.stdout.detach(), encoding="utf-8")
sys.stderr = io.TextIOWrapper(sys.stderr.detach(), encoding="utf-8")
"""
CLOSE = "\nimport sys\nsys.stdout.flush()\nsys.stdout.close()\nsys.stderr.close()\n"
CHANGES = {
    "tee": TEE + TRAINING,
    "detach": DETACH + TRAINING,
    "close": TRAINING.replace("range(3)", "range(2)"),
}
CHANGES["close"] += CLOSE


@pytest.fixture(params=sorted(CHANGES))
def script(request, tmp_path):
    (tmp_path / "train.py").write_text(CHANGES[request.param], encoding="utf-8")
    return "train.py"


def test_a_script_that_replaces_the_streams_prints_the_same(script, tmp_path):
    plain = python(script, cwd=tmp_path)
    log = tmp_path / "log.txt"
    logged = log.read_text() if log.exists() else ""
    log.unlink(missing_ok=True)
    done = lazyviz_command("run", script, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout) and plain.returncode == 0
    assert done.stderr.startswith("lazyviz: train.py: ") and "Traceback" not in done.stderr
    assert (log.read_text() if log.exists() else "") == logged  # the summary is not the script's


@pytest.mark.parametrize("output", ["text", "json", "view"])
def test_what_a_command_prints_comes_where_it_was_started(script, tmp_path, output):
    options = {
        "text": ("plan", "--steps", "1", "--fail-above", "1"),
        "json": ("plan", "--steps", "1", "--json", "-"),
        "view": ("view", "-o", "graph.svg"),
    }[output]
    done = lazyviz_command(options[0], script, *options[1:], cwd=tmp_path)
    assert "Traceback" not in done.stderr
    if output == "text":
        assert done.returncode == 3 and "Peak of eager PyTorch" in done.stdout
        assert "above the 1 B of --fail-above" in done.stderr
    elif output == "json":
        assert done.returncode == 0 and done.stdout.rstrip().endswith("}") and '"format"' in done.stdout
    else:
        assert done.returncode == 0 and "graph.svg: " in done.stderr


@pytest.mark.parametrize("closed", ["1", "2"])
@pytest.mark.parametrize("command", [("run",), ("plan", "--steps", "1")], ids=["run", "plan"])
@pytest.mark.slow
def test_a_command_without_a_stream_ends_like_python(tmp_path, command, closed):
    (tmp_path / "train.py").write_text(TRAINING, encoding="utf-8")
    shell = f'exec {sys.executable} -m lazyviz "$@" {closed}>&-'
    done = subprocess.run(
        ["sh", "-c", shell, "sh", *command, "train.py"],
        env=warm_python.environment({}),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "lazyviz: " not in done.stdout  # what is for stderr


@pytest.mark.slow
def test_lines_that_the_output_cannot_encode_are_escaped(tmp_path):
    (tmp_path / "train.py").write_text(TRAINING, encoding="utf-8")
    env = {"PYTHONIOENCODING": "ascii"}
    code = (
        "import sys; sys.argv[1:] = ['plan', 'train.py']; from lazyviz.__main__ import main; sys.exit(main())"
    )
    done = python("-c", code, cwd=tmp_path, env=env, fresh=True)
    assert done.returncode == 0, done.stderr
    assert r"# \xb5s" in done.stdout


class _Bare:
    def write(self, text: str) -> None: ...


def _detached() -> io.TextIOWrapper:
    found = io.TextIOWrapper(io.BytesIO())
    found.detach()
    return found


def _closed() -> io.StringIO:
    found = io.StringIO()
    found.close()
    return found


@pytest.mark.parametrize(
    "make", [lambda: None, _Bare, _detached, _closed], ids=["none", "bare", "detached", "closed"]
)
def test_streams_that_lack_something_are_no_terminals(make):
    stream = make()
    assert not stdio.is_terminal(stream)
    stdio.flush(stream)
    assert stdio.is_open(stream) == isinstance(stream, _Bare)


def test_a_block_evaluates_where_stderr_is_a_logger(monkeypatch):
    import torch

    import lazyviz

    monkeypatch.setattr(sys, "stderr", _Bare())
    with lazyviz.lazy() as graph:
        x = torch.ones(3) * 2
    assert graph.evaluate().ops_run == len(graph.nodes) and x.tolist() == [2.0] * 3
