"""What torch.distributed.pipelining can run, and under which names: its own rules, as it has them.

They hold for whatever is built upon it: torchtitan, NeMo Automodel.
"""

from __future__ import annotations

from dataclasses import dataclass

from debubble.errors import UsageError
from debubble.plan.change import Change
from debubble.plan.emit.aim import Aim
from debubble.plan.emit.refuse import cannot, microbatches_of, schedule_of
from debubble.schedules import SCHEDULES
from debubble.schedules.rounds import count_rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchSchedule:
    """A schedule that torch has."""

    name: str
    """As `get_schedule_class` takes it; the class is `Schedule` and this."""
    one_stage: bool = False
    """Its class takes one stage a rank, and waits for transfers by itself."""
    whole_rounds: bool = False
    microbatch_a_stage: bool = False
    no_compile: bool = False
    """It refuses modules that torch.compile has been at."""


TORCH_SCHEDULES = {
    "gpipe": TorchSchedule(name="GPipe", one_stage=True),
    "1f1b": TorchSchedule(name="1F1B", one_stage=True, microbatch_a_stage=True),
    "interleaved-1f1b": TorchSchedule(name="Interleaved1F1B", whole_rounds=True),
    "looped-bfs": TorchSchedule(name="LoopedBFS"),
    "interleaved-zb": TorchSchedule(
        name="InterleavedZeroBubble", whole_rounds=True, no_compile=True
    ),
    "zbv": TorchSchedule(name="ZBVZeroBubble", no_compile=True),
    "dualpipe-v": TorchSchedule(name="DualPipeV", microbatch_a_stage=True, no_compile=True),
}


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
    if known is None or (change.overlap and known.one_stage):
        return None
    _check_sizes(framework, known, aim)
    return known


def splits_backward(aim: Aim) -> bool:
    """Tell whether a schedule runs I and W apart, which torch.compile does not bear."""
    known = SCHEDULES.get(aim.schedule or "")
    return known is not None and "W" in known.kinds


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
