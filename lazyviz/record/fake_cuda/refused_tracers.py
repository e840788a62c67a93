"""Refused tracers: ``torch.export`` and other tracers raise an error for tensors on an absent GPU.

A tracer runs a program on tensors that it creates from the given ones. Planned tensors are rejected before
that, with an error that says where to trace instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from ...torch_internals import dynamo
from ..eager_fallback import evaluate_before_tracing
from ..intercept_ops_outside_blocks import is_out_of_reach, nodes_before_access
from ..interception import unpatched_imports
from .fake_gpus_protocol import Gpus


def install(gpus: Gpus) -> None:
    tape = gpus.tape
    owner, name = dynamo.MAKE_FAKE
    make_fake = getattr(owner, name)

    def of_values(converter: Any, mode: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if is_out_of_reach(tape, tensor):
            tape.runs.sync("tracing a program", nodes_before_access(tape, tensor, write=False))
        return make_fake(converter, mode, tensor, *args, **kwargs)

    gpus.replace(owner, name, of_values)

    def patch_pipelines(module: ModuleType) -> None:
        """Check tensors before the export, because pipelining attributes every exception of an export to the
        model.
        """
        owner = getattr(module, "Pipe", None)
        trace = getattr(owner, dynamo.TRACE_PIPELINE, None)
        if trace is None:
            return

        def checked(*given: Any, **named: Any) -> Any:
            evaluate_before_tracing(tape, "torch.export", (*given, *named.values()))
            return trace(*given, **named)

        gpus.patches.set(owner, dynamo.TRACE_PIPELINE, staticmethod(checked))

    def patch_backward(module: ModuleType) -> None:
        """Run the backward pass uncompiled: compiled autograd would trace it with its saved tensors."""

        @contextmanager
        def as_eager(*args: Any, **kwargs: Any) -> Iterator[None]:
            if tape.recording.graph is not None:
                tape.recording.graph.as_eager.add("compiled autograd")
            yield

        if hasattr(module, dynamo.ENABLE_COMPILED_BACKWARD):
            gpus.patches.set(module, dynamo.ENABLE_COMPILED_BACKWARD, as_eager)

    unpatched_imports.when_imported(dynamo.PIPELINES, patch_pipelines)
    unpatched_imports.when_imported(dynamo.COMPILED_BACKWARD, patch_backward)


def remove() -> None:
    unpatched_imports.forget(dynamo.PIPELINES)
    unpatched_imports.forget(dynamo.COMPILED_BACKWARD)
