"""XLA backend: recorded segments compiled by XLA through torchax and JAX.

A segment is functionalized, its operators are lowered to JAX (:mod:`lazyviz.execute.xla.program`), and JAX
compiles them as one program for its device: a TPU, a GPU, or the CPU.  The results of new code are compared
once with those of the recorded operators, on the inputs of its first run.  Random operators run in eager mode
between segments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import torch
import torch.utils.dlpack

from ...graph.ir import Node, Value
from ...torch_internals import functionalization
from ...torch_internals.dynamo import Compiled
from ..backend_protocol import Refused, Segment, first_line
from ..compiler.compiled_program_cache import program_of
from ..compiler.compiling_backend_base import SegmentCompiler, Task
from ..compiler.fx_lowering import NotLowered, refuse
from ..lru_cache import LRUCache
from . import ops as xla_ops
from . import program as xla_program

MOST_VERDICTS = 16384


class XlaBackend(SegmentCompiler):
    """Compiles segments with XLA, the compiler of JAX.

    Args:
        device: a ``jax.Device`` to run on; default: JAX's first for tensors in the host's memory, the same
            GPU for tensors on one.
        precision: of products of float32 matrices, JAX's ``default_matmul_precision``: ``"highest"`` is
            float32 everywhere; TPUs are faster with less.

    Results are eager's within rounding.
    """

    draws = True  # no random operators are accepted, but attention without dropout counts as one
    follows_sizes = False  # XLA programs are for the sizes that they were compiled for
    verifies = True  # new code is compared with the recorded operators in its first run

    def __init__(self, device: Any = None, *, precision: str = "highest") -> None:
        super().__init__()
        self._device = device
        self._precision = precision
        self._verdicts: LRUCache[Hashable, str] = LRUCache(MOST_VERDICTS)  # "" if it can be compiled
        self._table = functionalization.decompositions(xla_ops.DECOMPOSED)
        self._table.update(xla_ops.FOREACH)
        for op in xla_ops.OWN:
            self._table.pop(op, None)

    def refuses(self, node: Node) -> str | None:
        """Why ``node`` has to run by itself, or None."""
        key = getattr(node, "entry", None)
        if key is None:
            alone = program_of([node], [])
            key = (alone.key, *alone.shapes.numbers())
        why = self._verdicts.peek(key)
        if why is None:
            with self._lock:
                why = self._verdicts[key] = self._reason(node) or ""
        return str(refuse(node, why)) if why else None

    def _reason(self, node: Node) -> str | None:
        if (why := super().refuses(node)) is not None:
            return why.removeprefix(str(refuse(node, "")))
        if xla_ops.draws(node):
            return "draws random numbers"
        for value in (*node.inputs, *node.outputs):
            if value.meta.dtype not in xla_ops.DTYPES:
                return f"has {value.meta.dtype}, which JAX does not support"
        inputs = list(dict.fromkeys(node.inputs))
        kept = [value for value in node.outputs if value.node is node]
        try:
            program = xla_program.functional([node], inputs, kept, (), (), self._table)
            with self._settings():
                jax.eval_shape(xla_program.traced(program), [], xla_program.shapes(inputs, program.arguments))
        except Exception as error:
            return f"cannot be lowered to XLA: {first_line(error)}"
        return None

    @contextmanager
    def _settings(self) -> Iterator[None]:
        """JAX settings, for this thread and during a call: the user's settings do not change."""
        with jax.enable_x64(True), jax.default_matmul_precision(self._precision):
            yield

    def _code(self, task: Task) -> Compiled:
        segment, numbers = task.segment, task.numbers
        try:
            device = self._device_for(segment)
            made = xla_program.functional(
                segment.nodes, segment.inputs, task.kept, task.groups, numbers, self._table
            )
            shapes = xla_program.shapes(segment.inputs, made.arguments)
            with self._settings(), jax.default_device(device):
                compiled = jax.jit(xla_program.traced(made)).lower(numbers, shapes).compile()
        except NotLowered as error:
            raise Refused(str(error)) from error
        except Exception as error:
            raise Refused(f"XLA could not compile {len(segment.nodes):,} ops: {first_line(error)}") from error
        results = [own_memory(value) for value in task.kept]
        return Compiled(Code(compiled, made, device, self._settings, results))

    def _device_for(self, segment: Segment) -> Any:
        """The JAX device for the segment's tensors."""
        gpus = {
            value.meta.device
            for node in segment.nodes
            for value in (*node.inputs, *node.outputs)
            if value.meta.device.type == "cuda"
        }
        if len(gpus) > 1:
            raise Refused("tensors are on several GPUs")
        if self._device is not None:
            return self._device
        if not gpus:
            return jax.devices()[0]
        index = gpus.pop().index or 0
        try:
            return jax.devices("cuda")[index]
        except (RuntimeError, IndexError) as error:
            raise Refused(
                f"JAX has no GPU {index} (pip install 'jax[cuda12]'): {first_line(error)}"
            ) from None


@dataclass(frozen=True)
class Code:
    """A compiled program called with tensors: from inputs and 0-d number tensors to results, in PyTorch's
    memory.

    Writes of the segment are performed last.
    """

    call: Callable[..., Any]
    program: xla_program.Functional
    device: Any
    settings: Callable[[], AbstractContextManager[None]]
    results: Sequence[Callable[[], torch.Tensor]]

    def __call__(self, *given: torch.Tensor) -> list[torch.Tensor]:
        count = self.program.inputs
        parts = xla_program.argument_tensors(self.program.arguments, given[:count])
        numbers = [number.item() for number in given[count:]]
        with self.settings():
            made, right = self.call(numbers, [to_jax(part, self.device) for part in parts])
            if not right:  # waits until the program has ended
                raise Refused(
                    "a value, for example an index, is out of range; the ops run in eager mode to "
                    "report which"
                )
            made.reverse()
            results = [make().copy_(to_torch(made.pop())) for make in self.results]
            for at in self.program.writes:
                parts[at].copy_(to_torch(made.pop()))
        return results


def own_memory(value: Value) -> Callable[[], torch.Tensor]:
    """Creates a tensor like ``value`` on PyTorch's own memory, because JAX owns the memory of its arrays."""
    meta, nbytes = value.meta, value.storage.nbytes

    def make() -> torch.Tensor:
        own = torch.empty(0, dtype=meta.dtype, device=meta.device)
        storage = torch.UntypedStorage(nbytes, device=meta.device)
        return own.set_(storage, meta.offset, meta.shape, meta.stride)

    return make


class _Export:
    """A tensor that JAX reads while compiled code runs.

    It is not recorded as an export: JAX may release the memory on a thread of its own, long after the code
    has ended, and until then a write to it would be a sync point.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **kwargs: Any) -> Any:
        return inspect.unwrap(torch.Tensor.__dlpack__)(self._tensor, **kwargs)

    def __dlpack_device__(self) -> tuple[Any, int]:
        return self._tensor.__dlpack_device__()


def to_jax(tensor: torch.Tensor, device: Any) -> jax.Array:
    """``tensor`` as an array on ``device``, on the same memory if possible."""
    array = jax.dlpack.from_dlpack(_Export(tensor.detach().contiguous()))
    return array if array.device == device else jax.device_put(array, device)


def to_torch(array: jax.Array) -> torch.Tensor:
    """``array`` as a tensor on the same memory, or in host memory if it is on a TPU."""
    if array.device.platform not in ("cpu", "gpu", "cuda"):
        array = jax.device_put(array, jax.devices("cpu")[0])
    tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(array)
    return tensor
