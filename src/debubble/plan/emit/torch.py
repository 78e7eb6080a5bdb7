"""torch.distributed.pipelining: Python that cuts the model, builds stages and a schedule."""

from __future__ import annotations

import json
from itertools import accumulate

from debubble.plan.change import Change, Setting
from debubble.plan.emit.aim import Aim, aim_of
from debubble.plan.emit.order_file import FILE
from debubble.plan.emit.refuse import microbatches_of, schedule_of
from debubble.plan.emit.sizes import divides_note
from debubble.plan.emit.text import comment
from debubble.plan.emit.torch_rules import TorchSchedule, splits_backward, torch_schedule
from debubble.schedules import SCHEDULES

_NAME = "torch"
_GIVEN = {
    "model": "the whole model",
    "example": "one microbatch of input",
    "device": "the rank's own",
    "pp_rank": "its place in the pipeline",
    "pp_group": "the pipeline's process group",
    "loss_fn": "your loss",
    "stages": "the stages of the rank, lowest first",
}


def emit(change: Change, setting: Setting) -> str:
    """Write the Python that brings the change about; parts that stay are left out."""
    aim = aim_of(change, setting)
    only_split = change == Change(split=change.split, hold=change.hold)
    known = None if only_split else torch_schedule(_NAME, change, aim)
    imports: list[str] = []
    body: list[str] = []
    notes = ["torch.distributed.pipelining (checked with torch 2.13)."]
    if aim.split is not None:
        imports.append(
            "from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline"
        )
        body += [_split_spec(aim.split), _stages(aim)]
        notes.append(
            f"Assumes layers called layers.0 to layers.{sum(aim.split) - 1}: "
            "put in the names of your model."
        )
    if not only_split:
        imports.append(_import(known))
        body.append(_schedule(change, aim, known))
        notes += _schedule_notes(change, setting, aim, known)
    code = "\n".join([*sorted(imports), "", *body])
    return comment(*notes, *_given(code)) + code


def _split_spec(split: tuple[int, ...]) -> str:
    cuts = list(accumulate(split))[:-1]
    entries = "".join(f'    "layers.{cut}": SplitPoint.BEGINNING,\n' for cut in cuts)
    return f"split_spec = {{\n{entries}}}\n"


def _stages(aim: Aim) -> str:
    """Write how a rank builds its stages. Which of several it holds, the schedule tells."""
    if aim.chunks > 1:
        schedule_of(aim)
    placement = aim.placement or tuple((rank,) for rank in range(aim.ranks))
    rows = "".join(f"    {rank}: {list(stages)},\n" for rank, stages in enumerate(placement))
    return (
        f"stages_of_rank = {{\n{rows}}}\n"
        "pipe = pipeline(model, mb_args=(example,), split_spec=split_spec)\n"
        "stages = [\n"
        "    PipelineStage(pipe.get_stage_module(stage), stage, "
        f"{aim.stages}, device, group=pp_group)\n"
        "    for stage in stages_of_rank[pp_rank]\n"
        "]\n"
    )


def _import(known: TorchSchedule | None) -> str:
    if known is None:
        return "from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime"
    return f"from torch.distributed.pipelining.schedules import Schedule{known.name}"


def _schedule(change: Change, aim: Aim, known: TorchSchedule | None) -> str:
    sizes = f"n_microbatches={microbatches_of(aim)}, loss_fn=loss_fn"
    if known is None:
        file = FILE if aim.schedule in SCHEDULES else aim.schedule
        made = f"schedule = _PipelineScheduleRuntime(stages, {sizes})"
        return f"{made}\nschedule._load_csv({json.dumps(file)})\n"
    deferred = ", defer_pp_recv=True" if change.overlap else ""
    stages = "stages[0]" if known.one_stage else "stages"
    return f"schedule = Schedule{known.name}({stages}, {sizes}{deferred})\n"


def _schedule_notes(
    change: Change, setting: Setting, aim: Aim, known: TorchSchedule | None
) -> list[str]:
    notes: list[str] = []
    if known is None and aim.schedule in SCHEDULES:
        notes.append(f"{FILE}: the same option, written as csv.")
    if aim.split is None and aim.chunks > 1 and aim.placement is not None:
        notes.append(f"Stages, rank by rank: {', '.join(str(list(s)) for s in aim.placement)}.")
    if splits_backward(aim):
        notes.append("Stages must not be compiled: torch.compile cannot run I and W apart.")
    if change.microbatches is not None and change.hold == "batch":
        notes += divides_note(change, setting)
        notes.append("step() takes the same batch as now, in smaller microbatches.")
    elif change.microbatches is not None:
        notes.append(f"step() takes {change.microbatches} microbatches of the size of now.")
    return notes


def _given(code: str) -> list[str]:
    """Return the names that the code uses and does not set."""
    return [
        f"Given: {name}, {meaning}."
        for name, meaning in _GIVEN.items()
        if name in code and f"\n{name} = " not in code
    ]
