"""How a run sent its messages is found by simulating it as it is, and what that misses is kept."""

from __future__ import annotations

from dataclasses import replace
from math import hypot

import numpy as np
import pytest
from support.timelines.engine_runs import MS, MS_OF_A_PASS, planned_run, run_order

from debubble.errors import UsageError
from debubble.plan.baseline import measure_baseline
from debubble.plan.change import Change
from debubble.plan.option import Idea, predict_idea, weigh
from debubble.simulate.as_timeline import as_timeline
from debubble.simulate.communication import Communication
from debubble.timeline.figures import measure_pipeline
from debubble.timeline.job import JobFacts
from debubble.timeline.schedules import order_of

FUSED, BLOCKING, GROUPED = Communication.FUSED, Communication.BLOCKING, Communication.GROUPED
POSTED, RUNTIME = Communication.POSTED, Communication.RUNTIME
OVERLAPPED, LATENCY = Communication.OVERLAPPED, Communication.LATENCY
SAME = Idea(lever="schedule", change=Change())


def sent_so(name, way, *, rendezvous=False, wire_ms=3, framework=None):
    """The baseline of a run of four ranks and eight microbatches that sent its messages so."""
    costs = {"one_way": wire_ms * MS, "drain": wire_ms * MS // 2}
    order = order_of(name, 4, 8)
    program, times = run_order(order, MS_OF_A_PASS, way, rendezvous=rendezvous, **costs)
    timeline = as_timeline(program, times)
    ranks = tuple(
        replace(rank, parallelism=replace(rank.parallelism, framework=framework))
        for rank in timeline.ranks
    )
    timeline = replace(timeline, ranks=ranks)
    figures = measure_pipeline(timeline, 0)
    return measure_baseline(timeline, figures, schedule=name)


class TestTheWayThatLands:
    @pytest.mark.parametrize(
        ("name", "way"),
        [
            ("1f1b", FUSED),
            ("gpipe", POSTED),
            ("forward-only", POSTED),
            ("interleaved-1f1b", RUNTIME),
            ("zbv", RUNTIME),
        ],
    )
    @pytest.mark.parametrize("rendezvous", [True, False])
    def test_a_run_as_torch_sends_is_taken_for_one(self, name, way, rendezvous):
        found = sent_so(name, way, rendezvous=rendezvous)
        assert found.communication is way
        assert found.misfit == pytest.approx(0.0, abs=0.005)
        assert found.source.wires.buffers == (not rendezvous)

    @pytest.mark.parametrize(
        ("name", "way"),
        [
            ("1f1b", BLOCKING),
            ("1f1b", POSTED),
            ("1f1b", RUNTIME),
            ("gpipe", OVERLAPPED),
            ("interleaved-1f1b", OVERLAPPED),
            ("interleaved-1f1b", GROUPED),
            ("interleaved-1f1b", POSTED),
        ],
    )
    def test_a_run_of_nobodys_framework_that_sends_otherwise_is_recognised(self, name, way):
        found = sent_so(name, way)
        assert found.communication is way
        assert found.misfit == pytest.approx(0.0, abs=0.02)

    def test_where_the_framework_shows_only_its_own_ways_are_tried(self):
        assert sent_so("1f1b", BLOCKING, framework="torchtitan").communication is FUSED

    def test_a_framework_that_has_two_ways_sent_in_the_one_that_puts_as_much_together(self):
        for way in (OVERLAPPED, GROUPED):
            found = sent_so("interleaved-1f1b", way, framework="megatron")
            assert found.communication is way

    def test_what_contradicts_the_messages_is_taken_where_nothing_else_lands(self):
        """A framework that is known has one way, and this run is not like it."""
        found = sent_so("1f1b", FUSED, framework="deepspeed")
        assert found.communication is BLOCKING
        assert abs(found.misfit) > 0.02

    def test_another_schedule_is_sent_as_its_framework_usually_does(self):
        usual = sent_so("1f1b", FUSED)
        assert usual.what_if(Change(schedule="gpipe")).communication is POSTED

    def test_where_no_message_was_seen_none_is_made_up(self):
        timeline = as_timeline(*run_order(order_of("1f1b", 4, 8), MS_OF_A_PASS))
        none = timeline.transfers.where(np.zeros(len(timeline.transfers), dtype=bool))
        unseen = replace(timeline, transfers=none)
        found = measure_baseline(unseen, measure_pipeline(unseen, 0), schedule="1f1b")
        for baseline in (found, sent_so("1f1b", FUSED, wire_ms=0)):
            assert baseline.communication is LATENCY
            assert baseline.misfit == pytest.approx(0.0, abs=1e-6)
            assert baseline.what_if(Change(schedule="gpipe")).communication is LATENCY


class TestMisfit:
    def test_what_the_run_as_it_is_is_missed_by_widens_every_interval(self):
        baseline, _ = planned_run("1f1b", 4, 8, wire_ns=MS, noise=0.02)
        baseline = replace(baseline, misfit=0.0)
        found = predict_idea(baseline, SAME)
        sure, unsure = (weigh(replace(baseline, misfit=off), SAME) for off in (0.0, -0.2))
        scale = baseline.correction
        assert sure.low_ns == pytest.approx(found.low_ns * scale, abs=1)
        assert sure.high_ns == pytest.approx(found.high_ns * scale, abs=1)
        middle = found.window_ns * scale
        assert unsure.window_ns == sure.window_ns == pytest.approx(middle, abs=1)
        off = 0.2 * middle
        assert unsure.low_ns == pytest.approx(middle - hypot(middle - sure.low_ns, off), abs=3)
        assert unsure.high_ns == pytest.approx(middle + hypot(sure.high_ns - middle, off), abs=3)
        assert unsure.throughput_low < sure.throughput_low

    def test_it_is_what_the_run_took_against_its_simulation_whatever_is_served(self):
        order = order_of("1f1b", 4, 8)
        timeline = as_timeline(*run_order(order, MS_OF_A_PASS, FUSED, one_way=3 * MS))
        figures = measure_pipeline(timeline, 0)
        stated = replace(
            JobFacts().basis_for(figures),
            source="sidecars",
            batch_latency_ns=2 * figures.batch_latency_ns,
            step_time_ns=None,
        )
        served = measure_baseline(timeline, figures, schedule="1f1b", basis=stated)
        assert served.misfit == pytest.approx(0.0, abs=1e-6)
        assert served.correction == pytest.approx(2.0)
        assert served.window_ns == 2 * figures.batch_latency_ns


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            Change(schedule="looped-bfs", chunks=1_000_000),
            "the layers of each stage are unknown",
        ),
        (Change(microbatches=1_000_000), "1,000,000 microbatches on 4 stages are more than"),
    ],
)
def test_absurd_sizes_are_refused_before_an_order_is_written(change, complaint, monkeypatch):
    baseline = sent_so("1f1b", FUSED)
    monkeypatch.setattr("debubble.plan.baseline.order_for", None)
    with pytest.raises(UsageError, match=complaint):
        baseline.what_if(change)
