"""Several threads that call ``backward()`` in one block, also through a shared graph."""

from __future__ import annotations

import threading

import torch

import lazyviz
from lazyviz.record.parity import backward_lock


def in_threads(function, count=5):
    errors = []

    def run():
        try:
            function()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return errors


def test_threads_that_share_a_graph_without_keeping_it_get_pytorch_s_error():
    for _ in range(30):
        with lazyviz.lazy() as graph:
            x = torch.ones(5, 5, requires_grad=True)
            shared = x + x**2
            errors = in_threads(lambda shared=shared: (shared + shared**2).sum().backward())
        graph.evaluate()
        assert len(errors) < 5
        for error in errors:
            assert "Specify retain_graph=True" in str(error)


def test_threads_that_keep_a_shared_graph_add_up_their_gradients():
    for _ in range(30):
        with lazyviz.lazy() as graph:
            x = torch.ones(5, 5, requires_grad=True)
            shared = x + x**2

            def backward(shared=shared):
                (shared + shared**2).sum().backward(retain_graph=True)

            assert not in_threads(backward)
        graph.evaluate()
        assert torch.equal(x.grad, torch.full((5, 5), 5.0 * (4 + 6 + 4 + 1)))


def test_a_hook_that_waits_for_another_thread_s_backward_pass_ends_with_an_error(monkeypatch):
    monkeypatch.setattr(backward_lock, "LONGEST", 0.3)
    errors = []

    def wait(gradient):
        errors.extend(in_threads(lambda: torch.ones(2, requires_grad=True).sum().backward(), count=1))
        return gradient

    with lazyviz.lazy():
        x = torch.ones(3, requires_grad=True)
        y = x * 2
        y.register_hook(wait)
        y.sum().backward()
        assert x.grad.tolist() == [2.0, 2.0, 2.0]
    (error,) = errors
    assert isinstance(error, RuntimeError) and "another thread's backward pass" in str(error)


def test_backward_passes_inside_of_a_backward_pass_need_no_turn():
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            with torch.enable_grad():
                inner = ctx.saved_tensors[0].detach().requires_grad_()
                (inner * 2).backward(gradient)
            return inner.grad

    with lazyviz.lazy():
        x = torch.ones(3, requires_grad=True)
        Again.apply(x).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


class Nested(torch.autograd.Function):
    """Its backward pass calls itself, ``x`` levels deep."""

    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_() - 1
        return ctx.x.detach() * 2

    @staticmethod
    def backward(ctx, gradient):
        if ctx.x > 0:
            with torch.enable_grad():
                Nested.apply(ctx.x).sum().backward()
        return gradient * ctx.x


def test_passes_nested_so_deeply_that_the_engine_takes_other_threads(monkeypatch):
    monkeypatch.setattr(backward_lock, "LONGEST", 5)

    def gradient():
        x = torch.tensor(150.0, requires_grad=True)  # the engine's limit for one thread is 60
        Nested.apply(x).sum().backward()
        return x.grad

    expected = gradient()
    with lazyviz.lazy() as graph:
        found = gradient()
    graph.evaluate()
    assert torch.equal(found, expected)
