"""``no_grad``, ``enable_grad``, ``set_grad_enabled`` and ``inference_mode``, with their exact errors."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import nn

import lazyviz

from ...lazy_equals_eager import both


def model_and_data():
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.3), nn.Linear(5, 2))
    return model, torch.randn(6, 4)


MODES = {
    "no_grad": lambda f: torch.no_grad()(f)(),
    "enable_grad in no_grad": lambda f: torch.no_grad()(torch.enable_grad()(f))(),
    "set_grad_enabled(False)": lambda f: torch.set_grad_enabled(False)(f)(),
    "inference_mode": lambda f: torch.inference_mode()(f)(),
    "inference_mode(False) inside": lambda f: torch.inference_mode()(torch.inference_mode(False)(f))(),
    "inference_mode inside no_grad": lambda f: torch.no_grad()(torch.inference_mode()(f))(),
}


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("training", [False, True])
def test_a_model_in_each_mode(name, training):
    def program(model, x):
        model.train(training)
        out = MODES[name](lambda: model(x).exp_())
        return out, out.requires_grad, out.is_inference()

    both(program, model_and_data)


CONVERSIONS = {
    "to a device": lambda x: x.to("cpu"),
    "to a device by name": lambda x: x.to(device="cpu"),
    "to a device and a dtype": lambda x: x.to(torch.device("cpu"), torch.float64),
    "to a device, copied": lambda x: x.to("cpu", copy=True),
    "to a dtype": lambda x: x.to(torch.float16),
    "to the like of another": lambda x: x.to(torch.zeros(1, dtype=torch.int64)),
    "to a memory format": lambda x: x.to(memory_format=torch.channels_last),
    "cpu": lambda x: x.cpu(),
    "double": lambda x: x.double(),
    "type_as": lambda x: x.type_as(torch.zeros(1, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", CONVERSIONS)
@pytest.mark.parametrize("inside", [False, True])
def test_conversions_are_deferred_in_inference_mode(name, inside):
    def program(x):
        before = x * 2
        with torch.inference_mode():
            source = before * 3 if inside else before
            return before, source, CONVERSIONS[name](source), CONVERSIONS[name](x)

    both(program, lambda: torch.randn(2, 3, 4, 4))


def test_modes_switched_by_calls_and_restored_by_errors():
    def program(x):
        seen = []
        torch.set_grad_enabled(False)
        seen.append(x * 2)
        torch.set_grad_enabled(True)
        seen.append(x * 3)
        try:
            with torch.no_grad():
                seen.append(x * 4)
                x @ torch.ones(7, 7)
        except RuntimeError as error:
            seen.append(str(error))
        seen.append(x * 5)
        return seen, torch.is_grad_enabled()

    both(program, lambda: torch.ones(3, requires_grad=True))


def test_generators_and_decorators_keep_their_mode():
    @torch.no_grad()
    def rows(x):
        for row in x:
            yield row * 2

    def program(x):
        return [(row, row * x[0]) for row in rows(x)]

    both(program, lambda: torch.ones(3, 2, requires_grad=True))


INFERENCE = {
    "save for backward": lambda x, t: (x * t).sum().backward(),
    "in place outside": lambda x, t: t.add_(1),
    "in place through a view": lambda x, t: t[0].add_(1),
    "requires_grad": lambda x, t: t.requires_grad_(),
    "version": lambda x, t: t._version,
    "set data": lambda x, t: setattr(x, "data", t),
    "copy from": lambda x, t: x.detach().copy_(t),
    "add without saving": lambda x, t: (x + t).sum().backward(),
    "clone and use": lambda x, t: (x * t.clone()).sum().backward(),
    "view outside": lambda x, t: t[0].sum() + 0,
    "out": lambda x, t: torch.add(x.detach(), 1, out=t),
    "detach": lambda x, t: t.detach() + 1,
    "grad": lambda x, t: setattr(x, "grad", t),
}


@pytest.mark.parametrize("name", INFERENCE)
def test_inference_tensors_outside_of_inference_mode(name):
    def program(x):
        with torch.inference_mode():
            t = torch.ones(3, 2) * 2
        result = INFERENCE[name](x, t)
        return result, t

    both(program, lambda: torch.ones(3, 2, requires_grad=True))


@pytest.mark.parametrize("name", INFERENCE)
def test_real_inference_tensors_in_a_block(name):
    def make():
        with torch.inference_mode():
            t = torch.ones(3, 2) * 2
        return torch.ones(3, 2, requires_grad=True), t

    both(lambda x, t: (INFERENCE[name](x, t), t * 2), make)


def test_writes_in_inference_mode_to_normal_tensors():
    def program(x):
        y = x * 2
        view = y[0]
        with torch.inference_mode():
            y.add_(1)
            view.mul_(2)
            other = y[1]
            other.sub_(5)
        return y, view, other.is_inference(), y._version

    both(program, lambda: torch.ones(3, 2))


def test_a_view_made_in_no_grad_may_not_be_written_with_grad():
    def multi(w):
        with torch.no_grad():
            view = w.unbind(0)[0]
        view.mul_(2)

    def single(w):
        with torch.no_grad():
            view = (w * 2)[0]
        view.mul_(w[0])
        return view

    def base(w):
        y = w * 2
        with torch.no_grad():
            view = y[0]
        view.mul_(w[0])
        return y

    for program in (multi, single, base):
        both(program, lambda: torch.ones(3, 2, requires_grad=True))


def test_evaluation_in_any_mode_keeps_the_mode_of_the_record():
    x = torch.ones(3, requires_grad=True)
    with lazyviz.lazy() as graph:
        y = (x * 2).sum()
        with torch.no_grad():
            z = x * 3
        with torch.inference_mode():
            u = x * 4
    with torch.inference_mode():
        graph.evaluate()
    assert (y.is_inference(), z.is_inference(), u.is_inference()) == (False, False, True)
    assert (y.requires_grad, z.requires_grad) == (True, False)
    y.backward()
    assert x.grad.tolist() == [2, 2, 2] and not x.grad.is_inference()


def test_pending_writes_are_seen_after_an_inference_mode_around_the_block():
    x = torch.ones(3)
    with torch.inference_mode():
        with lazyviz.lazy():
            x.add_(1)
    assert (x + 0).sum().item() == 6


def test_pytorch_is_as_it_was_after_an_evaluation_in_inference_mode():
    with lazyviz.lazy() as graph:
        y = torch.ones(3) * 2
    with torch.inference_mode():
        graph.evaluate()
    assert torch.full((2,), 3.0).tolist() == [3, 3]  # a factory: no tensor among its arguments
    assert y.tolist() == [2, 2, 2]


VIEWS = {
    "view": lambda x: x.view(x.shape),
    "view_as": lambda x: x.view_as(x),
    "reshape": lambda x: x.reshape(6),
    "flatten": lambda x: x.flatten(),
    "mT": lambda x: x.mT,
    "narrow": lambda x: x.narrow(0, 0, 1),
    "chunk": lambda x: x.chunk(2)[0],
    "expand_as": lambda x: x[:1].expand_as(x[:1]),
    "contiguous": lambda x: x.contiguous()[0],
    "reshape that copies": lambda x: x.t().reshape(6),
    "real": lambda x: torch.view_as_complex(x[:, :2]).real,
    "linear": lambda x: nn.functional.linear(x, x),
}


@pytest.mark.parametrize("write", [False, True], ids=["read", "written"])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_made_in_inference_mode_are_views_after_it(view, write):
    def program(x):
        y = x.clone()
        with torch.inference_mode():
            seen = view(y)
            inside = view(seen * 2)
        if write and not seen.is_inference():
            seen.add_(1)
        return y, seen, inside, seen._is_view(), seen._base is y

    both(program, lambda: torch.linspace(0, 1, 6).reshape(2, 3).requires_grad_())


def test_data_that_is_no_tensor_is_refused():
    def program(x):
        y = x * 2
        y.data = None

    both(program, lambda: torch.ones(2))


def test_a_tangent_has_as_much_memory_as_its_primal():
    def program(x):
        with fwAD.dual_level():
            fwAD.make_dual(x[:4].clone(), torch.ones(4)).as_strided((2,), (1,), 0)
            return fwAD.unpack_dual(fwAD.make_dual(x[:4], x[1:]).as_strided((5,), (1,), 0)).primal

    both(program, lambda: torch.ones(5))


PARTS = {
    "convolution and norm": nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.MaxPool2d(2)),
    "attention": nn.TransformerEncoderLayer(12, 2, batch_first=True, norm_first=True),
    "gru": nn.GRU(12, 6, batch_first=True),
    "pooling": nn.MaxPool1d(2),
    "resizing": nn.Upsample(scale_factor=2, mode="bilinear"),
    "prelu": nn.PReLU(),
    "masked attention": lambda x: F.scaled_dot_product_attention(x, x, x, torch.ones(5, 5).bool()) @ x.mT,
    "loss": lambda x: F.cross_entropy(x.flatten(1), torch.arange(4), reduction="none"),
}


@pytest.mark.parametrize("name", PARTS)
def test_functions_made_of_ops_are_recorded_by_their_ops_in_inference_mode_too(name):
    torch.manual_seed(0)
    function = PARTS[name]
    if isinstance(function, nn.Module):
        function.eval()
    x = torch.randn(4, 3, 10, 10) if name in ("convolution and norm", "resizing") else torch.randn(4, 5, 12)
    seen = []
    for mode in (torch.no_grad, torch.inference_mode):
        with lazyviz.lazy(batch=[x]) as graph, mode():
            result = function(x)
        plan = graph.plan()
        seen.append(
            (
                [(str(node.op), node.flops) for node in graph.nodes],
                plan.peak_bytes,
                plan.split.reasons,
                [list(value.shape) for node in graph.nodes for value in node.outputs],
            )
        )
        with mode():
            expected = function(x)
        for found, right in zip(tensors_of(result), tensors_of(expected), strict=True):
            assert torch.equal(found, right)
    assert seen[0] == seen[1]


def tensors_of(result):
    return result if isinstance(result, tuple) else (result,)
