"""Which levers may be pulled: a command can be told some things and not others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from debubble.plan.change import Change, Hold
from debubble.plan.option import Idea
from debubble.plan.schedule import Refused
from debubble.simulate.communication import schedules_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What may change; everything, as it stands."""

    split: bool = True
    microbatches: bool = True
    overlap: bool = True
    link: bool = True
    """Repairs: nothing that a command can be told."""
    schedules: frozenset[str] | None = None
    """The schedules that can be run; None for all."""
    hold: Hold | None = None
    """What stays when the number of microbatches changes; None where either can."""

    def of(self, found: Iterable[Idea | Refused], chunks: int) -> Iterator[Idea | Refused]:
        """Yield what is allowed of what was found; `chunks` is stages a rank as it is."""
        return (one for one in found if self.permits(one.change, chunks))

    def permits(self, change: Change, chunks: int) -> bool:
        """Tell whether a change is allowed: more stages a rank need another split too."""
        if change.schedule is not None and self.schedules is not None:
            cut_anew = (change.chunks or chunks) != chunks
            if change.schedule not in self.schedules or (cut_anew and not self.split):
                return False
        wrong_hold = self.hold is not None and change.hold != self.hold
        if change.microbatches is not None and (wrong_hold or not self.microbatches):
            return False
        return (self.split or change.split is None) and (self.overlap or not change.overlap)


ALL = Allowed()


def runnable_by(framework: str | None) -> Allowed:
    """Return what a framework can run; everything, where none is known.

    DeepSpeed has one schedule. Megatron overlaps transfers with its interleaved one, and not else.
    """
    schedules = schedules_of(framework)
    return ALL if schedules is None else Allowed(schedules=schedules, overlap=False)
