"""One verdict for two runs: what decides it, what forbids it, and how often it is wrong."""

from __future__ import annotations

import json
import math
from statistics import NormalDist

import numpy as np
import pytest
from support.measurements import sampled
from support.traces.recordings import DATA

from debubble.measure import statistics
from debubble.measure.compare import Confidence, Direction, Verdict, compare
from debubble.measure.measurement import Environment, join_measurements

SAME = (0.300, 0.302, 0.298, 0.301, 0.299, 0.303)
QUICKER = tuple(0.85 * latency for latency in SAME)


def test_a_batch_that_is_clearly_quicker_is_better():
    found = compare(sampled(SAME), sampled(QUICKER))
    assert (found.verdict, found.confidence) == (Verdict.BETTER, Confidence.TESTED)
    assert found.decided_by == "batch_latency"
    assert found.deciding.change == pytest.approx(-0.15)
    assert found.deciding.p <= 0.05


def test_a_sure_change_below_the_threshold_is_no_clear_change():
    slower = tuple(1.015 * latency for latency in SAME)
    steady = tuple(0.3 + 0.0001 * number for number in range(6))
    after = tuple(1.015 * latency for latency in steady)
    assert compare(sampled(SAME), sampled(slower)).verdict is Verdict.NO_CLEAR_CHANGE
    found = compare(sampled(steady), sampled(after))
    assert found.deciding.p <= 0.05
    assert found.verdict is Verdict.NO_CLEAR_CHANGE
    assert compare(sampled(steady), sampled(after), threshold=0.01).verdict is Verdict.WORSE


def test_where_batches_differ_throughput_decides():
    larger = sampled(tuple(1.5 * latency for latency in SAME), microbatches=16)
    found = compare(sampled(SAME), larger)
    assert found.decided_by == "throughput"
    assert found.deltas["batch_latency"].direction is Direction.WORSE
    assert found.verdict is Verdict.BETTER
    assert found.deciding.change == pytest.approx(1 / 3)


def test_more_but_smaller_microbatches_are_the_same_batch():
    finer = sampled(QUICKER, microbatches=16, message_bytes=512)
    found = compare(sampled(SAME), finer)
    assert found.decided_by == "batch_latency"
    assert found.deltas["throughput"].change == pytest.approx(1 / 0.85 - 1)


def test_a_smaller_bubble_with_less_throughput_is_no_win_and_it_says_so():
    found = compare(sampled(QUICKER, bubble=0.4), sampled(SAME, bubble=0.2))
    assert found.verdict is Verdict.WORSE
    assert "the bubble is smaller, but throughput fell" in found.reasons[0]


@pytest.mark.parametrize(
    ("was", "peak", "limit", "unsafe"),
    [(50, 94, 100, False), (50, 96, 100, True), (97, 96, 100, False), (110, 101, 100, True)],
)
def test_memory_that_leaves_too_little_is_unsafe_however_quick(was, peak, limit, unsafe):
    found = compare(sampled(SAME, peak=was), sampled(QUICKER, peak=peak, limit=limit))
    assert (found.verdict is Verdict.UNSAFE_MEMORY) is unsafe


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"kind": "forward"}, "training before, forward after"),
        ({"ranks": (0, 1, 2)}, "2 ranks before, 3 after"),
        ({"split": (4, 5)}, "8 layers before, 9 after"),
        ({"partial": True}, "after is a part of a run"),
        ({"environment": Environment(devices=("H100",))}, "NVIDIA H200 before, H100 after"),
    ],
)
def test_what_is_not_the_same_work_is_not_compared(more, reason):
    found = compare(sampled(SAME), sampled(QUICKER, **more))
    assert found.verdict is Verdict.NOT_COMPARABLE
    assert reason in found.reasons[0]


def test_two_steps_a_side_only_indicate_and_say_how_many_are_needed():
    found = compare(sampled(SAME[:2]), sampled(QUICKER[:2]))
    assert (found.verdict, found.confidence) == (Verdict.BETTER, Confidence.INDICATIVE)
    assert found.needed == 4


def test_one_capture_several_times_is_no_more_evidence():
    before, after = sampled(SAME[:2]), sampled(QUICKER[:2])
    once = compare(before, after)
    found = compare(join_measurements([before] * 3), join_measurements([after] * 2))
    assert (found.verdict, found.confidence) == (once.verdict, Confidence.INDICATIVE)
    assert found.deciding.p == once.deciding.p
    assert "the same capture was given more than once: 2 before and 1 after left out" in found.notes


def test_other_context_lengths_are_not_compared():
    short, long = sampled(SAME, context=512), sampled(QUICKER, context=2048)
    found = compare(short, long)
    assert found.verdict is Verdict.NOT_COMPARABLE
    assert found.reasons == ("context lengths up to 512 before, 2048 after",)


def test_context_lengths_are_matched_where_sides_share_some():
    """Half of the steps before are of long contexts: unmatched, they would make it look quicker."""
    short, long = sampled(SAME, context=512), sampled([4 * one for one in SAME], context=2048)
    longer = sampled([4.1 * one for one in SAME], context=2048)
    found = compare(join_measurements([short, long, longer]), sampled(SAME, context=512))
    assert found.verdict is Verdict.NO_CLEAR_CHANGE
    assert found.deciding.before.n == found.deciding.after.n == len(SAME)
    assert "context lengths matched: 12 steps before and 0 steps after" in found.notes[0]


def timed(batches, step_s=1.25):
    """A profiled run, whose job timed these batches and longer steps without the profiler."""
    return sampled(
        SAME,
        unprofiled_batches_s=tuple((None, one) for one in batches),
        unprofiled_s=tuple((None, step_s * one) for one in batches),
    )


def test_all_that_is_compared_is_unprofiled_where_both_sides_timed_some():
    found = compare(timed(SAME), timed(QUICKER))
    assert found.bases == ("unprofiled", "unprofiled")
    assert found.deltas["throughput"].change == pytest.approx(1 / 0.85 - 1)
    assert found.deltas["batch_latency"].change == pytest.approx(-0.15)
    assert found.deltas["step_time"].after.median == pytest.approx(
        1.25 * found.deltas["batch_latency"].after.median
    )
    assert found.deltas["profiled_batch_latency"].change == 0.0


def test_where_one_side_timed_none_both_are_profiled_and_that_is_said():
    found = compare(timed(QUICKER), sampled(SAME))
    assert found.bases == ("profiled", "profiled")
    assert found.deltas["batch_latency"].change == 0.0
    assert "only before has unprofiled times: profiled times are compared" in found.notes


@pytest.fixture
def quick_intervals(monkeypatch):
    """Verdicts do not rest on the intervals, which take nearly all the time."""
    monkeypatch.setattr(statistics, "_RESAMPLES", 10)


# What eleven recorded runs, and one of our own, logged of their steps without the profiler.
NOISES = json.loads((DATA / "step_times.json").read_text("utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", NOISES)
@pytest.mark.parametrize("count", [2, 5, 20])
@pytest.mark.usefixtures("quick_intervals")
def test_a_real_runs_noise_is_rarely_taken_for_a_change(name, count):
    """Resample the steps that a recorded run logged, smoothed so that few repeat exactly."""
    wrong = 0
    for before, after in resampled(NOISES[name], count, change=1.0):
        wrong += compare(before, after).verdict in (Verdict.BETTER, Verdict.WORSE)
    assert wrong <= 10


def best_power(spread, count, change, level):
    """What the best test finds of a change in normal noise, were its spread known beforehand."""
    normal = NormalDist()
    distance = abs(math.log(change)) / (spread * math.sqrt(2 / count))
    return normal.cdf(distance - normal.inv_cdf(1 - level / 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", NOISES)
@pytest.mark.usefixtures("quick_intervals")
def test_a_planted_tenth_is_found_in_the_noise_of_a_real_run_wherever_it_can_be(name):
    """In 95 of 100, or, where noise is such that the best test of all could not, nearly as well."""
    found = 0
    for before, after in resampled(NOISES[name], 20, change=0.9):
        found += compare(before, after).verdict is Verdict.BETTER
    smoothed = np.std(NOISES[name]) / np.mean(NOISES[name]) * math.sqrt(1 + 1 / 9)
    best = best_power(smoothed, 20, 0.9, statistics.ALPHA)
    heavy = np.std(NOISES[name]) > 3 * np.median(np.abs(NOISES[name] - np.median(NOISES[name])))
    assert found / 200 >= (0.95 if best >= 0.95 or heavy else best - 0.07)


def resampled(times, count, change):
    rng = np.random.default_rng(11)
    spread = np.std(times) / 3
    for _ in range(200):
        sides = rng.choice(times, (2, count)) + rng.normal(0, spread, (2, count))
        yield sampled(sides[0].tolist()), sampled((change * sides[1]).tolist())


def test_times_of_two_kinds_are_compared_by_how_far_they_moved_not_by_where_their_middle_falls():
    """As many quick batches as slow ones, all a fifth quicker: either kind may hold the middle."""
    before = [*np.linspace(0.95, 1.05, 20), *np.linspace(4.8, 5.2, 20)]
    found = compare(sampled(before), sampled([0.8 * latency for latency in before]))
    assert found.verdict is Verdict.BETTER
    assert found.deciding.change == pytest.approx(-0.2, abs=0.01)
    assert -0.3 < found.deciding.ci[0] < found.deciding.ci[1] < -0.1
