"""How fast what-ifs are: a thousand splits of a step of 2,048 passes, run together.

Bar: 100 us a split, whatever the communication. Building program and engine is shown beside it:
it is done once for an order and kept.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from debubble.schedules import order_of
from debubble.simulate.communication import Communication
from debubble.simulate.engine import Engine
from debubble.simulate.hand_set import GivenCosts, give_lengths
from debubble.simulate.planned import plan_program
from debubble.simulate.program import Program
from debubble.timeline.model import PassKind

RANKS, MICROBATCHES = 16, 64
SPLITS = 1_000
REPEATS = 5
BAR_US = 100.0


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the median seconds of some work, and what it gave."""
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), result


def prepared(program: Program) -> Engine:
    """Return an engine that has its events in order."""
    engine = Engine(program)
    engine._free  # noqa: B018, SLF001 (made when it is first run)
    return engine


def random_splits(count: int) -> GivenCosts:
    """Return stage times of models whose layers are cut at random."""
    draw = np.random.default_rng(0)
    forward = draw.integers(4_000_000, 6_000_000, (RANKS, count))
    return GivenCosts(passes={PassKind.F: forward, PassKind.B: 2 * forward}, one_way=300_000)


def main() -> None:
    order = order_of("1f1b", RANKS, MICROBATCHES)
    costs = random_splits(SPLITS)
    one = GivenCosts(passes={k: table[:, 0] for k, table in costs.passes.items()}, one_way=300_000)
    print(f"Python {platform.python_version()}, {platform.machine()}, numpy {np.__version__}")
    print(f"{sum(map(len, order)):,} passes on {RANKS} ranks; {SPLITS:,} splits; us a split")
    print(f"{'communication':<14}{'program':>9}{'engine':>9}{'one run':>9}{'us a split':>12}   bar")
    for communication in Communication:
        build, program = timed(lambda how=communication: plan_program(order, how))
        order_events, engine = timed(lambda what=program: prepared(what))
        single, _ = timed(lambda: engine.run(give_lengths(program, one)))  # noqa: B023
        many, windows = timed(lambda: engine.windows(give_lengths(program, costs)))  # noqa: B023
        assert windows.shape == (SPLITS,)  # noqa: S101
        each = 1e6 * many / SPLITS
        verdict = "ok" if each <= BAR_US else "MISSED"
        print(
            f"{communication:<14}{1e3 * build:>6.1f} ms{1e3 * order_events:>6.1f} ms"
            f"{1e3 * single:>6.1f} ms{each:>9.1f} us   ≤ {BAR_US:.0f} {verdict}"
        )


if __name__ == "__main__":
    main()
