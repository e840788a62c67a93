"""``torch.cuda`` for an absent GPU, as a recorded cell sees it.

While a cell is recorded for such a GPU, ``torch.cuda`` answers for it, and tensors sent there are pending
tensors whose device is ``cuda:N``.  For C++, they are on another device (see
:mod:`lazyviz.torch_internals.fake_cuda_devices`), which this module maps back when an op reaches the
recorder.  :mod:`lazyviz.record.fake_cuda.device_dependent_composites` and
:mod:`lazyviz.record.fake_cuda.autocast` choose the kernels that a GPU would use.  Nothing here is active if
CUDA is present.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ...torch_internals import dispatch_level, fake_cuda_devices, private_api
from .. import constant_folding
from ..intercept_ops_outside_blocks import nodes_before_access
from ..interception.attribute_patches import Patches
from ..sync_points import AbsentDeviceError, needs_absent
from ..tracked_storages import TrackedNode
from . import (
    data_parallel,
    flex_attention,
    memory_stats,
    older_releases,
    refused_driver_calls,
    refused_tracers,
    saved_tensors,
    sparse_gradients,
    tensor_placement,
    value_read_errors,
    wrapper_subclasses,
)
from . import packed_sequences as fake_cuda_packing
from .assumed_values import Answer, AssumedValues
from .autocast import AutocastKernels
from .device_dependent_composites import CudaKernels
from .fake_gpu import Gpu as Gpu
from .fake_gpus_protocol import Memory, Reserved
from .generate_until_max_length import Generation
from .refused_driver_calls import refusal
from .streams_and_events import Event, Stream, planned_or

if TYPE_CHECKING:
    from ..tape import Tape


def is_absent(device: torch.device) -> bool:
    """Whether tensors on ``device`` are only planned."""
    return device in fake_cuda_devices.STAND_INS


_Generator = torch.Generator


class _PlannedGenerator(torch.Generator):
    """A generator of a planned device, which has a seed but draws no numbers."""

    _place: torch.device

    def __new__(cls, place: torch.device) -> _PlannedGenerator:
        self = super().__new__(cls)
        self._place = place
        return self

    def __init__(self, place: torch.device) -> None: ...

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._place


class _GeneratorType(type(_Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Generator)


class AbsentGpus:
    """While installed, PyTorch answers for ``gpu``."""

    def __init__(
        self, tape: Tape, gpu: Gpu, memory: Memory, reserved: Reserved, assume: Mapping[int | str, Any]
    ) -> None:
        self.gpu = gpu
        self.current = gpu.current
        self.tape = tape
        self.memory = memory
        self.reserved = reserved
        self._assumed = AssumedValues(tape, assume)
        self.reset_at = 0  # position of the last reset_peak_memory_stats
        self.patches = Patches()
        self._kernels = CudaKernels(self)
        self._autocast = AutocastKernels()
        self._generation = Generation(self)

    def install(self) -> None:
        fake_cuda_devices.stand_in()
        fake_cuda_devices.make_on_cpu_first(True)
        self._patch_functions()
        memory_stats.install(self)
        self._patch_randomness()
        tensor_placement.install(self)
        wrapper_subclasses.install(self.patches)
        fake_cuda_packing.install(self)
        refused_driver_calls.install(self)
        refused_tracers.install(self)
        data_parallel.install(self)
        saved_tensors.install(self)
        self._kernels.install()
        self._autocast.install(self.patches)
        self._generation.install()
        flex_attention.install(self)
        older_releases.install(self.patches, self.gpu.release)

    def remove(self) -> None:
        self._generation.remove()
        flex_attention.remove()
        refused_tracers.remove()
        self._autocast.remove()
        self._kernels.remove()
        self.patches.restore()
        fake_cuda_devices.make_on_cpu_first(False)
        fake_cuda_devices.require_init()

    # --- devices --------------------------------------------------------------------

    def index(self, device: Any = None) -> int:
        """The number of the CUDA device that a user's argument refers to."""
        if device is None:
            return self.current
        if isinstance(device, int):
            number = device if device >= 0 else self.current
        else:
            found = torch.device(device)
            if found.type != "cuda":
                raise ValueError(f"Expected a cuda device, but got: {found}")
            number = self.current if found.index is None else found.index
        if number >= fake_cuda_devices.MOST_DEVICES:
            raise RuntimeError("CUDA error: invalid device ordinal")
        return number

    def device(self, device: torch.device) -> torch.device:
        """The device that an op is recorded for: ``cuda`` is the current one."""
        if device.type == "meta":
            return fake_cuda_devices.stands_for(device)
        return torch.device("cuda", self.index(device)) if device.type == "cuda" else device

    def below(self, device: torch.device) -> torch.device:
        """The C++ device for this device; torch's own shape rules keep device names as they are."""
        if self.tape.shapes.inferring:
            return device
        return fake_cuda_devices.STAND_INS.get(self.device(device), device)

    def record(
        self,
        mode: private_api.TorchDispatchMode,
        op: private_api.OpOverload,
        args: tuple[Any, ...],
        kwargs: Any,
    ) -> Any:
        """Record an op on the devices that Python shows.

        In inference mode, and if a subclass calls them below autograd, composite functions arrive as one op,
        but the choice of kernels is made in their parts.
        """
        if op in self._kernels.of or (
            torch.is_inference_mode_enabled() and fake_cuda_devices.is_made_of_others(op)
        ):
            with mode:
                return self._kernels.of.get(op, op.decompose)(*args, **kwargs)
        is_sparse = op is fake_cuda_devices.EMBEDDING_BAG_BACKWARD and args[9]
        if is_sparse and is_absent(args[0].device):
            with mode:
                return sparse_gradients.bag_backward(self.tape, *args, **kwargs)
        if op is torch.ops.aten.copy_.default and self._brings_back(args[1]):
            return args[0]
        device = kwargs.get("device")
        if device is not None:
            place = self.device(torch.device(device))
            if op is fake_cuda_devices.EFFICIENT_ZEROS:  # C++ creates them
                place = fake_cuda_devices.STAND_INS.get(place, place)
            kwargs = {**kwargs, "device": place}
            if place.type == "cuda" and args and not _is_strided(args[0]):
                raise refusal(f"{op} of a sparse or nested tensor")
        if kwargs.get("pin_memory"):  # ordinary host memory, which only a driver can pin
            kwargs = {**kwargs, "pin_memory": False}
        return self.tape.recorder.record(op, args, kwargs)

    def _brings_back(self, source: torch.Tensor) -> bool:
        """Whether DDP copies the counts of used parameters back to the host, which still has them."""
        world = self.tape.recording.world
        if world is None or not world.alike or not is_absent(source.device):
            return False
        value = source.__dict__.get("_lazyviz")
        return value is not None and value.storage in world.alike

    def make_sparse(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a constructor of sparse tensors on the GPU; ``None`` if its tensors are not on the
        GPU.
        """
        return sparse_gradients.made_of(self.tape, name, args, kwargs)

    # --- reads ----------------------------------------------------------------------

    def answer(self, needed: Sequence[TrackedNode], *, one: bool = False) -> Answer | None:
        """The value that the user assumes for a read that needs ``needed``; ``one``: of a single number."""
        if not needs_absent(needed):
            return None
        frame = sys._getframe(2)
        if (assumed := self._assumed.take(frame, one=one)) is not None:
            return assumed
        known = self._generation.answer(needed, frame)
        return None if known is None else Answer(known)

    def assumes_each_read(self) -> bool:
        """Whether the user gave a list of values for reads at the running line, one after the other."""
        return self._assumed.is_one_per_read(sys._getframe(2))

    # --- functions ------------------------------------------------------------------

    def _patch_functions(self) -> None:
        cuda, replace = torch.cuda, self.replace
        tape, gpu = self.tape, self.gpu
        replace(cuda, "_lazy_init", lambda: None)
        replace(cuda, "init", lambda: None)
        # torch's own shape rules must not find a GPU that they could use
        replace(cuda, "is_available", lambda: not tape.shapes.inferring)
        replace(cuda, "device_count", lambda: gpu.count)
        replace(cuda, "current_device", lambda: self.current)
        replace(cuda, "set_device", self._set_device)
        replace(cuda, "_exchange_device", self._exchange_device)
        replace(cuda, "_maybe_exchange_device", self._exchange_device)
        replace(cuda, "get_device_name", lambda device=None: self.properties(device).name)
        replace(cuda, "get_device_capability", lambda device=None: (self.index(device), gpu.capability)[1])
        replace(cuda, "get_device_properties", self.properties)
        # torch.cuda.is_bf16_supported: from compute capability 8 on, or emulated
        replace(
            cuda,
            "is_bf16_supported",
            lambda including_emulation=True: gpu.capability >= (8, 0) or including_emulation,
        )
        replace(cuda, "is_tf32_supported", lambda: gpu.capability >= (8, 0))
        replace(
            cuda,
            "can_device_access_peer",
            lambda device, peer_device: self.index(device) != self.index(peer_device),
        )
        replace(cuda, "synchronize", lambda device=None: None)
        replace(cuda, "ipc_collect", lambda: None)
        replace(cuda, "is_current_stream_capturing", _omits_empty_ranks)
        replace(cuda, "Stream", Stream)
        replace(cuda, "Event", Event)
        for name in ("current_stream", "default_stream"):
            replace(cuda, name, lambda device=None: Stream(device))
        replace(cuda, "stream", lambda stream: nullcontext())
        replace(cuda, "set_stream", lambda stream: None)
        replace(torch.backends.cuda, "is_built", lambda: True)
        accelerator = torch.accelerator
        replace(accelerator, "is_available", lambda: not tape.shapes.inferring)
        replace(accelerator, "device_count", lambda: gpu.count)
        replace(accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
        replace(*fake_cuda_devices.GET_ACCELERATOR, lambda check=False: torch.device("cuda"))
        replace(accelerator, "current_device_index", lambda: self.current)
        replace(accelerator, "current_device_idx", lambda: self.current)
        for owner, name in fake_cuda_devices.EXCHANGE_ACCELERATOR:
            replace(owner, name, self._exchange_device)
        replace(accelerator, "set_device_index", self._set_device)
        replace(accelerator, "set_device_idx", self._set_device)
        replace(accelerator, "synchronize", lambda device=None: None)
        replace(accelerator, "current_stream", lambda device=None: Stream(device))
        replace(accelerator, "set_stream", lambda stream: None)
        replace(torch.Tensor, "record_stream", lambda tensor, stream: None)
        # its GPUs are all of one kind; and cuDNN, which orders an RNN's weights, is part of every CUDA build
        replace(*fake_cuda_devices.CHECK_BALANCE, lambda device_ids: None)
        replace(torch.backends.cudnn, "is_available", lambda: True)
        meshgrid: Any = getattr(private_api.VF, "meshgrid")  # noqa: B009
        replace(private_api.VF, "meshgrid", value_read_errors.meshgrid(meshgrid))
        replace(torch.Tensor, "__setitem__", value_read_errors.with_cuda_messages(torch.Tensor.__setitem__))
        replace(*fake_cuda_devices.COMPATIBLE_TENSORS, _compatible_tensors)
        replace(*fake_cuda_devices.GROUP_TENSORS, _group_tensors)

    def replace(self, owner: Any, name: str, function: Any) -> None:
        original = getattr(owner, name, None)
        if original is None:
            return  # another version of PyTorch
        if isinstance(function, type):
            self.patches.set(owner, name, function)
            return

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        self.patches.set(owner, name, replacement)

    def _set_device(self, device: Any) -> None:
        if not (isinstance(device, int) and device < 0):
            self.current = self.index(device)

    def _exchange_device(self, device: int) -> int:
        before = self.current
        self._set_device(device)
        return before

    def properties(self, device: Any = None) -> _Properties:
        self.index(device)
        return _Properties(self.gpu)

    # --- random numbers ---------------------------------------------------------------

    def _patch_randomness(self) -> None:
        """Replace functions for generator states, which planned GPUs lack because they draw nothing."""
        cuda, replace = torch.cuda, self.replace
        with self.tape.recording.paused():
            state = torch.zeros(16, dtype=torch.uint8, device="cpu")  # a seed and an offset of 8 bytes each

        def copy_of(state: torch.Tensor) -> torch.Tensor:
            with self.tape.recording.paused():
                return state.clone()

        for owner in (cuda, cuda.random):
            for name in ("manual_seed", "manual_seed_all"):
                replace(owner, name, lambda seed: None)
            for name in ("seed", "seed_all"):
                replace(owner, name, lambda: None)
            replace(owner, "get_rng_state", lambda device="cuda": copy_of(state))
            replace(owner, "get_rng_state_all", lambda: [copy_of(state)] * self.gpu.count)
            replace(owner, "set_rng_state", lambda new_state, device="cuda": None)
            replace(owner, "set_rng_state_all", lambda new_states: None)
            replace(owner, "initial_seed", _unknown("torch.cuda.initial_seed()"))
        draw = getattr(*fake_cuda_devices.TRUNC_NORMAL)

        def trunc_normal(
            tensor: torch.Tensor, mean: float, std: float, a: float, b: float, **rest: Any
        ) -> Any:
            """Out-of-range numbers are redrawn until there are none; on a device that draws nothing, once.

            Each further draw would reuse the memory of the previous one.
            """
            if not is_absent(tensor.device):
                return draw(tensor, mean, std, a, b, **rest)
            with dispatch_level.no_grad():
                result = tensor.normal_(mean, std)
                outside = (result < a) | (result > b)
                again = torch.empty_like(result).normal_(mean, std)
                result = torch.where(outside, again, result)
                return tensor.copy_(result)

        replace(*fake_cuda_devices.TRUNC_NORMAL, trunc_normal)
        gpus = self

        class Generator(_Generator, metaclass=_GeneratorType):
            """Replaces ``torch.Generator``: it also creates generators of planned devices."""

            def __new__(cls, device: Any = "cpu") -> Any:
                place = gpus.device(torch.device(device))
                return _PlannedGenerator(place) if is_absent(place) else _Generator(place)

        self.patches.set(torch, "Generator", Generator)
        self.patches.set(torch, "Stream", planned_or(torch.Stream, Stream))
        self.patches.set(torch, "Event", planned_or(torch.Event, Event))
        defaults = tuple(_PlannedGenerator(torch.device("cuda", number)) for number in range(self.gpu.count))
        self.patches.set(cuda, "default_generators", defaults)


# --- reads that need no value -----------------------------------------------------------


def _shown(tape: Tape, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> str:
    return repr(tensor)


def _deep_copy(tape: Tape, tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """A copy is recorded like any other."""
    if not tensor.is_leaf:
        with tape.recording.paused():
            torch.Tensor.__deepcopy__(
                torch.ones(1, device="cpu", requires_grad=True) * 1, memo
            )  # PyTorch's message
    if id(tensor) in memo:
        return memo[id(tensor)]
    copied = tensor.detach().clone(memory_format=torch.preserve_format)
    if isinstance(tensor, torch.nn.Parameter):
        copied = torch.nn.Parameter(copied, tensor.requires_grad)
    else:
        copied.requires_grad_(tensor.requires_grad)
        if tensor.grad is not None:
            copied.grad = _deep_copy(tape, tensor.grad, memo)
    memo[id(tensor)] = copied
    return copied


def _omits_empty_ranks() -> bool:
    """Whether a CUDA graph is captured: never, except that ``SyncBatchNorm`` would otherwise read which
    ranks have an empty batch.
    """
    return sys._getframe(2).f_globals.get("__name__") == "torch.nn.modules._functions"


def _formatted(tape: Tape, tensor: torch.Tensor, spec: str = "") -> str:
    """The number that the user assumes for the line, or a placeholder, because nothing depends on it."""
    if tensor.dim():
        return object.__format__(tensor, spec)
    absent = tape.recording.absent
    if absent is not None and not absent.assumes_each_read():  # a placeholder takes none of the values
        answer = absent.answer(nodes_before_access(tape, tensor, write=False))
        if answer is not None and isinstance(answer.value, (int, float, complex)):
            with contextlib.suppress(ValueError, TypeError):  # such as the format "d" for 0.5
                return format(answer.for_dtype(tensor.dtype), spec)
    return repr(tensor)


def _list(tape: Tape, tensor: torch.Tensor) -> Any:
    value = tape.tensors.value_of(tensor)
    if value is not None and (known := constant_folding.known(tape.shapes, [value])) is not None:
        return known[value].tolist()
    needed = nodes_before_access(tape, tensor, write=False)
    answer = tape.recording.absent.answer(needed) if tape.recording.absent is not None else None
    if answer is None:
        tape.runs.sync("tolist", needed, a_number=True)
        raise AssertionError("a value was read that only the absent GPU could compute")
    if isinstance(answer.value, list):  # the user gave all of it
        return answer.value
    return _filled(tensor.shape, answer.for_dtype(tensor.dtype))


def _filled(shape: Sequence[int], number: Any) -> Any:
    """What ``tolist`` returns for a tensor whose elements are all ``number``."""
    return [_filled(shape[1:], number) for _ in range(shape[0])] if shape else number


READERS: dict[str, Callable[..., Any]] = {
    "print": _shown,
    "format": _formatted,
    "deepcopy": _deep_copy,
    "share_memory_": lambda tape, tensor: tensor,  # GPU memory is left unchanged
    "tolist": _list,
}
"""Replacements for tensor methods that read values, by their cause, if only an absent GPU could compute the
value.
"""


class _Properties:
    """The known device properties of a GPU, as returned by ``torch.cuda.get_device_properties``."""

    def __init__(self, gpu: Gpu) -> None:
        self.name = gpu.name
        self.major, self.minor = gpu.capability
        if gpu.total_bytes is not None:
            self.total_memory = gpu.total_bytes

    def __repr__(self) -> str:
        known = f"name='{self.name}', major={self.major}, minor={self.minor}"
        if "total_memory" in vars(self):
            known += f", total_memory={self.total_memory // 2**20}MB"
        return f"_CudaDeviceProperties({known})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AbsentDeviceError(f"{name} of {self.name} is unknown: the GPU is not on this machine.")


def _is_strided(item: Any) -> bool:
    """Whether an argument is neither a sparse or nested tensor nor a list of parts of one."""
    return not isinstance(item, torch.Tensor) or (item.layout == torch.strided and not item.is_nested)


def _unknown(what: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AbsentDeviceError(f"{what} is not available for a GPU that is not on this machine.")

    return refuse


def _compatible_tensors(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Allow a tensor's memory to be exchanged for GPU memory, as on a machine with a GPU."""
    if tensor.is_cuda or other.is_cuda:
        return tensor.layout == other.layout == torch.strided
    return bool(fake_cuda_devices.compatible_tensors(tensor, other))


def _group_tensors(*args: Any) -> dict[Any, Any]:
    """C++ groups tensors by the devices that it sees."""
    groups = fake_cuda_devices.group_tensors(*args)
    return {(fake_cuda_devices.stands_for(device), dtype): group for (device, dtype), group in groups.items()}
