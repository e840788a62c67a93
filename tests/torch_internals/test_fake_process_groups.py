"""The private APIs of :mod:`lazyviz.torch_internals.fake_process_groups` behave as documented."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lazyviz
from lazyviz.record.interception.attribute_patches import Patches
from lazyviz.torch_internals import fake_process_groups, redispatch_from_dispatch_mode


@pytest.fixture
def world():
    """Rank 1 of 4, and after it nothing of it."""
    patches = Patches()
    before = fake_process_groups.exchange(fake_process_groups.GroupTables())
    try:
        for owner, name, value in fake_process_groups.patches():
            patches.set(owner, name, value)
        fake_process_groups.start(1, 4, "nccl")
        yield patches
    finally:
        after = fake_process_groups.exchange(before)
        patches.restore()
        assert not dist.is_initialized()
        del after


def test_groups_are_exchanged_as_a_whole(world):
    hook = sys.excepthook
    group = dist.new_group([1, 3], group_desc="pair")
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (1, 4, "nccl")
    assert fake_process_groups.is_fake()
    assert fake_process_groups.ranks_of(group) == (1, 3)
    found = fake_process_groups.exchange(fake_process_groups.GroupTables())
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError):
        fake_process_groups.group_named(group.group_name)
    fake_process_groups.exchange(found)
    assert fake_process_groups.group_named(group.group_name).size() == 2
    assert dist.get_rank() == 1
    assert sys.excepthook is hook


def test_a_group_has_the_backend_that_was_asked_for_by_name_alone(world):
    assert fake_process_groups.backend_name() == "nccl"
    fake_process_groups.name_backend("gloo")
    assert dist.get_backend() == fake_process_groups.backend_name() == "gloo"
    assert dist.get_backend(dist.new_group([0, 1])) == "gloo"


def test_operators_take_groups_that_are_known():
    boxed = dist.distributed_c10d.ProcessGroup(dist.HashStore(), 0, 2)
    assert fake_process_groups.unboxed(boxed) is boxed
    assert fake_process_groups.unboxed(boxed.boxed()).size() == 2
    assert fake_process_groups.unboxed("a name") is None


def test_what_is_waited_for_has_the_tensors_of_the_call():
    tensor = torch.ones(3)
    work = torch._C._distributed_c10d.Work.unbox(fake_process_groups.done([tensor]))
    assert work.wait()
    assert work.get_future().value()[0] is tensor


def test_the_function_inside_of_decorators_is_the_one_that_all_call():
    inner = fake_process_groups.INIT_PROCESS_GROUP
    assert inner.__name__ == "init_process_group"
    assert inner.__closure__ is None
    assert inner.__code__.co_varnames[3:5] == ("world_size", "rank")


def test_distributed_tensors_are_dispatched_in_cpp():
    distributed, waited = fake_process_groups.wrapper_classes()
    assert redispatch_from_dispatch_mode.is_dispatched_in_cpp(distributed)
    assert not redispatch_from_dispatch_mode.is_dispatched_in_cpp(waited)
    assert not redispatch_from_dispatch_mode.is_dispatched_in_cpp(torch.Tensor)


def test_what_is_patched_of_other_classes_is_there():
    assert callable(fake_process_groups.fsdp_parameter().reset_sharded_param)
    assert callable(fake_process_groups.sharding_propagator()._propagate_tensor_meta_non_cached)
    assert callable(DistributedDataParallel._check_comm_hook)
    dispatcher, tracker = fake_process_groups.random_state()
    assert callable(dispatcher.is_rng_supported_mesh)
    assert isinstance(tracker.distribute_region_enabled, property)


def test_each_private_name_has_its_reason():
    text = fake_process_groups.__doc__ or ""
    for name in ("_world", "_register_process_group", "FakeProcessGroup", "_create_work_from_future"):
        assert name in text
    assert lazyviz.__version__
