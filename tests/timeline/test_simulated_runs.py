"""Pipelines whose truth is known to the nanosecond, written as traces and read back."""

from __future__ import annotations

import pytest
from support.simulator.analysis import (
    BUFFERED,
    EARLY,
    FUSED,
    assert_all_named,
    assert_measured,
    setup_of,
    simulated,
)
from support.simulator.devices import true_bubbles, true_windows
from support.simulator.host_programs import MS, US
from support.simulator.written_traces import Clock

SKEWS_NS = (0, 50 * MS, -50 * MS, 37 * MS, -21 * MS, 13 * MS)


# schedule, ranks, microbatches, equal stages, how messages behave, labels
RUNS = [
    ("forward-only", 2, 2, True, {}, "simple"),
    ("forward-only", 4, 8, False, BUFFERED, "simple"),
    ("forward-only", 3, 5, False, EARLY, "none"),
    ("forward-only", 6, 12, True, BUFFERED, "none"),
    ("gpipe", 2, 3, True, BUFFERED, "simple"),
    ("gpipe", 4, 8, False, {}, "simple"),
    ("gpipe", 5, 4, False, EARLY, "none"),
    ("gpipe", 6, 12, True, {}, "none"),
    ("1f1b", 2, 2, True, FUSED, "none"),
    ("1f1b", 3, 2, False, FUSED, "none"),
    ("1f1b", 4, 8, True, FUSED, "none"),
    ("1f1b", 5, 7, False, FUSED | BUFFERED, "none"),
    ("1f1b", 6, 12, False, FUSED, "none"),
    ("interleaved-1f1b", 3, 6, False, EARLY, "runtime"),
    ("interleaved-1f1b", 4, 8, True, BUFFERED, "runtime"),
    ("looped-bfs", 4, 5, False, BUFFERED, "runtime"),
    ("zb-h1", 4, 6, False, BUFFERED, "runtime"),
    ("zb-h2", 5, 12, True, EARLY, "runtime"),
    ("interleaved-zb", 4, 8, False, EARLY, "runtime"),
    ("zbv", 2, 4, True, BUFFERED, "runtime"),
    ("zbv", 4, 8, False, EARLY, "runtime"),
    ("dualpipe-v", 3, 8, False, EARLY, "runtime"),
]
EACH_RUN = pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "even", "behaviour", "labels"),
    RUNS,
    ids=["-".join(map(str, (*run[:3], *run[4], run[5]))) for run in RUNS],
)


@pytest.mark.slow
@EACH_RUN
def test_every_pass_and_transfer_is_found_and_the_bubble_is_true(
    name, ranks, microbatches, even, behaviour, labels, tmp_path
):
    setup = setup_of(name, ranks, microbatches, even=even, **behaviour)
    found = simulated(tmp_path, setup, labels=labels)
    assert_all_named(found)
    assert_measured(found)
    assert found.figures.schedule == name
    assert found.figures.microbatches == microbatches
    assert found.figures.kind == ("forward" if name == "forward-only" else "training")


@pytest.mark.slow
@EACH_RUN
def test_clocks_that_are_off_change_the_bubble_by_less_than_one_percent(
    name, ranks, microbatches, even, behaviour, labels, tmp_path
):
    setup = setup_of(name, ranks, microbatches, even=even, **behaviour)
    clocks = [Clock(skew_ns=skew, drift_ppm=20 * (-1) ** n) for n, skew in enumerate(SKEWS_NS)]
    found = simulated(tmp_path, setup, labels=labels, clocks=clocks[:ranks])
    assert_all_named(found)
    assert found.figures.schedule == name
    for window, (begin, end), bubble in zip(
        found.figures.windows, true_windows(found.play), true_bubbles(found.play), strict=True
    ):
        assert window.bubble_fraction == pytest.approx(bubble, rel=0.01)
        assert window.length_ns == pytest.approx(end - begin, rel=0.01)


# Bubbles of 3 to 18 %: 1 % of them is as little as 20 us of clock.
LOW_BUBBLES = [
    ("zbv", 2, 8, EARLY),
    ("zbv", 4, 16, BUFFERED),
    ("interleaved-zb", 2, 8, EARLY),
    ("zb-h2", 4, 16, EARLY),
    ("dualpipe-v", 2, 8, EARLY),
    # Two tensors in one kernel go the same way: that is no exchange, and its ends say nothing.
    ("zbv", 2, 4, BUFFERED | {"messages": 2, "wire_ns": 400 * US}),
    ("zb-h2", 2, 6, BUFFERED | {"messages": 2, "wire_ns": 100 * US}),
    # Receives wait visibly one way only: the wire's factor must come from what else is known.
    ("zb-h2", 2, 4, EARLY | {"wire_ns": 4 * MS}),
    ("zbv", 2, 6, EARLY | {"wire_ns": 4 * MS}),
    ("zb-h2", 2, 6, BUFFERED | {"wire_ns": 2 * MS, "noise": 0.0}),
]


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("skew_ns", [50 * MS, -50 * MS])
@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "behaviour"),
    LOW_BUBBLES,
    ids=["-".join(map(str, (*run[:3], *run[3].items()))) for run in LOW_BUBBLES],
)
def test_one_clock_that_is_off_changes_no_small_bubble_by_one_percent_of_it(
    name, ranks, microbatches, behaviour, skew_ns, wrong, tmp_path
):
    clocks = [Clock() for _ in range(ranks)]
    clocks[wrong] = Clock(skew_ns=skew_ns, drift_ppm=20)
    setup = setup_of(name, ranks, microbatches, **behaviour)
    found = simulated(tmp_path, setup, labels="runtime", clocks=clocks)
    for window, (begin, end), bubble in zip(
        found.figures.windows, true_windows(found.play), true_bubbles(found.play), strict=True
    ):
        assert bubble < 0.2
        assert window.bubble_fraction == pytest.approx(bubble, rel=0.01)
        assert window.length_ns == pytest.approx(end - begin, rel=0.01)


@pytest.mark.parametrize("skews_ns", [(0, 50 * MS), (50 * MS, 0), (0, -50 * MS)])
def test_clocks_are_laid_together_where_no_receive_waits_visibly(skews_ns, tmp_path):
    setup = setup_of("zb-h2", 2, 6, even=False, early=True, wire_ns=4 * MS, noise=0.0)
    clocks = [Clock(skew_ns=skew) for skew in skews_ns]
    found = simulated(tmp_path, setup, labels="runtime", clocks=clocks)
    assert found.figures.kind == "training"
    assert found.figures.bubble_fraction == pytest.approx(true_bubbles(found.play)[0], rel=0.01)
    # No more is known than what the quickest messages there and back leave open.
    assert found.timeline.clock_uncertainty_ns >= 4 * MS


def test_a_clock_that_contradicts_nothing_is_off_by_no_more_than_is_said(tmp_path):
    skew = MS
    setup = setup_of("zbv", 2, 8, early=True, wire_ns=4 * MS)
    found = simulated(tmp_path, setup, labels="runtime", clocks=[Clock(), Clock(skew_ns=skew)])
    assert [rank.clock_offset_ns for rank in found.timeline.ranks] == [0, 0]
    assert found.timeline.clock_uncertainty_ns > skew


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "labels", "behaviour"),
    [
        ("gpipe", 2, 8, "simple", EARLY),
        ("forward-only", 3, 3, "none", {}),
        ("zb-h2", 3, 12, "runtime", EARLY),
    ],
)
def test_clocks_are_laid_together_where_a_quick_wire_lets_either_side_wait(
    name, ranks, microbatches, labels, behaviour, tmp_path
):
    setup = setup_of(name, ranks, microbatches, wire_ns=100 * US, **behaviour)
    clocks = [Clock(skew_ns=skew) for skew in (-36 * MS, -30 * MS, MS)]
    found = simulated(tmp_path, setup, labels=labels, clocks=clocks[:ranks])
    for window, bubble in zip(found.figures.windows, true_bubbles(found.play), strict=True):
        assert window.bubble_fraction == pytest.approx(bubble, abs=0.005)


def test_peak_memory_is_that_of_the_allocator(tmp_path):
    found = simulated(tmp_path, setup_of("1f1b", 4, 8, fused=True))
    peaks = [rank.peak_memory_bytes for rank in found.figures.ranks]
    per_microbatch = 300 * 1024**2
    assert [(peaks[0] - peak) / per_microbatch for peak in peaks] == [0, 1, 2, 3]
