"""Each private torch API that lazyviz uses behaves as documented in the modules of ``PRIVATE``."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import operator
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.optim import optimizer as optimizer_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import lazyviz
from lazyviz.process.global_state_transaction import take_back
from lazyviz.record import constant_folding, native_recorder, random_draw_order
from lazyviz.record.interception import attribute_patches
from lazyviz.torch_internals import (
    composite_ops,
    cpu_kernel_selection,
    dispatch_level,
    dispatcher_bypasses,
    dynamo,
    fake_cuda_devices,
    fastest_op_calls,
    generators,
    private_api,
    redispatch_from_dispatch_mode,
    storage_ownership,
)
from lazyviz.torch_internals.cpu_kernel_selection import Instructions


class Wrapper(torch.Tensor):
    __torch_function__ = private_api.disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} reached a pending tensor")


def wrapper(shape=(2, 3), dtype=torch.float32):
    stride = torch.empty(shape, device="meta").stride()
    return private_api.make_wrapper_subclass(
        Wrapper, shape, stride, 0, None, dtype, torch.strided, torch.device("cpu")
    )


def test_an_address_that_a_pending_tensor_does_not_have_is_refused():
    tensor = dispatcher_bypasses.make_wrapper(Wrapper, (2, 3), (3, 1), 0, torch.float32, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        tensor.data_ptr()


measures_allocations = pytest.mark.skipif(
    dispatcher_bypasses.measured(torch.empty, (1,), {})[1] is None, reason="lazyviz's C++ is not compiled"
)


def test_a_call_has_its_result_whether_it_is_measured_or_not():
    assert dispatcher_bypasses.measured(max, ([1, 2],), {"key": int.__neg__})[0] == 1
    with pytest.raises(ZeroDivisionError):
        dispatcher_bypasses.measured(lambda: 1 // 0, (), {})
    assert dispatcher_bypasses.end_measuring() is None


@measures_allocations
def test_the_allocator_says_what_a_call_holds_at_most():
    kept = torch.ones(1000)
    assert dispatcher_bypasses.measured(lambda: kept.clone().add(kept).sum(), (), {})[1] == 8000


@measures_allocations
def test_measuring_does_not_look_like_a_profiler_and_gives_way_to_one():
    assert dispatcher_bypasses.measured(torch.autograd._profiler_enabled, (), {}) == (False, 0)
    with torch.autograd.profiler.profile(profile_memory=True):
        assert dispatcher_bypasses.measured(torch.ones, (10,), {})[1] is None
        assert torch.autograd._profiler_enabled()


@measures_allocations
def test_a_measurement_that_an_interrupt_has_left_is_replaced():
    dispatcher_bypasses.begin_measuring()
    kept = torch.ones(1000)
    dispatcher_bypasses.begin_measuring()
    small = torch.ones(10)
    assert dispatcher_bypasses.end_measuring() == small.nbytes < kept.nbytes
    assert dispatcher_bypasses.end_measuring() is None


def test_numbers_in_lists_are_read_by_methods_that_can_be_replaced(monkeypatch):
    read = []

    def noted(name):
        original = getattr(torch.Tensor, name)

        def method(tensor):
            read.append((name, dispatcher_bypasses.bypasses_modes()))
            return original(tensor)

        return method

    for name in dispatcher_bypasses.NUMBERS:
        monkeypatch.setattr(torch.Tensor, name, noted(name))
    x, t = torch.arange(12.0).view(4, 3), torch.tensor(2)
    assert float(t) == 2.0
    torch.tensor([t, 1])
    x[[t, 1], [t, 0]]
    torch.tensor([1.0, t])
    torch.tensor([1j, t])
    names = ["float", "index", "index", "index", "float", "complex"]
    assert read == [(f"__{name}__", number > 0) for number, name in enumerate(names)]


def test_who_refers_to_a_storage_is_counted():
    tensor = torch.ones(3)
    assert storage_ownership.are_alone([tensor])
    alias = tensor.detach()
    assert not storage_ownership.are_alone([tensor])
    assert storage_ownership.are_alone([tensor, alias])
    del alias
    storage = tensor.untyped_storage()
    assert not storage_ownership.are_alone([tensor])
    del storage
    assert storage_ownership.are_alone([tensor])


def test_methods_of_generators_can_be_replaced_and_put_back():
    generator = torch.Generator().manual_seed(3)
    replacement = attribute_patches.Patches()
    for replaced in (True, False, True, False):
        if not replaced:
            replacement.restore()
        elif not replacement.reapply():
            replacement.set(torch.Generator, "initial_seed", lambda generator: "replaced")
        assert [generator.initial_seed() for _ in range(3)] == ["replaced" if replaced else 3] * 3
        assert random_draw_order.READERS["initial_seed"](generator) == 3
    assert {
        name: vars(torch.Generator)[name] for name in random_draw_order.READERS
    } == random_draw_order.READERS


def test_optimizers_tell_of_their_steps_outside_of_their_own_hooks():
    """And only of the outermost, of classes that are first used inside."""
    from lazyviz.torch_internals.after_optimizer_step_callbacks import watched_steps

    class Outer(torch.optim.SGD):
        def step(self, closure=None):
            inner.step()
            return super().step(closure)

    class Inner(torch.optim.SGD):
        pass

    weight = torch.nn.Parameter(torch.ones(2))
    told = []

    def after(optimizer):
        handle = optimizer_hooks.register_optimizer_step_post_hook(lambda *args: None)
        handle.remove()  # PyTorch is not going through them
        told.append(("after", optimizer))

    before = vars(torch.optim.Optimizer)["profile_hook_step"]
    with watched_steps(lambda optimizer: told.append(("before", optimizer)), after):
        inner, outer = Inner([weight], lr=0.1), Outer([weight], lr=0.1)
        outer.step()
    assert told == [("before", outer), ("after", outer)]
    assert vars(torch.optim.Optimizer)["profile_hook_step"] is before
    inner.step()
    assert len(told) == 2


def test_private_names_stay_in_one_package():
    package = Path(lazyviz.__file__).parent
    private = re.compile(r"torch\._[A-Za-z]\w*|from torch\._\w+|_make_wrapper_subclass\(|ctypes|gc\.get_ref")
    for path in package.rglob("*.py"):
        if path.parent.name != "torch_internals":
            found = private.search(path.read_text())
            assert found is None, f"{path.name}: {found}"


def test_a_wrapper_becomes_an_ordinary_tensor_in_place():
    tensor = wrapper()
    tensor.requires_grad_()
    hooked = []
    tensor.register_hook(hooked.append)
    real = torch.arange(6.0).reshape(2, 3)
    private_api.become_real(tensor, real, torch.Tensor)
    assert type(tensor) is torch.Tensor
    assert tensor.data_ptr() == real.data_ptr()
    assert "Python" not in str(torch._C._dispatch_keys(tensor))
    (tensor * 2).sum().backward()
    assert tensor.grad.tolist() == [[2, 2, 2], [2, 2, 2]]
    assert len(hooked) == 1
    tensor.requires_grad_(False).resize_(3, 3)  # metadata may change again


def test_conjugate_and_negative_views_become_real_without_being_read():
    for view in (lambda t: t.conj(), lambda t: t.conj().imag):
        with lazyviz.lazy() as graph:
            x = torch.randn(3, dtype=torch.complex64)
            y = view(x)
        graph.evaluate()
        assert torch.equal(y, view(x))
        assert (y.is_conj(), y.is_neg()) == (view(x).is_conj(), view(x).is_neg())


def test_a_real_tensor_becomes_pending_and_back():
    parameter = torch.nn.Parameter(torch.ones(2))
    address = parameter._cdata
    private_api.become_pending(parameter, wrapper((4,)), Wrapper)
    assert parameter.shape == (4,)
    with pytest.raises(AssertionError, match="reached a pending tensor"):
        parameter + 1
    private_api.become_real(parameter, torch.zeros(4), torch.nn.Parameter)
    assert parameter._cdata == address
    assert (parameter + 1).tolist() == [1, 1, 1, 1]


def test_a_wrapper_that_only_autograd_holds_keeps_its_python_object():
    tensor = wrapper()
    holder = torch.ones(2, 3, requires_grad=True)
    holder.grad = tensor
    deaths = []
    reference = weakref.ref(tensor, deaths.append)
    del tensor
    assert reference() is holder.grad and not deaths
    holder.grad = None
    assert deaths


def test_aliases_share_memory_and_not_the_version():
    tensor = torch.ones(3)
    alias = private_api.alias(tensor)
    alias.add_(1)
    assert tensor.tolist() == [2, 2, 2]
    assert tensor._version == 0
    assert private_api.storage_address(alias) == private_api.storage_address(tensor)
    assert private_api.storage_address(tensor.clone()) != private_api.storage_address(tensor)


def test_an_exception_that_comes_as_the_level_of_kernels_is_left_does_not_keep_it():
    before = torch._C._dispatch_tls_local_exclude_set()
    level = dispatch_level._KernelsOnly()
    level.__enter__()
    assert torch._C._dispatch_tls_local_exclude_set() != before

    def interrupt(frame, event, argument):
        if event == "call" and frame.f_code.co_name == "_leave":
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    with pytest.raises(KeyboardInterrupt):
        level.__exit__(None, None, None)
    level.__exit__(None, None, None)  # as `complete` does
    assert torch._C._dispatch_tls_local_exclude_set() == before


def test_kernels_only_reaches_no_mode_no_autograd_and_no_autocast():
    class Refuse(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError("a mode saw the op")

    weight = torch.ones(2, 2, requires_grad=True)
    with (
        Refuse(),
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.device("meta"),
        private_api.kernels_only(),
    ):
        result = torch.ops.aten.mm.default(weight, weight)
        made = torch.ops.aten.ones.default([2], device=torch.device("cpu"))
    assert result.dtype == torch.float32 and not result.requires_grad
    assert made.device.type == "cpu"


def test_excluding_python_lets_kernels_answer_from_metadata():
    tensor = wrapper()
    with private_api.excluding_python():
        assert torch.ops.aten.is_same_size.default(tensor, tensor)


def test_a_mode_goes_in_at_the_bottom_and_out_from_anywhere():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(self)
            return func(*args, **(kwargs or {}))

    seen: list[Mode] = []
    ours = Mode()
    with Mode() as theirs:
        private_api.insert_mode_at_bottom(ours)
        torch.ones(1)
        assert seen == [theirs, ours]
        assert private_api.remove_mode(ours) and not private_api.remove_mode(ours)
        torch.ones(1)
        assert seen[2:] == [theirs]
    assert private_api.active_dispatch_modes() == 0


def test_what_a_handler_leaves_to_others_is_seen_by_its_mode():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            if types:
                return redispatch_from_dispatch_mode.ask_subclasses(self, types, func, args, kwargs or {})
            if redispatch_from_dispatch_mode.makes_views_by_decomposition(func):
                return redispatch_from_dispatch_mode.call_decomposed(self, func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    class Unwraps(Wrapper):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return torch.ops.aten.neg.default(plain)

    aten = torch.ops.aten
    plain, seen = torch.ones(2, 3), []
    other = torch.Tensor._make_wrapper_subclass(Unwraps, (2, 3))
    with Mode():
        torch.abs(other)
        with torch.inference_mode():
            view = plain.mT
    assert seen == [aten.abs.default, aten.neg.default, aten.mT.default, aten.transpose.int]
    assert view._is_view() and view._base is plain
    made = [aten.reshape.default, aten.mT.default, aten.view_as.default]
    assert all(map(redispatch_from_dispatch_mode.makes_views_by_decomposition, made))
    tracked = [aten.view.default, aten.narrow.default, aten.matmul.default, aten.add_.Tensor]
    assert not any(map(redispatch_from_dispatch_mode.makes_views_by_decomposition, tracked))


def test_an_op_in_a_handler_can_pass_by_functions_of_subclasses():
    class Function(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("called")

    with redispatch_from_dispatch_mode.past_torch_function():
        tensor = torch.ones(2).as_subclass(Function)
        assert torch.ops.aten.add.Tensor(tensor, tensor).sum().item() == 4


def test_torchscript_writes_and_reads_memory_by_these_functions():
    writers = {name for owner, name in dispatcher_bypasses.SCRIPT_WRITERS}
    readers = {name for owner, name in dispatcher_bypasses.SCRIPT_READERS}
    assert {"save", "save_to_buffer", "serialize", "_pickle_save"} <= writers
    assert {"import_ir_module", "import_ir_module_from_buffer", "_pickle_load_obj"} <= readers
    tensor = torch._C._pickle_load_obj(torch._C._pickle_save(torch.ones(2) * 3))
    assert tensor.tolist() == [3, 3]


def test_sequence_numbers_pair_forward_and_backward():
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            node = private_api.current_autograd_node()
            seen.append((func, private_api.sequence_number() - 1 if node is None else node._sequence_nr()))
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, requires_grad=True)
    with Watch():
        x.exp().sum().backward()
    numbers = {str(func): number for func, number in seen}
    backward = [number for func, number in seen if str(func) == "aten.mul.Tensor"]
    assert backward == [numbers["aten.exp.default"]]


def test_lazy_parameters_do_not_change_the_choice_of_foreach():
    from torch.optim.optimizer import _foreach_supported_types
    from torch.utils import _foreach_utils

    both = (_foreach_supported_types, _foreach_utils._foreach_supported_types)
    before = [list(types) for types in both]
    fake_cuda_devices.support_foreach(Wrapper)
    assert all(Wrapper in types for types in both)
    fake_cuda_devices.withdraw_foreach(Wrapper)
    assert [list(types) for types in both] == before


def test_dispatches_itself_tells_subclasses_with_their_own_dispatch():
    assert private_api.dispatches_itself(Wrapper)
    assert not private_api.dispatches_itself(torch.nn.Parameter)


def test_shape_rule_errors_are_not_logged_twice(caplog):
    with pytest.raises(RuntimeError), lazyviz.lazy():
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert not caplog.records


def test_every_backward_pass_goes_through_the_entries(monkeypatch):
    passes = []
    for owner in private_api.BACKWARD_ENTRIES:
        original = owner._engine_run_backward

        def entry(*args, _original=original, **kwargs):
            passes.append(args)
            return _original(*args, **kwargs)

        monkeypatch.setattr(owner, "_engine_run_backward", entry)
    x = torch.ones(3, requires_grad=True)
    x.sum().backward()
    torch.autograd.grad(x.sum(), x)
    assert len(passes) == 2


def test_functional_calls_cross_entropy_where_it_is_patched(monkeypatch):
    monkeypatch.setattr(private_api.nn_functions, "cross_entropy_loss", lambda *args, **kwargs: "patched")
    assert torch.nn.functional.cross_entropy(torch.ones(2, 3), torch.tensor([0, 1])) == "patched"


def test_generators_keep_their_identity_through_the_dispatcher():
    seen = []

    class Watch(private_api.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(kwargs["generator"])
            return func(*args, **kwargs)

    own = torch.Generator()
    with Watch():
        torch.rand(2, generator=torch.default_generator)
        torch.rand(2, generator=own)
    assert [generators.generator_identity(generator) for generator in seen] == [
        generators.generator_identity(torch.default_generator),
        generators.generator_identity(own),
    ]


def memory_of(tensor):
    return storage_ownership.memory_of(storage_ownership.storage_address(tensor))


def test_the_deleter_of_a_storage_is_recognized(tmp_path):
    file = tmp_path / "numbers"
    file.write_bytes(bytes(64))
    array, buffer = np.zeros(4), bytearray(16)
    private = torch.from_file(str(file), shared=False, size=4)
    shared = torch.from_file(str(file), shared=True, size=4)
    part = torch.empty(0).set_(private.untyped_storage()[4:12])
    assert memory_of(torch.ones(3)).deleter == storage_ownership.OWN
    assert memory_of(part).data == private.data_ptr() + 4
    assert storage_ownership.whole_of(memory_of(part)) == storage_ownership.storage_address(private)
    assert storage_ownership.whole_of(memory_of(private)) is None
    for tensor, keeper in (
        (torch.from_numpy(array), array),
        (torch.frombuffer(buffer, dtype=torch.uint8), buffer),
    ):
        assert storage_ownership.is_kept_by_python(memory_of(tensor))
        assert storage_ownership.keeper(memory_of(tensor)) is keeper
    for tensor in (private, shared, torch.ones(2), torch.from_dlpack(torch.ones(2))):
        assert not storage_ownership.is_kept_by_python(memory_of(tensor))
    assert storage_ownership.is_private_mapping(memory_of(private))
    assert not storage_ownership.is_private_mapping(memory_of(shared))
    assert not storage_ownership.is_private_mapping(memory_of(torch.ones(2).share_memory_()))
    assert storage_ownership.shared_file(shared.untyped_storage()) == str(file)
    assert storage_ownership.shared_file(private.untyped_storage()) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the C library for sizes of memory")
@pytest.mark.parametrize("find", [private_api._key_set_offset, storage_ownership._find_memory])
def test_layouts_are_looked_for_inside_of_the_objects(find, monkeypatch):
    size_of = ctypes.CDLL(None).malloc_usable_size
    size_of.argtypes, size_of.restype = [ctypes.c_void_p], ctypes.c_size_t
    read, sizes = [], {}

    def watched(address, count=1):
        if len(sizes) < 2:  # two objects are looked at, from the front
            sizes[address] = size_of(address)
        assert any(0 <= address - start <= size - 8 * count for start, size in sizes.items())
        read.append(address)
        return ctypes.c_uint64.from_address(address).value

    words = storage_ownership._words
    monkeypatch.setattr(private_api, "word", watched)
    monkeypatch.setattr(
        storage_ownership,
        "_words",
        lambda address, count: (watched(address, count), words(address, count))[1],
    )
    assert find() in (private_api.KEY_SET_OFFSET, storage_ownership._MEMORY_OFFSET)
    assert len(read) >= 2


def test_a_tensor_without_other_references_is_alone():
    array = np.zeros(4)
    tensor = torch.from_numpy(array)
    memory = memory_of(tensor)
    kept = storage_ownership.keeper(memory)
    assert sys.getrefcount(kept) == storage_ownership.ALONE + 1
    del array
    assert sys.getrefcount(kept) == storage_ownership.ALONE


def test_memory_that_was_given_to_numpy_is_not_ordinary():
    given, other = torch.ones(3), torch.ones(3)
    assert storage_ownership.is_resizable(given) and storage_ownership.is_ordinary(given)
    given.numpy()
    assert not storage_ownership.is_resizable(given) and not storage_ownership.is_ordinary(given)
    assert storage_ownership.is_ordinary(other)
    assert not storage_ownership.is_ordinary(torch.ones(3).share_memory_())  # resizable as before
    assert [
        storage_ownership.address_of(tensor)
        for tensor in (given, torch.ones(2, 2).to_sparse(), torch.ones(2, device="meta"))
    ] == [given.untyped_storage()._cdata, None, None]


def test_a_weak_reference_to_the_c_tensor_does_not_keep_it():
    tensor = torch.ones(3)
    array = tensor.detach().numpy()
    reference = storage_ownership.WeakTensor(array.base)
    assert not reference.expired()
    del array
    assert reference.expired()
    assert storage_ownership.use_count(tensor) == 1


def test_every_reference_that_an_object_has_is_found():
    tensor = torch.ones(3)
    found = storage_ownership.referents_of([[tensor, tensor], {"key": tensor}, [1]])
    assert sum(item is tensor for item in found) == 3


def test_refreshed_modes_are_found_again_after_an_inference_mode_hid_them():
    class Count(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Count.seen += 1
            return func(*args, **(kwargs or {}))

    mode, x = Count(), torch.ones(2)
    with torch.inference_mode():
        private_api.insert_mode_at_bottom(mode)
    assert private_api.has_mode(mode)
    x + 1
    assert Count.seen == 0  # the reason for refreshing
    private_api.refresh_modes()
    x + 1
    assert Count.seen == 1
    with torch.inference_mode():
        private_api.remove_mode(mode)
    private_api.refresh_modes()
    assert (x + 1).tolist() == [2, 2] and not private_api.has_mode(mode)


def test_our_own_inference_mode_is_torchs():
    with private_api.inference_mode(True):
        assert torch.ones(1).is_inference()
        with private_api.inference_mode(False):
            assert not torch.ones(1).is_inference()
    assert not torch.is_inference_mode_enabled()


def test_a_gradient_that_only_the_engine_holds_is_distinguished_from_one_with_other_references():
    found = []

    class Watch(private_api.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.add.Tensor:
                found.append(private_api.engine_is_sole_owner(args))
            return func(*args, **(kwargs or {}))

    def sums(kept):
        x = torch.ones(2, requires_grad=True) * 1
        first = x.exp()
        other = x.clone()  # the last made gives its gradient first
        other.grad_fn.register_hook(lambda inputs, outputs: kept.extend(inputs))
        total = first.sum() + other.sum()
        found.clear()
        with Watch():
            total.backward()
        return list(found)

    class Forget(list):
        def extend(self, items):
            pass

    assert sums(Forget()) == [True]
    assert sums([]) == [False]


@pytest.mark.filterwarnings("ignore:.*also be overridden")  # lazyviz's own may be there from another test
@pytest.mark.parametrize("wanted", [composite_ops._STATE_IS_NEEDED, True])
def test_composites_go_on_to_dispatch_modes_in_inference_mode(wanted, monkeypatch):
    monkeypatch.setattr(composite_ops, "_STATE_IS_NEEDED", wanted)
    undo = []
    composite_ops.override_composites({"matmul": lambda original, *tensors: original(*tensors)}, undo)
    seen = []

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    left, right = torch.randn(2, 3), torch.randn(3, 4)
    try:
        with torch.inference_mode(), Note():
            product = left @ right
    finally:
        take_back(undo)
    assert seen == [torch.ops.aten.matmul.default] and torch.equal(product, left @ right)


def test_the_state_on_entry_leaves_nothing_to_the_collector():
    with composite_ops._state_on_entry():
        pass
    while gc.collect():  # what a graph of another test has kept from the collector is left when that has gone
        pass
    for _ in range(50):
        with composite_ops._state_on_entry():
            pass
    assert gc.collect() < 50


def test_a_mode_can_see_a_composite_as_one_op():
    seen = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            seen.append(op)
            return op(*args, **(kwargs or {}))

    undo = []
    composite_ops.override_composites({"max_pool1d": lambda original, *given: original.whole(*given)}, undo)
    image = torch.randn(2, 3, 9, requires_grad=True)
    with Mode():
        pooled = torch.ops.aten.max_pool1d.default(image, [3])
    take_back(undo)
    assert seen == [torch.ops.aten.max_pool1d.default]
    assert not pooled.requires_grad and torch.equal(pooled, torch.max_pool1d(image, 3))


def test_a_composite_can_be_given_another_kernel_and_its_own_again():
    before = torch._C._dispatch_dump("aten::matmul")
    seen = []

    def matmul(original, left, right):
        seen.append((left.dtype, original.is_next))
        return original(left, right)

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            return op(*args, **(kwargs or {}))

    undo = []
    composite_ops.override_composites({"matmul": matmul}, undo)
    left, right = torch.randn(2, 3, requires_grad=True), torch.randn(3, 4)
    product = left @ right
    assert not seen  # without a mode, nobody comes past
    with Mode():
        again = torch.linalg.multi_dot([left, right]) + left @ right  # called from C++ and from Python
        called = len(seen)
        with torch.autocast("cpu", torch.bfloat16):
            half = left @ right
        mapped = torch.vmap(torch.matmul, (None, 0))(left, torch.stack([right, right]))
    take_back(undo)
    assert called >= 1 and all(is_next for _, is_next in seen[:called])
    assert (torch.float32, False) in seen and (torch.bfloat16, True) in seen and half.dtype == torch.bfloat16
    assert torch.equal(again, product * 2) and again.requires_grad
    assert torch.allclose(mapped[1], product)
    count = len(seen)
    with Mode():
        left @ right
    assert len(seen) == count
    assert torch._C._dispatch_dump("aten::matmul") == before


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_tangent_is_seen():
    with torch.autograd.forward_ad.dual_level():
        tensor = torch.ones(2)
        assert not private_api.has_tangent(tensor)
        assert private_api.has_tangent(torch.autograd.forward_ad.make_dual(tensor, tensor))
    assert not private_api.has_tangent(tensor)


def test_a_node_knows_the_dtypes_of_its_gradients():
    values, _ = torch.linalg.eigh(torch.eye(2, dtype=torch.complex64, requires_grad=True))
    node = values.grad_fn
    assert [meta.dtype for meta in private_api.gradient_metadata(node)] == [torch.float32, torch.complex64]


@pytest.mark.slow
def test_the_wrapper_of_compiled_functions_is_known():
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    with lazyviz.lazy() as graph:
        y = compiled(torch.ones(2) * 2)
        z = y * 3
    assert [point.cause for point in graph.sync_points] == ["torch.compile"]  # else it was not noticed
    assert not lazyviz.is_lazy(y) and lazyviz.is_lazy(z)
    compiled = torch.compile(lambda x: x.sin(), backend="aot_eager")
    x = torch.ones(2, requires_grad=True)
    assert dynamo.is_compiled_backward(compiled(x).grad_fn)
    assert dynamo.CustomBackward in type(compiled(x).grad_fn).__mro__
    torch.compiler.reset()


def test_what_a_running_frame_returns_can_be_learned_once():
    seen = []

    def function(depth):
        if not depth:
            return "not asked for"
        try:
            return f"{depth} {function(depth - 1)}"
        finally:
            if depth == 2:
                assert dynamo.when_returned(sys._getframe(), seen.append)
                function(0)

    assert function(3) == "3 2 1 not asked for"
    assert seen == ["2 1 not asked for"]
    function(1)
    assert len(seen) == 1 and sys.getprofile() is None


def test_what_a_frame_returns_is_not_learned_where_profilers_have_all_places():
    taken = []
    if sys.version_info >= (3, 12):
        taken = [number for number in range(6) if sys.monitoring.get_tool(number) is None]
        for number in taken:
            sys.monitoring.use_tool_id(number, "test")
    else:
        sys.setprofile(lambda *event: None)
    try:
        assert not dynamo.when_returned(sys._getframe(), lambda value: None)
    finally:
        for number in taken:
            sys.monitoring.free_tool_id(number)
        sys.setprofile(None)


def test_ops_without_their_own_autograd_formula_are_recognized():
    library = torch.library.Library("lazyviz_private", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    op = torch.ops.lazyviz_private.twice.default
    assert private_api.leaves_autograd_to_its_parts(op)
    assert not private_api.leaves_autograd_to_its_parts(torch.ops.aten.mul.Tensor)
    library.impl("twice", lambda x: x * 2, "AutogradCPU")
    assert not private_api.leaves_autograd_to_its_parts(op)
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            with private_api.with_autograd():
                seen.append(torch.ones(2, requires_grad=True) * 2)
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.zeros(1)
    assert seen[0].grad_fn is not None
    assert not private_api.forward_mode_active()
    with torch.autograd.forward_ad.dual_level():
        assert private_api.forward_mode_active()


def test_autograd_takes_as_strided_for_a_view_while_its_base_does_not_show_as_a_wrapper(monkeypatch):
    def node_of_a_view_whose_base_was_written():
        with lazyviz.lazy():
            base = torch.ones(2, 3, requires_grad=True) * 2
            view = base[0]
            base.mul_(3)
            assert "PythonTLSSnapshot" in str(torch._C._dispatch_keys(base))  # shown again
            return type(view.grad_fn).__name__

    assert node_of_a_view_whose_base_was_written() == "AsStridedBackward0"  # as in eager mode
    monkeypatch.setattr(private_api, "show_as_wrapper", lambda tensor, on: None)
    before = native_recorder.active
    native_recorder.use(False)  # the recorder in Python calls it
    try:
        assert node_of_a_view_whose_base_was_written() == "SelectBackward0"  # the reason for it
    finally:
        native_recorder.use(before)


def test_a_modes_handler_can_see_conjugate_tensors_again():
    class Handler(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            with private_api.seeing_lazy_bits():
                return func(*args, **(kwargs or {}))

    matrix = torch.randn(4, 3, dtype=torch.complex64)
    expected = torch.linalg.pinv(matrix)
    with Handler():
        inverse = torch.linalg.pinv(matrix)
    assert torch.equal(inverse, expected)


def test_a_tensor_that_autograd_saved_has_more_than_one_use():
    tensor = torch.ones(3, requires_grad=True) * 2
    assert private_api.use_count(tensor) == 1
    result = tensor * tensor  # saves both factors
    assert private_api.use_count(tensor) > 1
    del result
    assert private_api.use_count(tensor) == 1


def test_a_view_keeps_the_tensor_it_is_of():
    tensor = torch.ones(3)
    assert private_api.base_of(tensor[:2]) is tensor
    assert private_api.base_of(tensor) is None


def test_the_kernel_of_a_convolution_follows_from_sizes_alone():
    def backend(shape, weight, dtype=torch.float32, transposed=False):
        return cpu_kernel_selection.conv_backend(
            shape, weight, (1, 1), (0, 0), (1, 1), transposed, (0, 0), 1, dtype
        )

    large, small, weight = (64, 64, 512, 512), (1, 3, 8, 8), (64, 64, 3, 3)
    assert backend(large, weight, torch.float64) == "Slow2d"
    assert backend(small, (4, 3, 3, 3)) == "Slow2d"
    if torch.backends.mkldnn.is_available():
        assert backend(large, weight) == "Mkldnn"
        assert backend(large, weight, transposed=True) == "MkldnnTranspose"


def test_an_exception_is_raised_in_a_thread_from_outside():
    began, seen = threading.Event(), []

    def work():
        try:
            began.set()
            for _ in range(2000):
                time.sleep(0.005)
        except KeyError:
            seen.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    began.wait()
    dynamo.raise_in_thread(thread.ident, KeyError)
    thread.join(10)
    assert seen == [True]


class AtUserLevel(TorchDispatchMode):
    """Calls a function of the user, as a signal handler would be, while it handles the first op."""

    def __init__(self, function):
        super().__init__()
        self.function, self.seen = function, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.overloadpacket.__name__)
        if self.function is not None:
            function, self.function = self.function, None
            before = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
            with redispatch_from_dispatch_mode.user_level(self):
                function()
            keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
            assert [key.raw_repr() for key in keys] == [key.raw_repr() for key in before]
            assert not private_api.active_dispatch_modes()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("autocast", [False, True])
def test_at_the_user_s_level_modes_and_autograd_see_ops(autocast):
    weight, results = torch.ones(2, requires_grad=True), []
    with AtUserLevel(lambda: results.append(weight * 2)) as mode, torch.autocast("cpu", enabled=autocast):
        torch.ones(2).add(1)
        assert private_api.has_mode(mode)
    assert mode.seen == ["ones", "mul", "add"]
    results[0].sum().backward()
    assert weight.grad.tolist() == [2, 2]


def test_at_the_user_s_level_nothing_changes_where_no_op_is_dispatched():
    mode = AtUserLevel(None)
    keys = torch._C._dispatch_tls_local_include_set().raw_repr()
    with redispatch_from_dispatch_mode.user_level(mode):
        assert torch._C._dispatch_tls_local_include_set().raw_repr() == keys
        assert not private_api.active_dispatch_modes()
        torch.ones(2)
    assert mode.seen == []


def test_a_graph_of_operators_is_compiled_with_numbers_that_are_read_when_it_runs():
    aten = torch.ops.aten
    graph = torch.fx.Graph()
    tensor, number = graph.placeholder("tensor"), graph.placeholder("number")
    value = graph.call_function(aten._local_scalar_dense.default, (number,))
    graph.output((graph.call_function(aten.mul_.Tensor, (tensor, value)),))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    half, x = torch.tensor(0.5, dtype=torch.float64), torch.ones(3)
    run = dynamo.compile_graph(module, [x], [half], {}).code
    for factor in (3.0, 5.0):
        run(x, torch.tensor(factor, dtype=torch.float64))
    assert x.tolist() == [15.0] * 3


def test_a_graph_of_operators_is_compiled_for_a_size_that_varies():
    aten = torch.ops.aten
    graph = torch.fx.Graph()
    size, tensor = graph.placeholder("size"), graph.placeholder("tensor")
    double = graph.call_function(operator.mul, (size, 2))
    graph.output((graph.call_function(aten.view.default, (tensor, [double])),))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    compiled = dynamo.compile_graph(module, [torch.ones(3, 2)], [], {}, 3, lambda n: [([n, 2], [2, 1])])
    assert compiled.holds(7) and not compiled.holds(1)
    assert compiled.code(7, torch.ones(7, 2))[0].shape == (14,)


@pytest.mark.parametrize("op", sorted(dynamo.CONTIGUOUS_UPSAMPLING | dynamo.UPSAMPLING, key=str), ids=str)
def test_gradients_of_interpolations_have_the_kernels_shapes_at_symbolic_sizes(op):
    """PyTorch's rule fails for them: once it does not, ours is not needed."""
    dims = int(str(op).split("d_")[0][-1])
    flags = [False for argument in op._schema.arguments if argument.name == "align_corners"]
    formats = [torch.contiguous_format, torch.channels_last, torch.channels_last_3d]
    for layout in (formats[0], formats[dims - 1]):
        real = torch.ones(4, 3, *[8] * dims).contiguous(memory_format=layout)
        expected = op(real, [8] * dims, [4, 3] + [4] * dims, *flags)
        for kind, fails in ((dynamo.SymbolicFakeMode, False), (private_api.FakeTensorMode, True)):
            environment = ShapeEnv()
            source = ConstantSource("size")
            symbol = environment.create_symbol(4, source=source, dynamic_dim=DimDynamic.DYNAMIC)
            size = environment.create_symintnode(symbol, hint=4, source=source)
            with kind(shape_env=environment):
                fake = torch.empty_strided([size, *real.shape[1:]], real.stride())
                if fails:
                    with pytest.raises(RuntimeError, match="INTERNAL ASSERT"):
                        op(fake, [8] * dims, [size, 3] + [4] * dims, *flags)
                else:
                    result = op(fake, [8] * dims, [size, 3] + [4] * dims, *flags)
                    assert symbol not in environment.replacements  # the size is not taken for constant
                    assert result.shape == expected.shape and result.stride() == expected.stride()


def test_the_quickest_call_of_an_operator_is_the_same_call():
    aten = torch.ops.aten
    x, y, bias = (torch.empty(shape, device="meta") for shape in ((4, 3), (3, 4), (4,)))
    with fastest_op_calls.proving() as quickest:
        assert quickest(aten.add.Tensor, [x, x], {"alpha": 2}) is torch._C.TensorBase.add
        assert quickest(aten.addmm.default, [bias, x, y], {}) is not aten.addmm.default._op
        # `x.mul(2)` is mul.Tensor, and nothing else than the operator itself is mul.Scalar.
        assert quickest(aten.mul.Tensor, [x, 2.0], {}) is torch._C.TensorBase.mul
        assert quickest(aten.mul.Scalar, [x, 2.0], {}) is aten.mul.Scalar._op
        for op, method in constant_folding._METHODS.items():
            assert quickest(op, [x, 2.0], {}) is quickest(op, [x, 3], {}) is method
        assert quickest(aten.sum.dim_IntList, [x, [0], True], {}) is torch._C.TensorBase.sum
        assert quickest(aten._unsafe_view.default, [x, [12]], {}) is aten._unsafe_view.default._op
    real = torch.arange(6.0).reshape(2, 3)
    with private_api.kernels_only():
        assert torch._C.TensorBase.add(real, real, alpha=2).equal(aten.add.Tensor._op(real, real, alpha=2))


def test_compilers_see_no_autocast_and_no_default_device():
    with torch.autocast("cpu"), torch.device("meta"):
        with dynamo.without_compile_context():
            assert not torch.is_autocast_enabled("cpu")
            assert torch.empty(2).device.type == "cpu"
        assert torch.is_autocast_enabled("cpu") and torch.empty(2).device.type == "meta"


def test_it_is_known_which_operators_python_defines():
    assert not private_api.is_defined_in_python(torch.ops.aten.add.Tensor)
    library = torch.library.Library("lazyviz_private", "FRAGMENT")
    library.define("defined_here(Tensor x) -> Tensor")
    assert private_api.is_defined_in_python(torch.ops.lazyviz_private.defined_here.default)


def test_marks_of_a_profiler_are_these_operators():
    seen = []

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Note(), torch.profiler.record_function("a part"):
        pass
    assert tuple(seen) == private_api.PROFILER_MARKS


@pytest.mark.slow
def test_the_layouts_of_small_weights_tell_onednn_s_instruction_set():
    module = "lazyviz.torch_internals.cpu_kernel_selection"
    code = f"from {module} import onednn_instructions; print(onednn_instructions().name)"
    found = []
    for most in ("SSE41", "AVX2", "AVX512_CORE", "AVX512_CORE_BF16", "ALL"):
        env = {**os.environ, "ONEDNN_MAX_CPU_ISA": most}
        answer = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        found.append(Instructions[answer.stdout.strip()])
    assert found == sorted(found)
    offered = torch.cpu.get_capabilities()
    if offered["architecture"] == "x86_64" and offered["avx2"]:
        assert found[:2] == [Instructions.SSE41, Instructions.AVX2]
        if offered.get("avx512_vl"):
            assert found[2] is Instructions.AVX512
        if offered.get("avx512_bf16"):
            assert found[3] is Instructions.AVX512_BF16


def test_functorch_wrappers_are_unwrapped_and_known_while_their_transform_is_computed():
    x, left = torch.ones(3), []

    def inner(t):
        assert composite_ops.is_of_transform(t)
        assert composite_ops.below_functorch(t) is x
        left.append(t)
        return t.sum()

    torch.func.grad(inner)(x)
    assert not composite_ops.is_of_transform(left[0])
    assert composite_ops.below_functorch(left[0]) is x
    assert composite_ops.below_functorch(x) is x and not composite_ops.is_of_transform(x)


def test_requires_grad_may_be_set_inside_of_a_transform():
    def made(x):
        return x * torch.ones(1).requires_grad_()

    def allowed(x):
        with composite_ops.requires_grad_allowed():
            return made(x)

    assert torch.func.vmap(allowed)(torch.ones(2)).requires_grad
    with pytest.raises(RuntimeError, match="inside of a function being transformed"):
        torch.func.vmap(made)(torch.ones(2))


def test_saved_tensors_are_recognized_by_functions_of_a_module():
    module, of_tensor, of_memory = private_api.SAVED_TENSOR_KEYS
    x, y = torch.ones(2), torch.ones(2)
    for name in (of_tensor, of_memory):
        assert getattr(module, name)(x) == getattr(module, name)(x) != getattr(module, name)(y)


def test_has_storage():
    assert private_api.has_storage(torch.ones(2)) and private_api.has_storage(torch.ones(2, device="meta"))
    assert not private_api.has_storage(
        torch.eye(2).to_sparse()
    )  # "lazy" tensors need a backend for the process
    assert torch.device("lazy").type in private_api.DEVICES_WITHOUT_STORAGE


@pytest.mark.skipif(not hasattr(torch.overrides, "redispatch_function"), reason="new in torch 2.13")
def test_a_class_that_hands_on_a_call_is_passed_over_once():
    class HandsOn(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return torch.overrides.redispatch_function(func, types, args, kwargs or {})

    class Counts(torch.Tensor):
        seen: ClassVar[list[str]] = []

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.seen.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs)

    asked = []

    def function(tensor):
        asked.append((private_api.is_redispatched(tensor), private_api.is_redispatched(tensor)))

    tensor = torch.ones(2).as_subclass(HandsOn)
    function(tensor)
    torch.overrides.redispatch_function(function, (), (tensor,), {})
    with private_api.no_function_modes():
        function(tensor)
    assert asked == [(False, False), (True, False), (False, False)]
    counts = torch.ones(2).as_subclass(Counts)
    Counts.seen.clear()
    private_api.redispatching(torch.Tensor.tolist)(counts)
    assert not Counts.seen
    counts.tolist()
    assert Counts.seen == ["tolist"]


def test_within_a_mode_the_dtype_of_autocast_is_that_of_the_caller():
    found = []

    class Asks(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found.append(private_api.autocast_dtype(torch.device("cpu")))
            return func(*args, **(kwargs or {}))

    edges = torch.eye(2).to_sparse()
    with Asks(), torch.autocast("cpu"):
        torch.ops.aten._sparse_addmm(torch.zeros(2, 2), edges, torch.ones(2, 2))
    with Asks():
        torch.ops.aten._sparse_addmm(torch.zeros(2, 2), edges, torch.ones(2, 2))
    assert found[0] is torch.bfloat16 and found[-1] is None


def test_kernels_see_autocast_within_a_mode():
    seen = []

    class Runs(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            with private_api.with_autocast() if "pinv" in func.name() else contextlib.nullcontext():
                seen.append(func.name())
                return func(*args, **(kwargs or {}))

    matrix = torch.randn(4, 3, requires_grad=True)
    with torch.autocast("cpu"):
        expected = torch.linalg.pinv(matrix)
        with Runs():
            found = torch.linalg.pinv(matrix)
    assert found.dtype == expected.dtype == torch.bfloat16 and torch.equal(found, expected)
    assert "aten::linalg_pinv.atol_rtol_tensor" in seen and found.grad_fn is not None
