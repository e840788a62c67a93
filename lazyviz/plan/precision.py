"""Changes of precision: what a program would allocate with smaller numbers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .changes import Changed
from .replay import Program


def bf16(program: Program) -> Iterator[Changed]:
    """``model.bfloat16()``, inputs too: every float32 tensor takes half the bytes.

    What attention's kernels keep in float32 beside their result (the log-sum-exp, see the meta
    functions in torch/_meta_registrations.py) stays.  An estimate: so does what the program itself asks
    for in float32, which is counted as half here.
    """
    keys = {storage: key for key, storage in enumerate(program.storages)}
    stay = {
        keys.get(value.storage)
        for step in program.steps
        if "_scaled_dot_product" in step.node.op._schema.name and step.node.phase != "backward"
        for value in step.node.outputs[1:]
    }
    halves = [key for key, dtype in enumerate(program.dtypes) if dtype is torch.float32 and key not in stay]
    if not halves:
        return
    changed = program.copy()
    for key in halves:
        changed.sizes[key] = program.sizes[key] // 2
    text = "model.bfloat16() (weights, gradients, optimizer state and activations; cast the inputs, too)"
    yield Changed("bf16", text, changed, numerics=True, estimate=True)
