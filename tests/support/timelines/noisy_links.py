"""Simulated runs with noise as measured ones have it, and a hop made slow on purpose."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from statistics import median

import numpy as np

from debubble.ledger.hop_health import judge_links
from debubble.links.wiring import Wiring
from debubble.simulate.as_timeline import as_timeline
from debubble.simulate.communication import usual_communication
from debubble.simulate.engine import Engine
from debubble.simulate.hand_set import GivenCosts, give_lengths
from debubble.simulate.lengths import hop_of
from debubble.simulate.planned import plan_program
from debubble.simulate.program import Times, in_exchange
from debubble.timeline.figures import measure_pipeline
from debubble.timeline.model import PassKind, join_columns
from debubble.timeline.schedules import order_of

MS = 1_000_000
SIZE = 8 * 1024**2
UNKNOWN_WIRES = Wiring(stated={}, guessed={})


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run: its order, and whether sends are buffered."""

    schedule: str
    ranks: int = 4
    microbatches: int = 8
    rendezvous: bool = False
    wire_ns: int = 1_400_000
    steps: int = 3
    noise: float = 0.12
    unlike: float = 0.05
    """How much hops differ."""
    tails: float = 0.08
    """So many messages take up to seven times as long, as on the recorded hops."""


@cache
def program_of(case):
    order = order_of(case.schedule, case.ranks, case.microbatches)
    return plan_program(order, usual_communication(case.schedule), rendezvous=case.rendezvous)


def lengths_of(case, seed, step):
    """Passes vary by 3 %, messages as the case says, and hops differ among each other."""
    program, random = program_of(case), np.random.default_rng([seed, step])
    hops = np.random.default_rng(seed).lognormal(0, case.unlike, case.ranks**2)
    stages = case.ranks
    costs = GivenCosts(
        passes={
            PassKind.F: np.full(stages, 7 * MS),
            PassKind.B: np.full(stages, 16 * MS),
        },
        one_way=case.wire_ns,
    )
    given, meets = give_lengths(program, costs), program.messages.rendezvous
    exchanged = in_exchange(program.messages.sent, program.messages.received)
    wire = np.where(exchanged, round(1.15 * case.wire_ns), case.wire_ns)
    drain = np.where(meets, wire, case.wire_ns // 2)
    sending = np.where(meets, wire, given.sending)
    given = replace(given, wire=wire, drain=drain, sending=np.where(exchanged, wire, sending))
    hop = hop_of(program)
    noise = random.lognormal(0, case.noise, len(hop)) * hops[hop]
    late = random.random(len(hop)) < case.tails
    noise = np.where(late, noise * random.uniform(2, 7, len(hop)), noise)
    return replace(
        given,
        passes=scaled(given.passes, random.normal(1, 0.03, len(given.passes))),
        **{name: scaled(getattr(given, name), noise) for name in ("sending", "wire", "drain")},
    )


def scaled(lengths, factor):
    return np.maximum(np.rint(lengths * factor), 1).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Told:
    """What `links` says of a run, and what a slow hop really cost it."""

    health: object
    true_cost_ns: int

    @property
    def slow(self):
        return [one.hop for one in self.health.slow]


def tell(case, seed, slow=None, times=1.0):
    """Run some steps, one hop `times` slower, and let them be judged."""
    program = program_of(case)
    engine, steps, costs, begin = Engine(program), [], [], 0
    for step in range(case.steps):
        healthy = lengths_of(case, seed, step)
        lengths = healthy if slow is None else slowed(program, healthy, slow, times)
        run = engine.run(lengths)
        costs.append(int(run.window_ns) - int(engine.run(healthy).window_ns))
        sizes = np.full(len(program.messages), SIZE, dtype=np.int64)
        steps.append(as_timeline(program, _later(run, begin), message_bytes=sizes, step=step))
        begin += int(run.window_ns) + 5 * MS
    timeline = _one_after_the_other(steps)
    figures = measure_pipeline(timeline, 0)
    health = judge_links(timeline, figures, UNKNOWN_WIRES, {})
    return Told(health=health, true_cost_ns=round(median(costs)))


def slowed(program, lengths, hop, times):
    mine = hop_of(program) == hop[0] * len(program.ranks) + hop[1]
    assert mine.any()
    factor = np.where(mine, times, 1.0)
    names = ("sending", "wire", "drain")
    return replace(lengths, **{name: scaled(getattr(lengths, name), factor) for name in names})


def _later(run, by_ns):
    return Times(**{one.name: getattr(run, one.name) + by_ns for one in fields(run)})


def _one_after_the_other(steps):
    return replace(
        steps[0],
        ranks=tuple(
            _joined_rank(ranks) for ranks in zip(*(step.ranks for step in steps), strict=True)
        ),
        passes=join_columns([step.passes for step in steps], by="step"),
        transfers=join_columns([step.transfers for step in steps], by="step"),
        steps=tuple(number for step in steps for number in step.steps),
    )


def _joined_rank(ranks):
    columns = {
        name: join_columns([getattr(rank, name) for rank in ranks], by="start_ns")
        for name in ("busy", "occupied", "apparent")
    }
    return replace(ranks[0], **columns)
