"""Options of ``%%lazy``: their values, their checks, and TAB completion."""

from __future__ import annotations

import ast
import keyword
from collections.abc import Iterable, Mapping
from types import CodeType
from typing import Any

from IPython.core.error import UsageError

from ..execute.backend_registry import backend_names, find_backend
from ..plan.devices.device_lookup import PROFILES, cuda_devices
from ..record.fake_cuda.generate_until_max_length import UNTIL_MAX_NEW_TOKENS
from ..session import device_options
from ..session.batch_specification import bound_names, dimension, parse_names, unknown_names
from ..session.default_options import options as defaults
from ..session.run_options import recompute_option

OPTIONS = (
    "--as",
    "--assume",
    "--async",
    "--backend",
    "--batch",
    "--device",
    "--loop",
    "--no-sync",
    "--no-widget",
    "--now",
    "--recompute",
    "--rank",
    "--split",
    "--torch-version",
    "--world",
)
VERBS = ("status", "evaluate", "plan", "explain", "why", "reset", "devices")


def check(options: Any) -> None:
    """Raise ``UsageError`` for invalid and unsupported options, before any of the cell runs."""
    name = options.name
    if name is not None and (not name.isidentifier() or keyword.iskeyword(name)):
        raise UsageError(f"%%lazy: --as needs the name of a variable, got {name!r}.")
    if options.split not in ("off", "auto") and not (options.split.isdigit() and int(options.split)):
        raise UsageError(f"%%lazy: --split must be off, auto, or a number, got {options.split!r}.")
    try:
        defaults.check()
        if options.device is None:
            options.device = defaults.device
        options.backend = options.backend or defaults.backend
        options.no_widget = options.no_widget or not defaults.widget
        recompute_option(unquoted(options.recompute))
        _check_rank(options)
        _, gpu = device_options.resolved(options.device, torch_version=options.torch_version)
        find_backend(options.backend)
        if options.loop:
            _check_loop(options, is_absent=gpu is not None)
    except ValueError as error:
        raise UsageError(f"%%lazy: {error}") from None


def _check_rank(options: Any) -> None:
    """Raise ``UsageError`` for an invalid number of ranks, or an invalid rank."""
    world, rank = options.world, options.rank
    if world is None and rank:
        raise UsageError(f"%%lazy: --rank {rank} needs the number of ranks: add --world N.")
    if world is not None and world < 1:
        raise UsageError(f"%%lazy: --world takes the number of ranks, got {world}.")
    if world is not None and not 0 <= rank < world:
        raise UsageError(f"%%lazy: --rank must be from 0 to {world - 1} with --world {world}, got {rank}.")


def _check_loop(options: Any, *, is_absent: bool) -> None:
    """Raise ``UsageError`` for options that cannot be combined with ``--loop``."""
    others = {
        "--now": options.now,
        "--async": options.no_wait,
        "--batch": options.batch is not None,
        "--split": options.split != "off",
        "--recompute": unquoted(options.recompute) != "off",
        "--world": options.world is not None,
        "--assume": bool(options.assume),
    }
    if not_with := [name for name, given in others.items() if given]:
        raise UsageError(
            f"%%lazy: --loop records and evaluates each iteration separately, without {not_with[0]}: "
            "leave out one of the two."
        )
    if is_absent:
        raise UsageError(
            f"%%lazy: --loop evaluates each iteration, which is not possible for {options.device}, "
            "because it is not on this machine: leave out --loop to plan the cell."
        )


def check_batch(given: str | None, variables: Mapping[str, Any], code: CodeType) -> None:
    """Raise ``UsageError`` for a name in ``--batch`` that is bound to no tensor and that the cell does not
    bind, and for a dimension that the tensor lacks.
    """
    try:
        names = parse_names(given) if given is not None else {}
        bound = bound_names(code)
        if reason := unknown_names(names, variables, bound):
            raise ValueError(reason)
        for name, dim in names.items():
            if name not in bound:
                dimension(variables[name], dim, name)
    except ValueError as error:
        raise UsageError(f"%%lazy --batch: {error}") from None


def option_choices(words: list[str]) -> Iterable[str]:
    """TAB completions after ``words`` of a ``%%lazy`` line."""
    previous = words[-2]
    if previous == "--device":
        return ["cpu", *(gpu.name for gpu in cuda_devices()[0]), *PROFILES]
    if previous == "--backend":
        return backend_names()
    if previous in ("--split", "--recompute"):
        return ["off", "auto"]
    if previous in ("--as", "--assume", "--batch", "--rank", "--torch-version", "--world"):
        return []
    return [option for option in OPTIONS if option not in words[:-1] or option == "--assume"]


def unquoted(option: str) -> str:
    return option.strip("'\"")


def split_option(option: str) -> int | str:
    return int(option) if option.isdigit() else option


def assumed(options: Iterable[str]) -> dict[int | str, Any]:
    """``--assume LINE=VALUE`` as a mapping; several values (``False*127,True``) become an iterator."""
    assume: dict[int | str, Any] = {}
    for option in options:
        if unquoted(option) == UNTIL_MAX_NEW_TOKENS:
            assume[UNTIL_MAX_NEW_TOKENS] = True
            continue
        line, _, value = unquoted(option).partition("=")
        try:
            assume[int(line)] = _assumed_value(value)
        except (ValueError, SyntaxError):
            raise UsageError(
                "%%lazy: --assume takes LINE=VALUE, a line of the cell and a number, or numbers for one read "
                f"after the other, LINE=False*127,True, got {option!r}."
            ) from None
    return assume


def _assumed_value(text: str) -> Any:
    """A number, or an iterator over several numbers; raises ``ValueError`` for other text."""
    tree = ast.parse(text.strip(), mode="eval").body
    several = isinstance(tree, ast.Tuple) and not text.strip().startswith("(")
    parts = tree.elts if isinstance(tree, ast.Tuple) and several else [tree]
    values: list[Any] = []
    for part in parts:
        count = 1
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult):
            several, count = True, ast.literal_eval(part.right)
            if type(count) is not int:
                raise ValueError(text)
            part = part.left
        values += [ast.literal_eval(part)] * count
    return iter(values) if several else values[0]
