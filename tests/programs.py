"""A small language of PyTorch programs, as data, and its interpreter.

A program is a list of instructions ``(name, a, b, c)``.  The numbers choose variables
(counted from the newest) and variants, modulo what there is, so that every list is a
program and taking anything out of one leaves a program: hypothesis shrinks them well.
Run lazily, ``open`` and ``close`` are blocks and some instructions evaluate parts; run
eagerly these do nothing, and everything else has to come out the same.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

import lazyviz
from lazyviz.session import lazy_graph
from lazyviz.torch_internals import private_api

from .bit_equality import difference

Instruction = tuple[str, int, int, int]
Program = list[Instruction]

_instructions: dict[str, Callable[[Machine, int, int, int], None]] = {}
weights: dict[str, int] = {}

_SHAPES = ((4, 3), (3,), (2, 3), (), (4, 1), (2, 2, 3), (0,), (6,))
_POINTWISE: tuple[Callable[[Any], Any], ...] = (
    lambda x: x + 1,
    lambda x: x * 2,
    torch.sin,
    torch.relu,
    lambda x: x / 3,
    lambda x: 1 - x,
    torch.sigmoid,
    lambda x: x.exp().clamp(max=5),
    lambda x: x.to(torch.float64),
    lambda x: x > 0,
    lambda x: x.abs().sqrt(),
    lambda x: x.contiguous(),
    lambda x: x.clone(),
    lambda x: x.softmax(-1),
    lambda x: x.float(),
    lambda x: x.cumsum(-1),
    lambda x: (x + 1).detach_(),
)
_VIEWS: tuple[Callable[[Any, int], Any], ...] = (
    lambda x, n: x[n % 3 :],
    lambda x, n: x[..., : 1 + n % 3],
    lambda x, n: x.t(),
    lambda x, n: x.unsqueeze(n % 2),
    lambda x, n: x.expand(2, *x.shape),
    lambda x, n: x.reshape(-1),
    lambda x, n: x.view(-1),
    lambda x, n: x.diagonal(),
    lambda x, n: x.as_strided((2, 2), (n % 3, 1), n % 4),
    lambda x, n: x.chunk(2)[n % 2],
    lambda x, n: x.unbind()[n % 2],
    lambda x, n: x.squeeze(),
    lambda x, n: x.select(-1, n % 3),
    lambda x, n: x.transpose(0, -1),
    lambda x, n: x[:: 1 + n % 3],
    lambda x, n: x.view_as(x),
    lambda x, n: x.detach(),
    lambda x, n: x.split(1 + n % 2)[-1],
    lambda x, n: x.flatten(),
    lambda x, n: x.unfold(0, 2, 1),
    lambda x, n: x.mT,
    lambda x, n: x.view(torch.int32) if x.dtype == torch.float32 and not x.requires_grad else x.view_as(x),
    lambda x, n: x.movedim(0, -1),
    lambda x, n: x.as_strided((3,), (1,)),
)
_RESTRUCTURE: tuple[Callable[[Any, int], Any], ...] = (
    lambda x, n: x.t_(),
    lambda x, n: x.unsqueeze_(0),
    lambda x, n: x.squeeze_(),
    lambda x, n: x.transpose_(0, -1),
    lambda x, n: x.as_strided_((2,), (1,)),
)
_IN_PLACE: tuple[Callable[[Any, int], Any], ...] = (
    *_RESTRUCTURE,
    lambda x, n: x.add_(1),
    lambda x, n: x.mul_(n - 3),
    lambda x, n: x.zero_(),
    lambda x, n: x.fill_(n),
    lambda x, n: x.sin_(),
    lambda x, n: x.clamp_(-1, 1),
    lambda x, n: x.relu_(),
    lambda x, n: x.masked_fill_(x > 0, n),
    lambda x, n: x.cumsum_(0),
    lambda x, n: x.neg_(),
)
_BINARY: tuple[Callable[[Any, Any], Any], ...] = (
    torch.add,
    torch.mul,
    torch.matmul,
    lambda x, y: torch.cat([x, y]),
    lambda x, y: torch.where(torch.gt(x, y), x, y),
    lambda x, y: torch.stack([x, y]),
    torch.maximum,
    lambda x, y: x - 2 * y,
    lambda x, y: x @ y.t(),
    lambda x, y: torch.nn.functional.linear(x, y),
    lambda x, y: torch.addcmul(x, y, y),
    lambda x, y: x[torch.gt(y, 0)],
    lambda x, y: torch.nn.functional.l1_loss(x, y),
    lambda x, y: torch.broadcast_tensors(x, y)[0],
)


def _sized(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``x``, or one to be resized: an error halfway through an ``out=`` would leave it as the heap was."""
    return x if x.shape == y.shape else x.clone()


_IN_PLACE_BINARY: tuple[Callable[[Any, Any, int], Any], ...] = (
    lambda x, y, n: x.add_(y),
    lambda x, y, n: x.mul_(y),
    lambda x, y, n: x.copy_(y),
    lambda x, y, n: x.add_(y, alpha=n),
    lambda x, y, n: x.__setitem__(slice(n % 3, None), y),
    lambda x, y, n: x.__setitem__(n % 2, y),
    lambda x, y, n: x.index_put_((torch.tensor([0, -1]),), y, accumulate=n % 2 == 1),
    lambda x, y, n: x.index_add_(0, torch.tensor([0]), y),
    lambda x, y, n: x.addcmul_(y, y),
    lambda x, y, n: x.lerp_(y, 0.5),
    lambda x, y, n: x.__setitem__(x > 0, 0.5),
    lambda x, y, n: torch.add(y, 1, out=_sized(x, y)),
    lambda x, y, n: torch.mul(y, y, out=_sized(x, y)),
    lambda x, y, n: torch.sin(y, out=_sized(x, y)),
    lambda x, y, n: torch._foreach_add_([x, torch.ones(2)], 1),
    lambda x, y, n: torch._foreach_mul_([x], [y]),
    lambda x, y, n: x.__ior__(y > 0) if x.dtype == torch.bool else x.__isub__(y),
)
_REDUCTIONS: tuple[Callable[[Any], Any], ...] = (
    lambda x: x.sum(),
    lambda x: x.mean(0),
    lambda x: x.max(),
    lambda x: x.max(-1)[0],
    lambda x: x.argmax(),
    lambda x: x.norm(),
    lambda x: x.sum(0, keepdim=True),
    lambda x: x.var(),
    lambda x: x.sort(-1)[0],
    lambda x: x.all(),
    lambda x: x.prod(),
    lambda x: (x > 0).sum(),
    lambda x: x.topk(1, 0)[1],
    lambda x: x.nonzero(),
)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Double(torch.autograd.Function):
    """Doubles its argument in place."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


# Kernels differ in the version that a new result begins with: only the writes since count.
_VERSIONS = re.compile(r"is at version (\d+); expected version (\d+)")


def _writes(versions: re.Match[str]) -> str:
    return f"has {int(versions[1]) - int(versions[2])} writes"


class Machine:
    """The state of one run of a program: variables, generators, NumPy buffers, and a log of what was seen."""

    def __init__(self, *, lazy: bool) -> None:
        self.lazy = lazy
        # By id: the version a variable began with, which for a result of an operator means nothing.
        self.began: dict[int, int] = {}
        torch.manual_seed(11)
        self.log: list[Any] = []
        self.hooked: list[torch.Tensor] = []
        self.graphs: list[lazyviz.LazyGraph] = []
        self.blocks: list[contextlib.AbstractContextManager] = []
        self.generators = [torch.Generator().manual_seed(5), torch.Generator().manual_seed(6)]
        self.states: list[torch.Tensor] = []
        self.buffer = np.arange(12, dtype=np.float32) - 5
        self.dropout = torch.nn.Dropout(0.5)
        self.norm = torch.nn.BatchNorm1d(3)
        self.linear = torch.nn.Linear(3, 3)
        self.optimizers: list[torch.optim.Optimizer] = []
        start = torch.arange(12.0).reshape(4, 3)
        self.variables: list[torch.Tensor] = [
            torch.from_numpy(self.buffer).view(4, 3),
            torch.tensor([2, 0, 1]),
            (start[:2] / 7).clone(),
            torch.nn.Parameter(start.sin()),
            start.cos().requires_grad_(),
            start - 4,
        ]

    def __getitem__(self, at: int) -> torch.Tensor:
        return self.variables[-1 - at % len(self.variables)]

    def keep(self, *results: Any) -> None:
        for result in results:
            if not any(result is variable for variable in self.variables):
                self.began[id(result)] = result._version
            self.variables.append(result)
        del self.variables[:-24]

    def writes_to(self, variable: torch.Tensor) -> int:
        return variable._version - self.began.get(id(variable), 0)

    def saw(self, what: Any) -> None:
        self.log.append(what)

    def run(self, program: Program) -> None:
        for name, a, b, c in program:
            try:
                _instructions[name](self, a, b, c)
            except Exception as error:
                message = "" if isinstance(error, IndexError) else str(error).partition("\n")[0]
                message = _VERSIONS.sub(_writes, message)
                self.log.append((name, type(error).__name__, message))
                if "storage that is not resizable" in str(error):
                    # PyTorch leaves a tensor that reaches out of its memory: nothing to compare.
                    del self.variables[-1 - a % len(self.variables)]
        while self.blocks:
            self.blocks.pop().__exit__(None, None, None)


def instruction(weight: int = 1) -> Callable[[Any], Any]:
    def register(function: Callable[[Machine, int, int, int], None]) -> Any:
        name = function.__name__.strip("_")
        _instructions[name] = function
        weights[name] = weight
        return function

    return register


def _mode(n: int) -> Any:
    return torch.no_grad() if n % 3 == 0 else contextlib.nullcontext()


# --- blocks and evaluation: nothing to do in an eager run ---------------------------


@instruction(6)
def _open(m: Machine, a: int, b: int, c: int) -> None:
    if m.lazy and len(m.blocks) < 2:
        block = lazyviz.lazy()
        m.graphs.append(block.__enter__())
        m.blocks.append(block)


@instruction(3)
def _close(m: Machine, a: int, b: int, c: int) -> None:
    if m.blocks:
        m.blocks.pop().__exit__(None, None, None)


@instruction(2)
def _evaluate(m: Machine, a: int, b: int, c: int) -> None:
    if m.lazy:
        lazyviz.evaluate(m[a])
        assert not lazyviz.is_lazy(m[a])


@instruction(1)
def _evaluate_graph(m: Machine, a: int, b: int, c: int) -> None:
    if m.lazy and m.graphs:
        m.graphs[a % len(m.graphs)].evaluate()


@instruction(1)
def _sync(m: Machine, a: int, b: int, c: int) -> None:
    if m.lazy:
        lazyviz.sync()


@instruction(1)
def _drop_graph(m: Machine, a: int, b: int, c: int) -> None:
    if m.lazy and m.graphs:
        m.graphs.pop(a % len(m.graphs))


@instruction(1)
def _next_cell(m: Machine, a: int, b: int, c: int) -> None:
    if m.lazy and not m.blocks:
        lazy_graph.cell_boundary()


@instruction(1)
def _look(m: Machine, a: int, b: int, c: int) -> None:
    repr(m[a])


# --- values, views and writes ---------------------------------------------------------


@instruction(6)
def _pointwise(m: Machine, a: int, b: int, c: int) -> None:
    with _mode(c):
        m.keep(_POINTWISE[b % len(_POINTWISE)](m[a]))


@instruction(12)
def _view(m: Machine, a: int, b: int, c: int) -> None:
    m.keep(_VIEWS[(b + 16 * (c // 8)) % len(_VIEWS)](m[a], c))


@instruction(10)
def _in_place(m: Machine, a: int, b: int, c: int) -> None:
    with _mode(c):
        change = _IN_PLACE[b % len(_IN_PLACE)]
        # Views of what is restructured in place find their history by replaying themselves, which can fail.
        if not (change in _RESTRUCTURE and m[a].requires_grad):
            change(m[a], c)


@instruction(5)
def _binary(m: Machine, a: int, b: int, c: int) -> None:
    m.keep(_BINARY[c % len(_BINARY)](m[a], m[b]))


@instruction(10)
def _write(m: Machine, a: int, b: int, c: int) -> None:
    x, y = m[a], m[b]
    if not x.is_floating_point():
        # A slice of integers that is given a number with a gradient: PyTorch makes the integers require
        # gradients, and a tensor subclass refuses it.
        y = y.detach()
    with _mode(a + b):
        _IN_PLACE_BINARY[(c + a) % len(_IN_PLACE_BINARY)](x, y, c)


@instruction(4)
def _reduce(m: Machine, a: int, b: int, c: int) -> None:
    m.keep(_REDUCTIONS[b % len(_REDUCTIONS)](m[a]))


@instruction(3)
def _new(m: Machine, a: int, b: int, c: int) -> None:
    shape = _SHAPES[a % len(_SHAPES)]
    factories = (
        lambda: torch.ones(shape),
        lambda: torch.zeros(shape),
        lambda: torch.full(shape, b / 3),
        lambda: torch.arange(float(a)),
        lambda: torch.arange(a),
        lambda: torch.tensor([[a, b], [b, c]], dtype=torch.float32),
        lambda: torch.tensor(float(b)),
        lambda: torch.eye(3),
    )
    m.keep(factories[c % len(factories)]())
    if b % 3 == 0 and m[0].is_floating_point():
        m[0].requires_grad_()


@instruction(1)
def _out(m: Machine, a: int, b: int, c: int) -> None:
    out = m[a].detach().clone()
    results: tuple[Callable[[], Any], ...] = (
        lambda: torch.cat([m[b], m[b]], out=out),
        lambda: torch.add(m[b], 1, out=out),
        lambda: torch.matmul(m[b], m[b].t(), out=out),
        lambda: torch.arange(c, out=out),
        lambda: torch.sum(m[b], 0, out=out),
    )
    m.keep(results[c % len(results)](), out)


@instruction(5)
def _delete(m: Machine, a: int, b: int, c: int) -> None:
    if len(m.variables) > 1:
        del m.variables[-1 - a % len(m.variables)]


@instruction(1)
def _resize(m: Machine, a: int, b: int, c: int) -> None:
    if m[a].numel() >= 2 and m[a].is_contiguous():  # or it could grow, and show what the heap held
        m[a].resize_(2)


@instruction(1)
def _exchange_memory(m: Machine, a: int, b: int, c: int) -> None:
    if not m[a].requires_grad:  # see _RESTRUCTURE
        m[a].set_(m[b].detach().clone() if c % 2 else m[b].detach())


@instruction(2)
def _data(m: Machine, a: int, b: int, c: int) -> None:
    if c % 3 == 0:
        m.keep(m[a].data)
    elif c % 3 == 1:
        m[a].data.mul_(2)
    elif m[a].shape == m[b].shape and m[a].dtype == m[b].dtype:  # or gradients would read beyond their memory
        m[a].data = m[b].detach() if c % 2 else m[b].detach() + 1


# --- memory that NumPy shares ---------------------------------------------------------


@instruction(2)
def _write_numpy(m: Machine, a: int, b: int, c: int) -> None:
    m.buffer[a % 12] = b


@instruction(1)
def _read_numpy(m: Machine, a: int, b: int, c: int) -> None:
    m.saw(repr(m.buffer.tolist()))


@instruction(1)
def _from_numpy(m: Machine, a: int, b: int, c: int) -> None:
    m.keep(torch.from_numpy(m.buffer))


@instruction(1)
def _to_numpy(m: Machine, a: int, b: int, c: int) -> None:
    array = m[a].detach().numpy()
    m.saw(repr(array.tolist()))
    if c % 2 and array.size:
        array.flat[0] = 3


# --- random numbers -------------------------------------------------------------------


@instruction(4)
def _draw(m: Machine, a: int, b: int, c: int) -> None:
    shape = _SHAPES[a % len(_SHAPES)]
    generator = (None, m.generators[0], m.generators[1])[b % 3]
    draws = (
        lambda: torch.rand(shape, generator=generator),
        lambda: torch.randn(shape, generator=generator),
        lambda: torch.randint(0, 5, shape, generator=generator),
        lambda: torch.randperm(4, generator=generator),
        lambda: torch.bernoulli(torch.full(shape, 0.5), generator=generator),
        lambda: torch.normal(torch.zeros(shape), 1.0, generator=generator),
        lambda: torch.rand_like(m[a]),
        lambda: torch.multinomial(torch.ones(5), 2, generator=generator),
    )
    m.keep(draws[c % len(draws)]())


@instruction(3)
def _draw_in_place(m: Machine, a: int, b: int, c: int) -> None:
    generator = (None, m.generators[0], m.generators[1])[b % 3]
    with _mode(c):
        (
            lambda: m[a].normal_(generator=generator),
            lambda: m[a].uniform_(generator=generator),
            lambda: m[a].bernoulli_(0.5, generator=generator),
            lambda: m[a].random_(0, 9, generator=generator),
        )[c % 4]()


@instruction(2)
def _dropout(m: Machine, a: int, b: int, c: int) -> None:
    if not m[a].is_floating_point():
        return  # an error after the draw
    m.keep(m.dropout(m[a]) if b % 2 else torch.nn.functional.dropout(m[a], 0.3, inplace=c % 3 == 0))


@instruction(2)
def _seed(m: Machine, a: int, b: int, c: int) -> None:
    if b % 3:
        m.generators[a % 2].manual_seed(c)
    else:
        torch.manual_seed(c)


@instruction(1)
def _generator_state(m: Machine, a: int, b: int, c: int) -> None:
    generator = m.generators[a % 2]
    if b % 2 and m.states:
        generator.set_state(m.states[c % len(m.states)])
    else:
        m.states.append(generator.get_state())


@instruction(1)
def _default_state(m: Machine, a: int, b: int, c: int) -> None:
    if b % 3 == 0:
        m.saw(torch.initial_seed())
    elif b % 3 == 1 and m.states:
        torch.set_rng_state(m.states[c % len(m.states)])
    else:
        m.states.append(torch.get_rng_state())


@instruction(1)
def _fork_rng(m: Machine, a: int, b: int, c: int) -> None:
    with torch.random.fork_rng(devices=[]):
        if b % 2:
            torch.manual_seed(c)
        m.keep(torch.rand(3))


# --- autograd -------------------------------------------------------------------------


def _total(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 0 else (x * 0.5).sum()


@instruction(6)
def _backward(m: Machine, a: int, b: int, c: int) -> None:
    _total(m[a]).backward(retain_graph=b % 2 == 0, create_graph=c % 8 == 7)


@instruction(3)
def _grad(m: Machine, a: int, b: int, c: int) -> None:
    results = torch.autograd.grad(
        _total(m[a]), [m[b]], retain_graph=True, create_graph=c % 2 == 1, allow_unused=True
    )
    m.keep(*[result for result in results if result is not None])


@instruction(1)
def _requires_grad(m: Machine, a: int, b: int, c: int) -> None:
    m.keep(m[a].detach().clone().requires_grad_())
    m.linear.bias.requires_grad_(c % 3 != 0)


@instruction(1)
def _retain_grad(m: Machine, a: int, b: int, c: int) -> None:
    m[a].retain_grad()


@instruction(2)
def _hook(m: Machine, a: int, b: int, c: int) -> None:
    hooked = m.hooked

    def replace(grad):
        return grad * 3

    def look(grad):
        hooked.append(grad.clone())

    def change(grad):
        grad.mul_(0.5)

    def step(leaf):
        with torch.no_grad():
            leaf.sub_(leaf.grad)
        leaf.grad = None

    if m[a].requires_grad and m[a].is_leaf and m[a]._is_view():
        return  # PyTorch itself crashes
    if c % 4 == 3:
        m[a].register_post_accumulate_grad_hook(step)
    else:
        m[a].register_hook((replace, look, change)[c % 4])


@instruction(2)
def _use_grad(m: Machine, a: int, b: int, c: int) -> None:
    if m[a].is_leaf and m[a].grad is not None:
        if c % 4 == 0:
            m.keep(m[a].grad)
        elif c % 4 == 1:
            m[a].grad = None
        elif c % 4 == 2:
            with torch.no_grad():
                m[a].grad.zero_()
        else:
            with torch.no_grad():
                m[a].sub_(m[a].grad, alpha=0.5)


@instruction(1)
def _assign_grad(m: Machine, a: int, b: int, c: int) -> None:
    if m[a].is_leaf:
        m[a].grad = m[b].detach()


@instruction(1)
def _custom_function(m: Machine, a: int, b: int, c: int) -> None:
    m.keep(Square.apply(m[a]) if c % 2 else Double.apply(m[a]))


@instruction(1)
def _checkpointed(m: Machine, a: int, b: int, c: int) -> None:
    def inside(x):
        return torch.nn.functional.dropout(x.sin(), 0.5) * x

    m.keep(checkpoint(inside, m[a], use_reentrant=c % 2 == 0))


@instruction(1)
def _inference(m: Machine, a: int, b: int, c: int) -> None:
    with torch.inference_mode():
        result = (m[a].detach() * 2)[:2] + torch.rand(1)
    m.keep(result.clone())  # inference tensors themselves have rules of their own


@instruction(1)
def _parameter(m: Machine, a: int, b: int, c: int) -> None:
    m.keep(torch.nn.Parameter(m[a].detach() if c % 2 else m[a]))


@instruction(2)
def _module(m: Machine, a: int, b: int, c: int) -> None:
    if c % 4 == 3:
        m.norm.train(b % 2 == 0)
    m.keep(m.norm(m[a]) if c % 2 else m.linear(m[a]))


@instruction(2)
def _optimizer(m: Machine, a: int, b: int, c: int) -> None:
    if not m.optimizers or b % 4 == 0:
        kind = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)[c % 3]
        options = {"momentum": 0.9} if c % 3 == 0 else {}
        m.optimizers.append(kind([m[a], m.linear.weight], lr=0.1, **options))
    elif c % 3 == 0:
        m.optimizers[a % len(m.optimizers)].zero_grad(set_to_none=b % 2 == 0)
    else:
        m.optimizers[a % len(m.optimizers)].step()


# --- reads ----------------------------------------------------------------------------


@instruction(2)
def _read(m: Machine, a: int, b: int, c: int) -> None:
    x = m[a].detach()
    reads: tuple[Callable[[], Any], ...] = (
        lambda: x.reshape(-1)[b % max(1, x.numel())].item(),
        lambda: x.tolist(),
        lambda: str(x),
        lambda: bool(x.sum() > 0),
        lambda: float(x.sum()),
        lambda: bool(torch.equal(x, m[b])),
        lambda: x.is_set_to(m[b]),
        lambda: f"{x.sum():.3f}",
        lambda: torch.tensor([x.sum(), x.sum()]).tolist(),
    )
    m.saw(repr(reads[c % len(reads)]()))


@instruction(2)
def _branch(m: Machine, a: int, b: int, c: int) -> None:
    if m[a].sum() > 0:
        m.keep(m[a] * 2)
    else:
        m.keep(m[b] - 1)


@instruction(1)
def _copy(m: Machine, a: int, b: int, c: int) -> None:
    if c % 3 == 0:
        m.keep(copy.deepcopy(m[a]))
    elif c % 3 == 1:
        m.keep(pickle.loads(pickle.dumps(m[a].detach())))
    else:
        memory = io.BytesIO()
        torch.save(m[a], memory)
        memory.seek(0)
        m.keep(torch.load(memory))


@instruction(1)
def _on_a_thread(m: Machine, a: int, b: int, c: int) -> None:
    seen: list[Any] = []
    x = m[a].detach()

    def work() -> None:
        try:
            seen.append((x + 1).tolist() if c % 2 else x.add_(1).tolist())
        except Exception as error:
            seen.append(type(error).__name__)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    m.saw(repr(seen))


# --- comparison -----------------------------------------------------------------------


def disagreement(program: Program) -> str | None:
    """What differs between an eager and a lazy run of ``program``, or None."""
    eager = Machine(lazy=False)
    eager.run(program)
    eager_after = _after(eager)
    lazy = Machine(lazy=True)
    try:
        lazy.run(program)
        return _compare(eager, eager_after, lazy)
    finally:
        for block in reversed(lazy.blocks):
            block.__exit__(None, None, None)
        lazy_graph.reset()


def _after(m: Machine) -> list[torch.Tensor]:
    return [torch.rand(2), *(torch.rand(2, generator=generator) for generator in m.generators)]


def _compare(eager: Machine, eager_after: list[torch.Tensor], lazy: Machine) -> str | None:
    if eager.log != lazy.log:
        for left, right in zip([*eager.log, "the end"], [*lazy.log, "the end"]):
            if left != right:
                return f"log: {right} instead of {left}"
    if len(eager.variables) != len(lazy.variables):
        return f"{len(lazy.variables)} variables instead of {len(eager.variables)}"
    if found := difference(eager_after, _after(lazy)):
        return f"next draws: {found}"
    pairs = list(zip(eager.variables, lazy.variables))
    middle = len(eager.log) % (len(pairs) or 1)
    for at, (left, right) in list(enumerate(pairs))[middle:] + list(enumerate(pairs))[:middle]:
        if eager.writes_to(left) != lazy.writes_to(right):
            return f"variable {at}: {lazy.writes_to(right)} writes instead of {eager.writes_to(left)}"
        if found := _tensor_difference(left, right):
            return f"variable {at} of {len(pairs)}: {found}"
    for what in ("linear", "norm"):
        for (name, left), (_, right) in zip(
            getattr(eager, what).state_dict(keep_vars=True).items(),
            getattr(lazy, what).state_dict(keep_vars=True).items(),
        ):
            if found := _tensor_difference(left, right):
                return f"{what}.{name}: {found}"
    if len(eager.hooked) != len(lazy.hooked):
        return f"{len(lazy.hooked)} hook calls instead of {len(eager.hooked)}"
    for left, right in zip(eager.hooked, lazy.hooked):
        if found := _tensor_difference(left, right):
            return f"seen by a hook: {found}"
    for left_opt, right_opt in zip(eager.optimizers, lazy.optimizers):
        state, other = left_opt.state_dict()["state"], right_opt.state_dict()["state"]
        for right in _tensors(other):
            lazyviz.to_eager(right)
        if found := difference(state, other):
            return f"optimizer state: {found}"
    if found := _sharing(eager) != _sharing(lazy):
        return f"sharing of memory: {_sharing(lazy)} instead of {_sharing(eager)}"
    lazyviz.sync()
    if eager.buffer.tobytes() != lazy.buffer.tobytes():
        return f"the NumPy buffer holds {lazy.buffer.tolist()} instead of {eager.buffer.tolist()}"
    for left, right in zip(eager.generators, lazy.generators):
        if not torch.equal(left.get_state(), right.get_state()):
            return "generator state"
    if private_api.active_dispatch_modes():
        return "a dispatch mode is left"
    return None


def _tensors(state: Any) -> list[torch.Tensor]:
    return [item for entry in state.values() for item in entry.values() if isinstance(item, torch.Tensor)]


def _tensor_difference(left: torch.Tensor, right: torch.Tensor) -> str | None:
    if _history(left) != _history(right):
        return f"{_history(right)} as grad_fn instead of {_history(left)}"
    if left.storage_offset() != right.storage_offset():
        return f"storage offset {right.storage_offset()} instead of {left.storage_offset()}"
    lazyviz.to_eager(right)
    if found := difference(left, right):
        return found
    if not _history(left).startswith("output"):
        return None
    if left.is_leaf or left.retains_grad:
        if (left.grad is None) != (right.grad is None):
            return f"gradient {right.grad} instead of {left.grad}"
        if left.grad is not None:
            lazyviz.to_eager(right.grad)
            if found := difference(left.grad, right.grad):
                return f"gradient: {found}"
    return None


def _history(tensor: torch.Tensor) -> str:
    try:
        kind = "nothing" if tensor.grad_fn is None else "something"  # its class may be an alias of eager's
        return f"output {tensor.output_nr} of {kind}, {'a leaf' if tensor.is_leaf else 'no leaf'}"
    except RuntimeError as error:  # a view from split() whose base has been written
        return str(error)


def _sharing(m: Machine) -> list[int]:
    addresses = [private_api.storage_address(tensor) for tensor in m.variables]
    return [addresses.index(address) for address in addresses]
