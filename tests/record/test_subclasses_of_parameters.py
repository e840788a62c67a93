"""Pending tensors of user-defined classes keep the methods, attributes, and overrides of the class."""

from __future__ import annotations

import copy
import io
import pickle
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._mode_utils import no_dispatch

import lazyviz
from lazyviz.record.lazy_tensor import is_pending

from ..lazy_equals_eager import both


class Packed(nn.Parameter):
    """Quantizes itself when it is moved, as bitsandbytes' and HQQ's weights do."""

    quantized_ones = 0
    seen: list[str] = []  # noqa: RUF012

    def __new__(cls, data=None, requires_grad=False, *, bits=4, scale=None):
        if data is None:
            data = torch.empty(0)
        self = torch.Tensor._make_subclass(cls, data, requires_grad)
        self.bits, self.scale = bits, scale
        self.data = data
        return self

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.chunk:
            parts = super().__torch_function__(func, types, args, kwargs or {})
            return tuple(cls(part, bits=args[0].bits) for part in parts)
        return super().__torch_function__(func, types, args, kwargs or {})

    @property
    def levels(self):
        return 2**self.bits

    @staticmethod
    def grid():
        return "even"

    def quantize(self):
        w = self.data.contiguous()
        self.scale = w.abs().amax() / (self.levels // 2 - 1)
        self.data = (w / self.scale).round().to(torch.int8)
        type(self).quantized_ones += 1
        return self

    def to(self, *args, **kwargs):
        if self.scale is None:
            return self.quantize()
        return type(self)(super().to(*args, **kwargs), bits=self.bits, scale=self.scale)

    def dequantize(self):
        return self.data.float() * self.scale

    def cpu(self):
        return self.to("cpu")

    def __getstate__(self):
        return {**self.__dict__, "data": self.data, "requires_grad": self.requires_grad}

    def __setstate__(self, state):
        self.requires_grad = state["requires_grad"]
        self.bits, self.scale, self.data = state["bits"], state["scale"], state["data"]

    def __deepcopy__(self, memo):
        made = type(self).__new__(type(self))
        made.__setstate__(self.__getstate__())
        made.scale, made.data = copy.deepcopy(self.scale), copy.deepcopy(self.data)
        return made

    def __copy__(self):
        made = type(self).__new__(type(self))
        made.__setstate__(self.__getstate__())
        return made


class Marked(nn.Parameter):
    """Says no more than what it is."""


class Sharded(nn.Parameter):
    """Has an ``__init__`` and attributes, as vLLM's and DeepSpeed's parameters."""

    def __new__(cls, data, dim=0, **options):
        return super().__new__(cls, data, requires_grad=options.get("requires_grad", True))

    def __init__(self, data, dim=0, **options):
        self.ds_shape, self.dim = tuple(data.shape), dim

    def part(self, at, parts):
        return self.data.chunk(parts, self.dim)[at]

    def load(self, loaded):
        self.data.copy_(loaded)


class Slotted(nn.Parameter):
    __slots__ = ("note",)


@dataclass(eq=False, init=False, repr=False)
class Described(nn.Parameter):
    group: int = 3

    def __new__(cls, data, group=3):
        return super().__new__(cls, data)

    def __init__(self, data, group=3):
        self.group = group


class Registering(nn.Parameter):
    names: list[str] = []  # noqa: RUF012

    def __init_subclass__(cls):
        Registering.names.append(cls.__name__)


class Doubled(Registering):
    def __mul__(self, other):
        return torch.mul(self.data, other) * 2

    def __len__(self):
        return 77

    def __call__(self, x):
        return x @ self.data

    def __getattr__(self, name):
        if name == "anything":
            return 5
        raise AttributeError(name)


class Reducing(nn.Parameter):
    def __reduce_ex__(self, protocol):
        return type(self), (self.detach().clone().as_subclass(torch.Tensor), self.requires_grad)


class Meta(type(nn.Parameter)):  # type: ignore[misc]
    made: list[str] = []  # noqa: RUF012

    def __init__(cls, *args, **kwargs):
        super().__init__(*args, **kwargs)
        Meta.made.append(cls.__name__)


class WithMeta(nn.Parameter, metaclass=Meta):
    pass


class Loud(torch.Tensor):
    """A tensor, no parameter, that keeps its class through functions."""

    def shout(self):
        return float(self.sum()) if self.numel() < 0 else "LOUD"


class Unwrapping(torch.Tensor):
    """Has a dispatch of its own, so that it takes no pending value."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        with no_dispatch():
            return func(*args, **(kwargs or {}))


def facts(tensor, *more):
    """What code finds out about a tensor without its values.

    The class of a plain parameter is called Tensor while it is pending (docs/limits.md).
    """
    return (
        type(tensor).__name__.replace("Parameter", "Tensor"),
        type(tensor).__qualname__.replace("Parameter", "Tensor"),
        isinstance(tensor, nn.Parameter),
        [cls.__name__ for cls in (Packed, Marked, Sharded, Loud) if isinstance(tensor, cls)],
        tensor.requires_grad,
        tensor.is_leaf,
        *more,
    )


def weight():
    return torch.arange(12.0).reshape(3, 4) / 7 - 0.8


def trained(p, make=torch.optim.AdamW):
    optimizer = make([p], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (p.sin() * weight()).sum().backward()
        optimizer.step()
    return p, facts(p)


def rebound(cls):
    p = cls(weight())
    p.data = p.data * 3
    return p


def into_class(x, cls):
    p = nn.Parameter(x * 2)
    p.__class__ = cls
    return p, facts(p), p.__class__ == cls


def through_class_state(x):
    before = Packed.quantized_ones
    Packed(x * 2).to("cpu"), Packed(x * 3).to("cpu")
    return Packed.quantized_ones - before, "quantized_ones" in vars(Packed)


def by_class(x):
    handlers = {Marked: "marked", Packed: "packed"}
    counts: Any = defaultdict(int)
    for p in (Marked(x * 2), Packed(x * 2), Packed(x + 1)):
        counts[type(p)] += 1
    return handlers[type(Marked(x * 2))], counts[Packed], counts[Marked], type(Packed(x * 2)) in [Packed]


def in_module(p):
    module = nn.Module()
    module.weight = p
    return module, [facts(q) for q in module.parameters()], module.weight is p, list(module.state_dict())


def saved(item):
    file = io.BytesIO()
    torch.save(item, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "made of pending": lambda x: (p := Packed(x * 2), facts(p, p.bits, p.levels, p.grid())),
    "made by a subclass of Parameter": lambda x: (p := Marked(x * 2), facts(p)),
    "made without gradient": lambda x: (p := Marked(x * 2, requires_grad=False), facts(p)),
    "an __init__": lambda x: (p := Sharded(x * 2, 1), facts(p, p.ds_shape, p.dim), p.part(0, 2)),
    "an __init__ by name": lambda x: (p := Sharded(data=x * 2, dim=1, requires_grad=False), facts(p, p.dim)),
    "a method that writes": lambda x: (p := Sharded(x * 2), p.load(x + 1), p, facts(p)),
    "a property": lambda x: Packed(x * 2, bits=3).levels,
    "an override of to": lambda x: (p := Packed(x * 2).to("cpu"), facts(p, p.bits), p.scale, p.dequantize()),
    "an override of cpu": lambda x: (p := Packed(x * 2).cpu(), facts(p), p.dequantize()),
    "to twice": lambda x: (p := Packed(x * 2).to("cpu").to(torch.int32), facts(p, p.bits), p.scale),
    "a method of eager data": lambda x: (p := Packed(weight()).quantize(), facts(p), p.dequantize() + x),
    "functions that it overrides": lambda x: [
        facts(c, c.bits) for c in torch.chunk(Packed(x * 2, bits=2), 3)
    ],
    "results of functions": lambda x: (r := Packed(x * 2) + 1, type(r).__name__ == "Tensor", facts(r)[2:]),
    "deepcopy of its own": lambda x: (p := copy.deepcopy(Packed(x * 2).to("cpu")), facts(p, p.bits), p.scale),
    "copy of its own": lambda x: (p := copy.copy(Packed(x * 2).to("cpu")), facts(p, p.bits), p.scale),
    "deepcopy of Parameter": lambda x: (p := copy.deepcopy(Marked(x * 2)), facts(p)),
    "deepcopy in a module": lambda x: copy.deepcopy(in_module(Marked(x * 2))[0]),
    "copy of a plain one": lambda x: (p := copy.copy(Marked(x * 2)), facts(p)),
    "pickle": lambda x: (p := pickle.loads(pickle.dumps(Marked(x * 2))), facts(p)),
    "pickle with a state": lambda x: (p := pickle.loads(pickle.dumps(Packed(x * 2))), facts(p, p.bits)),
    "pickle of its own": lambda x: (p := pickle.loads(pickle.dumps(Reducing(x * 2))), facts(p)),
    "copy by __reduce_ex__": lambda x: (p := copy.copy(Reducing(x * 2)), facts(p)),
    "torch.save": lambda x: (p := saved(Packed(x * 2).to("cpu")), facts(p, p.bits), p.scale),
    "state of a module": lambda x: saved(in_module(Marked(x * 2))[0].state_dict()),
    "rebound": lambda x: (p := rebound(Marked), facts(p), x),
    "rebound to another dtype": lambda x: (p := rebound(Marked), setattr(p, "data", p.data.half()), facts(p)),
    "rebound twice": lambda x: (p := rebound(Marked), setattr(p, "data", p.data + 1), p, facts(p)),
    "rebound to memory": lambda x: (p := rebound(Marked), setattr(p, "data", weight()), p, facts(p)),
    "slots": lambda x: (p := Slotted(x * 2), setattr(p, "note", 5), p.note, facts(p)),
    "slots of a rebound one": lambda x: (
        p := Slotted(weight()),
        setattr(p, "note", 4),
        setattr(p, "data", x * 2),
        p.note,
        facts(p),
    ),
    "a dataclass": lambda x: (p := Described(x * 2, 7), p.group, facts(p), Described.group),
    "a registry of subclasses": lambda x: (Doubled(x * 2), list(Registering.names)),
    "a metaclass": lambda x: (p := WithMeta(x * 2), facts(p), list(Meta.made), type(type(p)).__name__),
    "operators": lambda x: (p := Doubled(x * 2), p * 3, len(p), p(x.T), p.anything),
    "attributes that are not there": lambda x: Marked(x * 2).nope,
    "attributes of its own __getattr__": lambda x: Doubled(x * 2).nope,
    "hasattr": lambda x: [hasattr(Packed(x * 2), n) for n in ("quantize", "levels", "grid", "ds_shape")],
    "class state": through_class_state,
    "classes as keys": by_class,
    "super of a class": lambda x: [
        cls.__name__ for cls in (Packed, Marked) if issubclass(type(Packed(x * 2)), cls)
    ],
    "requires_grad_ returns self": lambda x: (p := Marked(x * 2)).requires_grad_(False) is p,
    "requires_grad_": lambda x: (p := Packed(x * 2).requires_grad_(), facts(p, p.bits)),
    "in a module": lambda x: in_module(Packed(x * 2)),
    "in a ParameterList": lambda x: (
        m := nn.ParameterList([Marked(x * 2), Packed(x)]),
        [facts(p) for p in m],
    ),
    "in a ParameterDict": lambda x: (m := nn.ParameterDict({"a": Marked(x * 2)}), facts(m["a"])),
    "moved in a module": lambda x: (m := in_module(Marked(x * 2))[0].double(), facts(m.weight)),
    "moved by its own to": lambda x: (m := in_module(Marked(x * 2))[0].to(torch.float64), facts(m.weight)),
    "loaded into": lambda x: (
        m := in_module(Marked(x * 2))[0],
        m.load_state_dict({"weight": x}),
        facts(m.weight),
    )[::2],
    "assigned by loading": lambda x: (
        m := in_module(Marked(x * 2))[0],
        m.load_state_dict({"weight": x * 3}, assign=True),
        facts(m.weight),
    )[::2],
    "trained": lambda x: trained(Marked(x * 2)),
    "trained after a rebind": lambda x: trained(rebound(Marked), torch.optim.SGD),
    "trained where it has overrides": lambda x: trained(Packed(x * 2, requires_grad=True)),
    "in place": lambda x: (p := Marked(x * 2), p.data.mul_(2), p.detach().add_(1), p, facts(p)),
    "transposed in place": lambda x: (p := Marked(x * 2, False), p.t_(), p, facts(p)),
    "clone": lambda x: (c := Marked(x * 2).clone(), c.detach(), c.is_leaf),
    "views": lambda x: (p := Marked(x * 2), p[0], p.view(-1)[2:].sum(), p.T),
    "a parameter of it": lambda x: nn.Parameter(Marked(x * 2)),
    "a parameter of its data": lambda x: (p := nn.Parameter(Packed(x * 2).data), facts(p)),
    "another class of its data": lambda x: (p := Packed(Marked(x * 2).data), facts(p)),
    "a class that is set": lambda x: into_class(x, Marked),
    "a class with methods that is set": lambda x: (
        *into_class(x, Sharded),
        into_class(x, Sharded)[0].part.__name__,
    ),
    "a class that is taken back": lambda x: (
        p := Marked(x * 2),
        setattr(p, "__class__", nn.Parameter),
        facts(p),
    ),
    "a class that cannot be set": lambda x: setattr(x * 2, "__class__", int),
    "attributes": lambda x: (
        p := nn.Parameter(x * 2),
        p.__dict__.update(ds_tensor=x, ds_id=3),
        p.ds_tensor,
        copy.deepcopy(p).__dict__.get("ds_id"),
        p,
    ),
    "format": lambda x: (f"{Marked(x * 2)}", str(Marked(x * 2))),
    "as_subclass of its class": lambda x: (t := (x * 3).as_subclass(type(Marked(x * 2))), facts(t)),
    "another of its class": lambda x: (p := Marked(x * 2), q := type(p)(x * 3), facts(q)),
    "integers": lambda x: (p := Packed((x * 2).int()), facts(p)),
    "integers with gradients": lambda x: Marked((x * 2).int()),
    "a tensor's subclass": lambda x: (
        t := weight().as_subclass(Loud),
        setattr(t, "data", x * 2),
        t.shout(),
        facts(t),
        facts(t + 1, (t + 1).shout()),
    ),
    "a dispatch of its own": lambda x: (
        t := weight().as_subclass(Unwrapping),
        setattr(t, "data", x * 2),
        type(t).__name__,
        t,
    ),
    "a buffer": lambda x: (
        b := nn.Buffer(x * 2),
        isinstance(b, nn.Buffer),
        b.persistent,
        copy.copy(b).persistent,
    ),
    "a buffer in a module": lambda x: (m := nn.BatchNorm1d(4), m.register_buffer("b", nn.Buffer(x * 2)), m.b)[
        ::2
    ],
    "a placeholder": lambda x: (m := nn.LazyLinear(2), m(x * 2), facts(m.weight)),
    "a placeholder with pending data": lambda x: (
        p := nn.UninitializedParameter(),
        p.materialize((3, 4)),
        p.data.copy_(x * 2),
        p,
        facts(p),
    )[3:],
    "gradients of subclasses": lambda x: torch.autograd.grad((p := Marked(x * 2)).pow(2).sum(), p),
    "hooks": lambda x: (
        p := Marked(x * 2),
        calls := [],
        p.register_hook(lambda g: calls.append(facts(g)[4:]) or g * 2),
        p.pow(2).sum().backward(),
        p,
        calls,
    )[4:],
    "swapped": lambda x: (
        p := Marked(x * 2),
        q := nn.Parameter(x * 3),
        torch.utils.swap_tensors(p, q),
        p,
        q,
        facts(p),
        facts(q),
    )[3:],
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_it_is_as_it_is_in_eager_mode(program):
    both(program, weight, syncs=None, versions=False)
    assert not any("LazyTensor" in cls.__name__ for cls in Packed.__mro__)


def test_a_parameter_that_quantizes_itself_stays_pending():
    with lazyviz.lazy() as graph:
        p = Packed(torch.randn(8, 8)).to("cpu")
        assert is_pending(p) and isinstance(p, Packed) and is_pending(p.scale)
        out = p.dequantize() @ torch.ones(8)
    assert not graph.sync_points and graph.pending == len(graph.nodes)
    graph.evaluate()
    assert type(p) is Packed and not is_pending(p) and not is_pending(out)


def test_what_takes_no_pending_value_is_a_sync_point_that_names_its_class():
    t = weight().as_subclass(Unwrapping)
    with lazyviz.lazy() as graph:
        t.data = torch.ones(3, 4) * 2
        assert type(t) is Unwrapping
    assert [point.cause for point in graph.sync_points] == ["data of a Unwrapping"]


def test_looking_at_one_evaluates_nothing():
    with lazyviz.lazy() as graph:
        p = Packed(torch.ones(2) * 2)
        assert repr(p) == "lazy[2] float32 cpu, pending"
    assert not graph.sync_points


def test_the_class_is_left_as_it_was():
    before = dict(vars(Marked))
    with lazyviz.lazy():
        p = Marked(torch.ones(2) * 2)
        type(p).counted = 5
        assert Marked.counted == 5
        del type(p).counted
    lazyviz.evaluate(p)
    assert dict(vars(Marked)) == before


def test_on_a_planned_gpu_it_keeps_its_methods():
    with lazyviz.lazy(device="A100-40GB") as graph:
        p = Packed(torch.randn(64, 64, device="cuda")).to("cuda")
        assert isinstance(p, Packed) and p.is_cuda and p.dtype is torch.int8 and p.levels == 16
        p.dequantize() @ torch.ones(64, device="cuda")
    assert not graph.sync_points
