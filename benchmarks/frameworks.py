"""Read recorded runs of Megatron, torchtitan and DeepSpeed, and predict them from each other.

Bubble and window are held against an independent count, predictions against the windows of runs of
the changed job. Only runs of one start of the machine may be compared: on another start its
loopback was twice as slow. `ds_m8` to 16 microbatches and `tt_1f1b_m8` to 16 are of two starts.

    python benchmarks/frameworks.py [FOLDER...]     # by default what is shipped, and in ../shared
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from functools import cache
from math import exp
from operator import attrgetter
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.traces.framework_count import count  # noqa: E402 (the tests' own, which shares nothing with us)

import debubble  # noqa: E402
from debubble.ledger.causes import Cause  # noqa: E402
from debubble.ledger.ledger import build_ledger  # noqa: E402
from debubble.plan.baseline import Baseline, measure_baseline  # noqa: E402
from debubble.plan.change import Change  # noqa: E402
from debubble.plan.option import Idea, weigh  # noqa: E402
from debubble.timeline.build import build_run  # noqa: E402
from debubble.timeline.figures import measure_pipeline  # noqa: E402
from debubble.trace.run import find_run, read_run  # noqa: E402

SHIPPED = ROOT / "tests" / "data" / "frameworks"
BESIDE = ROOT.parent / "shared" / "data" / "frameworks"
NEWER = ROOT.parent / "shared" / "recordings" / "frameworks"
MS = 1e6


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A run, a change, and the window in milliseconds that the changed job had, where known."""

    source: str
    change: Change
    window_ms: float | None = None
    peaks_of: str = ""
    """A run of the changed job whose peaks are known."""


PAIRS = (
    Pair(source="tt_1f1b_m8", change=Change(split=(1, 1, 1, 5)), window_ms=427, peaks_of="tt_1115"),
    Pair(source="tt_1f1b_m8", change=Change(split=(2, 2, 2, 2)), window_ms=272),
    Pair(source="tt_1f1b_m8", change=Change(microbatches=16), window_ms=570),
    Pair(source="mg_1f1b_m8", change=Change(microbatches=16), window_ms=752),
    Pair(source="mg_1f1b_m8", change=Change(split=(2, 3, 2, 1)), peaks_of="mg_2321"),
    Pair(source="ds_m8", change=Change(microbatches=16), window_ms=826),
)
# Of what is shipped no run is another one changed; of this one the window is not known.
TINY = Pair(source="ds_m8", change=Change(microbatches=16))


@cache
def baseline_of(folder: Path) -> Baseline:
    timeline = build_run(read_run(find_run([str(folder)])))
    return measure_baseline(timeline, measure_pipeline(timeline, 0))


def show_run(folder: Path) -> None:
    """Print what is found of a run beside what is known of it."""
    analysis = debubble.analyse(folder)
    timeline = analysis.timeline
    figures = [measure_pipeline(timeline, pipeline) for pipeline in timeline.pipelines]
    ledger = build_ledger(timeline, 0, [window.step for window in figures[0].windows])
    bubble, window_s = count(folder)
    found = sum(one.bubble_fraction or 0 for one in figures) / len(figures)
    latency = max(one.batch_latency_ns or 0 for one in figures)
    unexplained = ledger.causes()[Cause.UNEXPLAINED] / ledger.total_ns if ledger else float("nan")
    replay = (ledger.replay_error or 0.0) if ledger else float("nan")
    simulated = exp(-baseline_of(folder).misfit) - 1
    print(
        f"{folder.name:16s} bubble {found:6.1%} counted {bubble:6.1%}",
        f"window {latency / MS:7.1f} ms {latency / 1e9 / window_s - 1:+5.1%}",
        f"replay {replay:+5.1%}  unexplained {unexplained:4.1%}",
        f"simulated as it is {simulated:+5.1%}",
        f"warnings {', '.join(gap.code for gap in analysis.warnings) or 'none'}",
        sep="   ",
    )
    first, known = figures[0], figures[0].ranks[0].parallelism
    stages = sorted((one for rank in first.ranks for one in rank.layers), key=attrgetter("stage"))
    layers = ",".join(
        "+".join(f"{kind.layers} {kind.name}" for kind in one.kinds) or str(one.layers)
        for one in stages
    )
    samples = (known.microbatch_size or 0) * (first.microbatches or 0) * (known.data or 1)
    sizes = ("tensor", "context", "expert", "data", "sharded")
    several = {size: getattr(known, size) for size in sizes if (getattr(known, size) or 1) > 1}
    print(
        f"{'':16s} {first.schedule}, m {first.microbatches}, layers {layers}",
        f"{samples} samples of {known.sequence} tokens",
        ", ".join(f"{size} {ranks}" for size, ranks in several.items()) or "one pipeline",
        sep="   ",
    )


def show_pair(pair: Pair, source: Path) -> float | None:
    """Print a prediction beside what was measured; return its error, where that is known."""
    baseline = baseline_of(source)
    option = weigh(baseline, Idea(lever="", change=pair.change))
    window, low, high = (ns / MS for ns in (option.window_ns, option.low_ns, option.high_ns))
    said = [f"{window:7.1f} ms [{low:5.0f}, {high:5.0f}]"]
    error = None if pair.window_ms is None else window / pair.window_ms - 1
    if pair.window_ms is not None:
        outside = "" if low <= pair.window_ms <= high else "  outside"
        said.append(f"measured {pair.window_ms:6.1f}  error {error:+6.1%}{outside}")
    peaks = baseline.peaks(pair.change)
    if pair.peaks_of and peaks is not None:
        files = [SHIPPED / pair.peaks_of / f"truth{rank}.json" for rank in range(len(peaks))]
        truth = [json.loads(file.read_text())["peak_bytes"] for file in files]
        off = [abs(one.peak_bytes / known - 1) for one, known in zip(peaks, truth, strict=True)]
        said.append(f"memory, worst rank {max(off):.1%}")
    change = pair.change.split or f"{pair.change.microbatches} microbatches"
    print(f"{pair.source:12s} -> {change!s:18s} " + "  ".join(said))
    return None if error is None else abs(error)


def main() -> None:
    """Print every run, then every pair whose source is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="*")
    parser.add_argument("--tiny", action="store_true", help="a moment's work: does it still run?")
    given = parser.parse_args()
    if given.tiny:
        show_run(SHIPPED / TINY.source)
        show_pair(TINY, SHIPPED / TINY.source)
        return
    here = (SHIPPED, BESIDE, NEWER)
    folders = given.folders or [path for folder in here for path in sorted(folder.glob("*/"))]
    for folder in folders:
        show_run(folder)
    print()
    errors = [
        show_pair(pair, BESIDE / pair.source) for pair in PAIRS if (BESIDE / pair.source).is_dir()
    ]
    known = [error for error in errors if error is not None]
    if known:
        print(f"\nmedian error {median(known):.1%}, worst {max(known):.1%}")


if __name__ == "__main__":
    main()
