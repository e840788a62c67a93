"""The widget for everyone: axe finds nothing, keys reach everything, screen readers are told what happens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lazyviz

from .models import training
from .stage import Stage

pytestmark = pytest.mark.browser

AXE = Path(__file__).parents[2] / "js/node_modules/axe-core/axe.min.js"


def violations(page, root=".lazyviz"):
    """What axe finds wrong inside ``root``: its rule, and where."""
    if not AXE.is_file():
        pytest.fail("axe-core is missing: run `npm --prefix js ci`")
    if not page.evaluate("Boolean(window.axe)"):
        page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate(
        """async (root) => {
          const result = await axe.run(root, {resultTypes: ["violations"]});
          return result.violations.flatMap((rule) => rule.nodes.slice(0, 6).map((node) =>
            `${rule.id}: ${node.target.join(" ")}: ${node.failureSummary.split("\\n").slice(1).join(";")}`));
        }""",
        root,
    )
    return found


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_nothing_wrong_at_any_moment_of_use(page, dark):
    graph, keep = training(4)
    with Stage(page, graph, dark=dark) as stage:
        seen = {"before the run": violations(page)}
        stage.click('[data-node][data-op^="aten._log_softmax"]')
        seen["details"] = violations(page)
        stage.click(".lz-code tr[data-line] button")
        page.locator('input[data-action="search"]').fill("mm")
        page.wait_for_timeout(200)
        stage.settle()
        seen["a line and hits"] = violations(page)
        stage.click('button[data-action="table"]')
        stage.click('thead button[data-sort="bytes"]')
        stage.click("tbody tr[data-row] >> nth=1")
        seen["table"] = violations(page)
        stage.click('button[data-action="graph"]')
        stage.click('button[data-action="expand-all"]')
        seen["everything open"] = violations(page)
        stage.click('button[data-action="evaluate"]')
        seen["after the run"] = violations(page)
    assert {when: found for when, found in seen.items() if found} == {}
    del keep


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("by", ["memory", "time", "dtype", "module"])
def test_axe_finds_nothing_wrong_in_any_colours(page, dark, by):
    graph, keep = training(4)
    graph.evaluate()
    with Stage(page, graph, dark=dark) as stage:
        page.locator(".lazyviz select").first.wait_for()
        menu = page.locator(f'.lazyviz select:has(option[value="{by}"])').first
        menu.select_option(by)
        stage.settle()
        assert violations(page) == []
    del keep


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_nothing_wrong_after_a_failure_and_at_a_sync_point(page, dark):
    x = torch.randn(4, 4)
    with lazyviz.lazy(device="cpu:1MiB") as graph:
        y = x * 2
        float(y.sum())
        z = y.relu() + 1
    node = graph.nodes[-1]
    node.state, node.error = "failed", "RuntimeError: no"
    graph._changed("failed")
    with Stage(page, graph, dark=dark) as stage:
        stage.widget.error = {"message": "RuntimeError: no", "source": None, "chain": []}
        stage.settle()
        stage.click('[data-node][data-kind="sync"]')
        assert violations(page) == []
    node.state = "pending"
    assert z is not None
