"""Private torch APIs around ``torch.compile``, each with the reason for it.

Compiled code takes dispatch modes and patched methods for a part of the program, so that recording has
to know where it begins and ends.  ``tests/test_torch_private.py`` checks each entry.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import torch

# The class of autograd nodes of custom functions; its `_get_user_fn` gives their backward function.
CustomBackward = torch.autograd.function.BackwardCFunction


# Dynamo's hook on this thread's frames, and the mark of code that it leaves alone.
_FRAMES = torch._C._dynamo.eval_frame
set_eval_frame = _FRAMES.set_eval_frame


def skip_code(code: CodeType) -> None:
    """Have Dynamo run ``code`` as it is."""
    strategy = _FRAMES._FrameExecStrategy(_FRAMES._FrameAction.SKIP, _FRAMES._FrameAction.DEFAULT)
    _FRAMES.set_code_exec_strategy(code, strategy)


def is_compiled_backward(node: Any) -> bool:
    """Whether an autograd node of a custom function runs a backward pass that ``torch.compile`` made."""
    return hasattr(node._forward_cls, "_aot_id")


def calls_compiled_function(frame: FrameType) -> bool:
    """Whether ``frame`` is that of ``torch.compile``'s wrapper, which calls a compiled function."""
    code = frame.f_code
    return code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py")


class CompiledCall(NamedTuple):
    """A call of a compiled function: what it read, the modules it is of, and what it returned."""

    read: Any
    modules: Sequence[torch.nn.Module]
    returned: Any


def compiled_call(frame: FrameType) -> CompiledCall:
    """What ``torch.compile``'s wrapper calls in ``frame``; there is a result once it leaves its guard.

    What a function reads beside its arguments is found as far as its own code names it.
    """
    variables = frame.f_locals
    args, kwargs = variables.get("args") or (), variables.get("kwargs") or {}
    function = inspect.unwrap(variables["fn"])
    named = [getattr(function, "__self__", function)]
    if isinstance(function, FunctionType):
        named += [function.__globals__.get(name) for name in function.__code__.co_names]
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # not filled yet
                named.append(cell.cell_contents)
    modules = [each for each in (*named, *args, *kwargs.values()) if isinstance(each, torch.nn.Module)]
    tensors = [each for each in named if isinstance(each, torch.Tensor)]
    return CompiledCall((args, kwargs, tensors), modules, variables.get("result"))
