"""Instrumentation of PyTorch: installs dispatch modes and patches while something is pending."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType, FunctionType
from typing import Any

import torch

from ...process.deferred_signals import deferred, deferring
from ...process.global_state_lock import CriticalSection
from ...process.global_state_transaction import complete
from ...torch_internals import dispatcher_bypasses, dynamo, fake_cuda_devices, private_api
from ...torch_internals.redispatch_from_dispatch_mode import user_level
from ..eager_fallback import evaluate_before_tracing, note_region
from ..lazy_tensor import LazyTensor
from ..parity.derivative_formulas import FormulaPatches
from ..parity.mode_sensitive_composites import CompositeKernels
from ..provenance.module_calls_and_phases import ScopePatches
from ..recorder import RecorderMode
from ..tape import Tape
from .attribute_patches import CodePatch, Patches, everything, is_ours, originals, out_of_place
from .finalizers import FinalizerLevel
from .kv_cache_detection import CachePatches
from .print_numpy_tolist import SyncPatches
from .run_pending_before_flag_changes import SettingsPatches
from .torch_compile import CompilerPatches
from .unpatched_imports import LateImports


class Instrumentation:
    """Installs the dispatch mode and the patches that feed the tape, and removes them.

    Each thread has its own mode: the recording thread, and threads that are started while something is
    pending. Older threads are guarded only where they use a lazy tensor. Only its own thread can remove a
    mode, and not while the mode is handling an op, so :meth:`release` is called wherever it might succeed.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._mode = RecorderMode()
        self._thread = threading.local()
        self._reads = SyncPatches(tape)
        self._formulas = FormulaPatches(tape, self._mode)
        self._composites = CompositeKernels(tape, self._reads.before_read, self._formulas.forward_kernels())
        self._settings = SettingsPatches(tape)
        self._scopes = ScopePatches(tape.scopes, tape.tensors.value_of)
        self._rules = CodePatch(private_api.dispatch_rule)
        self._imports = LateImports(self._mode)
        self._caches = CachePatches(tape)
        self._compilers = CompilerPatches(self._run_immediately)
        self._finalizers = FinalizerLevel()
        self._threads = Patches()
        self._patches = Patches()
        self._stance = (
            Patches()
        )  # Dynamo's, once a compiled function has been called that can only be planned
        self.away = False  # while compiled code runs
        self.stays = False  # between two graphs of one block
        tape.retire = self._retire
        tape.user_level = functools.partial(user_level, self._mode)

    def _entered(self) -> dict[int, object]:
        """This thread's guards that have been entered and not exited, by id."""
        entered: dict[int, object] | None = getattr(self._thread, "entered", None)
        if entered is None:
            entered = self._thread.entered = {}
        return entered

    def _note_entered(self, key: int, guard: object = None) -> None:
        entered = self._entered()
        # One that is freed instead of being exited, because an interrupt came in between, is exited, too.
        entered[key] = None if guard is None else weakref.ref(guard, lambda _: entered.pop(key, None))

    def begin_recording(self) -> None:
        if not private_api.has_mode(self._mode):
            private_api.insert_mode_at_bottom(self._mode)
            self._thread.entered = {}
        if not self._reads.installed:
            self._reads.install()
            self._composites.install()
            self._formulas.install()
            self._settings.install()
            self._rules.set(_no_rules)
            self._caches.install()
            self._compilers.install()
            self._imports.install()
            self._finalizers.install()
            if not self._threads and not self._threads.reapply():
                self._threads.set(threading.Thread, "start", self._guarded_start())
                self._threads.complete()
        if not self._patches and not self._patches.reapply():
            self._watch_guards()
        self._scopes.install()
        self._tape.memory_holders.begin_block()
        fake_cuda_devices.support_foreach(LazyTensor)

    def rehearse(self) -> None:
        """Begin and end once, so that the first block is fast; nothing stays installed."""
        with torch.profiler.record_function("lazyviz"), private_api.kernels_only():
            pass  # ops of optimizer steps and reads of constants, whose first use imports modules
        self.begin_recording()
        self._scopes.remove()
        self.leave()

    def _guarded_start(self) -> Callable[[threading.Thread], None]:
        """``Thread.start`` that gives the new thread our mode; threads that already run cannot get it."""
        start, mode, local = threading.Thread.start, self._mode, self._thread

        @functools.wraps(start)
        def guarded_start(thread: threading.Thread) -> None:
            run = thread.run

            def guarded_run() -> None:
                private_api.insert_mode_at_bottom(mode)
                local.entered = {}
                run()

            thread.run = guarded_run  # type: ignore[method-assign]
            start(thread)

        return guarded_start

    def _watch_guards(self) -> None:
        """Watch functions that restore dispatch keys, and calls of compiled functions."""
        for guard in private_api.KEY_GUARDS:
            undo = functools.partial(_leave, guard.__exit__)
            self._patches.set(guard, "__enter__", self._entering(guard.__enter__, undo))
            self._patches.set(guard, "__exit__", self._leaving(guard.__exit__))
        if dynamo.KEPT_KEYS:
            keep, bring_back = dynamo.KEPT_KEYS
            self._patches.set(*keep, self._entering(getattr(*keep), getattr(*bring_back)))
            self._patches.set(*bring_back, self._leaving(getattr(*bring_back)))
        else:
            before, after = dynamo.DEPTH, dynamo.UNDO_TO_DEPTH
            self._patches.set(*before, self._before_unguarded(getattr(*before)))
            self._patches.set(*after, self._after_unguarded(getattr(*after)))
        for name in dynamo.BACKWARD_CALLS:
            apply = getattr(dynamo.CustomBackward, name)
            self._patches.set(dynamo.CustomBackward, name, self._backward_call(apply))
        self._patches.set(torch.export, "export", self._run_immediately(torch.export.export, "torch.export"))
        self._patches.complete()

    def _backward_call(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        """``apply`` of the autograd nodes of custom functions, which runs compiled ones immediately."""
        at_once = self._run_immediately(apply, "compiled backward")

        @functools.wraps(apply)
        def call(node: Any, *gradients: Any) -> Any:
            return (at_once if dynamo.is_compiled_backward(node) else apply)(node, *gradients)

        return call

    def _entering(self, enter: Callable[..., Any], undo: Callable[..., Any]) -> Callable[..., Any]:
        """``enter``, a method of a guard or a function without arguments, which saves the current dispatch
        keys.
        """
        local = self._thread

        def __enter__(*guard: Any) -> Any:
            compiler = dynamo.set_eval_frame(None)  # it is already active, and would compile our code
            frame = sys._getframe(1)
            key = id(guard[0] if guard else frame)
            try:
                with deferred():
                    result = enter(*guard)
                    self._note_entered(key, *guard)
                    if dynamo.calls_compiled_function(frame):
                        if self._is_planned():  # nothing to compile for: run the original function
                            self._run_as_eager(frame)
                            return result
                        region = self._begin_compiled(frame)
                        local.regions = {**getattr(local, "regions", {}), key: region}
                dynamo.set_eval_frame(compiler)
            except BaseException:  # a block that could not be entered is not exited
                complete(functools.partial(abandon, guard, key))
                dynamo.set_eval_frame(compiler)
                raise
            return result

        @deferring
        def abandon(guard: tuple[Any, ...], key: int) -> None:
            if key in self._entered():
                region = getattr(local, "regions", {}).pop(key, None)
                undo(*guard)
                self._entered().pop(key, None)
                private_api.refresh_modes()
                if region is not None:
                    region.__exit__(None, None, None)
                self.release()

        dynamo.skip_code(__enter__.__code__)
        return __enter__

    def _is_planned(self) -> bool:
        """Whether the recorded program can only be planned: compiled code has no tensors to read."""
        recording = self._tape.recording
        if self.away:  # something is traced on tensors with values
            return False
        return recording.absent is not None or (recording.world is not None and recording.graph is not None)

    def _run_as_eager(self, frame: FrameType) -> None:
        """Record the function that ``torch.compile``'s wrapper calls in ``frame`` uncompiled, and note it."""
        graph, name = self._tape.recording.graph, dynamo.compiled_name(frame)
        if graph is not None and name:
            graph.as_eager.add(name)
        stance = dynamo.eager_stance(frame)
        if stance is not None and not self._stance:
            self._stance.set(*stance)

    def _leaving(self, leave: Callable[..., Any]) -> Callable[..., Any]:
        local = self._thread

        def __exit__(*guard: Any) -> Any:
            frame = sys._getframe(1)
            results: list[Any] = []

            def left() -> None:
                with deferred():  # counted as left exactly if it was left
                    if results:
                        return
                    key = id(guard[0] if guard else frame)
                    region = getattr(local, "regions", {}).pop(key, None)
                    results.append(leave(*guard))
                    self._entered().pop(key, None)  # it may not have been entered
                    private_api.refresh_modes()
                    if region is not None:
                        held = _end_measuring(frame)
                        region.__exit__(None, None, None)
                        self._note_compiled(frame, held=held)
                    self.release()

            complete(left)
            return results[0]

        return __exit__

    def _before_unguarded(self, depth: Callable[[], int]) -> Callable[[], int]:
        local = self._thread

        def get_dynamic_layer_stack_depth() -> int:
            frame = sys._getframe(1)
            if dynamo.calls_unguarded(frame) and self._is_planned():
                self._run_as_eager(frame)
            elif dynamo.calls_unguarded(frame):
                region = self._begin_compiled(frame)
                entry = region, sys.exc_info()[1]
                local.regions = {**getattr(local, "regions", {}), id(frame): entry}
            return depth()

        return get_dynamic_layer_stack_depth

    def _after_unguarded(self, undo: Callable[[int], Any]) -> Callable[[int], Any]:
        local = self._thread

        def pop_dynamic_layer_stack_and_undo_to_depth(depth: int) -> Any:
            result = undo(depth)
            frame = sys._getframe(1)
            entry = getattr(local, "regions", {}).pop(id(frame), None)
            if entry is not None:
                region, handled = entry
                note = functools.partial(self._note_compiled, frame, held=_end_measuring(frame))
                region.__exit__(None, None, None)
                if sys.exc_info()[1] is not handled:  # the function failed
                    note()
                elif not dynamo.when_returned(frame, note):
                    note()
                    warnings.warn(
                        "lazyviz: plans do not count the results of compiled functions: torch "
                        f"{torch.__version__} "
                        "reports them only to a profiler, and another profiler is active",
                        stacklevel=3,
                    )
                self.release()
            return result

        return pop_dynamic_layer_stack_and_undo_to_depth

    def _begin_compiled(self, frame: FrameType) -> AbstractContextManager[None]:
        """Enter the region of the compiled function that ``torch.compile``'s wrapper calls in ``frame``."""
        region = self._suspended("torch.compile")
        region.__enter__()
        if dynamo.is_of_pytorch(frame):  # user-defined functions may free memory that existed before
            dispatcher_bypasses.begin_measuring()
        return region

    def _note_compiled(self, frame: FrameType, returned: Any = None, *, held: int | None = None) -> None:
        """The compiled function that ``torch.compile``'s wrapper called in ``frame`` has returned.

        ``held`` is the peak memory of its kernels in bytes, if it was measured.
        """
        call = dynamo.compiled_call(frame)
        returned = call.returned if returned is None else returned
        note_region(self._tape, "torch.compile", call.read, returned, modules=call.modules, held=held)

    def _run_immediately(
        self, function: Callable[..., Any], cause: str, also: tuple[Any, ...] = ()
    ) -> Callable[..., Any]:
        """``function``, called after pending ops have run; ``also``: tensors that it reads in addition to its
        arguments.
        """

        @functools.wraps(function)
        def at_once(*args: Any, **kwargs: Any) -> Any:
            with self._suspended(cause, (*also, *args, *kwargs.values())):
                result = function(*args, **kwargs)
            note_region(self._tape, cause, (also, args, kwargs), result)
            return result

        return at_once

    @contextmanager
    def _suspended(self, cause: str, given: tuple[Any, ...] = ()) -> Iterator[None]:
        """Evaluate everything that is pending, and remove lazyviz from PyTorch until the end of the context.

        Nodes that are only planned stay pending, unless ``given`` depends on them.

        A compiler would treat our mode and patches as part of the user's program, and compiled code reads
        memory directly.
        """
        tape = self._tape
        if self.away or (tape.recording.graph is not None and tape.recording.owner != threading.get_ident()):
            yield
            return
        if tape.pending:
            with tape.runs.lock:
                evaluate_before_tracing(tape, cause, given)
        recording = tape.recording.graph is not None
        phase = tape.scopes.phase
        self.away = True
        self._scopes.remove()
        self._remove()
        private_api.remove_mode(self._mode)
        try:
            # Compilers query more of `torch.cuda` than is available for a planned GPU.
            with out_of_place() if tape.recording.absent is not None else contextlib.nullcontext():
                yield
        finally:
            self.away = False
            if recording:
                self.begin_recording()
                tape.scopes.phase = phase

    def end_recording(self) -> None:
        self._tape.recording.view_is_made()
        self._scopes.remove()
        self._stance.restore()  # planned nodes stay pending
        self.release()

    def release(self) -> None:
        """Restore PyTorch's original state, if nothing is recorded or pending."""
        if self._is_needed():
            return
        with CriticalSection():  # another thread may be about to begin a block
            if self._is_needed():
                return
            self._remove()
            # Backward passes, inference modes and similar contexts restore the keys that were active on
            # entry.
            if not self._entered() and not self._tape.recording.in_autograd():
                private_api.remove_mode(self._mode)
                self._patches.restore()
                dynamo.drop_rules_of(is_ours)

    def _retire(self) -> None:
        """Remove this thread's mode, if :meth:`release` could not: it may be called at every op."""
        if not self._reads.installed and not self._entered():
            self.release()

    def _is_needed(self) -> bool:
        return self._tape.recording.graph is not None or bool(self._tape.pending) or self.stays

    def leave(self) -> None:
        """:meth:`release`, and also remove the kernels that may stay from one block to the next."""
        with CriticalSection():
            self.release()
            if not self._reads.installed:
                self._composites.remove()

    def replaced_code(self) -> list[str]:
        """The PyTorch functions that are currently replaced."""
        return [code.name for code in (self._rules, *self._scopes.code) if code.is_replaced]

    def taking_part(self) -> list[str]:
        """Other ways in which lazyviz is active in PyTorch now, as far as this thread can tell."""
        found = ["dispatch mode of lazyviz"] if private_api.has_mode(self._mode) else []
        found += [f"dispatch key {key}" for key in private_api.stray_keys()]
        if fake_cuda_devices.supports_foreach(LazyTensor):
            found.append("types of foreach optimizers")
        if self._imports.installed:
            found.append("finder of imports in sys.meta_path")
        if self._finalizers.installed:
            found.append("callback of the garbage collector")
        return found + self._scopes.hooks()

    def reset(self) -> None:
        """Clear all state: nothing is recorded, paused, planned, or running."""
        recording = self._tape.recording
        recording.graph, recording.pauses = None, 0
        recording.summing = recording.immediate_step = None
        recording.view_is_made()
        if recording.absent is not None:
            with contextlib.suppress(Exception):
                recording.absent.remove()
            recording.absent = None
        self.away = self.stays = False
        self._thread.entered = {}
        self._thread.regions = {}

    def restore(self) -> None:
        """Like :meth:`leave`, regardless of what has been noted: everything installed by this package is
        removed.
        """
        self._scopes.remove()
        self.leave()
        for patches in list(everything):
            patches.restore()
        for code in (self._rules, *self._scopes.code):
            code.put_back()
        self._imports.remove()
        self._finalizers.remove()
        self._reads.installed = False
        originals.put_back()
        self._scopes.withdraw()
        self._composites.remove()
        private_api.remove_mode(self._mode)
        private_api.drop_stray_keys()
        self._reads.exports.install(numpy=False)  # as it is after the import

    def unload(self) -> None:
        """Restore PyTorch's state before lazyviz was imported, if nothing is recorded or pending."""
        self.leave()
        self._reads.unload()

    def _remove(self) -> None:
        if self._reads.installed:
            self._threads.restore()
            self._stance.restore()
            self._finalizers.remove()
            self._imports.remove()
            self._caches.remove()
            self._compilers.remove()
            self._rules.restore()
            self._settings.remove()
            self._formulas.remove()
            self._reads.remove()  # last: while it is installed, there is something to remove
        fake_cuda_devices.withdraw_foreach(LazyTensor)


def _leave(leave: Callable[..., Any], guard: Any) -> None:
    leave(guard, None, None, None)


def _no_rules(rule_of: FunctionType) -> FunctionType:
    """``private_api.dispatch_rule`` that returns immediately for lazyviz's mode, which has no rules."""

    def dispatch_rule(
        op: Any, mode: type, *, _recorder: type = RecorderMode, _rule_of: FunctionType = rule_of
    ) -> Any:
        return None if mode is _recorder else _rule_of(op, mode)

    return dispatch_rule  # type: ignore[return-value]


def _end_measuring(frame: FrameType) -> int | None:
    """Peak bytes held by the compiled function that ``torch.compile``'s wrapper called in ``frame``."""
    return dispatcher_bypasses.end_measuring() if dynamo.is_of_pytorch(frame) else None
