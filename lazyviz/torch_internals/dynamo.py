"""Private torch APIs for ``torch.compile``, each with its reason.

Compiled code treats dispatch modes and patched methods as part of the program, so recording must know where
it begins and ends. ``tests/torch_internals/test_private_apis.py`` checks each entry.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorConverter, FakeTensorMode

# The class of autograd nodes of custom functions, and the methods that the engine calls: torch 2.13 passes
# gradients to some in a list, so that they can be freed early.
CustomBackward = torch.autograd.function.BackwardCFunction
BACKWARD_CALLS = tuple(name for name in ("apply", "apply_boxed") if hasattr(CustomBackward, name))


# The module that keeps PyTorch functions in tables when it is imported, and replaces some. Importing it takes
# most of a second, so it is imported only if it is needed.
KEEPS_WHAT_IT_FINDS = "torch._dynamo"
EXPORT = "torch._dynamo.export"
# The method with which tracers create fake tensors, and the function with which `pipeline` traces a model.
MAKE_FAKE = (FakeTensorConverter, "from_real_tensor")
PIPELINES, TRACE_PIPELINE = "torch.distributed.pipelining._IR", "_trace_with_export"
# The context that compiles backward passes.
COMPILED_BACKWARD, ENABLE_COMPILED_BACKWARD = "torch._dynamo.compiled_autograd", "_enable"
# The tensor types that AOTAutograd checks at a compiled function's first call.
AOT_WRAPPERS, HANDLED_TYPES = "torch._functorch._aot_autograd.runtime_wrappers", "HANDLED_TYPES"
# The modules of flex attention's operator and of the function that calls it, and the operator's name there.
FLEX_OPERATOR, FLEX_FUNCTION = "torch._higher_order_ops.flex_attention", "torch.nn.attention.flex_attention"
FLEX_CALLED = "flex_attention_hop"
# Dynamo's hook on this thread's frames, and the mark of code that it skips.
_FRAMES = torch._C._dynamo.eval_frame
set_eval_frame = _FRAMES.set_eval_frame


_checked: Mapping[Any, Any] | None = None  # the table of Dynamo's rules that was checked last


def drop_rules_of(is_replacement: Callable[[Any], bool]) -> None:
    """Rebuild Dynamo's table of rules, if it was built while functions of PyTorch were patched.

    The table is created once, from the functions that exist when it is first needed. A table with our
    replacements has no rules for the originals, so they could no longer be traced.
    """
    global _checked
    rules = sys.modules.get("torch._dynamo.trace_rules")
    table = getattr(rules, "get_torch_obj_rule_map", None)
    if table is None or not table.cache_info().currsize or table() is _checked:
        return
    _checked = table()
    if any(is_replacement(function) for function in _checked):
        table.cache_clear()
        _checked = None


def skip_code(code: CodeType, *, recursive: bool = False) -> None:
    """Make Dynamo skip ``code``; with ``recursive``, also everything that it calls."""
    actions = _FRAMES._FrameAction
    strategy = _FRAMES._FrameExecStrategy(actions.SKIP, actions.SKIP if recursive else actions.DEFAULT)
    _FRAMES.set_code_exec_strategy(code, strategy)


def is_compiled_backward(node: Any) -> bool:
    """Whether an autograd node of a custom function runs a backward pass that ``torch.compile`` created."""
    return hasattr(node._forward_cls, "_aot_id")


def calls_compiled_function(frame: FrameType) -> bool:
    """Whether ``frame`` is that of ``torch.compile``'s wrapper, which calls a compiled function."""
    code = frame.f_code
    return code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py")


def compiled_name(frame: FrameType) -> str:
    """The name of the function, or the class of the module, that ``torch.compile``'s wrapper in ``frame``
    calls.

    Empty for PyTorch's own functions, which eager code uses.
    """
    function = inspect.unwrap(frame.f_locals["fn"])
    owner = getattr(function, "__self__", function)
    if isinstance(owner, torch.nn.Module):
        return type(owner).__name__
    if getattr(function, "__module__", "") == "torch.nn.attention.flex_attention":
        return "" if function.__name__.startswith("_") else function.__name__
    return str(getattr(function, "__qualname__", type(function).__name__)).rpartition("<locals>.")[2]


def is_of_pytorch(frame: FrameType) -> bool:
    """Whether ``torch.compile``'s wrapper in ``frame`` calls a function of PyTorch's own.

    Some functions of eager PyTorch compile themselves, with a backend that runs each op: flex attention, and
    ``torch.cond``.
    """
    function = inspect.unwrap(frame.f_locals["fn"])
    return isinstance(function, FunctionType) and function.__module__.partition(".")[0] == "torch"


def eager_stance(frame: FrameType) -> tuple[Any, str, Any] | None:
    """Module, name and value that make ``torch.compile``'s wrapper in ``frame`` call functions uncompiled.

    This is the setting of ``torch.compiler.set_stance("force_eager")``; with another stance, the wrapper
    raises an error if it has compiled nothing (``fullgraph=True``). ``None``: it is set already, or this
    PyTorch has no such setting.
    """
    module = sys.modules.get(frame.f_globals["__name__"])
    stance = getattr(module, "_stance", None)
    if stance is None or stance.stance == "force_eager":
        return None
    return module, "_stance", type(stance)("force_eager")


# Since torch 2.13, the wrapper calls the function inside of a guard of dispatch keys; in 2.15, it calls two
# functions instead, the second in any case.
_KEPT_KEYS = ("_dynamo_save_local_dispatch_key_set", "_dynamo_restore_local_dispatch_key_set")
KEPT_KEYS = tuple((torch._C, name) for name in _KEPT_KEYS if hasattr(torch._C, name))

# Before torch 2.13, the only visible parts of the call are that it reads functorch's depth just before, and
# restores it just after, in any case.
DEPTH = (torch._C._functorch, "get_dynamic_layer_stack_depth")
UNDO_TO_DEPTH = (torch._C._functorch, "pop_dynamic_layer_stack_and_undo_to_depth")


def calls_unguarded(frame: FrameType) -> bool:
    """Whether ``frame`` is that of ``torch.compile``'s wrapper, in a version whose wrapper has no guard."""
    return calls_compiled_function(frame) and "_ForceDispatchKeyGuard" not in frame.f_code.co_names


def when_returned(frame: FrameType, then: Callable[[Any], None]) -> bool:
    """Call ``then`` with the return value of ``frame``, which is running and will not fail.

    Its code does not store the result in a variable. Python shows it only to profilers; False if all profiler
    slots are taken.
    """
    if sys.version_info >= (3, 12):
        watching = sys.monitoring
        event = watching.events.PY_RETURN
        tool = next((number for number in range(6) if watching.get_tool(number) is None), None)
        if tool is None:
            return False
        watching.use_tool_id(tool, "lazyviz")

        def returns(code: CodeType, offset: int, value: Any) -> None:
            if sys._getframe(1) is frame:
                watching.set_local_events(tool, code, 0)
                watching.register_callback(tool, event, None)
                watching.free_tool_id(tool)
                then(value)

        watching.register_callback(tool, event, returns)
        watching.set_local_events(tool, frame.f_code, event)
        return True

    if sys.getprofile() is not None:
        return False

    def profile(current: FrameType, event: str, value: Any) -> None:
        if current is frame and event == "return":
            sys.setprofile(None)
            then(value)

    sys.setprofile(profile)
    return True


class CompiledCall(NamedTuple):
    """A call of a compiled function: the tensors that it read, its modules, and its result."""

    read: Any
    modules: Sequence[torch.nn.Module]
    returned: Any


def compiled_call(frame: FrameType) -> CompiledCall:
    """The function that ``torch.compile``'s wrapper calls in ``frame``; with its result once it leaves its
    guard, if any.

    Tensors that a function reads besides its arguments are found if its own code names them.
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


class Compiled(NamedTuple):
    """Compiled code, and the sizes for which it is valid: None means those of the example."""

    code: Callable[..., Sequence[torch.Tensor]]
    holds: Callable[[int], bool] | None = None


@contextlib.contextmanager
def without_compile_context() -> Iterator[None]:
    """Context without autocast and ``__torch_function__`` modes, such as a default device's.

    Compilers read both while they trace; the traced program was recorded below them.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._C._DisableAutocast())
        for _ in range(torch._C._len_torch_function_stack()):
            stack.enter_context(torch.overrides._pop_mode_temporarily())
        yield


# Gradients of interpolations whose shape rules PyTorch has in C++ alone, for sizes that are numbers, although
# the results have the sizes that an argument names. The second set keeps channels-last (aten/src/ATen/native,
# UpSample*.cpp).
_aten = torch.ops.aten
CONTIGUOUS_UPSAMPLING = frozenset(
    {
        _aten.upsample_nearest1d_backward.default,
        _aten._upsample_nearest_exact1d_backward.default,
        _aten.upsample_linear1d_backward.default,
        _aten.upsample_bicubic2d_backward.default,
        _aten._upsample_bicubic2d_aa_backward.default,
        _aten.upsample_nearest3d_backward.default,
        _aten._upsample_nearest_exact3d_backward.default,
    }
)
UPSAMPLING = {_aten.upsample_bilinear2d_backward.default, _aten.upsample_trilinear3d_backward.default}


class SymbolicFakeMode(FakeTensorMode):
    """PyTorch's fake mode, with shape rules for symbolic sizes where PyTorch has none.

    Not ``register_op_impl``, which would change PyTorch for everyone.
    """

    def _dispatch_impl(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        contiguous = func in CONTIGUOUS_UPSAMPLING
        if (contiguous or func in UPSAMPLING) and any(type(size) is torch.SymInt for size in args[2]):
            gradient, size = args[0], args[2]
            with self:
                result = gradient.new_empty(size)
                if contiguous:
                    return result
                return result.contiguous(memory_format=torch._prims_common.suggest_memory_format(gradient))
        return super()._dispatch_impl(func, types, args, kwargs)


Dimensions = Sequence[tuple[Sequence[Any], Sequence[Any]]]  # of each input, its shape and strides


def compile_graph(
    module: torch.fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    numbers: Sequence[torch.Tensor],
    options: Mapping[str, Any],
    size: int | None = None,
    dimensions: Callable[[Any], Dimensions] | None = None,
) -> Compiled:
    """``module``, which calls ATen operators, compiled by Inductor for inputs like these.

    ``torch.compile(backend="inductor")`` calls ``compile_fx`` with the graph that Dynamo found. It removes
    in-place writes (AOTAutograd), generates code, and returns a function with the same arguments that
    performs the remaining writes at the end. Dynamo itself is not needed, because the graph is the recorded
    program. A separate shape environment gives symbols to ``numbers``, whose values the code reads when it
    runs.

    Shapes are those of ``inputs``; with ``size``, the module's first argument, they are ``dimensions`` of it,
    and the code is valid for all sizes that meet the compiler's assumptions.
    """
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", DeprecationWarning)  # warnings of torch about its own code
        from torch._dynamo.source import ConstantSource
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

        environment = ShapeEnv()
        fake_mode = SymbolicFakeMode(shape_env=environment, allow_non_fake_inputs=True)
        fakes: list[Any] = []
        symbol = None
        with torch._guards.tracing(torch._guards.TracingContext(fake_mode)), config.patch(dict(options)):
            if size is None or dimensions is None:
                fakes += [fake_mode.from_tensor(each, static_shapes=True) for each in inputs]
            else:
                source = ConstantSource("size")
                symbol = environment.create_symbol(size, source=source, dynamic_dim=DimDynamic.DYNAMIC)
                number = environment.create_symintnode(symbol, hint=size, source=source)
                fakes.append(number)
                with fake_mode:
                    for each, (shape, stride) in zip(inputs, dimensions(number), strict=True):
                        fakes.append(
                            torch.empty_strided(shape, stride, dtype=each.dtype, device=each.device)
                            if any(type(item) is not int for item in (*shape, *stride))
                            else fake_mode.from_tensor(each, static_shapes=True)
                        )
            fakes += [fake_mode.from_tensor(each, static_shapes=True) for each in numbers]
            compiled: Any = compile_fx(module, fakes)
    return Compiled(compiled) if symbol is None else Compiled(compiled, _holding(environment, symbol))


def _holding(environment: Any, symbol: Any) -> Callable[[int], bool]:
    """Whether all assumptions of the compiler about ``symbol`` hold for a value of it."""
    import sympy  # type: ignore[import-untyped]

    taken = [guard.expr for guard in environment.guards]
    bounds = environment.var_to_range[symbol]
    fixed = environment.replacements.get(symbol)
    known: dict[int, bool] = {}

    def holds(value: int) -> bool:
        answer = known.get(value)
        if answer is None:
            given = {symbol: sympy.Integer(value)}
            answer = known[value] = (
                bounds.lower <= value <= bounds.upper
                and (fixed is None or fixed == value)
                and all(expression.xreplace(given) == sympy.true for expression in taken)
            )
        return answer

    return holds


def raise_in_thread(thread: int, kind: type[BaseException]) -> None:
    """Raise ``kind`` between two Python instructions of the thread with this ident.

    Compilers cannot be stopped in another way, and CPython's function for this has no Python binding.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))
