"""How long planning takes: every lever of a large pipeline, from a run that was simulated.

Bar: 96 layers on 16 ranks, up to 64 microbatches, all schedules, in a second of one core. CPU time
counts, for others may be using the machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import numpy as np

from debubble.plan.baseline import Baseline, engine_for, measure_baseline, order_for
from debubble.plan.plan import Plan, make_plan
from debubble.schedules import order_of
from debubble.simulate.as_timeline import as_timeline
from debubble.simulate.communication import Communication
from debubble.simulate.engine import Engine
from debubble.simulate.hand_set import GivenCosts, give_lengths
from debubble.simulate.planned import plan_program
from debubble.timeline.figures import measure_pipeline
from debubble.timeline.model import PassKind, Timeline

LAYERS, RANKS, MICROBATCHES, MOST = 96, 16, 32, 64
LAYER_NS, WIRE_NS = {PassKind.F: 1_000_000, PassKind.B: 2_000_000}, 400_000
REPEATS = 5
BAR_S = 1.0


def simulate_run(layers: int, ranks: int, microbatches: int) -> tuple[Timeline, tuple[int, ...]]:
    """Run 1F1B with an uneven split and unsteady passes."""
    each = layers // ranks
    split = (each - 1, *(each,) * (ranks - 2), each + 1)
    order = order_of("1f1b", ranks, microbatches)
    program = plan_program(order, Communication.FUSED)
    costs = GivenCosts(
        passes={kind: np.array(split) * ns for kind, ns in LAYER_NS.items()},
        one_way=WIRE_NS,
    )
    lengths = give_lengths(program, costs)
    random = np.random.default_rng(0)
    lengths.passes[:] = np.rint(lengths.passes * random.normal(1.0, 0.03, len(lengths.passes)))
    return as_timeline(program, Engine(program).run(lengths)), split


def plan_once(
    timeline: Timeline, split: tuple[int, ...], most: int
) -> tuple[Baseline, Plan, float]:
    """Fit the run and weigh everything."""
    engine_for.cache_clear()
    order_for.cache_clear()
    began = time.process_time()
    baseline = measure_baseline(timeline, measure_pipeline(timeline, 0), layers=split)
    plan = make_plan(baseline, timeline, most_microbatches=most)
    return baseline, plan, time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a moment's work: does it still run?")
    if parser.parse_args().tiny:
        time_plans(layers=12, ranks=3, microbatches=4, most=8, repeats=1)
        return
    sys.exit(time_plans(LAYERS, RANKS, MICROBATCHES, MOST, REPEATS) > BAR_S)


def time_plans(layers: int, ranks: int, microbatches: int, most: int, repeats: int) -> float:
    """Print the seconds of a few plans; return those in the middle."""
    timeline, split = simulate_run(layers, ranks, microbatches)
    times = []
    for _ in range(repeats):
        _, plan, seconds = plan_once(timeline, split, most)
        times.append(seconds)
    middle = statistics.median(times)
    print(
        f"{layers} layers, {ranks} ranks, {microbatches} to {most} microbatches: "
        f"{len(plan.options)} options, {len(plan.refused)} refused"
    )
    print(
        f"plan, all levers: {middle:.2f} s ({min(times):.2f}-{max(times):.2f}), "
        f"bar <= {BAR_S:.0f} s: {'holds' if middle <= BAR_S else 'MISSED'}"
    )
    return middle


if __name__ == "__main__":
    main()
