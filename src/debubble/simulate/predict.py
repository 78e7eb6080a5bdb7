"""A measured run and a change in → what the changed run would take, as an interval.

Passes are drawn from the run's own residuals, messages from those it sent. What they meet in the
changed run makes them longer or shorter: ranks at work on the same device and messages beside a
pass, other messages on the wire, compute where a message's kernel would start. That is found by
simulating again until it agrees.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from debubble.errors import UsageError
from debubble.simulate.communication import BESIDE_COMPUTE, Communication
from debubble.simulate.costs.passes import (
    WHOLE,
    PassModel,
    share_under,
    slowed_beside,
    time_under,
    trailing_activity,
)
from debubble.simulate.costs.wire_pools import BUFFERED_BYTES, CROWDED, SlowHop, crowded
from debubble.simulate.engine import Engine, in_a_pass
from debubble.simulate.events import NEVER_NS
from debubble.simulate.planned import planned_engine
from debubble.simulate.program import Lengths, Program, Times
from debubble.simulate.source import OF_MEDIAN, Source, moment_of
from debubble.timeline.model import F64, Flags, PassKind
from debubble.timeline.schedules import Order

# Input and weight gradients apart take so much more than together: measured.
_SPLIT_COSTS = 1.05
# Of a backward pass the weight gradient takes so much where nothing tells: a product's two
# gradients take the same time.
_WEIGHT_SHARE = 0.5
# Without gradients to be added to, W takes at least so much of what it takes with them.
_LEAST_OF_W = 0.5
_ROUNDS = 4
_MIDDLE = 0.5
# Draws that tell what is met, of a run of one rank; of more ranks fewer do.
_SAMPLED = 64
# From launch to launch medians of the same run differ by 2.5 %, measured over five launches; tails
# of messages, few steps and a misfit come on top.
LAUNCH_SPREAD = 0.025
# What messages beside compute do is not seen in a run that has none: by the pairs of such runs.
_UNSEEN_SPREAD = 0.025
# All hops of a host go through its sockets: with one of them slower, or as quick as others again,
# the others' messages take more or less as well, and stall more or less often. By eleven pairs.
_OTHER_HOPS_SPREAD = 0.015
_LOW, _HIGH = 10, 90
# The longer a step, the less it differs from draw to draw. With 64 ranks and 128 microbatches the
# middle of 12 draws lies within a thousandth of that of 240.
_DRAWN_PASSES, _FEWEST_DRAWS = 50_000, 12
# Ends of an interval are told by so many samples: few draws are each spread more than once.
_SAMPLES = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A run to be predicted."""

    order: Order
    communication: Communication
    layers: tuple[float, ...]
    """Of each stage, as in `PassModel.layers`; first and last have more than layers."""
    wire_scale: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """By sender's and receiver's place: how many times as long messages take."""
    wire_ns: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """By sender's and receiver's place: what messages take at least."""
    token_scale: float = 1.0
    """How many times as many tokens a microbatch has."""
    recomputed: float = 0.0
    """Layers that backward passes run forward more than in the run, as a share; below 0 fewer."""
    recompute_stages: tuple[int, ...] = ()
    """Stages whose backward passes run all their layers forward once more."""
    copied_ns: Mapping[int, int] = field(default_factory=dict)
    """By stage: what a copy of activations to the host adds to F, and back to a gradient."""
    beside: float | None = None
    """What messages beside compute add to it, of the logarithm; None: as the run has it."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the run would take: the middle of many draws, and what four of five lie in."""

    window_ns: int
    low_ns: int
    high_ns: int
    bubble_fraction: float
    engine: Engine
    lengths: Lengths
    """Of all draws."""

    @property
    def program(self) -> Program:
        """What runs."""
        return self.engine.program

    @cached_property
    def times(self) -> Times:
        """When everything happens in each draw; many ask for the window alone."""
        return self.engine.run(self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What passes and messages meet in a run, on the mean of some draws."""

    at_work: F64
    """Of each pass: ranks at work."""
    beside: F64
    """Of each pass: the share beside messages."""
    others: F64
    """Of each message: other messages on their way."""
    late: F64
    """Of each batch: how often its rank computes where it could start."""
    awaited: F64
    """Of each message: how often its receiver is there before a buffered send is over."""


class _OfSlowHop(NamedTuple):
    """Draws of each message of a slow hop."""

    body: F64
    """Against what is typical of that hop."""
    kept: F64
    """Its send, where somebody receives."""
    buffered: F64
    """And where nobody does yet."""
    chance: F64
    """Decides which of them it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draws:
    """What chance decides, a column for each run."""

    noise: F64
    """Of each pass, of the logarithm."""
    slope: F64
    body: F64
    """Of each message, against what is typical."""
    tail_ns: F64
    """As if all met others on their way."""
    chance: F64 | None
    """Of each message: what decides whether one stalls that met none; None: a tail is a mean."""
    slow: Mapping[tuple[int, int], _OfSlowHop] = field(default_factory=dict)

    def first(self, runs: int) -> _Draws:
        """Return the first few runs."""
        return _Draws(
            noise=self.noise[:, :runs],
            slope=self.slope[:runs],
            body=self.body[:, :runs],
            tail_ns=self.tail_ns[:, :runs],
            chance=None if self.chance is None else self.chance[:, :runs],
            slow={
                hop: _OfSlowHop(*(column[:, :runs] for column in drawn))
                for hop, drawn in self.slow.items()
            },
        )


def predict(  # noqa: PLR0913 (a run, a change, and how it is drawn)
    source: Source,
    what_if: WhatIf,
    *,
    draws: int = 200,
    seed: int = 0,
    engine: Engine | None = None,
    same_launch: bool = False,
) -> Prediction:
    """Simulate a changed run many times over; who has its engine already may hand it over.

    What is simulated as it is meets the stalls of the `same_launch`.
    """
    random = np.random.default_rng(seed)
    if engine is None:
        meets = not source.wires.buffers
        engine = planned_engine(what_if.order, what_if.communication, rendezvous=meets)
    program, model = engine.program, source.passes
    slope = np.maximum(random.normal(model.slope, model.slope_spread, draws), 0.0)
    wires, messages = source.wires.of_size(what_if.token_scale), len(program.messages)
    body, tail, stalls = wires.draw(random, messages, draws, same_launch=same_launch)
    drawn = _Draws(
        noise=random.choice(model.residuals, size=(len(program.passes), draws)),
        slope=slope if model.slope else np.zeros(draws),
        body=body,
        tail_ns=tail,
        chance=np.zeros(tail.shape) if same_launch else random.random(tail.shape),
        slow={
            hop: _OfSlowHop(
                body=own.wires.draw(random, int(mine.sum()), draws, same_launch=True)[0],
                kept=random.choice(own.sends_ns, size=(int(mine.sum()), draws)),
                buffered=random.choice(own.buffered_ns, size=(int(mine.sum()), draws)),
                chance=random.random((int(mine.sum()), draws)),
            )
            for hop, own, mine in _slow_hops(program, source, what_if)
        },
    )
    met = _meet(engine, source, what_if, drawn)
    lengths = _lengths(engine, source, what_if, drawn, met)
    windows = engine.windows(lengths).astype(np.float64)
    unsure = model.growth_spread * float(np.log(what_if.token_scale))
    unseen = what_if.communication in BESIDE_COMPUTE and not model.tells_beside
    of_hops = bool(source.repaired or what_if.wire_scale or what_if.wire_ns)
    wide = np.linalg.norm(
        [
            LAUNCH_SPREAD,
            unsure,
            source.window_spread,
            _UNSEEN_SPREAD * unseen,
            _OTHER_HOPS_SPREAD * of_hops,
        ]
    )
    spread = random.normal(0.0, wide, (max(1, _SAMPLES // draws), draws))
    inside, before = data_ns(program, source)
    # What is gathered among passes occupies a rank, as in a measured run.
    gathered = float(inside.sum())
    own = lengths.passes.sum(axis=0) - gathered - float(before.sum())
    worked = own * source.busy_share + gathered * source.data_occupies
    bubbles = 1 - worked / (len(program.ranks) * windows)
    launches = _middles_of_launches(np.log(windows), (stalls, slope), len(source.steps))
    low, high = np.percentile(np.exp(launches + spread), (_LOW, _HIGH))
    return Prediction(
        window_ns=round(float(np.median(windows))),
        low_ns=round(float(low)),
        high_ns=round(float(high)),
        bubble_fraction=float(np.median(bubbles)),
        engine=engine,
        lengths=lengths,
    )


def enough_draws(order: Order, most: int) -> int:
    """Return how many draws tell what an order takes: many of a short step, few of a long one."""
    return max(_FEWEST_DRAWS, min(most, _DRAWN_PASSES // sum(map(len, order))))


def _middles_of_launches(logs: F64, launch: tuple[F64, ...], steps: int) -> F64:
    """Turn steps, each of another launch, into middles of so many steps of each launch.

    What a launch's own traits explain (how often messages stall in it, how ranks slow each other)
    stays. The rest differs from step to step, and is less in the middle of several.
    """
    columns = np.stack((np.ones(len(logs)), *launch), axis=1)
    of_launch = columns @ np.linalg.lstsq(columns, logs, rcond=None)[0]
    middles: F64 = of_launch + (logs - of_launch) * min(1.0, OF_MEDIAN / np.sqrt(steps))
    return middles


def mean_lengths(
    engine: Engine, source: Source, what_if: WhatIf, layers: tuple[float, ...] | None = None
) -> Lengths:
    """Return every pass and message at its mean: one run, to compare candidates by.

    With other `layers`, each meets what it met with those of the run that is asked for, and no
    stall: a little of one in every message would favour stages that have time to spare.
    """
    program, wires = engine.program, source.wires.of_size(what_if.token_scale)
    messages = (len(program.messages), 1)
    usual = float(np.log(np.exp(source.passes.residuals).mean()))
    drawn = _Draws(
        noise=np.full((len(program.passes), 1), usual),
        slope=np.array([source.passes.slope]),
        body=np.full(messages, wires.mean_body),
        tail_ns=np.full(messages, wires.mean_tail_ns if layers is None else 0.0),
        chance=None,
        slow={
            hop: _OfSlowHop(
                body=np.full((int(mine.sum()), 1), own.wires.mean_body),
                kept=np.full((int(mine.sum()), 1), own.sends_ns.mean()),
                buffered=np.full((int(mine.sum()), 1), own.buffered_ns.mean()),
                chance=np.full((int(mine.sum()), 1), _MIDDLE),
            )
            for hop, own, mine in _slow_hops(program, source, what_if)
        },
    )
    met = _meet(engine, source, what_if, drawn)
    what_if = what_if if layers is None else replace(what_if, layers=layers)
    found = _lengths(engine, source, what_if, drawn, met).columns()
    return Lengths(
        **{name: column[:, 0] if column.ndim > 1 else column for name, column in found.items()}
    )


def _meet(engine: Engine, source: Source, what_if: WhatIf, drawn: _Draws) -> Surroundings:
    """Run a few draws until what everything meets agrees with how long it takes."""
    program, wires = engine.program, source.wires
    messages, places = program.messages, program.batches.place
    drawn = drawn.first(max(1, _SAMPLED // len(program.ranks)))
    beside = source.passes.beside if what_if.beside is None else what_if.beside
    waits_for_room = what_if.communication in BESIDE_COMPUTE and source.late_gap_ns > 0
    crowds = len(messages) > 0 and (wires.contention > 0 or wires.tells_crowds)
    rated = _rated_hops(program, source, what_if)
    exchanged = engine.exchanged[:, None]
    met = Surroundings(
        at_work=np.full(len(program.passes), _mean_activity(source)),
        beside=np.zeros(len(program.passes)),
        others=np.zeros(len(messages)),
        late=np.zeros(len(places)),
        awaited=np.ones(len(messages)),
    )
    slow = list(_slow_hops(program, source, what_if))
    if not (source.passes.slope or beside or crowds or waits_for_room or slow):
        return met
    for _ in range(_ROUNDS):
        lengths = _lengths(engine, source, what_if, drawn, met)
        times = engine.run(lengths)
        # What waits for nothing is there from the first pass on.
        begun = np.maximum(times.batch_start, times.pass_start.min(axis=0))
        found: dict[str, F64] = {}
        if source.passes.slope:
            at_work = trailing_activity(times.pass_start, times.pass_end)
            found["at_work"] = at_work.mean(axis=1)
        if beside:
            shares = np.zeros(times.pass_start.shape)
            for rank in range(len(program.ranks)):
                mine, own = program.passes.place == rank, places == rank
                shares[mine] = share_under(
                    times.pass_start[mine],
                    times.pass_end[mine],
                    begun[own],
                    times.batch_end[own],
                )
            found["beside"] = shares.mean(axis=1)
        if crowds:
            # What both sides wait for leaves when all are there: it is over with the first of them.
            met_ns = np.minimum(times.batch_end[messages.sent], times.batch_end[messages.received])
            wire = np.maximum(lengths.wire, 1)
            meets = messages.rendezvous[:, None]
            leaves = np.where(meets, met_ns - wire, begun[messages.sent])
            arrives = leaves + wire
            under = time_under(leaves, arrives, leaves[~rated], arrives[~rated])
            others = under / (arrives - leaves) - ~rated[:, None] - (exchanged & ~rated[:, None])
            found["others"] = np.where(
                engine.several_partners, 0.0, np.maximum(others, 0.0).mean(axis=1)
            )
        if waits_for_room:
            gaps = source.batch_gap_ns + (source.late_gap_ns - source.batch_gap_ns) * met.late
            ready = begun - np.rint(gaps).astype(np.int64)[:, None]
            found["late"] = in_a_pass(program, times, ready, begun).mean(axis=1)
        if slow:
            found["awaited"] = met.awaited.copy()
        for hop, _, mine in slow:
            over = begun[messages.sent[mine]] + drawn.slow[hop].buffered
            there = times.batch_start[messages.received[mine]] <= over
            found["awaited"][mine] = there.mean(axis=1)
        met = replace(met, **found)
    return met


def _lengths(
    engine: Engine, source: Source, what_if: WhatIf, drawn: _Draws, met: Surroundings
) -> Lengths:
    """Return how long everything takes that meets what it meets, a column for each draw."""
    program, model = engine.program, source.passes
    passes, batches = program.passes, program.batches
    beside = model.beside if what_if.beside is None else what_if.beside
    # A steeper slope means that the same times were seen with a lower base.
    seen = _mean_activity(source)
    slowed = drawn.slope * met.at_work[:, None] - (drawn.slope - model.slope) * seen
    base = _log_lengths(program, model, what_if) + slowed_beside(beside, met.beside)
    inside, before = data_ns(program, source)
    worked = np.exp(base[:, None] + slowed + drawn.noise) + (inside + before)[:, None]
    messages, wires = program.messages, source.wires.of_size(what_if.token_scale)
    exchanged = engine.exchanged[:, None]
    body, tail = drawn.body, drawn.tail_ns
    if wires.tells_crowds:
        likely = np.where(exchanged, 1.0, crowded(met.others)[:, None] / CROWDED)
        tail = tail * likely if drawn.chance is None else np.where(drawn.chance < likely, tail, 0.0)
    if exchanged.any():
        body, tail = body[engine.first_of_exchange], tail[engine.first_of_exchange]
    slowed = body * np.exp(wires.contention * met.others)[:, None]
    wire = np.where(exchanged, wires.both_ways, wires.one_way) * slowed + tail
    sending = np.where(exchanged, wire, wires.sending * slowed + tail)
    # Where its sender waits nothing of a message is there before its receive begins.
    meets = messages.rendezvous[:, None]
    drain = np.where(meets, wire, wires.drain * slowed)
    for hop, own, mine in _slow_hops(program, source, what_if):
        (body, kept, early, chance), both = drawn.slow[hop], exchanged[mine]
        sent = np.where(chance < met.awaited[mine, None], kept, early)
        wire[mine] = np.where(both, own.wires.both_ways, own.wires.one_way) * body
        sending[mine] = np.where(both, own.sends_both_ways * body, sent)
        drain[mine] = np.where(meets[mine], wire[mine], own.wires.drain * body)
    for hop, scale in what_if.wire_scale.items():
        mine = _of_hop(program, hop)
        wire[mine], drain[mine] = wire[mine] * scale, drain[mine] * scale
    for hop, least in what_if.wire_ns.items():
        mine = _of_hop(program, hop)
        # What is buffered on its way has gone before its receive begins, in an exchange as well; of
        # unknown sizes, and where senders wait, nothing.
        known = wires.buffers and wires.message_bytes > 0
        buffered = BUFFERED_BYTES / wires.message_bytes if known else 0.0
        wire[mine] = np.maximum(wire[mine], least)
        drain[mine] = np.maximum(drain[mine], least * max(0.0, 1 - buffered))
    gaps = source.batch_gap_ns + (source.late_gap_ns - source.batch_gap_ns) * met.late
    return Lengths(
        passes=np.rint(worked).astype(np.int64),
        pass_gaps=np.full(len(passes), source.pass_gap_ns),
        batch_gaps=np.rint(gaps).astype(np.int64),
        sending=np.rint(sending).astype(np.int64),
        wire=np.rint(wire).astype(np.int64),
        drain=np.rint(drain).astype(np.int64),
        pass_floor=np.where(passes.before < 0, 0, NEVER_NS),
        batch_floor=np.full(len(batches), NEVER_NS),
    )


def _of_hop(program: Program, hop: tuple[int, int]) -> Flags:
    messages, places = program.messages, program.batches.place
    mine: Flags = (places[messages.sent] == hop[0]) & (places[messages.received] == hop[1])
    return mine


def _slow_hops(
    program: Program, source: Source, what_if: WhatIf
) -> Iterator[tuple[tuple[int, int], SlowHop, Flags]]:
    """Yield the slow hops that nobody has set to be otherwise, and the messages of each."""
    for hop, own in source.wires.of_size(what_if.token_scale).slow.items():
        if hop not in what_if.wire_scale and hop not in what_if.wire_ns:
            yield hop, own, _of_hop(program, hop)


def _rated_hops(program: Program, source: Source, what_if: WhatIf) -> Flags:
    """Tell messages of hops that hold them back: they are on no one else's way."""
    rated = np.zeros(len(program.messages), dtype=bool)
    for hop in {*source.wires.slow, *what_if.wire_ns} - {*what_if.wire_scale}:
        rated |= _of_hop(program, hop)
    return rated


def usual_factor(source: Source) -> float:
    """Return what passes take on average, against their base: alone, in the middle."""
    spread = float(np.exp(source.passes.residuals).mean())
    return float(np.exp(source.passes.slope * _mean_activity(source))) * spread


def extra_layers(program: Program, model: PassModel) -> F64:
    """Return what each pass has besides its layers, in layers: an embedding, a head."""
    passes = program.passes
    first, last = np.array([model.besides_layers(kind) for kind in PassKind]).T
    stage = passes.stage
    more: F64 = np.where(stage == 0, first[passes.kind], 0.0)
    return more + np.where(stage == stage.max(initial=0), last[passes.kind], 0.0)


def _mean_activity(source: Source) -> float:
    """Return how many ranks were at work in the measured run, as passes see it."""
    return max(1.0, len(source.ranks) * (1 - source.bubble_fraction) / max(source.busy_share, 0.1))


def _log_lengths(program: Program, model: PassModel, what_if: WhatIf) -> F64:
    passes, model = program.passes, model.with_tokens(what_if.token_scale)
    weights = np.array(what_if.layers)[passes.stage] + extra_layers(program, model)
    splits = bool((passes.kind == PassKind.I).any())
    classes = (len(PassKind), 2, len(program.ranks), 2)
    columns = (passes.kind, passes.microbatch == 0, passes.place, splits & (passes.stage == 0))
    of_pass = np.ravel_multi_index([column.astype(np.int64) for column in columns], classes)
    known = np.zeros(np.prod(classes))
    for number in np.flatnonzero(np.bincount(of_pass)).tolist():
        kind, first, place, ends = map(int, np.unravel_index(number, classes))
        known[number] = _log_length(model, kind, first=bool(first), place=place, ends=bool(ends))
    logs = known[of_pass]
    scaled: F64 = logs + np.log(np.maximum(weights, 1e-9))
    shares = np.full(len(what_if.layers), what_if.recomputed)
    shares[list(what_if.recompute_stages)] += 1.0
    if shares.any():
        # The half that needs activations first runs them again.
        again = (passes.kind == PassKind.I) | (passes.kind == PassKind.B)
        again &= shares[passes.stage] != 0
        forward = np.array(
            [
                _log_length(model, PassKind.F, first=False, place=place, ends=False)
                for place in range(len(program.ranks))
            ]
        )
        layers = np.array(what_if.layers)[passes.stage[again]]
        once = np.exp(forward[passes.place[again]]) * layers
        taken = np.exp(scaled[again]) + once * shares[passes.stage[again]]
        scaled[again] = np.log(np.maximum(taken, once / 2))
    for stage, copied in what_if.copied_ns.items():
        mine = (passes.stage == stage) & (passes.kind != PassKind.W)
        scaled[mine] = np.log(np.exp(scaled[mine]) + copied)
    return scaled


def data_ns(program: Program, source: Source) -> tuple[F64, F64]:
    """Return what each pass waits for gathers and reductions, in its midst and before it."""
    passes = program.passes
    inside, before = np.zeros(len(passes)), np.zeros(len(passes))
    if source.data_ns:
        last = int(passes.microbatch.max(initial=0))
        columns = (passes.stage.tolist(), passes.kind.tolist(), passes.microbatch.tolist())
        for row, (stage, kind, number) in enumerate(zip(*columns, strict=True)):
            key = stage, kind, moment_of(number, last)
            inside[row], before[row] = source.data_ns.get(key, (0, 0))
    return inside, before


def _log_length(model: PassModel, kind: int, *, first: bool, place: int, ends: bool) -> float:
    """Return a pass's base; a first stage has no input gradient, its weight gradient is all."""
    if ends and kind == PassKind.I:
        return -np.inf
    if ends and kind == PassKind.W:
        whole = model.log_ns(WHOLE, first=first, place=place)
        return whole if whole is not None else _whole_backward(model, first=first, place=place)
    if kind == PassKind.B:
        return _whole_backward(model, first=first, place=place)
    known = model.log_ns(kind, first=first and kind == PassKind.W, place=place)
    if known is not None:
        return known
    share = model.weight_share(place)
    share = _WEIGHT_SHARE if share is None else share
    usual, both = (
        np.exp(_whole_backward(model, first=is_first, place=place)) * _SPLIT_COSTS
        for is_first in (False, first)
    )
    if kind == PassKind.I:
        return float(np.log((1 - share) * usual))
    return float(np.log(max(both - (1 - share) * usual, _LEAST_OF_W * share * usual, 1.0)))


def _whole_backward(model: PassModel, *, first: bool, place: int) -> float:
    known = model.log_ns(PassKind.B, first=first, place=place)
    if known is not None:
        return known
    halves = [
        model.log_ns(PassKind.I, first=False, place=place),
        model.log_ns(PassKind.W, first=first, place=place),
    ]
    if None in halves:
        raise UsageError(
            "the run has no backward passes to plan with",
            hint="a run of forward passes is planned as forward-only",
        )
    return float(np.log(sum(np.exp(half) for half in halves if half is not None) / _SPLIT_COSTS))
