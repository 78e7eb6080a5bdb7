"""An order in → a quicker one nearby: passes moved along the critical path.

A window is as long as its longest way through passes and messages. Only a move that breaks that
way can shorten it: a pass put before or behind its neighbours on the way, or a backward pass cut
in two or put together. What a move would give is estimated from what comes before and after it,
without running anything; the best few are run, from the first pass that they change on.

    rank 1   [F 3][W 0][I 1]───►     on the way: I 1 waits for F 3 and W 0, others wait for I 1
    moved    [I 1][F 3][W 0]         its result leaves a pass and a half sooner

Moves that gain nothing are made, too, and not taken back for a while (tabu search): ways are often
several of one length, and all must be broken.

Where weight gradients fill every gap, no single move gains: whatever moves, they would all have to
move after it. `Refill` takes them out, moves one F or I of a longest way, and fills them in anew.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from debubble.plan.orders.construct import follow, without_weights
from debubble.plan.orders.pipeline import NONE, B, I, Pipeline, Row, Rows, Times, W

Score = Callable[[Rows, Times], int]
"""What is to be small; the window, unless somebody wants something else."""

# A pass is moved across so many others at most.
_REACH = 6
# Of the moves that look best so many are run.
_TRIED, _CONSIDERED = 4, 12
# A pass that moved stays where it is for so many moves, and a few more by chance.
_TENURE, _MORE = 7, 9
# The halves of a backward pass are put together across so many others at most.
_JOINED = 24
# Of kicks that could cut or join a backward pass, so many move it instead.
_SHIFT = 0.5


class Move(NamedTuple):
    """One rank's row, another way."""

    rank: int
    row: Row
    moved: int
    """The pass that moves."""
    first: int
    """The first position that changes."""
    estimate: int


@dataclass(slots=True)
class Climb:
    """A way through orders, from one that is known: the best so far, and where it is now."""

    pipeline: Pipeline
    score: Score
    random: random.Random
    best: Rows
    best_score: int
    now: Rows
    times: Times
    strays: int
    """Moves by chance that are tried each time besides: where the score is not the window, what
    shortens the longest way is not all that can gain."""
    held: dict[int, int]
    """Passes that may not move again before that many moves were made."""
    moves: int = 0

    def go_on(self, moves: int) -> None:
        """Make so many moves, or fewer where none is left."""
        for _ in range(moves):
            if not self._move():
                return

    def kick(self, times: int) -> None:
        """Make moves by chance, so that what follows comes elsewhere."""
        no_tails = [0] * len(self.times.end)
        for _ in range(times):
            for move in self._any(no_tails):
                rows = (*self.now[: move.rank], move.row, *self.now[move.rank + 1 :])
                run = self.pipeline.run(rows)
                if run is not None:
                    self.now, self.times = rows, run

    def _any(self, tails: list[int]) -> list[Move]:
        """Return a move by chance, or none where that one is not allowed."""
        rank = self.random.randrange(len(self.now))
        row = self.now[rank]
        at = self.random.randrange(len(row))
        to = at + self.random.choice((-3, -2, -1, 1, 2, 3))
        found = list(self._cut_or_joined(tails, rank, at, row))
        if 0 <= to < len(row) and (not found or self.random.random() < _SHIFT):
            found = list(self._shifted(tails, rank, at, to))
        return [self.random.choice(found)] if found else []

    def _move(self) -> bool:
        """Make the best move that is allowed, whether it gains or not."""
        pipeline = self.pipeline
        tails = pipeline.tails(self.now, self.times)
        found = sorted(self._moves(tails), key=lambda move: (move.estimate, self.random.random()))[
            :_CONSIDERED
        ]
        by_chance = [move for _ in range(self.strays) for move in self._any(tails)]
        found = [*by_chance, *found]
        chosen: tuple[int, int, Rows, Times, Move] | None = None
        tried = 0
        for move in found:
            if tried == _TRIED + len(by_chance):
                break
            rows = (*self.now[: move.rank], move.row, *self.now[move.rank + 1 :])
            times = pipeline.run(rows, self.times, (move.rank, move.first))
            if times is None:
                continue
            tried += 1
            score = self.score(rows, times)
            is_held = self.held.get(move.moved, -1) > self.moves and score >= self.best_score
            if not is_held and (chosen is None or score < chosen[0]):
                chosen = score, tried, rows, times, move
        self.moves += 1
        if chosen is None:
            return bool(found)
        score, _, self.now, self.times, move = chosen
        self.held[move.moved] = self.moves + _TENURE + self.random.randrange(_MORE)
        if score < self.best_score:
            self.best, self.best_score = self.now, score
        return True

    def _moves(self, tails: list[int]) -> Iterator[Move]:
        """Yield the moves that break a longest way."""
        way = longest_way(self.pipeline, self.now, self.times, self.random)
        for position, (rank, k) in enumerate(way):
            row = self.now[rank]
            # The pass before it on the way, if on the same rank: then they can change places.
            if position + 1 < len(way) and way[position + 1][0] == rank:
                begins = position + 1
                while (
                    begins + 1 < len(way)
                    and way[begins + 1][0] == rank
                    and begins - position < _REACH
                ):
                    begins += 1
                reach = {way[position + 1][1], way[begins][1]}
                for to in reach:
                    yield from self._shifted(tails, rank, k, to)
            if position and way[position - 1][0] == rank:
                ends = position - 1
                while ends and way[ends - 1][0] == rank and position - ends < _REACH:
                    ends -= 1
                yield from self._shifted(tails, rank, k, way[ends][1])
            yield from self._cut_or_joined(tails, rank, k, row)

    def _shifted(self, tails: list[int], rank: int, at: int, to: int) -> Iterator[Move]:
        """Yield a pass moved to another position of its row, if it may stand there."""
        pipeline, row = self.pipeline, self.now[rank]
        number = row[at]
        first, last = min(at, to), max(at, to)
        crossed = row[to:at] if to < at else row[at + 1 : to + 1]
        if to < at:
            if any(pipeline.must_follow(number, other) for other in crossed):
                return
            new = (number, *crossed)
        else:
            if any(pipeline.must_follow(other, number) for other in crossed):
                return
            new = (*crossed, number)
        yield from self._changed(tails, rank, number, new, first, last)

    def _cut_or_joined(self, tails: list[int], rank: int, at: int, row: Row) -> Iterator[Move]:
        """Yield a full backward pass cut in two, its weights later, or its halves put together."""
        pipeline, number, block = self.pipeline, row[at], self.pipeline.block
        kind = pipeline.kind(number)
        if kind == B and pipeline.stage(number) not in pipeline.whole:
            gradient, weight = number - 2 * block, number - block
            following = next(
                (k for k in range(at + 1, len(row)) if pipeline.must_follow(row[k], weight)),
                len(row),
            )
            for behind in {min(at + late, following) for late in (1, 2, 3, 5, len(row))}:
                new = (gradient, *row[at + 1 : behind], weight)
                yield from self._changed(tails, rank, number, new, at, behind - 1)
        elif kind in {I, W}:
            half = number + block if kind == I else number - block
            first, last = sorted((at, row.index(half)))
            if last - first <= _JOINED:
                new = (row[first] + 2 * block, *row[first + 1 : last])
                yield from self._changed(tails, rank, number, new, first, last)

    def _changed(  # noqa: PLR0913, PLR0917 (a rank, and from where to where what stands there)
        self, tails: list[int], rank: int, moved: int, new: Row, first: int, last: int
    ) -> Iterator[Move]:
        """Yield a row with other passes from one position to another, if its rank has room."""
        row = self.now[rank]
        changed = (*row[:first], *new, *row[last + 1 :])
        if self._has_room(rank, changed):
            yield Move(rank, changed, moved, first, self._estimate(tails, row, new, first, last))

    def _has_room(self, rank: int, row: Row) -> bool:
        held, changes = 0.0, self.pipeline.changes
        limit = self.pipeline.limits[rank]
        most = limit + 1e-9 * abs(limit)
        for number in row:
            held += changes[number]
            if held > most:
                return False
        return True

    def _estimate(self, tails: list[int], row: Row, new: Row, first: int, last: int) -> int:
        """Return the longest way through passes that stand anew: what lies around them stays."""
        pipeline, times = self.pipeline, self.times
        lengths, sources, delays = pipeline.lengths, pipeline.sources, pipeline.delays
        targets, block = pipeline.targets, pipeline.block
        now = times.end[row[first - 1]] if first else 0
        ends = []
        for number in new:
            source = sources[number]
            if source >= 0:
                now = max(now, times.end[source] + delays[number])
            now += lengths[number]
            ends.append(now)
        longest, after = 0, 0
        if last + 1 < len(row):
            after = tails[row[last + 1]] + lengths[row[last + 1]]
        for number, end in zip(reversed(new), reversed(ends), strict=True):
            target = targets[number]
            tail = after
            if target >= 0:
                made = target if times.start[target] >= 0 else target + 2 * block
                tail = max(tail, tails[made] + lengths[made] + delays[target])
            longest = max(longest, end + tail)
            after = tail + lengths[number]
        return longest


def longest_way(
    pipeline: Pipeline, rows: Rows, times: Times, chance: random.Random
) -> list[tuple[int, int]]:
    """Return one longest way, from its end: rank and position of each pass."""
    place = {number: (rank, k) for rank, row in enumerate(rows) for k, number in enumerate(row)}
    number = chance.choice([row[-1] for row in rows if times.end[row[-1]] == times.window])
    way = []
    while number != NONE:
        rank, k = place[number]
        way.append((rank, k))
        start, ways = times.start[number], []
        if k and times.end[rows[rank][k - 1]] == start:
            ways.append(rows[rank][k - 1])
        source = pipeline.sources[number]
        if source >= 0 and times.end[source] + pipeline.delays[number] == start:
            ways.append(source if source in place else source + 2 * pipeline.block)
        number = NONE if not ways else ways[0] if len(ways) == 1 else chance.choice(ways)
    return way


@dataclass(slots=True)
class Refill:
    """A walk through sequences of F and I, with weight gradients wherever there is room."""

    pipeline: Pipeline
    score: Score
    random: random.Random
    sequence: tuple[Row, ...]
    now: Rows
    times: Times
    rank: tuple[int, int]
    """The score, and of equals what all ranks together take: walks go on over those."""

    def go_on(self, moves: int) -> None:
        """Try so many moves of one pass, and make those that lose nothing."""
        block = self.pipeline.block
        for _ in range(moves):
            way = longest_way(self.pipeline, self.now, self.times, self.random)
            rank, k = self.random.choice(way)
            number = self.now[rank][k]
            if self.pipeline.kind(number) == W:
                continue
            row = self.sequence[rank]
            at = row.index(number if number < 2 * block else number - 2 * block)
            to = at + self.random.choice((-3, -2, -1, 1, 2, 3))
            if not 0 <= to < len(row):
                continue
            moved = list(row)
            moved.insert(to, moved.pop(at))
            sequence = (*self.sequence[:rank], tuple(moved), *self.sequence[rank + 1 :])
            filled = _fill(self.pipeline, sequence, self.score)
            if filled is not None and filled[0] <= self.rank:
                self.sequence = sequence
                self.rank, self.now, self.times = filled


def _fill(
    pipeline: Pipeline, sequence: tuple[Row, ...], score: Score
) -> tuple[tuple[int, int], Rows, Times] | None:
    """Put weight gradients into a sequence, eagerly and not, and return the better."""
    best: tuple[tuple[int, int], Rows, Times] | None = None
    for wait in (0.0, 1.0):
        filled = follow(pipeline, sequence, wait=wait)
        rows = None if filled is None else pipeline.joined(filled)
        times = None if rows is None else pipeline.run(rows)
        if rows is None or times is None:
            continue
        spans = sum(times.end[row[-1]] - times.start[row[0]] for row in rows)
        rank = score(rows, times), spans
        if best is None or rank < best[0]:
            best = rank, rows, times
    return best


def refill_from(pipeline: Pipeline, rows: Rows, score: Score, seed: int) -> Refill | None:
    """Begin at an order; None where its weight gradients do not fit elsewhere."""
    sequence = without_weights(pipeline, rows)
    filled = _fill(pipeline, sequence, score) if pipeline.can_split else None
    if filled is None:
        return None
    chance = random.Random(seed)  # noqa: S311 (no secret: the same seed, the same order)
    rank, now, times = filled
    return Refill(pipeline, score, chance, sequence, now, times, rank)


def climb_from(
    pipeline: Pipeline, rows: Rows, score: Score, seed: int, strays: int = 0
) -> Climb | None:
    """Begin at an order; None where it waits for itself."""
    times = pipeline.run(rows)
    if times is None:
        return None
    first = score(rows, times)
    return Climb(
        pipeline=pipeline,
        score=score,
        random=random.Random(seed),  # noqa: S311 (no secret: the same seed, the same order)
        best=rows,
        best_score=first,
        now=rows,
        times=times,
        strays=strays,
        held={},
    )
