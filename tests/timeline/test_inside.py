"""Gaps inside a meter's passes, from a capture of the same job: by hand, and on a recorded run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.traces.read_once import analyse_recording

import debubble
from debubble.errors import Code
from debubble.timeline.build import build_run
from debubble.timeline.inside import Inside, measure_inside, put_inside
from debubble.timeline.model import Intervals, PassKind
from debubble.timeline.steps import only_steps
from debubble.trace.run import find_run, read_run

MS = 1_000_000
HEADER = "step,pipeline,stage,microbatch,op,start_ns,duration_ns,rank"
RECORDED = Path(__file__).parents[1] / "data" / "h200" / "1f1b_p2_m4"
JOB = "20260131-235959"


def of_rows(tmp_path, *rows):
    """Return the timeline of passes of rank 0: kind, microbatch, begin and end in ms."""
    file = tmp_path / "ops.csv"
    lines = [f"0,0,0,{m},{op},{begin * MS},{(end - begin) * MS},0" for op, m, begin, end in rows]
    file.write_text("\n".join((HEADER, *lines)))
    return build_run(read_run(find_run([str(file)])))


def at_work(timeline, *stretches):
    """Return the timeline with a rank that was at work in these stretches alone, in ms."""
    start, end = (np.array(side, dtype=np.int64) * MS for side in zip(*stretches, strict=True))
    busy = Intervals(start_ns=start, end_ns=end)
    (rank,) = timeline.ranks
    return replace(timeline, ranks=(replace(rank, busy=busy, occupied=busy),))


def test_a_pass_begins_with_its_first_kernel_and_works_as_much_of_it_as_in_the_capture(tmp_path):
    metered = of_rows(tmp_path, ("F", 0, 0, 20), ("B", 0, 100, 140))
    captured = of_rows(tmp_path, ("F", 0, 4, 20), ("B", 0, 100, 140))
    captured = at_work(captured, (4, 10), (14, 20), (100, 110), (120, 140))
    inside = measure_inside(captured, metered)
    assert inside == {
        (0, 0, PassKind.F): Inside(lead_ns=4 * MS, share=0.75),
        (0, 0, PassKind.B): Inside(lead_ns=0, share=0.75),
    }
    # Another step: the same pass takes half as long again.
    told = put_inside(of_rows(tmp_path, ("F", 0, 0, 28), ("B", 0, 200, 240)), inside)
    assert told.passes.start_ns.tolist() == [4 * MS, 200 * MS]
    assert told.passes.end_ns.tolist() == [28 * MS, 240 * MS]
    assert told.passes.busy_ns.tolist() == [18 * MS, 30 * MS]
    (rank,) = told.ranks
    assert rank.occupied.inside(0, 28 * MS) == 18 * MS
    assert rank.occupied.inside(28 * MS, 240 * MS) == 30 * MS
    # No gap is as long as what counts as a wait, and each pass begins and ends at work.
    gaps = rank.occupied.start_ns[1:] - rank.occupied.end_ns[:-1]
    assert np.sort(gaps)[:-1].max() <= 50_001
    assert (rank.occupied.start_ns[0], rank.occupied.end_ns[-1]) == (4 * MS, 240 * MS)


def test_without_the_meters_own_steps_passes_begin_with_their_marks(tmp_path):
    captured = at_work(of_rows(tmp_path, ("F", 0, 4, 20)), (4, 12))
    gone = only_steps(of_rows(tmp_path, ("F", 0, 0, 20)), ())
    assert measure_inside(captured, gone) == {(0, 0, PassKind.F): Inside(lead_ns=0, share=0.5)}


def test_what_is_done_between_passes_counts_to_the_one_before(tmp_path):
    """As a loss, or gradients that are scaled once all passes of a rank are through."""
    captured = of_rows(tmp_path, ("F", 0, 0, 20), ("B", 0, 30, 70))
    captured = at_work(captured, (0, 15), (22, 24), (30, 60))
    inside = measure_inside(captured, captured)
    assert {key[2]: one.share for key, one in inside.items()} == {
        PassKind.F: 0.85,
        PassKind.B: 0.75,
    }


def write_meter(out, timeline, first, lead_ns=300_000):
    """Write what a meter would have: no kernels, and marks a little before the first of them."""
    folder = out / f"{JOB}-step{first:09}"
    folder.mkdir(parents=True)
    passes, steps = timeline.passes, sorted(timeline.steps)
    for rank in np.unique(passes.rank).tolist():
        lines = [
            f"{first + steps.index(int(passes.step[row]))},0,{passes.stage[row]},"
            f"{passes.microbatch[row]},{PassKind(passes.kind[row]).name},"
            f"{passes.start_ns[row] - lead_ns},"
            f"{passes.end_ns[row] - passes.start_ns[row] + lead_ns},{rank}"
            for row in np.flatnonzero(passes.rank == rank).tolist()
        ]
        (folder / f"rank{rank}.csv").write_text("\n".join((HEADER, *lines, "")))
        said = {"schema": "debubble.sidecar/1", "rank": rank, "capture": folder.name}
        (folder / f"rank{rank}.csv.debubble.json").write_text(json.dumps(said))
    return folder.name


def codes(run):
    return {gap.code for gap in run.warnings}


def test_find_takes_gaps_from_the_newest_capture_of_the_job_in_the_meters_folder(tmp_path):
    traced = analyse_recording(RECORDED)
    write_meter(tmp_path, traced.timeline, 40)
    later = write_meter(tmp_path, traced.timeline, 60)
    alone = debubble.analyse(str(tmp_path), capture=later)
    assert Code.GAPS_COUNT_AS_BUSY in codes(alone)
    # Of another job, it says nothing of this one.
    other = tmp_path / "captures" / "20250101-000000-step000000099"
    shutil.copytree(RECORDED, other)
    assert Code.GAPS_COUNT_AS_BUSY in codes(debubble.analyse(str(tmp_path), capture=later))
    other.rename(tmp_path / "captures" / f"{JOB}-step000000040")
    told = debubble.analyse(str(tmp_path), capture=later)
    (gap,) = [gap for gap in told.warnings if gap.code is Code.GAPS_FROM_CAPTURE]
    assert f"captures/{JOB}-step000000040" in gap.message
    apart = [
        abs(run.pipeline.bubble_fraction - traced.pipeline.bubble_fraction) for run in (alone, told)
    ]
    assert apart[0] > 0.01
    assert apart[1] < 0.003
    assert told.pipeline.batch_latency_ns == pytest.approx(
        traced.pipeline.batch_latency_ns, rel=0.002
    )


def test_a_capture_that_cannot_be_read_is_none(tmp_path):
    name = write_meter(tmp_path, analyse_recording(RECORDED).timeline, 40)
    broken = tmp_path / "captures" / f"{JOB}-step000000041"
    broken.mkdir(parents=True)
    (broken / "rank0.json").write_text('{"traceEvents": []}')
    assert Code.GAPS_COUNT_AS_BUSY in codes(debubble.analyse(str(tmp_path), capture=name))
