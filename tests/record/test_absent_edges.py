"""At the edges of what is planned for a GPU that is not there: what works, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazyviz

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
CUDA = torch.device("cuda", 0)


def names(graph):
    return [node.op._schema.name.removeprefix("aten::") for node in graph.nodes]


def test_a_model_built_in_a_device_context_changes_its_dtype():
    with lazyviz.lazy(device="H100-80GB") as graph:
        with torch.device("cuda"):
            model = nn.Linear(4, 4).to(torch.bfloat16)
            for p in model.parameters():
                p.data = p.data.half()
        torch.set_default_device("cuda")
        try:
            other = nn.Linear(4, 4).half()
        finally:
            torch.set_default_device(None)
        model(other.weight).sum().backward()
    assert {p.device for p in (*model.parameters(), *other.parameters())} == {CUDA}
    assert model.weight.grad.dtype == other.weight.dtype == torch.float16
    assert graph.plan().peak_bytes


# --- running the rest ---------------------------------------------------------------------------


@pytest.mark.parametrize("run", [lazyviz.evaluate, lazyviz.sync, lazyviz.mark_step])
def test_everything_else_can_be_run_while_something_is_planned(run):
    with lazyviz.lazy(device="H100-80GB") as planned:
        x = torch.arange(3.0)
        y = x.cuda() * 2
        back = y.cpu() + 1
    with lazyviz.lazy():
        z = torch.arange(3.0) + 1
    report = run()
    assert report.ops_run == 3
    assert x.tolist() == [0, 1, 2] and z.tolist() == [1, 2, 3]
    assert not lazyviz.is_lazy(z)
    assert lazyviz.is_lazy(y) and lazyviz.is_lazy(back)
    assert planned.pending
    with pytest.raises(lazyviz.AbsentDeviceError, match="H100-80GB"):
        planned.evaluate()
    with pytest.raises(lazyviz.AbsentDeviceError):
        lazyviz.evaluate(back)
