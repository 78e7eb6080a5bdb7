"""A measured step in → its `Account`: every nanosecond of every rank under one cause."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from debubble.costs.passes import PassCosts, collectives_of, without
from debubble.ledger.blame import Blame, Piece
from debubble.ledger.model import NUMBER_OF, Account, Cause, RootKind
from debubble.links.expectation import Expected
from debubble.simulate.measured import MeasuredStep
from debubble.timeline.model import Intervals, RankTimeline

Stretch = tuple[int, int, Cause]
_NO_ROOT = (RootKind.NOTHING, -1)
_NEVER = np.iinfo(np.int64).max


@dataclass(slots=True)
class _Rows:
    """The columns of an account, as they are written."""

    place: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    cause: list[int] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)
    root: list[int] = field(default_factory=list)
    queued: list[bool] = field(default_factory=list)

    def add(self, place: int, stretch: Stretch, root: tuple[int, int], queued: bool) -> None:
        self.place.append(place)
        self.start.append(stretch[0])
        self.end.append(stretch[1])
        self.cause.append(NUMBER_OF[stretch[2]])
        self.kind.append(root[0])
        self.root.append(root[1])
        self.queued.append(queued)


class _Cutter:
    """Cuts what was waited for into causes."""

    def __init__(
        self,
        step: MeasuredStep,
        costs: PassCosts,
        expected: Expected,
        collectives: tuple[Intervals, ...],
    ) -> None:
        self._step = step
        self._costs = costs
        self._expected = expected.seen
        self._collectives = collectives
        passes, times = step.program.passes, step.times
        places = range(len(step.program.ranks))
        self._first = [times.pass_start[passes.place == one].min(initial=_NEVER) for one in places]
        self._last = [times.pass_end[passes.place == one].max(initial=0) for one in places]

    def cut(self, waiter: int, piece: Piece) -> Iterator[Stretch]:
        """Yield the causes of a piece of a wait, in order of time."""
        if piece.kind is RootKind.PASS:
            yield from self._cut_pass(waiter, piece)
        elif piece.kind is RootKind.MESSAGE:
            yield from self._cut_message(piece)
        else:
            cause = Cause.HOST if piece.kind is RootKind.HOST else Cause.UNEXPLAINED
            yield piece.begin, piece.end, cause

    def _cut_pass(self, waiter: int, piece: Piece) -> Iterator[Stretch]:
        """Cut by how far the pass was: an equal share, its stage's excess, its own."""
        passes = self._step.program.passes
        key = (int(passes.stage[piece.row]), int(passes.kind[piece.row]))
        equal = self._costs.equal[key]
        typical = self._costs.typical(key, int(passes.microbatch[piece.row]))
        collectives = self._collectives[passes.place[piece.row]]
        began = int(self._step.times.pass_start[piece.row])
        for begin, end, collective in _split(collectives, piece.begin, piece.end):
            if collective:
                yield begin, end, Cause.COLLECTIVE
                continue
            # Where in the pass this stretch begins, collectives before it left out.
            into = begin - began - collectives.inside(began, begin)
            scheduled = Cause.TURNAROUND
            if begin < self._first[waiter]:
                scheduled = Cause.WARM_UP
            elif begin >= self._last[waiter]:
                scheduled = Cause.DRAIN
            yield from _steps(
                begin,
                end,
                ((equal - into, scheduled), (typical - into, Cause.IMBALANCE)),
                Cause.JITTER,
            )

    def _cut_message(self, piece: Piece) -> Iterator[Stretch]:
        messages, times = self._step.program.messages, self._step.times
        both = max(
            int(times.batch_start[messages.sent[piece.row]]),
            int(times.batch_start[messages.received[piece.row]]),
        )
        fair = int(self._expected[piece.row]) - (piece.begin - both)
        yield from _steps(piece.begin, piece.end, ((fair, Cause.TRANSFER),), Cause.SLOW_LINK)


def account_step(
    step: MeasuredStep,
    ranks: tuple[RankTimeline, ...],
    costs: PassCosts,
    expected: Expected,
) -> Account:
    """Cut ranks and window into intervals with one cause each; nothing is left out."""
    begin, length = step.begin_ns, int(step.times.pass_end.max())
    collectives = tuple(clip(collectives_of(rank), begin, length) for rank in ranks)
    blame = Blame(step, tuple(_shift(rank.unissued, begin) for rank in ranks))
    cutter = _Cutter(step, costs, expected, collectives)
    rows = _Rows()
    for place, rank in enumerate(ranks):
        occupied = clip(rank.occupied, begin, length)
        computes = without(occupied, collectives[place])
        for start, end, is_busy in _split(computes, 0, length):
            if is_busy:
                rows.add(place, (start, end, Cause.COMPUTE), _NO_ROOT, queued=False)
                continue
            for first, last, collective in _split(collectives[place], start, end):
                if collective:
                    rows.add(place, (first, last, Cause.COLLECTIVE), _NO_ROOT, queued=False)
                    continue
                for piece in blame.follow(place, first, last):
                    for stretch in cutter.cut(place, piece):
                        rows.add(place, stretch, (piece.kind, piece.row), queued=piece.queued)
    return Account(
        place=np.array(rows.place, dtype=np.int32),
        start_ns=np.array(rows.start, dtype=np.int64),
        end_ns=np.array(rows.end, dtype=np.int64),
        cause=np.array(rows.cause, dtype=np.uint8),
        root_kind=np.array(rows.kind, dtype=np.uint8),
        root=np.array(rows.root, dtype=np.int32),
        queued=np.array(rows.queued, dtype=bool),
    )


def _steps(
    begin: int, end: int, parts: tuple[tuple[int, Cause], ...], rest: Cause
) -> Iterator[Stretch]:
    """Cut a stretch at the given distances from its begin, each under its cause."""
    at = begin
    for distance, cause in parts:
        until = min(end, max(at, begin + distance))
        if at < until:
            yield at, until, cause
            at = until
    if at < end:
        yield at, end, rest


def _split(intervals: Intervals, begin: int, end: int) -> Iterator[tuple[int, int, bool]]:
    """Cut a stretch by intervals: what lies in them, and what between."""
    at = begin
    row = int(np.searchsorted(intervals.end_ns, begin, side="right"))
    while row < len(intervals.start_ns) and intervals.start_ns[row] < end:
        start, until = max(at, int(intervals.start_ns[row])), min(end, int(intervals.end_ns[row]))
        if at < start:
            yield at, start, False
        if start < until:
            yield start, until, True
        at = max(at, until)
        row += 1
    if at < end:
        yield at, end, False


def _shift(intervals: Intervals, begin: int) -> Intervals:
    return Intervals(start_ns=intervals.start_ns - begin, end_ns=intervals.end_ns - begin)


def clip(intervals: Intervals, begin: int, length: int) -> Intervals:
    """Return intervals as they lie in a window, counted from its start."""
    start = np.clip(intervals.start_ns - begin, 0, length)
    end = np.clip(intervals.end_ns - begin, 0, length)
    kept = end > start
    return Intervals(start_ns=start[kept], end_ns=end[kept])
