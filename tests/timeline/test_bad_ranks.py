"""One bad rank does not end the answer, and no answer contradicts itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.traces.read_once import read_recording
from support.traces.recordings import DATA, H200
from timeline.test_mixed_runs import later

from debubble.errors import Code
from debubble.timeline.figures import measure_windows
from debubble.timeline.fleet.survey import Question, measure_run
from debubble.trace.columns import Kernels, Operation, Operators, build
from debubble.trace.run import Run

YEAR = 365 * 86_400 * 10**9


def recorded(name: str = "fwd_closed_m4") -> Run:
    return read_recording(H200 / name)


def with_rank(run: Run, rank: int, **tables: object) -> Run:
    """Return the run with other tables of one rank."""
    return replace(
        run,
        ranks=tuple(
            replace(trace, **tables) if trace.rank == rank else trace for trace in run.ranks
        ),
    )


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_of_a_ring_without_operators_is_no_end(rank):
    silent = with_rank(recorded(), rank, operators=build(Operators, 0))
    assert measure_run(silent, Question()).figures


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_of_a_ring_without_peers_is_no_end(rank):
    operators = recorded().ranks[rank].operators
    nobody = np.full(len(operators), -1, dtype=np.int32)
    lost = replace(operators, peer=nobody, local_peer=nobody)
    assert measure_run(with_rank(recorded(), rank, operators=lost), Question()).figures


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_without_any_kernel_is_no_end(rank):
    trace = recorded().ranks[rank]
    lost = replace(trace.operators, kernel=np.full(len(trace.operators), -1, dtype=np.int32))
    empty = with_rank(recorded(), rank, kernels=build(Kernels, 0, start_ns=[]), operators=lost)
    assert measure_run(empty, Question()).figures


def warned_of(run: Run) -> list[tuple[Code, int | None, str]]:
    return [(gap.code, gap.rank, gap.message) for gap in measure_run(run, Question()).gaps]


def test_messages_that_one_side_lacks_name_both_sides():
    silent = with_rank(recorded(), 3, operators=build(Operators, 0))
    [said] = [m for code, _, m in warned_of(silent) if code is Code.UNMATCHED_TRANSFERS]
    assert "10 messages of ranks 2-3 to ranks 0, 3 without a counterpart" in said


def test_messages_lost_in_the_midst_of_a_stream_name_both_sides():
    run = read_recording(DATA / "serving" / "k4")
    operators = run.ranks[1].operators
    moves = np.flatnonzero(np.isin(operators.operation, (Operation.SEND, Operation.RECEIVE)))
    lost = moves[len(moves) // 3 : len(moves) // 2]
    kept = np.setdiff1d(np.arange(len(operators)), lost)
    columns = Operators.__dataclass_fields__
    fewer = replace(operators, **{name: getattr(operators, name)[kept] for name in columns})
    assert warned_of(run) == []
    found = warned_of(with_rank(run, 1, operators=fewer))
    [said] = [m for code, _, m in found if code is Code.UNMATCHED_TRANSFERS]
    assert "of ranks 0-1 to ranks 1-2" in said


def test_a_device_may_have_any_number():
    kernels = recorded().ranks[1].kernels
    far = replace(kernels, device=np.full(len(kernels), 2**31 - 1, dtype=np.int32))
    found = measure_run(with_rank(recorded(), 1, kernels=far), Question())
    assert found.shown.ranks[1].device[1] == 2**31 - 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b_p2_m4", "1f1b_p3_m7", "fwd_closed_m4"])
@pytest.mark.parametrize("by_ns", [-30 * YEAR, 3 * YEAR])
def test_a_clock_that_is_years_off_is_put_right_and_named(name, by_ns):
    run = recorded(name)
    right = measure_run(run, Question()).shown
    off = replace(run, ranks=tuple(later(t, by_ns) if t.rank == 1 else t for t in run.ranks))
    found = measure_run(off, Question())
    assert found.shown.bubble_fraction == pytest.approx(right.bubble_fraction, abs=0.002)
    assert found.shown.batch_latency_ns == pytest.approx(right.batch_latency_ns, rel=0.01)
    named = {gap.rank for gap in found.gaps if gap.code is Code.CLOCK_OFF}
    assert named
    assert named <= {0, 1}
    assert found.timeline.clock_uncertainty_ns < right.batch_latency_ns / 10


def test_a_step_whose_passes_hold_no_work_is_no_window():
    timeline = measure_run(recorded(), Question()).timeline
    away = timeline.passes.step == timeline.steps[1]
    passes = replace(
        timeline.passes,
        start_ns=timeline.passes.start_ns - np.where(away, 10**12, 0),
        end_ns=timeline.passes.end_ns - np.where(away, 10**12, 0),
    )
    assert len(measure_windows(replace(timeline, passes=passes), 0)) == 1
