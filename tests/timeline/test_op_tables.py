"""Op tables become timelines like any other."""

from __future__ import annotations

import pytest
from support.traces.recordings import DATA

import debubble
from debubble.errors import Code, NoPipeline
from debubble.report.answers.ledger import say_cause
from debubble.simulate.theory import bubble_fraction
from debubble.timeline.build import build_run
from debubble.timeline.figures import measure_pipeline
from debubble.timeline.fleet.survey import Question, measure_run
from debubble.trace.run import find_run, read_run

HEADER = "step,pipeline,stage,microbatch,op,start_us,duration_us"


def written(tmp_path, rows, header=HEADER):
    path = tmp_path / "ops.csv"
    path.write_text("\n".join([header, *rows]))
    return path


def table(tmp_path, rows, header=HEADER):
    return build_run(read_run(find_run([str(written(tmp_path, rows, header))])))


def equal_stages(stages, microbatches, step=0, origin=0, forward=10):
    """Forward passes alone: each takes as long as the other, and transfers are free."""
    return [
        f"{step},0,{stage},{m},F,{origin + forward * (stage + m)},{forward}"
        for stage in range(stages)
        for m in range(microbatches)
    ]


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (4, 4), (4, 8), (3, 7)])
def test_equal_stages_and_free_transfers_give_the_formula(tmp_path, stages, microbatches):
    timeline = table(tmp_path, equal_stages(stages, microbatches))
    figures = measure_pipeline(timeline, 0)
    assert figures.bubble_fraction == pytest.approx(bubble_fraction(stages, microbatches), abs=1e-9)
    assert figures.batch_latency_ns == 10_000 * (stages + microbatches - 1)
    assert (figures.microbatches, figures.schedule) == (microbatches, "forward-only")


@pytest.mark.parametrize("ranks_given", [False, True])
@pytest.mark.parametrize(("microbatch", "stage"), [(1, 0), (0, 1), (1, 1)])
def test_microbatches_and_stages_may_be_counted_from_one(tmp_path, microbatch, stage, ranks_given):
    header = "step,pipeline,stage,microbatch,op,start_us,duration_us" + ",rank" * ranks_given
    rows = [row.split(",") for row in equal_stages(3, 4)]
    rows = [
        ",".join([*row[:2], str(int(row[2]) + stage), str(int(row[3]) + microbatch), *row[4:]])
        + f",{row[2]}" * ranks_given
        for row in rows
    ]
    timeline = table(tmp_path, rows, header)
    assert [rank.stages for rank in timeline.ranks] == [(0,), (1,), (2,)]
    assert timeline.gaps == ()
    assert measure_pipeline(timeline, 0).schedule == "forward-only"


def test_a_missing_first_rank_does_not_make_the_second_the_first(tmp_path):
    header = "step,pipeline,stage,microbatch,op,start_us,duration_us,rank"
    rows = [f"{row},{row.split(',')[2]}" for row in equal_stages(3, 4) if row[4] != "0"]
    timeline = table(tmp_path, rows, header)
    assert [rank.stages for rank in timeline.ranks] == [(1,), (2,)]
    assert "no row of rank 0" in timeline.gaps[0].message


def test_steps_that_count_from_their_own_start_are_laid_one_after_the_other(tmp_path):
    timeline = table(tmp_path, equal_stages(2, 3) + equal_stages(2, 3, step=7))
    figures = measure_pipeline(timeline, 0)
    assert [window.step for window in figures.windows] == [0, 7]
    assert figures.kind == "forward"
    assert figures.windows[0].bubble_fraction == figures.windows[1].bubble_fraction


def test_steps_on_one_clock_stay_where_they_are(tmp_path):
    timeline = table(tmp_path, equal_stages(2, 3) + equal_stages(2, 3, step=1, origin=1000))
    assert measure_pipeline(timeline, 0).step_time_ns == 1_000_000


def trained(late=lambda *_: 0, lasts=lambda *_: 10):
    """Four microbatches through two stages, forward and back; a pass may be late, or long."""
    ways = {"F": lambda stage, m: stage + m, "B": lambda stage, m: 6 + (1 - stage) + m}
    return [
        f"0,0,{stage},{m},{op},{10 * when(stage, m) + late(stage, m, op)},{lasts(stage, m, op)}"
        for stage in range(2)
        for op, when in ways.items()
        for m in range(4)
    ]


def uneven(stage, m, op):
    """One pass is a microsecond shorter, so that times are not in whole tens of them."""
    return 9 if (stage, m, op) == (0, 3, "B") else 10


def figures_of(timeline):
    figures = measure_pipeline(timeline, 0)
    return figures.bubble_fraction, figures.batch_latency_ns


def test_passes_of_a_rank_may_run_at_once_and_count_once(tmp_path):
    """DualPipe runs a forward and a backward pass together; their kernels share the device."""
    rows = ["0,0,0,0,F,0,10", "0,0,0,1,F,10,10", "0,0,0,0,B,12,10", "0,0,0,1,B,22,10"]
    timeline = table(tmp_path, rows)
    assert timeline.gaps == ()
    assert timeline.ranks[0].busy.inside(0, 32_000) == 32_000


def test_times_in_whole_milliseconds_break_no_law(tmp_path):
    header, *rows = (DATA / "formats" / "slow_device.csv").read_text().splitlines()
    rounded = [
        [*cells[:6], str(start // 10**6), str((start + lasts) // 10**6 - start // 10**6)]
        for cells in (row.split(",")[:8] for row in rows)
        for start, lasts in [(int(cells[6]), int(cells[7]))]
    ]
    assert header.split(",")[6:8] == ["start_ns", "duration_ns"]
    header = header.replace("start_ns,duration_ns", "start_ms,duration_ms")
    gaps = measure(tmp_path, ",".join(header.split(",")[:8]), map(",".join, rounded))
    assert gaps == ()


def test_timers_that_are_not_exact_are_told_by_how_much(tmp_path):
    (gap,) = table(
        tmp_path, trained(late=lambda stage, m, _: -4 * stage * (m == 2), lasts=uneven)
    ).gaps
    assert (gap.code, gap.moves_ns) == (Code.CLOCK_OFF, 2_000)
    assert "ranks 0-1 contradict each other by 4.00 us" in gap.message


def test_passes_in_an_order_that_no_clock_allows_tell_nothing(tmp_path):
    timeline = table(tmp_path, trained(late=lambda stage, m, _: 500 * stage * (m == 2)))
    assert "nothing is told of the pipeline" in timeline.gaps[0].message
    assert figures_of(timeline) == (None, None)


def steps_with(rows_of_odd, many=40, odd=(7,)):
    """Forward passes of three stages in many steps on one clock, some of them as they are given."""
    return [
        row
        for step in range(many)
        for row in (rows_of_odd if step in odd else lambda rows: rows)(
            equal_stages(3, 4, step=step, origin=1000 * step)
        )
    ]


def third_pass_early(rows):
    return [row.replace(f",0,1,2,F,{at},", f",0,1,2,F,{at - 41},") for row in rows
            for at in [row.split(",")[5]] for at in [int(at)]]  # fmt: skip


def test_a_step_that_cannot_have_gone_so_is_left_out_and_named(tmp_path):
    sound = measure_pipeline(table(tmp_path, steps_with(lambda rows: rows)), 0)
    timeline = table(tmp_path, steps_with(third_pass_early))
    (gap,) = timeline.gaps
    assert (gap.code, gap.moves_ns) == (Code.IMPOSSIBLE, 0)
    assert gap.message.startswith("step 7 left out: passes of ranks 0-1 end before those that")
    figures = measure_pipeline(timeline, 0)
    assert [window.step for window in figures.windows] == [*range(7), *range(8, 40)]
    assert figures.bubble_fraction == sound.bubble_fraction
    assert figures.step_time_ns == sound.step_time_ns


def without_backward(rows, stage):
    return [row for row in rows if row.split(",")[2::2][:2] != [str(stage), "B"]]


def test_a_last_stage_without_backward_passes_is_in_part(tmp_path):
    rows = without_backward(trained(), 1)
    assert len(rows) == len(trained()) - 4
    figures = measure_run(read_run(find_run([str(written(tmp_path, rows))])), Question())
    assert any(gap.code == Code.CUT_STEPS and "rank 1" in gap.message for gap in figures.gaps)


def test_a_first_stage_without_backward_passes_is_frozen(tmp_path):
    assert table(tmp_path, without_backward(trained(), 0)).gaps == ()


def rank_of(cells):
    return int(cells[3])


def clock_jumps(cells):
    later = rank_of(cells) == 4 and int(cells[0]) > 0
    return [*cells[:6], str(int(cells[6]) + 7_000_000), cells[7]] if later else cells


def other_steps(cells):
    return [str(int(cells[0]) + 1), *cells[1:]] if rank_of(cells) == 4 else cells


def lost_row(cells):
    return None if cells[:6] == ["1", "1", "1", "4", "1", "forward"] else cells


@pytest.mark.parametrize(
    "damage",
    [clock_jumps, other_steps, lost_row],
)
def test_a_rank_whose_rows_were_damaged_is_named(tmp_path, damage):
    header, *rows = (DATA / "formats" / "slow_device.csv").read_text().splitlines()
    assert measure(tmp_path, header, rows) == ()
    changed = [damage(row.split(",")) for row in rows]
    gaps = measure(tmp_path, header, [",".join(cells) for cells in changed if cells])
    assert any("rank 4" in str(gap) or "ranks 1, 4" in gap.message for gap in gaps)


def measure(tmp_path, header, rows):
    path = written(tmp_path, rows, header)
    return measure_run(read_run(find_run([str(path)])), Question()).gaps


def test_a_replica_without_a_stage_that_others_have_is_seen_in_part(tmp_path):
    header = "step,pipeline,stage,rank,microbatch,op,start_us,duration_us"
    rows = [
        f"0,{replica},{stage},{2 * stage + replica},{m},F,{10 * (stage + m)},10"
        for replica in (0, 1)
        for stage in (0, 1)
        for m in range(4)
        if (replica, stage) != (1, 0)
    ]
    timeline = table(tmp_path, rows, header)
    assert "no row of rank 1" in timeline.gaps[0].message
    assert measure_pipeline(timeline, 1).absent == (1,)


def test_a_pass_of_a_stage_that_is_not_there_ends_nothing(tmp_path):
    rows = (DATA / "formats" / "slow_device.csv").read_text().splitlines()
    cells = rows[120].split(",")
    path = tmp_path / "ops.csv"
    path.write_text("\n".join([*rows[:120], ",".join([*cells[:2], "99", *cells[3:]]), *rows[121:]]))
    assert measure_run(read_run(find_run([str(path)])), Question()).gaps


def test_steps_that_are_times_are_refused_as_such(tmp_path):
    rows = [*equal_stages(2, 3, step=1_700_000_000_000), *equal_stages(2, 3, step=5)]
    with pytest.raises(NoPipeline, match="step 1,700,000,000,000 is no number that a job counts"):
        table(tmp_path, rows)


def test_a_table_without_passes_has_no_pipeline(tmp_path):
    with pytest.raises(NoPipeline, match="no forward or backward"):
        table(tmp_path, ["0,0,0,-1,optimizer,0,5"])


def test_a_send_and_a_receive_in_one_interval_are_one_exchange(public_data):
    timeline = build_run(read_run(find_run([str(public_data / "bytedance-straggler-ST")])))
    assert timeline.transfers.fused.any()
    assert not timeline.transfers.fused.all()


OTHER_NAMES = "step,dp_rank,pp_rank,chunk,rank,mb_id,op,start_us,duration_us,memory_bytes,hostname"


def test_a_table_tells_hosts_memory_and_chunks(tmp_path):
    rows = [
        f"0,0,{place},{chunk},{10 + place},0,F,{20 * chunk + 10 * place},10,{1000 + place},"
        f"node{place}"
        for chunk in range(2)
        for place in range(2)
    ]
    timeline = table(tmp_path, rows, header=OTHER_NAMES)
    assert [rank.rank for rank in timeline.ranks] == [10, 11]
    assert [rank.stages for rank in timeline.ranks] == [(0, 2), (1, 3)]
    assert [rank.device[0] for rank in timeline.ranks] == ["node0", "node1"]
    assert [rank.peak_memory_bytes for rank in timeline.ranks] == [1000, 1001]


def test_the_host_of_a_slow_device_is_said(tmp_path):
    lines = ["step,pipeline,stage,rank,microbatch,op,start_us,duration_us,node"]
    for step in range(3):
        for pipeline in range(2):
            length = 10 + 10 * pipeline
            lines += [
                f"{step},{pipeline},{stage},{2 * stage + pipeline},{m},F,"
                f"{step * 1000 + length * (stage + m)},{length if stage else 10},node{pipeline}"
                for stage in range(2)
                for m in range(6)
            ]
    path = tmp_path / "ops.csv"
    path.write_text("\n".join(lines))
    analysis = debubble.analyse(str(path))
    [named] = [one for one in analysis.causes if one.cause == "worker"]
    assert "the device of rank 3 on node1 is slow" in say_cause(analysis.ledger, named)


def test_chunks_in_a_v_are_told_by_the_way_that_microbatches_go(tmp_path):
    """Two ranks of two chunks; a microbatch goes 0, 1, then back from 1 to 0."""
    way = [(0, 0), (0, 1), (1, 1), (1, 0)]
    rows = [
        f"0,0,{place},{chunk},{place},{m},F,{40 * m + 10 * at},10,,"
        for m in range(3)
        for at, (chunk, place) in enumerate(way)
    ]
    timeline = table(tmp_path, rows, header=OTHER_NAMES)
    assert [rank.stages for rank in timeline.ranks] == [(0, 3), (1, 2)]


def test_of_ranks_that_share_a_stage_for_tensor_parallelism_one_is_read(tmp_path):
    header = "step,pp_rank,tp_rank,rank,mb_id,op,start_us,duration_us"
    rows = [
        f"0,{stage},{tensor},{2 * stage + tensor},{m},F,{10 * (stage + m)},10"
        for stage in range(2)
        for tensor in range(2)
        for m in range(3)
    ]
    timeline = table(tmp_path, rows, header=header)
    assert [rank.rank for rank in timeline.ranks] == [0, 2]
    assert measure_pipeline(timeline, 0).bubble_fraction == pytest.approx(1 / 4)
    run = read_run(find_run([str(tmp_path / "ops.csv")]))
    assert [gap.code for gap in run.gaps] == ["stages_shared"]
