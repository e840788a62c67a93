"""The saved page: what Python writes.  browser/test_saved_page.py tests what a reader sees."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.plan.make_plan import make_plan
from lazyviz.view.export import saved_html_page
from lazyviz.view.printable_text import visible_in, visible_json

TYPES = Path(__file__).parents[3] / "js" / "src" / "model" / "types.ts"


@pytest.fixture
def graph():
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    x = torch.randn(4, 8)
    with lazyviz.lazy() as graph:
        loss = net(x).sum()
        loss.backward()
    graph.keep = net, x, loss
    return graph


def parts_of(text):
    return {
        name: json.loads(gzip.decompress(base64.b64decode(data)))
        for name, data in re.findall(r'<script type="text/plain" data-part="([\w-]+)">([^<]*)</script>', text)
    }


def test_every_action_of_the_page_is_answered_offline_or_has_a_reason_why_not():
    union = re.search(r"export type Action =([^;]+);", TYPES.read_text(encoding="utf-8"))
    assert union is not None
    actions = set(re.findall(r'"([\w-]+)"', union[1]))
    assert actions >= {"open", "select", "search"}
    assert actions == set(saved_html_page.OFFLINE) | set(saved_html_page.NEEDS_PYTHON)
    assert not set(saved_html_page.OFFLINE) & set(saved_html_page.NEEDS_PYTHON)


def test_a_page_of_eager_pytorch_has_its_plan_and_leaves_the_widget_its_own(tmp_path):
    net = nn.Linear(256, 256)
    with lazyviz.lazy() as graph:
        for _ in range(3):
            net(torch.randn(64, 256)).sum().item()  # evaluates no more than this
            net(torch.randn(64, 256)).square().sum()
    shown = graph.shown_plans
    graph.save(tmp_path / "graph.html", eager=True)
    plan = make_plan(graph.ir, of="eager")
    assert plan.peak_bytes == plan.eager_peak_bytes
    memory = parts_of((tmp_path / "graph.html").read_text())["start"]["traits"]["scene"]["memory"]
    assert memory["peak"] == plan.peak_bytes
    assert graph.shown_plans is shown


def test_the_page_has_an_answer_for_every_group_box_line_and_position(graph, tmp_path):
    graph.save(tmp_path / "graph.html")
    parts = parts_of((tmp_path / "graph.html").read_text(encoding="utf-8"))
    boxes = graph.scene().hierarchy.boxes
    opened = {id for name, part in parts.items() if name.startswith("open-") for id in part}
    assert opened == {id for id, box in boxes.items() if box.is_group}
    told = {
        id: found for name, part in parts.items() if name.startswith("select-") for id, found in part.items()
    }
    assert set(told) == set(boxes)
    assert all(
        found[0]["kind"] == "details" and found[0]["details"]["id"] == id for id, found in told.items()
    )
    assert parts["start"]["moments"] == list(range(len(graph.nodes)))
    moments = [at for name, part in parts.items() if name.startswith("moment-") for at in part]
    assert sorted(map(int, moments)) == parts["start"]["moments"]
    assert parts["search"]["ids"]
    assert parts["line-0"]


def test_nothing_in_the_page_is_loaded_and_a_policy_forbids_it(graph, tmp_path):
    graph.save(tmp_path / "graph.html")
    text = (tmp_path / "graph.html").read_text(encoding="utf-8")
    assert re.search(
        r'http-equiv="Content-Security-Policy" content="default-src \'none\'; script-src \'sha256-', text
    )
    assert not re.findall(r'(?:src|href)=["\']?(?!data:)[^"\'>\s]', text.split("<script>")[0])
    assert '<meta name="description"' in text


def test_names_that_look_like_markup_are_text(tmp_path):
    name = '</script><script>alert(1)</script><!--"&'
    x = torch.ones(2)
    with lazyviz.lazy(names={name: x}) as graph:
        y = x + 1
    graph.title = name
    graph.save(tmp_path / "graph.html")
    text = (tmp_path / "graph.html").read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert text.count("<script>") == 1
    assert y.shape == (2,)


def test_details_and_moments_beyond_the_room_are_left_out(graph, tmp_path, monkeypatch):
    monkeypatch.setattr(saved_html_page, "DETAILS", 3)
    monkeypatch.setattr(saved_html_page, "MOMENTS", 4)
    graph.save(tmp_path / "graph.html")
    parts = parts_of((tmp_path / "graph.html").read_text(encoding="utf-8"))
    assert sum(len(part) for name, part in parts.items() if name.startswith("select-")) == 3
    moments = parts["start"]["moments"]
    assert moments[0] == 0
    assert moments[-1] == len(graph.nodes) - 1
    assert max(after - before for before, after in itertools.pairwise(moments)) <= len(graph.nodes) / 3 + 1


def test_the_page_of_a_graph_without_ops_can_be_saved(tmp_path):
    with lazyviz.lazy() as graph:
        pass
    graph.save(tmp_path / "graph.html")
    assert "start" in parts_of((tmp_path / "graph.html").read_text(encoding="utf-8"))


def test_the_page_is_smaller_than_its_parts_unpacked(graph, tmp_path):
    graph.save(tmp_path / "graph.html")
    assert (tmp_path / "graph.html").stat().st_size < 250_000


PAGE = """
import sys, torch, lazyviz
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))
with lazyviz.lazy(device="A100-80GB") as graph:
    net.to("cuda")(torch.randn(4, 8, device="cuda")).sum().backward()
graph.save(sys.argv[1])
"""


def test_the_page_of_a_graph_has_the_same_parts_in_every_process(tmp_path):
    pages = []
    for seed in "12":  # the order of sets
        path = tmp_path / f"{seed}.html"
        script = tmp_path / "page.py"
        script.write_text(PAGE)
        subprocess.run(
            [sys.executable, str(script), str(path)], env={**os.environ, "PYTHONHASHSEED": seed}, check=True
        )
        pages.append(parts_of(path.read_text()))
        assert "free of" in str(pages[-1]["start"]["traits"]["scene"].pop("devices"))  # this machine's memory
    assert pages[0] == pages[1]


TEXTS = [
    "plain",
    "line\nand\ttab",
    "a\rb",
    "\b\f",
    "nul \x00",
    "\ud800",
    "\u202e",
    "\x7f",
    "\\u0041 \\b",
    "é 😀",
    "\r\n",
]


@pytest.mark.parametrize("text", TEXTS)
def test_json_is_as_visible_as_each_of_its_texts(text):
    for value in (text, [text, 1, None], {text: {"a": [True, (text, 2.5)]}}):
        made = visible_json(value, separators=(",", ":"))
        assert made == json.dumps(visible_in(value), separators=(",", ":"), ensure_ascii=False)
        made.encode()  # no lone surrogate
        assert json.loads(made) == json.loads(json.dumps(visible_in(value)))
