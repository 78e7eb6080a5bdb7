"""What a run tells of the gaps before its messages' kernels, and how unsure its middle is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.timelines.engine_runs import MS, MS_OF_A_PASS, costs_of, timeline_of
from support.traces.read_once import build_recording
from support.traces.recordings import H200

from debubble.simulate.as_timeline import as_timeline
from debubble.simulate.communication import Communication
from debubble.simulate.engine import Engine, in_a_pass
from debubble.simulate.hand_set import give_lengths
from debubble.simulate.planned import plan_program
from debubble.simulate.source import measure_source
from debubble.timeline.figures import measure_pipeline
from debubble.timeline.schedules import order_of

IDLE_NS, LATE_NS = 50_000, 600_000


def a_run_with_late_kernels(microbatches):
    """Batches of messages that could start beside compute start 0.6 ms later, others 0.05."""
    order = order_of("zbv", 4, microbatches)
    program = plan_program(order, Communication.RUNTIME)
    costs = costs_of(order, MS_OF_A_PASS, one_way=MS, drain=MS // 2, batch_gap=IDLE_NS)
    lengths, engine = give_lengths(program, costs), Engine(program)
    while True:
        times, gaps = engine.run(lengths), lengths.batch_gaps
        computes = in_a_pass(program, times, times.batch_start - gaps, times.batch_start)
        lengths = replace(lengths, batch_gaps=np.where(computes, LATE_NS, IDLE_NS))
        if (lengths.batch_gaps == gaps).all():
            return as_timeline(program, times)


def source_of(timeline, split=None, **rank):
    ranks = tuple(replace(one, **rank) for one in timeline.ranks)
    timeline = replace(timeline, ranks=ranks)
    return measure_source(timeline, measure_pipeline(timeline, 0), split)


class TestLateKernels:
    def test_what_they_wait_for_multiprocessors_is_seen_where_many_start_beside_compute(self):
        found = source_of(a_run_with_late_kernels(8), multiprocessors=30)
        assert found.late_gap_ns == LATE_NS
        # Those of the first receives, which nothing comes before, are none.
        assert 0.9 * IDLE_NS < found.batch_gap_ns <= IDLE_NS

    @pytest.mark.parametrize(("split", "late_ns"), [(None, 175_000), ((2, 2, 2, 2), 350_000)])
    def test_where_few_do_it_is_a_share_of_a_forward_pass_or_of_one_layers(self, split, late_ns):
        """Of 5 ms 0.035, or of the 2.5 ms of one of two layers 0.14."""
        timeline = timeline_of(
            "1f1b", 4, 8, units=MS_OF_A_PASS, communication=Communication.FUSED, one_way=MS
        )
        assert source_of(timeline, split, multiprocessors=30).late_gap_ns == late_ns

    def test_without_multiprocessors_nothing_waits_for_them(self):
        timeline = timeline_of("1f1b", 4, 8, units=MS_OF_A_PASS, one_way=MS)
        assert source_of(timeline).late_gap_ns == 0


def test_the_middle_of_few_steps_is_as_unsure_as_they_differ():
    timeline = build_recording(H200 / "1f1b_p2_m4")
    figures = measure_pipeline(timeline, 0)
    lasted = [window.end_ns - window.start_ns for window in figures.windows]
    assert len(lasted) > 1
    expected = 1.25 * np.std(lasted, ddof=1) / np.mean(lasted) / len(lasted) ** 0.5
    assert measure_source(timeline, figures).window_spread == pytest.approx(expected)
    once = replace(figures, windows=figures.windows[:1])
    assert measure_source(timeline, once).window_spread == 0.0
