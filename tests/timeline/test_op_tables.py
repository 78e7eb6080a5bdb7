"""Op tables become timelines like any other."""

from __future__ import annotations

import pytest

from debubble.errors import NoPipeline
from debubble.simulate.theory import bubble_fraction
from debubble.timeline.build import build_run
from debubble.timeline.figures import measure_pipeline
from debubble.timeline.model import PassKind
from debubble.trace.run import find_run, read_run


def table(tmp_path, rows, header="step,pipeline,stage,microbatch,op,start_us,duration_us"):
    path = tmp_path / "ops.csv"
    path.write_text("\n".join([header, *rows]))
    return build_run(read_run(find_run([str(path)])))


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


def test_steps_that_count_from_their_own_start_are_laid_one_after_the_other(tmp_path):
    timeline = table(tmp_path, equal_stages(2, 3) + equal_stages(2, 3, step=7))
    figures = measure_pipeline(timeline, 0)
    assert [window.step for window in figures.windows] == [0, 7]
    assert figures.kind == "forward"
    assert figures.windows[0].bubble_fraction == figures.windows[1].bubble_fraction


def test_steps_on_one_clock_stay_where_they_are(tmp_path):
    timeline = table(tmp_path, equal_stages(2, 3) + equal_stages(2, 3, step=1, origin=1000))
    assert measure_pipeline(timeline, 0).step_time_ns == 1_000_000


def test_a_table_without_passes_has_no_pipeline(tmp_path):
    with pytest.raises(NoPipeline, match="no forward or backward"):
        table(tmp_path, ["0,0,0,-1,optimizer,0,5"])


def test_the_production_job_waits_as_its_authors_found(public_data):
    timeline = build_run(read_run(find_run([str(public_data / "bytedance-straggler-ST")])))
    assert timeline.pipelines == (0, 1)
    for pipeline in timeline.pipelines:
        figures = measure_pipeline(timeline, pipeline)
        assert figures.bubble_fraction == pytest.approx(0.515, abs=0.005)
        assert (figures.microbatches, figures.schedule) == (4, "1f1b")
        assert len(figures.windows) == 32
        slow = {(one.stage, one.kind): one.median_ns for one in figures.stages}
        assert slow[3, PassKind.F] > 2 * slow[0, PassKind.F]
    assert bubble_fraction(4, 4) == pytest.approx(0.429, abs=0.001)


def test_a_send_and_a_receive_in_one_interval_are_one_exchange(public_data):
    timeline = build_run(read_run(find_run([str(public_data / "bytedance-straggler-ST")])))
    assert timeline.transfers.fused.any()
    assert not timeline.transfers.fused.all()
