"""Batch propagation: finds the batch dimension of every value, and the nodes that can run on a piece.

Starting from the tensors named as batch, every value is ``Shard`` (each piece has its samples), ``Partial``
(each piece has a summand), or replicated (``None``: the same for all).  The rules are in
:mod:`lazyviz.plan.batch.pointwise_rules` and :mod:`lazyviz.plan.batch.layer_rules`.  A node is *spread* if it
runs once per piece, and *whole* if it runs once, on whole tensors; spread values that it reads are
concatenated first.  An operator that combines samples, or that has no rule, prevents the split and is
reported with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...graph.ir import Node, Storage, Value
from . import indexing_rules as _indexing  # noqa: F401  (these three fill the table of rules)
from . import layer_rules as _layers  # noqa: F401
from . import view_rules as _views  # noqa: F401
from .batch_analysis_result import BatchAnalysis as BatchAnalysis
from .batch_analysis_result import Blocker as Blocker
from .batch_placement import LOCAL, PARTIAL, Local, Part, Partial, Placement, Shard
from .batch_rule import FACTORIES, RULES, Call, Coupled, Rule, base_name, named
from .inputs_sliced_by_pieces import can_make_part, is_pointwise, make_part, pull
from .pointwise_rules import pointwise

_SHAPE_ONLY = named(
    """empty_like zeros_like ones_like full_like new_empty new_zeros new_ones new_full new_empty_strided
    zero"""
)
_ZEROS = frozenset(["zeros", "zeros_like", "new_zeros"])
_LINEAR = named("""add sub neg clone _to_copy mul div sum rsub""")
_LONGEST_PATH, _MOST_STEPS = 8, 64  # in the search for the factories of a tensor
_SELF_DRAWING = "it draws random numbers inside its kernel"
_KEEPS_STATE = re.compile("rnn|embedding_bag")  # operators whose backward formulas read it
_HANDED_OUT = "DataParallel hands a part of the batch to each GPU"


def analyze(
    nodes: Sequence[Node],
    roots: Mapping[Value, Shard],
    *,
    whole: Collection[str] = (),
    independent_rng: bool = False,
    handed_out: Mapping[Node, int] | None = None,
) -> BatchAnalysis:
    """Follow the batch through ``nodes``, given in program order.

    Args:
        roots: the batch tensors: dimension ``dim`` of each has one entry a sample.
        whole: names of operators that may run on the whole batch where they would block a split.
        independent_rng: operators that draw inside a fused kernel may draw separately for each piece.
        handed_out: nodes that cut a tensor into a part for each GPU, and the number of GPUs.
    """
    seeds: dict[Value, Shard | Partial] = {}
    while True:
        analysis, more = _Pass(nodes, roots, seeds, whole, independent_rng, handed_out or {}).run()
        if not more:
            return analysis
        seeds.update(more)


class _Pass:
    """One pass through the program, with ``seeds``: tensors that are created in it, but not from the
    batch.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        roots: Mapping[Value, Shard],
        seeds: Mapping[Value, Shard | Partial],
        whole: Collection[str],
        independent_rng: bool,
        handed_out: Mapping[Node, int],
    ) -> None:
        size = next((value.shape[shard.dim] for value, shard in roots.items()), 1)
        self.nodes, self.seeds = nodes, seeds
        self.whole_by_wish, self.independent_rng = whole, independent_rng
        self.handed_out = handed_out
        self.result = BatchAnalysis(size, dict(roots))
        self.now: dict[Value, Placement] = dict(roots)  # placements at this point of the program
        self.on: dict[Storage, list[Value]] = {}  # the spread values on each storage
        self.makers: dict[Storage, Node] = {}  # factories of whole tensors, by their results
        self.more: dict[Value, Shard | Partial] = {}
        self.named = {value.storage for value in roots}
        self.read = {value for node in nodes for value in node.inputs}
        for value, shard in roots.items():
            self.spread(value, shard)

    def run(self) -> tuple[BatchAnalysis, dict[Value, Shard | Partial]]:
        for node in self.nodes:
            self.visit(node)
        result = self.result
        if not self.more:
            pull(self.nodes, result)
        for shard in result.placements.values():
            if isinstance(shard, Shard) and shard.group > result.group:
                result.group = shard.group
        if result.size % result.group:
            result.group = result.size
        return result, self.more

    # --- bookkeeping ----------------------------------------------------------------

    def spread(self, value: Value, placement: Placement) -> None:
        self.now[value] = placement
        self.result.placements[value] = placement
        self.on.setdefault(value.storage, []).append(value)

    def mark_whole(self, storage: Storage) -> None:
        """From here on, the storage is whole: its sums have been computed, or it was written as a whole."""
        for value in self.on.pop(storage, ()):
            self.now.pop(value, None)

    def block(self, node: Node, reason: str, outputs: Any = None) -> None:
        self.result.blocked.append(Blocker(node, reason))
        if outputs is None:
            self.result.unknown.append(node)
        self.place(node, outputs)

    def place(self, node: Node, outputs: Any) -> tuple[Placement | None, ...]:
        """Store the placements of ``node``'s outputs, and return them in order."""
        placed = _by_output(node, outputs)
        for value, placement in zip(node.outputs, placed):
            if placement is not None and self.now.get(value) != placement:
                self.spread(value, placement)
        return placed

    # --- nodes ------------------------------------------------------------------------

    def visit(self, node: Node) -> None:
        now = self.now
        name = base_name(node.op)
        spread = [value for value in dict.fromkeys(node.inputs) if value in now]
        if not spread:
            seed = next((self.seeds[value] for value in node.outputs if value in self.seeds), None)
            if seed is not None:
                call = Call(node, self.result.size, now.get)
                if isinstance(seed, Partial) or make_part(call, seed):
                    self.run_spread(node, call, seed)
            elif name in FACTORIES:
                self.makers[node.outputs[0].storage] = node
            return
        if any(value.meta.flags for value in (*spread, *node.outputs)):
            return self.block(node, "it uses a conjugate or negative view")
        partial = [value for value in spread if isinstance(now[value], Partial)]
        sharded = len(partial) < len(spread)
        if name in _SHAPE_ONLY and not (name.endswith("_like") and sharded) and name != "zero":
            self.result.unread[node] = spread
            if (seed := next((self.seeds[v] for v in node.outputs if v in self.seeds), None)) is not None:
                call = Call(node, self.result.size, now.get)
                if isinstance(seed, Partial) or make_part(call, seed):
                    return self.run_spread(node, call, seed)
            if name in FACTORIES:
                self.makers[node.outputs[0].storage] = node
            return None
        if not sharded:
            if self.keeps_partial(node, name, partial):
                return self.run_spread(node, Call(node, self.result.size, now.get), PARTIAL)
            return self.run_whole(node)
        if any(isinstance(now[value], Local) for value in spread) and not _KEEPS_STATE.search(name):
            return self.block(node, "it reads internal state of a kernel")
        if partial:
            self.result.gathers[node] = partial
            for value in partial:
                self.mark_whole(value.storage)
        return self.visit_sharded(node, name)

    def visit_sharded(self, node: Node, name: str) -> None:
        call = Call(node, self.result.size, self.now.get)
        if len(node.outputs) < (count := self.handed_out.get(node, 0)):
            return self.block(node, f"the batch has no samples for some of DataParallel's {count} GPUs")
        if count and (parts := parts_of(call)) is not None:
            return self.block(node, _HANDED_OUT, parts)
        rule = rule_of(node)
        if rule is None:
            if name in self.whole_by_wish:
                return self.run_whole(node)
            return self.block(node, f"lazyviz has no rule for {node.op._schema.name}")
        if (reason := self.rng_obstacle(node, call)) is not None:
            try:
                grown = rule(call)  # this much is known: how the results grow
            except Coupled as coupled:
                grown = coupled.outputs
            return self.block(node, reason, grown)
        try:
            outputs = rule(call)
        except Coupled as coupled:
            if self.unused(node):
                return self.run_spread(node, Call(node, self.result.size, self.now.get), LOCAL)
            if coupled.pairs or name in self.whole_by_wish:
                return self.run_whole(node)
            return self.block(node, coupled.reason, coupled.outputs)
        if outputs is None:
            return self.block(node, "lazyviz has no rule for these arguments")
        return self.run_spread(node, call, outputs)

    def keeps_partial(self, node: Node, name: str, partial: list[Value]) -> bool:
        """Whether the operator is linear in its summands, and adds only summands to them."""
        if any(self.now[value] != PARTIAL for value in partial):
            return False  # a mean without its divisor
        tensors = list(dict.fromkeys(node.inputs))
        if is_view(node):
            # Not a reinterpretation of the bits as another type.
            return node.outputs[0].dtype == node.inputs[0].dtype
        if name not in _LINEAR or (node.writes and node.args[0] not in partial):
            return False
        if name in ("mul", "div"):
            first, second = node.args[0], node.args[1]
            if first is second:
                return False
            if name == "div" and (node.kwargs.get("rounding_mode") is not None or second in partial):
                return False
            return len(partial) == 1 and (first in partial or not node.writes)
        if name == "_to_copy":
            after, before = node.outputs[0].dtype, partial[0].dtype
            # Summands must not be rounded.
            if not after.is_floating_point or after.itemsize < before.itemsize:
                return False
        return len(tensors) == len(partial) and not any(
            isinstance(argument, (int, float, complex)) and not isinstance(argument, bool)
            for argument in node.args[1:2]
            if name in ("add", "sub", "rsub")
        )

    def rng_obstacle(self, node: Node, call: Call) -> str | None:
        name = base_name(node.op)
        if torch.Tag.nondeterministic_seeded not in node.op.tags and name != "_cudnn_rnn":
            return None
        if "attention" in name:
            dropout = call["dropout_p"] if call.has("dropout_p") else 0.0
            return _SELF_DRAWING if dropout and not self.independent_rng else None
        if name == "_cudnn_rnn":
            drops = call["dropout"] and call["train"] and call["num_layers"] > 1
            return _SELF_DRAWING if drops and not self.independent_rng else None
        return None if separable(node) or self.independent_rng else _SELF_DRAWING

    def run_spread(self, node: Node, call: Call, outputs: Any) -> None:
        for value in (*call.slices, *call.heads):
            if value in self.now:
                raise AssertionError("a spread tensor is cut again")
        written = self.written(node)
        placed = _by_output(node, outputs)
        if not all(_holds(value, at, self.result.size) for value, at in zip(node.outputs, placed)):
            return self.block(node, "lazyviz has no rule for these arguments")
        for value in written:
            if value.storage in self.named:
                return self.block(node, "it changes the batch itself")
            placement = next((p for o, p in zip(node.outputs, placed) if o is value), None)
            if value in self.now:
                if placement is not None and placement != self.now[value]:
                    return self.block(node, "it would change the batch dimension of the tensor it writes")
                continue
            wanted = call.slices.get(value) or placement
            if not self.seed(value, wanted):
                return self.block(node, "it writes into a tensor that all samples share")
        if call.onto is not None and call.onto not in self.now and not written:
            maker = self.makers.get(call.onto.storage)
            if maker is None or base_name(maker.op) not in _ZEROS or maker.outputs[0] is not call.onto:
                return self.block(node, "it adds the batch to a tensor that is not zero")
        if call.onto is not None and written and call.onto in self.now and self.now[call.onto] != PARTIAL:
            return self.block(node, "it writes samples at indices")
        call.whole = {
            value for value in node.inputs if value not in self.now and value in self.result.placements
        }
        call.outputs = self.place(node, outputs)
        self.result.calls[node] = call
        self.result.unread.pop(node, None)

    def run_whole(self, node: Node) -> None:
        gathers = [value for value in dict.fromkeys(node.inputs) if value in self.now]
        if any(isinstance(self.now[value], Shard) for value in gathers):
            self.result.unknown.append(node)
        self.result.gathers.setdefault(node, []).extend(gathers)
        for value in gathers:
            if isinstance(self.now.get(value), Local):
                self.result.blocked.append(Blocker(node, "it reads internal state of a kernel"))
            self.mark_whole(value.storage)
        for value in self.written(node):
            self.mark_whole(value.storage)

    def unused(self, node: Node) -> bool:
        """Whether no node reads its results, for example because a known value decided a branch."""
        return not node.writes and not any(
            value in self.read or value.storage.dropped is None for value in node.outputs
        )

    def written(self, node: Node) -> list[Value]:
        """The arguments that ``node`` writes."""
        if not node.writes:
            return []
        found = []
        for argument, value in zip(node.op._schema.arguments, (*node.args, *node.kwargs.values())):
            if argument.alias_info is not None and argument.alias_info.is_write:
                found += [value] if isinstance(value, Value) else list(value or ())
        return found or [value for value in node.inputs if value.storage in node.writes]

    # --- tensors that are created in the block and filled from the batch -------------------

    def seed(self, written: Value, wanted: Placement | None) -> bool:
        """Let the factories of ``written`` be spread, so that ``written`` has the placement ``wanted``."""
        if wanted is None:
            return False
        maker = self.makers.get(written.storage)
        if isinstance(wanted, Partial):
            if maker is None or base_name(maker.op) not in _ZEROS or maker.outputs[0] in self.seeds:
                return False
            self.more[maker.outputs[0]] = PARTIAL
            return True
        assert isinstance(wanted, Shard)
        node = written.node
        if written in self.seeds:  # that was not enough
            return False
        if node is not None and can_make_part(node) and not is_view(node) and node.outputs[0] is written:
            self.more[written] = wanted
            return True
        for base, path in self.paths(written):
            sizes = [wanted] if base is written else []
            for like in (wanted, replace(wanted, part=None)) if wanted.part is not None else (wanted,):
                blocks = replace(like, unit=1).size(self.result.size)
                sizes += [
                    replace(like, dim=dim, unit=length // blocks)
                    for dim, length in enumerate(base.shape)
                    if length and length % blocks == 0
                ]
            for candidate in sizes if base not in self.seeds else ():
                if self.produces(base, candidate, path, written, wanted):
                    self.more[base] = candidate
                    return True
        return False

    def paths(self, value: Value) -> Iterator[tuple[Value, list[Node]]]:
        """The factory tensors that ``value`` is computed from, with the nodes in between."""
        stack: list[tuple[Value, list[Node]]] = [(value, [])]
        for _ in range(_MOST_STEPS):
            if not stack:
                return
            value, path = stack.pop()
            node = value.node
            if node is None or value in self.now or len(path) > _LONGEST_PATH:
                continue
            if base_name(node.op) in FACTORIES:
                yield value, path
            else:
                stack += [(each, [node, *path]) for each in dict.fromkeys(node.inputs)]

    def produces(self, base: Value, start: Shard, path: list[Node], written: Value, wanted: Shard) -> bool:
        """Whether ``written`` is placed as wanted if ``base`` is at ``start``."""
        placed: dict[Value, Placement] = {base: start}
        for node in path:
            found, call = rule_of(node), Call(node, self.result.size, placed.get)
            parts = parts_of(call) if node in self.handed_out else None
            if found is None:
                return False
            try:
                outputs = _by_output(node, found(call) if parts is None else parts)
            except Coupled:
                return False
            placed.update({value: at for value, at in zip(node.outputs, outputs) if at is not None})
        return placed.get(written) == wanted


SEPARABLE = named(
    """native_dropout bernoulli rand_like randn_like randint_like uniform normal exponential random cauchy
    log_normal geometric"""
)
"""Operators whose draws can be made for the whole batch and cut."""


def rule_of(node: Node) -> Rule | None:
    return RULES.get(base_name(node.op)) or (pointwise if is_pointwise(node) else None)


def parts_of(call: Call) -> list[Shard] | None:
    """The placements of the parts that ``nn.DataParallel`` cuts its argument into.

    ``None`` if the batch is in another dimension, or if parts of another batch need not end between samples.
    """
    node = call.node
    shard = call.shard(call["self"])
    dim, count = call["dim"] % len(call["self"].shape), len(node.outputs)
    if shard is None or (shard.dim, shard.outer, shard.group, shard.part) != (dim, 1, 1, None):
        return None
    if shard.unit > 1 and node.op is torch.ops.aten.split.Tensor:  # the sizes of the parts are not arguments
        return None
    parts = [replace(shard, part=Part(index, count)) for index in range(count)]
    fitting = all(_holds(value, part, call.total) for value, part in zip(node.outputs, parts))
    return parts if fitting else None


def draws_nothing(node: Node) -> bool:
    """Whether an operator that can draw random numbers does not, such as attention without dropout."""
    if "attention" not in base_name(node.op):
        return False
    dropout = Call(node, 1, lambda each: None)
    return dropout.has("dropout_p") and not dropout["dropout_p"]


def separable(node: Node) -> bool:
    """Whether the draws depend on no tensor's values, so that they can be made for the whole batch."""
    name = base_name(node.op)
    if name == "bernoulli":
        return node.op._overloadname in ("float", "p")
    in_place_only = name in (
        "uniform",
        "normal",
        "exponential",
        "random",
        "cauchy",
        "log_normal",
        "geometric",
    )
    return name in SEPARABLE and (not in_place_only or bool(node.writes))


def _holds(value: Value, placement: Placement | None, samples: int) -> bool:
    """Whether the dimension of ``value`` has the right size for the batch there."""
    if not isinstance(placement, Shard):
        return True
    return placement.dim < len(value.shape) and value.shape[placement.dim] == placement.size(samples)


def _by_output(node: Node, outputs: Any) -> tuple[Placement | None, ...]:
    """The placements that a rule returned for the operator's returns, assigned to the node's outputs."""
    if not isinstance(outputs, (list, tuple)):
        return (outputs,) * len(node.outputs)
    places = [value.index if value.node is node else at for at, value in enumerate(node.outputs)]
    return tuple(outputs[at] if at < len(outputs) else None for at in places)


def is_view(node: Node) -> bool:
    """Whether the node's results are unchanged memory of its first argument."""
    return (
        bool(node.inputs)
        and not node.writes
        and all(value.node is node and value.storage is node.inputs[0].storage for value in node.outputs)
    )
