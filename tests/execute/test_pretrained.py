"""Pretrained weights are evaluated, split, and recomputed like weights created in this process."""

from __future__ import annotations

import numpy
import pytest
import torch

import lazyviz

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=100, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def loaded(checkpoint, dtype=torch.float32):
    return transformers.GPT2LMHeadModel.from_pretrained(checkpoint, dtype=dtype).train()


def train(model, ids):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()


def ids():
    return torch.arange(32).reshape(4, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inside", [False, True], ids=["loaded before", "loaded inside"])
def test_a_pretrained_model_is_trained_without_a_sync_point(checkpoint, dtype, inside):
    expected = loaded(checkpoint, dtype)
    train(expected, ids())
    model = None if inside else loaded(checkpoint, dtype)
    with lazyviz.lazy() as graph:
        model = model or loaded(checkpoint, dtype)
        train(model, ids())
    assert graph.sync_points == [] and graph.pending == len(graph.nodes)
    assert model.lm_head.weight is model.transformer.wte.weight
    graph.evaluate()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_weights_read_by_numpy_in_the_block_that_loaded_them_are_trained(checkpoint):
    expected = loaded(checkpoint)
    train(expected, ids())
    with lazyviz.lazy() as graph:
        model = loaded(checkpoint)
        histograms = [numpy.histogram(weight.detach().numpy()) for weight in model.parameters()]
        synced = len(graph.sync_points)
        train(model, ids())
    assert synced == len(histograms) == len(graph.sync_points)
    graph.evaluate()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_a_pretrained_model_is_recomputed(checkpoint):
    expected, model = loaded(checkpoint), loaded(checkpoint)
    x = torch.arange(64 * 16).remainder(100).reshape(64, 16)
    train(expected, x)
    with lazyviz.lazy() as graph:
        train(model, x)
    least = graph.plan(recompute=1).recompute.least_bytes
    report = graph.evaluate(recompute=(least + graph.plan().peak_bytes) // 2)
    assert graph.pending == 0 and report.recomputed
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_a_pretrained_model_is_split(checkpoint):
    expected, model = loaded(checkpoint), loaded(checkpoint)
    x = ids()
    expected(x).logits.square().sum().backward()
    with lazyviz.lazy(batch=x) as graph:
        model(x).logits.square().sum().backward()
    report = graph.evaluate(split=2)
    assert report.pieces == 2
    for one, other in zip(model.parameters(), expected.parameters()):
        torch.testing.assert_close(one.grad, other.grad)
