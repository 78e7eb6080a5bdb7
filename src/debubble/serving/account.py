"""Batches of a stream in → every nanosecond of every rank under one cause, and what each costs.

Inside a pass a rank computes, or its host has not launched the next kernel. Between two passes it
waits, for what `waits.py` tells.

A pass that is waited for is cut by how far it is: as long as this rank's own last batch took it is
the number in flight that is short, or the stage is longer than the others; beyond that the batch
is larger; beyond what its stage mostly takes, it is jitter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from debubble.ledger.causes import CAUSES, Cause
from debubble.ledger.ledger import MOST_OFF, Culprit, Example, Wait
from debubble.links.hop_times import Hop
from debubble.serving.batches import UNSEEN, Batches
from debubble.serving.queue import Queue, measure_queue, whole, with_slots, without_broadcasts
from debubble.serving.waits import Piece, Waits
from debubble.timeline.bubble import turn_of
from debubble.timeline.model import Intervals, split
from debubble.timeline.turns import Phase
from debubble.units import NS_PER_S

# A stage that waits for others less than this of the time is what others wait for.
_SATURATED = 0.1
# More batches in flight that buy less than this are not what is missing: one fewer than stages, of
# up to eight equal ones, costs more; and one setting differs by 6 % from start to start.
_GAINS = 0.1
_EXAMPLES = 3
_OF_HOSTS = {Cause.HOST, Cause.WAY_BACK, Cause.NO_WORK}


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
    def tokens_out_per_s(self) -> float | None:
        """What the captured batches answered, profiled; None where some hold prompts."""
        rows = self.batches.rows[self.batches.phase == Phase.DECODE]
        if len(rows) < len(self.batches) or not self.turn_ns or not (rows > 0).any():
            return None
        return float(rows[rows > 0].mean()) / self.turn_ns * NS_PER_S

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
    waits = Waits(batches)
    queue = measure_queue(batches)
    turn = _measured_turn(batches, queue)
    # Where a broadcast of tokens holds the next batch up, no stage sets the pace.
    longest = None if batches.held_back else _bottleneck(waits, queue)
    cutter = _Cutter(batches, waits, longest)
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
            for piece, found in cutter.causes(place, begin, end):
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


class _Cutter:
    """Cuts what ranks waited for into causes."""

    def __init__(self, batches: Batches, waits: Waits, longest: int | None) -> None:
        """Take the stage that sets the pace; None where more batches in flight would quicken it."""
        self._b, self._waits, self._longest = batches, waits, longest
        self._typical, self._equal = _typical(batches)

    def causes(self, place: int, begin: int, end: int) -> Iterator[tuple[Piece, Cause]]:
        """Cut a stretch in which a rank computes nothing, by cause."""
        late: Intervals = self._b.ranks[place].unissued
        at = begin
        while at < end:
            current, following, until = self._waits.at(place, at)
            until = min(max(until, at + 1), end)
            if current >= 0:
                # What was launched late also starts late: the launch itself takes its time.
                unissued = late.inside(at, until) > 0
                pieces = iter((Piece(at, until, "host", place, current),))
                if not unissued:
                    pieces = self._waits.held(place, current, at, until)
            else:
                unissued = True
                pieces = self._waits.follow(place, following, at, until)
            for piece in (part for found in pieces for part in self._handed_over(found)):
                if piece.what == "pass":
                    yield from self._cut_pass(piece, following)
                elif piece.what == "host" and not unissued and not piece.behind:
                    yield piece._replace(what=""), Cause.UNEXPLAINED
                else:
                    yield piece, _OF_WHAT[piece.what]
            at = until

    def _handed_over(self, piece: Piece) -> Iterator[Piece]:
        """Follow a host that stands in a send to the next host until that one takes it."""
        if piece.what != "host" or piece.stage + 1 >= self._b.stages:
            yield piece
            return
        over = self._b.ranks[piece.stage].handing_over
        for begin, end, stands in split(over, piece.begin, piece.end):
            cut = piece._replace(begin=begin, end=end)
            if stands:
                yield from self._handed_over(cut._replace(stage=piece.stage + 1))
            else:
                yield cut

    def _cut_pass(self, piece: Piece, following: int) -> Iterator[tuple[Piece, Cause]]:
        """Cut a pass that is waited for by how far it is."""
        longest = self._longest
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


def _bottleneck(waits: Waits, queue: Queue | None) -> int | None:
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
