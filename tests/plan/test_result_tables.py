"""Plans, reports, remedies, and moments display as tables, and as one line inside containers."""

from __future__ import annotations

import copy
import io
import pickle
import re

import pytest
import torch
from IPython.lib.pretty import pretty
from rich.console import Console

import lazyviz


@pytest.fixture(scope="module")
def results():
    """A plan, the report of its run, and what a plan consists of."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    with lazyviz.lazy() as graph:
        hidden = net(torch.randn(32, 64))
        hidden.pow(2).sum().backward()
    plan = graph.plan()
    remedies = plan.remedies
    assert remedies
    found = {
        "plan": plan,
        "report": graph.evaluate(),
        "moment": plan.at(plan.peak_position),
        "remedy": remedies[0],
        "remedies": remedies,
    }
    return found


@pytest.mark.parametrize("name", ["plan", "report", "moment", "remedy", "remedies"])
def test_shown_alone_it_is_a_table_in_every_front_end(results, name):
    shown = results[name]
    table = shown.table()
    assert table.rows
    page = shown._repr_html_()
    assert page.count("<tr>") == 1 + len(table.rows)
    assert page.count("<table>") == page.count("</table>") == 1
    text = pretty(shown)
    assert text == table.text()
    assert len(text.splitlines()) == 2 + len(table.rows)
    out = io.StringIO()
    Console(file=out, width=300).print(shown)
    for row in table.rows:
        assert all(cell in out.getvalue() for cell in row)


def test_rich_does_not_wrap_a_title_to_the_width_of_its_table(results):
    out = io.StringIO()
    Console(file=out, width=300).print(results["plan"])
    assert out.getvalue().splitlines()[0].rstrip() == results["plan"].table().title


def test_columns_are_aligned_and_numbers_end_where_they_end():
    table = lazyviz.plan.result_tables.Table("title", ("bytes", "what"), [("1 B", "a"), ("100 KiB", "bb")])
    assert table.text() == "title\n    bytes  what\n      1 B  a\n  100 KiB  bb"
    assert lazyviz.plan.result_tables.Table("nothing", ("a",), []).text() == "nothing"


@pytest.mark.parametrize("name", ["plan", "report", "moment", "remedy"])
def test_inside_of_a_list_it_is_one_line(results, name):
    line = repr(results[name])
    assert "\n" not in line
    assert line.startswith(f"<{type(results[name]).__name__}")
    assert not re.search(r"\w+=", line)  # no dataclass of fields
    assert repr([results[name]]) == f"[{line}]"
    assert pretty([results[name]]) == f"[{line}]"


def test_names_in_tables_are_text():
    table = lazyviz.plan.result_tables.Table("<b>", ("<i>",), [("<script>",)], 0)
    assert "<script>" not in table.html()
    assert "&lt;script&gt;" in table.html()


def test_in_html_each_column_is_aligned_and_has_room_whatever_the_host():
    shown = lazyviz.plan.result_tables.Table("title", ("bytes", "what"), [("1 B", "a")]).html()
    cells = re.findall(r'<(t[hd]) style="([^"]*)">([^<]*)<', shown)
    assert [(tag, text) for tag, _, text in cells] == [
        ("th", "bytes"),
        ("th", "what"),
        ("td", "1 B"),
        ("td", "a"),
    ]
    assert all("padding" in style for _, style, _ in cells)
    for word in ("right", "nowrap"):  # "65.6 MiB" is one word
        assert [word in style for _, style, _ in cells] == [True, False] * 2


def test_what_is_shown_runs_nothing():
    with lazyviz.lazy() as graph:
        x = torch.ones(3) + 1
    plan = graph.plan()
    plan._repr_html_()
    pretty(plan.at(0))
    assert graph.pending == 2
    assert repr(x).endswith("pending")


def test_text_is_displayed_as_lines_at_the_end_of_a_cell_and_is_a_str_elsewhere(results):
    shown = [results["plan"].explain(), lazyviz.why()]
    for text in shown:
        assert isinstance(text, str) and "\n" in text
        assert pretty(text) == text  # the lines, no "\n" in quotes
        assert "\\n" in pretty([text])
        assert pickle.loads(pickle.dumps(text)) == text


@pytest.mark.parametrize("name", ["plan", "moment"])
def test_what_refers_to_recorded_ops_says_why_it_cannot_be_pickled(results, name):
    for take in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="this process has recorded.* neither pickled"):
            take(results[name])
    assert copy.copy(results[name]) is results[name]
