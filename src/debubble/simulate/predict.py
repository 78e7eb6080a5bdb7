"""A measured run and a change in → what the changed run would take, as an interval.

Passes are drawn from the run's own residuals, messages from those it sent. Passes that run beside
messages take longer: how much of each does in the changed run is found by simulating again until it
agrees. What ranks that share a device do to each other besides is `shared_device.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from debubble.errors import UsageError
from debubble.simulate import shared_device
from debubble.simulate.communication import Communication
from debubble.simulate.costs.passes import GROWTH_SPREAD, WHOLE, PassModel, slowed_beside
from debubble.simulate.costs.wire_pools import BUFFERED_BYTES, Hop
from debubble.simulate.engine import Engine
from debubble.simulate.events import NEVER_NS
from debubble.simulate.overlap import share_under
from debubble.simulate.planned import planned_engine
from debubble.simulate.program import Lengths, Program, Times
from debubble.simulate.source import Source, moment_of
from debubble.timeline.model import F64, Flags, PassKind
from debubble.timeline.schedules import Order

# Input and weight gradients apart take so much more than together: measured.
_SPLIT_COSTS = 1.05
# Of a backward pass the weight gradient takes so much where nothing tells: a product's two
# gradients take the same time.
_WEIGHT_SHARE = 0.5
# When passes lie beside messages follows from how long they take: until they agree so far, of the
# logarithm of a pass.
_ROUNDS, _AGREES = 4, 0.005
# Draws that tell what is met, of a run of one rank; of more ranks fewer do.
_SAMPLED = 64
# How far predictions are off, of the logarithm: calibrated on recorded pairs, each run left out in
# turn (docs/explanation/accuracy.md). Hops of a host go through its sockets together: where one
# changes, the others do as well.
SPREAD, _HOP_SPREAD = 0.035, 0.02
# Of an interval that four of five lie in, from its middle, in standard deviations.
FOUR_OF_FIVE = 1.2816
# The longer a step, the less it differs from draw to draw. With 64 ranks and 128 microbatches the
# middle of 12 draws lies within a thousandth of that of 240.
_DRAWN_PASSES, _FEWEST_DRAWS = 50_000, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A run to be predicted."""

    order: Order
    communication: Communication
    layers: tuple[float, ...]
    """Of each stage, as in `PassModel.layers`; first and last have more than layers."""
    hops_ns: Mapping[Hop, int] = field(default_factory=dict)
    """By sender's and receiver's place: what messages would take one way, at another rate."""
    token_scale: float = 1.0
    """How many times as many tokens a microbatch has."""
    recomputed: float = 0.0
    """Layers that backward passes run forward more than in the run, as a share; below 0 fewer."""
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
class _Surroundings:
    """What passes meet in a run, on the mean of some draws."""

    at_work: F64
    """Of each pass: ranks at work; nothing where ranks have devices of their own."""
    beside: F64
    """Of each pass: the share beside messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draws:
    """What chance decides, a column for each run."""

    noise: F64
    """Of each pass, of the logarithm."""
    body: F64
    """Of each message, against what is typical."""
    tail_ns: F64

    def first(self, runs: int) -> _Draws:
        """Return the first few runs."""
        return _Draws(
            noise=self.noise[:, :runs], body=self.body[:, :runs], tail_ns=self.tail_ns[:, :runs]
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
    wires, messages = source.wires.of_size(what_if.token_scale), len(program.messages)
    body, tail = wires.draw(random, messages, draws)
    if source.shared and not same_launch:
        tail = shared_device.stalls(random, tail.shape, wires.stalls_ns)
    drawn = _Draws(
        noise=random.choice(model.residuals, size=(len(program.passes), draws)),
        body=body,
        tail_ns=tail,
    )
    met = _meet(engine, source, what_if, drawn)
    lengths = _lengths(engine, source, what_if, drawn, met)
    windows = engine.windows(lengths).astype(np.float64)
    inside, before = data_ns(program, source)
    # What is gathered among passes occupies a rank, as in a measured run.
    gathered = float(inside.sum())
    own = lengths.passes.sum(axis=0) - gathered - float(before.sum())
    worked = own * source.busy_share + gathered * source.data_occupies
    bubbles = 1 - worked / (len(program.ranks) * windows)
    of_hops = bool(source.repaired or what_if.hops_ns)
    unsure = GROWTH_SPREAD * float(np.log(what_if.token_scale))
    spread = float(np.linalg.norm([SPREAD, source.window_spread, _HOP_SPREAD * of_hops, unsure]))
    window = float(np.median(windows))
    return Prediction(
        window_ns=round(window),
        low_ns=round(window * np.exp(-FOUR_OF_FIVE * spread)),
        high_ns=round(window * np.exp(FOUR_OF_FIVE * spread)),
        bubble_fraction=float(np.median(bubbles)),
        engine=engine,
        lengths=lengths,
    )


def enough_draws(order: Order, most: int) -> int:
    """Return how many draws tell what an order takes: many of a short step, few of a long one."""
    return max(_FEWEST_DRAWS, min(most, _DRAWN_PASSES // sum(map(len, order))))


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
    tail = float(wires.tail_ns.mean())
    if source.shared:
        tail = shared_device.mean_stall_ns(wires.stalls_ns)
    drawn = _Draws(
        noise=np.full((len(program.passes), 1), usual),
        body=np.full(messages, wires.mean_body),
        tail_ns=np.full(messages, tail if layers is None else 0.0),
    )
    met = _meet(engine, source, what_if, drawn)
    what_if = what_if if layers is None else replace(what_if, layers=layers)
    found = _lengths(engine, source, what_if, drawn, met).columns()
    return Lengths(
        **{name: column[:, 0] if column.ndim > 1 else column for name, column in found.items()}
    )


def _meet(engine: Engine, source: Source, what_if: WhatIf, drawn: _Draws) -> _Surroundings:
    """Run a few draws until what passes meet agrees with how long they take."""
    program, places = engine.program, engine.program.batches.place
    drawn = drawn.first(max(1, _SAMPLED // len(program.ranks)))
    beside = source.passes.beside if what_if.beside is None else what_if.beside
    met = _Surroundings(
        at_work=np.full(len(program.passes), _mean_activity(source)),
        beside=np.zeros(len(program.passes)),
    )
    if not (source.passes.slope or beside):
        return met
    for _ in range(_ROUNDS):
        times, before = engine.run(_lengths(engine, source, what_if, drawn, met)), met
        if source.passes.slope:
            activity = shared_device.trailing_activity(times.pass_start, times.pass_end)
            met = replace(met, at_work=activity.mean(axis=1))
        if beside:
            # What waits for nothing is there from the first pass on.
            begun = np.maximum(times.batch_start, times.pass_start.min(axis=0))
            shares = np.zeros(times.pass_start.shape)
            for rank in range(len(program.ranks)):
                mine, own = program.passes.place == rank, places == rank
                shares[mine] = share_under(
                    times.pass_start[mine], times.pass_end[mine], begun[own], times.batch_end[own]
                )
            met = replace(met, beside=shares.mean(axis=1))
        moved = (met.at_work - before.at_work) * source.passes.slope
        moved += slowed_beside(beside, met.beside) - slowed_beside(beside, before.beside)
        if np.abs(moved).max() < _AGREES:
            break
    return met


def _lengths(
    engine: Engine, source: Source, what_if: WhatIf, drawn: _Draws, met: _Surroundings
) -> Lengths:
    """Return how long everything takes that meets what it meets, a column for each draw."""
    program, model = engine.program, source.passes
    passes, batches = program.passes, program.batches
    beside = model.beside if what_if.beside is None else what_if.beside
    base = _log_lengths(program, model, what_if) + slowed_beside(beside, met.beside)
    inside, before = data_ns(program, source)
    slowed = (base + model.slope * met.at_work)[:, None]
    worked = np.exp(slowed + drawn.noise) + (inside + before)[:, None]
    messages, wires = program.messages, source.wires.of_size(what_if.token_scale)
    exchanged = engine.exchanged[:, None]
    body, tail = drawn.body, drawn.tail_ns
    if exchanged.any():
        body, tail = body[engine.first_of_exchange], tail[engine.first_of_exchange]
    of_wire, of_drain, of_sending = _times_slower(program, source, what_if, engine.exchanged)
    wire = np.where(exchanged, wires.both_ways, wires.one_way) * body
    sending = np.where(exchanged, wire, wires.sending * body) * of_sending + tail
    wire = wire * of_wire + tail
    # Where its sender waits nothing of a message is there before its receive begins.
    meets = messages.rendezvous[:, None]
    drain = np.where(meets, wire, wires.drain * body * of_drain)
    # What is buffered on its way has gone before its receive begins, in an exchange as well; of
    # unknown sizes, and where senders wait, nothing.
    known = wires.buffers and wires.message_bytes > 0
    left = max(0.0, 1 - BUFFERED_BYTES / wires.message_bytes) if known else 1.0
    for hop, took in what_if.hops_ns.items():
        # What is slower takes that long at least; what is quicker shrinks what was measured.
        mine, scale = _of_hop(program, hop), min(1.0, took / max(wires.one_way, 1.0))
        least = took if scale == 1 else 0
        wire[mine] = np.maximum(wire[mine] * scale, least)
        drain[mine] = np.maximum(drain[mine] * scale, least * left)
    return Lengths(
        passes=np.rint(worked).astype(np.int64),
        pass_gaps=np.full(len(passes), source.pass_gap_ns),
        batch_gaps=np.full(len(batches), source.batch_gap_ns),
        sending=np.rint(sending).astype(np.int64),
        wire=np.rint(wire).astype(np.int64),
        drain=np.rint(drain).astype(np.int64),
        pass_floor=np.where(passes.before < 0, 0, NEVER_NS),
        batch_floor=np.full(len(batches), NEVER_NS),
    )


def _of_hop(program: Program, hop: Hop) -> Flags:
    messages, places = program.messages, program.batches.place
    mine: Flags = (places[messages.sent] == hop[0]) & (places[messages.received] == hop[1])
    return mine


def _times_slower(
    program: Program, source: Source, what_if: WhatIf, exchanged: Flags
) -> tuple[F64, F64, F64]:
    """Return how many times as long wire, drain and sending are on slow hops, unless one is set."""
    found = np.ones((3, len(program.messages)))
    for hop, slow in source.wires.slow.items():
        if hop not in what_if.hops_ns:
            mine = _of_hop(program, hop)
            found[:, mine & exchanged] = np.array(slow.exchanged)[:, None]
            found[:, mine & ~exchanged] = np.array(slow.alone)[:, None]
    wire, drain, sending = found[:, :, None]
    return wire, drain, sending


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
    if what_if.recomputed:
        # The half that needs activations first runs them again.
        again = (passes.kind == PassKind.I) | (passes.kind == PassKind.B)
        forward = np.array(
            [
                _log_length(model, PassKind.F, first=False, place=place, ends=False)
                for place in range(len(program.ranks))
            ]
        )
        layers = np.array(what_if.layers)[passes.stage[again]]
        once = np.exp(forward[passes.place[again]]) * layers
        taken = np.exp(scaled[again]) + once * what_if.recomputed
        scaled[again] = np.log(np.maximum(taken, once / 2))
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
    return float(np.log(max(both - (1 - share) * usual, 1.0)))


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
