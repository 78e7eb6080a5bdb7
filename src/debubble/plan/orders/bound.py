"""A pipeline in → what no order of it can be under: the search's certificate.

Of each pass two things are worked out that hold in every order: what must have passed before it
begins (its head), and what must follow its end (its tail). Both know of the way of its microbatch
through the stages, of all that the same rank must run before or after it, one at a time, and of
memory: with room for k microbatches, the F of one waits for the release of the k-th before it.

    rank 1, room for 2    F0 F1 . . . I0 W0 F2        F2 waits for F0, F1, I0 and W0,
                                                      and I0 for its way down and back
    its tail              I2 at the last rank, back to here, and on to rank 0

A rank alone, with these heads and tails, takes at least what it would if its passes could be
interrupted: always the one next with the longest tail (Jackson). The highest of all ranks counts.
A full backward pass counts as an I, and as much of a W as both together take at least.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import ceil, isfinite

import numpy as np

from debubble.plan.orders.pipeline import Pipeline

_Table = list[list[int]]
"""By stage and microbatch."""


class _Busy:
    """What one rank must run, no pass before its moment: when it can be done with all of it."""

    def __init__(self, most: int) -> None:
        self.begins = np.zeros(most, dtype=np.int64)
        self.lengths = np.zeros(most, dtype=np.int64)
        self.ends = np.zeros(most, dtype=np.int64)
        self.count = 0

    def add(self, begin: int, length: int) -> None:
        """Add a pass."""
        count = self.count
        begins = self.begins[:count]
        self.ends[:count][begins <= begin] += length
        self.ends[count] = begin + length + self.lengths[:count][begins >= begin].sum()
        self.begins[count], self.lengths[count] = begin, length
        self.count += 1

    def end(self) -> int:
        """Return when all can be done: from a moment on, all that begins no sooner must run."""
        return int(self.ends[: self.count].max()) if self.count else 0


@dataclass(slots=True)
class _Sides:
    """What lies on one side of every pass in all orders: before it, or after it."""

    forward: _Table
    gradient: _Table
    weight: _Table


class _Bound:
    """The stages of a pipeline as the bound sees them."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline, stages = pipeline, pipeline.stages
        self.count, self.last = pipeline.microbatches, len(stages) - 1
        self.forward = [stage.forward for stage in stages]
        both = [stage.backward for stage in stages]
        self.gradient = both.copy()
        for number, cost in enumerate(stages):
            if number not in pipeline.whole:
                self.gradient[number] = min(cost.input_gradient, cost.backward)
                both[number] = min(cost.input_gradient + cost.weight_gradient, cost.backward)
        self.weight = [whole - part for whole, part in zip(both, self.gradient, strict=True)]
        self.own = [pipeline.placement[home] for home in pipeline.home]
        self.room, self.owed = [], []
        for stage, own in enumerate(self.own):
            cost, limit = stages[stage], pipeline.limits[pipeline.home[stage]]
            after = cost.held + cost.halfway
            room = owed = self.count
            if len(own) == 1 and isfinite(limit) and cost.held > 0 and after > 0:
                room = min(room, int(limit * (1 + 1e-9) / cost.held + 1e-9))
                owed = min(owed, int((limit * (1 + 1e-9) - cost.held) / after + 1e-9))
            # How many microbatches may be held at once, and how many weight gradients may be owed
            # when the next input gradient begins, which has its own microbatch in memory.
            self.room.append(max(1, room))
            self.owed.append(max(0, owed))

    def frees_at_input(self, stage: int) -> bool:
        """Tell whether a microbatch may hold less from its I on, and not only from W on."""
        return self.pipeline.stages[stage].halfway < 0 and stage not in self.pipeline.whole

    def between_weights(self, stage: int) -> int:
        """Return how many turns an input gradient may be ahead of the weight gradients."""
        room = self.count if self.frees_at_input(stage) else self.room[stage]
        return min(room, self.owed[stage] + 1)

    def hop(self, delay: tuple[int, ...], here: int, there: int) -> int:
        home = self.pipeline.home
        return delay[here] if home[here] != home[there] else 0

    def tables(self) -> _Sides:
        return _Sides(*([[0] * self.count for _ in self.forward] for _ in range(3)))

    def busy(self) -> list[_Busy]:
        return [_Busy(4 * len(own) * self.count) for own in self.own]

    def heads(self) -> _Sides:  # noqa: C901, PLR0912 (one walk over all passes)
        """Return when each pass can begin at the earliest; of W, the n-th that is released."""
        found, up, down = self.tables(), self.pipeline.up, self.pipeline.down
        before_forward, before_gradient = self.busy(), self.busy()
        for turn in range(self.count):
            for stage, own in enumerate(self.own):
                busy, freed = before_forward[stage], turn - self.room[stage]
                for other in own:
                    if other < stage:
                        busy.add(found.forward[other][turn], self.forward[other])
                if turn:
                    busy.add(found.forward[stage][turn - 1], self.forward[stage])
                if freed >= 0:
                    busy.add(found.gradient[stage][freed], self.gradient[stage])
                    if not self.frees_at_input(stage):
                        busy.add(found.weight[stage][freed], self.weight[stage])
                begins = busy.end()
                if stage:
                    arrives = found.forward[stage - 1][turn] + self.forward[stage - 1]
                    begins = max(begins, arrives + self.hop(up, stage - 1, stage))
                found.forward[stage][turn] = begins
            for stage in range(self.last, -1, -1):
                busy = before_gradient[stage]
                for other in self.own[stage]:
                    busy.add(found.forward[other][turn], self.forward[other])
                    if other > stage:
                        busy.add(found.gradient[other][turn], self.gradient[other])
                if turn:
                    busy.add(found.gradient[stage][turn - 1], self.gradient[stage])
                freed = turn - self.between_weights(stage)
                if freed >= 0:
                    busy.add(found.weight[stage][freed], self.weight[stage])
                begins = busy.end()
                if stage < self.last:
                    arrives = found.gradient[stage + 1][turn] + self.gradient[stage + 1]
                    begins = max(begins, arrives + self.hop(down, stage + 1, stage))
                found.gradient[stage][turn] = begins
                found.weight[stage][turn] = begins + self.gradient[stage]
        return found

    def tails(self) -> _Sides:  # noqa: C901, PLR0912 (the same walk, backwards)
        """Return what must follow the end of each pass."""
        found, up, down = self.tables(), self.pipeline.up, self.pipeline.down
        after_forward, after_gradient, after_weight = self.busy(), self.busy(), self.busy()
        for turn in range(self.count - 1, -1, -1):
            for stage, own in enumerate(self.own):
                freed, later = turn + self.room[stage], turn + 1
                if freed < self.count:
                    after_gradient[stage].add(found.forward[stage][freed], self.forward[stage])
                    if not self.frees_at_input(stage):
                        after_weight[stage].add(found.forward[stage][freed], self.forward[stage])
                busy, freed = after_weight[stage], turn + self.between_weights(stage)
                if freed < self.count:
                    busy.add(found.gradient[stage][freed], self.gradient[stage])
                if later < self.count:
                    busy.add(found.weight[stage][later], self.weight[stage])
                    after_gradient[stage].add(found.gradient[stage][later], self.gradient[stage])
                found.weight[stage][turn] = busy.end()
                busy = after_gradient[stage]
                busy.add(found.weight[stage][turn], self.weight[stage])
                for other in own:
                    if other < stage:
                        busy.add(found.gradient[other][turn], self.gradient[other])
                        busy.add(found.weight[other][turn], self.weight[other])
                follows = busy.end()
                if stage:
                    way = self.hop(down, stage, stage - 1) + self.gradient[stage - 1]
                    follows = max(follows, way + found.gradient[stage - 1][turn])
                found.gradient[stage][turn] = follows
            for stage in range(self.last, -1, -1):
                busy = after_forward[stage]
                if turn + 1 < self.count:
                    busy.add(found.forward[stage][turn + 1], self.forward[stage])
                for other in self.own[stage]:
                    busy.add(found.gradient[other][turn], self.gradient[other])
                    busy.add(found.weight[other][turn], self.weight[other])
                    if other > stage:
                        busy.add(found.forward[other][turn], self.forward[other])
                follows = busy.end()
                if stage < self.last:
                    way = self.hop(up, stage, stage + 1) + self.forward[stage + 1]
                    follows = max(follows, way + found.forward[stage + 1][turn])
                found.forward[stage][turn] = follows
        return found


def lower_bound(pipeline: Pipeline) -> int:
    """Return the highest of what each rank cannot be under."""
    bound = _Bound(pipeline)
    heads, tails = bound.heads(), bound.tails()
    highest = 0
    for own, limit in zip(pipeline.placement, pipeline.limits, strict=True):
        passes = [
            (begins, follows, length)
            for stage in own
            for head, tail, length in (
                (heads.forward, tails.forward, bound.forward[stage]),
                (heads.gradient, tails.gradient, bound.gradient[stage]),
                (heads.weight, tails.weight, bound.weight[stage]),
            )
            for begins, follows in zip(head[stage], tail[stage], strict=True)
        ]
        highest = max(highest, _interrupted(passes))
        if len(own) > 1 and isfinite(limit) and limit > 0:
            # What its microbatches hold, as long as each must, has to fit one beside the other.
            area = 0.0
            for stage in own:
                released = heads.weight[stage][0] + bound.weight[stage]
                stay = released - heads.forward[stage][0]
                area += pipeline.microbatches * pipeline.stages[stage].held * stay
            begins = min(heads.forward[stage][0] for stage in own)
            highest = max(highest, begins + ceil(area / limit))
    return highest


def _interrupted(passes: list[tuple[int, int, int]]) -> int:
    """Return when a rank alone is done, tails counted, if it may interrupt what it runs."""
    waiting: list[list[int]] = []
    order = sorted(passes)
    at, now, last = 0, 0, 0
    while at < len(order) or waiting:
        if not waiting:
            now = max(now, order[at][0])
        while at < len(order) and order[at][0] <= now:
            heapq.heappush(waiting, [-order[at][1], order[at][2]])
            at += 1
        tail, left = waiting[0]
        until = now + left if at == len(order) else min(now + left, order[at][0])
        waiting[0][1] -= until - now
        now = until
        if not waiting[0][1]:
            heapq.heappop(waiting)
            last = max(last, now - tail)
    return last
