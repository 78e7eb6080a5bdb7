"""Batches of a stream in → every nanosecond of every rank under one cause, and what each costs.

Inside a pass a rank computes, or its host has not launched the next kernel. Between two passes a
rank waits; the wait is followed to what was not waiting itself at that instant:

    no message sent yet     the stage before it: the pass it is in, or what that one waits for
    sent, not asked for     this rank's host
    asked for, not there    the wire
    first stage             the batch that holds the slot, then the way back
    held in a collective    its last member, and on from there

Kernels that stand behind a broadcast of sampled tokens in their device's queue begin when it ends:
then the wait is for whoever was late to that.

A pass that is waited for is cut by how far it is: as long as this rank's own last batch took it is
the number in flight that is short, or the stage is longer than the others; beyond that the batch
is larger; beyond what its stage mostly takes, it is jitter.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from debubble.ledger.causes import CAUSES, Cause
from debubble.ledger.ledger import MOST_OFF, Wait
from debubble.ledger.model import Culprit, Example
from debubble.links.hop_times import Hop
from debubble.serving.batches import UNSEEN, Batches
from debubble.serving.queue import Queue, measure_queue, whole, with_slots, without_broadcasts
from debubble.timeline.bubble import turn_of
from debubble.timeline.model import AT_ONCE_NS, Intervals, split

# A stage that waits for others less than this of the time is what others wait for.
_SATURATED = 0.1
# More batches in flight that buy less than this are not what is missing: one fewer than stages, of
# up to eight equal ones, costs more; and one setting differs by 6 % from start to start.
_GAINS = 0.1
# A first stage that does nothing for so many usual ways back has nothing to do.
_IDLE_TIMES = 4
_EXAMPLES = 3
_OF_HOSTS = {Cause.HOST, Cause.WAY_BACK, Cause.NO_WORK}
# Generators within generators: Python allows a thousand.
_DEEPEST = 200


class Piece(NamedTuple):
    """A stretch of a wait that comes down to one thing."""

    begin: int
    end: int
    what: str
    """`pass`, `host`, `wire`, `back`, `idle`, or empty where nobody knows."""
    stage: int
    batch: int
    behind: bool = False
    """What waits stands behind a broadcast of sampled tokens."""


class _Start(NamedTuple):
    """Something that a device began: a pass, a send, a receive."""

    stage: int
    batch: int
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSaving:
    """What the time a batch takes in turn would be with one thing put right."""

    cause: Cause
    turn_ns: float
    saved_ns: float
    culprit: int | None = None
    """The stage that it mostly is of."""
    hop: Hop | None = None
    inflated: bool = False
    """The profiler itself makes hosts slow, so that the recording cannot price it."""

    @property
    def saved_fraction(self) -> float:
        """Of what a batch takes now."""
        return self.saved_ns / max(self.turn_ns + self.saved_ns, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamAccount:
    """Where the time of a stream went, over the span that all its ranks were captured."""

    batches: Batches
    queue: Queue | None
    spent: Mapping[tuple[int, Cause], int]
    """Nanoseconds, by the place of the rank and the cause: a rank's sum is the span, exactly."""
    culprits: tuple[Culprit, ...]
    savings: tuple[StreamSaving, ...]
    """The largest first, those that the recording cannot price last."""
    replay_error: float | None
    turn_ns: float | None
    """What a batch takes in turn, measured."""
    slow: tuple[int, ...] = ()
    """Stages whose incoming hop carries less than its peers."""
    waits: tuple[Wait, ...] = ()
    """Every stretch that is no compute, with its cause, in the order of ranks and time."""

    @property
    def length_ns(self) -> int:
        """The span."""
        return self.batches.span[1] - self.batches.span[0]

    def causes(self, place: int | None = None) -> dict[Cause, int]:
        """Return the nanoseconds under each cause, of all ranks or of one."""
        total = dict.fromkeys(CAUSES, 0)
        for (rank, cause), length in self.spent.items():
            if place in {None, rank}:
                total[cause] += length
        return total

    def shares(self, place: int | None = None) -> dict[Cause, float]:
        """Return them as shares."""
        whole = self.length_ns * (len(self.batches.ranks) if place is None else 1)
        return {cause: length / max(whole, 1) for cause, length in self.causes(place).items()}


def account_stream(batches: Batches, slow: Sequence[Hop] = ()) -> StreamAccount:
    """Say where the time went; `slow` are the hops that carry less than their peers."""
    waits = _Waits(batches)
    queue = measure_queue(batches)
    turn = _measured_turn(batches, queue)
    # Where a broadcast of tokens holds the next batch up, no stage sets the pace.
    longest = None if batches.held_back else _bottleneck(waits, queue)
    spent: defaultdict[tuple[int, Cause], int] = defaultdict(int)
    blamed: defaultdict[tuple[Cause, int, Hop | None], list[Example]] = defaultdict(list)
    waited: defaultdict[tuple[Cause, int, Hop | None], int] = defaultdict(int)
    names = [rank.rank for rank in batches.ranks]
    listed: list[Wait] = []
    for place, rank in enumerate(batches.ranks):
        for begin, end, works in split(rank.occupied, *batches.span):
            if works:
                spent[place, Cause.COMPUTE] += end - begin
                continue
            for piece, found in waits.causes(place, begin, end, longest):
                is_slow = found is Cause.TRANSFER and _hop(names, piece) in slow
                cause = Cause.SLOW_LINK if is_slow else found
                length = piece.end - piece.begin
                spent[place, cause] += length
                _add_wait(listed, rank.rank, piece, cause, _name(piece, names))
                if piece.what and length:
                    hop = _hop(names, piece) if piece.what == "wire" else None
                    key = (cause, piece.stage, hop)
                    waited[key] += length
                    blamed[key].append(
                        Example(
                            file=rank.file,
                            ts_us=rank.stamp_us(piece.begin),
                            dur_us=length / 1000,
                            rank=rank.rank,
                            waits_for=_name(piece, names),
                        )
                    )
    culprits = [
        Culprit(
            cause=cause,
            rank=names[stage],
            stage=None if hop is not None or cause in _OF_HOSTS else stage,
            kind=None if hop is not None or cause in _OF_HOSTS else "F",
            hop=hop,
            wait_ns=waited[cause, stage, hop],
            examples=tuple(sorted(blamed[cause, stage, hop], key=lambda one: -one.dur_us))[
                :_EXAMPLES
            ],
        )
        for cause, stage, hop in waited
    ]
    error = None
    savings: tuple[StreamSaving, ...] = ()
    if queue is not None and turn:
        error = queue.turn_ns() / turn - 1
        if abs(error) <= MOST_OFF:
            savings = _savings(batches, queue, turn, names, slow)
    return StreamAccount(
        batches=batches,
        queue=queue,
        spent=dict(spent),
        culprits=tuple(sorted(culprits, key=lambda one: -one.wait_ns)),
        savings=savings,
        replay_error=error,
        turn_ns=turn,
        slow=tuple(names.index(hop[1]) for hop in slow if hop[1] in names[1:]),
        waits=tuple(listed),
    )


def _add_wait(waits: list[Wait], rank: int, piece: Piece, cause: Cause, whom: str) -> None:
    """Add a stretch; one that touches the last, of one cause and for one thing, makes it longer."""
    last = waits[-1] if waits else None
    if (
        last is not None
        and (last.rank, last.cause, last.waits_for) == (rank, cause, whom)
        and last.end_ns == piece.begin
    ):
        waits[-1] = replace(last, end_ns=piece.end)
    elif piece.begin < piece.end:
        waits.append(
            Wait(
                rank=rank,
                step=None,
                start_ns=piece.begin,
                end_ns=piece.end,
                cause=cause,
                waits_for=whom,
            )
        )


def _hop(names: Sequence[int], piece: Piece) -> Hop:
    return names[piece.stage - 1], names[piece.stage]


def _name(piece: Piece, names: Sequence[int]) -> str:
    if piece.what == "pass":
        return f"{piece.stage}F{piece.batch}"
    if piece.what == "wire":
        return f"{names[piece.stage - 1]}→{names[piece.stage]}"
    return f"host of rank {names[piece.stage]}" if piece.what == "host" else ""


_OF_WHAT = {
    "host": Cause.HOST,
    "wire": Cause.TRANSFER,
    "back": Cause.WAY_BACK,
    "idle": Cause.NO_WORK,
    "": Cause.UNEXPLAINED,
}


class _Waits:
    """Follows what a rank waits for at an instant."""

    def __init__(self, batches: Batches) -> None:
        self._b = batches
        self._passes: list[tuple[list[int], list[int], list[int]]] = []
        """Of each stage: when its passes start and end, and whose they are."""
        for stage in range(batches.stages):
            rows = np.flatnonzero(batches.start[:, stage] != UNSEEN)
            start, end = batches.start[rows, stage], batches.end[rows, stage]
            self._passes.append((start.tolist(), end.tolist(), rows.tolist()))
        self._place = {rank.rank: place for place, rank in enumerate(batches.ranks)}
        self._meetings = [
            (
                rank.meetings.start_ns.tolist(),
                rank.meetings.end_ns.tolist(),
                rank.meetings.arrived_ns.tolist(),
                [self._place.get(late, place) for late in rank.meetings.late.tolist()],
            )
            for place, rank in enumerate(batches.ranks)
        ]
        """Of each stage: when its collectives with others start and end, when the last member came,
        and of which stage that is."""
        self._usual_back = self._measure_back()
        self._typical, self._equal = _typical(batches)

    @property
    def stages(self) -> int:
        """How many there are."""
        return self._b.stages

    def _measure_back(self) -> int:
        slots, batches = self._b.in_flight, self._b
        if not slots or slots >= len(batches):
            return 0
        since = self._b.entered[slots:] - np.maximum(
            batches.end[:-slots, -1], batches.end[slots - 1 : -1, 0]
        )
        known = (batches.start[slots:, 0] != UNSEEN) & (batches.end[:-slots, -1] != UNSEEN)
        return int(np.median(since[known])) if known.any() else 0

    def at(self, stage: int, moment: int) -> tuple[int, int, int]:
        """Return the pass under way, -1 for none; the next one, -1; and when that changes."""
        starts, ends, rows = self._passes[stage]
        number = bisect_right(starts, moment)
        following = rows[number] if number < len(rows) else -1
        if number and ends[number - 1] > moment:
            return rows[number - 1], following, ends[number - 1]
        return -1, following, starts[number] if number < len(rows) else self._b.span[1]

    def own_share(self, stage: int) -> float:
        """Return how much of the span a stage was with a batch, its host's turns and wires too."""
        begin, end = self._b.span
        waits = 0
        at = begin
        while at < end:
            current, following, until = self.at(stage, at)
            until = min(until, end)
            if current < 0:
                for piece in self.follow(stage, following, at, until):
                    waits += (piece.end - piece.begin) * (
                        piece.stage != stage or piece.what in {"", "idle", "back"}
                    )
            at = max(until, at + 1)
        return 1 - waits / max(end - begin, 1)

    def follow(
        self, stage: int, batch: int, begin: int, end: int, depth: int = 0
    ) -> Iterator[Piece]:
        """Yield why a batch has not started on a stage that is in no pass: pieces that cover it."""
        if batch < 0 or depth > _DEEPEST:
            yield Piece(begin, end, "", stage, batch)
        elif stage == 0:
            yield from self._not_entered(batch, begin, end, depth)
        else:
            yield from self._not_there(stage, batch, begin, end, depth)

    def _not_entered(self, batch: int, begin: int, end: int, depth: int) -> Iterator[Piece]:
        """Say why a batch has not entered: not sent out yet, its host, what holds its work up."""
        at, batches = begin, self._b
        out, issued = int(batches.turn[batch]), int(batches.issued[batch, 0])
        if out == UNSEEN:  # nothing tells when the scheduler sent it out
            yield from self._not_sent_out(batch, begin, end, depth)
            return
        if at < (until := min(end, out)):
            yield from self._not_sent_out(batch, at, until, depth)
            at = until
        if at < (until := min(end, issued)):
            yield Piece(at, until, "host", 0, batch)
            at = until
        if at < end:
            yield from self._held(_Start(0, batch, end), at, end, depth)

    def _not_sent_out(self, batch: int, begin: int, end: int, depth: int) -> Iterator[Piece]:
        """Say why a scheduler has not sent a batch out: its slot, its answer, nothing to do."""
        batches, at = self._b, begin
        slots = batches.in_flight
        holder = batch - slots if slots else -1
        left = int(batches.end[holder, -1]) if holder >= 0 else UNSEEN
        starts, _, rows = self._passes[-1]
        if holder >= 0 and left == UNSEEN and rows and rows[0] > holder:
            # The last stage was with it when its capture began, until its next pass at most.
            left = starts[0]
            if at < (until := min(end, left)):
                yield Piece(at, until, "pass", batches.stages - 1, holder)
                at = until
        elif left != UNSEEN and at < (until := min(end, left)):
            yield from self._unfinished(batches.stages - 1, holder, at, until, depth)
            at = until
        if at >= end:
            return
        before = int(batches.end[batch - 1, 0]) if batch > 0 else UNSEEN
        free = max(before, left)
        if self._usual_back and end - free > _IDLE_TIMES * self._usual_back:
            usual = min(end, max(at, free + self._usual_back))
            if at < usual:
                yield Piece(at, usual, "back", 0, batch)
            if usual < end:
                yield Piece(usual, end, "idle", 0, batch)
        else:
            yield Piece(at, end, "back" if left > before else "host", 0, batch)

    def _not_there(
        self, stage: int, batch: int, begin: int, end: int, depth: int
    ) -> Iterator[Piece]:
        """Say why a batch's message is not there: not sent, not asked for, on its wire."""
        batches, at = self._b, begin
        sent, posted = int(batches.sent[batch, stage - 1]), int(batches.posted[batch, stage])
        received, there = int(batches.received[batch, stage]), int(batches.arrived[batch, stage])
        started = int(batches.start[batch, stage])
        if UNSEEN in {sent, there}:  # no message is seen, but the pass before it may be
            sent = there = int(batches.end[batch, stage - 1])
            if sent != UNSEEN and at < (until := min(end, sent)):
                yield from self._unfinished(stage - 1, batch, at, until, depth)
                at = until
            if at < end:
                yield Piece(at, end, "" if sent == UNSEEN else "wire", stage, batch)
            return
        computed = int(batches.end[batch, stage - 1])
        computed = sent if computed == UNSEEN else min(computed, sent)
        if at < (until := min(end, computed)):
            yield from self._unfinished(stage - 1, batch, at, until, depth)
            at = until
        started = int(batches.start[batch, stage])
        for what, whose, moment in (
            ("host", stage - 1, int(batches.send_issued[batch, stage - 1])),
            ("held", stage - 1, sent),
            ("host", stage, posted),
            ("held", stage, received),
            ("wire", stage, there),
            ("host", stage, int(batches.issued[batch, stage])),
            ("held", stage, max(started, end)),
        ):
            if at < (until := min(end, moment)):
                if what == "held":
                    until_when = min(started, moment)
                    yield from self._held(_Start(whose, batch, until_when), at, until, depth)
                else:
                    yield Piece(at, until, what, whose, batch)
                at = until

    def _held(self, waiting: _Start, begin: int, end: int, depth: int) -> Iterator[Piece]:
        """Say what held something back that had all it needed from `begin` on.

        A broadcast that ends when it starts did: the wait is for its last member. Else it is the
        launch.
        """
        stage, batch, until = waiting
        starts, ends, arrivals, late = self._meetings[stage]
        row = bisect_right(ends, until) - 1
        if row < 0 or until - ends[row] > AT_ONCE_NS or depth > _DEEPEST:
            yield Piece(begin, end, "host", stage, batch)
            return
        first = row
        while first and starts[first] > begin and starts[first] - ends[first - 1] <= AT_ONCE_NS:
            first -= 1
        at = begin
        for number in range(first, row + 1):
            if at < (stop := min(end, starts[number])):
                yield Piece(at, stop, "host", stage, batch)
                at = stop
            if at < (stop := min(end, arrivals[number])):
                for piece in self._on_its_way(late[number], arrivals[number], at, stop, depth):
                    yield piece._replace(behind=True)
                at = stop
            if at < (stop := min(end, ends[number])):
                yield Piece(at, stop, "back", late[number], batch, behind=True)
                at = stop
        if at < end:
            yield Piece(at, end, "host", stage, batch)

    def _on_its_way(
        self, stage: int, arrived: int, begin: int, end: int, depth: int
    ) -> Iterator[Piece]:
        """Say what the late member of a collective did before it came: its last pass up to then."""
        starts, _, rows = self._passes[stage]
        number = bisect_right(starts, arrived) - 1
        if number < 0:
            yield Piece(begin, end, "", stage, -1)
        else:
            yield from self._unfinished(stage, rows[number], begin, end, depth + 1)

    def _unfinished(
        self, stage: int, batch: int, begin: int, end: int, depth: int
    ) -> Iterator[Piece]:
        """Say what a stage does that has not finished a batch."""
        at = begin
        while at < end:
            current, following, until = self.at(stage, at)
            until = min(max(until, at + 1), end)
            if current >= 0:
                yield Piece(at, until, "pass", stage, current)
            elif following < 0 or following > batch:
                # It has ended, and its message is yet to be sent.
                yield Piece(at, until, "host", stage, batch)
            else:
                yield from self.follow(stage, following, at, until, depth + 1)
            at = until

    def causes(
        self, place: int, begin: int, end: int, longest: int | None
    ) -> Iterator[tuple[Piece, Cause]]:
        """Cut a stretch in which a rank computes nothing, by cause; `longest` sets the pace."""
        late: Intervals = self._b.ranks[place].unissued
        at = begin
        while at < end:
            current, following, until = self.at(place, at)
            until = min(max(until, at + 1), end)
            if current >= 0:
                # What was launched late also starts late: the launch itself takes its time.
                unissued = late.inside(at, until) > 0
                pieces = iter((Piece(at, until, "host", place, current),))
                if not unissued:
                    pieces = self._held(_Start(place, current, until), at, until, 0)
            else:
                unissued = True
                pieces = self.follow(place, following, at, until)
            for piece in (part for found in pieces for part in self._handed_over(found)):
                if piece.what == "pass":
                    yield from self._cut_pass(piece, following, longest)
                elif piece.what == "host" and not unissued and not piece.behind:
                    yield piece._replace(what=""), Cause.UNEXPLAINED
                else:
                    yield piece, _OF_WHAT[piece.what]
            at = until

    def _handed_over(self, piece: Piece) -> Iterator[Piece]:
        """Follow a host that stands in a send to the next host until that one takes it."""
        if piece.what != "host" or piece.stage + 1 >= self.stages:
            yield piece
            return
        over = self._b.ranks[piece.stage].handing_over
        for begin, end, stands in split(over, piece.begin, piece.end):
            cut = piece._replace(begin=begin, end=end)
            if stands:
                yield from self._handed_over(cut._replace(stage=piece.stage + 1))
            else:
                yield cut

    def _cut_pass(
        self, piece: Piece, following: int, longest: int | None
    ) -> Iterator[tuple[Piece, Cause]]:
        """Cut a pass that is waited for by how far it is."""
        phase = int(self._b.phase[piece.batch])
        before = int(self._b.phase[following - 1]) if following > 0 else phase
        equal, typical = self._equal[phase], self._typical[piece.stage, phase]
        began = int(self._b.start[piece.batch, piece.stage])
        began = piece.begin if began == UNSEEN else began
        held_up = Cause.IN_FLIGHT if longest is None else Cause.IMBALANCE
        if self._b.starved:
            held_up = Cause.NO_WORK
        elif piece.behind or self._b.held_back:
            held_up = Cause.TOKEN_BROADCAST
        cuts = (
            (began + round(min(self._equal[before], equal)), held_up),
            (began + round(equal), Cause.UNEVEN),
            (began + round(max(equal, typical)), Cause.IMBALANCE),
            (piece.end, Cause.JITTER),
        )
        start = piece.begin
        for number, (moment, cause) in enumerate(cuts):
            stop = min(max(moment, start), piece.end)
            if start < stop:
                paced = number == 0 and longest is not None and held_up is Cause.IMBALANCE
                blamed = longest if paced and longest is not None else piece.stage
                yield piece._replace(begin=start, end=stop, stage=blamed), cause
                start = stop


def _bottleneck(waits: _Waits, queue: Queue | None) -> int | None:
    """Return the stage that sets the pace; None where more batches in flight would quicken it."""
    shares = [waits.own_share(stage) for stage in range(waits.stages)]
    busiest = int(np.argmax(shares))
    if queue is None or queue.in_flight is None:
        return busiest if shares[busiest] > 1 - _SATURATED else None
    twice = 2 * queue.in_flight
    gains = 1 - with_slots(queue, twice).turn_ns(twice) / queue.turn_ns(twice)
    return busiest if gains < _GAINS else None


def _typical(batches: Batches) -> tuple[dict[tuple[int, int], float], dict[int, float]]:
    """Return what a pass mostly takes, by stage and phase; and of equal stages, by phase."""
    length = batches.length()
    typical: dict[tuple[int, int], float] = {}
    equal: dict[int, float] = {}
    for phase in np.unique(batches.phase).tolist():
        mine = batches.phase == phase
        for stage in range(batches.stages):
            known = length[mine, stage]
            known = known[known >= 0]
            every = length[:, stage][length[:, stage] >= 0]
            typical[stage, phase] = float(np.median(known if len(known) else every))
        equal[phase] = float(np.mean([typical[stage, phase] for stage in range(batches.stages)]))
    return typical, equal


def _measured_turn(batches: Batches, queue: Queue | None) -> float | None:
    if queue is None:
        return None
    rows = np.flatnonzero(np.isin(batches.start[:, 0], queue.entered))
    return turn_of(batches.end[rows, -1], queue.in_flight or 1)


def _savings(
    batches: Batches, queue: Queue, turn: float, names: Sequence[int], slow: Sequence[Hop]
) -> tuple[StreamSaving, ...]:
    """Replay the batches with each cause put right."""
    phase = batches.phase[np.isin(batches.start[:, 0], queue.entered)]
    median = np.zeros(queue.length.shape)
    for one in np.unique(phase).tolist():
        median[phase == one] = np.median(queue.length[phase == one], axis=0)
    equal = median.mean(axis=1, keepdims=True)
    longest = int(median.mean(axis=0).argmax())
    held, released = batches.held_back, without_broadcasts(batches, queue)
    gaps = queue.length - queue.busy
    slowest_host = int(np.median(gaps + queue.turn, axis=0).argmax())
    alike = median.mean(axis=0, keepdims=True)  # what a stage takes, whichever phase
    repaired = queue.wire.copy()
    stages = [names.index(hop[1]) for hop in slow]
    well = [stage for stage in range(1, batches.stages) if stage not in stages]
    if well:  # each message as its like on the other hops: small ones may be well on a slow hop
        usual = whole(np.median(queue.wire[:, well], axis=1))
        for stage in stages:
            repaired[:, stage] = np.minimum(queue.wire[:, stage], usual)
    too_long = queue.wire - repaired
    remedies: list[tuple[Cause, Callable[[], Queue], int | None, Hop | None]] = [
        (
            Cause.IMBALANCE,
            lambda: replace(queue, length=whole(queue.length * equal / np.maximum(median, 1))),
            longest,
            None,
        ),
        (
            Cause.UNEVEN,
            lambda: replace(queue, length=whole(queue.length * alike / np.maximum(median, 1))),
            None,
            None,
        ),
        (
            Cause.JITTER,
            lambda: replace(queue, length=whole(np.minimum(queue.length, median))),
            int((queue.length - median).clip(0).sum(axis=0).argmax()),
            None,
        ),
        (Cause.TRANSFER, lambda: replace(queue, wire=too_long), None, None),
        (Cause.WAY_BACK, lambda: replace(queue, back=np.zeros_like(queue.back)), None, None),
        (
            Cause.HOST,
            lambda: replace(
                queue,
                length=queue.busy,
                turn=np.zeros_like(queue.turn),
                begin=np.maximum(queue.begin - released.begin, 0)
                if held
                else np.zeros_like(queue.begin),
                lag=np.maximum(queue.lag - released.lag, 0) if held else np.zeros_like(queue.lag),
            ),
            slowest_host,
            None,
        ),
    ]
    slots = queue.in_flight
    if slots is not None and batches.starved:
        # With so few requests the next batch of each waits for its own token, broadcast or not.
        filled = with_slots(released if held else queue, max(batches.stages, slots))
        remedies.append((Cause.NO_WORK, lambda: filled, None, None))
    elif slots is not None and held:
        remedies.append((Cause.TOKEN_BROADCAST, lambda: released, None, None))
    elif slots is not None and slots < batches.stages:
        # Beyond one for every stage, what more of them do is another question: they are smaller.
        for_each = with_slots(queue, batches.stages)
        remedies.append((Cause.IN_FLIGHT, lambda: for_each, None, None))
    if slow:
        remedies.append((Cause.SLOW_LINK, lambda: replace(queue, wire=repaired), None, slow[0]))
    now = queue.turn_ns()
    found = []
    for cause, remedy, culprit, slow_hop in remedies:
        put_right = remedy()
        saved = now - put_right.turn_ns()
        if put_right.in_flight is not None and put_right.in_flight != queue.in_flight:
            saved = queue.turn_ns(put_right.in_flight) - put_right.turn_ns()
        found.append(
            StreamSaving(
                cause=cause,
                turn_ns=turn - saved,
                saved_ns=saved,
                culprit=culprit,
                hop=slow_hop,
                inflated=cause is Cause.HOST,
            )
        )
    return tuple(sorted(found, key=lambda one: (one.inflated, -one.saved_ns)))
