"""Child processes: tensors that a forked child may read are evaluated before the fork.

A child does not run pending ops of its parent, because each child would run them again, also in memory that
it shares with the others. Tensors that are sent by ``pickle`` are evaluated when they are pickled.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.process import BaseProcess
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch

from ...process.tracebacks import shortened
from ...torch_internals.storage_ownership import referents_of
from ..provenance.source_lines import is_user_file
from ..sync_points import AbsentDeviceError
from ..tape import Tape
from .attribute_patches import Patches

Read = Callable[[torch.Tensor, str], None]

_DEEPEST = 4  # depth of nested instances: a dataset in a subset, with its transforms
_DEEPEST_MODULE = 2  # a trainer refers to its model, but its datasets do not read that
_MOST = 1_000_000  # objects


def _is_forked(process: Any) -> bool:
    method = getattr(process, "_start_method", None) or multiprocessing.get_start_method()
    return bool(method == "fork")


def patch_processes(tape: Tape, patches: Patches, read: Read) -> None:
    """Call ``read`` before ``multiprocessing`` forks, for each tensor that the child's function may read."""
    start = BaseProcess.start

    @functools.wraps(start)
    @shortened
    def start_process(process: Any) -> None:
        if tape.pending and _is_forked(process):
            read_all(vars(process).values(), "a forked process", tape, read)
        start(process)

    patches.set(BaseProcess, "start", start_process)


def read_all(roots: Iterable[Any], cause: str, tape: Tape, read: Read) -> None:
    """Call ``read`` for the tensors that can be reached from ``roots``, except on absent devices."""
    for tensor in _reachable(roots):
        if tape.pending:
            with contextlib.suppress(AbsentDeviceError):  # it may be reachable, and never read
                read(tensor, cause)


def _reachable(roots: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Tensors in containers, attributes of objects, closures, and global variables that functions read."""
    seen: set[int] = set()
    by_depth: list[list[Any]] = [list(roots), *[[] for _ in range(_DEEPEST)]]
    for depth, waiting in enumerate(by_depth):
        while waiting and len(seen) < _MOST:
            item = waiting.pop()
            if id(item) in seen:
                continue
            seen.add(id(item))
            if isinstance(item, torch.Tensor):
                yield item
                continue
            if isinstance(item, torch.nn.Module):
                if depth >= _DEEPEST_MODULE:
                    continue
                yield from (*item.parameters(), *item.buffers())
            inside = depth + (type(item).__module__ != "builtins")
            if inside <= _DEEPEST:
                by_depth[inside] += filter(gc.is_tracked, _contents(item))


def _contents(item: Any) -> Iterable[Any]:
    if isinstance(item, FunctionType):
        cells = [cell for cell in item.__closure__ or () if _is_filled(cell)]
        named = _global_names(item.__code__) if _is_of_user(item.__code__.co_filename) else ()
        variables = [item.__globals__[name] for name in named if name in item.__globals__]
        return (*[cell.cell_contents for cell in cells], item.__defaults__, item.__kwdefaults__, *variables)
    if isinstance(item, type):
        file = getattr(sys.modules.get(item.__module__), "__file__", None)
        return vars(item).values() if item.__module__ == "__main__" or (file and _is_of_user(file)) else ()
    if isinstance(item, (ModuleType, FrameType, torch.optim.Optimizer)):
        return ()
    if type(item).__module__.partition(".")[0] == "lazyviz":
        return ()
    return referents_of([item])


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_of_user(file: str) -> bool:
    return is_user_file(file) or (file.startswith("<") and not file.startswith("<frozen"))


@functools.lru_cache(1000)
def _global_names(code: CodeType) -> tuple[str, ...]:
    """The global variables that this code, or a function in it, reads."""
    own = [each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = [_global_names(each) for each in code.co_consts if isinstance(each, CodeType)]
    return tuple(dict.fromkeys([*own, *[name for names in inner for name in names]]))
