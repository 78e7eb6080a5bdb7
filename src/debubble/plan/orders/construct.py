"""What passes and hops take in → an order: every free rank takes what is there, by a rule.

Backward passes or forward passes first, so many microbatches ahead and no more; waits are filled
with weight gradients. On equal stages this reaches the zero-bubble paper's ZB-1p and ZB-2p.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from debubble.timeline.schedules import Action, Order, Placement
from debubble.timeline.schedules.named import Kind

# Shares of a weight gradient for which a rank rather waits than begins it.
_WAITS = (0.0, 0.5, 1.0)
# What passes are counted as.
_WAY: dict[Kind, Kind] = {"F": "F", "B": "B", "I": "B", "W": "W"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Stages on ranks, how long their passes and messages take, and what ranks have room for."""

    placement: Placement
    microbatches: int
    pass_ns: Mapping[tuple[Kind, int], int]
    """By kind and stage."""
    hop_ns: Mapping[tuple[Kind, int], int]
    """Of results that leave a rank, F or B, by the stage that sends; else nothing."""
    room: tuple[int, ...]
    """How many microbatches, counted per stage, each rank can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How a free rank chooses."""

    ahead: tuple[int, ...]
    """How many microbatches of its first stage each rank may have between F and backward."""
    backward_first: bool
    wait: float
    """It waits for what comes within this share of a weight gradient, and does none."""
    uncut: tuple[int, int]
    """The first and the last microbatch, plus one, whose backward passes run as one."""


def rules(pipeline: Pipeline) -> Iterator[Rule]:
    """Yield rules, those that most often win first."""
    ranks, chunks = len(pipeline.placement), len(pipeline.placement[0])
    count = pipeline.microbatches
    to_the_end = [chunks * (ranks - rank) for rank in range(ranks)]
    ahead = {
        tuple(min(chunks * count, max(1, round(share * steps) + more)) for steps in to_the_end): 0
        for share, more in ((2, -1), (2, 1), (1, 0), (1, 1), (1, 2), (1.5, 0), (1.5, ranks // 2))
    } | {(chunks * count,) * ranks: 0}
    uncut = ((0, 0), (ranks, count), (0, count - ranks), (ranks, count - ranks), (0, count))
    for whole, first, wait, most in product(uncut, (True, False), _WAITS, ahead):
        yield Rule(ahead=most, backward_first=first, wait=wait, uncut=whole)


def construct(pipeline: Pipeline, rule: Rule) -> Order | None:
    """Let every free rank choose by a rule; None where ranks have no room left and stop."""
    run = _Running(pipeline, rule)
    while run.wakes:
        now, rank = heapq.heappop(run.wakes)
        if run.free[rank] > now:
            continue
        offers = sorted(run.offers(rank))
        ready = [(place, -stage, kind) for arrives, place, stage, kind in offers if arrives <= now]
        if ready:
            _, stage, kind = min(ready)
            run.take(rank, now, Action(-stage, kind, run.done[_WAY[kind], -stage]))
        elif run.owed[rank]:
            weight = run.owed[rank][0]
            if offers and offers[0][0] - now < rule.wait * pipeline.pass_ns["W", weight.stage]:
                heapq.heappush(run.wakes, (offers[0][0], rank))
            else:
                run.take(rank, now, run.owed[rank].popleft())
    count = pipeline.microbatches
    return run.order if all(run.done["W", stage] == count for stage in run.home) else None


class _Running:
    """A pipeline that runs while its order is being chosen."""

    def __init__(self, pipeline: Pipeline, rule: Rule) -> None:
        self.pipeline, self.rule = pipeline, rule
        placement = pipeline.placement
        self.home = {stage: rank for rank, stages in enumerate(placement) for stage in stages}
        self.order: Order = [[] for _ in placement]
        self.free = [0] * len(placement)
        self.wakes = [(0, rank) for rank in range(len(placement))]
        self.owed: list[deque[Action]] = [deque() for _ in placement]
        """Weight gradients that can run, oldest first."""
        self.done: Counter[tuple[Kind, int]] = Counter()
        """Passes by way and stage: B counts input gradients, W weight gradients, cut or not."""
        self.arrived: dict[tuple[Kind, int, int], int] = {
            ("F", 0, microbatch): 0 for microbatch in range(pipeline.microbatches)
        }

    def offers(self, rank: int) -> Iterator[tuple[int, bool, int, Kind]]:
        """Yield what could run next: when its input is there, its place by the rule, and it."""
        done, rule, stages = self.done, self.rule, self.pipeline.placement[rank]
        held = sum(done["F", stage] - done["W", stage] for stage in stages)
        ahead = sum(done["F", stage] - done["B", stage] for stage in stages)
        for stage in stages:
            turn = done["B", stage]
            if ("B", stage, turn) in self.arrived:
                kind: Kind = "B" if rule.uncut[0] <= turn < rule.uncut[1] else "I"
                yield self.arrived["B", stage, turn], not rule.backward_first, stage, kind
            begins = stage > stages[0] or ahead < rule.ahead[rank]
            turn = done["F", stage]
            if begins and held < self.pipeline.room[rank] and ("F", stage, turn) in self.arrived:
                yield self.arrived["F", stage, turn], rule.backward_first, stage, "F"

    def take(self, rank: int, now: int, action: Action) -> None:
        """Let a rank run a pass now."""
        stage, kind, microbatch, _ = action
        way = _WAY[kind]
        self.order[rank].append(action)
        self.free[rank] = ends = now + self.pipeline.pass_ns[kind, stage]
        heapq.heappush(self.wakes, (ends, rank))
        self.done[way, stage] += 1
        if kind == "W":
            return
        if kind == "I":
            self.owed[rank].append(Action(stage, "W", microbatch))
        else:
            self.done["W", stage] += kind == "B"
        target = stage + 1 if kind == "F" else stage - 1
        if target in self.home:
            arrives = ends + self.pipeline.hop_ns.get((way, stage), 0)
            self.arrived[way, target, microbatch] = arrives
            heapq.heappush(self.wakes, (arrives, self.home[target]))
        elif kind == "F":
            self.arrived["B", stage, microbatch] = ends
