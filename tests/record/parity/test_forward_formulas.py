"""Forward-mode formulas that ATen changes for tensor subclasses are bit-equal to eager, at a sync point."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import lazyviz
from lazyviz.record.parity.derivative_formulas import FORWARD

from ...bit_equality import difference

# PyTorch scripts decompositions at the first dual tensor.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit")

CASES = {
    "native_batch_norm": lambda: nn.BatchNorm1d(7),
    "native_batch_norm, evaluating": lambda: nn.BatchNorm1d(7).eval(),
    "native_batch_norm, of instances": lambda: nn.InstanceNorm1d(5, affine=True),
    "native_group_norm": lambda: nn.GroupNorm(2, 6),
    "native_layer_norm": lambda: nn.LayerNorm(7),
    "prod": lambda: torch.prod,
    "prod of rows": lambda: lambda x: x.prod(1),
}


def seeded(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def derivative(make, shape, dtype=torch.float32):
    """A result, its tangent, and the buffers that the function has changed."""
    torch.manual_seed(3)
    function = make()
    if isinstance(function, nn.Module):
        function.to(dtype)
    x, tangent = seeded(*shape, dtype=dtype), seeded(*shape, seed=1, dtype=dtype)
    with fwAD.dual_level():
        result = function(fwAD.make_dual(x * 0.7, tangent.sin()))
        primal, tangent = fwAD.unpack_dual(result)
        # A copy: tangents end with their level.
        return primal + 0, tangent + 0, *getattr(function, "buffers", list)()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_forward_mode_derivative_has_eager_bits(name, dtype):
    shape = (9, 6, 5) if "group" in name else (9, 5, 8) if "instances" in name else (9, 7)
    expected = derivative(CASES[name], shape, dtype)
    with lazyviz.lazy() as graph:
        result = derivative(CASES[name], shape, dtype)
        after = result[0] * 2
    assert lazyviz.is_lazy(after), "recording goes on"
    graph.evaluate()
    assert difference(expected, result) is None
    operator = name.split()[0].rstrip(",")
    assert [point.cause for point in graph.sync_points] == [f"forward-mode derivative of {operator}"]


@pytest.mark.parametrize("name", CASES)
def test_without_a_tangent_it_is_deferred(name):
    function = CASES[name]()
    x = seeded(9, 6, 8) if "group" in name else seeded(9, 5, 7)
    if "native_batch_norm" in name and "instances" not in name:
        x = x[:, 0]
    with lazyviz.lazy() as graph, fwAD.dual_level():
        result = function(x)
    assert lazyviz.is_lazy(result) and not graph.sync_points


def test_outside_of_the_block_while_something_is_pending():
    expected = derivative(nn.Identity, (9, 7))[0], *derivative(CASES["native_layer_norm"], (9, 7))
    with lazyviz.lazy():
        pending = torch.ones(3) * 2
    found = derivative(nn.Identity, (9, 7))[0], *derivative(CASES["native_layer_norm"], (9, 7))
    assert difference(expected, found) is None
    assert pending.tolist() == [2, 2, 2]


def test_after_an_error_recording_goes_on():
    with lazyviz.lazy() as graph:
        with fwAD.dual_level(), pytest.raises(IndexError):
            fwAD.make_dual(torch.ones(3), torch.ones(3)).prod(5)
        later = torch.ones(2) + 1
    assert lazyviz.is_lazy(later)
    graph.evaluate()


def test_functional_derivatives_have_eager_bits_and_are_deferred():
    """functorch's own tensors are subclass-like in eager mode, too."""
    norm, x, tangent = nn.LayerNorm(7), seeded(9, 7), seeded(9, 7, seed=1)
    expected = torch.func.jvp(norm, (x,), (tangent,))
    with lazyviz.lazy() as graph:
        result = torch.func.jvp(norm, (x,), (tangent,))
    assert not graph.sync_points
    graph.evaluate()
    assert difference(expected, result) is None


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def dual_results(op, sample, mode):
    """Results and tangents of an OpInfo sample with random tangents, as plain tensors."""
    torch.manual_seed(0)
    flat, spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
    with fwAD.dual_level():
        for at, item in enumerate(flat):
            if isinstance(item, torch.Tensor):
                flat[at] = item.detach().clone()
                if item.is_floating_point():
                    flat[at] = fwAD.make_dual(flat[at], torch.randn_like(flat[at]))
        args, kwargs = pytree.tree_unflatten(flat, spec)
        with mode:
            outputs = [item for item in pytree.tree_leaves(op.op(*args, **kwargs)) if torch.is_tensor(item)]
        pairs = [part for item in outputs for part in fwAD.unpack_dual(item)]
        return [None if part is None else part.clone() for part in pairs]


@pytest.mark.slow
def test_no_other_formula_differs_under_a_mode(request):
    """A sweep of PyTorch's own samples, or of every fifth operator's; what is found belongs in the list."""
    everything = request.config.getoption("--all")
    invocations = pytest.importorskip("torch.testing._internal.common_methods_invocations")
    own = {name.partition(".")[0] for name in FORWARD}
    through = {f"nn.functional.{kind}_norm" for kind in ("batch", "group", "instance", "layer")}
    found, compared = set(), 0
    for op in invocations.op_db if everything else invocations.op_db[::5]:
        if not op.supports_forward_ad or torch.float64 not in op.supported_dtypes("cpu"):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for sample in list(op.sample_inputs("cpu", torch.float64))[:4]:
                try:
                    first, again = (dual_results(op, sample, nullcontext()) for _ in range(2))
                except (RuntimeError, NotImplementedError):
                    continue  # not for this sample, in eager mode either
                if op.name == "linalg.lstsq" or difference(first, again) is not None:
                    continue  # LAPACK's results may depend on the alignment of memory
                compared += 1
                if difference(first, dual_results(op, sample, Nothing())) is not None:
                    found.add(op.name)
    assert compared > (1000 if everything else 100)
    assert found <= own | through | {"masked.prod"}, found - own - through
