"""A change in → torch's pipelining, as code.

The rules of its schedules hold for whatever is built upon it: torchtitan, NeMo Automodel.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import accumulate

from debubble.errors import UsageError
from debubble.plan.change import Change, Setting
from debubble.plan.emit.aim import (
    Aim,
    aim_of,
    cannot,
    comment,
    divides_note,
    microbatches_of,
    only_splits,
    schedule_of,
)
from debubble.plan.emit.order_file import say_order
from debubble.timeline.schedules import SCHEDULES
from debubble.timeline.schedules.named import count_rounds

_NAME = "torch"
# What comes first behind the layers: a last stage without any begins with it.
_AFTER = "norm"
_GIVEN = {
    "model": "the whole model",
    "example": "one microbatch of input",
    "device": "the rank's own",
    "pp_rank": "its place in the pipeline",
    "pp_group": "the pipeline's process group",
    "loss_fn": "your loss",
    "stages": "the stages of the rank, lowest first",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchSchedule:
    """A schedule that torch has."""

    name: str
    """As `get_schedule_class` takes it; the class is `Schedule` and this."""
    one_stage: bool = False
    """Its class takes one stage a rank, and waits for transfers by itself."""
    whole_rounds: bool = False
    microbatch_a_stage: bool = False


TORCH_SCHEDULES = {
    "gpipe": TorchSchedule(name="GPipe", one_stage=True),
    "1f1b": TorchSchedule(name="1F1B", one_stage=True, microbatch_a_stage=True),
    "interleaved-1f1b": TorchSchedule(name="Interleaved1F1B", whole_rounds=True),
    "looped-bfs": TorchSchedule(name="LoopedBFS"),
    "interleaved-zb": TorchSchedule(name="InterleavedZeroBubble", whole_rounds=True),
    "zbv": TorchSchedule(name="ZBVZeroBubble"),
    "dualpipe-v": TorchSchedule(name="DualPipeV", microbatch_a_stage=True),
}


def emit(change: Change, setting: Setting) -> str:
    """Write the Python that brings the change about; parts that stay are left out."""
    aim = aim_of(change, setting)
    only_split = only_splits(change)
    forward_only = change.schedule is None and aim.schedule == "forward-only"
    if only_split:
        known = None
    elif forward_only and change.overlap is None:
        known = TORCH_SCHEDULES["gpipe"]  # without a loss it runs forward passes alone
    else:
        known = torch_schedule(_NAME, change, aim)
    imports: list[str] = []
    body: list[str] = []
    notes = ["torch.distributed.pipelining (checked with torch 2.13)."]
    if aim.split is not None:
        imports.append(
            "from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline"
        )
        layers = sum(aim.split)
        begins = [f"layers.{cut}" if cut < layers else _AFTER for cut in accumulate(aim.split[:-1])]
        cuts = "".join(f'    "{name}": SplitPoint.BEGINNING,\n' for name in begins)
        body += [f"split_spec = {{\n{cuts}}}\n", _stages(aim)]
        notes.append(
            f"Assumes layers called layers.0 to layers.{layers - 1}"
            f"{f', and {_AFTER} behind them' if _AFTER in begins else ''}: "
            "put in the names of your model."
        )
    if not only_split:
        runs = f"Schedule{known.name}" if known else "_PipelineScheduleRuntime"
        imports.append(f"from torch.distributed.pipelining.schedules import {runs}")
        file = setting.order_file if aim.in_a_new_file else aim.schedule
        loads = f"schedule._load_csv({json.dumps(file)})\n" if known is None else ""
        body.append(_schedule(aim, known, loss=not forward_only) + loads)
        notes += _schedule_notes(change, setting, aim, known)
    code = "\n".join([*sorted(imports), "", *body])
    notes += [
        f"Given: {name}, {meaning}."
        for name, meaning in _GIVEN.items()
        if name in code and f"\n{name} = " not in code
    ]
    return comment(*notes) + code


def torch_schedule(framework: str, change: Change, aim: Aim) -> TorchSchedule | None:
    """Return torch's schedule of this name, its rules checked; None: it runs from an order file.

    torch lacks zb-h1 and zb-h2, and its 1F1B and GPipe wait for every transfer. As an order in a
    file its general runtime runs them all, and transfers beside compute.
    """
    name = schedule_of(aim)
    if name == "forward-only":
        raise cannot(
            framework,
            "to run forward-only by name",
            "run any schedule without a loss, or call schedule.eval() first",
        )
    known = TORCH_SCHEDULES.get(name)
    if change.overlap is False:
        raise cannot(framework, "to wait for transfers", "leave the overlap as it is")
    if change.overlap and (known is None or not known.one_stage) and name in SCHEDULES:
        raise cannot(
            framework,
            f"to overlap more than {known.name if known else name} does already",
            "leave the overlap as it is",
        )
    if known is None or change.overlap:
        return None
    _check_sizes(framework, known, aim)
    return known


def splits_backward(aim: Aim) -> bool:
    """Tell whether a schedule runs I and W apart, which torch.compile does not bear."""
    if aim.order is not None:
        return any(action.kind == "W" for actions in aim.order for action in actions)
    known = SCHEDULES.get(aim.schedule or "")
    return known is not None and "W" in known.kinds


def split_backward_notes(aim: Aim) -> list[str]:
    """Say what is known to break schedules that run I and W apart, and those in a V."""
    if not splits_backward(aim):
        return []
    notes = [
        "Leave torch.compile off: split backwards and DualPipeV fail with it (pytorch#161904).",
        "Leave FlexAttention off: split backwards fail with its BlockMask (torchtitan main has its",
        "tests of zero-bubble schedules and custom orders off).",
    ]
    if aim.schedule in {"zbv", "dualpipe-v"}:
        notes.append("No stage may pass a view to the next one: clone its output (ZBV).")
    return notes


def _check_sizes(framework: str, known: TorchSchedule, aim: Aim) -> None:
    microbatches = microbatches_of(aim)
    if known.microbatch_a_stage and microbatches < aim.stages:
        raise UsageError(
            f"{framework}'s {known.name} needs a microbatch for each of {aim.stages} stages, "
            f"not {microbatches}",
            hint=f"give {aim.stages} microbatches or more",
        )
    rounds = count_rounds(aim.ranks, microbatches)
    if known.whole_rounds and microbatches % rounds:
        raise UsageError(
            f"{framework}'s {known.name} cannot cut {microbatches} microbatches into "
            f"{rounds} equal rounds",
            hint=f"give a multiple of {aim.ranks} microbatches",
        )


def _stages(aim: Aim) -> str:
    """Write how a rank builds its stages. Which of several it holds, the schedule tells."""
    if aim.chunks > 1:
        schedule_of(aim)
    placement = aim.placement or tuple((rank,) for rank in range(aim.ranks))
    rows = "".join(f"    {rank}: {list(stages)},\n" for rank, stages in enumerate(placement))
    edges = list(accumulate(aim.split or (), initial=0))
    return (
        f"stages_of_rank = {{\n{rows}}}\n"
        "pipe = pipeline(model, mb_args=(example,), split_spec=split_spec)\n"
        "stages = [\n"
        "    PipelineStage(pipe.get_stage_module(stage), stage, "
        f"{aim.stages}, device, group=pp_group)\n"
        "    for stage in stages_of_rank[pp_rank]\n"
        "]\n"
        "# Or, with modules of your own in place of pipeline(): build_stage(first, end) returns\n"
        "# these layers; for the first stage the embedding too, for the last norm and head.\n"
        f"# edges = {edges}\n"
        "# stages = [\n"
        "#     PipelineStage(build_stage(edges[stage], edges[stage + 1]), stage, "
        f"{aim.stages}, device, group=pp_group)\n"
        "#     for stage in stages_of_rank[pp_rank]\n"
        "# ]\n"
    )


def _schedule(aim: Aim, known: TorchSchedule | None, *, loss: bool) -> str:
    sizes = f"n_microbatches={microbatches_of(aim)}"
    sizes += ", loss_fn=loss_fn" if loss else ""
    if known is None:
        return f"schedule = _PipelineScheduleRuntime(stages, {sizes})\n"
    stages = "stages[0]" if known.one_stage else "stages"
    return f"schedule = Schedule{known.name}({stages}, {sizes})\n"


def _schedule_notes(
    change: Change, setting: Setting, aim: Aim, known: TorchSchedule | None
) -> list[str]:
    notes: list[str] = []
    if known is None and aim.in_a_new_file:
        notes.append(say_order(setting))
    if aim.split is None and aim.chunks > 1 and aim.placement is not None:
        notes.append(f"Stages, rank by rank: {', '.join(str(list(s)) for s in aim.placement)}.")
    notes += split_backward_notes(aim)
    if change.microbatches is not None and change.hold == "batch":
        notes += divides_note(change, setting)
        notes.append("step() takes the same batch as now, in smaller microbatches.")
    elif change.microbatches is not None:
        notes.append(f"step() takes {change.microbatches} microbatches of the size of now.")
    return notes


EMITTERS = {"torch": emit}
