"""Tracing, scripting, exporting, and compiling inside a block; attention with every backend."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import lazyviz

from ..lazy_equals_eager import both

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit")

BACKENDS = ["eager", "aot_eager"] + (["inductor"] if shutil.which("g++") else [])


@pytest.fixture(autouse=True)
def fresh_compilers():
    torch.compiler.reset()
    with torch.jit.optimized_execution(False):  # which depends on how often a program has run
        yield
    torch.compiler.reset()


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_function(backend):
    compiled = torch.compile(lambda x: (x.sin() + x[0]).relu(), backend=backend)
    both(lambda x: compiled(x * 2) + 1, lambda: torch.randn(3, 4), syncs=None)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_model_trains(backend):
    def program(model, x):
        compiled = torch.compile(model, backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss = compiled(x).pow(2).mean()
            loss.backward()
            optimizer.step()
        return loss

    both(program, net, syncs=None, versions=False)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_that_writes_and_breaks(backend):
    def function(x, buffer):
        buffer.add_(x.sum())
        if x.sum() > 0:
            return x + buffer
        return x - buffer

    compiled = torch.compile(function, backend=backend)

    def program(x, buffer):
        first = compiled(x * 1, buffer)
        second = compiled(-x, buffer * 1)
        return first, second, buffer

    both(program, lambda: (torch.ones(3), torch.zeros(1)), syncs=None)


def test_a_compiled_function_with_random_numbers():
    compiled = torch.compile(lambda x: F.dropout(x, 0.5) + torch.rand(4), backend="aot_eager")

    def program(x):
        before = torch.rand(2)
        return before, compiled(x * 2), torch.rand(2)

    both(program, lambda: torch.ones(4), syncs=None)


def test_a_block_inside_a_compiled_function_is_not_traced():
    @torch.compiler.disable
    def in_a_block(x):
        with lazyviz.lazy() as graph:
            y = x * 2
        graph.evaluate()
        return y

    compiled = torch.compile(lambda x: in_a_block(x + 1) + 1, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [5, 5]


# --- jit, fx, export ----------------------------------------------------------------------


def test_tracing_inside_a_block():
    def program(model, x):
        traced = torch.jit.trace(model, (x,))
        out = traced(x * 2)
        out.sum().backward()
        return out, str(traced.graph).count("aten::linear")

    both(program, net, syncs=None)


def test_tracing_a_pending_model_and_input():
    def program(x):
        model = nn.Linear(3, 2)
        traced = torch.jit.trace(model, (x * 2,))
        return traced(x), model(x)

    both(program, lambda: torch.randn(4, 3), syncs=None)


def test_scripting_inside_a_block():
    def program(model, x):
        scripted = torch.jit.script(model)
        out = scripted(x * 2)
        out.sum().backward()
        return out, scripted(x)

    both(program, net, syncs=None)


def branches(x: torch.Tensor, times: int) -> torch.Tensor:
    for i in range(times):
        if bool(x.sum() > 10):
            x = x - 1
        else:
            x = x * 2 + i
    return x


def test_calling_a_scripted_function_with_data_dependent_branches():
    scripted = torch.jit.script(branches)
    both(lambda x: scripted(x * 1, 5), lambda: torch.ones(3), syncs=None)


def test_a_traced_model_made_before_the_block():
    def make():
        model, x = net()
        return torch.jit.trace(model, (x,)), x

    def program(traced, x):
        out = traced(x * 2)
        out.sum().backward()
        return out

    both(program, make, syncs=None)
    both(program, make, syncs=None)


def test_symbolic_tracing():
    def program(model, x):
        traced = torch.fx.symbolic_trace(model)
        out = traced(x * 2)
        out.sum().backward()
        return out, [node.op for node in traced.graph.nodes]

    both(program, net)


def test_make_fx():
    from torch.fx.experimental.proxy_tensor import make_fx

    def program(model, x):
        traced = make_fx(lambda y: y.sin() + 1)(x)
        return traced(x * 2), [str(node.target) for node in traced.graph.nodes]

    both(program, net, syncs=None)
    both(lambda model, x: make_fx(lambda y: y.sin() + x, tracing_mode="fake")(x * 1)(x), net, syncs=None)


def test_fake_tensors_inside_a_block():
    from torch._subclasses.fake_tensor import FakeTensorMode

    def program(x):
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(x) @ torch.ones(3, 2)
        return tuple(fake.shape), str(fake.dtype), x * 2

    both(program, lambda: torch.randn(4, 3), syncs=None)
    both(lambda x: program(x * 1), lambda: torch.randn(4, 3), syncs=None)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    def program(model, x):
        exported = torch.export.export(model, (x,), strict=strict)
        out = exported.module()(x * 2)
        return out, [str(node.target) for node in exported.graph.nodes]

    both(program, net, syncs=None)


def test_export_of_a_pending_model_and_input():
    def program(x):
        model = nn.Linear(3, 2)
        exported = torch.export.export(model, (x * 2,))
        return exported.module()(x), model.weight

    both(program, lambda: torch.randn(4, 3), syncs=None)


# --- attention ----------------------------------------------------------------------------


def attention_inputs():
    return tuple(torch.randn(2, 3, 16, 8, requires_grad=True) for _ in range(3))


@pytest.mark.parametrize(
    "backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_attention_in_each_backend(backend, causal):
    def program(q, k, v):
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q * 1, k, v, is_causal=causal)
        out.sum().backward()
        return out

    both(program, attention_inputs)


@pytest.mark.parametrize("mask", ["bool", "float", "causal bias"])
def test_attention_with_masks_and_groups(mask):
    from torch.nn.attention.bias import causal_lower_right

    def program(q, k, v):
        masks = {
            "bool": torch.ones(16, 16, dtype=torch.bool).tril(),
            "float": torch.zeros(16, 16).masked_fill(torch.eye(16, dtype=torch.bool), -1e9),
            "causal bias": causal_lower_right(16, 16),
        }
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=masks[mask])
        grouped = F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True, scale=0.3)
        out.sum().backward()
        return out, grouped

    both(program, attention_inputs, versions=False)


def test_attention_with_dropout():
    def program(q, k, v):
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
        out.sum().backward()
        return out

    both(program, attention_inputs)


@pytest.mark.filterwarnings("ignore:.*flex_attention.*")
def test_flex_attention():
    def causal(b, h, q, k):
        return q >= k

    def program(q, k, v):
        mask = create_block_mask(causal, None, None, 16, 16, device="cpu")
        plain = flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + (i - j) * 0.1)
        masked = flex_attention(q * 2, k, v, block_mask=mask)
        return plain, masked

    def make():
        return tuple(tensor.detach() for tensor in attention_inputs())

    both(program, make, syncs=None)


@pytest.mark.parametrize("training", [False, True])
def test_multihead_attention_and_transformers_take_eagers_paths(training):
    def program(model, x):
        model.train(training)
        out, weights = model(x, x, x)
        return out, weights, model(x * 2, x, x, need_weights=False)[0]

    both(program, lambda: (nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True), torch.randn(2, 5, 8)))


def test_tracing_with_its_check_works_in_a_block():
    with lazyviz.lazy():
        traced = torch.jit.trace(lambda a: a + 1, torch.ones(4) * 1)
        assert traced(torch.ones(4)).tolist() == [2.0] * 4


@pytest.mark.parametrize("name", ["as_tensor", "tensor", "manual_seed"])
def test_rules_that_dynamo_collects_within_a_block_are_not_kept(name):
    """Dynamo lists PyTorch's functions once: those that a block replaces would never be traced again."""
    from torch._dynamo import trace_rules

    original = getattr(torch, name)
    rule = trace_rules.lookup(original)
    trace_rules.get_torch_obj_rule_map.cache_clear()
    with lazyviz.lazy():
        torch.ones(2) + 1
        trace_rules.get_torch_obj_rule_map()
    lazyviz.reset()
    assert getattr(torch, name) is original
    assert trace_rules.lookup(original) is rule


SYMBOLIC_CALLS = {
    "slice": lambda x, size: x[:size],
    "range": lambda x, size: torch.arange(size),
    "fill": lambda x, size: torch.full((2,), size),
    "select by a condition": lambda x, size: torch.where(x > 1, x, size),
}


@pytest.mark.parametrize("call", SYMBOLIC_CALLS.values(), ids=SYMBOLIC_CALLS)
def test_ops_with_symbolic_sizes_of_a_tracer_run_as_in_eager_mode(call):
    def size():
        fake = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.zeros(2, 3))
        return fake.shape[0]

    x = torch.arange(4.0)
    expected = call(x * 2, size())
    with lazyviz.lazy() as graph:
        result = call(x * 2, size())
    graph.evaluate()
    assert torch.equal(result, expected)


def test_a_tracer_that_reads_a_storage_of_unknown_size_adds_no_guard():
    written = torch.ones(3)
    with lazyviz.lazy() as graph:
        written += 1
        shown = torch.ones(3)
        array = shown.numpy()
        result = shown * 2
        sizes = ShapeEnv()
        with FakeTensorMode(shape_env=sizes):
            traced = torch.empty(sizes.create_unbacked_symint())
            assert "u0" in str(traced.untyped_storage().nbytes())
    graph.evaluate()
    assert result.tolist() == written.tolist() == (array * 2).tolist()
