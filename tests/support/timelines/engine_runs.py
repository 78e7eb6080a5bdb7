"""Orders with lengths of one's own, run by the engine, and such runs as timelines to plan with.

Passes of a run to plan with vary, and are slowed beside messages if asked; what a message does to
compute is computed here by looking at every pair of pass and message.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from debubble.plan.baseline import measure_baseline
from debubble.simulate.as_timeline import as_timeline
from debubble.simulate.communication import Communication, usual_communication
from debubble.simulate.engine import Engine
from debubble.simulate.hand_set import GivenCosts, give_lengths
from debubble.simulate.planned import plan_program
from debubble.timeline.figures import measure_pipeline
from debubble.timeline.model import PassKind
from debubble.timeline.schedules import order_of

MS = 1_000_000
UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}
MS_OF_A_PASS = {"F": 5, "B": 10, "I": 5, "W": 5}


def lengths_of(
    program,
    order,
    units=UNITS,
    *,
    unit_ns=1_000_000,
    one_way=0,
    drain=None,
    batch_gap=0,
    pair_share=1.0,
):
    """Passes take the same on every stage, or a list of one a stage; a pair a share of both."""
    stages = 1 + max(action.stage for actions in order for action in actions)
    passes = {
        PassKind[kind]: np.rint(np.broadcast_to(length, stages) * np.float64(unit_ns)).astype(int)
        for kind, length in units.items()
    }
    lengths = give_lengths(program, GivenCosts(passes=passes, one_way=one_way))
    took = lengths.passes.copy()
    both = np.concatenate((program.pairs, program.pairs + 1))
    took[both] = np.rint(took[both] * pair_share)
    drains = lengths.drain
    if drain is not None:
        drains = np.where(program.messages.rendezvous, lengths.wire, drain)
    gaps = np.full(len(lengths.batch_gaps), batch_gap)
    return replace(lengths, passes=took, drain=drains, batch_gaps=gaps)


def run_order(order, units=UNITS, communication=Communication.LATENCY, *, rendezvous=False, **more):
    program = plan_program(order, communication, rendezvous=rendezvous)
    return program, Engine(program).run(lengths_of(program, order, units, **more))


def timeline_of(name, ranks, microbatches, chunks=None, **how):
    return as_timeline(*run_order(order_of(name, ranks, microbatches, chunks), **how))


def run_unsteadily(
    order, communication, *, wire_ns=0, slowdown=1.0, noise=0.0, split=None, units=MS_OF_A_PASS
):
    """The program and its times; `split` are layers, of which `units` are what one takes."""
    units = {kind: np.array(split or 1) * length for kind, length in units.items()}
    program = plan_program(order, communication)
    lengths = lengths_of(program, order, units, unit_ns=MS, one_way=wire_ns)
    usual = np.where(program.messages.rendezvous, lengths.wire, lengths.wire // 2)
    lengths = replace(lengths, drain=usual)
    random = np.random.default_rng(0)
    alone = lengths.passes * random.normal(1.0, noise, len(lengths.passes))
    beside = np.zeros(len(alone))
    for _ in range(12):
        run = replace(lengths, passes=np.rint(alone + beside).astype(np.int64))
        times = Engine(program).run(run)
        beside = (1 - 1 / slowdown) * _beside(program, times)
    return program, times


def _beside(program, times):
    """Nanoseconds of each pass in which its rank sends or receives, waiting or not."""
    found = np.zeros(len(program.passes))
    place, first = program.batches.place, times.pass_start.min()
    for row in range(len(program.passes)):
        start, end = times.pass_start[row], times.pass_end[row]
        done = start
        for batch in np.argsort(times.batch_start, kind="stable"):
            if place[batch] == program.passes.place[row]:
                begun, over = max(times.batch_start[batch], first, done), times.batch_end[batch]
                found[row] += max(0, min(end, over) - max(start, begun))
                done = max(done, over)
    return found


def planned_run(name, ranks, microbatches, *, chunks=None, layers=None, weight_share=None, **how):
    """A baseline, and the timeline it was measured on; `weight_share` is what W takes of B."""
    order = order_of(name, ranks, microbatches, chunks)
    timeline = as_timeline(*run_unsteadily(order, usual_communication(name), **how))
    if weight_share is not None:
        told = [
            replace(rank, weight_shares=dict.fromkeys(rank.stages, weight_share))
            for rank in timeline.ranks
        ]
        timeline = replace(timeline, ranks=tuple(told))
    layers = layers or how.get("split")
    figures = measure_pipeline(timeline, 0)
    return measure_baseline(timeline, figures, layers=layers, schedule=name), timeline


def overlapped_ns(name, ranks, microbatches, **how):
    """What the same run takes with transfers beside compute."""
    order = order_of(name, ranks, microbatches)
    return int(run_unsteadily(order, Communication.ASYNCHRONOUS, **how)[1].window_ns)
