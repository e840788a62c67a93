"""Self-check (``lazyviz.doctor()``): what is installed, patched, missing, or left over.

A part of :mod:`lazyviz.session.lazy_graph`.
"""

from __future__ import annotations

import gc
import platform
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

import torch

from ..plan.devices.device_lookup import cuda_devices
from ..process.deferred_signals import Deferred, abandoned
from ..process.gc_pause import patience
from ..process.global_state_lock import CriticalSection
from ..record.interception.attribute_patches import is_ours, originals
from ..record.tape import tape
from ..torch_internals import native_module_loader, op_stream
from ..torch_internals.find_compiler_and_build_extensions import SOURCES
from . import evaluation
from .asynchronous.unrecorded_steps import observers
from .block import is_any_entered, open_blocks

_PACKAGES = (
    "lazyviz", "torch", "ipython", "ipywidgets", "anywidget", "graphviz", "nvidia-ml-py", "psutil", "click",
    "rich",
)  # fmt: skip
# Optional packages, and the features that need them.
_OPTIONAL = {
    "cairosvg": "PDF and PNG files",
    "ipyparallel": "the backend 'ipyparallel'",
    "ray": "the backend 'ray'",
    "jax": "the backend 'xla'",
    "torchax": "the backend 'xla'",
}
# Counted from the import on, because an export leaves no trace that could be found later.
_ALWAYS = {"torch.Tensor.__dlpack__", "torch.utils.dlpack.to_dlpack", "torch.to_dlpack"}


@dataclass(frozen=True, slots=True)
class Leftover:
    """State that differs from before lazyviz, although nothing is recording or pending.

    ``name`` is the changed item, ``found`` its current state.
    """

    name: str
    found: str

    def __str__(self) -> str:
        return f"{self.name}: {self.found}"


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """The result of :func:`lazyviz.doctor`; prints as text.

    Attributes:
        versions: versions of Python, lazyviz, and its dependencies, by name.
        compiled: for each native module, by name, whether it is in use.
        refused: why those that have been built are not in use, by name.
        devices: CUDA devices of this process and the state of NVML, as sentences.
        recording: the open blocks, innermost last.
        pending: number of ops that have not run.
        patched: attributes of PyTorch and Python that lazyviz currently replaces.
        leftovers: state that should have been restored; ``lazyviz.reset()`` restores it.
        missing: optional packages, and what they are for.
    """

    versions: dict[str, str]
    compiled: dict[str, bool]
    refused: dict[str, str]
    devices: tuple[str, ...]
    recording: tuple[str, ...]
    pending: int
    patched: tuple[str, ...]
    leftovers: tuple[Leftover, ...]
    missing: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether there is no leftover state."""
        return not self.leftovers

    def __bool__(self) -> bool:
        return self.ok

    def text(self) -> str:
        """The diagnosis as lines of text."""
        lines = [", ".join(f"{name} {version}" for name, version in self.versions.items())]
        used = [name for name, is_used in self.compiled.items() if is_used]
        rest = [name for name, is_used in self.compiled.items() if not is_used]
        lines.append(f"compiled modules: {', '.join(used) or 'none'}")
        if rest:
            lines.append(f"  not in use: {', '.join(rest)}")
        lines += [f"  {why}" for why in dict.fromkeys(self.refused.values())]
        lines += self.devices
        lines.append(f"recording: {', '.join(self.recording) or 'nothing'}; {self.pending:,} ops pending")
        if self.patched:
            lines.append(f"patched now: {len(self.patched)} attributes")
            lines += [f"  {name}" for name in self.patched]
        lines += [f"missing: {sentence}" for sentence in self.missing]
        if self.ok:
            lines.append("No leftover state.")
        else:
            lines.append(f"leftover state ({len(self.leftovers)}); lazyviz.reset() removes it:")
            lines += [f"  {leftover}" for leftover in self.leftovers]
        return "\n".join(lines)

    __repr__ = __str__ = text


def doctor() -> Diagnosis:
    """Compare the state of PyTorch and this process with the original: attributes, modes, keys, handlers, ...

    Nothing runs, and nothing is restored that the end of a cell would not restore.  Other threads are not
    checked.
    """
    handlers = _of_handlers()  # before they are deferred
    with CriticalSection():  # no other thread begins or ends a block meanwhile
        patched, leftovers = _state(handlers)
    return Diagnosis(
        _versions(),
        {each.stem: each.stem in native_module_loader.loaded for each in SOURCES},
        dict(native_module_loader.refused),
        _devices(),
        tuple(block.graph.ir.where if block.graph is not None else "" for block in open_blocks()),
        len(tape.pending),
        tuple(patched),
        tuple(leftovers),
        tuple(f"{name}, for {what}" for name, what in _OPTIONAL.items() if find_spec(name) is None),
    )


def _state(handlers: Sequence[Leftover]) -> tuple[list[str], list[Leftover]]:
    """What is patched, and what should have been restored; ``handlers`` are the leftover signal handlers."""
    evaluation.watch.leave()  # as between two cells
    busy = bool(open_blocks()) or bool(tape.pending)
    patched = sorted(_name(owner, name) for owner, name, _ in originals.replaced())
    patched += evaluation.watch.replaced_code()
    leftovers: list[Leftover] = []
    if not busy:
        noted = _ALWAYS | ({"torch.Tensor.numpy"} if tape.memory_holders.lasting else set())
        leftovers += [Leftover(name, "a patch of lazyviz") for name in patched if name not in noted]
        leftovers += [Leftover(name, "left in place") for name in evaluation.watch.taking_part()]
        if patience.lasts:
            leftovers.append(Leftover("thresholds of the garbage collector", str(gc.get_threshold())))
        leftovers += handlers
    leftovers += _of_the_tape()
    return patched, leftovers


def _of_handlers() -> list[Leftover]:
    found = [
        Leftover(f"handler of {signal.Signals(number).name}", "one of lazyviz")
        for number in signal.valid_signals()
        if number in signal.Signals.__members__.values()
        and is_ours(handler := signal.getsignal(number))
        and not isinstance(getattr(handler, "__self__", None), Deferred)  # these are checked below
    ]
    deferred = abandoned()
    if (context := Deferred.current.get(threading.get_ident())) is not None and not _is_within_an_op_or_run():
        deferred |= dict.fromkeys(context.numbers, context)
    found += [Leftover(f"handler of {signal.Signals(number).name}", "deferred") for number in deferred]
    return found


def _is_within_an_op_or_run() -> bool:
    """Whether the caller is code that an op or a run calls, such as a finalizer."""
    recording = tape.recording
    return evaluation.is_running_here() or recording.busy or bool(recording.appending)


def _of_the_tape() -> list[Leftover]:
    """Recorder state that does not belong to a block, run, or pause."""
    found: list[Leftover] = []
    if tape.recording.graph is not None and not open_blocks():
        found.append(Leftover("recorder", "records without an open block"))
    if tape.recording.pauses and not open_blocks():
        found.append(Leftover("recorder", f"paused {tape.recording.pauses} times"))
    if op_stream.observed_thread() and not is_any_entered() and not observers:
        found.append(Leftover("PyTorch's callbacks", "operator calls are observed without an open block"))
    if tape.recording.absent is not None and not open_blocks():
        found.append(Leftover("torch.cuda", "patched for an absent GPU"))
    if tape.runs.lock.is_lost:
        found.append(Leftover("lock of evaluations", "held by a thread that has ended"))
    elif tape.runs.lock.is_mine and not evaluation.is_running_here():
        found.append(Leftover("lock of evaluations", "held by no evaluation"))
    return found


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            if name in sys.modules:
                found[name] = str(getattr(sys.modules[name], "__version__", "?"))
    found["torch"] = str(torch.__version__)
    return found


def _devices() -> tuple[str, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        count = torch.cuda.device_count() if torch.version.cuda is not None else 0
    gpus, trouble = cuda_devices()
    cuda = (
        f"CUDA: {count} devices visible to this process"
        if count
        else "CUDA: no device visible to this process"
    )
    nvml = f"NVML: {', '.join(gpu.model for gpu in gpus)}" if gpus else f"NVML: {trouble or 'no device'}"
    return cuda, nvml


def _name(owner: object, name: str) -> str:
    where = getattr(owner, "__module__", "") if isinstance(owner, type) else ""
    return ".".join(part for part in (where, getattr(owner, "__name__", repr(owner)), name) if part)
