"""The lever of receives: torch's runtime posts them as late as is safe, with `defer_pp_recv`.

It posts a receive as soon as its sender is scheduled, maybe in front of sends that are ready before
it: those wait, for all are on one queue.
"""

from __future__ import annotations

from collections.abc import Iterator

from debubble.plan.change import Change
from debubble.plan.lever import Lever, Start
from debubble.plan.option import Idea
from debubble.simulate.communication import Communication

UNSEEN = "deferred receives were never measured; needs torch 2.13 (`defer_pp_recv`)"


def ideas(start: Start) -> Iterator[Idea]:
    """Yield it for a run of torch's runtime."""
    if start.baseline.communication == Communication.RUNTIME:
        yield Idea(lever="defer", change=Change(defer_receives=True), assumptions=(UNSEEN,))


def words(change: Change) -> str:
    """Say that receives are deferred."""
    return "receives deferred" if change.defer_receives else ""


LEVER = Lever(key="defer", position=55, ideas=ideas, words=words)
