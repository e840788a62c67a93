"""Modules and phases: the module path, the phase, and the tensor roles of each op, by scopes."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType, FunctionType
from typing import Any

import torch

from ...graph.ir import Graph, Phase, Role, SourceLine
from ...graph.modules import ModuleRoot, OwnedName
from ...torch_internals import private_api
from ..interception.attribute_patches import CodePatch
from ..interception.register_optimizer_step_hooks import OptimizerSteps, ValueFinder
from ..tracked_storages import TrackedNode, TrackedStorage, TrackedValue
from .module_variable_names import name_by_caller, name_modules, name_weights
from .source_lines import SourceFinder

CLONE = torch.ops.aten.clone.default
NO_SEQUENCE = 1 << 62  # AccumulateGrad and similar nodes have the largest sequence number


def _mark_gradient(storage: TrackedStorage, parameter: str) -> None:
    if storage.role is None:
        storage.role = "gradient"
        storage.name = parameter + ".grad" if parameter else "grad"


class Scopes:
    """The module path and phase of the running code.

    Modules are announced by replaced code of ``nn.Module.__call__`` (module hooks would send every call
    through its slow path), optimizers by the global step hooks of ``torch.optim``.
    """

    # The compiled recorder reads these at every op, or at every call of a module.
    __slots__ = (
        "__dict__", "__weakref__", "_callers", "_entered", "_learnt", "_parameters", "_paths", "_roots",
        "by_sequence", "called", "met", "module", "phase", "root", "roots",
    )  # fmt: skip

    def __init__(self) -> None:
        self.module = ""
        self.root = ""
        self._callers: tuple[SourceLine, ...] = ()  # for the call of the outermost module
        self.phase: Phase = "other"
        self.sources = SourceFinder()
        self.by_sequence: dict[int, TrackedNode] = {}  # autograd sequence number -> forward node
        self._earlier: weakref.WeakSet[Graph] = weakref.WeakSet()  # graphs that have their own forward nodes
        self._entered: list[tuple[str, str]] = []  # root and path of modules called since the last node
        self._stack: list[tuple[str, str, Phase, tuple[SourceLine, ...]]] = []
        self._paths: dict[int, str] = {}
        self.met: set[int] = set()  # the outermost modules that were called in this block, by identity
        self.called: list[ModuleRoot] = []  # of those with parts, also of those that no longer exist
        self.note_module_call: Callable[[torch.nn.Module], None] = lambda module: (
            None
        )  # called at the first call
        self.steps: list[Any] = []  # optimizers whose step is running, the outermost first
        self.stepped: Callable[[Any], None] = lambda optimizer: None  # called at the end of the outermost
        self._learnt: Root | None = None  # the last one, because modules may be part of several roots
        self._roots: dict[int, str] = {}  # by id of a parameter or buffer: the outermost module
        self.roots: dict[int, ModuleRoot] = {}  # by id of the module: the modules that were called
        # By id of a tensor: its module and its name there, its role and its full name; for an optimizer's
        # tensors, which have no module, the tensor itself. (A tensor with weak references cannot be swapped.)
        self._parameters: dict[int, tuple[weakref.ref[Any], str, Role, str]] = {}
        self._many = 200  # number of entries at which dead tensors are dropped next

    def locate(self, node: TrackedNode, frame: FrameType | None, mutates: bool) -> None:
        """Note the origin of ``node``: module path, source line, phase, grad modes."""
        node.module = self.module
        node.root = self.root
        if self.root:  # the lines of the modules' calls, so that ops need not search all frames
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
        """The part of :meth:`locate` for an op that the engine's node ``engine`` calls."""
        node.phase = "backward"
        sequence = engine._sequence_nr()
        if sequence < NO_SEQUENCE:
            forward = self._forward_of(sequence) or self._writer_of_copied(sequence)
            if forward is not None:
                node.forward = forward
                if not node.module:
                    node.module, node.root = forward.module, forward.root
        elif (parameter := getattr(engine, "variable", None)) is not None:
            _, name = self.role_of(parameter)
            # Or it belongs to a node that has died.
            node.root = self._roots.get(id(parameter), "") if name else ""
            node.module = name.rpartition(".")[0]
            for value in node.inputs:
                _mark_gradient(value.storage, name)

    def mark_stored_gradient(self, value: TrackedValue) -> None:
        """Mark ``value``, which is being detached, as a gradient if autograd detaches it to store it."""
        engine = private_api.current_autograd_node()
        if engine is None or engine._sequence_nr() < NO_SEQUENCE:
            return
        if (parameter := getattr(engine, "variable", None)) is not None:
            _mark_gradient(value.storage, self.role_of(parameter)[1])

    def role_of(self, tensor: torch.Tensor) -> tuple[Role | None, str]:
        """The role and name of an outside tensor: ("parameter", "h.0.attn.weight"), or (None, "")."""
        found = self._parameters.get(id(tensor))
        if found is not None:
            reference, key, role, name = found
            owner = reference()
            if isinstance(owner, torch.nn.Module):
                owner = getattr(owner, key, None)
            if owner is tensor:
                return role, name
        if type(tensor) is torch.Tensor and not tensor.__dict__:  # faster than Parameter's own check
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
        """Note a call of the outermost module, from the line that ``callers`` lead to."""
        root = self.roots.get(id(module))
        is_new = root is None or root.module is None or root.module() is not module
        if root is None or is_new:
            root = self._root_of(module)
        self.root = root
        self._paths = self._learn(module)
        if is_new or id(module) not in self.met:  # or one that no longer exists had its identity
            self.met.add(id(module))
            self.note_module_call(module)
            # Losses and similar modules may be new in each step.
            has_parts = bool(module._parameters or module._modules)
            # A TorchScript trace contains each access to a weight.
            if has_parts and not torch.jit.is_tracing():  # type: ignore[attr-defined]
                taken = {each.variable for each in self.called if each is not root}
                name_by_caller(root, module, sys._getframe(1), self.sources, taken)
                self.called.append(root)
        self._callers = callers

    def _root_of(self, module: torch.nn.Module) -> ModuleRoot:
        key, roots = id(module), self.roots
        reference = weakref.ref(module, lambda _: roots.pop(key, None))
        roots[key] = ModuleRoot(type(module).__name__, reference)
        return roots[key]

    def name_modules(self, variables: Mapping[str, Any]) -> None:
        """Name the outermost modules of the ending block like the user's variables."""
        known = set(map(id, self.called))
        others = [self.roots[key] for key in self.met if key in self.roots]
        name_modules([*self.called, *(root for root in others if id(root) not in known)], variables)

    def name_weights(self, values: Iterable[TrackedValue], variables: Mapping[str, Any]) -> None:
        """Name the weights and optimizer states among ``values`` that have no name yet.

        They were computed at a sync point before their model was called, or it was not called at all: a copy
        with averaged weights, or a target network.
        """
        nameless: dict[int, TrackedStorage] = {}
        for value in values:
            storage = value.storage
            tensor = value.tensor() if value.tensor is not None and not storage.name else None
            if tensor is None:
                continue
            role, name = self.role_of(tensor)
            if name:
                storage.role, storage.name = role, name
            else:
                nameless.setdefault(id(tensor), storage)
        if any(storage.role == "parameter" for storage in nameless.values()):
            name_weights(nameless, variables)

    def path_of_unnamed(self, module: torch.nn.Module) -> str:
        """The path of a module that was created after its root was entered, or is not registered."""
        return f"{self.module}.{type(module).__name__}" if self.module else type(module).__name__

    def leave(self) -> None:
        self.sources.leave(sys._getframe(1))
        self.module, self.root, self.phase, self._callers = self._stack.pop()

    def forget_calls(self) -> None:
        """Drop calls without recorded ops, so that they are not attributed to the next graph."""
        self._entered.clear()

    def learn_state(self, optimizer: torch.optim.Optimizer, find: ValueFinder) -> None:
        """Name the optimizer's tensors for each parameter: ``"h.0.weight.exp_avg"``."""
        for parameter, state in optimizer.state.items():
            _, name = self.role_of(parameter)
            for key, tensor in state.items() if isinstance(state, dict) else ():
                if isinstance(tensor, torch.Tensor):
                    known = self._parameters.get(id(tensor))
                    if known is not None and known[0]() is tensor and _is_parameter_of(known[3], name, key):
                        continue  # as in every step except the first: it already has that name
                    value = find(tensor)
                    storage = None if value is None else value.storage
                    if (
                        storage is not None
                        and storage.role == "optimizer"
                        and _is_parameter_of(storage.name, name, key)
                    ):
                        continue
                    full = name + f".{key}" if name else str(key)  # an OwnedName does not change
                    if storage is not None:
                        storage.role, storage.name = "optimizer", full
                    else:
                        self._parameters[id(tensor)] = (weakref.ref(tensor), "", "optimizer", full)

    def learn_cache(self, tensor: torch.Tensor, find: ValueFinder) -> None:
        """Note that ``tensor`` is part of a KV cache."""
        value = find(tensor)
        if value is not None:
            value.storage.role = "kv_cache"
        else:
            self._parameters[id(tensor)] = (weakref.ref(tensor), "", "kv_cache", "")

    def keep_forward_nodes(self, graph: Graph) -> None:
        """Keep the forward nodes of the ended block as long as ``graph`` exists."""
        graph.by_sequence, self.by_sequence = self.by_sequence, {}
        self._earlier.add(graph)

    def _forward_of(self, sequence: int) -> Any:
        return self.by_sequence.get(sequence) or next(
            (graph.by_sequence[sequence] for graph in self._earlier if sequence in graph.by_sequence), None
        )

    def _writer_of_copied(self, sequence: int) -> Any:
        """The forward op with that number, if it writes in place what its backward formula needs.

        Autograd copies this first, and the copy has its own number.
        """
        copy = self._forward_of(sequence + 1)
        if copy is None or copy.op is not CLONE or copy.index + 1 >= len(copy.graph.nodes):
            return None
        writer = copy.graph.nodes[copy.index + 1]
        return writer if copy.inputs[0].storage in writer.writes else None

    def forget_forward(self) -> None:
        self.by_sequence.clear()
        self._earlier.clear()

    def forget_dead(self) -> None:
        """Drop entries of tensors that no longer exist, occasionally."""
        if len(self._parameters) >= self._many:
            self._parameters = {
                key: known for key, known in self._parameters.items() if known[0]() is not None
            }
            self._roots = {key: root for key, root in self._roots.items() if key in self._parameters}
            self._many = 2 * len(self._parameters) + 200

    def _learn(self, root: torch.nn.Module) -> dict[int, str]:
        """Learn the names of the submodules, parameters and buffers of ``root``, again if these have
        changed.
        """
        known = self._learnt
        if known is not None and known.holds(root):
            return known.paths
        modules = list(torch.nn.Module.named_modules(root))
        paths = {id(module): name for name, module in modules}
        seen: set[int] = set()  # a tied weight has its first name, as in named_parameters()
        for name, module in modules:
            for role, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
                if role == "buffer" and type(module).__name__.replace("_", "").lower() == "kvcache":
                    role = "kv_cache"
                for key, tensor in tensors.items():
                    if tensor is not None and id(tensor) not in seen:
                        seen.add(id(tensor))
                        full = OwnedName(f"{name}.{key}" if name else key, self.root)
                        pending = tensor.__dict__.get("_lazyviz")
                        if pending is not None:  # created in this block: it already has a storage
                            pending.storage.role, pending.storage.name = role, full
                        self._roots[id(tensor)] = self.root
                        self._parameters[id(tensor)] = (weakref.ref(module), key, role, full)  # type: ignore[assignment]
        self._learnt = Root(paths, [module for _, module in modules])
        return paths


def _is_parameter_of(full: str, name: str, key: object) -> bool:
    """Whether ``full`` is the name of an optimizer's tensor ``key`` for the parameter ``name``."""
    if not isinstance(key, str):  # nearly all optimizers name their state
        key = str(key)
    length = len(name) + 1 + len(key) if name else len(key)
    return len(full) == length and full.startswith(name) and full.endswith(key)


def content_of(modules: Sequence[torch.nn.Module | None]) -> list[str | int]:
    """The names and identities of the content of ``modules``, in order; incomplete if one of them is gone."""
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
    """An outermost module in the state when its names were learned: ``paths`` by id of the submodule."""

    content_of = staticmethod(content_of)  # :mod:`lazyviz.record.native_recorder` has a compiled form of it

    def __init__(self, paths: dict[int, str], modules: Sequence[torch.nn.Module]) -> None:
        self.paths = paths
        # Weak, because a submodule may refer to the root, which would then keep itself alive through us.
        self._modules = [weakref.ref(module) for module in modules]
        self._content = self.content_of(modules)

    def holds(self, root: torch.nn.Module) -> bool:
        """Whether this is for ``root``, and nothing in it has been added, removed, renamed or exchanged."""
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
    """A function without a closure that calls ``call`` with a module and the arguments of its call."""

    def announced(module: Any, *args: Any, _lazyviz_call: Callable[..., Any] = call, **kwargs: Any) -> Any:
        return _lazyviz_call(module, *args, **kwargs)

    return announced  # type: ignore[return-value]


class ScopePatches:
    """Announces module calls and optimizer steps to ``scopes`` while recording."""

    module_call_of = staticmethod(
        module_call_of
    )  # :mod:`lazyviz.record.native_recorder` has a compiled form of it

    def __init__(self, scopes: Scopes, find: ValueFinder) -> None:
        self.scopes = scopes
        self._steps = OptimizerSteps(scopes, find)
        self._call = CodePatch(private_api.module_call)
        self._announced: Callable[[FunctionType], FunctionType] | None = None
        self._way: Any = None  # the attribute above belongs to it

    def install(self) -> None:
        scopes, way = self.scopes, ScopePatches.module_call_of
        scopes.met.clear()
        scopes.called.clear()
        if self._announced is None or self._way is not way:
            self._way, self._announced = way, lambda original: _by(way(scopes, original))
        if not self._call:
            self._call.set(self._announced)
        self._steps.install()

    @property
    def code(self) -> list[CodePatch]:
        """The functions that are replaced while it is installed."""
        return [self._call]

    def hooks(self) -> list[str]:
        """The hooks that are currently registered."""
        return self._steps.registered()

    def withdraw(self) -> None:
        """Remove the hooks wherever they are."""
        self._steps.withdraw()

    def remove(self) -> None:
        self._call.restore()
        self._steps.remove()
        self.scopes.phase = "other"
        self.scopes.forget_calls()
        self.scopes.forget_dead()
