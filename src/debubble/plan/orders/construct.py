"""A pipeline in → orders to start from: greedy ones by several rules, and ones with a rhythm.

Greedy: a rank that is free takes what is there, by a rule, and fills its waits with weight
gradients. That reaches the zero-bubble papers' figures. Where two stages of a rank compete for
memory it does not, for it takes in more than it can finish. There a rhythm does: every microbatch
runs the same pattern, one beat after the one before it, and how long it stays is chosen so that
memory suffices. That is how V-schedules are made, and it reaches their figures.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from debubble.plan.orders.pipeline import NONE, B, F, I, Pipeline, Row, Rows, W
from debubble.timeline.model import F64
from debubble.timeline.schedules import candidate_orders

# What a rank waits for rather than begin a weight gradient, as shares of that.
_WAITS = (0.0, 0.5, 1.0)
# A rhythm's legs and turns may be slower by so many passes.
_LEG_SLACKS, _TURN_SLACKS = range(4), range(6)
# A beat on which passes of one rank fall together costs so much more than a later end.
_COLLISION_COSTS = 4.0
_NEVER = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How a free rank chooses."""

    ahead: tuple[int, ...]
    """How many microbatches each rank may have between F and backward, chunks counted apart."""
    backward_first: bool = True
    deep_first: bool = True
    """Of two stages, the one nearer to the loss."""
    wait: float = 0.5
    """It waits for what comes within this share of a weight gradient, and does none."""
    apart: tuple[int, int] | None = None
    """Only so many first and so many last microbatches have I and W apart; None: all."""


def named_rows(pipeline: Pipeline) -> Iterator[tuple[str | None, Rows]]:
    """Yield the schedules that have a name and can have this placement.

    Those with passes that run as one are others without that, and so are those whose backward
    passes must not be cut: they lose their name here.
    """
    every = ["FB", "FIW", "FBIW"] if pipeline.can_split else ["FB"]
    for kinds in every:
        for name, order in candidate_orders(
            pipeline.placement, frozenset(kinds), pipeline.microbatches
        ):
            pairs = any(action.overlap for actions in order for action in actions)
            rows = pipeline.rows(order)
            joined = pipeline.joined(rows)
            yield None if pairs or joined != rows else name, joined


def in_groups(pipeline: Pipeline) -> Rows | None:
    """Return all stages' F and then B of as many microbatches at a time as memory has room for.

    None where not even a single one fits: then no order does. It is slow, and needs the least.
    """
    block, count = pipeline.block, pipeline.microbatches
    for size in range(count, 0, -1):
        rows = tuple(
            tuple(
                kind * block + stage * count + microbatch
                for first in range(0, count, size)
                for kind, stages in ((F, own), (B, own[::-1]))
                for stage in stages
                for microbatch in range(first, min(first + size, count))
            )
            for own in (tuple(sorted(own)) for own in pipeline.placement)
        )
        if pipeline.fits(rows):
            return rows
    return None


def rules(pipeline: Pipeline) -> Iterator[Rule]:
    """Yield rules, those that most often win first."""
    ranks, count = len(pipeline.placement), pipeline.microbatches
    chunks = len(pipeline.placement[0])
    most = chunks * count
    steps = [chunks * (ranks - rank) for rank in range(ranks)]
    limits = (
        [tuple(min(most, 2 * own - 1 + more) for own in steps) for more in (0, 2)]
        + [tuple(min(most, own + more) for own in steps) for more in (0, 1, 2)]
        + [
            tuple(min(most, max(1, 3 * own // 2 + more)) for own in steps)
            for more in (0, ranks // 2)
        ]
        + [(most,) * ranks]
    )
    aparts: list[tuple[int, int] | None] = [None]
    if any(
        stage.backward < stage.input_gradient + stage.weight_gradient for stage in pipeline.stages
    ):
        aparts += [(0, 0), (0, ranks), (ranks, ranks), (ranks // 2, ranks), (0, ranks // 2)]
    if not pipeline.can_split:
        aparts = [(0, 0)]
    for apart, backward, deep, wait, ahead in product(
        aparts, (True, False), (True, False), _WAITS, dict.fromkeys(limits)
    ):
        if chunks == 1 and not deep:
            continue
        if apart == (0, 0) and wait != _WAITS[0]:
            continue
        yield Rule(ahead=ahead, backward_first=backward, deep_first=deep, wait=wait, apart=apart)


class _Running:
    """A pipeline that runs while its order is being chosen."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        ranks, stages = len(pipeline.placement), len(pipeline.stages)
        self.rows: list[list[int]] = [[] for _ in range(ranks)]
        self.free, self.held = [0] * ranks, [0.0] * ranks
        self.begun, self.returned, self.weighed = [0] * stages, [0] * stages, [0] * stages
        self.arrived = [NONE] * (2 * pipeline.block)
        """When the input of each F and I is there; -1: not sent yet."""
        for number in range(pipeline.microbatches):
            self.arrived[number] = 0
        self.owed: list[list[int]] = [[] for _ in range(ranks)]
        """Weight gradients that can run, oldest first."""
        self.wakes = [(0, rank) for rank in range(ranks)]
        self.most = [limit + 1e-9 * abs(limit) for limit in pipeline.limits]

    def fits(self, rank: int, number: int) -> bool:
        return self.held[rank] + self.pipeline.changes[number] <= self.most[rank]

    def take(self, rank: int, number: int, now: int) -> None:
        """Let a rank run a pass now."""
        pipeline = self.pipeline
        kind, stage, block = pipeline.kind(number), pipeline.stage(number), pipeline.block
        self.rows[rank].append(number)
        end = now + pipeline.lengths[number]
        self.free[rank] = end
        self.held[rank] += pipeline.changes[number]
        heapq.heappush(self.wakes, (end, rank))
        if kind == F:
            self.begun[stage] += 1
            if stage == len(pipeline.stages) - 1:
                self.arrived[block + number] = end
        elif kind == W:
            self.weighed[stage] += 1
            self.owed[rank].remove(number)
            return
        else:
            self.returned[stage] += 1
            if kind == I:
                self.owed[rank].append(number + block)
            else:
                self.weighed[stage] += 1
        target = pipeline.targets[number]
        if target >= 0:
            self.arrived[target] = end + pipeline.delays[target]
            heapq.heappush(self.wakes, (self.arrived[target], pipeline.rank_of[target]))

    def finished(self) -> Rows | None:
        """Return the rows, or None where ranks ran out of memory and stopped."""
        count = self.pipeline.microbatches
        if min(self.weighed) < count:
            return None
        return tuple(tuple(row) for row in self.rows)


def construct(pipeline: Pipeline, rule: Rule) -> Rows | None:
    """Let every free rank choose by a rule; None where it gets stuck for want of memory."""
    run = _Running(pipeline)
    while run.wakes:
        now, rank = heapq.heappop(run.wakes)
        if run.free[rank] > now:
            continue
        offers = [*_gradients(run, rule, rank), *_forwards(run, rule, rank)]
        there = [offer for offer in offers if offer[0] <= now]
        if there:
            run.take(rank, min(offer[1:] for offer in there)[2], now)
        elif run.owed[rank]:
            weight = run.owed[rank][0]
            soon = min((offer[0] for offer in offers), default=_NEVER)
            if soon - now < rule.wait * pipeline.lengths[weight]:
                heapq.heappush(run.wakes, (soon, rank))
            else:
                run.take(rank, weight, now)
    return run.finished()


_Offer = tuple[int, int, int, int]
"""When a pass can start, its place by the rule, and the pass."""


def _gradients(run: _Running, rule: Rule, rank: int) -> Iterator[_Offer]:
    """Yield the next gradient of each stage whose input is there or on its way."""
    pipeline, count = run.pipeline, run.pipeline.microbatches
    first, last = rule.apart or (count, 0)
    for stage in pipeline.placement[rank]:
        turn = run.returned[stage]
        number = pipeline.block + stage * count + turn
        if turn == run.begun[stage] or run.arrived[number] < 0:
            continue
        whole = first <= turn < count - last or stage in pipeline.whole
        chosen = number + 2 * pipeline.block if whole else number
        if run.fits(rank, chosen):
            depth = -stage if rule.deep_first else stage
            yield run.arrived[number], 0 if rule.backward_first else 1, depth, chosen


def _forwards(run: _Running, rule: Rule, rank: int) -> Iterator[_Offer]:
    """Yield the next F of each stage whose input is there or on its way, if there is room."""
    pipeline, own = run.pipeline, run.pipeline.placement[rank]
    flying = sum(run.begun[stage] - run.returned[stage] for stage in own)
    for stage in own:
        turn = run.begun[stage]
        if turn == pipeline.microbatches or (flying >= rule.ahead[rank] and stage == own[0]):
            continue
        number = stage * pipeline.microbatches + turn
        if run.arrived[number] >= 0 and _has_room(run, rank, number):
            depth = -stage if rule.deep_first else stage
            yield run.arrived[number], 1 if rule.backward_first else 0, depth, number


def _has_room(run: _Running, rank: int, number: int) -> bool:
    """Tell whether an F fits, and the oldest microbatch could still finish on its rank.

    As that one can then go on, and sets more free than the next one lacks, none gets stuck.
    """
    pipeline, own = run.pipeline, run.pipeline.placement[rank]
    left = run.most[rank] - run.held[rank] - pipeline.changes[number]
    if left < 0 or len(own) == 1:
        return left >= 0
    oldest = min(run.weighed[stage] for stage in own)
    lacks = sum(
        pipeline.changes[stage * pipeline.microbatches]
        for stage in own
        if run.begun[stage] <= oldest and stage != pipeline.stage(number)
    )
    return left >= lacks


def follow(pipeline: Pipeline, sequence: Sequence[Row], *, wait: float) -> Rows | None:
    """Run F and I in a given sequence, and fill waits and want of memory with weight gradients."""
    run, block = _Running(pipeline), pipeline.block
    at = [0] * len(sequence)
    while run.wakes:
        now, rank = heapq.heappop(run.wakes)
        if run.free[rank] > now:
            continue
        arrives = NONE
        if at[rank] < len(sequence[rank]):
            number = sequence[rank][at[rank]]
            if run.fits(rank, number):
                arrives = run.arrived[number if number < 2 * block else number - 2 * block]
            if 0 <= arrives <= now:
                at[rank] += 1
                run.take(rank, number, now)
                continue
        if run.owed[rank]:
            weight = run.owed[rank][0]
            if arrives < 0 or arrives - now >= wait * pipeline.lengths[weight]:
                run.take(rank, weight, now)
                continue
        if arrives >= 0:
            heapq.heappush(run.wakes, (arrives, rank))
    return run.finished()


def rhythms(pipeline: Pipeline, most: int) -> list[tuple[Row, ...]]:
    """Return sequences of F and I in which every microbatch runs one pattern, a beat apart.

    The pattern goes down the stages and back, each leg between two turns as slow as it takes for
    passes of one rank not to fall together, and as quick as memory asks for.

        rank 0   F0  . . .  F3 I3  . . .  I0        two chunks in a V: four legs,
        rank 1     F0  . F3  .   I3  .  I0          the turns at the ends of them
    """
    stages, chunks = pipeline.stages, len(pipeline.placement[0])
    ranks, count = len(pipeline.placement), len(pipeline.stages)
    lengths = np.array([[s.forward for s in stages], [s.input_gradient for s in stages]])
    beat = max(
        sum(stages[s].forward + stages[s].input_gradient + stages[s].weight_gradient for s in own)
        for own in pipeline.placement
    )
    unit = float(lengths.mean())
    free = chunks <= 2  # more legs have too many ways: then they are alike
    legs = np.array(list(product(_LEG_SLACKS, repeat=2 * chunks if free else 2)), dtype=float)
    turns = np.array(list(product(_TURN_SLACKS, repeat=2 * chunks - 1 if free else 1)), dtype=float)
    ways = len(legs) * len(turns)
    legs, turns = np.repeat(legs, len(turns), axis=0), np.tile(turns, (len(legs), 1))
    at = np.zeros((ways, 2, count))
    for stage in range(1, count):
        leg, turned = divmod(stage, ranks)[0], stage % ranks == 0
        slack = _column(turns, leg - 1) if turned else _column(legs, leg if free else 0)
        hop = pipeline.delays[stage * pipeline.microbatches]
        at[:, 0, stage] = at[:, 0, stage - 1] + lengths[0, stage - 1] + hop + unit * slack
    slack = _column(turns, chunks - 1)
    at[:, 1, count - 1] = at[:, 0, count - 1] + lengths[0, count - 1] + unit * slack
    for stage in range(count - 2, -1, -1):
        back = count - 1 - stage
        leg, turned = chunks + back // ranks, back % ranks == 0
        slack = _column(turns, leg - 1) if turned else _column(legs, leg if free else 1)
        hop = pipeline.delays[pipeline.block + stage * pipeline.microbatches]
        at[:, 1, stage] = at[:, 1, stage + 1] + lengths[1, stage + 1] + hop + unit * slack
    held, together = np.zeros(ways), np.zeros(ways)
    for own, limit in zip(pipeline.placement, pipeline.limits, strict=True):
        mine = list(own)
        stays = at[:, 1, mine] + lengths[1, mine] - at[:, 0, mine]
        holds = (stays / beat * np.array([stages[s].held for s in mine])).sum(axis=1)
        held = np.maximum(held, holds - limit)
        begins = np.concatenate([at[:, 0, mine], at[:, 1, mine]], axis=1) % beat
        lasts = np.broadcast_to(np.concatenate([lengths[0, mine], lengths[1, mine]]), begins.shape)
        turn = np.argsort(begins, axis=1, kind="stable")
        begins = np.take_along_axis(begins, turn, axis=1)
        lasts = np.take_along_axis(lasts, turn, axis=1)
        following = np.concatenate([begins[:, 1:], begins[:, :1] + beat], axis=1)
        together += np.maximum(lasts - (following - begins), 0).sum(axis=1)
    cost = at[:, 1, 0] + _COLLISION_COSTS * pipeline.microbatches * together / ranks
    cost[held > 0] = np.inf
    best = np.argsort(cost, kind="stable")[:most]
    return [_beat_out(pipeline, at[way], beat) for way in best.tolist() if cost[way] < np.inf]


def _column(table: F64, number: int) -> F64:
    return table[:, min(number, table.shape[1] - 1)]


def _beat_out(pipeline: Pipeline, at: F64, beat: int) -> tuple[Row, ...]:
    """Write a pattern down for all microbatches, rank by rank, in the order of its moments."""
    count = pipeline.microbatches
    rows = []
    for own in pipeline.placement:
        moments = [
            (float(at[kind, stage]) + microbatch * beat, kind, stage, microbatch)
            for kind in (F, I)
            for stage in own
            for microbatch in range(count)
        ]
        rows.append(
            tuple(
                kind * pipeline.block + stage * count + microbatch
                for _, kind, stage, microbatch in sorted(moments)
            )
        )
    return tuple(rows)


def nearby(rule: Rule, rank: int, step: int) -> Rule:
    """Return a rule that lets one rank run ahead more, or less."""
    ahead = list(rule.ahead)
    ahead[rank] = max(1, ahead[rank] + step)
    return replace(rule, ahead=tuple(ahead))


def without_weights(pipeline: Pipeline, rows: Rows) -> tuple[Row, ...]:
    """Return the sequence of F and I in an order, B as I."""
    block = pipeline.block
    return tuple(
        tuple(
            number - 2 * block if pipeline.kind(number) == B else number
            for number in row
            if pipeline.kind(number) != W
        )
        for row in rows
    )
