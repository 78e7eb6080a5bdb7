"""The schedule of torch.distributed.pipelining over a rank's own stages, each pass recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.pipelining import PipelineStage, schedules

from debubble.demo.layers import build_stage
from debubble.demo.replicas import Reduction
from debubble.demo.workload import SCHEDULES
from debubble.errors import DemoError

if TYPE_CHECKING:
    from debubble.demo.replicas import Groups
    from debubble.demo.truth import Kind, Recorder
    from debubble.demo.workload import Workload


class RecordedStage(PipelineStage):
    """A stage that writes down when each of its passes began and ended."""

    def __init__(self, workload: Workload, stage: int, recorder: Recorder, groups: Groups) -> None:
        model = build_stage(workload, stage)
        if workload.reduce_kib:
            layer = workload.layers_of(stage)[-1]
            model.append(Reduction(workload, layer, groups.data, recorder.record_call))
        super().__init__(model, stage, workload.stages, torch.device("cpu"), group=groups.pipeline)
        self.recorder = recorder

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run F."""
        with self.recorder.record_pass("F", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> Any:
        """Run B, or I where the schedule splits the backward pass."""
        kind: Kind = "B" if full_backward else "I"
        with self.recorder.record_pass(kind, self.stage_index, bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> Any:
        """Run W."""
        with self.recorder.record_pass("W", self.stage_index, bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, last_backward)


def build_stages(
    workload: Workload, rank: int, recorder: Recorder, groups: Groups
) -> list[RecordedStage]:
    """Return the stages that a rank of a pipeline holds."""
    return [RecordedStage(workload, stage, recorder, groups) for stage in workload.stages_of(rank)]


def build_schedule(workload: Workload, stages: list[RecordedStage]) -> Any:
    """Return torch's schedule object over this rank's stages."""
    known = SCHEDULES[workload.schedule]
    schedule_class = getattr(schedules, known.torch_class, None)
    if schedule_class is None:
        raise DemoError(
            f"torch {torch.__version__} has no {known.torch_class}",
            hint="take another schedule, or a newer torch",
        )
    loss = torch.nn.functional.mse_loss if workload.trains else None
    return schedule_class(
        stages[0] if known.layout == "single" else stages, workload.microbatches, loss_fn=loss
    )
