"""One bad rank does not end the answer, and no answer contradicts itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.traces.read_once import read_recording
from support.traces.recordings import DATA, H200

from debubble.errors import Code
from debubble.timeline.figures import measure_windows
from debubble.timeline.fleet.survey import Question, measure_run
from debubble.trace.columns import Kernels, Operation, Operators, build
from debubble.trace.run import RankTrace, Run


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


def without_operators(_trace: RankTrace) -> dict[str, object]:
    return {"operators": build(Operators, 0)}


def without_peers(trace: RankTrace) -> dict[str, object]:
    nobody = np.full(len(trace.operators), -1, dtype=np.int32)
    return {"operators": replace(trace.operators, peer=nobody, local_peer=nobody)}


def without_kernels(trace: RankTrace) -> dict[str, object]:
    lost = replace(trace.operators, kernel=np.full(len(trace.operators), -1, dtype=np.int32))
    return {"kernels": build(Kernels, 0, start_ns=[]), "operators": lost}


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("lost", [without_operators, without_peers, without_kernels])
def test_a_rank_of_a_ring_that_lost_some_of_its_trace_is_no_end(lost, rank):
    run = recorded()
    assert measure_run(with_rank(run, rank, **lost(run.ranks[rank])), Question()).figures


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


def test_a_step_whose_passes_hold_no_work_is_no_window():
    timeline = measure_run(recorded(), Question()).timeline
    away = timeline.passes.step == timeline.steps[1]
    passes = replace(
        timeline.passes,
        start_ns=timeline.passes.start_ns - np.where(away, 10**12, 0),
        end_ns=timeline.passes.end_ns - np.where(away, 10**12, 0),
    )
    assert len(measure_windows(replace(timeline, passes=passes), 0)) == 1
