"""Pipeline stages: shapes that other ranks would send are assumed to be like this rank's.

Before its first step, a schedule of ``torch.distributed.pipelining`` has, since PyTorch 2.13, all ranks vote
whether the shapes that stages exchange are given (``PipelineStage(..., input_args=, output_args=)``).  If
not, each stage sends its shapes to the next as objects.  What the stage before this rank's would send is
unknown here.  The gradients that the next stage sends have the shapes of the outputs.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from ...torch_internals import fake_process_groups
from ..interception import unpatched_imports
from ..interception.attribute_patches import Patches
from ..sync_points import AbsentDeviceError
from ..tape import Tape

_ALIKE = "either all stages of the pipeline are given their shapes, or none, as for this rank"
_GRADIENTS = "gradients sent between pipeline stages have the shapes and dtypes of the activations"


def install(patches: Patches, tape: Tape) -> None:
    def patch_schedules(module: ModuleType) -> None:
        schedule = getattr(module, fake_process_groups.PIPELINE_SCHEDULE, None)
        if hasattr(schedule, "_warmup_p2p"):  # from PyTorch 2.13 on
            _patch_votes(patches, tape, module, schedule)

    def patch_stages(module: ModuleType) -> None:
        stage = getattr(module, "PipelineStage", None)
        if hasattr(stage, "_recv_meta"):
            _patch_shapes(patches, tape, module, stage)
        elif hasattr(stage, "_shape_inference"):  # up to PyTorch 2.12
            _patch_inference(patches, stage)

    unpatched_imports.when_imported(fake_process_groups.PIPELINE_SCHEDULES, patch_schedules)
    unpatched_imports.when_imported(fake_process_groups.PIPELINE_STAGES, patch_stages)


def remove() -> None:
    unpatched_imports.forget(fake_process_groups.PIPELINE_SCHEDULES)
    unpatched_imports.forget(fake_process_groups.PIPELINE_STAGES)


def _assume(tape: Tape, text: str) -> None:
    if tape.recording.graph is not None:
        tape.recording.graph.assumed.add(text)


def _patch_votes(patches: Patches, tape: Tape, module: ModuleType, schedule: Any) -> None:
    original = schedule._warmup_p2p
    mode: Any = vars(module)["InferenceMode"]

    @functools.wraps(original)
    def warm_up(self: Any, stages: list[Any], has_backward: bool, p2p_done: bool) -> None:
        if not all(hasattr(stage, "_warmup_forward_vote") for stage in stages):
            return original(self, stages, has_backward, p2p_done)
        vote = None
        for stage in stages:
            vote = stage._warmup_forward_vote(has_backward, received_acc=vote)
        for stage in reversed(stages):
            vote = stage._warmup_backward_result(received_result=vote)
        dynamic = any(mode.needs_dynamic(stage._user_meta, has_backward) for stage in stages)
        for stage in stages:
            stage._inference_mode = mode.DYNAMIC if dynamic else mode.STATIC
        _assume(tape, _ALIKE)
        return None

    patches.set(schedule, "_warmup_p2p", warm_up)


def _patch_shapes(patches: Patches, tape: Tape, module: ModuleType, stage: Any) -> None:
    backward_shapes: Any = vars(module)["_StageBackwardMeta"]
    original = stage._recv_meta

    @functools.wraps(original)
    def received(self: Any, source: int) -> Any:
        outputs = self._stage_meta.outputs
        if source < self.stage_index or outputs is None:
            raise _unknown_shapes(self, source)
        _assume(tape, _GRADIENTS)
        return backward_shapes(
            backward_metas=tuple([each if each.requires_grad else None for each in outputs])
        )

    patches.set(stage, "_recv_meta", received)


def _patch_inference(patches: Patches, stage: Any) -> None:
    """Before 2.13, stages do not vote, and the gradients have the outputs' shapes by definition."""
    original = stage._shape_inference

    @functools.wraps(original)
    def inferred(self: Any, *args: Any, **kwargs: Any) -> Any:
        source = self.stage_index - 1
        if not self.is_first and self.stage_index_to_group_rank[source] != self.group_rank:
            raise _unknown_shapes(self, source)
        return original(self, *args, **kwargs)

    patches.set(stage, "_shape_inference", inferred)


def _unknown_shapes(stage: Any, source: int) -> AbsentDeviceError:
    return AbsentDeviceError(
        f"Stage {stage.stage_index} of the pipeline would receive the shapes of its inputs from stage "
        f"{source}, which is on a rank that is only planned. Give them: "
        "PipelineStage(..., input_args=..., output_args=...)."
    )
