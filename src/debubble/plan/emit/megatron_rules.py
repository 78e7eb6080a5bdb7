"""What Megatron can run: 1F1B, and interleaved 1F1B where a rank has virtual stages."""

from __future__ import annotations

from debubble.errors import UsageError
from debubble.plan.change import Change
from debubble.plan.emit.aim import Aim
from debubble.plan.emit.refuse import cannot, microbatches_of
from debubble.schedules.rounds import count_rounds, round_size

# Without overlap Megatron's interleaved schedule exchanges in pairs, which needs a third rank.
_LEAST_RANKS_WITHOUT_OVERLAP = 3


def check_schedule(framework: str, change: Change, aim: Aim) -> None:
    """Refuse a schedule that Megatron does not have, or sizes that its own cannot have."""
    if change.schedule is not None and change.schedule not in {"1f1b", "interleaved-1f1b"}:
        raise cannot(
            framework,
            f"to run {change.schedule}",
            "it has 1f1b, and interleaved-1f1b where --chunks is 2 or more",
        )
    if aim.chunks > 1:
        _check_rounds(framework, aim)
    _check_overlap(framework, change, aim)


def group_size(aim: Aim) -> int | None:
    """Return how many microbatches a virtual stage takes at a time, where it is not its default."""
    if aim.chunks == 1 or aim.microbatches is None:
        return None
    size = round_size(aim.ranks, aim.microbatches)
    return None if size == aim.ranks else size


def _check_rounds(framework: str, aim: Aim) -> None:
    microbatches = microbatches_of(aim)
    if aim.ranks == 1:
        raise UsageError(f"{framework} has no virtual stages on one rank", hint="use --chunks 1")
    if microbatches < aim.ranks or microbatches % count_rounds(aim.ranks, microbatches):
        raise UsageError(
            f"{framework} cannot cut {microbatches} microbatches into equal groups of "
            f"{aim.ranks} or more",
            hint=f"give a multiple of {aim.ranks} microbatches",
        )


def _check_overlap(framework: str, change: Change, aim: Aim) -> None:
    if change.overlap is None:
        return
    if aim.chunks == 1:
        raise UsageError(
            f"{framework} never overlaps transfers without virtual stages",
            hint="give --schedule interleaved-1f1b --chunks 2 as well",
        )
    if not change.overlap and aim.ranks < _LEAST_RANKS_WITHOUT_OVERLAP:
        raise UsageError(
            f"{framework} needs 3 ranks or more for virtual stages without overlap",
            hint="leave the overlap on",
        )
