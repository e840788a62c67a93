"""Backward passes: repeated, double backward, custom functions, recomputation."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from ...lazy_equals_eager import both


def weight():
    return torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_()


def two():
    return weight(), torch.linspace(0.5, 2, 6).reshape(2, 3).requires_grad_()


def test_gradients_of_gradients():
    def program(a, b):
        y = (a**3 * b.exp()).sum()
        da, db = torch.autograd.grad(y, (a, b), create_graph=True)
        (daa,) = torch.autograd.grad(da.sum(), a, create_graph=True)
        (daab,) = torch.autograd.grad(daa.sum(), b, retain_graph=True)
        (da.norm() + db.norm()).backward()
        return da, db, daa, daab

    both(program, two, versions=False)


def test_grad_of_every_option():
    def program(a, b):
        y = a * 2
        z = torch.stack([y.sum(), (y * b).sum()])
        return (
            torch.autograd.grad(z, a, torch.tensor([1.0, 2.0]), retain_graph=True),
            torch.autograd.grad(y.sum(), (a, b), allow_unused=True, retain_graph=True),
            torch.autograd.grad(y.sum(), (a, b), materialize_grads=True, retain_graph=True),
            torch.autograd.grad(z, a, torch.eye(2), is_grads_batched=True, retain_graph=True),
            torch.autograd.grad(z[1], (y, b)),
        )

    both(program, two, versions=False)


def test_backward_with_chosen_inputs_and_retained_gradients():
    def program(a, b):
        y = a * b
        y.retain_grad()
        z = y.sin()
        z.retain_grad()
        z.sum().backward(inputs=[a, y], retain_graph=True)
        first = (y.grad + 0, z.grad)
        z.sum().backward()
        return first, y, z

    both(program, two)


def test_a_gradient_penalty():
    def program(model, x):
        x = x.requires_grad_()
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = out.mean() + ((grad.norm(2, dim=1) - 1) ** 2).mean()
        loss.backward()
        return loss

    both(program, lambda: (nn.Sequential(nn.Linear(3, 5), nn.Softplus(), nn.Linear(5, 1)), torch.randn(4, 3)))


def test_anomaly_mode():
    def fine(a, b):
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            (a * b).sum().backward()

    both(fine, two)


@pytest.mark.filterwarnings("ignore:.*(Anomaly|Error detected).*")
def test_anomaly_mode_finds_the_nan_at_a_named_sync_point():
    def program(a, b):
        with torch.autograd.detect_anomaly():
            (a.detach().requires_grad_() * 0).sqrt().mul(0).sum().backward()

    both(program, two, syncs=None)


# --- custom functions ---------------------------------------------------------------------


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x**3 * scale

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        assert ctx.needs_input_grad == (True, False)
        return 3 * x**2 * ctx.scale * grad, None


class CubeWithSetup(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, scale):
        return x**3 * scale, x > 0

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.scale = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, grad, unused):
        assert unused is None
        (x,) = ctx.saved_tensors
        return 3 * x**2 * ctx.scale * grad, None

    @staticmethod
    def jvp(ctx, tangent, _):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * ctx.scale * tangent, None


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].exp()


class SameView(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x), x[0]

    @staticmethod
    def backward(ctx, whole, row):
        whole = whole.clone()
        whole[0] += row
        return whole


class SavesItsOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


class WithOwnVmap(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()

    @staticmethod
    def vmap(info, in_dims, x):
        return WithOwnVmap.apply(x), in_dims[0]


class ReturnsTooMany(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad, grad


def dirty(w):
    y = w * 1
    view = y[0]
    z = Double.apply(y)
    assert z is y
    z.add_(1)
    (z * z).sum().backward()
    return y, view


CUSTOM = {
    "saves": lambda w: [y := Cube.apply(w, 2), y.sum().backward(), y],
    "twice differentiable": lambda w: torch.autograd.grad(
        torch.autograd.grad(Cube.apply(w, 2).sum(), w, create_graph=True)[0].sum(), w
    ),
    "setup_context": lambda w: [y := CubeWithSetup.apply(w, 2), y[0].sum().backward(), y],
    "no gradient through the unused": lambda w: CubeWithSetup.apply(w, 2)[1].requires_grad,
    "dirty": dirty,
    "dirty leaf": lambda w: Double.apply(w),
    "dirty view": lambda w: [y := w * 1, Double.apply(y[0]), y.sum().backward(), y],
    "once": lambda w: [y := Once.apply(w), y.sum().backward(), y],
    "once but asked twice": lambda w: torch.autograd.grad(
        torch.autograd.grad(Once.apply(w).sum(), w, create_graph=True)[0].sum(), w
    ),
    "views": lambda w: [y := SameView.apply(w * 1), (y[0].sum() + y[1].sum()).backward(), y],
    "writes its view": lambda w: SameView.apply(w * 1)[1].add_(1),
    "saves its output": lambda w: [y := SavesItsOutput.apply(w), y.sum().backward(), y],
    "saved output is written": lambda w: [y := SavesItsOutput.apply(w), y.add_(1), y.sum().backward()],
    "vmap rule made": lambda w: torch.func.vmap(lambda r: CubeWithSetup.apply(r, 2)[0])(w.detach()),
    "vmap of grad": lambda w: torch.func.vmap(torch.func.grad(lambda r: CubeWithSetup.apply(r, 2)[0].sum()))(
        w.detach()
    ),
    "own vmap rule": lambda w: torch.func.vmap(WithOwnVmap.apply)(w.detach()),
    "jvp": lambda w: torch.func.jvp(
        lambda x: CubeWithSetup.apply(x, 2)[0], (w.detach(),), (torch.ones(2, 3),)
    ),
    "too many gradients": lambda w: ReturnsTooMany.apply(w).sum().backward(),
    "no vmap rule": lambda w: torch.func.vmap(lambda r: Once.apply(r))(w.detach()),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("name", CUSTOM)
def test_custom_functions(name):
    both(CUSTOM[name], weight)


def test_memory_of_custom_functions_may_be_read_at_a_named_sync_point():
    class ThroughNumpy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.as_tensor(x.detach().numpy() ** 2)

        @staticmethod
        def backward(ctx, grad):
            return torch.as_tensor(grad.numpy() * 2)

    def program(w):
        y = ThroughNumpy.apply(w * 2)
        y.sum().backward()
        return y

    both(program, weight, syncs=["numpy"])


# --- saved tensors and checkpoints --------------------------------------------------------


def test_saved_tensor_hooks():
    def program(a, b):
        packed = []

        def pack(t):
            packed.append(t.shape)
            return t.double()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.float() * 2):
            y = (a * b).exp()
        y.sum().backward()
        return y, len(packed)

    both(program, two)


def test_saving_on_the_cpu():
    def program(a, b):
        with torch.autograd.graph.save_on_cpu():
            y = (a * b).exp()
        y.sum().backward()
        return y

    both(program, two, syncs=None)


def test_disallowed_saved_tensor_hooks_and_in_place_packing_are_eagers_errors():
    def disallowed(a, b):
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                return a * b

    def writes(a, b):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.mul_(2), lambda t: t):
            return (a.exp() * b).sum()

    both(disallowed, two)
    both(writes, two)


def test_saved_tensors_may_be_written_where_that_is_allowed():
    def program(a, b):
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            y = a.exp()
            z = y * b
            y.add_(1)
            z.sum().backward()
        return y, z

    both(program, two, syncs=["data_ptr"])


def blocks():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.4), nn.GELU()) for _ in range(3)])
    return model, torch.randn(5, 4, requires_grad=True)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("preserve", [False, True])
def test_checkpoints_with_dropout(reentrant, preserve):
    def program(model, x):
        h = x
        for block in model:
            h = checkpoint(block, h, use_reentrant=reentrant, preserve_rng_state=preserve)
        between = torch.rand(2)
        h.sum().backward()
        return h, between, torch.rand(2)

    both(program, blocks, syncs=None)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_a_sequence(reentrant):
    def program(model, x):
        out = checkpoint_sequential(model, 2, x, use_reentrant=reentrant)
        out.sum().backward()
        return out

    both(program, blocks, syncs=None)


def test_nested_checkpoints_and_early_stop():
    def program(model, x):
        def inner(h):
            return checkpoint(model[1], model[0](h), use_reentrant=False)

        with torch.utils.checkpoint.set_checkpoint_early_stop(False):
            out = checkpoint(lambda h: model[2](inner(h)), x, use_reentrant=False)
        out.sum().backward()
        return out

    both(program, blocks, syncs=None)


def test_selective_checkpoints():
    def policy(ctx, op, *args, **kwargs):
        save = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    def program(model, x):
        out = checkpoint(
            model,
            x,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )
        out.sum().backward()
        return out

    both(program, blocks, syncs=None)


def test_a_checkpoint_that_recomputes_something_else_is_eagers_error():
    def program(model, x):
        calls = []

        def changes(h):
            calls.append(1)
            return h.exp().sin() if len(calls) == 1 else h * 1

        checkpoint(changes, x, use_reentrant=False).sum().backward()

    both(program, blocks, syncs=None)


def test_checkpoints_under_autocast():
    def program(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = checkpoint(model, x, use_reentrant=False)
        out.float().sum().backward()
        return out

    both(program, blocks, syncs=None)
