"""Scratch memory of the CPU kernels of sparse tensors.

The nodes have lazyviz's operators, with components in place of sparse tensors
(:mod:`lazyviz.record.sparse.custom_operators`). From ATen's ``native/sparse``, and, for the conversions
before MKL's and within ``to_dense``, from the allocator's events.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ...graph.ir import Node, Value
from .workspace_rule import Rule, exactly
from .workspace_size import NOTHING, Need

TABLE: dict[str, Rule] = {}
_MKL_INDEX = 4  # bytes; ATen converts indices to MKL's integers
_INDEX = 8


def _on(name: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        TABLE[f"lazyviz::sparse_{name}"] = rule
        return rule

    return add


def _named(node: Node) -> dict[str, Any]:
    return dict(zip((argument.name for argument in node.op._schema.arguments), node.args))


def _nbytes(*values: Value) -> int:
    return sum(value.meta.nbytes for value in values)


def _count(value: Value) -> int:
    return math.prod(value.meta.shape)


def _for_mkl(named: dict[str, Any], name: str) -> int:
    """Bytes of a compressed matrix's indices in MKL's integers."""
    parts = named[f"{name}_compressed"], named[f"{name}_plain"]
    return sum(_MKL_INDEX * _count(value) for value in parts)


def _as_rows(named: dict[str, Any], name: str) -> int:
    """Bytes to convert a matrix with compressed columns: the result, and the columns in order."""
    values = named[f"{name}_values"]
    return (2 * _count(values) + named[f"{name}_size"][0] + 1) * _INDEX + _nbytes(values)


def _in_order(named: dict[str, Any], name: str) -> int:
    """Bytes at most during that conversion, for indices by coordinates, their order, and both compressed."""
    values = named[f"{name}_values"]
    return 6 * _INDEX * _count(values) + _nbytes(values) + 4 * _INDEX * (named[f"{name}_size"][0] + 1)


@_on("mm")
def _product(node: Node, threads: int) -> Need:
    """The product is added to a matrix of zeros."""
    named, result = _named(node), _nbytes(node.outputs[0])
    if "self_indices" in named:
        return exactly(result)
    if "self_plain" in named:
        if "csc0" not in node.op._overloadname:
            return exactly(result + _for_mkl(named, "self"))
        multiplied = result + _for_mkl(named, "self") + _as_rows(named, "self")
        return exactly(max(multiplied, _in_order(named, "self") - result))  # before there is a result
    if "mat2_indices" in named:  # the transpose times the transpose
        return exactly(result + _nbytes(named["mat2_indices"], named["mat2_values"]))
    return exactly(result + _in_order(named, "mat2"))


@_on("addmm")
def _sum_with_product(node: Node, threads: int) -> Need:
    named = _named(node)
    return exactly(_for_mkl(named, "mat1")) if "mat1_plain" in named else NOTHING


@_on("mv")
def _product_with_vector(node: Node, threads: int) -> Need:
    named = _named(node)
    return exactly(_for_mkl(named, "self") if "self_plain" in named else _nbytes(node.outputs[0]))


@_on("mask")
def _mask(node: Node, threads: int) -> Need:
    named = _named(node)
    count = _count(named["mask_values"])
    if "self_values" in named:  # indices as one number, and in order, of both; of the elements that differ
        ordered = 2 * _INDEX * (_count(named["self_values"]) + count)
        copied = 0 if named["self_is_coalesced"] else _nbytes(named["self_indices"], named["self_values"])
        return exactly(ordered + copied)
    if "mask_indices" in named:
        return exactly(_nbytes(named["mask_values"]))
    # The mask becomes a dense one, by `to_dense`.
    return exactly(_count(named["self"]) + _coordinates(count) - 12 * count)


@_on("mul")
def _product_by_element(node: Node, threads: int) -> Need:
    """With a strided tensor, whose elements are gathered first."""
    named = _named(node)
    factor = named.get("self", named.get("other"))
    by_element = isinstance(factor, Value) and factor.meta.shape
    return exactly(_nbytes(node.outputs[-1])) if by_element else NOTHING


@_on("softmax")
def _softmax(node: Node, threads: int) -> Need:
    return exactly(_nbytes(_named(node)["self_indices"]))


TABLE["lazyviz::sparse_log_softmax"] = _softmax


@_on("to_dense")
def _to_dense(node: Node, threads: int) -> Need:
    named = _named(node)
    if "self_plain" not in named:
        return NOTHING
    return exactly(_coordinates(_count(named["self_values"])) + _nbytes(named["self_compressed"]))


def _coordinates(count: int) -> int:
    """Bytes to write elements at their places in a dense tensor."""
    return 8 * _INDEX * count
