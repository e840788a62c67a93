"""Tracers and function transforms in a block for a planned GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import lazyviz

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present"),
    # Forward mode's formulas are compiled by TorchScript, in PyTorch itself.
    pytest.mark.filterwarnings("ignore:`torch.jit"),
]


def model():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()


def product(x):
    return (x @ x.t()).relu()


TRACERS = {
    "torch.export": lambda model, x: torch.export.export(model, (x,)).module(),
    "torch.jit.trace": lambda model, x: torch.jit.trace(model, x),
    "tracing aten": lambda model, x: make_fx(product)(x),
}


@pytest.mark.parametrize("cause", TRACERS)
def test_what_is_traced_on_the_cpu_is_planned_on_the_gpu(cause):
    with lazyviz.lazy(device="A100-40GB") as graph:
        earlier = torch.randn(8, 8, device="cuda") + 1  # stays planned
        traced = TRACERS[cause](model(), torch.randn(16, 64)).to("cuda")
        x = torch.randn(16, 64)
        result = traced(x.cuda())
        TRACERS[cause](model(), x)  # what the GPU would read of it is no reason against that
        assert result.is_cuda and lazyviz.is_lazy(earlier)
    assert graph.plan().devices["cuda:0"].peak_bytes > 16 * 64 * 4


@pytest.mark.parametrize("cause", TRACERS)
def test_a_trace_of_planned_tensors_says_where_to_trace(cause):
    with lazyviz.lazy(device="A100-40GB"):
        planned = model().cuda()
        x = torch.randn(16, 64, device="cuda")
        with pytest.raises(lazyviz.AbsentDeviceError, match=f"{cause}.* trace it on the CPU, and move"):
            TRACERS[cause](planned, x)


def hessian(device):
    layers = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 1)).to(device)
    x = torch.randn(64, 20, device=device)
    parameters = dict(layers.named_parameters())

    def loss(parameters):
        return torch.func.functional_call(layers, parameters, (x,)).square().mean()

    return torch.func.hessian(loss)(parameters)


def jacobian_forward(device):
    weight = torch.randn(100, 50, device=device)
    return torch.func.jacfwd(lambda x: torch.tanh(x @ weight))(torch.randn(100, device=device))


def jacobian_backward(device):
    weight = torch.randn(100, 50, device=device)
    return torch.func.jacrev(lambda x: torch.tanh(x @ weight))(torch.randn(100, device=device))


def dual(device):
    with torch.autograd.forward_ad.dual_level():
        pair = [torch.randn(256, 256, device=device) for _ in range(2)]
        x = torch.autograd.forward_ad.make_dual(*pair)
        return torch.autograd.forward_ad.unpack_dual((x @ x).softmax(-1).log().sum()).tangent


def of_samples(device):
    layer = nn.Linear(64, 8).to(device)
    parameters = {name: each.detach() for name, each in layer.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(layer, parameters, (x,)).square().sum()

    return torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, torch.randn(16, 64, device=device))


@pytest.mark.parametrize("program", [hessian, jacobian_forward, jacobian_backward, dual, of_samples])
def test_transforms_take_on_the_gpu_what_they_take_on_the_cpu(program):
    with lazyviz.lazy() as here:
        expected = program("cpu")
    with lazyviz.lazy(device="A100-40GB") as there:
        found = program("cuda")
    assert there.plan().devices["cuda:0"].peak_bytes == here.plan().eager_peak_bytes
    del expected, found


@pytest.mark.slow
def test_forward_mode_begins_in_a_block_for_a_planned_gpu():
    """PyTorch compiles its formulas with TorchScript at a process's first tangent."""
    program = (
        "import torch, lazyviz\n"
        "with lazyviz.lazy(device='A100-40GB') as graph:\n"
        "    x = torch.randn(4, 4, device='cuda')\n"
        "    y, tangent = torch.func.jvp(torch.sin, (x,), (x,))\n"
        "assert tangent.is_cuda and graph.plan().peak_bytes\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_scripts_may_make_tensors():
    def make(n: int) -> torch.Tensor:
        return torch.zeros(n) + torch.ones(n)

    with lazyviz.lazy(device="A100-40GB"):
        scripted = torch.jit.script(make)
    assert scripted(3).tolist() == [1, 1, 1]


def test_loops_of_higher_order_operators_are_planned_as_eager_runs_them():
    from torch._higher_order_ops.scan import scan

    with lazyviz.lazy(device="A100-40GB", assume={"*": True}) as graph:
        x = torch.randn(16, 64, device="cuda")
        carried, rows = scan(lambda c, y: (c + y, c * y), torch.zeros(64, device="cuda"), x)
        chosen = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        with pytest.raises(lazyviz.AbsentDeviceError, match="torch.cond of operands that require"):
            torch.cond(x.sum() > 0, torch.sin, torch.cos, (x.detach().requires_grad_(),))
    assert carried.shape == (64,) and rows.shape == chosen.shape == (16, 64)
    assert "planned as run by eager PyTorch" in str(graph.plan().explain())
