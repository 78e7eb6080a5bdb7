"""Batches of a stream in → every nanosecond of every rank under one cause, and what each costs.

Inside a pass a rank computes, or its host has not launched the next kernel. Between two passes it
waits, for what `waits.py` tells.

A pass that is waited for is cut by how far it is: as long as this rank's own last batch took it is
the number in flight that is short, or the stage is longer than the others; beyond that the batch
is larger; beyond what its stage mostly takes, it is jitter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from debubble.errors import Code, Gap
from debubble.ledger.causes import CAUSES, Cause
from debubble.ledger.ledger import MOST_OFF, Culprit, Example, Wait, cut_steps
from debubble.links.hop_times import Hop
from debubble.serving.batches import UNSEEN, Batches
from debubble.serving.queue import Queue, measure_queue, whole, with_slots, without_broadcasts
from debubble.serving.waits import Piece, Waits
from debubble.timeline.figures import turn_of
from debubble.timeline.model import F64, Intervals, RankTimeline, split
from debubble.timeline.turns import Phase
from debubble.units import NS_PER_S, show_percent

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

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """What it had to do without."""
        if self.replay_error is None or abs(self.replay_error) <= MOST_OFF:
            return ()
        return (
            Gap(
                code=Code.REPLAY_MISSES,
                message=f"replay error {show_percent(abs(self.replay_error))} (limit "
                f"{show_percent(MOST_OFF)}): no savings are predicted",
                hint="capture all ranks at once, without a pause; the shares of causes are measured"
                " and remain valid",
            ),
        )

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


class _Cut(NamedTuple):
    """A stretch in which a rank computed nothing."""

    place: int
    piece: Piece
    cause: Cause


def account_stream(batches: Batches, slow: Sequence[Hop] = ()) -> StreamAccount:
    """Say where the time went; `slow` are the hops that carry less than their peers."""
    queue = measure_queue(batches)
    turn = None
    if queue is not None:
        rows = np.isin(batches.start[:, 0], queue.entered)
        turn = turn_of(batches.end[rows, -1], queue.in_flight or 1)
    names = [rank.rank for rank in batches.ranks]
    slow_stages = tuple(names.index(hop[1]) for hop in slow if hop[1] in names[1:])
    cutter = _Cutter(batches, queue, slow_stages)
    spent: defaultdict[tuple[int, Cause], int] = defaultdict(int)
    cuts: list[_Cut] = []
    for place, rank in enumerate(batches.ranks):
        for begin, end, works in split(rank.occupied, *batches.span):
            if works:
                spent[place, Cause.COMPUTE] += end - begin
            else:
                cuts += [_Cut(place, *cut) for cut in cutter.causes(place, begin, end)]
    for place, piece, cause in cuts:
        spent[place, cause] += piece.end - piece.begin
    savings: tuple[StreamSaving, ...] = ()
    culprits = _find_culprits(cuts, batches.ranks)
    error = queue.turn_ns() / turn - 1 if queue is not None and turn else None
    if queue is not None and turn and error is not None and abs(error) <= MOST_OFF:
        savings = _savings(batches, queue, turn, slow_stages, culprits)
    return StreamAccount(
        batches=batches,
        queue=queue,
        spent=dict(spent),
        culprits=culprits,
        savings=savings,
        replay_error=error,
        turn_ns=turn,
        slow=slow_stages,
        waits=_list_waits(cuts, names),
    )


def _find_culprits(cuts: Sequence[_Cut], ranks: Sequence[RankTimeline]) -> tuple[Culprit, ...]:
    """List whom ranks waited for, the longest first, each with its longest waits."""
    names = [rank.rank for rank in ranks]
    blamed: defaultdict[tuple[Cause, int, Hop | None], list[Example]] = defaultdict(list)
    waited: defaultdict[tuple[Cause, int, Hop | None], int] = defaultdict(int)
    for place, piece, cause in cuts:
        length = piece.end - piece.begin
        if not piece.what or not length:
            continue
        hop = (names[piece.stage - 1], names[piece.stage]) if piece.what == "wire" else None
        key = (cause, piece.stage, hop)
        waited[key] += length
        blamed[key].append(
            Example(
                file=ranks[place].file,
                ts_us=ranks[place].stamp_us(piece.begin),
                dur_us=length / 1000,
                rank=names[place],
                waits_for=_name(piece, names),
            )
        )
    culprits = []
    for (cause, stage, hop), examples in blamed.items():
        of_pass = hop is None and cause not in _OF_HOSTS
        longest = sorted(examples, key=lambda example: -example.dur_us)
        culprits.append(
            Culprit(
                cause=cause,
                rank=names[stage],
                stage=stage if of_pass else None,
                kind="F" if of_pass else None,
                hop=hop,
                wait_ns=waited[cause, stage, hop],
                examples=tuple(longest[:_EXAMPLES]),
            )
        )
    return tuple(sorted(culprits, key=lambda culprit: -culprit.wait_ns))


def _list_waits(cuts: Sequence[_Cut], names: Sequence[int]) -> tuple[Wait, ...]:
    """Return every wait; stretches that touch and have one cause and one culprit are one."""
    waits: list[Wait] = []
    for place, piece, cause in cuts:
        whom, last = _name(piece, names), waits[-1] if waits else None
        if (
            last is not None
            and (last.rank, last.cause, last.waits_for) == (names[place], cause, whom)
            and last.end_ns == piece.begin
        ):
            waits[-1] = replace(last, end_ns=piece.end)
        elif piece.begin < piece.end:
            waits.append(
                Wait(
                    rank=names[place],
                    step=None,
                    start_ns=piece.begin,
                    end_ns=piece.end,
                    cause=cause,
                    waits_for=whom,
                )
            )
    return tuple(waits)


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

    def __init__(self, batches: Batches, queue: Queue | None, slow: Sequence[int]) -> None:
        """`slow` are stages whose incoming hop carries less than its peers."""
        self._b, self._waits, self._slow = batches, Waits(batches, queue), slow
        # Where a broadcast of tokens holds the next batch up, no stage sets the pace.
        self._longest = None if batches.held_back else _bottleneck(queue)
        self._typical = batches.usual_ns()
        self._equal = self._typical.mean(axis=1)

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
                elif piece.what == "wire" and piece.stage in self._slow:
                    yield piece, Cause.SLOW_LINK
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
        before = following - 1 if following > 0 else piece.batch
        equal, typical = self._equal[piece.batch], self._typical[piece.batch, piece.stage]
        began = int(self._b.start[piece.batch, piece.stage])
        into = 0 if began == UNSEEN else piece.begin - began
        paced, held_up = self._longest is not None, Cause.IN_FLIGHT
        if self._b.starved:
            held_up = Cause.NO_WORK
        elif piece.behind or self._b.held_back:
            held_up = Cause.TOKEN_BROADCAST
        elif paced:
            held_up = Cause.IMBALANCE
        share = round(min(self._equal[before], equal)) - into
        parts = (
            (share, held_up),
            (round(equal) - into, Cause.UNEVEN),
            (round(max(equal, typical)) - into, Cause.IMBALANCE),
        )
        for begin, end, cause in cut_steps(piece.begin, piece.end, parts, Cause.JITTER):
            stage = piece.stage
            if held_up is Cause.IMBALANCE and self._longest is not None:
                stage = self._longest if begin < piece.begin + share else stage
            yield piece._replace(begin=begin, end=end, stage=stage), cause


def _bottleneck(queue: Queue | None) -> int | None:
    """Return the stage that sets the pace; None where more batches in flight would quicken it."""
    if queue is None:
        return None
    if queue.in_flight is not None:
        twice = 2 * queue.in_flight
        if 1 - with_slots(queue, twice).turn_ns(twice) / queue.turn_ns(twice) >= _GAINS:
            return None
    taken = queue.length + queue.turn + queue.wire + queue.begin
    return int(taken.sum(axis=0).argmax())


def _savings(
    batches: Batches, queue: Queue, turn: float, slow: Sequence[int], culprits: Sequence[Culprit]
) -> tuple[StreamSaving, ...]:
    """Replay the batches with each cause put right."""
    mostly = batches.usual_ns()[np.isin(batches.start[:, 0], queue.entered)]
    now = queue.turn_ns()
    longest = {
        Cause.IMBALANCE: mostly.mean(axis=0),
        Cause.JITTER: (queue.length - mostly).clip(0).sum(axis=0),
        Cause.HOST: np.median(queue.length - queue.busy + queue.turn, axis=0),
    }
    whose = {cause: int(lasts.argmax()) for cause, lasts in longest.items()}
    for culprit in reversed(culprits):
        if culprit.cause is Cause.TOKEN_BROADCAST and culprit.stage is not None:
            whose[culprit.cause] = culprit.stage
    names, savings = [rank.rank for rank in batches.ranks], []
    for cause, other in _put_right(batches, queue, mostly, slow).items():
        saved = now - other.turn_ns()
        if other.in_flight is not None and other.in_flight != queue.in_flight:
            saved = queue.turn_ns(other.in_flight) - other.turn_ns()
        is_slow = cause is Cause.SLOW_LINK
        savings.append(
            StreamSaving(
                cause=cause,
                turn_ns=turn - saved,
                saved_ns=saved,
                culprit=whose.get(cause),
                hop=(names[slow[0] - 1], names[slow[0]]) if is_slow else None,
                inflated=cause is Cause.HOST,
            )
        )
    return tuple(sorted(savings, key=lambda saving: (saving.inflated, -saving.saved_ns)))


def _put_right(
    batches: Batches, queue: Queue, mostly: F64, slow: Sequence[int]
) -> dict[Cause, Queue]:
    """Return the queue without each cause."""
    held, released = batches.held_back, without_broadcasts(batches, queue)
    repaired, nothing = queue.wire.copy(), np.zeros_like(queue.turn)
    well = [stage for stage in range(1, batches.stages) if stage not in slow]
    for stage in slow if well else ():
        # Each message as its like on the other hops: small ones may be well on a slow hop.
        usual = whole(np.median(queue.wire[:, well], axis=1))
        repaired[:, stage] = np.minimum(queue.wire[:, stage], usual)
    equal = mostly.mean(axis=1, keepdims=True) / np.maximum(mostly, 1)
    # What a stage takes, whichever phase.
    alike = mostly.mean(axis=0, keepdims=True) / np.maximum(mostly, 1)
    found = {
        Cause.IMBALANCE: replace(queue, length=whole(queue.length * equal)),
        Cause.UNEVEN: replace(queue, length=whole(queue.length * alike)),
        Cause.JITTER: replace(queue, length=whole(np.minimum(queue.length, mostly))),
        Cause.TRANSFER: replace(queue, wire=queue.wire - repaired),
        Cause.WAY_BACK: replace(queue, back=np.zeros_like(queue.back)),
        Cause.HOST: replace(
            queue,
            length=queue.busy,
            turn=nothing,
            begin=np.maximum(queue.begin - released.begin, 0) if held else nothing,
            lag=np.maximum(queue.lag - released.lag, 0) if held else nothing,
        ),
    }
    slots = queue.in_flight
    if slots is not None and batches.starved:
        # With so few requests the next batch of each waits for its own token, broadcast or not.
        filled = with_slots(released if held else queue, max(batches.stages, slots))
        found[Cause.NO_WORK] = filled
    elif slots is not None and held:
        found[Cause.TOKEN_BROADCAST] = released
    elif slots is not None and slots < batches.stages:
        # Beyond one for every stage, what more of them do is another question: they are smaller.
        found[Cause.IN_FLIGHT] = with_slots(queue, batches.stages)
    if slow:
        found[Cause.SLOW_LINK] = replace(queue, wire=repaired)
    return found
