"""Value statistics during a run: correct, and without effect on the run."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.execute import compute_value_stats, remaining_time
from lazyviz.execute.compute_value_stats import merged, summarize

TENSORS = {
    "matrix": lambda: torch.randn(200, 40),
    "transposed": lambda: torch.randn(200, 40).t(),
    "strided": lambda: torch.randn(64, 64)[::3, 1::2],
    "expanded": lambda: torch.randn(5)[:, None].expand(5, 7),
    "scalar": lambda: torch.tensor(2.5),
    "integers": lambda: torch.arange(-5, 50),
    "truths": lambda: torch.rand(100) > 0.3,
    "halves": lambda: torch.randn(1000).half(),
    "bfloat16": lambda: torch.randn(1000).bfloat16(),
    "doubles": lambda: torch.randn(1000, dtype=torch.float64) * 1e200,
    "complex": lambda: torch.randn(50, dtype=torch.complex64),
    "NaN and infinities": lambda: torch.tensor([1.0, math.nan, math.inf, -2.0, -math.inf, math.nan]),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_summary_says_what_is_in_a_tensor(name, monkeypatch):
    monkeypatch.setattr(compute_value_stats, "CHUNK", 1000)  # several chunks
    torch.manual_seed(0)
    tensor = TENSORS[name]()
    before = tensor.clone()
    summary = summarize(tensor)
    assert torch.equal(torch.nan_to_num(tensor), torch.nan_to_num(before))
    values = (tensor.abs() if tensor.is_complex() else tensor).to(torch.float64).flatten()
    finite = values[values.isfinite()]
    assert summary.count == tensor.numel() and summary.finite == finite.numel()
    assert (summary.least, summary.largest) == (finite.min().item(), finite.max().item())
    assert summary.mean == pytest.approx(finite.mean().item(), rel=1e-6, abs=1e-6)
    assert summary.nan == int(values.isnan().sum()) and summary.inf == int(values.isinf().sum())
    assert summary.nan_share == summary.nan / tensor.numel()
    if summary.least != summary.largest and tensor.dim() and name != "expanded":
        expected = torch.histc(finite, len(summary.histogram), summary.least, summary.largest)
        moved = (torch.tensor(summary.histogram) - expected).abs().sum()
        assert sum(summary.histogram) == finite.numel() and moved <= 4, "bounds of bins are rounded"


def test_nothing_is_summarized_of_what_has_no_numbers():
    assert summarize(torch.randn(3, 3).to_sparse()) is None
    assert summarize(torch.empty(3, device="meta")) is None
    empty = summarize(torch.empty(0, 4))
    assert (empty.count, empty.least, empty.histogram) == (0, None, ())
    lost = summarize(torch.full((4,), math.nan))
    assert (lost.nan_share, lost.mean, lost.histogram) == (1.0, None, ())


def test_the_histogram_of_a_large_tensor_samples_it_evenly():
    torch.manual_seed(0)
    summary = summarize(torch.rand(1000, 1000))
    total = sum(summary.histogram)
    assert 1000 < total <= compute_value_stats.SAMPLE
    assert all(abs(16 * count / total - 1) < 0.25 for count in summary.histogram)


def test_summaries_of_parts_add_up():
    torch.manual_seed(0)
    whole = torch.cat([torch.randn(500), torch.tensor([math.nan, math.inf]), torch.randn(300) + 9])
    parts = [summarize(part) for part in (whole[:400], whole[400:600], whole[600:])]
    together, expected = merged(merged(*parts[:2]), parts[2]), summarize(whole)
    for name in ("count", "nan", "plus_inf", "least", "largest"):
        assert getattr(together, name) == getattr(expected, name)
    assert together.mean == pytest.approx(expected.mean)
    assert sum(together.histogram) == sum(expected.histogram)


def train(net, x, y, **options):
    optimizer = torch.optim.AdamW(net.parameters())
    with lazyviz.lazy(batch=[x, y]) as graph:
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        noise = torch.rand(3)
    report = graph.evaluate(**options)
    return graph, report, [loss, noise, *net.parameters(), torch.rand(2)]


def model():
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(32, 4))
    return net, torch.randn(12, 16), torch.randint(0, 4, (12,))


@pytest.mark.parametrize("split", ["off", 3])
def test_looking_at_values_changes_no_bit_no_draw_and_no_measured_peak(split):
    plain, without, expected = train(*model(), split=split)
    graph, report, results = train(*model(), split=split, summaries=True)
    for one, other in zip(expected, results, strict=True):
        assert torch.equal(one, other)
    assert report.peak_bytes == without.peak_bytes
    assert report.timeline == without.timeline
    assert all(not node.summaries for node in plain.nodes)
    assert report.first_nonfinite is None
    noted = [node for node in graph.nodes if any(node.summaries)]
    assert len(noted) > 0.6 * len(graph.nodes)
    if split == "off":
        assert all(any(node.summaries) for node in graph.nodes if "empty" not in node.name)


def test_pieces_give_the_summaries_of_the_whole():
    whole, *_ = train(*model(), summaries=True)
    pieces, *_ = train(*model(), summaries=True, split=3)
    compared = 0
    for one, other in zip(whole.nodes, pieces.nodes):
        for a, b in zip(one.summaries, other.summaries):
            if a is not None and b is not None and one.phase == "forward":
                assert a.count == b.count
                assert a.mean == pytest.approx(b.mean, rel=1e-4, abs=1e-6)
                compared += 1
    assert compared >= 4


def test_the_first_nan_and_the_first_infinity_are_named_with_their_lines():
    x = torch.randn(6, 4)
    with lazyviz.lazy() as graph:
        zeros = x * 0
        large = zeros.log()  # -inf
        wrong = large - large
        wrong + 1
    report = graph.evaluate(summaries=True)
    assert report.first_inf.node.name == "log_1" and report.first_inf.source.text.startswith("large =")
    assert report.first_nan.node.name == "sub_2" and report.first_nan.value is graph.nodes[2].outputs[0]
    assert report.first_nonfinite is report.first_inf
    assert [node.alarm for node in graph.nodes] == [None, "inf", "nan", "nan"]
    assert "all 24 values NaN" in str(report.first_nan)
    assert not torch.isfinite(wrong).any()


@pytest.mark.parametrize("outside", [False, True])
def test_a_masks_infinities_are_meant(outside):
    scores = torch.randn(2, 5, 5)
    mask = torch.full((5, 5), -math.inf).triu(1)
    with lazyviz.lazy() as graph:
        if outside:
            masked = scores + mask
        else:
            masked = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
        weights = (masked * 0.5).softmax(-1)
    report = graph.evaluate(summaries=True)
    assert report.first_nonfinite is None
    assert all(node.alarm is None for node in graph.nodes)
    assert torch.isfinite(weights).all()


def test_what_comes_in_wrong_is_said_to_come_in():
    bad = torch.ones(3)
    bad[1] = math.nan
    with lazyviz.lazy() as graph:
        bad + 1
    assert "bad has it already" in str(graph.evaluate(summaries=True).first_nan)


def test_memory_that_is_yet_to_be_written_is_not_looked_at():
    with lazyviz.lazy() as graph:
        blank = torch.empty(64)
        blank.fill_(2.0)
    report = graph.evaluate(summaries=True)
    assert not any(graph.nodes[0].summaries) and graph.nodes[1].summaries[0].mean == 2
    assert report.first_nonfinite is None and blank[0] == 2


def test_results_that_the_user_still_has_can_be_summarized_later():
    x = torch.linspace(0, 1, 11)
    with lazyviz.lazy() as graph:
        kept = x * 2
        kept + 1  # nobody holds it
    graph.evaluate()
    assert graph.readable(graph.nodes[:1]) and not graph.readable(graph.nodes[1:])
    kept += 1
    graph.summarize(graph.nodes)
    assert graph.nodes[0].summaries[0].least == 1, "as it is now"
    assert not any(graph.nodes[1].summaries)
    assert not graph.readable(graph.nodes)
    del kept
    other = torch.randn(4)
    with pytest.raises(ValueError, match="not a node of this graph"):
        with lazyviz.lazy() as another:
            other + 1
        graph.summarize(another.nodes)


# --- parts, and what is told of a run -----------------------------------------------------------


def test_nodes_run_with_what_they_need_and_the_rest_stays_pending():
    net, x, y = model()
    with lazyviz.lazy() as graph:
        hidden = net[0](x)
        out = net[3](hidden)
        loss = nn.functional.cross_entropy(out, y)
    wanted = [node for node in graph.nodes if node.outputs[0].shape == (12, 4)][:1]
    report = graph.evaluate(nodes=wanted)
    assert report.ops_run == 4 and lazyviz.is_lazy(loss) and not lazyviz.is_lazy(out)
    assert torch.equal(out, net[3](net[0](x)))
    assert graph.evaluate(nodes=wanted).ops_run == 0
    graph.evaluate()
    assert [index for index, _ in sorted(graph.measured)] == list(range(len(graph.nodes)))
    with lazyviz.lazy() as another:
        x + 1
    with pytest.raises(ValueError, match="not a node of this graph"):
        graph.evaluate(nodes=another.nodes)


def test_the_measured_timeline_is_the_planned_one():
    net, x, y = model()
    with lazyviz.lazy() as graph:
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
    planned = list(graph.plan().timeline)
    report = graph.evaluate()
    assert list(report.timeline) == planned
    assert max(held for _, held in report.timeline) == report.peak_bytes


def test_how_long_a_run_will_take_is_foreseen_from_what_its_ops_have_to_do(monkeypatch):
    monkeypatch.setattr(remaining_time, "_known", {})
    x, small = torch.randn(400, 400), torch.randn(4)
    with lazyviz.lazy() as graph:
        for _ in range(20):
            x = x @ x / 20
        for _ in range(400):
            small = small + 1
    assert remaining_time.Forecast(graph.nodes).share(40) > 0.25, "though it is one op in eleven"
    seen = []
    graph.evaluate(progress=seen.append)
    half = next(each for each in seen if each.done == 40)
    assert half.seconds_left > half.seconds, "counting ops is all that is known without looking at them"


def test_a_long_run_is_foreseen_from_some_of_its_ops(monkeypatch):
    from lazyviz.execute import remaining_time

    x = torch.randn(4)
    with lazyviz.lazy() as graph:
        for _ in range(300):
            x = (x + 1) * 2
    whole = remaining_time.Forecast(graph.nodes)
    monkeypatch.setattr(remaining_time, "MOST_SEEN", 50)
    some = remaining_time.Forecast(graph.nodes)
    for done in (0, 1, 100, 299, 600):
        assert some.share(done) == pytest.approx(whole.share(done), abs=0.03)


def test_an_invalid_choice_changes_nothing_and_valid_ones_notify_subscribers():
    net, x, _ = model()
    with lazyviz.lazy() as graph:
        net(x)
    told = []
    graph.subscribe(lambda: told.append((graph.backend, graph.summaries, graph.split)))
    for wrong in ({"split": 3}, {"backend": "none such"}, {"backend": "ipyparallel"}, {"split": "half"}):
        with pytest.raises(ValueError):
            graph.choose(**wrong)
    assert told == []
    graph.choose(summaries=True)
    assert told == [("eager", True, "off")]
    reasons = dict(graph.backends())
    assert reasons["eager"] == "" and "batch" in reasons["ipyparallel"] + reasons["ray"]
    assert graph.evaluate().first_nonfinite is None and any(graph.nodes[-1].summaries)


def test_a_sync_point_looks_at_values_where_that_is_chosen():
    x = torch.ones(3)
    with lazyviz.lazy() as graph:
        y = (x - 1).log().sum()
    graph.choose(summaries=True)
    assert y.item() == -math.inf
    assert graph.report.first_inf.node.name == "log_1"
    assert graph.nonfinite["inf"] is graph.report.first_inf


def test_a_run_of_two_graphs_gives_each_the_memory_of_its_own_storages():
    """A draw in the second one runs the draws of the first one before, which are large."""
    for _ in range(3):  # the last time from the cache
        with lazyviz.lazy() as first:
            kept = torch.randn(500, 500) @ torch.randn(500, 500)
        with lazyviz.lazy() as second:
            weight = torch.ones(50, 4, requires_grad=True)
            optimizer = torch.optim.SGD([weight], 0.1)
            for _ in range(3):
                optimizer.zero_grad()
                loss = (torch.randn(20, 50) @ weight).abs().mean()
                loss.backward()
                optimizer.step()
                loss.item()
        second.evaluate()
        assert sorted(position for position, _ in second.measured) == list(range(len(second.nodes)))
        assert max(held for _, held in second.measured) == second.plan().peak_bytes < 100_000
        first.evaluate()
        assert max(held for _, held in first.measured) == first.plan().peak_bytes
        del kept
