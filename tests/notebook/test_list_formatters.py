"""Lists of plans, moments, reports and remedies are one table in IPython, while the extension is loaded."""

from __future__ import annotations

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.lib.pretty import pretty
from torch import nn

import lazyviz
from lazyviz.notebook import list_formatters, magic
from lazyviz.plan.node_formatting import where
from lazyviz.plan.units import format_bytes


@pytest.fixture(scope="module")
def plan():
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
    with lazyviz.lazy() as graph:
        net(torch.ones(4, 8)).sum().backward()
    plan = graph.plan()
    graph.evaluate()
    return plan


@pytest.fixture
def show():
    """How a loaded shell shows an object, by MIME type."""
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    magic.load_ipython_extension(shell)
    yield lambda shown: shell.display_formatter.format(shown)[0]
    magic.unload_ipython_extension(shell)
    InteractiveShell.clear_instance()


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_of_moments_is_a_table_with_a_row_for_each(plan, show, kind):
    moments = kind(plan.at(position) for position in range(3))
    shown = show(moments)
    lines = shown["text/plain"].splitlines()
    assert lines[0] == "3 Moments" and len(lines) == 2 + 3
    assert shown["text/html"].count("<tr>") == 1 + 3
    for moment, line in zip(moments, lines[2:]):
        size, tensors = format_bytes(moment.nbytes), str(len(moment.alive))
        assert line.split()[1:4] == [*size.split(), tensors] and line.endswith(where(moment.node))


def test_a_list_of_remedies_has_their_columns(plan, show):
    remedies = list(plan.remedies)
    assert remedies
    assert show(remedies)["text/html"] == plan.remedies._repr_html_()
    assert show(remedies)["text/plain"] == plan.remedies.table().text()


def test_a_mixed_list_of_tables_has_a_row_for_each(plan, show):
    assert show([plan, plan.at(0)])["text/plain"].startswith("2 objects\n")


@pytest.mark.parametrize("shown", [[], [1, 2], (1,), [[]], ["a" * 100] * 3])
def test_other_lists_are_shown_as_before(show, shown):
    assert show(shown) == {"text/plain": pretty(shown)}


def test_inside_of_something_else_items_stay_one_line_each(plan, show):
    moment = plan.at(0)
    assert repr(moment) in show({"moments": [moment]})["text/plain"]


def test_unloading_brings_back_the_formatters_that_were_there(plan):
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    formatters = shell.display_formatter.formatters
    before = {kind: dict(formatter.type_printers) for kind, formatter in formatters.items()}
    formatters["text/html"].for_type(list, lambda items: "theirs")
    magic.load_ipython_extension(shell)
    assert formatters["text/html"]([1]) == "theirs"
    assert "<table>" in formatters["text/html"]([plan])
    magic.unload_ipython_extension(shell)
    assert formatters["text/html"]([plan]) == "theirs"
    formatters["text/html"].pop(list)
    assert {kind: dict(formatter.type_printers) for kind, formatter in formatters.items()} == before
    InteractiveShell.clear_instance()


def test_lists_of_plans_and_reports_have_a_column_for_each_figure(show):
    plans, reports = [], []
    for width in (8, 64):
        with lazyviz.lazy() as graph:
            torch.ones(width, width) + 1
        plans.append(graph.plan(device="A100-40GB"))
        reports.append(graph.evaluate())
    _, head, *rows = show(plans)["text/plain"].splitlines()
    assert head.split() == ["index", "peak", "needed", "device", "fits", "peak", "during"]
    for plan, row in zip(plans, rows):
        figures = f"{format_bytes(plan.peak_bytes)}  {format_bytes(plan.needed_bytes)}  A100-40GB  yes"
        assert figures.split() == row.split()[1:7]
    _, head, *rows = show(reports)["text/plain"].splitlines()
    assert head.split() == ["index", "peak", "seconds", "ops", "run", "backend", "evaluated"]
    for report, row in zip(reports, rows):
        assert row.split()[1:3] == format_bytes(report.peak_bytes).split()
        assert row.split()[4:6] == [str(report.ops_run), "eager"]


def test_nothing_evaluates_when_a_list_is_shown():
    with lazyviz.lazy() as graph:
        kept = torch.ones(3) + 1
    assert list_formatters.table_of([graph.plan(), graph.plan()]) is not None
    assert graph.pending and lazyviz.is_lazy(kept)


def test_lists_of_allocations_and_sync_points_are_a_short_line_each(show):
    net = nn.Linear(8, 4)
    with lazyviz.lazy() as graph:
        for _ in range(3):
            net(torch.ones(2, 8)).sum().item()
    for items in (list(graph.plan().alive_at_peak), list(graph.sync_points)):
        assert items
        for item in items:
            assert repr(item).startswith(f"<{type(item).__name__} ") and "\n" not in repr(item)
            assert "(" not in repr(item), "not the call of a dataclass"
            assert len(repr(item)) < 110
        assert show(items)["text/plain"] == pretty(items)
    assert "item, test_list_formatters.py:" in repr(graph.sync_points[0])
    weight = next(each for each in graph.plan().alive_at_peak if each.category == "parameters")
    assert "128 B, parameters, net.weight>" in repr(weight)


def test_allocations_are_named_by_the_variables_of_their_models():
    G, D = nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 4)
    with lazyviz.lazy() as graph:
        D(G(torch.ones(4, 8))).sum().backward()
    texts = [
        repr(each) for each in graph.plan().alive_at_peak if each.category in ("parameters", "gradients")
    ]
    names = [text.split(", ")[2].rstrip(">") for text in texts]
    assert {"G.0.weight", "G.0.bias", "D.weight", "D.bias", "D.weight.grad"} <= set(names)
    assert len(names) == len(set(names))
