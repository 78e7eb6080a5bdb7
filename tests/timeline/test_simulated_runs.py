"""Pipelines whose truth is known to the nanosecond, written as traces and read back."""

from __future__ import annotations

import pytest
from host_programs import MS, US
from played import BUFFERED, EARLY, FUSED, assert_all_named, assert_measured, played, setup_of
from simulated import true_bubbles, true_windows
from simulated_traces import Clock

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


@EACH_RUN
def test_every_pass_and_transfer_is_found_and_the_bubble_is_true(
    name, ranks, microbatches, even, behaviour, labels, tmp_path
):
    setup = setup_of(name, ranks, microbatches, even=even, **behaviour)
    found = played(tmp_path, setup, labels=labels)
    assert_all_named(found)
    assert_measured(found)
    assert found.figures.schedule == name
    assert found.figures.microbatches == microbatches
    assert found.figures.kind == ("forward" if name == "forward-only" else "training")


@EACH_RUN
def test_clocks_that_are_off_change_the_bubble_by_less_than_one_percent(
    name, ranks, microbatches, even, behaviour, labels, tmp_path
):
    setup = setup_of(name, ranks, microbatches, even=even, **behaviour)
    clocks = [Clock(skew_ns=skew, drift_ppm=20 * (-1) ** n) for n, skew in enumerate(SKEWS_NS)]
    found = played(tmp_path, setup, labels=labels, clocks=clocks[:ranks])
    assert_all_named(found)
    assert found.figures.schedule == name
    for window, (begin, end), bubble in zip(
        found.figures.windows, true_windows(found.play), true_bubbles(found.play), strict=True
    ):
        assert window.bubble_fraction == pytest.approx(bubble, abs=0.01)
        assert window.length_ns == pytest.approx(end - begin, rel=0.02)


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
    found = played(tmp_path, setup, labels=labels, clocks=clocks[:ranks])
    for window, bubble in zip(found.figures.windows, true_bubbles(found.play), strict=True):
        assert window.bubble_fraction == pytest.approx(bubble, abs=0.005)


@pytest.mark.parametrize("wire_ns", [20 * US, 4 * MS])
def test_neither_a_quick_nor_a_slow_wire_confuses_passes(wire_ns, tmp_path):
    found = played(tmp_path, setup_of("1f1b", 4, 6, fused=True, wire_ns=wire_ns))
    assert_all_named(found)
    assert_measured(found)


def test_peak_memory_is_that_of_the_allocator(tmp_path):
    found = played(tmp_path, setup_of("1f1b", 4, 8, fused=True))
    peaks = [rank.peak_memory_bytes for rank in found.figures.ranks]
    per_microbatch = 300 * 1024**2
    assert [(peaks[0] - peak) / per_microbatch for peak in peaks] == [0, 1, 2, 3]
