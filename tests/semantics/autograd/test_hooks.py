"""Hooks of tensors, modules, gradient accumulators, autograd nodes and optimizers run as in eager."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.record import native_recorder
from lazyviz.record.tape import tape

from ...lazy_equals_eager import both


def weight():
    return torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_()


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3)


def test_tensor_hooks_change_gradients_in_order():
    def program(w):
        seen = []
        y = w * 2
        y.register_hook(lambda g: g * 3)
        y.register_hook(lambda g: seen.append(g + 0))
        removed = y.register_hook(lambda g: g * 100)
        removed.remove()
        w.register_hook(lambda g: g.clamp(max=1))
        y.retain_grad()
        (y**2).sum().backward()
        return seen, y, w.grad

    both(program, weight)


def test_hooks_registered_before_the_block():
    def make():
        w = weight()
        w.register_hook(lambda g: g * 2)
        w.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(3))
        return w

    both(lambda w: (w.exp().sum().backward(), w.exp().sum().backward())[:0], make)


def test_a_hook_that_returns_another_shape_is_eagers_error():
    def program(w):
        y = w * 2
        y.register_hook(lambda g: g[0])
        y.sum().backward()

    both(program, weight)


def test_a_hook_on_a_tensor_without_gradient_is_eagers_error():
    both(lambda w: w.detach().register_hook(print), weight)
    both(lambda w: (w * 2).register_post_accumulate_grad_hook(print), weight)
    both(lambda w: w.detach().retain_grad(), weight)


def test_post_accumulate_grad_hooks_see_each_sum():
    def program(w):
        seen = []
        handle = w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad + 0))
        for scale in (1, 2, 3):
            (w * scale).sum().backward()
        handle.remove()
        w.sum().backward()
        return seen

    both(program, weight)


def test_an_optimizer_step_inside_backward():
    def program(model, x):
        optimizers = {p: torch.optim.Adam([p], foreach=False) for p in model.parameters()}

        def step(p):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        losses = []
        for _ in range(3):
            losses.append(model(x).pow(2).sum())
            losses[-1].backward()
        return losses

    both(program, net)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_accumulate_in_place_or_not_as_in_eager():
    def program(w):
        grads = []
        w.sum().backward()
        first = w.grad
        grads.append(first + 0)
        (w * w).sum().backward()
        assert w.grad is first
        (w.sum() * 2).backward(create_graph=True)
        grads.append(w.grad)
        w.grad = None
        w.t().sum().backward()
        w.grad.zero_()
        (w * 3).sum().backward()
        return grads, first

    both(program, weight)


def test_gradients_are_stolen_or_copied_as_in_eager():
    def program(w):
        incoming = torch.ones(2, 3)
        (w * 1).backward(incoming)
        stolen = w.grad
        stolen.add_(1)
        w.grad = None
        w.expand(4, 2, 3).backward(torch.ones(1, 1, 1).expand(4, 2, 3))
        return incoming, stolen, w.grad.stride()

    both(program, weight)


def test_hooks_of_autograd_nodes():
    def program(w):
        seen = []
        y = (w * 2).exp()
        y.grad_fn.register_prehook(lambda grads: (grads[0] * 2,))
        y.grad_fn.register_hook(lambda gi, go: seen.append((gi[0] + 0, go[0] + 0)))
        y.sum().backward()
        return seen, y.grad_fn.name(), y.grad_fn.next_functions[0][0].name()

    both(program, weight)


def test_multi_grad_hooks():
    def program(w):
        seen = []
        a, b = w * 2, w * 3
        torch.autograd.graph.register_multi_grad_hook(
            (a, b), lambda grads: seen.append([g + 0 for g in grads])
        )
        torch.autograd.graph.register_multi_grad_hook((a, b), lambda g: seen.append(g + 1), mode="any")
        (a * b).sum().backward()
        return seen

    both(program, weight, versions=False)


def test_module_hooks_of_every_kind():
    def program(model, x):
        seen = []
        first, last = model[0], model[2]
        first.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        first.register_forward_pre_hook(lambda m, a, k: seen.append(a[0].sum()), with_kwargs=True)
        first.register_forward_hook(lambda m, args, out: out + 1)
        model[1].register_forward_hook(lambda m, args, out: seen.append(out.mean()), always_call=True)
        last.register_full_backward_pre_hook(lambda m, grads: (grads[0] * 3,))
        last.register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,))
        first.register_full_backward_hook(lambda m, gi, go: seen.append(go[0] + 0))
        out = model(x)
        out.sum().backward()
        return seen, out

    both(program, net)


def test_global_module_hooks():
    def program(model, x):
        seen = []
        handles = [
            nn.modules.module.register_module_forward_pre_hook(lambda m, a: seen.append(type(m).__name__)),
            nn.modules.module.register_module_forward_hook(lambda m, a, out: seen.append(out.sum())),
            nn.modules.module.register_module_full_backward_hook(lambda m, gi, go: seen.append(go[0] + 0)),
        ]
        try:
            model(x).sum().backward()
        finally:
            for handle in handles:
                handle.remove()
        model(x).sum().backward()
        return seen

    both(program, net)


def test_state_dict_hooks():
    def program(model, x):
        model.register_state_dict_pre_hook(lambda m, prefix, keep: m[0].weight.data.mul_(2))
        model._register_state_dict_hook(lambda m, state, prefix, meta: {k: v + 1 for k, v in state.items()})
        model.register_load_state_dict_pre_hook(
            lambda m, state, *rest: state.update({"0.bias": state["2.bias"].repeat(2)})
        )
        model.register_load_state_dict_post_hook(lambda m, keys: m[0].bias.data.add_(5))
        state = model.state_dict()
        model.load_state_dict(state)
        return state, model(x)

    both(program, net)


def test_optimizer_hooks():
    def program(model, x):
        seen = []
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        optimizer.register_step_pre_hook(lambda o, a, k: seen.append(model[0].weight.grad.norm()))
        optimizer.register_step_post_hook(lambda o, a, k: model[0].bias.data.clamp_(-0.1, 0.1))
        optimizer.register_state_dict_post_hook(lambda o, state: seen.append(len(state["state"])))
        for _ in range(2):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        return seen, optimizer.state_dict()

    both(program, net)


@pytest.mark.parametrize("method", ["append", "pop"])
def test_an_exception_of_a_signal_inside_of_the_hook_of_steps_leaves_nothing_behind(
    method, monkeypatch, request
):
    class Interrupted(list):
        """Stops the hook between its two lists, as the handler of a signal may."""

        def _stop(self, *args):
            monkeypatch.setattr(Interrupted, method, getattr(list, method))
            raise KeyboardInterrupt

        locals()[method] = _stop

    native = native_recorder.active
    native_recorder.use(False)  # no handler can run in the compiled form of the hook
    request.addfinalizer(lambda: native_recorder.use(native))
    monkeypatch.setattr(tape.scopes, "steps", Interrupted())
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(KeyboardInterrupt), lazyviz.lazy():
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert tape.scopes.phase == "other" and not tape.scopes.steps
    with lazyviz.lazy() as graph:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert {node.phase for node in graph.nodes} == {"other", "forward", "backward", "optimizer"}
    graph.evaluate()
    assert lazyviz.doctor().ok


@pytest.mark.parametrize("set_to_none", [False, True])
def test_zeroing_gradients_and_going_on(set_to_none):
    def program(model, x):
        grads = []
        for _ in range(3):
            model(x).sum().backward()
            grads.append(model[0].weight.grad.clone())
            model.zero_grad(set_to_none=set_to_none)
        model(x).mean().backward()
        return grads

    both(program, net)


def test_an_error_in_a_hook_leaves_what_eager_leaves():
    def program(w):
        def fail(g):
            raise ValueError("no")

        y = w * 2
        w.register_hook(lambda g: g + 1)
        z = y * 1
        z.register_hook(fail)
        (y.sum() + z.sum()).backward()

    both(program, weight)


def test_a_step_after_forward_makes_backward_fail_as_in_eager():
    for foreach in (False, True):
        for make_optimizer in (
            lambda p, f=foreach: torch.optim.SGD(p, 0.1, foreach=f),
            lambda p, f=foreach: torch.optim.Adam(p, 0.1, foreach=f),
            lambda p: torch.optim.AdamW(p, 0.1, fused=True),
        ):

            def program(model, x, make_optimizer=make_optimizer):
                optimizer = make_optimizer(model.parameters())
                loss = model(x).pow(2).sum()
                loss.backward(retain_graph=True)
                optimizer.step()
                loss.backward()

            both(program, net)
