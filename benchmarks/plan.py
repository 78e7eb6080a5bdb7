"""How long planning takes: every lever of a large pipeline, from a run that was simulated.

Bars: 96 layers on 16 ranks, up to 64 microbatches, all schedules, in a second of one core; 192
layers on 64 ranks, 128 microbatches and as many more as a plan tries, in five. CPU time counts, for
others may be using the machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass

import numpy as np

from debubble.plan.baseline import Baseline, engine_for, measure_baseline, order_for
from debubble.plan.plan import Plan, make_plan
from debubble.simulate.as_timeline import as_timeline
from debubble.simulate.communication import Communication
from debubble.simulate.engine import Engine
from debubble.simulate.hand_set import GivenCosts, give_lengths
from debubble.simulate.planned import plan_program
from debubble.timeline.figures import measure_pipeline
from debubble.timeline.model import PassKind, Timeline
from debubble.timeline.schedules import order_of

LAYER_NS, WIRE_NS = {PassKind.F: 1_000_000, PassKind.B: 2_000_000}, 400_000


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pipeline, and what its plan may take."""

    layers: int
    ranks: int
    microbatches: int
    most: int | None
    repeats: int
    bar_s: float


CASES = (
    Case(layers=96, ranks=16, microbatches=32, most=64, repeats=5, bar_s=1.0),
    Case(layers=192, ranks=64, microbatches=128, most=None, repeats=3, bar_s=5.0),
)
TINY = Case(layers=12, ranks=3, microbatches=4, most=8, repeats=1, bar_s=1.0)


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
    timeline: Timeline, split: tuple[int, ...], most: int | None
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
        time_plans(TINY)
        return
    held = [time_plans(case) for case in CASES]
    sys.exit(not all(held))


def time_plans(case: Case) -> bool:
    """Print the seconds of a few plans; tell whether those in the middle hold the bar."""
    timeline, split = simulate_run(case.layers, case.ranks, case.microbatches)
    times = []
    for _ in range(case.repeats):
        _, plan, seconds = plan_once(timeline, split, case.most)
        times.append(seconds)
    middle = statistics.median(times)
    counts = {option.change.microbatches or case.microbatches for option in plan.options}
    print(
        f"{case.layers} layers, {case.ranks} ranks, {min(counts)} to {max(counts)} microbatches: "
        f"{len(plan.options)} options, {len(plan.refused)} refused"
    )
    print(
        f"plan, all levers: {middle:.2f} s ({min(times):.2f}-{max(times):.2f}), "
        f"bar <= {case.bar_s:.0f} s: {'holds' if middle <= case.bar_s else 'MISSED'}"
    )
    return middle <= case.bar_s


if __name__ == "__main__":
    main()
