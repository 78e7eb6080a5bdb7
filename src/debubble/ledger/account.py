"""A measured step in → its `Account`: every nanosecond of every rank under one cause."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from debubble.costs.passes import PassCosts, collectives_of
from debubble.ledger.blame import Blame, Piece
from debubble.ledger.model import NUMBER_OF, Account, Cause, RootKind
from debubble.links.expectation import Expected
from debubble.simulate.measured import MeasuredStep
from debubble.timeline.model import I64, Flags, Intervals, RankTimeline, split, without

Stretch = tuple[int, int, Cause]
AnyArray = NDArray[np.generic]
_COMPUTE, _COLLECTIVE = NUMBER_OF[Cause.COMPUTE], NUMBER_OF[Cause.COLLECTIVE]
_HOST, _UNEXPLAINED = NUMBER_OF[Cause.HOST], NUMBER_OF[Cause.UNEXPLAINED]
_HOST_SYNC, _DATA_PARALLEL = NUMBER_OF[Cause.HOST_SYNC], NUMBER_OF[Cause.DATA_PARALLEL]
_NEVER = np.iinfo(np.int64).max
_OF_RANKS = {
    RootKind.HOST: Cause.HOST,
    RootKind.HOST_SYNC: Cause.HOST_SYNC,
    RootKind.COLLECTIVE: Cause.COLLECTIVE,
    RootKind.DATA_PARALLEL: Cause.DATA_PARALLEL,
}


@dataclass(slots=True)
class _Rows:
    """The waits of a rank, as they are written."""

    place: int
    start: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    cause: list[int] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)
    root: list[int] = field(default_factory=list)
    queued: list[bool] = field(default_factory=list)

    def add(self, stretch: Stretch, piece: Piece) -> None:
        self.start.append(stretch[0])
        self.end.append(stretch[1])
        self.cause.append(NUMBER_OF[stretch[2]])
        self.kind.append(piece.kind)
        self.root.append(piece.row)
        self.queued.append(piece.queued)


class _Cutter:
    """Cuts what was waited for into causes."""

    def __init__(
        self,
        step: MeasuredStep,
        costs: PassCosts,
        expected: Expected,
        collectives: tuple[Intervals, ...],
        data: tuple[Intervals, ...],
    ) -> None:
        self._step = step
        self._costs = costs
        self._expected = expected.seen
        self._collectives, self._data = collectives, data
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
            yield piece.begin, piece.end, _OF_RANKS.get(piece.kind, Cause.UNEXPLAINED)

    def _cut_pass(self, waiter: int, piece: Piece) -> Iterator[Stretch]:
        """Cut by how far the pass was: an equal share, its stage's excess, its own."""
        passes = self._step.program.passes
        key = (int(passes.stage[piece.row]), int(passes.kind[piece.row]))
        equal = self._costs.equal[key]
        typical = self._costs.typical(key, int(passes.microbatch[piece.row]))
        collectives = self._collectives[passes.place[piece.row]]
        data = self._data[passes.place[piece.row]]
        began = int(self._step.times.pass_start[piece.row])
        for begin, end, cause in _by_collective(collectives, data, piece.begin, piece.end):
            if cause is not None:
                yield begin, end, cause
                continue
            # Where in the pass this stretch begins, collectives before it left out.
            into = begin - began - collectives.inside(began, begin) - data.inside(began, begin)
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


def _by_collective(
    collectives: Intervals, data: Intervals, begin: int, end: int
) -> Iterator[tuple[int, int, Cause | None]]:
    """Cut a stretch by the collectives that it lies in: of passes, beside them, or none."""
    for first, last, inside in split(collectives, begin, end):
        if inside:
            yield first, last, Cause.COLLECTIVE
            continue
        for begun, ended, beside in split(data, first, last):
            yield begun, ended, Cause.DATA_PARALLEL if beside else None


def account_step(
    step: MeasuredStep,
    ranks: tuple[RankTimeline, ...],
    costs: PassCosts,
    expected: Expected,
) -> Account:
    """Cut ranks and window into intervals with one cause each; nothing is left out."""
    begin, length = step.begin_ns, int(step.times.pass_end.max())
    collectives = tuple(clip(collectives_of(rank), begin, length) for rank in ranks)
    unissued = tuple(_shift(rank.unissued, begin) for rank in ranks)
    synchronised = tuple(_shift(rank.synchronised, begin) for rank in ranks)
    data = tuple(clip(rank.data_parallel, begin, length) for rank in ranks)
    blame = Blame(step, unissued, synchronised, collectives, data)
    cutter = _Cutter(step, costs, expected, collectives, data)
    parts = []
    for place, rank in enumerate(ranks):
        computes = without(clip(rank.occupied, begin, length), collectives[place])
        computes = without(computes, data[place])
        mine = step.program.passes.place == place
        passes = Intervals(start_ns=step.times.pass_start[mine], end_ns=step.times.pass_end[mine])
        late = unissued[place], synchronised[place]
        held = collectives[place], data[place]
        known, waits = _cut_rank(computes, held, passes, late, length)
        rows = _Rows(place)
        for wait in waits:
            for piece in blame.follow(place, *wait):
                for stretch in cutter.cut(place, piece):
                    rows.add(stretch, piece)
        parts.append(_in_order(place, known, rows))
    return Account(
        **{one.name: np.concatenate([part[one.name] for part in parts]) for one in fields(Account)}
    )


def _cut_rank(
    computes: Intervals,
    held: tuple[Intervals, Intervals],
    passes: Intervals,
    late: tuple[Intervals, Intervals],
    length: int,
) -> tuple[tuple[I64, I64, I64], list[tuple[int, int]]]:
    """Return what a rank did, and gaps inside its passes, by cause; and its waits between them.

    `held` is when it was in collectives of its passes, and beside them; `late` when its host had
    not issued what ran next, and when it was kept by a call.
    """
    (collectives, data), (unissued, synchronised) = held, late
    edges = [np.array([0, length])]
    for intervals in (computes, collectives, data, passes, unissued, synchronised):
        edges += [intervals.start_ns, intervals.end_ns]
    moments = np.unique(np.clip(np.concatenate(edges), 0, length))
    start, end = moments[:-1], moments[1:]
    occupied = _covers(computes, start) | _covers(collectives, start) | _covers(data, start)
    waits = ~occupied & ~_covers(passes, start)
    whose = np.where(_covers(synchronised, start), _HOST_SYNC, _HOST)
    cause = np.where(_covers(unissued, start), whose, _UNEXPLAINED)
    cause = np.where(_covers(data, start), _DATA_PARALLEL, cause)
    cause = np.where(_covers(collectives, start), _COLLECTIVE, cause)
    cause = np.where(_covers(computes, start), _COMPUTE, cause)
    first = waits & ~np.concatenate(([False], waits[:-1]))
    last = waits & ~np.concatenate((waits[1:], [False]))
    return (
        (start[~waits], end[~waits], cause[~waits]),
        list(zip(start[first].tolist(), end[last].tolist(), strict=True)),
    )


def _covers(intervals: Intervals, moments: I64) -> Flags:
    """Tell which moments lie in one of some intervals."""
    begun = np.searchsorted(intervals.start_ns, moments, side="right")
    over = np.searchsorted(intervals.end_ns, moments, side="right")
    inside: Flags = begun > over
    return inside


def _in_order(place: int, known: tuple[I64, I64, I64], rows: _Rows) -> dict[str, AnyArray]:
    """Lay what a rank did and what it waited for one after the other."""
    start = np.concatenate((known[0], np.array(rows.start, dtype=np.int64)))
    order = np.argsort(start)
    # The host of a rank is to blame for gaps inside its own passes.
    late, kept = known[2] == _HOST, known[2] == _HOST_SYNC
    kind = np.where(late, RootKind.HOST, np.where(kept, RootKind.HOST_SYNC, RootKind.NOTHING))
    root = np.where(late | kept, place, -1)
    columns: dict[str, AnyArray] = {
        "start_ns": start,
        "end_ns": np.concatenate((known[1], np.array(rows.end, dtype=np.int64))),
        "cause": np.concatenate((known[2], np.array(rows.cause, dtype=np.int64))).astype(np.uint8),
        "root_kind": np.concatenate((kind, np.array(rows.kind, dtype=np.int64))).astype(np.uint8),
        "root": np.concatenate((root, np.array(rows.root, dtype=np.int64))).astype(np.int32),
        "queued": np.concatenate((np.zeros(len(root), dtype=bool), np.array(rows.queued, bool))),
    }
    ordered = {name: column[order] for name, column in columns.items()}
    return ordered | {"place": np.full(len(order), place, dtype=np.int32)}


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


def _shift(intervals: Intervals, begin: int) -> Intervals:
    return Intervals(start_ns=intervals.start_ns - begin, end_ns=intervals.end_ns - begin)


def clip(intervals: Intervals, begin: int, length: int) -> Intervals:
    """Return intervals as they lie in a window, counted from its start."""
    start = np.clip(intervals.start_ns - begin, 0, length)
    end = np.clip(intervals.end_ns - begin, 0, length)
    kept = end > start
    return Intervals(start_ns=start[kept], end_ns=end[kept])
