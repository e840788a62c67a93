"""Running a graph from its widget: all or a part, stopped and resumed, failed, watched, inspected."""

from __future__ import annotations

import math
import time

import pytest
import torch
from torch import nn

import lazyviz

from .support.bare_page import Stage, shown

pytestmark = pytest.mark.browser

EVALUATE = 'button[data-action="evaluate"]'
UP_TO = 'button[data-action="evaluate-to"]'
CANCEL = 'button[data-action="cancel"]'
VALUES = 'button[data-action="summaries"]'


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def step(labels=None, *, batch=None, width=64):
    """A training step, its results in eager mode, and what keeps it alive."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 10))
    x, y = torch.randn(32, width), torch.randint(0, 10, (32,))
    if labels is not None:
        y = labels
    with lazyviz.lazy(batch=batch and [x, y]) as graph:
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
    return graph, (net, x, y, loss)


def long_graph(ops=400, size=700):
    """A run of some seconds."""
    x = torch.randn(size, size)
    with lazyviz.lazy() as graph:
        y = x
        for _ in range(ops):
            y = (y @ x).tanh()
    return graph, (x, y)


def states(page):
    """Drawn boxes by their state."""
    found: dict[str, set[str]] = {}
    for box in page.locator("[data-node]").all():
        found.setdefault(box.get_attribute("data-state") or "", set()).add(box.get_attribute("data-op") or "")
    return found


def test_evaluate_runs_all_and_tells_every_box(page):
    graph, (_, _, _, loss) = step()
    with Stage(page, graph) as stage:
        assert "pending" in states(page)
        stage.click(EVALUATE)
        page.locator('.lazyviz[data-state="done"]').wait_for()
        assert graph.pending == 0 and not lazyviz.is_lazy(loss)
        ops = page.locator('[data-node]:is([data-kind="op"], [data-kind="module"])')
        assert {box.get_attribute("data-state") for box in ops.all()} == {"done"}
        assert page.locator(EVALUATE).is_disabled() and page.locator(CANCEL).is_hidden()
        assert f"ran {len(graph.nodes)} ops" in page.locator(".lz-state").inner_text()
        page.locator('[data-node][data-op^="aten."]').first.click()
        stage.settle()
        assert "time" in page.locator('[data-panel="details"] dt').all_inner_texts()


def test_to_selected_runs_what_the_box_needs_and_nothing_else(page):
    graph, (net, x, _, loss) = step()
    expected = net[1](net[0](x.clone())).detach()
    with Stage(page, graph) as stage:
        assert page.locator(UP_TO).is_disabled()
        stage.click('[data-node][data-name="net.1"][data-phase="forward"]')
        assert page.locator(UP_TO).is_enabled()
        stage.click(UP_TO)
        done = [node for node in graph.nodes if node.state == "done"]
        assert [node.name.rpartition("_")[0] for node in done] == ["t", "addmm", "relu"]
        assert graph.state == "pending" and lazyviz.is_lazy(loss)
        state = page.locator(".lz-state").inner_text().replace("\xa0", " ")
        assert state.startswith("partly run · ran 3 ops")
        selected = page.locator('[data-node][data-name="net.1"][data-phase="forward"]')
        assert selected.get_attribute("data-state") == "done"
        assert page.locator(UP_TO).is_disabled()
        stage.click(EVALUATE)
        assert graph.pending == 0
        relu = next(node for node in graph.nodes if node.op is torch.ops.aten.relu.default)
        assert relu.state == "done"
        assert torch.equal(net[1](net[0](x)), expected), "the run has changed no weights"


@pytest.mark.takes_times
def test_a_cancelled_run_is_resumed_where_it_stopped_and_the_page_is_notified_throughout(page):
    graph, (x, y) = long_graph()
    with Stage(page, graph) as stage:
        page.locator(EVALUATE).click()
        end = time.monotonic() + 20
        while "of 800" not in page.locator(".lz-progress-text").inner_text():
            assert time.monotonic() < end
            page.wait_for_timeout(20)
            stage.pump()
        words = page.locator(".lz-progress-text").inner_text()
        assert "held" in words and page.locator("progress[value]").count() == 1
        start = time.monotonic()
        page.locator(
            '[data-node][aria-expanded="false"][data-phase="forward"]'
        ).first.click()  # the page answers while it runs
        stage.pump()
        assert time.monotonic() - start < 1
        page.locator(CANCEL).click()
        stage.settle()
        assert page.locator(".lazyviz").get_attribute("data-state") == "interrupted"
        ran = sum(node.state == "done" for node in graph.nodes)
        assert 0 < ran < 800
        assert page.locator(EVALUATE).inner_text() == "Resume"
        page.locator(EVALUATE).focus()
        page.keyboard.press("Control+Enter")
        stage.settle(seconds=60)
        assert page.locator(".lazyviz").get_attribute("data-state") == "done"
        assert stage.widget.report.startswith(f"ran {800 - ran:,} ops")
    expected = x
    for _ in range(400):
        expected = (expected @ x).tanh()
    assert torch.equal(y, expected)
    sent = [message for message in stage.messages if message["kind"] == "states"]
    assert all(len(str(message)) < 20_000 for message in sent)


def test_a_failed_op_is_red_with_its_message_and_line_and_can_be_shown(page):
    labels = torch.zeros(32, dtype=torch.long)
    labels[5] = 99
    graph, keep = step(labels)
    with Stage(page, graph) as stage:
        stage.click(EVALUATE)
        page.locator('.lazyviz[data-state="failed"]').wait_for()
        alert = page.locator('.lazyviz [role="alert"]').inner_text()
        assert "Target 99 is out of bounds" in alert and "cross_entropy(net(x), y)" in alert
        failed = page.locator('[data-node][data-state="failed"]')
        assert "nll_loss_forward" in failed.first.get_attribute("data-op")
        shown(page.locator('[role="alert"] button')).click()
        stage.settle()
        page.locator('.lz-selected[data-node][data-state="failed"]').wait_for()
    assert keep[2][5] == 99


def test_what_failed_once_is_resumed(page):
    calls = []

    @torch.library.custom_op("lazyviz_tests::flaky", mutates_args=())
    def flaky(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 1:
            raise ConnectionError("the first call fails")
        return x + 1

    flaky.register_fake(lambda x: torch.empty_like(x))
    x = torch.zeros(3)
    with lazyviz.lazy() as graph:
        y = flaky(x * 2).sum()
    with Stage(page, graph) as stage:
        stage.click(EVALUATE)
        assert page.locator(".lazyviz").get_attribute("data-state") == "failed"
        assert "the first call fails" in page.locator('[role="alert"]').inner_text()
        assert page.locator('[data-node][data-state="failed"]').count() == 1
        assert page.locator(EVALUATE).inner_text() == "Resume"
        stage.click(EVALUATE)
        assert page.locator(".lazyviz").get_attribute("data-state") == "done"
        assert page.locator('[data-node][data-state="failed"]').count() == 0
        assert page.locator('[role="alert"]').count() == 0
    assert y.item() == 3 and len(calls) == 2


def test_a_failure_in_code_shows_in_the_widget_too(page):
    labels = torch.full((32,), 99)
    graph, (_, _, _, loss) = step(labels)
    with Stage(page, graph) as stage:
        with pytest.raises(IndexError):
            loss.item()
        stage.settle()
        assert page.locator(".lazyviz").get_attribute("data-state") == "failed"
        assert page.locator('[data-node][data-state="failed"]').count() == 1


def test_values_find_the_first_nan_and_show_a_histogram(page):
    torch.manual_seed(0)
    x = torch.randn(64, 32)
    with lazyviz.lazy() as graph:
        scores = (x @ x.t()).masked_fill(torch.ones(64, 64).triu(1).bool(), -math.inf)
        weights = scores.softmax(-1)
        logs = (weights - 0.5).log()
        out = logs.sum()
    with Stage(page, graph) as stage:
        assert page.locator(VALUES).get_attribute("aria-pressed") == "false"
        stage.click(VALUES)
        assert page.locator(VALUES).get_attribute("aria-pressed") == "true"
        stage.click(EVALUATE)
        finding = page.locator('[data-finding="nan"]')
        assert (
            "first in log_" in finding.inner_text() and "line" not in finding.inner_text().split(":")[0][:4]
        )
        assert page.locator('[data-finding="inf"]').count() == 0, "the mask is meant"
        shown(finding.locator("button")).click()
        stage.settle()
        selected = page.locator(".lz-selected[data-node]").first
        assert selected.get_attribute("data-op") == "aten.log.default"
        assert "lz-alarmed" in selected.get_attribute("class")
        assert "NaN" in page.locator('[data-panel="details"] .lz-values').inner_text()
        stage.click('[data-node][data-op="aten._softmax.default"]')
        picture = page.locator('[data-panel="details"] .lz-histogram')
        assert picture.get_attribute("aria-label").startswith("Histogram from 0 to 1:")
        assert picture.locator("rect").count() == 16
    assert torch.isnan(out)


def test_a_result_that_is_still_there_can_be_looked_at_later(page):
    x = torch.linspace(-1, 1, 101)
    with lazyviz.lazy() as graph:
        y = x * 2
    with Stage(page, graph) as stage:
        stage.click(EVALUATE)
        stage.click('[data-node][data-op="aten.mul.Tensor"]')
        stage.click('button[data-action="summarize"]')
        facts = page.locator(".lz-values").inner_text().split()
        assert facts[:4] == ["least", "-2", "largest", "2"]
        assert page.locator('button[data-action="summarize"]').count() == 0
    assert y.sum().abs() < 1e-5


def test_a_view_that_is_displayed_later_shows_the_run_and_the_annotations_of_meanwhile(page):
    graph, _keep = step(batch=True)
    with Stage(page, graph) as stage:
        first = page.locator(".lazyviz").first
        stage.click(EVALUATE)
        graph.annotate("norm", {node: float(node.index) for node in graph.nodes})
        stage.settle()
        done = first.locator('[data-node][data-state="done"]').count()
        legend = first.locator(".lz-color-key").inner_text()
        later = stage.display_again()
        assert later.locator('[data-node][data-state="done"]').count() == done > 5
        assert later.locator(".lz-color-key").inner_text() == legend and "norm" in legend
        assert first.locator(".lz-color-key").inner_text() == legend


def test_two_widgets_of_a_graph_and_two_views_of_one_stay_in_step(page, browser):
    graph, _ = step(batch=True)
    other_page = browser.new_page()
    with Stage(page, graph, views=2) as stage, Stage(other_page, graph) as other:
        shown(stage.page.locator(VALUES).first).click()
        stage.settle()
        other.settle()
        shown(stage.page.locator('select[data-action="split"]').nth(1)).select_option("4")
        stage.settle()
        other.settle()
        for each in (page, other_page):
            for view in each.locator(".lazyviz").all():
                assert view.locator(VALUES).get_attribute("aria-pressed") == "true"
                assert view.locator('select[data-action="split"]').input_value() == "4"
        other.click(EVALUATE)
        stage.settle()
        for each in (page, other_page):
            for view in each.locator(".lazyviz").all():
                assert view.get_attribute("data-state") == "done"
                assert "in 4 pieces" in view.locator(".lz-state").inner_text()
                assert view.locator('[data-node][data-state="done"]').count() > 5
    other_page.close()
    assert graph.report.pieces == 4


def test_one_widget_stops_what_the_other_started(page, browser):
    graph, _ = long_graph()
    other_page = browser.new_page()
    with Stage(page, graph) as stage, Stage(other_page, graph) as other:
        page.locator(EVALUATE).click()
        page.wait_for_timeout(100)
        stage.pump()
        other_page.wait_for_timeout(100)
        other.pump()
        other_page.locator(CANCEL).click()
        other_page.wait_for_timeout(50)
        other.pump()
        stage.settle()
        other.settle()
        assert page.locator(".lazyviz").get_attribute("data-state") == "interrupted"
        assert other_page.locator(".lazyviz").get_attribute("data-state") == "interrupted"
    other_page.close()


def test_an_unavailable_backend_is_disabled_or_refused_with_a_message_and_loses_nothing(page):
    class Broken:
        def compile(self, segment, inputs):
            raise RuntimeError("no compiler here")

    lazyviz.register_backend("broken", Broken())
    graph, _ = step(batch=True)
    with Stage(page, graph) as stage:
        menu = shown(page.locator('select[data-action="backend"]'))
        assert menu.input_value() == "eager"
        shown(page.locator('select[data-action="split"]')).select_option("2")
        stage.settle()
        shown(menu).select_option("broken")
        stage.settle()
        assert "a split batch needs the backend 'eager'" in page.locator(".lz-run-note").inner_text()
        assert menu.input_value() == "eager" and graph.backend == "eager"
        shown(page.locator('select[data-action="split"]')).select_option("off")
        stage.settle()
        shown(menu).select_option("broken")
        stage.settle()
        stage.click(EVALUATE)
        assert page.locator(".lazyviz").get_attribute("data-state") == "failed"
        assert "no compiler here" in page.locator('[role="alert"]').inner_text()
        assert graph.pending == len(graph.nodes)
        shown(menu).select_option("eager")
        stage.settle()
        stage.click(EVALUATE)
        assert page.locator(".lazyviz").get_attribute("data-state") == "done"


def test_the_focus_is_never_lost_to_a_button_that_goes(page):
    graph, _ = step()
    with Stage(page, graph) as stage:
        page.locator(EVALUATE).focus()
        page.keyboard.press("Enter")
        stage.settle()
        assert page.evaluate("document.activeElement.closest('.lazyviz') !== null")


# Where everything is that can be seen, by what it is; words and what is inside of the chart may change.
PLACES = """() => {
  const found = {};
  const parts = '[data-part], button, select, input, .lz-verdict, [role="tab"], th, tr[data-line],'
    + '[data-node] > :is(.lz-card, .lz-frame), .lz-lane, .lz-edge,'
    + '.lz-legend-entry, .lz-memory-head, .lz-plot-box, .lz-layers li, .lz-color-key';
  document.querySelectorAll(parts).forEach((element) => {
    const { x, y } = element.getBoundingClientRect();
    const seen = element.checkVisibility({ visibilityProperty: true });
    const { action, tab } = element.dataset;
    const node = element.closest("[data-node]")?.dataset.node;
    const name = `${element.tagName} ${node ?? action ?? tab ?? element.textContent}`.slice(0, 90);
    if (seen) found[name] ??= [x, y].map(Math.round);
  });
  return found;
}"""


@pytest.mark.parametrize("width", [1484, 884])
@pytest.mark.parametrize("ending", ["done", "failed", "interrupted", "done on a machine not calibrated"])
def test_nothing_moves_when_a_run_starts_goes_on_and_ends(page, width, ending, monkeypatch, tmp_path):
    ending, _, uncalibrated = ending.partition(" on ")
    if uncalibrated:  # no time is known before the run
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    labels = torch.zeros(32, dtype=torch.long)
    if ending == "failed":
        labels[5] = 99
    graph, keep = long_graph() if ending == "interrupted" else step(labels, batch=True)
    page.set_viewport_size({"width": width + 16, "height": 1000})
    with Stage(page, graph, width=width) as stage:
        before = page.evaluate(PLACES)
        page.locator(EVALUATE).click()
        page.wait_for_timeout(30)
        during = [page.evaluate(PLACES)]
        if ending == "interrupted":
            end = time.monotonic() + 20
            while "of 800" not in page.locator(".lz-progress-text").inner_text():
                assert time.monotonic() < end
                page.wait_for_timeout(20)
                stage.pump()
            during.append(page.evaluate(PLACES))
            page.locator(CANCEL).click()
        stage.settle(seconds=30)
        page.locator(f'.lazyviz[data-state="{ending}"]').wait_for()
        for after in (*during, page.evaluate(PLACES)):
            moved = {
                name: (at, after[name]) for name, at in before.items() if name in after and after[name] != at
            }
            assert not moved
            assert len(before.keys() & after.keys()) > 20, "most of it stays"
        if width > 900:  # below, the chip alone is shown
            cut = "(span) => span.scrollWidth > span.clientWidth"
            assert not page.locator(".lz-state span").first.evaluate(cut), "no word is cut"
        strip = page.locator(".lz-failed-at text")
        op = ": nll_loss_forward" if width > 900 else ""  # below, it would hide the curves
        assert strip.all_text_contents() == [
            f"op {node.index + 1} failed{op}" for node in graph.nodes if node.state == "failed"
        ]
    del keep


def test_boxes_fill_as_they_finish_and_pending_ones_recede(page):
    graph, (x, y) = long_graph()
    filled = """() => [...document.querySelectorAll('[data-node] > .lz-done')].map((fill) => {
      const card = fill.parentElement.querySelector('.lz-card');
      return [fill.parentElement.dataset.state, fill.getBBox().width / card.getBBox().width,
              Number(getComputedStyle(fill).fillOpacity), Number(getComputedStyle(card).opacity)];
    })"""
    with Stage(page, graph) as stage:
        assert {(state, share, fill) for state, share, fill, _ in page.evaluate(filled)} == {
            ("pending", 0, 0)
        }
        page.locator(EVALUATE).click()
        end = time.monotonic() + 20
        now = page.evaluate(filled)
        while not any(0 < share < 1 for _, share, _, _ in now):
            assert time.monotonic() < end
            page.wait_for_timeout(20)
            stage.pump()
            now = page.evaluate(filled)
        for state, share, fill, card in now:
            assert fill > 0 and 0 <= share <= 1
            assert (card < 1) == (state == "pending"), "what is pending recedes"
        page.locator(CANCEL).click()
        stage.settle()
        partly = [share for state, share, _, _ in page.evaluate(filled) if state == "partly"]
        assert partly and all(0 < share < 1 for share in partly)
    del x, y
