"""A run in → an order of passes made for it: its stages, its hops, its memory.

Orders are made by rule (`construct.py`), then one pass at a time is moved; each is judged by the
simulator that prices all options. A round judges so many orders, and they follow each other in a
fixed sequence: so the same seed and number of rounds give the same order on any machine, and time
only says after which round to stop.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from debubble.plan.baseline import Baseline
from debubble.plan.change import SEARCHED, Change
from debubble.plan.lever import OrderSearch
from debubble.plan.option import Headroom, headroom_after, quick_latency_s
from debubble.plan.orders.construct import Pipeline, construct, rules
from debubble.plan.split_problem import bound_splits, split_problem
from debubble.simulate.events import OrderCycle
from debubble.simulate.predict import mean_lengths
from debubble.timeline.model import PassKind
from debubble.timeline.schedules import (
    Action,
    Order,
    Placement,
    Shape,
    can_finish,
    candidate_orders,
    place_stages,
)
from debubble.timeline.schedules.named import Kind
from debubble.units import NS_PER_S

_ORDERS_A_ROUND = 40
# Of every way to place and cut stages so many rounds, before the best of them goes on.
_FIRST_ROUNDS = 3
_MOST_OF_TIME = 0.7
# Passes move across so many others at most; weight gradients are cut off so far behind.
_REACH = 6
# A move is taken that is no worse than what was had so many moves before.
_LATE = 10
# Moves in a row that come to no new order, after which none is left.
_MOST_IDLE = 400
# Of the limit, what orders leave: on a GPU one took 25 MiB more than the 4.7 GiB that
# it was made for.
_SPARED = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundOrder:
    """What a search came to."""

    change: Change
    """The order, and how stages are cut for it."""
    name: str | None
    """Of the schedule, where nothing is quicker than one that has a name."""
    latency_s: float
    lower_bound_s: float
    """No order can be under it, with messages that take no time."""
    rounds: int
    tried: int


def find_order(
    baseline: Baseline, question: OrderSearch, split: tuple[int, ...] | None = None
) -> FoundOrder | None:
    """Look for an order; None where none of this run's kind fits its memory.

    With `split` the layers may be cut so, too.
    """
    began = question.clock()

    def goes_on(look: _Look, share: float) -> bool:
        if question.seconds is not None:
            spent, seconds = question.clock() - began, round(question.seconds)
            question.progress(min(round(spent), seconds), seconds)
            if spent > share * question.seconds:
                return False
        return (question.rounds is None or look.rounds < question.rounds) and look.go_on()

    looks = [
        _Look(baseline=baseline, base=base, placement=placement, seed=question.seed)
        for base, placement in _bases(baseline, question, split)
    ]
    for number, look in enumerate(looks, start=1):
        while look.rounds < _FIRST_ROUNDS and goes_on(look, _MOST_OF_TIME * number / len(looks)):
            pass
    best = min(looks, key=lambda look: look.best[0])
    if not best.best[1]:
        return None
    while goes_on(best, 1.0):
        pass
    latency_s, order = best.best
    name = next((name for name, named in best.named() if named == order), None)
    return FoundOrder(
        change=replace(best.base, order=order),
        name=name if best is looks[0] else None,
        latency_s=latency_s,
        lower_bound_s=_lower_bound_s(best.pipeline) * baseline.correction,
        rounds=best.rounds,
        tried=len(best.judged),
    )


def _bases(
    baseline: Baseline, question: OrderSearch, split: tuple[int, ...] | None
) -> Iterator[tuple[Change, Placement]]:
    """Yield the ways to place and cut stages: as they are, and others where that is allowed."""
    first = min(stage for rank in baseline.ranks for stage in rank.stages)
    now = tuple(tuple(sorted(stage - first for stage in rank.stages)) for rank in baseline.ranks)
    yield Change(schedule=SEARCHED), now
    layers = baseline.source.split
    if not question.cuts_anew or layers is None:
        return
    if split is not None and len(split) == len(layers) and split != tuple(layers):
        yield Change(schedule=SEARCHED, split=split), now
    for shape, chunks in ((Shape.LOOP, 1), (Shape.V, 2)):
        placement = place_stages(shape, len(now), chunks)
        if placement != now and sum(layers) >= len(now) * chunks:
            yield Change(schedule=SEARCHED, chunks=chunks), placement


@dataclass(slots=True, kw_only=True)
class _Look:
    """One way to place and cut stages, and the orders of it that were judged."""

    baseline: Baseline
    base: Change
    placement: Placement
    seed: int
    rounds: int = 0
    best: tuple[float, Order] = (float("inf"), [])
    judged: dict[tuple[tuple[Action, ...], ...], float] = field(default_factory=dict)
    """Batch latency in seconds; infinite where an order cannot finish, or does not fit."""
    pipeline: Pipeline = field(init=False)
    _steps: Iterator[float] = field(init=False)

    def __post_init__(self) -> None:
        self.pipeline = pipeline_of(self.baseline, self.base, self.placement)
        self._steps = self._judge_all()

    def go_on(self) -> bool:
        """Judge the orders of a round; say whether more may be found."""
        self.rounds += 1
        return len(list(islice(self._steps, _ORDERS_A_ROUND))) == _ORDERS_A_ROUND

    def named(self) -> Iterator[tuple[str, Order]]:
        """Yield the schedules that have a name and can have this placement."""
        for kinds in ("FB", "FIW", "FBIW"):
            yield from candidate_orders(
                self.placement, frozenset(kinds), self.pipeline.microbatches
            )

    def _judge_all(self) -> Iterator[float]:
        """Judge schedules with a name, orders by every rule, and then moves without end."""
        for _, order in self.named():
            yield self._judge([[action._replace(overlap=False) for action in row] for row in order])
        fewest = min(
            room // len(stages)
            for room, stages in zip(self.pipeline.room, self.placement, strict=True)
        )
        yield self._judge(in_groups(self.placement, self.pipeline.microbatches, max(1, fewest)))
        for rule in rules(self.pipeline):
            made = construct(self.pipeline, rule)
            if made is not None:
                yield self._judge(made)
        yield from self._moves()

    def _moves(self) -> Iterator[float]:
        """Move passes of the best order, by late acceptance: so it leaves what is best nearby."""
        chance = random.Random(self.seed)  # noqa: S311 (no secret: the same seed, the same order)
        now, order = self.best
        before, idle, turn = [now] * _LATE, 0, 0
        while order and idle < _MOST_IDLE:
            moved, known = neighbour(order, chance), len(self.judged)
            if moved is not None:
                latency_s = self._judge(moved)
                if latency_s <= max(now, before[turn % _LATE]):
                    now, order = latency_s, moved
                before[turn % _LATE] = now
                turn += 1
            idle = idle + 1 if len(self.judged) == known else 0
            if not idle:
                yield now

    def _judge(self, order: Order) -> float:
        key = tuple(map(tuple, order))
        if key not in self.judged:
            self.judged[key] = float("inf")
            change = replace(self.base, order=order)
            if can_finish(order) and _fits(headroom_after(self.baseline, change)):
                with suppress(OrderCycle):
                    self.judged[key] = quick_latency_s(self.baseline, change)
            if self.judged[key] < self.best[0]:
                self.best = self.judged[key], order
        return self.judged[key]


def _fits(ranks: Sequence[Headroom] | None) -> bool:
    """Tell whether every rank stays below its limit, and a little more."""
    return all(
        rank.bytes is None
        or rank.bytes - (rank.other_bytes or 0.0) >= _SPARED * (rank.limit_bytes or 0.0)
        for rank in ranks or ()
    )


def neighbour(order: Order, chance: random.Random) -> Order | None:
    """Return an order with one pass moved, or a backward pass cut or joined, by chance.

    None where what was drawn cannot be: each stage takes its microbatches in turn.
    """
    rank = chance.randrange(len(order))
    row = list(order[rank])
    at = chance.randrange(len(row))
    action = row[at]
    if action.kind == "F" or chance.random() < 0.5:
        del row[at]
        to = at + chance.choice((-1, 1)) * chance.randint(1, _REACH)
        if not 0 <= to <= len(row):
            return None
        row.insert(to, action)
    elif action.kind == "B":
        row[at] = action._replace(kind="I")
        row.insert(at + chance.randint(1, _REACH), action._replace(kind="W"))
    else:
        gradient, weight = (row.index(action._replace(kind=kind)) for kind in ("I", "W"))
        row[gradient] = action._replace(kind="B")
        del row[weight]
    return [*order[:rank], row, *order[rank + 1 :]] if _in_turn(row) else None


def _in_turn(row: list[Action]) -> bool:
    """Tell whether each stage takes its microbatches in turn, and F, I and W of each likewise."""
    forward, backward = Counter[int](), Counter[int]()
    for stage, kind, microbatch, _ in row:
        if kind == "F":
            due, forward[stage] = forward[stage], forward[stage] + 1
        elif kind == "W":
            due = microbatch if microbatch < backward[stage] else -1
        else:
            due = backward[stage] if microbatch < forward[stage] else -1
            backward[stage] += 1
        if microbatch != due:
            return False
    return True


def pipeline_of(baseline: Baseline, base: Change, placement: Placement) -> Pipeline:
    """Return what passes and hops of a run take on the mean, with its stages placed and cut so."""
    count = base.microbatches or baseline.source.microbatches
    pass_ns: dict[tuple[Kind, int], list[int]] = {}
    hop_ns: dict[tuple[Kind, int], list[int]] = {}
    for backward in (("B",), ("I", "W")):
        change = replace(base, order=in_groups(placement, count, count, backward))
        engine = baseline.engine(change)
        lengths = mean_lengths(engine, baseline.source, baseline.what_if(change))
        passes, messages = engine.program.passes, engine.program.messages
        kinds: list[Kind] = [PassKind(kind).name for kind in passes.kind.tolist()]  # type: ignore[misc]
        stages, took = passes.stage.tolist(), (lengths.passes + lengths.pass_gaps).tolist()
        for kind, stage, length in zip(kinds, stages, took, strict=True):
            pass_ns.setdefault((kind, stage), []).append(length)
        arrives = (lengths.wire + lengths.batch_gaps[messages.sent]).tolist()
        for producer, length in zip(messages.producer.tolist(), arrives, strict=True):
            way: Kind = "F" if kinds[producer] == "F" else "B"
            hop_ns.setdefault((way, stages[producer]), []).append(length)
    return Pipeline(
        placement=placement,
        microbatches=count,
        pass_ns={key: round(float(np.mean(values))) for key, values in pass_ns.items()},
        hop_ns={key: round(float(np.mean(values))) for key, values in hop_ns.items()},
        room=_room(baseline, base, placement, count),
    )


def in_groups(
    placement: Placement, count: int, size: int, backward: tuple[Kind, ...] = ("B",)
) -> Order:
    """Return all stages' F, and then what comes back, of so many microbatches at a time."""
    kinds: tuple[Kind, ...] = ("F", *backward)
    return [
        [
            Action(stage, kind, microbatch)
            for first in range(0, count, size)
            for kind in kinds
            for stage in (stages if kind == "F" else stages[::-1])
            for microbatch in range(first, min(first + size, count))
        ]
        for stages in placement
    ]


def _room(baseline: Baseline, base: Change, placement: Placement, count: int) -> tuple[int, ...]:
    """Return how many microbatches each rank can hold, counted per stage."""
    room = [0] * len(placement)
    for size in range(count, 0, -1):
        left = headroom_after(baseline, replace(base, order=in_groups(placement, count, size)))
        for rank, stages in enumerate(placement):
            if not room[rank] and (left is None or left[rank].fits is not False):
                room[rank] = size * len(stages)
        if all(room):
            break
    return tuple(room)


def _lower_bound_s(pipeline: Pipeline) -> float:
    """Return what no order of these stages can be under: layers that are whole stages, cut so."""
    stages, took = sum(map(len, pipeline.placement)), pipeline.pass_ns
    forward, inputs, weights, both = (
        np.array([took[kind, stage] for stage in range(stages)], dtype=np.float64) / NS_PER_S
        for kind in ("F", "I", "W", "B")
    )
    backward = np.minimum(inputs, both)
    home = {stage: rank for rank, own in enumerate(pipeline.placement) for stage in own}
    problem = split_problem(
        forward,
        backward,
        np.minimum(inputs + weights, both) - backward,
        rank=np.array([home[stage] for stage in range(stages)]),
        microbatches=pipeline.microbatches,
    )
    return float(bound_splits(problem, np.ones((1, stages), dtype=np.int64))[0])
