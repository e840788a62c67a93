"""``torch.compile`` and flex attention on an absent GPU: planned as in eager mode, without sync point."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import lazyviz

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here"),
    # Of torch about itself, and of flex attention that is not compiled.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:flex_attention called without"),
]
SENTENCE = "planned as run by eager PyTorch"


def mlp():
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).cuda()


def run(model, x):
    loss = model(x).sum()
    loss.backward()
    return loss


def compiled_in_place(model):
    model.compile()
    return model


WAYS = {
    "module": (lambda model, x: run(torch.compile(model), x), "Sequential"),
    "method": (lambda model, x: run(compiled_in_place(model), x), "Sequential"),
    "whole graph": (
        lambda model, x: run(torch.compile(model, fullgraph=True, mode="reduce-overhead"), x),
        "Sequential",
    ),
    "step": (lambda model, x: torch.compile(run)(model, x), "run"),
    "backend": (lambda model, x: run(torch.compile(model, backend="eager", dynamic=True), x), "Sequential"),
}


@pytest.mark.parametrize("way", WAYS)
def test_compiled_is_planned_as_eager(way):
    call, name = WAYS[way]
    with lazyviz.lazy(device="H100-80GB") as plain:
        run(mlp(), torch.randn(8, 64, device="cuda"))
    with lazyviz.lazy(device="H100-80GB") as graph:
        model = mlp()
        call(model, torch.randn(8, 64, device="cuda"))
        assert model[0].weight.grad.shape == (64, 64)
    assert not graph.sync_points
    assert [node.op for node in graph.nodes] == [node.op for node in plain.nodes]
    assert graph.plan().peak_bytes == plain.plan().peak_bytes
    assert f"{name}: {SENTENCE}" in graph.plan().explain()
    assert SENTENCE not in plain.plan().explain()


def test_after_the_block_functions_are_compiled_as_ever():
    calls = []

    def backend(module, inputs):
        calls.append(module)
        return module.forward

    function = torch.compile(lambda x: x.sin() + 1, backend=backend)
    with lazyviz.lazy(device="H100-80GB"):
        function(torch.randn(4, device="cuda"))
    assert not calls
    lazyviz.reset()
    x = torch.randn(4)
    assert torch.equal(function(x), x.sin() + 1)
    assert calls


def causal(batch, head, query, key):
    return query >= key


def distance(score, batch, head, query, key):
    return score + (query - key) * 0.1


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("score_mod", [None, distance], ids=["plain", "scored"])
def test_flex_attention(compiled, masked, score_mod):
    with lazyviz.lazy(device="H100-80GB") as graph:
        query, key, value = (torch.randn(2, 4, 256, 64, device="cuda", requires_grad=True) for _ in range(3))
        mask = create_block_mask(causal, None, None, 256, 256, device="cuda") if masked else None
        attention = torch.compile(flex_attention) if compiled else flex_attention
        found = attention(query, key, value, block_mask=mask, score_mod=score_mod)
        assert found.shape == (2, 4, 256, 64) and found.device.type == "cuda"
        found.sum().backward()
        assert query.grad.shape == key.grad.shape == value.grad.shape == (2, 4, 256, 64)
    assert not graph.sync_points
    plan = graph.plan()
    assert plan.peak_bytes > 2 * 4 * 256 * 256 * 4  # eager's scores
    assert (f"flex_attention: {SENTENCE}" in plan.explain()) == compiled


SLOPES = torch.empty(0)


def test_gradients_of_what_a_score_captures():
    with lazyviz.lazy(device="H100-80GB"):
        query, key, value = (torch.randn(1, 2, 128, 16, device="cuda", requires_grad=True) for _ in range(3))
        slopes = torch.randn(2, device="cuda", requires_grad=True)
        found = flex_attention(query, key, value, score_mod=lambda s, b, h, q, k: s + slopes[h] * (q - k))
        found.sum().backward()
        assert slopes.grad.shape == (2,)
        globals()["SLOPES"] = slopes.detach().clone().requires_grad_()
        found = flex_attention(query, key, value, score_mod=lambda s, b, h, q, k: s * SLOPES[h])
        found.sum().backward()
        assert SLOPES.grad.shape == (2,)
