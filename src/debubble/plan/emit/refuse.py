"""The words for what a framework has no setting for."""

from __future__ import annotations

from debubble.errors import UsageError
from debubble.plan.change import Change, Setting
from debubble.plan.emit.aim import Aim
from debubble.schedules import SCHEDULES


def cannot(framework: str, what: str, hint: str) -> UsageError:
    """Return the refusal of something that a framework cannot be told."""
    return UsageError(f"{framework} cannot be told {what}", hint=hint)


def refuse_training(framework: str, setting: Setting) -> None:
    """Refuse a run that trains, for an engine that serves."""
    known = SCHEDULES.get(setting.schedule or "")
    if known is not None and known.kinds != {"F"}:
        raise cannot(
            framework,
            f"to train: it serves, and the run has backward passes ({setting.schedule})",
            "name what trains it: torch, torchtitan, megatron, deepspeed, nemo",
        )


def refuse_schedule(framework: str, change: Change, aim: Aim, hint: str) -> None:
    """Refuse any change of schedule or chunks, for an engine that has its own."""
    if change.schedule is not None or change.chunks is not None or aim.chunks != 1:
        raise cannot(framework, "a schedule or stages a rank", hint)


def refuse_overlap(framework: str, change: Change, hint: str) -> None:
    """Refuse any change of overlap."""
    if change.overlap is not None:
        raise cannot(framework, "to overlap transfers, or not to", hint)


def microbatches_of(aim: Aim) -> int:
    """Return the microbatches of the run after the change, which must be known."""
    if aim.microbatches is None:
        raise UsageError(
            "how many microbatches the run has is not known", hint="say it with --microbatches"
        )
    return aim.microbatches


def schedule_of(aim: Aim) -> str:
    """Return the schedule of the run after the change, which must be known."""
    if aim.schedule is None:
        raise UsageError("which schedule the run has is not known", hint="say it with --schedule")
    return aim.schedule
