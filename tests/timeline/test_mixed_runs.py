"""Ranks that are not of one run: nothing is measured between them, and it is said."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.simulator.analysis import setup_of
from support.simulator.devices import Play
from support.simulator.written_traces import Clock, Writing, write_run
from support.traces.read_once import read_recording
from support.traces.recordings import recorded_run
from support.traces.trimmed import without_marks

from debubble.timeline.build import build_timeline
from debubble.timeline.figures import measure_pipeline
from debubble.trace.columns import TABLES
from debubble.trace.run import find_run, read_run

HOUR = 3_600_000_000_000
YEAR = 365 * 24 * HOUR


def traces_of(name):
    return read_recording(recorded_run(name)).ranks


def later(trace, by_ns):
    tables = {name: getattr(trace, name) for name in TABLES}
    return replace(
        trace, **{name: replace(t, start_ns=t.start_ns + by_ns) for name, t in tables.items()}
    )


def codes_of(traces):
    timeline = build_timeline(traces)
    figures = measure_pipeline(timeline, 0)
    return figures, [str(gap.code) for gap in (*timeline.gaps, *figures.gaps)]


def assert_mixed(traces, groups=""):
    figures, codes = codes_of(traces)
    assert codes == ["mixed_runs"]
    assert figures.bubble_fraction is None
    assert figures.batch_latency_ns is None
    assert figures.windows == figures.hops == ()
    assert figures.schedule is None
    message = build_timeline(traces).gaps[0].message
    assert groups in message
    return message


@pytest.mark.slow
@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("1f1b_m8", "1f1b_m8_split3337"),
        ("1f1b_m8", "1f1b_m8_slow23"),
        ("1f1b_m8_split3337", "1f1b_m8_slow23"),
        ("fwd_closed_m8", "fwd_closed_m8_t512"),
        ("fwd_closed_m8", "fwd_closed_m8_slow12"),
    ],
)
@pytest.mark.parametrize("first", [1, 2, 3])
def test_recorded_runs_of_one_size_are_told_apart(name, other, first, marks):
    traces = [*traces_of(name)[:first], *traces_of(other)[first:]]
    traces = traces if marks else [without_marks(trace) for trace in traces]
    assert_mixed(traces)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b_p2_m4", "1f1b_p3_m7", "fwd_closed_m4"])
@pytest.mark.parametrize("by_ns", [-30 * YEAR, -5 * HOUR, HOUR // 1000, 3 * YEAR])
def test_a_clock_that_is_off_by_hours_or_years_is_no_other_run(name, by_ns):
    traces = traces_of(name)
    right, _ = codes_of(traces)
    moved = [later(trace, by_ns) if trace.rank == 1 else trace for trace in traces]
    figures, codes = codes_of(moved)
    assert build_timeline(moved).clock_uncertainty_ns < right.batch_latency_ns / 10
    assert figures.batch_latency_ns == pytest.approx(right.batch_latency_ns, rel=0.01)
    assert codes == (["clock_off"] if abs(by_ns) > 10_000_000_000 else [])
    assert figures.bubble_fraction == pytest.approx(right.bubble_fraction, abs=0.001)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "other", "rank"),
    [("gpipe_m8", "1f1b_m8", 3), ("1f1b_m8", "gpipe_m8", 0), ("1f1b_m8", "fwd_m8", 3),
     ("fwd_closed_m8", "fwd_closed_m8_slow12", 0)],
)  # fmt: skip
def test_an_end_of_another_run_that_fits_by_chance_is_named_by_its_clock(name, other, rank):
    """One neighbour's messages bound a clock from few sides: minutes between two runs tell."""
    traces = [(traces_of(other) if trace.rank == rank else traces_of(name))[trace.rank]
              for trace in traces_of(name)]  # fmt: skip
    gaps = [*build_timeline(traces).gaps]
    assert {gap.rank for gap in gaps if gap.code == "clock_off"} - {None} == {rank}
    assert all("another run" in gap.hint for gap in gaps if gap.rank == rank)


def test_two_runs_of_the_same_program_are_told_apart(tmp_path):
    """The same schedule and sizes, hours apart; only the noise of their steps differs."""
    traces = []
    for seed in (0, 1):
        play = Play(setup_of("1f1b", 4, 8, fused=True, steps=3, noise=0.03, seed=seed))
        clocks = [Clock(skew_ns=seed * HOUR)] * 4
        write_run(play, tmp_path / str(seed), Writing(clocks=clocks))
        traces.append(read_run(find_run([str(tmp_path / str(seed))])).ranks)
    assert_mixed([*traces[0][:2], *traces[1][2:]], "ranks 0-1 and ranks 2-3")
    for mine in traces:
        assert codes_of(mine)[1] == []


def test_jobs_of_different_sizes_are_different_runs():
    traces = list(traces_of("1f1b_p2_m4"))
    header = replace(traces[1].header, world_size=8)
    traces[1] = replace(traces[1], header=header)
    message = assert_mixed(traces)
    assert "rank 0 of 2, rank 1 of 8" in message


def test_messages_of_different_sizes_are_of_different_runs():
    traces = list(traces_of("1f1b_p2_m4"))
    operators = traces[1].operators
    known = operators.message_bytes > 0
    halved = np.where(known, operators.message_bytes // 2, operators.message_bytes)
    traces[1] = replace(traces[1], operators=replace(operators, message_bytes=halved))
    assert "size" in assert_mixed(traces)


def without_sends(trace, *, kept_each):
    """The same rank, of its sends to the next one so many not in its trace: a side thread's."""
    operators = trace.operators
    sends = np.flatnonzero((operators.operation == 1) & (operators.peer == trace.rank + 1))
    gone = np.zeros(len(operators.start_ns), dtype=bool)
    gone[np.delete(sends, np.s_[::kept_each])] = True
    kernels = np.ones(len(trace.kernels), dtype=bool)
    kernels[operators.kernel[gone]] = False
    renumber = np.append(np.where(kernels, np.cumsum(kernels) - 1, -1), -1)
    operators = replace(operators, kernel=renumber[operators.kernel].astype(np.int32))
    return replace(trace, kernels=trace.kernels.take(kernels), operators=operators.take(~gone))


@pytest.mark.parametrize("kept_each", [2, 4, 8])
@pytest.mark.parametrize(("name", "rank"), [("fwd_closed_m4", 1), ("1f1b_p3_m7", 1)])
def test_sends_that_are_in_no_trace_are_counted_and_their_run_stays_one(name, rank, kept_each):
    traces = list(traces_of(name))
    whole, _ = codes_of(traces)
    traces[rank] = without_sends(traces[rank], kept_each=kept_each)
    figures, codes = codes_of(traces)
    assert codes == ["unmatched_transfers"]
    assert figures.bubble_fraction == pytest.approx(whole.bubble_fraction, abs=0.002)
    assert figures.schedule == whole.schedule
