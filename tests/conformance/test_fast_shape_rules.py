"""Known shapes agree with PyTorch's, including errors."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import OpInfo, op_db
from torch.utils._pytree import tree_leaves

import lazyviz
from lazyviz.record.shapes import fast_shape_rules
from lazyviz.record.shapes.inferred_outputs import Inferred, OutputSpec
from lazyviz.record.tape import tape

DTYPES = (torch.float32, torch.float64, torch.int64)


def described(inferred: Inferred) -> Any:
    """All that an answer says, for a comparison."""
    outputs = [
        (spec.meta, spec.source, spec.itself, spec.fresh, None if spec.source is not None else spec.nbytes)
        if isinstance(spec, OutputSpec)
        else spec
        for spec in inferred.outputs
    ]
    kept = (inferred.on_meta, inferred.to_cpu, inferred.dtype, inferred.special, inferred.restructured)
    return inferred.container, outputs, kept


@pytest.fixture
def wrong(monkeypatch) -> list[str]:
    """Filled, while ops are recorded, with what is known of them otherwise than PyTorch says."""
    found: list[str] = []
    find = fast_shape_rules.find

    def comparing(metadata: Any, op: Any, info: Any, args: Any, kwargs: Any, inputs: Any) -> Any:
        known = find(metadata, op, info, args, kwargs, inputs)
        if known is None:
            return None
        call = f"{op}({args}, {kwargs}) of {[(value.meta, value.meta.stride) for value in inputs]}"
        try:
            asked = tape.shapes._ask(op, info, args, kwargs, inputs)
        except Exception as error:
            found.append(f"{call} is refused: {error}")
            raise
        if described(known) != described(asked):
            found.append(f"{call}: {described(known)} known, {described(asked)} by PyTorch")
        return asked

    monkeypatch.setattr(fast_shape_rules, "find", comparing)
    return found


def cases(entry: OpInfo, dtype: torch.dtype, everything: bool) -> Iterator[Any]:
    torch.manual_seed(0)
    differentiable = dtype.is_floating_point and entry.supports_autograd
    for sample in itertools.islice(
        entry.sample_inputs("cpu", dtype, requires_grad=differentiable), 40 if everything else 2
    ):
        yield sample
        tensors = [t for t in tree_leaves((sample.input, sample.args)) if isinstance(t, torch.Tensor)]
        if all(tensor.layout == torch.strided for tensor in tensors):
            yield sample.noncontiguous()
    if everything and dtype == torch.float32 and entry.error_inputs_func is not None:
        for wrong in entry.error_inputs("cpu"):
            yield wrong.sample_input


def record(entry: OpInfo, sample: Any) -> None:
    with lazyviz.lazy():
        output = entry(sample.input, *sample.args, **sample.kwargs)
        outputs = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
        leaves = [
            t for t in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(t, torch.Tensor)
        ]
        leaves = [t for t in leaves if t.requires_grad]
        for like in (
            torch.ones_like,
            lambda t: torch.ones(t.shape[::-1], dtype=t.dtype).permute(*range(t.dim() - 1, -1, -1)),
        ):
            if outputs and leaves:
                torch.autograd.grad(
                    outputs, leaves, [like(t) for t in outputs], allow_unused=True, retain_graph=True
                )


@pytest.mark.filterwarnings("ignore")  # what the entries themselves are warned of
@pytest.mark.parametrize("entry", op_db, ids=lambda entry: entry.formatted_name)
def test_what_is_known_is_what_pytorch_says(entry, wrong, everything):
    for dtype in DTYPES if everything else DTYPES[:1]:
        if dtype not in entry.dtypes:
            continue
        for sample in cases(entry, dtype, everything):
            with torch.random.fork_rng():
                try:
                    record(entry, sample)
                except Exception:
                    pass  # it is refused, as in eager mode
                lazyviz.session.lazy_graph.reset()
    assert not wrong


FOREACH = {
    "add, list": lambda a, b, c: torch._foreach_add_(a, b, alpha=2),
    "add, number": lambda a, b, c: torch._foreach_add_(a, 1),
    "add, tensor": lambda a, b, c: torch._foreach_add_(a, torch.tensor(1.5)),
    "mul": lambda a, b, c: torch._foreach_mul_(a, 0.5),
    "div, numbers": lambda a, b, c: torch._foreach_div_(a, [1.0, 2.0, 3.0]),
    "lerp": lambda a, b, c: torch._foreach_lerp_(a, b, 0.1),
    "addcmul of one twice": lambda a, b, c: torch._foreach_addcmul_(a, b, b, 0.5),
    "addcdiv": lambda a, b, c: torch._foreach_addcdiv_(a, b, c, [1.0, 2.0, 3.0]),
    "what is written, too": lambda a, b, c: torch._foreach_add_(a, a),
    "sqrt": lambda a, b, c: torch._foreach_sqrt(a),
    "neg": lambda a, b, c: torch._foreach_neg_(a),
    "made": lambda a, b, c: torch._foreach_mul(a, c),
    "of another length": lambda a, b, c: torch._foreach_add_(a, b[:2]),
    "of other shapes": lambda a, b, c: torch._foreach_add(a, b[::-1]),
    "of another dtype": lambda a, b, c: torch._foreach_add(a, [each.double() for each in b]),
    "transposed": lambda a, b, c: torch._foreach_mul(a, [each.t().contiguous().t() for each in b]),
}


@pytest.mark.parametrize("name", FOREACH)
def test_what_is_known_of_lists_is_what_pytorch_says(name, wrong):
    lists = [[torch.ones(2, 3), torch.ones(4, 1), torch.ones(1, 1)] for _ in range(3)]
    try:
        with lazyviz.lazy():
            FOREACH[name](*lists)
    except Exception:
        pass  # it is refused, as in eager mode
    lazyviz.session.lazy_graph.reset()
    assert not wrong


NUMBERS = (torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_membership_on_an_absent_gpu_is_what_pytorch_says(dtype, wrong):
    with lazyviz.lazy(device="RTX-4090"), torch.device("cuda"):
        ids = torch.zeros(4, 6, dtype=dtype)
        for elements in (ids, ids[:, -1], ids.t(), ids[0, 0], ids[:0], ids[:, ::2], ids[:1].expand(3, 6)):
            for other in NUMBERS:
                for tests in (torch.zeros(2, dtype=other), torch.zeros((), dtype=other), torch.zeros(0)):
                    for options in ({}, {"assume_unique": True}, {"invert": True}):
                        with contextlib.suppress(Exception):  # it is refused
                            torch.isin(elements, tests, **options)
    lazyviz.session.lazy_graph.reset()
    assert not wrong


KERNELS = ("flash", "efficient", "cudnn")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_on_an_absent_gpu_is_what_pytorch_says(kernel, dtype, wrong):
    op = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")
    more: list[tuple[Any, ...]] = [(), (0.1,), (0.0, True), (0.5, True, True), (0.0, False, True)]
    with lazyviz.lazy(device="H100-80GB"), torch.no_grad(), torch.device("cuda"):
        biases = (None, torch.zeros(2, 4, 5, 7, dtype=dtype), torch.zeros(5, 7), torch.zeros(1, dtype=dtype))
        if kernel != "flash":
            more = [(bias, wanted, *rest) for bias in biases for wanted in (True, False) for rest in more[:4]]
        calls = [
            [torch.zeros(*shape, dtype=dtype) for shape in shapes]
            for shapes in (
                [(2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)],
                [(2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)],  # grouped
                [(2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 16)],
                [(1, 4, 1, 128), (1, 1, 300, 128), (1, 1, 300, 128)],
                [(2, 4, 0, 8), (2, 4, 7, 8), (2, 4, 7, 8)],
                [(4, 5, 8), (4, 7, 8), (4, 7, 8)],
                [(2, 4, 5, 8), (3, 4, 7, 9), (2, 4, 7, 8)],
            )
        ]
        calls.append([torch.zeros(2, 5, 4, 8, dtype=dtype).transpose(1, 2) for _ in range(3)])
        calls.append([torch.zeros(2, 4, 5, 3 * 8, dtype=dtype)[..., 8 * at : 8 * at + 8] for at in range(3)])
        calls.append([*calls[0][:2], calls[0][2].double()])
        for tensors in calls:
            for rest in more:
                with contextlib.suppress(Exception):  # it is refused
                    op(*tensors, *rest, scale=0.5)
    lazyviz.session.lazy_graph.reset()
    assert not wrong
