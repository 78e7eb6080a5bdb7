"""Predict recorded GPU runs from each other, and hold each against what was measured.

Measured is the median of the unprofiled steps of rank 0 (`truth0.json`); beside it, the error
against the target's own profiled window. A pair's noise is the spread of the target's steps.

    python benchmarks/predict.py [RUNS]     # RUNS: by default ../shared/data/h200
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import median, pstdev

from debubble.plan.baseline import Baseline, measure_baseline
from debubble.plan.change import Change
from debubble.plan.link import mend
from debubble.simulate.predict import predict
from debubble.timeline.build import build_run
from debubble.timeline.figures import PipelineFigures, measure_pipeline
from debubble.trace.run import find_run, read_run

RUNS = Path(__file__).parents[2] / "shared" / "data" / "h200"
SHIPPED = Path(__file__).parents[1] / "tests" / "data" / "h200"
MESSAGE_BYTES = 8 * 1024**2
MEDIAN_BAR, WORST_BAR, COVERED_BAR, WIDTH_BAR = 0.03, 0.08, 0.8, 0.15
TRAINING_MEDIAN_BAR, TRAINING_WORST_BAR = 0.015, 0.05
MEMORY_BAR, MEMORY_BAR_OF_M = 0.03, 0.06


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A run to predict from another."""

    source: str
    target: str
    change: Change = field(default_factory=Change)
    hop: tuple[int, int, float] | None = None
    """Places of the hop's ends, and its bytes a second."""
    repaired: tuple[int, int] | None = None
    """A hop of the source whose messages are left out: it will be as its peers."""


EVEN, LAST = (4, 4, 4, 4), (3, 3, 3, 7)
PAIRS = (
    Pair(source="1f1b_m8", target="1f1b_m8_split3337", change=Change(split=LAST)),
    Pair(source="1f1b_m8_split3337", target="1f1b_m8", change=Change(split=EVEN)),
    Pair(source="1f1b_m8", target="gpipe_m8", change=Change(schedule="gpipe")),
    Pair(source="gpipe_m8", target="1f1b_m8", change=Change(schedule="1f1b")),
    Pair(source="1f1b_m8", target="zbv_m8", change=Change(schedule="zbv", chunks=2)),
    Pair(source="1f1b_m8", target="1f1b_m8_slow23", hop=(2, 3, 1.3e9)),
    Pair(source="1f1b_m8_slow23", target="1f1b_m8", repaired=(2, 3)),
    Pair(source="fwd_closed_m4", target="fwd_closed_m8", change=Change(microbatches=8)),
    Pair(source="fwd_closed_m8", target="fwd_closed_m4", change=Change(microbatches=4)),
    Pair(source="fwd_closed_m8", target="fwd_closed_m8_slow12", hop=(1, 2, 1.3e9)),
    Pair(source="fwd_closed_m8_slow12", target="fwd_closed_m8", repaired=(1, 2)),
)
# Of what is shipped no run is another one changed: they are predicted as they are.
TINY = tuple(Pair(source=name, target=name) for name in ("1f1b_p2_m4", "fwd_closed_m4"))


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was predicted of a pair, beside what was measured."""

    pair: Pair
    predicted_s: float
    low_s: float
    high_s: float
    measured_s: float
    noise: float
    window_error: float
    memory_error: float | None

    @property
    def error(self) -> float:
        """Against the unprofiled steps."""
        return self.predicted_s / self.measured_s - 1

    @property
    def covered(self) -> bool:
        """Whether the interval holds what was measured."""
        return self.low_s <= self.measured_s <= self.high_s

    @property
    def width(self) -> float:
        """Of the interval, as a share of the prediction."""
        return (self.high_s - self.low_s) / self.predicted_s

    @property
    def trains(self) -> bool:
        """Whether the target is a training run."""
        return not self.pair.target.startswith(("fwd", "n_fwd"))


@cache
def load(
    folder: Path, repaired: tuple[int, int] | None = None, *, unprofiled: bool = False
) -> tuple[Baseline, PipelineFigures, list[dict]]:
    timeline = build_run(read_run(find_run([str(folder)])))
    figures = measure_pipeline(timeline, 0)
    truths = [json.loads((folder / f"truth{r.rank}.json").read_text()) for r in figures.ranks]
    baseline = measure_baseline(timeline, figures)
    if unprofiled:
        latency = median(truths[0]["wall_s"]) * 1e9 - baseline.source.outside_ns
        baseline = measure_baseline(timeline, figures, latency_ns=latency)
    if repaired is not None:
        baseline = mend(baseline, timeline, [repaired])
    return baseline, figures, truths


def predict_pair(runs: Path, pair: Pair, *, unprofiled: bool = False) -> Result:
    """Predict a pair; the source's own unprofiled latency may be known, as captures will tell."""
    baseline, _, _ = load(runs / pair.source, pair.repaired, unprofiled=unprofiled)
    _, figures, truths = load(runs / pair.target)
    what_if = baseline.what_if(pair.change)
    if pair.hop is not None:
        here, there, rate = pair.hop
        what_if = replace(what_if, wire_ns={(here, there): round(MESSAGE_BYTES / rate * 1e9)})
    found = predict(baseline.source, what_if)
    outside = baseline.source.outside_ns
    seconds = [
        (ns * baseline.correction + outside) / 1e9
        for ns in (found.window_ns, found.low_ns, found.high_ns)
    ]
    walls = truths[0]["wall_s"]
    peaks = baseline.peaks(pair.change)
    memory = None
    if peaks is not None:
        errors = [
            peak.peak_bytes / truth["peak_bytes"] - 1
            for peak, truth in zip(peaks, truths, strict=True)
        ]
        memory = max(errors, key=abs)
    return Result(
        pair=pair,
        predicted_s=seconds[0],
        low_s=seconds[1],
        high_s=seconds[2],
        measured_s=median(walls),
        noise=pstdev(walls) / median(walls),
        window_error=found.window_ns * baseline.correction / figures.batch_latency_ns - 1,
        memory_error=memory,
    )


def judge(results: list[Result]) -> bool:
    """Print the figures beside their bars; return whether all hold."""
    training = [abs(one.error) for one in results if one.trains]
    errors = [abs(one.error) for one in results]
    worst = max(results, key=lambda one: abs(one.error) / max(WORST_BAR, 2 * one.noise))
    covered = sum(one.covered for one in results) / len(results)
    width = median(one.width for one in results)
    of_m = [abs(r.memory_error) for r in results if r.memory_error and r.pair.change.microbatches]
    others = [
        abs(r.memory_error) for r in results if r.memory_error and not r.pair.change.microbatches
    ]
    allowed = max(WORST_BAR, 2 * worst.noise)
    rows = [
        ("median error", median(errors), MEDIAN_BAR, False),
        ("worst error against its bar", abs(worst.error), allowed, False),
        ("training pairs: median", median(training), TRAINING_MEDIAN_BAR, False),
        ("training pairs: worst", max(training), TRAINING_WORST_BAR, False),
        ("inside the 80 % interval", covered, COVERED_BAR, True),
        ("median width of the interval", width, WIDTH_BAR, False),
        ("peak memory, worst rank", max(others, default=0.0), MEMORY_BAR, False),
        ("peak memory, change of m", max(of_m, default=0.0), MEMORY_BAR_OF_M, False),
    ]
    holds = True
    for name, figure, bar, at_least in rows:
        good = figure >= bar if at_least else figure <= bar
        holds &= good
        print(f"{name:32} {figure:7.1%}   bar {bar:6.1%}   {'holds' if good else 'MISSED'}")
    return holds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="?", default=RUNS)
    parser.add_argument("--tiny", action="store_true", help="a moment's work: does it still run?")
    given = parser.parse_args()
    if given.tiny:
        show([predict_pair(SHIPPED, pair) for pair in TINY])
        return
    runs = given.runs
    if not runs.is_dir():
        print(f"no recorded runs in {runs}: nothing predicted")
        return
    pairs = [p for p in PAIRS if (runs / p.source).is_dir() and (runs / p.target).is_dir()]
    for unprofiled in (False, True):
        known = "and the source's unprofiled latency" if unprofiled else "alone"
        print(f"from the source's traces {known}:")
        show([predict_pair(runs, pair, unprofiled=unprofiled) for pair in pairs])


def show(results: list[Result]) -> None:
    """Print every pair, and the figures that are judged."""
    for one in results:
        print(
            f"{one.pair.source:20} → {one.pair.target:20} {one.predicted_s * 1e3:6.1f} ms"
            f" [{one.low_s * 1e3:5.0f}, {one.high_s * 1e3:5.0f}]  measured"
            f" {one.measured_s * 1e3:6.1f} (±{one.noise:4.1%})  error {one.error:+6.1%}"
            f"  window {one.window_error:+6.1%}"
            f"  memory {one.memory_error or 0:+6.1%}{'' if one.covered else '  outside'}"
        )
    print()
    judge(results)


if __name__ == "__main__":
    main()
