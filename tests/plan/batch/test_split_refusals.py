"""Reasons that prevent a split are named with their line; nothing runs, and no result is wrong."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyviz

B = 12
PERMUTATION = torch.tensor([3, 1, 0, 2, 7, 6, 5, 4, 11, 10, 9, 8])
REFUSED = {
    "softmax": ("_softmax", lambda h: h.softmax(0)),
    "log_softmax": ("_log_softmax", lambda h: h.log_softmax(0)),
    "cumsum": ("cumsum", lambda h: h.cumsum(0)),
    # Its gradient is a sync point in torch 2.11, which would be refused in the block.
    "cumprod": ("cumprod", lambda h: h * h.detach().cumprod(0)),
    "logcumsumexp": ("logcumsumexp", lambda h: h.logcumsumexp(0)),
    "logsumexp": ("logsumexp", lambda h: h.logsumexp(0)),
    "sort": ("sort", lambda h: h.sort(0).values),
    "topk": ("topk", lambda h: h.topk(3, 0).values),
    "roll": ("roll", lambda h: h.roll(1, 0)),
    "flip": ("flip", lambda h: h.flip(0)),
    "max": ("max", lambda h: h.max(0).values),
    "amax": ("amax", lambda h: h.amax(0)),
    "std": ("std", lambda h: h.std(0)),
    "var": ("var", lambda h: h.var(0)),
    "median": ("median", lambda h: h.median(0).values),
    "norm": ("linalg_vector_norm", lambda h: h.norm(dim=0)),
    "mixup by index": ("index", lambda h: 0.3 * h + 0.7 * h[PERMUTATION]),
    "mixup by index_select": ("index_select", lambda h: h + h.index_select(0, PERMUTATION)),
    "first half minus second": ("slice", lambda h: h[: B // 2] - h[B // 2 :]),
    "halves by chunk": ("split", lambda h: torch.sub(*h.chunk(2))),
    "neighbors": ("slice", lambda h: h[1:] - h[:-1]),
    "every other": ("slice", lambda h: h[::2]),
    "first sample": ("select", lambda h: h - h[0]),
    "another row": ("cat", lambda h: torch.cat([h, torch.zeros(1, 6)])),
    "padding": ("constant_pad_nd", lambda h: F.pad(h, (0, 0, 1, 0))),
    "convolution along the batch": ("convolution", lambda h: F.conv1d(h.t()[None], torch.ones(2, 6, 3))),
    "recurrence along the batch": ("mkldnn_rnn_layer", lambda h: LSTM(h)[0]),
    "batch norm": ("native_batch_norm", lambda h: F.batch_norm(h, None, None, training=True)),
    "finer than the pieces": ("_softmax", lambda h: h.view(4, 3, 6).softmax(0)),
}
LSTM = nn.LSTM(6, 6)


BAGS = {
    "its offsets are positions in the indices of the whole batch": lambda bag, x: bag(
        x.flatten(), torch.arange(0, 6 * B, 6) + 0 * x[:, 0]
    ),
    "its bags are not known to be of equal size, and of one sample each": lambda bag, x: bag(
        x.flatten(), torch.tensor([0, *range(7, 6 * B, 6)])
    ),
    "scale_grad_by_freq counts indices over the whole batch": lambda bag, x: F.embedding_bag(
        x, bag.weight, mode="sum", scale_grad_by_freq=True
    ),
}


@pytest.mark.parametrize("reason", BAGS)
def test_bags_that_cannot_be_cut_are_refused_with_the_reason(reason):
    bag, x = nn.EmbeddingBag(50, 6), torch.randint(0, 50, (B, 6))
    with lazyviz.lazy(batch=x, split=3) as graph:
        BAGS[reason](bag, x).square().sum().backward()
    found = graph.plan().split.blocked_by[0]
    assert "embedding_bag" in found.op._schema.name
    assert reason in graph.plan().explain()
    lazyviz.reset()


@pytest.mark.parametrize("case", REFUSED)
def test_what_lets_samples_meet_is_refused_by_name_and_line(case):
    op, function = REFUSED[case]
    model, x = nn.Linear(6, 6), torch.randn(B, 6)
    with lazyviz.lazy(batch=x, split=3) as graph:
        function(model(x)).square().sum().backward()
    pending = graph.pending
    plan = graph.plan()
    first = plan.split.blocked_by[0]
    assert first.op._schema.name == f"aten::{op}"
    assert plan.split.pieces == 1
    with pytest.raises(lazyviz.SplitError) as caught:
        graph.evaluate()
    assert first.name in str(caught.value)
    assert f":{first.source.line}" in str(caught.value)
    assert graph.pending == pending
    assert graph.evaluate(split="off").pieces == 1
    assert model.weight.grad is not None


def test_a_block_seen_in_groups_of_samples_is_cut_between_them():
    model, x = nn.Linear(6, 6), torch.randn(B, 6)
    with lazyviz.lazy(batch=x, split=8) as graph:
        model(x).view(3, 4, 6).softmax(1).square().sum().backward()
    assert list(graph.plan().split.piece_sizes) == [4, 4, 4]
    assert graph.evaluate().pieces == 3


def test_batch_norm_says_what_to_use_in_its_place():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    x = torch.randn(B, 6)
    with lazyviz.lazy(batch=x, split=2) as graph:
        model(x).sum().backward()
    text = graph.plan().split.explain()
    assert "native_batch_norm" in text
    assert "model.eval(), GroupNorm" in text
    assert "(model.1, " in text


def test_an_operator_without_a_rule_is_refused():
    x = torch.rand(B, 3)
    with lazyviz.lazy(batch=x, split=2) as graph:
        torch.histc(x)
        y = torch.trapezoid(x) + torch.histc(x).sum()
    del y
    blocked = {node.op._schema.name for node in graph.plan().split.blocked_by}
    assert "aten::histc" in blocked


def test_statistics_in_layer_after_layer_are_refused():
    class Norm(nn.Module):
        def forward(self, x):
            return (x - x.mean(0)) / (x - x.mean(0)).square().mean(0).add(1e-5).sqrt()

    model = nn.Sequential(*[layer for _ in range(5) for layer in (nn.Linear(6, 6), Norm())])
    x = torch.randn(B, 6)
    with lazyviz.lazy(batch=x, split=2) as graph:
        model(x).square().sum().backward()
    with pytest.raises(lazyviz.SplitError, match="one of too many successive ops"):
        graph.evaluate()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"batch": "x y"}, ValueError, "NAME or NAME:DIM"),
        ({"batch": 3}, TypeError, "not int"),
        ({"batch": [1]}, TypeError, "not int"),
        ({"split": 2}, ValueError, "name its tensors"),
        ({"split": True, "batch": "x"}, ValueError, "number of pieces"),
        ({"split": -1, "batch": "x"}, ValueError, "number of pieces"),
        ({"batch": {torch.ones(2): 1}}, ValueError, "no dimension 1"),
        ({"batch": [torch.ones(2), torch.ones(3)]}, ValueError, "2 and 3"),
    ],
)
def test_a_bad_batch_or_split_is_one_clear_error(options, error, words):
    with pytest.raises(error, match=words):
        with lazyviz.lazy(**options):
            pass


def test_a_batch_that_nothing_uses_is_said_so():
    x = torch.ones(4)
    with lazyviz.lazy(batch=x, split=2) as graph:
        y = torch.ones(3) * 2
    with pytest.raises(lazyviz.SplitError, match="no op of this block uses"):
        graph.evaluate()
    assert graph.evaluate(split="off").ops_run == 2
    assert y.tolist() == [2, 2, 2]


def test_a_batch_that_is_changed_in_place_is_not_cut():
    model, x = nn.Linear(6, 6), torch.randn(B, 6)
    expected = x * 2
    with lazyviz.lazy(batch=x, split=3) as graph:
        x.mul_(2)
        model(x).sum().backward()
    with pytest.raises(lazyviz.SplitError, match="it changes the batch itself"):
        graph.evaluate()
    graph.evaluate(split="off")
    assert torch.equal(x, expected)


def test_shapes_tell_where_the_batch_is():
    model, x = nn.Linear(6, 5), torch.randn(B, 3, 6)
    with lazyviz.lazy(batch=x) as graph:
        model(x).flatten(0, 1).view(3, 4, 3, 5).softmax(1)
    graph.plan()
    shapes = {node.name.rpartition("_")[0]: node.outputs[0].symbolic_shape for node in graph.nodes}
    assert shapes["addmm"] == ("3*B", 5)
    assert ("B/4", 4, 3, 5) in [node.outputs[0].symbolic_shape for node in graph.nodes]
    assert shapes["t"] == (6, 5)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_cudnns_layers_are_cut_unless_they_draw_within(dropout):
    with lazyviz.lazy(device="H100-80GB", batch="x") as graph:
        model = nn.LSTM(16, 32, num_layers=2, dropout=dropout).cuda()
        x = torch.randn(10, 8, 16, device="cuda").transpose(0, 1).contiguous()
        model(x.transpose(0, 1))[0].sum().backward()
    split = graph.plan(split=4).split
    if dropout:
        assert split.blocked_by[0].op._schema.name == "aten::_cudnn_rnn"
        assert "draws random numbers inside its kernel" in split.reasons[0]
    else:
        assert split.pieces == 4
