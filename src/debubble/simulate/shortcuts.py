"""Events and edges in → fewer of them out: what waits for one other event alone is skipped.

It happens a fixed while after that one, so edges can go past it, as long as the sum of the edges
they stand for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from debubble.timeline.model import I64, Flags


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Which old edges each new one is the sum of, a pair a part."""

    new: I64
    old: I64


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortened:
    """A graph with fewer events, numbered anew."""

    kept: I64
    """The old number of each event."""
    target: I64
    source: I64
    sums: Sums
    skipped: I64
    """The old numbers of the other events."""
    anchor: I64
    """The event, by its new number, that each of them follows."""
    skipped_sums: Sums


def shorten(events: int, target: I64, source: I64, may_skip: Flags) -> Shortened:
    """Skip events that wait for one other alone, where they may be skipped."""
    skipped = may_skip & (np.bincount(target, minlength=events) == 1)
    into = np.zeros(events, dtype=np.int64)
    """The edge into each event that is skipped."""
    only = np.flatnonzero(skipped[target])
    into[target[only]] = only
    number = np.cumsum(~skipped) - 1
    edges = np.flatnonzero(~skipped[target])
    anchors, sums = _walk_back(source[edges], skipped, into, source)
    away = np.flatnonzero(skipped)
    away_anchors, away_sums = _walk_back(away, skipped, into, source)
    return Shortened(
        kept=np.flatnonzero(~skipped),
        target=number[target[edges]],
        source=number[anchors],
        sums=Sums(
            new=np.concatenate((np.arange(len(edges)), sums.new)),
            old=np.concatenate((edges, sums.old)),
        ),
        skipped=away,
        anchor=number[away_anchors],
        skipped_sums=away_sums,
    )


def _walk_back(start: I64, skipped: Flags, into: I64, source: I64) -> tuple[I64, Sums]:
    """Go back from events to the first that is not skipped; return it, and the edges passed."""
    at = start.copy()
    rows, edges = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    while len(going := np.flatnonzero(skipped[at])):
        passed = into[at[going]]
        rows.append(going)
        edges.append(passed)
        at[going] = source[passed]
    return at, Sums(new=np.concatenate(rows), old=np.concatenate(edges))
