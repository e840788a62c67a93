"""Backend conformance: programs that a backend must run correctly.

In the tests of a package that offers a backend::

    import pytest
    from lazyviz.testing import PROGRAMS, check_backend

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_my_backend(program):
        check_backend("mine", program)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..execute.backend_registry import find_backend
from ..execute.compiler.output_metadata_checks import WrongResults
from ..session.lazy_graph import lazy

Tensors = Mapping[str, torch.Tensor]


def check_backend(name: str, program: str, *, exact: bool = False) -> float:
    """Run one of :data:`PROGRAMS` three times in eager PyTorch and with the backend ``name``, and compare.

    It compares results, gradients, parameters, buffers, and tensors written in place, with their shapes,
    strides and dtypes, which tensors share memory, the state of the random generator, and that nothing is
    left pending.

    Args:
        exact: compare bitwise; otherwise within the tolerances of :func:`torch.testing.assert_close`.

    Returns:
        The share of the ops that the backend itself ran, over all three runs.

    Raises:
        AssertionError: something differs; the message says what.
        KeyError: there is no such program.
    """
    find_backend(name)
    make = PROGRAMS[program]
    torch.manual_seed(0)
    eager = make()
    torch.manual_seed(0)
    ours = make()
    states = [torch.get_rng_state()] * 2
    ran = ops = 0.0
    try:
        for _ in range(3):
            torch.set_rng_state(states[0])
            expected = eager()
            states[0] = torch.get_rng_state()
            torch.set_rng_state(states[1])
            with lazy(backend=name) as graph:
                got = ours()
            try:
                report = graph.evaluate()
            except WrongResults as error:
                raise AssertionError(str(error)) from None
            states[1] = torch.get_rng_state()
            assert graph.pending == 0, f"{graph.pending} ops are still pending"
            assert torch.equal(*states), "the state of the random generator differs from eager"
            _compare(got, expected, exact)
            ran += report.share * report.ops_run
            ops += report.ops_run
    finally:
        torch.set_rng_state(states[0])
    return ran / ops if ops else 1.0


def _compare(got: Tensors, expected: Tensors, exact: bool) -> None:
    assert list(got) == list(expected)
    limits: dict[str, Any] = {"rtol": 0.0, "atol": 0.0} if exact else {}
    for name, mine in got.items():
        theirs = expected[name]
        assert type(mine) is type(theirs), f"{name} is a {type(mine).__name__}"
        assert mine.stride() == theirs.stride(), f"{name} has strides {mine.stride()}, not {theirs.stride()}"
        made = "was made in inference mode" if mine.is_inference() else "was not made in inference mode"
        assert mine.is_inference() == theirs.is_inference(), f"{name} {made}"
        try:
            torch.testing.assert_close(mine, theirs, equal_nan=True, **limits)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
    for name, mine in got.items():
        for other, tensor in got.items():
            shared = mine.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            alike = (
                expected[name].untyped_storage().data_ptr() == expected[other].untyped_storage().data_ptr()
            )
            if mine.numel() and tensor.numel():
                assert shared == alike, f"{name} and {other} {'share' if shared else 'do not share'} memory"


def _training(model: nn.Module, loss: Callable[[], torch.Tensor], make: Any) -> Callable[[], Tensors]:
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def step() -> Tensors:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        grads = {
            f"{name}.grad": each.grad for name, each in model.named_parameters() if each.grad is not None
        }
        return {"loss": value.detach(), **model.state_dict(), **grads}

    return step


def _mlp() -> Callable[[], Tensors]:
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
    x, y = torch.randn(5, 6), torch.randint(0, 3, (5,))
    return _training(model, lambda: nn.functional.cross_entropy(model(x), y), torch.optim.AdamW)


def _convolutions() -> Callable[[], Tensors]:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 2),
    )
    x = torch.randn(3, 2, 4, 4)
    return _training(model, lambda: model(x).square().mean(), lambda p: torch.optim.SGD(p, 0.1, 0.9))


def _attention() -> Callable[[], Tensors]:
    # Without biases, because the gradient of the keys' bias is only rounding error, which Adam amplifies.
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, bias=False)
    x = torch.randn(2, 5, 8)
    return _training(model, lambda: model(x).tanh().sum(), torch.optim.Adam)


def _dropout() -> Callable[[], Tensors]:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    x = torch.randn(3, 4)

    def loss() -> torch.Tensor:
        return (model(x) + torch.randn(3, 1)).abs().mean()

    return _training(model, loss, torch.optim.AdamW)


def _views_and_writes() -> Callable[[], Tensors]:
    base, total = torch.arange(12.0), torch.zeros(3)

    def run() -> Tensors:
        table = base.view(3, 4)
        made = (table * 2).t()
        row = made[1]
        row.add_(100)
        table[:, 0].mul_(-1)
        total.add_(table.sum(1))
        parts = made.split(2)
        gates = torch.unsafe_split(base + 1, 4)  # as in recurrent cells
        gates[1].zero_()
        results = {"base": base, "total": total, "made": made, "row": row, "first": parts[0], "table": table}
        return {**results, "gate": gates[1], "next": gates[2]}

    return run


def _numbers() -> Callable[[], Tensors]:
    x = torch.tensor([0.0, -1.5, 3e38, float("inf"), float("nan")])
    whole = torch.tensor([7, -7, 0])

    def run() -> Tensors:
        return {
            "double": x.double() / 3,
            "half": x.half(),
            "overflow": x * 10,
            "compared": x > 0,
            "divided": torch.div(whole, 2, rounding_mode="floor"),
            "mask": torch.where(x.isfinite(), x, 0.0),
            "empty": x[:0] + 1,
            "scalar": x.nansum() * 0,
        }

    return run


def _kept_results() -> Callable[[], Tensors]:
    """Results of a run do not change when the same code runs again on other numbers."""
    count, made = torch.zeros(3), [torch.zeros(3)]

    def run() -> Tensors:
        count.add_(1)
        made.append((made[-1] + count).exp().log1p())
        table = torch.outer(count, count) + 1
        made.append(table.t()[0])
        return {"count": count, "table": table, **{f"made {at}": each for at, each in enumerate(made)}}

    return run


def _equal_results() -> Callable[[], Tensors]:
    """Equal results are separate tensors, and none is an argument."""
    x = torch.arange(6.0).reshape(2, 3)

    def run() -> Tensors:
        results = {"x": x, "one": x * 2 + 1, "same": x * 2 + 1, "copy": x.clone(), "times one": x * 1}
        results |= {"relu": x.relu(), "zeros": x * 0, "made": torch.zeros(2, 3), "like": torch.zeros_like(x)}
        results["same"].add_(1)
        results["rows"], results["same rows"] = x.sum(1), x.sum(1)
        results["written"] = results["made"].add_(results["like"])
        return results

    return run


def _whole_numbers() -> Callable[[], Tensors]:
    """64-bit integers, and integers of the width of a smaller type: larger values wrap around."""
    x = torch.tensor([2**40 + 1, -(2**53) - 1, 2**62, 3, -1])
    small = torch.tensor([250, 7, 0], dtype=torch.uint8)

    def run() -> Tensors:
        return {
            "product": x * 3,
            "sum": x.sum(),
            "running": x.cumsum(0),
            "remainder": x % 1000,
            "shifted": x >> 3,
            "compared": x == x + 1,
            "largest": x.max(),
            "wrapped": small + 10,
            "narrow": x.to(torch.int32),
            "wide": small.long() * 2**33,
        }

    return run


def _recurrent() -> Callable[[], Tensors]:
    model = nn.LSTM(4, 5, batch_first=True)
    x = torch.randn(2, 3, 4)
    return _training(model, lambda: model(x)[0].square().sum(), torch.optim.Adagrad)


def _inference() -> Callable[[], Tensors]:
    """Results show whether they were created in inference mode; only then can they be written in inference
    mode.
    """
    x, total = torch.arange(3.0), torch.zeros(3)
    with torch.inference_mode():
        cache = torch.zeros(2, 3)

    def run() -> Tensors:
        before = x * 2
        with torch.inference_mode():
            inside = (before + 1).exp()
            total.add_(inside)
            cache[1].add_(inside)
            part = inside[1:]
        return {
            "before": before,
            "inside": inside,
            "total": total,
            "cache": cache,
            "part": part,
            "after": inside + 1,
        }

    return run


PROGRAMS: dict[str, Callable[[], Callable[[], Tensors]]] = {
    "a multilayer perceptron with AdamW": _mlp,
    "convolutions with batch norm and SGD": _convolutions,
    "attention with Adam": _attention,
    "dropout and noise": _dropout,
    "views and writes in place": _views_and_writes,
    "numbers of all kinds": _numbers,
    "whole numbers of 64 bits": _whole_numbers,
    "results kept from run to run": _kept_results,
    "results of equal value": _equal_results,
    "an LSTM with Adagrad": _recurrent,
    "partly in inference mode": _inference,
}
"""Programs by name; each, called, gives a function whose tensors are compared after every call."""
