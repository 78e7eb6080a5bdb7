"""A pipeline to be ordered, and when each of its passes runs in a given order.

Microbatches are alike, so every stage takes them in turn: an order is, for each rank, a row of
passes of which only kinds and stages are chosen. Times are whole nanoseconds and a message is a
delay on its hop, so that a row of a thousand passes is run in a millisecond; the simulator that
knows queues and contention judges what is left at the end (`search.py`).

A pass is a number, kind * (stages * microbatches) + stage * microbatches + microbatch:

    2 stages, 3 microbatches    F 0..2 | 3..5    I 6..8 | 9..11    W 12..14 | 15..17    B 18..

I and B of a microbatch hand on the same gradient: where it stands in time is kept under I.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from debubble.timeline.schedules import Action, Order, Placement
from debubble.timeline.schedules.named import Kind

NAMES: tuple[Kind, ...] = ("F", "I", "W", "B")
F, I, W, B = range(4)  # noqa: E741 (the names that papers, torch and this house have for passes)
NONE = -1

Row = tuple[int, ...]
Rows = tuple[Row, ...]
"""The passes of each rank, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """What one stage takes, in nanoseconds, and holds, in bytes or any other unit."""

    forward: int
    input_gradient: int
    weight_gradient: int
    backward: int
    """Both gradients together: mostly a little less than one after the other."""
    held: float = 1.0
    """By a microbatch from its F on, until its W or B."""
    halfway: float = 0.0
    """More than that between I and W; below 0 where I sets some of it free."""
    kept_forward: float = 0.0
    """Left behind by an F until the step ends."""
    kept_input: float = 0.0
    """Left behind by an I until the step ends."""
    can_split: bool = True
    """Whether its I and W can run apart, where they can at all."""


class Times(NamedTuple):
    """When passes run in an order, by their numbers."""

    start: list[int]
    end: list[int]
    window: int


@dataclass(frozen=True)
class Pipeline:
    """Stages on ranks, what they cost, and what each rank may hold for microbatches in flight."""

    placement: Placement
    microbatches: int
    stages: tuple[StageCosts, ...]
    up: tuple[int, ...]
    """From the end of stage s's F to when stage s + 1 can have its result; one for each stage."""
    down: tuple[int, ...]
    """From the end of stage s's I or B to when stage s - 1 can have its result."""
    limits: tuple[float, ...]
    """What each rank may hold for microbatches in flight; infinite where nothing limits it."""
    can_split: bool = True
    """Whether I and W can run apart."""

    @cached_property
    def home(self) -> tuple[int, ...]:
        """The rank of each stage."""
        found = {stage: rank for rank, own in enumerate(self.placement) for stage in own}
        return tuple(found[stage] for stage in range(len(found)))

    @cached_property
    def block(self) -> int:
        """How many passes there are of one kind."""
        return len(self.stages) * self.microbatches

    @cached_property
    def rank_of(self) -> list[int]:
        """The rank of each pass."""
        return [rank for _ in NAMES for rank in self.home for _ in range(self.microbatches)]

    @cached_property
    def lengths(self) -> list[int]:
        """What each pass takes."""
        kinds = (
            [stage.forward for stage in self.stages],
            [stage.input_gradient for stage in self.stages],
            [stage.weight_gradient for stage in self.stages],
            [stage.backward for stage in self.stages],
        )
        return [length for kind in kinds for length in kind for _ in range(self.microbatches)]

    @cached_property
    def changes(self) -> list[float]:
        """What its rank holds more after each pass."""
        kinds = (
            [stage.held + stage.kept_forward for stage in self.stages],
            [stage.halfway + stage.kept_input for stage in self.stages],
            [-stage.held - stage.halfway for stage in self.stages],
            [-stage.held for stage in self.stages],
        )
        return [change for kind in kinds for change in kind for _ in range(self.microbatches)]

    @cached_property
    def sources(self) -> list[int]:
        """The pass on another stage whose result each pass needs, I also for B; -1 for none."""
        block, count = self.block, self.microbatches
        forward = [number - count if number >= count else NONE for number in range(block)]
        backward = [
            block + number + count if number + count < block else NONE for number in range(block)
        ]
        return [*forward, *backward, *[NONE] * block, *backward]

    @cached_property
    def delays(self) -> list[int]:
        """What lies between the end of that pass and the arrival of its result."""
        home, last = self.home, len(self.stages) - 1

        def of_hop(stage: int, other: int) -> int:
            if not 0 <= other <= last or home[stage] == home[other]:
                return 0
            return self.up[other] if other < stage else self.down[other]

        forward = [of_hop(s, s - 1) for s in range(last + 1) for _ in range(self.microbatches)]
        backward = [of_hop(s, s + 1) for s in range(last + 1) for _ in range(self.microbatches)]
        return [*forward, *backward, *[0] * self.block, *backward]

    @cached_property
    def targets(self) -> list[int]:
        """The pass on another stage that needs the result of each pass, I also for B."""
        found = [NONE] * (4 * self.block)
        for number, source in enumerate(self.sources[: 3 * self.block]):
            if source >= 0:
                found[source] = number
        found[3 * self.block :] = found[self.block : 2 * self.block]
        return found

    @cached_property
    def whole(self) -> frozenset[int]:
        """The stages whose backward passes run as one."""
        return frozenset(
            stage
            for stage, cost in enumerate(self.stages)
            if not (self.can_split and cost.can_split)
        )

    def joined(self, rows: Rows) -> Rows:
        """Return rows in which no backward pass is cut that must run as one."""
        if not self.whole or not self.can_split:
            return rows
        block = self.block
        return tuple(
            tuple(
                number + 2 * block
                if self.stage(number) in self.whole and self.kind(number) == I
                else number
                for number in row
                if self.kind(number) != W or self.stage(number) not in self.whole
            )
            for row in rows
        )

    def kind(self, number: int) -> int:
        """Return the kind of a pass: F, I, W or B."""
        return number // self.block

    def stage(self, number: int) -> int:
        """Return the stage of a pass."""
        return number % self.block // self.microbatches

    def must_follow(self, later: int, earlier: int) -> bool:
        """Tell whether two passes of one rank can only come in this order."""
        if self.stage(later) != self.stage(earlier):
            return False
        first, second = self.kind(earlier), self.kind(later)
        if (first == F) == (second == F) and (first == W) == (second == W):
            return True  # a stage takes its microbatches in turn
        same = later % self.block == earlier % self.block
        return same and (first == F or second == W)

    def most_held(self, rows: Rows) -> list[float]:
        """Return the most that each rank holds for microbatches in flight."""
        changes, found = self.changes, []
        for row in rows:
            held = most = 0.0
            for number in row:
                held += changes[number]
                most = max(most, held)
            found.append(most)
        return found

    def fits(self, rows: Rows) -> bool:
        """Tell whether no rank holds more than it may."""
        return all(
            most <= limit + 1e-9 * abs(limit)
            for most, limit in zip(self.most_held(rows), self.limits, strict=True)
        )

    def run(  # noqa: C901 (one hot loop)
        self, rows: Rows, before: Times | None = None, changed: tuple[int, int] = (0, 0)
    ) -> Times | None:
        """Return when passes run, or None where they wait for each other in a circle.

        Where rows differ from those that were run `before` only in one, by its rank, and there only
        from a position on, what starts before that position can is taken over.
        """
        lengths, sources, delays, block = self.lengths, self.sources, self.delays, self.block
        targets, rank_of, fused = self.targets, self.rank_of, 3 * self.block
        if before is None:
            start, end = [NONE] * (4 * block), [NONE] * (4 * block)
            at, free = [0] * len(rows), [0] * len(rows)
        else:
            start, end = before.start.copy(), before.end.copy()
            other, first = changed
            since = end[rows[other][first - 1]] if first else 0
            at = [bisect_left(row, since, key=start.__getitem__) for row in rows]
            at[other] = first
            free = [end[row[k - 1]] if k else 0 for row, k in zip(rows, at, strict=True)]
            for row, first in zip(rows, at, strict=True):
                for number in row[first:]:
                    end[number] = NONE
                    if number >= fused:
                        end[number - 2 * block] = NONE
        awake, sleeps = list(range(len(rows))), [False] * len(rows)
        while awake:
            rank = awake.pop()
            row, now, position = rows[rank], free[rank], at[rank]
            count = len(row)
            while position < count:
                number = row[position]
                source = sources[number]
                if source >= 0:
                    arrived = end[source]
                    if arrived < 0:
                        sleeps[rank] = True
                        break
                    arrived += delays[number]
                    if arrived > now:  # noqa: PLR1730 (`max` takes three times as long here)
                        now = arrived
                start[number] = now
                now += lengths[number]
                end[number] = now
                if number >= fused:
                    end[number - 2 * block] = now
                position += 1
                target = targets[number]
                if target >= 0 and sleeps[rank_of[target]]:
                    sleeps[rank_of[target]] = False
                    awake.append(rank_of[target])
            at[rank], free[rank] = position, now
        return None if any(sleeps) else Times(start, end, max(free))

    def tails(self, rows: Rows, times: Times) -> list[int]:
        """Return what must follow the end of each pass before the window ends."""
        lengths, targets, delays, fused = self.lengths, self.targets, self.delays, 3 * self.block
        end, begin, after = times.end, times.start, [0] * (4 * self.block)
        taken = lengths.copy()  # of a gradient, by I: that of the pass that makes it
        following = [NONE] * (4 * self.block)
        place = [0] * (4 * self.block)
        for row in rows:
            for position, number in enumerate(row):
                place[number] = position
                if position:
                    following[row[position - 1]] = number
                if number >= fused:
                    taken[number - 2 * self.block] = lengths[number]
        passes = [number for row in rows for number in row]
        passes.sort(key=lambda number: (end[number], begin[number], place[number]), reverse=True)
        for number in passes:
            later, target = following[number], targets[number]
            longest = after[later] + lengths[later] if later >= 0 else 0
            if target >= 0:
                longest = max(longest, after[target] + taken[target] + delays[target])
            after[number] = longest
            if number >= fused:
                after[number - 2 * self.block] = longest
        return after

    def order(self, rows: Rows) -> Order:
        """Write rows as an order of passes."""
        return [
            [
                Action(self.stage(number), NAMES[self.kind(number)], number % self.microbatches)
                for number in row
            ]
            for row in rows
        ]

    def rows(self, order: Order) -> Rows:
        """Read an order of these sizes as rows; the passes of a pair one after the other."""
        return tuple(
            tuple(
                NAMES.index(action.kind) * self.block
                + action.stage * self.microbatches
                + action.microbatch
                for action in actions
            )
            for actions in order
        )


def longest_rank(rows: Rows, times: Times) -> int:
    """Return the longest span of a single rank, which the zero-bubble papers hold bubbles to."""
    return max(times.end[row[-1]] - times.start[row[0]] for row in rows)
