"""A measured step in → its account: every nanosecond under one cause, and whom it waited for.

The one home of accounts: a stream (`serving/account.py`) tells what its events are, and how long
its passes should take; how waits are followed, cut, laid to someone and listed is all here.

A wait belongs to what it waited for last, and from there on back to what that waited for, as long
as it waits: `Happened` of the engine, over the edges that a replay runs on. Rank 1 waits here for
its F 0, from 0 to 7:

    rank 0   [ F 0 ]──send─┐         0 to 4   rank 0's F 0: the send had nothing else to wait for
    rank 1   recv··········[ F 0 ]   4 to 7   the message, from when both sides were there

A wait is then cut into causes: a pass by how far it was, a message by what its peers take.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from operator import or_
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from debubble.errors import Gap
from debubble.ledger.causes import (
    CAUSES,
    NUMBER_OF,
    Cause,
    RootKind,
)
from debubble.ledger.savings import Saving
from debubble.links.hop_times import ExpectedTimes, as_it_came
from debubble.simulate import events
from debubble.simulate.costs.passes import (
    PassCosts,
    collectives_of,
)
from debubble.simulate.engine import Engine
from debubble.simulate.measured import MeasuredStep
from debubble.timeline.model import (
    I32,
    I64,
    U8,
    Columns,
    Flags,
    Intervals,
    PassKind,
    RankTimeline,
    join_columns,
    split,
    without,
)

Cut = tuple[int, int, Cause]
_COMPUTE = NUMBER_OF[Cause.COMPUTE]
_COLLECTIVE, _COLLECTIVE_WAIT = NUMBER_OF[Cause.COLLECTIVE], NUMBER_OF[Cause.COLLECTIVE_WAIT]
_HOST, _UNEXPLAINED = NUMBER_OF[Cause.HOST], NUMBER_OF[Cause.UNEXPLAINED]
_HOST_SYNC, _DATA_PARALLEL = NUMBER_OF[Cause.HOST_SYNC], NUMBER_OF[Cause.DATA_PARALLEL]
_OF_OTHERS = frozenset({Cause.COLLECTIVE, Cause.COLLECTIVE_WAIT, Cause.DATA_PARALLEL})
_OCCUPIES = [NUMBER_OF[cause] for cause in (Cause.COMPUTE, *_OF_OTHERS)]
_NEVER = np.iinfo(np.int64).max
CAUSE_OF_ROOT = {
    RootKind.HOST: Cause.HOST,
    RootKind.HOST_SYNC: Cause.HOST_SYNC,
    RootKind.COLLECTIVE: Cause.COLLECTIVE,
    RootKind.DATA_PARALLEL: Cause.DATA_PARALLEL,
    RootKind.WAY_BACK: Cause.WAY_BACK,
    RootKind.NO_WORK: Cause.NO_WORK,
    RootKind.NOTHING: Cause.UNEXPLAINED,
}
"""What is of one cause, however long it took; passes and messages are cut by what they should."""
_KINDS = {cause: kind for kind, cause in CAUSE_OF_ROOT.items()} | {
    Cause.COLLECTIVE_WAIT: RootKind.COLLECTIVE
}


class Piece(NamedTuple):
    """A stretch of a wait with one root."""

    begin: int
    end: int
    kind: RootKind
    row: int
    queued: bool = False
    """On the way to it a message stood behind another one in its queue, or behind a broadcast."""


def follow(
    happened: events.Happened,
    wait: tuple[int, int, int],
    say: Callable[[events.Stretch], Iterable[Piece]],
    stands_behind: Callable[[events.Stretch], bool],
) -> Iterator[Piece]:
    """Yield what a wait (for an event, from, to) comes down to: pieces that cover it, in order."""
    way = [*happened.way_back(*wait)]
    behind = [*accumulate(map(stands_behind, way), or_)]
    for stretch, queued in zip(reversed(way), reversed(behind), strict=True):
        for piece in say(stretch):
            yield piece._replace(queued=True) if queued else piece


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHost:
    """What held a rank up besides passes and messages: parts that cover the window, from 0 on."""

    place: int
    begins: I64
    """Of each part; and where the last one ends."""
    causes: U8
    """Of each part, the number of its cause: a collective, or waiting in one; a gather; its host
    had not issued what ran next, kept by its device or not; or nothing."""
    beside: tuple[Intervals, Intervals]
    """Collectives of its passes, and gathers and reductions beside them."""
    synchronised: Intervals
    """Its device kept its host."""

    @classmethod
    def of(cls, rank: RankTimeline, place: int, begin_ns: int, length: int) -> RankHost:
        """Lay what a rank shows one over the other."""
        shown = (collectives_of(rank), rank.data_parallel, rank.unissued, rank.synchronised)
        layers = [clip(part, begin_ns, length) for part in (*shown, rank.shared.waits)]
        edges = [edge for part in layers for edge in (part.start_ns, part.end_ns)]
        begins = np.unique(np.concatenate([np.array([0, length]), *edges]))
        gathers, data, late, kept, waits = (_covers(part, begins[:-1]) for part in layers)
        causes = np.select(
            [gathers & waits, gathers, data, late & kept, late],
            [_COLLECTIVE_WAIT, _COLLECTIVE, _DATA_PARALLEL, _HOST_SYNC, _HOST],
            default=_UNEXPLAINED,
        )
        new = np.concatenate(([True], np.diff(causes) != 0))
        return cls(
            place=place,
            begins=np.append(begins[:-1][new], length),
            causes=causes[new].astype(np.uint8),
            beside=(layers[0], layers[1]),
            synchronised=layers[3],
        )

    def cut(self, begin: int, end: int) -> Iterator[Cut]:
        """Cut a stretch by what held the rank up."""
        first, last = self.begins.searchsorted((begin, end), side="right").tolist()
        moments = [begin, *self.begins[first:last].tolist(), end]
        causes = self.causes[first - 1 : last].tolist()
        for (at, until), cause in zip(pairwise(moments), causes, strict=False):
            if at < until:
                yield at, until, CAUSES[cause]

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """Cut a stretch in which the rank could have gone on, by what held it up."""
        for at, until, cause in self.cut(begin, end):
            kind = _KINDS.get(cause, RootKind.NOTHING)
            yield Piece(at, until, kind, self.place)

    def late(self, begin: int, end: int) -> Iterator[Piece]:
        """Cut a stretch in which the host was late: kept by its device, or of itself."""
        for at, until, kept in split(self.synchronised, begin, end):
            yield Piece(at, until, RootKind.HOST_SYNC if kept else RootKind.HOST, self.place)


class Waits:
    """Says why a rank waited, for any wait of a step. Times count from the start of its window."""

    def __init__(self, step: MeasuredStep, hosts: tuple[RankHost, ...]) -> None:
        """Take what held each rank up besides."""
        program, times = step.program, step.times
        passes, messages = program.passes, program.messages
        self._hosts = hosts
        self._happened = Engine(program).measured(times)
        self._passes, self._batches = len(passes), len(program.batches)
        places = range(len(program.ranks))
        self._rows = [np.flatnonzero(passes.place == place).tolist() for place in places]
        self._starts = [[self._happened.moments_ns[row] for row in rows] for rows in self._rows]
        self._places = [*passes.place.tolist(), *program.batches.place.tolist()]
        self._issued: list[int] = step.lengths.batch_floor.tolist()
        self._end = self._passes + int(times.pass_end.argmax())
        # A batch lasts until the message whose sides were there last has come.
        there = np.maximum(times.batch_start[messages.sent], times.batch_start[messages.received])
        latest = np.argsort(there, kind="stable")
        carried = np.full(self._batches, -1)
        sides = np.stack((messages.sent[latest], messages.received[latest]), axis=1)
        carried[sides.ravel()] = np.repeat(latest, 2)  # the last to be written stays
        self._carried: list[int] = carried.tolist()
        needs = zip(messages.consumer.tolist(), messages.received.tolist(), strict=True)
        self._inputs = {need: message for message, need in enumerate(needs)}
        """By pass and batch, the message that the pass needs of it."""

    def follow(self, place: int, begin: int, end: int) -> Iterator[Piece]:
        """Return why a rank waited from `begin` to `end`, in no pass: pieces that cover it."""
        number = bisect_right(self._starts[place], begin)
        rows = self._rows[place]
        waited_for = rows[number] if number < len(rows) else self._end
        wait = waited_for, begin, end
        return follow(self._happened, wait, self._of, self._stands_behind_another)

    def _stands_behind_another(self, stretch: events.Stretch) -> bool:
        """Tell a batch whose start waited for another batch last."""
        first, end = 2 * self._passes, 2 * self._passes + self._batches
        return first <= stretch.event < end and self._happened.last_source[stretch.event] >= first

    def _of(self, stretch: events.Stretch) -> Iterator[Piece]:
        """Say what a rank did, or did not, while all that an event needs was there."""
        event, waiting, begin, end = stretch
        starts_of_batches, ends_of_batches = 2 * self._passes, 2 * self._passes + self._batches
        if event < 0:
            yield Piece(begin, end, RootKind.NOTHING, -1)
        elif event < self._passes:
            yield from self._hosts[self._places[event]].pieces(begin, end)
        elif event < starts_of_batches:
            yield Piece(begin, end, RootKind.PASS, event - self._passes)
        elif event < ends_of_batches:
            batch = event - starts_of_batches
            host = self._hosts[self._places[self._passes + batch]]
            issued = min(max(self._issued[batch], begin), end)
            if begin < issued:
                yield from host.late(begin, issued)
            yield from host.pieces(issued, end)
        else:
            batch = event - ends_of_batches
            message = self._inputs.get((waiting, batch), self._carried[batch])
            yield Piece(begin, end, RootKind.MESSAGE, message)


class _Cutter:
    """Cuts what was waited for into causes."""

    def __init__(
        self,
        step: MeasuredStep,
        costs: PassCosts,
        expected: ExpectedTimes,
        hosts: tuple[RankHost, ...],
    ) -> None:
        self._step = step
        self._costs = costs
        self._expected = as_it_came(step, expected)
        self._hosts = hosts
        self._bounds: dict[int, tuple[int, int, int, int, int, int]] = {}
        passes, times = step.program.passes, step.times
        places = range(len(step.program.ranks))
        self._first = [
            times.pass_start[passes.place == place].min(initial=_NEVER) for place in places
        ]
        self._last = [times.pass_end[passes.place == place].max(initial=0) for place in places]

    def cut(self, waiter: int, piece: Piece) -> Iterator[Cut]:
        """Yield the causes of a piece of a wait, in order of time."""
        if piece.kind is RootKind.PASS:
            yield from self._cut_pass(waiter, piece)
        elif piece.kind is RootKind.MESSAGE:
            yield from self._cut_message(piece)
        elif piece.kind is RootKind.COLLECTIVE:
            yield from self._hosts[piece.row].cut(piece.begin, piece.end)
        else:
            yield piece.begin, piece.end, CAUSE_OF_ROOT[piece.kind]

    def _cut_pass(self, waiter: int, piece: Piece) -> Iterator[Cut]:
        """Cut by how far the pass was: an equal share, its stage's excess, its device's, its own.

        Its data come between the last two.
        """
        began, place, equal, sound, usual, uneven = self._bounds_of(piece.row)
        host = self._hosts[place]
        for begin, end, held in _only(_OF_OTHERS, host.cut(piece.begin, piece.end)):
            if held is not None:
                yield begin, end, held
                continue
            # Where in the pass this stretch begins, collectives before it left out.
            into = begin - began - sum(part.inside(began, begin) for part in host.beside)
            scheduled = Cause.TURNAROUND
            if begin < self._first[waiter]:
                scheduled = Cause.WARM_UP
            elif begin >= self._last[waiter]:
                scheduled = Cause.DRAIN
            yield from cut_steps(
                begin,
                end,
                (
                    (equal - into, scheduled),
                    (sound - into, Cause.IMBALANCE),
                    (usual - into, Cause.WORKER),
                    (uneven - into, Cause.DATA),
                ),
                Cause.JITTER,
            )

    def _bounds_of(self, row: int) -> tuple[int, int, int, int, int, int]:
        """Return a pass's start and place, and how far into it each of its causes reaches."""
        known = self._bounds.get(row)
        if known is None:
            passes = self._step.program.passes
            key = (int(passes.stage[row]), int(passes.kind[row]))
            number = int(passes.microbatch[row])
            typical = self._costs.typical(key, number)
            usual = typical / self._costs.heavy
            known = self._bounds[row] = (
                int(self._step.times.pass_start[row]),
                int(passes.place[row]),
                self._costs.equal[key],
                round(typical * self._costs.sound[key] / max(self._costs.median[key], 1)),
                round(usual),
                round(usual * self._costs.data.get((self._step.number, key[1], number), 1.0)),
            )
        return known

    def _cut_message(self, piece: Piece) -> Iterator[Cut]:
        messages, times = self._step.program.messages, self._step.times
        both = max(
            int(times.batch_start[messages.sent[piece.row]]),
            int(times.batch_start[messages.received[piece.row]]),
        )
        fair = int(self._expected[piece.row]) - (piece.begin - both)
        yield from cut_steps(piece.begin, piece.end, ((fair, Cause.TRANSFER),), Cause.SLOW_LINK)


def _only(kept: frozenset[Cause], cuts: Iterable[Cut]) -> Iterator[tuple[int, int, Cause | None]]:
    """Keep some causes; stretches of others, one after the other, are one of none."""
    for cause, same in groupby(cuts, key=lambda cut: cut[2] if cut[2] in kept else None):
        stretches = list(same)
        yield stretches[0][0], stretches[-1][1], cause


def account_step(
    step: MeasuredStep,
    ranks: tuple[RankTimeline, ...],
    costs: PassCosts,
    expected: ExpectedTimes,
) -> Account:
    """Cut ranks and window into intervals with one cause each; nothing is left out."""
    begin, length = step.begin_ns, int(step.times.pass_end.max())
    hosts = tuple(RankHost.of(rank, place, begin, length) for place, rank in enumerate(ranks))
    waits, cutter = Waits(step, hosts), _Cutter(step, costs, expected, hosts)

    def whom(place: int, idle: Iterable[tuple[int, int]]) -> Iterator[tuple[Cut, Piece]]:
        for wait in idle:
            for piece in waits.follow(place, *wait):
                for cut in cutter.cut(place, piece):
                    yield cut, piece

    roots, parts = _roots_of(step), []
    for place, (rank, host) in enumerate(zip(ranks, hosts, strict=True)):
        computes = clip(rank.occupied, begin, length)
        for part in host.beside:
            computes = without(computes, part)
        runs = step.program.passes.place == place
        passes = Intervals(start_ns=step.times.pass_start[runs], end_ns=step.times.pass_end[runs])
        known, idle = _cut_rank(computes, host, passes)
        parts.append(account_rank(roots, place, known, whom(place, idle)))
    return join_columns(parts, by="place")


def _roots_of(step: MeasuredStep) -> Roots:
    program, ranks = step.program, np.array(step.program.ranks)
    passes, messages, places = program.passes, program.messages, program.batches.place
    return Roots(
        ranks=program.ranks,
        begin_ns=step.begin_ns,
        step=step.number,
        passes=np.stack((ranks[passes.place], passes.stage, passes.kind, passes.microbatch)),
        messages=np.stack((ranks[places[messages.sent]], ranks[places[messages.received]])),
    )


def _cut_rank(
    computes: Intervals, host: RankHost, passes: Intervals
) -> tuple[tuple[I64, I64, I64], list[tuple[int, int]]]:
    """Return what a rank did, and gaps inside its passes, by cause; and its waits between them."""
    length = int(host.begins[-1])
    edges = [edge for part in (computes, passes) for edge in (part.start_ns, part.end_ns)]
    moments = np.unique(np.clip(np.concatenate([host.begins, *edges]), 0, length))
    start, end = moments[:-1], moments[1:]
    held = host.causes[np.searchsorted(host.begins, start, side="right") - 1].astype(np.int64)
    cause = np.where(_covers(computes, start), _COMPUTE, held)
    waits = ~np.isin(cause, _OCCUPIES) & ~_covers(passes, start)
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


def account_rank(
    roots: Roots,
    place: int,
    known: tuple[I64, I64, I64],
    waits: Iterable[tuple[Cut, Piece]],
) -> Account:
    """Lay what a rank did (start, end, cause) and what it waited for one after the other."""
    start, end, cause = known
    # The host of a rank is to blame for gaps inside its own passes.
    late, kept = cause == _HOST, cause == _HOST_SYNC
    kind = np.where(late, RootKind.HOST, np.where(kept, RootKind.HOST_SYNC, RootKind.NOTHING))
    root = np.where(late | kept, place, -1)
    did = np.stack((start, end, cause, kind, root, np.zeros_like(root)), axis=1)
    waited = [
        (begin, until, NUMBER_OF[cause], piece.kind, piece.row, piece.queued)
        for (begin, until, cause), piece in waits
    ]
    rows = np.concatenate((did, np.array(waited, dtype=np.int64).reshape(-1, 6)))
    columns = np.ascontiguousarray(rows[np.argsort(rows[:, 0])].T)
    return Account(
        place=np.full(len(rows), place, dtype=np.int32),
        start_ns=columns[0],
        end_ns=columns[1],
        cause=columns[2].astype(np.uint8),
        root_kind=columns[3].astype(np.uint8),
        root=columns[4].astype(np.int32),
        queued=columns[5].astype(bool),
        roots=roots,
    )


def cut_steps(
    begin: int, end: int, parts: tuple[tuple[int, Cause], ...], rest: Cause
) -> Iterator[Cut]:
    """Cut a stretch at the given distances from its begin, each under its cause."""
    at = begin
    for distance, cause in parts:
        until = min(end, max(at, begin + distance))
        if at < until:
            yield at, until, cause
            at = until
    if at < end:
        yield at, end, rest


def clip(intervals: Intervals, begin: int, length: int) -> Intervals:
    """Return intervals as they lie in a window, counted from its start."""
    start = np.clip(intervals.start_ns - begin, 0, length)
    end = np.clip(intervals.end_ns - begin, 0, length)
    kept = end > start
    return Intervals(start_ns=start[kept], end_ns=end[kept])


@dataclass(frozen=True, slots=True, kw_only=True)
class Roots:
    """What waits of a step or a stream come down to, and what names it."""

    ranks: tuple[int, ...]
    """By their places."""
    begin_ns: int
    """What the account counts from."""
    step: int | None
    """None for a stream, which has none."""
    passes: I64
    """Rank, stage, kind and microbatch, a row each, by the number of the pass."""
    messages: I64
    """Sending and receiving rank, a row each, by the number of the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account(Columns):
    """Intervals that cover ranks and window exactly, sorted by rank and start."""

    place: I32
    start_ns: I64
    """From `begin_ns` of the roots: the start of the window."""
    end_ns: I64
    cause: U8
    root_kind: U8
    root: I32
    """The number of the pass or message waited for; the place of the rank whose host was late."""
    queued: Flags
    """Somewhere on the way a message stood behind another one in its queue, or a broadcast."""
    roots: Roots

    @property
    def length_ns(self) -> I64:
        """How long each is."""
        length: I64 = self.end_ns - self.start_ns
        return length

    def of_place(self, place: int | None) -> Account:
        """Return what one rank did; None for all of them."""
        return self if place is None else self.where(self.place == place)

    def total_of(self, cause: Cause) -> int:
        """Return the nanoseconds under a cause."""
        return int(self.length_ns[self.cause == NUMBER_OF[cause]].sum())

    def totals(self) -> dict[Cause, int]:
        """Return the nanoseconds under every cause."""
        sums = np.zeros(len(CAUSES), dtype=np.int64)
        np.add.at(sums, self.cause, self.length_ns)
        return dict(zip(CAUSES, sums.tolist(), strict=True))


_EXAMPLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A wait to look at in a viewer: the waiting rank's file, the moment, the length."""

    file: str
    ts_us: float
    dur_us: float
    rank: int
    waits_for: str
    """`3B5` for a pass (stage, kind, microbatch), `2→3` for a hop, empty for a host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """Something that ranks waited for under one cause."""

    cause: Cause
    rank: int
    """Whose pass or host it was; the sender's of a hop."""
    stage: int | None = None
    kind: str | None = None
    hop: tuple[int, int] | None = None
    """Sending and receiving rank."""
    wait_ns: int
    """All ranks and steps together."""
    examples: tuple[Example, ...] = ()


def find_culprits(
    accounts: Sequence[Account],
    ranks: Sequence[RankTimeline],
    waiter: int | None = None,
    most: int | None = None,
) -> tuple[Culprit, ...]:
    """List whom ranks waited for, the longest first; or the `most` that one rank (by place) did.

    A pipeline of hundreds of stages has millions of waits: they are grouped as columns, and only
    examples are looked at one by one.
    """
    kept = [_waits_of(account, waiter) for account in accounts]
    number = np.repeat(np.arange(len(accounts)), [len(rows) for rows in kept])
    rows = np.concatenate(kept) if kept else np.zeros(0, dtype=np.intp)
    if not len(rows):
        return ()
    pairs = list(zip(accounts, kept, strict=True))
    columns = np.concatenate([_identities(*pair) for pair in pairs], axis=1)
    length = np.concatenate([account.length_ns[waits] for account, waits in pairs])
    group = np.zeros(len(rows), dtype=np.int64)
    for column in columns:
        _, value = np.unique(column, return_inverse=True)
        _, group = np.unique(group * (int(value.max()) + 1) + value, return_inverse=True)
    total = np.zeros(int(group.max()) + 1, dtype=np.int64)
    np.add.at(total, group, length)
    longest_first = np.lexsort((-length, group))  # stable: of equal ones, the earlier
    begins = np.searchsorted(group[longest_first], np.arange(len(total)))
    first = np.full(len(total), len(rows))
    np.minimum.at(first, group, np.arange(len(rows)))
    cause, rank = columns[0][first], columns[1][first]
    names = np.array([str(each) for each in CAUSES])[cause]
    culprits = []
    for row in np.lexsort((first, rank, names, -total))[:most].tolist():
        longest = longest_first[begins[row] : begins[row] + _EXAMPLES]
        examples = [
            _example(accounts[number[at]], int(rows[at]), ranks)
            for at in longest[group[longest] == row].tolist()
        ]
        _, _, stage, kind, destination = columns[:, first[row]].tolist()
        culprits.append(
            Culprit(
                cause=CAUSES[cause[row]],
                rank=int(rank[row]),
                stage=None if stage < 0 else stage,
                kind=None if kind < 0 else PassKind(kind).name,
                hop=None if destination < 0 else (int(rank[row]), destination),
                wait_ns=int(total[row]),
                examples=tuple(examples),
            )
        )
    return tuple(culprits)


def _waits_of(account: Account, waiter: int | None) -> NDArray[np.intp]:
    """Return the rows that waited for something: of all, or of one rank."""
    first, last = 0, len(account)
    if waiter is not None:
        first, last = np.searchsorted(account.place, (waiter, waiter + 1)).tolist()
    return first + np.flatnonzero(account.root_kind[first:last] != RootKind.NOTHING)


def _identities(account: Account, rows: NDArray[np.intp]) -> I64:
    """Return what makes waits those for the same: cause, rank, stage, kind of pass, receiver."""
    roots, root, kind = account.roots, account.root[rows], account.root_kind[rows]
    identities = np.full((5, len(rows)), -1, dtype=np.int64)
    identities[0] = account.cause[rows]
    passes, messages = kind == RootKind.PASS, kind == RootKind.MESSAGE
    of_rank = ~passes & ~messages
    identities[1:4, passes] = roots.passes[:3, root[passes]]
    identities[1, messages], identities[4, messages] = roots.messages[:, root[messages]]
    identities[1, of_rank] = np.array(roots.ranks, dtype=np.int64)[root[of_rank]]
    return identities


def _name(account: Account, row: int) -> str:
    """Name the very pass or hop of a wait; nothing for a host."""
    root = int(account.root[row])
    if account.root_kind[row] == RootKind.PASS:
        _, stage, kind, microbatch = account.roots.passes[:, root].tolist()
        return f"{stage}{PassKind(kind).name}{microbatch}"
    if account.root_kind[row] == RootKind.MESSAGE:
        source, destination = account.roots.messages[:, root].tolist()
        return f"{source}→{destination}"
    return ""


def _name_root(account: Account, row: int) -> str:
    """Name what a row of the account waited for; nothing where nobody knows."""
    kind = account.root_kind[row]
    if kind in {RootKind.NOTHING, RootKind.WAY_BACK, RootKind.NO_WORK}:
        return ""
    name = _name(account, row)
    if name:
        return name
    rank = account.roots.ranks[int(account.root[row])]
    return f"host of rank {rank}" if kind in {RootKind.HOST, RootKind.HOST_SYNC} else f"rank {rank}"


def _example(account: Account, row: int, ranks: Sequence[RankTimeline]) -> Example:
    waiting = ranks[account.place[row]]
    return Example(
        file=waiting.file,
        ts_us=waiting.stamp_us(account.roots.begin_ns + int(account.start_ns[row])),
        dur_us=int(account.end_ns[row] - account.start_ns[row]) / 1000,
        rank=waiting.rank,
        waits_for=_name(account, row),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A stretch in which a rank waited for one thing."""

    rank: int
    step: int | None
    """None in a stream, which has none."""
    start_ns: int
    end_ns: int
    cause: Cause
    waits_for: str
    """`3B5` for a pass, `2→3` for a hop, `host of rank 1`; empty where nobody knows."""


def _wait(account: Account, begin: int, end: int) -> Wait:
    roots = account.roots
    return Wait(
        rank=roots.ranks[account.place[begin]],
        step=roots.step,
        start_ns=roots.begin_ns + int(account.start_ns[begin]),
        end_ns=roots.begin_ns + int(account.end_ns[end]),
        cause=CAUSES[account.cause[begin]],
        waits_for=_name_root(account, begin),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounts:
    """Where the time of ranks went: in some steps, or over the span of a stream."""

    ranks: tuple[RankTimeline, ...]
    accounts: tuple[Account, ...]
    """Of each step; of a stream one."""
    culprits: tuple[Culprit, ...]
    savings: tuple[Saving, ...]
    """The largest first; of streams those last that the recording cannot price."""
    gaps: tuple[Gap, ...]
    """What it had to do without."""
    middle: tuple[int, ...]
    """The rows of the step, or the two, in the middle by bubble: what is said of "the batch"."""

    @property
    def total_ns(self) -> int:
        """Ranks times window, all steps."""
        return sum(int(account.length_ns.sum()) for account in self.accounts)

    @property
    def waits(self) -> tuple[Wait, ...]:
        """Every wait; gaps that touch and have one cause and one culprit are one wait."""
        waits: list[Wait] = []
        for account in self.accounts:
            kept = account.where(account.cause > CAUSES.index(Cause.COLLECTIVE))
            same = np.stack((kept.place, kept.cause, kept.root_kind, kept.root))
            breaks = (np.diff(same, axis=1) != 0).any(axis=0)
            breaks |= kept.start_ns[1:] != kept.end_ns[:-1]
            cuts = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(kept)] if len(kept) else []
            waits += [_wait(kept, begin, end - 1) for begin, end in pairwise(cuts)]
        return tuple(waits)

    def saving_of(self, cause: str) -> Saving | None:
        """Return what removing a cause would buy."""
        return next((saving for saving in self.savings if saving.causes == (cause,)), None)

    def causes(self, place: int | None = None) -> dict[Cause, int]:
        """Return the nanoseconds under each cause, of all ranks or of one."""
        total = dict.fromkeys(Cause, 0)
        for account in self.accounts:
            for cause, length in account.of_place(place).totals().items():
                total[cause] += length
        return total

    def shares(self, place: int | None = None) -> dict[Cause, float]:
        """Return the share of each cause in the batch: of its middle steps, as the headline is."""
        total = dict.fromkeys(Cause, 0.0)
        for row in self.middle:
            account = self.accounts[row].of_place(place)
            length = max(int(account.length_ns.sum()), 1)
            for cause, spent in account.totals().items():
                total[cause] += spent / length / len(self.middle)
        return total
