"""How fast what-ifs are: a thousand splits of a step of 2,048 passes, run together.

Bar: 100 us a split, whatever the communication. Building program and engine is shown beside it:
it is done once for an order and kept.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from debubble.simulate.communication import OF_ONE_SCHEDULE, Communication
from debubble.simulate.engine import Engine
from debubble.simulate.hand_set import GivenCosts, give_lengths
from debubble.simulate.planned import plan_program
from debubble.simulate.program import Program
from debubble.timeline.model import PassKind
from debubble.timeline.schedules import Order, order_of

RANKS, MICROBATCHES = 16, 64
SPLITS = 1_000
REPEATS = 5
BAR_US = 100.0


def timed(work: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Return the median seconds of some work, and what it gave."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), result


def prepared(program: Program) -> Engine:
    """Return an engine that has its events in order."""
    engine = Engine(program)
    engine._free  # noqa: B018, SLF001 (made when it is first run)
    return engine


def random_splits(stages: int, count: int) -> GivenCosts:
    """Return stage times of models whose layers are cut at random."""
    draw = np.random.default_rng(0)
    forward = draw.integers(4_000_000, 6_000_000, (stages, count))
    return GivenCosts(passes={PassKind.F: forward, PassKind.B: 2 * forward}, one_way=300_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a moment's work: does it still run?")
    if parser.parse_args().tiny:
        compare_communications(ranks=4, microbatches=16, splits=3, repeats=1)
    else:
        compare_communications(RANKS, MICROBATCHES, SPLITS, REPEATS)


def compare_communications(ranks: int, microbatches: int, splits: int, repeats: int) -> None:
    print(f"Python {platform.python_version()}, {platform.machine()}, numpy {np.__version__}")
    print(f"{2 * ranks * microbatches:,} passes on {ranks} ranks; {splits:,} splits; us a split")
    print(f"{'communication':<14}{'program':>9}{'engine':>9}{'one run':>9}{'us a split':>12}   bar")
    for communication in Communication:
        order = order_for(communication, ranks, microbatches)
        stages = 1 + max(action.stage for actions in order for action in actions)
        costs = random_splits(stages, splits)
        first = {kind: table[:, 0] for kind, table in costs.passes.items()}
        one = replace(costs, passes=first)
        build, program = timed(partial(plan_program, order, communication), repeats)
        order_events, engine = timed(partial(prepared, program), repeats)
        single, _ = timed(partial(run_one, engine, program, one), repeats)
        many, windows = timed(partial(run_all, engine, program, costs), repeats)
        assert windows.shape == (splits,)  # noqa: S101
        each = 1e6 * many / splits
        verdict = "ok" if each <= BAR_US else "MISSED"
        print(
            f"{communication:<14}{1e3 * build:>6.1f} ms{1e3 * order_events:>6.1f} ms"
            f"{1e3 * single:>6.1f} ms{each:>9.1f} us   ≤ {BAR_US:.0f} {verdict}"
        )


def order_for(communication: Communication, ranks: int, microbatches: int) -> Order:
    """Return 1F1B, or what alone communicates so; of two chunks half as many microbatches."""
    name = OF_ONE_SCHEDULE.get(communication, "1f1b")
    if name == "interleaved-1f1b":
        return order_of(name, ranks, microbatches // 2, chunks=2)
    return order_of(name, ranks, microbatches)


def run_one(engine: Engine, program: Program, costs: GivenCosts) -> None:
    engine.run(give_lengths(program, costs))


def run_all(engine: Engine, program: Program, costs: GivenCosts) -> np.ndarray:
    return engine.windows(give_lengths(program, costs))


if __name__ == "__main__":
    main()
