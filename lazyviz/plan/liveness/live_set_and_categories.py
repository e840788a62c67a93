"""Live set: what is alive at one moment of the run, its memory category, and what keeps it alive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar, get_args, overload

from ...graph.ir import Node, Role, SourceLine, Storage
from ...graph.modules import ModuleNames, OwnedName, full_name, root_of
from ...process.unpicklable_base_class import Unpicklable
from ..node_formatting import where
from ..result_tables import Table, Tabular
from ..result_tables import sizes as rows_of_sizes
from ..units import format_bytes
from . import lifetimes
from .lifetimes import Lifetime, alive_at

Category = Literal[
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "kv_cache",
    "inputs",
    "buffers",
    "temporaries",
    "held",
]

CATEGORIES: tuple[Category, ...] = get_args(Category)

_OF_ROLE: dict[Role, Category] = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer": "optimizer",
    "buffer": "buffers",
    "input": "inputs",
    "kv_cache": "kv_cache",
}


@dataclass(frozen=True, slots=True)
class Allocation(Unpicklable):
    """One storage that is alive at some moment.

    ``nbytes`` is its size in bytes. ``node`` created it at the line ``source`` (both ``None`` if it is from
    outside the graph). ``module`` is where it was created, or first used if it is from outside. ``name`` is
    the recorder's name for it (a parameter's), or "". Both are paths in the model; the text of an allocation
    begins them with the user's variable for it (``"net.weight"``).

    What keeps it alive: ``last_use`` is the last node that uses it (``None``: no node does). ``variables``
    are the user's expressions (``"out.logits"``) that referred to it when the block ended; they are empty if
    the lazyviz run frees it at its last use, or if no name is known.
    """

    nbytes: int
    category: Category
    node: Node | None
    module: str
    source: SourceLine | None
    name: str
    storage: Storage = field(repr=False)
    last_use: Node | None = field(repr=False, default=None)
    variables: tuple[str, ...] = ()

    def __repr__(self) -> str:
        what = full_name(self.name) or (self.node.name if self.node is not None else "from outside the graph")
        path = full_name(self.module)
        module = f", {path}" if path and not what.startswith(f"{path}.") else ""
        line = f", {self.source.short}" if self.source is not None else ""
        return f"<Allocation {format_bytes(self.nbytes)}, {self.category}, {what}{module}{line}>"

    @property
    def is_borrowed(self) -> bool:
        """Whether the memory belongs to NumPy, a mapped file, or another process."""
        return self.storage.borrowed or self.storage.origin.borrowed

    @property
    def saved_for(self) -> Node | None:
        """The backward node that reads it last, if it is from before the backward pass."""
        last = self.last_use
        if last is None or last.phase != "backward" or self.category != "activations":
            return None
        return last


class LiveSet(Sequence[Allocation]):
    """The allocations of lifetimes, largest first, each created on access.

    A picture shows the largest of thousands, at each of thousands of moments.
    """

    def __init__(self, spans: Iterable[Lifetime]) -> None:
        self._spans = sorted(spans, key=lambda span: -span.storage.nbytes)
        self._created: dict[int, Allocation] = {}

    def __len__(self) -> int:
        return len(self._spans)

    @overload
    def __getitem__(self, at: int) -> Allocation: ...
    @overload
    def __getitem__(self, at: slice) -> list[Allocation]: ...
    def __getitem__(self, at: int | slice) -> Allocation | list[Allocation]:
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(len(self)))]
        at = range(len(self))[at]
        if at not in self._created:
            self._created[at] = allocation(self._spans[at])
        return self._created[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def categories(self) -> Iterator[tuple[Category, int]]:
        """The category and the bytes of each."""
        return ((categorize(span), span.storage.nbytes) for span in self._spans)


@dataclass(frozen=True, slots=True)
class Moment(Tabular, Unpicklable):
    """The storages that a lazyviz run holds during the node at ``position``. Sizes are bytes.

    ``alive`` is sorted, largest first. ``by_category`` has every category, the others only keys with bytes:
    ``by_module`` counts activations and temporaries where they were created, and everything else where it
    belongs, by its path in the model (``"G.0"`` if several models have the path ``"0"``); ``by_line`` counts
    storages that the graph created, by the user's line.
    """

    position: int
    node: Node
    nbytes: int
    alive: LiveSet = field(repr=False)

    def __repr__(self) -> str:
        size = format_bytes(self.nbytes)
        return f"<Moment {self.position}: {size} in {len(self.alive)} tensors, {where(self.node)}>"

    _repr_pretty_ = Tabular._repr_pretty_  # IPython uses it in addition to `__repr__`

    def table(self) -> Table:
        named = {str(category): size for category, size in self.by_category.items()}
        title = f"{format_bytes(self.nbytes)} in {len(self.alive)} tensors during {where(self.node)}"
        return Table(title, ("bytes", "share", "what"), rows_of_sizes(named), 2)

    @property
    def by_category(self) -> dict[Category, int]:
        sizes: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        for category, nbytes in self.alive.categories():
            sizes[category] += nbytes
        return sizes

    @property
    def by_module(self) -> dict[str, int]:
        return self._by_module(self.alive)

    @property
    def activations_by_module(self) -> dict[str, int]:
        """The same for activations only."""
        return self._by_module(each for each in self.alive if each.category == "activations")

    def _by_module(self, allocations: Iterable[Allocation]) -> dict[str, int]:
        name = ModuleNames((root_of(each.module), each.module) for each in self.alive)
        return _sums((name(root_of(each.module), each.module), each.nbytes) for each in allocations)

    @property
    def by_line(self) -> dict[SourceLine, int]:
        return _sums(
            (allocation.source, allocation.nbytes)
            for allocation in self.alive
            if allocation.source is not None
        )


def moment(position: int, node: Node, spans: Iterable[Lifetime]) -> Moment:
    """The moment of ``node`` at index ``position``, with the lifetimes ``spans``."""
    alive = [span for span in alive_at(position, spans) if span.storage.nbytes]
    return Moment(position, node, sum([span.storage.nbytes for span in alive]), LiveSet(alive))


def categorize(span: Lifetime) -> Category:
    """The category of a storage: by its recorded role, if it has one, otherwise by its lifetime."""
    maker, kept = span.maker, span.kept
    if span.held:
        return "held"
    role = span.storage.role
    if role is not None:
        return _OF_ROLE[role]
    if maker is None:
        # State of an optimizer that has made steps before: no module and no data loader created it.
        in_optimizer = span.first_use is not None and span.first_use.phase == "optimizer"
        return "optimizer" if in_optimizer else "inputs"
    phase = maker.phase
    if phase == "optimizer":
        return "optimizer" if kept else "temporaries"
    # Ops outside of modules are "other": for example, a hand-written loss, which counts as forward.
    if phase != "backward" and (kept or span.in_backward):
        return "inputs" if span.storage.is_data else "activations"
    return "temporaries"


def by_category(spans: Sequence[Lifetime]) -> dict[Category, list[Lifetime]]:
    """The lifetimes of every category."""
    found: dict[Category, list[Lifetime]] = {category: [] for category in CATEGORIES}
    if (native := lifetimes.native) is not None:
        for alike in native.alike(spans):  # in all that `categorize` reads
            found[categorize(alike[0])] += alike
    else:
        for span in spans:
            found[categorize(span)].append(span)
    return found


def allocation(span: Lifetime) -> Allocation:
    """The allocation of ``span`` as it is shown to the user."""
    storage, maker = span.storage, span.maker
    place = maker if maker is not None else span.first_use
    return Allocation(
        nbytes=storage.nbytes,
        category=categorize(span),
        node=maker,
        module=_module_with_root(storage, place),
        source=maker.source if maker is not None else None,
        name=storage.name,
        storage=storage,
        last_use=span.last_use,
        variables=storage.variables if span.kept else (),
    )


def _module_with_root(storage: Storage, place: Node | None) -> str:
    """The module of a storage, which knows the model that it is a path in."""
    named = storage.name
    module = module_of(storage) or (place.module if place is not None else "")
    if isinstance(named, OwnedName):
        return OwnedName(module, named.root)
    return OwnedName(module, place.root) if place is not None else module


# The number of trailing parts of a storage's name that follow its module's: "h.0.attn.weight.exp_avg".
_NAME_PARTS = {"parameter": 1, "buffer": 1, "kv_cache": 1, "gradient": 2, "optimizer": 2}


def module_of(storage: Storage) -> str:
    """The module that a named storage belongs to, wherever it was created (for example, optimizer state)."""
    parts = storage.name.split(".")
    return ".".join(parts[: -_NAME_PARTS.get(storage.role or "", len(parts))])


_Key = TypeVar("_Key")


def _sums(pairs: Iterable[tuple[_Key, int]]) -> dict[_Key, int]:
    """Bytes added up by key, largest first."""
    sizes: dict[_Key, int] = {}
    for key, nbytes in pairs:
        sizes[key] = sizes.get(key, 0) + nbytes
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))
