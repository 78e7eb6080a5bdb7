"""The lever of order: every schedule that the framework can run, and what may be changed at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from debubble.errors import UsageError
from debubble.plan.baseline import Baseline
from debubble.plan.change import Change, Hold
from debubble.plan.emit.torch import TORCH_SCHEDULES
from debubble.plan.option import Idea
from debubble.schedules import SCHEDULES
from debubble.simulate.communication import schedules_of

_FROM_FILE = "torch runs it as an order of your own (CSV), through its runtime"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Something that will not be done, and why."""

    lever: str
    change: Change
    reason: str


def ideas(baseline: Baseline) -> Iterator[Idea | Refused]:
    """Yield every other schedule of the run's kind, or what forbids it."""
    trains = baseline.schedule != "forward-only"
    for name, schedule in SCHEDULES.items():
        if name == baseline.schedule or (name == "forward-only") == trains:
            continue
        chunks = max(baseline.source.chunks, schedule.least_chunks)
        if schedule.most_chunks is not None:
            chunks = min(chunks, schedule.most_chunks)
        change = Change(schedule=name, chunks=chunks)
        try:
            baseline.what_if(change)
        except UsageError as error:
            yield Refused(lever="schedule", change=change, reason=error.message)
        else:
            assumed = () if name in TORCH_SCHEDULES else (_FROM_FILE,)
            yield Idea(lever="schedule", change=change, assumptions=assumed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
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
        return (idea for idea in found if self.permits(idea.change, chunks))

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


ALL = Permissions()


def runnable_by(framework: str | None) -> Permissions:
    """Return what a framework can run; everything, where none is known.

    DeepSpeed has one schedule. Megatron overlaps transfers with its interleaved one, and not else.
    """
    schedules = schedules_of(framework)
    return ALL if schedules is None else Permissions(schedules=schedules, overlap=False)
