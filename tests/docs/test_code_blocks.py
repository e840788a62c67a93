"""Code in README, docs and CONTRIBUTING: each block runs, or says in the line above why it does not.

Pages that are notebooks (MyST, with ``file_format: mystnb``) are executed by the build of the site instead.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..warm_python import environment, python

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(
    r"(?:^<!-- not run: (?P<why>[^>]+) -->\n)?^```(?P<language>[a-z{}-]*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
TRAIN = """\
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
options = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
net = torch.nn.Linear(8, 4).to(device)
optimizer = torch.optim.SGD(net.parameters(), lr=options.lr)
for _ in range(3):
    optimizer.zero_grad()
    net(torch.ones(2, 8, device=device)).sum().backward()
    optimizer.step()
"""
# Runs the blocks of a page, one after another, as cells of one notebook.
SHELL = """\
import json, sys
from IPython.core.interactiveshell import InteractiveShell
from IPython.testing.globalipapp import start_ipython

shell = InteractiveShell.instance()
for number, code in enumerate(json.load(sys.stdin)):
    result = shell.run_cell(code, store_history=True)
    if not result.success:
        print(f"block {number} failed:\\n{code}", file=sys.stderr)
        sys.exit(1)
"""


@dataclass(frozen=True)
class Block:
    page: Path
    language: str
    code: str
    why: str | None

    @property
    def runs(self) -> bool:
        return self.why is None


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    if text.startswith("---\nfile_format: mystnb"):
        return []
    return [Block(page, m["language"], m["code"], m["why"]) for m in FENCE.finditer(text)]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def pages_with(language: str) -> list[Path]:
    return sorted({block.page for block in BLOCKS if block.language == language and block.runs})


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def running(page: Path, language: str) -> list[str]:
    return [
        block.code for block in BLOCKS if block.page == page and block.language == language and block.runs
    ]


def run(*argv: str, imports: tuple[str, ...], cwd: Path, stdin: str | None = None):
    """``python ARGV``, where ``imports`` are imported already."""
    return python(*argv, imports=imports, env=environment({}), cwd=cwd, stdin=stdin)


@pytest.mark.parametrize("page", pages_with("python"), ids=named)
def test_python_blocks_run_as_cells_of_one_notebook(page, tmp_path):
    import json

    path = f"import sys; sys.path.insert(0, {str(ROOT / 'docs' / 'examples')!r})\n"
    cells = json.dumps(running(page, "python"))
    done = run("-c", path + SHELL, imports=("torch", "IPython"), stdin=cells, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", pages_with("pycon"), ids=named)
def test_examples_of_the_reference_give_what_they_show(page, tmp_path, monkeypatch):
    import builtins
    import doctest

    import lazyviz

    monkeypatch.chdir(tmp_path)
    source = "\n".join(running(page, "pycon"))
    example = doctest.DocTestParser().get_doctest(source, {}, named(page), str(page), 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
    said: list[str] = []
    try:
        result = runner.run(example, out=said.append)
    finally:
        lazyviz.reset()
        vars(builtins).pop("_", None)  # doctest leaves it, and IPython would then set none of its own
    assert result.attempted and not result.failed, "".join(said)


def commands(code: str) -> list[str]:
    """The lines that call lazyviz, less comments; what has optional parts in brackets is a summary."""
    lines = [line.split(" #")[0].split("   ")[0].strip() for line in code.splitlines()]
    found = [part.strip() for line in lines for part in line.split(" ; ")]
    return [
        line
        for line in found
        if line.startswith("lazyviz ") and "[" not in line and line != "lazyviz compile"
    ]


COMMAND = ("torch", "lazyviz")
WITH_COMMANDS = sorted({b.page for b in BLOCKS if b.runs and not b.language and commands(b.code)})
DATA = ("yaml", "toml", "{eval-rst}", "{toctree}")


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=named)
def test_commands_run(page, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    for name in ("before.json", "after.json"):
        planned = run("-m", "lazyviz", "plan", "train.py", "--json", name, imports=COMMAND, cwd=tmp_path)
        assert planned.returncode == 0, planned.stderr
    for line in (line for code in running(page, "") for line in commands(code)):
        done = run("-m", *shlex.split(line), imports=COMMAND, cwd=tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


def test_every_other_block_is_data_or_says_why_it_is_not_run():
    silent = [
        f"{named(block.page)}: {block.code[:60]!r}"
        for block in BLOCKS
        if block.runs and block.language not in ("python", "pycon", *DATA) and not commands(block.code)
    ]
    assert silent == []


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "yaml"], ids=lambda b: b.page.stem)
def test_yaml_can_be_read(block):
    import yaml

    assert isinstance(yaml.safe_load(block.code), dict)


LINK = re.compile(r"\[[^\]]*\]\((?!\w+:)(?P<path>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


LINKING = [
    *PAGES,
    *(ROOT / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
]


@pytest.mark.parametrize("page", LINKING, ids=named)
def test_links_lead_to_files_and_headings_that_are_there(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for match in LINK.finditer(text):
        target = (page.parent / match["path"]).resolve() if match["path"] else page
        anchor = match["anchor"] if target.suffix == ".md" else None
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(match[0])
    assert broken == []


def test_the_reference_has_every_public_name():
    import lazyviz

    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    named = {"mark_step": "`lazyviz.mark_step`", "options": "`lazyviz.options`"}
    missing = [
        name
        for name in lazyviz.__all__
        if not re.search(rf":: lazyviz\.{name}$", text, re.MULTILINE) and named.get(name, "?") not in text
    ]
    assert missing == []
