"""Optimizer step hooks: note where each step begins and ends, with the global hooks of ``torch.optim``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ...graph.ir import Phase
from ...process.deferred_signals import deferring
from ..tracked_storages import TrackedValue

ValueFinder = Callable[[torch.Tensor], TrackedValue | None]
"""Finds the recorded value of a tensor, if any."""


class StepListener(Protocol):
    """Listens to steps: the recorded phase, and the optimizers whose steps are running."""

    phase: Phase
    steps: list[Any]

    def learn_state(self, optimizer: Any, find: ValueFinder) -> None: ...
    def stepped(self, optimizer: Any) -> None: ...


class OptimizerSteps:
    """Notifies ``scopes`` of running optimizer steps, and of the optimizers' states.

    :mod:`lazyviz.record.native_recorder` has compiled forms of its two hooks.
    """

    def __init__(self, scopes: StepListener, find: ValueFinder) -> None:
        self.scopes = scopes
        self._find = find
        self._hooks: list[tuple[RemovableHandle, Callable[..., None]]] = []
        self._phases: list[Phase] = []
        self._named: list[int] = []  # the state at the beginning of the last step

    def install(self) -> None:
        before, after = self.before_step, self.after_step
        if not self._hooks:
            self._hooks = [
                (register_optimizer_step_pre_hook(before), before),
                (register_optimizer_step_post_hook(after), after),
            ]
            return
        self._hooks = [(handle, hook) for (handle, _), hook in zip(self._hooks, (before, after))]
        for handle, hook in self._hooks:
            hooks: Any = handle.hooks_dict_ref()
            hooks[handle.id] = hook  # as it was registered, with the same id

    def remove(self) -> None:
        for handle, _ in self._hooks:
            handle.remove()
        self._end()

    def registered(self) -> list[str]:
        """The hooks that are currently registered."""
        return [
            f"{hook.__qualname__} in torch.optim's global step hooks"
            for handle, hook in self._hooks
            if handle.id in (handle.hooks_dict_ref() or ())
        ]

    def withdraw(self) -> None:
        """Remove hooks of this class wherever they were registered."""
        for handle, _ in self._hooks:
            hooks: Any = handle.hooks_dict_ref()
            for key, hook in list(hooks.items()):
                if isinstance(getattr(hook, "__self__", None), OptimizerSteps):
                    del hooks[key]

    @deferring  # a reset in a handler of a signal ends the step
    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._named = []
        if optimizer.state:
            self.scopes.learn_state(optimizer, self._find)
            self._named = _contents(optimizer)
        for other in self.scopes.steps:
            if other is optimizer:  # its last step has failed
                self._end()
                break
        self._phases.append(self.scopes.phase)
        self.scopes.phase = "optimizer"
        self.scopes.steps.append(optimizer)

    @deferring
    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._phases:
            self.scopes.phase = self._phases.pop()
            self.scopes.steps.pop()
            if not self.scopes.steps:
                self.scopes.stepped(optimizer)
        if optimizer.state and self._named != _contents(optimizer):  # as in the first step
            self.scopes.learn_state(optimizer, self._find)

    def _end(self) -> None:
        """Note the end of a step; PyTorch has no hook for the end of a step that fails.

        A signal handler's exception may have stopped :meth:`before_step` or :meth:`after_step` at any
        instruction.
        """
        if self._phases:
            self.scopes.phase = self._phases[0]
        if self.scopes.steps:
            self.scopes.stepped(self.scopes.steps[0])
            self.scopes.steps.clear()
        self._phases.clear()


def _contents(optimizer: Any) -> list[int]:
    """The identities of the objects in ``optimizer``'s state, in order."""
    found: list[int] = []
    for state in optimizer.state.values():
        if isinstance(state, dict):
            found += map(id, state.values())
    return found
