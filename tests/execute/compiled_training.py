"""A training model with a compiling backend, and the same model in eager PyTorch."""

from __future__ import annotations

import torch
from torch import nn

import lazyviz


def trainer(make, x):
    """A model for inputs of shape ``x``, and a function that makes a step with a learning-rate schedule."""
    torch.manual_seed(0)
    model, x = make(), torch.randn(x)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    y = torch.randint(0, 3, x.shape[:1])

    def step():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss

    return model, step


def reports_of_training_as_eager_does(backend, make, x):
    """Of four steps with ``backend``, each compared with eager's: loss, state, gradients, random numbers.

    ``make`` gives the model, of 3 classes; ``x`` is the shape of its input.
    """
    (model, step), (twin, twin_step) = trainer(make, x), trainer(make, x)
    states = torch.get_rng_state(), torch.get_rng_state()
    reports = []
    for _ in range(4):
        torch.set_rng_state(states[0])
        expected = twin_step()
        eager_state = torch.get_rng_state()
        torch.set_rng_state(states[1])
        with lazyviz.lazy(backend=backend) as graph:
            loss = step()
        reports.append(graph.evaluate())
        states = eager_state, torch.get_rng_state()
        assert torch.equal(*states)  # dropout drew what eager draws
        torch.testing.assert_close(loss, expected)
        for name, value in twin.state_dict().items():  # statistics of the batch norm, too
            torch.testing.assert_close(model.state_dict()[name], value, msg=name)
        for ours, theirs in zip(model.parameters(), twin.parameters()):
            torch.testing.assert_close(ours.grad, theirs.grad)
            assert type(ours) is nn.Parameter and type(ours.grad) is torch.Tensor
    assert [report.fallbacks for report in reports] == [()] * 4
    assert [report.share for report in reports] == [1.0] * 4
    # The first step makes the optimizer's state; a schedule and bias corrections are no new programs.
    assert [report.cache_hit for report in reports] == [False, False, True, True]
    return reports
