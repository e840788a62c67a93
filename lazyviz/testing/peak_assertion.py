"""Peak assertion, a memory budget: a block of PyTorch code fails if its projected peak is above a limit.

Nothing runs, and no GPU is needed, so a memory regression fails in any CI.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from ..graph.nested_blocks import flattened
from ..plan.devices.device_lookup import Device, DeviceLike, DeviceProfile, planned
from ..plan.explain_memory import essence, needed_text
from ..plan.make_plan import make_plan
from ..plan.plan import Plan, Run
from ..plan.units import format_bytes, parse_bytes
from ..session.block import LazyBlock
from ..session.lazy_graph import LazyGraph, lazy

P = ParamSpec("P")
T = TypeVar("T")


class PeakExceeded(AssertionError):
    """The projected peak is above the limit; ``plan`` has the details."""

    def __init__(self, message: str, plan: Plan) -> None:
        super().__init__(message)
        self.plan = plan


class Budget:
    """A limit on the peak of a block or, as a decorator, of every call of a function.

    ``of_function``: the block is a whole function.  Its variables no longer exist when the block ends, but
    did exist until then, so they count until the end.  ``names``: variables to name tensors by, such as the
    function's arguments, instead of those where the block ends.
    """

    def __init__(
        self,
        nbytes: int,
        device: DeviceLike | None,
        *,
        of_function: bool = False,
        of: Run = "eager",
        names: Mapping[str, Any] | None = None,
    ) -> None:
        self.nbytes = nbytes
        self.device = device
        self.of: Run = of
        self.of_function = of_function
        self.names = names
        self._open: list[tuple[LazyBlock[LazyGraph], LazyGraph]] = []

    def __enter__(self) -> LazyGraph:
        recording = lazy(device=self.device)
        graph = recording.__enter__()
        self._open.append((recording, graph))
        return graph

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        recording, graph = self._open.pop()
        if self.names is not None:
            recording.ends_in = self.names
        suppressed = recording.__exit__(kind, error, traceback)
        if kind is None:
            whole = flattened(graph.ir)
            if whole.elsewhere:
                warnings.warn(
                    _ELSEWHERE.format(threads=", ".join(sorted(whole.elsewhere))), UserWarning, stacklevel=2
                )
            plan = make_plan(whole, device=graph.device, as_recorded=self.of_function, of=self.of)
            if plan.needed_bytes > self.nbytes:
                raise PeakExceeded(_exceeded(plan, self.nbytes), plan)
        return suppressed

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        if isinstance(function, (classmethod, staticmethod)):  # written below this decorator
            return type(function)(self(function.__func__))
        if isinstance(function, type):
            raise TypeError(f"assert_peak_below decorates functions; {function.__name__} is a class")
        if any(map(_runs_later, (function, getattr(function, "__call__", None)))):  # noqa: B004
            raise TypeError(_LATER.format(name=_name(function)))

        @functools.wraps(function)
        def budgeted(*args: P.args, **kwargs: P.kwargs) -> T:
            names = _arguments(function, args, kwargs)
            with Budget(self.nbytes, self.device, of_function=True, of=self.of, names=names):
                result = function(*args, **kwargs)
                if inspect.iscoroutine(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
                    if inspect.iscoroutine(result):
                        result.close()  # otherwise, Python warns that it was never awaited
                    raise TypeError(_LATER.format(name=_name(function)))
                return result

        return budgeted


_LATER = (
    "assert_peak_below cannot decorate {name}: the body of a coroutine or generator runs after the call, "
    "interleaved with other code; instead, write `with lazyviz.assert_peak_below(...)` around the ops in it"
)


_ELSEWHERE = (
    "assert_peak_below counts only ops of its own thread (and autograd's): ops of {threads} are not counted"
)


def _arguments(
    function: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by the names that the function has for them."""
    try:
        return dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # the call raises its own error, or the function has no signature
        return dict(kwargs)


def _runs_later(function: object) -> bool:
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    return any(kind(function) for kind in kinds)


def _name(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__)


def assert_peak_below(
    limit: int | str, device: str | Device | DeviceProfile | None = None, *, of: Run = "eager"
) -> Budget:
    """Record a block, and fail if its projected peak is above ``limit``.

    Works as a context manager, which returns the :class:`LazyGraph`, and as a decorator::

        with lazyviz.assert_peak_below("12 GiB", device="A100-40GB"):
            model(x).sum().backward()

    Lazy blocks and budgets inside it count, too.  Ops on other threads do not count, and a ``UserWarning``
    names a thread that was started in the block.

    The compared memory is the same as for ``plan.fits``: on a GPU, the memory held by the caching allocator
    and the CUDA context; on the CPU, the peak of the tensors.  Recorded ops stay pending; the tensors of the
    block can be used afterwards as after any lazy block.

    Args:
        limit: bytes, or text such as ``"12 GiB"``, ``"800 MB"``, ``"1.5GB"``.
        device: plan for this device, present or not; default: the device that the block runs on.
        of: the kind of run: ``"eager"`` for eager PyTorch, or ``"lazyviz"`` for an evaluation.

    Raises:
        TypeError: it decorates a class, or a coroutine or generator function, whose body it cannot measure.
        ValueError: an invalid size, unknown device, or invalid ``of``; raised before the block runs.
        PeakExceeded: an ``AssertionError``, raised at the end of the block, with the peak, its line, and what
            would lower it.
    """
    nbytes = parse_bytes(limit)
    if device is not None:
        planned(device)
    if of not in ("eager", "lazyviz"):
        raise ValueError(f"of must be 'eager' (eager PyTorch) or 'lazyviz' (an evaluation), not {of!r}")
    return Budget(nbytes, device, of=of)


def _exceeded(plan: Plan, nbytes: int) -> str:
    need = plan.needed_bytes
    would = (
        f"would probably need {needed_text(plan)}"
        if plan.straddles(nbytes)
        else f"would need {format_bytes(need)}"
    )
    whose = "eager PyTorch" if plan.verdict_of == "eager" else "an evaluation by lazyviz"
    over, allowed = format_bytes(need - nbytes), format_bytes(nbytes)
    first = f"{plan.device} {would}, {over} above the limit of {allowed}, for {whose}"
    if need != plan.peak_bytes:
        first += " (including PyTorch's allocator and the CUDA context)"
    return "\n".join([f"{first}.", *essence(plan)])
