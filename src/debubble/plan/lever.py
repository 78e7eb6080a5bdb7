"""What a lever is, what it is asked with, and what may be changed at all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from debubble.errors import UsageError
from debubble.ledger.hop_health import LinkHealth
from debubble.plan.baseline import Baseline
from debubble.plan.change import SEARCHED, Change, Hold, Setting
from debubble.plan.emit import refusal_of
from debubble.plan.option import Idea, Option
from debubble.plan.split import Partition
from debubble.timeline.model import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderSearch:
    """How long to look for an order that has no name, and among what."""

    seconds: float | None = None
    rounds: int | None = None
    """For the same result on any machine."""
    seed: int = 0
    cuts_anew: bool = True
    """Whether stages may be cut and placed in another way."""
    clock: Callable[[], float] = field(default=time.monotonic, compare=False)
    progress: Callable[[int, int], None] = field(default=lambda _done, _all: None, compare=False)
    """Told how much is done, of how much."""


class OwnOption(Protocol):
    """What a lever has weighed by itself, having more to say of it than other levers do."""

    @property
    def option(self) -> Option:
        """What would be done, and what it buys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What levers are asked with."""

    baseline: Baseline
    timeline: Timeline
    partition: Partition | None = None
    """The best split of the run as it is; None where there is none to be found."""
    most_microbatches: int | None = None
    links: LinkHealth | None = None
    """What each hop takes and costs, where that is known."""
    empty_ends: bool = False
    """A first stage may be left with the embedding alone, a last one with the head."""
    search: OrderSearch | None = None
    """How long to look for an order that has no name; None: not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """One kind of change: where it can be had, and how it is said."""

    key: str
    """What options carry as their `lever`."""
    position: int
    """Its place where levers stand in a row, as in the words of a change."""
    ideas: Callable[[Start], Iterable[Idea | OwnOption]]
    words: Callable[[Change], str] = lambda _: ""
    """Says what a change does with this lever, unless the change says it itself (`by_hand`)."""
    probe: Change | None = None
    """Where that cannot be told to a framework, none of its ideas can: it is not asked at all."""
    shown: int | None = None
    """Of its ideas so many are weighed, those with the most work a second by means; else all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """What may change; everything, as it stands."""

    barred: frozenset[str] = frozenset()
    """Levers that may not be used, by their keys."""
    hold: Hold | None = None
    """What stays when the number of microbatches changes; None where either can."""
    framework: str | None = None
    """Only what it can be told, by its name among emitters; None for what any of them can."""

    def permits(self, change: Change, chunks: int) -> bool:
        """Tell whether a change is allowed: more stages a rank need another split too."""
        cut_anew = (change.chunks or chunks) != chunks
        used = {
            "split": change.split is not None or (change.schedule is not None and cut_anew),
            "microbatches": change.microbatches is not None,
            "schedule": change.schedule not in {None, SEARCHED},
            "overlap": bool(change.overlap),
        }
        if any(used[lever] for lever in self.barred & used.keys()):
            return False
        return not used["microbatches"] or self.hold in {None, change.hold}

    def refusal_of(self, change: Change, setting: Setting) -> UsageError | None:
        """Return why the framework cannot be told a change; None where it can, or none is named."""
        if self.framework is None or change == Change(hold=change.hold):
            return None
        return refusal_of(self.framework, change, setting)
