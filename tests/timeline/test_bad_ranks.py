"""One bad rank does not end the answer, and no answer contradicts itself."""

from __future__ import annotations

import re
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


def test_a_rank_whose_messages_have_no_kernels_is_named():
    trace = recorded().ranks[3]
    lost = replace(trace.operators, kernel=np.full(len(trace.operators), -1, dtype=np.int32))
    found = warned_of(with_rank(recorded(), 3, operators=lost))
    assert (Code.LOST_OPERATORS, 3) in [gap[:2] for gap in found]


def test_ranks_that_train_on_threads_that_are_all_one_are_named():
    run = recorded("1f1b_p2_m4")
    merged = []
    for trace in run.ranks:
        alike = np.full(len(trace.launches), trace.operators.thread[0])
        merged.append(replace(trace, launches=replace(trace.launches, thread=alike)))
    found = warned_of(replace(run, ranks=tuple(merged)))
    assert [gap[:2] for gap in found] == [(Code.WRONG_FIELDS, 0), (Code.WRONG_FIELDS, 1)]
    assert "kernels of backward passes" in found[0][2]


def test_messages_of_nccl_without_kernels_are_named_on_every_rank():
    run = recorded()
    silent = []
    for trace in run.ranks:
        lost = np.full(len(trace.operators), -1, dtype=np.int32)
        silent.append(replace(trace, operators=replace(trace.operators, kernel=lost)))
    found = [gap[:2] for gap in warned_of(replace(run, ranks=tuple(silent)))]
    assert found[:4] == [(Code.LOST_OPERATORS, rank) for rank in range(4)]
    by_host = [replace(trace, header=replace(trace.header, backend="gloo")) for trace in silent]
    assert Code.LOST_OPERATORS not in {
        gap[0] for gap in warned_of(replace(run, ranks=tuple(by_host)))
    }


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
    assert (Code.CLOCK_OFF, 1) in [gap[:2] for gap in found]


def with_jump(run: Run, rank: int, share: float, by_ms: float) -> Run:
    """Set the clock of a rank forward when so much of its time has passed."""
    trace = run.ranks[rank]
    begin, end = trace.kernels.start_ns[[0, -1]].tolist()
    moment, by_ns = begin + round(share * (end - begin)), round(by_ms * 1_000_000)
    tables = {}
    for name in ("kernels", "launches", "operators", "annotations"):
        table = getattr(trace, name)
        start, length = table.start_ns, table.duration_ns
        during = (start < moment) & (start + length >= moment)
        late = np.where(start >= moment, start + by_ns, start)
        tables[name] = replace(
            table, start_ns=late, duration_ns=np.where(during, length + by_ns, length)
        )
    return with_rank(run, rank, **tables)


# What rank 0 sends waits in a queue from the middle on: a jump by less than that is not seen.
@pytest.mark.parametrize(
    ("rank", "share", "by_ms"),
    [(0, 0.45, 20), (0, 0.6, 50)]
    + [(r, share, ms) for r in (1, 2, 3) for share, ms in ((0.45, 20), (0.5, 5), (0.6, 50))],
)
def test_a_clock_that_jumps_in_the_midst_of_a_stream_is_named(rank, share, by_ms):
    run = read_recording(DATA / "serving" / "k4")
    found = warned_of(with_jump(run, rank, share, by_ms))
    assert [(code, named) for code, named, _ in found] == [(Code.CLOCK_OFF, rank)]
    [shift] = re.findall(r"shift by ([\d.]+) ms", found[0][2])
    assert float(shift) == pytest.approx(by_ms, abs=0.2 if rank else 8)


def test_a_hop_whose_first_messages_did_not_spin_clears_nobody_of_a_jump():
    """From rank 2 to rank 3 they came 20 ms later than all others, as if they had queued."""
    run = read_recording(DATA / "serving" / "k4")
    [gap] = warned_of(with_jump(run, 2, 0.38, 20))
    assert gap[:2] == (Code.CLOCK_OFF, None)
    assert "messages from rank 1 to rank 2 shift by" in gap[2]


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
