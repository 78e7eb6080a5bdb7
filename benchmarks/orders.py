"""What a search for an order reaches on recorded runs, and how long it takes.

Bars: never slower than the best schedule with a name; in little memory 1 % quicker.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from debubble.analysis import Analysis
from debubble.api import analyse
from debubble.plan.baseline import Baseline
from debubble.plan.change import Change
from debubble.plan.lever import OrderSearch
from debubble.plan.option import all_fit, headroom_after, quick_latency_s
from debubble.plan.orders.construct import Pipeline, construct, rules
from debubble.plan.orders.search import find_order
from debubble.plan.request import Stated
from debubble.timeline.schedules import Shape, place_stages

RECORDED = Path(__file__).parents[1] / "tests" / "data" / "h200" / "1f1b_p3_m7"
NAMED = ("1f1b", "gpipe", "zb-h1", "zb-h2")
GIB = 2.0**30


def best_named_s(baseline: Baseline) -> float:
    """Return what the best schedule with a name takes, of those that fit."""
    changes = [Change(schedule=name) for name in NAMED]
    fits = [one for one in changes if all_fit(headroom_after(baseline, one)) is not False]
    return min(quick_latency_s(baseline, change) for change in fits)


def measure_recorded(run: Analysis, limit_gib: float | None, rounds: int) -> float:
    """Search, print, and return the gain over the best with a name."""
    baseline = run.baseline(Stated(limit_bytes=None if limit_gib is None else limit_gib * GIB))
    began = time.process_time()
    found = find_order(baseline, OrderSearch(rounds=rounds, cuts_anew=False))
    took, named = time.process_time() - began, best_named_s(baseline)
    if found is None:
        raise SystemExit("nothing was found")
    gain = named / found.latency_s - 1
    print(
        f"{limit_gib or 'no limit'}: {1e3 * found.latency_s:.1f} ms, the best with a name "
        f"{1e3 * named:.1f} ms: {100 * gain:.1f} % quicker; {found.tried} orders in {took:.1f} s"
    )
    return gain


def measure_rules(ranks: int, microbatches: int) -> None:
    """Print how long rules take to make an order of a large pipeline."""
    took = {"F": 100, "I": 100, "W": 100, "B": 200}
    pipeline = Pipeline(
        placement=place_stages(Shape.LOOP, ranks, 1),
        microbatches=microbatches,
        pass_ns={(kind, stage): ns for kind, ns in took.items() for stage in range(ranks)},  # type: ignore[misc]
        hop_ns={},
        room=(2 * ranks,) * ranks,
    )
    began = time.process_time()
    made = [construct(pipeline, rule) for rule in list(rules(pipeline))[:20]]
    each = (time.process_time() - began) / len(made)
    print(f"{ranks} ranks, {microbatches} microbatches: a rule makes its order in {each:.3f} s")


def main() -> int:
    """Measure all bars, and say whether they hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a moment's work, to see that it runs")
    tiny = parser.parse_args().tiny
    run = analyse(RECORDED)
    rounds = 1 if tiny else 20
    gains = [measure_recorded(run, limit, rounds) for limit in (None, 4.7)]
    measure_rules(4 if tiny else 16, 8 if tiny else 32)
    good = min(gains) >= 0 and (tiny or gains[1] >= 0.01)
    print("bars hold" if good else "a bar is missed")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
