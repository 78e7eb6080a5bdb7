"""A schedule or a stage of torch.distributed.pipelining in → its stages and its sizes out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from debubble.errors import UsageError

# torch's classes, as every answer of debubble spells them.
SCHEDULE_NAMES = {
    "_ScheduleForwardOnly": "forward-only",
    "ScheduleGPipe": "gpipe",
    "Schedule1F1B": "1f1b",
    "ScheduleInterleaved1F1B": "interleaved-1f1b",
    "ScheduleLoopedBFS": "looped-bfs",
    "ScheduleInterleavedZeroBubble": "interleaved-zb",
    "ScheduleZBVZeroBubble": "zbv",
    "ScheduleDualPipeV": "dualpipe-v",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """What the user named: the stages of this rank, and their schedule where it is known."""

    stages: tuple[Any, ...] = ()
    schedule: Any = None

    @property
    def schedule_class(self) -> str | None:
        """The schedule's class, as torch calls it."""
        return None if self.schedule is None else type(self.schedule).__name__

    @property
    def schedule_name(self) -> str | None:
        """The schedule as debubble calls it; a subclass goes by the class it came from."""
        classes = [] if self.schedule is None else type(self.schedule).__mro__
        names = (SCHEDULE_NAMES.get(one.__name__) for one in classes)
        return next(filter(None, names), None)

    @property
    def microbatches(self) -> int | None:
        """Microbatches of a step."""
        count = getattr(self.schedule, "_n_microbatches", None)
        return count if isinstance(count, int) else None

    @property
    def held_stages(self) -> list[int]:
        """The stages of this rank."""
        return [int(stage.stage_index) for stage in self.stages]

    @property
    def all_stages(self) -> int | None:
        """Stages over all ranks."""
        return int(self.stages[0].num_stages) if self.stages else None


def find_pipeline(given: Any) -> Pipeline:
    """Return what the user's schedule, stage or list of stages is made of."""
    if given is None:
        return Pipeline()
    if isinstance(given, list | tuple):
        stages, schedule = tuple(given), None
    elif hasattr(given, "forward_one_chunk"):
        stages, schedule = (given,), None
    else:
        stages = tuple(getattr(given, "_stages", None) or [getattr(given, "_stage", None)])
        schedule = given
    if not stages or not all(hasattr(stage, "forward_one_chunk") for stage in stages):
        raise UsageError(
            f"{type(given).__name__} is no schedule and no stage of torch.distributed.pipelining",
            hint="give one of those, or nothing: passes are then told by their structure",
        )
    return Pipeline(stages=stages, schedule=schedule)
