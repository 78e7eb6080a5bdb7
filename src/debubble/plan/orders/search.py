"""A pipeline in → the quickest order found, never a slower one than the best that has a name.

Rounds of a fixed size follow each other: schedules with a name, greedy orders by rule, orders with
a rhythm, then moves along the critical path of the best few, and walks on which weight gradients
are filled in anew; at last, where somebody judges better than a delay a hop can (the simulator that
`plan` uses), moves by that judgement. So a search is the same for the same seed and the same number
of rounds, whatever the machine; time only says after which round to stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice, product

from debubble.plan.orders.bound import lower_bound
from debubble.plan.orders.construct import (
    Rule,
    construct,
    follow,
    in_groups,
    named_rows,
    nearby,
    rhythms,
    rules,
)
from debubble.plan.orders.exact import quickest
from debubble.plan.orders.improve import Climb, Score, climb_from, refill_from
from debubble.plan.orders.pipeline import Pipeline, Rows, Times

Judge = Callable[[Rows], int | None]
"""What an order takes, in nanoseconds, by a better model; None where it cannot run at all."""

# Work of a round, in passes that are run: a few tenths of a second.
_PASSES_A_ROUND = 60_000
# The best orders are kept, and moves begin at the best few of them.
_KEPT, _CLIMBED = 12, 3
# Rhythms that are tried, the most promising first.
_RHYTHMS = 64
# Orders that are judged in a round, and moves that are.
_JUDGED = 4
# A rank that may run ahead by so many more, or fewer.
_STEPS = (1, -1, 3, -3)
# Moves by chance among those that are tried, where the window is not what counts.
_STRAYS = 4
# Rounds of moves without a gain, after which they begin again elsewhere.
_STALE = 6
_FIRST_MOVES = 24
# Then weight gradients are filled in anew, for so many rounds of so many orders for one built.
_REFILLED, _REFILLS = 12, 5
# Each time they begin again, so many more moves by chance come first, up to a most.
_KICKS, _MOST_KICKED = 2, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class BestOrder:
    """The best order of a search."""

    rows: Rows
    score: int
    """As it was judged: by the judge, or as a window in nanoseconds."""
    name: str | None
    """Of the schedule, where none was found that is quicker than those that have one."""
    named: str | None
    """The best schedule with a name that fits; None where none does."""
    named_score: int | None
    bound: int
    """No order can be under it, with messages as a delay a hop."""
    window: int
    """Of the order, with messages so."""
    rounds: int
    judged_rounds: int
    tried: int

    @property
    def gain(self) -> float | None:
        """By what share it is quicker than the best with a name."""
        if self.named_score is None:
            return None
        return self.named_score / self.score - 1


@dataclass(slots=True)
class Search:
    """A search that goes on round by round."""

    pipeline: Pipeline
    judge: Judge | None = None
    score: Score | None = None
    """What is to be small, of a quick run; None: the window."""
    score_costs: int = 1
    """How many times as long that takes as a quick run."""
    seed: int = 0
    rounds: int = 0
    judged_rounds: int = 0
    tried: int = 0
    _pool: dict[Rows, int] = field(default_factory=dict)
    _names: dict[Rows, str] = field(default_factory=dict)
    _rules: dict[Rows, Rule] = field(default_factory=dict)
    _judged: dict[Rows, int | None] = field(default_factory=dict)
    _climb: Climb | None = None
    _stale: int = 0
    _steps: Iterator[None] | None = None
    _bound: int | None = None

    @property
    def bound(self) -> int:
        """What no order can be under, worked out once."""
        if self._bound is None:
            self._bound = lower_bound(self.pipeline)
        return self._bound

    def go_on(self) -> bool:
        """Run one quick round; say whether another may find more."""
        if self._steps is None:
            built = (self._by_rules, self._by_rhythms)
            # Where stages of a rank compete for memory, rules seldom win.
            others = (self._by_rhythms, self._by_first_moves, self._by_rules)
            phases = (
                self._with_names,
                *(others if len(self.pipeline.placement[0]) > 1 else built),
                self._by_rules_nearby,
                self._by_all_orders,
                self._by_moves,
            )
            self._steps = (None for phase in phases for _ in phase())
        if next(self._steps, self) is self:
            return False
        self.rounds += 1
        return not self._is_proven()

    def judge_on(self) -> bool:
        """Run one round of judging; say whether another may find more."""
        if self.judge is None:
            return False
        waiting = [rows for rows in self._ranked() if rows not in self._judged]
        waiting = [rows for rows in self._names if rows not in self._judged] or waiting
        self.judged_rounds += 1
        if waiting and self._climb is None:
            for rows in waiting[:_JUDGED]:
                self._ask(rows)
            return True
        if self._climb is None:
            self._climb = self._climb_by_judge()
            if self._climb is None:
                return False
        before = self._climb.best_score
        self._climb.go_on(1)
        self._stale = 0 if self._climb.best_score < before else self._stale + 1
        return self._stale < _STALE * _STALE

    def found(self) -> BestOrder | None:
        """Return the best so far; None where nothing fits."""
        scores = self._pool
        if self.judge is not None:
            for rows in list(self._names):
                self._ask(rows)
            if all(taken is None for taken in self._judged.values()):
                for rows in self._ranked()[:_JUDGED]:
                    self._ask(rows)
            scores = {rows: taken for rows, taken in self._judged.items() if taken is not None}
        if not scores:
            return None
        named = {rows: scores[rows] for rows in self._names if rows in scores}
        # Of equals the one with a name: others know it.
        best = min(scores, key=lambda rows: (scores[rows], rows not in named))
        first = min(named, key=named.__getitem__) if named else None
        times = self.pipeline.run(best)
        return BestOrder(
            rows=best,
            score=scores[best],
            name=self._names.get(best),
            named=None if first is None else self._names[first],
            named_score=None if first is None else named[first],
            bound=self.bound,
            window=0 if times is None else times.window,
            rounds=self.rounds,
            judged_rounds=self.judged_rounds,
            tried=self.tried,
        )

    @property
    def _size(self) -> int:
        """How many orders a round may build."""
        return max(1, _PASSES_A_ROUND // self.score_costs // (4 * self._passes))

    @property
    def _passes(self) -> int:
        return self.pipeline.block * (4 if self.pipeline.can_split else 2)

    def _with_names(self) -> Iterator[None]:
        """Begin with the schedules that have a name, and with what needs the least memory."""
        for name, rows in named_rows(self.pipeline):
            if self.pipeline.fits(rows) and self._add(rows) and name is not None:
                self._names.setdefault(rows, name)
        plain = in_groups(self.pipeline)
        if plain is not None:
            self._add(plain)
        yield

    def _by_rules(self) -> Iterator[None]:
        """Build orders by every rule."""
        ways = rules(self.pipeline)
        while some := list(islice(ways, self._size)):
            for rule in some:
                self._build(rule)
            yield

    def _by_rhythms(self) -> Iterator[None]:
        """Build orders with a rhythm."""
        patterns = iter(rhythms(self.pipeline, _RHYTHMS) if self.pipeline.can_split else ())
        while some := list(islice(patterns, self._size)):
            for sequence, wait in product(some, (0.0, 1.0)):
                rows = follow(self.pipeline, sequence, wait=wait)
                if rows is not None:
                    self._add(self.pipeline.joined(rows))
            yield

    def _by_rules_nearby(self) -> Iterator[None]:
        """Let one rank after the other run ahead more, or less, while that gains."""
        by_rule = [rows for rows in self._ranked() if rows in self._rules]
        if not by_rule:
            return
        best, score = self._rules[by_rule[0]], self._pool[by_rule[0]]
        done, gained = 0, True
        while gained:
            gained = False
            for rank, step in product(range(len(self.pipeline.placement)), _STEPS):
                rule = nearby(best, rank, step)
                rows = self._build(rule)
                if rows is not None and self._pool.get(rows, score) < score:
                    best, score, gained = rule, self._pool[rows], True
                done += 1
                if done % self._size == 0:
                    yield

    def _by_all_orders(self) -> Iterator[None]:
        """Look through all orders there are, where they are few."""
        if self.score is None and self._pool:
            rows = quickest(self.pipeline, min(self._pool.values()))
            if rows is not None:
                self._add(rows)
            yield

    def _by_first_moves(self) -> Iterator[None]:
        """Make moves for a while, before more is built."""
        yield from islice(self._by_moves(), _FIRST_MOVES)

    def _by_moves(self) -> Iterator[None]:
        """Move passes of the best few, and begin again elsewhere when that gains no more."""
        turn, strays = 0, 0 if self.score is None else _STRAYS
        while self._pool:
            climbs = []
            for number, rows in enumerate(self._ranked()[:_CLIMBED]):
                seed = self.seed + turn * _CLIMBED + number
                climb = climb_from(self.pipeline, rows, self._score, seed, strays)
                if climb is not None:
                    climb.kick(_KICKS * (turn % _MOST_KICKED))
                    climbs.append(climb)
            stale = 0
            while climbs and stale < _STALE:
                before = min(climb.best_score for climb in climbs)
                for climb in climbs:
                    climb.go_on(max(1, self._size // 2))
                    self._add(climb.best)
                stale = 0 if min(climb.best_score for climb in climbs) < before else stale + 1
                yield
            turn += 1
            walk = refill_from(self.pipeline, self._ranked()[0], self._score, self.seed + turn)
            if walk is not None:
                for _ in range(_REFILLED):
                    walk.go_on(_REFILLS * self._size)
                    self._add(walk.now)
                    yield

    def _build(self, rule: Rule) -> Rows | None:
        rows = construct(self.pipeline, rule)
        if rows is not None and self._add(rows):
            self._rules[rows] = rule
        return rows

    def _add(self, rows: Rows) -> bool:
        """Keep an order that is among the best; say whether it is."""
        self.tried += 1
        if rows in self._pool:
            return True
        times = self.pipeline.run(rows)
        if times is None:
            return False
        self._pool[rows] = self._score(rows, times)
        others = [rows for rows in self._pool if rows not in self._names]
        if len(others) > _KEPT:
            worst = max(others, key=self._pool.__getitem__)
            del self._pool[worst]
            self._rules.pop(worst, None)
            return worst is not rows
        return True

    def _ranked(self) -> list[Rows]:
        return sorted(self._pool, key=self._pool.__getitem__)

    def _score(self, rows: Rows, times: Times) -> int:
        return times.window if self.score is None else self.score(rows, times)

    def _is_proven(self) -> bool:
        """Tell whether nothing can be quicker, as far as the quick model goes."""
        if self.score is not None or not self._pool:
            return False
        return min(self._pool.values()) <= self.bound

    def _ask(self, rows: Rows) -> int | None:
        if rows not in self._judged and self.judge is not None:
            self._judged[rows] = self.judge(rows)
        return self._judged[rows]

    def _climb_by_judge(self) -> Climb | None:
        """Begin moves at the order that is judged best."""
        known = {rows: taken for rows, taken in self._judged.items() if taken is not None}
        if not known:
            return None

        def score(rows: Rows, times: Times) -> int:
            taken = self._ask(rows)
            return 2**62 + times.window if taken is None else taken

        best = min(known, key=known.__getitem__)
        return climb_from(self.pipeline, best, score, self.seed, _STRAYS)


def search(  # noqa: PLR0913 (a problem, and how long to look)
    pipeline: Pipeline,
    *,
    judge: Judge | None = None,
    score: Score | None = None,
    seed: int = 0,
    rounds: int | None = None,
    stop: Callable[[float], bool] = lambda _: False,
) -> BestOrder | None:
    """Look for so many rounds, or until `stop` says so, asked with the share that is quick.

    Of a search that is judged, the quick rounds have the first half of the time.
    """
    looked = Search(pipeline=pipeline, judge=judge, score=score, seed=seed)
    share = 1.0 if judge is None else 0.5
    while (rounds is None or looked.rounds < rounds) and not stop(share):
        if not looked.go_on():
            break
    while (rounds is None or looked.judged_rounds < rounds) and not stop(1.0):
        if not looked.judge_on():
            break
    return looked.found()
