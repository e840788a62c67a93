"""Remedies name the local variable of a function, and the line in it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyviz

GPU = pytest.param(
    "H100-80GB", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 64)
        self.head = nn.Linear(64, 5000)

    def forward(self, x):
        hidden = self.body(x).tanh()
        scores = self.head(hidden)
        return scores * 1


def loss_of(scores, labels):
    return F.cross_entropy(scores, labels)


def returns_both(model, x, labels):
    logits = model(x)
    loss = loss_of(logits, labels)
    loss.backward()
    return loss, logits


def returns_loss(model, x, labels):
    logits = model(x)
    loss = loss_of(logits, labels)
    loss.backward()
    return loss


def returns_loss_after_del(model, x, labels):
    logits = model(x)
    loss = loss_of(logits, labels)
    del logits
    loss.backward()
    return loss


def passes_it_on(model, x, labels):
    loss = loss_of(model(x), labels)
    loss.backward()
    return loss


def plan_of(step, device):
    torch.manual_seed(0)
    lazyviz.reset()
    place = "cpu" if device == "cpu" else "cuda"
    with lazyviz.lazy(device=None if device == "cpu" else device) as graph:
        model = Classifier().to(place)
        labels = torch.zeros(64, dtype=torch.long, device=place)
        keep = step(model, torch.randn(64, 16, device=place), labels)
    plan = graph.plan()
    del keep
    return plan


def variables(plan):
    return [each for each in plan.remedies if each.kind == "variable"]


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_what_is_returned_is_named_as_the_function_calls_it(device):
    (remedy,) = variables(plan_of(returns_both, device))
    assert remedy.text.startswith("del logits after its last use at test_local_variable_names.py:")
    assert "in returns_both, which can no longer return it" in remedy.text
    assert remedy.source.text == "loss = loss_of(logits, labels)" and remedy.estimate
    lazyviz.reset()


@pytest.mark.parametrize("device", [GPU])
def test_a_variable_that_is_gone_when_its_function_returns_is_named(device):
    plan = plan_of(returns_loss, device)
    (remedy,) = variables(plan)
    assert remedy.text.startswith("del logits") and remedy.text.endswith("(in returns_loss)")
    assert remedy.source.text == "loss = loss_of(logits, labels)"
    actual = plan_of(returns_loss_after_del, device)
    assert remedy.peak_bytes == actual.peak_bytes
    assert not variables(actual)
    lazyviz.reset()


def views_it(model, x, labels):
    logits = model(x)
    flat = logits.flatten(0, 1).unflatten(0, (-1, 5000))
    loss = loss_of(flat, labels)
    loss.backward()
    return loss


def views_it_and_deletes_one(model, x, labels):
    logits = model(x)
    flat = logits.flatten(0, 1).unflatten(0, (-1, 5000))
    loss = loss_of(flat, labels)
    del logits
    loss.backward()
    return loss, flat.shape


def views_it_and_deletes_both(model, x, labels):
    logits = model(x)
    flat = logits.flatten(0, 1).unflatten(0, (-1, 5000))
    loss = loss_of(flat, labels)
    del logits, flat
    loss.backward()
    return loss


@pytest.mark.parametrize("device", [GPU])
def test_all_variables_that_share_the_memory_are_named(device):
    plan = plan_of(views_it, device)
    (remedy,) = variables(plan)
    assert remedy.text.startswith("del logits, flat after their last use at test_local_variable_names.py:")
    assert remedy.source.text == "loss = loss_of(flat, labels)"
    assert remedy.peak_bytes == plan_of(views_it_and_deletes_both, device).peak_bytes
    assert plan_of(views_it_and_deletes_one, device).peak_bytes == plan.peak_bytes
    lazyviz.reset()


def on_one_line(model, x, labels):
    logits = model(x); loss = loss_of(logits, labels)  # fmt: skip  # noqa: E702
    loss.backward()
    return logits, loss


@pytest.mark.parametrize("device", [GPU])
def test_a_variable_is_not_taken_for_another_that_its_line_binds(device):
    texts = [each.text for each in variables(plan_of(on_one_line, device))]
    assert not any(text.startswith("del loss") for text in texts)
    lazyviz.reset()


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_what_no_variable_keeps_is_no_remedy(device):
    assert not variables(plan_of(passes_it_on, device))
    lazyviz.reset()


def test_a_variable_of_the_block_keeps_its_name():
    torch.manual_seed(0)
    model = Classifier()
    with lazyviz.lazy() as graph:
        kept = model(torch.randn(64, 16))
        loss = loss_of(kept, torch.zeros(64, dtype=torch.long))
        loss.backward()
    (remedy,) = variables(graph.plan())
    assert remedy.text.startswith("del kept after its last use at test_local_variable_names.py:")
    assert "if no later code needs it" in remedy.text and not remedy.estimate
    lazyviz.reset()


def reads_its_shape(model, x, labels):
    logits = model(x)
    loss = loss_of(logits, labels)
    count = logits.shape[0]
    loss.backward()
    return loss / count, logits


def reads_it_after_the_peak(model, x, labels):
    logits = model(x)
    loss = loss_of(logits, labels)
    loss.backward()
    return loss, logits.mean()


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_variable_is_not_deleted_above_a_line_that_reads_its_shape(device):
    (remedy,) = variables(plan_of(reads_its_shape, device))
    assert remedy.source.text == "count = logits.shape[0]"
    lazyviz.reset()


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_variable_that_is_read_after_the_peak_is_not_deleted_before(device):
    def stopped(model, x, labels):
        with pytest.raises(RuntimeError, match="stopped"):
            reads_it_in_the_next_step(model, x, labels)

    assert not variables(plan_of(reads_it_after_the_peak, device))
    assert not variables(plan_of(stopped, device))
    lazyviz.reset()


def reads_it_in_the_next_step(model, x, labels):
    for step in range(2):
        logits = model(x)
        loss = loss_of(logits, labels)
        loss.backward()
        if step:
            raise RuntimeError("stopped", logits)  # as the command stops a script
        logits.mean()


def test_what_reads_a_variable_of_the_block_later_is_named():
    model = Classifier()
    with lazyviz.lazy() as graph:
        kept = model(torch.randn(64, 16))
        loss_of(kept, torch.zeros(64, dtype=torch.long)).backward()
    (remedy,) = variables(graph.plan())
    line = remedy.source.line + 3
    assert f"(if line {line}, which reads it later, can do without it)" in remedy.text, len(kept)
    lazyviz.reset()


def test_a_variable_that_every_iteration_reads_is_not_deleted_in_the_loop():
    model = Classifier()
    with lazyviz.lazy() as graph:
        data = torch.randn(5000, 16)
        for start in range(0, 192, 64):
            batch = data[start : start + 64]
            loss_of(model(batch), torch.zeros(64, dtype=torch.long)).backward()
    assert not [each.text for each in variables(graph.plan()) if each.text.startswith("del data")]
    with lazyviz.lazy() as graph:
        data = torch.randn(5000, 16)
        batches = [data[start : start + 64].clone() for start in range(0, 192, 64)]
        loss_of(model(batches[0]), torch.zeros(64, dtype=torch.long)).backward()
    assert [each.text for each in variables(graph.plan()) if each.text.startswith("del data")]
    lazyviz.reset()
