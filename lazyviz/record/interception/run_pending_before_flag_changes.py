"""Global flags that change what kernels compute: changing one runs the pending ops that it would affect.

A recorded op runs later, under the settings at that time.  Therefore, changing such a setting in a block is a
sync point: pending ops run with the settings under which they were recorded.  Only a few ops depend on the
default dtype, namely those that create floating-point results from integers.  They run before any change,
also after the block, because nothing else would give them the recorded dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...torch_internals import private_api
from ..dependency_closure import can_run_without, sequence_of
from ..sync_points import needs_absent
from ..tape import Tape
from ..tracked_storages import TrackedNode
from .attribute_patches import Patches

# The setters: owner, name, and the function that returns the current setting.
_SETTERS: Sequence[tuple[Any, str, Callable[[], Any]]] = (
    (torch, "set_flush_denormal", lambda: None),  # there is no such function
    (torch, "set_float32_matmul_precision", torch.get_float32_matmul_precision),
    (torch, "set_num_threads", torch.get_num_threads),
    (torch, "use_deterministic_algorithms", torch.are_deterministic_algorithms_enabled),
    (torch, "set_deterministic_debug_mode", torch.get_deterministic_debug_mode),
    (private_api.mkldnn, "set_flags", lambda: None),  # `flags()` calls it as well
)


class SettingsPatches:
    """Makes changing a setting a sync point if recorded ops depend on it."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._patches = Patches()

    def install(self) -> None:
        if self._patches or self._patches.reapply():
            return
        for owner, name, is_set in _SETTERS:
            self._patches.set(owner, name, self._setter(getattr(owner, name), is_set))
        for name in ("set_default_dtype", "set_default_tensor_type"):
            self._patches.set(torch, name, self._default_dtype(getattr(torch, name)))
        self._patches.complete()

    def remove(self) -> None:
        self._patches.restore()

    def _setter(self, original: Callable[..., Any], is_set: Callable[[], Any]) -> Callable[..., Any]:
        tape = self._tape

        @functools.wraps(original)
        def setter(*args: Any, **kwargs: Any) -> Any:
            if tape.recording.graph is not None and (not args or is_set() is None or args[0] != is_set()):
                self._run_first(list(tape.pending), original.__name__)
            return original(*args, **kwargs)

        return setter

    def _default_dtype(self, original: Callable[..., Any]) -> Callable[..., Any]:
        tape = self._tape

        @functools.wraps(original)
        def setter(wanted: Any, /) -> Any:
            before = torch.get_default_dtype()
            if wanted is not before:
                self._run_first(
                    [node for node in list(tape.pending) if _takes_default(node)], original.__name__
                )
            return original(wanted)

        return setter

    def _run_first(self, nodes: list[TrackedNode], cause: str) -> None:
        """Run ``nodes``, except those that have failed before and what depends on them.

        Raises:
            Exception: the first new error, after all others have run; the setting is not changed then.
        """
        if not nodes or needs_absent(nodes):  # results of an absent GPU are only planned
            return
        error: Exception | None = None
        with self._tape.runs.lock:
            while nodes := self._without_failed(nodes):
                try:
                    self._tape.runs.sync(cause, nodes)
                except Exception as failed:
                    if len(self._without_failed(nodes)) == len(nodes):
                        raise  # no op has failed
                    error = error or failed
                else:
                    break
        if error is not None:
            raise error

    def _without_failed(self, nodes: list[TrackedNode]) -> list[TrackedNode]:
        """The pending nodes among ``nodes`` that depend on none that has failed."""
        pending = sorted(self._tape.pending, key=sequence_of)
        blocked = {node for node in pending if node.state == "failed"}
        if blocked:
            for node in pending:  # producers come first, so one pass is enough
                before = (*[value.node for value in node.inputs], *node.after)
                if any(other in blocked and not can_run_without(other, node) for other in before if other):
                    blocked.add(node)
        return [node for node in nodes if node.state == "pending" and node not in blocked]


def _takes_default(node: TrackedNode) -> bool:
    """Whether ``node``'s results may have the default dtype: they are floating, and nothing else determines
    it.
    """
    if not any(_floating(value.dtype) for value in node.outputs if value.node is node):
        return False
    arguments = (*node.args, *node.kwargs.values())
    return not any(_floating(value.dtype) for value in node.inputs) and not any(
        isinstance(item, torch.dtype) for item in arguments
    )


def _floating(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
