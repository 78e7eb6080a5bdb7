"""Batches of a stream in → every nanosecond of every rank under one cause, and what each costs.

Inside a pass a rank computes, or its host has not launched the next kernel. Between two passes it
waits, for what `waits.py` tells.

A pass that is waited for is cut by how far it is: as long as this rank's own last batch took it is
the number in flight that is short, or the stage is longer than the others; beyond that the batch
is larger; beyond what its stage mostly takes, it is jitter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from debubble.ledger.account import (
    CAUSE_OF_ROOT,
    Account,
    Accounts,
    Culprit,
    Cut,
    Piece,
    Roots,
    account_rank,
    cut_steps,
    find_culprits,
)
from debubble.ledger.causes import NUMBER_OF, Cause, RootKind
from debubble.ledger.ledger import MOST_OFF, replay_misses
from debubble.ledger.savings import Saving
from debubble.links.hop_times import Hop
from debubble.serving.batches import UNSEEN, Batches
from debubble.serving.queue import Queue, measure_queue, whole, with_slots, without_broadcasts
from debubble.serving.waits import Waits
from debubble.timeline.figures import turn_of
from debubble.timeline.model import F64, Intervals, PassKind, join_columns, split
from debubble.timeline.turns import Phase
from debubble.units import NS_PER_S

# More batches in flight that buy less than this are not what is missing: one fewer than stages, of
# up to eight equal ones, costs more; and one setting differs by 6 % from start to start.
_GAINS = 0.1
_HINT = (
    "capture all ranks at once, without a pause; the shares of causes are measured and remain valid"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamAccount(Accounts):
    """Where the time of a stream went, over the span that all its ranks were captured."""

    batches: Batches
    queue: Queue | None
    whose: Mapping[Cause, int]
    """The stage that a cause mostly is of, of some."""
    replay_error: float | None
    turn_ns: float | None
    """What a batch takes in turn, measured."""
    slow: tuple[int, ...] = ()
    """Stages whose incoming hop carries less than its peers."""

    @property
    def tokens_out_per_s(self) -> float | None:
        """What the captured batches answered, profiled; None where some hold prompts."""
        rows = self.batches.rows[self.batches.phase == Phase.DECODE]
        if len(rows) < len(self.batches) or not self.turn_ns or not (rows > 0).any():
            return None
        return float(rows[rows > 0].mean()) / self.turn_ns * NS_PER_S


def account_stream(batches: Batches, slow: Sequence[Hop] = ()) -> StreamAccount:
    """Say where the time went; `slow` are the hops that carry less than their peers."""
    queue = measure_queue(batches)
    turn = None
    if queue is not None:
        rows = np.isin(batches.start[:, 0], queue.entered)
        turn = turn_of(batches.end[rows, -1], queue.in_flight or 1)
    names = [rank.rank for rank in batches.ranks]
    slow_stages = tuple(names.index(hop[1]) for hop in slow if hop[1] in names[1:])
    accounts = (_account(batches, _Cutter(batches, queue, slow_stages)),)
    culprits = find_culprits(accounts, batches.ranks)
    error = queue.turn_ns() / turn - 1 if queue is not None and turn else None
    lands = error is not None and abs(error) <= MOST_OFF
    savings: tuple[Saving, ...] = ()
    whose: dict[Cause, int] = {}
    if queue is not None and turn and lands:
        mostly = batches.usual_ns()[np.isin(batches.start[:, 0], queue.entered)]
        savings = _savings(queue, turn, _put_right(batches, queue, mostly, slow_stages))
        whose = _whose(queue, mostly, culprits)
    return StreamAccount(
        batches=batches,
        queue=queue,
        ranks=batches.ranks,
        accounts=accounts,
        middle=(0,),
        culprits=culprits,
        savings=savings,
        whose=whose,
        replay_error=error,
        turn_ns=turn,
        slow=slow_stages,
        gaps=() if error is None or lands else (replay_misses(error, _HINT),),
    )


def _account(batches: Batches, cutter: _Cutter) -> Account:
    """Cut ranks and span into intervals with one cause each."""
    names = np.array([rank.rank for rank in batches.ranks])
    batch, stage = np.divmod(np.arange(len(batches) * batches.stages), batches.stages)
    roots = Roots(
        ranks=tuple(names.tolist()),
        begin_ns=0,
        step=None,
        passes=np.stack((names[stage], stage, np.full(len(stage), PassKind.F), batch)),
        messages=np.stack((np.roll(names, 1), names)),
    )
    ranks = []
    for place, rank in enumerate(batches.ranks):
        parts = np.array([*split(rank.occupied, *batches.span)], dtype=np.int64).reshape(-1, 3)
        computes = parts[:, 2] > 0
        begin, end, _ = parts[computes].T
        compute = np.full(len(begin), NUMBER_OF[Cause.COMPUTE])
        waits = (
            (cut, piece)
            for wait in parts[~computes, :2].tolist()
            for cut, piece in cutter.causes(place, *wait)
            if cut[0] < cut[1]
        )
        ranks.append(account_rank(roots, place, (begin, end, compute), waits))
    return join_columns(ranks, by="place")


class _Cutter:
    """Cuts what ranks waited for into causes."""

    def __init__(self, batches: Batches, queue: Queue | None, slow: Sequence[int]) -> None:
        """`slow` are stages whose incoming hop carries less than its peers."""
        self._b, self._waits, self._slow = batches, Waits(batches, queue), slow
        # Where a broadcast of tokens holds the next batch up, no stage sets the pace.
        self._longest = None if batches.held_back else _bottleneck(queue)
        self._typical = batches.usual_ns()
        self._equal = self._typical.mean(axis=1)

    def causes(self, place: int, begin: int, end: int) -> Iterator[tuple[Cut, Piece]]:
        """Cut a stretch in which a rank computes nothing, by cause."""
        late: Intervals = self._b.ranks[place].unissued
        at = begin
        while at < end:
            current, following, until = self._waits.at(place, at)
            until = min(max(until, at + 1), end)
            unissued = True
            if current < 0:
                pieces = self._waits.follow(place, following, at, until)
            elif late.inside(at, until) > 0:
                # What was launched late also starts late: the launch itself takes its time.
                pieces = iter((Piece(at, until, RootKind.HOST, place),))
            else:
                unissued = False
                pieces = self._waits.held(place, at, until)
            for piece in (part for found in pieces for part in self._handed_over(found)):
                if piece.kind is RootKind.PASS:
                    yield from self._cut_pass(piece, following)
                    continue
                cause, known = CAUSE_OF_ROOT.get(piece.kind, Cause.TRANSFER), piece
                if piece.kind is RootKind.HOST and not unissued and not piece.queued:
                    cause = Cause.UNEXPLAINED
                    known = piece._replace(kind=RootKind.NOTHING, row=-1)
                elif piece.kind is RootKind.MESSAGE and piece.row in self._slow:
                    cause = Cause.SLOW_LINK
                yield (piece.begin, piece.end, cause), known
            at = until

    def _handed_over(self, piece: Piece) -> Iterator[Piece]:
        """Follow a host that stands in a send to the next host until that one takes it."""
        if piece.kind is not RootKind.HOST or piece.row + 1 >= self._b.stages:
            yield piece
            return
        over = self._b.ranks[piece.row].handing_over
        for begin, end, stands in split(over, piece.begin, piece.end):
            cut = piece._replace(begin=begin, end=end)
            if stands:
                yield from self._handed_over(cut._replace(row=piece.row + 1))
            else:
                yield cut

    def _cut_pass(self, piece: Piece, following: int) -> Iterator[tuple[Cut, Piece]]:
        """Cut a pass that is waited for by how far it is."""
        batch, stage = divmod(piece.row, self._b.stages)
        before = following - 1 if following > 0 else batch
        equal, typical = self._equal[batch], self._typical[batch, stage]
        began = int(self._b.start[batch, stage])
        into = 0 if began == UNSEEN else piece.begin - began
        of_share, held_up = piece, Cause.IN_FLIGHT
        if self._b.starved:
            held_up = Cause.NO_WORK
        elif piece.queued or self._b.held_back:
            held_up = Cause.TOKEN_BROADCAST
        elif self._longest is not None:
            held_up = Cause.IMBALANCE
            of_share = piece._replace(row=piece.row - stage + self._longest)
        share = round(min(self._equal[before], equal)) - into
        parts = (
            (share, held_up),
            (round(equal) - into, Cause.UNEVEN),
            (round(max(equal, typical)) - into, Cause.IMBALANCE),
        )
        for cut in cut_steps(piece.begin, piece.end, parts, Cause.JITTER):
            yield cut, of_share if cut[0] < piece.begin + share else piece


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


def _savings(queue: Queue, turn: float, put_right: Mapping[Cause, Queue]) -> tuple[Saving, ...]:
    """Replay the batches with each cause put right; the profiler itself makes hosts slow."""
    now, savings = queue.turn_ns(), []
    for cause, other in put_right.items():
        saved = now - other.turn_ns()
        if other.in_flight is not None and other.in_flight != queue.in_flight:
            saved = queue.turn_ns(other.in_flight) - other.turn_ns()
        left = round(turn) - round(saved)
        savings.append(Saving(causes=(str(cause),), batch_latency_ns=left, saved_ns=round(saved)))
    return tuple(sorted(savings, key=lambda one: (one.cause == Cause.HOST, -one.saved_ns)))


def _whose(queue: Queue, mostly: F64, culprits: Sequence[Culprit]) -> dict[Cause, int]:
    """Return the stage that a cause mostly is of."""
    longest = {
        Cause.IMBALANCE: mostly.mean(axis=0),
        Cause.JITTER: (queue.length - mostly).clip(0).sum(axis=0),
        Cause.HOST: np.median(queue.length - queue.busy + queue.turn, axis=0),
    }
    whose = {cause: int(lasts.argmax()) for cause, lasts in longest.items()}
    for culprit in reversed(culprits):
        if culprit.cause is Cause.TOKEN_BROADCAST and culprit.stage is not None:
            whose[culprit.cause] = culprit.stage
    return whose


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
    without = {
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
        without[Cause.NO_WORK] = filled
    elif slots is not None and held:
        without[Cause.TOKEN_BROADCAST] = released
    elif slots is not None and slots < batches.stages:
        # Beyond one for every stage, what more of them do is another question: they are smaller.
        without[Cause.IN_FLIGHT] = with_slots(queue, batches.stages)
    if slow:
        without[Cause.SLOW_LINK] = replace(queue, wire=repaired)
    return without
