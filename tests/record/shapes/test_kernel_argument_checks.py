"""Argument checks and scalar operands: errors at their line, with eager PyTorch's message, or none."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves

import lazyviz

aten = torch.ops.aten


def mask() -> torch.Tensor:
    return torch.randn(3) > 0


def lengths(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers)


NUMBERS = {
    "minus True": lambda x: x - True,
    "True minus": lambda x: True - x,
    "sub": lambda x: torch.sub(x, True),
    "rsub": lambda x: torch.rsub(x, True),
    "alpha": lambda x: torch.sub(x, 1, alpha=True),
    "a known number in place": lambda x: torch.as_tensor(7.5).clone().sub_(True),
    "complex in place": lambda x: x.add_(1j),
    "complex after an ordinary number": lambda x: x.mul_(2).mul_(1j),
    "full": lambda x: torch.full((2,), 1j, dtype=torch.float32),
    "full of too much": lambda x: torch.full((2,), 1e300, dtype=torch.float32),
    "full of bytes": lambda x: torch.full((2,), 1000, dtype=torch.int8),
    "full of integers": lambda x: torch.full((2,), 1e30, dtype=torch.int64),
    "full_like": lambda x: torch.full_like(x, 1j),
    "full_like after an ordinary one": lambda x: torch.full_like(torch.full_like(x, 2.0), 1e300),
    "new_full": lambda x: x.new_full((2,), 1j),
    "fill_": lambda x: x.fill_(1j),
    "fill_ after an ordinary number": lambda x: x.fill_(3.0).fill_(1e300),
    "masked_fill": lambda x: x.masked_fill(mask(), 1e300),
    "infinity among integers": lambda x: (
        x.long().masked_fill_(mask(), 1.0).masked_fill_(mask(), float("inf"))
    ),
    "NaN among integers": lambda x: x.long().fill_(1.0).fill_(float("nan")),
    "beta": lambda x: torch.addmm(x, x[:, None], x[None], beta=1e300),
    "alpha of a product": lambda x: torch.addr(x[None], x[:1], x, alpha=1j),
    "value": lambda x: torch.addcmul(x, x, x, value=1e300),
    "lists": lambda x: torch._foreach_sub_([x, x.clone()], True),
    "a mask": lambda x: x - mask(),
}
SEGMENTS = {
    "lengths of floats": lambda x: torch.segment_reduce(x, "sum", lengths=lengths(1.0, 2.0)),
    "lengths that were drawn": lambda x: torch.segment_reduce(x, "sum", lengths=torch.rand(2)),
    "offsets of floats": lambda x: torch.segment_reduce(x, "sum", offsets=lengths(0.0, 3.0)),
    "known lengths": lambda x: torch.segment_reduce(x, "sum", lengths=lengths(1, 1)),
    "lengths below zero": lambda x: torch.segment_reduce(x, "sum", lengths=lengths(-1, 4)),
    "what it is reduced by": lambda x: torch.segment_reduce(x, "foo", lengths=torch.randint(3, 4, (1,))),
    "dimensions": lambda x: torch.segment_reduce(x, "sum", lengths=torch.randint(1, 2, (1, 3))),
    "integers": lambda x: torch.segment_reduce(x.long(), "sum", lengths=torch.randint(3, 4, (1,))),
    "nothing": lambda x: torch.segment_reduce(x, "sum"),
}
LAYERS = {
    "softmax of half": lambda x: torch._softmax_backward_data(x, x.softmax(0), 0, torch.float16),
    "log_softmax of half": lambda x: torch._log_softmax_backward_data(x, x.softmax(0), 0, torch.float16),
    "gradient of no weight": lambda x: aten.native_group_norm_backward(
        x.view(1, 3, 1), x.view(1, 3, 1), x[:1, None], x[:1, None], None, 1, 3, 1, 1, [True, True, True]
    ),
    "categories": lambda x: torch.multinomial(torch.ones(2**24 + 1), 3),
}
if torch.__version__ >= "2.14":  # which computes it
    del LAYERS["gradient of no weight"]


def error_of(call, x):
    try:
        call(x)
    except Exception as error:
        return type(error), str(error)
    return None


@pytest.mark.parametrize("call", [*NUMBERS.values(), *SEGMENTS.values(), *LAYERS.values()],
                         ids=[*NUMBERS, *SEGMENTS, *LAYERS])  # fmt: skip
@pytest.mark.parametrize("pending", [False, True], ids=["real", "pending"])
def test_it_raises_at_the_line(call, pending):
    expected = error_of(call, torch.randn(3))
    assert expected is not None
    x = torch.randn(3)
    with lazyviz.lazy():
        found = error_of(call, x * 1 if pending else x)
    assert found == expected


def test_what_segments_hold_is_not_made_up_where_it_is_not_known():
    data = torch.randn(5)
    with lazyviz.lazy() as graph:
        drawn = torch.randint(2, 3, (2,))
        result = torch.segment_reduce(data[:4] * 1, "sum", lengths=drawn)
    assert not graph.sync_points
    graph.evaluate()
    assert torch.equal(result, torch.stack([data[:2].sum(), data[2:4].sum()]))


METADATA = {
    "softmax of double": lambda x: torch._softmax_backward_data(x, x, 1, torch.float64),
    "softmax of bfloat16": lambda x: torch._softmax_backward_data(x, x, 1, torch.bfloat16),
    "log_softmax of double": lambda x: torch._log_softmax_backward_data(x, x, 1, torch.float64),
    "groups of another batch": lambda x: torch.native_group_norm(x, None, None, 4, 2, 15, 2, 1e-5),
    "groups with channels last": lambda x: torch.native_group_norm(
        x.contiguous(memory_format=torch.channels_last), None, None, 4, 2, 15, 2, 1e-5
    ),
    "bfloat16 and wider statistics": lambda x: aten._batch_norm_with_update(
        x.bfloat16(), torch.ones(4), torch.ones(4), torch.zeros(4), torch.ones(4), 0.1, 1e-5
    ),
    "shuffle of nothing": lambda x: torch.channel_shuffle(x[:0], 2),
    "shuffle of nothing with channels last": lambda x: torch.channel_shuffle(
        x[:, :, :0].contiguous(memory_format=torch.channels_last), 2
    ),
}


@pytest.mark.parametrize("name", METADATA)
def test_a_pending_result_is_described_as_its_kernel_returns_it(name):
    def described(result):
        return [(t.shape, t.stride(), t.dtype) for t in tree_leaves(result)]

    expected = described(METADATA[name](torch.randn(2, 4, 3, 5)))
    with lazyviz.lazy() as graph:
        result = METADATA[name](torch.randn(2, 4, 3, 5))
        pending = described(result)
    graph.evaluate()
    assert pending == expected
    assert described(result) == expected


def test_numbers_that_fit_cost_no_further_entries():
    """Learning rates and their like share an entry of the shape cache."""
    from lazyviz.record.tape import tape

    x = torch.randn(3)
    with lazyviz.lazy() as graph:
        x * 0.5
        before = len(tape.shapes.entries)
        for number in (0.25, 1e-8, -3.0, 100.0):
            x * number
        assert len(tape.shapes.entries) == before
    graph.evaluate()
