"""Value reads that bypass the dispatcher: ``print``, ``numpy``, ``tolist``, ``.data``, pickling, loaders.

``numpy()``, ``tolist()``, ``print``, pickling, and others read a tensor's memory where no dispatch mode sees
it, and ``Tensor.data = `` replaces it.  Both pending tensors and real tensors with a pending write need
special handling there, so the methods of ``torch.Tensor`` and a few functions are patched while anything is
pending or recording, and restored afterwards.
"""

from __future__ import annotations

import functools
import pickle
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ...process.tracebacks import shorten, shortened
from ...torch_internals import composite_ops, fake_cuda_devices, private_api
from .. import constant_folding, eager_fallback, lazy_tensor
from ..distributed.fsdp_storage_resize import planned_storage
from ..fake_cuda import torch_cuda_replacement as fake_torch_cuda
from ..fake_cuda import value_read_errors
from ..fake_cuda.gpu_copies_of_host_values import host_copy
from ..intercept_ops_outside_blocks import is_out_of_reach, nodes_before_access, tensors_in
from ..item_and_bool_reads import needed_by
from ..lazy_tensor import (
    LazyTensor,
    is_lazy,
    is_pending,
    is_plain_class,
    is_plain_memory,
    lazy_class,
    pending_parameter,
    see_history,
)
from ..lazy_tensors_of_user_classes import real_class
from ..random_draw_order import READERS, WRITERS, rng_state
from ..shapes import ctc_loss as ctc_shapes
from ..sparse.components import parts_of
from ..sync_points import AbsentDeviceError, may_need_absent, without_shapes
from ..tape import Tape
from . import child_processes, torch_save, torchscript_calls
from . import deepcopy as deepcopy_hooks
from .attribute_patches import Patches, originals
from .exported_array_tracking import FUNCTIONS, METHODS, ExportPatches, export_array, noting_exports
from .observers_of_deferred_writes import DLPACK
from .storage_access import RAW_ACCESS, TENSOR_METHODS, Addresses, patch_numbers, patch_storages
from .torch_function import sees_calls
from .warning_routing import at_users_line

# Modules that read a generator's state only to set it again.
_HAND_BACK_STATES = ("torch.utils.checkpoint", "torch.random")

# Methods that read memory, with the cause that a sync point shows.
_READERS = {
    "numpy": "numpy",
    "__array__": "numpy",
    "tolist": "tolist",
    "__dlpack__": "DLPack",
    "as_subclass": "as_subclass",
    "__reduce_ex__": "pickle",
    "__deepcopy__": "deepcopy",
    "__str__": "print",
    "__format__": "format",
    "apply_": "apply_",
    "map_": "map_",
    "map2_": "map2_",
    **TENSOR_METHODS,
}


# Code that gets the memory itself may write it later unnoticed, so pending readers run first.
_HANDED_OUT = {
    "set_", "resize_", "apply_", "map_", "map2_", "numpy", "data_ptr", "storage access", "share_memory_",
    "DLPack", "__cuda_array_interface__", RAW_ACCESS,
}  # fmt: skip


_OPS = {"set_", "resize_"}  # they go through the dispatcher
_OTHERS = {"map_", "map2_"}  # they read the memory of other tensors as well


def show_values_in_repr(tape: Tape) -> None:
    """From now on, ``repr`` evaluates tensors as ``str`` does, unless only an absent GPU could.

    For scripts, whose output is then the same as without recording.
    """
    lazy_tensor.shown = lambda tensor: None if is_out_of_reach(tape, tensor) else str(tensor)


class SyncPatches:
    """Makes below-dispatcher access to pending memory a sync point."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self._patches = Patches()
        self._addresses = Addresses(tape, self.before_read)
        self.exports = ExportPatches(tape.memory_holders, self.before_read)
        self.exports.install(numpy=False)
        self.installed = False  # whether any patch is installed, or has not been removed completely
        self._generator_methods = {
            **{name: self._generator_reader(name) for name in READERS},
            **{name: self._generator_writer(name) for name in WRITERS},
        }

    def install(self) -> None:
        if self.installed:
            return
        self.installed = True
        self._addresses.begin()
        self.exports.begin_block()
        if self._patches.reapply():
            return
        for name, method in self._generator_methods.items():
            self._patches.set(torch.Generator, name, method)  # modes do not see it
        for cls in (torch.Tensor, torch.nn.Parameter):
            for name, cause in _READERS.items():
                if cls is torch.Tensor or name in vars(cls):
                    original = getattr(cls, name)
                    reader = (
                        self._list_reader(original) if cause == "tolist" else self._reader(original, cause)
                    )
                    self._patches.set(cls, name, reader)
            if cls is torch.Tensor or "__repr__" in vars(cls):
                self._patches.set(cls, "__repr__", self._repr(cls.__repr__))
        for name in ("__cuda_array_interface__", "data"):
            self._patches.set(torch.Tensor, name, getattr(self, f"_{name.strip('_')}")())
        # Otherwise it is pickled.
        self._patches.set(torch.Tensor, "__copy__", deepcopy_hooks.copier(self.tape))
        self._patch_randomness()
        resize = eager_fallback.watched_resize(self.tape, torch.UntypedStorage.resize_)
        self._patches.set(torch.UntypedStorage, "resize_", resize)
        patch_storages(self.tape, self._patches)
        patch_numbers(self.tape, self._patches, self.before_read)
        self._patch_loaders()
        child_processes.patch_processes(self.tape, self._patches, self.before_read)
        for name in ("dump", "dumps"):
            self._patches.set(pickle, name, torch_save.seen(getattr(pickle, name)))
        self._patch_subclasses()
        self._patch_native_readers()
        self._patch_torchscript()
        self._patch_cuda()
        self._patches.complete()

    def remove(self) -> None:
        self._addresses.end()
        self._patches.restore()
        if self.tape.memory_holders.lasts():
            self.exports.install(numpy=True)
        else:
            self.tape.memory_holders.begin_gap()
        self.installed = False

    def unload(self) -> None:
        """Stop watching."""
        if not self.installed:
            self.exports.remove()
            self.tape.memory_holders.begin_gap()

    def before_read(self, tensor: torch.Tensor, cause: str) -> None:
        """Evaluate what reading ``tensor``'s memory depends on."""
        tape = self.tape
        if tape.shapes.inferring or (tape.runs.running and tape.runs.running == threading.get_ident()):
            return
        with private_api.no_function_modes():  # the user's modes must only see calls by user code
            if tensor.is_meta:  # the user's meta tensor; planned tensors report their GPU
                return
            needed = nodes_before_access(tape, tensor, write=(write := cause in _HANDED_OUT))
            nbytes = tensor.numel() * tensor.element_size() if needed else 0
        if needed:
            if cause in torch_save.CAUSES and tape.recording.absent is None:
                needed += torch_save.read_with(tape, tensor, write=write, frame=sys._getframe(1))
            with tape.runs.lock:
                tape.runs.sync(cause, needed, nbytes)

    def of_class(
        self, original: Callable[..., Any], cause: str, tensor: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a method of a tensor whose class has a ``__torch_function__``; such a tensor is not pending
        itself.

        Returns ``NotImplemented`` if an absent GPU has to compute the value.
        """
        tape = self.tape
        # Checked first, because any other check in C++ resets this state.
        call = private_api.redispatching(original) if private_api.is_redispatched(tensor) else original
        with private_api.no_function_modes():
            if may_need_absent() and is_out_of_reach(tape, tensor):
                return NotImplemented
        if tape.pending:
            for each in (tensor, *tensors_in(args)):
                self.before_read(each, cause)
            args = tuple(map(real_class, args))
        with private_api.no_function_modes():
            tape.runs.await_result(tensor)
        if tape.recording.graph is None or cause in _OPS:
            return call(tensor, *args, **kwargs)
        with tape.recording.paused():
            result = call(tensor, *args, **kwargs)
        self._after_read(cause, tensor, result)
        return result

    def _after_read(self, cause: str, tensor: torch.Tensor, result: Any) -> None:
        """Note memory that a method has replaced or copied."""
        if cause == "share_memory_":
            with private_api.no_function_modes():
                place = eager_fallback.memory_of(tensor)
            if place is not None:
                self.tape.tensors.forget_storage(place[0])
        if cause == "deepcopy":
            eager_fallback.note_copies(self.tape, result)

    def known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The content of ``tensor``, if it is known without evaluating anything."""
        with private_api.no_function_modes():
            value = self.tape.tensors.value_of(tensor)
        found = constant_folding.known(self.tape.shapes, [value]) if value is not None else None
        return found[value] if found is not None and value is not None else None

    # --- methods ------------------------------------------------------------------

    def _reader(self, original: Callable[..., Any], cause: str) -> Callable[..., Any]:
        patches = self
        dispatches = cause in _OPS
        give = _giving(patches.tape, original)

        @functools.wraps(original)
        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            tape = patches.tape
            if sees_calls(tensor):
                found = patches.of_class(original, cause, tensor, *args, **kwargs)
                if found is not NotImplemented:
                    return found
            if tape.pending:
                cls = type(tensor)
                if (
                    cause == "numpy"
                    and may_need_absent()
                    and tensor.device.type == "cpu"
                    and is_out_of_reach(tape, tensor)
                    and (copy := host_copy(tape, tensor)) is not None
                ):
                    with tape.recording.paused():
                        return original(copy, *args, **kwargs)
                if cause == "storage access" and (storage := planned_storage(tape, tensor)) is not None:
                    return storage
                if cause in fake_torch_cuda.READERS and (
                    is_out_of_reach(tape, tensor)
                    or (cause == "deepcopy" and tape.recording.absent is not None and is_pending(tensor))
                ):
                    return fake_torch_cuda.READERS[cause](tape, tensor, *args, **kwargs)
                if cause == "format" and tensor.dim() == 0 and (known := patches.known(tensor)) is not None:
                    return original(known, *args, **kwargs)
                if cause == "deepcopy" and args:
                    made = deepcopy_hooks.deep_copy(tape, original, tensor, args[0])
                    if made is not None:
                        return made
                patches.before_read(tensor, cause)
                if cause in _OTHERS:
                    for other in tensors_in(args):
                        patches.before_read(other, cause)
                args = tuple(map(real_class, args))  # `as_subclass(type(p))`
                # Its class has changed, for example to Parameter, which has its own method.
                if type(tensor) is not cls and type(tensor) is not torch.Tensor:
                    return getattr(tensor, original.__name__)(*args, **kwargs)
            tape.runs.await_result(tensor)
            if tape.recording.graph is None or dispatches:
                return give(tensor, *args, **kwargs)
            with tape.recording.paused():
                result = give(tensor, *args, **kwargs)
            patches._after_read(cause, tensor, result)
            return result

        return value_read_errors.with_own_errors(patches.tape, original, method)

    def _list_reader(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``tolist``: a program may call it after every op."""
        tape = self.tape

        @functools.wraps(original)
        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if sees_calls(tensor):
                found = self.of_class(original, "tolist", tensor, *args, **kwargs)
                if found is not NotImplemented:
                    return found
            if tape.pending:
                cls = type(tensor)
                if may_need_absent() and is_out_of_reach(tape, tensor):
                    copy = host_copy(tape, tensor)
                    if copy is None:
                        return fake_torch_cuda.READERS["tolist"](tape, tensor, *args, **kwargs)
                    with tape.recording.paused():
                        return original(copy, *args, **kwargs)
                value = tensor._lazyviz if is_lazy(tensor) else None
                if value is None or tape.shapes.inferring or tape.runs.running:
                    if (content := self.known(tensor)) is not None:
                        return original(content, *args, **kwargs)
                    self.before_read(tensor, "tolist")
                elif value.meta.device.type != "meta":  # nearly always
                    contents = constant_folding.known(tape.shapes, [value])
                    if contents is not None:
                        return original(contents[value], *args, **kwargs)
                    if needed := needed_by(value):
                        tape.runs.sync("tolist", needed, value.meta.nbytes)
                if type(tensor) is not cls and type(tensor) is not torch.Tensor:
                    return getattr(tensor, original.__name__)(*args, **kwargs)
            tape.runs.await_result(tensor)
            if tape.recording.graph is None or is_plain_memory(tensor):
                return original(tensor, *args, **kwargs)
            with tape.recording.paused():
                return original(tensor, *args, **kwargs)

        return value_read_errors.with_own_errors(tape, original, method)

    def _repr(self, original: Callable[..., str]) -> Callable[..., str]:
        tape = self.tape

        @functools.wraps(original)
        def __repr__(tensor: torch.Tensor, **kwargs: Any) -> str:
            if sees_calls(tensor):
                found = self.of_class(original, "print", tensor, **kwargs)
                if found is not NotImplemented:
                    return found
            value = tensor.__dict__.get("_lazyviz")
            if value is not None:
                return LazyTensor.__repr__(tensor)  # type: ignore[arg-type]
            if composite_ops.is_functorch_wrapper(tensor):
                with tape.recording.paused():  # the tensor in it is shown by its own `repr`
                    return original(tensor, **kwargs)
            if nodes_before_access(tape, tensor, write=False):
                see_history(tensor)
                values = lazy_tensor.shown(tensor) if lazy_tensor.shown is not None else None
                if values is not None:
                    return values
                kind = "Parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor"
                dtype = str(tensor.dtype).removeprefix("torch.")
                if any(map(is_lazy, parts := parts_of(tensor))):
                    layout, count = str(tensor.layout).removeprefix("torch."), parts[-1].shape[0]
                    return f"lazy{list(tensor.shape)} {dtype} {tensor.device}, {layout}, nnz={count}, pending"
                return f"{kind}{list(tensor.shape)} {dtype} {tensor.device}, pending write"
            with tape.recording.paused():
                return original(tensor, **kwargs)

        return __repr__

    def _data(self) -> property:
        tape = self.tape

        def get(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, private_api.UninitializedTensorMixin):
                with tape.recording.paused():  # it has no data, but its device was requested
                    return private_api.alias(tensor)
            return private_api.alias(tensor)

        def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
            if not is_pending(tensor) and isinstance(data, torch.Tensor) and lazy_class(type(tensor)) is None:
                self.before_read(data, f"data of a {type(tensor).__name__}")
            tape.external.rebind(tensor, data)

        return property(get, set_data, private_api.TensorBase.data.__delete__)  # type: ignore[attr-defined]

    def _cuda_array_interface(self) -> property:
        original = torch.Tensor.__cuda_array_interface__

        @shortened
        def get(tensor: torch.Tensor) -> Any:
            self.before_read(tensor, "__cuda_array_interface__")
            return original.fget(tensor)  # type: ignore[attr-defined]

        return property(get, original.__set__, original.__delete__)  # type: ignore[attr-defined]

    # --- functions ----------------------------------------------------------------

    def _patch_randomness(self) -> None:
        """A generator with pending draws has a marker, instead of the state that the user may read."""
        self._patch_states((torch, torch.random), lambda: torch.default_generator)
        if fake_cuda_devices.cuda_is_present():

            def of_device(device: Any = "cuda") -> torch.Generator:
                index = device if isinstance(device, int) else torch.device(device).index
                return torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]

            self._patch_states((torch.cuda, torch.cuda.random), of_device)

    def _generator_reader(self, name: str) -> Callable[..., Any]:
        """A method of torch.Generator that returns its state: the marker must not be visible."""
        tape, original = self.tape, READERS[name]

        @functools.wraps(original)
        @shortened
        def method(generator: torch.Generator, *args: Any) -> Any:
            if tape.runs.running == threading.get_ident():  # a compiler saves the state while it works
                return original(generator, *args)
            with tape.runs.lock:  # a run on another thread has control of the generators' states
                if name == "initial_seed":
                    return tape.generators.seed_of(generator)
                draw = tape.generators.pending(generator)
                if draw is not None:
                    tape.runs.sync(f"Generator.{name}", [draw])
                return original(generator, *args)

        return method

    def _generator_writer(self, name: str) -> Callable[..., Any]:
        """A method of torch.Generator that sets its state, which a run on another thread would overwrite."""
        runs, original = self.tape.runs, WRITERS[name]

        @functools.wraps(original)
        def method(generator: torch.Generator, *args: Any, **kwargs: Any) -> Any:
            with runs.lock:
                return original(generator, *args, **kwargs)

        return method

    def _patch_states(self, owners: Sequence[Any], generator_of: Callable[..., torch.Generator]) -> None:
        """``get_rng_state`` and ``set_rng_state`` of a type of device."""
        tape = self.tape
        get_state, set_state = owners[0].get_rng_state, owners[0].set_rng_state

        @functools.wraps(get_state)
        def get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
            generator = generator_of(*args, **kwargs)
            running = tape.runs.running == threading.get_ident()
            draw = None if running else tape.generators.pending(generator)
            if draw is not None:
                caller = sys._getframe(1).f_globals.get("__name__")
                recording = tape.recording
                if recording.graph is not None and not recording.pauses and caller in _HAND_BACK_STATES:
                    return rng_state(generator)
                try:
                    tape.runs.sync("get_rng_state", [draw])
                except BaseException as error:
                    shorten(error)
                    raise
            return get_state(*args, **kwargs)

        @functools.wraps(set_state)
        @shortened
        def set_rng_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if is_pending(new_state):
                node = new_state._lazyviz.node  # type: ignore[attr-defined]
                if tape.recording.graph is not None and node.op is rng_state:
                    tape.generators.restart(generator_of(*args, **kwargs), new_state._lazyviz)  # type: ignore[attr-defined]
                    return
                self.before_read(new_state, "set_rng_state")
            set_state(new_state, *args, **kwargs)

        for owner in owners:
            self._patches.set(owner, "get_rng_state", get_rng_state)
            self._patches.set(owner, "set_rng_state", set_rng_state)

    def _patch_loaders(self) -> None:
        """Batches are created eagerly: a loader's seeds, shuffles and copies are not part of the graph."""
        tape, patches = self.tape, self
        loader = torch.utils.data.DataLoader
        iterator = torch.utils.data.dataloader._BaseDataLoaderIter
        make_iterator, next_batch = loader.__iter__, iterator.__next__

        @functools.wraps(make_iterator)
        @shortened
        def __iter__(self: Any) -> Any:
            if self.num_workers and tape.pending:
                # Workers are forked, so the values that they read must exist. Otherwise, a dataset's own
                # reads are noticed.
                given = self.dataset, self.collate_fn, self.worker_init_fn
                child_processes.read_all(given, "DataLoader workers", tape, patches.before_read)
            with tape.recording.paused():
                return make_iterator(self)

        @functools.wraps(next_batch)
        def __next__(self: Any) -> Any:
            with tape.recording.paused():
                batch = next_batch(self)
            if (graph := tape.recording.graph) is not None and tape.recording.is_on_this_thread():
                tape.tensors.arrivals.note_batch(batch, graph)
            return batch

        self._patches.set(loader, "__iter__", __iter__)
        self._patches.set(iterator, "__next__", __next__)

    def _patch_subclasses(self) -> None:
        """Tensors that other code creates from a tensor, and tensors that become others."""
        self._patch_constructors()
        self._patch_placeholders()
        self._patch_parameters()
        swap = torch.utils.swap_tensors

        @functools.wraps(swap)
        @shortened
        def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
            self.tape.external.swap(swap, t1, t2)

        self._patches.set(torch.utils, "swap_tensors", swap_tensors)

    def _patch_constructors(self) -> None:
        """``_make_subclass`` copies a tensor's C++ object without dispatch, so it must not be a
        pending one.
        """
        make_subclass = torch.Tensor._make_subclass

        @shortened
        def _make_subclass(cls: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
            cls = real_class(cls)
            if self._stays_pending(cls, data) and not kwargs and len(args) <= 1:
                return pending_parameter(cls, data, *args)
            self.before_read(data, "_make_subclass")
            return make_subclass(cls, data, *args, **kwargs)

        self._patches.set(torch.Tensor, "_make_subclass", staticmethod(_make_subclass))
        construct = torch.Tensor.__new__

        @shortened
        def new_tensor(cls: Any, *args: Any, **kwargs: Any) -> Any:
            whole = cls is not torch.Tensor
            for item in (*args, *kwargs.values()):
                for tensor in tensors_in((item,) if whole or isinstance(item, (list, tuple)) else ()):
                    self.before_read(tensor, f"{cls.__name__}()")
            if not whole:
                if _may_warn((*args, *kwargs.values())):
                    call = functools.partial(construct, cls, *args, **kwargs)
                    return at_users_line(self.tape.scopes.sources, sys._getframe(1), call)
                return construct(cls, *args, **kwargs)
            with private_api.excluding_python():  # it accepts only a tensor without a class yet
                return construct(cls, *args, **kwargs)

        self._patches.set(torch.Tensor, "__new__", staticmethod(new_tensor))

    def _stays_pending(self, cls: Any, data: Any) -> bool:
        """Whether a parameter of class ``cls`` created from ``data`` can be recorded."""
        return (
            self.tape.recording.graph is not None
            and not self.tape.recording.pauses
            and isinstance(cls, type)
            and issubclass(cls, torch.nn.Parameter)
            and isinstance(data, torch.Tensor)
            and is_pending(data)
            and lazy_class(cls) is not None
            and cls.__basicsize__ == torch.Tensor.__basicsize__  # no `__slots__`
        )

    def _patch_placeholders(self) -> None:
        """Parameters and buffers of lazy modules, which have no data before they are used."""
        for cls in (torch.nn.parameter.UninitializedParameter, torch.nn.parameter.UninitializedBuffer):
            new = cls.__new__

            def __new__(cls: type, *args: Any, _new: Any = new, **kwargs: Any) -> Any:
                with without_shapes(self.tape.recording.absent), self.tape.recording.paused():
                    return _new(cls, *args, **kwargs)

            self._patches.set(cls, "__new__", __new__)

    def _patch_parameters(self) -> None:
        """A parameter created from a pending tensor has the requested class."""
        new_parameter = torch.nn.Parameter.__new__

        def __new_parameter__(cls: type, data: Any = None, requires_grad: bool = True) -> Any:
            pending = isinstance(data, torch.Tensor) and is_pending(data)
            if pending and requires_grad and not (data.is_floating_point() or data.is_complex()):
                # With the message for ordinary tensors; that for subclasses differs.
                raise RuntimeError("Only Tensors of floating point and complex dtype can require gradients")
            if cls is torch.nn.Parameter or not is_plain_class(data):
                with composite_ops.requires_grad_allowed() if pending else nullcontext():
                    return new_parameter(cls, data, requires_grad)
            if self._stays_pending(cls, data):
                return pending_parameter(cls, data, requires_grad)
            self.before_read(data, f"{cls.__name__}()")
            return new_parameter(cls, data, requires_grad)

        self._patches.set(torch.nn.Parameter, "__new__", __new_parameter__)

    def _patch_native_readers(self) -> None:
        """Functions whose C++ code reads or fills memory without the dispatcher."""
        packed = private_api.VF._pad_packed_sequence  # it fills fresh tensors
        self._patches.set(private_api.VF, "_pad_packed_sequence", self._run_immediately(packed))
        self._patches.set(torch, "ctc_loss", self._with_lengths(torch.ctc_loss))
        for owner, name in FUNCTIONS:
            give = noting_exports(self.tape.memory_holders, getattr(owner, name), DLPACK, self.before_read)
            self._patches.set(owner, name, self._after_reading(give, "DLPack"))
        constructors: list[tuple[Any, str]] = [
            (torch, "tensor"),
            (torch, "as_tensor"),
            (torch, "asarray"),
            (torch.Tensor, "new"),
            (torch.Tensor, "new_tensor"),
        ]
        for owner, name in constructors:
            # They read each tensor of a list; a tensor itself goes through the dispatcher.
            self._patches.set(
                owner, name, self._after_reading(getattr(owner, name), f"torch.{name}", nested=True)
            )
        for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
            original = getattr(private_api.VF, name)
            self._patches.set(
                private_api.VF, name, self._after_reading(original, "batch sizes", lengths=True)
            )

    def _with_lengths(self, ctc_loss: Callable[..., Any]) -> Callable[..., Any]:
        """``torch.ctc_loss`` after the lengths are known, because they decide the shape of what it saves.

        For lists, it would fill a tensor without the dispatcher, so lengths are passed as tensors on the
        result's device.
        """

        @functools.wraps(ctc_loss)
        @shortened
        def function(
            log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *args: Any, **kwargs: Any
        ) -> Any:
            lengths = [input_lengths, target_lengths]
            if self.tape.recording.graph is not None and isinstance(log_probs, torch.Tensor):
                known = self._lengths(lengths, log_probs, targets)
                blank = args[0] if args else kwargs.get("blank", 0)
                given = {"log_probs": log_probs, "targets": targets, "blank": blank}
                given |= dict(zip(ctc_shapes.LENGTHS, known))
                # Arguments that the kernel rejects are unchanged, so that its message is the same.
                if ctc_shapes.is_valid(given, moves_targets=True):
                    lengths = [self._on_device(each or [], log_probs.device) for each in known]
            return ctc_loss(log_probs, targets, *lengths, *args, **kwargs)

        return function

    def _lengths(self, lengths: list[Any], log_probs: torch.Tensor, targets: Any) -> list[list[int] | None]:
        """Both lengths of ``ctc_loss``; the maximum if only a planned GPU could compute them."""
        known: list[list[int] | None] = []
        for name, each in zip(ctc_shapes.LENGTHS, lengths):
            try:
                known.append(self._length(each, log_probs.device))
            except AbsentDeviceError:
                longest = ctc_shapes.longest(name, log_probs, targets, each)
                graph = self.tape.recording.graph
                if longest is None or graph is None:
                    raise
                known.append(longest[0])
                graph.assumed.add(longest[1])
        return known

    def _length(self, lengths: Any, device: torch.device) -> list[int] | None:
        """Lengths of sequences, read if they are not known; ``None`` if they are not lengths."""
        if isinstance(lengths, torch.Tensor):
            if lengths.is_floating_point() or lengths.is_complex():
                return None
            found = self.known(lengths)
            if found is None and device.type == "cpu":
                self.before_read(lengths, "lengths of sequences")
            return (lengths if found is None else found).flatten().tolist()
        whole = isinstance(lengths, (list, tuple)) and all(type(each) is int for each in lengths)
        return list(lengths) if whole else None

    def _on_device(self, lengths: list[int], device: torch.device) -> torch.Tensor:
        if device.type != "cpu":
            return torch.tensor(lengths, dtype=torch.long, device=device)
        with self.tape.recording.paused():
            return torch.tensor(lengths, dtype=torch.long, device="cpu")

    def _patch_torchscript(self) -> None:
        """TorchScript's tracer runs the program to trace it, and compares it with the compiled one: both need
        values.  Its interpreter drops messages of errors.

        Its compiler recognizes functions that are replaced while ops are pending by the functions that they
        wrap.
        """
        self._patches.set(*private_api.FIND_BUILTIN, _find_builtin)
        for owner, name in private_api.SCRIPT_CALLS:
            self._patches.set(
                owner, name, torchscript_calls.with_messages(getattr(owner, name), self.tape.recording.paused)
            )
        for name, cause in private_api.TRACED_BY.items():
            original = getattr(torch.jit, name)

            def traced(*args: Any, _original: Any = original, _cause: str = cause, **kwargs: Any) -> Any:
                tape = self.tape
                eager_fallback.evaluate_before_tracing(tape, _cause, (*args, *kwargs.values()))
                with tape.recording.paused(), private_api.no_dispatch_modes():
                    return _original(*args, **kwargs)

            self._patches.set(torch.jit, name, functools.wraps(original)(shortened(traced)))

    def _run_immediately(self, original: Callable[..., Any]) -> Callable[..., Any]:
        tape = self.tape

        @functools.wraps(original)
        @shortened
        def function(*args: Any, **kwargs: Any) -> Any:
            if tape.recording.graph is not None and not tape.recording.pauses:
                tensors = list(tensors_in((*args, *kwargs.values())))
                needed = [node for t in tensors for node in nodes_before_access(tape, t, write=False)]
                tape.runs.sync(original.__name__, needed, sum(t.numel() * t.element_size() for t in tensors))
            with tape.recording.paused():
                return original(*args, **kwargs)

        return value_read_errors.with_own_errors(tape, original, function)

    def _after_reading(
        self, original: Callable[..., Any], cause: str, *, nested: bool = False, lengths: bool = False
    ) -> Callable[..., Any]:
        """``original`` after the tensors that it reads have values: all of them, those in lists, or only
        lengths.
        """

        @functools.wraps(original)
        @shortened
        def function(*args: Any, **kwargs: Any) -> Any:
            if self.tape.pending:
                items = [
                    item
                    for item in (*args, *kwargs.values())
                    if not nested or isinstance(item, (list, tuple))
                ]
                for tensor in tensors_in(items):
                    if not lengths or (tensor.dtype == torch.int64 and tensor.dim() == 1):
                        self.before_read(tensor, cause)
            if nested and _may_warn((*args, *kwargs.values())):
                call = functools.partial(original, *args, **kwargs)
                return at_users_line(self.tape.scopes.sources, sys._getframe(1), call)
            return original(*args, **kwargs)

        return value_read_errors.with_own_errors(self.tape, original, function)

    def _patch_cuda(self) -> None:
        """Synchronizing with the GPU, or querying its memory, requires that pending ops run."""
        tape = self.tape
        if not fake_cuda_devices.cuda_is_present():
            return
        for name in (
            "synchronize",
            "memory_allocated",
            "max_memory_allocated",
            "memory_reserved",
            "memory_stats",
        ):
            original = getattr(torch.cuda, name)

            def function(*args: Any, _original: Any = original, _name: str = name, **kwargs: Any) -> Any:
                if tape.pending:
                    tape.runs.sync(f"torch.cuda.{_name}", list(tape.pending))
                return _original(*args, **kwargs)

            self._patches.set(torch.cuda, name, functools.wraps(original)(shortened(function)))


def _giving(tape: Tape, original: Callable[..., Any]) -> Callable[..., Any]:
    """``original``, after the evaluation: it notes what it exports, and warns with the line of its caller."""
    if (who := METHODS.get(original.__name__)) is not None:
        return functools.partial(export_array, tape.memory_holders, original, who)
    if original is not torch.Tensor.storage:
        return original

    def storage(*args: Any, **kwargs: Any) -> Any:
        call = functools.partial(original, *args, **kwargs)
        return at_users_line(tape.scopes.sources, sys._getframe(1), call)

    return storage


def _may_warn(args: Iterable[Any]) -> bool:
    """Whether a constructor may warn of the data that it copies: tensors, and NumPy arrays that are
    read-only or in lists.
    """
    numpy = sys.modules.get("numpy")
    for data in args:
        first = data
        while isinstance(first, (list, tuple)) and first:
            first = first[0]
        if isinstance(first, torch.Tensor):
            return True
        if numpy is not None and isinstance(first, numpy.ndarray):
            return first is not data or not data.flags.writeable
    return False


def _find_builtin(function: Any) -> str | None:
    """The TorchScript operator of a function, or of the function that it wraps; a new table gets the
    originals.
    """
    table, is_new = private_api.table_of_builtins()
    if is_new:
        for owner, name, original in originals.replaced():
            if (operator := table.pop(id(vars(owner)[name]), None)) is not None:
                table[id(original)] = operator
    while function is not None:
        if (found := table.get(id(function))) is not None:
            return found
        function = getattr(function, "__wrapped__", None)
    return None
