"""Tensors that autograd and ``.data`` detach share their source's value; ``detach()`` itself is an op."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lazyviz
from lazyviz.record.lazy_tensor import MOST_TENSORS


def names(graph: lazyviz.LazyGraph) -> list[str]:
    return [node.op.name() for node in graph.nodes]


def test_a_training_step_has_the_ops_that_eager_pytorch_runs():
    model = nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Tanh(), nn.Sigmoid(), nn.Softmax(1)
    )
    x = torch.randn(3, 8)
    with torch.profiler.profile(acc_events=True) as profile:
        model(x).square().sum().backward()
    kernels = {
        "relu",
        "tanh",
        "sigmoid",
        "_softmax",
        "threshold_backward",
        "tanh_backward",
        "sigmoid_backward",
    }
    ran = sum(event.name.removeprefix("aten::") in kernels for event in profile.events())
    model.zero_grad()
    with lazyviz.lazy() as graph:
        model(x).square().sum().backward()
    assert sum(name.split("::")[1].split(".")[0] in kernels for name in names(graph)) == ran > 0
    assert not any("detach" in name for name in names(graph))
    assert graph.pending == len(graph.nodes)


@pytest.mark.parametrize("detach", [torch.Tensor.detach, lambda x: x.detach()], ids=["function", "method"])
def test_what_the_user_detaches_has_the_same_memory_and_no_history(detach):
    x = torch.ones(3, requires_grad=True)
    with lazyviz.lazy() as graph:
        y = x * 2
        z = detach(y)
        z.add_(1)
    assert z.grad_fn is None and y._version == z._version == 1
    assert graph.plan().timeline[-1][1] == x.nbytes + y.nbytes
    assert y.tolist() == z.tolist() == [3.0, 3.0, 3.0]


def test_a_call_of_detach_is_an_op():
    generator, critic = nn.Linear(2, 3), nn.Linear(3, 1)
    with lazyviz.lazy() as graph:
        critic(generator(torch.ones(4, 2)).detach()).sum().backward()
    assert sum("detach" in name for name in names(graph)) == 1
    assert generator.weight.grad is None and critic.weight.grad is not None


def test_data_has_the_value_and_versions_of_its_own():
    with lazyviz.lazy() as graph:
        x = torch.ones(2, 3, requires_grad=True) + 1
        data = x.data
        assert names(graph) == ["aten::ones", "aten::add.Tensor"] and not data.requires_grad
        data.mul_(5)
        assert x._version == 0 and data._version == 1
        data.t_()
        assert x.shape == (2, 3) and data.shape == (3, 2)
        data.add_(torch.arange(2.0))
    expected = torch.full((2, 3), 10.0) + torch.arange(2.0)[:, None]
    assert torch.equal(x.detach(), expected) and torch.equal(data, expected.t())
    assert data.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def addresses(tensors: list[torch.Tensor]) -> list[int]:
    """Which of the first three share memory: each one's is the number of the first one there."""
    found = [tensor.data_ptr() for tensor in tensors[:3]]
    return [found.index(address) for address in found]


METADATA_WRITES = [
    lambda x: x.t_(),
    lambda x: x.unsqueeze_(0),
    lambda x: x.squeeze_(),
    lambda x: x.transpose_(0, 1),
    lambda x: x.as_strided_((3,), (1,)),
    lambda x: x.resize_(2, 2),
    lambda x: x.resize_(3, 7).zero_(),
    lambda x: x.set_(torch.zeros(5)),
    lambda x: torch.add(torch.ones(4, 4), 1, out=x),
    lambda x: x.swapdims_(0, 1).mul_(2),
]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("write", METADATA_WRITES)
@pytest.mark.parametrize("of_source", [False, True], ids=["detached", "source"])
def test_metadata_written_to_one_tensor_is_not_the_others(write, of_source):
    def program() -> list[torch.Tensor]:
        x = torch.arange(6.0).reshape(2, 3) + 1
        one, two = x.data, x.data
        write(x if of_source else one)
        two.view(-1)[0] += 10
        return [x, one, two, x.detach() + 1, one.sum(), two * 2]

    expected = program()
    with lazyviz.lazy():
        results = program()
    for result, tensor in zip(results, expected, strict=True):
        assert torch.equal(result, tensor) and result.stride() == tensor.stride()
    assert addresses(results) == addresses(expected)


@pytest.mark.parametrize("dropped", ["source", "detached", "neither"])
def test_whichever_tensor_is_left_is_computed(dropped):
    with lazyviz.lazy() as graph:
        x = torch.arange(4.0) * 2
        one, two = x.data, x.data
        if dropped == "source":
            del x
        if dropped == "detached":
            del one
    live = [two] + ([x] if dropped != "source" else []) + ([one] if dropped != "detached" else [])
    graph.evaluate()
    addresses = set()
    for tensor in live:
        assert type(tensor) is torch.Tensor and tensor.tolist() == [0.0, 2.0, 4.0, 6.0]
        addresses.add(tensor.data_ptr())
    assert len(addresses) == 1


def test_memory_is_held_until_the_last_of_them_dies():
    with lazyviz.lazy() as graph:
        x = torch.ones(1000) + 1
        data = x.data
        del x
        kept = torch.ones(1) + 1
        del data
        after = torch.ones(1) + 2
    levels = [nbytes for _, nbytes in graph.plan().timeline]
    assert max(levels) >= 4000 and levels[-1] < 4000, levels
    assert kept.item() + after.item() == 5.0


def test_dropped_tensors_leave_nothing_behind():
    with lazyviz.lazy() as graph:
        x = torch.ones(3) + 1
        dead = [weakref.ref(x.data) for _ in range(5)]
        value = x._lazyviz
        assert sum(1 for _ in value.refs()) == 1 and value.storage.live == 1
    gc.collect()
    assert all(ref() is None for ref in dead)
    del x
    assert value.tensor is None and value.storage.live == 0
    graph.evaluate()


def test_any_number_of_tensors_may_share_memory():
    with lazyviz.lazy() as graph:
        x = torch.ones(2) * 3
        many = [x.data for _ in range(10 * MOST_TENSORS)]
        many[-1].add_(1)
    assert sum(1 for _ in x._lazyviz.refs()) <= MOST_TENSORS
    graph.evaluate()
    assert all(each.tolist() == [4.0, 4.0] for each in (x, *many))
    assert {each.data_ptr() for each in many} == {x.data_ptr()}


def test_a_saved_result_that_was_written_since_is_the_error_of_eager():
    def program() -> None:
        y = torch.ones(3, requires_grad=True).exp()
        y.add_(1)
        y.sum().backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation") as eager:
        program()
    with lazyviz.lazy(), pytest.raises(RuntimeError, match="modified by an inplace operation") as lazy:
        program()
    assert str(lazy.value).split(";")[0] == str(eager.value).split(";")[0]


def test_two_parameters_may_be_given_one_tensor():
    def program() -> list[torch.Tensor]:
        torch.manual_seed(0)
        one, two = nn.Linear(3, 3), nn.Linear(3, 3)
        shared = torch.randn(3, 3)
        one.weight.data = two.weight.data = shared
        optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            F.mse_loss(two(one(torch.ones(2, 3))), torch.zeros(2, 3)).backward()
            optimizer.step()
        one.weight.data = one.weight.data.t()
        return [one.weight, two.weight, one.weight.grad, two.bias.grad, shared]

    expected = program()
    with lazyviz.lazy() as graph:
        results = program()
    graph.evaluate()
    for result, tensor in zip(results, expected, strict=True):
        assert torch.equal(result, tensor) and result.stride() == tensor.stride()
    assert results[0].data_ptr() == results[1].data_ptr() == results[4].data_ptr()


def test_gradients_are_named_and_stored_without_an_op():
    model = nn.Linear(4, 2)
    with lazyviz.lazy() as graph:
        model(torch.ones(3, 4)).sum().backward()
    assert not any("detach" in name for name in names(graph))
    assert model.weight.grad._lazyviz.storage.role == "gradient"
    assert model.weight.grad._lazyviz.storage.name.endswith("weight.grad")
    assert model.bias.grad._lazyviz.storage.role == "gradient"


def test_swapped_tensors_keep_what_shares_their_values():
    with lazyviz.lazy() as graph:
        x, y = torch.ones(2) + 1, torch.ones(3) + 2
        data = x.data
        torch.utils.swap_tensors(x, y)
        x.add_(1)
    graph.evaluate()
    assert (x.tolist(), y.tolist(), data.tolist()) == ([4.0] * 3, [2.0] * 2, [2.0] * 2)
    assert data.data_ptr() == y.data_ptr()
