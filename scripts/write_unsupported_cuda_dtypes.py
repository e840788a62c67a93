"""Write the table of dtypes for which operators have no CUDA kernel, from PyTorch's operator database.

``python scripts/write_unsupported_cuda_dtypes.py`` records samples of every entry of ``op_db`` for a GPU that
is not on this machine. The database says which dtypes CUDA supports, PyTorch's tests on GPUs that this is so,
and the recording which operator an entry calls. An operator is in the table for a dtype if an entry that
calls only this operator does not support the dtype, and no entry that calls it does. An entry whose list is
incomplete is left out: the CPU's kernel shows it. Takes several minutes; needs ``expecttest``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db

import lazyviz
from lazyviz.graph.ir import Node

TABLE = Path(lazyviz.__file__).parent / "record/shapes/unsupported_cuda_dtypes.json"
SAMPLES = 3  # per entry and dtype
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, torch.float64)
# Entries that support halves only on newer GPUs: the database queries the present GPU.
ASK_THE_GPU = ("fft.", "stft", "istft", "_upsample", "nn.functional.scaled_dot_product")
CREATES = ("empty", "zeros", "ones", "full", "new_", "arange", "rand", "scalar_tensor", "eye", "linspace")


def supported(info: Any) -> set[torch.dtype]:
    """The dtypes of an entry on CUDA; halves only count as unsupported if neither is supported at all."""
    found = set(info.dtypesIfCUDA)
    if found & set(HALVES) or set(info.dtypes) & set(HALVES) or info.name.startswith(ASK_THE_GPU):
        found.update(HALVES)
    return found


def is_incomplete(info: Any, dtype: torch.dtype) -> bool:
    """Whether the database omits dtypes that work, according to the CPU kernel and the CPU's list."""
    if dtype in info.dtypes:
        return False
    for sample in samples_of(info, dtype):
        if not isinstance(sample.input, torch.Tensor) or sample.input.numel() < 2:
            continue  # kernels may not be called for empty tensors or scalars
        with contextlib.suppress(Exception):
            info.op(sample.input, *sample.args, **sample.kwargs)
            return True
    return False


def samples_of(info: Any, dtype: torch.dtype) -> list[Any]:
    try:
        return list(itertools.islice(info.sample_inputs("cpu", dtype), SAMPLES))
    except Exception:  # the database cannot create samples for all dtypes
        return []


def operand_dtype(node: Node) -> torch.dtype | None:
    """The dtype of the first tensor that an operator reads."""
    return node.inputs[0].meta.dtype if node.inputs else None


def recorded(info: Any, dtype: torch.dtype) -> list[list[Node]]:
    """For each sample that recording accepts: the nodes that compute something."""
    found: list[list[Node]] = []
    for sample in samples_of(info, dtype):
        try:
            with lazyviz.lazy(device="A100-40GB") as graph:
                there = sample.transform(lambda item: item.cuda() if isinstance(item, torch.Tensor) else item)
                before = len(graph.nodes)
                kept = info.op(there.input, *there.args, **there.kwargs)
            nodes = [node for node in graph.nodes[before:] if not node.op.is_view and node.inputs]
            found.append([node for node in nodes if node.op.name() not in ("aten::_to_copy", "aten::clone")])
            del kept
        except Exception:
            pass  # already rejected when recording
        finally:
            lazyviz.reset()
    return found


def table() -> dict[str, list[str]]:
    """The names of unsupported dtypes by operator."""
    works: dict[str, set[torch.dtype]] = defaultdict(set)
    fails: dict[str, set[torch.dtype]] = defaultdict(set)
    for info in op_db:
        there = supported(info)
        for dtype in (*INTEGERS, *COMPLEX, *HALVES, *FLOATS):
            if dtype not in there and is_incomplete(info, dtype):
                continue
            for nodes in recorded(info, dtype):
                if dtype in there:
                    for node in nodes:
                        works[node.op.name()].add(operand_dtype(node))  # type: ignore[arg-type]
                elif len(nodes) == 1 and operand_dtype(nodes[0]) == dtype:
                    fails[nodes[0].op.name()].add(dtype)
    found = {}
    for name, dtypes in sorted(fails.items()):
        left = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes - works[name])
        if left and not name.removeprefix("aten::").startswith(CREATES):
            found[name] = left
    return found


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    warnings.simplefilter("ignore")
    TABLE.write_text(json.dumps(table(), indent=1) + "\n")
    print(f"{TABLE.name}: {len(json.loads(TABLE.read_text()))} operators")


if __name__ == "__main__":
    main()
