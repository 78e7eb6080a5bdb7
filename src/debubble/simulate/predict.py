"""A measured run and a change in → what the changed run would take, as an interval.

Passes are drawn from the run's own residuals, messages from those it sent. Where ranks share a
device, how many are at work slows each: that is found by simulating again until it agrees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from debubble.costs.passes import WHOLE, PassModel, trailing_activity
from debubble.costs.wire_pools import BUFFERED_BYTES
from debubble.errors import UsageError
from debubble.schedules import Order
from debubble.simulate.communication import Communication
from debubble.simulate.engine import Engine, covered_ns
from debubble.simulate.planned import plan_program
from debubble.simulate.program import NEVER_NS, Lengths, Program, Times, in_exchange
from debubble.simulate.source import Source, moment_of
from debubble.timeline.model import F64, I64, PassKind

# Input and weight gradients apart take so much more than together: measured.
_SPLIT_COSTS = 1.05
_ROUNDS = 4
# From launch to launch medians of the same run differ by 2.5 %, measured over five launches; what
# the model leaves out is as much again and more, by the predictions that were tried.
_LAUNCH_SPREAD = 0.045
_LOW, _HIGH = 10, 90


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
    pass_scale: float = 1.0
    token_scale: float = 1.0
    """How many times as many tokens a microbatch has."""
    recomputed: float = 0.0
    """Layers that backward passes run forward more than in the run, as a share; below 0 fewer."""
    compute_slowdown: float = 1.0
    """Of compute, while messages of its rank travel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the run would take: the middle of many draws, and what four of five lie in."""

    window_ns: int
    low_ns: int
    high_ns: int
    bubble_fraction: float
    times: Times
    """Of all draws."""
    program: Program


def predict(
    source: Source,
    what_if: WhatIf,
    *,
    draws: int = 200,
    seed: int = 0,
    engine: Engine | None = None,
) -> Prediction:
    """Simulate a changed run many times over; who has its engine already may hand it over."""
    random = np.random.default_rng(seed)
    if engine is None:
        rendezvous = not source.wires.buffers
        engine = Engine(plan_program(what_if.order, what_if.communication, rendezvous=rendezvous))
    program = engine.program
    base = _log_lengths(program, source.passes, what_if)
    noise = random.choice(source.passes.residuals, size=(len(base), draws))
    slope = np.maximum(random.normal(source.passes.slope, source.passes.slope_spread, draws), 0.0)
    slope = slope if source.passes.slope else np.zeros(draws)
    # A steeper slope means that the same times were seen with a lower base.
    seen = _mean_activity(source)
    fixed = _other_lengths(program, source, what_if, random.choice, draws)
    inside, before = _data_ns(program, source)
    data = (inside + before)[:, None]
    activity = np.full((len(base), draws), seen)
    besides, beside = 1 - 1 / what_if.compute_slowdown, np.zeros((len(base), draws))
    for _ in range(_ROUNDS if source.passes.slope or besides else 1):
        slowed = slope * activity - (slope - source.passes.slope) * seen
        lengths = np.exp(base[:, None] + slowed + noise) + beside + data
        times = engine.run(Lengths(passes=np.rint(lengths).astype(np.int64), **fixed))
        if source.passes.slope:
            activity = trailing_activity(times.pass_start, times.pass_end)
        if besides:
            beside = besides * covered_ns(program, times)
    unsure = source.passes.growth_spread * float(np.log(what_if.token_scale))
    spread = random.normal(0.0, np.hypot(_LAUNCH_SPREAD, unsure), draws)
    windows = times.window_ns.astype(np.float64)
    # What is gathered among passes occupies a rank, as in a measured run.
    gathered = float(inside.sum())
    own = (times.pass_end - times.pass_start).sum(axis=0) - gathered - float(before.sum())
    worked = own * source.busy_share + gathered * source.data_occupies
    bubbles = 1 - worked / (len(program.ranks) * windows)
    low, high = np.percentile(windows * np.exp(spread), (_LOW, _HIGH))
    return Prediction(
        window_ns=round(float(np.median(windows))),
        low_ns=round(float(low)),
        high_ns=round(float(high)),
        bubble_fraction=float(np.median(bubbles)),
        times=times,
        program=program,
    )


def mean_lengths(program: Program, source: Source, what_if: WhatIf) -> Lengths:
    """Return every pass and message at its mean: one run, to compare candidates by."""
    logs = _log_lengths(program, source.passes, what_if)
    worked = np.exp(logs) * usual_factor(source) + sum(_data_ns(program, source))
    fixed = _other_lengths(program, source, what_if, _mean_of, 1)
    return Lengths(
        passes=np.rint(worked).astype(np.int64),
        **{name: column[:, 0] if column.ndim > 1 else column for name, column in fixed.items()},
    )


def _mean_of(pool: F64, size: tuple[int, int]) -> F64:
    return np.full(size, pool.mean())


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
    columns = (passes.kind, passes.microbatch == 0, passes.place, splits & (passes.stage == 0))
    classes = list(zip(*(column.tolist() for column in columns), strict=True))
    known = {
        (kind, first, place, ends): _log_length(model, kind, first=first, place=place, ends=ends)
        for kind, first, place, ends in set(classes)
    }
    logs = np.array([known[of] for of in classes])
    scaled: F64 = logs + np.log(np.maximum(weights, 1e-9) * what_if.pass_scale)
    if what_if.recomputed:
        again = passes.kind == (PassKind.I if splits else PassKind.B)
        forward = np.array(
            [
                _log_length(model, PassKind.F, first=False, place=place, ends=False)
                for place in range(len(program.ranks))
            ]
        )
        layers = np.array(what_if.layers)[passes.stage[again]]
        once = np.exp(forward[passes.place[again]]) * layers * what_if.pass_scale
        taken = np.exp(scaled[again]) + once * what_if.recomputed
        scaled[again] = np.log(np.maximum(taken, once / 2))
    return scaled


def _data_ns(program: Program, source: Source) -> tuple[F64, F64]:
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
    half = np.exp(_whole_backward(model, first=False, place=place)) * _SPLIT_COSTS / 2
    if kind == PassKind.I:
        return float(np.log(half))
    both = np.exp(_whole_backward(model, first=first, place=place)) * _SPLIT_COSTS
    return float(np.log(max(both - half, half / 2)))


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


def _other_lengths(
    program: Program,
    source: Source,
    what_if: WhatIf,
    draw: Callable[..., F64],
    draws: int,
) -> dict[str, I64]:
    """Draw what messages take, both messages of an exchange together; add gaps and floors."""
    messages, wires = program.messages, source.wires.of_size(what_if.token_scale)
    exchanged = in_exchange(messages.sent, messages.received)[:, None]
    size = (len(messages), draws)
    pair = np.stack(
        (np.minimum(messages.sent, messages.received), np.maximum(messages.sent, messages.received))
    )
    _, exchange = np.unique(pair, axis=1, return_inverse=True)
    exchange = exchange.reshape(-1)
    both = draw(wires.both_ways, size=(int(exchange.max(initial=-1)) + 1, draws))[exchange]
    wire = np.where(exchanged, both, draw(wires.one_way, size=size))
    drain = np.where(exchanged, wire, draw(wires.drain, size=size))
    sending = np.where(exchanged, wire, draw(wires.sending, size=size))
    places = program.batches.place
    usual = float(np.median(wires.one_way))
    slow = {
        hop: round(times * usual)
        for hop, times in wires.slow.items()
        if hop not in what_if.wire_scale
    }
    for (here, there), scale in what_if.wire_scale.items():
        mine = (places[messages.sent] == here) & (places[messages.received] == there)
        wire[mine], drain[mine] = wire[mine] * scale, drain[mine] * scale
    for (here, there), least in {**slow, **what_if.wire_ns}.items():
        mine = (places[messages.sent] == here) & (places[messages.received] == there)
        # What is buffered on its way has gone before its receive begins; of unknown sizes, nothing.
        buffered = BUFFERED_BYTES / wires.message_bytes if wires.message_bytes > 0 else 0.0
        rest = least * max(0.0, 1 - buffered)
        wire[mine] = np.maximum(wire[mine], least)
        drain[mine] = np.maximum(drain[mine], np.where(exchanged[mine], least, rest))
    passes, batches = program.passes, program.batches
    return {
        "pass_gaps": np.full(len(passes), source.pass_gap_ns),
        "batch_gaps": np.full(len(batches), source.batch_gap_ns),
        "sending": np.rint(sending).astype(np.int64),
        "wire": np.rint(wire).astype(np.int64),
        "drain": np.rint(drain).astype(np.int64),
        "pass_floor": np.where(passes.before < 0, 0, NEVER_NS),
        "batch_floor": np.full(len(batches), NEVER_NS),
    }
