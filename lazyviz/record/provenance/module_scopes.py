"""Module scopes: the module path, phase and tensor roles of each op."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, FunctionType
from typing import Any

import torch

from ...graph.ir import Graph, Phase, Role, SourceLine
from ...graph.modules import ModuleRoot, OwnedName
from ...torch_internals import private_api
from ..interception.attribute_patches import CodePatch
from ..interception.optimizer_hooks import OptimizerSteps, ValueFinder
from ..storage import TrackedNode, TrackedStorage, TrackedValue
from .module_names import name_roots
from .source_lines import SourceFinder

NO_SEQUENCE = 1 << 62  # AccumulateGrad and its like carry the largest sequence number


def _mark_gradient(storage: TrackedStorage, parameter: str) -> None:
    if storage.role is None:
        storage.role = "gradient"
        storage.name = parameter + ".grad" if parameter else "grad"


class Scopes:
    """The module path and phase of what is running now.

    Modules announce themselves where ``nn.Module.__call__`` goes on with something else (module
    hooks would send every call through their slow path), optimizers through the global
    step hooks that ``torch.optim`` offers.
    """

    # Of these the compiled recorder asks at every op or call of a module.
    __slots__ = (
        "__dict__", "__weakref__", "_callers", "_entered", "_learnt", "_parameters", "_paths", "_roots",
        "by_sequence", "met", "module", "phase", "root", "roots",
    )  # fmt: skip

    def __init__(self) -> None:
        self.module = ""
        self.root = ""
        self._callers: tuple[SourceLine, ...] = ()  # of the outermost module's call
        self.phase: Phase = "other"
        self.sources = SourceFinder()
        self.by_sequence: dict[int, TrackedNode] = {}  # autograd sequence number -> forward node
        self._earlier: weakref.WeakSet[Graph] = weakref.WeakSet()  # with forward nodes of their own
        self._entered: list[tuple[str, str]] = []  # root and path of modules called since the last node
        self._stack: list[tuple[str, str, Phase, tuple[SourceLine, ...]]] = []
        self._paths: dict[int, str] = {}
        self.met: set[int] = set()  # the outermost modules that were called in this block, by identity
        self.note_module_call: Callable[[torch.nn.Module], None] = lambda module: (
            None
        )  # what hears of the first call
        self.steps: list[Any] = []  # optimizers whose step is being taken, the outermost first
        self.stepped: Callable[[Any], None] = lambda optimizer: None  # what hears of the end of the outermost
        self._learnt: Root | None = None  # the last: modules may be part of several roots
        self._roots: dict[int, str] = {}  # by id of a parameter or buffer: the outermost module
        self.roots: dict[int, ModuleRoot] = {}  # by id of the module: those that were called
        # By id of a tensor: its module and its name there, its role and its full name.  Of an optimizer's
        # tensors, which have no module, themselves.  (A tensor with weak references cannot be swapped.)
        self._parameters: dict[int, tuple[weakref.ref[Any], str, Role, str]] = {}
        self._many = 200  # of these, when next to look for dead ones

    def locate(self, node: TrackedNode, frame: FrameType | None, mutates: bool) -> None:
        """Note where ``node`` comes from: module path, source line, phase, grad modes."""
        node.module = self.module
        node.root = self.root
        if self.root:  # the lines of the modules' calls: no op there looks through all their frames
            node.source, hint = self.sources.find(frame)
            node.callers = self._callers
        else:
            node.source, hint, node.callers = self.sources.place(frame)
        if self._entered:
            node.graph.calls[node.index] = tuple(self._entered)
            self._entered.clear()
        node.grad_mode = torch.is_grad_enabled()
        node.inference_mode = torch.is_inference_mode_enabled()
        engine = private_api.current_autograd_node()
        if engine is None:
            phase = hint or self.phase
            if phase == "other" and hint is None and node.inputs and (node.grad_mode or not mutates):
                phase = "forward"
            node.phase = phase
            self.by_sequence.setdefault(private_api.sequence_number() - 1, node)
            return
        self.locate_gradient(node, engine)

    def locate_gradient(self, node: TrackedNode, engine: Any) -> None:
        """The part of :meth:`locate` for an op that the autograd engine's node ``engine`` calls."""
        node.phase = "backward"
        sequence = engine._sequence_nr()
        if sequence < NO_SEQUENCE:
            forward = self.by_sequence.get(sequence) or self._earlier_forward(sequence)
            if forward is not None:
                node.forward = forward
                if not node.module:
                    node.module, node.root = forward.module, forward.root
        elif (parameter := getattr(engine, "variable", None)) is not None:
            _, name = self.role_of(parameter)
            node.root = self._roots.get(id(parameter), "") if name else ""  # or it is of one that has died
            node.module = name.rpartition(".")[0]
            for value in node.inputs:
                _mark_gradient(value.storage, name)

    def mark_stored_gradient(self, value: TrackedValue) -> None:
        """``value`` is being detached: it is a gradient from now on if autograd does so to store it."""
        engine = private_api.current_autograd_node()
        if engine is None or engine._sequence_nr() < NO_SEQUENCE:
            return
        if (parameter := getattr(engine, "variable", None)) is not None:
            _mark_gradient(value.storage, self.role_of(parameter)[1])

    def role_of(self, tensor: torch.Tensor) -> tuple[Role | None, str]:
        """What a tensor from outside is: ("parameter", "h.0.attn.weight"), or (None, "")."""
        found = self._parameters.get(id(tensor))
        if found is not None:
            reference, key, role, name = found
            owner = reference()
            if isinstance(owner, torch.nn.Module):
                owner = getattr(owner, key, None)
            if owner is tensor:
                return role, name
        if type(tensor) is torch.Tensor and not tensor.__dict__:  # sooner than Parameter's own look
            return None, ""
        if isinstance(tensor, torch.nn.Parameter):
            return "parameter", ""
        return None, ""

    def enter(self, module: torch.nn.Module) -> None:
        self._stack.append((self.module, self.root, self.phase, self._callers))
        line, _, callers = self.sources.enter(sys._getframe(1))
        if not self.root:
            self.enter_root(module, callers)
        if line is not None and line not in self._callers:
            self._callers = (line, *self._callers)
        path = self._paths.get(id(module))
        self.module = path if path is not None else self.path_of_unnamed(module)
        self._entered.append((self.root, self.module))
        if self.phase == "other":
            self.phase = "forward"

    def enter_root(self, module: torch.nn.Module, callers: tuple[SourceLine, ...]) -> None:
        """The outermost module is called, from the line that ``callers`` led to."""
        root = self.roots.get(id(module))
        if root is None or root.module is None or root.module() is not module:
            root = self._root_of(module)
        self.root = root
        self._paths = self._learn(module)
        if id(module) not in self.met:
            self.met.add(id(module))
            self.note_module_call(module)
        self._callers = callers

    def _root_of(self, module: torch.nn.Module) -> ModuleRoot:
        key, roots = id(module), self.roots
        reference = weakref.ref(module, lambda _: roots.pop(key, None))
        roots[key] = ModuleRoot(type(module).__name__, reference)
        return roots[key]

    def name_modules(self, variables: Mapping[str, Any]) -> None:
        """Call the outermost modules of the block that ends as the user's variables are called."""
        name_roots([self.roots[key] for key in self.met if key in self.roots], variables)

    def path_of_unnamed(self, module: torch.nn.Module) -> str:
        """The path of one that was made after its root was entered, or is not registered."""
        return f"{self.module}.{type(module).__name__}" if self.module else type(module).__name__

    def leave(self) -> None:
        self.sources.leave(sys._getframe(1))
        self.module, self.root, self.phase, self._callers = self._stack.pop()

    def forget_calls(self) -> None:
        """Drop the calls that recorded nothing, so that the next graph does not take them for its own."""
        self._entered.clear()

    def learn_state(self, optimizer: torch.optim.Optimizer, find: ValueFinder) -> None:
        """Name what the optimizer keeps for each parameter: ``"h.0.weight.exp_avg"``."""
        for parameter, state in optimizer.state.items():
            _, name = self.role_of(parameter)
            for key, tensor in state.items() if isinstance(state, dict) else ():
                if isinstance(tensor, torch.Tensor):
                    known = self._parameters.get(id(tensor))
                    if known is not None and known[0]() is tensor and _is_parameter_of(known[3], name, key):
                        continue  # as in every step but the first: it was met under that name
                    value = find(tensor)
                    storage = None if value is None else value.storage
                    if (
                        storage is not None
                        and storage.role == "optimizer"
                        and _is_parameter_of(storage.name, name, key)
                    ):
                        continue
                    full = name + f".{key}" if name else key  # an OwnedName stays one
                    if storage is not None:
                        storage.role, storage.name = "optimizer", full
                    else:
                        self._parameters[id(tensor)] = (weakref.ref(tensor), "", "optimizer", full)

    def learn_cache(self, tensor: torch.Tensor, find: ValueFinder) -> None:
        """``tensor`` is a part of a KV cache."""
        value = find(tensor)
        if value is not None:
            value.storage.role = "kv_cache"
        else:
            self._parameters[id(tensor)] = (weakref.ref(tensor), "", "kv_cache", "")

    def hand_over(self, graph: Graph) -> None:
        """The block has ended: from now on its forward nodes are remembered as long as ``graph`` is."""
        graph.by_sequence, self.by_sequence = self.by_sequence, {}
        self._earlier.add(graph)

    def _earlier_forward(self, sequence: int) -> Any:
        return next(
            (graph.by_sequence[sequence] for graph in self._earlier if sequence in graph.by_sequence), None
        )

    def forget_forward(self) -> None:
        self.by_sequence.clear()
        self._earlier.clear()

    def forget_dead(self) -> None:
        """Drop what is known of tensors that are gone, now and then."""
        if len(self._parameters) >= self._many:
            self._parameters = {
                key: known for key, known in self._parameters.items() if known[0]() is not None
            }
            self._roots = {key: root for key, root in self._roots.items() if key in self._parameters}
            self._many = 2 * len(self._parameters) + 200

    def _learn(self, root: torch.nn.Module) -> dict[int, str]:
        """Names of the submodules, parameters and buffers of ``root``; again when it has others."""
        known = self._learnt
        if known is not None and known.holds(root):
            return known.paths
        modules = list(torch.nn.Module.named_modules(root))
        paths = {id(module): name for name, module in modules}
        seen: set[int] = set()  # a tied weight goes by its first name, as in named_parameters()
        for name, module in modules:
            for role, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
                if role == "buffer" and type(module).__name__.replace("_", "").lower() == "kvcache":
                    role = "kv_cache"
                for key, tensor in tensors.items():
                    if tensor is not None and id(tensor) not in seen:
                        seen.add(id(tensor))
                        full = OwnedName(f"{name}.{key}" if name else key, self.root)
                        pending = tensor.__dict__.get("_lazyviz")
                        if pending is not None:  # made in this block: it has a storage already
                            pending.storage.role, pending.storage.name = role, full
                        self._roots[id(tensor)] = self.root
                        self._parameters[id(tensor)] = (weakref.ref(module), key, role, full)  # type: ignore[assignment]
        self._learnt = Root(paths, [module for _, module in modules])
        return paths


def _is_parameter_of(full: str, name: str, key: str) -> bool:
    """Whether ``full`` is the name of what an optimizer keeps by ``key`` for the parameter ``name``."""
    length = len(name) + 1 + len(key) if name else len(key)
    return len(full) == length and full.startswith(name) and full.endswith(key)


def content_of(modules: Sequence[torch.nn.Module | None]) -> list[str | int]:
    """The names and identities of what each of ``modules`` holds, in order; less, if one of them is gone."""
    content: list[str | int] = []
    for module in modules:
        if module is None:
            break
        for held in (module._modules, module._parameters, module._buffers):
            content.append(len(held))
            if held:
                content += held.keys()
                content += map(id, held.values())
    return content


class Root:
    """An outermost module as it was when its names were learnt: ``paths`` by id of the submodule."""

    content_of = staticmethod(
        content_of
    )  # which :mod:`lazyviz.record.native_recorder` has a compiled form of

    def __init__(self, paths: dict[int, str], modules: Sequence[torch.nn.Module]) -> None:
        self.paths = paths
        # Weak: a submodule may know the root, which would keep itself alive through us.
        self._modules = [weakref.ref(module) for module in modules]
        self._content = self.content_of(modules)

    def holds(self, root: torch.nn.Module) -> bool:
        """Whether it is of ``root``, and nothing has been added, taken out, renamed or exchanged."""
        if self._modules[0]() is not root:
            return False
        return self.content_of([reference() for reference in self._modules]) == self._content


def module_call_of(scopes: Scopes, original: Callable[..., Any]) -> Callable[..., Any]:
    """``nn.Module.__call__`` that announces its module to ``scopes``."""

    def __call__(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            scopes.enter(module)
            return original(module, *args, **kwargs)
        finally:
            scopes.leave()

    return __call__


def _by(call: Callable[..., Any]) -> FunctionType:
    """A function without closure that calls ``call`` with a module and the arguments of its call."""

    def announced(module: Any, *args: Any, _lazyviz_call: Callable[..., Any] = call, **kwargs: Any) -> Any:
        return _lazyviz_call(module, *args, **kwargs)

    return announced  # type: ignore[return-value]


class ScopePatches:
    """Announces module calls and optimizer steps to ``scopes`` while recording."""

    module_call_of = staticmethod(
        module_call_of
    )  # which :mod:`lazyviz.record.native_recorder` has a compiled form of

    def __init__(self, scopes: Scopes, find: ValueFinder) -> None:
        self.scopes = scopes
        self._steps = OptimizerSteps(scopes, find)
        self._call = CodePatch(private_api.module_call)
        self._announced: Callable[[FunctionType], FunctionType] | None = None
        self._way: Any = None  # of which that is

    def install(self) -> None:
        scopes, way = self.scopes, ScopePatches.module_call_of
        scopes.met.clear()
        if self._announced is None or self._way is not way:
            self._way, self._announced = way, lambda original: _by(way(scopes, original))
        if not self._call:
            self._call.set(self._announced)
        self._steps.install()

    @property
    def code(self) -> list[CodePatch]:
        """The functions that do something else while it is installed."""
        return [self._call]

    def hooks(self) -> list[str]:
        """The hooks that are there now."""
        return self._steps.registered()

    def withdraw(self) -> None:
        """Take the hooks out wherever they are."""
        self._steps.withdraw()

    def remove(self) -> None:
        self._call.restore()
        self._steps.remove()
        self.scopes.phase = "other"
        self.scopes.forget_calls()
        self.scopes.forget_dead()
