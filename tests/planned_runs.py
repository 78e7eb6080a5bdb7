"""Runs of the engine as timelines to plan with: passes that vary, slowed beside messages if asked.

What a message does to compute is computed here by looking at every pair of pass and message.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from planning import costs_of

from debubble.plan.baseline import measure_baseline
from debubble.schedules import order_of
from debubble.simulate.as_timeline import as_timeline
from debubble.simulate.communication import Communication, usual_communication
from debubble.simulate.engine import Engine
from debubble.simulate.hand_set import give_lengths
from debubble.simulate.planned import plan_program
from debubble.timeline.figures import measure_pipeline

MS = 1_000_000
UNITS = {"F": 5, "B": 10, "I": 5, "W": 5}


def play(order, communication, *, wire_ns=0, slowdown=1.0, noise=0.0, split=None, units=UNITS):
    """The program and its times; `split` are layers, of which `units` are what one takes."""
    units = {kind: np.array(split or 1) * length for kind, length in units.items()}
    program = plan_program(order, communication)
    costs = costs_of(order, units, unit_ns=MS, one_way=wire_ns, drain=wire_ns // 2)
    lengths = give_lengths(program, costs)
    random = np.random.default_rng(0)
    alone = lengths.passes * random.normal(1.0, noise, len(lengths.passes))
    beside = np.zeros(len(alone))
    for _ in range(12):
        run = replace(lengths, passes=np.rint(alone + beside).astype(np.int64))
        times = Engine(program).run(run)
        beside = (1 - 1 / slowdown) * _beside(program, times)
    return program, times


def _beside(program, times):
    """Nanoseconds of each pass in which a message of its rank is under way."""
    found = np.zeros(len(program.passes))
    messages, place = program.messages, program.batches.place
    for row in range(len(program.passes)):
        start, end = times.pass_start[row], times.pass_end[row]
        for sent, received in zip(messages.sent, messages.received, strict=True):
            if program.passes.place[row] in (place[sent], place[received]):
                begun = max(times.batch_start[sent], times.batch_start[received])
                over = times.batch_end[received]
                found[row] += max(0, min(end, over) - max(start, begun))
        found[row] = min(found[row], end - start)
    return found


def planned_run(name, ranks, microbatches, *, chunks=None, layers=None, **how):
    """A baseline, and the timeline it was measured on."""
    order = order_of(name, ranks, microbatches, chunks)
    timeline = as_timeline(*play(order, usual_communication(name), **how))
    layers = layers or how.get("split")
    figures = measure_pipeline(timeline, 0)
    return measure_baseline(timeline, figures, layers=layers, schedule=name), timeline


def overlapped_ns(name, ranks, microbatches, **how):
    """What the same run takes with transfers beside compute."""
    order = order_of(name, ranks, microbatches)
    return int(play(order, Communication.ASYNCHRONOUS, **how)[1].window_ns)
