"""Notification of whole optimizer steps, for which :mod:`torch.optim` has no hook.

The hooks of ``torch.optim`` are called within a step, while PyTorch iterates over the list of hooks: a block
that ends or begins there would change that list (``tests/torch_internals/test_private_apis.py``).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer


@contextmanager
def watched_steps(before: Callable[[Any], None], after: Callable[[Any], None]) -> Iterator[None]:
    """Context in which ``before`` and ``after`` are called with the optimizer around each outermost step.

    This applies to optimizers whose class creates its first instance in the context, because PyTorch then
    wraps ``step``.
    """
    original: Any = vars(Optimizer)["profile_hook_step"]
    active = [True]
    inside = threading.local()

    def profile_hook_step(step: Callable[..., Any]) -> Callable[..., Any]:
        hooked = original.__func__(step)

        @functools.wraps(hooked)
        def watched_step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not active[0] or getattr(inside, "a_step", False):
                return hooked(optimizer, *args, **kwargs)
            inside.a_step = True
            try:
                before(optimizer)
                result = hooked(optimizer, *args, **kwargs)
            finally:
                inside.a_step = False
            after(optimizer)
            return result

        return watched_step

    ours: Any = staticmethod(profile_hook_step)
    setattr(Optimizer, "profile_hook_step", ours)  # noqa: B010
    try:
        yield
    finally:
        active[0] = False
        setattr(Optimizer, "profile_hook_step", original)  # noqa: B010
