"""Predict recorded runs from each other, and hold each against what was measured.

Measured is the median of the unprofiled steps of rank 0 (`truth0.json`, or as the recordings' notes
have it), of frameworks the window of the profiled steps. A pair may be off by 8 %, or by twice what
its target differs from launch to launch, where that was launched more than once. Intervals are
judged by the kind of change, and calibrated once more with every pair left out that a run takes
part in.

    python benchmarks/predict.py [RECORDINGS]        # by default ../shared/data
    python benchmarks/predict.py --ablations         # the same with each term of the model left out
    python benchmarks/predict.py --lab FOLDER...     # recordings of the lab's program, each in turn

Of the lab's own recordings every run is predicted from every other of its model; what they are is
read from their `truth0.json`. Measured is the window of profiled steps: what disturbs a machine
comes and goes within a launch. Pairs whose wires differ by half are shown and not judged.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import permutations
from math import exp, log
from pathlib import Path
from statistics import fmean, median, pstdev
from unittest.mock import patch

import numpy as np

import debubble.plan.baseline as baseline_module
import debubble.simulate.costs.passes as passes_module
import debubble.simulate.predict as predict_module
from debubble.plan.baseline import FITS, Baseline, measure_baseline
from debubble.plan.change import Change
from debubble.plan.levers.link import mend
from debubble.plan.option import Idea, weigh
from debubble.simulate.communication import Communication
from debubble.simulate.source import Source
from debubble.timeline.build import build_run
from debubble.timeline.figures import PipelineFigures, measure_pipeline
from debubble.timeline.model import Timeline
from debubble.trace.run import find_run, read_run

DATA = Path(__file__).parents[2] / "shared" / "data"
SHIPPED = Path(__file__).parents[1] / "tests" / "data" / "h200"
MEDIAN_BAR, WORST_BAR = 0.03, 0.08
LEAST_COVERED, MOST_COVERED = 0.75, 0.90
MEMORY_BAR, MEMORY_BAR_OF_M = 0.03, 0.06
# Runs whose messages take so many times as long as the other's were recorded on another machine.
WIRES_APART = 1.5
# What runs of one model have in common, by their truths.
MODEL = ("dim", "world", "forward_only")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A run to predict from another."""

    kind: str
    source: str
    target: str
    """A recording, or words where its traces are not at hand."""
    change: Change = field(default_factory=Change)
    ms: float | None = None
    """What it took, where there is no recording."""
    window: bool = False
    """What is known of it is the window, not the wall time of a step."""
    hops: tuple[tuple[int, int, float], ...] = ()
    """Places of slow hops' ends, and their bytes a second."""
    repaired: tuple[tuple[int, int], ...] = ()
    layers: tuple[int, ...] | None = None
    """Of the source's stages, where nothing else tells."""
    other_start: bool = False
    """Recorded on another start of the machine, whose wire was twice as slow: not judged."""
    launches: float | None = None
    """How far launches of the target are from their middle, as a share; None: there was one."""


EVEN, LAST, FIRST = (4, 4, 4, 4), (3, 3, 3, 7), (7, 3, 3, 3)
ZBV, LOOPED = {"schedule": "zbv", "chunks": 2}, {"schedule": "interleaved-1f1b", "chunks": 2}
BOTH_INTO_2 = ((1, 2, 0.6e9), (3, 2, 0.6e9))


def pair(kind: str, source: str, target: str, ms: float | None = None, **more: object) -> Pair:
    """Return a pair; what `Change` knows goes into its change."""
    own = {name: more.pop(name) for name in list(more) if name in Pair.__dataclass_fields__}
    return Pair(kind=kind, source=source, target=target, ms=ms, change=Change(**more), **own)


def window(kind: str, source: str, target: str, ms: float | None = None, **more: object) -> Pair:
    """Return a pair of which windows are known."""
    return pair(kind, source, target, ms, window=True, **more)


PAIRS = (
    pair("split", "h200/1f1b_m8", "h200/1f1b_m8_split3337", split=LAST),
    pair("split", "h200/1f1b_m8_split3337", "h200/1f1b_m8", split=EVEN),
    pair("schedule", "h200/1f1b_m8", "h200/gpipe_m8", schedule="gpipe"),
    pair("schedule", "h200/gpipe_m8", "h200/1f1b_m8", schedule="1f1b"),
    pair("schedule", "h200/1f1b_m8", "h200/zbv_m8", **ZBV),
    pair("schedule", "h200/zbv_m8", "h200/1f1b_m8", schedule="1f1b", chunks=1),
    pair("schedule", "h200/gpipe_m8", "h200/zbv_m8", **ZBV),
    pair("schedule", "h200/zbv_m8", "h200/gpipe_m8", schedule="gpipe", chunks=1),
    pair("combined", "h200/1f1b_m8_split3337", "h200/gpipe_m8", schedule="gpipe", split=EVEN),
    pair("combined", "h200/1f1b_m8_split3337", "h200/zbv_m8", **ZBV),
    pair("combined", "h200/gpipe_m8", "h200/1f1b_m8_split3337", schedule="1f1b", split=LAST),
    pair("hop", "h200/1f1b_m8", "h200/1f1b_m8_slow23", hops=((2, 3, 1.3e9),)),
    pair("hop", "h200/1f1b_m8_slow23", "h200/1f1b_m8", repaired=((2, 3),)),
    pair("hop", "h200/fwd_closed_m8", "h200/fwd_closed_m8_slow12", hops=((1, 2, 1.3e9),)),
    pair("hop", "h200/fwd_closed_m8_slow12", "h200/fwd_closed_m8", repaired=((1, 2),)),
    pair("m", "h200/fwd_closed_m4", "h200/fwd_closed_m8", microbatches=8),
    pair("m", "h200/fwd_closed_m8", "h200/fwd_closed_m4", microbatches=4),
    pair("size", "h200/fwd_closed_m8", "h200/fwd_closed_m8_t512", token_scale=0.5),
    pair("size", "h200/fwd_closed_m8_t512", "h200/fwd_closed_m8", token_scale=2.0),
    pair("size", "h200/fwd_closed_m4", "h200/fwd_closed_m8_t512", microbatches=8, hold="batch"),
    pair("size", "h200/fwd_closed_m8_t512", "h200/fwd_closed_m4", microbatches=4, hold="batch"),
    pair("schedule", "h200_free/a_1f1b_m8", "h200_free/a_i1f1b_m8", **LOOPED),
    pair("schedule", "h200_free/a_1f1b_m8", "zbv", 248, **ZBV),
    pair("schedule", "h200_free/a_1f1b_m8", "gpipe", 272, schedule="gpipe"),
    pair("split", "h200_free/a_1f1b_m8", "6,4,3,3", 276, split=(6, 4, 3, 3)),
    pair("m", "h200_free/a_1f1b_m8", "m 20", 579, microbatches=20),
    pair("m", "h200_free/a_1f1b_m8", "m 32", 898, microbatches=32),
    pair("combined", "h200_free/a_1f1b_m8", "zb-h2, m 32", 817, schedule="zb-h2", microbatches=32),
    pair("hop", "h200_free/a_1f1b_m8", "both hops into 2", 396, hops=BOTH_INTO_2),
    pair("size", "h200_free/a_1f1b_m8", "m 16 of half", 267, microbatches=16, hold="batch"),
    pair("schedule", "h200_free/a_i1f1b_m8", "1f1b", 264, schedule="1f1b", chunks=1),
    pair("schedule", "h200_free/a_i1f1b_m8", "zbv", 248, **ZBV),
    pair("schedule", "h200_free/a_i1f1b_m8", "gpipe", 272, schedule="gpipe", chunks=1),
    pair(
        "combined",
        "h200_free/a_i1f1b_m8",
        "1f1b, m 32",
        898,
        schedule="1f1b",
        chunks=1,
        microbatches=32,
    ),
    pair(
        "combined",
        "h200_free/a_i1f1b_m8",
        "zb-h2, m 32",
        817,
        schedule="zb-h2",
        chunks=1,
        microbatches=32,
    ),
    pair("split", "h200_free/c_fwd_m6", "h200_free/c_fwd_m6_7333", split=FIRST),
    pair("split", "h200_free/c_fwd_m6_7333", "h200_free/c_fwd_m6", split=EVEN),
    pair("m", "h200_free/c_fwd_m6", "m 20", 177, microbatches=20),
    pair("combined", "h200_free/c_fwd_m6_7333", "even, m 20", 177, microbatches=20, split=EVEN),
    window("m", "frameworks/mg_1f1b_m8", "m 16", 752, microbatches=16),
    window("split", "frameworks/tt_1f1b_m8", "2,2,2,2", 272, split=(2, 2, 2, 2)),
    window("split", "frameworks/tt_1f1b_m8", "1,1,1,5", 427, split=(1, 1, 1, 5)),
    window("schedule", "frameworks/mg_1f1b_m8", "frameworks/mg_int_m8", **LOOPED, other_start=True),
    window(
        "schedule",
        "frameworks/mg_int_m8",
        "frameworks/mg_1f1b_m8",
        schedule="1f1b",
        chunks=1,
        other_start=True,
    ),
    window("m", "frameworks/tt_1f1b_m8", "m 16", 570, microbatches=16, other_start=True),
    window("m", "frameworks/ds_m8", "m 16", 826, microbatches=16, other_start=True),
    window(
        "schedule",
        "public/primus-pp_vis/pp8",
        "public/primus-pp_vis/pp8_vpp2",
        2881,
        **LOOPED,
        layers=(8,) * 8,
    ),
)
# What runs took that were launched more than once, some on another start of the machine: the least
# and the most, in milliseconds.
LAUNCHES = {
    "h200/1f1b_m8": (286, 303),
    "h200/fwd_closed_m4": (60, 63),
    "h200/fwd_closed_m8_t512": (56, 61),
    "h200_free/a_1f1b_m8": (260, 266),
    "h200_free/a_i1f1b_m8": (339, 384),
    "h200_free/c_fwd_m6": (61, 64),
    "h200_free/c_fwd_m6_7333": (68, 77),
    "1f1b": (260, 266),
    "zbv": (248, 267),
    "m 32": (896, 900),
}
# Of what is shipped no run is another one changed: they are predicted as they are.
TINY = tuple(pair("as is", name, name) for name in ("1f1b_p2_m4", "fwd_closed_m4"))


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was predicted of a pair, beside what was measured."""

    pair: Pair
    predicted_ms: float
    low_ms: float
    high_ms: float
    measured_ms: float
    steps: float
    """How far steps of the target are apart: one standard deviation, as a share."""
    memory_error: float | None

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted_ms / self.measured_ms - 1

    @property
    def covered(self) -> bool:
        """Whether the interval holds what was measured."""
        return self.low_ms <= self.measured_ms <= self.high_ms

    @property
    def width(self) -> float:
        """Of the interval, as a share of the prediction."""
        return (self.high_ms - self.low_ms) / self.predicted_ms

    @property
    def allowed(self) -> float:
        """What the pair may be off by."""
        return max(WORST_BAR, 2 * (self.pair.launches or 0.0))

    @property
    def over(self) -> bool:
        """Whether it is off by more."""
        return abs(self.error) > self.allowed


@cache
def read(folder: Path) -> tuple[Timeline, PipelineFigures]:
    timeline = build_run(read_run(find_run([str(folder)])))
    return timeline, measure_pipeline(timeline, 0)


@cache
def load(
    folder: Path, layers: tuple[int, ...] | None = None
) -> tuple[Baseline, Timeline, PipelineFigures]:
    timeline, figures = read(folder)
    return measure_baseline(timeline, figures, layers=layers), timeline, figures


def truths_of(folder: Path) -> list[dict]:
    files = sorted(folder.glob("truth*.json"))
    return [json.loads(file.read_text()) for file in files]


def predict_pair(data: Path, of: Pair) -> Result:
    """Predict a pair from the source's traces alone."""
    baseline, _, _ = load(data / of.source, of.layers)
    if of.repaired:
        baseline = mend(baseline, of.repaired)
    size = baseline.source.wires.message_bytes
    hops = tuple(((here, there), round(size / rate * 1e9)) for here, there, rate in of.hops)
    option = weigh(baseline, Idea(lever="asked", change=replace(of.change, hops_ns=hops)))
    truths, steps = truths_of(data / of.target), 0.0
    if of.ms is not None:
        measured = of.ms
    elif of.window:
        measured = load(data / of.target)[2].batch_latency_ns / 1e6
    else:
        walls = truths[0]["wall_s"]
        measured, steps = median(walls) * 1e3, pstdev(walls) / median(walls)
    outside = 0 if of.window else baseline.source.outside_ns
    predicted, low, high = (
        (ns + outside) / 1e6 for ns in (option.window_ns, option.low_ns, option.high_ns)
    )
    memory, peaks = None, baseline.peaks(of.change)
    if peaks is not None and truths and len(truths) == len(peaks):
        errors = [p.peak_bytes / t["peak_bytes"] - 1 for p, t in zip(peaks, truths, strict=True)]
        memory = max(errors, key=abs)
    if of.target in LAUNCHES:
        of = replace(of, launches=half_range(LAUNCHES[of.target]))
    return Result(
        pair=of,
        predicted_ms=predicted,
        low_ms=low,
        high_ms=high,
        measured_ms=measured,
        steps=steps,
        memory_error=memory,
    )


def half_range(ms: Sequence[float]) -> float:
    """Return how far launches are from their middle, as a share of it."""
    return (max(ms) - min(ms)) / (max(ms) + min(ms))


# The names that torch has for schedules.
SCHEDULES = {
    "1F1B": "1f1b",
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved-1f1b",
    "InterleavedZeroBubble": "interleaved-zb",
    "ZBVZeroBubble": "zbv",
}


def lab_pairs(folder: Path) -> list[Pair]:
    """Return every pair of runs of one model; slow hops are in no truth and are left out."""
    truths = {
        run.name: truths_of(run)[0]
        for run in sorted(folder.iterdir())
        if "slow" not in run.name and (run / "truth0.json").is_file()
    }
    alike: dict[tuple, list[str]] = defaultdict(list)
    for name, truth in truths.items():
        alike[tuple(truth[key] for key in ("schedule", "m", "layers", "tokens", *MODEL))].append(
            name
        )
    launches = {
        name: half_range([load(folder / one)[2].batch_latency_ns for one in names])
        for names in alike.values()
        for name in names
        if len(names) > 1
    }
    pairs = []
    for (source, was), (target, is_now) in permutations(truths.items(), 2):
        change, kinds = {}, []
        if any(was[key] != is_now[key] for key in MODEL):
            continue
        if was["schedule"] != is_now["schedule"]:
            change |= {"schedule": SCHEDULES[is_now["schedule"]]}
            change |= {"chunks": len(is_now["layers"].split(",")) // is_now["world"]}
            kinds.append("schedule")
        elif was["layers"] != is_now["layers"]:
            kinds.append("split")
        if was["layers"] != is_now["layers"]:
            change["split"] = tuple(map(int, is_now["layers"].split(",")))
        if was["m"] != is_now["m"]:
            change["microbatches"] = is_now["m"]
            kinds.append("m")
        if was["tokens"] != is_now["tokens"]:
            change["token_scale"] = is_now["tokens"] / was["tokens"]
            kinds.append("size")
        wires = [load(folder / name)[0].source.wires for name in (source, target)]
        apart = wires[0].of_size(change.get("token_scale", 1.0)).one_way / wires[1].one_way
        pairs.append(
            window(
                kinds[0] if len(kinds) == 1 else "combined" if kinds else "as is",
                source,
                target,
                **change,
                launches=launches.get(target),
                other_start=not 1 / WIRES_APART < apart < WIRES_APART,
            )
        )
    return pairs


def without_variation(source: Source) -> Source:
    """Let passes and messages all take what is typical."""
    wires, none = source.wires, np.zeros(1)
    flat = replace(wires, body=none + 1, tail_ns=none, step=none.astype(np.int64))
    return replace(source, passes=replace(source.passes, residuals=none), wires=flat)


def without_tails(source: Source) -> Source:
    """Draw messages whole: a stall grows with the size and stays with its kind."""
    wires = source.wires
    typical = np.maximum(wires.one_way, 1.0)
    whole = replace(wires, body=wires.body + wires.tail_ns / typical, tail_ns=0 * wires.tail_ns)
    return replace(source, wires=whole)


# What the model has, and a run's costs with it left out.
ABLATIONS: dict[str, Callable[[Source], Source]] = {
    "nothing left out": lambda source: source,
    "variation of passes and messages": without_variation,
    "tails of messages apart": without_tails,
    "compute beside messages, assumed": lambda source: source,
    "shared device: ranks at work": lambda source: source,
    "shared device: stalls as elsewhere": lambda source: replace(source, shared=False),
    "both apart cost more than B": lambda source: source,
    "what is underway on a slow hop": lambda source: source,
}
# Of what is no part of a run's costs: where it stands, its name, and what leaves it out.
CONSTANTS = {
    "compute beside messages, assumed": (passes_module, "BESIDE", 0.0),
    "shared device: ranks at work": (passes_module, "SLOPE", 0.0),
    "both apart cost more than B": (predict_module, "_SPLIT_COSTS", 1.0),
    "what is underway on a slow hop": (predict_module, "BUFFERED_BYTES", 0.0),
}


def ablate(data: Path) -> None:
    """Print what the pairs say of each term of the model, left out of the fit as well."""
    measured = baseline_module.measure_source
    judged = [of for of in PAIRS if (data / of.source).is_dir() and not of.other_start]
    print(f"{'left out':36} median   mean  worst  inside  the run as it is, worst")
    for name, change in ABLATIONS.items():
        load.cache_clear()
        baseline_module.measure_source = lambda *args, change=change: change(measured(*args))
        with ExitStack() as stack:
            if name in CONSTANTS:
                module, constant, value = CONSTANTS[name]
                stack.enter_context(patch.object(module, constant, value))
            results = [predict_pair(data, of) for of in judged]
        off = [abs(result.error) for result in results]
        misfit = max(abs(load(data / of.source, of.layers)[0].misfit) for of in judged)
        print(
            f"{name:36} {median(off):6.1%} {fmean(off):6.1%} {max(off):6.1%}"
            f" {sum(result.covered for result in results):4} of {len(results)} {misfit:10.1%}"
        )
    baseline_module.measure_source = measured
    load.cache_clear()


def show(results: list[Result]) -> None:
    """Print every pair."""
    for result in results:
        of = result.pair
        said = "" if of.launches is None else f"  launches ±{of.launches:.1%}"
        said += "" if result.covered else "  outside"
        said += f"  OVER {result.allowed:.0%}" if result.over else ""
        said += "  (other wires)" if of.other_start else ""
        print(
            f"{of.kind:8}  {of.source.split('/')[-1]:20} → {of.target.split('/')[-1]:20}"
            f" {result.predicted_ms:7.1f} ms [{result.low_ms:5.0f}, {result.high_ms:5.0f}]"
            f"  measured {result.measured_ms:7.1f} ±{result.steps:5.1%}  error {result.error:+6.1%}"
            f"  memory {result.memory_error or 0:+6.1%}{said}"
        )


def judge(results: list[Result]) -> None:
    """Print the figures beside their bars, then coverage by kind."""
    errors = [abs(result.error) for result in results]
    worst = max(results, key=lambda result: abs(result.error) / result.allowed)
    over = sum(result.over for result in results)
    known = [result for result in results if result.memory_error is not None]
    of_m = [abs(r.memory_error or 0) for r in known if r.pair.change.microbatches]
    others = [abs(r.memory_error or 0) for r in known if not r.pair.change.microbatches]
    for name, figure, bar in (
        ("median error", median(errors), MEDIAN_BAR),
        ("worst error against its bar", abs(worst.error), worst.allowed),
        ("peak memory, worst rank", max(others, default=0.0), MEMORY_BAR),
        ("peak memory, change of m", max(of_m, default=0.0), MEMORY_BAR_OF_M),
    ):
        verdict = "holds" if figure <= bar else "MISSED"
        print(f"{name:32} {figure:7.1%}   bar {bar:6.1%}   {verdict}")
    print(f"{over} of {len(results)} pairs are over what they may be off by")
    print(f"\n80 % intervals (bar: {LEAST_COVERED:.0%} to {MOST_COVERED:.0%} of pairs inside)")
    print("kind       pairs   median error   worst   inside   width   inside, its runs left out")
    by_kind: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_kind[result.pair.kind].append(result)
    for kind, mine in [*sorted(by_kind.items()), ("all", results)]:
        inside = sum(result.covered for result in mine) / len(mine)
        off = [abs(result.error) for result in mine]
        width = median(result.width for result in mine)
        print(
            f"{kind:9} {len(mine):6} {median(off):12.1%} {max(off):9.1%} {inside:8.0%} {width:8.0%}"
            f" {_left_out(mine, by_kind):14.0%}"
        )


def _left_out(mine: list[Result], by_kind: dict[str, list[Result]]) -> float:
    """Return the share inside if intervals were as wide as other runs of the kind want them."""
    inside = 0
    for result in mine:
        runs = {result.pair.source, result.pair.target}
        others = [
            abs(log(other.measured_ms / other.predicted_ms))
            for other in by_kind[result.pair.kind]
            if not runs & {other.pair.source, other.pair.target}
        ]
        others.sort()
        wide = others[min(int(0.8 * len(others)), len(others) - 1)] if others else 0.0
        inside += abs(log(result.measured_ms / result.predicted_ms)) <= wide
    return inside / len(mine)


def show_fits(data: Path) -> None:
    """Print the way in which each recording's messages travel, and by how much it is missed."""
    print("the runs as they are:")
    folders = [
        folder
        for part in ("h200", "h200_free", "frameworks")
        for folder in sorted((data / part).iterdir())
        if any(folder.glob("*.json.gz"))
    ]
    for folder in folders:
        try:
            baseline, _, figures = load(folder)
        except Exception as error:  # noqa: BLE001 (what cannot be planned is said)
            print(f"  {folder.name:22} {error}")
            continue
        off = exp(-baseline.misfit) - 1
        said = "fits" if abs(baseline.misfit) <= log(1 + FITS) else "DOES NOT FIT"
        way = Communication(baseline.communication).value
        took = figures.batch_latency_ns / 1e6
        print(f"  {folder.name:22} {took:7.1f} ms  simulated {off:+6.1%}  {way:10} {said}")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, nargs="?", default=DATA)
    parser.add_argument("--tiny", action="store_true", help="a moment's work: does it still run?")
    parser.add_argument("--ablations", action="store_true", help="leave each term out in turn")
    parser.add_argument("--lab", type=Path, nargs="+", help="folders of the lab's recordings")
    given = parser.parse_args()
    for folder in given.lab or ():
        print(f"{folder.name}, windows of profiled steps:")
        results = [predict_pair(folder, of) for of in lab_pairs(folder)]
        show(results)
        judge([result for result in results if not result.pair.other_start])
    if given.lab:
        return
    if given.tiny:
        results = [predict_pair(SHIPPED, replace(of, window=True)) for of in TINY]
        show(results)
        judge(results)
        return
    if not given.data.is_dir():
        print(f"no recorded runs in {given.data}: nothing predicted")
        return
    if given.ablations:
        ablate(given.data)
        return
    show_fits(given.data)
    there = [of for of in PAIRS if (given.data / of.source).is_dir()]
    results = [predict_pair(given.data, of) for of in there]
    show(results)
    print()
    judge([result for result in results if not result.pair.other_start])


if __name__ == "__main__":
    main()
