"""The private torch APIs of :mod:`lazyviz.torch_internals.fake_cuda_devices` behave as documented."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lazyviz.process.global_state_transaction import take_back
from lazyviz.torch_internals import fake_cuda_devices, private_api

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
OF_CPU_BUILDS = pytest.mark.skipif(
    torch.backends.cuda.is_built(), reason="a build with CUDA has the driver's own messages"
)


class Wrapper(torch.Tensor):
    __torch_function__ = private_api.disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return torch.empty(2)


def wrapper(device):
    return private_api.make_wrapper_subclass(
        Wrapper, (2,), (1,), 0, None, torch.float32, torch.strided, torch.device(device)
    )


def test_stand_ins_are_devices_whose_backward_runs_on_the_cpus_thread():
    fake_cuda_devices.stand_in()
    below = fake_cuda_devices.STAND_INS[torch.device("cuda", 3)]
    assert below.type == "meta"
    assert torch.empty(1, device="meta").device.index is None  # what tells the user's own from ours
    assert fake_cuda_devices.stands_for(below) == torch.device("cuda", 3)
    assert fake_cuda_devices.stands_for(torch.device("cpu")) == torch.device("cpu")


def test_a_marked_tensor_reaches_the_kernels_of_autocast():
    tensor, reached = wrapper("meta"), []

    def kernel(left, right):
        reached.append(left)
        return torch.empty(2)

    undo = []
    fake_cuda_devices.override({"mm": kernel}, "AutocastCUDA", undo)
    try:
        with _autocast():
            torch.ops.aten.mm.default(tensor, tensor)
            assert not reached
            fake_cuda_devices.mark(tensor)
            torch.ops.aten.mm.default(tensor, tensor)
            assert len(reached) == 1
            with fake_cuda_devices.without_autocast():
                torch.ops.aten.mm.default(tensor, tensor)
            assert len(reached) == 1
    finally:
        take_back(undo)


class _autocast:
    """Autocast for CUDA, which its context manager turns on only where a CUDA device is."""

    def __enter__(self):
        torch.set_autocast_enabled("cuda", True)

    def __exit__(self, *error):
        torch.set_autocast_enabled("cuda", False)


def test_a_parameter_takes_a_planned_tensors_place():
    parameter = torch.nn.Parameter(torch.ones(2))
    stand_in = wrapper("meta:100")
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        private_api._set_data(parameter, stand_in)
    with fake_cuda_devices.as_on_cpu(parameter, stand_in):
        private_api._set_data(parameter, stand_in)
    assert torch._C._dispatch_keys(parameter).has(torch._C.DispatchKey.Meta)
    for tensor in (parameter, stand_in):
        assert not torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.CPU)


@OF_CPU_BUILDS
def test_c_plus_plus_asks_for_initialization_again(monkeypatch):
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    with pytest.raises(NotImplementedError):
        torch.zeros(1, device="cuda")
    monkeypatch.undo()
    fake_cuda_devices.require_init()
    with pytest.raises(AssertionError, match="not compiled with CUDA"):
        torch.zeros(1, device="cuda")


@OF_CPU_BUILDS
def test_shape_rules_may_guard_a_cuda_device():
    with FakeTensorMode(), torch.no_grad():
        tensor = torch.empty(2, device="cuda:0")
        with pytest.raises(RuntimeError, match="not linked with support for cuda"):
            tensor.copy_(tensor)
        with fake_cuda_devices.cuda_guards():
            assert tensor.copy_(tensor).device == torch.device("cuda", 0)
        with pytest.raises(RuntimeError, match="not linked with support for cuda"):
            tensor.copy_(tensor)


def test_an_operator_run_as_one_keeps_autograds_formula():
    seen = []

    class Watch(private_api.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    tensor = torch.empty(2, 4, device="meta", requires_grad=True)

    def ops():
        seen.clear()
        with Watch():
            torch.rms_norm(tensor, (4,))
        return list(seen)

    assert "aten._fused_rms_norm.default" not in ops()
    undo = []
    fake_cuda_devices.run_as_one(["_fused_rms_norm"], undo)
    try:
        assert ops()[0] == "aten._fused_rms_norm.default"
    finally:
        take_back(undo)
    assert "aten._fused_rms_norm.default" not in ops()


def test_the_order_of_attention_kernels_is_the_one_that_is_compared_with():
    from lazyviz.record.fake_cuda.sdpa_backend_selection import _DEFAULT_ORDER

    assert tuple(fake_cuda_devices.attention_order())[:4] == _DEFAULT_ORDER


@pytest.mark.parametrize(
    "place",
    [
        fake_cuda_devices.GROUP_TENSORS,
        fake_cuda_devices.COMPATIBLE_TENSORS,
        fake_cuda_devices.PARSE_TO,
        fake_cuda_devices.TRUNC_NORMAL,
        fake_cuda_devices.CHECK_BALANCE,
    ],
    ids=lambda place: place[1],
)
def test_what_is_replaced_is_there(place):
    owner, name = place
    assert callable(getattr(owner, name))


def test_optimizers_ask_in_their_own_module_which_form_to_take():
    owners = {owner.__name__ for owner, _ in fake_cuda_devices.foreach_choices()}
    assert {"torch.optim.adam", "torch.optim.sgd", "torch.optim.rmsprop"} <= owners
    module, name = fake_cuda_devices.FOREACH_ADAM
    assert callable(getattr(module, name))


def test_adam_adds_epsilon_to_lists_in_place():
    ones = [torch.ones(2), torch.ones(3)]
    added = fake_cuda_devices.foreach_add(ones, 1.5)
    getattr(torch, fake_cuda_devices.FOREACH_ADD_IN_PLACE)(ones, 1.5)
    assert [each.tolist() for each in added] == [each.tolist() for each in ones] == [[2.5] * 2, [2.5] * 3]
    module, name = fake_cuda_devices.FOREACH_ADAM
    assert f"torch.{fake_cuda_devices.FOREACH_ADD_IN_PLACE}(exp_avg_sq_sqrt, eps)" in inspect.getsource(
        getattr(module, name)
    )
