"""Text generation on an absent GPU: only the maximum length ends a sequence.

After each token, ``generate`` of transformers checks whether a sequence has ended, which is unknown on an
absent GPU. Checks that depend on tokens are recorded as usual and assumed to return "no", so that only
lengths end generation: the longest possible run.  Plans say so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import FrameType, ModuleType
from typing import Any

import torch

from .. import constant_folding
from ..interception import unpatched_imports
from ..lazy_tensor import is_lazy
from ..tracked_storages import TrackedNode
from .fake_gpus_protocol import Gpus

UNTIL_MAX_NEW_TOKENS = "until max_new_tokens"
"""The assumption, as the option that sets it words it."""
_CHECKS = {("transformers.generation.utils", name) for name in ("generate", "_get_logits_processor")}
"""Functions that check the prompt: whether its whole mask is set, whether any of its ids are invalid, and
whether more than 0 of its sequences end with padding."""
_PACKED = ("transformers.masking_utils", "find_packed_sequence_indices")
"""The check whether positions of tokens restart within a row. In ``generate`` without a cache, they are
computed from the prompt's mask, and do not if it has no padding.
"""
_BEAM_SEARCH = ("transformers.generation.utils", "_beam_search")
_READ = ("aten::all", "aten::any", "aten::gt", "aten::max", "aten::add")
_MOST_FRAMES = 12  # between a check and the read
_PROMPT = "the prompt of generate() has no padding"
_TEXT = "generate() stops only at the maximum length (max_new_tokens)"


class Generation:
    """The assumed answers for ``generate``, and the patches that give them."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._actions: dict[str, Callable[[ModuleType], None]] = {
            "transformers.generation.stopping_criteria": self._patch_criteria,
            "transformers.generation.utils": self._patch_beams,
        }

    def install(self) -> None:
        for name, action in self._actions.items():
            unpatched_imports.when_imported(name, action)

    def remove(self) -> None:
        for name in self._actions:
            unpatched_imports.forget(name)

    def answer(self, needed: Sequence[TrackedNode], frame: FrameType) -> bool | int | None:
        """The assumed value of a read in ``generate``, above ``frame``; ``None`` for any other read."""
        node = needed[-1] if needed else None
        name = node.op._schema.name if node is not None else ""
        if node is None or name not in _READ:
            return None
        caller: FrameType | None = frame
        for _ in range(_MOST_FRAMES):
            if caller is None:
                return None
            function = caller.f_globals.get("__name__"), caller.f_code.co_name
            if function in _CHECKS and (
                name in ("aten::all", "aten::any") or (name == "aten::gt" and node.args[1] == 0)
            ):
                self._say(_PROMPT)
                return name == "aten::all"
            if function == _PACKED and name == "aten::all" and _is_in_generate(caller):
                self._say(_PROMPT)
                return True
            if function == _BEAM_SEARCH and (length := _longest_beam(node)) is not None:
                self._say(_TEXT)
                return length
            caller = caller.f_back
        return None

    def _say(self, what: str) -> None:
        graph = self._gpus.tape.recording.graph
        if graph is not None:
            graph.assumed.add(what)

    def _patch_criteria(self, module: ModuleType) -> None:
        all_of_them = getattr(module, "StoppingCriteriaList", None)
        if all_of_them is None:
            return  # another version of transformers
        original = all_of_them.__call__

        @functools.wraps(original)
        def any_is_met(criteria: Any, *args: Any, **kwargs: Any) -> Any:
            return original([self._unmet(criterion) for criterion in criteria], *args, **kwargs)

        self._gpus.patches.set(all_of_them, "__call__", any_is_met)

    def _unmet(self, criterion: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``criterion`` so that it returns False if its result depends on a token."""

        def met(*args: Any, **kwargs: Any) -> Any:
            answer = criterion(*args, **kwargs)
            self._assume(answer, False)
            return answer

        return met

    def _patch_beams(self, module: ModuleType) -> None:
        mixin = getattr(module, "GenerationMixin", None)
        name = "_beam_search_has_unfinished_sequences"
        original = getattr(mixin, name, None)
        if mixin is None or original is None:
            return

        @functools.wraps(original)
        def has_unfinished(*args: Any, **kwargs: Any) -> Any:
            hits = kwargs.get("next_token_hits_stopping_criteria", args[2] if len(args) > 2 else None)
            answer = original(*args, **kwargs)
            met = self._content(hits)
            self._assume(answer, met is None or not bool(met.all()))
            return answer

        self._gpus.patches.set(mixin, name, staticmethod(has_unfinished))

    def _content(self, tensor: Any) -> torch.Tensor | None:
        """The content of a pending tensor, if it is known."""
        if not is_lazy(tensor):
            return tensor if isinstance(tensor, torch.Tensor) else None
        value = tensor._lazyviz
        known = constant_folding.known(self._gpus.tape.shapes, [value])
        return None if known is None else known[value]

    def _assume(self, answer: Any, content: bool) -> None:
        """Assume ``content`` for the unknown elements of ``answer``, unless the user says what reads
        return.
        """
        tape = self._gpus.tape
        if not is_lazy(answer) or answer.dtype != torch.bool or self._content(answer) is not None:
            return
        if self._gpus.assumes_each_read():
            return
        graph = tape.recording.graph
        if graph is not None and constant_folding.assume(answer._lazyviz, content):
            graph.assumed.add(_TEXT)


def _is_in_generate(frame: FrameType | None) -> bool:
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == (
            "transformers.generation.utils",
            "generate",
        ):
            return True
        frame = frame.f_back
    return False


def _longest_beam(node: TrackedNode) -> int | None:
    """The length to which beam search cuts sequences that have all their tokens: the largest number that is
    set in a row, plus the prompt's length; ``None`` if ``node`` computes something else.
    """
    length = 0
    if node.op is torch.ops.aten.add.Tensor and isinstance(node.args[1], int):
        length, before = node.args[1], node.inputs[0].node
        if before is None:
            return None
        node = before
    counts = node.inputs[0].node if node.op is torch.ops.aten.max.default else None
    if counts is None or counts.op is not torch.ops.aten.sum.dim_IntList:
        return None
    (flags,) = counts.inputs
    return length + flags.meta.shape[1] if flags.dtype == torch.bool else None
