"""Custom operators that call sparse kernels, with components in place of sparse tensors.

``aten::mm(sparse, dense)`` is recorded as ``lazyviz::sparse_mm(indices, values, size, coalesced, dense)``: an
operator on strided tensors like any other, whose kernel puts the sparse tensor together and calls ATen's.
Each operator is defined when it is first recorded.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...torch_internals import operator_registration
from ...torch_internals.private_api import OpOverload
from .components import Form, parts_of
from .result_metadata_rules import RULES, Made, New, Outcome, Written

_SHORT = {
    torch.sparse_coo: "coo", torch.sparse_csr: "csr", torch.sparse_csc: "csc",
    torch.sparse_bsr: "bsr", torch.sparse_bsc: "bsc",
}  # fmt: skip


class Signature(NamedTuple):
    """What distinguishes the custom operators for one ATen operator.

    Attributes:
        sparse: positions of the sparse arguments in the schema, and their layouts.
        numbers: positions of numbers in place of tensors, which PyTorch allows within an op.
        returned: the positions of the result's components that the kernel creates; ``None`` for a strided
            result.
    """

    sparse: tuple[tuple[int, torch.layout], ...]
    numbers: tuple[int, ...]
    returned: tuple[int, ...] | None


def flat(forms: Mapping[int, Form], arguments: Sequence[Any]) -> list[Any]:
    """The arguments with the components, the size, and whether it is coalesced, for each sparse tensor."""
    found: list[Any] = []
    for position, item in enumerate(arguments):
        form = forms.get(position)
        found += [item] if form is None else [*form.parts, list(form.shape), form.is_coalesced]
    return found


def _put_together(sparse: Sequence[tuple[int, torch.layout]], items: Sequence[Any]) -> list[Any]:
    """The inverse of :func:`flat`, with forms for the sparse tensors."""
    rest, found = iter(items), list[Any]()
    layouts = dict(sparse)
    while True:
        try:
            layout = layouts.get(len(found))
            if layout is None:
                found.append(next(rest))
                continue
            parts = tuple(next(rest) for _ in range(2 if layout == torch.sparse_coo else 3))
            found.append(Form(layout, tuple(next(rest)), parts, next(rest)))
        except StopIteration:
            return found


def new_parts(outcome: Made) -> tuple[int, ...]:
    """The positions of the components that the kernel creates."""
    return tuple(at for at, part in enumerate(outcome.parts) if isinstance(part, New))


def apply_rule(op: OpOverload, arguments: Sequence[Any]) -> Outcome:
    """The result of a call by the rule of ``op``; ``None`` if it is not known."""
    if any(isinstance(item, Form) and item.is_degenerate for item in arguments):
        return None
    names = [argument.name for argument in op._schema.arguments]
    return RULES[op.name()](**dict(zip(names, arguments)))


@functools.cache
def operator_for(op: OpOverload, signature: Signature) -> OpOverload:
    """The operator for calls of ``op`` with this signature; all its arguments are positional."""
    base, _, overload = op._schema.name.partition("::")[2], ".", op._schema.overload_name
    marks = [_SHORT[layout] + str(position) for position, layout in signature.sparse]
    marks += [f"number{position}" for position in signature.numbers]
    marks += ["own"] if base.startswith("_sparse_") else []  # beside addmm there is _sparse_addmm
    marks += [overload.lower()] if overload else []
    marks += ["".join(map(str, signature.returned))] if signature.returned is not None else []
    return operator_registration.define(
        f"sparse_{base.removeprefix('_').removeprefix('sparse_')}",
        _schema(op, signature),
        overload="_".join(marks),
        kernel=functools.partial(_run, op, signature),
        shape=functools.partial(_shape, op, signature),
    )


def _schema(op: OpOverload, signature: Signature) -> str:
    text = str(op._schema)
    inside = text[text.index("(") + 1 : text.rindex(") ->")]
    written = re.split(r", (?![^\[\]()]*[\])])", inside)
    taken = [item for item in written if item != "*"]
    layouts = dict(signature.sparse)
    arguments = []
    for position, (item, argument) in enumerate(zip(taken, op._schema.arguments)):
        if position not in layouts:
            item = item.partition("=")[0]
            arguments.append(item.replace("Tensor", "Scalar") if position in signature.numbers else item)
            continue
        names = ("indices",) if layouts[position] == torch.sparse_coo else ("compressed", "plain")
        arguments += [f"Tensor {argument.name}_{name}" for name in (*names, "values")]
        arguments += [f"int[] {argument.name}_size", f"bool {argument.name}_is_coalesced"]
    returned = text[text.rindex(") ->") + 4 :].strip()
    if signature.returned is not None:
        returned = f"({', '.join('Tensor' for _ in signature.returned)})"
    return f"({', '.join(arguments)}) -> {returned}"


def _call(op: OpOverload, arguments: Sequence[Any]) -> Any:
    positional = [argument for argument in op._schema.arguments if not argument.kwarg_only]
    names = [argument.name for argument in op._schema.arguments if argument.kwarg_only]
    return op(*arguments[: len(positional)], **dict(zip(names, arguments[len(positional) :])))


def _run(op: OpOverload, signature: Signature, *items: Any) -> Any:
    arguments = _put_together(signature.sparse, items)
    result = _call(op, [item.made() if isinstance(item, Form) else item for item in arguments])
    if signature.returned is None:
        return result
    parts = parts_of(result)
    found = tuple(parts[position] for position in signature.returned)
    return found if len(found) > 1 else found[0]


def _shape(op: OpOverload, signature: Signature, *items: Any) -> Any:
    arguments = _put_together(signature.sparse, items)
    outcome = apply_rule(op, arguments)
    if isinstance(outcome, Written):
        return arguments[[argument.name for argument in op._schema.arguments].index(outcome.name)]
    if isinstance(outcome, New):
        return outcome.empty()
    if isinstance(outcome, tuple):
        return tuple(each.empty() for each in outcome)
    assert outcome is not None
    found = tuple(part.empty() for part in outcome.parts if isinstance(part, New))
    return found if len(found) > 1 else found[0]
