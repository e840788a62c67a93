"""Tensor subclasses: user-defined ones of both kinds, and those of PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map, tree_map_only

from ..lazy_equals_eager import both


class Named(torch.Tensor):
    """Keeps its class through operations, as any subclass does by default."""


class Logged(torch.Tensor):
    """Counts the functions it is given to."""

    calls: list = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


class Scaled(torch.Tensor):
    """A wrapper with a dispatch of its own: a tensor and a factor."""

    @staticmethod
    def __new__(cls, inner, factor):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner, factor):
        self.inner, self.factor = inner, factor

    def __tensor_flatten__(self):
        return ["inner"], self.factor

    @staticmethod
    def __tensor_unflatten__(inner, factor, size, stride):
        return Scaled(inner["inner"], factor)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Scaled, lambda s: s.inner * s.factor, (args, kwargs or {}))
        return tree_map(
            lambda t: Scaled(t, 1.0) if type(t).__name__ == "Tensor" else t,
            func(*args, **kwargs),
        )


class Plain(torch.Tensor):
    """A wrapper that unwraps everything."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Plain, lambda p: p.inner, (args, kwargs or {}))
        return func(*args, **kwargs)


class Mode(torch.overrides.TorchFunctionMode):
    """Turns sine into cosine."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = torch.cos if func is torch.sin else func
        return func(*args, **(kwargs or {}))


class DispatchMode(torch.utils._python_dispatch.TorchDispatchMode):
    """Turns sine into cosine, below autograd."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        func = torch.ops.aten.cos.default if func is torch.ops.aten.sin.default else func
        return func(*args, **(kwargs or {}))


def grid():
    return torch.linspace(-1, 1, 6).reshape(2, 3)


def test_a_plain_subclass_made_outside():
    def program(x):
        y = x * 2
        return y, y.sum(), type(y[0]).__name__, torch.cat([y, grid().as_subclass(torch.Tensor)])

    both(program, lambda: grid().as_subclass(Named), syncs=None)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.as_subclass(Named),
        lambda x: torch.Tensor._make_subclass(Named, x),
        lambda x: Named(x),
        lambda x: Named([1.0, 2.0]),
        lambda x: Named(),
    ],
)
def test_a_plain_subclass_made_inside(make):
    def program(x):
        y = make(x * 3)
        y.note = "kept"
        return y, y + 1, y.note, type(y * 2).__name__

    both(program, grid, syncs=None)


def test_functions_reach_a_subclass_in_eagers_order():
    def program(x):
        Logged.calls.clear()
        y = torch.relu(x * 2).sum(0, keepdim=True) @ torch.ones(3, 1)
        return y, list(Logged.calls)

    both(program, lambda: grid().as_subclass(Logged), syncs=None)


def test_a_subclass_as_a_parameter_trains():
    def program(w, x):
        p = nn.Parameter(w)
        (p * x).sum().backward()
        torch.optim.SGD([p], 0.1).step()
        return p.detach().as_subclass(torch.Tensor), p.grad.as_subclass(torch.Tensor), type(p).__name__

    both(program, lambda: (grid().as_subclass(Named), grid()), syncs=None, versions=False)


def test_a_wrapper_with_its_own_dispatch_around_a_pending_tensor():
    def program(x):
        s = Scaled(x * 2, 3.0)
        t = (s + 1).sin()
        return t.inner, type(t).__name__, t.factor, (t @ x.t()).inner

    both(program, grid, syncs=None)


def test_a_wrapper_made_before_the_block():
    def program(s, x):
        t = s * (x + 1)
        return t.inner, x

    def run(x):
        s = Scaled(x, 2.0)
        return (s * x).inner

    both(run, grid, syncs=None)


def test_a_wrapper_that_unwraps():
    both(lambda x: torch.sin(Plain(x * 2)) + 1, grid)


def test_function_and_dispatch_modes_of_the_user():
    def program(x):
        with Mode():
            a = torch.sin(x * 2)
        with DispatchMode():
            b = torch.sin(x * 2)
        return a, b, torch.sin(x)

    both(program, grid)

    def around(x):
        with DispatchMode(), torch.no_grad(), Mode():
            return torch.sin(x)

    both(around, grid)


def test_a_default_device_and_dtype():
    def program(x):
        with torch.device("meta"):
            m = torch.ones(2) + 1
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            a = torch.ones(3)
        finally:
            torch.set_default_dtype(before)
        torch.set_default_device("cpu")
        b = torch.zeros(2)
        torch.set_default_device(None)
        return a, b, str(m.device), tuple(m.shape), x.to("meta").shape

    both(program, grid)


@pytest.mark.filterwarnings("ignore:.*MaskedTensors? .*")
@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_masked_tensors():
    from torch.masked import as_masked_tensor, masked_tensor

    def program(x):
        m = masked_tensor(x * 2, x > 0)
        total = (m + m).sum(1)
        other = as_masked_tensor(x, x < 0)
        return (
            m.get_data(),
            m.get_mask(),
            total.get_data(),
            total.get_mask(),
            torch.softmax(m, 1).get_data(),
            other.to_tensor(0.0),
        )

    both(program, grid, syncs=None)


def test_masked_functions():
    def program(x):
        mask = x > 0
        return torch.masked.sum(x * 2, 1, mask=mask), torch.masked.softmax(x, 1, mask=mask)

    both(program, grid, syncs=None)


@pytest.fixture
def mesh():
    import torch.distributed as dist

    # Not the "fake" backend: in torch 2.11 its scatter leaves memory as it was.
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield dist.device_mesh.init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_distributed_tensors_on_one_rank(mesh):
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    def program(w, x):
        weight = distribute_tensor(w, mesh, [Shard(0)])
        data = DTensor.from_local(x * 2, mesh, [Replicate()])
        out = torch.relu(data @ weight.t()) + 1
        out.sum().backward()
        return out.full_tensor(), out.to_local(), type(out).__name__

    both(program, lambda: (grid(), grid().requires_grad_()), syncs=None, versions=False)


def test_a_distributed_model_trains(mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def make():
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        return [parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})], grid()

    def program(models, x):
        (model,) = models
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(x).pow(2).sum()
            loss.backward()
            optimizer.step()
        return (
            loss,
            [p.to_local() for p in model.parameters()],
            [p.grad.to_local() for p in model.parameters()],
        )

    def run(x):
        torch.manual_seed(1)
        return program(*make())

    both(run, grid, syncs=None, versions=False)


class Strict(torch.Tensor):
    """Takes tensors and its own kind, and nothing else, as PyTorch's documentation has it."""

    told: list = []  # noqa: RUF012

    @staticmethod
    def __new__(cls, inner, **options):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, **options)

    def __init__(self, inner, **options):
        self.inner = inner

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if not all(issubclass(cls, other) for other in types):
            return NotImplemented
        cls.told.append((func.__name__, len(types)))
        args, kwargs = tree_map_only(Strict, lambda s: s.inner, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if func is torch.ops.aten.detach.default:
            return Strict(result)
        return args[0] if func._schema.is_mutable else result


class Again(torch.Tensor):
    """Calls what it is given once more, which does not come back to it."""

    calls: list = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls.append(func.__name__)
        return torch.overrides.redispatch_function(func, types, args, kwargs or {})


def test_a_subclass_that_takes_no_other_class_takes_pending_tensors():
    def program(x):
        Strict.told.clear()
        s = Strict(x * 2)
        left, right = s + torch.ones(3), torch.ones(2, 3) * s
        mixed = torch.cat([s, x + 1])
        other = torch.zeros(2, 3)
        other.copy_(s)
        return left, right, mixed, other, (x * 3).mul_(s).sum(), list(Strict.told)

    both(program, grid)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_subclass_that_takes_no_other_class_trains(optimizer):
    def program(x):
        p = nn.Parameter(Strict(x.clone(), requires_grad=True))
        step = optimizer([p], 0.1, foreach=False)
        for _ in range(2):
            (p * (x + 1)).sum().backward()
            step.step()
        return p.inner, p.grad

    both(program, grid, syncs=None, versions=False)


@pytest.mark.skipif(not hasattr(torch.overrides, "redispatch_function"), reason="new in torch 2.13")
def test_a_subclass_that_calls_functions_again():
    def program(x, y):
        Again.calls.clear()
        z = x * 2 + y
        z.add_(1)
        p = nn.Parameter(x)
        (p * y).sum().backward()
        made = [z.as_subclass(torch.Tensor), p.grad.as_subclass(torch.Tensor), torch.equal(z, z)]
        return made, list(Again.calls)

    both(program, lambda: (grid().as_subclass(Again), grid()), syncs=None, versions=False)


def test_a_function_mode_that_refuses_a_subclass_is_asked_as_often_as_in_eager_mode():
    class Refuses(TorchFunctionMode):
        asked = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.asked += 1
            if any(cls is not torch.Tensor for cls in types):
                return NotImplemented
            return func(*args, **(kwargs or {}))

    def program(x):
        with Refuses() as mode:
            named = torch.neg(x)
        return named.as_subclass(torch.Tensor), type(named).__name__, mode.asked

    both(program, lambda: grid().as_subclass(Named), syncs=None)
